"""Watched runs of pipelines whose stages are shared by processes: each writes the numbers that it has to a file.

The process that has started them puts parts together, and sees what stages do not divide as often as it is there.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.errors import WorkerError
from penstock.job.cpus import Cpus
from penstock.launch.fork_server import start_method
from penstock.launch.launch import launch_local
from penstock.runtime.rank.tensor_pieces import joined_pieces, piece_name, pieces_in
from penstock.train.config.load import validate_config
from penstock.train.config.schema import TrainConfig
from penstock.train.prepare.prepare_run import Prepared, prepare
from penstock.train.process_group import process_group
from penstock.verify.differences import Value
from penstock.verify.watched_run import See, WatchedRun


def run_in_processes(config: TrainConfig, count: int, updated: list[int], see: See) -> Exception | None:
    """Train a pipeline in processes of its own, and show its numbers; returns what was raised on the way.

    Args:
        config: of the run.
        count: the number of batches.
        updated: the batches whose update must be made.
        see: receives the numbers.

    Raises:
        InterruptedRunError: this process was signalled.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = config.model_dump(), folder, count, updated
        try:
            start_method((__name__,))
            launch_local(config.processes, _work, *arguments, timeout=config.timeout, drains=False)
        except WorkerError as error:
            return error
        show_numbers(Path(folder), config, see)
    return None


def _work(values: dict[str, Any], folder: str, count: int, updated: list[int], drain: str) -> None:  # noqa: ARG001
    config = validate_config(values)
    torch.set_num_threads(config.threads or Cpus.of_this_process().threads(config.processes))
    with process_group(config):
        prepared = prepare(config)
        with prepared.plan.options.precision.kernels.applied():
            write_numbers(Path(folder), prepared, count, updated, dist.group.WORLD)


def write_numbers(
    folder: Path, prepared: Prepared, count: int, updated: list[int], group: dist.ProcessGroup | None
) -> None:
    """Train, and write what this process has of all numbers.

    Args:
        folder: for the files of all processes.
        prepared, count, updated: as of `WatchedRun`.
        group: one process per rank and tensor rank.

    Raises:
        Exception: the pipeline has raised it.
    """
    found: dict[tuple[str, int, str], Tensor] = {}

    def keep(kind: str, batch: int, name: str, value: Value, pipeline: int) -> None:  # noqa: ARG001
        found[kind, batch, name] = torch.as_tensor(value).detach().clone(memory_format=torch.contiguous_format)

    watched = WatchedRun(prepared, count, updated, keep, group)
    error = watched.run()
    if error is not None:
        raise error
    splits = {n: s for stage in watched.pipeline.stages.values() for n, s in stage.module.division.splits.items()}
    tensors = {}
    for (kind, batch, name), tensor in found.items():
        split, what = splits.get(name.rpartition(" of ")[2]), f"{kind}/{batch}"
        tensors[f"{what}/{name}" if split is None or not tensor.dim() else piece_name(what, name, split)] = tensor
    save_file(tensors, folder / f"{dist.get_rank(group)}.safetensors")


def show_numbers(folder: Path, config: TrainConfig, see: See) -> None:
    """Show the numbers that all processes of a run have written.

    Args:
        folder: with their files.
        config: of the run.
        see: receives the numbers.
    """
    size = config.tensor_parallel
    for first in range(0, config.processes, size):  # of the processes that share the stages of a rank
        pipeline, parts = first // (size * config.stages), dict[str, Tensor]()
        for rank in range(first, first + size):
            read = load_file(folder / f"{rank}.safetensors")
            own = {piece.name for pieces in pieces_in(read).values() for piece in pieces}
            parts |= {name: read[name] for name in own}
            for name in read.keys() - own:
                _show(name, read[name], pipeline, see)
        for whole, pieces in pieces_in(parts).items():
            _show(whole, joined_pieces(whole, pieces, parts.__getitem__), pipeline, see)


def _show(name: str, value: Tensor, pipeline: int, see: See) -> None:
    kind, batch, name = name.split("/", 2)
    see(kind, int(batch), name, value, pipeline)
