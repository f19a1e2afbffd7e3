"""Restores stages from a saved state, whatever the depth, width, sharding and method were.

Of what holders of a stage divide among them, each reads its own rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.comm.collective.control_plane import gather_json
from penstock.comm.collective.shard_exchange import GlooShards, LocalShards
from penstock.comm.communicators import holders_of
from penstock.comm.core.rank_grid import Holder, RankGrid
from penstock.comm.core.ticket import Ticket
from penstock.errors import CheckpointError
from penstock.partition.parameter_names import block_of, prefix_of
from penstock.runtime.rank.snapshot import WRITTEN, older_kind, suffix
from penstock.runtime.restore.saved_state import ANOTHER_MODEL, SavedState, SavedTensors, check_shape, check_type
from penstock.runtime.setup.rank_state import RankState
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.ir.sharding import Level
from penstock.stage.checks.changes_between_runs import find_parameters
from penstock.stage.sharded_stage_weights import ShardedWeights
from penstock.stage.stage_runtime import StageRuntime
from penstock.stage.trained_stage_weights import TrainedWeights
from penstock.weights.corrections.base import Corrector
from penstock.weights.memory.row_shards import Rows
from penstock.weights.replica_averaging import COMMON
from penstock.weights.sharded_store import ShardedStore

_WHAT = "loading a saved state, in load()"


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


# Restores stages from a saved state, whatever the depth, width and method were that it was saved with.
#
# Each holder of a stage reads the rows that it owns into their places, one tensor at a time; what others have read of
# the same stage comes from them, before `Restored.finish`.


class Restored:
    """A stage whose state is read from a snapshot, with nothing in flight.

    Args:
        stage: the stage.
        saved: the snapshots of all stages.
        tensors: of them.
        older: how many versions before the newest passes will read.
        blocks: all of the model.

    Attributes:
        stage: as given.
        rest: the memory of weights of which only the own rows have been read, as flat tensors, by owner of the rows.

    Raises:
        CheckpointError: a tensor is missing or has another shape, or the optimizer is another one.
    """

    def __init__(
        self,
        stage: StageRuntime,
        saved: SavedState,
        tensors: SavedTensors,
        older: int,
        blocks: Mapping[str, Any],
    ) -> None:
        self.stage, self._saved, self._reader = stage, saved, StageReader(stage, saved, tensors, blocks)
        self.rest: list[list[Tensor]] = []
        self._ahead = False
        self._reader.check()
        for name, tensor in stage.module.tensors.unversioned().items():
            self._reader.fill(self._reader.fixed(name), name, tensor.shape, tensor)
        if isinstance(stage.weights, TrainedWeights):
            self._read_trained(stage.weights, older)

    def _read_trained(self, weights: TrainedWeights, older: int) -> None:
        """Read the state of a stage's trained parameters; what is not divided is left to `finish`."""
        reader, saved, store = self._reader, self._saved, weights.store
        self._ahead = store.reads_ahead and older > 0
        room = store.restart(int(saved.facts["batch"]), older)
        self._fill(weights, room.newest, partial(reader.kind, "weights"))
        for back, views in enumerate(room.older, 1):
            kind = partial(reader.kind, f"ahead.{back}" if self._ahead else older_kind(back))
            self._fill(weights, views, kind, room.older_rows)
        if room.ahead is not None and self._ahead:
            self._fill(weights, room.ahead, partial(reader.kind, "ahead"))
        if weights.average is not None:
            saved_average = any(reader.has("average", name) for name in weights.average.views)
            weights.average.rewrite()
            self._fill(weights, weights.average.views, partial(reader.kind, "average" if saved_average else "weights"))
        updates = saved.facts.get(f"updates{reader.own}", saved.facts["updates"])
        weights.updater.load(int(updates), reader.optimizer_state())
        weights.updater.rates.load(reader.settings(), weights.updater.updates)

    def _fill(
        self, weights: TrainedWeights, views: Mapping[str, Tensor], kind: Callable[[str], str], rows_alone: bool = False
    ) -> None:
        """Read weights, of those that are divided the own rows, into their places.

        Args:
            weights: of the stage.
            views: where they go, by name.
            kind: what they are called in the saved state, by name.
            rows_alone: these are places for the own rows, and not for all.
        """
        shards = weights.store.shards if isinstance(weights, ShardedWeights) and not rows_alone else None
        for name, view in views.items():
            rows = self._reader.rows(name)
            place = view if shards is None else rows.of(view)
            self._reader.fill(kind(name), name, weights.store.layout.slots[name].shape, place, rows)
        if shards is not None and shards.holders > 1:
            parts = shards.flat(views)
            self.rest = [[*mine, *more] for mine, more in zip(self.rest or [[]] * len(parts), parts, strict=True)]

    def finish(self) -> None:
        """Go on with the weights, which are whole now, and read what is never divided."""
        if isinstance(self.stage.weights, TrainedWeights):
            self._finish_trained(self.stage.weights)
        self.stage.restore()

    def _finish_trained(self, weights: TrainedWeights) -> None:
        reader, saved, views, agreement = self._reader, self._saved, weights.store.master.views, weights.agreement
        weights.store.refilled(ahead=self._ahead)
        weights.watch_writes()
        weights.rewritten = WRITTEN in saved.facts
        if weights.older is not None:
            weights.older.restart(int(saved.facts["batch"]), reader.find_delayed)
        if agreement is not None:
            agreement.recall(saved.facts)
            common = [(kind, name) for kind in COMMON for name in views if reader.has(kind, name)]
            agreement.load({f"{kind}/{name}": reader.read(kind, name, views[name]) for kind, name in common})
        if weights.corrector is not None:
            _restore_corrector(weights.corrector, reader, saved)


