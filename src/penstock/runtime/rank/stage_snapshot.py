"""Takes the snapshot of one stage: copies of the tensors whose names `penstock.runtime.rank.snapshot` lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.comm.core.devices import Done, SideStream, is_accelerator
from penstock.runtime.rank.snapshot import WRITTEN, Snapshot, older_kind, suffix
from penstock.runtime.rank.tensor_pieces import own_pieces
from penstock.runtime.update.decisions import Decisions
from penstock.stage.sharded_stage_weights import ShardedWeights
from penstock.stage.stage_runtime import StageRuntime
from penstock.stage.trained_stage_weights import TrainedWeights
from penstock.weights.memory.tensor_sums import tensor_sums

Older = Mapping[int, Mapping[str, Tensor]]
"""Copies of versions before the newest, by how many updates before, and by name."""


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
    facts |= {WRITTEN: True} if weights.rewritten else {}
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
