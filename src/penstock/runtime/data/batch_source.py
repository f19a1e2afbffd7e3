"""Access to the training data by microbatch: the first stage takes inputs, the last stage targets.

Batches are any iterable; a batch is a pair (inputs, targets), or a sequence of microbatches, each a pair that is made
when it is asked for: m for each of the parallel pipelines. The first stage looks one batch ahead, because every message
of a batch says whether another one follows; between processes the last stage reads further ahead, so that a batch that
it cannot read, or does not have, is never begun (`schedule.proof.data_read_ahead`). In one process both stages share a
`BatchSource`; between processes each has its own over equal data, and a checksum that travels with the activations
catches it if they differ.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import DataError, PenstockError
from penstock.options.parallelism import Dims
from penstock.runtime.data.checksum import checksum
from penstock.runtime.data.microbatches import Microbatches, in_pairs, marked, microbatches_of
from penstock.runtime.update.stop_request import StopRequest

Batches = Iterable[Any]
"""What `microbatches_of` takes: whole batches, or lists of microbatches."""
_READ, EVALUATE = "read the data of the evaluation", "evaluate"
_END = object()
_COMPARED = 2  # batches of a span of which samples on a GPU are compared, too


class Sample(NamedTuple):
    """The input and target of a microbatch, with their checksum from before any block could write into them.

    The checksum is 0 where none was made: where all ranks read the same source, and of data on a GPU, which the host
    would have to wait for, after the first batches of a span. `counts` is False where the microbatch only repeats
    another one, because the batch has too few samples.
    """

    input: Any
    target: Any
    checksum: int
    counts: bool = True


class BatchSource:
    """Random access to the microbatches of the batches in flight.

    Args:
        batches: an iterable of batches, each of w * m microbatches; pipeline r takes m of them, from r * m.
        microbatches: m.
        width: w, the number of parallel pipelines.
        reads: how many times this process reads each microbatch of a pipeline's batch; each once if None.
        pipelines: how many of the parallel pipelines read in this process.
        stop: the request to end the run; none can come if None.
        fills: whole batches may have fewer samples than microbatches; the last one is repeated, and does not count.
        shared: every rank reads this source, so samples need no checksum.
        length: how many batches there are, where that is known and counts.
        first: number of the first batch, for messages.
        ahead: how many batches a rank behind the first reads ahead when it has taken the last sample of a batch; if one
            cannot be read, or is missing, it asks in time for an end before it.
        overlap: how many batches before a new one passes may still read when it is made
            (`penstock.schedule.proof.data_read_ahead`); a loader that writes into the first batch by then is refused.
        dims: along which dimensions whole batches are split.

    Attributes:
        length: as given; None where this process reads none of them.
        failure: what reading ahead has raised: the span ends before the batch that could not be read; or what the first
            look at the data has raised, or a `DataError` if they are no iterable: then there is no batch; or what a
            forward of an evaluation, or Ctrl-C within one, has raised; else None.
    """

    def __init__(
        self,
        batches: Batches,
        microbatches: int,
        width: int = 1,
        reads: Sequence[int] | None = None,
        pipelines: int = 1,
        stop: StopRequest | None = None,
        *,
        fills: bool = False,
        shared: bool = False,
        first: int = 0,
        ahead: int = 0,
        overlap: int = 1,
        length: int | None = None,
        dims: Dims = 0,
    ) -> None:
        self._ahead = ahead
        self._whole: dict[int, Any] = {}  # batches that have been read ahead, as they came
        self._fills, self._shared, self._first, self._dims = fills, shared, first, dims
        self.failure: BaseException | None = None
        self._reason = ""
        self._spoiled: Exception | None = None  # what is wrong with a batch under way
        try:
            self._batches = iterator_of(batches)
        except Exception as error:  # all ranks are told of it before it is raised
            self._batches, self.failure = iter(()), error
        self._m, self._width = microbatches, width
        self._readers = [1] * microbatches if reads is None else reads
        self._reads = pipelines * sum(self._readers)  # of a batch
        self.length = length if self._reads else None
        self._held: dict[int, Microbatches] = {}
        self._count: dict[int, int] = {}  # microbatches of a held batch that are no repetitions
        self._left: dict[int, int] = {}  # reads that a held batch has before it
        self._samples: dict[tuple[int, int], tuple[Sample, int]] = {}
        self._fetched = 0
        self._exhausted = False
        self._keeps = max(overlap, ahead)
        self._begun: list[Tensor] = []  # the first batch, as long as passes may read it
        self._stop = StopRequest() if stop is None else stop
        self._asked, self._end = 0, math.inf

    def begins(self) -> bool:
        """Return False if a stop was requested, or if this process reads data, but finds no first batch.

        `failure` may say why.
        """
        return self._stop.agreed > self._first and (not self._reads or self._comes(0))

    def has(self, batch: int) -> bool:
        """Return True if batch number `batch` of the span exists, fetching batches up to it.

        Raises:
            DataError: a batch cannot be split, or has another number of microbatches than the schedule, or a list has
                one that is no pair; or the loader has written into a batch under way.
        """
        while self._fetched <= batch and not self._exhausted:
            before = _content(self._begun)
            given = next(self._batches, _END)
            if self._begun:
                self._check_reuse(before)
            if given is _END:
                self._exhausted = True
                break
            following = in_pairs(given)
            if not self._fetched:
                tensors = (tensor for tensor in batch_tensors(following) if tensor.layout is torch.strided)
                self._begun = [tensor for tensor in tensors if not tensor.is_nested]
            self._held[self._fetched], self._count[self._fetched] = self._divided(following)
            self._left[self._fetched] = self._reads
            if self._ahead:
                self._whole[self._fetched] = given
            self._fetched += 1
        return batch < self._fetched

    def read_ahead(self) -> int | None:
        """Read the first batches of the span; return the number of the first one that is not there, if any.

        Later ones are read as the span goes on.
        """
        return self._fetched if self._ahead and not self._comes(self._ahead - 1) else None

    def end_before(self, batch: int) -> None:
        """Let the span end before a batch that another rank does not have."""
        self._stop.agree(self._first + batch)

    def end_soon(self) -> None:
        """Let an evaluation end before the next batch, as nobody asks for its results any more."""
        self._stop.agree()

    def fail(self, error: BaseException, reason: str = "") -> None:
        """Take down why an evaluation has failed, and the reason for other ranks, if it is not that of the data.

        It ends before the next batch that is to be read, where all ranks read this source.
        """
        if self.failure is None:
            self.failure, self._reason = error, reason
        self._exhausted |= self._shared

    @contextmanager
    def interruptible(self, rank: int, alone: bool) -> Iterator[None]:
        """Let the first Ctrl-C be a failure of an evaluation, which ends in order, instead of a KeyboardInterrupt.

        Args:
            rank: that tells others of it.
            alone: where data is read in this process, nobody else reads it, so the evaluation ends with what is begun.
        """

        def note(*_: Any) -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            error = KeyboardInterrupt()
            self.fail(error, could_not(rank, EVALUATE, error))
            if alone:
                self.end_soon()

        main = threading.current_thread() is threading.main_thread()
        if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def reason(self, rank: int) -> str | None:
        """Why an evaluation has failed, as rank `rank`, which this source is of, tells others; None if it has not."""
        return None if self.failure is None else self._reason or could_not(rank, _READ, self.failure)

    def goes_on(self, after: int) -> bool | None:
        """Whether the data go on after so many batches; None where that is not known, and for who does not read."""
        if not self._reads or (self._exhausted and self.failure is not None):
            return None
        return True if self._fetched > after else False if self._exhausted else None

    def unread(self) -> list[Any]:
        """Return the batches that were read ahead, but not trained on."""
        return list(self._whole.values())

    def _check_reuse(self, before: tuple[list[int], int]) -> None:
        """Make sure that the loader has not written into its first batch; a batch under way cannot be finished then."""
        if _content(self._begun) != before:
            self._spoiled = DataError(
                f"batch {self._first} was written into by the loader when it made the next one, which is read ahead, "
                "while passes still read this one; let it make new tensors for each batch, such as\n"
                "    batches = ((x.clone(), y.clone()) for x, y in loader)\n"
                "    for report in pipeline.run(batches): ..."
            )
            raise self._spoiled
        if self._fetched >= self._keeps and 0 not in self._held:
            self._begun = []

    def _divided(self, batch: Any) -> tuple[Microbatches, int]:
        """The microbatches of a batch, and how many of them are no repetitions."""
        wanted, number = self._width * self._m, self._first + self._fetched
        found = microbatches_of(batch, wanted, number, self._dims, fewer=self._fills)
        count = len(found) if self._fills else wanted
        if found is not batch:  # what is missing repeats the last one, and does not count
            found = [*found, *[found[-1]] * (wanted - len(found))]
        if len(found) != wanted:
            takes = f"{self._m} per batch" + f" and pipeline, of which there are {self._width}" * (self._width > 1)
            raise DataError(f"batch {number} has {len(found)} microbatches, but the schedule takes {takes}")
        for k, pair in enumerate(found if isinstance(found, list | tuple) else ()):  # other sequences make them late
            _check_pair(pair, number, k)
        if found is batch and type(found) in (list, tuple):  # the loader may clear its lists and fill them again
            found = tuple(_kept(pair) for pair in found)
        return found, count

    def follows(self, batch: int) -> bool:
        """Return True if the span goes on with batch `batch`: it exists and no stop was requested.

        The answer never changes, since all messages of a batch must agree on it.
        """
        if batch > self._asked:
            self._asked = batch
            number = self._first + batch  # one that others lack is looked for here, too: `goes_on` tells
            if self._stop.agreed < number or not self._comes(batch) or self._stop.agreed == number:
                self._end = min(self._end, batch)
        return batch < self._end

    def _comes(self, batch: int) -> bool:
        """Whether a later batch exists; what its loader raises ends the span before it, and is kept."""
        try:
            return self.has(batch)
        except Exception as error:
            self._exhausted, self.failure = True, error
            if error is self._spoiled:
                raise
            return False

    def sample(self, pipeline: int, microbatch: int) -> Sample:
        """Return a microbatch of a pipeline, by its number in the span.

        Raises:
            DataError: the data ends before this microbatch, or it is not a pair.
        """
        batch, k = divmod(microbatch, self._m)
        if (pipeline, microbatch) in self._samples:
            sample, left = self._samples.pop((pipeline, microbatch))
        else:
            if not self.has(batch):
                raise DataError(
                    f"the data ends after {self._fetched} batches, but the first stage has sent batch {batch}"
                )
            place = pipeline * self._m + k
            self._whole.pop(batch, None)
            sample = self._sample(batch, place)
            left = self._readers[k]
        if left > 1:
            self._samples[pipeline, microbatch] = sample, left - 1
        self._left[batch] -= 1
        if not self._left[batch]:
            del self._held[batch], self._left[batch], self._count[batch]
            if self._ahead and not self._comes(batch + self._ahead):
                self._stop.ask(self._first + self._fetched)
        return sample

    def _sample(self, batch: int, place: int) -> Sample:
        pair = self._held[batch][place]
        if not isinstance(self._held[batch], list | tuple):  # else it was checked when it was read
            _check_pair(pair, self._first + batch, place)
        if self._dims:
            pair = marked(pair, self._dims, self._first + batch)
        known = self._shared or (batch >= _COMPARED and not all(tensor.is_cpu for tensor in batch_tensors(pair)))
        return Sample(pair[0], pair[1], 0 if known else checksum(pair), place < self._count[batch])


def batch_tensors(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree; without torch's walk, which is slow, where it is of tuples and lists."""
    if type(tree) not in (tuple, list):
        return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
    return [found for part in tree for found in ((part,) if isinstance(part, Tensor) else batch_tensors(part))]


