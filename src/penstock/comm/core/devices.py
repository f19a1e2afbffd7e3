"""Devices and their backends: which one a rank computes on, an accelerator's clock, copies beside its work."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import ConfigError
from penstock.job.place import job_place

_DEVICES = "auto, cpu, cuda, or one by its number, such as cuda:1"
BOTH = "cpu:gloo,cuda:nccl"
EVENTS = 8192  # of one rank: those of some batches, until they are read


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


# The clock of an accelerator: when its work began and ended, not when the host issued it.
#
# The times of work are known only once the device has done it. So a mark is an event on the device's stream, and what
# is marked is read later, a batch at a time, and only as far as the device has come; nothing waits for the device but
# the beginning and the end of a span. There is no such clock where the host computes: what it issues, it has done.


class Event(Protocol):
    """What is used of `torch.Event`."""

    def record(self) -> None:
        """Have the device take the time when it has done all work that was issued before."""
        ...

    def query(self) -> bool:
        """Return whether the device has come so far."""
        ...

    def synchronize(self) -> None:
        """Wait until it has."""
        ...

    def elapsed_time(self, end: Any, /) -> float:
        """Return the milliseconds from this event to another one, which is of the same kind."""
        ...


class StreamEvent:
    """An event on whatever stream of a device is the current one.

    Args:
        device: an accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._event = device, torch.Event(device, enable_timing=True)

    def record(self) -> None:
        """Record it."""
        self._event.record(torch.accelerator.current_stream(self._device))

    def query(self) -> bool:
        """Return whether the device has come so far."""
        return bool(self._event.query())

    def synchronize(self) -> None:
        """Wait until it has."""
        self._event.synchronize()

    def elapsed_time(self, end: StreamEvent, /) -> float:
        """Return the milliseconds from this event to another one."""
        return float(self._event.elapsed_time(end._event))


class DeviceClock:
    """Reads the times of work on an accelerator, on the clock of `time.perf_counter`.

    Args:
        make: makes an event.
        most: events that may be in use at once; while there are no more, work has the times at which it was issued.
    """

    def __init__(self, make: Callable[[], Event], most: int = EVENTS) -> None:
        self._make, self._left = make, most
        self._spare: list[Event] = []
        self._anchor, self._anchored_at = make(), 0.0  # an event that is over, and the host's time of it
        self._begun: Event | None = None
        self._pending: deque[tuple[Event, Event, Callable[[float, float], None]]] = deque()

    def align(self) -> None:
        """Take an event and the host's time together, which waits for the device: at the beginning of a span."""
        self.read(wait=True)
        self._anchor.record()
        self._anchor.synchronize()
        self._anchored_at = time.perf_counter()

    def begin(self) -> None:
        """Mark where a piece of work begins; if one that was begun has not been ended, it is forgotten."""
        self._begun = self._begun or self._take()
        if self._begun is not None:
            self._begun.record()

    def end(self, tell: Callable[[float, float], None]) -> bool:
        """Mark where the piece of work ends that was begun last.

        Args:
            tell: called with its start and its end once they are known.

        Returns:
            Whether they will be.
        """
        begun, end = self._begun, self._take()
        if begun is None or end is None:
            self._spare += [event for event in (begun, end) if event is not None]
            self._begun = None
            return False
        end.record()
        self._begun = None
        self._pending.append((begun, end, tell))
        return True

    def read(self, *, wait: bool = False) -> None:
        """Tell the times of all work that the device has done.

        Args:
            wait: until it has done all.
        """
        if wait and self._pending:
            self._pending[-1][1].synchronize()
        while self._pending and self._pending[0][1].query():
            begun, end, tell = self._pending.popleft()
            start = self._anchored_at + self._anchor.elapsed_time(begun) / 1000
            stop = start + begun.elapsed_time(end) / 1000
            tell(start, stop)
            # Milliseconds in float32 are exact enough only over short times, so each event is read from the one before.
            self._spare += [self._anchor, begun]
            self._anchor, self._anchored_at = end, stop

    def _take(self) -> Event | None:
        if self._spare:
            return self._spare.pop()
        if not self._left:
            return None
        self._left -= 1
        return self._make()


def device_clock(device: torch.device) -> DeviceClock | None:
    """Return the clock of a device; None for one on which work is done when the host goes on."""
    return DeviceClock(lambda: StreamEvent(device)) if is_accelerator(device) else None


# Copies between an accelerator and the host that run beside the accelerator's work.
#
# They are issued on a stream of their own, in order, and the thread that issues them waits for none. Memory of the host
# is pinned, or a copy would not run beside anything; torch's allocator for it uses again what is no longer referred to.


class Done(Protocol):
    """A moment in the order of the copies, such as a `torch.Event`."""

    def synchronize(self) -> None:
        """Wait on the host until the copies before have been made; any thread may."""
        ...


class SideStream(Protocol):
    """Where copies are issued.

    Attributes:
        device: the accelerator.
    """

    device: torch.device

    def after_work(self) -> None:
        """Have the copies that follow wait for all work that has been issued to the device so far."""
        ...

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return the tensor in the host's memory; not there yet. It must not be written until it is (`before_work`)."""
        ...

    def to_device(self, tensor: Tensor) -> Tensor:
        """Return what `to_host` returned, on the device again; not there yet."""
        ...

    def mark(self) -> Done:
        """Return the moment at which all copies so far have been made."""
        ...

    def before_work(self, copies: Done) -> None:
        """Have the work that is issued to the device from now on wait for copies; the host does not."""
        ...


class AcceleratorStream:
    """A stream of an accelerator beside the one that is current where its work is issued.

    Args:
        device: the accelerator.

    Attributes:
        device: the same.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._stream = device, torch.Stream(device)

    def after_work(self) -> None:
        """Have the copies that follow wait for all work that has been issued to the device so far."""
        self._stream.wait_stream(torch.accelerator.current_stream(self.device))

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return the tensor in pinned memory; not there yet. What is in the host's memory anyway is copied at once."""
        if tensor.device.type == "cpu":
            return tensor.clone()
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        with self._stream:
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)  # it may be freed at once, but its memory is not used again before
        return host

    def to_device(self, tensor: Tensor) -> Tensor:
        """Return what `to_host` returned, on the device again; not there yet."""
        there = torch.empty_like(tensor, device=self.device)
        self.after_work()  # that memory may still be read by work that was issued before
        with self._stream:
            there.copy_(tensor, non_blocking=True)
        return there

    def mark(self) -> torch.Event:
        """Return the moment at which all copies so far have been made."""
        return self._stream.record_event()

    def before_work(self, copies: Done) -> None:
        """Have the work that is issued to the device from now on wait for copies; the host does not."""
        assert isinstance(copies, torch.Event)
        torch.accelerator.current_stream(self.device).wait_event(copies)


def side_stream(device: torch.device) -> SideStream | None:
    """Return a stream for copies beside the work of a device; None where the host computes."""
    return AcceleratorStream(device) if is_accelerator(device) else None
