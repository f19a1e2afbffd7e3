"""Copies between an accelerator and the host that run beside the accelerator's work.

They are issued on a stream of their own, in order, and the thread that issues them waits for none. Memory of the host
is pinned, or a copy would not run beside anything; torch's allocator for it uses again what is no longer referred to.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from penstock.comm.core.devices import is_accelerator


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
