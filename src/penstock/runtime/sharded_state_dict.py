"""The weights of stages as DTensors, which torch.distributed.checkpoint saves and loads at any width and depth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from penstock.comm.collective.control_plane import gather_json
from penstock.comm.collective.shard_exchange import GlooShards
from penstock.comm.communicators import holders_of
from penstock.comm.core.rank_grid import Holder
from penstock.comm.device_mesh import width_mesh
from penstock.errors import CapabilityError, ConfigError
from penstock.partition.replay.model_stages import UnitBlocks
from penstock.runtime.engine.lifecycle import between_runs
from penstock.runtime.full_state import names_in
from penstock.runtime.model_weights import ModelWeights
from penstock.stage.stage_runtime import StageRuntime

_WHAT = "loading a sharded state"


class ShardedStateDict(ModelWeights):
    """The part of `Pipeline` that shows weights as DTensors."""

    _width_mesh: DeviceMesh | None = None

    @between_runs()
    def sharded_state_dict(self, *, averaged: bool = False) -> dict[str, Tensor]:
        """Return copies of the parameters of the stages here, of which each pipeline has its rows, and of buffers.

            import torch.distributed.checkpoint as dcp

            dcp.save({"model": pipeline.sharded_state_dict()}, checkpoint_id="weights")

            state = {"model": pipeline.sharded_state_dict()}  # of another width, depth or sharding
            dcp.load(state, checkpoint_id="weights")
            pipeline.load_sharded_state_dict(state["model"])

        Call it between two runs; all ranks call it together. A trained parameter is a DTensor, divided by its rows
        among the parallel pipelines (`Shard(0)`) whether they shard weights otherwise or not; scalars, frozen
        parameters and buffers are plain tensors, buffers those of the first pipeline. Names are those of
        `full_state_dict`; shared parameters come under each of their names. For optimizers and older versions of
        weights there is `Checkpoints`.

        Args:
            averaged: the averaged weights (`ema_decay`).

        Raises:
            ConfigError: all ranks are in one process, where `full_state_dict` has everything; or another process has
                trained the stages here further, for another pipeline of the model.
            CapabilityError: stages are held twice by a pipeline, or shared by tensor parallelism; pipelines have
                weights of their own; or they do not span the whole job, and have no mesh.
            PenstockError: a run is under way.
            TransportError: a peer is dead, or did not call this in time.
        """
        from torch.distributed.tensor import DTensor, Shard  # takes half a second, which only this needs

        mesh, found, buffers = self._mesh_of_holders(), dict[str, Tensor](), list[list[Tensor]]()
        for stage in self._in_order():
            kept = stage.module.tensors.unversioned().keys() - stage.module.tensors.frozen().keys()
            buffers.append([])
            for first, tensor in self._state_of([stage], averaged).items():
                shown = tensor.detach()
                if first in stage.module.tensors.trained and shown.dim():
                    rows = self._chunk(shown).clone()
                    form = shown.shape, shown.stride()
                    shown = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=form[0], stride=form[1])
                else:
                    shown = shown.clone()
                    buffers[-1] += [shown.reshape(-1)] if first in kept else []
                found |= dict.fromkeys(self._names(stage)[first], shown)
        self._exchange([[own, *[[]] * (self.grid.width - 1)] for own in buffers], "gathering buffers")
        return found

    @between_runs()
    def load_sharded_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Let the next run begin with other weights and buffers, in the form that `sharded_state_dict` has.

        Call it between two runs; all ranks call it together, each with its rows, and have the others from one another.
        As with `load_state_dict`, optimizers go on as they are.

        Args:
            state: by the names of `sharded_state_dict`, divided in the same way.

        Raises:
            ConfigError: something is missing, or of another form, here or on another rank; nothing has been loaded.
            CapabilityError, PenstockError, TransportError: as of `sharded_state_dict`.
        """
        mesh, stages = self._mesh_of_holders(), list(self._in_order())
        fault = next((text for stage in stages for text in self._faults(stage, state, mesh)), None)
        for rank, text in enumerate(gather_json(fault, _WHAT, self.grid.everyone)):
            if text is not None:
                raise ConfigError(f"load_sharded_state_dict: nothing has been loaded; on rank {rank} {text}")
        self._exchange([self._put(stage, state) for stage in stages], _WHAT)

    def _exchange(self, parts: Sequence[Sequence[Sequence[Tensor]]], what: str) -> None:
        """Give all pipelines what each of them has; parts are flat tensors, by stage and pipeline."""
        exchange, holders = GlooShards(self.grid.process, self.grid.control), holders_of(self.schedule, self.grid.width)
        try:
            for stage, shards in zip(self._in_order(), parts, strict=True):
                me = Holder(self._ranks[0].key.pipeline, stage.key)
                exchange.gather(holders[stage.key.index], me, self._spans.batches, shards).wait(self.timeout, what)
        finally:
            exchange.close()

    def _put(self, stage: StageRuntime, state: Mapping[str, Tensor]) -> list[list[Tensor]]:
        """Write what is here of a state into a stage; returns the memory of divided parameters by pipeline."""
        parts: list[list[Tensor]] = [[] for _ in range(self.grid.width)]
        with torch.no_grad():
            for first, tensor in self._state_of([stage], averaged=False).items():
                given = _local(state[self._names(stage)[first][0]])
                if first not in stage.module.tensors.trained or not tensor.dim():
                    tensor.copy_(given)
                    continue
                self._chunk(tensor).copy_(given)
                for pipeline, part in enumerate(parts):
                    part.append(self._chunk(tensor.detach(), pipeline).reshape(-1))
        return parts

    def _faults(self, stage: StageRuntime, state: Mapping[str, Tensor], mesh: DeviceMesh) -> Iterator[str]:
        """Yield what is wrong with a state, for a stage."""
        for first, tensor in self._state_of([stage], averaged=False).items():
            name = self._names(stage)[first][0]
            given = state.get(name) if isinstance(state, Mapping) else None
            if not isinstance(given, Tensor):
                yield f"there is no tensor {name!r}; pass what sharded_state_dict() returned, with other values in it"
                continue
            divided = first in stage.module.tensors.trained and tensor.dim() > 0
            wanted = self._chunk(tensor).shape if divided else tensor.shape
            other = divided and getattr(given, "device_mesh", None) != mesh
            if given.shape != tensor.shape or other or _local(given).shape != wanted:
                form = f"a DTensor of shape {tuple(tensor.shape)} with Shard(0) on {mesh}" if divided else "a tensor"
                yield f"{name} is {type(given).__name__} of shape {tuple(given.shape)}, where {form} is wanted"

    def _chunk(self, tensor: Tensor, pipeline: int | None = None) -> Tensor:
        """Return the rows of a tensor that a pipeline has, that of this process if None, as DTensor divides them."""
        place = self._ranks[0].key.pipeline if pipeline is None else pipeline
        size = -(-len(tensor) // self.grid.width)
        return tensor[min(place * size, len(tensor)) : (place + 1) * size]

    def _names(self, stage: StageRuntime) -> dict[str, list[str]]:
        """Return, by the names that tensors of a stage have in the pipeline, those of `full_state_dict`."""
        if isinstance(self._given[1], UnitBlocks):
            return names_in(self._given[1].model, [stage])
        names = {name: [name] for name in stage.module.tensors.state()}
        for name, first in stage.module.tensors.aliases().items():
            names[first].append(name)
        return names

    def _in_order(self) -> Iterator[StageRuntime]:
        """Yield the stages of this process, in an order that parallel pipelines have in common."""
        yield from (stage for _, stage in sorted(self.stages.items()))

    def _mesh_of_holders(self) -> DeviceMesh:
        """Return the mesh of the ranks that hold the same stages in parallel pipelines; made once, by all ranks."""
        self._held.check()
        if self.grid.group is None:
            raise ConfigError(
                "all ranks are in one process, so there is nothing to divide: full_state_dict() returns the whole "
                "model, and load_state_dict() takes it"
            )
        for fault, why in (
            (self.grid.tensor.size > 1, "with tensor parallelism"),
            (self.combine.apart, f"of pipelines that have weights of their own (combine={self.combine.kind})"),
            (self.schedule.directions > 1, f"of {self.schedule.name}, whose pipelines hold stages twice"),
        ):
            if fault:
                raise CapabilityError(
                    f"weights {why} are not shown as DTensors yet; take full_state_dict(), or penstock.Checkpoints"
                )
        gather_json(None, "agreeing to a call for sharded states", self.grid.everyone)  # or all would wait in vain
        if self._width_mesh is None:
            device = next(iter(self.stages.values())).module.device
            self._width_mesh = width_mesh(self.grid, self._plan.options.data_parallel.mesh, device.type)
        return self._width_mesh


def _local(tensor: Tensor) -> Tensor:
    """Return what this process has of a tensor: its part of a DTensor, all of another one."""
    whole = getattr(tensor, "to_local", None)
    return tensor if whole is None else whole()
