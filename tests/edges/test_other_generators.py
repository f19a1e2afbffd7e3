"""Recomputed blocks that draw from Python's, numpy's or their own generators: the second forward draws the same."""

from __future__ import annotations

import random
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.stage.autograd import recompute
from support.plain_training import assert_close_weights, make_data, make_model, pipeline_of_model

SHARED = torch.Generator()  # as scripts have one


class Noisy(nn.Module):
    """A layer whose output is scaled by a number that it draws."""

    def __init__(self, inner: nn.Module, source: str) -> None:
        super().__init__()
        self.inner, self.source = inner, source
        self.own = torch.Generator().manual_seed(3)
        self.own_random, self.own_numpy = random.Random(3), np.random.default_rng(3)
        self.legacy = np.random.RandomState(3)
        self.several = [np.random.default_rng(4)]

    def forward(self, x: Tensor) -> Tensor:
        draw = {
            "random": random.random,
            "numpy": np.random.random,
            "torch.Generator": lambda: torch.rand((), generator=self.own).item(),
            "random.Random": self.own_random.random,
            "numpy Generator": self.own_numpy.random,
            "RandomState": self.legacy.random_sample,
            "in a list": lambda: self.several[0].random(),
            "global": self.shared,
        }[self.source]
        y: Tensor = self.inner(x) * (0.5 + draw())
        return y

    def shared(self) -> float:
        return torch.rand((), generator=SHARED).item()


@pytest.mark.parametrize("recompute", ["block", "stage"])
@pytest.mark.parametrize(
    "source",
    ["random", "numpy", "torch.Generator", "random.Random", "numpy Generator", "RandomState", "in a list", "global"],
)
def test_recomputed_forwards_draw_the_same_numbers(source: str, recompute: str) -> None:
    """As without recompute; and the numbers of later forwards are the same, too."""
    states = []
    for mode in ("none", recompute):
        random.seed(5)
        np.random.seed(5)
        SHARED.manual_seed(5)
        model = make_model()
        pipeline = pipeline_of_model([Noisy(model[0], source), model[1], model[2], model[4]], recompute=mode)
        list(pipeline.run(make_data()))
        states.append(pipeline.state_dict())
    assert_close_weights(*states)


@pytest.mark.parametrize("recompute", ["block", "stage"])
def test_a_generator_of_the_function_around_a_block_draws_the_same_again(recompute: str) -> None:
    """Where the block is a function, and where it is a module whose class was made there."""
    states = []
    for mode in ("none", recompute):
        own, other = torch.Generator().manual_seed(3), random.Random(3)

        class Dropping(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x) * (0.5 + other.random())  # noqa: B023

        def scaled(x: Tensor) -> Tensor:
            return torch.tanh(x) * torch.rand(x.shape, generator=own, dtype=x.dtype)  # noqa: B023

        model = make_model()
        layer = Dropping(model[0].in_features, model[0].out_features).to(model[0].weight)
        layer.load_state_dict(model[0].state_dict())
        pipeline = pipeline_of_model([layer, scaled, model[2], model[4]], recompute=mode)
        list(pipeline.run(make_data()))
        states.append(pipeline.state_dict())
    assert_close_weights(*states)


def test_states_of_pythons_generator_are_compared_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not number by number: that took longer than a small block's forward."""
    compare = Mock(wraps=recompute._same)
    monkeypatch.setattr(recompute, "_same", compare)
    before = recompute.generator_states([])
    assert recompute.drawn_from(before) == []
    assert compare.call_count < 20
    random.random()
    assert [known.get for known in recompute.drawn_from(before)] == [random.getstate]
