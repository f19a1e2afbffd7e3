"""The machine at hand: what its devices do and hold, and the links between processes on it, measured in some seconds.

Messages of several sizes go there and back between the ranks of a small job, on the runtime's own lanes.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from penstock.comm.p2p.gloo import GlooTransport
from penstock.comm.p2p.tensor_message import Header, TensorMessage
from penstock.job.cpus import Cpus
from penstock.measure.local_processes import in_processes
from penstock.plan.cluster.files import THIS_MACHINE
from penstock.plan.cluster.schema import FORMAT, Cluster, Sourced
from penstock.plan.profile.schema import UNRESOLVED, ProfiledLink
from penstock.schedule.ir.schedule import Payload
from penstock.schedule.machine.instructions import LaneKey
from penstock.train.config.schema import TrainConfig

_REPEATS, _WARM = 9, 2  # of products and copies
_LARGE = 64 << 20  # bytes that are copied
_SIDES = {"cpu": 1024, "cuda": 8192}  # of matrices that are multiplied
SIZES = tuple(4**k << 8 for k in range(8))  # bytes, 256 to 4 MiB
_PINGS, _WARM_PINGS = 15, 3
_LEAST, _MOST = 64, 32 << 20  # bytes of messages around which links are measured
_THERE, _BACK = LaneKey(0, 1, Payload.ACTIVATION), LaneKey(1, 0, Payload.GRADIENT)


def this_machine() -> Cluster:
    """Measure the machine at hand.

    Devices are its GPUs or, if there are none, its cores, each with its part of the memory. There is no other machine
    to send to, so `between` is as `inside`.

    Raises:
        WorkerError: a process failed that measures the link.
    """
    kind = "cuda" if torch.cuda.device_count() else "cpu"
    link = 2 * measure_link(TrainConfig()).bandwidth  # in and out
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if kind == "cpu" else threads)
        flops, memory_bandwidth = _flops(kind), 2 * _LARGE / _copy_seconds(kind, kind)
        return _machine(
            link, flops, memory_bandwidth, 0.0 if kind == "cpu" else 2 * _LARGE / _copy_seconds(kind, "cpu")
        )
    finally:
        torch.set_num_threads(threads)


def unmeasured_machine() -> Cluster:
    """Return the machine at hand with speeds of no meaning, so that all else can be checked before it is measured."""
    return _machine(1e9, 1e12, 1e10, 1e9)


def _machine(link: float, flops: float, memory_bandwidth: float, host: float) -> Cluster:
    """Return the machine at hand, given the bandwidth of a link, operations per second, and copies per second."""
    gpus = torch.cuda.device_count()
    node = gpus or Cpus.of_this_process().threads()
    memory = torch.cuda.get_device_properties(0).total_memory if gpus else _physical_memory() / node
    kind_of_numbers = "bfloat16" if gpus else "float32, one thread"
    return Cluster(
        format=FORMAT,
        name=THIS_MACHINE,
        node=node,
        nodes=1,
        precision="bf16" if gpus else "fp32",
        flops=Sourced(value=flops, source=_said(f"a product of matrices in {kind_of_numbers}")),
        memory=Sourced(value=float(memory), source="of the device" if gpus else "of the machine, over its cores"),
        memory_bandwidth=Sourced(value=memory_bandwidth, source=_said("a copy of 64 MiB, read and written")),
        inside=Sourced(value=link, source=_said("messages between two processes, over gloo")),
        between=Sourced(value=link, source="assumed: as inside, as there is no other machine"),
        host=Sourced(value=host, source=_said("a copy")) if gpus else None,
    )


def _said(what: str) -> str:
    return f"measured here: {what}"


def _physical_memory() -> int:
    """Return the bytes of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _flops(kind: str) -> float:
    """Return the operations per second of products of large matrices."""
    side = _SIDES[kind]
    matrix = torch.randn(side, side, device=kind, dtype=torch.bfloat16 if kind == "cuda" else torch.float32)
    return 2 * side**3 / _seconds(kind, lambda: matrix @ matrix)


def _copy_seconds(source: str, target: str) -> float:
    """Return the seconds of a copy of `_LARGE` bytes."""
    data = torch.zeros(_LARGE, dtype=torch.uint8, device=source)
    there = torch.empty(_LARGE, dtype=torch.uint8, device=target, pin_memory=source != target)
    return _seconds(source, lambda: there.copy_(data, non_blocking=True))


def _seconds(kind: str, work: Callable[[], object]) -> float:
    """Return the median seconds of some work on a device."""
    found = []
    for _ in range(_WARM + _REPEATS):
        start = time.perf_counter()
        work()
        if kind == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return median(found[_WARM:])


# --- links ------------------------------------------------------------------------------------------------------------


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


def ping(group: dist.ProcessGroup | None, sizes: Sequence[int], timeout: float, repeats: int = _PINGS) -> list[Ping]:
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
            for _ in range(_WARM_PINGS + repeats):
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
            found.append(Ping(payload.nbytes, median(times[_WARM_PINGS:]), median(work[_WARM_PINGS:])))
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
