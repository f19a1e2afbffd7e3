"""Gradients added by torch's all_reduce: the same bits on all pipelines, and for two of them those of the reference."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from penstock.comm.collective.all_reduce import GlooReducer
from penstock.comm.core.rank_grid import Holder
from penstock.errors import ConfigError, PenstockError
from penstock.schedule.ir.schedule import Stage
from support.cases import Case, Outcome, assert_same, expected, make_batches, make_pipeline, train
from support.joined_pipelines import together
from support.pool import Pool
from support.runtime_faults import Fails, what_happens, with_block

SIZE = 100_003  # no multiple of anything that gloo might stage a tensor by
EPS = torch.finfo(torch.float32).eps


def reduces(group: dist.ProcessGroup) -> list[Tensor]:
    """What this rank brings, and its sums with that of the others: fast and ordered."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    members = tuple(Holder(r, Stage(0, 0, 0)) for r in range(ranks))
    brought = torch.randn(SIZE, generator=torch.Generator().manual_seed(rank))
    sums = []
    for groups in ({frozenset(range(ranks)): group}, {}):
        reducer, total = GlooReducer(lambda holder: holder.pipeline, group, groups), brought.clone()
        if rank > 0:
            dist.recv(torch.empty(1), group=group, group_src=0)
        ticket = reducer.reduce(members, members[rank], 0, [total])
        if rank == 0:  # it goes on while the others have yet to join
            assert not ticket.done
            for other in range(1, ranks):
                dist.send(torch.empty(1), group=group, group_dst=other)
        ticket.wait(20.0, "the test")
        reducer.close()
        sums.append(total)
    return [brought, *sums]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_get_the_same_bits_near_to_those_of_the_ordered_sum(pool: Pool, ranks: int) -> None:
    brought, fast, ordered = zip(*pool.submit(reduces, ranks=ranks), strict=True)
    assert all(torch.equal(total, fast[0]) for total in fast)
    assert all(torch.equal(total, ordered[0]) for total in ordered)
    assert torch.equal(fast[0], ordered[0]) == (ranks == 2)
    magnitudes = torch.stack(brought).abs().sum(0)
    assert ((fast[0] - ordered[0]).abs() <= (ranks - 1) * EPS * magnitudes).all()


@pytest.mark.parametrize("m", [2, 3])
@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_two_pipelines_of_two_stages(pool: Pool, method: str, m: int) -> None:
    case = Case(method, 2, m, width=2, reduce="fast", spans=(4, 3), clip=0.6)
    assert_same(together(pool.submit(train, case, ranks=4), case), expected(case))


