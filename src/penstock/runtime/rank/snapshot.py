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

import torch
from torch import Tensor

from penstock.checks import check_whole
from penstock.comm.core.devices import is_accelerator
from penstock.comm.core.host_copy_stream import Done, SideStream
from penstock.errors import ConfigError
from penstock.runtime.rank.tensor_pieces import own_pieces
from penstock.runtime.update.decisions import Decisions
from penstock.stage.checks.tensor_sums import tensor_sums
from penstock.stage.sharded_stage_weights import ShardedWeights
from penstock.stage.stage_runtime import StageRuntime
from penstock.stage.trained_stage_weights import TrainedWeights

Older = Mapping[int, Mapping[str, Tensor]]
"""Copies of versions before the newest, by how many updates before, and by name."""


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


def take_snapshot(
    stage: StageRuntime,
    batch: int,
    decisions: Decisions | None,
    fixed: Fixed | None = None,
    older: Older | None = None,
    side: SideStream | None = None,
) -> Snapshot:
    """Take a snapshot of a stage, between an update and the next pass.

    Args:
        stage: the stage. All copies of a stage have the same state but for their module buffers and what is divided
            among them, so only the first copy saves the rest, unless pipelines have weights of their own.
        batch: the newest version.
        decisions: of its rank; None where nothing is trained, as the rank may not have received any.
        fixed: untrained tensors from before the first forward of `batch`; None if that has not run.
        older: copies of those versions before it that will be read again and may be gone.
        side: copies the tensors to the host's memory beside the work of the device, which must wait for that (`copied`)
            before it updates the stage; if None, they are copied where they are.
    """
    if fixed is None:
        fixed = take_fixed(stage)
    facts: dict[str, Any] = (
        {"batch": batch} if decisions is None else {"batch": batch, decisions.key: decisions.state()}
    )
    kind = f"fixed{suffix(stage.place)}/"
    tensors = {kind + name: tensor for name, tensor in fixed.tensors.items()}
    frozen = {kind + name: number for name, number in fixed.frozen.items()}
    values: dict[str, Any] = {}
    weights = stage.weights
    if (not stage.place or _has_own(stage)) and isinstance(weights, TrainedWeights):
        rows_alone = isinstance(weights, ShardedWeights) and batch - 1 in weights.store.older_rows
        older = dict(older or {})
        for version in () if rows_alone else sorted(weights.store.versions.keys() - {batch}):
            older.setdefault(batch - version, weights.store.copies(version))
        settled = torch.clone if side is None or weights.agreement is not None else torch.Tensor.detach
        _add_trained(weights, batch, older, tensors, values, facts, settled)
    elif isinstance(weights, ShardedWeights):
        settled = torch.clone if side is None else torch.Tensor.detach
        rows, values = optimizer_state(weights, settled)
        tensors |= rows | _rows_of_weights(weights, settled) | _older_rows(weights, batch)
    division = stage.module.division
    names = own_pieces(division, tensors)
    tensors = {names[name]: tensor for name, tensor in tensors.items() if name in names}
    frozen = {names[name]: number for name, number in frozen.items() if name in names}
    if side is None:
        copied = _copied(tensors)
    else:
        side.after_work()
        moved = {name: side.to_host(t) for name, t in tensors.items() if not (fixed.shared and name in frozen)}
        tensors, copied = tensors | moved, side.mark()
    values, place = {} if division.index else values, stage.place + division.first_place
    return Snapshot(batch, place, stage.key.index, tensors, values, facts, copied, frozen, fixed.shared)


def older_kind(back: int) -> str:
    """Return what the version before the newest is called in names (older), the one before that (older2), and so on."""
    return "older" if back == 1 else f"older{back}"


def suffix(number: int) -> str:
    """Return the suffix in names for the state of the second pipeline or copy (.1), the third (.2), and so on."""
    return f".{number}" if number else ""


def _has_own(stage: StageRuntime) -> bool:
    """Return True if a stage of a further pipeline has weights of its own; only its first direction saves them."""
    agreement = stage.weights.agreement
    return agreement is not None and agreement.pipeline > 0 and not stage.key.direction


