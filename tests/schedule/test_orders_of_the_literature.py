"""Every order is the one that its source prints, pass by pass, and legal for every number of microbatches it takes."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError, ScheduleError
from penstock.schedule.build import call_order, prove
from penstock.schedule.ir.schedule import Action, Op, Schedule, passes
from penstock.schedule.orders import ORDERS
from penstock.schedule.text_parser import parse_schedule
from support.worked_orders import CHIMERA, SEQ1F1B, WORKED


def printed(action: Action, first: dict[int, int], chunks: bool) -> str:
    """As sources print it; directions count their own microbatches."""
    if action.parts:
        return "[" + "+".join(printed(part, first, chunks) for part in action.parts) + "]"
    stage, unit = action.stage, action.unit
    text = f"{action.op}{unit.first - first.get(stage.direction, 0)}"
    if unit.slice is not None:
        text += f".{unit.slice[0]}"
    if chunks:
        return text + "'" * (stage.index >= 4)
    return text + ("" if len(first) == 1 else "><"[stage.direction])


def order_of(name: str, p: int, m: int, rank: int, first: dict[int, int], chunks: bool = False) -> str:
    period = call_order(ORDERS[name], p, m).programs[rank].period
    return " ".join(printed(action, first, chunks) for action in period)


@pytest.mark.parametrize(("name", "rank"), [(name, rank) for name, ranks in WORKED.items() for rank in ranks])
def test_it_is_the_order_of_its_source(name: str, rank: int) -> None:
    first = {0: 0, 1: 4} if name == "dualpipe" else {0: 0}
    assert order_of(name, 4, 8, rank, first, chunks=name != "dualpipe") == WORKED[name][rank]


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_the_order_of_chimera(rank: int) -> None:
    assert order_of("chimera", 4, 4, rank, {0: 0, 1: 2}) == CHIMERA[rank]


@pytest.mark.parametrize("rank", SEQ1F1B)
def test_seq1f1b(rank: int) -> None:
    assert order_of("seq1f1b", 4, 4, rank, {0: 0}) == SEQ1F1B[rank]


ANY_M = ("interleaved", "breadth-first", "zb-h1", "zb-h2", "zb-interleaved", "zb-v", "v-half", "v-min", "v-auto",
         "hanayo", "seq1f1b", "terapipe", "bpipe")  # fmt: skip


def same_counts(schedule: Schedule, m: int) -> None:
    """Every pass of every microbatch once on every stage: the checker's own count is not asked."""
    found: dict[tuple[Op, int, int], int] = {}
    for program in schedule.programs:
        for action in program.period:
            for p in passes(action):
                if p.op in (Op.F, Op.B, Op.W):
                    key = (Op.F if p.op is Op.F else Op.B, p.stage.index, p.unit.first)
                    found[key] = found.get(key, 0) + 1
    wanted = {(op, index, k) for op in (Op.F, Op.B) for index in range(schedule.num_stages) for k in range(m)}
    assert found.keys() == wanted
    assert set(found.values()) == {schedule.slices}


@pytest.mark.parametrize("name", ANY_M)
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_any_number_of_microbatches_is_legal(name: str, p: int) -> None:
    for m in (1, 2, 3, 5, 8):
        schedule = prove(ORDERS[name], p, m).schedule
        same_counts(schedule, m)
        assert parse_schedule(str(schedule)) == schedule


DEEP = [(name, p, m) for name in ANY_M for p, m in ((6, 12), (8, 17))] + [("hanayo", 16, 48), ("bitpipe", 16, 32)]


@pytest.mark.parametrize(("name", "p", "m"), DEEP)
def test_deeper_pipelines_are_legal_too(name: str, p: int, m: int) -> None:
    """Their lanes have room for what is under way there."""
    same_counts(prove(ORDERS[name], p, m).schedule, m)


