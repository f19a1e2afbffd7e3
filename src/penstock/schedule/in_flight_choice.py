"""The microbatches in flight that links ask for, as they were chosen, and what is said of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.schedule.build import ScheduleRequest
from penstock.schedule.ir.in_flight_option import in_flight_on, write_in_flight
from penstock.schedule.methods.find_method import find_method
from penstock.schedule.orders import CHAINS, ORDERS

INTERLEAVED, ON_V = "interleaved", "zb-v"
_SPLIT = ("zb-h1", "zb-h2", "zb-interleaved", ON_V)
_TRIED = ("zb-interleaved", ON_V)
FILLS = "zb-h2"
"""The order with so many forwards ahead that a rank does not wait for its first gradient either."""
NO_LINKS_HERE = "what the order has where messages take no time, as no stage sends to another process"
"""What is said where `auto` has nothing to measure."""


@dataclass(frozen=True)
class InFlightChoice:
    """Microbatches in flight on every rank, as the option of the order counts them.

    That is, by order: of 1F1B and its like, the microbatches themselves; of ZB-H1 and ZB-H2, forwards ahead; of
    interleaved 1F1B, passes of chunks on the first rank; of interleaved zero bubble, forwards of chunks ahead there; of
    ZB-V, one number for all ranks.

    Attributes:
        taken: what to run with.
        asked: the least with which no rank waits for messages.
        plain: what the order has where messages take no time.
        reasons: why fewer are taken than the links ask for.
        later: by how much weights are read later with them, if they are.
        group: of interleaved orders, the microbatches that run through a chunk together.
        held: the most microbatches whose activations each rank holds, where these are others than those taken: where
            backwards come in two halves, from the forward to the second one.
    """

    taken: tuple[int, ...]
    asked: tuple[int, ...]
    plain: tuple[int, ...]
    reasons: tuple[str, ...] = ()
    later: str = ""
    group: int | None = None
    held: tuple[int, ...] = ()

    def applied(self, request: ScheduleRequest) -> ScheduleRequest:
        """Return the request with these numbers in place of `auto`."""
        if self.group is None:
            return with_in_flight(request, self.taken)
        return replace(request, options={**request.options, "in_flight": self.taken[0], "group": self.group})

    def __str__(self) -> str:
        """Return the numbers with the reasons, for people."""
        plain = f"{write_in_flight(self.plain)} where messages take no time"
        return f"{self.counted} ({'; '.join([*self.why, plain])})"

    @property
    def counted(self) -> str:
        """What is taken, with what it counts and where: "3/1 microbatches on ranks 0 and 1"."""
        taken = write_in_flight(self.taken)
        if self.group is not None and not self.held:
            return f"{taken} passes of chunks on rank 0"
        if not self.held:
            return f"{taken} {plural(self.taken, 'microbatch', 'microbatches')} on {_ranks(len(self.taken))}"
        held, ranks = write_in_flight(self.held), _ranks(len(self.held))
        if self.group is not None:
            what = plural(self.taken, "forward", "forwards")
            return f"{taken} {what} of chunks ahead on rank 0, in groups of {self.group}, of which {ranks} hold {held}"
        if len(self.taken) < len(self.held):
            return f"{taken} {plural(self.taken, 'microbatch', 'microbatches')}, of which {ranks} hold {held}"
        holds, what = "holds" if len(self.held) == 1 else "hold", plural(self.taken, "forward", "forwards")
        return (
            f"{taken} {what} ahead on {ranks}, which {holds} {held} {plural(self.held, 'microbatch', 'microbatches')}"
        )

    @property
    def why(self) -> list[str]:
        """Why they are not what links ask for, and what they cost; nothing where there is nothing to say."""
        asked = f"links ask for {write_in_flight(self.asked)}, but {' and '.join(self.reasons)}"
        return [asked] * bool(self.reasons) + [self.later] * bool(self.later)


def asked_order(request: ScheduleRequest) -> str:
    """Return the name of the order of a request for a method whose order has one."""
    assert not callable(request.method)
    order = request.order or find_method(request.method).order
    assert isinstance(order, str)
    return order


def splits(request: ScheduleRequest) -> bool:
    """Whether its backwards come in two halves."""
    return asked_order(request) in _SPLIT


def interleaves(request: ScheduleRequest) -> bool:
    """Whether its order is interleaved 1F1B, whose numbers count passes of chunks."""
    return asked_order(request) == INTERLEAVED


def is_tried(request: ScheduleRequest) -> bool:
    """Whether nothing but simulated batches tell how many its links ask for."""
    return asked_order(request) in _TRIED


def on_v(request: ScheduleRequest) -> bool:
    """Whether its order is ZB-V, which has one number for all ranks, and two stages on each."""
    return asked_order(request) == ON_V


def plain_numbers(request: ScheduleRequest) -> tuple[int, ...]:
    """Return what an order with a stage on each rank has where messages take no time."""
    ranks = request.stages
    return tuple(in_flight_on(ranks, 2 * ranks - 1 if asked_order(request) == FILLS else ranks))


def with_in_flight(request: ScheduleRequest, numbers: tuple[int, ...]) -> ScheduleRequest:
    """Return a request with other numbers of microbatches in flight."""
    given = numbers if ORDERS[asked_order(request)] in CHAINS else numbers[0]
    return replace(request, options={**request.options, "in_flight": given})


def plural(numbers: tuple[int, ...], one: str, many: str) -> str:
    """Return the noun for numbers, one for each rank."""
    return one if numbers == (1,) else many


def too_small(microbatches: int, enough: int, *, limited: bool) -> str:
    """Say that batches of so many microbatches are too small, and which would do.

    Args:
        microbatches: of a batch.
        enough: of a batch that would do.
        limited: that would do for what something else allows, which is less than links ask for, too.
    """
    size = f"{microbatches} {plural((microbatches,), 'microbatch', 'microbatches')}"
    where = f"where {enough} would be enough{' for that' * limited}"
    return f"{size}, {where} (--microbatches {enough}, or microbatches={enough})"


def _ranks(count: int) -> str:
    return "rank 0" if count == 1 else f"ranks 0 {'and' if count == 2 else 'to'} {count - 1}"
