"""Conversations as values: laws of what turns, commands and lines do to them."""

import string
from dataclasses import replace

import pytest
from chats import CONVERSATIONS, SETTINGS, TEXTS, TURNS, pairs
from hypothesis import given
from hypothesis import strategies as st

from dgemma_local.chat.commands import COMMANDS, NAMES, Command, Lines, Say, Unknown, complete, file_part, parse
from dgemma_local.chat.conversation import (
    KEYS,
    MOST_TOKENS,
    SEEDS,
    TORN,
    Conversation,
    Settings,
    Turn,
    cleared,
    messages,
    next_seed,
    retried,
    said,
    shown,
    undone,
    with_setting,
    with_settings,
)
from dgemma_local.errors import UsageError
from dgemma_local.outcomes import Outcome
from dgemma_local.presets import Preset


@given(CONVERSATIONS, TURNS)
def test_a_turn_that_is_taken_back_leaves_what_was_there(conversation: Conversation, turn: Turn) -> None:
    after = said(conversation, turn)
    assert after.turns[-1] == turn
    assert replace(undone(after), asked=conversation.asked) == conversation
    assert after.asked == conversation.asked + 1  # a seed is not used twice


@given(CONVERSATIONS, TURNS, TURNS)
def test_a_retry_replaces_the_last_turn_unless_it_came_to_nothing(
    conversation: Conversation, old: Turn, new: Turn
) -> None:
    after = retried(said(conversation, old), new)
    torn = old.outcome == "complete" and new.outcome in TORN
    kept = bool(old.answer.strip()) and (torn or not new.answer.strip())
    assert after.turns == (*conversation.turns, old if kept else new)
    assert after.asked == conversation.asked + 2


@pytest.mark.parametrize("outcome", Outcome)
def test_a_whole_answer_gives_way_to_one_that_ended_by_itself(outcome: Outcome) -> None:
    old, new = Turn(user="u", answer="whole"), Turn(user="u", answer="torn", outcome=outcome.value)
    torn = outcome in (Outcome.INTERRUPTED, Outcome.NUMERIC)
    assert retried(said(pairs(), old), new).turns == (old if torn else new,)
    assert retried(said(pairs(), replace(old, outcome="interrupted")), new).turns == (new,)


@given(CONVERSATIONS, TEXTS)
def test_what_the_model_gets(conversation: Conversation, user: str) -> None:
    """Roles alternate, end with the user's, hold every question in order and every answer, and no thought."""
    found = messages(conversation, user)
    roles = [each["role"] for each in found]
    rest = roles if conversation.system is None else roles[1:]
    assert conversation.system is None or found[0] == {"role": "system", "content": conversation.system}
    assert rest == (["user", "assistant"] * len(rest))[: len(rest)] and rest[-1] == "user"
    answers = [each["content"] for each in found if each["role"] == "assistant"]
    assert answers == [turn.answer for turn in conversation.turns if turn.answer.strip()]
    asked = "\n\n".join(each["content"] for each in found if each["role"] == "user")
    assert asked == "\n\n".join([*(turn.user for turn in conversation.turns), user])


def test_a_question_without_an_answer_stands_before_the_next() -> None:
    conversation = pairs(("a", "A"), ("b", ""), ("c", " \n"), system="s")
    assert messages(conversation, "d") == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "b\n\nc\n\nd"},
    ]
    assert messages(pairs(("a", "A"))) == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "A"}]


@given(CONVERSATIONS, TURNS)
def test_what_was_said_stays_the_beginning_of_what_the_model_gets(conversation: Conversation, turn: Turn) -> None:
    """So the cache of one turn serves the next."""
    answered = replace(turn, answer=turn.answer + ".")
    before = messages(conversation, turn.user)
    assert messages(said(conversation, answered), "next")[: len(before)] == before


@given(CONVERSATIONS)
def test_clearing_keeps_how_it_is_asked(conversation: Conversation) -> None:
    after = cleared(conversation, "new", "now")
    assert after == replace(conversation, name="new", started="now", turns=(), asked=0)


def test_undoing_nothing_is_nothing() -> None:
    assert undone(pairs()) == pairs()


