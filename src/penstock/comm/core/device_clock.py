"""The clock of an accelerator: when its work began and ended, not when the host issued it.

The times of work are known only once the device has done it. So a mark is an event on the device's stream, and what is
marked is read later, a batch at a time, and only as far as the device has come; nothing waits for the device but the
beginning and the end of a span. There is no such clock where the host computes: what it issues, it has done.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

from penstock.comm.core.devices import is_accelerator

EVENTS = 8192  # of one rank: those of some batches, until they are read


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
