"""Parallel pipelines: every number equals the reference that adds the parts of a batch in their order, bit for bit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from penstock.comm.collective.all_reduce import GlooReducer
from penstock.errors import ConfigError, DataError
from penstock.schedule.ir.schedule import Op
from penstock.verify.reference import Scaling
from support.cases import (
    METHODS,
    VOCABULARY,
    WIDTH,
    Case,
    assert_same,
    expected,
    make_batches,
    make_pipeline,
    train,
)
from support.joined_pipelines import together
from support.pool import Pool
from support.schedules import make_schedule
from support.smallest_batch import least

SHAPES = [(1, 2), (1, 3), (2, 1), (2, 2), (3, 1), (4, 1)]  # depth, width


@pytest.mark.parametrize(("depth", "width"), [s for s in SHAPES if s[1] > 1])
@pytest.mark.parametrize("method", METHODS)
def test_parallel_pipelines_in_one_process(method: str, depth: int, width: int) -> None:
    case = Case(method, depth, least(method, depth) + 1, width=width, spans=(4, 3))
    found, wanted = train(None, case), expected(case)
    found.gradients = found.gradients[: len(wanted.gradients)]
    assert_same(found, wanted)


@pytest.mark.parametrize(
    ("method", "depth", "width"),
    [(method, 2, 2) for method in METHODS] + [("2bw", 1, 2), ("2bw", 1, 3), ("1f1b", 1, 4)],
)
def test_parallel_pipelines_on_ranks(pool: Pool, method: str, depth: int, width: int) -> None:
    case = Case(method, depth, least(method, depth) + 1, width=width, spans=(4, 3), clip=0.4)
    found, wanted = together(pool.submit(train, case, ranks=depth * width), case), expected(case)
    assert sum(norm > 0.4 for _, _, norm, _, _ in wanted.decided) >= len(wanted.decided) / 2
    assert_same(found, wanted)


@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_dropout_scales_and_overflows(pool: Pool, method: str) -> None:
    scaling = Scaling(2.0**24, 2.0, 0.5, 2)
    case = Case(method, 2, 2, model="half", width=2, spans=(6,), scaling=scaling, clip=0.6, recompute="block", seed=4)
    wanted = expected(case)
    assert any(skipped for *_, skipped in wanted.decided)
    assert_same(together(pool.submit(train, case, ranks=4), case), wanted)


def test_more_pipelines_than_a_batch_has_parts_for() -> None:
    case = Case("1f1b", 2, 2, width=2, spans=(1,))
    pipeline = make_pipeline(case)
    with pytest.raises(DataError, match="batch 0 has 2 microbatches, but the schedule takes 2 per batch and pipeline"):
        list(pipeline.run([make_batches(case)[0][:2]]))


@pytest.mark.parametrize(("method", "width"), [("1f1b", 2), ("2bw", 3), ("chimera", 1), ("dualpipe", 2)])
def test_what_is_written_into_the_first_weights_is_for_all(method: str, width: int) -> None:
    """Between two runs, of all copies of a stage; without a state of the optimizer it is a new beginning."""
    case = Case(method, 2, 4, width=width, rate=False, spans=(6,))
    used, new = (make_pipeline(case, optimizer=lambda named: torch.optim.SGD(named, lr=0.1)) for _ in range(2))
    batches = make_batches(case)
    list(used.run(batches[:3]))
    for pipeline in (used, new):
        draw = torch.Generator().manual_seed(5)
        for name, weight in sorted(pipeline.state_dict().items()):
            if "running" not in name and weight.is_floating_point():
                weight.copy_(0.1 * torch.randn(weight.shape, generator=draw))
    if method == "2bw":  # or it would go on with what came before as well
        used.switch(used.proof)
    for pipeline in (used, new):
        list(pipeline.run(batches[3:]))
        stores = [(n.index, r.weights.store) for w in pipeline._ranks for n, r in w.stages.items()]
        for index, store in stores:
            (first, *_) = (other for where, other in stores if where == index)
            assert all(map(torch.equal, store.master.flats, first.master.flats))
    for name, weight in used.state_dict().items():
        assert torch.equal(weight, new.state_dict()[name])


@pytest.mark.parametrize("width", [0, -1, 1.5, True])
def test_a_width_that_makes_no_sense(width: Any) -> None:
    with pytest.raises(ConfigError, match="width must be a whole number"):
        make_pipeline(Case("1f1b", 2, 2), width=width)


def wrong_size(group: dist.ProcessGroup, case: Case) -> str:
    try:
        make_pipeline(case, group)
    except ConfigError as error:
        return str(error)
    return "nothing"


def test_a_group_of_another_size(pool: Pool) -> None:
    (said, *_) = pool.submit(wrong_size, Case("1f1b", 2, 2, width=2), ranks=3)
    assert said.startswith(
        "the schedule has 2 ranks times 2 parallel pipelines, the process group 3; start 4 processes"
    )


def stops_somewhere(group: dist.ProcessGroup, case: Case, who: int, nap: float = 0.0) -> list[int]:
    pipeline, seen = make_pipeline(case, group), []
    for report in pipeline.run(slowly(make_batches(case), nap)):
        seen.append(report.batch)
        if report.batch == 2 and dist.get_rank(group) == who:
            pipeline.stop()
    return [*seen, pipeline.batches]


def leaves_somewhere(group: dist.ProcessGroup, case: Case, who: int) -> list[int]:
    pipeline = make_pipeline(case, group)
    for report in pipeline.run(make_batches(case)):
        if report.batch == 2 and dist.get_rank(group) == who:
            break
    return [pipeline.batches]


@pytest.mark.parametrize("who", [0, 1, 2, 3])
@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_any_rank_may_stop_parallel_pipelines(pool: Pool, method: str, who: int) -> None:
    """All ranks end after the same batch, long before the data ends."""
    case = Case(method, 2, 2, width=2, spans=(40,), skips=())
    for function in (stops_somewhere, leaves_somewhere):
        ends = pool.submit(function, case, who, ranks=4)
        assert len({end[-1] for end in ends}) == 1
        assert 3 <= ends[0][-1] <= 8


def slowly(batches: list[Any], nap: float) -> Iterator[Any]:
    for batch in batches:
        time.sleep(nap)
        yield batch


def stops_amid_slow_sums(group: dist.ProcessGroup, case: Case, seconds: float) -> int:
    """Rank 1 hands in its share of a batch, then it stops, then the sum of that batch's gradients is there."""
    add = GlooReducer._add

    def add_slowly(self: GlooReducer, *arguments: Any) -> Iterator[None]:
        time.sleep(seconds)
        return add(self, *arguments)

    GlooReducer._add = add_slowly  # type: ignore[method-assign]
    try:
        return stops_somewhere(group, case, 1, nap=0.05)[-1]
    finally:
        GlooReducer._add = add  # type: ignore[method-assign]


