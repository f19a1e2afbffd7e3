"""A GPT whose output layer is divided among the stages, next to the whole one in plain torch."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.checkpoint.manager import Checkpoints
from penstock.errors import ConfigError
from penstock.models.gpt import gpt_blocks, language_loss
from penstock.models.gpt_shape import GPTConfig
from penstock.models.vocabulary_parallel_gpt import (
    CrossEntropyOfParts,
    HeadPart,
    summed_cross_entropy,
    vocabulary_parallel_gpt,
    whole_head,
)
from penstock.runtime.pipeline import Pipeline
from penstock.schedule.orders.vocabulary_parallel import vocabulary_1f1b
from support.pool import Pool
from support.schedules import make_schedule

SHAPE = GPTConfig(layers=4, width=16, heads=2, context=8, vocabulary=29)
M, BATCHES, CLIP = 4, 5, 0.5
Numbers = dict[str, Tensor]


@cache
def batches() -> list[list[tuple[Tensor, Tensor]]]:
    numbers = torch.Generator().manual_seed(1)
    pairs = torch.randint(SHAPE.vocabulary, (BATCHES, M, 2, 2, SHAPE.context), generator=numbers)
    return [[(x, y) for x, y in batch] for batch in pairs]


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-2, weight_decay=0.1)


@cache
def in_plain_torch() -> tuple[list[float], Numbers, Numbers]:
    """Losses, weights, and Adam's second moments; clipped in every batch."""
    model = nn.Sequential(*(block.make() for block in gpt_blocks(SHAPE, 0).values()))
    names = [f"{block}.{name}" for block, made in zip(gpt_blocks(SHAPE, 0), model, strict=True)
             for name, _ in made.named_parameters()]  # fmt: skip
    optimizer, losses = adamw(model.parameters()), []
    for batch in batches():
        parts = [language_loss(model(x), y) for x, y in batch]
        loss = sum(total for total, _ in parts) / sum(count for _, count in parts)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    weights = dict(zip(names, (p.detach() for p in model.parameters()), strict=True))
    return (
        losses,
        weights,
        {n: optimizer.state[p]["exp_avg_sq"] for n, p in zip(names, model.parameters(), strict=True)},
    )


def pipeline_of(stages: int, group: dist.ProcessGroup | None = None, **options: Any) -> Pipeline:
    blocks, partition = vocabulary_parallel_gpt(SHAPE, stages, seed=0)
    schedule = make_schedule("vocabulary-1f1b", stages, M)
    given = {
        "loss": summed_cross_entropy,
        "optimizer": adamw,
        "max_grad_norm": CLIP,
        "partition": partition,
        "group": group,
    }
    return Pipeline(blocks, schedule, **given | options)


def train(group: dist.ProcessGroup | None, stages: int, **options: Any) -> tuple[list[float | None], Numbers, Numbers]:
    pipeline = pipeline_of(stages, group, **options)
    losses = [report.loss for report in pipeline.run([[((x, y), y) for x, y in batch] for batch in batches()])]
    squares: Numbers = {}
    for optimizer in pipeline.optimizers().values():
        (named,) = optimizer.param_groups
        for name, p in zip(named["param_names"], named["params"], strict=True):
            squares[name] = optimizer.state[p]["exp_avg_sq"]
    return losses, pipeline.state_dict(), squares


def assert_near(found: Numbers, wanted: Numbers) -> None:
    found = whole_head(found)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.linalg.vector_norm(found[name] - value) <= 2e-5 * torch.linalg.vector_norm(value), name


@pytest.mark.long
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_a_divided_head_learns_like_a_whole_one(stages: int) -> None:
    """Losses, weights and moments, to rounding: 29 tokens of a vocabulary do not divide evenly."""
    losses, weights, squares = train(None, stages)
    wanted = in_plain_torch()
    assert losses == pytest.approx(wanted[0], rel=1e-6)
    assert_near(weights, wanted[1])
    assert_near(squares, wanted[2])


@pytest.mark.parametrize("options", [{}, {"recompute": "block"}], ids=["kept", "recomputed"])
def test_a_divided_head_between_processes(pool: Pool, options: dict[str, Any]) -> None:
    found = pool.submit(train_with, 3, options, ranks=3)
    weights, squares = ({name: value for each in found for name, value in each[place].items()} for place in (1, 2))
    assert_near(weights, in_plain_torch()[1])
    assert_near(squares, in_plain_torch()[2])
    assert found[2][0] == pytest.approx(in_plain_torch()[0], rel=1e-6)
    for rank, (_, own, _) in enumerate(found):
        assert [name for name in own if name.startswith("head.out.")] == [f"head.out.{rank}.weight"]


