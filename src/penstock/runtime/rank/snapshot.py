"""Snapshots: the state of a stage between two batches, from which training resumes bit for bit.

A snapshot is taken directly after the update that creates version B, while later microbatches are in flight; training
resumes from it with batch B. With double-buffered weights it has two versions, because batch B reads the one before;
passes of batch B that are in flight are repeated when training resumes. Module buffers are those from before the
stage's first forward of batch B. Random numbers depend on the batch alone, so no state of a generator is saved.

Names in a snapshot: `weights/NAME` (newest, in full precision), `older/NAME` (the version before), `delayed.K/NAME`
(the K-th version before the newest, where passes read with a delay of K or more), `average/NAME`,
`motion/NAME` (how the weights move, and others of a correction),
`fixed/NAME` (frozen parameters and persistent buffers; `fixed.1/NAME` for the second stage that holds them, in another
pipeline or in another direction of the same one, and so on) and
`optimizer/KIND/NAME`, where NAME is that of a parameter, the same at every depth. Of values that are not tensors,
`setting/KEY/NAME` was set by hand in the parameter group of NAME between two runs. Where parallel pipelines have
weights of their own, `weights.1/NAME`, `older.1/NAME` and `optimizer.1/KIND/NAME` are those of the second pipeline, and
so on; weights are left out when pipelines have just met and agree. `common/NAME` and `momentum/NAME` are what they
share.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from penstock.checks import check_whole
from penstock.errors import CheckpointError, ConfigError
from penstock.partition.blocks import block_of
from penstock.runtime.update.decisions import Decisions
from penstock.schedule.methods.combine import Combine
from penstock.stage.stage_runtime import StageRuntime
from penstock.stage.stage_weights import TrainedWeights
from penstock.weights.averaging import COMMON
from penstock.weights.corrections.base import Corrector


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
        copied: recorded when the tensors are complete, where a device copies them asynchronously.
    """

    batch: int
    place: int
    stage: int
    tensors: dict[str, Tensor]
    values: dict[str, Any]
    facts: dict[str, Any]
    copied: torch.cuda.Event | None = None

    def __repr__(self) -> str:
        """Return which state it is, and how large."""
        return f"<Snapshot of stage {self.stage} (copy {self.place}) before batch {self.batch}: {self.nbytes} bytes>"

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the tensors; computed once, so it must be read before their owner clears them."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def on_cpu(self) -> dict[str, Tensor]:
        """Copy the tensors to contiguous CPU memory, for a file; safe in any thread, on any current stream."""
        if self.copied is not None:
            self.copied.synchronize()
        return {name: tensor.cpu().contiguous() for name, tensor in self.tensors.items()}


class Saving(NamedTuple):
    """When to take snapshots during a run, and where they go: the `save` argument of `Pipeline.run`.

    `Checkpoints.every` makes one that writes checkpoints.

    Attributes:
        every: snapshots are taken after every so many batches, counted from the start of training.
        sink: called with the snapshot of each stage in the process that holds it, which waits until it returns.
        make_room: called with the number of batches before a snapshot is taken, so that earlier ones can be freed;
            returns False to leave it out.
    """

    every: int
    sink: Callable[[Snapshot], None]
    make_room: Callable[[int], bool] = lambda _: True

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


def take_snapshot(
    stage: StageRuntime,
    batch: int,
    decisions: Decisions | None,
    fixed: Mapping[str, Tensor] | None = None,
    older: Mapping[str, Tensor] | None = None,
) -> Snapshot:
    """Take a snapshot of a stage, between an update and the next pass.

    Args:
        stage: the stage. All copies of a stage have the same state but for their module buffers, so only the first
            copy saves the rest, unless pipelines have weights of their own.
        batch: the newest version.
        decisions: of its rank; None where nothing is trained, as the rank may not have received any.
        fixed: copies of untrained tensors from before the first forward of `batch`; None if that has not run.
        older: copies of the version before; None if that is still alive, or not read again.
    """
    if fixed is None:
        fixed = copies_of_fixed(stage)
    facts: dict[str, Any] = (
        {"batch": batch} if decisions is None else {"batch": batch, decisions.key: decisions.state()}
    )
    tensors = {f"fixed{_suffix(stage.place)}/{name}": tensor for name, tensor in fixed.items()}
    values: dict[str, Any] = {}
    weights = stage.weights
    if (not stage.place or _has_own(stage)) and isinstance(weights, TrainedWeights):
        if older is None and batch - 1 in weights.store.versions:
            older = weights.store.copies(batch - 1)
        _add_trained(weights, batch, older or {}, tensors, values, facts)
    return Snapshot(batch, stage.place, stage.key.index, tensors, values, facts, _copied(tensors))


def _suffix(number: int) -> str:
    """Return the suffix in names for the state of the second pipeline or copy (.1), the third (.2), and so on."""
    return f".{number}" if number else ""


def _has_own(stage: StageRuntime) -> bool:
    """Return True if a stage of a further pipeline has weights of its own; only its first direction saves them."""
    agreement = stage.weights.agreement
    return agreement is not None and agreement.pipeline > 0 and not stage.key.direction


