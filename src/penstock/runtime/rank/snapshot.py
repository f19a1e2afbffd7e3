"""The state of a stage between two batches, from which training goes on as if nothing had been.

It is taken directly after the update that bears version B, while later microbatches are under way: the next batch to
begin from is B. With double-buffered weights two versions belong to it, because batch B reads the one before; passes of
batch B that are under way are done again later. Module buffers are those from before the stage's first forward of
batch B. Random numbers depend on the batch alone, so no generator has a state worth keeping.

Names in a snapshot: `weights/NAME` (newest, in full precision), `older/NAME` (the version before), `delayed.K/NAME`
(the K-th version before the newest, where passes read with a delay of K or more), `average/NAME`,
`motion/NAME` (how the weights move, and others of a correction),
`fixed/NAME` (frozen parameters and persistent buffers; `fixed.1/NAME` for the second stage that holds them, in another
pipeline or in another direction of the same one, and so on) and
`optimizer/KIND/NAME`, where NAME is that of a parameter, the same at every depth. Where parallel pipelines have weights
of their own, `weights.1/NAME`, `older.1/NAME` and `optimizer.1/KIND/NAME` are those of the second pipeline, and so on;
weights are left out when pipelines have just met and agree. `common/NAME` and `momentum/NAME` are what they share.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.runtime.update.decisions import Decisions
from penstock.schedule.methods.combine import Combine
from penstock.stage.stage_runtime import StageRuntime
from penstock.weights.averaging import COMMON
from penstock.weights.corrections.base import Corrector


@dataclass(frozen=True)
class Snapshot:
    """A stage before batch `batch`.

    Attributes:
        batch: as many batches have been trained on.
        place, stage: whose: of the copies of the stage the first (0), the second (1), ...
        tensors: copies, by name.
        values: plain values that an optimizer remembers, by name.
        facts: what is the same on all stages.
        copied: when the tensors are complete, where a device copies them in its own time.
    """

    batch: int
    place: int
    stage: int
    tensors: dict[str, Tensor]
    values: dict[str, Any]
    facts: dict[str, Any]
    copied: torch.cuda.Event | None = None

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the tensors, until whoever has it clears them."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def on_cpu(self) -> dict[str, Tensor]:
        """The tensors as a file takes them; any thread may ask for them, whatever its current stream is."""
        if self.copied is not None:
            self.copied.synchronize()
        return {name: tensor.cpu().contiguous() for name, tensor in self.tensors.items()}


class Saving(NamedTuple):
    """When snapshots are taken, and where they go.

    Attributes:
        every: number of batches between two; they are taken when B is a multiple of it.
        sink: takes them, on the rank that has the stage; a call that lasts holds up the rank.
        make_room: called before one of a batch is taken, so that earlier ones need not live beside it; False if there
            is no room, and it is to be left out.
    """

    every: int
    sink: Callable[[Snapshot], None]
    make_room: Callable[[int], bool] = lambda _: True

    def wants(self, batch: int) -> bool:
        """Whether one is taken before `batch`."""
        return batch > 0 and batch % self.every == 0


class Saved(Protocol):
    """All stages of a pipeline, of any depth and width, before one batch."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What is the same on all stages, and `values` of them all."""
        ...

    @property
    def names(self) -> Collection[str]:
        """All tensors."""
        ...

    def tensor(self, name: str) -> Tensor:
        """One of them."""
        ...


def take(
    stage: StageRuntime,
    batch: int,
    decisions: Decisions | None,
    fixed: Mapping[str, Tensor] | None = None,
    older: Mapping[str, Tensor] | None = None,
) -> Snapshot:
    """A snapshot of a stage, between an update and the next pass.

    Args:
        stage: the stage; all that hold its stage have the same but for their buffers, so only the first keeps the rest,
            unless pipelines have weights of their own.
        batch: the newest version.
        decisions: as its rank knows them; None if it may know nothing, because nothing is trained there.
        fixed: copies of what is not trained from before the first forward of `batch`; None if that has not run.
        older: copies of the version before; None if that is still there, or nobody reads it.
    """
    if fixed is None:
        fixed = copies_of_fixed(stage)
    facts: dict[str, Any] = (
        {"batch": batch} if decisions is None else {"batch": batch, decisions.key: decisions.state()}
    )
    tensors = {f"fixed{_suffix(stage.place)}/{name}": tensor for name, tensor in fixed.items()}
    values: dict[str, Any] = {}
    if (not stage.place or _has_own(stage)) and stage.store is not None and stage.updater is not None:
        if older is None and batch - 1 in stage.store.versions:
            older = stage.store.copies(batch - 1)
        _add_trained(stage, batch, older or {}, tensors, values, facts)
    return Snapshot(batch, stage.place, stage.key.index, tensors, values, facts, _copied(tensors))