def train_with(group: dist.ProcessGroup, stages: int, options: dict[str, Any]) -> Any:
    return train(group, stages, **options)


def test_in_bf16_it_learns_nearly_the_same() -> None:
    losses, *_ = train(None, 2, precision="bf16")
    assert losses == pytest.approx(in_plain_torch()[0], rel=2e-2)


def test_no_rank_has_more_than_its_share_of_the_head() -> None:
    """Parameters with their optimizer state, and logits."""
    shape = GPTConfig(layers=2, width=8, heads=2, context=4, vocabulary=1000)
    blocks, partition = vocabulary_parallel_gpt(shape, 2, seed=0)
    pipeline = Pipeline(
        blocks, make_schedule(vocabulary_1f1b, 2, M), loss=summed_cross_entropy, optimizer=adamw, partition=partition
    )
    pair = torch.zeros(2, 4, dtype=torch.long), torch.ones(2, 4, dtype=torch.long)
    list(pipeline.run([[(pair, pair[1])] * M]))
    first, last = (pipeline.peak_bytes()[rank] for rank in (0, 1))
    head, embedding = 4 * 1000 * 8, 4 * 1000 * 8
    assert abs(first["weights"] - embedding - last["weights"]) < 1000
    assert head / 2 < last["weights"] < head


def test_a_checkpoint_goes_on(tmp_path: Any) -> None:
    data = [[((x, y), y) for x, y in batch] for batch in batches()]
    whole, first = pipeline_of(2), pipeline_of(2)
    list(whole.run(data))
    list(first.run(data[:2]))
    Checkpoints(first, tmp_path).save()
    second = pipeline_of(2)
    assert Checkpoints(second, tmp_path).load() is not None
    list(second.run(data[2:]))
    wanted = whole.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in second.state_dict().items())


def test_it_is_evaluated_like_a_whole_one() -> None:
    plain = Pipeline(gpt_blocks(SHAPE, 0), make_schedule("sequential", 1, M), loss=language_loss, optimizer=adamw)
    divided = pipeline_of(3).evaluate([[((x, y), y) for x, y in batch] for batch in batches()])
    assert divided == pytest.approx(plain.evaluate(batches()), rel=1e-6)


def test_parts_know_what_the_whole_knows() -> None:
    """In float64, with targets in the first part, in the last, and at both ends of each."""
    torch.manual_seed(0)
    parts = [HeadPart(SHAPE, place, 3).double() for place in range(3)]
    x, targets = (
        torch.randn(1, SHAPE.vocabulary, SHAPE.width, dtype=torch.float64),
        torch.arange(SHAPE.vocabulary)[None],
    )
    logits = x @ torch.cat([part.weight for part in parts]).T
    wanted = nn.functional.cross_entropy(logits[0], targets[0], reduction="none")
    assert torch.allclose(
        CrossEntropyOfParts()(tuple(part((x, targets)) for part in parts))[0].double(), wanted, rtol=1e-5
    )


@pytest.mark.parametrize(("layers", "vocabulary"), [(2, 29), (4, 2)])
def test_more_stages_than_there_is_to_divide(layers: int, vocabulary: int) -> None:
    shape = GPTConfig(layers, 8, 2, 4, vocabulary)
    with pytest.raises(ConfigError, match=f"{layers} layers and {vocabulary} tokens cannot be divided among 3 stages"):
        vocabulary_parallel_gpt(shape, 3, seed=0)


def test_more_than_ten_parts_are_put_together_in_their_order() -> None:
    state = {f"head.out.{place}.weight": torch.full((2, 3), float(place)) for place in range(11)}
    assert whole_head(state)["head.out.weight"][:, 0].tolist() == [float(place) for place in range(11) for _ in "ab"]


def test_a_model_is_not_cut_by_cost_for_it() -> None:
    with pytest.raises(
        ConfigError, match="vocabulary-1f1b: its 5 stages are no chain.*pass the blocks and the partition"
    ):
        Pipeline(
            gpt_blocks(SHAPE, 0), method="vocabulary-1f1b", stages=2, microbatches=M,
            loss=language_loss, optimizer=adamw,
        )  # fmt: skip


def test_a_balance_has_a_number_for_each_rank() -> None:
    assert vocabulary_parallel_gpt(SHAPE, 2, seed=0, balance=[4, 2]).partition == [4, 2, 1, 1, 1]
    with pytest.raises(ConfigError, match="balance must hold 2 positive numbers that add up to the 6 blocks"):
        vocabulary_parallel_gpt(SHAPE, 2, seed=0, balance=[4, 3])
