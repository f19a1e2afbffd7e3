"""The benchmark of links: hosts, rates and delays, all arms for a few microbatches, and what is made of a run."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.links import Turn, batches_of, turns_of
from benchmarks.loss_on_link import curve, seconds_to
from benchmarks.network.arms import AUTO, CASES, MAKERS, METHODS, STREAMS, TINY
from benchmarks.network.compare import TOLERANCE, core_costs, measured_costs, message_costs, predict, schedule_of
from benchmarks.network.hosts import LINKS, Network, sweep, why_not
from benchmarks.network.report import aims, group, most_sent

from penstock import SharedCores, make_schedule

ROOT = Path(__file__).parents[1]
NAME = TINY[0].name


@pytest.fixture(scope="session")
def hosts():
    if reason := why_not():
        pytest.skip(reason)


def row(arm="penstock 1f1b", link="100 Mbit/s", seconds=2.0, round_=0, **more):
    """A turn of four batches of two microbatches, with F = 1 and B = 2 on both stages."""
    work = [{f"{stage}:F": [8, 1.0], f"{stage}:B": [8, 2.0], f"{stage}:STEP": [4, 0.5]} for stage in range(2)]
    ranks = [{"seconds": seconds, "sent": 1000 * (r + 1), "received": 0, "work": work[r]} for r in range(2)]
    found = {"case": NAME, "link": link, "arm": arm, "round": round_, "m": 2, "microbatches": 8, "seconds": seconds}
    return found | {"ranks": ranks} | more


@pytest.mark.smoke
def test_a_turn_as_the_simulator_sees_it():
    """A batch of 1F1B of two stages and two microbatches takes three times F + B, and an update."""
    turn = row()
    costs = measured_costs(turn, 2)
    times = [(c.forward, c.backward_input + c.backward_weight, c.step) for c in costs.stages]
    assert times == [(1.0, 3.0 - 1.0, 0.5)] * 2
    assert core_costs(turn, 2, 2) is None
    assert predict(turn, make_schedule("1f1b", 2, 2), costs) == pytest.approx(4 * 9.5, rel=1e-3)
    # In the steady state of 2bw, four batches of two microbatches, and as many updates.
    assert predict(row("penstock 2bw"), make_schedule("2bw", 2, 2), costs) == pytest.approx(4 * 6.5, rel=1e-3)


def test_what_a_turn_takes_of_cores():
    """Half as long as by the clock; 4 seconds of each rank for 8 messages there and back; a tenth longer by others."""
    turn = row(cores={"busy": 33.0 + 2.0, "stolen": 0.0 + 4.4, "idle": 9.0})
    for at, rank in enumerate(turn["ranks"]):
        seconds = {f"{at}:F": 4.0, f"{at}:B": 8.0, f"{at}:STEP": 1.0, "wait": 1.0, "caller": 9.0}
        rank |= {"cpu": 18.0, "cores": seconds, "messages": {"lane": [8, 1.0, 1.0]}}
    costs = core_costs(turn, 2, 1)
    assert costs.cores == SharedCores(1)
    assert costs.stages[0].forward == pytest.approx(1.1 * 0.5)
    assert costs.stages[1].step == pytest.approx(1.1 * 0.25)
    assert costs.send == costs.receive == pytest.approx(1.1 * 0.25)
    assert predict(turn, make_schedule("1f1b", 2, 2), costs) == pytest.approx(1.1 * 34, rel=0.02)  # all work, on a core


def test_four_ranks_on_two_cores():
    """A recorded turn: by the clock it took a fourth more than ranks with cores of their own would."""
    lines = (ROOT / "benchmarks" / "results" / "links-2026-11-26-153205.jsonl").read_text().splitlines()
    turn = next(found for found in map(json.loads, lines) if found.get("link") == "loopback" and "2bw" in found["arm"])
    proof = schedule_of(turn)
    assert turn["seconds"] > 1.25 * predict(turn, proof, measured_costs(turn, 4))
    assert turn["seconds"] == pytest.approx(predict(turn, proof, core_costs(turn, 4, 2)), rel=TOLERANCE)


def test_the_schedule_of_a_turn():
    """An arm that measures its link tells what it found; the others have the schedule of their method."""
    measured = row("penstock 2bw auto")
    measured["ranks"][0]["activations"] = [3.0, 1.0]
    assert schedule_of(measured).activations == (3, 1)
    assert schedule_of(row("penstock 2bw")).activations == (2, 1)


def test_turns_of_all_cases():
    """Every arm of a case on each of its links; those that divide batches train a quarter."""
    arguments = type("", (), {"links": list(LINKS), "arms": list(MAKERS)})
    turns = turns_of(CASES, arguments)
    assert len(turns) == sum(len(case.arms) * len(case.links or LINKS) for case in CASES)
    assert batches_of(Turn(CASES[1], LINKS["loopback"], "torch 1f1b"), 64) == 8
    assert batches_of(Turn(CASES[1], LINKS["loopback"], "torch ddp"), 64) == 2
    assert {*STREAMS, *AUTO} <= METHODS.keys() <= MAKERS.keys()


def test_the_time_of_a_message():
    """Frames of Ethernet with 1,448 bytes of a message have 66 more."""
    nbytes = 125_000 * 1448 / 1514
    assert LINKS["100 Mbit/s"].seconds(nbytes) == pytest.approx(0.01)
    assert LINKS["1 Gbit/s, 5 ms"].seconds(nbytes) == pytest.approx(0.006)
    assert LINKS["1 Gbit/s, 5 ms"].occupied(nbytes) == pytest.approx(0.001)
    assert LINKS["loopback"].seconds(nbytes) == 0
    assert message_costs(LINKS["1 Gbit/s, 5 ms"], nbytes) == pytest.approx({"latency": 0.005, "transfer": 0.001})


def test_aims_of_a_run():
    """Ratios are taken within a round; a round that was interrupted is left out."""
    arms = {"penstock 2bw auto": 1.0, "penstock 1f1b": 2.0, "torch 1f1b": 3.0}
    rows = [row(arm, link, s * (1 + r), r) for arm, s in arms.items() for link in LINKS for r in range(2)]
    rows.append(row("torch 1f1b", "loopback", 9.0, 2))
    turns = group(rows)
    assert {len(found) for found in turns.values()} == {2}
    found = aims(turns)
    assert [aim.found for aim in found if aim.what == "penstock 1f1b / torch 1f1b"] == [[1.5, 1.5]] * len(LINKS)
    itself = [aim for aim in found if "itself" in aim.what]
    assert [aim.link for aim in itself] == [name for name, link in LINKS.items() if link.mbit]
    assert {ratio for aim in itself for ratio in aim.found} == {1.0}


def test_bytes_of_the_host_that_sends_most():
    """All ranks of the loopback read one counter, which has the bytes of both."""
    assert most_sent(row()) == 2000
    assert most_sent(row(link="loopback")) == 750


@pytest.mark.processes
@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("name", [name for name in LINKS if name != "loopback"])
def test_a_link_has_its_rate_and_its_delay(name):
    """No socket is faster than the link, no byte earlier than its delay, and the interface counts what was sent."""
    link = LINKS[name]
    nbytes = 12_500 * link.mbit  # a tenth of a second
    with Network(2) as network:
        found = network.probe(link, nbytes)
    assert link.mbit / 20 < found["mbit"] < 1.05 * link.mbit
    assert 2 * link.delay <= found["rtt"] < 2 * link.delay + 0.2
    assert link.delay < found["message"] < 1
    assert nbytes < found["sent"] < 1.1 * (nbytes + 2e6)


@pytest.mark.processes
@pytest.mark.usefixtures("hosts")
def test_nothing_is_left_of_a_network(monkeypatch):
    """Neither at its end, nor, when the next one is made, of a process that was killed."""

    def left():
        return [path.name for path in Path("/run/netns").iterdir() if path.name in made]

    network = Network(1)
    made = [network.namespace(place) for place in (0, "lo", "switch")]
    with network:
        assert len(left()) == 3
    assert left() == []
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    monkeypatch.setattr("os.getpid", lambda: ended.pid)
    abandoned = Network(1)
    abandoned.__enter__()
    made = [abandoned.namespace(place) for place in (0, "lo", "switch")]
    assert len(left()) == 3
    sweep()
    assert left() == []


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.usefixtures("hosts")
def test_links_of_every_arm(tmp_path):
    """In a process of its own, as a person starts it, because it begins others inside namespaces."""
    options = ["--tiny", "--count", "4", "--rounds", "1", "--probe", "0.02", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.links", *options, "--links", "1 Gbit/s, 5 ms"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    (raw,) = tmp_path.iterdir()
    header, *probes = (json.loads(line) for line in raw.read_text().splitlines())
    probes, turns = [r for r in probes if "probe" in r], [r for r in probes if "arm" in r]
    assert {"machine", "command"} <= header.keys()
    assert [probe["probe"] for probe in probes] == ["1 Gbit/s, 5 ms"]
    assert {(turn["link"], turn["arm"]) for turn in turns} == {("1 Gbit/s, 5 ms", arm) for arm in MAKERS}
    for turn in turns:
        assert 0 < turn["seconds"] < math.inf
        assert all(rank["sent"] > 0 and rank["received"] > 0 for rank in turn["ranks"])
        if turn["arm"] in METHODS:
            assert all(("in_flight" in rank) == (turn["arm"] in AUTO) for rank in turn["ranks"])
            stages = make_schedule(METHODS[turn["arm"]], 2, 2).schedule.num_stages
            assert all(cost.forward > 0 and cost.step > 0 for cost in measured_costs(turn, stages).stages)
        assert f"| {turn['arm']} | " in ran.stdout
    assert "measured / shared cores" in ran.stdout


def test_when_a_curve_of_losses_comes_down_to_another() -> None:
    """The last point of a run is its validation; between two evaluations the curve is straight."""
    rows = [
        {"batch": 0, "seconds": 1.0},
        {"batch": 1, "seconds": 3.0},
        {"evaluated": 1, "loss": 4.0},
        {"update": 0, "loss": 5.0},
        {"validation_loss": 2.0, "seconds": 9.0},
    ]
    points = curve(rows)
    assert [tuple(point.values()) for point in points] == [(1, 1.0, 4.0), (2, 3.0, 2.0)]
    assert [seconds_to(loss, points) for loss in (5.0, 3.0, 2.0, 1.0)] == [1.0, 2.0, 3.0, None]
