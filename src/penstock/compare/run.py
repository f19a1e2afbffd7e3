"""Runs a comparison: trains every run that has not finished yet."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Protocol

from penstock.compare.config import ComparisonConfig
from penstock.compare.contender_run import Key, TrialResult, read_result, train_contender
from penstock.compare.prepared_contender import PreparedContender, prepare_contender
from penstock.compare.result_files import RUNS, check_data, describe, joined
from penstock.compare.results import Findings
from penstock.errors import PenstockError, WorkerError
from penstock.launch.signals import end_with_parent
from penstock.train.data.corpus import load_corpus
from penstock.train.prepare.prepare_run import Task, gpt_on_text


class ComparisonObserver(Protocol):
    """Receives the progress of a comparison."""

    def preparing(self, label: str) -> None:
        """A contender is about to be proven, checked and simulated."""
        ...

    def started(self, title: str, total: int, there: int) -> None:
        """All contenders can be trained; `there` of `total` runs have finished earlier."""
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


def grid_of(config: ComparisonConfig) -> Iterator[Key]:
    """Yield every run that may be needed: all contenders with all seeds and all rates."""
    for seed in range(config.seeds):
        for lr in config.rates:
            for label in config.contenders:
                yield Key(label, seed, lr)


def rounds_of(config: ComparisonConfig, best: Callable[[str], float | None]) -> Iterator[list[Key]]:
    """Yield all runs that are needed, in rounds that need the results of those before them.

    Each is ordered seed by seed, so that early results compare all contenders. `best` returns the best rate of a
    contender once all have been tried; if that is None, its further runs are left out.
    """
    tuned = config.tuned
    yield [key for key in grid_of(config) if key.seed < tuned]
    rates = {label: best(label) for label in config.contenders}
    yield [Key(label, seed, lr) for seed in range(tuned, config.seeds) for label, lr in rates.items() if lr is not None]


def text_task(config: ComparisonConfig, folder: Path) -> Task:
    """Return the task of a comparison on text, which is read once for all runs; files in its own folder are no part."""
    corpus = load_corpus(config.data, lambda file: file.resolve().is_relative_to(folder.resolve()))
    return partial(gpt_on_text, corpus=corpus)


class ComparisonRun:
    """A comparison and its folder.

    Args:
        config: the comparison, merged with what the folder has already.
        folder: for the results.
        observer: receives the progress.
        task: makes the task of the comparison in every process, from its configuration and its folder.

    Raises:
        ConfigError: a contender cannot be trained as configured, or the folder holds another comparison.
        PenstockError: see `prepare`.
    """

    def __init__(
        self,
        config: ComparisonConfig,
        folder: Path,
        observer: ComparisonObserver,
        task: Callable[[ComparisonConfig, Path], Task] = text_task,
    ) -> None:
        self._config, self._folder, self._observer, self._make_task = joined(config, folder), folder, observer, task
        self._task = task(self._config, folder)
        _, windows = self._task(self._config)
        data = windows.corpus.fingerprint
        check_data(folder, data)
        self._contenders: list[PreparedContender] = []
        for label in self._config.contenders:
            observer.preparing(label)
            self._contenders.append(prepare_contender(self._config, label, self._task))
        describe(folder, self._config, data)
        self._results: dict[Key, TrialResult] = {}

    def run(self, jobs: int = 1) -> Findings:
        """Train every run that has not finished yet.

        Args:
            jobs: runs to train at a time; each has a process of its own if it is more than one.

        Raises:
            PenstockError: see `train_contender` and `train_side_by_side`.
        """
        keys_there = ((key, read_result(self._folder / RUNS, key)) for key in grid_of(self._config))
        self._results |= {key: found for key, found in keys_there if found is not None}
        wanted = sum(key in self._results for keys in rounds_of(self._config, self._best_rate) for key in keys)
        self._observer.started(self.findings().title, len(self._contenders) * self._config.runs, wanted)
        for keys in rounds_of(self._config, self._best_rate):
            missing = [key for key in keys if key not in self._results]
            for result in self._train(missing, min(jobs, len(missing))):
                self._results[result.key] = result
                self._observer.finished(result)
        return self.findings()

    def _train(self, keys: Sequence[Key], jobs: int) -> Iterator[TrialResult]:
        """Train runs, and yield their results as they end."""
        if jobs > 1:
            yield from train_side_by_side(self._config, self._folder, keys, jobs, self._make_task)
            return
        for key in keys:
            self._observer.began(key, self._config.batches)
            yield train_contender(self._config, self._task, self._folder / RUNS, key, self._observer.progress)

    def _best_rate(self, label: str) -> float | None:
        """Return the best rate of a contender by its finished runs; None if there are none."""
        return self.findings().best_rate(next(e for e in self._contenders if e.label == label))

    def findings(self) -> Findings:
        """Return the results so far."""
        ordered = {key: self._results[key] for key in grid_of(self._config) if key in self._results}
        return Findings(self._config, self._contenders, ordered)


def train_side_by_side(
    config: ComparisonConfig,
    folder: Path,
    keys: Sequence[Key],
    jobs: int,
    task: Callable[[ComparisonConfig, Path], Task] = text_task,
) -> Generator[TrialResult, None, None]:
    """Train runs, so many at a time, and yield their results in the order in which they end.

    After a run that fails, none begins; its error is raised when those under way have ended.

    Raises:
        PenstockError: see `train_contender`.
        WorkerError: a process was killed.
    """
    context = multiprocessing.get_context("spawn")  # a fork would have no GPU
    failed: PenstockError | None = None
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(min(jobs, len(keys)), context, initializer=end_with_parent) as pool:
        runs = [pool.submit(_train, config, folder, task, key) for key in keys]
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


def _train(
    config: ComparisonConfig, folder: Path, task: Callable[[ComparisonConfig, Path], Task], key: Key
) -> TrialResult:
    """Train one run in this process."""
    return train_contender(config, task(config, folder), folder / RUNS, key, lambda *_: None)