def _content(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return the counts of writes into tensors, and a checksum of those on the host for writes torch knows not of."""
    if not tensors:
        return [], 0
    versions = [tensor._version for tensor in tensors if not tensor.is_inference()]
    return versions, checksum([tensor for tensor in tensors if tensor.is_cpu])


def could_not(rank: int, what: str, error: BaseException) -> str:
    """Say for other ranks that a rank has failed in something."""
    said = " ".join(f"{type(error).__name__}: {error}".split())
    return f"rank {rank} could not {what} ({said:.400}{''.join(f'; {note}' for note in _places(error))})"


def _places(error: BaseException) -> list[str]:
    return [note for note in getattr(error, "__notes__", ()) if note.startswith("raised ") and "\n" not in note]


def failed_elsewhere(reason: str) -> PenstockError:
    """What a rank raises where another one has failed in an evaluation: a `DataError` if in reading its data."""
    return (PenstockError if f" could not {EVALUATE} (" in reason else DataError)(reason)


def batches_in(batches: Any) -> int | None:
    """Return how many batches there are; None if they do not say."""
    try:
        return len(batches)
    except Exception:  # such as of a DataLoader over a stream, whatever its own method raises
        return None


def iterator_of(batches: Any) -> Iterator[Any]:
    """Return the iterator of data.

    Raises:
        DataError: they are no iterable.
    """
    if not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
        what = "a function; call it" if callable(batches) else type(batches).__name__
        raise DataError(f"batches must be an iterable of batches, such as a DataLoader or a list; got {what}")
    return iter(batches)


def inputs_alone(batches: Batches) -> Iterator[Any]:
    """Yield batches for outputs alone: pairs as they are, labels apart, and other inputs without targets."""
    for batch in map(in_pairs, iterator_of(batches)):
        yield batch if isinstance(batch, Sequence) else (batch, None)


class Portions:
    """The data of a run, for several spans one after the other.

    Args:
        batches: the data; what is wrong with them is found where the first batch is asked for, as in a single span.
    """

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._rest: Iterator[Any] | None = None

    def next(self, count: int | None = None) -> Iterator[Any]:
        """Yield at most so many of the batches that are left; all if None."""
        if self._rest is None:
            self._rest = iterator_of(self._batches)
        yield from islice(self._rest, count)


def _kept(pair: Any) -> Any:
    """Copy the lists and dicts of a microbatch, but not its tensors."""
    plain = isinstance(pair[0], Tensor) and isinstance(pair[1], Tensor)
    return tuple(pair) if plain else pytree.tree_map(lambda leaf: leaf, pair)


def _check_pair(pair: Any, batch: int, microbatch: int) -> None:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        what = f"a {type(pair).__name__}" + (f" of {len(pair)}" if isinstance(pair, tuple | list) else "")
        raise DataError(f"batch {batch}: microbatch {microbatch} is not a pair (input, target) but {what}")
