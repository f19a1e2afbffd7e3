"""On which device a rank computes, and which backends its messages take."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import ConfigError
from penstock.job.place import job_place

_DEVICES = "auto, cpu, cuda, or one by its number, such as cuda:1"
BOTH = "cpu:gloo,cuda:nccl"


def choose_device(name: str | torch.device, local_rank: int, available: int) -> torch.device:
    """Return the device of a rank.

    Args:
        name: "auto" (a GPU if there is one), "cpu", "cuda" (ranks of a machine take its GPUs in turns), or a device of
            torch, such as "cuda:1" (all ranks take that).
        local_rank: number of the rank on its machine.
        available: GPUs that this process sees.

    Raises:
        ConfigError: there is no such device.
    """
    if name == "auto":
        name = "cuda" if available else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise ConfigError(f"device must be {_DEVICES}; got {name!r:.80}") from None
    if device.type != "cuda":
        return device
    if not available:
        raise ConfigError(
            f"device is {str(name)!r}, but torch sees no GPU here (torch {torch.__version__}, "
            f"{'built for CUDA ' + torch.version.cuda if torch.version.cuda else 'built without CUDA'}); "
            "use device=cpu, or a torch that is built for the GPU"
        )
    index: int | None = device.index  # torch says that it is always a number
    if index is None:
        return torch.device("cuda", local_rank % available)
    if index >= available:
        raise ConfigError(
            f"device is {str(name)!r}, but torch sees {available} GPUs here, the last one cuda:{available - 1}"
        )
    return device


def choose_backend(name: str, device: torch.device, alone: bool) -> str:
    """Return the backend to make the process group of a job with.

    Args:
        name: "auto", or what torch's `init_process_group` takes: "gloo", or "cpu:gloo,cuda:nccl".
        device: of the rank.
        alone: every rank of the machine has a device of its own; NCCL needs that.

    Raises:
        ConfigError: ranks could not talk over it.
    """
    if name == "auto":
        return BOTH if device.type == "cuda" and alone and dist.is_nccl_available() else "gloo"
    if name == "nccl":  # the control messages of ranks travel on the CPU
        name = BOTH
    if name not in ("gloo", BOTH):
        raise ConfigError(f"backend must be auto, gloo, nccl or {BOTH} (the same); got {name!r:.80}")
    if name == BOTH and device.type != "cuda":
        raise ConfigError(f"backend is {name}, but ranks compute on {device}; use backend=gloo, or device=cuda")
    if name == BOTH and not alone:
        raise ConfigError(
            f"backend is {name}, but several ranks of this machine share {device}, which NCCL does not allow; use "
            "backend=gloo, or as many GPUs as ranks"
        )
    return name


def find_device(name: str | torch.device) -> torch.device:
    """Return the device of this process by what torch sees, and the number that its launcher has given it.

    Raises:
        ConfigError: there is no such device.
    """
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    place = job_place(os.environ)
    return choose_device(name, (place and place.local_rank) or 0, available)


def current_device() -> torch.device:
    """Return the device that torch computes on where no tensor says it: the current GPU, if GPUs are in use."""
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.device("cuda", torch.cuda.current_device()) if in_use else torch.device("cpu")


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device is one that works beside the host and is there, such as a GPU."""
    there = torch.accelerator.current_accelerator(check_available=True)
    return there is not None and device.type == there.type


def issuing_stream() -> AbstractContextManager[Any]:
    """Return the stream to which this thread issues its work, for another thread to go on there; nothing on the CPU."""
    if torch.accelerator.current_accelerator(check_available=True) is None:
        return nullcontext()
    stream: AbstractContextManager[Any] = torch.accelerator.current_stream()
    return stream


def allocator_peaks(device: torch.device) -> dict[str, int]:
    """Return the most bytes that this process has had of a device: in tensors, and with what the allocator caches.

    Those since the process began, or since `torch.accelerator.reset_peak_memory_stats`; none where the host computes.
    """
    if not is_accelerator(device):
        return {}
    allocated = torch.accelerator.max_memory_allocated(device)
    return {"device: allocated": allocated, "device: reserved": torch.accelerator.max_memory_reserved(device)}


def on_device(value: Any, device: torch.device) -> Any:
    """Return a tree with its tensors on a device; those that are there stay as they are."""
    if isinstance(value, Tensor):
        # A copy to the host that nobody waits for would be read before it is there.
        return value if value.device == device else value.to(device, non_blocking=device.type != "cpu")
    return pytree.tree_map(lambda leaf: on_device(leaf, device) if isinstance(leaf, Tensor) else leaf, value)
