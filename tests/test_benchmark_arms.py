"""The arms of benchmarks that are plain torch: what they train, and that parts of a model do not communicate."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from benchmarks.arms import Data, LoopArm, Task
from benchmarks.gpu import Setting, alone_makers
from torch import Tensor, nn
from torch.nn import functional as F

from penstock import GPTConfig

M, SAMPLES, WIDTH = 3, 2, 4


def parts_of(count: int) -> list[nn.Sequential]:
    """Equal linear layers, the same every time."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(count)]


TASK = Task(parts_of, F.mse_loss, lambda parameters: torch.optim.SGD(parameters, lr=0.1))


@pytest.fixture
def data() -> Data:
    generator = torch.Generator().manual_seed(1)
    pairs = [torch.randn(2, SAMPLES, WIDTH, generator=generator) for _ in range(2 * M)]
    return Data([(x, y) for x, y in pairs])


@pytest.fixture
def loopback() -> Tensor:
    return torch.full((SAMPLES, WIDTH), 0.5)


def test_a_plain_loop_trains_on_the_mean_of_its_microbatches(data: Data, loopback: Tensor) -> None:
    arm = LoopArm(M, data, loopback, TASK)
    model = nn.Sequential(*parts_of(2))
    optimizer = TASK.optimizer(model.parameters())
    for inputs, targets in data.joined(2, M):
        optimizer.zero_grad()
        TASK.loss(model(inputs), targets).backward()
        optimizer.step()
    arm.run(2)
    torch.testing.assert_close(dict(arm.module.named_parameters()), dict(model.named_parameters()))


def test_the_parts_of_a_ceiling_take_a_buffer_for_what_would_come_from_the_other_one(
    data: Data, loopback: Tensor
) -> None:
    first, second = (LoopArm(M, data, loopback, TASK, part) for part in (0, 1))
    wanted = [deepcopy(arm.module) for arm in (first, second)]
    (batch,) = data.batches(1, M)
    for inputs, targets in batch:
        (wanted[0](inputs) * loopback).sum().backward()
        (TASK.loss(wanted[1](loopback), targets) / M).backward()
    for arm, module in zip((first, second), wanted, strict=True):
        arm.run(1)
        TASK.optimizer(module.parameters()).step()
        torch.testing.assert_close(dict(arm.module.named_parameters()), dict(module.named_parameters()))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_arms_of_one_process_on_a_gpu_run_on_the_cpu_too(precision: str) -> None:
    setting = Setting(GPTConfig(layers=2, width=16, heads=2, context=8, vocabulary=32), 2, "cpu", precision)
    makers = alone_makers(setting)
    assert list(makers) == ["plain loop", "penstock 1f1b", "penstock 2bw", "penstock zb-h1"]
    for make in makers.values():
        arm = make(2, setting.data())
        arm.run(2)
        arm.close()