def _suffix(number: int) -> str:
    """Of what belongs to the second pipeline or place, the third one, and so on."""
    return f".{number}" if number else ""


def _has_own(stage: StageRuntime) -> bool:
    """Whether a stage of a further pipeline has weights of its own; of two directions the first one tells of them."""
    return stage.agreement is not None and stage.agreement.pipeline > 0 and not stage.key.direction


def _add_trained(
    stage: StageRuntime,
    batch: int,
    older: Mapping[str, Tensor],
    tensors: dict[str, Tensor],
    values: dict[str, Any],
    facts: dict[str, Any],
) -> None:
    """Add what a snapshot has of a stage's trained parameters."""
    store, updater, agreement = stage.store, stage.updater, stage.agreement
    assert store is not None
    assert updater is not None
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
    if stage.older is not None:
        tensors |= {f"delayed.{place}": tensor for place, tensor in stage.older.copies(batch).items()}
    if stage.average is not None:
        tensors |= {f"average/{name}": view.clone() for name, view in stage.average.views.items()}
    if stage.corrector is not None:
        facts |= {"correction": stage.corrector.name, "corrected_from": stage.corrector.began}
    for kind, buffer in (stage.corrector.buffers if stage.corrector is not None else {}).items():
        tensors |= {f"{kind}/{name}": view.clone() for name, view in buffer.views.items()}
    if agreement is not None:
        tensors |= agreement.copies()
    values |= {f"stepped/{name}": updater.stepper(name) for name in updater.parameters}


def _copied(tensors: Mapping[str, Tensor]) -> torch.cuda.Event | None:
    """When the work that the current stream has been given is done; None where all are on the CPU."""
    device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
    return None if device is None else torch.cuda.current_stream(device).record_event()


def copies_of_fixed(stage: StageRuntime) -> dict[str, Tensor]:
    """Copies of a stage's frozen parameters and persistent buffers."""
    return {name: tensor.clone() for name, tensor in stage.module.unversioned().items()}


def restore(stage: StageRuntime, saved: Saved, older: bool) -> None:
    """Bring a stage to where a snapshot was taken.

    Args:
        stage: the stage, with nothing in flight.
        saved: the snapshots of all stages.
        older: passes will read the version before the newest.

    Raises:
        CheckpointError: something is missing, or has another shape.
    """
    reader, batch = _Reader(stage, saved), int(saved.facts["batch"])
    reader.check()
    own = f"fixed.{stage.place}/"
    for name, tensor in stage.module.unversioned().items():
        kind = own if f"{own}{name}" in saved.names else "fixed/"
        tensor.copy_(reader.read(kind, name, tensor))
    if stage.store is None or stage.updater is None:
        return
    views = stage.store.master.views
    newest = {name: reader.read(reader.kind("weights", name), name, view) for name, view in views.items()}
    before = {name: reader.read(reader.kind("older", name), name, v) for name, v in views.items()} if older else None
    stage.store.restart(batch, newest, before)
    if stage.older is not None:
        stage.older.restart(batch, reader.find_delayed)
    if stage.agreement is not None:
        stage.agreement.recall(saved.facts)
        common = [(kind, name) for kind in COMMON for name in views if reader.has(f"{kind}/", name)]
        stage.agreement.load({f"{kind}/{name}": reader.read(f"{kind}/", name, views[name]) for kind, name in common})
    if stage.average is not None:
        kind = "average/" if reader.has("average/", next(iter(views))) else "weights/"
        stage.average.load({name: reader.read(kind, name, view) for name, view in views.items()})
    if stage.corrector is not None:
        _restore_corrector(stage.corrector, reader, saved)
    updates = saved.facts.get(f"updates{reader.own}", saved.facts["updates"])
    stage.updater.load(int(updates), reader.optimizer_state())
    stage.restore()


