"""Optimizers that do more than write into their parameters: step hooks, new memory for weights, kept gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from penstock.errors import CapabilityError, ConfigError
from penstock.weights.memory import gradient_scratch
from support.plain_training import (
    PlainTraining,
    assert_close_weights,
    make_data,
    make_model,
    pipeline_of_model,
    sgd,
)


@pytest.fixture
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a stage of millions of parameters, these are stepped a few at a time."""
    monkeypatch.setattr(gradient_scratch, "_CHUNK", 1)


def compare(optimizer: Any, method: str, batches: int = 4) -> None:
    """Train with a pipeline and in plain torch, and compare the weights."""
    pipeline = pipeline_of_model(make_model(), optimizer, method)
    for part in (make_data(batches)[:2], make_data(batches)[2:]):
        list(pipeline.run(part))
    plain = PlainTraining(make_model(), optimizer, delay=int(method == "2bw"))
    plain.run(make_data(batches))
    assert_close_weights(pipeline.state_dict(), dict(plain.model.state_dict()))


# --- step hooks -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_step_hooks_see_all_parameters_once_an_update(method: str) -> None:
    """One that clips the gradients of all parameters together needs them all."""
    calls = []

    def clip(optimizer: torch.optim.Optimizer, *_: object) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        calls.append(sum(p.grad is not None for p in parameters))
        nn.utils.clip_grad_norm_(parameters, 0.05)

    def clipping(parameters: Any) -> torch.optim.Optimizer:
        optimizer = sgd(parameters)
        optimizer.register_step_pre_hook(clip)
        return optimizer

    pipeline = pipeline_of_model(make_model(), clipping, method)
    list(pipeline.run(make_data()))
    sizes = [sum(len(g["params"]) for g in o.param_groups) for o in pipeline.optimizers().values()]
    assert sorted(calls) == sorted(sizes * 4)
    plain = PlainTraining(make_model(), lambda p: sgd(p), delay=int(method == "2bw"))
    parts = [
        nn.ModuleList(list(plain.model)[a:b]) for a, b in ((0, len(pipeline.parts[0])), (len(pipeline.parts[0]), 5))
    ]
    plain.optimizer.register_step_pre_hook(
        lambda *_: [nn.utils.clip_grad_norm_(part.parameters(), 0.05) for part in parts] and None  # type: ignore[arg-type]
    )
    plain.run(make_data())
    assert_close_weights(pipeline.state_dict(), dict(plain.model.state_dict()))


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("kind", ["after the first run", "of all optimizers"])
def test_step_hooks_that_come_later_run_once_an_update(kind: str) -> None:
    pipeline, calls = pipeline_of_model(make_model(), method="2bw"), []
    list(pipeline.run(make_data()[:1]))
    register: list[Callable[..., Any]] = [o.register_step_post_hook for o in pipeline.optimizers().values()]
    handles = [
        add(lambda *_: calls.append(1)) for add in (register if kind[0] == "a" else [register_optimizer_step_post_hook])
    ]
    list(pipeline.run(make_data()))
    for handle in handles:
        handle.remove()
    list(pipeline.run(make_data()))
    assert len(calls) == 4 * 2


# --- new memory -------------------------------------------------------------------------------------------------------


