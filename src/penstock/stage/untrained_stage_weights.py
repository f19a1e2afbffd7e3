"""The weights of one stage as passes and updates ask for them; here of a stage that trains nothing."""

# ruff: noqa: ARG002 (a stage that trains nothing ignores what the other kind needs)

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from penstock.schedule.ir.schedule import Copy
from penstock.weights.decision import Decision
from penstock.weights.memory.buffers import Buffer, Handle
from penstock.weights.memory.squared_norm import Squares
from penstock.weights.replica_averaging import Agreement
from penstock.weights.wave_synchronous_updates import WaveWeights


class StageWeights:
    """The weights of a stage that trains nothing: one version, no gradients, and updates that do nothing.

    `TrainedWeights` are those of a stage that trains parameters. Batches and versions are counted from the start of
    training; version t + 1 is made by the update with the gradient of batch t.

    Attributes:
        agreement: what becomes of the weights when parallel pipelines meet; None where they hold the same.
    """

    agreement: Agreement | WaveWeights | None = None

    # --- reading ----------------------------------------------------------------------------------------------------

    def handle(self, version: int | None = None) -> Handle | None:
        """Return a handle to read a version, the newest if None; None where there is nothing to bind."""
        return None

    def newest_tensors(self) -> dict[str, Tensor]:
        """Return the newest value of every trained parameter."""
        return {}

    def common_model(self, averaged: bool) -> Buffer | None:
        """Return what evaluations read instead of the newest version: an average, or a model that pipelines share."""
        return None

    def presented(self, averaged: bool) -> Mapping[str, Tensor]:
        """Return what is shown as the stage's parameters instead of the newest version, by name."""
        return {}

    def predict(self, copy: Copy, versions: tuple[int, ...], batch: int, scale: float) -> None:
        """Create a derived copy of the newest version, or of it and the one that a forward read.

        Args:
            copy: its name.
            versions: what it is made of, the newest last.
            batch: of the microbatch that it is for.
            scale: S of the batch whose gradient the next update is made of: all batches before are decided.
        """

    def not_finite(self) -> list[str]:
        """Return which of the newest weights are not finite, and whether the optimizer state is not."""
        return []

    # --- gradients --------------------------------------------------------------------------------------------------

    def gradient(self, batch: int) -> list[Tensor]:
        """Return the accumulated gradient of a batch as flat tensors."""
        return []

    def gradients_of(self, batch: int, names: Sequence[str]) -> list[Tensor]:
        """Return the gradients of some parameters, as far as their sums over pipelines are here."""
        return []

    def gradient_squares(self, batch: int) -> Squares:
        """Return the squared norm of the gradient that is here, without parameters that count with another stage."""
        return Squares()

    @property
    def counted(self) -> int:
        """The numbers whose gradients count in the norm with this stage."""
        return 0

    def all_squares(self, batch: int) -> float:
        """Return the squared norm of the whole gradient."""
        return 0.0

    def gradient_shards(self, batch: int) -> list[list[Tensor]]:
        """Return the gradient of a batch, by the pipeline that owns a shard of its sum."""
        return []

    def settle_sum(self, batch: int) -> None:
        """Go on with a gradient whose shard of the sum is here."""

    # --- updates ----------------------------------------------------------------------------------------------------

    def swap(self, *, away: bool) -> None:
        """Begin to bring the optimizer state from the host's memory, or to move it there."""

    def settle_swap(self) -> Callable[[], None] | None:
        """Return what has the device wait for a state that is on its way; None where there is none."""
        return None

    def step(self, batch: int, factor: float, keeps_old: bool) -> None:
        """Create version batch + 1: the optimizer update.

        Args:
            batch: whose gradient is complete.
            factor: what the accumulated gradient is multiplied by first; zero skips the update.
            keeps_old: version `batch` stays readable, so the new one is written over the gradient.
        """

    def version_shards(self, version: int) -> list[list[Tensor]] | None:
        """Return the memory of a version of which only the own shard is there, by owner; None if it is whole."""
        return []

    def complete(self, version: int) -> None:
        """Go on with a version whose other shards have come."""

    def release(self, version: int) -> None:
        """Give the memory of a gathered version back, where weights are shards."""

    def is_whole(self, version: int) -> bool:
        """Return whether the version that an evaluation reads is whole, or is being gathered."""
        return True

    def evaluation_shards(self, version: int) -> list[list[Tensor]] | None:
        """Allocate what evaluations read, where it is not whole; returns its memory, by owner of the rows."""
        return []

    @property
    def keeps_average(self) -> bool:
        """Whether there is an average of the weights."""
        return True

    @property
    def keeps_rows(self) -> bool:
        """Whether weights are rows while a span trains."""
        return False

    @property
    def keeps_sums_apart(self) -> bool:
        """Whether gradients give their memory back when their sums have ended."""
        return False

    def begin_run(self) -> None:
        """Begin a span of training: where weights are shards, keep those only."""

    def end_run(self) -> list[list[Tensor]]:
        """End it: return the memory of what is to be whole between two runs, by the owner of what is in it."""
        return []

    def completed(self) -> None:
        """Go on with what `end_run` returned, which is whole."""

    def try_step(self, batch: int, factor: float) -> None:
        """Create version batch + 1 as `step` does, but so that it can be made again."""

    def settle_step(self, decision: Decision) -> None:
        """Settle a provisional update; if it is rejected, make it again."""

    def decided(self, mean: float) -> None:
        """Take note of c / N by the last batch that an update was made with."""

    # --- between spans ----------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Adopt what was written into the newest version between two runs."""

    def take_hooks(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Take over the hooks on the modules' trained parameters."""

    def begin_span(self, batches: int) -> None:
        """Begin a span after so many batches."""

    def end_span(self) -> None:
        """End a span, with the pipeline drained."""

    # --- memory -----------------------------------------------------------------------------------------------------

    @property
    def optimizer_bytes(self) -> int:
        """Bytes that the optimizer remembers on the device."""
        return 0

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that it remembers in the memory of the host."""
        return 0

    def bytes_by_role(self) -> dict[str, int]:
        """Return the parameter-sized bytes by role, without the optimizer's."""
        return {}
