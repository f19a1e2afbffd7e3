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
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from penstock.errors import ConfigError, TransportError
from penstock.train.config import TrainConfig
from penstock.train.prepare import make_run_folder

_LINGER = 0.5  # seconds by which elastic sees a peer that ended without a word before the ranks that it has let down


def local_ranks() -> int:
    """Processes of the job on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def shared_folder(config: TrainConfig, store: Store) -> Path:
    """A run folder made by rank 0; the others learn its name.

    Raises:
        ConfigError: this rank cannot see it.
    """
    if dist.get_rank() == 0:
        store.set("penstock/folder", str(make_run_folder(config).resolve()))
    folder = Path(store.get("penstock/folder").decode())
    if not folder.is_dir():
        raise ConfigError(
            f"rank {dist.get_rank()} cannot see the run folder {str(folder)!r} that rank 0 has made; set `out` to a "
            "folder that all machines share"
        )
    return folder


def _check_same(config: TrainConfig, store: Store, rank: int) -> None:
    """Make sure that every rank was started with the same configuration.

    Raises:
        ConfigError: this one was not.
    """
    mine = config.model_dump_json()
    if rank == 0:
        store.set("penstock/config", mine)
    first = json.loads(store.get("penstock/config"))
    other = [key for key, value in json.loads(mine).items() if first.get(key) != value]
    if other:
        raise ConfigError(f"rank {rank} was started with other values than rank 0 for: {', '.join(other)}")


@contextmanager
def process_group(config: TrainConfig) -> Iterator[Store]:
    """The job's process group, from the variables that torch elastic sets.

    Raises:
        ConfigError: the job is not what the configuration says.
    """
    store, rank, size = next(iter(rendezvous("env://")))
    wanted = config.stages * config.width
    if size != wanted:
        pipelines = f" and width {config.width}" if config.width > 1 else ""
        raise ConfigError(
            f"the job has {size} processes, but stages is {config.stages}{pipelines}; launch one process per stage, "
            f"for example with torchrun --nproc-per-node {wanted} -m penstock train ..."
        )
    _check_same(config, store, rank)
    timeout = timedelta(seconds=config.timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
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
