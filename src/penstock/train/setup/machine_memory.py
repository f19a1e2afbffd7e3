"""Refuses runs that this machine cannot hold, before its processes find out; and says what makes a run take less."""

from __future__ import annotations

import os

from penstock.byte_sizes import human_bytes
from penstock.errors import ConfigError
from penstock.models.gpt_shape import GPTConfig
from penstock.schedule.ir.sharding import Level
from penstock.schedule.ir.version_rules import RULES, Source
from penstock.schedule.methods.compatibility import sharding_of
from penstock.train.config.schema import TrainConfig

_MOST_WORKERS = 120
"""More cannot be started: torch elastic hands the pipes of all to each, and a process inherits at most 256 files."""
_PER_PARAMETER = 8  # bytes of a weight and its gradient in float32
_PER_WORKER = 50 << 20  # bytes that a process takes before it holds anything of the model
_MOMENTS = {"adamw": 8, "adam": 8, "nadam": 8, "sgd": 4}  # bytes for each parameter that the optimizer remembers
_SIGNS = ("SIGKILL", "MemoryError", "OutOfMemory", "out of memory", "allocate memory", "not enough memory", "bad_alloc")


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


def may_lack_memory(said: str) -> bool:
    """Return whether a process that failed so, or was killed so, may have found no memory left."""
    return any(sign in said for sign in _SIGNS)


def ways_to_take_less(config: TrainConfig, model: GPTConfig) -> list[str]:
    """Return what would make each process of a run take less memory, with numbers where formulas know them.

    Args:
        config: of the run; what it has set already is left out.
        model: the shape of its model.
    """
    size, row = config.microbatch_size, config.row
    token, found = 4 * size * model.context, list[str]()
    if config.keep_freed_memory and not config.device.startswith("cuda"):
        found.append("keep_freed_memory=false: up to half as much as the memory ledger says lies free otherwise")
    if config.recompute == "none" and RULES[row.rule].recompute is not Source.COPY:
        found.append(
            "recompute=block: of a microbatch in flight each layer keeps its input alone, "
            f"{human_bytes(token * model.width)}"
        )
    if size > 1:
        found.append(
            f"microbatch_size={size // 2} with twice as many microbatches: activations halve, and so do the logits of "
            f"one, {human_bytes(token * model.vocabulary)}"
        )
    if "in_flight" in config.options:
        found.append(f"options.in_flight, which is {config.options['in_flight']}: a smaller number, or none")
    found += _sharding(config, model)
    return [*found, f"stages={config.stages + 1} or more: each has fewer layers"]


def _sharding(config: TrainConfig, model: GPTConfig) -> list[str]:
    """Say what sharding would divide, where the method takes it and the run has none."""
    try:
        here, _ = sharding_of(config.row, config.sharding), sharding_of(config.row, "gradients")
    except ConfigError:
        return []
    if here.level is not Level.NONE:
        return []
    moments = _MOMENTS.get(config.optimizer.name)
    known = "" if moments is None else f", {human_bytes(moments * model.parameters // config.stages)} of a stage"
    if config.width > 1:
        return [f"sharding=gradients: each of the {config.width} pipelines keeps its part of optimizer states{known}"]
    return [f"sharding=gradients with width=2 or more: parallel pipelines divide optimizer states{known}"]


def _gib(number: int) -> str:
    return f"{number / 2**30:,.1f} GiB"


def _physical_memory() -> int | None:
    """Return the bytes of memory of this machine; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
