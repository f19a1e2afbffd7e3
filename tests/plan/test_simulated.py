"""Plans by simulation: the best of every candidate and cut, and a file that `penstock train` runs."""

import itertools
import json
import math
from random import Random

import pytest
import yaml

import penstock
from penstock.errors import ConfigError, ScheduleError
from penstock.plan.planners.simulated import METHODS, simulated_plans
from penstock.plan.planners.two_bw import Sized
from penstock.plan.profile.files import parse_profile
from penstock.plan.profile.from_piper import from_piper
from penstock.plan.profile.layer_graph import layer_graph
from penstock.plan.stages.devices import DeviceLevel, Devices
from penstock.schedule.build import prove
from penstock.schedule.extend import extend
from penstock.simulate.simulate import play

HEAD = "format: penstock profile 1\nlayers:\n"
BLOCK = "- {{name: b{}, forward: {}, backward: {}, output: {}, stored: {}, parameters: {}}}\n"


def chain(random, layers):
    numbers = [
        [random.randint(1, 4), random.randint(1, 8), random.randint(0, 9), 30, random.randint(0, 9)]
        for _ in range(layers)
    ]
    return layer_graph(parse_profile(HEAD + "".join(BLOCK.format(n, *row) for n, row in enumerate(numbers)), "c"))


def batch_time(graph, method, cuts, width, m, bandwidth, again):
    """What two more batches take on the machine that plays schedules action by action, halved."""
    parts = [graph.layers[a:b] for a, b in itertools.pairwise(cuts)]
    forwards = [sum(layer.forward for layer in part) for part in parts]
    backwards = [sum(layer.seconds for layer in part) - f + f * again for part, f in zip(parts, forwards, strict=True)]
    largest = max(sum(layer.parameters for layer in part) for part in parts)
    crossing = [sum(e.bytes for e in graph.edges if e.source < cut <= e.target) for cut in cuts[1:-1]]
    costs = penstock.Costs(
        tuple(penstock.StageCost(f, b, 0.0) for f, b in zip(forwards, backwards, strict=True)),
        transfer=max(crossing, default=0.0) / bandwidth,
        collective=2 * (width - 1) / width * largest / bandwidth,
    )
    proof = prove(method, len(parts), m)
    proof = extend(proof, reduces=True) if width > 1 else proof
    spans = [play(proof.lowered, costs, batches)[0].bubble().makespan for batches in (3, 5)]
    return (spans[1] - spans[0]) / 2, proof


def memory(graph, proof, cuts, again):
    """The bytes of each stage: parameters, versions, gradients and Adam's moments; activations in flight."""
    found = []
    for stage, (a, b) in enumerate(itertools.pairwise(cuts)):
        layers = range(a, b)
        inputs = {n: sum(e.bytes for e in graph.edges if e.target == n) for n in layers}
        kept = sum(min(inputs[n], graph.layers[n].stored) if again else graph.layers[n].stored for n in layers)
        copies = list(proof.stages.values())[stage].buffers + 2
        held = float(proof.activations[stage]) * kept + (max(graph.layers[n].stored for n in layers) if again else 0)
        found.append(sum(graph.layers[n].parameters for n in layers) * copies + held)
    return found


