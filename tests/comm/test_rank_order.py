"""The order in which ranks are numbered, those of a pipeline or replicas of a stage in a row: the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import penstock
from penstock.comm.core.rank_grid import RankGrid, RankKey
from penstock.comm.transports import NcclTransports
from penstock.errors import ConfigError
from penstock.options.parallelism import DataParallel
from penstock.runtime.pipeline import Pipeline
from penstock.schedule.ir.rank_numbers import RANK_ORDERS, RankNumbers
from support.cases import Case, Outcome, assert_same, expected, make_batches, make_pipeline, train
from support.joined_pipelines import together
from support.pool import Pool

REPLICAS_FIRST = "tp-dp-pp"
CASE = Case("1f1b", 2, 2, width=2, clip=0.6)


def by_pipeline(found: list[Any], case: Case) -> list[Any]:
    """What the ranks of a job have returned, pipeline by pipeline."""
    numbers = RankNumbers(case.width, case.depth, REPLICAS_FIRST)
    return [found[number] for pipeline in range(case.width) for number in numbers.of_pipeline(pipeline)]


@pytest.mark.parametrize("order", RANK_ORDERS)
@pytest.mark.parametrize(("width", "depth"), [(1, 3), (3, 1), (2, 3)])
def test_every_rank_has_one_number(order: Any, width: int, depth: int) -> None:
    numbers = RankNumbers(width, depth, order)
    places = [numbers.place(number) for number in range(width * depth)]
    assert [numbers.number(*place) for place in places] == list(range(width * depth))
    assert sorted(places) == [(pipeline, rank) for pipeline in range(width) for rank in range(depth)]
    assert sorted(places, key=lambda place: place[:: 1 if order == "tp-pp-dp" else -1]) == places
    assert [numbers.place(n) for n in numbers.of_pipeline(width - 1)] == [(width - 1, rank) for rank in range(depth)]
    assert [numbers.place(n) for n in numbers.of_rank(depth - 1)] == [(p, depth - 1) for p in range(width)]


def test_tensor_ranks_stay_next_to_each_other() -> None:
    """Of all tensor ranks together a rank's number counts first, whatever the order."""
    grid = RankGrid(RankNumbers(2, 2, REPLICAS_FIRST), None, 1.0)
    assert [grid.global_rank(key) for key in grid.local] == [0, 2, 1, 3]
    assert grid.local == [RankKey(0, 0), RankKey(0, 1), RankKey(1, 0), RankKey(1, 1)]


@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_one_process_gives_the_same_numbers_in_either_order(method: str) -> None:
    case = Case(method, 2, 2, width=2, clip=0.6)
    pipeline = make_pipeline(case, rank_order=REPLICAS_FIRST)
    assert_same(train(None, case, rank_order=REPLICAS_FIRST), expected(case))
    list(pipeline.run(make_batches(case)))
    rows = {each.rank: each.stage for each in pipeline.timeline().work()}
    assert rows == {0: 0, 1: 0, 2: 1, 3: 1}


@pytest.mark.parametrize(("method", "reduce"), [("chimera", "ordered"), ("2bw", "fast")])
def test_ranks_give_the_same_numbers_in_either_order(pool: Pool, method: str, reduce: Any) -> None:
    case = Case(method, 2, 2, width=2, clip=0.6, reduce=reduce)
    found = pool.submit(in_order, case, ranks=4)
    assert_same(together(by_pipeline(found, case), case), expected(case))


def in_order(group: dist.ProcessGroup, case: Case) -> Outcome:
    return train(group, case, rank_order=REPLICAS_FIRST)


def over_split_lanes(group: dist.ProcessGroup, case: Case) -> Outcome:
    def chosen(pipeline: Pipeline) -> NcclTransports:
        assert pipeline.grid.control is not None
        return NcclTransports(pipeline.grid, pipeline.grid.control, torch.device("cpu"), "gloo")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pipeline, "_choose_transports", chosen)
        return train(group, case, rank_order=REPLICAS_FIRST)


