"""Random numbers do not depend on depth, order or process, and nobody else's are touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.stage.blocks.rng import BlockRng, RngKey, may_draw, seed_of
from support.cases import (
    METHODS,
    WIDTH,
    Case,
    assert_same,
    expected,
    make_batches,
    make_pipeline,
    mixed,
    train,
    train_on_ranks,
)
from support.pool import Pool
from support.smallest_batch import least

CASES = [(method, d) for method in METHODS for d in (1, 2, 4)]


@pytest.mark.parametrize(("method", "depth"), CASES)
def test_dropout_and_buffers_equal_the_reference(pool: Pool, method: str, depth: int, device: str) -> None:
    case = Case(method, depth, max(least(method, depth), 2), model="restless", spans=(3, 2), seed=7, device=device)
    wanted = expected(case)
    assert_same(train(None, case), wanted)
    if (depth, device) == (2, "cpu"):
        assert_same(train_on_ranks(pool, case), wanted)


@pytest.mark.slow
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
    assert seed_of(0, "layers.3", RngKey(12, 5)) == 6746180157032014177
    assert (
        len({seed_of(s, b, RngKey(t, k)) for s in (0, 1) for b in "ab" for t in (0, 1, 11) for k in (0, 1, 11)}) == 36
    )


def drawn_blocks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of blocks that are seeded from now on, in order."""
    seeded: list[str] = []
    seed_block = BlockRng.seed_block

    def recorded(self: BlockRng, block: str, key: RngKey) -> None:
        seeded.append(block)
        seed_block(self, block, key)

    monkeypatch.setattr(BlockRng, "seed_block", recorded)
    return seeded


class Custom(nn.Linear):
    """A subclass may do anything."""


@pytest.mark.parametrize(
    ("block", "wanted"),
    [
        (nn.Linear(2, 2), False),
        (nn.Sequential(nn.Embedding(3, 2), nn.Sequential(nn.LayerNorm(2), nn.GELU()), nn.BatchNorm1d(2)), False),
        (torch.tanh, False),
        (nn.CrossEntropyLoss(), False),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)), True),
        (nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.RReLU())), True),
        (nn.MultiheadAttention(2, 1), True),
        (nn.Sequential(Custom(2, 2)), True),
        (lambda x: x, True),
        (F.dropout, True),
    ],
)
def test_only_what_torch_shows_to_be_deterministic_is_not_seeded(block: Any, wanted: bool) -> None:
    assert may_draw(block) is wanted


def test_a_layer_with_a_hook_or_a_forward_of_its_own_may_draw() -> None:
    hooked, patched = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
    handle = hooked[0].register_forward_pre_hook(lambda *_: None)
    assert may_draw(hooked)
    handle.remove()
    assert not may_draw(hooked)
    patched.forward = lambda x: F.dropout(x)  # type: ignore[method-assign]
    assert may_draw(patched)
    everywhere = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert may_draw(nn.Linear(2, 2))
    everywhere.remove()


@pytest.mark.parametrize("how", ["hook", "submodule"])
def test_what_begins_to_draw_in_the_middle_of_a_run_is_seeded_from_there(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not draw from the generator of the user, and draws the same at another depth."""

    def run(depth: int) -> tuple[list[float | None], Tensor]:
        torch.manual_seed(5)
        case = Case("1f1b", depth, 2, spans=(4,), skips=())
        layer = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        blocks = mixed() | {"tanh": layer}
        pipeline, losses = make_pipeline(case, blocks=blocks), []
        torch.manual_seed(9)
        for report in pipeline.run(make_batches(case)):
            losses.append(report.loss)
            if report.batch == 1 and how == "hook":
                layer.register_forward_hook(lambda _module, _given, made: F.dropout(made, 0.4))
            elif report.batch == 1:
                layer.append(nn.Dropout(0.4))
        return losses, torch.rand(3)

    seeded = drawn_blocks(monkeypatch)
    (losses, after), (deeper, deeper_after) = run(1), run(2)
    assert seeded.count("tanh") == 2 * 2 * 2  # depths, batches, microbatches
    assert losses == deeper
    torch.manual_seed(9)
    wanted = torch.rand(3)
    assert torch.equal(after, wanted)
    assert torch.equal(deeper_after, wanted)


def test_a_block_that_is_called_like_the_loss_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded = drawn_blocks(monkeypatch)
    case = Case("1f1b", 1, 2, spans=(1,), skips=())
    blocks = {"loss" if name == "tanh" else name: block for name, block in mixed().items()} | {
        "loss": nn.Dropout(0.5),
        "after": torch.tanh,
    }
    list(make_pipeline(case, blocks=blocks, balance=None).run(make_batches(case)))
    assert seeded.count("loss") == 2 * 2  # block and loss of two microbatches
