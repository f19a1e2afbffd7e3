"""Reads what one stage needs of a saved state, whatever the depth, width and sharding were that it was saved with.

Of what holders of a stage divide among them, each reads its own rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.partition.parameter_names import block_of, prefix_of
from penstock.runtime.rank.snapshot import suffix
from penstock.runtime.restore.saved_rows import SavedTensors, check_shape, check_type
from penstock.runtime.restore.saved_state import ANOTHER_MODEL, SavedState
from penstock.stage.checks.changes_between_runs import find_parameters
from penstock.stage.stage_runtime import StageRuntime
from penstock.stage.trained_stage_weights import TrainedWeights
from penstock.weights.memory.row_shards import Rows
from penstock.weights.sharded_store import ShardedStore


class StageReader:
    """Reads the tensors of one stage from a saved state, under any of the names of a tied parameter.

    Args:
        stage: the stage.
        saved: the state.
        tensors: of it.
        blocks: all of the model.

    Attributes:
        own: the suffix in names for the weights of its pipeline, where pipelines have weights of their own.
    """

    def __init__(
        self, stage: StageRuntime, saved: SavedState, tensors: SavedTensors, blocks: Mapping[str, Any]
    ) -> None:
        self._stage, self._saved, self._tensors, self._blocks = stage, saved, tensors, blocks
        agreement, weights = stage.weights.agreement, stage.weights
        self.own = suffix(0 if agreement is None else agreement.pipeline)
        self._updater = weights.updater if isinstance(weights, TrainedWeights) else None
        self._store = weights.store if isinstance(weights, TrainedWeights) else None
        self._as_fixed = f"fixed{suffix(stage.place)}", "fixed"
        index = stage.key.index
        first = find_parameters(blocks).paths  # what is frozen may be shared by stages without a tie
        self._names = {name: [name, first.get(name, name)] for name in stage.module.tensors.frozen()}
        for tie in stage.ties:
            for place, name in enumerate(tie.names_at(index)):
                self._names[name] = [name, *(names[place] for names in tie.names)]
        self._splits = stage.module.division.splits
        self._types: dict[str, torch.dtype] = {}  # of weights, as they were saved

    def check(self) -> None:
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
                    f"{here or 'nothing'}; use the same optimizer, or begin a new run with the weights alone: "
                    "pipeline.load_state_dict(weights), with what full_state_dict() of a pipeline that has loaded the "
                    "checkpoint with its optimizer has returned"
                )
        for block, module in stage.module.modules.items():
            known = {f"{prefix_of(block, module)}{name}" for name in module.state_dict()}
            for name in saved.names:
                kind, _, rest = name.partition("/")
                if (
                    kind.partition("@")[0].partition("~")[0].partition(".")[0] in ("weights", "fixed")
                    and rest not in known
                    and block_of(rest, self._blocks) == block
                ):
                    raise CheckpointError(
                        f"the checkpoint has a {rest}, which block {block!r} does not have; {ANOTHER_MODEL}"
                    )

    def has(self, kind: str, name: str) -> bool:
        """Return True if the checkpoint has a tensor of this kind."""
        return any(f"{kind}/{known}" in self._tensors for known in self._known(name))

    def kind(self, what: str, name: str) -> str:
        """Return what a trained parameter is called: of the stage's own pipeline if saved, else of the first one.

        One that was frozen when it was saved has one value, which all its versions begin with.
        """
        return self._first((f"{what}{self.own}", what), self._as_fixed, name)

    def fixed(self, name: str) -> str:
        """Return what a buffer or a frozen parameter is called; of one that was trained, its newest weights."""
        return self._first(self._as_fixed, (f"weights{self.own}", "weights"), name)

    def _first(self, kinds: tuple[str, str], others: tuple[str, str], name: str) -> str:
        """Return the first of these kinds of which a tensor is saved; the last of `kinds` if there is none."""
        return next((kind for kind in (*kinds, *others) if self.has(kind, name)), kinds[-1])

    def read(self, kind: str, name: str, like: Tensor) -> Tensor:
        """Read a tensor of the stage.

        Raises:
            CheckpointError: it is missing or has another shape.
        """
        found = torch.empty_like(like)
        self.fill(kind, name, like.shape, found, _all_rows(like.shape))
        return found

    @torch.no_grad()
    def fill(self, kind: str, name: str, shape: torch.Size, place: Tensor, rows: Rows | None = None) -> None:
        """Read a tensor of the stage, or rows of it, into its place.

        Args:
            kind: what it is, such as "weights".
            name: of the parameter or buffer.
            shape: that all of it has in this process.
            place: where it goes.
            rows: which; all if None.

        Raises:
            CheckpointError: it is missing or has another shape, or numbers of another kind.
        """
        known = next((known for known in self._known(name) if f"{kind}/{known}" in self._tensors), None)
        if known is None:
            raise CheckpointError(
                f"the checkpoint has no {kind}/{name}, which {self._stage.module.where} needs; {ANOTHER_MODEL}"
            )
        split = self._splits.get(name)
        if split is not None:
            whole = split.whole_shape(shape)
            tensor = self._tensors.joined(kind, known, _all_rows(whole))
            tensor = split.own(tensor) if tensor.shape == whole else tensor
            check_shape(name, tensor.shape, shape)
            check_type(name, tensor.dtype, place.dtype)
            self._types[name] = tensor.dtype
            place.copy_(tensor)
            return
        for at, part in self._tensors.rows(kind, known, rows or _all_rows(shape), shape):
            check_type(name, part.dtype, place.dtype)
            self._types[name] = part.dtype
            if place.dim() and place.numel():
                place[at : at + len(part)].copy_(part)
            elif place.numel():
                place.copy_(part)

    def rows(self, name: str) -> Rows:
        """Return the rows of a trained parameter that are read here: those that this holder steps."""
        assert self._store is not None
        if isinstance(self._store, ShardedStore):
            return self._store.shards.rows(name)
        return _all_rows(self._store.layout.slots[name].shape)

    def find_delayed(self, back: int, name: str, like: Tensor) -> Tensor | None:
        """Read a parameter from `back` updates before the newest version; None if the checkpoint has it not."""
        kind = f"delayed.{back}"
        return self.read(kind, name, like) if self.has(kind, name) else None

    def optimizer_state(self) -> Iterator[tuple[tuple[str, str], Any]]:
        """Read the state of the stage's optimizer: kind and parameter, and the value, one at a time."""
        assert self._updater is not None
        values: Mapping[str, Any] = self._saved.facts["values"]
        what = f"optimizer{self.own if f'updates{self.own}' in self._saved.facts else ''}"
        places = [name.split("/", 2) for name in (*self._saved.names, *values) if name.startswith(f"{what}/")]
        kinds: dict[str, list[str]] = {}
        for _, kind, name in places:
            kinds.setdefault(name, []).append(re.split("[@~]", kind)[0])
        for name, parameter in self._updater.parameters.items():
            known = next((k for k in self._known(name) if k in kinds), None)
            if name not in self._updater.own or known is None:
                continue
            for kind in dict.fromkeys(kinds[known]):
                key = f"{what}/{kind}/{known}"
                value = values[key] if key in values else self._optimizer_rows(name, f"{what}/{kind}", known)
                if isinstance(value, Tensor) and (value.dim() or not parameter.dim()):
                    same = value.dtype == self._types.get(name)  # else it has a type of its own
                    value = value.to(parameter.dtype if same else value.dtype)
                moved = isinstance(value, Tensor) and value.dim()
                yield (kind, name), value.to(parameter.device) if moved else value

    def _optimizer_rows(self, name: str, kind: str, known: str) -> Tensor:
        """Read a tensor of the optimizer: the rows that this holder steps, from wherever they were saved.

        Args:
            name: of the parameter.
            kind: what it is, such as "optimizer/exp_avg".
            known: the name of the parameter in the checkpoint.

        Raises:
            CheckpointError: rows are missing.
        """
        split = self._splits.get(name)
        if split is None:
            return self._tensors.joined(kind, known, self.rows(name))
        assert self._store is not None
        whole = self._tensors.joined(kind, known, _all_rows(split.whole_shape(self._store.layout.slots[name].shape)))
        return split.own(whole) if whole.dim() else whole

    def settings(self) -> dict[str, dict[str, Any]]:
        """Read what was set by hand for the parameters of the stage, by parameter and setting."""
        assert self._updater is not None
        kept: dict[str, dict[str, Any]] = {}
        for key, value in self._saved.facts["values"].items():
            if key.startswith("stepped/"):
                kept.setdefault(key.removeprefix("stepped/"), {})
            elif key.startswith("setting/"):
                _, setting, name = key.split("/", 2)
                kept.setdefault(name, {})[setting] = value
        names = {name: next((k for k in self._known(name) if k in kept), None) for name in self._updater.parameters}
        return {name: kept[known] for name, known in names.items() if known is not None}

    def _known(self, name: str) -> list[str]:
        return self._names.get(name, [name])


def _all_rows(shape: torch.Size) -> Rows:
    """Return all rows of a parameter of this shape."""
    count = shape[0] if shape else 1
    return Rows(0, count, count)
