"""A GPT whose output layer is divided among the stages along the vocabulary (Yeung et al., arXiv 2411.05288).

Each part takes the hidden states and knows of a token the logarithm of its own sum of exponentials, and the target's
logit if the target is its own. The loss is the logarithm of the sum over all parts, less the target's logit. So no rank
has more than a share of the output layer, of its optimizer state, and of the logits. Targets travel with the hidden
states, as only the first and the last stage read data: the model's input is the pair (tokens, targets).

Shapes: B microbatch, L positions, D width, V vocabulary, P parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.models.gpt import Embedding, Head, Layer, cross_entropy_of_parts, gpt_blocks, known_of_part
from penstock.models.gpt_shape import GPTConfig
from penstock.partition.blocks import LazyBlock

WithTargets = tuple[Tensor, Tensor]
"""Hidden states (B, L, D), or at first tokens (B, L), and targets (B, L)."""


class EmbeddingWithTargets(Embedding):
    """Embedding of tokens, which hands targets on."""

    def forward(self, pair: WithTargets) -> WithTargets:  # type: ignore[override]
        """Look up the vectors of the tokens."""
        tokens_BL, targets_BL = pair
        return super().forward(tokens_BL), targets_BL


class LayerWithTargets(Layer):
    """One transformer layer, which hands targets on."""

    def forward(self, pair: WithTargets) -> WithTargets:  # type: ignore[override]
        """Apply the layer to the hidden states."""
        x_BLD, targets_BL = pair
        return super().forward(x_BLD), targets_BL


class NormWithTargets(nn.RMSNorm):
    """The normalization before the output layer, which hands targets on."""

    def forward(self, pair: WithTargets) -> WithTargets:  # type: ignore[override]
        """Normalize the hidden states."""
        x_BLD, targets_BL = pair
        return super().forward(x_BLD), targets_BL


class HeadPart(nn.Module):
    """The output layer for a part of the vocabulary: what it knows of each token.

    Args:
        config: of the whole model.
        place: which part.
        parts: P.
    """

    def __init__(self, config: GPTConfig, place: int, parts: int) -> None:
        super().__init__()
        rows = Head(config).out.weight.detach().tensor_split(parts)
        self.first = sum(len(part) for part in rows[:place])
        self.weight = nn.Parameter(rows[place].clone())

    def forward(self, pair: WithTargets) -> WithTargets:
        """Return the logarithm of the sum of exponentials, and the target's logit or 0, in float32, each (B, L)."""
        x_BLD, targets_BL = pair
        return known_of_part(nn.functional.linear(x_BLD, self.weight), targets_BL, self.first)


class CrossEntropyOfParts(nn.Module):
    """The cross-entropy of each token (B, L), from what all parts know, or the only one."""

    def forward(self, parts: tuple[WithTargets, ...] | WithTargets) -> Tensor:
        """Return the logarithm of the sum over all parts, less the target's logit."""
        sums, targets = zip(parts, strict=True) if isinstance(parts[0], Tensor) else zip(*parts, strict=True)
        return cross_entropy_of_parts(torch.stack(sums), torch.stack(targets))


class HeadParts(nn.ModuleList):
    """All parts of an output layer, side by side in one block."""

    def forward(self, pair: WithTargets) -> tuple[WithTargets, ...]:
        """Return what each part knows."""
        found = [part(pair) for part in reversed(self)]  # so autograd adds up gradients from the first part on
        return tuple(reversed(found))


def summed_cross_entropy(entropies_BL: Tensor, targets_BL: Tensor) -> tuple[Tensor, float]:
    """Return the sum of the cross-entropy over all tokens, in nats, and their number: a loss for `Pipeline`."""
    return entropies_BL.sum(), float(targets_BL.numel())


def with_targets(tokens_BL: Tensor, targets_BL: Tensor) -> tuple[WithTargets, Tensor]:
    """Return a microbatch as such a GPT takes it: targets travel with the tokens, and the loss counts them."""
    return (tokens_BL, targets_BL), targets_BL


