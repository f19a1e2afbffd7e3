"""The machine at hand as a cluster: what its devices do and hold, and how they are joined, measured in some seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import median

import torch

from penstock.job.cpus import Cpus
from penstock.measure.machine.links import measure_link
from penstock.plan.cluster.files import THIS_MACHINE
from penstock.plan.cluster.schema import FORMAT, Cluster, Sourced
from penstock.train.config.schema import TrainConfig

_REPEATS, _WARM = 9, 2
_LARGE = 64 << 20  # bytes that are copied
_SIDES = {"cpu": 1024, "cuda": 8192}  # of matrices that are multiplied


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