def _add_trained(
    weights: TrainedWeights,
    batch: int,
    older: Older,
    tensors: dict[str, Tensor],
    values: dict[str, Any],
    facts: dict[str, Any],
    settled: Callable[[Tensor], Tensor],
) -> None:
    """Add the state of a stage's trained parameters to a snapshot.

    `settled` is what becomes of tensors that nothing but the next update writes; others are copied.
    """
    store, updater, agreement, corrector = weights.store, weights.updater, weights.agreement, weights.corrector
    own = suffix(0 if agreement is None else agreement.pipeline)
    apart = agreement is not None and not agreement.agrees(batch)
    divided = weights.keeps_rows
    if divided:
        tensors |= _rows_of_weights(weights, settled)
    elif not own or apart:
        tensors |= {f"weights{own}/{name}": tensor for name, tensor in store.newest_copies(settled).items()}
    for back, copies in older.items():
        kind = f"ahead.{back}" if store.reads_ahead else f"{older_kind(back)}{own}"
        tensors |= {f"{kind}/{name}": tensor for name, tensor in copies.items()}
    tensors |= _older_rows(weights, batch)
    if store.reads_ahead:
        tensors |= {f"ahead/{name}": tensor for name, tensor in store.copies(batch).items()}
    for kept, found in zip((tensors, values), optimizer_state(weights, settled, own), strict=True):
        kept |= found
    facts |= {f"updates{own}": updater.updates} | ({} if agreement is None else agreement.facts())
    if apart and agreement is not None:
        facts |= {"pipelines": agreement.width}
    if own:
        return
    if weights.older is not None:
        tensors |= {f"delayed.{place}": tensor for place, tensor in weights.older.copies(batch).items()}
    if weights.average is not None and not divided:
        tensors |= {f"average/{name}": settled(view) for name, view in weights.average.views.items()}
    if corrector is not None:
        facts |= {"correction": corrector.name, "corrected_from": corrector.began}
        for kind, buffer in corrector.buffers.items():
            tensors |= {f"{kind}/{name}": view.clone() for name, view in buffer.views.items()}
    if agreement is not None:
        tensors |= agreement.copies()
    values |= {f"stepped/{name}": updater.stepper(name) for name in updater.parameters}
    values |= {f"setting/{key}/{name}": value for (key, name), value in updater.rates.by_hand().items()}


def _rows_of_weights(weights: TrainedWeights, settled: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return the own rows of the newest weights and of their average, where weights are divided; else nothing."""
    if not isinstance(weights, ShardedWeights) or not weights.keeps_rows:
        return {}
    store = weights.store
    found = {store.shards.saved_as("weights", name): t for name, t in store.newest_copies(settled).items()}
    if weights.average_rows is not None:
        rows = weights.average_rows.present
        found |= {store.shards.saved_as("average", name): settled(view) for name, view in rows.items()}
    return found


def _older_rows(weights: TrainedWeights, batch: int) -> dict[str, Tensor]:
    """Return copies of the own rows of the version before the newest, where these are all that is here of it."""
    if not isinstance(weights, ShardedWeights) or batch - 1 not in weights.store.older_rows:
        return {}
    store = weights.store
    return {store.shards.saved_as("older", name): t.clone() for name, t in store.older_rows[batch - 1].items()}


def optimizer_state(
    weights: TrainedWeights, settled: Callable[[Tensor], Tensor], own: str = ""
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors and the other values of a stage's optimizer; of what is divided, the rows that are here.

    What is not divided is saved by the owner of the first row.
    """
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    shards = weights.store.shards if isinstance(weights, ShardedWeights) else None
    for (kind, name), value in weights.updater.state(settled).items():
        kept, whose = tensors if isinstance(value, Tensor) else values, kind
        if shards is not None:
            rows = shards.rows(name)
            if isinstance(value, Tensor) and value.dim() and rows.end - rows.first < rows.all:
                whose = f"{kind}@{rows.first}"
            elif rows.first:
                continue
        kept[f"optimizer{own}/{whose}/{name}"] = value
    return tensors, values


def _copied(tensors: Mapping[str, Tensor]) -> Done | None:
    """Record an event after the copies on the current stream; None if all tensors are on the CPU."""
    device = next((tensor.device for tensor in tensors.values() if is_accelerator(tensor.device)), None)
    return None if device is None else torch.accelerator.current_stream(device).record_event()


class Fixed(NamedTuple):
    """A stage's frozen parameters and persistent buffers.

    Attributes:
        tensors: by name; copies, or frozen parameters themselves where they are `shared`.
        frozen, shared: as of `Snapshot`.
    """

    tensors: Mapping[str, Tensor]
    frozen: Mapping[str, int]
    shared: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(t.nbytes for name, t in self.tensors.items() if not (self.shared and name in self.frozen))


def take_fixed(stage: StageRuntime) -> Fixed:
    """Copy a stage's frozen parameters and persistent buffers; of the former only what has changed since the last time.

    That is asked of their bits, since a user, or a block, may set them in ways that leave no other trace.
    """
    frozen = stage.module.tensors.frozen()
    sums = tensor_sums(frozen)
    shared, stage.frozen_sums = sums == stage.frozen_sums, sums
    tensors = stage.module.tensors.unversioned().items()
    return Fixed({name: t if shared and name in frozen else t.clone() for name, t in tensors}, sums, shared)
