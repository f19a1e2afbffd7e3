"""Collect plain values from all ranks, without pickle."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def gather_json(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Every rank's value, in rank order; values are anything JSON can say."""
    raw = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = torch.tensor([raw.numel()])
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    longest = max(int(s) for s in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: raw.numel()] = raw
    blocks = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(blocks, padded, group=group)
    return [json.loads(bytes(b[: int(s)].numpy())) for b, s in zip(blocks, sizes, strict=True)]
