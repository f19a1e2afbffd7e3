"""What each configured optimizer steps, and how, against its equations."""

from __future__ import annotations

import copy
import importlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.errors import CapabilityError, ConfigError
from penstock.models.gpt import gpt_blocks
from penstock.models.gpt_shape import GPTConfig
from penstock.partition.blocks import LazyBlock
from penstock.train.config.load import load_config
from penstock.train.config.schema import TrainConfig
from penstock.train.config.sections import OptimizerName, OptimizerSection
from penstock.train.prepare.prepare_run import prepare
from penstock.train.setup.optimizers import is_hidden, optimizer_factory
from penstock.weights.corrections.base import StagePlace
from penstock.weights.memory.buffers import Layout
from penstock.weights.optim.directions import check_predictable, direction
from penstock.weights.optim.optimizer_adapters import ByParameter, Joined, is_separable, name_of, optimizer_of
from support.named_parameters import gradients, made, orthogonalised, run, some
from support.own_methods import chosen, correction_of


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ["optimizer.name=sgd", "optimizer.momentum=0.5"],
            "momentum is an option of muon, not of sgd .whose momentum is beta1.; leave it out$",
        ),
        (["optimizer.refresh=3"], "refresh is an option of soap, basis-rotation, not of adamw; leave it out"),
        (["optimizer.nesterov=false"], "nesterov is an option of sgd, muon, not of adamw"),
    ],
)
def test_options_that_the_optimizer_does_not_take_are_refused(changes: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, changes)


def test_which_matrices_are_hidden() -> None:
    """Of a GPT: those of attention and MLP, in every layer."""
    found, others = set(), set()
    for name, block in gpt_blocks(GPTConfig(layers=2, width=8, heads=2, context=4, vocabulary=9), seed=0).items():
        assert isinstance(block, LazyBlock)
        for own, p in block.make().named_parameters():
            (found if is_hidden(f"{name}.{own}", p) else others).add(f"{name}.{own}")
    kinds = ("query_key_value", "attention_out", "mlp_in", "mlp_out")
    assert found == {f"layers.{i}.{kind}.weight" for i in range(2) for kind in kinds}
    assert {"embedding.weight", "head.out.weight", "layers.0.mlp_norm.weight"} <= others


@pytest.mark.parametrize(("name", "kind"), [("muon", "Muon"), ("basis-rotation", "BasisRotation")])
def test_who_steps_what(name: OptimizerName, kind: str) -> None:
    named = some()
    optimizer = made(name, named)
    assert name_of(optimizer) == f"{kind} and AdamW"
    assert {n: name_of(optimizer, p) for n, p in named} == {
        "layers.0.a.weight": kind,
        "layers.0.b.weight": kind,
        "layers.0.b.bias": "AdamW",
        "head.out.weight": "AdamW",
        "layers.1.conv.weight": "AdamW",
    }
    decays = {n: group["weight_decay"] for group in optimizer.param_groups for n in group["param_names"]}
    assert decays == {n: 0.2 * (p.ndim > 1) for n, p in named}
    assert {group["lr"] for group in optimizer.param_groups} == {0.03}
    for some_only in (named[:2], named[2:4]):  # a stage may have nothing of one kind
        assert name_of(made(name, some_only)) in (kind, "AdamW")
    assert is_separable(optimizer)


