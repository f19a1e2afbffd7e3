"""Launches the workers of a run through torch elastic."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future, wait
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from penstock.errors import InterruptedRunError, WorkerError
from penstock.launch.worker_exit import WorkerExits, work

_LOOK = 0.1  # seconds between two checks of the workers
_LONGEST_FOLDER = 64  # characters; the path of a socket may have 107, of which multiprocessing adds about 32


def launch_local(
    workers: int, function: Callable[..., None], *arguments: Any, restarts: int = 0, timeout: float = 300.0
) -> None:
    """Run `function(*arguments, drain)` in local worker processes; return when it has returned in all of them.

    The rendezvous is a file that only this user can read; on Linux gloo is bound to the loopback interface. Elastic
    runs in a thread, so that this process receives signals first: the first one (Ctrl-C, SIGTERM) creates the file
    `drain`, at which the workers finish and exit; the second one kills them.

    Args:
        workers: the number of processes.
        function: a module-level function.
        arguments: plain values.
        restarts: how often elastic may restart all workers after one has failed.
        timeout: seconds for all workers to return after the first has.

    Raises:
        WorkerError: a worker failed, and the others have been killed.
        InterruptedRunError: this process was signalled twice.
    """
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # failures are reported below, once
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        exits, drain = WorkerExits(Path(folder), workers, timeout), Path(folder) / "drain"
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=workers,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=str(Path(folder) / "rendezvous"),
            rdzv_configs={"store_type": "file"},
            local_addr="127.0.0.1",
            max_restarts=restarts,
            monitor_interval=0.1,
            start_method=_start_method(),
            logs_specs=DefaultLogsSpecs(log_dir=str(exits.errors)),
        )
        with _Signals(drain) as signals:
            launched = _in_thread(elastic_launch(config, work), function, folder, *arguments, str(drain))
            while not wait([launched], timeout=_LOOK).done:
                exits.look()
                if signals.second is not None:  # also kills workers that elastic has restarted meanwhile
                    exits.kill()
                if exits.is_stuck:
                    raise exits.explain_stuck()
            try:
                launched.result()
            except ChildFailedError as error:
                if signals.second is not None:
                    raise InterruptedRunError(signals.second) from None
                raise exits.explain(error) from None
            except (EOFError, OSError) as error:  # the fork server has died
                raise WorkerError(f"workers could not be started: {error!r}", "") from None


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


def _start_method() -> str:
    """Choose how workers start: forked from a server that has imported everything, or spawned if that is impossible."""
    # Not every system library survives a fork, and the server's socket is in the folder for temporary files.
    if sys.platform != "linux" or len(tempfile.gettempdir()) > _LONGEST_FOLDER:
        return "spawn"
    multiprocessing.set_forkserver_preload(["penstock.launch.preload"])
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None  # inherited by the fork server
    try:
        forkserver.ensure_running()  # in this thread: the server is killed when the thread that started it ends
    finally:
        if main:
            signal.signal(signal.SIGINT, before)
    return "forkserver"


class _Signals:
    """Handles signals while workers run: the first asks them to drain, the second kills them.

    Args:
        drain: the file to create at the first signal.

    Attributes:
        second: the number of the second signal, if it came.
    """

    def __init__(self, drain: Path) -> None:
        self._drain = drain
        self.second: int | None = None

    def __enter__(self) -> _Signals:
        """Install the signal handlers."""
        numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
        self._before = {number: signal.signal(number, self._take) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the previous handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, *_: object) -> None:
        if not self._drain.exists():
            self._drain.touch()
            return
        self.second = number
