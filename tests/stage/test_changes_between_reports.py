"""What is changed in the loop over reports is an error with what to write; gradients that are read are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

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


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_scripted_modules_are_trained() -> None:
    """Their parameters are in a dict that has less than a dict."""
    model = nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Linear(3, 3)))
    assert len([report.loss for report in make_pipeline(model, "1f1b").run(DATA)]) == len(DATA)


@pytest.mark.parametrize("method", ["2bw", "stash", "1f1b"])
@pytest.mark.parametrize("change", [replaced, parametrized])
def test_parameters_replaced_in_the_loop_are_refused(method: str, change: Change) -> None:
    with pytest.raises(ConfigError, match=r"another tensor was put in the place of 2\.weight .* between two runs"):
        losses(change, method)


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


# --- steps ------------------------------------------------------------------------------------------------------------


class Own(torch.optim.SGD):
    """An optimizer of the script's own class."""


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Own])
@pytest.mark.parametrize("when", ["before", "in the loop"])
def test_a_step_of_ones_own_in_the_loop_is_refused(kind: Any, when: str) -> None:
    """Of parameters of the model as they were before the run, or are meanwhile; the run ends as if it had been left."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    pipeline = make_pipeline(model, "2bw")
    optimizer = kind(model.parameters(), lr=0.1) if when == "before" else None

    def loop() -> None:
        for _ in pipeline.run(DATA):
            (optimizer or kind(model.parameters(), lr=0.1)).step()

    with pytest.raises(ConfigError, match=rf"{kind.__name__}.step\(\) was called in the loop .* an optimizer for each"):
        loop()
    assert pipeline.batches < len(DATA)
    list(pipeline.run(DATA))
    optimizer = kind(model.parameters(), lr=0.1)
    optimizer.step()  # between two runs it is as good as ever


def test_a_second_step_of_the_optimizers_of_stages_is_refused() -> None:
    pipeline = make_pipeline(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), "1f1b")
    reports = pipeline.run(DATA)
    next(reports)
    with pytest.raises(ConfigError, match="SGD.step.* was called in the loop over reports"):
        next(iter(pipeline.optimizers().values())).step()
    reports.close()


def test_optimizers_of_stages_see_no_hook_of_the_watch() -> None:
    """They go another way where all parameters have to be stepped together."""
    seen: list[int] = []

    class Looks(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append(len(_global_optimizer_pre_hooks))
            return super().step(closure)

    pipeline = Pipeline(
        nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), "2bw", stages=2, microbatches=4,
        loss=nn.functional.mse_loss, optimizer=lambda named: Looks([p for _, p in named], lr=0.1),
    )  # fmt: skip
    for _ in pipeline.run(DATA):
        pass
    for _ in pipeline.run(DATA):
        break
    assert set(seen) == {0}
    assert len(seen) >= 2 * len(DATA)
    assert not _global_optimizer_pre_hooks


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
