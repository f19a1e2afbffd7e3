"""Format of trained weights on disk: one safetensors file per stage and an index, no pickle.

    weights/index.json                        schema, model, file of each tensor
    weights/batch-1000-stage-0-of-2.safetensors

Tensors have canonical names (block and parameter), so a model with other stages can read them. Files get their names
only when they are complete, and the index is written last, so it never mixes files of two moments.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.checkpoint.format import sync_file
from penstock.errors import CheckpointError

SCHEMA = 2
FOLDER = "weights"
INDEX = "index.json"


def save_stage(folder: Path, batch: int, stage: int, stages: int, state: Mapping[str, Tensor]) -> dict[str, str]:
    """Write the tensors of one stage.

    Args:
        folder: of the run.
        batch: the number of batches trained.
        stage, stages: the index of the stage, and the number of stages.
        state: the tensors.

    Returns:
        The file of each tensor, for the index.

    Raises:
        OSError: they cannot be written.
    """
    place = folder / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    name = f"batch-{batch}-stage-{stage}-of-{stages}.safetensors"
    tensors = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in state.items()}
    temporary = place / f".{name}.part"
    save_file(tensors, temporary, metadata={"schema": str(SCHEMA), "stage": str(stage)})
    sync_file(temporary)
    os.replace(temporary, place / name)
    return dict.fromkeys(tensors, name)


def save_index(folder: Path, files: Mapping[str, str], model: Mapping[str, Any], *, text: bool) -> None:
    """Write the index: the file of each tensor, the model's configuration, and whether tokens are bytes of text.

    Files named by the previous index are removed.

    Raises:
        OSError: it cannot be written.
    """
    temporary = folder / FOLDER / f".{INDEX}.part"
    temporary.write_text(
        json.dumps({"schema": SCHEMA, "text": text, "model": dict(model), "files": dict(files)}, indent=1)
    )
    sync_file(temporary)
    os.replace(temporary, folder / FOLDER / INDEX)
    for path in (folder / FOLDER).glob("*.safetensors"):
        if path.name not in files.values():
            path.unlink()


def load_index(folder: Path) -> dict[str, Any]:
    """Read the index of a run's weights.

    Raises:
        CheckpointError: there is none, or its schema is another one.
    """
    path = folder / FOLDER / INDEX
    try:
        index = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(
            f"no saved weights in {str(folder)!r}: cannot read {path.name}: {error.strerror}"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{str(path)!r} is damaged: {error}") from None
    if not isinstance(index, dict) or index.get("schema") != SCHEMA:
        found = index.get("schema") if isinstance(index, dict) else None
        raise CheckpointError(f"{str(path)!r} has schema {found}, this version of penstock reads {SCHEMA}")
    missing = {"text", "model", "files"} - index.keys()
    if missing:
        raise CheckpointError(f"{str(path)!r} is damaged: it lacks {', '.join(sorted(missing))}")
    return index


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a run by canonical name.

    Raises:
        CheckpointError: a file is missing or damaged, or lacks a tensor of the index.
    """
    files: dict[str, str] = load_index(folder)["files"]
    state: dict[str, Tensor] = {}
    for name in sorted(set(files.values())):
        if Path(name).name != name:
            raise CheckpointError(f"the index in {str(folder)!r} names {name!r}, which is not a file of its folder")
        path = folder / FOLDER / name
        try:
            with safe_open(path, framework="pt") as opened:
                state.update((key, opened.get_tensor(key)) for key in opened.keys())  # noqa: SIM118 - not a dict
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {str(path)!r}: {error}") from None
    missing = sorted(files.keys() - state.keys())
    if missing:
        raise CheckpointError(f"{len(missing)} tensors of the index are in no file, the first of them {missing[0]}")
    return state


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
