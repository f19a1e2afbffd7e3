"""Snapshots: the state of a stage between two batches, from which training resumes bit for bit.

A snapshot is taken directly after the update that creates version B, while later microbatches are in flight; training
resumes from it with batch B. With double-buffered weights it has two versions, because batch B reads the one before,
with triple-buffered ones three; passes from batch B on that are in flight are repeated when training resumes. Module
buffers are those from before the stage's first forward of batch B. Random numbers depend on the batch alone, so no
state of a generator is saved.

Names in a snapshot: `weights/NAME` (newest, in full precision), `older/NAME` and `older2/NAME` (the versions before),
`delayed.K/NAME` (the K-th version before the newest, where passes read with a delay of K or more), `average/NAME`,
`ahead/NAME`, `ahead.1/NAME` and `ahead.2/NAME` (what passes read of these, where they read ahead), `motion/NAME` (how
the weights move, and others of a correction), `fixed/NAME` (frozen parameters and persistent buffers; `fixed.1/NAME`
for the second stage that holds them, in another pipeline or in another direction of the same one, and so on) and
`optimizer/KIND/NAME`, where NAME is that of a parameter, the same at every depth; where pipelines have divided it by
rows, `optimizer/KIND@8/NAME` has those of one of them, from row 8 on, and so have `weights@8/NAME` and `average@8/NAME`
where weights are divided, too, and `older@8/NAME` where all versions are. Where processes share stages by tensor
parallelism, each has parts, as in `weights~0.3.1of2/NAME` and `optimizer/KIND~0.3.1of2/NAME`: of dimension 0, which
consists of 3 sections, the second of 2 parts (`penstock.runtime.rank.tensor_pieces`). Of values that are not tensors,
`setting/KEY/NAME` was set by hand in the parameter group of NAME between two runs. Where parallel pipelines have
weights of their own, `weights.1/NAME`, `older.1/NAME` and `optimizer.1/KIND/NAME` are those of the second pipeline, and
so on; weights are left out when pipelines have just met and agree. `common/NAME` and `momentum/NAME` are what they
share.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from penstock.checks import check_whole
from penstock.comm.core.devices import Done
from penstock.errors import ConfigError

WRITTEN = "written"  # a fact: weights of some stage were written between two runs, so no pass reads older ones


@dataclass(frozen=True)
class Snapshot:
    """The state of one stage after `batch` batches; those of all stages make a saved state.

    Attributes:
        batch: the number of batches trained on.
        place: which copy of the stage it is of: the first (0), the second (1) and so on.
        stage: the index of the stage.
        tensors: copies of its tensors, by name (`penstock.runtime.rank.snapshot` lists the names).
        values: the optimizer's state that is not tensors, and what was set by hand, by name.
        facts: what is the same on all stages.
        copied: when the tensors are complete, where a device copies them; whoever takes a snapshot does not wait.
        frozen: of the tensors that are frozen parameters, by name, a number that changes with them; they seldom do.
        shared: frozen parameters have not changed since the last snapshot, and are no copies but the stage's own.
    """

    batch: int
    place: int
    stage: int
    tensors: dict[str, Tensor]
    values: dict[str, Any]
    facts: dict[str, Any]
    copied: Done | None = None
    frozen: Mapping[str, int] = field(default_factory=dict)
    shared: bool = False

    def __repr__(self) -> str:
        """Return which state it is, and how large."""
        return f"<Snapshot of stage {self.stage} (copy {self.place}) before batch {self.batch}: {self.nbytes} bytes>"

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the copies; computed once, so it must be read before their owner clears them."""
        return sum(t.nbytes for name, t in self.tensors.items() if not (self.shared and name in self.frozen))

    def on_cpu(self, names: Collection[str]) -> dict[str, Tensor]:
        """Copy tensors to contiguous CPU memory, for a file; safe in any thread, on any current stream."""
        if self.copied is not None:
            self.copied.synchronize()
        return {name: self.tensors[name].cpu().contiguous() for name in names}

    def own(self) -> None:
        """Replace what is shared with the stage by copies; at once, before anything else writes there."""
        for name in self.frozen if self.shared else ():
            self.tensors[name] = self.tensors[name].clone()


class Saving(NamedTuple):
    """When to take snapshots during a run, and where they go: the `save` argument of `Pipeline.run`.

    `Checkpoints.every` makes one that writes checkpoints.

    Attributes:
        every: snapshots are taken after every so many batches, counted from the start of training.
        sink: called with the snapshot of each stage in the process that holds it, which waits until it returns.
        make_room: called with the number of batches before a snapshot is taken, so that earlier ones can be freed;
            returns False to leave it out.
        shares: frozen parameters that have not changed since the last snapshot are to be the stage's own tensors, not
            copies.
    """

    every: int
    sink: Callable[[Snapshot], None]
    make_room: Callable[[int], bool] = lambda _: True
    shares: bool = False

    def __repr__(self) -> str:
        """Return when; whereto is a function."""
        return f"Saving(every={self.every})"

    def wants(self, batch: int) -> bool:
        """Return True if a snapshot is taken before `batch`."""
        return batch > 0 and batch % self.every == 0


def check_saving(save: Any) -> None:
    """Refuse what is no plan for snapshots.

    Raises:
        ConfigError: it is something else, or its interval is no number of batches.
    """
    if not isinstance(save, Saving):
        raise ConfigError(
            f"save must be a Saving, such as checkpoints.every(100) of checkpoints = penstock.Checkpoints(pipeline, "
            f"folder); got {save!r:.80}"
        )
    check_whole("save: every", save.every)


def older_kind(back: int) -> str:
    """Return what the version before the newest is called in names (older), the one before that (older2), and so on."""
    return "older" if back == 1 else f"older{back}"


def suffix(number: int) -> str:
    """Return the suffix in names for the state of the second pipeline or copy (.1), the third (.2), and so on."""
    return f".{number}" if number else ""
