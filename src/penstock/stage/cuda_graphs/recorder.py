"""Records the work that a function issues to a GPU as a CUDA graph, which is issued again by one call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

import torch

from penstock.errors import ConfigError
from penstock.gc_pause import no_collection


class RecordedWork(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Issue all of it again, on the same memory."""
        ...


class GraphRecorder(Protocol):
    """Records work."""

    def pool(self) -> Any:
        """Return an empty pool of memory for recordings that are never replayed at the same time."""
        ...

    def aside(self) -> AbstractContextManager[Any]:
        """Return the context in which tensors are made whose gradients are recorded."""
        ...

    def record(self, work: Callable[[], None], pool: Any) -> RecordedWork:
        """Record what a function issues, without running it; its tensors are taken from a pool.

        Raises:
            RuntimeError: it waits for the device, or does something else that cannot be recorded.
        """
        ...


class CudaGraphRecorder:
    """Records CUDA graphs on a stream of its own.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pool(self) -> Any:
        """Return an empty pool of memory for recordings that are never replayed at the same time.

        Memory that passes have taken before they were recorded, and freed, goes back to the device for it.
        """
        torch.cuda.empty_cache()
        return torch.cuda.graph_pool_handle()

    def aside(self) -> AbstractContextManager[Any]:
        """Return the stream of recordings: autograd accumulates a gradient on the stream on which its leaf was made."""
        return torch.cuda.stream(self._stream)

    @no_collection  # what it destroys may be a CUDA graph, which cannot be done meanwhile
    def record(self, work: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
        """Record what a function issues, without running it; its tensors are taken from a pool.

        Raises:
            RuntimeError: it waits for the device, or does something else that cannot be recorded.
        """
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # other threads may wait for events
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # the recording is void, and says so once more
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph


def check_records(device: torch.device) -> None:
    """Make sure that the work of a device can be recorded.

    Raises:
        ConfigError: it is no GPU.
    """
    if device.type != "cuda":
        raise ConfigError(f"cuda_graphs takes a GPU, but ranks compute on {device}; leave cuda_graphs out")


def recorder_on(device: torch.device) -> GraphRecorder:
    """Return what records the work of a device.

    Raises:
        ConfigError: it is no GPU.
    """
    check_records(device)
    return CudaGraphRecorder(device)
