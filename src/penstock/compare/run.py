"""Runs a comparison: trains every run that has not finished yet."""

from __future__ import annotations

import multiprocessing
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from penstock.compare.config import ComparisonConfig
from penstock.compare.grid import Key, contenders, grid_of, rounds_of
from penstock.compare.prepared_contender import PreparedContender, prepare_contender
from penstock.compare.result_files import Records, joined
from penstock.compare.results import Findings
from penstock.compare.tasks import Task, make_task
from penstock.compare.trial import TrialResult, run_trial
from penstock.errors import PenstockError, WorkerError
from penstock.launch.signals import end_with_parent


class ComparisonObserver(Protocol):
    """Receives the progress of a comparison."""

    def preparing(self, label: str) -> None:
        """A method is about to be proven, checked and simulated."""
        ...

    def started(self, task: Task, total: int, there: int) -> None:
        """All methods can be trained; `there` of `total` runs have finished earlier."""
        ...

    def began(self, key: Key, batches: int) -> None:
        """A run begins."""
        ...

    def progress(self, batches: int, loss: float) -> None:
        """The present run has done so many batches; `loss` is that of the last one."""
        ...

    def finished(self, result: TrialResult) -> None:
        """A run has ended, and its results are on disk."""
        ...


class ComparisonRun:
    """A comparison and its folder.

    Args:
        config: the comparison, merged with what the folder has already.
        folder: for the results.
        observer: receives the progress.

    Raises:
        ConfigError: a method cannot be trained as configured, or the folder holds another comparison.
        PenstockError: see `make_task` and `penstock.schedule.build.prove`.
    """

    def __init__(self, config: ComparisonConfig, folder: Path, observer: ComparisonObserver) -> None:
        config = joined(config, folder)
        self._config, self._observer = config, observer
        self._task = make_task(config, folder)
        self._records = Records(folder, config, self._task)
        self._contenders: list[PreparedContender] = []
        for contender in contenders(config):
            observer.preparing(contender.label)
            self._contenders.append(prepare_contender(config, self._task, contender))
        self._records.begin()
        self._results: dict[Key, TrialResult] = {}

    def run(self, jobs: int = 1) -> Findings:
        """Train every run that has not finished yet.

        Args:
            jobs: runs to train at a time; each has a process of its own if it is more than one.

        Raises:
            PenstockError: see `Pipeline` and `train_side_by_side`.
        """
        there = {key: found for key in grid_of(self._config) if (found := self._records.load(key)) is not None}
        self._results |= there
        wanted = sum(key in there for keys in rounds_of(self._config, self._best_rate) for key in keys)
        self._observer.started(self._task, len(self._contenders) * self._config.runs, wanted)
        for keys in rounds_of(self._config, self._best_rate):
            missing = [key for key in keys if key not in self._results]
            for result in self._train(missing, min(jobs, len(missing))):
                self._records.save(result)
                self._results[result.key] = result
                self._observer.finished(result)
        return self.findings()

    def _train(self, keys: Sequence[Key], jobs: int) -> Iterator[TrialResult]:
        """Train runs, and yield their results as they end."""
        if jobs > 1:
            yield from train_side_by_side(self._config, self._records.folder, keys, jobs)
            return
        by_label = {prepared.label: prepared for prepared in self._contenders}
        with _threads(self._config.threads), torch.random.fork_rng(devices=[]):
            for key in keys:
                self._observer.began(key, self._config.batches)
                yield run_trial(self._config, self._task, by_label[key.method], key, self._observer.progress)

    def _best_rate(self, label: str) -> float | None:
        """Return the best rate of a method by its finished runs; None if there are none."""
        return self.findings().best_rate(next(e for e in self._contenders if e.label == label))

    def findings(self) -> Findings:
        """Return the results so far."""
        ordered = {key: self._results[key] for key in grid_of(self._config) if key in self._results}
        return Findings(self._config, self._task, self._contenders, ordered)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Set the number of threads temporarily, as it changes the last bits of sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train_side_by_side(
    config: ComparisonConfig, folder: Path, keys: Sequence[Key], jobs: int
) -> Generator[TrialResult, None, None]:
    """Train runs, so many at a time, and yield their results in the order in which they end.

    After a run that fails, none begins; its error is raised when those under way have ended.

    Args:
        config: of the comparison.
        folder: of its results.
        keys: of the runs.
        jobs: processes.

    Raises:
        PenstockError: see `run_trial`.
        WorkerError: a process was killed.
    """
    context = multiprocessing.get_context("spawn")  # a fork would have no GPU
    failed: PenstockError | None = None
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(min(jobs, len(keys)), context, initializer=end_with_parent) as pool:
        runs = [pool.submit(_train, config, folder, key) for key in keys]
        try:
            for run in as_completed(runs):
                if run.cancelled():
                    continue
                try:
                    yield run.result()
                except BrokenProcessPool:
                    raise WorkerError(
                        f"a process that trained one of {len(keys)} runs was killed; if memory was short, use fewer "
                        "--jobs. The same command continues with the runs that have not finished",
                        "",
                    ) from None
                except PenstockError as error:
                    failed = failed or error
                    _cancel(runs)
        except BaseException:  # an interrupt, too: the pool would wait for all runs that are under way
            _cancel(runs)
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise
    if failed is not None:
        raise failed


def _cancel(runs: Sequence[Future[TrialResult]]) -> None:
    """Have no further run begin."""
    for run in runs:
        run.cancel()


def _train(config: ComparisonConfig, folder: Path, key: Key) -> TrialResult:
    """Train one run in this process."""
    torch.set_num_threads(config.threads)
    task = make_task(config, folder)
    contender = next(contender for contender in contenders(config) if contender.label == key.method)
    return run_trial(config, task, prepare_contender(config, task, contender), key, lambda *_: None)
