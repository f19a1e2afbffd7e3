"""The built-in language model, as all that trains, verifies or saves it takes it: a GPT in one of its forms.

Its output layer is whole (`penstock.models.gpt`) or divided among the stages along the vocabulary
(`penstock.models.vocabulary_parallel_gpt`). Initial weights are the same, and so are losses, to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.models.gpt import TIED_EMBEDDINGS, gpt_blocks, language_loss
from penstock.models.gpt_shape import GPTConfig
from penstock.models.vocabulary_parallel_gpt import (
    in_a_row,
    parts_of_head,
    summed_cross_entropy,
    vocabulary_parallel_gpt,
    with_targets,
)
from penstock.partition.blocks import LazyBlock
from penstock.stage.blocks.loss import LossFunction

Pair = tuple[Any, Tensor]
"""What the model takes of a microbatch, and what its loss does."""
StageBlocks = Mapping[str, nn.Module]
"""The blocks of a stage, by name."""


def as_they_are(tokens_BL: Tensor, targets_BL: Tensor) -> Pair:
    """Return tokens and targets."""
    return tokens_BL, targets_BL


@dataclass(frozen=True)
class LanguageModel:
    """A GPT in one of its forms.

    Attributes:
        shape: of the GPT.
        blocks: by name.
        loss: (output, target) -> sum of the cross-entropy in nats, and number of tokens.
        balance: blocks of each stage; None where they are divided by cost.
        tied: the argument `tied` of `Pipeline`.
        pair: (tokens, targets) -> what the model takes, and what the loss does.
        joined: of parameters that stages have parts of: the name of the whole -> those of the parts, which are rows.
        chain: the blocks of each stage -> the same in a row, each of which takes what the one before returns.
    """

    shape: GPTConfig
    blocks: Mapping[str, LazyBlock]
    loss: LossFunction
    balance: list[int] | None = None
    tied: Mapping[str, str] | None = None
    pair: Callable[[Tensor, Tensor], Pair] = as_they_are
    joined: Mapping[str, Sequence[str]] = field(default_factory=dict)
    chain: Callable[[Sequence[StageBlocks]], Sequence[StageBlocks]] = lambda stages: stages


def language_model(
    shape: GPTConfig, seed: int, *, head_parts: int | None = None, balance: list[int] | None = None, tied: bool = False
) -> LanguageModel:
    """Make the language model.

    Args:
        shape: of the GPT.
        seed: of the initial weights.
        head_parts: the number of ranks that its output layer is divided among; None for a whole one.
        balance: blocks of each stage, or, with a divided output layer, of each rank without its part; by cost if None.
        tied: whether input and output embedding are one parameter.

    Raises:
        ConfigError: the output layer cannot be divided so.
    """
    if head_parts is None:
        names = TIED_EMBEDDINGS if tied else None
        return LanguageModel(shape, gpt_blocks(shape, seed), language_loss, balance, names)
    if tied:
        raise ConfigError(
            "model.tied: parts of an output layer that is divided among the stages cannot be tied to the embedding; "
            "set model.tied=false, or take a method with a whole output layer, such as 1f1b"
        )
    blocks, partition = vocabulary_parallel_gpt(shape, head_parts, seed, balance)
    joined = {"head.out.weight": parts_of_head(head_parts)}
    return LanguageModel(
        shape, blocks, summed_cross_entropy, partition, pair=with_targets, joined=joined, chain=in_a_row
    )
