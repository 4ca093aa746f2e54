"""Modes of a terminal that are taken and given back, in whatever order `fg` lets their takers in."""

import os
import pty
import termios
from collections.abc import Callable, Iterator
from itertools import product

import pytest

from dgemma_local.ui import pause

BOTH = termios.ECHO | termios.ICANON


@pytest.fixture
def terminal() -> Iterator[int]:
    master, slave = pty.openpty()
    yield slave
    os.close(master)
    os.close(slave)


def state(fd: int) -> tuple[int, bytes, bytes]:
    _, _, _, local, _, _, signs = termios.tcgetattr(fd)
    return local, signs[termios.VMIN], signs[termios.VTIME]


@pytest.mark.parametrize(("early", "late"), [*product([termios.ECHO, BOTH], repeat=2)])
@pytest.mark.parametrize("leave", [lambda pair: pair, reversed], ids=["first in, first out", "first in, last out"])
def test_whatever_order_they_enter_and_leave_in_all_is_given_back(
    terminal: int, early: int, late: int, leave: Callable[[list[pause._Modes]], Iterator[pause._Modes]]
) -> None:
    before = state(terminal)
    pair = [pause._Modes(terminal, off, b"", b"") for off in (early, late)]
    for each in pair:
        each.enter()
    assert not state(terminal)[0] & (early | late)
    for each in leave(pair):
        each.leave()
    assert state(terminal) == before


def test_a_terminal_that_becomes_ours_between_two_of_them(terminal: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`fg` while a stopped process goes on: the first finds it another's, the second ours; the next look mends that."""
    before = state(terminal)
    answers = [True, True, True, True, False, True]  # both enter, both leave, the first is early
    monkeypatch.setattr(pause, "foreground", lambda _: answers.pop(0) if answers else True)
    with pause.modes(terminal, BOTH), pause.modes(terminal, termios.ECHO):
        for leave, _ in reversed(pause._held):
            leave()
        assert state(terminal) == before
        for _, enter in pause._held:
            enter()
        assert not state(terminal)[0] & termios.ECHO and state(terminal)[0] & termios.ICANON
        with open(os.dup(terminal)) as stream:  # noqa: PTH123 - a descriptor
            assert pause.front(stream)
        assert not state(terminal)[0] & BOTH
    assert state(terminal) == before and not answers


def test_while_it_is_lent_nobody_takes_it_back(terminal: int) -> None:
    """An editor that is stopped and goes on still has it."""
    before = state(terminal)
    with pause.modes(terminal, BOTH), open(os.dup(terminal)) as stream:  # noqa: PTH123 - a descriptor
        with pause.given_back():
            with pause.given_back():
                pass
            assert state(terminal) == before and not pause.front(stream) and state(terminal) == before
        assert not state(terminal)[0] & BOTH and pause.front(stream)
    assert state(terminal) == before


def test_what_comes_untouched_is_so_only_meanwhile(terminal: int) -> None:
    before = termios.tcgetattr(terminal)
    with pause.modes(terminal, BOTH, untouched=True):
        now = termios.tcgetattr(terminal)
        assert now[3] & termios.NOFLSH and not now[0] & termios.ICRNL and before[0] & termios.ICRNL
    assert termios.tcgetattr(terminal) == before
