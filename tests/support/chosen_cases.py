"""Choose the cases of `make test`: of a test with many, a few."""

from collections import Counter
from collections.abc import Iterable
from typing import Any
from zlib import crc32

SHARE = 5
"""Of so many examples that a test of a property may draw, one is tried."""
_EVERY = (100, 20), (10, 10), (3, 5)  # of so many cases or more, which are chosen


def cases_left_out(items: Iterable[Any]) -> list[Any]:
    """Return the collected cases that `make test` leaves to `make test-all`.

    Of a test with more than two cases these are all but every fifth (so of three or four all but one), tenth from ten
    on, and twentieth from a hundred on; of one with two that take processes all but one. The name of a test says with
    which case it begins, so the cases are the same in every run and on every worker, and not all tests try the same
    methods. A test marked `all_cases` keeps them, and those marked `long` are left to others to choose.

    Args:
        items: pytest's items, in the order of their files, those that take processes marked.
    """
    tests = [(item, (item.path, item.originalname)) for item in items if not item.get_closest_marker("long")]
    cases, seen = Counter(test for _, test in tests), Counter[Any]()
    found = []
    for item, test in tests:
        number, several = seen[test], cases[test]
        seen[test] += 1
        every = next((each for many, each in _EVERY if several >= many), 1)
        if every == 1 and item.get_closest_marker("processes"):
            every = several
        first = crc32(item.originalname.encode()) % min(every, several)
        if number % every != first and not item.get_closest_marker("all_cases"):
            found.append(item)
    return found
