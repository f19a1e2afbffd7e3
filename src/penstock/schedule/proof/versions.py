"""The proof of versions: every pass reads the version its rule names, while it exists and in a buffer of its own.

Where versions are provisional, both outcomes of a VALIDATE are played.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

from penstock.errors import ScheduleError
from penstock.schedule.ir.absolute_actions import existing, since
from penstock.schedule.ir.schedule import Action, Op, Program, Schedule, Stage, split_fused
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.proof.activations import Activations
from penstock.schedule.proof.induction import first_repeat
from penstock.schedule.proof.proof import StageFacts
from penstock.schedule.stage_state.stage_constants import stage_specs
from penstock.schedule.stage_state.stage_state import Delay, StageState
from penstock.schedule.transforms.post_validation import redone


class ProvenVersions(NamedTuple):
    """What the proof of versions has derived.

    Attributes:
        stages: facts per stage.
        activations: per rank, the most activations in flight in a span of any length.
        steady_from: the first batch from which on everything repeats.
    """

    stages: dict[Stage, StageFacts]
    activations: tuple[Fraction, ...]
    steady_from: int


def prove_versions(schedule: Schedule) -> ProvenVersions:
    """Play the weights of every stage.

    Raises:
        ScheduleError: a pass reads another version than its rule names, or something is left after a drain.
    """
    books = _Books(schedule, older=0)
    steady_from = books.prove()
    for kept in range(1, RULES[schedule.rule].delay + 1):
        other = _Books(schedule, older=-kept)  # a span that continues an earlier one
        other.prove()
        books.absorb(other)
    if RULES[schedule.rule].provisional:
        other = _Books(schedule, older=0, rejecting=True)
        other.prove()
        books.absorb(other)
    return ProvenVersions(books.facts(), books.activations.peaks(), steady_from)


class _Books:
    """The state of every stage, and the activations on every rank, while a schedule is played.

    Args:
        schedule: the schedule.
        older: the number of the version that represents everything before the span.
        rejecting: reject every provisional version.
    """

    def __init__(self, schedule: Schedule, older: int, rejecting: bool = False) -> None:
        self.schedule = schedule = redone(schedule)[0] if rejecting else schedule
        self.programs = [Program(*(tuple(map(_always, part)) for part in p)) for p in schedule.programs]
        specs = stage_specs(schedule, older)
        self.states = {spec.stage: StageState(spec, rejecting=rejecting) for spec in specs}
        self.activations = Activations(schedule)
        # The state of a stage depends only on its own passes and on the versions with which microbatches were admitted,
        # so the stages are played one after the other, those that admit first.
        self.order = sorted((s.stage for s in specs), key=lambda stage: not self.states[stage].spec.admits)
        self.passes = {
            stage: tuple(self._of_stage(p, stage) for p in self.programs[stage.rank]) for stage in self.order
        }
        self.admitted: dict[int, int] = {}
        self.runs = len({s.stage.index for s in specs if s.share}) * schedule.slices  # forwards of a microbatch
        self.run: dict[int, int] = {}  # admitted microbatch -> forwards that it has run

    def _of_stage(self, actions: Iterable[Action], stage: Stage) -> list[tuple[int, Action]]:
        """Return the actions of a stage, with the first batch in which each action exists."""
        mine = [p for p in split_fused(actions) if p.stage == stage]
        return [(since(p.unit, self.schedule.microbatches), p) for p in mine]

    def prove(self) -> int:
        """Play until the state at a batch border repeats, and return the batch from which it does."""
        return first_repeat(self.schedule, self._state(0), self._play_batch, "state")

    def _play_batch(self, t: int) -> object:
        """Play a batch, and a copy to the end of a span that ends with it; return the state at the border behind it."""
        self._play(t, epilogue=False)
        twin = self._twin()
        twin.drain(t + 1)
        self.absorb(twin)
        return self._state(t + 1)

    def _play(self, t: int, epilogue: bool) -> None:
        m = self.schedule.microbatches
        for stage in self.order:
            state = self.states[stage]
            for begins, action in self.passes[stage][epilogue]:
                if t >= begins and (t or action.op is not Op.REDO):  # no version is validated in the first period
                    state.apply(action, t, self.admitted)
                    if self.admitted and action.op is Op.F:
                        self._forget(range(action.unit.first + t * m, action.unit.first + t * m + action.unit.count))
        for rank, program in enumerate(self.programs):
            for action in program[epilogue]:
                found = existing(action, t, m)
                if found is not None:
                    taken, freed = self.activations.change(found)
                    self.activations.add(rank, taken)
                    self.activations.add(rank, freed)

    def _forget(self, microbatches: Iterable[int]) -> None:
        """Drop the admissions of microbatches that have run all their forwards, as only forwards use them."""
        for k in self.admitted.keys() & set(microbatches):
            self.run[k] = self.run.get(k, 0) + 1
            if self.run[k] == self.runs:
                del self.admitted[k], self.run[k]

    def _state(self, t: int) -> object:
        """Return the state at the border before batch t."""
        k = t * self.schedule.microbatches
        admitted = sorted((mb - k, v - t, self.run.get(mb, 0)) for mb, v in self.admitted.items())
        return [s.state(t) for s in self.states.values()], admitted

    def _twin(self) -> _Books:
        """Return an independent copy in the same state."""
        twin = copy.copy(self)
        twin.states = {stage: state.copy() for stage, state in self.states.items()}
        twin.admitted, twin.run, twin.activations = dict(self.admitted), dict(self.run), self.activations.copy()
        return twin

    def drain(self, batches: int) -> None:
        """Play the epilogue of a span of `batches` batches; raise an error if anything is left afterwards."""
        for state in self.states.values():
            state.drain(batches)
        self._play(batches, epilogue=True)
        for stage, state in self.states.items():
            left = {
                "microbatches in flight": sorted({k for k, _ in state.flights}),
                "provisional versions": sorted(state.versions.provisional),
                "forwards that read a rejected version": sorted({k for k, _ in state.flights.void}),
                "gradients of batches": sorted(state.gradients),
                "derived copies": sorted(state.copies),
                "activations of other ranks' microbatches": sorted(unit.first for _, unit in state.held),
                **state.shards.left(),
            }
            for what, items in left.items():
                if items:
                    where = f"after draining {batches} batches, rank {stage.rank}"
                    raise ScheduleError(f"{self.schedule.name}: {where} still has {what} {items}")

    def absorb(self, other: _Books) -> None:
        """Raise the peaks to those of another copy."""
        for stage, state in self.states.items():
            twin = other.states[stage]
            state.peak_versions = max(state.peak_versions, twin.peak_versions)
            state.copies.peak = max(state.copies.peak, twin.copies.peak)
            state.peak_gradients = max(state.peak_gradients, twin.peak_gradients)
            state.peak_buffers = max(state.peak_buffers, twin.peak_buffers)
            state.delay = state.delay or twin.delay
            if state.recompute_delay is None:
                state.recompute_delay = twin.recompute_delay
        self.activations.peak = [*map(max, self.activations.peak, other.activations.peak)]

    def facts(self) -> dict[Stage, StageFacts]:
        """Return what has been derived of each stage."""
        return {
            stage: StageFacts(
                state.peak_versions,
                state.copies.peak,
                state.peak_gradients,
                state.peak_buffers,
                state.delay or Delay(0.0, 0.0),
                state.recompute_delay,
            )
            for stage, state in self.states.items()
        }


def _always(action: Action) -> Action:
    """Return an AVERAGE with `every` removed: it changes no state, and must be placed correctly in every period."""
    return action._replace(unit=action.unit._replace(every=1)) if action.unit.every > 1 else action
