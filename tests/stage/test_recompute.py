"""Forwards that are run again give the same numbers, keep less, and read the version that the schedule names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, ScheduleError
from penstock.schedule.ir.absolute_actions import actions_of
from penstock.schedule.ir.schedule import Op
from penstock.schedule.proof.check import check
from penstock.schedule.text_parser import parse_schedule
from penstock.schedule.transforms.recompute import with_recompute
from penstock.stage.autograd.recompute import RecomputeMode
from support.cases import (
    LENGTH,
    METHODS,
    VOCABULARY,
    WIDTH,
    Case,
    assert_equal_tensors,
    assert_same,
    expected,
    make_batches,
    make_pipeline,
    train,
    train_on_ranks,
)
from support.pool import Pool
from support.schedules import make_schedule
from support.smallest_batch import least

WAYS: tuple[RecomputeMode, ...] = ("block", "stage")


@pytest.mark.parametrize("recompute", WAYS)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("method", ["gpipe", "2bw", "stash"])
def test_the_numbers_are_the_same(pool: Pool, method: str, depth: int, recompute: RecomputeMode, device: str) -> None:
    """Dropout, batch statistics and clipping included."""
    m = max(least(method, depth), 2)
    case = Case(method, depth, m, model="restless", spans=(3, 2), recompute=recompute, clip=0.6, device=device)
    wanted = expected(case)
    assert_same(train(None, case), wanted)
    if (depth, device) == (2, "cpu"):
        assert_same(train_on_ranks(pool, case), wanted)


def peak(recompute: RecomputeMode, method: str = "gpipe") -> int:
    case = Case(method, 2, 8, model="gpt", spans=(2,), skips=(), recompute=recompute)
    pipeline = make_pipeline(case)
    list(pipeline.run(make_batches(case)))
    assert all(live["activations"] == 0 for live in pipeline.live_bytes().values())
    return pipeline.peak_bytes()[0]["activations"]


@pytest.mark.slow
def test_less_is_kept() -> None:
    """Per block only its input; per stage only the stage's input (tokens here), and one graph at a time."""
    none, block, stage = peak("none"), peak("block"), peak("stage")
    graph, tokens = none / 8, 2 * (LENGTH + 1) * 8
    assert stage == graph + 8 * tokens
    assert block < none / 8


def test_where_a_backward_follows_its_forward_nothing_is_run_again() -> None:
    schedule = with_recompute(make_schedule("1f1b", 3, 4))
    counts = [sum(a.op is Op.R for a in program.period) for program in schedule.programs]
    assert counts == [4, 4, 0]
    gpipe = with_recompute(make_schedule("gpipe", 3, 4))
    assert [sum(a.op is Op.R for a in program.period) for program in gpipe.programs] == [4, 4, 4]


@pytest.mark.parametrize("method", METHODS)
def test_a_recompute_reads_what_its_forward_read(method: str) -> None:
    m = least(method, 3) + 1
    plain, schedule = (f(make_schedule(method, 3, m)) for f in (lambda s: s, with_recompute))
    assert check(schedule).stages.keys() == check(plain).stages.keys()
    for rank in range(3):
        read = {a.unit.first: a.reads for a in actions_of(schedule, rank, 4) if a.op is Op.F}
        again = {a.unit.first: a.reads for a in actions_of(schedule, rank, 4) if a.op is Op.R}
        assert again.items() <= read.items()


class Counting(nn.Module):
    """A buffer that counts forwards, and one that never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("constant", torch.ones(WIDTH))
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        count, constant = self.get_buffer("count"), self.get_buffer("constant")
        self.seen.append(float(count))
        count += 1
        return x * self.scale * constant


@pytest.mark.parametrize("recompute", WAYS)
def test_buffers_are_updated_once_and_seen_as_they_were(recompute: RecomputeMode) -> None:
    case = Case("gpipe", 2, 3, spans=(1,), skips=())
    counting = Counting()
    blocks = {"table": nn.Embedding(13, WIDTH), "counting": counting, "head": nn.Linear(WIDTH, 13)}
    list(make_pipeline(case, blocks=blocks, balance=(2, 1), recompute=recompute).run(make_batches(case)))
    assert counting.seen == [0, 1, 2, 0, 1, 2]
    assert counting.get_buffer("count") == 3


class Late(nn.Module):
    """Changes its buffer only from the third forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 2:
            self.get_buffer("state").add_(1)
        return x


