"""Pipelines that read loaders, and loaders that fail."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from penstock import Pipeline, make_schedule
from penstock.options.run import Group

M, STAGES = 4, 2
METHODS = ("1f1b", "2bw", "stash", "zb-h1")


def make_pipeline(method: str = "1f1b", group: dist.ProcessGroup | None = None, **options: Any) -> Pipeline:
    torch.manual_seed(1)
    blocks = [nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 2)]
    return Pipeline(
        blocks,
        make_schedule(method, STAGES, M),
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9),
        group=Group(group, 20.0),
        **options,
    )


def make_loader(samples: int, batch_size: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(7)
    inputs, targets = torch.randn(64, 3, generator=generator), torch.randn(64, 2, generator=generator)
    return DataLoader(TensorDataset(inputs[:samples], targets[:samples]), batch_size=batch_size)


def weights_of(pipeline: Pipeline) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in pipeline.state_dict().items()}


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


class DiskError(Exception):
    """What a user's loader raises."""


def failing(after: int) -> Iterator[Any]:
    yield from list(make_loader(8 * after, 8))
    raise DiskError("the disk of the user")
