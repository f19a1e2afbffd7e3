"""Task digits: scikit-learn's images of handwritten digits, classified by a small residual network.

1797 images of 8 x 8 pixels with values from 0 to 16 (Alpaydin and Kaynak, UCI repository, 1998); nothing is downloaded.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from penstock.compare.config import ComparisonConfig
from penstock.errors import ConfigError
from penstock.models.residual_cnn import CNNConfig, class_loss, count_correct, residual_cnn_blocks
from penstock.partition.blocks import LazyBlock
from penstock.train.data.window_sampler import shuffled

_HELD_OUT = 0.2


class DigitsTask:
    """A residual network on the images; which of them are held out does not depend on the seed.

    Args:
        config: `model.layers` residual blocks (as many as stages, at least 6, if None) of `model.width` channels (16).

    Raises:
        ConfigError: scikit-learn is not installed, or a key does not apply to this task.
    """

    unit, units = "images", 1

    def __init__(self, config: ComparisonConfig, own: Path | None = None) -> None:
        del own  # no files are read but scikit-learn's
        for key, value in (
            ("data", config.data),
            ("model.heads", config.model.heads),
            ("model.context", config.model.context),
        ):
            if value is not None:
                raise ConfigError(f"{key} belongs to task text; leave it out for task digits")
        images_NHW, classes_N = _load()
        n = len(classes_N)
        order = torch.tensor([shuffled(place, n, seed=0, epoch=0) for place in range(n)])
        self._images = (images_NHW[order, None] - images_NHW.mean()) / images_NHW.std()
        self._classes = classes_N[order]
        self._train = n - max(round(n * (_HELD_OUT if config.held_out is None else config.held_out)), 1)
        self.held_out_samples = n - self._train
        self.model = CNNConfig(config.model.layers or max(config.stages, 6), config.model.width or 16)
        self.fingerprint = f"{n} images, {zlib.crc32(images_NHW.numpy().tobytes()):08x}"
        self.title = (
            f"residual CNN of {self.model.layers} blocks, {self.model.width} channels; digits of scikit-learn, "
            f"{self._train} images to train on"
        )

    def blocks(self, seed: int) -> Mapping[str, LazyBlock]:
        """Make the model."""
        return residual_cnn_blocks(self.model, seed)

    def loss(self, output: Tensor, target: Tensor) -> tuple[Tensor, float]:
        """Compute the cross-entropy in nats."""
        return class_loss(output, target)

    def correct(self, output: Tensor, target: Tensor) -> int | None:
        """Count the images that are classified correctly."""
        return count_correct(output, target)

    def samples(self, seed: int, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Return training images; the order differs from epoch to epoch."""
        numbers = (divmod(number, self._train) for number in range(first, first + count))
        places = torch.tensor([shuffled(place, self._train, seed, epoch) for epoch, place in numbers])
        return self._images[places], self._classes[places]

    def held_out(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Return held-out images."""
        places = self._train + torch.arange(first, first + count) % self.held_out_samples
        return self._images[places], self._classes[places]


def _load() -> tuple[Tensor, Tensor]:
    """Load the images (N, 8, 8) in float32 and their classes (N,)."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ConfigError(
            "task digits needs scikit-learn, which contains the images: pip install 'penstock[digits]'"
        ) from None
    found = load_digits()
    images_NHW, classes_N = np.asarray(found.images, np.float32), np.asarray(found.target, np.int64)
    return torch.from_numpy(images_NHW), torch.from_numpy(classes_N)
