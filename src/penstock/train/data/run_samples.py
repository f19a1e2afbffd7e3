"""Which samples the batches of a run take, counted through restarts, and the held-out ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.checks import is_whole
from penstock.errors import CheckpointError, DataError
from penstock.train.data.window_sampler import WindowMicrobatches, Windows, batches


class RunSamples:
    """The samples of a run, in batches of m microbatches.

    Args:
        windows: of the text.
        microbatches: m, through all parallel pipelines.
        size: samples of a microbatch.
        fingerprint: of the text, the same on every rank.
    """

    def __init__(self, windows: Windows, microbatches: int, size: int, fingerprint: str) -> None:
        self._windows, self._microbatches, self._size, self._fingerprint = windows, microbatches, size, fingerprint
        self._first, self._sample = 0, 0  # a batch, and the number of its first sample

    def start(self, batch: int, found: Mapping[str, Any] | None, folder: str) -> None:
        """Go on with a batch.

        Args:
            batch: the next one.
            found: what `state` returned for it, as a checkpoint holds it; None to begin with the first sample.
            folder: of the run, for messages.

        Raises:
            CheckpointError: the checkpoint has no such data.
            DataError: it is of another text.
        """
        sample: Any = 0
        if found is not None:
            sample = found.get("sample")
            if not is_whole(sample):
                raise CheckpointError(
                    f"the checkpoint after {batch} batches in {folder!r} was not written by penstock train: of the "
                    f"samples that have been trained on it says {sample!r:.80}; remove it to go on from the one before"
                )
            if found.get("corpus", self._fingerprint) != self._fingerprint:
                raise DataError(
                    f"the run in {folder!r} was trained on other text: {found['corpus']} then, "
                    f"{self._fingerprint} now in {self._windows.corpus.name}. Use the same text, or start a new run"
                )
        self._first, self._sample = batch, sample

    def state(self, batch: int) -> dict[str, Any]:
        """Return what a checkpoint of `batch` needs to go on with it."""
        return {"sample": self._sample_of(batch), "corpus": self._fingerprint}

    def batches(self, first: int, count: int) -> Iterator[WindowMicrobatches]:
        """Yield `count` batches, from batch `first` on."""
        return batches(self._windows, self._sample_of(first), count, self._microbatches, self._size)

    def held_out(self, samples: int) -> Iterator[WindowMicrobatches]:
        """Yield whole batches of held-out samples: at most `samples` of them, but at least one batch."""
        count = max(min(samples, len(self._windows.validation)) // (self._microbatches * self._size), 1)
        return batches(self._windows, 0, count, self._microbatches, self._size, validation=True)

    def _sample_of(self, batch: int) -> int:
        """Return the number of the first sample of a batch."""
        return self._sample + (batch - self._first) * self._microbatches * self._size
