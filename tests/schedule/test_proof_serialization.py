"""A proof in parts: what is sent to a rank, as JSON, comes together as the program and the facts that were proven."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.errors import PenstockError
from penstock.schedule.add_options import evaluation_of, extend
from penstock.schedule.build import prove
from penstock.schedule.ir.absolute_actions import actions_of
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.lowering.report_places import with_report_places
from penstock.schedule.methods.table import METHODS
from penstock.schedule.proof.check import check
from penstock.schedule.proof.proof import Proof
from penstock.schedule.rank_schedule import (
    common_part,
    own_program,
    part_of_rank,
    rank_proof,
    rank_schedule,
    schedule_facts,
)
from penstock.schedule.stage_state.stage_constants import stage_specs
from penstock.schedule.text_parser import parse_schedule
from support.smallest_batch import least

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("*.txt"))


def sent(value):
    return json.loads(json.dumps(value))


def assert_same(proof: Proof) -> None:
    common, facts = sent(common_part(proof)), sent(schedule_facts(proof.schedule))
    for rank in range(proof.schedule.ranks):
        received = rank_schedule(facts, unbuilt)
        found = rank_proof(received, rank, common, sent(part_of_rank(proof.lowered, rank)))
        assert_alike(found.schedule, proof.schedule, rank)
        found = rank_proof(proof.schedule, rank, common, sent(part_of_rank(proof.lowered, rank)))
        assert found.lowered.programs[rank] == proof.lowered.programs[rank]
        assert (found.lowered.routes, found.lowered.window) == (proof.lowered.routes, proof.lowered.window)
        assert (found.lowered.lanes, found.schedule) == (proof.lowered.lanes, proof.schedule)
        assert found.stages == proof.stages
        assert found.activations == proof.activations
        assert found.steady_from == proof.steady_from
        assert found.border_fault == proof.border_fault
        assert found.reading == proof.reading
        assert not any(any(program) for other, program in enumerate(found.lowered.programs) if other != rank)


def unbuilt() -> Schedule:
    raise AssertionError("a rank has built a schedule")


FACTS = """
    name microbatches stages edges rule frozen segments window sharding ranks num_stages predecessors successors
    stage_at recomputed slices directions chunks operations deciding first_trained actions_hash
""".split()  # noqa: SIM905 - a list of words


def assert_alike(received: Schedule, built: Schedule, rank: int) -> None:
    """A rank knows everything of its own program, and the facts of the whole schedule, without building it."""
    assert {name: getattr(received, name) for name in FACTS} == {name: getattr(built, name) for name in FACTS}
    assert received.program(rank) == built.program(rank)
    assert stage_specs(received, 0, {rank}) == [one for one in stage_specs(built, 0) if one.stage.rank == rank]
    assert list(actions_of(received, rank, 3, -1)) == list(actions_of(built, rank, 3, -1))


def test_the_programs_of_other_ranks_are_built_when_somebody_looks() -> None:
    schedule = prove("interleaved", 4, 8).schedule
    received = rank_schedule(sent(schedule_facts(schedule)), lambda: schedule).held_by(1, schedule.program(1))
    assert "programs" not in received.__dict__
    assert received.program(2) == schedule.program(2)
    assert (received, str(received), hash(received)) == (schedule, str(schedule), hash(schedule))
    assert schedule == received != prove("1f1b", 4, 8).schedule
    assert replace(received, window=5) == replace(schedule, window=5)
    assert check(received).stages == check(schedule).stages


@pytest.mark.parametrize("file", GOLDEN, ids=lambda file: file.stem)
def test_parts_of_hand_written_schedules(file: Path) -> None:
    assert_same(check(parse_schedule(file.read_text(), file.stem)))


@pytest.mark.parametrize("method", METHODS)
def test_parts_of_every_method(method: str) -> None:
    """With what options add to it: decisions, reductions, recomputes, shared parameters."""
    plain = prove(method, 4, max(least(method, 4), 8))
    assert_same(plain)
    assert_same(check(evaluation_of(plain.schedule)))
    for options in ({"decides": True, "reduces": True}, {"recomputes": True}, {"tied": {0, 1}}):
        extended = extended_or_none(plain.schedule, options)
        if extended is not None:
            assert_same(extended)


def test_places_of_reports_travel() -> None:
    lowered = with_report_places(prove("2bw", 4, 4, decides=True).lowered, decided=True)
    for rank, program in enumerate(lowered.programs):
        assert any(instruction.report_lag is not None for instruction in program.period)
        own = own_program(lowered, rank, json.loads(json.dumps(part_of_rank(lowered, rank))))
        assert own.programs[rank] == program


def extended_or_none(schedule: Schedule, options: dict) -> Proof | None:
    try:
        return extend(schedule, **options)
    except PenstockError:  # a method that does not go with it
        return None


@pytest.mark.parametrize("ranks", [4, 16, 64])
def test_a_rank_gets_no_more_than_its_own_program(ranks: int) -> None:
    """Its size follows the microbatches, not the ranks; what all have in common follows the stages alone."""
    proof = prove("1f1b", ranks, 64)
    sizes = [len(json.dumps(part_of_rank(proof.lowered, rank))) for rank in range(ranks)]
    assert max(sizes) < 64 * 260
    assert len(json.dumps(common_part(proof))) < 200 * ranks
