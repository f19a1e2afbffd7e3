"""Links on which messages are held, and stages whose passes take a known time, both longer than machines need."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from penstock.comm.core.ticket import Ticket
from penstock.comm.p2p.gloo import SendLane
from penstock.comm.p2p.tensor_message import TensorMessage
from support.cases import WIDTH, make_blocks

NAP, HOLD = 0.016, 0.006  # a forward and a backward take twice the first: T; there and back is less than T


class Nap(torch.autograd.Function):
    """The identity, after a nap; also in the backward."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        time.sleep(NAP)
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        time.sleep(NAP)
        return gradient.clone()


class SlowNorm(nn.LayerNorm):
    """A layer norm that takes its time."""

    def forward(self, x: Tensor) -> Tensor:
        return Nap.apply(super().forward(x))  # type: ignore[no-any-return]


def slow_blocks() -> dict[str, Any]:
    """Those of "mixed", one of which naps in each half."""
    return make_blocks("mixed") | {"tanh": lambda x: Nap.apply(torch.tanh(x)), "norm": SlowNorm(WIDTH)}


@contextmanager
def slow_links(hold: float = HOLD) -> Iterator[None]:
    """Meanwhile lanes over gloo hold every message for a time."""
    send, lines = SendLane.send, dict[SendLane, queue.Queue[Any]]()

    def work(lane: SendLane, line: queue.Queue[Any]) -> None:
        while True:
            posted, message, ticket = line.get()
            time.sleep(max(posted + hold - time.perf_counter(), 0.0))
            real = send(lane, message)
            real.settles(20.0)
            ticket.complete(error=real.error)

    def held(lane: SendLane, message: TensorMessage) -> Ticket:
        if lane not in lines:
            lines[lane] = queue.Queue()
            threading.Thread(target=work, args=(lane, lines[lane]), daemon=True).start()
        ticket = Ticket(lane.lane)
        lines[lane].put((time.perf_counter(), message, ticket))
        return ticket

    with patch.object(SendLane, "send", held):
        yield
