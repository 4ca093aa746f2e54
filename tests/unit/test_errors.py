"""Every kind of error can happen, has a code of its own, and says why and what to do."""

import ast
from pathlib import Path

import pytest

from dgemma_local import errors
from dgemma_local.errors import DgemmaError, kinds
from dgemma_local.outcomes import Outcome

PACKAGE = Path(errors.__file__).parent
OURS = [kind for kind in kinds() if kind is not DgemmaError]


def made() -> dict[str, list[tuple[Path, ast.Call]]]:
    """Where each kind is made: its name called, in the package but for errors.py itself."""
    found: dict[str, list[tuple[Path, ast.Call]]] = {}
    for path in PACKAGE.rglob("*.py"):
        if path.name != "errors.py":
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    found.setdefault(node.func.id, []).append((path, node))
    return found


def chosen() -> set[str]:
    """Names that a table maps something to: `raise KINDS[outcome](…)` makes them."""
    tables = [
        node
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Dict)
    ]
    return {value.id for table in tables for value in table.values if isinstance(value, ast.Name)}


MADE = made()
CHOSEN = chosen()


@pytest.mark.parametrize("kind", OURS)
def test_each_can_happen(kind: type[DgemmaError]) -> None:
    assert MADE.get(kind.__name__) or kind.__name__ in CHOSEN, f"nothing makes a {kind.__name__}"


@pytest.mark.parametrize("kind", OURS)
def test_each_says_what_why_and_how_to_cure_it(kind: type[DgemmaError]) -> None:
    for name in ("word", "means", "why", "cure", "exit_code"):
        assert name in vars(kind), f"{kind.__name__} has no {name} of its own"
    assert all(text and text.isprintable() and "|" not in text for text in (kind.word, kind.means, kind.why, kind.cure))


@pytest.mark.parametrize("kind", OURS)
def test_no_cure_is_left_empty_where_it_is_raised(kind: type[DgemmaError]) -> None:
    for path, call in MADE.get(kind.__name__, []):
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        assert len(given) == 2 or any(isinstance(each, ast.Starred) for each in given), f"{path}:{call.lineno}"
        assert not any(isinstance(each, ast.Constant) and not each.value for each in given), f"{path}:{call.lineno}"


def test_each_has_a_code_of_its_own() -> None:
    codes = [kind.exit_code for kind in kinds()] + [code for code, *_ in errors.ENDINGS]
    assert len({*codes}) == len(codes)


def test_the_other_codes_are_those_that_are_used() -> None:
    assert {code for code, *_ in errors.ENDINGS} == {
        0,
        errors.CHECK_FAILED,
        errors.HUNG_UP,
        errors.INTERRUPTED,
        errors.BROKEN_PIPE,
        errors.TERMINATED,
        Outcome.TOKEN_LIMIT.exit_code,
        Outcome.NOT_CONVERGED.exit_code,
    }


def test_every_code_has_a_word() -> None:
    assert errors.OTHER_WORDS.keys() == {code for code, *_ in errors.ENDINGS}


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    assert errors.__doc__ is not None
    for kind in OURS:
        assert any(
            line.split()[1:3] == [kind.__name__, str(kind.exit_code)]
            for line in errors.__doc__.splitlines()
            if "──" in line
        ), kind.__name__


def test_the_table_has_every_code_once_in_order() -> None:
    lines = errors.table().splitlines()
    codes = [int(line.split("|")[1]) for line in lines[2:]]
    assert codes == sorted({*codes}) and {kind.exit_code for kind in kinds()} <= {*codes}
    assert all(line.count("|") == 5 for line in lines)
