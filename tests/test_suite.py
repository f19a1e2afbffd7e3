"""The test suite itself: names that can be told apart, modules that stand alone, a choice for `make check`."""

import ast
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from support.chosen_cases import cases_left_out
from support.examples import examples
from support.smoke import smoke_tests

TESTS = Path(__file__).parent
FILES = sorted(TESTS.rglob("test_*.py"))


class _Module(NamedTuple):
    """What is asked here of a module: its tests, its docstring, and what it imports in which line."""

    tests: tuple[str, ...]
    says: str
    imports: tuple[tuple[int, str], ...]


@cache
def _modules():
    """All modules of the suite by their paths, each parsed once."""
    found = {}
    for path in TESTS.rglob("*.py"):
        tree = ast.parse(path.read_text())
        tests = [n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
        imports = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                imports += [(node.lineno, alias.name) for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                imports.append((node.lineno, node.module or ""))
        found[path] = _Module(tuple(tests), ast.get_docstring(tree) or "", tuple(imports))
    return found


@pytest.mark.slow
def test_no_test_name_stands_in_two_files():
    """So that `pytest -k` picks one test, and a name in a report says which one it is."""
    found = {}
    for path in FILES:
        for name in dict.fromkeys(_modules()[path].tests):
            found.setdefault(name, []).append(str(path.relative_to(TESTS)))
    assert len(found) > 1000
    assert {name: where for name, where in found.items() if len(where) > 1} == {}


def test_no_test_module_imports_another():
    """What several of them need is in tests/support."""
    names = {path.stem for path in FILES}
    assert names >= {"test_suite", "test_layers"}
    found = [
        f"{path.relative_to(TESTS)}, line {line}"
        for path, module in _modules().items()
        for line, imported in module.imports
        if names.intersection(imported.split("."))
    ]
    assert found == []


def test_every_module_says_what_it_is():
    """In one sentence on its first line."""
    said = {path: module.says for path, module in _modules().items() if path.stat().st_size}
    first = {str(path.relative_to(TESTS)): text.partition("\n")[0] for path, text in said.items()}
    assert {path: line for path, line in first.items() if not line.endswith(".")} == {}


def test_every_file_is_part_of_make_check(request):
    """Whatever has been collected here: no file is left out when its tests are chosen."""
    items = request.session.items
    assert {item.path for item in smoke_tests(items)} == {item.path for item in items}


@pytest.mark.parametrize(
    ("marks", "wanted"),
    [
        (["", "", ""], [0]),
        (["processes", "slow", ""], [2]),
        (["processes", "slow"], [0]),
        (["long", "slow", "", ""], [2]),
        (["long", "processes"], [1]),
        (["", "smoke", "", "smoke"], [1, 3]),
        (["processes smoke", ""], [0]),
    ],
)
def test_which_tests_of_a_file_make_check_runs(marks, wanted):
    def item(path, number, mark):
        return SimpleNamespace(path=path, number=number, get_closest_marker=lambda name: name in mark.split() or None)

    items = [item(path, number, mark) for path in ("a", "b") for number, mark in enumerate(marks)]
    assert [(found.path, found.number) for found in smoke_tests(items)] == [(p, n) for p in ("a", "b") for n in wanted]


def test_of_many_cases_a_few_are_chosen():
    """Counted for each test by itself; tests with few cases keep all, unless they take processes."""

    def cases(name, number, marks=()):
        return [
            SimpleNamespace(path="file", originalname=name, number=k, get_closest_marker=lambda m: m in marks)
            for k in range(number)
        ]

    wide, few, two, kept = cases("wide", 9), cases("few", 4), cases("two", 2), cases("kept", 9, ["all_cases"])
    wider, widest = cases("wider", 40), cases("widest", 200)
    processes, one = cases("processes", 2, ["processes"]), cases("one", 1, ["processes"])
    tests = [*wide[:4], *few, *wide[4:], *two, *kept, *wider, *widest, *processes, *one]
    left = {id(case) for case in cases_left_out(tests)}
    chosen = [[c.number for c in t if id(c) not in left] for t in (wide, few, wider, widest, processes)]
    assert [len(numbers) for numbers in chosen] == [len(range(chosen[0][0], 9, 5)), 1, 4, 10, 1]
    assert {b - a for numbers in chosen for a, b in pairwise(numbers)} <= {5, 10, 20}
    assert not left & {id(case) for case in (*two, *kept, *one)}
    pairs = [(*cases(f"pair {n}", 1, ["processes"]), *cases(f"pair {n}", 1, ["processes", "long"])) for n in range(9)]
    assert cases_left_out([case for pair in pairs for case in pair]) == []
    names = [cases(f"test {n}", 5) for n in range(40)]
    left = {id(case) for case in cases_left_out([case for test in names for case in test])}
    assert {case.number for test in names for case in test if id(case) not in left} == set(range(5))


def test_of_many_examples_a_fifth_is_tried(request):
    """Under `make test`, as `SWEEP` and its like ask for them."""
    share = 5 if request.config.getoption("some_cases") else 1
    assert [examples(number) for number in (200, 60, 1)] == [200 // share, 60 // share, 1]
