"""Choose the cases of `make test`: of a test with many, every fifth."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

MANY = 5


def cases_left_out(items: Iterable[Any]) -> list[Any]:
    """Return the collected cases that `make test` leaves to `make test-all`.

    Of a test with more than four cases these are all but the first one and every fifth after it, in the order of
    pytest, so they are the same in every run and on every worker. A test marked `all_cases` keeps them.

    Args:
        items: pytest's items, in the order of their files.
    """
    tests = [(item, (item.path, item.originalname)) for item in items]
    cases, seen = Counter(test for _, test in tests), Counter[Any]()
    found = []
    for item, test in tests:
        if cases[test] >= MANY and seen[test] % MANY and not item.get_closest_marker("all_cases"):
            found.append(item)
        seen[test] += 1
    return found
