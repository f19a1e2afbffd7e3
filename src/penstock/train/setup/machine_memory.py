"""Refuses runs that this machine cannot hold, before its processes find out."""

from __future__ import annotations

import os

from penstock.errors import ConfigError
from penstock.models.gpt_shape import GPTConfig
from penstock.train.config.schema import TrainConfig

_MOST_WORKERS = 120
"""More cannot be started: torch elastic hands the pipes of all to each, and a process inherits at most 256 files."""
_PER_PARAMETER = 8  # bytes of a weight and its gradient in float32
_PER_WORKER = 50 << 20  # bytes that a process takes before it holds anything of the model


def check_workers(config: TrainConfig) -> None:
    """Refuse more processes than one machine can start.

    Raises:
        ConfigError: how many there would be.
    """
    workers = config.processes
    if workers > _MOST_WORKERS:
        pipelines = f" in each of {config.width} pipelines" if config.width > 1 else ""
        pipelines += f", shared by {config.tensor_parallel} processes each," if config.tensor_parallel > 1 else ""
        raise ConfigError(
            f"{config.stages} stages{pipelines} are {workers} processes, but one machine starts {_MOST_WORKERS} at "
            "most; use fewer, or torchrun on several machines"
        )


def check_machine_memory(config: TrainConfig, model: GPTConfig) -> None:
    """Refuse a run that takes more memory than this machine has even if nothing but the least is counted.

    Args:
        config: of the run, all of whose processes are on this machine.
        model: the shape of its model.

    Raises:
        ConfigError: how much it takes, for what, and how much there is.
    """
    there = _physical_memory()
    needs = {
        "weights and gradients": _PER_PARAMETER * model.parameters * config.width,
        "the logits of a microbatch": 4 * config.microbatch_size * model.context * model.vocabulary,
        "processes": _PER_WORKER * config.processes,
    }
    total = sum(needs.values())
    if there is not None and total > there:
        parts = ", ".join(f"{what} {_gib(number)}" for what, number in needs.items())
        raise ConfigError(
            f"the run takes at least {_gib(total)} of memory ({parts}), but this machine has {_gib(there)}; use a "
            "smaller model, smaller microbatches or fewer processes"
        )


def _gib(number: int) -> str:
    return f"{number / 2**30:,.1f} GiB"


def _physical_memory() -> int | None:
    """Return the bytes of memory of this machine; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
