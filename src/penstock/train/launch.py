"""Starting the workers of a run: through torch elastic, or as a worker that elastic has started already."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from penstock.errors import PenstockError


class WorkerError(PenstockError):
    """A worker of the job ended with an error.

    Attributes:
        trace: the traceback of the first worker that failed.
    """

    def __init__(self, message: str, trace: str) -> None:
        super().__init__(message)
        self.trace = trace


class InterruptedRunError(PenstockError):
    """A signal has ended the job; the workers are gone."""

    def __init__(self, signal_: signal.Signals) -> None:
        super().__init__(f"{signal_.name} has ended the run; weights are saved only at its end")
        self.signal = signal_


def is_worker() -> bool:
    """Whether torch elastic (torchrun) has started this process as one of a job."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def launch_local(workers: int, function: Callable[..., None], *arguments: Any) -> None:
    """Run `function(*arguments)` in local worker processes; returns when all of them have.

    The rendezvous is a file that only this user can read; on Linux gloo is bound to the loopback interface.

    Args:
        workers: how many.
        function: a module-level function.
        arguments: plain values.

    Raises:
        WorkerError: one failed; elastic has ended the others.
        InterruptedRunError: this process was told to end (Ctrl-C); elastic has ended the workers.
    """
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # failures are reported below, once
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=workers,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=str(Path(folder) / "rendezvous"),
            rdzv_configs={"store_type": "file"},
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.1,
            start_method="spawn",
        )
        try:
            elastic_launch(config, function)(*arguments)
        except ChildFailedError as error:
            raise _explain(error) from None
        except SignalException as error:
            raise InterruptedRunError(signal.Signals(error.sigval)) from None


def _explain(error: ChildFailedError) -> WorkerError:
    rank, failure = error.get_first_failure()
    trace = ""
    message: Any = failure.message  # text, or what torch elastic's error handler wrote
    if isinstance(message, dict):
        trace = str(message.get("extraInfo", {}).get("py_callstack", ""))
        message = message.get("message", "")
    others = len(error.failures) - 1
    also = f" ({others} other worker{'s' * (others > 1)} then failed, too)" if others else ""
    return WorkerError(f"worker {rank} failed with exit code {failure.exitcode}: {message}{also}", trace)
