"""Restores stages from a saved state, whatever the depth, width and method were that it was saved with.

`penstock.runtime.rank.snapshot` lists the names of what is in it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from itertools import count
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.partition.parameter_names import block_of, prefix_of
from penstock.runtime.rank.snapshot import older_kind, suffix
from penstock.runtime.rank.tensor_pieces import joined_pieces, pieces_in
from penstock.schedule.methods.corrections import CORRECTIONS
from penstock.schedule.methods.data_parallel_sync import Combine
from penstock.stage.stage_runtime import StageRuntime
from penstock.stage.trained_stage_weights import TrainedWeights
from penstock.weights.corrections.base import Corrector
from penstock.weights.memory.row_shards import Rows
from penstock.weights.replica_averaging import COMMON
from penstock.weights.sharded_store import ShardedStore
from penstock.weights.store import GivenWeights


@runtime_checkable
class SavedState(Protocol):
    """A saved state of a whole pipeline, whatever its depth, width and method were; `Pipeline.load` takes it."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """Values that are the same on all stages, and under `values` those of all optimizers."""
        ...

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Read one tensor."""
        ...


def check_pipelines(saved: SavedState, combine: Combine, width: int) -> None:
    """Make sure that the pipelines match a checkpoint in which pipelines have weights of their own.

    Raises:
        CheckpointError: their number is another one, or the checkpoint lacks the common model that `combine` takes.
    """
    apart = saved.facts.get("pipelines", 1)
    alike = combine.spec.drains and combine.agrees  # between two runs
    if apart != 1 and (apart != width or not combine.apart or alike):
        raise CheckpointError(
            f"the checkpoint of batch {saved.facts['batch']} has the weights of {apart} pipelines that differ, so it "
            f"goes on with width {apart} and pipelines that have weights of their own; here are {width}, combine="
            f"{combine.kind}. To change either, take a checkpoint from where pipelines have just been averaged"
        )
    if apart != 1 and combine.spec.buffers and not any(name.startswith("common/") for name in saved.names):
        raise CheckpointError(
            f"the checkpoint of batch {saved.facts['batch']} has the weights of {apart} pipelines that differ, and no "
            f"model that they have in common, from which combine={combine.kind} goes on; go on as before, or take a "
            "checkpoint from where pipelines have just been averaged"
        )


def check_names(saved: SavedState, blocks: Mapping[str, Any]) -> None:
    """Make sure that a checkpoint has only tensors of the model's blocks.

    Raises:
        CheckpointError: it has tensors of blocks that the model does not have.
    """
    foreign = [name for name in saved.names if not _belongs(name, blocks)]
    if foreign:
        raise CheckpointError(
            f"the checkpoint has {len(foreign)} tensors of blocks that the model does not have, the first of them "
            f"{foreign[0]}; blocks of the model: {', '.join(blocks)}"
        )


def _belongs(saved: str, blocks: Mapping[str, Any]) -> bool:
    """Whether a tensor is of some block by its name in a saved state, which begins with what it is."""
    parts = saved.split("/")
    return any(block_of("/".join(parts[at:]), blocks) is not None for at in range(1, len(parts)))


def saved_older(saved: SavedState, correction: str) -> int:
    """Return of how many versions before the newest a saved state has what passes read, under this correction."""
    ahead = correction in CORRECTIONS and CORRECTIONS[correction].reads_ahead
    kinds = {re.split("[/@~]", name, maxsplit=1)[0] for name in saved.names}
    found = (back for back in count(1) if not kinds & {older_kind(back), *((f"ahead.{back}",) if ahead else ())})
    return next(found) - 1


def restore(stage: StageRuntime, saved: SavedState, older: int, blocks: Mapping[str, Any]) -> None:
    """Restore a stage from a snapshot.

    Args:
        stage: the stage, with nothing in flight.
        saved: the snapshots of all stages.
        older: how many versions before the newest passes will read.
        blocks: all of the model.

    Raises:
        CheckpointError: a tensor is missing or has another shape, or the optimizer is another one.
    """
    reader = _StageReader(stage, saved)
    reader.check(blocks)
    own = f"fixed.{stage.place}/"
    for name, tensor in stage.module.unversioned().items():
        kind = own if f"{own}{name}" in saved.names else "fixed/"
        tensor.copy_(reader.read(kind, name, tensor))
    if isinstance(stage.weights, TrainedWeights):
        _restore_trained(stage.weights, reader, saved, older)
    stage.restore()


