"""Joins the job that a launcher has started: makes the process group, and checks that all ranks agree."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from penstock.comm.collective.all_gather_json import gather_json
from penstock.comm.core.devices import choose_backend, find_device
from penstock.comm.core.ticket import brief
from penstock.errors import ConfigError, TransportError
from penstock.job.place import LOOPBACK, JobPlace, job_place
from penstock.job.store import is_loopback, job_store
from penstock.train.config.schema import TrainConfig
from penstock.train.setup.machine_memory import may_lack_memory
from penstock.train.setup.run_folder import make_run_folder
from penstock.train.start_barrier import Meeting, differing_keys

_STARTING = 60.0  # seconds within which all processes must start, in addition to the time-out of messages
_LOOK = 0.05  # seconds between two looks
_LINGER = 0.5  # grace period so that elastic notices a peer that died silently before the ranks that depended on it


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
    other = differing_keys(mine, meeting.first)
    if other:
        raise ConfigError(f"rank {rank} was started with other values than rank 0 for: {', '.join(other)}")
    return PrefixStore(f"penstock/{meeting.name}", job)


def _choose_backend(config: TrainConfig, place: JobPlace) -> str:
    """Return the backend that suits the device of this rank, which becomes the current one if it is a GPU."""
    device = find_device(config.device)
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    if gpus:
        torch.cuda.set_device(device)
    return choose_backend(config.backend, device, config.device in ("auto", "cuda") and (place.local_size or 1) <= gpus)


@contextmanager
def process_group(config: TrainConfig) -> Iterator[PrefixStore]:
    """Join the process group that exists (as under Ray), or make the job's from what its launcher has set.

    Raises:
        ConfigError: the job has another number of processes than the configuration.
        TransportError: not all processes have started.
    """
    timeout = timedelta(seconds=config.timeout)
    place = job_place(os.environ) or JobPlace("penstock", 0, 1, LOOPBACK, 0)
    backend = _choose_backend(config, place)
    if dist.is_initialized():
        _check_size(config, dist.get_world_size())
        yield _meet(config, _store_of_this_call(), dist.get_rank(), dist.get_world_size())
        return  # whoever made it ends it
    _check_size(config, place.size)
    job = job_store(place, timeout, max(config.timeout, _STARTING))
    store = _meet(config.model_copy(update={"backend": backend}), job, place.rank, place.size)
    try:
        _make_group(store, place, timeout, backend)
        yield store
    except BaseException as error:
        atexit.register(_end_at_once)
        if isinstance(error, TransportError):
            time.sleep(_LINGER)
        if isinstance(error, dist.DistNetworkError):
            raise _store_is_lost(place, error) from error
        raise
    dist.destroy_process_group()  # not after an error: peers would see broken connections before the error is reported


def _store_is_lost(place: JobPlace, error: dist.DistNetworkError) -> TransportError:
    """Make the error for the user when the store has broken the connection."""
    served = f"a {place.launcher}" if place.served else "rank 0"
    return TransportError(
        f"rank {place.rank}: the store of the job, which {served} at {place.address} serves, does not answer: that has "
        f"ended ({brief(error)}); earlier checkpoints are intact"
    )


def _store_of_this_call() -> Store:
    """Return a part of the existing group's store that no earlier run in this group has used.

    Raises:
        TransportError: a peer is dead or stalled.
    """
    mine = None if dist.get_rank() else uuid.uuid4().hex
    name, *_ = gather_json(mine, "joining the job", dist.group.WORLD)
    return PrefixStore(f"penstock/{name}", _get_default_store())


def _check_size(config: TrainConfig, size: int) -> None:
    """Refuse a job that has another number of processes than the configuration has ranks.

    Raises:
        ConfigError: how many there are, and how many there must be.
    """
    wanted = config.processes
    if size != wanted:
        pipelines = f" and width {config.width}" if config.width > 1 else ""
        pipelines += f" and tensor_parallel {config.tensor_parallel}" if config.tensor_parallel > 1 else ""
        raise ConfigError(
            f"the job has {size} processes, but stages is {config.stages}{pipelines}; launch one process per stage, "
            f"for example with torchrun --no-python --nproc-per-node {wanted} penstock train ..."
        )


def _make_group(store: Store, place: JobPlace, timeout: timedelta, backend: str) -> None:
    """Make the process group in a thread, because a signal cannot interrupt torch while it waits for peers.

    Raises:
        TransportError: a peer is dead or stalled.
        MemoryError: there is none left.
    """
    here = place.local_size in (None, place.size) and is_loopback(place.address)
    if here and sys.platform == "linux":  # all ranks are on this machine, and need no other interface
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    made: Future[None] = Future()

    def make() -> None:
        try:
            dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=timeout)
            made.set_result(None)
        except Exception as error:
            made.set_exception(error)

    threading.Thread(target=make, name="penstock process group", daemon=True).start()
    try:
        made.result()
    except RuntimeError as error:
        if may_lack_memory(str(error)):
            raise MemoryError(f"rank {place.rank}, joining the job: {brief(error)}") from error
        reason = f"a peer is dead or stalled ({brief(error)})"
        raise TransportError(f"rank {place.rank}, joining the job: {reason}") from error


def _end_at_once() -> None:
    """Exit a failed process at once: threads of its lanes still wait in gloo, and may abort an orderly exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
