"""State sharded over the copies of stages that a bidirectional pipeline holds, and over parallel ones of these."""

from __future__ import annotations

from functools import cache

import pytest

from penstock.errors import ScheduleError
from penstock.schedule.add_options import extend
from penstock.schedule.ir.schedule import Op
from penstock.schedule.proof.check import check
from penstock.schedule.text_parser import parse_schedule
from support.cases import Case, expected, make_batches, make_pipeline
from support.pool import Pool
from support.schedules import make_schedule
from support.sharded import assert_as_whole, train_sharded

CLIP = 0.4  # of most batches
CASES = [
    Case("chimera", 2, 4, clip=CLIP, spans=(4, 3)),
    Case("chimera", 2, 2, width=2, spans=(4,)),
    Case("chimera", 4, 4, "mixed", "configured muon", spans=(3,)),
    Case("dualpipe", 2, 4, clip=CLIP, spans=(4,)),
    Case("chimera", 2, 2, "mixed", "momentum", clip=CLIP, spans=(4,), precision="bf16"),
    Case("bitpipe", 2, 4, clip=CLIP, spans=(4,)),
]
said = cache(expected)


@pytest.mark.parametrize("level", ["optimizer", "gradients"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.method}-{c.depth}-{c.width}-{c.optimizer}-{c.precision}")
def test_sharded_directions_have_the_numbers_of_the_reference(case: Case, level: str) -> None:
    outcome, parts, _ = train_sharded(None, case, level)
    assert_as_whole(outcome, [parts], said(case))


@pytest.mark.parametrize("method", ["chimera", "bitpipe", "dualpipe"])
@pytest.mark.parametrize("level", ["optimizer", "gradients"])
def test_ranks_begin_gathers_in_one_order(method: str, level: str) -> None:
    """Ranks that hold the same stages, each behind its last STEP; so nobody waits for a gather that waits for him."""
    proof = extend(make_schedule(method, 4, 8), sharding=level)
    orders = [[a.stage.index for a in p.period if a.op is Op.GATHER] for p in proof.schedule.programs]
    assert all(order == sorted(order) and order for order in orders)
    for program in proof.schedule.programs:
        ops = [a.op for a in program.period]
        assert ops.index(Op.GATHER) > max(i for i, op in enumerate(ops) if op is Op.STEP)


def test_gathers_in_two_orders_are_refused() -> None:
    """As the ranks of Chimera step their stages: the one that they both hold first, the other one second."""
    text = str(extend(make_schedule("chimera", 2, 2), sharding="optimizer").schedule)
    assert "GATHER[t]@0^t+1 GATHER[t]@1.1^t+1" in text
    with pytest.raises(ScheduleError, match="all ranks of a group must issue collectives in one order"):
        check(parse_schedule(text.replace("GATHER[t]@0^t+1 GATHER[t]@1.1^t+1", "GATHER[t]@1.1^t+1 GATHER[t]@0^t+1")))


def test_each_copy_has_a_share() -> None:
    """Of the optimizer's state, in one pipeline of Chimera without others: a half."""
    held = []
    for level in ("none", "gradients"):
        case = Case("chimera", 2, 2, "gpt", "momentum", "even", spans=(2,), skips=())
        pipeline = make_pipeline(case, sharding=level)
        for _ in pipeline.run(make_batches(case)):
            pass
        held.append([pipeline.live_bytes()[rank]["optimizer"] for rank in range(2)])
    assert held[1] == [pytest.approx(whole / 2, rel=0.1) for whole in held[0]]


@pytest.mark.long
def test_directions_share_state_between_processes(pool: Pool) -> None:
    for case, level in ((CASES[0], "gradients"), (CASES[1], "optimizer")):
        results = pool.submit(train_sharded, case, level, ranks=case.depth * case.width)
        weights = results[0][0]
        for outcome, _, _ in results:
            weights.weights |= outcome.weights
        assert_as_whole(weights, [parts for _, parts, _ in results], said(case))
