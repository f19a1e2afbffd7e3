"""Launches the workers of a run through torch elastic."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from penstock.errors import InterruptedRunError, WorkerError
from penstock.job.surroundings import check_surroundings
from penstock.launch.fork_server import start_method, workers_environment
from penstock.launch.local_rendezvous import BACKEND
from penstock.launch.signals import LauncherSignals
from penstock.launch.worker_exit import WorkerExits, work
from penstock.launch.worker_start_failure import why_not_started

_LOOK = 0.1  # seconds between two checks of the workers
_REPORTS = ".workers"  # begins the name of a folder of reports in a run folder; the process id of its launcher follows


def launch_local(
    workers: int,
    function: Callable[..., None],
    *arguments: Any,
    folder: Path | None = None,
    restarts: int = 0,
    timeout: float = 300.0,
    preload: Sequence[str] = (),
    drains: bool = True,
) -> None:
    """Run `function(*arguments, drain)` in local worker processes; return when it has returned in all of them.

    Their store listens on the loopback interface, and on Linux gloo does, too. Workers import nothing from the working
    folder, unless it is on the path of this process. Elastic runs in a thread, so that this process receives signals
    first: the first one (Ctrl-C, SIGTERM, a terminal that is closed) creates the file `drain`, at which the workers
    finish and exit; the second one kills them.

    Args:
        workers: the number of processes.
        function, arguments: a module-level function, and plain values.
        folder: where the workers' reports lie while they run; a temporary one if not given.
        restarts: how often elastic may restart all workers after one has failed.
        timeout: seconds for all workers to return after the first has.
        preload: modules of the function, imported once for all workers that this process ever forks.
        drains: the function looks at that file; if it does not, the first signal kills the workers.

    Raises:
        WorkerError: a worker failed, and the others have been killed.
        InterruptedRunError: this process was signalled twice, or once where nothing drains.
        ConfigError: they cannot run here (`check_surroundings`).
    """
    check_surroundings(os.environ, workers)
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # failures are reported below, once
    kills = not drains
    with (
        _folder_of_reports(folder) as reports,
        workers_environment(),
        LauncherSignals(reports / "drain", kills) as signals,
    ):
        exits = WorkerExits(reports, workers, timeout)
        config = _launch_config(workers, restarts, preload, exits.errors)
        tempfile.tempdir = str(reports)  # of this process: torch leaves a file there for each worker that raises
        launched = _in_thread(elastic_launch(config, work), function, str(reports), *arguments, str(signals.drain))
        while not wait([launched], timeout=_LOOK).done:
            exits.look()
            if signals.fatal is not None:  # also kills workers that elastic has restarted meanwhile
                exits.kill()
            if exits.is_stuck:
                raise exits.explain_stuck()
        try:
            launched.result()
        except ChildFailedError as error:
            if signals.fatal is not None:
                raise InterruptedRunError(signals.fatal) from None
            raise exits.explain(error) from None
        except (EOFError, OSError) as error:
            raise WorkerError(why_not_started(error), "") from None


def _launch_config(workers: int, restarts: int, preload: Sequence[str], errors: Path) -> LaunchConfig:
    """Return how elastic is to launch workers of this machine, which write their errors into a folder."""
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=uuid.uuid4().hex,
        rdzv_backend=BACKEND,
        local_addr="127.0.0.1",
        max_restarts=restarts,
        monitor_interval=0.1,
        start_method=start_method(preload),
        logs_specs=DefaultLogsSpecs(log_dir=str(errors)),
    )


@contextmanager
def _folder_of_reports(parent: Path | None) -> Iterator[Path]:
    """Make the folder of the workers' marks and reports, and remove it at the end; temporary files may lie in it.

    Args:
        parent: where to make it; what a launcher that was killed has left there is removed.
    """
    for left in () if parent is None else parent.glob(f"{_REPORTS}-*"):
        if not _is_alive(int(left.name.split("-")[1])):
            shutil.rmtree(left, ignore_errors=True)
    prefix = "penstock-" if parent is None else f"{_REPORTS}-{os.getpid()}-"
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as folder:
        try:
            yield Path(folder).resolve()
        finally:
            tempfile.tempdir = before


def _is_alive(process: int) -> bool:
    """Return whether there is a process of this number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's
        pass
    return True


def _in_thread(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Call a function in a daemon thread, which may stay behind when the process exits: elastic may hang in it."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="penstock launcher", daemon=True).start()
    return future
