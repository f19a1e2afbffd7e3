"""A proof in parts: what is sent to a rank, as JSON, comes together as the program and the facts that were proven."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.errors import PenstockError
from penstock.schedule.build import extend, prove, prove_evaluation
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.methods.table import METHODS
from penstock.schedule.proof.check import Proof, check
from penstock.schedule.rank_proof import common_part, own_part, rank_proof
from penstock.schedule.text import parse_schedule
from support.smallest_batch import least

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("*.txt"))


def sent(value):
    return json.loads(json.dumps(value))


def assert_same(proof: Proof) -> None:
    common = sent(common_part(proof))
    for rank in range(proof.schedule.ranks):
        found = rank_proof(proof.schedule, rank, common, sent(own_part(proof, rank)))
        assert found.lowered.programs[rank] == proof.lowered.programs[rank]
        assert (found.lowered.routes, found.lowered.window) == (proof.lowered.routes, proof.lowered.window)
        assert (found.lowered.lanes, found.schedule) == (proof.lowered.lanes, proof.schedule)
        assert found.stages == proof.stages
        assert found.activations == proof.activations
        assert found.steady_from == proof.steady_from
        assert found.border_fault() == proof.border_fault()
        assert not any(any(program) for other, program in enumerate(found.lowered.programs) if other != rank)


@pytest.mark.parametrize("file", GOLDEN, ids=lambda file: file.stem)
def test_parts_of_hand_written_schedules(file: Path) -> None:
    assert_same(check(parse_schedule(file.read_text(), file.stem)))


@pytest.mark.parametrize("method", METHODS)
def test_parts_of_every_method(method: str) -> None:
    """With what options add to it: decisions, reductions, recomputes, shared parameters."""
    plain = prove(method, 4, max(least(method, 4), 8))
    assert_same(plain)
    assert_same(prove_evaluation(plain.schedule))
    for options in ({"decides": True, "reduces": True}, {"recomputes": True}, {"tied": {0, 1}}):
        extended = extended_or_none(plain.schedule, options)
        if extended is not None:
            assert_same(extended)


def extended_or_none(schedule: Schedule, options: dict) -> Proof | None:
    try:
        return extend(schedule, **options)
    except PenstockError:  # a method that does not go with it
        return None


@pytest.mark.parametrize("ranks", [4, 16, 64])
def test_a_rank_gets_no_more_than_its_own_program(ranks: int) -> None:
    """Its size follows the microbatches, not the ranks; what all have in common follows the stages alone."""
    proof = prove("1f1b", ranks, 64)
    sizes = [len(json.dumps(own_part(proof, rank))) for rank in range(ranks)]
    assert max(sizes) < 64 * 260
    assert len(json.dumps(common_part(proof))) < 200 * ranks
