"""Launches the workers of a run through torch elastic."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from penstock.errors import InterruptedRunError, WorkerError
from penstock.job.place import LOOPBACK
from penstock.job.store import listening_store
from penstock.job.surroundings import check_surroundings
from penstock.launch.fork_server import start_method, why_not_started, workers_environment
from penstock.launch.signals import LauncherSignals
from penstock.launch.worker_exit import WorkerExits, work

_BACKEND = "penstock-local"  # the name under which torch elastic finds `LocalRendezvous`
_LOOK = 0.1  # seconds between two checks of the workers
_REPORTS = ".workers"  # begins the name of a folder of reports in a run folder; the process id of its launcher follows


class LocalRendezvous(StaticTCPRendezvous):
    """The rendezvous of a single agent, whose store only this machine can reach; elastic's own listens everywhere.

    Args:
        parameters: of elastic's launcher.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        timeout = timedelta(minutes=5)
        store = listening_store(LOOPBACK, 0, timeout)
        super().__init__(LOOPBACK, store.port, 0, 1, parameters.run_id, int(timeout.total_seconds()))
        self._store = store

    def get_backend(self) -> str:
        """Return the name of this kind of rendezvous."""
        return _BACKEND


rendezvous_handler_registry.register(_BACKEND, LocalRendezvous)


def launch_local(
    workers: int,
    function: Callable[..., None],
    *arguments: Any,
    folder: Path | None = None,
    restarts: int = 0,
    timeout: float = 300.0,
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
        drains: the function looks at that file; if it does not, the first signal kills the workers.

    Raises:
        WorkerError: a worker failed, and the others have been killed.
        InterruptedRunError: this process was signalled twice, or once where nothing drains.
        ConfigError: they cannot run here (`check_surroundings`).
    """
    check_surroundings(os.environ, workers)
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # failures are reported below, once
    with (
        _folder_of_reports(folder) as reports,
        workers_environment(),
        LauncherSignals(reports / "drain", kills=not drains) as signals,
    ):
        exits = WorkerExits(reports, workers, timeout)
        config = _launch_config(workers, restarts, exits.errors)
        tempfile.tempdir = str(reports)  # of this process: torch leaves a file there for each worker that raises
        launched = _in_thread(elastic_launch(config, work), function, str(reports), *arguments, str(signals.drain))
        while not wait([launched], timeout=_LOOK).done:
            exits.look()
            if signals.fatal is not None:  # also kills workers that elastic has restarted meanwhile
                exits.kill()
            if stuck := exits.explain_stuck():
                raise stuck
        try:
            launched.result()
        except ChildFailedError as error:
            if signals.fatal is not None:
                raise InterruptedRunError(signals.fatal) from None
            raise exits.explain(error) from None
        except (EOFError, OSError) as error:
            raise WorkerError(why_not_started(error), "") from None


def _launch_config(workers: int, restarts: int, errors: Path) -> LaunchConfig:
    """Return how elastic is to launch workers of this machine, which write their errors into a folder."""
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=uuid.uuid4().hex,
        rdzv_backend=_BACKEND,
        local_addr=LOOPBACK,
        max_restarts=restarts,
        monitor_interval=0.1,
        start_method=start_method(),
        logs_specs=DefaultLogsSpecs(log_dir=str(errors)),
    )


@contextmanager
def _folder_of_reports(parent: Path | None) -> Iterator[Path]:
    """Make the folder of the workers' marks and reports, and remove it at the end; temporary files may lie in it.

    Args:
        parent: where to make it; what a launcher that was killed has left there is removed.
    """
    for left in () if parent is None else parent.glob(f"{_REPORTS}-*"):
        try:
            os.kill(int(left.name.split("-")[1]), 0)
        except ProcessLookupError:
            shutil.rmtree(left, ignore_errors=True)
        except OSError:  # it is another user's
            pass
    prefix = "penstock-" if parent is None else f"{_REPORTS}-{os.getpid()}-"
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as folder:
        try:
            yield Path(folder).resolve()
        finally:
            tempfile.tempdir = before


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