class VocabularyParallel(NamedTuple):
    """The blocks of a GPT with a divided output layer, and how they are divided into stages.

    Attributes:
        blocks: by name; for `Pipeline`.
        partition: the number of blocks of each of the 2 P + 1 stages of `vocabulary_1f1b`.
    """

    blocks: Mapping[str, LazyBlock]
    partition: list[int]


def vocabulary_parallel_gpt(
    config: GPTConfig, stages: int, seed: int, balance: Sequence[int] | None = None
) -> VocabularyParallel:
    """Make a GPT for `penstock.schedule.orders.vocabulary_parallel.vocabulary_1f1b`, with the weights of `gpt_blocks`.

    Args:
        config: its shape.
        stages: P, the ranks, among which its layers and its vocabulary are divided as equally as whole ones can be.
        seed: of the whole model.
        balance: the number of blocks of each rank beside its part: embedding, layers and the last normalization.

    Raises:
        ConfigError: there are fewer layers, or tokens of the vocabulary, than stages; or `balance` does not match.
    """
    if stages > min(config.layers, config.vocabulary):
        raise ConfigError(
            f"a GPT of {config.layers} layers and {config.vocabulary} tokens cannot be divided among {stages} stages; "
            f"use at most {min(config.layers, config.vocabulary)}"
        )
    plain, made = gpt_blocks(config, seed), dict[str, LazyBlock]()
    for name, block in plain.items():
        kind = {"embedding": EmbeddingWithTargets, "head": NormWithTargets}.get(name, LayerWithTargets)
        if name == "head":
            made["head.norm"] = LazyBlock(partial(kind, config.width), seed=block.seed, cost=0.0)
        else:
            made[name] = LazyBlock(partial(kind, config), seed=block.seed, cost=block.cost)
    layers = _balance(config, stages) if balance is None else list(balance)
    if len(layers) != stages or min(layers) < 1 or sum(layers) != len(made):
        raise ConfigError(
            f"balance must hold {stages} positive numbers that add up to the {len(made)} blocks beside the divided "
            f"output layer (embedding, layers and a last normalization); got {layers}"
        )
    cost = config.vocabulary * config.width / stages
    for place in range(stages):
        made[f"head.out.{place}"] = LazyBlock(partial(HeadPart, config, place, stages), plain["head"].seed, cost)
    made["cross_entropy"] = LazyBlock(CrossEntropyOfParts, seed=0, cost=0.0)
    return VocabularyParallel(made, [*layers, *[1] * stages, 1])


def _balance(config: GPTConfig, stages: int) -> list[int]:
    """Return as many layers for each rank as can be equal, the embedding for the first, the last norm for the last."""
    layers = [len(part) for part in torch.arange(config.layers).tensor_split(stages)]
    layers[0] += 1
    layers[-1] += 1
    return layers


def parts_of_head(stages: int) -> list[str]:
    """Return the names of the parts of the output layer's weights, in the order of their rows."""
    return [f"head.out.{place}.weight" for place in range(stages)]


def whole_head(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict of such a GPT with its output layer whole, under the names of `gpt_blocks`."""
    parts = parts_of_head(sum(name.startswith("head.out.") for name in state))
    found = {name: tensor for name, tensor in state.items() if name not in parts}
    return found | ({"head.out.weight": torch.cat([state[name] for name in parts])} if parts else {})


def in_a_row(stages: Sequence[Mapping[str, nn.Module]]) -> list[Mapping[str, nn.Module]]:
    """Return the blocks of each stage with all parts of the output layer as one stage.

    So each stage takes what the one before returns, and parameters keep their names.
    """
    ranks = len(stages) // 2
    parts = HeadParts(part for stage in stages[ranks:-1] for part in stage.values())
    return [*stages[:ranks], {"head.out": parts}, stages[-1]]