def test_seeds_count_up_from_the_one_that_is_set_and_are_drawn_else() -> None:
    conversation = with_settings(pairs(), seed=SEEDS - 2)
    found = []
    for _ in range(3):
        found.append(next_seed(conversation, lambda most: 1 // 0))
        conversation = said(conversation, Turn(user="u"))
    assert found == [SEEDS - 2, SEEDS - 1, 0]
    assert next_seed(pairs(), lambda most: most - 1) == SEEDS - 1
    assert next_seed(with_settings(conversation, seed=5), lambda most: 1 // 0) == 5  # counted anew


# ── settings ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("max-tokens", "1", 1),
        ("max-tokens", "2,048", 2048),
        ("steps", "4096", 4096),
        ("seed", str(SEEDS - 1), SEEDS - 1),
        ("seed", "0", 0),
        ("think-tokens", "12", 12),
        ("stop", "END", ("END",)),
        ("preset", "fast", Preset.fast),
        ("preset", "default", None),
        ("stop", '"\\n\\n"', ("\n\n",)),
        ("max-tokens", "default", 1024),
        ("steps", "default", None),
        ("stop", "default", ()),
    ],
)
def test_settings_that_can_be_set(key: str, value: str, expected: object) -> None:
    after = with_setting(pairs(), key, value)
    assert getattr(after.settings, key.replace("-", "_")) == expected


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("nothing", "1"), ("", ""), ("steps", ""), ("steps", "0"), ("steps", "4097"), ("steps", "-1"), ("steps", "1.5"),
        ("steps", "²"), ("seed", str(SEEDS)), ("seed", "9" * 10_000), ("max-tokens", "0"), ("stop", '""'),
        ("thinking", "yes"), ("show-thoughts", "1"), ("preset", "hasty"), ("preset", "x" * 10_000), ("think-tokens", "1024"),
    ],
)  # fmt: skip
def test_settings_that_cannot(key: str, value: str) -> None:
    with pytest.raises(UsageError) as caught:
        with_setting(pairs(), key, value)
    assert caught.value.fix and len(caught.value.what) < 100


@pytest.mark.parametrize(
    "values", [{"max_tokens": MOST_TOKENS + 1}, {"max_tokens": 0}, {"steps": 4097}, {"seed": SEEDS}, {"seed": -1}]
)
def test_settings_that_no_file_may_hold(values: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        with_settings(pairs(), **values)


def test_a_thought_leaves_room_for_an_answer() -> None:
    bound = with_settings(pairs(), think_tokens=9)
    with pytest.raises(UsageError, match="think-tokens 9 leaves nothing of max-tokens 9"):
        with_setting(bound, "max-tokens", "9")
    assert with_settings(bound, max_tokens=8, think_tokens=7).settings.max_tokens == 8


def test_a_preset_brings_its_steps_along_and_later_ones_go_before_them() -> None:
    after = with_settings(with_settings(pairs(), steps=5), preset=Preset.fast)
    assert after.settings.steps is None and dict(shown(after.settings))["steps"] == "16, the preset's"
    assert dict(shown(with_settings(after, steps=5).settings))["steps"] == "5"
    assert with_settings(pairs(), preset=Preset.fast, steps=5).settings.steps == 5
    balanced = with_setting(after, "preset", "balanced").settings
    assert dict(shown(balanced))["steps"] == "the model's own" and dict(shown(balanced))["preset"] == "balanced"


def test_stop_strings_add_up() -> None:
    assert with_setting(with_setting(pairs(), "stop", "a"), "stop", "b").settings.stop == ("a", "b")


@given(SETTINGS)
def test_every_setting_is_shown(settings: Settings) -> None:
    found = dict(shown(settings))
    assert {*KEYS} <= found.keys() and len(found) == 8
    assert all(found.values())
    assert found["thinking"] == ("on" if settings.thinking else "off")
    assert found["max-tokens"] == str(settings.max_tokens)
    assert settings.seed is None or found["seed"] == str(settings.seed)


# ── lines ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", None),
        (" \n\t", None),
        ('"""\n"""', None),
        ("Hi", Say("Hi")),
        ("  indented\n  code", Say("  indented\n  code")),
        ("//etc is a folder", Say("/etc is a folder")),
        ("//etc/hosts\n//etc/fstab", Say("/etc/hosts\n//etc/fstab")),
        ("// a comment\nint x; // of C", Say("// a comment\nint x; // of C")),
        ("a;\n// a comment", Say("a;\n// a comment")),
        ("//", Say("//")),
        ("/// rust", Say("/// rust")),
        ('"""\n//as it is\n"""', Say("//as it is")),
        ('"""quoted""" is what?', Say('"""quoted""" is what?')),
        ('"""a""" or """b"""', Say('"""a""" or """b"""')),
        ('"""a""""', Say('a"')),
        ('"""said "so" """', Say('said "so" ')),
        ('"""\n/help\n"""', Say("/help")),
        ('"""a\n\n  b"""', Say("a\n\n  b")),
        ('"""', Say('"""')),
        ("/help", Command("help")),
        ("  /HELP  ", Command("help")),
        ("/set steps 4", Command("set", "steps 4")),
        ("/system You are\n terse.", Command("system", "You are\n terse.")),
        ('/system """\nTwo\nlines\n"""', Command("system", "Two\nlines")),
        ("/system\nBelow", Command("system", "Below")),
        ("/quit", Command("exit")),
        ("/?", Command("help")),
        ("/retyr", Unknown("retyr", "retry")),
        ("/stat", Unknown("stat", "stats")),
        ("/xyzzy", Unknown("xyzzy", None)),
        ("/", Unknown("", None)),
        ("/usr/bin/env python", Unknown("usr/bin/env", None)),
    ],
)
def test_what_a_line_means(line: str, expected: object) -> None:
    assert parse(line) == expected


