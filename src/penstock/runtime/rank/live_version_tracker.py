"""The schedule's books of one stage in a run: played until a period repeats, and then replayed.

Books (`penstock.schedule.stage_state`) depend on nothing but their own state, relative to the batch. So once the
state before a period is that before the period before, every action has the effect that it had there. The effect is
looked up from then on, as long as the actions are the same. The epilogue is played again, from that state.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.errors import ScheduleError
from penstock.schedule.ir.schedule import Action, Copy
from penstock.schedule.stage_state.stage_constants import StageSpec
from penstock.schedule.stage_state.stage_state import StageState


class Effect(NamedTuple):
    """What is alive on a stage after an action, with numbers relative to the batch of its period.

    Attributes:
        action: whose effect it is.
        versions: of the weights.
        copies: derived from them.
        rotated: whether the last update was written over its gradient, instead of over the version it started from.
    """

    action: Action
    versions: tuple[int, ...]
    copies: tuple[Copy, ...]
    rotated: bool


class StageBooks:
    """The books of one stage during a span.

    Args:
        spec: the constants of the stage.
        repeats: every period has the same actions, and none of them has an effect that is decided at work.

    Attributes:
        last: the effect of the last action.
    """

    last: Effect

    def __init__(self, spec: StageSpec, *, repeats: bool) -> None:
        self._spec, self._repeats = spec, repeats
        self._state = StageState(spec)
        self._t = self._since = -1  # of the present period, and of the one from whose beginning on effects are known
        self._border: object = None  # the state before the present period
        self._effects: list[Effect] = []  # of the actions of the present period, or of each one
        self._place, self._replays = 0, False

    @property
    def provisional(self) -> bool:
        """Whether a version is not decided on yet."""
        return bool(self._state.versions.provisional)

    def reject(self, rejected: bool) -> None:
        """Say whether the next VALIDATE rejects its version."""
        self._state.rejecting = rejected

    def apply(self, action: Action, t: int, first: int) -> Effect:
        """Play one action of the period (or epilogue) of batch t.

        Args:
            action: of this stage, with relative numbers.
            t: the batch they are relative to.
            first: its first microbatch, counted from the start of the span.

        Raises:
            ScheduleError: the action breaks the version rule or the life of a version, activation or gradient.
        """
        if t != self._t:
            self._begin(t)
        if self._replays:
            place, known = self._place, self._effects
            if place == len(known) or known[place].action is not action:
                raise ScheduleError(f"{action}: a period of {self._spec.stage.name} is not the same as the one before")
            self.last, self._place = known[place], place + 1
            return self.last
        state, reads = self._state, action.reads
        # What the first stage has read, which is on another rank: the schedule says it, and has been proven.
        state.apply(action, t, {} if reads is None else {first: max(reads.versions[0] + t, self._spec.older)})
        k = t * self._spec.microbatches
        copies = tuple([copy._replace(first=copy.first - k) for copy in state.copies])
        self.last = Effect(action, tuple([v - t for v in state.versions.alive]), copies, state.rotated)
        self._effects.append(self.last)
        return self.last

    def drain(self, batches: int) -> None:
        """Begin the epilogue of a span of `batches` batches."""
        self._end()
        if self._replays:
            self._state = self._state.shifted(batches - self._since)
        self._repeats = self._replays = False
        self._state.drain(batches)

    def _end(self) -> None:
        """Check that nothing is left of the present period."""
        if self._replays and self._place < len(self._effects):
            left = self._effects[self._place].action
            raise ScheduleError(f"{left}: a period of {self._spec.stage.name} ended without it")

    def _begin(self, t: int) -> None:
        """Begin the period of batch t."""
        self._end()
        follows, self._t, self._place = t == self._t + 1, t, 0
        if self._replays:
            return
        if self._repeats:
            border, before = self._state.state(t), self._border
            self._border = border if t >= self._spec.transient else None
            if follows and before is not None and border == before:
                self._replays, self._since = True, t
                return
        self._effects = []
