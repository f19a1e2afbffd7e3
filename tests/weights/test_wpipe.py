"""WPipe: group 1 reads the weights of one update ago, group 2 the newest ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from penstock.errors import ConfigError
from penstock.schedule.methods.data_parallel_sync import Combine
from penstock.train.config.load import load_config
from penstock.train.prepare.prepare_run import prepare
from penstock.weights.decision import LossScale
from support.cases import (
    BALANCE,
    LOSSES,
    OPTIMIZERS,
    Case,
    Outcome,
    assert_equal_tensors,
    assert_same,
    expected,
    make_batches,
    make_blocks,
    make_pipeline,
    train,
    train_on_ranks,
)
from support.own_methods import chosen
from support.pool import Pool

SHAPES = [(1, 2), (2, 1), (2, 3), (4, 2), (4, 4)]


def case_of(p: int, m: int, **changes: Any) -> Case:
    given: dict[str, Any] = {"spans": (21,), "skips": (), "rate": False, "model": "long" if p == 4 else "mixed"}
    return Case("wpipe", p, m, **(given | changes))


def equations(case: Case) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]], list[float], Any]:
    """Batch by batch, without the library: W(t+1) = opt(W(t), gradient at W1(t-1) of group 1 and W2(t) of group 2).

    Returns:
        All versions, all gradients of mean losses, the losses, and the optimizer's state by name.
    """
    blocks = make_blocks(case.model)
    balance = BALANCE[2 * case.depth]
    group_1 = set(list(blocks)[: sum(balance[: case.depth])])
    modules = {name: block for name, block in blocks.items() if isinstance(block, nn.Module)}
    weights = {
        f"{b}.{own}": nn.Parameter(w.detach().clone()) for b, x in modules.items() for own, w in x.named_parameters()
    }
    optimizer = OPTIMIZERS[case.optimizer](list(weights.items()))
    versions, gradients, losses = [{name: w.detach().clone() for name, w in weights.items()}], [], []
    begins = [sum(case.spans[:k]) for k in range(len(case.spans))]
    for t, batch in enumerate(make_batches(case)):
        read = {
            name: versions[t if name.split(".")[0] not in group_1 or t in begins else t - 1][name]
            .clone()
            .requires_grad_()
            for name in weights
        }
        sums, total, count = {name: torch.zeros_like(w) for name, w in weights.items()}, 0.0, 0.0
        for value, targets in batch:
            for name, block in blocks.items():
                own = {key.removeprefix(f"{name}."): w for key, w in read.items() if key.startswith(f"{name}.")}
                value = functional_call(block, own, (value,)) if own else block(value)
            loss, weight = LOSSES[case.loss](value, targets)
            total, count = total + float(loss.detach()), count + weight
            found = torch.autograd.grad(loss / case.divisor, list(read.values()))
            sums = {name: sums[name] + g for name, g in zip(read, found, strict=True)}
        for name, w in weights.items():
            w.grad = sums[name] * (case.divisor / count)
        gradients.append({name: w.grad.clone() for name, w in weights.items() if w.grad is not None})
        optimizer.step()
        versions.append({name: w.detach().clone() for name, w in weights.items()})
        losses.append(total / count)
    return versions, gradients, losses, {name: optimizer.state[w] for name, w in weights.items()}


def assert_trained(found: Outcome, case: Case) -> None:
    versions, gradients, losses, state = equations(case)
    assert [loss for _, loss, _ in found.reports] == losses
    assert len(found.gradients) == len(gradients)
    for t, (g, wanted) in enumerate(zip(found.gradients, gradients, strict=True)):
        assert_equal_tensors(g, wanted, f"gradient {t}")
    assert_equal_tensors({name: found.weights[name] for name in versions[-1]}, versions[-1], "weights")
    for name, wanted in state.items():
        assert_equal_tensors(found.state[name], wanted, f"state of {name}")


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_the_equations_of_wpipe(p: int, m: int, optimizer: str) -> None:
    """21 updates, bit for bit."""
    case = case_of(p, m, optimizer=optimizer)
    assert_trained(train(None, case), case)


@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_the_reference(p: int, m: int) -> None:
    """With drains and a skipped update."""
    case = replace(case_of(p, m), spans=(5, 1, 4), skips=(3,), rate=True)
    assert_same(train(None, case), expected(case))


def test_a_drain_begins_anew() -> None:
    """The first batch of a span reads the newest weights in group 1, too."""
    case = case_of(2, 3, spans=(2, 1, 4, 3))
    assert_trained(train(None, case), case)


@pytest.mark.processes
def test_wpipe_between_processes(pool: Pool) -> None:
    case = case_of(4, 3, spans=(5, 3))
    assert_same(train_on_ranks(pool, case), train(None, case))


@pytest.mark.parametrize(
    "changes",
    [{"recompute": "block"}, {"recompute": "stage"}, {"precision": "bf16"}, {"skips": (2,)}],
    ids=str,
)
def test_wpipe_with_other_features(changes: dict[str, Any]) -> None:
    """As synchronous training in which the blocks of group 1 are read one update late by choice."""
    case = case_of(2, 2, spans=(7,), **changes)
    group_1 = list(make_blocks(case.model))[:3]
    late = train(None, replace(case, method="interleaved"), delays={"table": 1, "first": 1})
    assert group_1 == ["table", "first", "tanh"]
    assert_same(train(None, case), late)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"max_grad_norm": 1.0},
            "rank 0 updates stage 2 before stage 0 .* cannot wait for a .*, which max_grad_norm needs",
        ),
        ({"loss_scale": LossScale()}, "which loss_scale needs; remove it, or"),
        ({"precision": "fp16"}, "which the loss scale of fp16 needs; set precision to bf16 or fp32, or"),
        (
            {"width": 2, "max_grad_norm": 1.0},
            r"which max_grad_norm and data_parallel=2 need; set max_grad_norm to null \(None\), set data",
        ),
        (
            {"width": 2, "combine": Combine("average", every=2)},
            "which combine 'average' needs; set data_parallel ",
        ),
        (
            {"tied": {"head.weight": "table.weight"}},
            "stages 0, 3 cannot share parameters, whose gradients are summed",
        ),
    ],
    ids=["clip", "loss scale", "fp16", "width", "average", "tied"],
)
def test_what_would_have_to_wait_for_both_groups_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_pipeline(case_of(2, 2), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["max_grad_norm=1.0"], "max_grad_norm"),
        (["max_grad_norm=null", "precision=fp16"], "fp16"),
        (["max_grad_norm=null", "model.tied=true"], "stages 0, 3"),
    ],
    ids=["clip", "fp16", "tied"],
)
def test_a_configuration_is_refused_before_anything_starts(changes: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(load_config(None, [chosen("wpipe"), *changes]))


def test_parameters_that_are_shared_within_a_cut_are_no_hindrance() -> None:
    case = case_of(1, 2, tied=True, spans=(3,))
    with pytest.raises(ConfigError, match="cannot share"):
        make_pipeline(case)
    make_pipeline(case, balance=[5, 1], tied={"second.narrow.bias": "first.narrow.bias"})
