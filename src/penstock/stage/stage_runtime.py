"""One stage of a rank: its blocks, their weights, its passes and its updates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from penstock.partition.tied import Tie
from penstock.schedule.ir.schedule import Stage
from penstock.stage.blocks.module import StageModule
from penstock.stage.blocks.precision_casts import cast
from penstock.stage.checks.released_weight_placeholders import absent
from penstock.stage.stage_passes import StagePasses
from penstock.stage.trained_stage_weights import TrainedWeights
from penstock.stage.untrained_stage_weights import StageWeights
from penstock.weights.decision import Decision
from penstock.weights.sharded_store import allocated


@dataclass(repr=False)
class StageRuntime:
    """One stage of a rank, from when it is built to the end of its pipeline.

    Attributes:
        module: its blocks.
        weights: their versions and gradients, and what updates them.
        passes: under its present schedule.
        ties: parameters that other stages share.
        place: of the stages that hold the same weights, in this pipeline and in parallel ones, the first (0), the
            second, and so on.
        absent: what modules have while weights are not whole; None where they always are.
        frozen_sums: of its frozen parameters, when a snapshot was last taken (`penstock.weights.memory.tensor_sums`).
    """

    key: Stage
    module: StageModule
    weights: StageWeights
    passes: StagePasses
    ties: Sequence[Tie]
    place: int = 0
    absent: Mapping[str, Tensor] | None = None
    frozen_sums: Mapping[str, int] | None = None

    def __repr__(self) -> str:
        """Return where it is, and what it holds."""
        numbers = sum(parameter.numel() for parameter in self.module.tensors.trained.values())
        return f"<{self.module.where}: blocks {', '.join(self.module.blocks)}; {numbers} trained parameters>"

    # --- updates ----------------------------------------------------------------------------------------------------

    def try_step(self, batch: int, factor: float) -> None:
        """Create version batch + 1, but so that it can be made again."""
        self.passes.graphs.accept_drafts()
        self.weights.try_step(batch, factor)

    def settle_step(self, batch: int, decision: Decision) -> None:
        """Settle a provisional update; if it is rejected, make it again and drop the forwards that have read it."""
        if decision.again:
            self.passes.discard_forwards(batch + 1)
        self.passes.graphs.accept_drafts()
        self.weights.settle_step(decision)

    # --- weights as rows --------------------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """Begin a span of training: where weights are rows, nothing else is left of them."""
        if not self.weights.keeps_rows:
            return
        if self.absent is None:
            self.absent = absent(self.weights.newest_tensors(), self.module.where)
        self.module.tensors.hide()
        self.module.tensors.bind(self.absent)
        self.weights.begin_run()

    def retain(self, alive: Iterable[int]) -> None:
        """Free all versions of trained weights but some; modules let go of one whose memory is given back."""
        assert isinstance(self.weights, TrainedWeights)
        store, tensors = self.weights.store, self.module.tensors
        bound = next((each for each in store.versions.values() if each.leaves is tensors.bound), None)
        store.retain(alive)
        if self.absent is not None and bound is not None and not allocated(bound):
            tensors.bind(self.absent)

    def release(self, version: int) -> None:
        """Give the memory of a gathered version back, where weights are shards."""
        self.weights.release(version)
        if self.absent is not None:
            self.module.tensors.bind(self.absent)

    # --- between passes ---------------------------------------------------------------------------------------------

    def evaluated_leaves(self, averaged: bool) -> dict[str, Tensor] | None:
        """Return the weights that evaluations read: averaged or common to all pipelines; None for the newest."""
        model = self.weights.common_model(averaged)
        if model is None:
            return None
        low, full = self.module.precision, self.module.tensors.full
        return {name: cast(view, None if name in full else low) for name, view in model.views.items()}

    def adopt(self) -> None:
        """Take over parameters that were replaced on the modules, or given other memory, between two runs.

        Raises:
            ConfigError: modules have changed so that the optimizer could not follow.
        """
        self.module.tensors.adopt(self.weights.newest_tensors())

    def refresh(self) -> None:
        """Adopt what was written into the modules' parameters between two runs.

        Raises:
            ConfigError: modules have changed so that the optimizer could not follow.
        """
        self.adopt()
        self.weights.refresh()
        self.module.refresh()
        self.passes.graphs.refresh()

    def restore(self) -> None:
        """Give the modules their own parameters back, over the newest weights."""
        self.module.tensors.restore(self.weights.newest_tensors())
