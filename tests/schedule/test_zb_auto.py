"""The search for zero-bubble orders: legal, within its memory, as good as the proven optimum of small cases."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings, strategies as st

from penstock.errors import ScheduleError
from penstock.schedule.build import prove
from penstock.schedule.orders.zb_exact import zb_exact
from penstock.schedule.orders.zero_bubble import zb_auto
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import Simulation, simulate_schedule
from support.examples import examples

MEASURED = {"forward": 18522, "input": 18086, "weight": 9337, "hop": 601}  # a 1.5B model (arXiv 2401.10241, table 4)


def found_by(order: object, p: int, m: int, left: float = 1.0, **options: int) -> Simulation:
    times = [options.get(name, 1) for name in ("forward", "input", "weight")]
    proof = prove(order, p, m, options={} if order in ("zb-h1", "zb-h2") else options)  # type: ignore[arg-type]
    costs = Costs.uniform(proof.schedule, *times, latency=options.get("hop", 0))
    return simulate_schedule(proof, Costs(costs.stages, costs.latency, left=left))


@given(
    p=st.integers(1, 5),
    m=st.integers(1, 12),
    limit=st.integers(1, 8),
    held=st.sampled_from([20, 50, 100]),
    times=st.tuples(*[st.integers(1, 4)] * 3),
    hop=st.integers(1, 3),
)
@example(p=2, m=8, limit=8, held=20, times=(1, 1, 1), hop=3)  # rank 0 is seven messages ahead
@settings(max_examples=examples(60), deadline=None)
def test_any_times_and_any_memory(p: int, m: int, limit: int, held: int, times: tuple[int, ...], hop: int) -> None:
    """Always legal; and never more activations than asked for, by the simulator's own account."""
    given_ = dict(zip(("forward", "input", "weight"), times, strict=True))
    found = found_by(zb_auto, p, m, held / 100, limit=limit, held=held, hop=hop, **given_)
    assert max(found.activations) <= limit


def test_the_published_case_beside_our_own() -> None:
    """ZB-2p of 1.5B on 8 ranks, m = 24, with its memory model: 0.0433 is published, our search finds 0.0434."""
    found = found_by(zb_auto, 8, 24, held=37, **MEASURED)
    assert round(found.bubble.rank_span_bubble, 4) == 0.0434
    assert max(found.activations) <= 24  # by a model that frees everything at W; by that of the paper 16:
    assert max(found_by(zb_auto, 8, 24, 0.37, held=37, **MEASURED).activations) <= 16


def test_zb_1p_is_no_worse_than_h1_and_zb_2p_has_no_bubble() -> None:
    for p in (2, 4, 8):
        m = 3 * p
        h1, found = found_by("zb-h1", p, m), found_by(zb_auto, p, m, limit=p)
        assert found.bubble.rank_span <= h1.bubble.rank_span
        assert max(found.activations) <= p
        assert found_by(zb_auto, p, m).bubble.rank_span_bubble == 0


@given(
    p=st.integers(1, 5),
    m=st.integers(1, 12),
    times=st.tuples(*[st.integers(1, 12)] * 3),
    hop=st.integers(0, 3),
    held=st.sampled_from([37, 100]),
)
@example(p=4, m=8, times=(10, 12, 7), hop=1, held=100)  # which the heuristic alone misses by 5 %
@settings(max_examples=examples(40), deadline=None)
def test_no_worse_than_h1_and_h2_for_any_times(p: int, m: int, times: tuple[int, ...], hop: int, held: int) -> None:
    given_ = dict(zip(("forward", "input", "weight"), times, strict=True))
    for known, limit in (("zb-h1", p), ("zb-h2", 2 * p)):
        costs = {**given_, "hop": hop}
        found = found_by(zb_auto, p, m, held / 100, limit=limit, held=held, **costs)
        assert found.bubble.rank_span <= found_by(known, p, m, held / 100, **costs).bubble.rank_span
        assert max(found.activations) <= limit


UNEQUAL = {"forward": 3, "input": 4, "weight": 2, "hop": 1}
SMALL = [
    (2, 2, {}), (2, 4, {"limit": 2}), (2, 4, {}), (3, 3, {"limit": 2}), (3, 4, {"limit": 3}), (2, 4, UNEQUAL),
    (3, 3, {"forward": 2, "input": 3, "weight": 1, "held": 50}),
]  # fmt: skip


@pytest.mark.parametrize(("p", "m", "options"), SMALL)
def test_it_finds_what_is_proven_to_be_the_best(p: int, m: int, options: dict[str, int]) -> None:
    left = options.get("held", 100) / 100
    best, found = (found_by(order, p, m, left, **options) for order in (zb_exact, zb_auto))
    assert found.bubble.rank_span == best.bubble.rank_span
    assert max(best.activations) <= options.get("limit", 2 * p)


def test_the_optimum_of_the_hand_calculation() -> None:
    """Two ranks that hold one microbatch each: on rank 0, F, then F, I and I of the other rank before its own I."""
    assert found_by(zb_exact, 2, 2, limit=1).bubble.rank_span == 2 * 5
    assert found_by(zb_exact, 1, 3).bubble.rank_span == 9


def test_one_microbatch_at_a_time() -> None:
    """A rank holds one, so each goes there and back before the next one: 3F + 3I + W on rank 0, five times."""
    best, found = found_by(zb_exact, 3, 5, limit=1), found_by(zb_auto, 3, 5, limit=1)
    assert best.bubble.rank_span == found.bubble.rank_span == 5 * 7
    assert best.activations == found.activations == (1, 1, 1)


def test_no_more_than_all_activations_can_be_left() -> None:
    with pytest.raises(ScheduleError, match="zb-exact: held is a percentage of a microbatch's activations, got 101"):
        zb_exact(2, 2, held=101)


def test_too_little_time_is_said() -> None:
    with pytest.raises(ScheduleError, match=r"no best order of 6 ranks and 12 microbatches was found in 1 seconds"):
        zb_exact(6, 12, limit=4, forward=3, input=5, weight=2, hop=1, seconds=1)