def _restore_trained(weights: TrainedWeights, reader: _StageReader, saved: SavedState, older: int) -> None:
    """Restore the state of a stage's trained parameters."""
    views, agreement = weights.store.master.views, weights.agreement
    newest = {name: reader.read(reader.kind("weights", name), name, view) for name, view in views.items()}
    ahead = weights.store.reads_ahead and any(name.startswith("ahead/") for name in saved.names)
    before = []
    for back in range(1, older + 1):
        kinds = {name: f"ahead.{back}/" if ahead else reader.kind(older_kind(back), name) for name in views}
        before.append({name: reader.read(kinds[name], name, v) for name, v in views.items()})
    read = {name: reader.read("ahead/", name, v) for name, v in views.items()} if ahead else None
    weights.store.restart(int(saved.facts["batch"]), GivenWeights(newest, before, read))
    weights.watch = None  # nothing has been written since
    if weights.store.reads_ahead:
        weights.watch_writes()
    if weights.older is not None:
        weights.older.restart(int(saved.facts["batch"]), reader.find_delayed)
    if agreement is not None:
        agreement.recall(saved.facts)
        common = [(kind, name) for kind in COMMON for name in views if reader.has(f"{kind}/", name)]
        agreement.load({f"{kind}/{name}": reader.read(f"{kind}/", name, views[name]) for kind, name in common})
    if weights.average is not None:
        kind = "average/" if reader.has("average/", next(iter(views))) else "weights/"
        weights.average.load({name: reader.read(kind, name, view) for name, view in views.items()})
    if weights.corrector is not None:
        _restore_corrector(weights.corrector, reader, saved)
    updates = saved.facts.get(f"updates{reader.own}", saved.facts["updates"])
    weights.updater.load(int(updates), reader.optimizer_state())
    weights.updater.rates.load(reader.settings(), weights.updater.updates)


def _restore_corrector(corrector: Corrector, reader: _StageReader, saved: SavedState) -> None:
    """Restore the state of a correction; it begins at zero where the checkpoint has none, or that of another one."""
    same = saved.facts.get("correction") == corrector.name
    corrector.began = int(saved.facts["corrected_from" if same else "updates"])
    for kind, buffer in corrector.buffers.items():
        known = {name for name in buffer.views if same and reader.has(f"{kind}/", name)}
        views = buffer.views.items()
        buffer.load({n: reader.read(f"{kind}/", n, v) if n in known else torch.zeros_like(v) for n, v in views})


