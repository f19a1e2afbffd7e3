"""Starting the workers of a run: through torch elastic, or as a worker that elastic has started already."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from penstock.errors import InterruptedRunError, WorkerError


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
            logs_specs=DefaultLogsSpecs(log_dir=str(Path(folder) / "errors")),
        )
        try:
            elastic_launch(config, function)(*arguments)
        except ChildFailedError as error:
            raise _explain(error, Path(folder) / "errors") from None
        except SignalException as error:
            raise InterruptedRunError(error.sigval) from None


def _explain(error: ChildFailedError, folder: Path) -> WorkerError:
    """What the user must know: the error that came first.

    A worker that ends breaks its connections, so that its peers fail, too; elastic names the lowest rank among those
    it finds dead. All workers leave their errors in `folder`, and what is not about transport is the cause.
    """
    rank, failure = error.get_first_failure()
    code, message, trace = failure.exitcode, str(failure.message), ""
    reports = [_report(path) for path in folder.rglob("error.json")]
    causes = [r for r in reports if not r[2].startswith("TransportError")] or [r for r in reports if r[1] == rank]
    if causes:
        _, found, message, trace = min(causes)
        rank, code = found, code if found == rank else 1
    return WorkerError(f"worker {rank} failed with exit code {code}: {message}", trace)


def _report(path: Path) -> tuple[float, int, str, str]:
    """Time, rank, message and traceback of an error that a worker left behind."""
    message: Any = json.loads(path.read_text())["message"]
    extra = message["extraInfo"]
    return float(extra["timestamp"]), int(path.parent.name), str(message["message"]), str(extra["py_callstack"])
