"""HetPipe's global staleness: its equation, and what forwards lack in the order in which a rank runs its actions."""

import json
from pathlib import Path

import pytest

from penstock.schedule.add_options import extended
from penstock.schedule.ir.absolute_actions import actions_of
from penstock.schedule.ir.schedule import Kind, Op, passes
from penstock.schedule.proof.check import check
from penstock.schedule.text_parser import parse_schedule
from penstock.simulate.costs import Costs
from penstock.simulate.missing_updates import missing_updates
from penstock.simulate.simulate import simulate_schedule
from support.schedules import make_schedule

GOLDEN = Path(__file__).parents[1] / "golden" / "wave_synchronous.txt"


def counted(schedule, rank, batches):
    """The most updates of others that a forward lacks, by running the actions of a rank one after the other."""
    others, newest, most = {}, {}, 0  # updates of others in each version of a stage, and in its newest one
    for action in actions_of(schedule, rank, batches):
        for p in passes(action):
            number = p.unit.first
            if p.op is Op.STEP:
                newest[p.stage] = number + 1
                others[p.stage, number + 1] = others.get((p.stage, number), 0)
            elif p.op is Op.AVERAGE:  # all waves up to this batch
                others[p.stage, newest[p.stage]] = number + 1
            elif p.op is Op.F and p.unit.kind is Kind.TRAIN:
                read = others.get((p.stage, p.reads.versions[0]), 0)
                most = max(most, number // schedule.microbatches - read)
    return most


@pytest.mark.parametrize(("in_flight", "distance"), [(1, 0), (2, 0), (2, 1), (4, 0), (4, 1), (4, 4), (7, 4)])
def test_the_equation(in_flight, distance):
    """s_global = (D + 1)(s_local + 1) + s_local - 1 with s_local = N_m - 1, on the first rank of stashing."""
    schedule = extended(make_schedule("stash", in_flight, 1), averages=in_flight, behind=in_flight * distance)
    local = in_flight - 1
    found = missing_updates(schedule)
    assert found[0] == max(found) == (distance + 1) * (local + 1) + local - 1
    assert simulate_schedule(schedule, Costs.uniform(schedule)).missing_updates == found


@pytest.mark.parametrize("name", ["stash", "1f1b", "2bw", "vertical-sync", "newest", "gpipe", "interleaved"])
@pytest.mark.parametrize(("m", "every", "waves"), [(4, 1, 0), (4, 3, 0), (4, 3, 2), (8, 2, 1)])
def test_what_forwards_lack_in_the_order_of_a_rank(name, m, every, waves):
    schedule = extended(make_schedule(name, 4, m), averages=every, behind=every * waves)
    found = [counted(schedule, rank, every * (waves + 6) + 3) for rank in range(4)]
    assert missing_updates(schedule) == tuple(found)


def test_pipelines_that_add_all_gradients_lack_nothing():
    schedule = make_schedule("1f1b", 2, 4)
    found = simulate_schedule(schedule, Costs.uniform(schedule))
    assert (missing_updates(schedule), found.missing_updates) == (None, None)
    assert "missing_updates" not in found.figures()


def test_simulate_prints_it(command):
    wanted = list(missing_updates(check(parse_schedule(GOLDEN.read_text())).schedule))
    assert wanted == [4, 3]
    assert json.loads(command("simulate", "--file", GOLDEN, "--json").stdout)["missing_updates"] == wanted
    said = " ".join(command("simulate", "--file", GOLDEN).stdout.split())
    assert "missing updates 4 3 updates of another pipeline that a forward lacks" in said
