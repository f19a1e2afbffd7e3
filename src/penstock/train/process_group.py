"""Joins the job that a launcher has started: makes the process group, and checks that all ranks agree."""

from __future__ import annotations

import atexit
import json
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

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from penstock.comm.collective.gather import gather_json
from penstock.comm.core.ticket import brief
from penstock.errors import ConfigError, TransportError
from penstock.job.place import LOOPBACK, JobPlace, job_place
from penstock.job.store import is_loopback, job_store
from penstock.train.config.schema import TrainConfig
from penstock.train.setup.prepare import make_run_folder

_STARTING = 60.0  # seconds within which all processes must start, in addition to the time-out of messages
_LOOK = 0.05  # seconds between two looks
_ASKED, _START = "penstock/asked", "penstock/start"  # in the job's store
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


def _meet(config: TrainConfig, job: Store, rank: int, size: int) -> PrefixStore:
    """Wait for every rank, and check that all were started with the same configuration.

    Elastic keeps its store, with everything that earlier workers have written, when it restarts workers, and its count
    of restarts may differ between machines. So rank 0 gives each start a name, and answers every rank's question with
    the name and that question; a rank that finds an answer to another question knows that it is an old one.

    It polls, because a blocking wait in the store cannot be interrupted by a signal.

    Returns:
        A store for this start only.

    Raises:
        ConfigError: this rank's configuration differs from rank 0's.
        TransportError: some ranks did not come in time.
    """
    mine, patience = config.model_dump_json(), max(config.timeout, _STARTING)
    question, name = uuid.uuid4().hex, uuid.uuid4().hex if rank == 0 else ""
    job.set(f"{_ASKED}/{rank}", question)
    deadline, missing = time.monotonic() + patience, [0]  # all other ranks, once this start has a name
    store: PrefixStore | None = None
    while missing:
        if rank == 0:
            _answer(job, name, size)
        if store is None and (name := name or _answered(job, rank, question)):
            store, missing = PrefixStore(f"penstock/{name}", job), list(range(size))
            store.set(f"config/{rank}", mine)
        if store is not None:
            missing = [r for r in missing if not store.check([f"config/{r}"])]
        if missing and time.monotonic() > deadline:
            raise TransportError(
                f"rank {rank}, joining the job: rank {', '.join(map(str, missing))} did not come within {patience:g} "
                "seconds; it is stalled or dead"
            )
        time.sleep(_LOOK if missing else 0)
    assert store is not None
    first = json.loads(store.get("config/0"))
    other = [key for key, value in json.loads(mine).items() if first.get(key) != value]
    if other:
        raise ConfigError(f"rank {rank} was started with other values than rank 0 for: {', '.join(other)}")
    return store


def _answer(job: Store, name: str, size: int) -> None:
    """On rank 0: send the name of this start to all ranks that have asked by now."""
    asked = {r: job.get(f"{_ASKED}/{r}").decode() for r in range(size) if job.check([f"{_ASKED}/{r}"])}
    job.set(_START, json.dumps([name, asked]))


def _answered(job: Store, rank: int, question: str) -> str:
    """Return the name of this start; empty if rank 0 has not answered this rank yet."""
    if not job.check([_START]):
        return ""
    name, asked = json.loads(job.get(_START))
    return str(name) if asked.get(str(rank)) == question else ""


@contextmanager
def process_group(config: TrainConfig) -> Iterator[PrefixStore]:
    """Join the process group that exists (as under Ray), or make the job's from what its launcher has set.

    Raises:
        ConfigError: the job has another number of processes than the configuration.
        TransportError: not all processes have started.
    """
    timeout = timedelta(seconds=config.timeout)
    if dist.is_initialized():
        _check_size(config, dist.get_world_size())
        yield _meet(config, _store_of_this_call(), dist.get_rank(), dist.get_world_size())
        return  # whoever made it ends it
    place = job_place(os.environ) or JobPlace("penstock", 0, 1, LOOPBACK, 0)
    _check_size(config, place.size)
    job = job_store(place, timeout, max(config.timeout, _STARTING))
    store = _meet(config, job, place.rank, place.size)
    try:
        _make_group(store, place, timeout)
        yield store
    except BaseException as error:
        atexit.register(_end_at_once)
        if isinstance(error, TransportError):
            time.sleep(_LINGER)
        raise
    dist.destroy_process_group()  # not after an error: peers would see broken connections before the error is reported


def _store_of_this_call() -> Store:
    """Return a part of the existing group's store that no earlier run in this group has used.

    Raises:
        TransportError: a peer is dead or stalled.
    """
    name, *_ = gather_json(uuid.uuid4().hex, "joining the job", dist.group.WORLD)
    return PrefixStore(f"penstock/{name}", _get_default_store())


def _check_size(config: TrainConfig, size: int) -> None:
    """Refuse a job that has another number of processes than the configuration has ranks.

    Raises:
        ConfigError: how many there are, and how many there must be.
    """
    wanted = config.stages * config.width
    if size != wanted:
        pipelines = f" and width {config.width}" if config.width > 1 else ""
        raise ConfigError(
            f"the job has {size} processes, but stages is {config.stages}{pipelines}; launch one process per stage, "
            f"for example with torchrun --no-python --nproc-per-node {wanted} penstock train ..."
        )


def _make_group(store: Store, place: JobPlace, timeout: timedelta) -> None:
    """Make the process group in a thread, because a signal cannot interrupt torch while it waits for peers.

    Raises:
        TransportError: a peer is dead or stalled.
    """
    here = place.local_size in (None, place.size) and is_loopback(place.address)
    if here and sys.platform == "linux":  # all ranks are on this machine, and need no other interface
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    made: Future[None] = Future()

    def make() -> None:
        try:
            dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size, timeout=timeout)
            made.set_result(None)
        except Exception as error:
            made.set_exception(error)

    threading.Thread(target=make, name="penstock process group", daemon=True).start()
    try:
        made.result()
    except RuntimeError as error:
        reason = f"a peer is dead or stalled ({brief(error)})"
        raise TransportError(f"rank {place.rank}, joining the job: {reason}") from error


def _end_at_once() -> None:
    """Exit a failed process at once: threads of its lanes still wait in gloo, and may abort an orderly exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