@pytest.mark.parametrize("method", [pytest.param("1f1b", marks=pytest.mark.long), "2bw"])
def test_a_run_ends_after_the_same_batch_however_fast_its_sums_are(pool: Pool, method: str) -> None:
    case = Case(method, 2, 4, width=2, spans=(40,), skips=())
    fast, slow = (pool.submit(stops_amid_slow_sums, case, seconds, ranks=4) for seconds in (0.0, 0.5))
    assert fast == slow


def evaluates(group: dist.ProcessGroup | None, case: Case) -> tuple[float, float] | None:
    return make_pipeline(case, group).evaluate(make_batches(case))


def test_evaluation_covers_all_parts_and_every_rank_hears(pool: Pool) -> None:
    case = Case("2bw", 2, 2, width=2, spans=(3,))
    wanted = evaluates(None, case)
    wide = Case("2bw", 2, 4, spans=(3,))
    assert wanted is not None
    assert wanted == pytest.approx(evaluates(None, wide))
    assert pool.submit(evaluates, case, ranks=4) == [wanted] * 4


def test_every_update_waits_for_its_reduction() -> None:
    wide, narrow = make_pipeline(Case("2bw", 2, 2, width=2)), make_pipeline(Case("2bw", 2, 2))
    for program in wide.schedule.programs:
        operations = [action.op for action in program.period]
        assert operations.count(Op.REDUCE) == operations.count(Op.DECIDE) == operations.count(Op.STEP) == 1
        assert operations.index(Op.DECIDE) == operations.index(Op.REDUCE) + 1
    assert narrow.schedule == make_schedule("2bw", 2, 2)


def test_the_timeline_has_a_row_for_every_rank_of_every_pipeline() -> None:
    case = Case("2bw", 2, 2, width=2, spans=(3,))
    pipeline = make_pipeline(case)
    list(pipeline.run(make_batches(case)))
    timeline = pipeline.timeline()
    assert timeline.ranks == 4
    for rank in range(4):
        kinds = [i.what for i in timeline.intervals if i.rank == rank and i.lane == "collective"]
        assert kinds.count("REDUCE") == kinds.count("DECIDE") == 3
        peers = {i.peer for i in timeline.intervals if i.rank == rank and i.peer >= 0}
        assert peers == {rank ^ 1}  # of the same pipeline, counted through both
    assert set(pipeline.peak_bytes()) == {0, 1, 2, 3}
    assert torch.is_grad_enabled()


def differ(group: dist.ProcessGroup, case: Case) -> str:
    torch.manual_seed(dist.get_rank(group) // case.depth)
    blocks = [nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)]
    try:
        make_pipeline(case, group, blocks=blocks, balance=None)
    except ConfigError as error:
        return str(error)
    return "accepted"


def test_pipelines_that_begin_with_other_weights_are_refused(pool: Pool) -> None:
    said = pool.submit(differ, Case("1f1b", 2, 2, width=2), ranks=4)
    assert all(
        "stage 0 does not begin with the same weights on ranks 0 and 2: call torch.manual_seed" in text for text in said
    )


def test_parallel_pipelines_draw_random_numbers_of_their_own() -> None:
    """Dropout and noise of a microbatch go by its place in the whole batch; statistics are those of one pipeline."""
    case = Case("2bw", 2, 2, "restless", width=2, seed=3)
    found, wanted = train(None, case), expected(case)
    wanted.weights = {name: w for name, w in wanted.weights.items() if "running" not in name and "num_" not in name}
    assert_same(found, wanted)
