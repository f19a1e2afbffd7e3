"""The adapter to streams of an accelerator, with tensors that only say where they are, and streams that note calls."""

from __future__ import annotations

from types import TracebackType

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from penstock.comm.core.devices import AcceleratorStream, side_stream

GPU = torch.device("cuda", 0)


class NotedStream:
    """Has the methods of `torch.Stream` that are used."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def wait_stream(self, other: NotedStream) -> None:
        self.calls.append(f"{self.name} waits for {other.name}")

    def __enter__(self) -> NotedStream:
        self.calls.append(f"on {self.name}")
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.calls.append("back")


def test_copies_are_issued_on_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the work that makes what is copied; its memory is kept until then, and the host is not waited for."""
    calls: list[str] = []
    made: list[dict[str, object]] = []
    empty_like = torch.empty_like

    def noted_copy(self: Tensor, source: Tensor, *, non_blocking: bool) -> Tensor:
        calls.append(f"copy {source.device} to {self.device}, {'not waiting' if non_blocking else 'waiting'}")
        return self

    def noted_empty(tensor: Tensor, **given: object) -> Tensor:
        made.append(given)
        return empty_like(tensor, device=given["device"])  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "Stream", lambda _: NotedStream("side", calls))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: NotedStream("work", calls))
    monkeypatch.setattr(Tensor, "record_stream", lambda _, stream: calls.append(f"kept for {stream.name}"))
    monkeypatch.setattr(Tensor, "copy_", noted_copy)
    monkeypatch.setattr(torch, "empty_like", noted_empty)
    with FakeTensorMode():
        side, tensor = AcceleratorStream(GPU), torch.empty(3, device=GPU)
        side.after_work()
        host = side.to_host(tensor)
        back = side.to_device(host)
        counter = side.to_host(torch.zeros(()))
    assert (host.device.type, back.device, counter.device.type) == ("cpu", GPU, "cpu")
    assert made == [{"device": "cpu", "pin_memory": True}, {"device": GPU}]
    there, again = "copy cuda:0 to cpu, not waiting", "copy cpu to cuda:0, not waiting"
    waits = "side waits for work"
    assert calls == [waits, "on side", there, "back", "kept for side", waits, "on side", again, "back"]


def test_what_torch_offers_is_what_is_used() -> None:
    """The stand-ins of these tests have no method that torch's own classes lack."""
    assert all(hasattr(torch.Stream, name) for name in ("wait_stream", "wait_event", "record_event", "__enter__"))
    assert all(hasattr(torch.Event, name) for name in ("record", "query", "synchronize", "elapsed_time"))
    names = "current_accelerator", "current_stream", "max_memory_allocated", "max_memory_reserved"
    assert all(hasattr(torch.accelerator, name) for name in names)


def test_the_host_has_none() -> None:
    assert side_stream(torch.device("cpu")) is None
    assert side_stream(torch.device("meta")) is None
