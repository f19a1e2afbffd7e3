"""WPipe's order: as in its code, with the delays, weights, activations and bubble of its two groups."""

from __future__ import annotations

from fractions import Fraction

import pytest

from penstock.errors import ConfigError
from penstock.schedule.build import call_order
from penstock.schedule.ir.absolute_actions import actions_of
from penstock.schedule.ir.schedule import Action, Op
from penstock.schedule.lowering.lower import lower
from penstock.schedule.lowering.send_window_search import unlimited
from penstock.simulate.costs import Costs
from penstock.simulate.long_run import steady_bubble
from penstock.simulate.simulate import simulate_schedule
from support.own_methods import own, prove
from support.schedules import make_schedule

GRID = [(p, m) for p in (1, 2, 3, 4, 6) for m in (1, 2, 3, 4, 7)]


def printed(action: Action, p: int) -> str:
    """Capitals are group 1."""
    letter = str(action.op) if action.stage.index < p else str(action.op).lower()
    return f"{letter}{action.unit.first}"


BY_HAND = {
    # Rank 1 has its first gradient as soon as it has run a forward of group 2; rank 0 a forward and a backward later.
    (2, 2): (
        "F0 b-1 F1 B-2 f0 B-1 f1 b0 / b-1 B-2 B-1",
        "F0 B-2 F1 B-1 f0 b0 f1 b1 / B-2 B-1",
    ),
    (2, 3): (
        "F0 b-1 F1 B-3 F2 B-2 f0 B-1 f1 b0 f2 b1 / b-1 B-3 B-2 B-1",
        "F0 B-3 F1 B-2 F2 B-1 f0 b0 f1 b1 f2 b2 / B-3 B-2 B-1",
    ),
    (1, 2): ("F0 B-2 F1 B-1 f0 b0 f1 b1 / B-2 B-1",),
}


@pytest.mark.parametrize(("p", "m"), BY_HAND)
def test_the_order_by_hand(p: int, m: int) -> None:
    found = [
        " / ".join(" ".join(printed(a, p) for a in part) for part in program)
        for program in call_order(own("wpipe").order, p, m).programs
    ]
    assert found == list(BY_HAND[p, m])


def as_in_the_code(p: int, rank: int, batches: int) -> list[str]:
    """What the authors' runtime does for m = p: 2p - 1 - r forwards, then one of each in turn; passes change group
    after every p of a kind, forwards beginning with group 1 and backwards with group 2."""
    forwards = [("F" if n // p % 2 == 0 else "f") + str(n // (2 * p) * p + n % p) for n in range(2 * p * batches)]
    backwards = [("b" if n // p % 2 == 0 else "B") + str(n // (2 * p) * p + n % p) for n in range(2 * p * batches)]
    ahead = 2 * p - 1 - rank
    done = forwards[:ahead]
    for f, b in zip(forwards[ahead:], backwards, strict=False):
        done += [f, b]
    return done + backwards[len(forwards) - ahead :]


@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_it_is_the_order_of_the_code_of_its_authors(p: int) -> None:
    schedule = make_schedule("wpipe", p, p)
    for rank in range(p):
        found = [printed(a, p) for a in actions_of(schedule, rank, 4) if a.op is not Op.STEP]
        assert found == as_in_the_code(p, rank, 4)


@pytest.mark.parametrize(("p", "m"), GRID)
def test_group_1_is_one_update_late_and_group_2_not_at_all(p: int, m: int) -> None:
    """Half of the delayed gradients, and half of the redundant weights, of 2BW."""
    proof = prove("wpipe", p, m)
    for stage, facts in proof.stages.items():
        late = stage.index < p
        assert facts.delay == ((1.0, 1.0) if late else (0.0, 0.0))
        assert (facts.versions, facts.gradients, facts.buffers) == ((2, 1, 3) if late else (1, 1, 2))
    double = prove("2bw", 2 * p, 2 * p).stages.values()
    delayed, redundant = (
        [sum(facts.delay.forward for facts in stages), sum(facts.versions - 1 for facts in stages)]
        for stages in (proof.stages.values(), double)
    )
    assert [2 * number for number in delayed] == redundant


@pytest.mark.parametrize(("p", "m"), GRID)
def test_activations(p: int, m: int) -> None:
    """m + p - r microbatches on one of a rank's two halves, or 2m + 1 where there are too few of them."""
    proof = prove("wpipe", p, m)
    wanted = [Fraction(m + min(p - 1 - rank, m) + 1, 2) for rank in range(p)]
    assert list(proof.activations) == wanted
    simulated = simulate_schedule(proof, Costs.uniform(proof.schedule), 6)
    assert list(simulated.activations) == wanted


TIMES = [(1.0, 1.0, 1.0), (1.0, 0.5, 0.5), (2.0, 0.5, 0.5), (1.0, 2.0, 2.0)]


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_the_steady_bubble(p: int, times: tuple[float, float, float]) -> None:
    """None from m = p - 1 on, if there is time for a batch to come round; below, p - m ranks work in turn."""
    forward, backward = times[0], times[1] + times[2]
    for m in {1, max(p - 2, 1), max(p - 1, 1), p, p + 2}:
        schedule = make_schedule("wpipe", p, m)
        bubble = steady_bubble(lower(schedule, window=unlimited(schedule)), Costs.uniform(schedule, *times), 8)
        longer = max(forward, backward) / (forward + backward)
        if m < p - 1 and longer <= 2 / 3:
            assert bubble == pytest.approx(1 - 1 / (p - m))
        elif m >= p - 1 and m >= p * longer:
            assert bubble == pytest.approx(0, abs=1e-12)
        else:
            assert bubble > 0.01


@pytest.mark.parametrize("p", [2, 4])
def test_drained_after_some_batches(p: int) -> None:
    """From m = p on a rank fills, and drains, as in 1F1B of half as long passes."""
    for m, batches in ((p, 1), (p, 3), (p + 2, 2)):
        schedule = make_schedule("wpipe", p, m)
        found = simulate_schedule(schedule, Costs.uniform(schedule, 1.0, 1.0, 1.0), batches).bubble
        assert found.ideal == 3 * m * batches
        assert found.makespan == 3 * m * batches + 3 * (p - 1) / 2


@pytest.mark.parametrize("p", [1, 2, 3])
def test_no_decision_of_all_stages_can_be_waited_for(p: int) -> None:
    with pytest.raises(ConfigError, match=f"wpipe: rank 0 updates stage {p} before stage 0 has its gradient"):
        prove("wpipe", p, 4, decides=True)
    prove("interleaved", p, 4, decides=True)


def test_on_its_order_double_buffers_can_wait() -> None:
    facts = prove("wpipe", 3, 4, rule="double-buffer", decides=True).stages.values()
    assert {f.delay for f in facts} == {(1.0, 1.0)}
