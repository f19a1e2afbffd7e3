"""PipeMare's order: a slot holds a forward and a backward of each stage, and its delay formula holds to the number."""

from __future__ import annotations

from fractions import Fraction

import pytest

from penstock.schedule.add_options import extend
from penstock.schedule.build import call_order, prove
from penstock.schedule.ir.absolute_actions import actions_of
from penstock.schedule.ir.order import Order
from penstock.schedule.ir.schedule import Op
from penstock.schedule.lowering.lower import lower
from penstock.schedule.orders import ORDERS
from penstock.simulate.costs import Costs
from penstock.simulate.long_run import steady_bubble
from penstock.simulate.simulate import simulate_schedule


def slots(stages: int, stage: int, microbatches: int, first: str = "F") -> str:
    """Stage i (from 1) of P: microbatch j (from 0) forward in slot j + i - 1, backward in slot j + 2P - i."""
    found = []
    for slot in range(microbatches + 2 * stages):
        passes = [("F", slot - stage + 1), ("B", slot - 2 * stages + stage)]
        for letter, number in passes if first == "F" else passes[::-1]:
            if 0 <= number < microbatches:
                found.append(f"{letter}{number}")
    return " ".join(found)


@pytest.mark.parametrize(("p", "n"), [(1, 1), (1, 3), (2, 1), (3, 2), (4, 8)])
def test_passes_stand_in_the_slots_of_the_paper(p: int, n: int) -> None:
    schedule = prove("newest", p, n, order="fine-grained").schedule
    for rank in range(p):
        found = [f"{a.op}{a.unit.first}" for a in actions_of(schedule, rank, 7) if a.op is not Op.STEP]
        assert " ".join(found) == slots(p, rank + 1, 7 * n)


def mean_delay(order: Order, p: int, n: int, rank: int) -> Fraction:
    """Updates that a rank makes between a forward and the update of its microbatch, mean over a batch, counted by hand.

    An update follows every n-th backward. The batch lies so late that nothing is left of the beginning.
    """
    period = order.programs[rank].period
    last = 2 * p // n + 2
    read, done = {}, 0
    for t in range(last + 1):
        for action in period:
            if action.op is Op.F:
                read[action.unit.first + t * n] = done // n
            elif action.unit.first + t * n >= 0:
                done += 1
    return Fraction(sum(last - read[k] for k in range(last * n, (last + 1) * n)), n)


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("p", [1, 2, 3, 6])
def test_the_delay_is_that_of_the_formula(p: int, n: int) -> None:
    """tau_i = (2 (P - i) + 1) / N forward, 0 backward: P/N in the mean over the stages."""
    proof = prove("newest", p, n, order="fine-grained")
    delays = [proof.stages[stage].delay for stage in sorted(proof.stages)]
    assert [d.forward for d in delays] == pytest.approx([(2 * (p - i) + 1) / n for i in range(1, p + 1)])
    assert [d.backward for d in delays] == [0] * p
    assert sum(d.forward for d in delays) / p == pytest.approx(p / n)


def test_the_figures_of_107_stages() -> None:
    """N = 8: 26.625 on the first stage, 13.375 = P/N in the mean, by counting; GPipe works 1/14.25 of the time."""
    p, n = 107, 8
    order = call_order(ORDERS["fine-grained"], p, n)
    delays = [mean_delay(order, p, n, rank) for rank in range(p)]
    assert delays[0] == Fraction(26625, 1000)
    assert sum(delays) / p == Fraction(13375, 1000) == Fraction(p, n)
    for small in ((1, 1), (3, 2), (5, 8)):  # the proof counts as is counted here
        order = call_order(ORDERS["fine-grained"], *small)
        for stage, facts in prove("newest", *small, order="fine-grained").stages.items():
            assert facts.delay.forward == pytest.approx(float(mean_delay(order, *small, stage.rank)))
    gpipe = prove("gpipe", p, n)
    busy = 1 - simulate_schedule(gpipe, Costs.uniform(gpipe.schedule)).bubble.bubble
    assert busy == pytest.approx(0.0702, abs=5e-5)
    assert 1 / busy == pytest.approx(14.25)


@pytest.mark.parametrize(("p", "n"), [(1, 1), (3, 2), (6, 3)])
def test_it_is_never_idle_and_holds_a_square_of_microbatches(p: int, n: int) -> None:
    """2 (P - i) + 2 on stage i, one more than its delay: P^2 + P together."""
    proof = prove("newest", p, n, order="fine-grained")
    assert list(proof.activations) == [2 * (p - i) + 2 for i in range(1, p + 1)]
    assert sum(proof.activations) == p * p + p
    assert steady_bubble(lower(proof.schedule), Costs.uniform(proof.schedule), 2 * p + 2) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("root", [2, 3, 4])
def test_segments_hold_a_root_of_that(root: int) -> None:
    """Segments of sqrt(P) stages: P sqrt(P) of P^2, so 1/sqrt(P) of it (PipeMare, appendix: P = 107, 0.097)."""
    p = root**2
    plain = prove("pipemare", p, 2, order="fine-grained")
    proof = extend(plain, recomputes=True, segments="auto")
    assert proof.schedule.segments == tuple(tuple(range(c, c + root)) for c in range(0, p, root))
    assert (sum(plain.activations), sum(proof.activations)) == (p * p + p, p * root)


@pytest.mark.parametrize("p", [1, 2, 5])
def test_backwards_first_it_is_that_of_pipelined_backpropagation(p: int) -> None:
    """D_s = 2 (S - 1 - s), with an update for each microbatch (Kosson et al., arXiv 2003.11666)."""
    proof = prove("newest", p, 1, order="endless-eager-1f1b")
    assert [proof.stages[stage].delay.forward for stage in sorted(proof.stages)] == [2 * (p - 1 - s) for s in range(p)]
    for rank in range(p):
        found = [f"{a.op}{a.unit.first}" for a in actions_of(proof.schedule, rank, 9) if a.op is not Op.STEP]
        assert found == slots(p, rank + 1, 9, first="B").split()
