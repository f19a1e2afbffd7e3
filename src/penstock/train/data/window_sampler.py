"""Assigns samples to microbatches as a pure function of the seed and the global sample number.

The text is cut into windows of `context` tokens (and one more, the last target). Blocks of neighbouring windows are
held out for validation; the others are visited in a different order in every epoch. The first and the last stage,
parallel pipelines and resumed runs all compute the same samples without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.errors import DataError
from penstock.models.gpt_variant import as_they_are
from penstock.train.data.corpus import Corpus

_ROUNDS = 4
_PART = 4096  # windows counted at once
_COUNTED = 1 << 27  # approximate limit of the tokens counted in each text
_BLOCK = 32  # neighbouring windows that are held out together, if there are enough windows


@dataclass(frozen=True)
class Windows:
    """Training and validation samples of a corpus.

    Attributes:
        corpus: the tokens.
        context: L, tokens per sample.
        held_out: the fraction of windows kept for validation.
        seed: of the visiting order.
        pair: (tokens, targets) -> what the model takes, and what its loss does.

    Raises:
        DataError: the text is too short for one training and one validation sample.
    """

    corpus: Corpus
    context: int
    held_out: float
    seed: int
    pair: Callable[[Tensor, Tensor], tuple[Any, Tensor]] = as_they_are

    def __post_init__(self) -> None:
        """Check that the text is long enough."""
        needed = 2 * self.context + 1
        if len(self.corpus.tokens) < needed:
            raise DataError(
                f"{self.corpus.name} has {len(self.corpus.tokens)} tokens; with model.context {self.context} at least "
                f"{needed} are needed (one training and one validation sample). Use more text or a smaller context"
            )

    @property
    def count(self) -> int:
        """The number of all windows."""
        return (len(self.corpus.tokens) - 1) // self.context

    @cached_property
    def _is_held_out(self) -> NDArray[np.bool_]:
        every = min(max(round(1 / self.held_out), 2), self.count)
        block = min(max(self.count // (4 * every), 1), _BLOCK)
        return np.asarray(np.arange(self.count) // block % every == every - 1)

    @cached_property
    def training(self) -> NDArray[np.int64]:
        """The numbers of the windows to train on."""
        return np.flatnonzero(~self._is_held_out)

    @cached_property
    def validation(self) -> NDArray[np.int64]:
        """The numbers of the held-out windows."""
        return np.flatnonzero(self._is_held_out)

    def samples(self, first: int, count: int) -> tuple[Any, Tensor]:
        """Return the training samples first .. first + count - 1: tokens and targets, each (B, L), int64, as a pair."""
        numbers = np.arange(first, first + count, dtype=np.int64)
        epochs, places = np.divmod(numbers, len(self.training))
        order = [shuffled(int(p), len(self.training), self.seed, int(e)) for e, p in zip(epochs, places, strict=True)]
        return self._read(self.training[order])

    def validation_samples(self, first: int, count: int) -> tuple[Any, Tensor]:
        """Return held-out samples, spread evenly over the held-out text; numbers beyond the end wrap around."""
        windows = self.validation
        spread = (np.arange(first, first + count) * _spread(len(windows))) % len(windows)
        return self._read(windows[spread])

    def _read(self, windows: NDArray[np.int64]) -> tuple[Any, Tensor]:
        rows = [self.corpus.tokens[w * self.context : (w + 1) * self.context + 1] for w in windows]
        tokens_BL = torch.from_numpy(np.stack(rows).astype(np.int64))
        self._check(int(tokens_BL.min()), int(tokens_BL.max()))
        return self.pair(tokens_BL[:, :-1].contiguous(), tokens_BL[:, 1:].contiguous())

    def _check(self, least: int, most: int) -> None:
        """Refuse tokens outside of the vocabulary, which nobody has looked for if it was given.

        Raises:
            DataError: there are some.
        """
        if least < 0 or most >= self.corpus.vocabulary:
            raise DataError(
                f"{self.corpus.name} holds the token {least if least < 0 else most}, but model.vocabulary is "
                f"{self.corpus.vocabulary}; tokens count from 0 and lie below it"
            )

    def count_tokens(self, vocabulary: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Count how often each token occurs in the training text and in the held-out text.

        It reads in parts, and only some evenly spread windows of a large text.
        """
        counts = np.zeros((2, vocabulary), dtype=np.int64)
        rows = self.corpus.tokens[: self.count * self.context].reshape(self.count, self.context)
        for which, windows in enumerate((self.training, self.validation)):
            chosen = windows[:: max(len(windows) * self.context // _COUNTED, 1)]
            for first in range(0, len(chosen), _PART):
                part = rows[chosen[first : first + _PART]].ravel()
                self._check(int(part.min()), int(part.max()))
                counts[which] += np.bincount(part, minlength=vocabulary)
        return counts[0], counts[1]


class WindowMicrobatches(Sequence[tuple[Any, Tensor]]):
    """The m microbatches of a batch, from sample number `first` on, each read on access."""

    def __init__(self, windows: Windows, first: int, microbatches: int, size: int, validation: bool = False) -> None:
        self._read = windows.validation_samples if validation else windows.samples
        self._first, self._m, self._size = first, microbatches, size

    def __len__(self) -> int:
        return self._m

    def __getitem__(self, k: int) -> tuple[Any, Tensor]:  # type: ignore[override]  # slices are never asked for
        if not 0 <= k < self._m:
            raise IndexError(k)
        return self._read(self._first + k * self._size, self._size)


def batches(
    windows: Windows, first: int, count: int, microbatches: int, size: int, validation: bool = False
) -> Iterator[WindowMicrobatches]:
    """Yield batches of m microbatches of `size` samples, from sample number `first` on."""
    for batch in range(count):
        yield WindowMicrobatches(windows, first + batch * microbatches * size, microbatches, size, validation)


def shuffled(place: int, count: int, seed: int, epoch: int) -> int:
    """Return the image of `place` under a pseudo-random permutation of range(count), without storing the permutation.

    A Feistel network over the next even power of two; values out of range are mapped again until they are in range.
    """
    half = max((count - 1).bit_length() + 1, 2) // 2
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for round_ in range(_ROUNDS):
            left, right = right, left ^ (_mix(right, seed, epoch, round_) & mask)
        place = left << half | right
        if place < count:
            return place


def _mix(value: int, seed: int, epoch: int, round_: int) -> int:
    """Hash the inputs in turn to 32 bits (the finaliser of MurmurHash3)."""
    h = 0x9E3779B9
    for part in (seed ^ (seed >> 32) * 0x9E3779B1, epoch, round_, value):
        h = (h ^ part) & 0xFFFFFFFF
        h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
        h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
        h ^= h >> 16
    return h


def _spread(count: int) -> int:
    """Return a step near the golden section of `count` that visits every place."""
    step = max(int(count * 0.618), 1)
    while np.gcd(step, count) != 1:
        step += 1
    return step
