"""The shape of a GPT, apart from its modules, so that what follows from it is known before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from penstock.checks import check_whole
from penstock.errors import ConfigError

LARGEST: Mapping[str, int] = MappingProxyType(
    {"layers": 10_000, "width": 1 << 20, "heads": 1 << 16, "context": 1 << 20, "vocabulary": 1 << 24}
)
"""The largest numbers of a shape, far above those of any model."""


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT, for `gpt_blocks`.

    Attributes:
        layers: the number of transformer layers.
        width: D, the size of hidden states; a multiple of 2 H.
        heads: H, the number of attention heads of a layer.
        context: the longest sequence, in tokens.
        vocabulary: V, the number of tokens.
    """

    layers: int
    width: int
    heads: int
    context: int = 1024
    vocabulary: int = 256

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_whole(f"model.{name}", value, 1, LARGEST[name])
        if self.width % (2 * self.heads):
            raise ConfigError(
                f"model.width {self.width} must be a multiple of twice model.heads ({2 * self.heads}), as rotary "
                "positions rotate pairs of a head's entries"
            )

    @property
    def parameters(self) -> int:
        """Number of trained parameters, with input and output embedding counted separately."""
        layer = 12 * self.width**2 + 2 * self.width
        return self.layers * layer + 2 * self.vocabulary * self.width + self.width

    @property
    def described(self) -> str:
        """Its size in words, for display."""
        return f"GPT {self.layers} x {self.width}, {self.parameters / 1e6:.2f} M parameters"


PRESETS: Mapping[str, GPTConfig] = MappingProxyType(
    {
        "tiny": GPTConfig(layers=4, width=128, heads=4, context=128),
        "small": GPTConfig(layers=8, width=256, heads=8, context=256),
        "124m": GPTConfig(layers=12, width=768, heads=12, vocabulary=51200),
        "355m": GPTConfig(layers=24, width=1024, heads=16, vocabulary=51200),
        "1.3b": GPTConfig(layers=24, width=2048, heads=16, context=2048, vocabulary=51200),
        "2.2b": GPTConfig(layers=32, width=2304, heads=32, context=2048, vocabulary=51200),
        "3.8b": GPTConfig(layers=32, width=3072, heads=32, context=2048, vocabulary=51200),
    }
)
"""Shapes by name; the four large ones are those of PipeDream-2BW's evaluation (arXiv 2006.09503)."""


def preset(name: str, **changes: int) -> GPTConfig:
    """Return a shape by name, with some numbers changed.

    Raises:
        ConfigError: no such preset.
    """
    if name not in PRESETS:
        raise ConfigError(f"unknown model preset {name!r}; known: {', '.join(PRESETS)}")
    return replace(PRESETS[name], **changes)


def count_blocks(shape: GPTConfig) -> int:
    """Return how many blocks a GPT has: its embedding, its layers and its head."""
    return shape.layers + 2
