"""A conversation for other programs: pure, text in and text out.

    md      questions quoted, answers as the model wrote them, thoughts folded
    json    what a saved conversation holds, in ASCII
    html    one page that needs nothing else; every text of user and model escaped

What a terminal would obey is made harmless by `clean`, but for JSON, which escapes it and keeps every character.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from html import escape
from typing import Literal, get_args

from dgemma_local.chat.conversation import Conversation, Turn, shown

Form = Literal["md", "json", "html"]
FORMS: tuple[str, ...] = get_args(Form)

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; }
.user, .answer, .thought { white-space: pre-wrap; overflow-wrap: anywhere; }
.user { background: #8882; border-radius: .5rem; padding: .5rem .8rem; }
.answer { padding: .5rem .8rem; font-family: ui-monospace, monospace; font-size: .9rem; }
footer, .about, summary { color: #777; font-size: .85rem; }
"""


def exported(conversation: Conversation, form: Form, clean: Callable[[str], str]) -> str:
    """The whole file; clean: a text without what a terminal obeys."""
    if form == "json":
        return json.dumps(asdict(conversation), indent=2, allow_nan=False) + "\n"
    parts = _markdown(conversation) if form == "md" else _html(conversation)
    return clean("\n".join(parts)) + "\n"


def _about(conversation: Conversation) -> list[tuple[str, str]]:
    return [("model", conversation.model), ("started", conversation.started), *shown(conversation.settings)]


def _foot(turn: Turn) -> str:
    return f"{turn.outcome} · seed {turn.seed} · {turn.time}"


def _markdown(conversation: Conversation) -> Iterator[str]:
    yield f"# {_code(conversation.name)}\n"
    for key, value in _about(conversation):
        yield f"- {key}: {_code(value)}"
    yield ""
    if conversation.system is not None:
        yield f"## System\n\n{_quoted(conversation.system)}\n"
    for turn in conversation.turns:
        yield f"## You\n\n{_quoted(turn.user)}\n"
        yield "## Model\n"
        if turn.thought:
            yield f"<details><summary>Thought</summary>\n\n<pre>{escape(turn.thought)}</pre>\n\n</details>\n"
        if turn.answer:
            yield f"{turn.answer}\n"
        yield f"<sub>{escape(_foot(turn))}</sub>\n"


def _quoted(text: str) -> str:
    """A quotation, in which nothing of the text can end it."""
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines() or [""])


def _code(text: str) -> str:
    """Code in a line: between more backticks than it holds side by side."""
    line = " ".join(text.split())
    longest = max((len(run) for run in "".join(c if c == "`" else " " for c in line).split()), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {line} {fence}" if longest else f"{fence}{line}{fence}"


def _html(conversation: Conversation) -> Iterator[str]:
    title = escape(conversation.name)
    yield f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{title}</title>'
    yield f'<meta name="viewport" content="width=device-width">\n<style>{_STYLE}</style>\n<h1>{title}</h1>'
    about = " · ".join(f"{escape(key)}: {escape(value)}" for key, value in _about(conversation))
    yield f'<p class="about">{about}</p>'
    if conversation.system is not None:
        yield f'<section>\n<h2>System</h2>\n<div class="user">{escape(conversation.system)}</div>\n</section>'
    for turn in conversation.turns:
        yield f'<section>\n<h2>You</h2>\n<div class="user">{escape(turn.user)}</div>'
        yield "<h2>Model</h2>"
        if turn.thought:
            yield f'<details><summary>Thought</summary>\n<div class="thought">{escape(turn.thought)}</div></details>'
        yield f'<div class="answer">{escape(turn.answer)}</div>'
        yield f"<footer>{escape(_foot(turn))}</footer>\n</section>"
    yield "</html>"
