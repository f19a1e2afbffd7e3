"""Averages of parallel pipelines in a schedule: legal with every method that does not take updates back."""

from itertools import pairwise

import pytest

from penstock.errors import ConfigError, ScheduleError
from penstock.schedule.add_options import extend
from penstock.schedule.build import smallest_microbatches
from penstock.schedule.ir.schedule import Op
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.methods.compatibility import compatible
from penstock.schedule.methods.data_parallel_sync import COMBINES, Combine, combine_fault
from penstock.schedule.methods.table import METHODS
from penstock.schedule.orders import ORDERS
from penstock.schedule.proof.check import check
from penstock.schedule.text_parser import parse_schedule
from support.schedules import make_schedule

OFFERED = [name for name, row in METHODS.items() if combine_fault("average", row.rule, row.spec.name) is None]
OFFERED = [name for name in OFFERED if not METHODS[name].needs_sharded_state]  # which needs the same weights everywhere


@pytest.mark.parametrize("method", OFFERED)
def test_every_update_is_averaged_before_it_is_read(method):
    stages = 2
    m = max(smallest_microbatches(method, stages) or 0, 4)
    proof = extend(make_schedule(method, stages, m), averages=3, decides=True)
    for period, epilogue in proof.schedule.programs:
        for actions in (period, epilogue):
            places = [i for i, action in enumerate(actions) if action.op is Op.STEP]
            assert [actions[i + 1].op for i in places] == [Op.AVERAGE] * len(places)
            assert all(actions[i + 1].unit == actions[i].unit._replace(every=3) for i in places)
    assert {action.op for period, _ in proof.schedule.programs for action in period} >= {Op.AVERAGE, Op.DECIDE}
    assert parse_schedule(str(proof.schedule)) == proof.schedule


def test_a_version_that_has_been_read_is_not_averaged_any_more():
    text = str(extend(make_schedule("stash", 2, 2), averages=2).schedule)
    late = text.replace("AVERAGE[t-1]%2 F1^t B0^t-1", "F1^t AVERAGE[t-1]%2 B0^t-1")
    assert late != text
    with pytest.raises(ScheduleError, match="must come between a STEP and the first read of its new version"):
        check(parse_schedule(late))


@pytest.mark.parametrize("kind", list(COMBINES))
def test_what_goes_with_which_rule(kind):
    order = ORDERS["gpipe"](2, 2)
    for rule in RULES.values():
        fault = compatible(order, rule, combine=kind)
        assert fault == combine_fault(kind, rule.name)
        own = rule.provisional or rule.rebinds or rule.copies_forward
        assert (fault is not None) == (kind != "reduce" and own)
    assert "is not supported" in (compatible(order, RULES["flush"], combine="gossip") or "")


def test_when_pipelines_meet():
    assert [b for b in range(9) if Combine("average", every=4).meets(b)] == [3, 7]
    assert not any(Combine().meets(b) for b in range(9))


@pytest.mark.parametrize("method", ["1f1b", "2bw", "stash", "interleaved"])
def test_sums_that_come_later_stand_after_the_update_where_they_are_added(method):
    combine = Combine("wsp", every=3, distance=2, lag=[1, 2])
    proof = extend(make_schedule(method, 2, 4), averages=combine.every, behind=combine.behind, decides=True)
    for period, epilogue in proof.schedule.programs:
        for actions in (period, epilogue):
            for before, action in pairwise(actions):
                assert (action.op is Op.AVERAGE) == (before.op is Op.STEP)
                if action.op is Op.AVERAGE:
                    assert action.unit.first == before.unit.first - 6
    assert parse_schedule(str(proof.schedule)) == proof.schedule


def test_averages_in_other_places_are_refused():
    schedule = extend(make_schedule("1f1b", 2, 2), averages=4).schedule
    assert extend(schedule, averages=4).schedule == schedule
    with pytest.raises(ConfigError, match="the schedule has AVERAGEs of its own, but pipelines that meet every 2"):
        extend(schedule, averages=2)
