"""Format of trained weights on disk: one safetensors file per stage and an index, no pickle.

    weights/index.json                           as `penstock.checkpoint.index` says, with the model's shape
    weights/batch-1000-stage-0-of-2.safetensors

Tensors have canonical names (block and parameter), so a model with other stages can read them. Files get their names
only when they are complete, and the index is written last, so it never mixes files of two moments. Every file is
compared with the index before anything of it is used.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock.checkpoint.index import INDEX, TensorFiles, check_file, read_index, write_index
from penstock.errors import CheckpointError
from penstock.guarded_files import fingerprint, make_own_folder, new_file

SCHEMA = 3
FOLDER = "weights"
_KINDS: Mapping[str, type] = MappingProxyType({"text": bool, "model": dict})


def save_stage(folder: Path, batch: int, stage: int, stages: int, state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write the tensors of one stage.

    Args:
        folder: of the run.
        batch: the number of batches trained.
        stage, stages: the index of the stage, and the number of stages.
        state: the tensors.

    Returns:
        The part of the index about them: size and digest of the file, and the file of each tensor.

    Raises:
        OSError: they cannot be written.
    """
    place = folder / FOLDER
    for own in (folder, place):
        make_own_folder(own)
    name = f"batch-{batch}-stage-{stage}-of-{stages}.safetensors"
    tensors = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in state.items()}
    with new_file(place / name) as temporary:
        save_file(tensors, temporary, metadata={"schema": str(SCHEMA), "stage": str(stage)})
        written = fingerprint(temporary)
    return {"files": {name: written}, "tensors": dict.fromkeys(tensors, name)}


def save_index(folder: Path, parts: Iterable[Mapping[str, Any]], model: Mapping[str, Any], *, text: bool) -> None:
    """Write the index; files that it does not name are removed.

    Args:
        folder: of the run.
        parts: what `save_stage` has returned for each stage.
        model: its shape.
        text: whether tokens are bytes of text.

    Raises:
        OSError: it cannot be written.
    """
    whole: dict[str, Any] = {"text": text, "model": dict(model), "files": {}, "tensors": {}}
    for part in parts:
        for what in ("files", "tensors"):
            whole[what] |= part[what]
    write_index(folder / FOLDER, SCHEMA, whole)
    for path in (folder / FOLDER).glob("*.safetensors"):
        if path.name not in whole["files"]:
            path.unlink()


def load_index(folder: Path) -> dict[str, Any]:
    """Read the index of a run's weights.

    Raises:
        CheckpointError: there is none, or it is damaged, or its schema is another one.
    """
    if not os.path.exists(folder / FOLDER / INDEX):  # unlike Path.exists, False for a name that is too long
        within = folder.glob(f"*/{FOLDER}/{INDEX}") if os.path.isdir(folder) else ()
        runs = sorted(path.parent.parent for path in within)
        newest = f"; the newest finished run in it is {str(runs[-1])!r}" if runs else ""
        raise CheckpointError(
            f"no saved weights in {str(folder)!r}: there is no {FOLDER}/{INDEX}; a run writes it when it has finished"
            + newest
        )
    return read_index(folder / FOLDER, SCHEMA, _KINDS)


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a run by canonical name, after comparing every file with the index.

    Raises:
        CheckpointError: a file is missing or has changed, or lacks a tensor of the index; the message names it.
    """
    index, place = load_index(folder), folder / FOLDER
    for name, written in index["files"].items():
        check_file(place, name, written)
    files = TensorFiles(place)
    return {name: files.read(file, name) for name, file in index["tensors"].items()}


def fill_module(module: torch.nn.Module, name: str, state: Mapping[str, Tensor]) -> None:
    """Load the tensors of a block.

    Raises:
        CheckpointError: one is missing or has another shape.
    """
    prefix = f"{name}."
    own = {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}
    try:
        module.load_state_dict(own)
    except RuntimeError as error:
        raise CheckpointError(f"the saved weights do not fit block {name!r}: {error}") from None
