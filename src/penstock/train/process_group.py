"""Joins the job that torch elastic has started: makes the process group, and checks that all ranks agree."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from penstock.comm.core.devices import choose_backend, find_device
from penstock.comm.core.ticket import brief
from penstock.errors import ConfigError, TransportError
from penstock.train.config.schema import TrainConfig
from penstock.train.meeting import Meeting, differences
from penstock.train.setup.prepare import make_run_folder

_STARTING = 60.0  # seconds within which all processes must start, in addition to the time-out of messages
_LOOK = 0.05  # seconds between two looks
_LINGER = 0.5  # grace period so that elastic notices a peer that died silently before the ranks that depended on it


def local_ranks() -> int:
    """Return the number of the job's processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def shared_folder(config: TrainConfig, store: PrefixStore) -> Path:
    """Let rank 0 make the run folder, and return it on all ranks.

    Raises:
        ConfigError: this rank cannot access it.
    """
    base = store.underlying_store  # the job's, not that of this start: restarted workers use the same folder
    if dist.get_rank() == 0 and not base.check(["penstock/folder"]):
        base.set("penstock/folder", str(make_run_folder(config).resolve()))
    folder = Path(base.get("penstock/folder").decode())
    if not folder.is_dir():
        raise ConfigError(
            f"rank {dist.get_rank()} cannot access the run folder {str(folder)!r} that rank 0 has made; set `out` to a "
            "folder that all machines share"
        )
    return folder


def first_of_the_job(store: PrefixStore, what: str) -> bool:
    """Return whether this is the first call about `what` since the job was started, restarts of workers included."""
    return int(store.underlying_store.add(f"penstock/first/{what}", 1)) == 1


def _meet(config: TrainConfig, job: Store, rank: int, size: int) -> PrefixStore:
    """Wait for every rank, and check that all were started with the same configuration.

    Returns:
        A store for this start only.

    Raises:
        ConfigError: this rank's configuration differs from rank 0's.
        TransportError: some ranks did not come in time.
    """
    mine, patience = config.model_dump_json(), max(config.timeout, _STARTING)
    meeting, deadline = Meeting(job, rank, size, mine), time.monotonic() + patience
    while not meeting.look():
        if time.monotonic() > deadline:
            raise TransportError(
                f"rank {rank}, joining the job: rank {', '.join(map(str, meeting.missing()))} did not come within "
                f"{patience:g} seconds; it is stalled or dead"
            )
        time.sleep(_LOOK)
    other = differences(mine, meeting.first)
    if other:
        raise ConfigError(f"rank {rank} was started with other values than rank 0 for: {', '.join(other)}")
    return PrefixStore(f"penstock/{meeting.name}", job)


def _choose_backend(config: TrainConfig) -> str:
    """Return the backend that suits the device of this rank, which becomes the current one if it is a GPU."""
    device = find_device(config.device)
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    if gpus:
        torch.cuda.set_device(device)
    return choose_backend(config.backend, device, config.device in ("auto", "cuda") and local_ranks() <= gpus)


@contextmanager
def process_group(config: TrainConfig) -> Iterator[PrefixStore]:
    """Make the job's process group from the variables that torch elastic sets.

    Raises:
        ConfigError: the job has another number of processes than the configuration.
        TransportError: not all processes have started.
    """
    timeout = timedelta(seconds=config.timeout)
    job, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
    wanted = config.stages * config.width
    if size != wanted:
        pipelines = f" and width {config.width}" if config.width > 1 else ""
        raise ConfigError(
            f"the job has {size} processes, but stages is {config.stages}{pipelines}; launch one process per stage, "
            f"for example with torchrun --nproc-per-node {wanted} -m penstock train ..."
        )
    backend = _choose_backend(config)
    store = _meet(config.model_copy(update={"backend": backend}), job, rank, size)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except RuntimeError as error:
        raise TransportError(f"rank {rank}, joining the job: a peer is dead or stalled ({brief(error)})") from error
    try:
        yield store
    except BaseException as error:
        atexit.register(_end_at_once)
        if isinstance(error, TransportError):
            time.sleep(_LINGER)
        raise
    dist.destroy_process_group()  # not after an error: peers would see broken connections before the error is reported


def _end_at_once() -> None:
    """Exit a failed process at once: threads of its lanes still wait in gloo, and may abort an orderly exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