class _StageReader:
    """Finds the tensors of one stage in a checkpoint, under any of the names of a tied parameter."""

    def __init__(self, stage: StageRuntime, saved: SavedState) -> None:
        self._stage, self._saved = stage, saved
        agreement, weights = stage.weights.agreement, stage.weights
        self.own = suffix(0 if agreement is None else agreement.pipeline)  # of its pipeline's weights
        self._updater = weights.updater if isinstance(weights, TrainedWeights) else None
        self._store = weights.store if isinstance(weights, TrainedWeights) else None
        index = stage.key.index
        self._names: dict[str, list[str]] = {}
        for tie in stage.ties:
            for place, name in enumerate(tie.names_at(index)):
                self._names[name] = [name, *(names[place] for names in tie.names)]
        self._firsts, self._pieces = _first_rows(saved.names), pieces_in(saved.names)
        self._splits = stage.module.division.splits

    def check(self, blocks: Mapping[str, Any]) -> None:
        """Make sure that the optimizer is of the saved kind, and that the blocks have all tensors saved for them.

        Raises:
            CheckpointError: it is not, or one is missing.
        """
        stage, saved = self._stage, self._saved
        for name in () if self._updater is None else self._updater.parameters:
            kinds = {saved.facts["values"].get(f"stepped/{known}") for known in self._known(name)} - {None}
            here = None if self._updater is None else self._updater.stepper(name)
            if kinds - {here}:
                raise CheckpointError(
                    f"the checkpoint has the state of {kinds.pop()}, but {stage.module.where} is stepped by "
                    f"{here or 'nothing'}; use the same optimizer, or begin a new run from the weights alone"
                )
        for block, module in stage.module.named_modules():
            known = {f"{prefix_of(block, module)}{name}" for name in module.state_dict()}
            for name in saved.names:
                kind, _, rest = name.partition("/")
                if (
                    kind.partition("@")[0].partition("~")[0].partition(".")[0] in ("weights", "fixed")
                    and rest not in known
                    and block_of(rest, blocks) == block
                ):
                    raise CheckpointError(f"the checkpoint has a {rest}, which block {block!r} does not have")

    def has(self, kind: str, name: str) -> bool:
        """Return True if the checkpoint has a tensor of this kind."""
        return any(self._saved_as(kind, known) for known in self._known(name))

    def _saved_as(self, kind: str, known: str) -> bool:
        """Return True if the checkpoint has a tensor by this name, or rows of it."""
        return any(kind + known in names for names in (self._saved.names, self._firsts, self._pieces))

    def kind(self, what: str, name: str) -> str:
        """Return the prefix of a tensor: of the stage's own pipeline if saved, else of the first one."""
        own = f"{what}{self.own}/"
        return own if self.has(own, name) else f"{what}/"

    def read(self, kind: str, name: str, like: Tensor) -> Tensor:
        """Read a tensor of the stage.

        Raises:
            CheckpointError: it is missing or has another shape.
        """
        known = next((known for known in self._known(name) if self._saved_as(kind, known)), None)
        if known is None:
            raise CheckpointError(f"the checkpoint has no {kind}{name}, which {self._stage.module.where} needs")
        split = self._splits.get(name)
        shape = like.shape if split is None else split.whole_shape(like.shape)
        count = shape[0] if shape else 1
        tensor = self._rows(kind[:-1], known, Rows(0, count, count))
        if split is not None and tensor.shape == shape:
            tensor = split.own(tensor)
        if tensor.shape != like.shape:
            raise CheckpointError(
                f"{name} has shape {tuple(tensor.shape)} in the checkpoint and {tuple(like.shape)} in the model; give "
                "the model the shape that it was saved with"
            )
        return tensor.to(like.device)

    def find_delayed(self, back: int, name: str, like: Tensor) -> Tensor | None:
        """Read a parameter from `back` updates before the newest version; None if the checkpoint has it not."""
        kind = f"delayed.{back}/"
        return self.read(kind, name, like) if self.has(kind, name) else None

    def optimizer_state(self) -> dict[tuple[str, str], Any]:
        """Read the state of the stage's optimizer, by kind and parameter."""
        assert self._updater is not None
        state: dict[tuple[str, str], Any] = {}
        values: Mapping[str, Any] = self._saved.facts["values"]
        what = f"optimizer{self.own if f'updates{self.own}' in self._saved.facts else ''}"
        places = [name.split("/", 2) for name in (*self._saved.names, *values) if name.startswith(f"{what}/")]
        kinds: dict[str, list[str]] = {}
        for _, kind, name in places:
            kinds.setdefault(name, []).append(kind)
        for name, parameter in self._updater.parameters.items():
            known = next((k for k in self._known(name) if k in kinds), None)
            if name not in self._updater.own:
                continue
            for kind in dict.fromkeys(re.split("[@~]", kind)[0] for kind in kinds.get(known or "", ())):
                key = f"{what}/{kind}/{known}"
                value = values[key] if key in values else self._rows_of(name, f"{what}/{kind}", str(known))
                state[kind, name] = value.to(parameter.device) if isinstance(value, Tensor) and value.dim() else value
        return state

    def _rows_of(self, name: str, prefix: str, known: str) -> Tensor:
        """Read a tensor of the optimizer: the rows that this holder steps, from wherever they were saved.

        Args:
            name: of the parameter.
            prefix: of the tensor's name.
            known: the name of the parameter in the checkpoint.

        Raises:
            CheckpointError: rows are missing.
        """
        store = self._store
        assert store is not None
        shape = store.layout.slots[name].shape
        count = shape[0] if shape else 1
        split = self._splits.get(name)
        if split is not None:
            whole = self._rows(prefix, known, Rows(0, *2 * (split.whole_shape(shape)[0],)))
            return split.own(whole) if whole.dim() else whole
        rows = store.shards.rows(name) if isinstance(store, ShardedStore) else Rows(0, count, count)
        return self._rows(prefix, known, rows)

    def _rows(self, prefix: str, known: str, rows: Rows) -> Tensor:
        """Read rows of a tensor, which was saved whole or by rows.

        Raises:
            CheckpointError: rows are missing.
        """
        whole = f"{prefix}/{known}"
        if whole in self._saved.names or whole in self._pieces:
            read, pieces = self._saved.tensor, self._pieces.get(whole)
            tensor = read(whole) if pieces is None else joined_pieces(whole, pieces, read)
            return tensor if not tensor.dim() or rows.end - rows.first == rows.all else rows.of(tensor)
        firsts = self._firsts.get(whole, [])
        if not firsts or firsts[0]:
            raise CheckpointError(f"the checkpoint lacks the first rows of {whole}")
        found: list[Tensor] = []
        for first, end in zip(firsts, [*firsts[1:], rows.all], strict=True):
            if first < rows.end and end > rows.first:
                part = self._saved.tensor(f"{prefix}@{first}/{known}")
                if len(part) != end - first:
                    raise CheckpointError(f"the checkpoint lacks rows {first + len(part)} to {end - 1} of {whole}")
                found.append(part[max(rows.first - first, 0) : rows.end - first])
        return torch.cat(found) if found else self._saved.tensor(f"{prefix}@{firsts[0]}/{known}")[:0]

    def settings(self) -> dict[str, dict[str, Any]]:
        """Read what was set by hand for the parameters of the stage, by parameter and setting."""
        assert self._updater is not None
        kept: dict[str, dict[str, Any]] = {}
        for key, value in self._saved.facts["values"].items():
            if key.startswith("setting/"):
                _, setting, name = key.split("/", 2)
                kept.setdefault(name, {})[setting] = value
        names = {name: next((k for k in self._known(name) if k in kept), None) for name in self._updater.parameters}
        return {name: kept[known] for name, known in names.items() if known is not None}

    def _known(self, name: str) -> list[str]:
        return self._names.get(name, [name])


def _first_rows(names: Collection[str]) -> dict[str, list[int]]:
    """Return, by what tensors saved by rows would be called as a whole, the first rows of their parts, in order."""
    found: dict[str, list[int]] = {}
    for name in names:
        kind, at, rest = name.partition("@")
        if at and kind.count("/") == kind.startswith("optimizer"):  # else it is in the name of a parameter
            first, _, known = rest.partition("/")
            if first.isdecimal():
                found.setdefault(f"{kind}/{known}", []).append(int(first))
    return {whole: sorted(firsts) for whole, firsts in found.items()}