@pytest.mark.parametrize("limit", [math.inf, 260.0])
def test_simulated_plans_are_the_best_of_all(limit):
    """Four layers, three devices, four microbatches: every method, depth, width, cut, with and without recompute."""
    fits = 0
    for seed in range(2):
        graph = chain(Random(seed), 4)
        devices = Devices((DeviceLevel(3, 1e4),), None if limit == math.inf else limit)
        plans, _ = simulated_plans({1: Sized(graph, 1, 4)}, devices)
        for method in METHODS:
            best = math.inf
            for depth, width, again in itertools.product((1, 2, 3), (1, 2), (False, True)):
                if depth * width > 3 or (method != "1f1b" and depth == 1):
                    continue
                for inner in itertools.combinations(range(1, 4), depth - 1):
                    cuts = (0, *inner, 4)
                    try:
                        time, proof = batch_time(graph, method, cuts, width, 4 // width, 1e4, again)
                    except ScheduleError:
                        continue
                    if max(memory(graph, proof, cuts, again)) <= limit:
                        best = min(best, time / 4)
            found = next((p for p in plans if p.settings["method"] == method), None)
            assert (found is None) == (best == math.inf)
            if found is not None:
                fits += 1
                assert found.seconds_per_sample == pytest.approx(best, rel=1e-9)
                assert max(stage.memory for stage in found.rating.stages) <= limit
        assert [p.seconds_per_sample for p in plans] == sorted(p.seconds_per_sample for p in plans)
    assert fits > 4


def test_a_plan_is_trained(command, tmp_path):
    """Four blocks: an embedding, two layers and a head."""
    rows = [(1, 2, 8, 64, 32)] * 4
    (tmp_path / "p.yaml").write_text(HEAD + "".join(BLOCK.format(n, *row) for n, row in enumerate(rows)))
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 50)
    out = tmp_path / "plan.yaml"
    arguments = ["--devices", "2", "--bandwidth", "1kB", "--microbatches", "4", "--cost", "simulated", "--out", out]
    run = command("plan", "--profile", tmp_path / "p.yaml", *arguments, "--json")
    best = json.loads(run.stdout)["plans"][0]
    assert best["settings"] == yaml.safe_load(out.read_text())
    assert best["settings"]["balance"] == [2, 2]
    tiny = [
        "batches=2", "model.layers=2", "model.width=16", "model.heads=2", "model.context=8", "threads=1",
        "validation_samples=2", "sample_length=4", f"data={tmp_path / 'text.txt'}", f"out={tmp_path / 'runs'}",
    ]  # fmt: skip
    trained = command("train", "--plan", out, *(part for change in tiny for part in ("--set", change)))
    assert trained.returncode == 0, trained.stderr


def test_what_cannot_be_simulated_is_said(command, tmp_path):
    sizes = {"parameterSize": 0.0, "memoryUsageA": 0.0, "memoryUsageB": 0.0}
    way = {"id": "a", "timePerSample": 1.0, "syncTimeFw": {}, "syncTimeBw": {}, **sizes}
    piper = json.dumps({"nodes": [{"id": 1, "TMPCs": {"1": [way]}}], "edges": []})
    two = Devices((DeviceLevel(2, 1.0),))
    with pytest.raises(ConfigError, match="layer '1' has options only"):
        simulated_plans({1: Sized(layer_graph(from_piper(piper)), 1, 4)}, two)
    backwards = (
        HEAD + "- {name: b, forward: 1, backward: 1, inputs: [a]}\n- {name: a, forward: 1, backward: 1, inputs: []}\n"
    )
    with pytest.raises(ConfigError, match="order the profile so that each reads earlier ones"):
        simulated_plans({1: Sized(layer_graph(parse_profile(backwards, "b")), 1, 4)}, two)
    (tmp_path / "p.yaml").write_text(HEAD + BLOCK.format(0, 1, 2, 3, 4, 5))
    run = command("plan", "--profile", tmp_path / "p.yaml", "--devices", "1", "--out", tmp_path / "plan.yaml")
    assert run.returncode == 2
    assert "which --cost simulated finds" in " ".join(run.stderr.split())


@pytest.mark.parametrize("method", METHODS)
def test_no_less_is_held_with_more_microbatches(method):
    """So that what does not fit with few microbatches need not be proven with many."""
    for depth in (2, 3, 5):
        held = [
            [float(held) for held in prove(method, depth, m).activations] for m in (2 * depth, 2 * depth + 1, 5 * depth)
        ]
        assert all(a <= b for few, more in itertools.pairwise(held) for a, b in zip(few, more, strict=True))
        assert held[0] == held[-1] or method == "gpipe"


def test_what_does_not_fit_is_skipped_with_its_size():
    graph = chain(Random(1), 4)
    plans, skipped = simulated_plans({1: Sized(graph, 1, 4)}, Devices((DeviceLevel(3, 1e4),), 20.0))
    assert plans == []
    assert skipped
    assert all("does not fit" in each.bound for each in skipped)
