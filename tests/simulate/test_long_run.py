"""Figures of a long run: the bubble of one more batch, and what a rank holds in a span of any length."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from penstock.schedule.array_schedules.array_lowering import ArrayLowered
from penstock.schedule.machine.play import Machine
from penstock.schedule.methods.table import METHODS
from penstock.schedule.proof.check import check
from penstock.schedule.proof.proof import Proof
from penstock.schedule.text_parser import parse_schedule
from penstock.simulate.costs import Costs
from penstock.simulate.long_run import steady_bubble
from penstock.simulate.play import play
from penstock.simulate.simulate import simulate_schedule
from support.own_methods import prove

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("*.txt"))
CASES = [(name, decides) for name in METHODS for decides in (False, True)]
UNEQUAL = {"forward": 0.9, "backward_input": 1.3, "backward_weight": 0.7, "latency": 0.11, "step": 0.3}
LINKS = {**UNEQUAL, "latency": (0.11, 0.7, 0.03)}


def of_two_spans(proof: Proof, costs: Costs, batches: int) -> float:
    """The definition: two spans, played whole, of which one is a batch longer."""
    shorter, longer = (play(proof.lowered, costs, n)[0].bubble() for n in (batches, batches + 1))
    total = len(longer.busy) * (longer.makespan - shorter.makespan)
    return 1 - (sum(longer.busy) - sum(shorter.busy)) / total


@pytest.fixture
def periods(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batches whose periods a machine plays, in the order in which it does."""
    played: list[int] = []
    plain = Machine.play_period

    def play_period(self: Machine, t: int, more: bool, rejected: bool = False) -> None:
        played.append(t)
        plain(self, t, more, rejected)

    monkeypatch.setattr(Machine, "play_period", play_period)
    return played


@pytest.mark.parametrize("times", [{}, UNEQUAL, LINKS], ids=["equal", "unequal", "links"])
@pytest.mark.parametrize(("name", "decides"), CASES)
def test_one_span_gives_what_two_give(name: str, decides: bool, times: dict[str, Any], periods: list[int]) -> None:
    """To rounding, for fewer batches: two where the pipeline empties after each, none where spans are compiled."""
    proof = prove(name, 4, 8, decides=decides)
    costs, batches = Costs.uniform(proof.schedule, **times), proof.steady_from + 2
    periods.clear()  # those of the proof
    found = steady_bubble(proof.lowered, costs, batches)
    played = len([t for t in periods if t >= 0])
    assert found == pytest.approx(of_two_spans(proof, costs, batches), abs=1e-12)
    assert played < 2 * batches + 1
    if isinstance(proof.lowered, ArrayLowered):
        assert played == 0
    elif not any(program.epilogue for program in proof.schedule.programs):
        assert played == 2 or (times is LINKS and played < 5)  # with two directions batches meet


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_schedules_written_by_hand(path: Path) -> None:
    """Also one whose batches are not all alike: its pipelines average their weights after every other batch."""
    proof = check(parse_schedule(path.read_text(), path.stem))
    for collective in (0.0, 2.5):
        costs = Costs(Costs.uniform(proof.schedule, 1, 1.5, 0.5, step=0.25).stages, 0.2, collective)
        for batches in (1, 2, 5):
            assert steady_bubble(proof.lowered, costs, batches) == pytest.approx(
                of_two_spans(proof, costs, batches), abs=1e-12
            )


def test_a_play_that_has_not_settled_is_not_taken_for_one_that_has() -> None:
    """Stages of 3, 6 and 3 (stashed, one microbatch): the second batch adds less than those that follow."""
    proof = prove("stash", 3, 1)
    stages = Costs.uniform(proof.schedule).stages
    costs = Costs((stages[0], *Costs.uniform(proof.schedule, 2, 2, 2).stages[:1], stages[2]))
    found = [steady_bubble(proof.lowered, costs, batches) for batches in range(1, 8)]
    assert found == pytest.approx([of_two_spans(proof, costs, batches) for batches in range(1, 8)], abs=1e-12)
    assert found[0] != pytest.approx(found[-1])


@pytest.mark.parametrize("left", [1.0, 0.25])
@pytest.mark.parametrize("name", METHODS)
def test_activations_are_those_of_a_long_run_however_short_the_span(name: str, left: float) -> None:
    proof = prove(name, 4, 8)
    costs = Costs(Costs.uniform(proof.schedule).stages, left=left)
    _, held = play(proof.lowered, costs, proof.steady_from + 3)
    assert simulate_schedule(proof, costs, 1).activations == tuple(map(float, held))


def test_weight_stashing_with_one_microbatch_holds_as_many_as_there_are_ranks_behind() -> None:
    """Eight ranks: 8 .. 1 microbatches and versions, though one batch alone never has more than one under way."""
    proof = prove("stash", 8, 1)
    found = simulate_schedule(proof, Costs.uniform(proof.schedule))
    assert found.figures()["peak_activations"] == found.figures()["live_versions"] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert found.timeline.peak("activations") == [1] * 8


def test_halves_of_backwards_count_in_a_long_run() -> None:
    """Of zb-h1, after I a quarter is left: (p - r) + r / 4."""
    proof = prove("zb-h1", 4, 12)
    found = simulate_schedule(proof, Costs(Costs.uniform(proof.schedule).stages, left=0.25))
    assert found.activations == tuple(float(4 - r + Fraction(r, 4)) for r in range(4))
