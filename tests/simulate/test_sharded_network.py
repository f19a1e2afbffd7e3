"""What sharded schedules send over the network, and how long passes and updates wait for it."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from penstock.errors import ConfigError
from penstock.schedule.build import prove
from penstock.simulate.costs import Costs
from penstock.simulate.sharding_traffic import Network
from penstock.simulate.simulate import simulate_schedule
from support.command_line import run


def simulated(proof, width, bandwidth, batches=1, parameters=1.0):
    network = Network(proof.schedule, width, bandwidth, parameters)
    return simulate_schedule(proof, replace(Costs.uniform(proof.schedule), network=network), batches)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize(("level", "gathers", "sums"), [("optimizer", 1, 2), ("gradients", 1, 1), ("full", 2, 1)])
def test_bytes_are_those_of_zero(level, gathers, sums, width):
    """(w - 1) / w of a weight for each gather, of a gradient for each reduce-scatter, of two for a whole sum."""
    proof = prove("gpipe", 2, 4, sharding=level)
    network = Network(proof.schedule, width)
    whole = 4 * (width - 1) / width
    gathers = 1 if level == "full" else gathers  # one stage stays gathered from its forwards to its backwards
    for rank in range(2):
        assert network.per_batch(rank) == {"gathers": gathers * whole, "reductions": sums * whole}


def test_traffic_of_breadth_first_does_not_grow_with_m_and_that_of_depth_first_does():
    def sent(method, m):
        proof = prove(method, 4, m, options={"chunks": 4}, sharding="full")
        return sum(Network(proof.schedule, 4).per_batch(0).values())

    assert sent("breadth-first", 4) == sent("breadth-first", 32) == 3 / 4 * 4 * (6 + 4)
    assert sent("breadth-first", 8) < sent("interleaved", 8) < sent("interleaved", 16)


def test_gathers_and_sums_of_a_rank_share_one_lane_and_passes_wait_for_what_they_read():
    proof = prove("breadth-first", 1, 2, options={"chunks": 3}, sharding="full:weights=1")
    simulation = simulated(proof, 2, 0.5)  # each gather, and each sum, takes 4
    intervals = simulation.timeline.intervals
    lane = sorted((i.start, i.end) for i in intervals if i.what in ("GATHER", "REDUCE"))
    assert len(lane) == 5 + 3
    assert all(after[0] >= before[1] for before, after in pairwise(lane))
    assert all(end - start == pytest.approx(4) for start, end in lane)
    for stage in range(3):
        gathered = min(i.end for i in intervals if i.what == "GATHER" and i.stage == stage)
        assert min(i.start for i in intervals if i.what == "F" and i.stage == stage) >= gathered
    (step, *_) = [i for i in intervals if i.what == "STEP"]
    assert step.start >= max(i.end for i in intervals if i.what == "REDUCE" and i.stage == step.stage)
    assert simulation.shards.exposed > 0
    assert simulation.shards.busy == (pytest.approx(8 * 4),)
    passes = [(i.start, i.end) for i in simulation.timeline.work()]
    both = sum(max(min(a[1], b[1]) - max(a[0], b[0]), 0) for a in lane for b in passes)
    assert simulation.shards.hidden == (pytest.approx(both),)
    assert 0 < both < 6
    free = simulated(proof, 2, float("inf"))
    assert free.shards.exposed == 0
    ends = [max(i.end for i in each.timeline.work()) for each in (simulation, free)]  # both begin at 0, with a gather
    assert ends[0] - ends[1] == simulation.shards.exposed


def test_the_slack_of_2bw_hides_what_a_flush_exposes():
    """Passes of one version do not wait for the gather of the next one."""
    batches, times = 6, 4  # a sum and a gather take 4 each
    exposed = {}
    for method in ("1f1b", "2bw"):
        simulation = simulated(prove(method, 2, 16, sharding="gradients"), 2, 2 / times, batches)
        exposed[method] = simulation.shards.exposed
    assert exposed["1f1b"] >= 2 * times * (batches - 1)
    assert exposed["2bw"] <= 2 * times  # of the last update alone, when the pipeline is drained


@pytest.mark.parametrize(("name", "value"), [("width", 0), ("bandwidth", 0.0), ("parameters", -1.0)])
def test_what_is_no_network_is_refused(name, value):
    schedule = prove("1f1b", 2, 2, sharding="full").schedule
    with pytest.raises(ConfigError, match=name):
        Network(schedule, **{"width": 2, name: value})


def test_the_command_prints_gathers_sums_and_bytes(monkeypatch, capsys):
    sharded = (monkeypatch, capsys, "simulate", "breadth-first", "--sharding", "full", "--width", "4")
    code, printed, _ = run(*sharded, "--parameters", "8e6", "--bandwidth", "1e6", "--json")
    found = json.loads(printed)["sharding"]
    assert code == 0
    assert found["gathers"] == found["reductions"] == [2] * 4
    assert found["bytes_gathered"] == [2 * 3 / 4 * 1e6 * 4] * 4
    assert "gathered at once" in run(*sharded)[1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--width", "4"), "--width goes with --sharding"),
        (("--bandwidth", "4"), "--bandwidth goes with --sharding"),
        (("--sharding", "full", "--bandwidth", "0"), "bandwidth must be greater than 0"),
        (("--sharding", "all"), "unknown sharding 'all'"),
    ],
)
def test_options_of_the_network_without_a_sharding_are_refused(monkeypatch, capsys, options, said):
    code, _, error = run(monkeypatch, capsys, "simulate", "1f1b", *options)
    assert code != 0
    assert said in " ".join(error.split())


def test_recomputes_and_sharding_go_together_on_the_command_line(monkeypatch, capsys):
    code, printed, _ = run(
        monkeypatch, capsys, "show", "1f1b", "--sharding", "full", "--segments", "1", "--stages", "2", "--text"
    )
    assert code == 0
    assert "sharding full:weights=2:gradients=2" in printed
    assert "GATHER[t]^t F0^t" in printed
    assert "R0^t" in printed
