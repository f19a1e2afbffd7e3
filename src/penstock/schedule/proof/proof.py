"""What is known of a schedule once it has been proven."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from penstock.schedule.ir.schedule import Schedule, Stage
from penstock.schedule.machine.evaluation_without_draining_check import border_fault
from penstock.schedule.machine.instructions import Lowered
from penstock.schedule.proof.data_read_ahead import Reading, reading_of
from penstock.schedule.proof.unsharded_peaks import RankShards
from penstock.schedule.stage_state.stage_state import Delay


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

    @cached_property
    def border_fault(self) -> str | None:
        """Why nothing may be run at the borders of batches; None if it may."""
        return border_fault(self.lowered)

    @cached_property
    def reading(self) -> Reading:
        """How far ranks read ahead."""
        return reading_of(self.schedule)

    def versions_on(self, rank: int) -> int:
        """Return the most weight versions that a stage of this rank has alive at once."""
        return max((self.stages[n].versions for n in self.schedule.on_rank(rank)), default=0)
