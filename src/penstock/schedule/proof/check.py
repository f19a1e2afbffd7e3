"""The proof of a schedule, before anything runs.

`check` shows three things: every batch gets every pass exactly once (coverage); no rank waits forever on the machine
model of `penstock.schedule.lowering.lower`; and every pass reads the version its rule names, while it exists and in a
buffer of its own.

The second and third are proven separately (`prove_progress`, `penstock.schedule.proof.versions`),
because the versions of a stage depend only on the order of its rank's program. Both hold for spans of any length
(`penstock.schedule.proof.induction`).
"""

from __future__ import annotations

from penstock.errors import DeadlockError, ScheduleError
from penstock.gc_pause import no_collection
from penstock.schedule.array_schedules.array_coverage import is_complete
from penstock.schedule.array_schedules.array_lowering import ArrayLowering
from penstock.schedule.array_schedules.array_peak_activations import most_held_in_arrays
from penstock.schedule.array_schedules.array_send_windows import lower_arrays_freely, nobody_waits_for_ever
from penstock.schedule.array_schedules.representative_microbatches import representatives
from penstock.schedule.compiled.collective_events import NotCompiledError
from penstock.schedule.ir.arrays import ArraySchedule
from penstock.schedule.ir.schedule import Payload, Schedule
from penstock.schedule.ir.sharding import Level
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.lowering.lower import lower
from penstock.schedule.lowering.send_window_search import lower_freely
from penstock.schedule.machine.instructions import Lowered
from penstock.schedule.machine.play import Machine
from penstock.schedule.proof.activations import MicrobatchCount
from penstock.schedule.proof.coverage import check_coverage
from penstock.schedule.proof.induction import first_repeat, transient_of
from penstock.schedule.proof.proof import Proof
from penstock.schedule.proof.unsharded_peaks import RankShards, shard_facts
from penstock.schedule.proof.versions import prove_versions


@no_collection
def check(schedule: Schedule, lookahead: int | None = None, window: int | None = None) -> Proof:
    """Prove a schedule.

    Args:
        schedule: what to prove.
        lookahead: actions by which a RECV may be posted ahead; as many as the window if None.
        window: outstanding messages per lane and side; as the schedule says if None. Where it does not, it is the least
            that costs no time in units of a forward (`penstock.schedule.lowering.send_window_search`).

    Raises:
        ScheduleError: the schedule is wrong; the message names the action and the reason.
    """
    if schedule.rule not in RULES:
        raise ScheduleError(f"{schedule.name}: unknown rule {schedule.rule!r}; known: {', '.join(RULES)}")
    in_arrays = _check_arrays(schedule, lookahead, window) if isinstance(schedule, ArraySchedule) else None
    if in_arrays is not None:
        return in_arrays
    check_coverage(schedule)
    versions, shards = None, tuple[RankShards, ...]()
    if schedule.sharding.level is not Level.NONE:  # first: a missing REDUCE would be found as a wait for room
        versions = prove_versions(schedule)
        shards = shard_facts(schedule, versions.steady_from + 2)
    chosen = schedule.window if window is None else window
    try:
        lowered = lower(schedule, lookahead, chosen) if chosen is not None else lower_freely(schedule)
        if lookahead is not None and chosen is None:
            lowered = lower(schedule, lookahead, lowered.window)
        if chosen is not None or lookahead is not None or not ends_with_batches(lowered):
            prove_progress(lowered)  # else two batches have been played in search of the window, and nobody waited
    except ScheduleError as error:
        raise error if chosen is None else _with_more_room(schedule, chosen, error) from None
    return Proof(lowered, *(versions or prove_versions(schedule)), shards)


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
        versions = prove_versions(few)
        lowering = ArrayLowering(schedule)
        lowered = lower_arrays_freely(lowering) if chosen is None else lowering.at(chosen, lookahead)
        if lookahead is not None and chosen is None:
            lowered = lowering.at(lowered.window, lookahead)
        played = (
            chosen is None and lookahead is None and not any(p.epilogue for p in few.programs)
        )  # two batches, in search of the window
        if not played and not nobody_waits_for_ever(lowered, transient_of(few)):
            return None
    except (NotCompiledError, ScheduleError):
        return None
    held = most_held_in_arrays(schedule, versions.steady_from + 2)
    return Proof(lowered, versions.stages, tuple(map(MicrobatchCount, held)), versions.steady_from)


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
        prove_progress(lowered)
    except ScheduleError:
        return error
    return too_narrow(schedule.name, window, lowered.window, error) if lowered.window > window else error


# The proof of progress: no rank waits for ever on the machine model, in a span of any length.
#
# Where versions are provisional, both outcomes of a VALIDATE are played. They leave the same messages in transit, so
# that what holds for each outcome holds for any sequence of them.


def prove_progress(lowered: Lowered) -> None:
    """Play the messages of a schedule.

    Raises:
        ScheduleError: a rank waits for ever in a span of some length.
    """
    machine = Machine(lowered)
    machine.play_period(-1, more=True)
    if ends_with_batches(lowered):
        _drain(machine, 0)
        return
    rejects = any(program.rejected for program in lowered.programs)

    def play(t: int) -> object:
        _drain(machine.copy(), t)
        other = machine.copy() if rejects else None
        machine.play_period(t, more=True)
        state = machine.state(t + 1)
        if other is not None:
            _prove_rejection(other, t, state)
        return state

    first_repeat(lowered.schedule, machine.state(0), play, "set of messages in transit")


def ends_with_batches(lowered: Lowered) -> bool:
    """Whether a batch is played like the one before it, so that one tells of all."""
    # No message crosses a border then, and RECVs that are posted early cannot block but where activations are parked.
    parks = any(lane.payload is Payload.PARKED for lane in lowered.lanes)
    return not parks and not any(program.epilogue for program in lowered.programs)


def _drain(machine: Machine, t: int, rejected: bool = False) -> None:
    """Play the last batch of a span, and its epilogue."""
    machine.play_period(t, more=False, rejected=rejected)
    machine.play_epilogue(t + 1)


def _prove_rejection(machine: Machine, t: int, accepted: object) -> None:
    """Prove that no rank waits for ever after a rejection, and that it leaves the same state as an acceptance."""
    _drain(machine.copy(), t, rejected=True)
    machine.play_period(t, more=True, rejected=True)
    if machine.state(t + 1) != accepted:
        name = machine.lowered.schedule.name
        raise ScheduleError(
            f"{name}: the messages in transit after a rejected version differ from those after an accepted one"
        )
