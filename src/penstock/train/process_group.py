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
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from penstock.comm.collective.control_plane import gather_json
from penstock.comm.core.devices import choose_backend, find_device
from penstock.comm.core.ticket import brief
from penstock.errors import ConfigError, TransportError
from penstock.job.place import LOOPBACK, JobPlace, job_place
from penstock.job.store import is_loopback, job_store
from penstock.train.config.schema import TrainConfig
from penstock.train.setup.machine_memory import may_lack_memory
from penstock.train.setup.run_folder import make_run_folder

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


@contextmanager
def group_of_one(config: TrainConfig) -> Iterator[Store]:
    """Make a process group of this process alone, for a run that has all of its ranks here."""
    store, hook = HashStore(), sys.excepthook
    _make_group(store, JobPlace("penstock", 0, 1, LOOPBACK, 0), timedelta(seconds=config.timeout), "gloo")
    try:
        yield store
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook  # torch's would name a rank in all errors from now on


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


class Requests(Protocol):
    """What a meeting asks of the job's store; values come back as bytes."""

    def set(self, key: str, value: str) -> None:
        """Store a value."""
        ...

    def get(self, key: str) -> bytes:
        """Return the value of a key that is there."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""
        ...

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it was there."""
        ...


class Meeting:
    """The part of one rank in a meeting of all ranks, look by look: a blocking wait could not be interrupted.

    Ranks form a binary tree. The name of the start goes down, from rank 0; that all of a subtree have come goes up; and
    rank 0 then says that all have met. So a look takes a few requests of each rank, however many there are.

    Elastic keeps its store, with everything that earlier workers have written, when it restarts workers, and its count
    of restarts may differ between machines. So rank 0 gives each start a name, and every rank asks its parent a
    question of its own, which the parent answers with the name and that question; a rank that finds an answer to
    another question knows that it is an old one. Keys are removed once they have been read, but for the last one.

    Args:
        store: the job's.
        rank, size: of this process, and of the job.
        config: what rank 0 was started with is what all compare theirs with.

    Attributes:
        name: of this start; empty while it is not known.
        first: the `config` of rank 0, once it is known.
    """

    def __init__(self, store: Requests, rank: int, size: int, config: str) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._question, self.name = uuid.uuid4().hex, uuid.uuid4().hex if rank == 0 else ""
        self.first = config if rank == 0 else ""
        self._coming = [child for child in (2 * rank + 1, 2 * rank + 2) if child < size]
        self._answered: dict[int, bytes] = {}  # the last question of each child
        self._told = False
        store.set(_asked(rank), self._question)
        if rank == 0:
            store.set(self._own("config"), config)

    def look(self) -> bool:
        """Do what can be done by now; return whether all ranks have met."""
        if not self.name and not self._hear_name():
            return False
        self._coming = [child for child in self._coming if not self._has_come(child)]
        if self._coming:
            return False
        if not self._told:
            self._told = True
            self._store.set(self._own(f"came/{self._rank}" if self._rank else "met"), "")
        if self._rank and not self._store.check([self._own("met")]):
            return False
        self._clear()
        return True

    def missing(self) -> list[int]:
        """Return the ranks that have not come at all, or those that this one waits for."""
        absent = self._absent([rank for rank in range(self._size) if rank != self._rank])
        return absent or self._coming or [(self._rank - 1) // 2 if not self.name else 0]

    def _hear_name(self) -> bool:
        """Return whether the parent has answered."""
        if not self._store.check([_answer(self._rank)]):
            return False
        name, question = json.loads(self._store.get(_answer(self._rank)))
        if question != self._question:
            return False
        self.name = name
        self.first = self._store.get(self._own("config")).decode()
        return True

    def _has_come(self, child: int) -> bool:
        """Return whether a whole subtree has come; if not, answer the rank at its top."""
        came = self._own(f"came/{child}")
        if self._store.check([came]):
            self._store.delete_key(came)
            return True
        if self._store.check([_asked(child)]):
            question = self._store.get(_asked(child))
            if question != self._answered.get(child):
                self._answered[child] = question
                self._store.set(_answer(child), json.dumps([self.name, question.decode()]))
        return False

    def _clear(self) -> None:
        """Remove what nobody reads any more; it is this rank's own, or was for all that have come."""
        for key in (_asked(self._rank), _answer(self._rank)) if self._rank else (_asked(0), self._own("config")):
            self._store.delete_key(key)

    def _absent(self, ranks: list[int]) -> list[int]:
        """Return those that have not asked, by halving: a request tells whether all of some ranks have."""
        if not ranks or self._store.check([_asked(rank) for rank in ranks]):
            return []
        half = len(ranks) // 2
        return self._absent(ranks[:half]) + self._absent(ranks[half:]) if half else ranks

    def _own(self, key: str) -> str:
        return f"penstock/{self.name}/{key}"


def differing_keys(mine: str, first: str) -> list[str]:
    """Return the keys whose values differ between two configurations, given as JSON."""
    other: dict[str, Any] = json.loads(first)
    return [key for key, value in json.loads(mine).items() if other.get(key) != value]


def _asked(rank: int) -> str:
    return f"penstock/asked/{rank}"


def _answer(rank: int) -> str:
    return f"penstock/start/{rank}"