def _restore_corrector(corrector: Corrector, reader: _Reader, saved: Saved) -> None:
    """What a correction remembers; another one's memory is of no use, and what a stage has had no delay for is zero."""
    same = saved.facts.get("correction") == corrector.name
    corrector.began = int(saved.facts["corrected_from" if same else "updates"])
    for kind, buffer in corrector.buffers.items():
        known = {name for name in buffer.views if same and reader.has(f"{kind}/", name)}
        views = buffer.views.items()
        buffer.load({n: reader.read(f"{kind}/", n, v) if n in known else torch.zeros_like(v) for n, v in views})


class _Reader:
    """Finds the tensors of one stage in a checkpoint, whatever a shared parameter was called there."""

    def __init__(self, stage: StageRuntime, saved: Saved) -> None:
        self._stage, self._saved = stage, saved
        self.own = _suffix(0 if stage.agreement is None else stage.agreement.pipeline)  # of its pipeline's weights
        index = stage.key.index
        self._names: dict[str, list[str]] = {}
        for tie in stage.ties:
            for place, name in enumerate(tie.names_at(index)):
                self._names[name] = [name, *(names[place] for names in tie.names)]

    def check(self) -> None:
        """Make sure that the optimizer is the saved one, and that the blocks have all that was saved of them."""
        stage, saved = self._stage, self._saved
        for name in stage.updater.parameters if stage.updater is not None else ():
            kinds = {saved.facts["values"].get(f"stepped/{known}") for known in self._known(name)} - {None}
            here = None if stage.updater is None else stage.updater.stepper(name)
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
                    and rest.startswith(f"{block}.")
                    and rest not in known
                ):
                    raise CheckpointError(f"the checkpoint has a {rest}, which block {block!r} does not have")

    def has(self, kind: str, name: str) -> bool:
        """Whether there is one of this kind."""
        return any(kind + known in self._saved.names for known in self._known(name))

    def kind(self, what: str, name: str) -> str:
        """Where to read `what` of: that of the stage's own pipeline, if there is one, else that of the first."""
        own = f"{what}{self.own}/"
        return own if self.has(own, name) else f"{what}/"

    def read(self, kind: str, name: str, like: Tensor) -> Tensor:
        """A tensor of the stage."""
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
        """The version so many updates before the newest one; None where the checkpoint has none."""
        kind = f"delayed.{back}/"
        return self.read(kind, name, like) if self.has(kind, name) else None

    def optimizer_state(self) -> dict[tuple[str, str], Any]:
        """What the optimizer of the stage remembers, by kind and parameter."""
        assert self._stage.updater is not None
        state: dict[tuple[str, str], Any] = {}
        values: Mapping[str, Any] = self._saved.facts["values"]
        what = f"optimizer{self.own if f'updates{self.own}' in self._saved.facts else ''}"
        places = [name.split("/", 2) for name in (*self._saved.names, *values) if name.startswith(f"{what}/")]
        kinds: dict[str, list[str]] = {}
        for _, kind, name in places:
            kinds.setdefault(name, []).append(kind)
        for name, parameter in self._stage.updater.parameters.items():
            known = next((k for k in self._known(name) if k in kinds), None)
            for kind in kinds[known] if known is not None else ():
                key = f"{what}/{kind}/{known}"
                value = values[key] if key in values else self._saved.tensor(key)
                state[kind, name] = value.to(parameter.device) if isinstance(value, Tensor) and value.dim() else value
        return state

    def _known(self, name: str) -> list[str]:
        return self._names.get(name, [name])


def check_pipelines(saved: Saved, combine: Combine, width: int) -> None:
    """Make sure that there is a pipeline for each that has weights of its own, and what they have in common.

    Raises:
        CheckpointError: there is none, or one too many, or nothing in common.
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


def check_names(saved: Saved, blocks: Collection[str]) -> None:
    """Make sure that a checkpoint is of this model.

    Raises:
        CheckpointError: it has tensors of blocks that the model does not have.
    """
    foreign = [name for name in saved.names if not any(f"/{block}." in name for block in blocks)]
    if foreign:
        raise CheckpointError(
            f"the checkpoint has {len(foreign)} tensors of blocks that the model does not have, the first of them "
            f"{foreign[0]}; blocks of the model: {', '.join(blocks)}"
        )
