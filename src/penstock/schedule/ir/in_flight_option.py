"""The microbatches in flight on each rank of a chain: those whose forward has begun and whose backward has not.

Without latency rank s of p needs p - s of them, so that it works while a microbatch goes to the last rank and back.
Over slow links that takes longer, and more of them hide it (`penstock.simulate.least_in_flight`).
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.checks import check_whole, in_short
from penstock.errors import ConfigError

InFlight = int | tuple[int, ...]
"""Those of the first rank, or of every rank."""

AUTO, AUTO_DELAYED = "auto", "auto+delay"
"""As many as links ask for (`penstock.simulate.auto_in_flight`); the second may make delays longer."""


def in_flight_on(ranks: int, given: InFlight) -> list[int]:
    """Return the microbatches in flight on every rank.

    Args:
        ranks: p.
        given: those of every rank; or n of the first one: then rank s has 1 + x + ceil(x (n - p) / (p - 1)) of them,
            but at least 1, where x = p - 1 - s is how many ranks are behind it. So n = p gives p - s, as in 1F1B, and
            n = 2 p - 1 gives 2 (p - s) - 1, as in eager 1F1B.
    """
    if isinstance(given, tuple):
        return list(given)
    more = given - ranks
    return [max(1 + x - (-x * more) // max(ranks - 1, 1), 1) for x in reversed(range(ranks))]


def check_in_flight(what: str, given: object, ranks: int) -> InFlight:
    """Return numbers of microbatches in flight in the form that orders take.

    Args:
        what: where they were set, for the message.
        given: a number, or one for every rank.
        ranks: p.

    Raises:
        ConfigError: they are no whole numbers of at least 1; or there is not one for every rank; or a rank has more
            than the one before it, which would never send so many.
    """
    if isinstance(given, str) or not isinstance(given, Sequence):
        check_whole(what, given)
        return int(given)  # type: ignore[call-overload, no-any-return]
    for number in given:
        check_whole(what, number)
    if len(given) != ranks:
        raise ConfigError(f"{what} has {len(given)} numbers, but there are {ranks} ranks; give one for each, or one")
    rising = next((s for s in range(1, ranks) if given[s] > given[s - 1]), None)
    if rising is not None:
        raise ConfigError(
            f"{what} is {given[rising]} on rank {rising}, but {given[rising - 1]} on the rank before it, which begins "
            f"no more until their gradients are back; give no rank more than the one before it; got {in_short(given)}"
        )
    return tuple(given)


def read_in_flight(text: str) -> int | tuple[int, ...] | str:
    """Read `auto`, `auto+delay`, a number, or numbers of all ranks with strokes between them, as in 7/5/3/1.

    Raises:
        ConfigError: it is none of these.
    """
    parts = text.strip().split("/")
    if text.strip() in (AUTO, AUTO_DELAYED):
        return text.strip()
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise ConfigError(
            f"in_flight takes a number, one for every rank (7/5/3/1), auto or auto+delay; got {text!r:.80}"
        )
    numbers = tuple(int(part) for part in parts)
    return numbers if len(numbers) > 1 else numbers[0]


def write_in_flight(given: InFlight | str) -> str:
    """Write what `read_in_flight` reads."""
    return "/".join(map(str, given)) if isinstance(given, tuple) else str(given)
