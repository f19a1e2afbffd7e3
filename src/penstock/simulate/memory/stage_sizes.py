"""The bytes of what a stage holds: as measured, or as a profile says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.simulate.memory.held import HeldKind


class SliceBytes(NamedTuple):
    """What one slice of the sequences of a microbatch takes on a stage.

    Attributes:
        passes, output, gradients: as of `StageBytes`.
    """

    passes: Mapping[HeldKind, int]
    output: int
    gradients: Mapping[int, int]


class SnapshotBytes(NamedTuple):
    """What copies of a stage for a snapshot take.

    Attributes:
        weights: the newest weights, as they are updated.
        version: a version, as passes read it.
        optimizer: what the optimizer remembers.
        buffers: module buffers.
        frozen: frozen parameters.
        shares: where state is divided, by the place among all that divide it: of the optimizer, of the newest weights,
            and of a version.
    """

    weights: int
    version: int
    optimizer: int
    buffers: int
    frozen: int
    shares: Sequence[tuple[int, int, int]] = ()


NO_COPIES = SnapshotBytes(0, 0, 0, 0, 0)


@dataclass(frozen=True)
class StageBytes:
    """What one stage takes.

    Attributes:
        version: bytes of one version of the weights as passes read it, with its padding.
        whole: bytes of one gradient, or of weights that are updated; `version` unless passes compute in low precision.
        optimizer: bytes that the optimizer remembers; of a sharded one, by its place among all that divide it:
            pipelines or, where these have several copies of a stage and weights are not divided, the copies of all.
        rows: bytes of the rows of weights that are updated, where pipelines divide these; as `optimizer`.
        low_rows: the same of a version as passes read it; as `optimizer`.
        frozen: bytes of frozen parameters and module buffers.
        scratch: bytes to which gradients move while weights are written over them, or previous values are kept while
            somebody asks for them; as `optimizer`.
        passes: by kind, bytes of one microbatch, as `HeldKind` has them; a kind that is not there takes none.
        output: bytes of its output, as a message.
        gradients: bytes of the gradient of its input, as messages, by the index of the stage that each goes to.
        slices: of each slice of a sequence, where a method takes slices.
        snapshot: of its copies for snapshots.
    """

    version: int
    whole: int
    optimizer: Sequence[int]
    frozen: int = 0
    scratch: Sequence[int] = (0,)
    rows: Sequence[int] = (0,)
    low_rows: Sequence[int] = (0,)
    passes: Mapping[HeldKind, int] = field(default_factory=dict)
    output: int = 0
    gradients: Mapping[int, int] = field(default_factory=dict)
    slices: Sequence[SliceBytes] = ()
    snapshot: SnapshotBytes = NO_COPIES

    def of(self, piece: int) -> SliceBytes:
        """Return what passes and messages of a slice take, or of the whole."""
        return self.slices[piece] if self.slices else SliceBytes(self.passes, self.output, self.gradients)
