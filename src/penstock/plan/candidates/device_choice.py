"""Which devices the ranks of a pipeline lie on where devices differ: how many of each kind, and in which order.

A stage is as fast as the slowest of its replicas and holds what the smallest does, so its replicas are of one kind
where that can be. No device is left out for one that is no faster and has no more memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice, permutations
from typing import TypeAlias

from penstock.plan.stages.device_hierarchy import DeviceKind, Devices, StageDevices

MOST_ORDERS = 12
"""Along a pipeline, all of which are tried; of more those with equal devices side by side."""
MOST_CHOICES = 64
"""Of devices for a depth and a width, of which those with the fastest devices are tried."""

Placement: TypeAlias = tuple[StageDevices, ...]
"""The devices of each rank of a pipeline; empty if all devices are alike."""


def placements(devices: Devices, depth: int, width: int) -> Iterator[Placement]:
    """Yield placements of pipelines with this depth and width, those with the fastest devices first."""
    if not devices.kinds:
        yield ()
        return
    limit = math.inf if devices.memory is None else devices.memory
    kinds = sorted(devices.kinds, key=lambda kind: (kind.speed, kind.memory or limit), reverse=True)
    for counts in islice(_choices(kinds, limit, depth * width, width), MOST_CHOICES):
        used = list(zip(kinds, counts, strict=True))
        by_speed = [kind for kind, count in used for _ in range(count)]
        by_memory = sorted(by_speed, key=lambda kind: kind.memory or limit, reverse=True)
        whole_first = [kind for kind, count in used for _ in range(count - count % width)]
        whole_first += [kind for kind, count in used for _ in range(count % width)]
        rows = (whole_first, by_speed, by_memory)
        for stages in dict.fromkeys(_stages(row, width, devices.memory) for row in rows):
            yield from _orders(stages)


def _stages(row: Sequence[DeviceKind], width: int, limit: float | None) -> Placement:
    """Return stages whose replicas lie on devices that follow each other, in the order of their kinds."""
    parts = (row[n : n + width] for n in range(0, len(row), width))
    return tuple(sorted((_stage(part, limit) for part in parts), key=lambda each: each.kinds))


def _stage(kinds: Sequence[DeviceKind], limit: float | None) -> StageDevices:
    """Return what a stage with replicas on these devices can do."""
    memory = None if limit is None else min(kind.memory or limit for kind in kinds)
    return StageDevices(tuple(sorted(kind.name for kind in kinds)), min(kind.speed for kind in kinds), memory)


def _choices(
    kinds: Sequence[DeviceKind], limit: float, total: int, width: int, taken: tuple[int, ...] = ()
) -> Iterator[tuple[int, ...]]:
    """Yield how many devices of each kind are used, whole stages of a kind where that can be.

    Args:
        kinds: the fastest first.
        limit: bytes of kinds that do not say.
        total: how many are used of kinds from here on.
        width: replicas of a stage.
        taken: how many of the kinds before.
    """
    at = len(taken)
    if at == len(kinds):
        yield from [taken] * (not total)
        return
    kind, most = kinds[at], min(kinds[at].count, total)
    better = (
        count < other.count
        for other, count in zip(kinds, taken, strict=False)
        if (other.memory or limit) >= (kind.memory or limit)
    )
    counts = [0] if any(better) else sorted({*range(0, most + 1, width), most}, reverse=True)
    for count in counts:
        if total - count <= sum(each.count for each in kinds[at + 1 :]):
            yield from _choices(kinds, limit, total - count, width, (*taken, count))


def _orders(stages: Sequence[StageDevices]) -> Iterator[Placement]:
    """Yield orders of stages along a pipeline: all if they are few, otherwise those with equal ones side by side."""
    counts = Counter(stages)
    all_orders = math.factorial(len(stages)) // math.prod(map(math.factorial, counts.values()))
    if all_orders <= MOST_ORDERS:
        yield from _arrangements(counts)
    elif math.factorial(len(counts)) <= MOST_ORDERS:
        for order in permutations(counts):
            yield tuple(each for each in order for _ in range(counts[each]))
    else:
        by_speed = sorted(stages, key=lambda each: each.speed)
        by_memory = sorted(stages, key=lambda each: each.memory or 0.0)
        for row in dict.fromkeys([tuple(by_speed), tuple(by_memory)]):
            yield from (row, row[::-1])


def _arrangements(counts: Counter[StageDevices]) -> Iterator[Placement]:
    """Yield all orders of so many of each."""
    if not counts.total():
        yield ()
    for each in [each for each, count in counts.items() if count]:
        for rest in _arrangements(counts - Counter([each])):
            yield (each, *rest)
