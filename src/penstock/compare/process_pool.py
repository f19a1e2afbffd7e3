"""Trains runs of a comparison side by side, each in a process of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch

from penstock.compare.config import ComparisonConfig
from penstock.compare.grid import Key, contenders
from penstock.compare.prepared_contender import prepare_contender
from penstock.compare.tasks import make_task
from penstock.compare.trial import TrialResult, run_trial
from penstock.errors import PenstockError, WorkerError
from penstock.launch.signals import end_with_parent


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
