"""The model of a run: the shape that the configuration says, whether it has blocks enough, and that of a checkpoint.

The shape is known before torch, the text or a schedule.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import CheckpointError, ConfigError
from penstock.models.gpt_shape import GPTConfig, count_blocks, preset
from penstock.train.config.schema import TrainConfig

if TYPE_CHECKING:  # as they import torch
    from penstock.checkpoint.format import Checkpoint
    from penstock.models.gpt_variant import LanguageModel
    from penstock.train.data.corpus import Corpus


def check_enough_blocks(config: TrainConfig) -> None:
    """Refuse a configuration whose stages cannot each have a block of the model.

    Every rank holds a stage; methods that place several on a rank are seen through when their schedule is built.

    Raises:
        ConfigError: how many blocks there are, or a shape that cannot be.
    """
    shape = shape_of(config)
    if config.row.divides_head and shape.layers < config.stages:
        raise ConfigError(
            f"{config.row.name}: the model has {shape.layers} layers, which cannot be divided among {config.stages} "
            f"stages; use fewer stages, or set model.layers to at least {config.stages}"
        )
    blocks = count_blocks(shape)
    if blocks < config.stages:
        raise ConfigError(
            f"the model has {blocks} blocks, which cannot be cut into {config.stages} stages; use fewer stages, or set "
            f"model.layers to at least {config.stages - blocks + shape.layers}"
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
    if section.planned is not None and None in (section.layers, section.width):
        raise ConfigError(
            f"the plan is for the model {section.planned!r:.80}, which penstock train does not have, and would train "
            f"the preset {section.preset!r} instead; set model.layers and model.width of a GPT with as many blocks, "
            "or model.planned=null for that preset, or divide blocks of your own in Python (penstock.Pipeline)"
        )
    changes["vocabulary"] = changes["vocabulary"] or vocabulary
    return preset(section.preset, **{name: value for name, value in changes.items() if value is not None})


def model_shape(config: TrainConfig, corpus: Corpus) -> GPTConfig:
    """Return the GPT's shape, with the vocabulary of the text where the configuration leaves it open.

    Raises:
        ConfigError: there is no such shape, or the text holds other tokens.
    """
    vocabulary = config.model.vocabulary or corpus.vocabulary
    heads = shape_of(config, vocabulary).heads
    if heads % config.tensor_parallel:
        raise ConfigError(f"model.heads {heads} must be a multiple of tensor_parallel {config.tensor_parallel}")
    if vocabulary < corpus.vocabulary:
        raise ConfigError(
            f"model.vocabulary is {vocabulary}, but {corpus.name} holds tokens up to {corpus.vocabulary - 1}"
        )
    return shape_of(config, vocabulary)


def model_of(config: TrainConfig, shape: GPTConfig) -> LanguageModel:
    """Return the model of a run, in the form that its method needs.

    Raises:
        ConfigError: it has none for this method.
    """
    from penstock.models.gpt_variant import language_model

    head_parts = config.stages if config.row.divides_head else None
    return language_model(shape, config.seed, head_parts=head_parts, balance=config.balance, tied=config.model.tied)


def describe_model(shape: GPTConfig) -> dict[str, int]:
    """Return a GPT's shape as plain values, for the index of saved weights."""
    return asdict(shape)


def check_same_shape(config: TrainConfig, run: Path, checkpoint: Checkpoint) -> None:
    """Refuse to go on with the weights of another model.

    Args:
        config: with which the run goes on.
        run: its folder.
        checkpoint: of the run.

    Raises:
        ConfigError: what was changed of the model.
    """
    now, parts = shape_of(config), config.stages if config.row.divides_head else 0
    if (there := len(_head_parts(checkpoint))) != parts and checkpoint.names:
        method = f"method=vocabulary-1f1b and stages={there}" if there else "a method with a whole output layer"
        raise ConfigError(
            f"method {config.row.name!r} has its output layer {_divided(parts)}, but the weights of the run in "
            f"{str(run)!r} have it {_divided(there)}; go on with {method}, or train in a run of its own (without "
            "--resume)"
        )
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
    heads = _head_parts(checkpoint) or ["weights/head.out.weight"]
    for name, tensors in (("width", ["weights/head.norm.weight"]), ("vocabulary", heads)):
        if all(tensor in checkpoint.names for tensor in tensors):
            try:
                found[name] = sum(len(checkpoint.tensor(tensor)) for tensor in tensors)
            except CheckpointError:  # reported when it is loaded
                return {}
    return found


def _head_parts(checkpoint: Checkpoint) -> list[str]:
    """Return the names of the parts of a divided output layer; none if it is whole."""
    return [name for name in checkpoint.names if re.fullmatch(r"weights/head\.out\.\d+\.weight", name)]


def _divided(parts: int) -> str:
    return f"in {parts} part{'s' if parts > 1 else ''}" if parts else "whole"
