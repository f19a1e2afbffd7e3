"""The weights of the whole model, as users save and load them: by name, from all ranks and into the unsplit model."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from penstock.comm.collective.control_plane import gather_json
from penstock.errors import ConfigError
from penstock.partition.replay.model_stages import UnitBlocks
from penstock.partition.replay.units import name_in_model
from penstock.runtime.built_pipeline import BuiltPipeline
from penstock.runtime.engine.lifecycle import between_runs
from penstock.runtime.full_state import (
    WHAT,
    check_fits_model,
    gather_state,
    names_in,
    own_parts,
    shares_of,
    with_all_names,
    with_the_rest,
    with_whole_tensors,
)
from penstock.stage.stage_runtime import StageRuntime

_LOG = logging.getLogger(__name__)
_WITHIN_A_RUN = (
    "To save within a run: checkpoints = penstock.Checkpoints(pipeline, folder), then pipeline.run(loader, "
    "save=checkpoints.every(n)), every n batches"
)
_NO_OPTIMIZERS = (
    "load_state_dict has loaded weights, and no state of optimizers. To go on with a run that was interrupted: "
    "checkpoints = penstock.Checkpoints(pipeline, folder); checkpoints.load()"
)


class ModelWeights(BuiltPipeline):
    """The part of `Pipeline` that hands out weights and takes others."""

    @between_runs(_WITHIN_A_RUN)
    def full_state_dict(self, model: nn.Module | None = None, *, averaged: bool = False) -> dict[str, Tensor]:
        """Return parameters and buffers of the whole model, which the model that was not divided can load.

            weights = pipeline.full_state_dict()
            if weights:  # rank 0
                torch.save(weights, "model.pt")

        Call it between two runs. Between processes all ranks call it together; rank 0 gets the tensors, on the CPU, and
        the others an empty dict, which refuses to be saved over the file of rank 0. Names are those of the blocks and
        of what is in them: of blocks ``{"transformer.h.0": ..., "lm_head": ...}`` those of a model that has them there.
        Shared parameters come under each of their names. Of several pipelines it is the first one's state, or that of
        the model that they have in common.

        Args:
            model: whose names tensors are to have, if blocks were given under others (as a list, or in modules made for
                the pipeline). They are found by identity, so it is the model that the blocks were taken from. What it
                has beside the blocks is there, too, as it is on rank 0.
            averaged: the averaged weights (`ema_decay`).

        Raises:
            ConfigError: the blocks were not taken from that model, or modules have changed so that the optimizer could
                not follow, or have weights from before another pipeline trained them further; here or on another rank.
            PenstockError: a run is under way.
            TransportError: a peer is dead, or did not call this in time.
        """
        if model is None and isinstance(self._given[1], UnitBlocks):
            model = self._given[1].model
        stages = [stage for key, stage in self.stages.items() if key.direction == 0]  # others hold copies of them
        own, fault = {}, None
        try:  # the others must hear of a failure before it is raised here
            self._held.check()
            own = self._state_of(stages, averaged)
        except ConfigError as error:
            fault = str(error)
        if self.grid.tensor.size > 1:
            fault = next(filter(None, gather_json(fault, WHAT, self.grid.everyone)), None)
            own = own if fault else with_whole_tensors(own, self.grid, stages)
        try:
            own = with_all_names(own, stages) if fault is None else {}
            if model is not None and fault is None:
                names = names_in(model, stages)
                own = {new: tensor for name, tensor in own.items() for new in names.get(name, ())}
        except ConfigError as error:
            fault = str(error)
        found = gather_state(own, self.grid, fault)
        return with_the_rest(found, model) if found and model is not None else found

    def state_dict(self, *, averaged: bool = False) -> dict[str, Tensor]:
        """Return parameters and buffers of the stages in this process, newest or averaged; shared ones under one name.

        The tensors share the pipeline's memory, in which the next updates write other versions and gradients: clone
        what is to outlive the next batch. What is written into them between two runs is where the next one begins. In
        one process other copies of the same stage take it over; between processes write the same into all of them.

        Where processes share stages by tensor parallelism, these are the parts of this one.

        Where parallel pipelines have a model in common beside their own weights (`Combine`), parameters are those of
        that model, which begins anew from what has been written into the weights of all pipelines between two runs. Of
        two directions of a stage, the buffers are those of the first, where both are here, as evaluations read them.

        Args:
            averaged: the averaged weights (`ema_decay`).

        Raises:
            ConfigError: another process has trained the stages here further, for another pipeline of the model.
        """
        if self._spans.life.at_rest:
            self._held.check()
        state = self._state_of(self._by_place(), averaged)
        return {name: tensor for name, tensor in state.items() if name_in_model(name) == name}

    def _state_of(self, stages: Iterable[StageRuntime], averaged: bool) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for stage in stages:
            if self._spans.life.at_rest:
                (stage.adopt if stage.weights.agreement is None else stage.refresh)()
            state.update(stage.module.tensors.state())
            state.update(stage.weights.newest_tensors())  # in the middle of a run another version may be bound
            state.update(stage.weights.presented(averaged))
        return state

    @between_runs()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Let the next run begin with other weights and buffers, such as those that `full_state_dict` returned.

        As with a model in plain torch, optimizers go on as they are. To go on with a run as if it had not ended, with
        its optimizers, schedulers and older versions, save and load it with `penstock.Checkpoints`.

            pipeline.load_state_dict(torch.load("model.pt"))  # between processes on every rank

        Args:
            state: by the names of `full_state_dict()`, those of the whole model. (What has the names of the unsplit
                model is loaded into that, on every rank; the pipeline takes it over.)

        Raises:
            ConfigError: a name is missing or unknown, or a tensor has another shape; nothing has been loaded then.
            PenstockError: a run is under way.
        """
        blocks = self._given[1]
        if isinstance(blocks, UnitBlocks):
            check_fits_model(state, blocks.model)
            blocks.load(state)
            _LOG.warning(_NO_OPTIMIZERS)
            return
        if self.grid.tensor.size > 1 and isinstance(state, Mapping):
            state = own_parts(state, self._by_place())
        here = dict(pair for stage in self._by_place() for pair in stage.module.modules.items())
        own = here | {name: blocks[name] for name in here if isinstance(blocks[name], nn.Module)}
        shares = shares_of(state, blocks, own)
        for name, share in shares.items():  # a block that another process trains has the same weights then
            block = own.get(name, blocks[name])
            if isinstance(block, nn.Module):
                block.load_state_dict(share, strict=False)
        _LOG.warning(_NO_OPTIMIZERS)
