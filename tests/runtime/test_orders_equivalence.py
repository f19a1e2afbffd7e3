"""Every order of the literature trains a model to the same bits as plain gradient accumulation does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.schedule.ir.absolute_actions import actions_of
from penstock.schedule.ir.schedule import passes
from support.cases import Case, assert_same, expected, make_batches, make_pipeline, train, train_on_ranks
from support.order_cases import ORDERS, PAIRS, case_of
from support.pool import Pool
from support.schedules import make_schedule
from support.sharded import assert_as_whole, train_sharded

SHAPES = {
    "chimera": [(2, 2), (2, 5), (4, 6)],
    "dualpipe": [(2, 4), (2, 6), (4, 8)],
    "dualpipe-v": [(1, 2), (2, 5), (3, 6)],
    "bitpipe": [(2, 4), (4, 8)],
}
LOOPED = ("interleaved", "breadth-first", "zb-interleaved")
GRID = [(name, p, m) for name in ORDERS for p, m in SHAPES.get(name, [(1, 2), (2, 1), (2, 5), (3, 4)])]
ON_RANKS = [(name, 2, SHAPES.get(name, [(2, 4), (2, 4)])[1 if name == "dualpipe-v" else 0][1]) for name in ORDERS]
ON_FOUR = {"dualpipe": 8, "dualpipe-v": 8, "chimera": 6, "bitpipe": 6} | dict.fromkeys(("zb-auto", "v-min"), 5)
ON_RANKS += [(name, 4, ON_FOUR.get(name, 4)) for name in ORDERS if name != "bpipe"]  # test_parking.py has that


@pytest.mark.parametrize(("name", "p", "m"), GRID)
def test_orders_in_one_process(name: str, p: int, m: int, device: str) -> None:
    case = replace(case_of(name, p, m), device=device)
    assert_same(train(None, case), expected(case))


@pytest.mark.parametrize(("name", "p", "m"), ON_RANKS)
def test_orders_on_ranks(pool: Pool, name: str, p: int, m: int) -> None:
    case = replace(case_of(name, p, m), clip=0.6)
    case = replace(case, spans=(2,), skips=()) if p == 4 else case
    assert_same(train_on_ranks(pool, case), expected(case))


@pytest.mark.parametrize("name", ORDERS)
def test_what_was_run_is_the_table(name: str) -> None:
    """Pass by pass, on every rank, from batch to batch; a fused pair is run as its parts."""
    case = replace(case_of(name, 2, 4), spans=(2,), skips=())
    pipeline = make_pipeline(case)
    for _ in pipeline.run(make_batches(case)):
        pass
    timeline, kinds = pipeline.timeline(), ("F", "B", "I", "W")
    for rank in range(2):
        work = sorted(timeline.work(rank), key=lambda i: i.start)
        table = [part for action in actions_of(case.schedule, rank, 2) for part in passes(action) if part.op in kinds]
        wanted = [(part.op, part.stage.index, part.stage.direction, part.unit.first) for part in table]
        assert [(i.what, i.stage, i.direction, i.microbatch) for i in work if i.what in kinds] == wanted


@pytest.mark.parametrize("name", LOOPED)
@pytest.mark.parametrize(("p", "m", "chunks"), [(1, 3, 4), (2, 4, 3), (2, 3, 4)])
def test_any_number_of_chunks(name: str, p: int, m: int, chunks: int) -> None:
    case = Case(name, p, m, options=(("chunks", chunks),), spans=(4,))
    case = replace(case, model="long") if case.schedule.num_stages == 8 else case
    assert_same(train(None, case), expected(case))


OPTIONS = [
    ("breadth-first", 2, 5, {"group": 3}),
    ("breadth-first", 3, 5, {"group": 2}),
    ("interleaved", 2, 7, {"group": 3}),
    ("zb-interleaved", 2, 7, {"group": 3}),
    ("hanayo", 2, 4, {"waves": 2}),
    ("hanayo", 2, 5, {"in_flight": 1}),
    ("bitpipe", 2, 4, {"in_flight": 1}),
    ("zb-auto", 3, 6, {"limit": 1}),
    ("zb-auto", 2, 8, {"limit": 8, "held": 20, "hop": 3}),  # one rank runs seven messages ahead
]


@pytest.mark.parametrize(("name", "p", "m", "options"), OPTIONS)
def test_options_of_orders(name: str, p: int, m: int, options: dict[str, int]) -> None:
    """Groups of breadth-first (its hybrid with depth-first), several waves, few or many microbatches under way."""
    case = Case(name, p, m, options=tuple(options.items()), spans=(3, 2), skips=(3,))
    case = replace(case, model="long") if case.schedule.num_stages == 8 else case
    assert_same(train(None, case), expected(case))


@pytest.mark.parametrize(("p", "m", "chunks"), [(1, 2, 3), (2, 3, 2), (3, 4, 2), (2, 1, 2)])
def test_endless_breadth_first_has_the_numbers_of_2bw(p: int, m: int, chunks: int) -> None:
    """2bw-layered on whole state: batches overlap, and backwards through a rank's first chunk are put off."""
    case = Case("2bw-layered", p, m, spans=(3, 2), skips=(3,), clip=0.6, options=(("chunks", chunks),))
    whole = make_schedule(case.method, p, m, options={"chunks": chunks}, sharding="none")
    assert_same(train(None, case, method=whole), expected(case))


@pytest.mark.long
@pytest.mark.parametrize("level", ["optimizer", "gradients"])
def test_endless_breadth_first_divides_its_state(level: str) -> None:
    case = Case("2bw-layered", 2, 3, spans=(3, 2), skips=(3,), clip=0.6, width=2)
    outcome, parts, _ = train_sharded(None, case, level, method=make_schedule(case.method, 2, 3, sharding="none"))
    assert_as_whole(outcome, [parts], expected(case))


@pytest.mark.parametrize("m", [4, 8, 11])
def test_four_pipelines_of_chimera(m: int, device: str) -> None:
    """Two pairs: every rank holds four stages, every stage is held four times."""
    case = Case("chimera", 4, m, options=PAIRS, spans=(3, 2), skips=(3,), device=device)
    assert {len(case.schedule.on_rank(rank)) for rank in range(4)} == {case.schedule.directions} == {4}
    assert_same(train(None, case), expected(case))


@pytest.mark.parametrize("changes", [{"clip": 0.6}, {"recompute": "stage", "precision": "bf16"}])
def test_four_pipelines_of_chimera_on_ranks(pool: Pool, changes: dict[str, Any]) -> None:
    case = replace(Case("chimera", 4, 8, options=PAIRS, spans=(3, 2)), **changes)
    assert_same(train_on_ranks(pool, case), expected(case))
