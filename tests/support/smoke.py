"""Choose the tests of `make check`: from every file at least one that is cheap."""

from collections.abc import Iterable, Sequence
from typing import Any


def smoke_tests(items: Iterable[Any]) -> list[Any]:
    """Select the collected tests that `make check` runs.

    Of a file these are the tests marked `smoke`; where none is marked, the first test that starts no processes and is
    neither slow nor long; where there is none either, the first that is not long, or the first of all. So a new file
    takes part without anybody thinking of it.

    Args:
        items: pytest's items, in the order of their files.
    """
    files: dict[Any, list[Any]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    return [item for tests in files.values() for item in _of_one_file(tests)]


def _of_one_file(tests: Sequence[Any]) -> Sequence[Any]:
    marked = [test for test in tests if test.get_closest_marker("smoke")]
    short = [test for test in tests if not any(map(test.get_closest_marker, ("long", "skip")))]
    cheap = [test for test in short if not any(map(test.get_closest_marker, ("processes", "slow")))]
    return marked or (cheap or short or tests)[:1]