class Peak(nn.Module):
    """Remembers the largest value that it has seen, which few forwards change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("peak", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        peak = self.get_buffer("peak")
        if x.detach().max() > peak:
            peak.fill_(float(x.detach().max()))
        return x * peak.clone()


@pytest.mark.parametrize("recompute", ["block", "stage"])
def test_buffers_that_few_forwards_change(recompute: RecomputeMode) -> None:
    """The largest value grows in the first, third and fourth microbatch, while all of them wait for their backward."""
    case = Case("gpipe", 2, 4, spans=(1,), skips=())
    batch = [(tokens, target) for tokens, target in make_batches(case)[0]]
    weights = []
    for how in ("none", recompute):
        torch.manual_seed(1)
        table = nn.Embedding(VOCABULARY, WIDTH)
        with torch.no_grad():
            table.weight.copy_(torch.linspace(0.1, 1.0, VOCABULARY)[:, None] + 0.01 * torch.randn(VOCABULARY, WIDTH))
        largest = (4, 2, 7, 9)
        rising = [(torch.full_like(tokens, largest[k]), target) for k, (tokens, target) in enumerate(batch)]
        blocks = {"table": table, "peak": Peak(), "head": nn.Linear(WIDTH, VOCABULARY)}
        pipeline = make_pipeline(case, blocks=blocks, balance=(2, 1), recompute=how)
        list(pipeline.run([rising]))
        weights.append(pipeline.state_dict())
    assert_equal_tensors(weights[1], weights[0], "weights")


@pytest.mark.parametrize("recompute", ["block", "stage"])
def test_an_input_that_is_used_again_is_refused(recompute: RecomputeMode) -> None:
    """The next microbatch in the memory of the one before: autograd notices that only where graphs are kept."""
    case = Case("gpipe", 2, 3, spans=(1,), skips=())
    batch = make_batches(case)[0]
    memory = torch.empty_like(batch[0][0])

    blocks = {"table": nn.Embedding(VOCABULARY, WIDTH), "head": nn.Linear(WIDTH, VOCABULARY)}
    pipeline = make_pipeline(case, blocks=blocks, balance=(1, 1), recompute=recompute)

    class Batch(list[tuple[Tensor, Tensor]]):
        def __getitem__(self, k: Any) -> Any:
            memory.copy_(batch[k][0])
            return memory, batch[k][1]

    with pytest.raises(ConfigError, match="the input of a forward has been written into"):
        list(pipeline.run([Batch(batch)]))


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


@pytest.mark.parametrize(
    ("block", "message"),
    [(Late(), "changed buffer 'state' of a Late"), (InPlace(), "writes in place into its input")],
)
def test_what_cannot_be_run_again_is_refused(block: nn.Module, message: str) -> None:
    case = Case("gpipe", 2, 4, spans=(1,), skips=())
    blocks = {"odd": block, "table": nn.Embedding(13, WIDTH), "head": nn.Linear(WIDTH, 13)}
    pipeline = make_pipeline(case, blocks=blocks, balance=(2, 1), recompute="block")
    with pytest.raises(ConfigError, match=message):
        list(pipeline.run(make_batches(case)))


def test_choices_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="recompute must be one of none, block, stage, or a list"):
        make_pipeline(Case("1f1b", 2, 2), recompute="all")
    with pytest.raises(ConfigError, match="recomputes whole stages"):
        make_pipeline(Case("1f1b", 2, 2), method=with_recompute(make_schedule("1f1b", 2, 2)), recompute="block")


def test_a_schedule_that_recomputes_is_run_as_it_is() -> None:
    case = Case("1f1b", 2, 2, model="restless", spans=(3,))
    schedule = with_recompute(make_schedule("1f1b", 2, 2))
    pipeline = make_pipeline(case, method=schedule)
    assert pipeline.schedule == schedule
    list(pipeline.run(make_batches(case)))
    wanted = expected(case).weights
    assert all(torch.equal(pipeline.state_dict()[name], w) for name, w in wanted.items())


def test_rules_that_read_copies_place_their_own() -> None:
    golden = Path(__file__).parents[1] / "golden" / "xpipe.txt"
    with pytest.raises(ScheduleError, match="places its own recomputes"):
        with_recompute(parse_schedule(golden.read_text()))
