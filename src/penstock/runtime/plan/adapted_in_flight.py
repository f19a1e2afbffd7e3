"""The microbatches in flight that a run has chosen for its links, and what they follow from."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from penstock.errors import ScheduleError
from penstock.runtime.plan.pass_and_message_times import Measured
from penstock.runtime.plan.plan import PipelinePlan
from penstock.schedule.build import ScheduleRequest
from penstock.schedule.in_flight_choice import FILLS, InFlightChoice, asked_order, interleaves, is_tried, splits
from penstock.schedule.ir.in_flight_option import write_in_flight
from penstock.schedule.proof.proof import Proof
from penstock.simulate.auto_in_flight import as_allowed
from penstock.simulate.auto_of_chunks import (
    choose_by_trial,
    choose_interleaved,
    chunks_of,
    costs_of_stages,
)
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
        """Microbatches in flight, as the option of the order counts them (`InFlightChoice`)."""
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
            "each": list(self.measured.each),
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> AdaptedInFlight:
        """Read what `state` has returned."""
        taken, asked, plain = (tuple(map(int, state[key])) for key in ("taken", "asked", "plain"))
        held = tuple(map(int, state.get("held", ())))
        choice = InFlightChoice(taken, asked, plain, tuple(state["reasons"]), state["later"], state.get("group"), held)
        times = tuple(RankTimes(*each) for each in state["times"])
        hops = tuple((there, back) for there, back in state["hops"])
        around, each = tuple(state.get("around", (0.0, 0.0))), tuple(state.get("each", ()))
        measured = Measured(times, hops, tuple(state["nbytes"]), around, each)
        return cls(state["from_batch"], choice, state["window"], measured)


def adapt(plan: PipelinePlan, measured: Measured, batch: int) -> AdaptedInFlight:
    """Choose the microbatches in flight, and the window with which messages cost no time.

    Where links ask for more microbatches than usual, the window is one more than the simulator finds. Gloo sends a
    message once it has heard that its RECV is posted, and on a busy link that news waits behind the messages that
    travel back, of which the simulator knows nothing.

    Args:
        plan: under which it was measured, which asks for `auto`.
        measured: on all ranks.
        batch: the first one that is trained so.
    """
    assert plan.auto is not None
    request, limit = replace(plan.auto, window=None), plan.options.microbatches.in_flight_bytes
    choice = _choose(request, measured, limit)
    simulated = _simulated(request, choice, measured)
    if choice.group is not None:
        plain = _simulated(request, _plain(request, choice), measured)
        if simulated.bubble.makespan > plain.bubble.makespan:
            choice = _plain(request, choice, "a batch has too few microbatches for the larger groups to pay")
            simulated = plain
    window = plan.auto.window
    if window is None:
        assert isinstance(simulated.window, int)
        window = simulated.window + (choice.taken != choice.plain)
    try:
        proof = plan.adapted(choice, window).prove().proof
    except ScheduleError as error:  # with the window that is given, or with what options add to the schedule
        why = str(error).partition("\n")[0]
        choice = _plain(request, choice, f"they do not go with the other options ({why})")
        proof, window = plan.proof, plan.proof.lowered.window
    if choice.held:
        choice = replace(choice, held=tuple(map(math.ceil, proof.activations)))
    return AdaptedInFlight(batch, choice, window, measured)


def _choose(request: ScheduleRequest, measured: Measured, limit: float | None) -> InFlightChoice:
    """The microbatches in flight that links ask for, as far as batch, memory (`limit`, in bytes) and delay allow."""
    chunks = chunks_of(request) if interleaves(request) else 1
    most = None if limit is None else _most(request.prove(), measured, limit, chunks)
    if interleaves(request):
        return choose_interleaved(request, measured.times, measured.message, most=most, leave=_LEAVE)
    if is_tried(request):
        return choose_by_trial(request, measured.times, measured.message, most=most, leave=_LEAVE)
    least = partial(least_in_flight, measured.times, measured.hops, leave=_LEAVE, fills=asked_order(request) == FILLS)
    return as_allowed(request, lambda limits: least(most=limits), most)


def _plain(request: ScheduleRequest, choice: InFlightChoice, reason: str | None = None) -> InFlightChoice:
    """What the order has where messages take no time, and why."""
    reasons = choice.reasons if reason is None else (*choice.reasons, reason)
    group = None if choice.group is None else request.options.get("group") or request.stages
    return replace(choice, taken=choice.plain, reasons=reasons, later="", group=group)


def _simulated(request: ScheduleRequest, choice: InFlightChoice, measured: Measured) -> Simulation:
    """A batch with these numbers and times; its window is the least that costs no time."""
    proof = choice.applied(request).prove()
    costs = costs_of_stages(proof.schedule, measured.times, measured.message, halves=splits(request))
    return simulate_schedule(proof, costs)


def _most(plain: Proof, measured: Measured, limit: float, chunks: int) -> list[int]:
    """The passes whose activations fit on each rank, each of which takes a microbatch through one of its chunks.

    That is as many as there were when the most was held, and as many more as the rest of the memory has room for.
    """
    found = []
    for count, held, each in zip(plain.activations, measured.nbytes, measured.each, strict=True):
        more = (min(limit, sys.maxsize) - held) * chunks / each if each else sys.maxsize
        found.append(max(math.floor(float(count * chunks) + more + 1e-9), 0))
    return found


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


class Adaptations:
    """What a pipeline has found for each of its schedules that ask for it, and from where on it measures others.

    Args:
        limit: in bytes, under which that holds; another one asks for another choice.
    """

    def __init__(self, limit: float | None = None) -> None:
        self._limit, self._told = limit, False
        self._begun: dict[str, int] = {}
        self._found: dict[str, AdaptedInFlight] = {}

    def measured_until(self, request: ScheduleRequest, batch: int) -> int | None:
        """Return the batch before which something is to be chosen; None where that has been done.

        Args:
            request: that asks for it.
            batch: that comes next. A run that was left goes on measuring, and one that has ended there chooses when the
                next one begins.
        """
        key = self._key(request)
        if key in self._found:
            return None
        if not 0 <= batch - self._begun.get(key, batch + 1) <= MEASURED + 1:
            self._begun[key] = batch
        return max(self._begun[key] + MEASURED, batch)

    def begin_anew(self, request: ScheduleRequest, batch: int) -> None:
        """Measure from this batch on, as nothing is known of those before."""
        self._begun[self._key(request)] = batch

    def first_told(self) -> bool:
        """Whether this is the first time that there is nothing to measure."""
        told, self._told = self._told, True
        return not told

    def settle(self, request: ScheduleRequest, found: AdaptedInFlight) -> None:
        """Keep what has been found."""
        self._found[self._key(request)] = found

    def of(self, request: ScheduleRequest | None) -> AdaptedInFlight | None:
        """Return what has been found for a request; None if nothing has."""
        return None if request is None else self._found.get(self._key(request))

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

    def _key(self, request: ScheduleRequest) -> str:
        """The request in one word, without the window: that is chosen, too, or the same."""
        parts = request.method, request.order, request.rule, request.stages, request.microbatches
        options = {key: value for key, value in sorted(request.options.items()) if key != "in_flight"}
        more = [f"{key}={value}" for key, value in options.items()]
        limit = [] if self._limit is None else [f"bytes={self._limit:g}"]
        return "/".join(str(part) for part in (*parts, request.options["in_flight"], *more, *limit))
