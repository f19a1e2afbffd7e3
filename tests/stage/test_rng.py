"""Random numbers do not depend on depth, order or process, and nobody else's are touched."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.stage.rng import Draw, seed_of
from support.cases import METHODS, Case, assert_same, expected, make_batches, make_pipeline, train, train_on_ranks
from support.least import least
from support.pool import Pool

CASES = [(method, d) for method in METHODS for d in (1, 2, 4)]


@pytest.mark.parametrize(("method", "depth"), CASES)
def test_dropout_and_buffers_equal_the_reference(pool: Pool, method: str, depth: int, device: str) -> None:
    case = Case(method, depth, max(least(method, depth), 2), model="restless", spans=(3, 2), seed=7, device=device)
    wanted = expected(case)
    assert_same(train(None, case), wanted)
    if (depth, device) == (2, "cpu"):
        assert_same(train_on_ranks(pool, case), wanted)


@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_dropout_falls_alike_at_every_depth(method: str) -> None:
    """Losses of the first batch, which all read the same weights, are the same bits."""
    first = [train(None, Case(method, d, 4, model="restless", seed=3)).reports[0] for d in (1, 2, 3, 4)]
    assert first == [first[0]] * 4


def test_another_seed_is_another_run() -> None:
    a, b = (train(None, Case("1f1b", 2, 2, model="restless", seed=seed)).reports[0] for seed in (1, 2))
    assert a[1] != b[1]


def test_no_two_passes_draw_the_same() -> None:
    drawn: list[float] = []
    block = lambda x: drawn.append(float(torch.rand(()))) or x  # noqa: E731
    blocks = {"a": nn.Embedding(13, 13), "b": block, "c": lambda x: block(x)}
    case = Case("1f1b", 1, 3, spans=(4,), skips=())
    list(make_pipeline(case, blocks=blocks, balance=None).run(make_batches(case)))
    assert len(set(drawn)) == len(drawn) == 4 * 3 * 2


@pytest.mark.parametrize("recompute", ["none", "block", "stage"])
def test_the_generator_of_the_user_is_left_alone(recompute: str) -> None:
    """Data that is drawn while the pipeline runs is what it would be without it."""
    case = Case("2bw", 2, 2, model="restless", spans=(3,), skips=())
    pipeline = make_pipeline(case, recompute=recompute)
    torch.manual_seed(21)
    wanted = [torch.rand(2).tolist() for _ in range(8)]
    torch.manual_seed(21)
    found = [torch.rand(2).tolist()]
    for _ in pipeline.run(make_batches(case)):
        found.append(torch.rand(2).tolist())
    pipeline.evaluate(make_batches(case)[:1])
    found.append(torch.rand(2).tolist())
    assert found == wanted[:5]


def test_the_seed_of_a_pass_is_what_the_documentation_says() -> None:
    """Computed with Python's hashlib by hand, so that runs can be reproduced elsewhere and later."""
    assert seed_of(0, "layers.3", Draw(12, 5)) == 6746180157032014177
    assert len({seed_of(s, b, Draw(t, k)) for s in (0, 1) for b in "ab" for t in (0, 1, 11) for k in (0, 1, 11)}) == 36
