"""Hooks on parameters, of gradients and after these have accumulated: as in plain torch, for each microbatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import Precision, Staleness
from penstock.errors import CapabilityError, ConfigError
from support.plain_training import (
    SAMPLES,
    PlainTraining,
    assert_close_weights,
    make_data,
    make_model,
    pipeline_of_model,
)

METHODS = ["1f1b", "2bw", "zb-h1", "gpipe"]
AS_IN_TORCH = Precision(divisor=float(SAMPLES))
NAMES = ("0.weight", "2.weight", "2.bias", "4.bias")


def mask(name: str, shape: torch.Size) -> Tensor:
    return (torch.arange(shape.numel()).view(shape) + len(name)) % 2


def add_masks(model: nn.Sequential) -> None:
    """That leave half of the elements as they are."""
    for name in NAMES:
        p = model.get_parameter(name)
        p.register_hook(lambda g, name=name: g * mask(name, g.shape))


def add_masks_after(model: nn.Sequential) -> None:
    def zero(p: nn.Parameter, name: str) -> None:
        assert p.grad is not None
        p.grad.mul_(mask(name, p.shape))

    for name in NAMES:
        model.get_parameter(name).register_post_accumulate_grad_hook(lambda p, name=name: zero(p, name))


def add_clamps(model: nn.Sequential) -> None:
    """Not linear: that they run for each microbatch, and on which scale, matters."""
    for name in NAMES:
        model.get_parameter(name).register_hook(lambda g: g.clamp(-0.02, 0.03))
        model.get_parameter(name).register_hook(lambda g: None if g.dim() > 1 else g * 2)


def add_replacements(model: nn.Sequential) -> None:
    def replace(p: nn.Parameter) -> None:
        assert p.grad is not None
        p.grad = p.grad.clamp(-0.02, 0.03) + 0.01 * p.detach()

    for name in NAMES:
        model.get_parameter(name).register_post_accumulate_grad_hook(replace)


def node_of(p: nn.Parameter) -> Any:
    """Of what accumulates the gradient of a parameter; its hooks live as long as somebody keeps it."""
    return p.expand_as(p).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("add", [add_masks, add_masks_after, add_clamps, add_replacements])
def test_hooks_act_as_in_plain_torch(add: Any, method: str) -> None:
    model, other = make_model(), make_model()
    add(model)
    add(other)
    pipeline = pipeline_of_model(model, method=method, precision=AS_IN_TORCH)
    list(pipeline.run(make_data()))
    plain = PlainTraining(other, delay=int(method == "2bw"))
    plain.run(make_data())
    assert_close_weights(pipeline.state_dict(), dict(plain.model.state_dict()))


@pytest.mark.parametrize("add", [add_masks, add_masks_after])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("1f1b", {"recompute": "block"}),
        ("1f1b", {"data_parallel": 2}),
        ("chimera", {}),
        ("1f1b", {"staleness": Staleness(delays=1)}),
        (penstock.method("pipemare", reschedule=0), {}),
        ("stash", {}),
        ("1f1b", {"precision": "bf16"}),
        ("zb-h1", {"precision": "bf16"}),
    ],
)
def test_masked_elements_stay_whatever_the_method(add: Any, method: Any, options: dict[str, Any]) -> None:
    model, data = make_model(), make_data()
    if "precision" in options:
        model, data = model.float(), [(x.float(), y.float()) for x, y in data]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    add(model)
    pipeline = pipeline_of_model(model, lambda p: torch.optim.SGD(p, lr=0.1), method, **options)
    list(pipeline.run(data))
    for name, tensor in pipeline.full_state_dict().items():
        moves = mask(name, tensor.shape).bool() if name in NAMES else torch.ones_like(tensor).bool()
        assert torch.equal(tensor[~moves], before[name][~moves]), name
        assert not torch.equal(tensor[moves], before[name][moves]), name


def test_hooks_come_and_go_between_runs() -> None:
    models = make_model(), make_model()
    pipeline, plain = pipeline_of_model(models[0], precision=AS_IN_TORCH), PlainTraining(models[1])
    list(pipeline.run(make_data()[:1]))
    plain.run(make_data()[:1])
    handles = [m.get_parameter("2.weight").register_hook(lambda g: 3 * g) for m in models]
    list(pipeline.run(make_data()[1:2]))
    plain.run(make_data()[1:2])
    for handle in handles:
        handle.remove()
    list(pipeline.run(make_data()[2:]))
    plain.run(make_data()[2:])
    assert_close_weights(pipeline.state_dict(), dict(plain.model.state_dict()))


@pytest.mark.parametrize("method", ["register_hook", "register_prehook"])
def test_hooks_of_nodes_are_refused(method: str) -> None:
    model = make_model()
    node = node_of(model[2].weight)
    handle = getattr(node, method)(lambda *_: None)
    pipeline = pipeline_of_model(model)
    with pytest.raises(ConfigError, match=r"2\.weight has a hook on the node .* register_post_accumulate_grad_hook"):
        list(pipeline.run(make_data()[:1]))
    handle.remove()
    assert len(list(pipeline.run(make_data()[:1]))) == 1


def test_hooks_run_once_for_each_microbatch() -> None:
    model, seen, after = make_model(), [], []
    model[0].weight.register_hook(lambda g: seen.append(g.clone()))
    model[0].weight.register_post_accumulate_grad_hook(
        lambda p: after.append(None if p.grad is None else p.grad.clone())
    )
    list(pipeline_of_model(model).run(make_data()[:3]))
    assert len(seen) == len(after) == 3 * 2
    torch.testing.assert_close(after[1], seen[0] + seen[1])
    assert model[0].weight.grad is None


@pytest.mark.parametrize("kind", ["steps", "drops"])
def test_an_optimizer_in_the_backward_is_refused(kind: str) -> None:
    """The update is the pipeline's: other passes still read the weights."""
    model = make_model()

    def step(p: nn.Parameter) -> None:
        with torch.no_grad():
            if kind == "steps":
                p.sub_(0.1 * p.grad)
            p.grad = None

    model[2].weight.register_post_accumulate_grad_hook(step)
    pipeline = pipeline_of_model(model)
    what = "written into the weights" if kind == "steps" else "dropped the gradient"
    with pytest.raises(CapabilityError, match=rf"hook on 2\.weight has {what}"):
        list(pipeline.run(make_data()))


def test_who_clamps_gradients_is_told_their_scale(caplog: pytest.LogCaptureFixture) -> None:
    """Where it was not chosen; masks do not mind."""

    def hooked(**options: Any) -> None:
        blocks = [nn.Linear(2, 2), nn.Linear(2, 2)]
        blocks[0].weight.register_hook(lambda g: g.clamp(-1, 1))
        blocks[0].bias.register_hook(lambda g: g.clamp(-1, 1))
        given = {"loss": nn.functional.mse_loss, "optimizer": torch.optim.SGD, **options}
        penstock.Pipeline(blocks, method="1f1b", stages=2, microbatches=2, **given)

    hooked(precision=Precision(divisor=4.0))
    assert not caplog.records
    hooked()
    assert [record.message[:55] for record in caplog.records] == [
        "a hook on 0.weight (and 1 more) sees, for each microbat"
    ]
