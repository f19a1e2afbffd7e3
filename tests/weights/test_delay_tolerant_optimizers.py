"""Optimizers that bear delayed gradients well: against the reference, over snapshots, partitions and widths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import CapabilityError, CheckpointError
from penstock.schedule.methods.data_parallel_sync import Combine
from penstock.weights.optim.optimizer_adapters import Joined
from support.cases import (
    BY_NAME,
    OPTIMIZERS,
    Case,
    assert_equal_tensors,
    assert_same,
    expected,
    make_batches,
    make_pipeline,
    train,
    train_on_ranks,
)
from support.correction_cases import snapshots_of
from support.pool import Pool
from support.snapshots import Kept

SHAPES = [*((method, *shape) for method in ("1f1b", "2bw") for shape in [(1, 2), (2, 1), (4, 3)]), ("2bw", 8, 8)]


def case_of(name: str, method: str = "2bw", depth: int = 2, m: int = 2, **changes: Any) -> Case:
    return replace(Case(method, depth, m, "long" if depth == 8 else "mixed", f"configured {name}"), **changes)


@pytest.mark.parametrize(("method", "depth", "m"), SHAPES)
@pytest.mark.parametrize("name", BY_NAME)
def test_updates_are_those_of_the_reference(name: str, method: str, depth: int, m: int) -> None:
    """12 updates in two spans and a batch without weight; clipped where the depth is 4."""
    case = case_of(name, method, depth, m, spans=(8, 5), clip=0.5 if depth == 4 else None)
    assert_same(train(None, case), expected(case))


@pytest.mark.parametrize("name", BY_NAME)
def test_a_run_goes_on_at_another_depth(name: str) -> None:
    """From a snapshot in the midst of it, to the same bits; bases are refreshed before and after it."""
    case = case_of(name, depth=3, spans=(9,))
    whole = make_pipeline(case)
    taken = [snapshot for snapshot in snapshots_of(case, 5, whole) if snapshot.batch == 5]
    resumed = make_pipeline(replace(case, depth=2))
    resumed.load(Kept(taken))
    for _ in resumed.run(make_batches(case)[5:]):
        pass
    assert_equal_tensors(resumed.state_dict(), whole.state_dict(), "weights")
    states = [{n: s for o in p.optimizers().values() for n, s in named_state(o).items()} for p in (whole, resumed)]
    assert states[0].keys() == states[1].keys()
    for key, state in states[0].items():
        assert_equal_tensors(states[1][key], state, key)


def named_state(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    groups = optimizer.param_groups
    return {n: optimizer.state[p] for g in groups for n, p in zip(g["param_names"], g["params"], strict=True)}


def test_another_optimizer_does_not_take_over() -> None:
    """Of joined ones it is that of the parameter that counts."""
    case = case_of("muon", spans=(2,))
    taken = snapshots_of(case, 2, make_pipeline(case))
    with pytest.raises(CheckpointError, match="has the state of Muon, but stage 0 .* is stepped by BasisRotation"):
        make_pipeline(case_of("basis-rotation")).load(Kept(taken))
    with pytest.raises(CheckpointError, match="has the state of AdamW, but stage 0 .* is stepped by Muon"):
        make_pipeline(case_of("muon")).load(
            Kept(snapshots_of(case, 2, make_pipeline(replace(case, optimizer="adamw"))))
        )


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("muon", {"width": 2}),
        ("soap", {"width": 2}),
        ("adan", {"tied": True}),
        ("basis-rotation", {"tied": True, "model": "gpt"}),
        ("muon", {"method": "zb-h2-post", "m": 4, "clip": 0.1}),
        ("adan", {"method": "zb-h2-post", "m": 4, "clip": 0.1}),
        ("soap", {"method": "stash"}),
        ("basis-rotation", {"method": "newest"}),
        ("muon", {"precision": "bf16"}),
    ],
    ids=str,
)
def test_delay_tolerant_optimizers_with_other_features(name: str, changes: dict[str, Any]) -> None:
    case = case_of(name, **changes)
    assert_same(train(None, case), expected(case))


@pytest.mark.long
def test_delay_tolerant_optimizers_on_ranks(pool: Pool) -> None:
    case = case_of("soap", spans=(5,), clip=0.6)
    assert_same(train_on_ranks(pool, case), expected(case))


@pytest.mark.parametrize("name", BY_NAME)
def test_steps_are_not_undone_by_arithmetic(name: str) -> None:
    with pytest.raises(CapabilityError, match="cannot be undone in place"):
        make_pipeline(case_of(name, "zb-h2-post", 2, 4, clip=0.1, rule="provisional-in-place"))


@pytest.mark.parametrize(("name", "refused"), [("soap", True), ("basis-rotation", True), ("adan", False)])
def test_bases_are_not_averaged(name: str, refused: bool) -> None:
    case = case_of(name, "1f1b", spans=(4,), width=2, skips=())
    make: dict[str, Any] = {"combine": Combine("average", every=2, optimizer_state="average")}
    if refused:
        with pytest.raises(CapabilityError, match="holds orthogonal bases, whose mean is not orthogonal"):
            make_pipeline(case, **make)
        return
    for _ in make_pipeline(case, **make).run(make_batches(case)):
        pass


@pytest.mark.parametrize("name", BY_NAME)
def test_parameters_are_stepped_a_few_at_a_time(name: str) -> None:
    """So that updates which rotate take no scratch as large as the weights."""
    blocks = [nn.Linear(1200, 1200, bias=False) for _ in range(3)]
    (stage,) = make_pipeline(case_of(name, depth=1), blocks=blocks, balance=[3]).stages.values()
    assert 0 < stage.weights.updater.nbytes < stage.weights.store.layout.nbytes / 2


class Whole(torch.optim.SGD):
    """A class of one's own."""


def test_joined_with_a_class_of_one_s_own_everything_is_stepped_at_once() -> None:
    def factory(named: Any) -> torch.optim.Optimizer:
        first, rest = named[:1], named[1:]
        return Joined([Whole(first, lr=0.1), torch.optim.AdamW(rest, lr=0.01)]) if rest else Whole(first, lr=0.1)

    OPTIMIZERS["joined"] = factory
    try:
        case = Case("2bw", 2, 2, optimizer="joined")
        assert_same(train(None, case), expected(case))
    finally:
        del OPTIMIZERS["joined"]
