"""The job that torch elastic has started: its process group, and what its ranks must agree on."""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from penstock.errors import ConfigError, TransportError
from penstock.runtime.transport import brief
from penstock.train.config import TrainConfig
from penstock.train.prepare import make_run_folder

_STARTING = 60.0  # seconds that processes may start one after another, whatever the time-out of messages
_LOOK = 0.05  # seconds between two looks
_LINGER = 0.5  # seconds by which elastic sees a peer that ended without a word before the ranks that it has let down


def local_ranks() -> int:
    """Processes of the job on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def shared_folder(config: TrainConfig, store: PrefixStore) -> Path:
    """A run folder made by rank 0; the others learn its name.

    Raises:
        ConfigError: this rank cannot see it.
    """
    base = store.underlying_store  # not that of this start alone: workers that start again go on in the same folder
    if dist.get_rank() == 0 and not base.check(["penstock/folder"]):
        base.set("penstock/folder", str(make_run_folder(config).resolve()))
    folder = Path(base.get("penstock/folder").decode())
    if not folder.is_dir():
        raise ConfigError(
            f"rank {dist.get_rank()} cannot see the run folder {str(folder)!r} that rank 0 has made; set `out` to a "
            "folder that all machines share"
        )
    return folder


def _meet(config: TrainConfig, store: Store, rank: int, size: int) -> None:
    """Wait until every rank is there, and make sure that it was started with the same configuration.

    It looks again and again, because a wait in the store cannot be ended by a signal.

    Raises:
        ConfigError: this one was not.
        TransportError: some did not come.
    """
    mine, patience = config.model_dump_json(), max(config.timeout, _STARTING)
    store.set(f"penstock/config/{rank}", mine)
    deadline, missing = time.monotonic() + patience, list(range(size))
    while missing := [r for r in missing if not store.check([f"penstock/config/{r}"])]:
        if time.monotonic() > deadline:
            raise TransportError(
                f"rank {rank}, joining the job: rank {', '.join(map(str, missing))} did not come within {patience:g} "
                "seconds; it is stalled or dead"
            )
        time.sleep(_LOOK)
    first = json.loads(store.get("penstock/config/0"))
    other = [key for key, value in json.loads(mine).items() if first.get(key) != value]
    if other:
        raise ConfigError(f"rank {rank} was started with other values than rank 0 for: {', '.join(other)}")


@contextmanager
def process_group(config: TrainConfig) -> Iterator[PrefixStore]:
    """The job's process group, from the variables that torch elastic sets.

    Raises:
        ConfigError: the job is not what the configuration says.
        TransportError: not all of it has started.
    """
    timeout = timedelta(seconds=config.timeout)
    store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
    # Elastic keeps the store when it starts workers again, with all that those before have written into it.
    store = PrefixStore(f"penstock/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    wanted = config.stages * config.width
    if size != wanted:
        pipelines = f" and width {config.width}" if config.width > 1 else ""
        raise ConfigError(
            f"the job has {size} processes, but stages is {config.stages}{pipelines}; launch one process per stage, "
            f"for example with torchrun --nproc-per-node {wanted} -m penstock train ..."
        )
    _meet(config, store, rank, size)
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    except RuntimeError as error:
        raise TransportError(f"rank {rank}, joining the job: a peer is dead or stalled ({brief(error)})") from error
    try:
        yield store
    except BaseException as error:
        atexit.register(_end_at_once)
        if isinstance(error, TransportError):
            time.sleep(_LINGER)
        raise
    dist.destroy_process_group()  # not after an error: peers would see broken connections before they see the error


def _end_at_once() -> None:
    """End a process that has failed: threads of its lanes still wait in gloo, and may abort an orderly end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
