"""What is changed in the loop over reports is an error with what to write; gradients that are read are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from penstock.errors import ConfigError, PenstockError
from penstock.runtime.pipeline import Pipeline
from support.pool import Pool

Change = Callable[[nn.Module], object]


def clipped(model: nn.Module) -> object:
    return nn.utils.clip_grad_norm_(model.parameters(), 1e-9)


def zeroed(model: nn.Module) -> object:
    model.zero_grad()
    return None


def doubled(model: nn.Module) -> object:
    return [p.grad.mul_(2.0) for p in model.parameters() if p.grad is not None]


@torch.no_grad()
def clamped(model: nn.Module) -> object:
    return [p.clamp_(-0.2, 0.2) for p in model.parameters()]


def clamped_as_data(model: nn.Module) -> object:
    return [p.data.clamp_(-0.2, 0.2) for p in model.parameters()]


def loaded(model: nn.Module) -> object:
    return model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})


def frozen(model: nn.Module) -> object:
    return [p.requires_grad_(False) for p in next(model.children()).parameters()]


def looked_at(model: nn.Module) -> object:
    return [float(p.grad.norm()) for p in model.parameters() if p.grad is not None]


def losses(change: Change | None, method: str, group: dist.ProcessGroup | None = None) -> list[float | None]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])
    pipeline = Pipeline(
        model, method, stages=2, microbatches=4, loss=nn.functional.mse_loss, group=group,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )  # fmt: skip
    found = []
    for report in pipeline.run([(torch.randn(8, 3), torch.randn(8, 3)) for _ in range(6)]):
        found.append(report.loss)
        if change is not None:
            change(model)
    return found


@pytest.mark.parametrize("method", ["2bw", "stash", "1f1b"])
@pytest.mark.parametrize("change", [clipped, zeroed, doubled])
def test_it_is_refused_with_what_to_write(method: str, change: Change) -> None:
    with pytest.raises(ConfigError, match=r"the gradient of \S+ was changed in the loop over reports .*max_grad_norm"):
        losses(change, method)


@pytest.mark.parametrize("method", ["2bw", "1f1b", "newest"])
@pytest.mark.parametrize("change", [clamped, clamped_as_data, loaded])
def test_weights_written_in_the_loop_are_refused(method: str, change: Change) -> None:
    with pytest.raises(ConfigError, match=r"\S+ was written in the loop over reports .*register_step_post_hook"):
        losses(change, method)


@pytest.mark.parametrize("method", ["2bw", "1f1b", "newest"])
def test_freezing_in_the_loop_is_refused(method: str) -> None:
    with pytest.raises(ConfigError, match=r"requires_grad of 0\.weight was changed in the loop over reports"):
        losses(frozen, method)


@pytest.mark.parametrize("method", ["2bw", "1f1b"])
def test_reading_changes_nothing(method: str) -> None:
    assert losses(looked_at, method) == losses(None, method)


def said_on_ranks(group: dist.ProcessGroup) -> str:
    with pytest.raises(PenstockError) as caught:
        losses(clipped, "2bw", group)
    return str(caught.value)


def test_gradients_changed_between_processes(pool: Pool) -> None:
    first, last = pool.submit(said_on_ranks, ranks=2, fresh=True)
    assert any("was changed in the loop over reports" in text for text in (first, last))
