"""Anything may travel between stages: nested trees with all kinds of leaves, in shapes that change all the time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import PenstockError
from support import cases
from support.cases import (
    METHODS,
    Case,
    Outcome,
    Recording,
    assert_same,
    finish,
    make_pipeline,
    mixed,
)
from support.pool import Pool
from support.tree_cases import RAGGED, TreeCase, batches_of, blocks_of, expected


def train(group: dist.ProcessGroup | None, case: TreeCase) -> Outcome:
    recording = Recording(cases.OPTIMIZERS[case.optimizer])
    pipeline = make_pipeline(case, group, blocks=blocks_of(case), optimizer=recording)
    outcome = Outcome([(r.batch, r.loss, r.weight) for r in pipeline.run(batches_of(case))])
    return finish(outcome, pipeline, recording)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("depth", "m"), [(1, 2), (2, 3), (4, 3)])
def test_trees(pool: Pool, method: str, depth: int, m: int) -> None:
    case = TreeCase(method, depth, m, "trees", optimizer="sgd", spans=(4,))
    wanted = expected(case)
    assert_same(train(None, case), wanted)
    assert_same(cases.together(pool.submit(train, case, ranks=depth)), wanted)


@pytest.mark.parametrize("depth", [2, 3, 6])
@pytest.mark.parametrize("model", ["turned", "normed"])
def test_tensors_lie_in_memory_as_they_did(pool: Pool, model: str, depth: int) -> None:
    """Or kernels would round otherwise, and the numbers would depend on the stages."""
    case = TreeCase("1f1b", depth, 2, model, spans=(4,))
    wanted = expected(case)
    assert_same(train(None, case), wanted)
    if depth < 6:
        assert_same(cases.together(pool.submit(train, case, ranks=depth)), wanted)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", ["mixed", "trees"])
def test_changing_shapes(pool: Pool, method: str, model: str) -> None:
    shapes = RAGGED if model == "mixed" else tuple(shape for shape in RAGGED if shape[0])  # no mean of nothing
    case = TreeCase(method, 3, len(shapes), model, optimizer="sgd", spans=(6,), shapes=shapes)
    wanted = expected(case)
    assert_same(train(None, case), wanted)
    assert_same(cases.together(pool.submit(train, case, ranks=3)), wanted)


@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_an_odd_last_microbatch(pool: Pool, method: str) -> None:
    case = TreeCase(method, 4, 4, "mixed", spans=(5,), shapes=((4, 4), (4, 4), (4, 4), (1, 4)))
    wanted = expected(case)
    assert_same(train(None, case), wanted)
    assert_same(cases.together(pool.submit(train, case, ranks=4)), wanted)


@pytest.mark.parametrize("where", ["in one process", "on ranks"])
def test_plain_values_keep_their_type_and_sign(pool: Pool, where: str) -> None:
    """1, True and 1.0 are equal to Python, as are 0.0 and -0.0, but they are not the same."""
    case = TreeCase("1f1b", 4, 4, "kinds", spans=(6,))
    found = cases.together(pool.submit(train, case, ranks=4, fresh=True)) if where == "on ranks" else train(None, case)
    assert_same(found, expected(case))


def double(x: Tensor) -> Tensor:
    return x * 2.0


def double_and_erase(x: Tensor) -> Tensor:
    doubled = double(x)
    x.detach().zero_()
    return doubled


def test_a_stage_may_write_into_what_it_received() -> None:
    """The stage before it still has what it saved: tanh needs its own result in its backward."""
    case = Case("1f1b", 2, 3, spans=(3,))
    batches = cases.make_batches(case)
    weights = []
    for function in (double, double_and_erase):
        torch.manual_seed(4)
        pipeline = make_pipeline(case, blocks=mixed() | {"norm": function})  # the first block of the second stage
        list(pipeline.run(batches))
        weights.append(pipeline.state_dict())
    cases.assert_equal_tensors(weights[1], weights[0], "weights")


class Odd:
    """Nothing that can travel."""


def send_odd(x: Tensor) -> Any:
    return {"x": x, "odd": Odd()}


def drop_odd(tree: dict[str, Any]) -> Tensor:
    x: Tensor = tree["x"]
    return x


def send_refusal(group: dist.ProcessGroup | None, depth: int) -> str:
    """What the pipeline says when a block returns something that cannot travel."""
    case = Case("1f1b", depth, 2, spans=(2,))
    mixed_blocks = list(mixed().items())
    blocks = dict([*mixed_blocks[:2], ("send", send_odd), ("drop", drop_odd), *mixed_blocks[2:]])
    pipeline = make_pipeline(case, group, blocks=blocks, balance=(3, 5), timeout=3.0)
    try:
        list(pipeline.run(cases.make_batches(case)))
    except PenstockError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("where", ["on ranks", "in one process"])
def test_what_cannot_travel_is_refused(pool: Pool, where: str) -> None:
    ranks = [send_refusal(None, 2)] if where == "in one process" else pool.submit(send_refusal, 2, ranks=2, fresh=True)
    for said in ranks:  # others hear of the cause
        assert "a block returned a Odd" in said
        assert "activation lane from rank 0 to rank 1" in said
