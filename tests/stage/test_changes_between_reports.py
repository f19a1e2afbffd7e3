"""What is changed in the loop over reports is an error with what to write; gradients that are read are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def replaced(model: nn.Module) -> object:
    model[2].weight = nn.Parameter(torch.eye(3))  # type: ignore[index]
    return None


def parametrized(model: nn.Module) -> object:
    return nn.utils.parametrizations.weight_norm(model[2])  # type: ignore[index]


def looked_at(model: nn.Module) -> object:
    return [float(p.grad.norm()) for p in model.parameters() if p.grad is not None]


DATA = [(torch.full((8, 3), 0.1 * k), torch.ones(8, 3)) for k in range(6)]


def make_pipeline(model: nn.Module, method: str, group: dist.ProcessGroup | None = None, **options: Any) -> Pipeline:
    return Pipeline(
        model, method, stages=2, microbatches=4, loss=nn.functional.mse_loss, group=group,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1), **options,
    )  # fmt: skip


def losses(
    change: Change | None, method: str, group: dist.ProcessGroup | None = None, tied: bool = False, **options: Any
) -> list[float | None]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])
    if tied:
        model[3].weight = model[0].weight
    pipeline, found = make_pipeline(model, method, group, **options), []
    for report in pipeline.run([(torch.randn(8, 3), torch.randn(8, 3)) for _ in range(6)]):
        found.append(report.loss)
        if change is not None:
            change(model)
    return found


@pytest.mark.parametrize("method", ["2bw", "1f1b", "newest", "stash"])
@pytest.mark.parametrize(
    "change", [clipped, zeroed, doubled, clamped, clamped_as_data, loaded, frozen, replaced, parametrized]
)
def test_weights_and_gradients_changed_in_the_loop_are_refused(method: str, change: Change) -> None:
    said = r"\S+ or its gradient was changed in the loop over reports .*max_grad_norm.*register_step_post_hook"
    with pytest.raises(ConfigError, match=said):
        losses(change, method)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_scripted_modules_are_trained() -> None:
    """Their parameters are in a dict that has less than a dict."""
    model = nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Linear(3, 3)))
    assert len([report.loss for report in make_pipeline(model, "1f1b").run(DATA)]) == len(DATA)


@pytest.mark.parametrize("method", ["2bw", "1f1b"])
def test_reading_changes_nothing(method: str) -> None:
    assert losses(looked_at, method) == losses(None, method)


def said_on_ranks(group: dist.ProcessGroup, change: Change, options: dict[str, Any]) -> str:
    with pytest.raises(PenstockError) as caught:
        losses(change, "2bw", group, **options)
    return str(caught.value)


@pytest.mark.long
@pytest.mark.parametrize("change", [clipped, zeroed])
@pytest.mark.parametrize("how", ["alone", "wide", "tied"])
def test_gradients_changed_between_processes(pool: Pool, how: str, change: Change) -> None:
    """Also where they are added to those of other ranks, beside the caller."""
    options = {"alone": {}, "wide": {"data_parallel": 2}, "tied": {"tied": True}}[how]
    said = pool.submit(said_on_ranks, change, options, ranks=4 if how == "wide" else 2, fresh=True)
    assert any("was changed in the loop over reports" in text for text in said)


@pytest.mark.parametrize("how", ["wide", "tied"])
def test_reading_changes_nothing_where_gradients_are_added_up(pool: Pool, how: str) -> None:
    options = {"wide": {"data_parallel": 2}, "tied": {"tied": True}}[how]
    read, left = (
        pool.submit(read_on_ranks, change, options, ranks=4 if how == "wide" else 2) for change in (looked_at, None)
    )
    assert read == left


def read_on_ranks(group: dist.ProcessGroup, change: Change | None, options: dict[str, Any]) -> list[float | None]:
    return losses(change, "2bw", group, **options)


@pytest.mark.parametrize("method", ["2bw", "1f1b"])
def test_a_step_of_ones_own_in_the_loop_steps_nothing_or_is_refused(method: str) -> None:
    """Parameters of the model as they were before the run have no gradients; those that it computes with have."""
    found: list[list[float | None]] = []
    for own in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        found.append([])
        for report in make_pipeline(model, method).run(DATA):
            found[-1].append(report.loss)
            if own:
                optimizer.step()
    assert found[0] == found[1]
    with pytest.raises(ConfigError, match="a step of your own"):
        losses(lambda model: torch.optim.AdamW(model.parameters(), lr=0.1).step(), method)


def test_other_models_are_trained_in_the_loop_as_ever() -> None:
    """In plain torch, or by another pipeline."""
    pipeline = make_pipeline(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), "1f1b")
    inner = make_pipeline(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), "1f1b")
    other = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in pipeline.run(DATA):
        optimizer.zero_grad()
        other(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        list(inner.run(DATA[:1]))
    assert (pipeline.batches, inner.batches) == (len(DATA), len(DATA))
