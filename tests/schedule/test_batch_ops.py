"""What stands directly after the last backward of a batch: reductions, ties, decisions."""

from __future__ import annotations

import pytest

from penstock.errors import ScheduleError
from penstock.schedule.build import prove
from penstock.schedule.ir.absolute_actions import actions_of
from penstock.schedule.ir.schedule import Op
from penstock.schedule.proof.check import check
from penstock.schedule.text_parser import parse_schedule
from penstock.schedule.transforms.batch_ops import with_decisions, with_reductions, with_ties
from support.schedules import make_schedule
from support.smallest_batch import CHAINS, least

GRID = [(method, d) for method in CHAINS for d in (1, 2, 3, 4, 6)]


def everything(schedule):
    """All three, added in the wrong order."""
    return with_decisions(with_ties(with_reductions(schedule, everywhere=True), {0, schedule.num_stages - 1}))


@pytest.mark.parametrize(("method", "depth"), GRID)
def test_every_batch_has_each_of_them_between_its_last_backward_and_its_update(method, depth):
    m = least(method, depth) + 1
    schedule = everything(make_schedule(method, depth, m))
    check(schedule)
    for rank in range(depth):
        actions = list(actions_of(schedule, rank, 5))
        place = {(a.op, a.unit.first): i for i, a in enumerate(actions)}
        for batch in range(5):
            tied = rank in (0, depth - 1)
            wanted = [Op.REDUCE, *([Op.TIE] if tied else []), Op.DECIDE]
            last = max(place[Op.B, k] for k in range(batch * m, (batch + 1) * m))
            assert [a.op for a in actions[last + 1 : last + 1 + len(wanted)]] == wanted
            assert all(a.unit.first == batch for a in actions[last + 1 : last + 1 + len(wanted)])
            assert place[Op.STEP, batch] > place[Op.DECIDE, batch]


@pytest.mark.parametrize("method", CHAINS)
@pytest.mark.parametrize("depth", [1, 2, 3, 4, 8])
def test_decisions_need_no_more_microbatches_and_no_more_memory(method, depth):
    """Two weight buffers are legal from m = d-1 (eager: 2d-2) with a global norm as well."""
    m = least(method, depth)
    plain, deciding = prove(method, depth, m), prove(method, depth, m, decides=True)
    assert deciding.stages == plain.stages
    assert deciding.activations == plain.activations
    if m > 1:
        with pytest.raises(ScheduleError, match=f"needs at least {m} microbatches"):
            prove(method, depth, m - 1, decides=True)


def test_they_print_and_parse():
    schedule = everything(make_schedule("2bw", 3, 3))
    assert parse_schedule(str(schedule)) == schedule
    assert "REDUCE[t-1] TIE[t-1] DECIDE[t-1]" in str(schedule)


SELF_WAIT = """
    microbatches 1
    nodes 0@0 1@1 2@0
    rank 0: F0@0^t F0@2^t B0@2^t DECIDE[t]@2 STEP[t]@2 B0@0^t DECIDE[t]@0 STEP[t]@0
    rank 1: F0^t B0^t DECIDE[t] STEP[t]
"""


def test_an_update_that_waits_for_its_own_rank_is_refused():
    """Rank 0 would step its second stage only after a decision that needs the backward of its first one."""
    with pytest.raises(ScheduleError, match="deadlock") as caught:
        check(parse_schedule(SELF_WAIT))
    assert "rank 0 at STEP[0]@2 waits for a reduction or decision that other ranks have not joined" in str(caught.value)
    late = SELF_WAIT.replace("DECIDE[t]@2 STEP[t]@2 B0@0^t DECIDE[t]@0", "DECIDE[t]@2 B0@0^t DECIDE[t]@0 STEP[t]@2")
    check(parse_schedule(late))


PLAIN = """
    microbatches 1
    nodes 0@0 1@1
    rank 0: F0^t B0^t REDUCE[t] TIE[t] DECIDE[t] STEP[t]
    rank 1: F0^t B0^t REDUCE[t] TIE[t] DECIDE[t] STEP[t]
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rank 0: F0^t B0^t REDUCE[t] TIE[t] DECIDE[t]", "rank 0: F0^t B0^t REDUCE[t] TIE[t]", "0 DECIDEs per batch"),
        ("rank 0: F0^t B0^t REDUCE[t] TIE[t] DECIDE[t]", "rank 0: F0^t B0^t REDUCE[t] DECIDE[t] TIE[t]", "TIE of its"),
        ("rank 0: F0^t B0^t REDUCE[t] TIE[t]", "rank 0: F0^t B0^t TIE[t] REDUCE[t]", "needs the REDUCE of its batch"),
        ("rank 0: F0^t B0^t REDUCE[t] TIE[t]", "rank 0: F0^t B0^t REDUCE[t] TIE[t] TIE[t]", "2 TIEs per batch"),
        ("rank 0: F0^t B0^t REDUCE[t]", "rank 0: F0^t B0^t REDUCE[t] REDUCE[t]", "2 REDUCEs per batch"),
        ("rank 1: F0^t B0^t REDUCE[t]", "rank 1: F0^t REDUCE[t] B0^t", "comes before 1 of batch t's backwards"),
        ("rank 1: F0^t B0^t REDUCE[t] TIE[t] DECIDE[t] STEP[t]", "rank 1: F0^t B0^t REDUCE[t] TIE[t] STEP[t] DECIDE[t]",
         "needs the DECIDE of its batch first"),
    ],
)  # fmt: skip
def test_planted_faults(old, new, message):
    check(parse_schedule(PLAIN))
    assert old in PLAIN
    with pytest.raises(ScheduleError, match=message.replace("[", r"\[")):
        check(parse_schedule(PLAIN.replace(old, new)))
