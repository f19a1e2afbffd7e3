"""A few processes of this machine that measure something together."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.launch.launch import launch_local
from penstock.train.config.schema import TrainConfig
from penstock.train.process_group import process_group

_FILE = "found.json"


def in_processes(count: int, timeout: float, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function(group, *arguments)` in as many processes, which talk over gloo, with a thread each at first.

    Args:
        count: of processes.
        timeout: seconds after which a missing message is an error.
        function, arguments: a module-level function, and plain values.

    Returns:
        What the first one has returned, which is plain values.

    Raises:
        WorkerError: a process failed.
        InterruptedRunError: this process was signalled.
    """
    job = {"stages": count, "width": 1, "timeout": timeout, "device": "cpu", "backend": "gloo"}
    with tempfile.TemporaryDirectory() as folder:
        launch_local(count, _work, job, folder, function, arguments, timeout=timeout, drains=False)
        return json.loads((Path(folder) / _FILE).read_text())


def _work(
    job: dict[str, object],
    folder: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    drain: str,  # noqa: ARG001
) -> None:
    """Be one of the processes; the first writes what it has found."""
    torch.set_num_threads(1)
    with process_group(TrainConfig.model_validate(job)):
        found = function(dist.group.WORLD, *arguments)
        if dist.get_rank() == 0:
            (Path(folder) / _FILE).write_text(json.dumps(found))
