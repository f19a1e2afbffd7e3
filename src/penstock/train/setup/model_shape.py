"""The shape of the model of a run: what the configuration says, whether it has blocks enough, and that of a checkpoint.

All but the last is known before torch, the text or a schedule.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import CheckpointError, ConfigError
from penstock.models.gpt_shape import GPTConfig, count_blocks, preset
from penstock.train.config.schema import TrainConfig

if TYPE_CHECKING:  # as it imports torch
    from penstock.checkpoint.format import Checkpoint


def check_enough_blocks(config: TrainConfig) -> None:
    """Refuse a configuration whose stages cannot each have a block of the model.

    Every rank holds a stage; methods that place several on a rank are seen through when their schedule is built.

    Raises:
        ConfigError: how many blocks there are, or a shape that cannot be.
    """
    blocks = count_blocks(shape_of(config))
    if blocks < config.stages:
        raise ConfigError(
            f"the model has {blocks} blocks, which cannot be cut into {config.stages} stages; use fewer stages, or set "
            f"model.layers to at least {config.stages - blocks + shape_of(config).layers}"
        )


def shape_of(config: TrainConfig, vocabulary: int | None = None) -> GPTConfig:
    """Return the GPT's shape: the preset with what the configuration changes.

    Args:
        config: of the run.
        vocabulary: that of the data, where the configuration leaves it open.

    Raises:
        ConfigError: there is no such shape.
    """
    section = config.model
    changes = {name: getattr(section, name) for name in ("layers", "width", "heads", "context", "vocabulary")}
    changes["vocabulary"] = changes["vocabulary"] or vocabulary
    return preset(section.preset, **{name: value for name, value in changes.items() if value is not None})


def check_same_shape(config: TrainConfig, run: Path, checkpoint: Checkpoint) -> None:
    """Refuse to go on with the weights of another model.

    Args:
        config: with which the run goes on.
        run: its folder.
        checkpoint: of the run.

    Raises:
        ConfigError: what was changed of the model.
    """
    now = shape_of(config)
    for name, there in _shape_in(checkpoint).items():
        if getattr(now, name) != there and (name != "vocabulary" or config.model.vocabulary is not None):
            raise ConfigError(
                f"model.{name} is {getattr(now, name)}, but the weights of the run in {str(run)!r} are of a model with "
                f"{there}; leave the change out, or train another model in a run of its own (without --resume)"
            )


def _shape_in(checkpoint: Checkpoint) -> dict[str, int]:
    """Return what the weights in a checkpoint tell of the shape of a GPT; nothing if they cannot be read."""
    layers = [name for name in checkpoint.names if re.fullmatch(r"weights/layers\.\d+\.mlp_norm\.weight", name)]
    found = {"layers": len(layers)} if layers else {}
    for name, tensor in (("width", "head.norm.weight"), ("vocabulary", "head.out.weight")):
        if f"weights/{tensor}" in checkpoint.names:
            try:
                found[name] = len(checkpoint.tensor(f"weights/{tensor}"))
            except CheckpointError:  # reported when it is loaded
                return {}
    return found