@given(st.text(max_size=60))
def test_every_line_means_something(line: str) -> None:
    found = parse(line)
    assert found is None or isinstance(found, Say | Command | Unknown)
    assert (found is None) <= (not line.strip().strip('"').strip())
    if isinstance(found, Command):
        assert found.name in NAMES


def test_the_longest_names_are_looked_up_at_once() -> None:
    assert parse("/" + "x" * 1_000_000) == Unknown("x" * 1_000_000, None)


def fed(*lines: str) -> list[str]:
    gathered = Lines(10_000)
    found = [gathered.feed(line) for line in lines]
    return [each for each in (*found, gathered.close()) if each is not None]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["a", "b"], ["a", "b"]),
        (["a\\", "b"], ["a\nb"]),
        (["a\\", "b\\", "c", "d"], ["a\nb\nc", "d"]),
        (['"""', "a\\", "", "b", '"""', "c"], ['"""\na\\\n\nb\n"""', "c"]),
        (['"""one line"""', "c"], ['"""one line"""', "c"]),
        (['/system """', "a", '"""'], ['/system """\na\n"""']),
        (['say """', "b"], ['say """', "b"]),  # not at its beginning
        (["a\\"], ["a"]),  # the end comes instead
        (['"""', "a"], ['"""\na']),
        ([""], [""]),
    ],
)
def test_lines_that_belong_together(lines: list[str], expected: list[str]) -> None:
    assert fed(*lines) == expected


@given(st.lists(st.text(string.ascii_letters + ' \\"/\n'.replace("\n", ""), max_size=8), max_size=8))
def test_no_character_of_a_line_is_lost_but_the_backslash_that_goes_on(lines: list[str]) -> None:
    kept = "".join(fed(*lines)).replace("\n", "").replace("\\", "")
    assert kept == "".join(lines).replace("\\", "")


# ── completion ────────────────────────────────────────────────────────────────────────────────────────────────────


def completed(text: str) -> list[str]:
    back, found = complete(text, {"load": lambda: ["first", "a second"], "model": lambda: ["demo"]})
    return [text[: len(text) - back] + each for each in found]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/re", ["/retry", "/record"]),
        ("/", [f"/{name}" for name in NAMES]),
        ("/set s", ["/set steps", "/set seed", "/set stop", "/set show-thoughts"]),
        ("/set THINKING o", ["/set THINKING on", "/set THINKING off"]),
        ("/delete a", ["/delete a second"]),
        ("/show s", ["/show system"]),
        ("/help un", ["/help undo"]),
        ("/set steps d", ["/set steps default"]),
        ("/set preset ", [f"/set preset {name}" for name in ("fast", "balanced", "quality", "default")]),
        ("/export ", ["/export md", "/export json", "/export html"]),
        ("/think s", ["/think show"]),
        ("/visualize o", ["/visualize on", "/visualize off"]),
        ("/record o", ["/record off"]),
        ("/load ", ["/load first", "/load a second"]),
        ("/load a s", ["/load a second"]),
        ("/model d", ["/model demo"]),
        ("/undo x", []),
        ("re", []),
        ("", []),
        ("/re\n", []),
    ],
)
def test_completions(text: str, expected: list[str]) -> None:
    assert completed(text) == expected


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("/record ~/x", "~/x"), ("/export md out/", "out/"), ("/export md", None), ("/export pdf x", None),
        ("/load x", None), ("say /record x", None),
    ],
)  # fmt: skip
def test_where_file_names_are_completed(text: str, part: str | None) -> None:
    assert file_part(text) == part


def test_every_command_is_described() -> None:
    assert len({*NAMES}) == len(COMMANDS) == 21
    assert all(known.does for known in COMMANDS)
