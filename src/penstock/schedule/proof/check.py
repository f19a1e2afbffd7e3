"""The proof of a schedule, before anything runs.

`check` shows three things: every batch gets every pass exactly once (coverage); no rank waits forever on the machine
model of `penstock.schedule.machine.lower`; and every pass reads the version its rule names, while it exists and in a
buffer of its own.

The second and third hold for spans of any length by induction. The schedule is played batch by batch; the messages,
microbatches, versions and gradients that exist at a batch border, numbered relative to the border's batch, are its
state. All ranks run the same period again, so once a state repeats, everything after it repeats, too. (This requires
that every action exists and that no version or unit from before the span is used, so the first periods do not count.)
From every border up to there a copy of the state drains the pipeline and must leave nothing behind: that covers spans
of every length. Messages and versions are played separately, because the versions of a stage depend only on the order
of its rank's program.

Where versions are provisional, both outcomes of a VALIDATE are played. They leave the same messages in transit, so that
what holds for each outcome holds for any sequence of them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from penstock.errors import DeadlockError, ScheduleError
from penstock.gc_pause import no_collection
from penstock.schedule.compiled.array_coverage import is_complete
from penstock.schedule.compiled.array_lowering import ArrayLowering
from penstock.schedule.compiled.array_peak_activations import most_held_in_arrays
from penstock.schedule.compiled.array_send_windows import lower_arrays_freely, nobody_waits_for_ever
from penstock.schedule.compiled.collective_events import NotCompiledError
from penstock.schedule.compiled.representative_microbatches import representatives
from penstock.schedule.ir.absolute_actions import existing, since
from penstock.schedule.ir.arrays import ArraySchedule
from penstock.schedule.ir.schedule import Action, Op, Payload, Program, Schedule, Stage, split_fused
from penstock.schedule.ir.sharding import Level
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.machine.evaluation_border_check import border_fault
from penstock.schedule.machine.instructions import Lowered
from penstock.schedule.machine.lower import lower
from penstock.schedule.machine.play import Machine
from penstock.schedule.machine.send_window_search import lower_freely
from penstock.schedule.proof.activations import Activations, MicrobatchCount
from penstock.schedule.proof.coverage import check_coverage
from penstock.schedule.proof.data_read_ahead import Reading, reading_of
from penstock.schedule.proof.stage_constants import stage_specs
from penstock.schedule.proof.stage_state import Delay, StageState
from penstock.schedule.proof.unsharded_peaks import RankShards, shard_facts
from penstock.schedule.transforms.post_validation import redone

_LIMIT = 8
"""Batches beyond twice the transient by which every state must have repeated."""


@dataclass(frozen=True)
class StageFacts:
    """The facts that the proof derived about a stage.

    Attributes:
        versions: the most weight versions alive at once.
        copies: the most derived copies alive at once.
        gradients: the most gradients accumulating or waiting at once.
        buffers: parameter-sized buffers needed for versions and gradients together.
        delay: updates between the version read and the version updated, mean over a batch, in the steady state.
        recompute_delay: the same for recomputed forwards; None where there are none. So between a forward and its
            recompute lie `delay.forward - recompute_delay` updates, and from there to its backward `recompute_delay -
            delay.backward`.
    """

    versions: int
    copies: int
    gradients: int
    buffers: int
    delay: Delay
    recompute_delay: float | None = None


@dataclass(frozen=True)
class Proof:
    """A schedule that has been checked, with the facts that were derived on the way.

    It holds for the window of `lowered`, and for every larger one, too: more room, and RECVs that are posted earlier,
    only end waits sooner, so where nobody waits for ever nobody does with more.

    Attributes:
        lowered: the schedule with its messages, and the window with which it was proven, which is also that of a run.
        stages: facts per stage.
        activations: per rank, the most activations in flight in a span of any length, in units of one microbatch on the
            rank's whole share.
        steady_from: the first batch from which on everything repeats.
        shards: per rank, what it gathers and reduces, and has whole at once; empty where nothing is sharded.
    """

    lowered: Lowered
    stages: dict[Stage, StageFacts]
    activations: tuple[Fraction, ...]
    steady_from: int
    shards: tuple[RankShards, ...] = ()

    def __repr__(self) -> str:
        """Return the schedule that it is about."""
        return f"<{type(self).__name__} of {self.schedule!r}>"

    @property
    def schedule(self) -> Schedule:
        """The schedule that was checked."""
        return self.lowered.schedule

    def border_fault(self) -> str | None:
        """Say why nothing may be run at the borders of batches; None if it may."""
        return border_fault(self.lowered)

    def reading(self) -> Reading:
        """Return how far ranks read ahead."""
        return reading_of(self.schedule)

    def versions_on(self, rank: int) -> int:
        """Return the most weight versions that a stage of this rank has alive at once."""
        return max((self.stages[n].versions for n in self.schedule.on_rank(rank)), default=0)


@no_collection
def check(schedule: Schedule, lookahead: int | None = None, window: int | None = None) -> Proof:
    """Prove a schedule.

    Args:
        schedule: what to prove.
        lookahead: actions by which a RECV may be posted ahead; as many as the window if None.
        window: outstanding messages per lane and side; as the schedule says if None. Where it does not, it is the least
            that costs no time in units of a forward (`penstock.schedule.machine.send_window_search`).

    Raises:
        ScheduleError: the schedule is wrong; the message names the action and the reason.
    """
    if schedule.rule not in RULES:
        raise ScheduleError(f"{schedule.name}: unknown rule {schedule.rule!r}; known: {', '.join(RULES)}")
    in_arrays = _check_arrays(schedule, lookahead, window) if isinstance(schedule, ArraySchedule) else None
    if in_arrays is not None:
        return in_arrays
    check_coverage(schedule)
    sharded = schedule.sharding.level is not Level.NONE
    known = _prove_whole(schedule) if sharded else None  # first: a missing REDUCE would be found as a wait for room
    chosen = schedule.window if window is None else window
    try:
        lowered = lower(schedule, lookahead, chosen) if chosen is not None else lower_freely(schedule)
        if lookahead is not None and chosen is None:
            lowered = lower(schedule, lookahead, lowered.window)
        if chosen is not None or lookahead is not None or not _ends_with_batches(lowered):
            _prove_progress(lowered)  # else two batches have been played in search of the window, and nobody waited
    except ScheduleError as error:
        raise error if chosen is None else _with_more_room(schedule, chosen, error) from None
    (books, steady_from), shards = known or (_prove_versions(schedule), ())
    return Proof(lowered, _facts(books), books.activations.peaks(), steady_from, shards)


def _facts(books: _Books) -> dict[Stage, StageFacts]:
    return {
        stage: StageFacts(
            s.peak_versions,
            s.copies.peak,
            s.peak_gradients,
            s.peak_buffers,
            s.delay or Delay(0.0, 0.0),
            s.recompute_delay,
        )
        for stage, s in books.states.items()
    }


def _check_arrays(schedule: ArraySchedule, lookahead: int | None, window: int | None) -> Proof | None:
    """Prove a schedule of arrays without a look at each of its actions.

    Returns:
        None where that proves nothing; then the proof of all actions does, or says what is wrong.
    """
    few = representatives(schedule) if is_complete(schedule) else None
    if few is None:
        return None
    chosen = schedule.window if window is None else window
    try:
        books, steady_from = _prove_versions(few)
        lowered = lower_arrays_freely(schedule) if chosen is None else ArrayLowering(schedule).at(chosen, lookahead)
        if lookahead is not None and chosen is None:
            lowered = ArrayLowering(schedule).at(lowered.window, lookahead)
        played = chosen is None and lookahead is None and not books.drains  # two batches, in search of the window
        if not played and not nobody_waits_for_ever(lowered, _transient(few)):
            return None
    except (NotCompiledError, ScheduleError):
        return None
    held = most_held_in_arrays(schedule, steady_from + 2)
    return Proof(lowered, _facts(books), tuple(map(MicrobatchCount, held)), steady_from)


def too_narrow(name: str, window: int, enough: int, error: ScheduleError) -> ScheduleError:
    """Return what to say of a schedule that cannot run with a window, but with another one.

    Args:
        name: of the schedule.
        window: with which it cannot run.
        enough: with which it has been proven.
        error: why it cannot.
    """
    why = error.waits if isinstance(error, DeadlockError) else str(error)  # another order is not the remedy here
    hint = f"\nIt is proven with a window of {enough}; set it to {enough} or more" if enough > window else ""
    return ScheduleError(f"{name} cannot run with a window of {window}: {why}{hint}")


def _with_more_room(schedule: Schedule, window: int, error: ScheduleError) -> ScheduleError:
    """Return what to say of a schedule that cannot run with a window: whether it can with another one."""
    try:
        lowered = lower_freely(schedule)
        _prove_progress(lowered)
    except ScheduleError:
        return error
    return too_narrow(schedule.name, window, lowered.window, error) if lowered.window > window else error


@no_collection
def check_versions(schedule: Schedule) -> None:
    """Prove a part of what `check` does, in a fraction of its time: the versions that passes read, and the buffers.

    Raises:
        ScheduleError: that part is wrong.
    """
    check_coverage(schedule)
    _prove_versions(schedule)


def _prove_versions(schedule: Schedule) -> tuple[_Books, int]:
    """Play the weights of every stage; return their state and the first batch from which on everything repeats."""
    books = _Books(schedule, older=0)
    steady_from = books.prove()
    if RULES[schedule.rule].bases == 2:
        other = _Books(schedule, older=-1)  # a span that continues an earlier one
        other.prove()
        books.absorb(other)
    if RULES[schedule.rule].provisional:
        other = _Books(schedule, older=0, rejecting=True)
        other.prove()
        books.absorb(other)
    return books, steady_from


def _prove_whole(schedule: Schedule) -> tuple[tuple[_Books, int], tuple[RankShards, ...]]:
    """Play the weights of a sharded schedule, and derive what each rank has whole at once."""
    books, steady_from = _prove_versions(schedule)
    return (books, steady_from), shard_facts(schedule, steady_from + 2)


def _transient(schedule: Schedule) -> int:
    """Return the first batch in whose period no unit, and no version that is read, lies before the span."""
    return max(spec.transient for spec in stage_specs(schedule, older=0))


def _prove_progress(lowered: Lowered) -> None:
    """Play the messages: raise an error if a rank waits forever in a span of some length."""
    machine, transient = Machine(lowered), _transient(lowered.schedule)
    machine.play_period(-1, more=True)
    before = machine.state(0)
    for t in range(_LIMIT + 2 * transient):
        twin = machine.copy()
        twin.play_period(t, more=False)
        twin.play_epilogue(t + 1)
        if _ends_with_batches(lowered):
            return
        other = machine.copy() if any(program.rejected for program in lowered.programs) else None
        machine.play_period(t, more=True)
        state = machine.state(t + 1)
        if other is not None:
            _prove_rejection(other, t, state)
        if state == before and t >= transient:
            return
        before = state
    raise ScheduleError(
        f"{lowered.schedule.name}: after {t + 1} batches the messages in transit at a batch border still change"
    )


def _ends_with_batches(lowered: Lowered) -> bool:
    """Whether a batch is played like the one before it, so that one tells of all."""
    # No message crosses a border then, and RECVs that are posted early cannot block but where activations are parked.
    parks = any(lane.payload is Payload.PARKED for lane in lowered.lanes)
    return not parks and not any(program.epilogue for program in lowered.programs)


def _prove_rejection(machine: Machine, t: int, accepted: object) -> None:
    """Prove that no rank waits forever after a rejection, and that it leaves the same state as an acceptance."""
    twin = machine.copy()
    twin.play_period(t, more=False, rejected=True)
    twin.play_epilogue(t + 1)
    machine.play_period(t, more=True, rejected=True)
    if machine.state(t + 1) != accepted:
        name = machine.lowered.schedule.name
        raise ScheduleError(
            f"{name}: the messages in transit after a rejected version differ from those after an accepted one"
        )


class _Books:
    """The state of every stage, and the activations on every rank, while a schedule is played.

    Args:
        schedule: the schedule.
        older: the number of the version that represents everything before the span.
        rejecting: reject every provisional version.
    """

    def __init__(self, schedule: Schedule, older: int, rejecting: bool = False) -> None:
        self.schedule = schedule = redone(schedule)[0] if rejecting else schedule
        self.drains = any(program.epilogue for program in schedule.programs)
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
        before, transient = self._state(0), _transient(self.schedule)
        for t in range(_LIMIT + 2 * transient):
            self._play(t, epilogue=False)
            twin = self._twin()
            twin.drain(t + 1)
            self.absorb(twin)
            state = self._state(t + 1)
            if state == before and t >= transient:
                return t
            before = state
        raise ScheduleError(f"{self.schedule.name}: after {t + 1} batches the state at a batch border still changes")

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
                "provisional versions": sorted(state.provisional),
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


def _always(action: Action) -> Action:
    """Return an AVERAGE with `every` removed: it changes no state, and must be placed correctly in every period."""
    return action._replace(unit=action.unit._replace(every=1)) if action.unit.every > 1 else action
