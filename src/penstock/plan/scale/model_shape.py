"""Shapes of transformers: parameters, operations and the batch that is worth its samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from penstock.checks import check_whole
from penstock.errors import ConfigError
from penstock.plan.scale.rules_file import ScalingRules

_MOST = 1 << 24  # of each dimension
GPT_EXPANSION = 4.0
"""The width of the MLP of the built-in GPT, in hidden sizes."""


@dataclass(frozen=True)
class ModelShape:
    """A transformer of equal layers.

    Attributes:
        name: for tables.
        layers, hidden, sequence, heads: l, h, s and a.
        expansion: width of the MLP in hidden sizes.
        vocabulary: V; 0 counts layers alone, without scores, logits and embeddings, as the papers' short forms do.
    """

    name: str
    layers: int
    hidden: int
    sequence: int
    heads: int
    expansion: float = GPT_EXPANSION
    vocabulary: int = 0

    def __post_init__(self) -> None:
        for what in ("layers", "hidden", "sequence", "heads"):
            check_whole(what, getattr(self, what), 1, _MOST)
        check_whole("vocabulary", self.vocabulary, 0, _MOST)

    @property
    def layer_parameters(self) -> float:
        """Parameters of the matrices of a layer: (4 + 2 expansion) h^2."""
        return (4 + 2 * self.expansion) * self.hidden**2

    @property
    def parameters(self) -> float:
        """All parameters; with a vocabulary those of arXiv 2104.04473, eq. 2."""
        matrices = self.layers * self.layer_parameters
        if not self.vocabulary:
            return matrices
        embeddings = (self.vocabulary + self.sequence) / (12 * self.layers * self.hidden)
        return matrices * (1 + 13 / (12 * self.hidden) + embeddings)

    def sequence_flops(self, rules: ScalingRules) -> float:
        """Return the operations of a sequence, forward, backward and recompute.

        With a vocabulary attention scores and logits count (arXiv 2104.04473, eq. 3).
        """
        short = rules.work * self.layers * self.layer_parameters * self.sequence
        if not self.vocabulary:
            return short
        logits = self.vocabulary / (16 * self.layers * self.hidden)
        return short * (1 + self.sequence / (6 * self.hidden) + logits)


def family_model(x: float, rules: ScalingRules) -> ModelShape:
    """Return the model X_[x] of the family.

    Raises:
        ConfigError: x makes no model.
    """
    if not 2 <= x <= 4000:
        raise ConfigError(f"x must be between 2 and 4000, got {x:g}")
    laws = rules.family
    layers, hidden, sequence, heads = (
        max(1, round(law.at(x))) for law in (laws.layers, laws.hidden, laws.sequence, laws.heads)
    )
    return ModelShape(f"X_{x:g}", layers, hidden, sequence, heads, rules.expansion.value)


def critical_batch(shape: ModelShape, rules: ScalingRules, x: float | None = None) -> float:
    """Return the critical batch in sequences, by the law of the family for its model, or by that of parameters."""
    if x is not None:
        return rules.family.critical_batch.at(x)
    return rules.critical_tokens.at(shape.parameters) / shape.sequence


Samples = TypeVar("Samples", float, npt.NDArray[np.float64])


def steps_at(batch: Samples, critical: float, least: float) -> Samples:
    """Return the steps with a batch (McCandlish et al., arXiv 1812.06162).

    (S / S_min - 1) (E / E_min - 1) = 1 for S steps and E samples, with the critical batch B_crit = E_min / S_min.

    Args:
        batch: in samples.
        critical: the critical batch; with it steps are twice the least.
        least: steps with an infinite batch.
    """
    return least * (1 + critical / batch)


def samples_at(batch: Samples, critical: float, least: float) -> Samples:
    """Return the samples with a batch.

    Args:
        batch: in samples.
        critical: the critical batch; with it samples are twice the least.
        least: samples with an infinitely small batch.
    """
    return least * (1 + batch / critical)
