"""The microbatches in flight that a run has chosen for its links, and what they follow from."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from penstock.errors import ScheduleError
from penstock.runtime.in_flight.pass_and_message_times import Measured
from penstock.runtime.plan.plan import PipelinePlan
from penstock.schedule.build import ScheduleRequest
from penstock.schedule.ir.in_flight_option import write_in_flight
from penstock.schedule.proof.proof import Proof
from penstock.simulate.auto_in_flight import (
    InFlightChoice,
    as_allowed,
    choose_interleaved,
    chunks_of,
    interleaves,
    most_of_a_run,
    splits,
)
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.least_in_flight import RankTimes, least_in_flight
from penstock.simulate.simulate import Simulation, simulate_schedule

MEASURED = 4
"""Batches that are measured, of which the first one fills the pipeline."""
_LEAVE = 0.02  # a period longer by this is not worth the activations of a microbatch, nor told from noise


@dataclass(frozen=True, repr=False)
class AdaptedInFlight:
    """The microbatches in flight that a run goes on with, as its links ask for.

    Attributes:
        batch: the first one that is trained so.
        choice: the numbers, and why they are these.
        window: the number of messages that may be outstanding on a lane.
        measured: the times that it follows from.
    """

    batch: int
    choice: InFlightChoice
    window: int
    measured: Measured

    @property
    def numbers(self) -> tuple[int, ...]:
        """Microbatches in flight on every rank; of interleaved 1F1B, passes of chunks on the first one."""
        return self.choice.taken

    def __repr__(self) -> str:
        """Return what `str` does, with the batch."""
        return f"<In flight from batch {self.batch} on: {self}>"

    def __str__(self) -> str:
        """Return the numbers and what they follow from, for people."""
        choice, measured = self.choice, self.measured
        less = "as before" if choice.taken == choice.plain else f"instead of {write_in_flight(choice.plain)}"
        times = f"messages take {_milliseconds(measured.message)}, a forward and backward "
        said = [f"{choice.counted} {less}: {times}{_milliseconds(measured.microbatch)}", *choice.why]
        return "; ".join(said)

    def state(self) -> dict[str, Any]:
        """Return it as plain values, for metrics and checkpoints."""
        return {
            "from_batch": self.batch,
            **asdict(self.choice),
            "window": self.window,
            "times": [list(times) for times in self.measured.times],
            "hops": [list(hop) for hop in self.measured.hops],
            "around": list(self.measured.around),
            "nbytes": list(self.measured.nbytes),
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> AdaptedInFlight:
        """Read what `state` has returned."""
        taken, asked, plain = (tuple(map(int, state[key])) for key in ("taken", "asked", "plain"))
        choice = InFlightChoice(taken, asked, plain, tuple(state["reasons"]), state["later"], state.get("group"))
        times = tuple(RankTimes(*each) for each in state["times"])
        hops = tuple((there, back) for there, back in state["hops"])
        measured = Measured(times, hops, tuple(state["nbytes"]), tuple(state.get("around", (0.0, 0.0))))
        return cls(state["from_batch"], choice, state["window"], measured)


def adapt(plan: PipelinePlan, measured: Measured, batch: int) -> AdaptedInFlight:
    """Choose the microbatches in flight, and the window with which messages cost no time.

    Args:
        plan: under which it was measured, which asks for `auto`.
        measured: on all ranks.
        batch: the first one that is trained so.
    """
    request, limit = plan.auto, plan.options.microbatches.in_flight_bytes
    assert request is not None
    choice = _choose(request, measured, plan.proof, limit)
    simulated = _simulated(request, choice, measured)
    if choice.group is not None:
        plain = _simulated(request, _plain(request, choice), measured)
        if simulated.bubble.makespan > plain.bubble.makespan:
            choice = _plain(request, choice, "a batch has too few microbatches for the larger groups to pay")
            simulated = plain
    window = request.window or simulated.window
    assert isinstance(window, int)
    try:
        plan.adapted(choice, window).prove()
    except ScheduleError as error:  # with what the options of the pipeline add to the schedule
        choice = _plain(request, choice, f"they do not go with the other options ({error})")
        window = plan.proof.lowered.window
    return AdaptedInFlight(batch, choice, window, measured)


def _choose(request: ScheduleRequest, measured: Measured, proof: Proof, limit: float | None) -> InFlightChoice:
    """The microbatches in flight that links ask for, as far as batch, memory (`limit`, in bytes) and delay allow."""
    if interleaves(request):
        chunks = chunks_of(request)
        passes = None if limit is None else _most(proof, measured.nbytes, limit, chunks)
        return choose_interleaved(request, measured.times, measured.message, most=passes, leave=_LEAVE)
    most = None if limit is None else _most(proof, measured.nbytes, limit)
    return as_allowed(
        request,
        lambda limits: least_in_flight(measured.times, measured.hops, leave=_LEAVE, most=limits),
        most,
        most_of_a_run(request.stages, request.microbatches),
    )


def _plain(request: ScheduleRequest, choice: InFlightChoice, reason: str | None = None) -> InFlightChoice:
    """What the order has where messages take no time, and why."""
    reasons = choice.reasons if reason is None else (*choice.reasons, reason)
    group = None if choice.group is None else request.options.get("group") or request.stages
    return replace(choice, taken=choice.plain, reasons=reasons, later="", group=group)


def _simulated(request: ScheduleRequest, choice: InFlightChoice, measured: Measured) -> Simulation:
    """A batch with these numbers and times; its window is the least that costs no time."""
    return simulate_schedule(choice.applied(request).prove(), _costs(request, measured))


def _costs(request: ScheduleRequest, measured: Measured) -> Costs:
    """The times of every stage."""
    chunks = chunks_of(request) if interleaves(request) else 1
    half, parts = splits(request), [RankTimes(*(time / chunks for time in times)) for times in measured.times]
    return Costs(
        tuple(
            StageCost(t.forward, t.returns, t.rest) if half else StageCost(t.forward, t.returns + t.rest, 0.0)
            for t in parts * chunks
        ),
        latency=measured.message,
    )


def _most(proof: Proof, nbytes: Sequence[int], limit: float, chunks: int = 1) -> list[int]:
    """The passes whose activations fit on each rank, each of which takes a microbatch through one of its chunks."""
    each = [held / float(count * chunks) for held, count in zip(nbytes, proof.activations, strict=True)]
    return [max(int(min(limit, sys.maxsize) // size), 1) if size else sys.maxsize for size in each]


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


class Adaptations:
    """What a pipeline has found for each of its schedules that ask for it, and from where on it measures others."""

    def __init__(self) -> None:
        self._begun: dict[str, int] = {}
        self._found: dict[str, AdaptedInFlight] = {}

    def measured_until(self, request: ScheduleRequest, batch: int) -> int | None:
        """Return the batch before which something is to be chosen; None where that has been done.

        Args:
            request: that asks for it.
            batch: that comes next. A run that was left goes on measuring.
        """
        key = _key(request)
        if key in self._found:
            return None
        if not self._begun.get(key, -MEASURED) <= batch < self._begun.get(key, -MEASURED) + MEASURED:
            self._begun[key] = batch
        return self._begun[key] + MEASURED

    def settle(self, request: ScheduleRequest, found: AdaptedInFlight) -> None:
        """Keep what has been found."""
        self._found[_key(request)] = found

    def of(self, request: ScheduleRequest | None) -> AdaptedInFlight | None:
        """Return what has been found for a request; None if nothing has."""
        return None if request is None else self._found.get(_key(request))

    def state(self) -> dict[str, Any]:
        """Return everything as plain values, for snapshots."""
        found = {key: {"found": each.state()} for key, each in self._found.items()}
        return {key: {"begun": begun, **found.get(key, {})} for key, begun in self._begun.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what a snapshot has; what it does not know stays."""
        for key, entry in state.items():
            self._begun[key] = entry["begun"]
            if "found" in entry:
                self._found[key] = AdaptedInFlight.of_state(entry["found"])


def _key(request: ScheduleRequest) -> str:
    """The request in one word, without the window: that is chosen, too, or the same."""
    parts = request.method, request.order, request.rule, request.stages, request.microbatches
    options = {key: value for key, value in sorted(request.options.items()) if key != "in_flight"}
    more = [f"{key}={value}" for key, value in options.items()]
    return "/".join(str(part) for part in (*parts, request.options["in_flight"], *more))