def test_joined_optimizers_step_as_each_alone() -> None:
    named, other = some(), some()
    optimizer = made("muon", named, momentum=0.9, nesterov=False, ns_dtype="bfloat16")
    run(optimizer, named)
    alone = [
        torch.optim.Muon(other[:2], 0.03, 0.2, 0.9, nesterov=False, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([other[3], other[4]], 0.03, (0.9, 0.95), weight_decay=0.2),
        torch.optim.AdamW(other[2:3], 0.03, (0.9, 0.95), weight_decay=0.0),
    ]
    for found in gradients(other, 25):
        for (_, p), g in zip(other, found, strict=True):
            p.grad = g
        for part in alone:
            part.step()
    for (name, p), (_, q) in zip(named, other, strict=True):
        assert torch.equal(p, q), name


def test_joined_optimizers_load_their_state() -> None:
    named, other = some(), some()
    first = made("muon", named)
    run(first, named, 3)
    second = made("muon", other)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for (_, p), (_, q) in zip(named, other, strict=True):
        q.data.copy_(p.data)
    for optimizer in (first, second):
        optimizer.param_groups[0]["lr"] = 0.5
    run(first, named, 2)
    run(second, other, 2)
    for (name, p), (_, q) in zip(named, other, strict=True):
        assert torch.equal(p, q), name


class Rude(Optimizer):
    """Counts in its groups, keeps a list, and writes into gradients."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    kept = self.state[p].setdefault("kept", [torch.zeros_like(p), []])
                    kept[0].add_(p.grad.neg_())
                    p.add_(kept[0], alpha=group["lr"] / group["step"])


def test_by_parameter_keeps_to_itself_what_a_class_does() -> None:
    named, other = some(), some()
    groups = [{"params": named[:2], "lr": 0.5}, {"params": named[2:], "lr": 0.25}]
    optimizer = ByParameter(Rude(groups, 1.0))
    run(optimizer, named, 4)
    plain = Rude([{"params": other[:2], "lr": 0.5}, {"params": other[2:], "lr": 0.25}], 1.0)
    for found in gradients(other, 4):
        for (_, p), g in zip(other, found, strict=True):
            p.grad = g
        plain.step()
    for (name, p), (_, q) in zip(named, other, strict=True):
        assert torch.equal(p, q), name
        assert optimizer.state[p].keys() == {"step", "kept.length", "kept.0"}
    assert not is_separable(Joined([Rude(some()[:1], 1.0), torch.optim.SGD(some()[1:], lr=1.0)]))
    assert is_separable(Joined([optimizer]))
    assert not is_separable(plain)


@pytest.mark.parametrize("method", ["gap-aware", "spike", "nag-pp", "nag-pp-no-stash", "ftpipe", "lwp"])
def test_corrections_name_the_optimizer_that_is_wrapped(method: str) -> None:
    options = {"reschedule": 0} if method == "nag-pp-no-stash" else {}
    correction = correction_of(method, **options)
    assert correction is not None
    optimizer = ByParameter(Rude([p for _, p in some()], 1.0))
    with pytest.raises(CapabilityError, match="Rude") as raised:
        correction.on(Layout({}), StagePlace(0, 2, 1, 1.0, "here")).begin(optimizer)
    assert "ByParameter" not in str(raised.value)


@pytest.mark.parametrize(("name", "kind"), [("adan", "Adan"), ("soap", "SOAP")])
def test_by_parameter_as_all_at_once(name: OptimizerName, kind: str) -> None:
    """The class of the library, which keeps its count in its groups, and the same kept by parameter."""
    named, other = some(), some()
    optimizer = made(name, named, **({"refresh": 4} if name == "soap" else {}))
    assert isinstance(optimizer, ByParameter)
    run(optimizer, named)
    library = importlib.import_module("pytorch_optimizer")
    settings = {"Adan": {"betas": (0.9, 0.92, 0.95)}, "SOAP": {"betas": (0.9, 0.95), "precondition_frequency": 4}}
    groups = [
        {"params": [p for _, p in other if (p.ndim > 1) == big], "weight_decay": 0.2 * big} for big in (True, False)
    ]
    plain = getattr(library, kind)(groups, lr=0.03, **settings[kind])
    for found in gradients(other, 25):
        for (_, p), g in zip(other, found, strict=True):
            p.grad = g.clone()
        plain.step()
    for (n, p), (_, q) in zip(named, other, strict=True):
        assert torch.equal(p, q), n
        assert optimizer.state[p]["step"] == 25
        kept = [v for v in optimizer.state[p].values() if not isinstance(v, Tensor | int | float)]
        assert not kept
    assert all("step" not in group for group in optimizer.param_groups)


def test_joined_optimizers_are_predicted_part_by_part() -> None:
    named = some()
    optimizer = made("muon", named)
    check_predictable(optimizer)
    run(optimizer, named, 3)
    for name, p in named:
        (group,) = [g for g in optimizer.param_groups if name in g["param_names"]]
        found = direction(optimizer, p, group)
        state = optimizer.state[p]
        if name_of(optimizer, p) == "Muon":
            wanted = 0.2 * math.sqrt(max(p.shape)) * orthogonalised(state["momentum_buffer"])
            torch.testing.assert_close(found, wanted.float(), rtol=0, atol=0.02)
        else:
            mean, square = state["exp_avg"] / (1 - 0.9**3), state["exp_avg_sq"] / (1 - 0.95**3)
            torch.testing.assert_close(found, mean / (square.sqrt() + 1e-8))
        assert optimizer_of(optimizer, p) in (optimizer.parts if isinstance(optimizer, Joined) else ())


@pytest.mark.parametrize("name", ["nadam", "adan", "soap", "basis-rotation"])
def test_whose_steps_are_not_predicted(name: OptimizerName) -> None:
    kind = {"nadam": "NAdam", "adan": "Adan", "soap": "SOAP", "basis-rotation": "BasisRotation"}[name]
    with pytest.raises(CapabilityError, match=f"of SGD, Adam, AdamW, Muon, not of {kind}"):
        check_predictable(made(name, some()))


def test_xpipe_s_direction_is_a_third_of_adam_s() -> None:
    """A constant gradient, after so many steps that corrections with the power t are 1: sqrt(0.001) / 0.1."""
    p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = torch.optim.Adam([p], lr=0.0, eps=0.0)
    gradient = torch.tensor([3.0, -0.01], dtype=torch.float64)
    optimizer.state[p] = {
        "step": torch.tensor(10**6),
        "exp_avg": gradient.clone(),
        "exp_avg_sq": gradient**2,
    }
    group = optimizer.param_groups[0]
    ratio = direction(optimizer, p, group, uncorrected=True) / direction(optimizer, p, group)  # type: ignore[operator]
    assert ratio.tolist() == pytest.approx([0.316228, 0.316228], abs=1e-6)


def test_a_library_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", nothing)
    for name in ("adan", "soap"):
        with pytest.raises(CapabilityError, match=r"pip install 'penstock\[optimizers\]'"):
            optimizer_factory(OptimizerSection(name=name))


def test_names_in_a_configuration() -> None:
    section = load_config(None, ["optimizer.name=muon", "optimizer.momentum=0.9"]).optimizer
    assert (section.name, section.momentum) == ("muon", 0.9)
    changes = ["optimizer.name=basis-rotation", "optimizer.sides=smaller", "optimizer.refresh=20"]
    section = load_config(None, changes).optimizer
    assert (section.name, section.sides, section.refresh) == ("basis-rotation", "smaller", 20)
    assert TrainConfig().optimizer.name == "adamw"
    for change, message in (
        ("optimizer.refresh=0", "greater than or equal to 1"),
        ("optimizer.sides=left", "'both' or 'smaller'"),
        ("optimizer.momentum=1", "less than 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(None, [change])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([chosen("ftpipe"), "optimizer.name=muon"], "supports SGD with momentum, Adam and AdamW, not Muon"),
        (["method=spectrain", "optimizer.name=adan"], "not of Adan"),
        (["method=zb-h2-post", "undo=in-place", "optimizer.name=basis-rotation"], "BasisRotation cannot be undone"),
        (
            ["method=2bw", "width=2", "combine.kind=average", "combine.optimizer_state=average", "optimizer.name=soap"],
            "SOAP holds orthogonal bases",
        ),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused_before_anything_runs(changes: list[str], message: str) -> None:
    with pytest.raises(CapabilityError, match=message):
        prepare(load_config(None, [*changes, f"data={__file__}", "model.context=8", "held_out=0.2"]))