def _restore_corrector(corrector: Corrector, reader: StageReader, saved: SavedState) -> None:
    """Restore the state of a correction; it begins at zero where the checkpoint has none, or that of another one."""
    same = saved.facts.get("correction") == corrector.name
    corrector.began = int(saved.facts["corrected_from" if same else "updates"])
    for kind, buffer in corrector.buffers.items():
        known = {name for name in buffer.views if same and reader.has(kind, name)}
        views = buffer.views.items()
        buffer.load({n: reader.read(kind, n, v) if n in known else torch.zeros_like(v) for n, v in views})


# Restores the stages of all ranks from a saved state, of which each rank reads what it owns.
#
# Where stages are divided among pipelines, every row is read from the disk once, and the other holders have it from its
# owner.


def restore_all(
    saved: SavedState,
    older: int,
    blocks: Mapping[str, Any],
    ranks: Sequence[RankState],
    grid: RankGrid,
    schedule: Schedule,
) -> None:
    """Restore the stages of this process; where stages are divided, all processes call this together.

    Args:
        saved: the state.
        older: how many versions before the newest passes will read.
        blocks: all of the model.
        ranks: of this process.
        grid: of all.
        schedule: that they run.

    Raises:
        CheckpointError: a tensor is missing or has another shape, or an optimizer is another one; where stages are
            divided, here or on another rank.
        TransportError: a peer is dead, or has not called this in time.
    """
    divided = schedule.sharding.level is not Level.NONE
    tensors, found, failure = SavedTensors(saved), list[tuple[int, Restored]](), None
    try:
        for state in ranks:
            for _, stage in sorted(state.stages.items()):  # an order that parallel pipelines have in common
                found.append((state.key.pipeline, Restored(stage, saved, tensors, older, blocks)))
    except Exception as error:  # the others must hear of it before it is raised here
        failure = error
    told = []
    if divided and grid.group is not None:
        told = gather_json(None if failure is None else str(failure), _WHAT, grid.everyone)
    if failure is not None:
        raise failure
    elsewhere = next(((rank, text) for rank, text in enumerate(told) if text is not None), None)
    if elsewhere is not None:
        raise CheckpointError(f"rank {elsewhere[0]} could not load its part of the checkpoint: {elsewhere[1]}")
    if divided:
        _complete(found, grid, schedule, int(saved.facts["batch"]))
    for _, restored in found:
        restored.finish()


def _complete(found: Sequence[tuple[int, Restored]], grid: RankGrid, schedule: Schedule, batch: int) -> None:
    """Exchange the rows that the holders of each stage have read."""
    exchange = LocalShards() if grid.group is None else GlooShards(grid.process, grid.control)
    holders = holders_of(schedule, grid.width)
    tickets: list[Ticket] = []
    try:
        for pipeline, restored in found:
            if restored.rest:
                key = restored.stage.key
                tickets.append(exchange.gather(holders[key.index], Holder(pipeline, key), batch, restored.rest))
        for ticket in tickets:
            ticket.wait(grid.patience.total_seconds(), _WHAT)
    finally:
        exchange.close()