def test_lanes_of_their_own_in_the_other_order(pool: Pool) -> None:
    found = pool.submit(over_split_lanes, CASE, ranks=4, fresh=True)
    assert_same(together(by_pipeline(found, CASE), CASE), expected(CASE))


def on_a_mesh_with_depth_first(group: dist.ProcessGroup) -> tuple[str, Outcome]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("depth", "width"))
    return repr(make_pipeline(CASE, None, mesh=mesh, width=1).grid), train(None, CASE, mesh=mesh, width=1)


def test_a_mesh_says_the_order(pool: Pool) -> None:
    found = by_pipeline(pool.submit(on_a_mesh_with_depth_first, ranks=4), CASE)
    assert [text.partition("this is ")[2] for text, _ in found[1:3]] == [
        "RankKey(pipeline=0, rank=1)>",
        "RankKey(pipeline=1, rank=0)>",
    ]
    assert_same(together([outcome for _, outcome in found], CASE), expected(CASE))


def in_flight_and_more(group: dist.ProcessGroup) -> list[Any]:
    """What ranks measure of messages and gather, who reports, and what traces say of the other end of a message."""
    case = Case("1f1b", 2, 4, width=2)
    pipeline = make_pipeline(
        case, group, rank_order=REPLICAS_FIRST, microbatches=4, in_flight="auto", method="1f1b", stages=2
    )
    reports = list(pipeline.run(make_batches(case) * 3))
    sends = {(i.rank, i.peer) for i in pipeline.timeline().intervals if i.what == "SEND"}
    assert pipeline.in_flight is not None
    assert pipeline.in_flight.measured.message > 0
    pipeline.switch("gpipe")
    loss = pipeline.evaluate(make_batches(case)[:1])
    whole = sorted(pipeline.full_state_dict())
    return [reports[0].loss is not None, sorted(sends), loss, whole]


@pytest.mark.long
def test_measured_messages_traces_and_gathers_in_the_other_order(pool: Pool) -> None:
    found = pool.submit(in_flight_and_more, ranks=4)
    assert [reports for reports, *_ in found] == [False, False, True, True]
    assert found[0][1] == [(0, 2), (1, 3), (2, 0), (3, 1)]
    assert len({loss for _, _, loss, _ in found}) == 1
    assert found[0][3] == sorted(make_pipeline(CASE).full_state_dict())


def trained(group: dist.ProcessGroup, folder: str, order: str, batches: int) -> Outcome:
    """Go on from the newest checkpoint, if there is one, with state that pipelines divide among them."""
    pipeline = make_pipeline(CASE, group, rank_order=order, sharding="gradients")
    checkpoints = penstock.Checkpoints(pipeline, Path(folder))
    checkpoints.load()
    list(pipeline.run(make_batches(CASE)[pipeline.batches : batches]))
    checkpoints.save()
    return Outcome(weights=dict(pipeline.state_dict()))


@pytest.mark.long
def test_checkpoints_do_not_depend_on_the_order(pool: Pool, tmp_path: Path) -> None:
    half, all_ = 1, len(make_batches(CASE))
    pool.submit(trained, str(tmp_path / "a"), RANK_ORDERS[0], half, ranks=4)
    resumed = by_pipeline(pool.submit(trained, str(tmp_path / "a"), REPLICAS_FIRST, all_, ranks=4), CASE)
    straight = pool.submit(trained, str(tmp_path / "b"), RANK_ORDERS[0], all_, ranks=4)
    for there, here in zip(resumed, straight, strict=True):
        assert there.weights.keys() == here.weights.keys()
        assert all(torch.equal(there.weights[name], here.weights[name]) for name in here.weights)


def test_an_order_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match="rank_order must be 'tp-pp-dp' or 'tp-dp-pp', got 'tp-pp'. Did you mean"):
        DataParallel(2, rank_order="tp-pp")  # type: ignore[arg-type]
