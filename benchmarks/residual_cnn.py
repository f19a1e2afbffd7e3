"""A small residual network for images as a list of blocks: pre-activation, GroupNorm, no batch statistics.

Pre-activation as in He et al., arXiv 1603.05027, fig. 4e; GroupNorm as in Wu and He, arXiv 1803.08494, because
statistics over a microbatch would depend on how a batch is divided.

Shapes: B microbatch, C channels, H height, W width, K classes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from penstock.errors import ConfigError
from penstock.partition.blocks import LazyBlock

_GROUPS = 4


@dataclass(frozen=True)
class CNNConfig:
    """The shape of a residual network.

    Attributes:
        layers: residual blocks of two convolutions each; from the middle one on, images have half the height and width,
            and twice the channels.
        width: channels of the first half; a multiple of 4, the groups of GroupNorm.
        channels: channels of the images.
        size: height and width of the images.
        classes: K.
    """

    layers: int = 8
    width: int = 16
    channels: int = 1
    size: int = 8
    classes: int = 10

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ConfigError(f"model.{name} must be at least 1, got {value}")
        if self.width % _GROUPS:
            raise ConfigError(f"model.width {self.width} must be a multiple of {_GROUPS}, the groups of GroupNorm")

    @property
    def context(self) -> int:
        """What the loss is a mean over: an image is one of them, as a text has so many tokens."""
        return 1

    @property
    def vocabulary(self) -> int:
        """The number of classes, as a text has so many tokens."""
        return self.classes

    @property
    def described(self) -> str:
        """Its size in words, for display."""
        return f"residual CNN of {self.layers} blocks, {self.width} channels"


class Stem(nn.Module):
    """First convolution: (B, C, H, W) -> (B, width, H, W)."""

    def __init__(self, config: CNNConfig) -> None:
        super().__init__()
        self.conv = nn.Conv2d(config.channels, config.width, 3, padding=1, bias=False)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Convolve the images."""
        y_BCHW: Tensor = self.conv(x_BCHW)
        return y_BCHW


class Residual(nn.Module):
    """Two convolutions beside a shortcut: (B, C, H, W) -> (B, C', H / stride, W / stride)."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(_GROUPS, before)
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(_GROUPS, after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        changes = before != after or stride != 1
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False) if changes else nn.Identity()

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Add two convolutions, each of a normalized input, to the shortcut."""
        y_BCHW = self.conv1(F.relu(self.norm1(x_BCHW)))
        y_BCHW = self.conv2(F.relu(self.norm2(y_BCHW)))
        total_BCHW: Tensor = self.shortcut(x_BCHW) + y_BCHW
        return total_BCHW


class Classifier(nn.Module):
    """Projection of channels to logits: (B, C, H, W) -> (B, K)."""

    def __init__(self, config: CNNConfig) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(_GROUPS, 2 * config.width)
        self.out = nn.Linear(2 * config.width, config.classes)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Normalize, average over the image, and project."""
        logits_BK: Tensor = self.out(F.relu(self.norm(x_BCHW)).mean((2, 3)))
        return logits_BK


def residual_cnn_blocks(config: CNNConfig, seed: int) -> dict[str, LazyBlock]:
    """Return the model as blocks, each initialized from its own seed, independently of the partition.

    Args:
        config: the shape; there are `config.layers + 2` blocks.
        seed: seed of the whole model.
    """
    w, pixels = config.width, config.size**2
    middle = config.layers // 2
    parts: dict[str, tuple[Callable[[], nn.Module], float]] = {
        "stem": (partial(Stem, config), 9 * config.channels * w * pixels)  # multiplications per image
    }
    for i in range(config.layers):
        before, after = w * (1 + (i > middle)), w * (1 + (i >= middle))
        stride = 1 + (i == middle)
        here = pixels / (4 if i >= middle else 1)
        convolutions = 9 * before * after + 9 * after * after + (before * after if before != after else 0)
        parts[f"layers.{i}"] = partial(Residual, before, after, stride), convolutions * here
    parts["head"] = partial(Classifier, config), 2 * w * config.classes
    return {
        name: LazyBlock(build, seed=zlib.crc32(f"{seed} {name}".encode()), cost=cost)
        for name, (build, cost) in parts.items()
    }


def class_loss(logits_BK: Tensor, classes_B: Tensor) -> tuple[Tensor, float]:
    """Return the sum of the cross-entropy over all images, in nats, and their number."""
    return F.cross_entropy(logits_BK.float(), classes_B, reduction="sum"), float(classes_B.numel())
