"""Collective calls on process groups, with errors that say what the ranks were doing when a peer was lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from penstock.comm.core.ticket import brief
from penstock.errors import TransportError


@contextmanager
def collective(what: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Turn torch's error about a lost peer into one that names the collective operation.

    Args:
        what: the operation, such as "agreeing to start".
        group: the ranks that take part.

    Raises:
        TransportError: a peer is dead, or did not take part within the group's time-out.
    """
    try:
        yield
    except RuntimeError as error:
        reason = f"a peer is dead or stalled ({brief(error)})"
        raise TransportError(f"rank {dist.get_rank(group)}, {what}: {reason}") from error


def gather_json(value: Any, what: str, group: dist.ProcessGroup | None) -> list[Any]:
    """Gather a JSON value from every rank, in rank order; JSON, so that no pickle is loaded.

    Raises:
        TransportError: a peer is dead, or did not take part within the group's time-out.
    """
    raw = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = torch.tensor([raw.numel()])
    with collective(what, group):
        sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size(group))]
        dist.all_gather(sizes, size, group=group)
        padded = torch.zeros(max(int(s) for s in sizes), dtype=torch.uint8)
        padded[: raw.numel()] = raw
        blocks = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(blocks, padded, group=group)
    return [json.loads(bytes(b[: int(s)].numpy())) for b, s in zip(blocks, sizes, strict=True)]
