"""Evaluation of the newest weights between two batches of a run, without draining the pipeline.

Every rank runs forward-only passes directly before its first forward of a batch, over lanes of their own; what is in
flight stays where it is (`schedule.machine.evaluation_without_draining_check` says when that cannot block). They read
the newest weights there, which are of one version on all stages. The last versions of a run have no border in it, and
are evaluated when it has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from penstock.checks import check_whole, is_whole
from penstock.comm.core.ticket import Wait
from penstock.errors import ConfigError, DataError
from penstock.runtime.data.batch_source import Batches, BatchSource
from penstock.runtime.execute.executor import Executor
from penstock.runtime.setup.rank_state import RankState
from penstock.runtime.update.run_events import Evaluated, with_numbers
from penstock.stage.blocks.loss import summed


class Evaluating(NamedTuple):
    """When to evaluate the newest weights during a run, and on what: the `evaluate` argument of `Pipeline.run`.

    Attributes:
        every: the weights after `every`, 2 * `every`, ... batches are evaluated, in the run that makes them, as soon as
            all stages have them: before the next batch begins, under 2bw one batch later, under 3bw two, and at the
            end of the run. (The last ones of a run whose loop is left are evaluated when the next one begins.)
        data: the batches, at least one and the same on all ranks: a DataLoader or a list, or a function that is called
            for them each time.
    """

    every: int
    data: Batches | Callable[[], Batches]

    def __repr__(self) -> str:
        """Return when, and the kind of the data."""
        return f"Evaluating(every={self.every}, data=<{type(self.data).__name__}>)"

    @property
    def batches(self) -> Batches:
        """The batches of the next evaluation."""
        return self.data() if callable(self.data) else self.data

    def wants(self, version: int) -> bool:
        """Return True if a version is to be evaluated."""
        return version > 0 and version % self.every == 0


def check_evaluating(evaluate: Any) -> None:
    """Refuse what is no plan for evaluations.

    Raises:
        ConfigError: it is something else, its interval is no number of batches, or its data can be read once only.
    """
    if not isinstance(evaluate, Evaluating):
        raise ConfigError(
            f"evaluate must be penstock.Evaluating(every=50, data=loader), every so many batches; got {evaluate!r:.80}"
        )
    if is_whole(evaluate.data):
        raise ConfigError(
            f"evaluate: the number of batches comes first: penstock.Evaluating({evaluate.data}, loader), to evaluate "
            f"every {evaluate.data} batches"
        )
    check_whole("evaluate: every", evaluate.every)
    if isinstance(evaluate.data, Iterator):
        raise ConfigError(
            f"evaluate: data is a {type(evaluate.data).__name__}, which the first evaluation would use up; pass a "
            "list, a DataLoader, or a function that makes it"
        )


def no_data() -> DataError:
    """What an evaluation within a run raises that has no batch."""
    return DataError("the data of an evaluation is empty; give at least one batch, or do not evaluate")


def longer(count: int) -> DataError:
    """What an evaluation raises whose data go on where the loss is."""
    return DataError(f"the data of an evaluation ends after {count} batches on the first stage, not on the last")


class _Unreadable:
    """Data whose first look raises an error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __iter__(self) -> Iterator[Any]:
        raise self._error


def readable(evaluating: Evaluating) -> Batches:
    """The batches of the next evaluation; where asking for them raises an error, looking at them does."""
    try:
        return evaluating.batches
    except Exception as error:
        return _Unreadable(error)


class EvaluationData:
    """Opens the data of each evaluation in a span, once for all ranks of this process.

    Args:
        evaluating: has the data.
        opened: batches -> their source.
        ranks: of this process.
    """

    def __init__(self, evaluating: Evaluating, opened: Callable[[Batches], BatchSource], ranks: int) -> None:
        self._evaluating, self._opened, self._ranks = evaluating, opened, ranks
        self._sources: dict[int, tuple[BatchSource, int]] = {}  # and the ranks that have not asked for it

    def open(self, batch: int) -> BatchSource:
        """Return the source of the evaluation before `batch`; its `failure` says why it has no first batch."""
        found, left = self._sources.pop(batch) if batch in self._sources else (self._open(), self._ranks)
        if left > 1:
            self._sources[batch] = found, left - 1
        return found

    def _open(self) -> BatchSource:
        source = self._opened(readable(self._evaluating))
        if source.failure is None and not source.begins():
            source.failure = source.failure or no_data()
        return source


class Evaluator:
    """Runs the evaluations of one rank during one span of training.

    What reading the data, or a forward, raises ends the run, as if somebody had asked for its end: nothing in flight is
    lost. Ranks behind the one that has failed hear why in place of its output; those before it, by the request to stop
    and at the end of the run.

    Args:
        state: the rank.
        executor: runs the forward-only schedule.
        evaluating: the versions to evaluate.
        data: opens the data.
        ask_to_stop: ends the run after what is under way.
        delay: before batch t, version t - delay is read.
        start: the version that the span begins with; those up to it are no matter of borders.
        training: runs the training schedule, whose weights may have to be gathered.

    Attributes:
        failure: what reading the data, or a forward, has raised first; None while nothing has.
        reason: of it, for other ranks.
    """

    def __init__(
        self,
        state: RankState,
        executor: Executor,
        evaluating: Evaluating,
        data: EvaluationData,
        ask_to_stop: Callable[[], None],
        delay: int,
        start: int,
        training: Executor,
    ) -> None:
        self._training = training
        self._state, self._executor, self._evaluating = state, executor, evaluating
        self._data, self._ask_to_stop, self._delay, self._start = data, ask_to_stop, delay, start
        self.failure: BaseException | None = None
        self.reason: str | None = None

    def at_border(self, batch: int) -> Iterator[Wait]:
        """Evaluate before the first forward of `batch`, if the version there is to be evaluated."""
        version = batch - self._delay
        if not self._evaluating.wants(version) or version <= self._start:
            return
        source = self._data.open(batch)  # what its loader raises is no trouble to what is in flight
        total, weight, count, recorder = 0.0, 0.0, 0, self._state.recorder
        numbers = list[Mapping[str, float]]()
        release = yield from self._training.gather_rest(version)
        training = recorder.span
        recorder.begin_span()
        with self._state.evaluating(version=version):
            for event in self._executor.run(source, batch, 0):
                if isinstance(event, Wait):
                    yield event
                    continue
                count += 1
                if event.loss is not None and event.weight:
                    total, weight = total + event.loss * event.weight, weight + event.weight
                    numbers.append(event.numbers)
        recorder.span = training
        release()
        follows = self._state.has_loss and source.follows(count)  # it may not be readable on any rank
        if follows:
            source.fail(longer(count))
        if source.failure is not None:
            self.failure, self.reason = self.failure or source.failure, source.reason(recorder.rank)
            self._ask_to_stop()
        elif self._state.has_loss:
            self._state.decisions.note(batch, with_numbers(Evaluated(version, total, weight), summed(numbers)))

    def close(self) -> None:
        """Stop the background threads of the executor."""
        self._executor.close()
