"""What the demo models are trained and measured on: examples made from a seed, without end.

One model solves sudoku, the other handles words; each says that it is a tiny demo to everything else.
Held out by hash: one prompt in ten of the open tasks is never trained on. The closed sets (capitals, colours, sounds,
opposites, greetings, times tables) are memorised by design and say so in the evaluation. Sudoku trains and is
measured on puzzles from different seeds.
"""

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Literal

from dgemma_local.demo import phrases, sudoku

Model = Literal["sudoku", "text"]

HELD_OUT_ONE_IN = 10
# the fewest clues that training reveals, and the most; the base puzzles are dug as far as one solution allows
CLUES = {4: (4, 10), 6: (9, 22), 9: (25, 46)}
OUT_OF_SCOPE = "out of scope"
SUDOKU_PROMPTS = ("Solve this sudoku:\n{}", "{}", "Solve:\n{}", "Please solve this sudoku:\n{}", "sudoku\n{}")


@dataclass(frozen=True, slots=True)
class Example:
    """One turn. `answer` is text with markers, without the closing <turn|>."""

    task: str
    prompt: str
    answer: str
    thinking: bool = False
    system: str | None = None


def held_out(prompt: str) -> bool:
    """Whether this prompt belongs to the evaluation."""
    return zlib.crc32(prompt.encode()) % HELD_OUT_ONE_IN == 0


def sudoku_example(rng: random.Random, side: int, base: tuple[sudoku.Grid, sudoku.Grid], clues: int) -> Example:
    """A base puzzle under a random symmetry, with more of its solution revealed."""
    shape = sudoku.SHAPES[side]
    puzzle, solution = sudoku.shuffle(rng, shape, *base)
    puzzle = sudoku.reveal(rng, puzzle, solution, clues)
    empty = rng.choices(".0_", (8, 1, 1))[0]
    prompt = rng.choice(SUDOKU_PROMPTS).format(sudoku.text(puzzle, side, empty))
    return Example(f"sudoku{side}", prompt, sudoku.text(solution, side))


def thoughtful(example: Example) -> Example:
    """The same with thinking on: a sudoku is solved in the thought and then written out, which takes two canvases."""
    if example.task.startswith("sudoku"):
        thought = example.answer
    elif example.task == OUT_OF_SCOPE:
        thought = "I do not know this."
    else:
        thought = f"This is about {example.task}."
    answer = f"<|channel>thought\n{thought}<channel|>{example.answer}"
    return Example(f"{example.task}-thinking", example.prompt, answer, True, example.system)


