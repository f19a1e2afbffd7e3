"""The task of some campaigns: scikit-learn's images of handwritten digits, classified by a small residual network.

1797 images of 8 x 8 pixels with values from 0 to 16 (Alpaydin and Kaynak, UCI repository, 1998); nothing is downloaded.
It stands in for model and text of `penstock train`, which reads of them no more than what is here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.residual_cnn import CNNConfig, class_loss, residual_cnn_blocks
from penstock.models.gpt_variant import LanguageModel
from penstock.train.config.schema import TrainConfig
from penstock.train.data.corpus import Corpus
from penstock.train.data.window_sampler import shuffled


class Images:
    """The images; which of them are held out does not depend on the seed.

    Args:
        held_out: the fraction of them that is kept for validation.
        seed: of the order of the others.

    Attributes:
        corpus: all pixels, by which one set of data is told from another.
        validation: the places of the held-out images.
    """

    def __init__(self, held_out: float, seed: int) -> None:
        from sklearn.datasets import load_digits

        found = load_digits()
        images_NHW, classes_N = np.asarray(found.images, np.float32), np.asarray(found.target, np.int64)
        n, images = len(classes_N), torch.from_numpy(images_NHW)
        order = torch.tensor([shuffled(place, n, seed=0, epoch=0) for place in range(n)])
        self._images = (images[order, None] - images.mean()) / images.std()
        self._classes, self._seed = torch.from_numpy(classes_N)[order], seed
        self._train = n - max(round(n * held_out), 1)
        self.corpus = Corpus(f"digits, {n} images", images_NHW.astype(np.uint8).ravel(), 17, text=False)
        self.validation = np.arange(self._train, n)

    def samples(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Return training images; the order differs from epoch to epoch."""
        numbers = (divmod(number, self._train) for number in range(first, first + count))
        places = torch.tensor([shuffled(place, self._train, self._seed, epoch) for epoch, place in numbers])
        return self._images[places], self._classes[places]

    def validation_samples(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Return held-out images; numbers beyond the end wrap around."""
        places = self._train + torch.arange(first, first + count) % len(self.validation)
        return self._images[places], self._classes[places]

    def count_tokens(self, classes: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Count how often each class occurs in the training images and in the held-out ones."""
        parts = self._classes[: self._train], self._classes[self._train :]
        one, other = (np.bincount(part.numpy(), minlength=classes) for part in parts)
        return one, other


def digits(config: TrainConfig) -> tuple[Any, Any]:
    """Return the model of a run, a network of `model.layers` blocks and `model.width` channels, and its samples."""
    shape: Any = CNNConfig(config.model.layers or 8, config.model.width or 16)
    model = LanguageModel(shape, residual_cnn_blocks(shape, config.seed), class_loss)
    return model, Images(config.held_out, config.seed)


def digits_of(config: TrainConfig, folder: Path) -> Any:
    """Return the task, as `ComparisonRun` takes it."""
    del config, folder
    return digits
