"""The proof of progress: no rank waits for ever on the machine model, in a span of any length.

Where versions are provisional, both outcomes of a VALIDATE are played. They leave the same messages in transit, so that
what holds for each outcome holds for any sequence of them.
"""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.schedule.ir.schedule import Payload
from penstock.schedule.machine.instructions import Lowered
from penstock.schedule.machine.play import Machine
from penstock.schedule.proof.induction import first_repeat


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