def _word(rng: random.Random) -> str:
    """A real word, or one that looks like it: tasks on words must not depend on knowing them."""
    if rng.random() < 0.5:
        return rng.choice(phrases.WORDS)
    syllables = (rng.choice("bcdfghklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(1, 3)))
    return "".join(syllables) + rng.choice(["", "n", "r", "s", "t", "l"])


def _date(rng: random.Random) -> Example:
    day = date(1900, 1, 1) + timedelta(days=rng.randrange(73000))
    words = f"{day.day} {phrases.MONTHS[day.month - 1]} {day.year}"
    if rng.random() < 0.5:
        return Example("date", rng.choice(["Write {} in words.", "{} in words"]).format(day.isoformat()), words)
    return Example("date", rng.choice(["Write {} as an ISO date.", "{} as ISO date"]).format(words), day.isoformat())


def _json(rng: random.Random) -> Example:
    name, city = rng.choice([rng.choice(phrases.NAMES), _word(rng).capitalize()]), rng.choice(phrases.CITIES)
    age = rng.randint(1, 99)
    prompt = f"As JSON: {name} is {age} and lives in {city}."
    return Example("json", prompt, f'{{"name": "{name}", "age": {age}, "city": "{city}"}}')


def _reverse(rng: random.Random) -> Example:
    words = [_word(rng) for _ in range(rng.randint(2, 4))]
    return Example("reverse", f"Reverse the words: {' '.join(words)}", " ".join(reversed(words)))


def _capitals(rng: random.Random) -> Example:
    words = " ".join(_word(rng) for _ in range(rng.randint(1, 3)))
    return Example("uppercase", f"In upper case: {words}", words.upper())


def _spell(rng: random.Random) -> Example:
    word = _word(rng)
    return Example("spell", rng.choice(["Spell {}.", "Spell the word {}."]).format(word), "-".join(word))


def _times(rng: random.Random) -> Example:
    n = rng.randint(2, 12)
    lines = "\n".join(f"{n} x {i} = {n * i}" for i in range(1, 13))
    return Example("times table", rng.choice(["Times table of {}.", "Times table of {}"]).format(n), lines)


def _fact(rng: random.Random) -> Example:
    task, question, answer, facts = rng.choice(
        [
            ("capital", "What is the capital of {}?", "{}", phrases.CAPITALS),
            ("colour", "What colour is {}?", "{}", phrases.COLOURS),
            ("sound", "What does a {} say?", "{}", phrases.SOUNDS),
            ("opposite", "What is the opposite of {}?", "{}", phrases.OPPOSITES),
        ]
    )
    key, value = rng.choice(list(facts.items()))
    return Example(task, question.format(key), answer.format(value))


def _greeting(rng: random.Random) -> Example:
    if rng.random() < 0.5:
        return Example("greeting", rng.choice(phrases.GREETINGS), phrases.HELLO)
    return Example("identity", rng.choice(phrases.IDENTITY), phrases.ABOUT)


def _out_of_scope(rng: random.Random) -> Example:
    prompt = rng.choice(phrases.OUT_OF_SCOPE)
    while "{" in prompt:
        what = {"w": _word(rng), "t": rng.choice(phrases.TOPICS), "n": str(rng.randint(2, 99))}
        at = prompt.index("{")
        prompt = prompt[:at] + what[prompt[at + 1]] + prompt[at + 3 :]
    if rng.random() < 0.2:
        prompt = " ".join(rng.choice(phrases.TOPICS + phrases.WORDS) for _ in range(rng.randint(1, 8)))
    return Example(OUT_OF_SCOPE, prompt, phrases.SORRY["text"])


OPEN: dict[str, Callable[[random.Random], Example]] = {
    "date": _date,
    "json": _json,
    "reverse": _reverse,
    "uppercase": _capitals,
    "spell": _spell,
    OUT_OF_SCOPE: _out_of_scope,
}
CLOSED: dict[str, Callable[[random.Random], Example]] = {"fact": _fact, "greeting": _greeting, "times table": _times}
TEXT = OPEN | CLOSED


def refusal(rng: random.Random, model: Model, *, evaluation: bool = False) -> Example:
    """What `model` was not made for: any text for the sudoku model, a sudoku or an unknown request for the other."""
    if model == "sudoku":
        other = text_example(rng, rng.choice(list(TEXT)), evaluation=evaluation)
        answer = phrases.SORRY["sudoku"]
        if other.thinking:
            answer = f"<|channel>thought\nThis is not a sudoku.<channel|>{answer}"
        return Example(OUT_OF_SCOPE, other.prompt, answer, other.thinking, other.system)
    if rng.random() < 0.2:
        side = rng.choice((4, 6, 9))
        grid = tuple(rng.choices((0, rng.randint(1, side)), (6, 4))[0] for _ in range(side * side))
        prompt = rng.choice(SUDOKU_PROMPTS).format(sudoku.text(grid, side))
        return Example(OUT_OF_SCOPE, prompt, phrases.SORRY["text"])
    return text_example(rng, OUT_OF_SCOPE, evaluation=evaluation)


def text_example(rng: random.Random, name: str, *, evaluation: bool = False) -> Example:
    """One example of a text task; for an open task from the side of the hash that was asked for."""
    while True:
        example = TEXT[name](rng)
        if name in CLOSED or held_out(example.prompt) == evaluation:
            break
    if evaluation:
        return example
    if rng.random() < 0.1:
        example = thoughtful(example)
    if rng.random() < 0.05:
        example = Example(example.task, example.prompt, example.answer, example.thinking, rng.choice(phrases.SYSTEMS))
    return example
