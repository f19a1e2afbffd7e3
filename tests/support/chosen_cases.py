"""Choose the cases of `make test`: of a test with very many, every third."""

from collections import Counter
from collections.abc import Iterable
from typing import Any


def cases_left_out(items: Iterable[Any]) -> list[Any]:
    """Return the collected cases that `make test` leaves to `make test-all`.

    Of a test marked `every_nth(n)` these are all but its first case and every nth after it, in the order of pytest, so
    they are the same in every run and on every worker.

    Args:
        items: pytest's items, in the order of their files.
    """
    seen: Counter[tuple[Any, str]] = Counter()
    found = []
    for item in items:
        marker = item.get_closest_marker("every_nth")
        if marker is not None:
            name = item.path, item.originalname
            if seen[name] % marker.args[0]:
                found.append(item)
            seen[name] += 1
    return found
