"""Refuses more stages than the model has blocks, from the configuration alone: before torch, the text or a schedule."""

from __future__ import annotations

from penstock.errors import ConfigError
from penstock.models.gpt_shape import GPTConfig, count_blocks, preset
from penstock.train.config.schema import TrainConfig


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
