"""Links between the ranks of a small job: messages of several sizes there and back, on the runtime's own lanes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from penstock.comm.p2p.gloo import GlooTransport
from penstock.comm.p2p.tensor_message import Header, TensorMessage
from penstock.measure.machine.local_processes import in_processes
from penstock.plan.profile.schema import UNRESOLVED, ProfiledLink
from penstock.schedule.ir.schedule import Payload
from penstock.schedule.machine.instructions import LaneKey
from penstock.train.config.schema import TrainConfig

SIZES = tuple(4**k << 8 for k in range(8))  # bytes, 256 to 4 MiB
_REPEATS, _WARM = 15, 3
_LEAST, _MOST = 64, 32 << 20  # bytes of messages around which links are measured
_THERE, _BACK = LaneKey(0, 1, Payload.ACTIVATION), LaneKey(1, 0, Payload.GRADIENT)


class Ping(NamedTuple):
    """A message.

    Attributes:
        nbytes: of its tensor.
        seconds: from SEND to the end of the wait for it, half of the way there and back.
        work: seconds of a core that it takes at each end, in all threads; but for waits, which look for it.
    """

    nbytes: int
    seconds: float
    work: float = 0.0


def sizes_around(messages: Iterable[float]) -> tuple[int, ...]:
    """Return sizes from half of the smallest message to twice the largest one; `SIZES` if there are no messages.

    A link need not be linear: with a token bucket, as in clouds, small messages are faster than its rate.
    """
    known = [min(max(nbytes, _LEAST), _MOST) for nbytes in messages if nbytes > 0]
    if not known:
        return SIZES
    least, most = min(known) / 2, max(known) * 2
    steps = max(math.ceil(math.log(most / least, 4)), 2)
    return tuple(4 * max(round(least * (most / least) ** (n / steps) / 4), 1) for n in range(steps + 1))


def measure_link(config: TrainConfig, sizes: Sequence[int] = SIZES) -> ProfiledLink:
    """Measure the link between two processes of this machine.

    Args:
        config: of a run, whose time-out counts; messages go over gloo.
        sizes: of messages, in bytes.

    Raises:
        WorkerError: a process failed.
        InterruptedRunError: this process was signalled twice.
    """
    return fit([Ping(*each) for each in in_processes(2, config.timeout, ping, tuple(sizes), config.timeout)])


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
            payload, times, work = torch.zeros(max(size // 4, 1)), list[float](), list[float]()
            for _ in range(_WARM + repeats):
                cpu = time.process_time()
                what, message = (
                    f"measuring the link, message {number}",
                    TensorMessage(Header(0, number, False), payload),
                )
                start = time.perf_counter()
                coming = receiver.receive()
                sent = sender.send(message) if rank == 0 else None
                looked = time.thread_time()
                coming.wait(timeout, what)
                cpu += time.thread_time() - looked
                times.append((time.perf_counter() - start) / 2)
                (sent or sender.send(message)).wait(timeout, what)
                work.append((time.process_time() - cpu) / 2)
                number += 1
            found.append(Ping(payload.nbytes, median(times[_WARM:]), median(work[_WARM:])))
    finally:
        transport.close()
    return found


def fit(pings: Sequence[Ping]) -> ProfiledLink:
    """Return the latency and bandwidth with which a message of n bytes takes latency + n / bandwidth, and its work."""
    latency, per_byte = _line([(p.nbytes, p.seconds) for p in pings])
    work, work_per_byte = _line([(p.nbytes, max(p.work, 1e-9)) for p in pings])
    return ProfiledLink(
        latency=_rounded(latency),
        bandwidth=_rounded(1 / max(per_byte, 1 / UNRESOLVED)),
        work=_rounded(work),
        work_per_byte=_rounded(work_per_byte),
    )


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return a and b >= 0 with which y is about a + b x.

    Relative errors count, squared, so that the times of small messages count as much as those of large ones.
    """
    weights = [1 / y**2 for _, y in points]
    total = sum(weights)
    x0, y0 = (sum(w * point[axis] for w, point in zip(weights, points, strict=True)) / total for axis in (0, 1))
    spread = sum(w * (x - x0) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    slope = max(sum(w * (x - x0) * (y - y0) for w, (x, y) in zip(weights, points, strict=True)) / spread, 0.0)
    return max(y0 - slope * x0, 0.0), slope


def _rounded(value: float) -> float:
    """Return a number with the digits that mean something."""
    return float(f"{value:.4g}")
