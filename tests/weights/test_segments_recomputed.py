"""What segments of recomputed stages keep, and when they run again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.schedule.add_options import extend
from penstock.schedule.ir.absolute_actions import actions_of
from penstock.schedule.ir.schedule import Op, Payload
from penstock.schedule.transforms.recompute import length_of, with_recompute
from penstock.simulate.costs import Costs
from penstock.simulate.long_run import steady_bubble
from penstock.simulate.simulate import simulate_schedule
from penstock.stage.autograd.recompute import RecomputeInput
from support.cases import (
    LENGTH,
    WIDTH,
    Case,
    make_batches,
    make_pipeline,
)
from support.own_methods import prove
from support.pipemare_player import case_of, changes_of, segments_of
from support.schedules import make_schedule

# --- what is kept ---------------------------------------------------------------------------------------------------


def peaks(case: Case, segments: int = 1) -> list[int]:
    pipeline = make_pipeline(case, **changes_of(case, "elementary", segments))
    list(pipeline.run(make_batches(case)))
    assert all(live["activations"] == 0 for live in pipeline.live_bytes().values())
    return [peak["activations"] for peak in pipeline.peak_bytes().values()]


@pytest.mark.slow
def test_only_the_first_of_a_segment_keeps_its_input() -> None:
    """Byte by byte, and as the schedule's proof says."""
    case = case_of(8, 1, spans=(20,), recompute="stage")
    graphs = [peak // (8 - s) for s, peak in enumerate(peaks(replace(case, recompute="none")))]
    proof = extend(prove("pipemare", 8, 1), recomputes=True, segments=3)
    assert proof.schedule.segments == ((0, 1, 2), (3, 4, 5))  # 6 by itself; 7 has nothing to wait for
    assert [float(a) for a in proof.activations] == [3, 2, 1, 3, 2, 1, 1, 1]
    for s, found in enumerate(peaks(case, 3)):
        wanted = int(proof.activations[s]) * graphs[s]
        if s in (0, 3, 6):  # inputs of what waits for its recompute; the graph of the next one is made meanwhile
            waiting = 8 - s - int(proof.activations[s]) + 1
            wanted += waiting * 2 * ((LENGTH + 1) * 8 if s == 0 else LENGTH * WIDTH * 4)
        assert found == wanted, s


def test_inputs_that_come_again_are_let_go_of() -> None:
    """Not only not counted."""
    case = case_of(4, 1, recompute="stage")
    pipeline = make_pipeline(case, **changes_of(case, "elementary", 3))
    there: list[tuple[int, bool]] = []
    for _ in pipeline.run(make_batches(case)):
        for stage, runtime in pipeline.stages.items():
            waiting = [
                piece
                for flight in runtime.passes.flights.values()
                for piece in flight.work
                if isinstance(piece, RecomputeInput)
            ]
            there += [(stage.index, piece.value is not None) for piece in waiting]
    assert {index for index, _ in there} == {0, 1, 2}  # the last stage does not recompute
    assert all(has == (index == 0) for index, has in there)


def kept(depth: int, segments: int | None) -> int:
    """The most that all stages keep in endless 1F1B, where an input counts as much as a stage's activations."""
    schedule = make_schedule("pipemare", depth, 1)
    if segments is not None:
        schedule = with_recompute(schedule, segments)
    total = 0
    for rank in range(depth):
        inputs = activations = most = 0
        for action in actions_of(schedule, rank, 3 * depth):
            if action.op is Op.F and rank in schedule.recomputed:
                inputs += schedule.segment_before(rank) is None
            elif action.op in (Op.F, Op.R):
                activations += 1
                inputs -= action.op is Op.R and schedule.segment_before(rank) is None
            most = max(most, inputs + activations)
            activations -= action.op is Op.B
        total += most
    return total


@pytest.mark.long
@pytest.mark.parametrize("depth", [9, 16])
def test_activations_with_segments_of_the_square_root(depth: int) -> None:
    """The paper's P^2 to P^(3/2), by about 1 / sqrt(P). Here P (P+1) / 2 to not quite P^(3/2), by about 2 / sqrt(P)."""
    root = length_of("auto", depth)
    assert root**2 == depth
    assert kept(depth, None) == depth * (depth + 1) // 2
    assert (kept(depth, root), kept(depth, None)) == {9: (26, 45), 16: (62, 136)}[depth]
    assert kept(depth, root) == min(kept(depth, length) for length in (1, root - 1, root, root + 1, 2 * root, depth))


# --- when -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "m", "length"), [(2, 1, 1), (4, 2, 2), (5, 3, 4), (8, 2, 3), (8, 8, 8)])
def test_delays_of_recomputed_passes(depth: int, m: int, length: int) -> None:
    """A forward is (d-1-s) / m updates late; a recompute as many backwards ahead as stages of its segment follow."""
    proof = extend(prove("pipemare", depth, m), recomputes=True, segments=length)
    again = segments_of(depth, length)
    for stage, facts in proof.stages.items():
        assert facts.delay == (pytest.approx((depth - 1 - stage.index) / m), 0)
        wanted = again[stage.index][0] / m if stage.index < depth - 1 else None
        assert facts.recompute_delay == (wanted if wanted is None else pytest.approx(wanted))


@pytest.mark.parametrize("method", ["pipemare", "2bw", "2bw-eager"])
@pytest.mark.parametrize("backward", [0.5, 1.0, 2.0])
def test_nobody_waits_for_a_wave_of_recomputes(method: str, backward: float) -> None:
    bubbles = []
    for segments in (1, 2, 5):
        proof = extend(prove(method, 6, 12), recomputes=True, segments=segments)
        costs = Costs.uniform(proof.schedule, 1.0, backward / 2, backward / 2)
        bubbles.append(steady_bubble(proof.lowered, costs, proof.steady_from + 2))
    assert bubbles == pytest.approx([bubbles[0]] * 3, abs=1e-9)


def test_messages_of_recomputed_activations() -> None:
    """One for each microbatch, from every stage of a segment to the next one; on lanes of their own."""
    proof = extend(prove("2bw", 4, 4), recomputes=True, segments=2)
    lanes = {(lane.source, lane.target) for lane in proof.lowered.lanes if lane.payload is Payload.RECOMPUTE}
    assert lanes == {(0, 1)}
    plain, again = (simulate_schedule(p, Costs.uniform(p.schedule), 3).messages for p in (prove("2bw", 4, 4), proof))
    assert again - plain == 3 * 4
