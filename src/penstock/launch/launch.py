"""Starting the workers of a run: through torch elastic, or as a worker that elastic has started already."""

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
from penstock.launch.worker_exit import Ends, work

_LOOK = 0.1  # seconds between two looks at workers
_LONGEST_FOLDER = 64  # characters; the name of a socket has 107 at most, of which multiprocessing adds about 32


def is_worker() -> bool:
    """Whether torch elastic (torchrun) has started this process as one of a job."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def launch_local(
    workers: int, function: Callable[..., None], *arguments: Any, restarts: int = 0, timeout: float = 300.0
) -> None:
    """Run `function(*arguments, drain)` in local worker processes; returns when all of them have.

    The rendezvous is a file that only this user can read; on Linux gloo is bound to the loopback interface. Elastic
    runs in a thread, so that signals come here first: the first one (Ctrl-C, SIGTERM) makes the file `drain`, at which
    workers end in good order; the second one ends them at once.

    Args:
        workers: how many.
        function: a module-level function.
        arguments: plain values.
        restarts: times that elastic starts all workers again after one has failed.
        timeout: seconds within which all have returned when one has.

    Raises:
        WorkerError: one failed, and the others have been ended.
        InterruptedRunError: this process was told twice to end.
    """
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # failures are reported below, once
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        ends, drain = Ends(Path(folder), workers, timeout), Path(folder) / "drain"
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
            logs_specs=DefaultLogsSpecs(log_dir=str(ends.errors)),
        )
        with _Signals(drain) as signals:
            launched = _in_thread(elastic_launch(config, work), function, folder, *arguments, str(drain))
            while not wait([launched], timeout=_LOOK).done:
                ends.look()
                if signals.second is not None:  # those that elastic has started instead of them as well
                    ends.kill()
                if ends.is_stuck:
                    raise ends.explain_stuck()
            try:
                launched.result()
            except ChildFailedError as error:
                if signals.second is not None:
                    raise InterruptedRunError(signals.second) from None
                raise ends.explain(error) from None
            except (EOFError, OSError) as error:  # what workers are forked from has died
                raise WorkerError(f"workers could not be started: {error!r}", "") from None


def _in_thread(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Call a function in a thread that nobody waits for at the end: elastic may be stuck in it."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="penstock launcher", daemon=True).start()
    return future


def _start_method() -> str:
    """How workers start: where possible by forking a process that has imported everything, else each imports it."""
    # Not every system library bears a fork, and the socket of that process lies in the folder for temporary files.
    if sys.platform != "linux" or len(tempfile.gettempdir()) > _LONGEST_FOLDER:
        return "spawn"
    multiprocessing.set_forkserver_preload(["penstock.launch.preload"])
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None  # the process inherits it
    try:
        forkserver.ensure_running()  # from this thread: the process ends with the one that has started it
    finally:
        if main:
            signal.signal(signal.SIGINT, before)
    return "forkserver"


class _Signals:
    """What signals mean while workers run.

    Args:
        drain: the file that asks workers to end.

    Attributes:
        second: the one that has ended them at once.
    """

    def __init__(self, drain: Path) -> None:
        self._drain = drain
        self.second: int | None = None

    def __enter__(self) -> _Signals:
        """Take signals."""
        numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
        self._before = {number: signal.signal(number, self._take) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        """Leave them to whoever had them before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, *_: object) -> None:
        if not self._drain.exists():
            self._drain.touch()
            return
        self.second = number
