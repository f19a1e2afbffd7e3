"""Two parameters over one memory are refused by name: each stage has its weights in memory of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from penstock import LazyBlock
from penstock.errors import ConfigError
from support.plain_training import make_data, pipeline_of_model


def make_square() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Linear(3, 3).double() for _ in range(3)], nn.Linear(3, 2).double())


def second_parameter(model: nn.Sequential) -> None:
    model[3].weight = nn.Parameter(model[0].weight.detach()[:2])


def assigned_data(model: nn.Sequential) -> None:
    model[1].weight.data = model[0].weight.data


def transposed(model: nn.Sequential) -> None:
    model[2].weight = nn.Parameter(model[0].weight.detach().t())


def frozen_view(model: nn.Sequential) -> None:
    model[2].weight = nn.Parameter(model[0].weight.detach(), requires_grad=False)


def buffer(model: nn.Sequential) -> None:
    model[2].register_buffer("copy", model[0].weight.detach())


@pytest.mark.parametrize(
    ("share", "name"),
    [
        (second_parameter, r"3\.weight"),
        (assigned_data, r"1\.weight"),
        (transposed, r"2\.weight"),
        (frozen_view, r"2\.weight"),
        (buffer, r"2\.copy"),
    ],
)
def test_parameters_that_share_memory_are_refused(share: Callable[[nn.Sequential], None], name: str) -> None:
    """In plain torch a step of one moves the other, too."""
    model = make_square()
    share(model)
    with pytest.raises(ConfigError, match=rf"{name} and 0\.weight are two tensors over the same memory"):
        pipeline_of_model(model)


def test_lazy_blocks_are_looked_into_when_they_are_made() -> None:
    def make() -> nn.Module:
        block = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
        block[1].weight.data = block[0].weight.data
        return block

    with pytest.raises(ConfigError, match=r"0\.1\.weight and 0\.0\.weight are two tensors over the same memory"):
        pipeline_of_model([LazyBlock(make, seed=1), nn.Linear(3, 2).double()])


def test_one_parameter_in_two_places_and_parts_of_one_memory_are_fine() -> None:
    """The former is tied; the latter do not overlap."""
    model = make_square()
    model[2].weight = model[0].weight
    memory = torch.zeros(2, 3, 3, dtype=torch.double)
    model[1].weight = nn.Parameter(memory[0])
    model[3].weight = nn.Parameter(memory[1][:2])
    pipeline: Any = pipeline_of_model(model)
    list(pipeline.run(make_data()))
    assert torch.equal(model[2].weight, model[0].weight)
    again = pipeline_of_model(model)  # on parameters that live in the memory of the first
    assert len(list(again.run(make_data()))) == 4