def in_pairs(group: dist.ProcessGroup, case: Case) -> Outcome:
    """Half of the job trains two pipelines of one stage; so does the other half."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("half", "width", "depth"))["width", "depth"]
    return train(halves[dist.get_rank(group) // 2], case, mesh=mesh, width=1)


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_two_pipelines_of_one_stage_on_a_part_of_the_job(pool: Pool, method: str, m: int) -> None:
    case = Case(method, 1, m, width=2, reduce="fast", spans=(4, 3), clip=0.6)
    outcomes = pool.submit(in_pairs, case, ranks=4)
    for half in (outcomes[:2], outcomes[2:]):
        assert_same(together(half, case), expected(case))


def test_shared_parameters_are_added_after_it(pool: Pool) -> None:
    case = Case("2bw", 2, 2, width=2, reduce="fast", tied=True, clip=0.6)
    assert_same(together(pool.submit(train, case, ranks=4), case), expected(case))


@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_four_pipelines_stay_equal_and_near_the_reference(pool: Pool, method: str) -> None:
    case = Case(method, 1, 2, width=4, reduce="fast", optimizer="sgd", spans=(4, 3), clip=0.6)
    found, wanted = together(pool.submit(train, case, ranks=4), case), expected(case)
    assert found.rates == wanted.rates
    for values in ("gradients", "weights", "state", "decided"):
        a, b = getattr(found, values), getattr(wanted, values)
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.slow
def test_in_one_process_it_is_the_ordered_sum() -> None:
    case = Case("2bw", 2, 2, width=3, reduce="fast")
    found = train(None, case)
    found.gradients = found.gradients[: len(expected(case).gradients)]
    assert_same(found, expected(case))


def counts(group: dist.ProcessGroup, case: Case) -> tuple[int, int, int]:
    """Groups made with the pipeline and in all, and sums left to torch, in two runs."""
    with (
        patch.object(dist, "new_group", wraps=dist.new_group) as groups,
        patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sums,
    ):
        pipeline = make_pipeline(case, group)
        made = groups.call_count
        for _ in range(2):
            list(pipeline.run(make_batches(case)))
        return made, groups.call_count, sums.call_count


@pytest.mark.parametrize(("reduce", "wanted"), [("fast", (2, 2, 6)), ("ordered", (0, 0, 0))])
def test_groups_are_made_once_one_per_stage(pool: Pool, reduce: Any, wanted: tuple[int, int, int]) -> None:
    case = Case("2bw", 2, 2, width=2, reduce=reduce, spans=(3,))
    assert pool.submit(counts, case, ranks=4) == [wanted] * 4


def refused(group: dist.ProcessGroup, case: Case) -> str:
    try:
        make_pipeline(case, group)
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def test_groups_are_not_made_by_a_part_of_the_job(pool: Pool) -> None:
    """Torch wants every rank of the job when a group is made; a clear error is better than ranks that wait."""
    for said in pool.submit(refused, Case("1f1b", 1, 1, width=2, reduce="fast"), ranks=2):
        assert said.startswith("CapabilityError: reduce='fast' makes process groups, in which all 4 ranks of the")
        assert "the pipelines have only 2. Pass a device mesh" in said


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(ConfigError, match="reduce must be one of ordered, fast; got 'quick'"):
        make_pipeline(Case("1f1b", 2, 2), reduce="quick")


def loses_the_last(group: dist.ProcessGroup, case: Case, deed: str, timeout: float) -> tuple[str, str]:
    deeds = {"stalls": lambda: time.sleep(3.0), "dies": lambda: os.kill(os.getpid(), signal.SIGKILL)}
    block = Fails(2 * case.m, deeds[deed] if dist.get_rank(group) == case.width - 1 else lambda: None)
    return what_happens(group, case, make_batches(case), timeout, **with_block(0, block, case.depth))


def test_a_pipeline_that_stalls(pool: Pool) -> None:
    case = Case("1f1b", 1, 2, width=4, reduce="fast")
    said = pool.submit(loses_the_last, case, "stalls", 1.0, ranks=4, fresh=True)
    lane = r"the reduction lane of ranks 0, 1, 2, 3 \(batch 2\)"  # the rank and its thread wait for one second each
    broke = "(Timed out waiting 1000ms|Connection closed by peer)"  # the latter where another rank has given up before
    lost = f"stage 0, STEP2: (nothing moved on {lane} within 1 seconds|{lane} broke: {broke})"
    for rank in range(3):
        assert said[rank][0] == "TransportError"
        assert re.search(f"rank {rank}, {lost}", said[rank][1])


@pytest.mark.processes
def test_a_pipeline_that_dies() -> None:
    """The others notice the broken connection; they do not wait for the time-out."""
    case, alone = Case("1f1b", 1, 2, width=2, reduce="fast"), Pool(2)
    try:
        said = alone.submit(loses_the_last, case, "dies", 20.0, ranks=2, victims=[1])
    finally:
        alone.close()
    (kind, text), nothing = said
    assert nothing is None
    assert kind == "TransportError"
    assert "rank 0, stage 0, STEP2: the reduction lane of ranks 0, 1 (batch 2) broke: " in text