@pytest.mark.parametrize(
    ("name", "legal"),
    [
        ("chimera", [(2, 2), (2, 5), (4, 4), (4, 6), (4, 7), (6, 12)]),
        ("dualpipe", [(2, 4), (2, 6), (4, 8), (4, 10), (6, 12)]),
        ("dualpipe-v", [(1, 2), (2, 4), (2, 5), (3, 6), (4, 9)]),
        ("bitpipe", [(2, 2), (2, 4), (4, 4), (4, 8), (4, 10)]),
    ],
)
def test_two_directions_and_pairs(name: str, legal: list[tuple[int, int]]) -> None:
    for p, m in legal:
        same_counts(prove(ORDERS[name], p, m).schedule, m)


@pytest.mark.parametrize(
    ("stages", "pairs", "legal"), [(4, 2, [4, 5, 8]), (8, 2, [4, 7, 8, 16, 19]), (8, 4, [8, 11]), (12, 3, [6, 12])]
)
def test_several_pairs_of_chimera(stages: int, pairs: int, legal: list[int]) -> None:
    """Pair j is the first one turned on by j D/f ranks; microbatches are dealt evenly; a rank holds 2f stages."""
    for m in legal:
        schedule = prove("chimera", stages, m, options={"pairs": pairs}).schedule
        same_counts(schedule, m)
        turns = [j * stages // pairs for j in range(pairs)]
        down = [[(turn + index) % stages for index in range(stages)] for turn in turns]
        up = [[(turn + index) % stages for index in reversed(range(stages))] for turn in turns]
        places = [[schedule.stage_at[index, way].rank for index in range(stages)] for way in range(2 * pairs)]
        assert sorted(places) == sorted(down + up)
        for rank, program in enumerate(schedule.programs):
            held = schedule.on_rank(rank)
            assert len({stage.index for stage in held}) == len(held) == 2 * pairs
            forwards = [sum(a.op is Op.F and a.stage == stage for a in program.period) for stage in held]
            assert max(forwards) - min(forwards) <= 1
            assert sum(forwards) == m


@pytest.mark.parametrize("name", ["interleaved", "breadth-first", "zb-interleaved"])
def test_chunks_and_groups(name: str) -> None:
    for chunks in (1, 3, 4):
        for group in (None, 3, 4):
            for m in (2, 5, 7):
                options = {"chunks": chunks} | ({} if group is None else {"group": group})
                same_counts(prove(ORDERS[name], 3, m, options=options).schedule, m)


@pytest.mark.parametrize(
    ("name", "p", "m", "options", "message"),
    [
        ("chimera", 3, 3, {}, "chimera needs a multiple of 2 stages .two per pair of pipelines., got 3"),
        ("chimera", 6, 6, {"pairs": 2}, "chimera needs a multiple of 4 stages .two per pair of pipelines., got 6"),
        ("chimera", 8, 3, {"pairs": 2}, "cannot run with the given microbatches, but with 4 "),
        ("chimera", 4, 4, {"pairs": 0}, "chimera: pairs must be a whole number of at least 1, got 0"),
        ("dualpipe", 4, 6, {}, "at least twice as large; got 4 and 6"),
        ("dualpipe", 4, 9, {}, "at least twice as large; got 4 and 9"),
        ("dualpipe-v", 4, 7, {}, "at least twice as many microbatches as stages; got 7 for 4"),
        ("bitpipe", 2, 3, {}, "an even number of stages and of microbatches, got 2 and 3"),
        ("interleaved", 4, 8, {"group": 3}, "at least as large as the number of stages, 4; got 3"),
        ("interleaved", 4, 8, {"chunk": 3}, "order interleaved has no option 'chunk'; it has chunks, group"),
        ("zb-h1", 4, 8, {"chunks": 3}, "order zb-h1 has no option 'chunks'; it has in_flight"),
        ("interleaved", 4, 8, {"chunks": 0}, "interleaved: chunks must be a whole number of at least 1, got 0"),
    ],
)
def test_what_cannot_be_is_refused(name: str, p: int, m: int, options: dict[str, int], message: str) -> None:
    with pytest.raises((ConfigError, ScheduleError), match=message):
        prove(ORDERS[name], p, m, options=options)