def _add_trained(
    weights: TrainedWeights,
    batch: int,
    older: Mapping[str, Tensor],
    tensors: dict[str, Tensor],
    values: dict[str, Any],
    facts: dict[str, Any],
) -> None:
    """Add the state of a stage's trained parameters to a snapshot."""
    store, updater, agreement, corrector = weights.store, weights.updater, weights.agreement, weights.corrector
    own = _suffix(0 if agreement is None else agreement.pipeline)
    apart = agreement is not None and not agreement.agrees(batch)
    if not own or apart:
        tensors |= {f"weights{own}/{name}": tensor for name, tensor in store.newest_copies().items()}
    tensors |= {f"older{own}/{name}": tensor for name, tensor in older.items()}
    for (kind, name), value in updater.state().items():
        kept = tensors if isinstance(value, Tensor) else values
        kept[f"optimizer{own}/{kind}/{name}"] = value
    facts |= {f"updates{own}": updater.updates} | ({} if agreement is None else agreement.facts())
    if apart and agreement is not None:
        facts |= {"pipelines": agreement.width}
    if own:
        return
    if weights.older is not None:
        tensors |= {f"delayed.{place}": tensor for place, tensor in weights.older.copies(batch).items()}
    if weights.average is not None:
        tensors |= {f"average/{name}": view.clone() for name, view in weights.average.views.items()}
    if corrector is not None:
        facts |= {"correction": corrector.name, "corrected_from": corrector.began}
        for kind, buffer in corrector.buffers.items():
            tensors |= {f"{kind}/{name}": view.clone() for name, view in buffer.views.items()}
    if agreement is not None:
        tensors |= agreement.copies()
    values |= {f"stepped/{name}": updater.stepper(name) for name in updater.parameters}
    values |= {f"setting/{key}/{name}": value for (key, name), value in updater.settings_by_hand().items()}


def _copied(tensors: Mapping[str, Tensor]) -> torch.cuda.Event | None:
    """Record an event after the copies on the current stream; None if all tensors are on the CPU."""
    device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
    return None if device is None else torch.cuda.current_stream(device).record_event()


def copies_of_fixed(stage: StageRuntime) -> dict[str, Tensor]:
    """Copy a stage's frozen parameters and persistent buffers."""
    return {name: tensor.clone() for name, tensor in stage.module.unversioned().items()}


def restore(stage: StageRuntime, saved: SavedState, older: bool, blocks: Collection[str]) -> None:
    """Restore a stage from a snapshot.

    Args:
        stage: the stage, with nothing in flight.
        saved: the snapshots of all stages.
        older: passes will read the version before the newest.
        blocks: names of all blocks of the model.

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


def _restore_trained(weights: TrainedWeights, reader: _StageReader, saved: SavedState, older: bool) -> None:
    """Restore the state of a stage's trained parameters."""
    views, agreement = weights.store.master.views, weights.agreement
    newest = {name: reader.read(reader.kind("weights", name), name, view) for name, view in views.items()}
    before = {name: reader.read(reader.kind("older", name), name, v) for name, v in views.items()} if older else None
    weights.store.restart(int(saved.facts["batch"]), newest, before)
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
    weights.updater.load_settings(reader.settings())


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
        self.own = _suffix(0 if agreement is None else agreement.pipeline)  # of its pipeline's weights
        self._updater = weights.updater if isinstance(weights, TrainedWeights) else None
        index = stage.key.index
        self._names: dict[str, list[str]] = {}
        for tie in stage.ties:
            for place, name in enumerate(tie.names_at(index)):
                self._names[name] = [name, *(names[place] for names in tie.names)]

    def check(self, blocks: Collection[str]) -> None:
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
            known = {f"{block}.{name}" for name in module.state_dict()}
            for name in saved.names:
                kind, _, rest = name.partition("/")
                if (
                    kind.partition(".")[0] in ("weights", "fixed")
                    and rest not in known
                    and block_of(rest, blocks) == block
                ):
                    raise CheckpointError(f"the checkpoint has a {rest}, which block {block!r} does not have")

    def has(self, kind: str, name: str) -> bool:
        """Return True if the checkpoint has a tensor of this kind."""
        return any(kind + known in self._saved.names for known in self._known(name))

    def kind(self, what: str, name: str) -> str:
        """Return the prefix of a tensor: of the stage's own pipeline if saved, else of the first one."""
        own = f"{what}{self.own}/"
        return own if self.has(own, name) else f"{what}/"

    def read(self, kind: str, name: str, like: Tensor) -> Tensor:
        """Read a tensor of the stage.

        Raises:
            CheckpointError: it is missing or has another shape.
        """
        found = next((kind + known for known in self._known(name) if kind + known in self._saved.names), None)
        if found is None:
            raise CheckpointError(f"the checkpoint has no {kind}{name}, which {self._stage.module.where} needs")
        tensor = self._saved.tensor(found)
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
            for kind in kinds[known] if known is not None else ():
                key = f"{what}/{kind}/{known}"
                value = values[key] if key in values else self._saved.tensor(key)
                state[kind, name] = value.to(parameter.device) if isinstance(value, Tensor) and value.dim() else value
        return state

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


def check_names(saved: SavedState, blocks: Collection[str]) -> None:
    """Make sure that a checkpoint has only tensors of the model's blocks.

    Raises:
        CheckpointError: it has tensors of blocks that the model does not have.
    """
    foreign = [name for name in saved.names if not any(f"/{block}." in name for block in blocks)]
    if foreign:
        raise CheckpointError(
            f"the checkpoint has {len(foreign)} tensors of blocks that the model does not have, the first of them "
            f"{foreign[0]}; blocks of the model: {', '.join(blocks)}"
        )
