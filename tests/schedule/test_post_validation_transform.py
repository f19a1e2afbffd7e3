"""Versions that are read before they are decided on: both outcomes are in the schedule, and proven."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.errors import ScheduleError
from penstock.schedule.build import prove
from penstock.schedule.ir.schedule import Op, Program, Schedule
from penstock.schedule.lowering.lower import lower
from penstock.schedule.machine.instructions import Instruction
from penstock.schedule.proof.check import check
from penstock.schedule.text_parser import parse_schedule
from penstock.schedule.transforms.post_validation import redone
from support.schedules import make_schedule

GOLDEN = Path(__file__).parents[1] / "golden" / "post_validation.txt"
ORDERS = (
    "gpipe",
    "1f1b",
    "zb-h1",
    "zb-h2",
    "zb-auto",
    "interleaved",
    "breadth-first",
    "zb-v",
    "v-half",
    "v-min",
    "v-auto",
    "hanayo",
)


def texts(instructions: tuple[Instruction, ...]) -> list[str]:
    """Actions without versions, messages by payload."""
    found = []
    for action, route, *_ in instructions:
        k = action.unit.first
        found.append(f"{action.op} {action.payload} {k}" if route >= 0 else f"{action.op}{k}")
    return found


def test_the_branch_after_a_rejection() -> None:
    """Worked by hand: p = 2, m = 3. Rank 1 has run F0 on the version that is rejected, and has F1 still before it."""
    lowered = lower(parse_schedule(GOLDEN.read_text()))
    first, second = ([t for t in texts(p.rejected) if "gradient" not in t] for p in lowered.programs)
    assert first == [
        "F0", "SEND activation 0", "F1", "SEND activation 1", "VALIDATE-1",
        "REDO0", "SEND repair 0", "REDO1", "SEND repair 1", "F2", "SEND activation 2",
        "I0", "W0", "I1", "W1", "I2", "W2", "STEP0",
    ]  # fmt: skip
    assert [t for t in second if "activation" not in t] == [
        "F0", "VALIDATE-1", "RECV repair 0", "REDO0", "I0", "RECV repair 1", "F1", "I1", "W0", "F2", "I2", "W1", "W2",
        "STEP0",
    ]  # fmt: skip
    for program in lowered.programs:
        accepted = [t for t in texts(program.rejected) if "REDO" not in t and "repair" not in t]
        assert texts(program.period) == accepted
        place = texts(program.period).index("VALIDATE-1")
        assert program.rejected[: place + 1] == program.period[: place + 1]


def test_who_has_run_nothing_yet_waits_for_both_messages() -> None:
    lowered = lower(parse_schedule(GOLDEN.read_text()))
    payloads = {
        (i.action.op, i.action.unit.first): sorted(str(lowered.routes[need.route].payload) for need in i.needs)
        for i in lowered.programs[1].rejected
        if i.action.op in (Op.F, Op.REDO)
    }
    assert payloads == {
        (Op.F, 0): ["activation"], (Op.REDO, 0): ["repair"], (Op.F, 1): ["activation", "repair"],
        (Op.F, 2): ["activation"],
    }  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 1), (2, 5), (3, 4), (4, 8)])
def test_any_flushed_order_may_be_validated_later(name: str, p: int, m: int) -> None:
    proof = prove(name, p, m, rule="provisional", decides=True)
    assert all(facts.buffers <= 3 and facts.versions <= 2 for facts in proof.stages.values())
    assert all(facts.delay == (0.0, 0.0) for facts in proof.stages.values())
    in_place = prove(name, p, m, rule="provisional-in-place", decides=True)
    assert all(facts.buffers == 2 and facts.versions == 1 for facts in in_place.stages.values())
    for period, _ in proof.schedule.programs:
        place = [i for i, a in enumerate(period) if a.op is Op.VALIDATE]
        rest = [a.op for a in period[place[-1] + 1 :]]
        assert Op.F in rest  # the report of a batch waits for its last forward
        before = {a.op for a in period[: place[0]]}
        assert before <= {Op.F}


def changed(schedule: Schedule, rank: int, *moves: tuple[int, int]) -> Schedule:
    """With actions of a rank's period moved from one position to another."""
    period = list(schedule.programs[rank].period)
    for source, target in moves:
        period.insert(target, period.pop(source))
    programs = list(schedule.programs)
    programs[rank] = Program(tuple(period), programs[rank].epilogue)
    return replace(schedule, programs=tuple(programs))


def test_the_branch_is_proven_too() -> None:
    """Rank 1 runs 4 forwards before its VALIDATE, and rank 0 the fourth of them only behind 3 repeated ones.

    On a lane for 2 messages the third repair waits for rank 1, which waits for the fourth forward. Where every version
    is accepted, nobody waits.
    """
    good = make_schedule("gpipe", 2, 5, rule="provisional")
    assert [a.op for a in good.programs[0].period[3:5]] == [Op.F, Op.VALIDATE]
    bad = changed(good, 0, (4, 3))
    with pytest.raises(
        ScheduleError, match="deadlock: 2 ranks would wait for ever\n  rank 0 at SEND7@0>1/repair .*\n  rank 1 at F8@1 "
    ):
        check(bad)
    check(bad, window=3)


def test_nothing_that_was_made_of_a_rejected_version_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = make_schedule("zb-h2", 2, 4, rule="provisional")

    def forgetful(given: Schedule) -> tuple[Schedule, frozenset[object]]:
        whole, drafts = redone(given)
        programs = tuple(
            Program(tuple(a for a in p if not (a.op is Op.REDO and a.unit.first == 1)), e) for p, e in whole.programs
        )
        return replace(whole, programs=programs), drafts

    monkeypatch.setattr("penstock.schedule.proof.versions.redone", forgetful)
    with pytest.raises(ScheduleError, match="rank 0, I1.*has read a rejected version and has not been repeated"):
        check(schedule)


def test_refused() -> None:
    chunks = make_schedule("interleaved", 2, 4, rule="provisional")
    places = [i for i, a in enumerate(chunks.programs[0].period) if a.op is Op.VALIDATE]
    with pytest.raises(ScheduleError, match="the VALIDATEs of rank 0 must be adjacent"):
        check(changed(chunks, 0, (places[0], places[0] - 1)))
    with pytest.raises(ScheduleError, match="post-validation does not support sequence slices"):
        make_schedule("seq1f1b", 2, 4, rule="provisional")
    with pytest.raises(ScheduleError, match="REDO must not be written in a schedule"):
        check(parse_schedule(GOLDEN.read_text().replace("VALIDATE[t-1] F2^t", "VALIDATE[t-1] REDO0^t F2^t")))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("[F0^t+F1^t] VALIDATE[t-1] B0^t B1^t STEP[t]", "is fused"),
        ("F0^t B0^t F1^t B1^t STEP[t] VALIDATE[t]", "it decides on a batch of this period"),
    ],
)
def test_what_cannot_be_run_again_is_refused_by_name(row: str, message: str) -> None:
    drain = "drain 0: VALIDATE[t-1]\n" if "t-1" in row else ""
    text = f"schedule mine\nrule provisional\nmicrobatches 2\nnodes 0@0\nrank 0: {row}\n{drain}"
    with pytest.raises(ScheduleError, match=message):
        check(parse_schedule(text))
