"""Saves the trained weights of a run: every rank writes its stage, one of them the index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from penstock.comm.collective.control_plane import gather_json
from penstock.comm.core.rank_grid import RankGrid
from penstock.errors import CheckpointError
from penstock.runtime.full_state import gather_state, with_whole_tensors
from penstock.runtime.pipeline import Pipeline
from penstock.train.export.weights_folder import save_index, save_stage
from penstock.train.prepare.prepare_run import Prepared
from penstock.train.setup.model_shape import describe_model

AVERAGED = "averaged"  # a folder in the run folder


def save_weights(pipeline: Pipeline, prepared: Prepared, folder: Path) -> None:
    """Save the newest weights of a run, and averaged ones, if there are any, in a folder of their own.

    Raises:
        CheckpointError: a rank failed to write.
    """
    _save(pipeline, prepared, folder, folder, averaged=False)
    if prepared.config.ema_decay is not None:
        _save(pipeline, prepared, folder, folder / AVERAGED, averaged=True)


def _save(pipeline: Pipeline, prepared: Prepared, run: Path, folder: Path, averaged: bool) -> None:
    key, first = pipeline.grid.local[0], pipeline.grid.tensor.index == 0
    stages = 1 if pipeline.grid.everyone is None else prepared.config.stages
    written: dict[str, Any] = {"files": {}, "tensors": {}}
    own, failure = dict[str, Tensor](), None
    if key.pipeline == 0:  # it writes; the others hold the same weights, or it represents them
        state = with_whole_tensors(pipeline.state_dict(averaged=averaged), pipeline.grid, pipeline.stages.values())
        blocks = [
            f"{block}." for stage in pipeline.stages if not stage.direction for block in pipeline.parts[stage.index]
        ]
        own = {name: tensor for name, tensor in state.items() if name.startswith(tuple(blocks))}  # one direction
    if prepared.model.joined:
        own = _joined(own, prepared.model.joined, pipeline.grid)
    try:
        if key.pipeline == 0 and first:
            written = save_stage(folder, pipeline.batches, key.rank, stages, own)
    except (OSError, SafetensorError) as error:
        failure = str(error)
    parts = gather_json([written, failure], "saving the weights", None)
    failures = [failure for _, failure in parts if failure is not None]
    try:
        if dist.get_rank() == 0 and not failures:
            stages_written = [part for part, _ in parts]
            save_index(folder, stages_written, describe_model(prepared.model.shape), text=prepared.windows.corpus.text)
    except OSError as error:
        failures = [str(error)]
    failures = gather_json(None if dist.get_rank() else failures, "saving the weights", None)[0]
    if failures:
        raise CheckpointError(
            f"training has finished, but its weights could not be written into {str(folder)!r}: {failures[0]}. Free "
            f"space and finish the run from its last checkpoint: penstock train --resume {run}"
        )


def _joined(own: Mapping[str, Tensor], joined: Mapping[str, Sequence[str]], grid: RankGrid) -> dict[str, Tensor]:
    """Return the tensors of a rank, of which rank 0 has what stages have parts of as a whole; a call of all ranks.

    Raises:
        TransportError: a peer is dead.
    """
    names = {part for parts in joined.values() for part in parts}
    rest = {name: tensor for name, tensor in own.items() if name not in names}
    gathered = gather_state({name: own[name].detach().cpu() for name in own if name in names}, grid)
    return rest | {whole: torch.cat([gathered[p] for p in parts]) for whole, parts in joined.items() if gathered}
