"""Recordings of runs that never were, of any size: for whatever reads, draws or exports one.

Everything is drawn from a seed. Of every eight positions in turn: five are accepted once and stay, one is taken back and
comes back (a thaw), one comes back as another token (a thaw and a correction), one changes while it is accepted (a
replacement and a correction); so all of it occurs from 8 positions and 3 steps on.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from dgemma_local.events import CanvasCommitted, Finished, Prefilled, Retried, StepDone
from dgemma_local.recording import Header, Piece, Recorder, Recording, Word

CONTROLS = ("<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>", "<|channel>")  # the first tokens of every vocabulary
PAD, END = 0, 1
LETTERS = "etaoinshrdlcumwfgypbvkjxqz"
LIMIT = 48  # steps a canvas may take

Texts = Callable[[int], Word] | Sequence[str] | None


def plausible(token: int) -> Word:
    """A control token, or random letters: mean 5.5 characters, half of them behind a space."""
    if token < len(CONTROLS):
        return Word(CONTROLS[token], control=True)
    letters = random.Random(token)
    return Word(" " * letters.randrange(2) + "".join(letters.choices(LETTERS, k=letters.randint(2, 8))))


def make(
    *,
    canvases: int = 2,
    steps: int = 8,
    length: int = 64,
    vocabulary: int = 1000,
    seed: int = 0,
    texts: Texts = None,
    model: str = "synthetic",
) -> Recording:
    """A run of so many canvases, each of so many steps and positions; its answer ends in the last canvas.

    texts: how a token reads, or how the tokens behind the controls read, in their order (the vocabulary is then theirs).
    """
    if isinstance(texts, Sequence):
        vocabulary = len(CONTROLS) + len(texts)
    noise = random.Random(seed)
    draw = [
        [noise.randrange(len(CONTROLS), vocabulary) for _ in range(length)] for _ in range(canvases)
    ]  # what will be committed
    kept = max(1, length * 3 // 4)
    draw[-1][kept:] = [END, *[PAD] * (length - kept - 1)][: length - kept]
    return compose(draw, kept, steps, vocabulary, _reading(texts), noise, model)


def compose(
    committed: Sequence[Sequence[int]],
    kept: int,
    steps: int,
    vocabulary: int,
    word: Callable[[int], Word],
    noise: random.Random,
    model: str,
) -> Recording:
    """The run that commits these canvases, of which so many positions of the last belong to the answer."""
    length = len(committed[0])
    limit = max(LIMIT, steps)
    header = Header(
        model=model,
        revision="0" * 40,
        demo=True,
        seed=7,
        canvas_length=length,
        steps=limit,
        max_tokens=1024,
        ends=(END,),
        prompt=(2, 3, len(CONTROLS), 4),
        settings={"dtype": "float32", "device": "cpu", "entropy_bound": 0.1},
        dgemma="0.1.0",
    )
    made = Recording(header)
    _add(made, Prefilled(tokens=4, reused=0, joining=0), noise)
    answer: tuple[int, ...] = ()
    for number, tokens in enumerate(committed):
        for step in _denoised(number, tokens, steps, limit, vocabulary, noise):
            _add(made, step, noise)
        mine = tuple(tokens[: kept if number == len(committed) - 1 else length])
        event = CanvasCommitted(number, tuple(tokens), len(mine), steps, converged=steps < limit)
        _add(made, event, noise, "".join(word(token).text for token in mine if not word(token).control))
        answer += mine
    _add(made, Finished("end", answer, len(committed), steps * len(committed)), noise)
    made.words = {token: word(token) for token in _named(made)}
    return made


def _add(
    made: Recording, event: Prefilled | StepDone | CanvasCommitted | Finished, noise: random.Random, text: str = ""
) -> None:
    made.events.append(event)
    made.seconds.append(round(noise.uniform(0.001, 0.1), 6))
    made.pieces.append((Piece("answer", text),) if text else ())


def _denoised(
    number: int, tokens: Sequence[int], steps: int, limit: int, vocabulary: int, noise: random.Random
) -> list[StepDone]:
    places = range(len(tokens))
    other = [(token + 1 + noise.randrange(vocabulary - 1)) % vocabulary for token in tokens]  # another one, for sure
    since = [noise.randrange(max(1, steps - 2)) for _ in places]  # step at which a position is first accepted
    back = [min(each + 1 + noise.randrange(max(1, steps // 4)), steps - 2) for each in since]  # its second thoughts
    fed = tuple(noise.randrange(vocabulary) for _ in places)
    draft = list(other)
    found = []
    for step in range(steps):
        done = step == steps - 1
        accepted = []
        for i in places:
            kind, doubts = i % 8, since[i] < back[i]
            thawed = doubts and kind in (1, 2) and step == back[i]
            guessed = i % 16 == 4  # accepted by no step: its draft is committed all the same
            accepted.append(step >= since[i] and not thawed and not guessed)
            if done or step >= (back if doubts and kind in (2, 3) else since)[i]:
                draft[i] = tokens[i]
            elif step >= since[i]:
                draft[i] = other[i]
            elif noise.randrange(2):  # undecided: another guess at every other step
                draft[i] = noise.randrange(vocabulary)
        after = tuple(d if a or done else noise.randrange(vocabulary) for d, a in zip(draft, accepted, strict=True))
        spread = [noise.expovariate(1.0) * (0.02 if a else 3.0) * (1 - step / (2 * steps)) for a in accepted]
        found.append(
            StepDone(
                canvas=number,
                step=step,
                steps=limit,
                temperature=round(0.8 - 0.4 * step / limit, 6),
                fed=fed,
                draft=tuple(draft),
                accepted=tuple(accepted),
                next=after,
                entropy=tuple(round(min(each, 12.0), 3) for each in spread),
                done=done,
            )
        )
        fed = after
    return found


def _reading(texts: Texts) -> Callable[[int], Word]:
    if texts is None:
        return plausible
    if callable(texts):
        return texts
    first = len(CONTROLS)
    return lambda token: plausible(token) if token < first else Word(texts[token - first])


def _named(made: Recording) -> list[int]:
    """Every token of a recording, in the order in which its lines name them."""
    lists: list[tuple[int, ...]] = [made.header.ends, made.header.prompt or ()]
    for event in made.events:
        match event:
            case StepDone():
                lists += [event.fed if event.step == 0 else (), event.draft, event.next]
            case CanvasCommitted() | Finished():
                lists.append(event.tokens)
            case Prefilled() | Retried():
                pass
    return list(dict.fromkeys(token for ids in lists for token in ids))


def write(path: Path, recording: Recording) -> None:
    """To a file, as a run does it."""
    with Recorder(path, recording.header, recording.word) as recorder:
        for event, seconds, pieces in zip(recording.events, recording.seconds, recording.pieces, strict=True):
            recorder.take(event, seconds, pieces)


HOSTILE = (
    # a terminal: escapes, titles, colours, clearing, 8-bit C1, and what moves the cursor
    *("\x1b[2J", "\x1b[31mred", "\x1b]0;title\x07", "\x1b]8;;http://a.test\x1b\\link", "\x1bPq#0\x1b\\", "\x1b[?1049h"),
    *(
        "\x1b]52;c;aGk=\x07",
        "\x1bc",
        "\x1b",
        "\x9b31m",
        "\x9d0;title\x9c",
        "\x90q\x9c",
        "\x85",
        "\x00",
        "\x07",
        "\x08\x08",
    ),
    *("\x7f", "\r", "over\rwritten", "\x0b\x0c", "\x0e\x0f", "\x05", "\x1a", "\x1b[6n", "\x1b[20t"),
    # a browser, an SVG, a script, an attribute
    *(
        "<script>alert(1)</script>",
        "</script><script>alert(1)//",
        "<img src=x onerror=alert(1)>",
        "<svg onload=alert(1)>",
    ),
    *(
        "</text></svg><script>alert(1)</script>",
        "]]>",
        "<![CDATA[",
        "-->",
        "<!--",
        "<!-- <script>",
        "&lt;",
        "&#x1b;",
        "&amp",
    ),
    *(
        '" onmouseover="alert(1)',
        "' onclick='alert(1)",
        "javascript:alert(1)",
        "url(http://a.test/x)",
        "</style>",
        "*/",
    ),
    *(
        "${alert(1)}",
        "`",
        "\\u003cscript\\u003e",
        "\\",
        '"',
        "'",
        "{{7*7}}",
        "%s%n",
        "<?xml version='1.0'?>",
        "<!DOCTYPE x>",
    ),
    *('"];alert(1);//', "\u2028alert(1)\u2029", "__proto__", "constructor", "</TITLE>", "<foreignObject>", "\n</pre>"),
    # what a reader does not see, or sees in another order
    *("\u202eevil", "\u202d", "\u2066x\u2069", "\u200e", "\u200f", "\u061c", "\u200b", "\u200c", "\u200d", "\u2060"),
    *("\ufeff", "\u00ad", "\u034f", "\u115f", "\u3164", "\U000e0041\U000e0042", "\ufe0f", "\ufffc", "\ufffe", "\uffff"),
    # width: combining piles, wide, joined, right to left
    *(
        "Z" + "\u0301\u0316\u0489" * 40,
        "\u0301",
        "漢字",
        "한글",
        "👩\u200d👩\u200d👧\u200d👦",
        "🇩🇪",
        "👍🏽",
        "שלום",
        "مرحبا",
    ),
    *("ﷺ", "e\u0301", "\U0001f600", "ก็็็็็็", "\ue000", "\U000f0000"),
    # space and size
    *(
        "\t",
        "\n",
        "\n\n\n",
        "\r\n",
        "    ",
        "\u00a0",
        "\u3000",
        "\t\tx",
        "",
        "x" * 1000,
        "漢" * 1000,
        "<" * 1000,
        "\x1b" * 100,
    ),
)
LONE = ("\ud800", "x\udfffy", "\udc1b[2J")  # halves of a surrogate pair: JSON can spell them, UTF-8 cannot


def hostile(*, lone: bool = False) -> Recording:
    """Two canvases that commit every hostile text; settings, model and pieces are hostile as well.

    lone: with lone surrogates, which no recording that was read holds (`open_recording` replaces them).
    """
    texts = (*HOSTILE, *(LONE if lone else ()))
    first = len(CONTROLS)
    ids = list(range(first, first + len(texts)))
    noise = random.Random(5)
    made = compose(
        [[*ids, PAD], [*ids[::-1], END]], len(ids), 5, first + len(texts), _reading(texts), noise, "<b>\x1b[2J</b>"
    )
    made.header.settings["\x1b[2J<script>"] = "</script>\x1b]0;x\x07"  # type: ignore[index]
    return made