class Assigning(torch.optim.Optimizer):
    """Assigns new tensors to its parameters."""

    def __init__(self, parameters: Any, kind: str = "data") -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make new weights beside the old ones."""
        for p in (p for group in self.param_groups for p in group["params"]):
            new = p - 0.1 * p.grad
            if self.kind == "data":
                p.data = new
            elif self.kind == "set_":
                p.set_(new)
            else:
                p.data = new.reshape(-1)


@pytest.mark.parametrize("method", ["1f1b", "2bw", "stash"])
@pytest.mark.parametrize("kind", ["data", "set_"])
def test_weights_that_an_optimizer_assigns_are_taken_over(method: str, kind: str) -> None:
    if method != "stash":
        compare(lambda parameters: Assigning(parameters, kind), method)
        return
    states = []
    for make in (
        lambda parameters: Assigning(parameters, kind),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    ):
        pipeline = pipeline_of_model(make_model(), make, method)
        list(pipeline.run(make_data()))
        states.append(pipeline.state_dict())
    assert_close_weights(*states)


def test_weights_of_another_shape_are_refused_by_name() -> None:
    pipeline = pipeline_of_model(make_model(), lambda parameters: Assigning(parameters, "flat"))
    with pytest.raises(CapabilityError, match=r"Assigning has given 2\.weight a tensor of shape \(30,\).*\(5, 6\)"):
        list(pipeline.run(make_data()))


# --- kept gradients ---------------------------------------------------------------------------------------------------


class Keeping(torch.optim.Optimizer):
    """Steps with the mean of this gradient and the last one, of which it keeps the tensor itself."""

    def __init__(self, parameters: Any, since: int = 0, way: str = "tensor") -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.since, self.way, self.steps = since, way, 0
        self.last: dict[Any, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Keep the gradients from some step on."""
        for p in (p for group in self.param_groups for p in group["params"]):
            p.sub_(0.05 * (p.grad + self.last.get(p, p.grad)))
            if self.steps >= self.since:
                self.last[p] = p.grad if self.way == "tensor" else p.grad.detach().view(-1).view_as(p)
        self.steps += 1


@pytest.mark.parametrize("way", ["tensor", "view"])
@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_gradients_that_an_optimizer_keeps_stay_as_they_are(method: str, way: str) -> None:
    compare(lambda parameters: Keeping(parameters, way=way), method)


@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_an_optimizer_that_begins_to_keep_gradients_is_refused(method: str) -> None:
    pipeline = pipeline_of_model(make_model(), lambda parameters: Keeping(parameters, since=2), method)
    with pytest.raises(CapabilityError, match=r"Keeping keeps the gradient of its step.*\.clone\(\)"):
        list(pipeline.run(make_data(6)))


def test_an_optimizer_that_keeps_no_gradient_gets_no_copies() -> None:
    """From the second step on it works on the pipeline's memory."""

    class Looking(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            found.append({p.grad.data_ptr() for group in self.param_groups for p in group["params"]})
            return super().step(closure)

    found: list[set[int]] = []
    pipeline = pipeline_of_model(make_model(), lambda parameters: Looking(parameters, lr=0.1))
    list(pipeline.run(make_data(6)))
    assert len(found) == 2 * 6
    assert set(map(frozenset, found[2:])) == set(map(frozenset, found[-2:]))


# --- what a stage cannot keep ---


@pytest.mark.parametrize("when", ["between runs", "in the loop"])
def test_parameters_added_to_an_optimizer_later_are_refused(when: str) -> None:
    """As who unfreezes layers one by one adds them."""
    pipeline = pipeline_of_model(make_model())
    optimizer = next(iter(pipeline.optimizers().values()))

    def add() -> None:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})

    def run() -> None:
        for report in pipeline.run(make_data()):
            if when == "in the loop" and report.batch == 0:
                add()

    if when == "between runs":
        run()
        add()
    with pytest.raises(ConfigError, match=r"SGD has parameter groups of \[\d, 1\] parameters now, and had \[\d\]"):
        run()


class Counting(torch.optim.SGD):
    """Keeps a number for all of its parameters, from the beginning or from its first step on."""

    at_once = False

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.state["count"] = 0 if self.at_once else {}

    def step(self, closure: Any = None) -> None:
        self.state["count"] = 1
        super().step(closure)


@pytest.mark.parametrize("kind", [Counting, type("AtOnce", (Counting,), {"at_once": True})])
def test_state_that_is_of_no_parameter_is_refused(kind: type[Counting]) -> None:
    said = rf"{kind.__name__} keeps 'count' in its state, .* keep it for each parameter"
    with pytest.raises(CapabilityError, match=said):
        list(pipeline_of_model(make_model(), kind, "1f1b").run(make_data(2)))


def test_one_optimizer_for_several_stages_is_refused() -> None:
    """Made at the first one, and given the parameters of the next ones."""
    made: list[torch.optim.SGD] = []

    def factory(parameters: list[nn.Parameter]) -> torch.optim.SGD:
        if made:
            made[0].add_param_group({"params": parameters})
        else:
            made.append(torch.optim.SGD(parameters, lr=0.1))
        return made[0]

    pipeline = pipeline_of_model(make_model(), factory)
    with pytest.raises(ConfigError, match="an optimizer of its own"):
        list(pipeline.run(make_data()))
