"""Links between the ranks of a small job: messages of several sizes there and back, on the runtime's own lanes."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from penstock.comm.message.tensor_message import Header, TensorMessage
from penstock.comm.p2p.gloo import GlooTransport
from penstock.launch.launch import launch_local
from penstock.plan.profile.schema import ProfiledLink
from penstock.schedule.ir.schedule import Payload
from penstock.schedule.machine.instructions import LaneKey
from penstock.train.config.schema import TrainConfig
from penstock.train.process_group import process_group

SIZES = tuple(4**k << 8 for k in range(8))  # bytes, 256 to 4 MiB
_REPEATS, _WARM = 15, 3
_THERE, _BACK = LaneKey(0, 1, Payload.ACTIVATION), LaneKey(1, 0, Payload.GRADIENT)
_FILE = "pings.json"


class Ping(NamedTuple):
    """A message.

    Attributes:
        nbytes: of its tensor.
        seconds: from SEND to the end of the wait for it, half of the way there and back.
    """

    nbytes: int
    seconds: float


def measure_link(config: TrainConfig) -> ProfiledLink:
    """Measure the link between two processes of this machine.

    Args:
        config: of a run, whose time-out counts; messages go over gloo.

    Raises:
        WorkerError: a process failed.
        InterruptedRunError: this process was signalled twice.
    """
    two = {"stages": 2, "width": 1, "timeout": config.timeout, "device": "cpu", "backend": "gloo"}
    with tempfile.TemporaryDirectory() as folder:
        launch_local(2, _work, two, folder, timeout=config.timeout)
        pings = [Ping(*pair) for pair in json.loads((Path(folder) / _FILE).read_text())]
    return fit(pings)


def _work(values: dict[str, object], folder: str, drain: str) -> None:  # noqa: ARG001
    """Measure as one of the two processes; rank 0 writes what it has found."""
    config = TrainConfig.model_validate(values)
    torch.set_num_threads(1)
    with process_group(config):
        pings = ping(dist.group.WORLD, SIZES, config.timeout)
        if dist.get_rank() == 0:
            (Path(folder) / _FILE).write_text(json.dumps(pings))


def ping(group: dist.ProcessGroup | None, sizes: Sequence[int], timeout: float, repeats: int = _REPEATS) -> list[Ping]:
    """Send messages of each size there and back between the two ranks of a group, which call this together.

    Args:
        group: of two ranks.
        sizes: in bytes, of float32 tensors.
        timeout: seconds after which a missing message is an error.
        repeats: how often; the median counts.

    Raises:
        TransportError: the peer is stalled or dead.
    """
    rank = dist.get_rank(group)
    transport = GlooTransport(rank, (_THERE, _BACK), 1, group, patience=timedelta(seconds=timeout))
    mine, other = (_THERE, _BACK) if rank == 0 else (_BACK, _THERE)
    sender, receiver = transport.sender(mine), transport.receiver(other)
    found = []
    try:
        number = 0
        for size in sizes:
            payload, times = torch.zeros(max(size // 4, 1)), list[float]()
            for _ in range(_WARM + repeats):
                what, message = (
                    f"measuring the link, message {number}",
                    TensorMessage(Header(0, number, False), payload),
                )
                start = time.perf_counter()
                coming = receiver.receive()
                sent = sender.send(message) if rank == 0 else None
                coming.wait(timeout, what)
                times.append((time.perf_counter() - start) / 2)
                (sent or sender.send(message)).wait(timeout, what)
                number += 1
            found.append(Ping(payload.nbytes, median(times[_WARM:])))
    finally:
        transport.close()
    return found


def fit(pings: Sequence[Ping]) -> ProfiledLink:
    """Return the latency and bandwidth with which a message of n bytes takes latency + n / bandwidth.

    Relative errors count, squared, so that the times of small messages count as much as those of large ones.
    """
    weights = [1 / p.seconds**2 for p in pings]
    total = sum(weights)
    size = sum(w * p.nbytes for w, p in zip(weights, pings, strict=True)) / total
    took = sum(w * p.seconds for w, p in zip(weights, pings, strict=True)) / total
    spread = sum(w * (p.nbytes - size) ** 2 for w, p in zip(weights, pings, strict=True))
    slope = sum(w * (p.nbytes - size) * (p.seconds - took) for w, p in zip(weights, pings, strict=True)) / spread
    slope = max(slope, 1e-15)  # faster than any link: noise of messages that take no time
    return ProfiledLink(latency=float(f"{max(took - slope * size, 0.0):.4g}"), bandwidth=float(f"{1 / slope:.4g}"))
