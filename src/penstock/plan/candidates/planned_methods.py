"""The methods that plans by simulation try: which stages their ranks hold, and what their proofs will say of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import Any, NamedTuple

from penstock.schedule.ir.in_flight_option import in_flight_on
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.proof.proof import StageFacts
from penstock.schedule.stage_state.stage_state import Delay
from penstock.simulate.memory.predicted import AlwaysThere


class ActivationMemory(IntEnum):
    """What a rank does with its activations between forward and backward: the less, the lower."""

    KEPT = 0
    OFFLOADED = 1  # moved to the memory of the host
    RECOMPUTED = 2  # blocks are run again


def activations_of(settings: Mapping[str, Any], ranks: Sequence[int]) -> list[ActivationMemory]:
    """Return what each rank does with its activations.

    Args:
        settings: keys of `penstock train` that run a plan.
        ranks: of each stage.
    """
    modes, away = settings["recompute"], settings.get("offload", "none")
    again, moved = ([each] * len(ranks) if isinstance(each, str) else each for each in (modes, away))
    found = dict[int, ActivationMemory]()
    for rank, mode, word in zip(ranks, again, moved, strict=True):
        kept = ActivationMemory.KEPT if word == "none" else ActivationMemory.OFFLOADED
        found[rank] = kept if mode == "none" else ActivationMemory.RECOMPUTED
    return [found[rank] for rank in sorted(found)]


def steady_spans(rule: str) -> tuple[int, int]:
    """Return the batches of two spans, the longer of which takes more by what as many batches of a long run take.

    Where batches overlap, what they do repeats every two batches, or every two or three if there are three versions of
    the weights; with these it also settles later.

    Args:
        rule: of versions.
    """
    return (6, 12) if RULES[rule].delay > 1 else (3, 5)


class PlannedMethod(NamedTuple):
    """A method with the options of its order.

    Attributes:
        name: a row of the method table, with the number of chunks where that is a choice.
        chunks: stages on each rank.
        folded: they lie on a V, so that rank r has the stages r and, from the end, r; otherwise they go round.
        halved: backwards come in two halves.
        rule: its version rule.
        correction: of stale weights.
        full: parallel pipelines divide all state of stages, weights, too.
        searched: options of an order that is searched for given times.
    """

    name: str
    chunks: int = 1
    folded: bool = False
    halved: bool = False
    rule: str = "flush"
    correction: str = "none"
    full: bool = False
    searched: tuple[tuple[str, int], ...] = ()

    @property
    def row(self) -> str:
        """The row of the method table."""
        return self.name.partition(":")[0]

    @property
    def plain(self) -> str:
        """The name of the method whose orders and versions it has without its correction; its own if it has none."""
        return self.row.removesuffix("-ahead") if self.correction != "none" else self.name

    @property
    def options(self) -> dict[str, int]:
        """Of its order, where they are not what the method has anyway."""
        return {"chunks": self.chunks} if ":" in self.name else dict(self.searched)

    @property
    def flushes(self) -> bool:
        """Whether no weights are read late."""
        return self.rule == "flush"

    @property
    def delay(self) -> int:
        """By how many updates its weights are late."""
        return RULES[self.rule].delay

    @property
    def on_request(self) -> bool:
        """Whether it is tried only where it is asked for: weights that are two updates late cost far more loss."""
        return self.delay > 1

    @property
    def divides(self) -> bool:
        """Whether parallel pipelines may divide its state; not where stages have three versions."""
        return self.delay < 2

    @property
    def spans(self) -> tuple[int, int]:
        """The batches of two spans: `steady_spans` of its rule."""
        return steady_spans(self.rule)

    @property
    def drifts(self) -> bool:
        """Whether ranks may drift apart for many batches, until messages stop them."""
        return self.row == "2bw-eager"

    @property
    def forwards_first(self) -> bool:
        """Whether all forwards of a batch come before its backwards."""
        return self.row in ("gpipe", "breadth-first", "layered")

    @property
    def grows(self) -> bool:
        """Whether ranks hold the more microbatches, the more a batch has."""
        return self.forwards_first or self.row == "2bw-layered"

    def warm_up(self, depth: int, microbatches: int) -> list[int] | None:
        """Return the forwards of every rank before its first backward, if the order has those of ZB-H1 or ZB-H2."""
        first = {"zb-h1": depth, "zb-h2": 2 * depth - 1}.get(self.row)
        return None if first is None else [min(ahead, microbatches) for ahead in in_flight_on(depth, first)]

    def ranks(self, depth: int) -> tuple[int, ...]:
        """Return the rank of each stage of a pipeline with so many ranks."""
        if self.folded:
            return (*range(depth), *reversed(range(depth)))
        return tuple(range(depth)) * self.chunks


_USUAL = (
    *map(PlannedMethod, ("1f1b", "eager", "gpipe")),
    *(PlannedMethod(name, rule="double-buffer") for name in ("2bw", "2bw-eager")),
)
_OTHERS = (
    PlannedMethod("zb-h1", halved=True),
    PlannedMethod("zb-h2", halved=True),
    PlannedMethod("zb-v", 2, folded=True, halved=True),
    PlannedMethod("v-half", 2, folded=True, halved=True),
    PlannedMethod("v-min", 2, folded=True, halved=True),
    PlannedMethod("zb-interleaved:chunks=2", 2, halved=True),
    PlannedMethod("2bw-ahead", rule="double-buffer", correction="2bw-ahead"),
    PlannedMethod("3bw", rule="triple-buffer"),
    PlannedMethod("3bw-ahead", rule="triple-buffer", correction="2bw-ahead"),
    *(PlannedMethod(f"{name}:chunks={n}", n) for name in ("interleaved", "breadth-first") for n in (2, 4)),
    *(PlannedMethod(f"layered:chunks={n}", n, full=True) for n in (4, 8)),
    PlannedMethod("2bw-layered:chunks=4", 4, rule="double-buffer", full=True),
)

PLANNED: Mapping[str, PlannedMethod] = MappingProxyType({each.name: each for each in (*_USUAL, *_OTHERS)})
"""All by their names, in the order in which they are tried."""

USUAL = tuple(each.name for each in _USUAL)
"""Those with one stage on each rank whose backward is one pass: the best plan of each is found."""

METHODS = tuple(PLANNED)
"""Their names."""

SEARCHED = PlannedMethod("zb-auto", halved=True)
"""The method whose order is searched for given times."""


def method_of(planner: str, settings: Mapping[str, Any]) -> PlannedMethod:
    """Return the method of a plan.

    Args:
        planner: its name.
        settings: keys of `penstock train` that run the plan.
    """
    if planner == SEARCHED.name:
        return SEARCHED._replace(searched=tuple(settings["options"].items()))
    return PLANNED[planner]


class StageForecast(NamedTuple):
    """What a stage needs, known before a schedule is made.

    Attributes:
        rule: of the schedule.
        facts: of its versions and gradients.
        activations: microbatches in flight, at most; of a method with several stages on a rank, or whose backwards come
            in halves, at least.
    """

    rule: str
    facts: StageFacts
    activations: int


def of_full_sharding(method: PlannedMethod, low_precision: bool, buffers: int) -> AlwaysThere:
    """Return the parameter-sized buffers of a fully sharded stage that are there all the time: rows.

    Args:
        method: with more stages on a rank than places for full-size gradients.
        low_precision: passes compute in 16 bits.
        buffers: that its proof asks for.
    """
    if method.flushes:
        return AlwaysThere(0, 0, 2, int(low_precision))  # weights, and sums that wait for their update
    return AlwaysThere(0, 0, 1 if low_precision else buffers, int(low_precision))


def least_microbatches(method: PlannedMethod, depth: int) -> int:
    """Return the fewest microbatches of a pipeline that the proof of a method accepts."""
    if method.flushes or method.chunks > 1:
        return 1
    return max(depth, 2 * (depth - 1)) if method.drifts else RULES[method.rule].least_microbatches(depth)


def stage_forecast(
    method: PlannedMethod, depth: int, microbatches: int, stage: int, divided: bool = False
) -> StageForecast:
    """Return what the proof of a method derives for a stage.

    Args:
        method: which.
        depth, microbatches: d and m.
        stage: which.
        divided: pipelines divide updates, which a gradient is free again for earlier.
    """
    late, behind = method.delay, depth - 1 - stage
    ahead = _ahead(method, behind, microbatches)
    if method.row == "interleaved":
        ahead = _interleaved(method.chunks, depth, microbatches, stage) - 1
    flight = ahead + 1 if late else min(ahead + 1, microbatches)
    early = divided and not method.full
    whole = 0 if method.full and stage < depth else late - min((ahead + early) // microbatches, late)
    facts = StageFacts(1 + late, 0, 1 + whole, 2 + late, Delay(float(late), float(late)))
    return StageForecast(method.rule, facts, flight)


def _interleaved(chunks: int, depth: int, microbatches: int, stage: int) -> int:
    """Return the microbatches of a stage in flight when its rank has run the forwards before its first backward."""
    chunk, rank = divmod(stage, depth)
    count = max(microbatches // depth, 1)
    size, larger = divmod(microbatches, count)
    forwards, found = (chunks - 1) * (size + (larger > 0)) + 2 * (depth - 1 - rank) + 1, 0
    for n in range(count):  # groups, all of which go through one chunk after the other
        group = size + (n < larger)
        found += min(max(forwards - chunk * group, 0), group)
        forwards -= chunks * group
        if forwards <= 0:
            break
    return found


def _ahead(method: PlannedMethod, behind: int, microbatches: int) -> int:
    """Return how many forwards a stage with so many behind it runs before its first backward."""
    if method.grows:
        return microbatches - 1
    if method.chunks > 1:
        return 0
    return 2 * behind if method.row in ("eager", "2bw-eager", "zb-h2") else behind
