"""Learning rates over updates, and optimizers by name."""

import pytest
import torch
from torch import nn

from penstock.train.config.sections import OptimizerSection, RateSection
from penstock.train.setup.lr_schedule import rate_schedule
from penstock.train.setup.optimizers import optimizer_factory


def test_warm_up_rises_linearly_to_the_peak():
    rate = rate_schedule(RateSection(warm_up=4), 20)
    assert [rate(k) for k in range(5)] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_the_fall_ends_at_the_floor(decay):
    rate = rate_schedule(RateSection(warm_up=2, decay=decay, floor=0.1), 12)
    values = [rate(k) for k in range(2, 12)]
    assert values[0] == 1.0
    assert values[-1] == pytest.approx(0.1)
    assert values == sorted(values, reverse=True)
    assert rate(100) == pytest.approx(0.1)


def test_halfway_down():
    assert rate_schedule(RateSection(warm_up=0, decay="cosine", floor=0.0), 11)(5) == pytest.approx(0.5)
    assert rate_schedule(RateSection(warm_up=0, decay="linear", floor=0.2), 11)(5) == pytest.approx(0.6)
    assert rate_schedule(RateSection(warm_up=0, decay="none"), 11)(5) == 1.0


def test_a_run_shorter_than_its_warm_up():
    rate = rate_schedule(RateSection(warm_up=100), 3)
    assert [rate(k) for k in range(3)] == pytest.approx([1 / 3, 2 / 3, 1.0])


@pytest.mark.parametrize(
    ("name", "kind"),
    [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam), ("nadam", torch.optim.NAdam), ("sgd", torch.optim.SGD)],
)
def test_optimizers_decay_matrices_only(name, kind):
    named = list(nn.Linear(3, 2).named_parameters())
    optimizer = optimizer_factory(OptimizerSection(name=name, lr=0.5, weight_decay=0.3, beta1=0.8))(named)
    assert type(optimizer) is kind
    decays = {p.ndim: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays == {2: 0.3, 1: 0.0}
    assert {group["lr"] for group in optimizer.param_groups} == {0.5}
    if name == "sgd":
        assert all(group["momentum"] == 0.8 for group in optimizer.param_groups)
    else:
        assert all(group["betas"] == (0.8, 0.95) for group in optimizer.param_groups)
