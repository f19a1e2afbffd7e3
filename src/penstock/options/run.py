"""The options of a run as a whole: where its ranks are, how they wait for each other, and its random numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
import torch.distributed as dist

from penstock.checks import is_number
from penstock.comm.collective.control_plane import Waits
from penstock.errors import ConfigError
from penstock.repr_without_defaults import ShortRepr
from penstock.weights.optim.offloaded_state import OffloadedOptimizer


@dataclass(frozen=True, repr=False)
class Group(ShortRepr):
    """A process group with one process per rank, and how its processes wait for each other.

    Attributes:
        group: the ranks of a pipeline next to each other; None to run all ranks in this process.
        timeout: seconds after which a missing message is an error during a run. Between runs, where all ranks meet, the
            group's own time-out counts.
        waits: how a process waits for messages: "latency" by looking for them, "shared" asleep, which leaves its core
            to others; "auto" sleeps where this process has less than a core of its own.

    Raises:
        ConfigError: the time-out is no number of seconds, or there is no such way to wait.
    """

    group: dist.ProcessGroup | None = None
    timeout: float = 300.0
    waits: Waits = "auto"

    def __post_init__(self) -> None:
        """Check each by itself; `Pipeline` checks the group."""
        if not is_number(self.timeout) or not self.timeout > 0:
            raise ConfigError(f"timeout must be a number of seconds above 0; got {self.timeout!r:.80}")
        if self.waits not in get_args(Waits):
            raise ConfigError(f"waits must be one of {', '.join(get_args(Waits))}; got {self.waits!r:.80}")


@dataclass(frozen=True, repr=False)
class Device(ShortRepr):
    """Where ranks compute, how their passes are issued there, and what they keep elsewhere.

    Attributes:
        device: "auto" (a GPU if there is one), "cpu", "cuda" (ranks of a machine take its GPUs in turns), one such as
            "cuda:1", or where the blocks are if None.
        cuda_graphs: passes are recorded as CUDA graphs, when they come a second time, and replayed from then on: the
            host issues a forward or a backward by one call, so the GPU does not wait for it. What blocks and loss do on
            the host is then done once: an attribute of a module that the loop over reports changes counts from the next
            run on, a variable of a function not at all (a buffer that is written into, at once). Blocks that draw
            random numbers, write attributes of their modules or into their input, or have hooks, and inputs whose shape
            comes once only, run as without. Each microbatch in flight has memory of its own for good.
        offload_optimizer: where optimizer states are between updates: on the device of the stage ("none"), or in the
            memory of the host, from where they come for an update, all of a stage one pass before it ("stages"), or a
            few parameters at a time while it is made ("pieces"), which takes less memory and more time. An accelerator
            copies beside its work and makes the update, to the same bits. Where the host computes nothing is copied.

    Raises:
        ConfigError: cuda_graphs is neither True nor False, or offload_optimizer none of these.
    """

    device: str | torch.device | None = None
    cuda_graphs: bool = False
    offload_optimizer: OffloadedOptimizer = "none"

    def __post_init__(self) -> None:
        """Check what can be checked without a device."""
        if not isinstance(self.cuda_graphs, bool):
            raise ConfigError(f"cuda_graphs must be True or False; got {self.cuda_graphs!r:.80}")
        if self.offload_optimizer not in get_args(OffloadedOptimizer):
            known = ", ".join(get_args(OffloadedOptimizer))
            raise ConfigError(f"offload_optimizer must be one of {known}; got {self.offload_optimizer!r:.80}")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What belongs to a run as a whole.

    Attributes:
        seed: of the random numbers that blocks draw (`penstock.stage.blocks.rng`).
        timeout, waits: as of `Group`.
        device, cuda_graphs, offload_optimizer: as of `Device`.
        compile: blocks that are modules are compiled by torch.compile, each for every shape that it gets.

    Raises:
        ConfigError: a value is no such number, or no such name.
    """

    seed: int = 0
    timeout: float = 300.0
    device: str | torch.device | None = None
    cuda_graphs: bool = False
    offload_optimizer: OffloadedOptimizer = "none"
    waits: Waits = "auto"
    compile: bool = False

    def __post_init__(self) -> None:
        """Check each by itself."""
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed must be a whole number; got {self.seed!r:.80}")
        Group(None, self.timeout, self.waits)  # refuses what is no time-out, or no way to wait
        Device(self.device, self.cuda_graphs, self.offload_optimizer)
        if not isinstance(self.compile, bool):
            raise ConfigError(f"compile must be True or False; got {self.compile!r:.80}")
