"""Plans by simulation: the best of every candidate and cut, and a file that `penstock train` runs."""

import itertools
import json
import math
from random import Random
from types import SimpleNamespace

import pytest
import yaml

import penstock
from penstock.cli.plans.plan_tables import _said_of_delay
from penstock.errors import ConfigError, ScheduleError
from penstock.plan.planners.block_chain import BlockChain
from penstock.plan.planners.candidate_trial import Candidate, CandidateTrial
from penstock.plan.planners.proof_forecast import METHODS, least_microbatches, stage_forecast
from penstock.plan.planners.schedule_cache import KnownSchedules, ScheduleKey
from penstock.plan.planners.simulated import simulated_plans
from penstock.plan.planners.two_bw import Sized
from penstock.plan.profile.files import parse_profile
from penstock.plan.profile.from_piper import from_piper
from penstock.plan.profile.layer_graph import layer_graph
from penstock.plan.stages.device_hierarchy import DeviceLevel, Devices
from penstock.schedule.add_options import extend
from penstock.schedule.build import prove
from penstock.schedule.machine.shared_cores import SharedCores
from penstock.simulate.memory.held import HeldKind
from penstock.simulate.memory.predicted import MemoryOptions, StageBytes, peak_bytes
from penstock.simulate.simulate import play

HEAD = "format: penstock profile 1\nlayers:\n"
BLOCK = "- {{name: b{}, forward: {}, backward: {}, output: {}, stored: {}, parameters: {}}}\n"


def chain(random, layers):
    numbers = [
        [random.randint(1, 4), random.randint(1, 8), random.randint(0, 9), 30, random.randint(0, 9)]
        for _ in range(layers)
    ]
    return layer_graph(parse_profile(HEAD + "".join(BLOCK.format(n, *row) for n, row in enumerate(numbers)), "c"))


def batch_time(graph, method, cuts, width, m, bandwidth, again, cores=None):
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
        cores=cores and SharedCores(cores / width),
    )
    proof = prove(method, len(parts), m, decides=True)
    proof = extend(proof, reduces=True) if width > 1 else proof
    spans = [play(proof.lowered, costs, batches)[0].bubble().makespan for batches in (3, 5)]
    return (spans[1] - spans[0]) / 2, proof


def memory(graph, proof, cuts, again):
    """The most bytes of each stage, as the runtime counts them, from the bytes of its layers."""
    sizes, crossing = {}, [0, *(graph.layers[cut - 1].output for cut in cuts[1:-1]), 0]
    for stage, (a, b) in enumerate(itertools.pairwise(cuts)):
        layers = graph.layers[a:b]
        inputs = [sum(e.bytes for e in graph.edges if e.target == n) for n in range(a, b)]
        weights = sum(layer.parameters for layer in layers)
        passes = {
            HeldKind.GRAPH: sum(layer.stored for layer in layers),
            HeldKind.SAVED: sum(inputs),
            HeldKind.FORWARD: max(sum(inputs[:n]) + layer.stored for n, layer in enumerate(layers)),
            HeldKind.BACKWARD: max(sum(inputs[: n + 1]) + layer.stored for n, layer in enumerate(layers)),
        }
        ends = crossing[stage + 1], crossing[stage]
        sizes[stage] = StageBytes(weights, weights, (2 * weights,), 0, (weights,), (weights,), passes, *ends)
    peaks = peak_bytes(proof, sizes, MemoryOptions(blockwise=again, batches=5))
    return [peaks[0, rank] for rank in range(len(cuts) - 1)]


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
                if depth * width > 3:
                    continue
                for inner in itertools.combinations(range(1, 4), depth - 1):
                    cuts = (0, *inner, 4)
                    try:
                        time, proof = batch_time(graph, method, cuts, width, 4 // width, 1e4, again)
                    except ScheduleError:
                        continue
                    if limit == math.inf or max(memory(graph, proof, cuts, again)) <= limit:
                        best = min(best, time / 4)
            found = next((p for p in plans if p.settings["method"] == method), None)
            assert (found is None) == (best == math.inf)
            if found is not None:
                fits += 1
                assert found.seconds_per_sample == pytest.approx(best, rel=1e-9)
                assert max(stage.memory for stage in found.rating.stages) <= limit
        seconds = [float(f"{p.seconds_per_sample:.9g}") for p in plans]
        assert seconds == sorted(seconds)
    assert fits > 4


def test_plans_of_ranks_that_share_cores_are_the_best_of_all():
    """Two ranks have one and a half cores; parallel pipelines are in step, so each has its part of them."""
    graph, devices = chain(Random(1), 3), Devices((DeviceLevel(2, 1e4),), cores=1.5)
    plans, _ = simulated_plans({1: Sized(graph, 1, 4)}, devices)
    for method in ("1f1b", "gpipe", "2bw"):
        found = next(p for p in plans if p.settings["method"] == method).seconds_per_sample
        trials = [((0, 3), 1), ((0, 3), 2), ((0, 1, 3), 1), ((0, 2, 3), 1)]
        slowed, alone = (
            min(batch_time(graph, method, cuts, w, 4 // w, 1e4, False, cores)[0] / 4 for cuts, w in trials)
            for cores in (1.5, None)
        )
        assert found == pytest.approx(slowed, rel=1e-9)
        assert slowed > 1.05 * alone


@pytest.mark.parametrize(("parameters", "balance"), [(40000, [2, 2]), (32, [4])], ids=["pipeline", "one stage"])
def test_a_plan_is_trained(command, tmp_path, parameters, balance):
    """Four blocks: an embedding, two layers and a head; two copies of all where their sums of gradients are cheap."""
    rows = [(1, 2, 8, 64, parameters)] * 4
    (tmp_path / "p.yaml").write_text(HEAD + "".join(BLOCK.format(n, *row) for n, row in enumerate(rows)))
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 50)
    out = tmp_path / "plan.yaml"
    arguments = ["--devices", "2", "--bandwidth", "1kB", "--microbatches", "4", "--cost", "simulated", "--out", out]
    run = command("plan", "--profile", tmp_path / "p.yaml", *arguments, "--json")
    best = json.loads(run.stdout)["plans"][0]
    assert best["settings"] == yaml.safe_load(out.read_text())
    assert best["settings"]["method"].startswith("2bw")
    assert best["settings"]["balance"] == balance
    tiny = [
        "batches=2", "model.layers=2", "model.width=16", "model.heads=2", "model.context=8", "threads=1",
        "validation_samples=2", "sample_length=4", f"data={tmp_path / 'text.txt'}", f"out={tmp_path / 'runs'}",
    ]  # fmt: skip
    trained = command("train", "--plan", out, *(part for change in tiny for part in ("--set", change)))
    assert trained.returncode == 0, trained.stderr


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        (["1f1b", "2bw"], None),
        (["2bw", "2bw-eager", "eager"], "plan 3 is the first without"),
        (["2bw"], "no plan here is without"),
        ([None], None),
    ],
)
def test_a_best_plan_that_reads_late_weights_says_so(methods, said):
    """Times alone do not tell what that costs; plans of other cost functions name no method."""
    plans = [SimpleNamespace(settings={} if name is None else {"method": name}) for name in methods]
    lines = list(_said_of_delay(SimpleNamespace(plans=plans)))
    assert lines == [] if said is None else "weights that are late" in lines[0] and said in lines[0]


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
def test_the_forecast_is_what_the_proof_says(method):
    """So that what does not fit need not be proven."""
    for depth, m in ((1, 1), (1, 3), (2, 2), (2, 5), (3, 3), (3, 4), (3, 6), (5, 7), (5, 8), (5, 13)):
        try:
            proof = prove(method, depth, m, decides=True)
        except ScheduleError:
            continue
        for stage, facts in enumerate(proof.stages.values()):
            found = stage_forecast(method, depth, m, stage)
            assert found == (proof.schedule.rule, facts, proof.activations[stage]), (depth, m, stage)


@pytest.mark.parametrize("method", METHODS)
def test_schedules_are_those_that_the_proof_accepts(method):
    """With the same messages and window, though only that of the best plan is proven; and with as few microbatches."""
    known = KnownSchedules()
    for depth in (1, 2, 3, 4):
        least = least_microbatches(method, depth)
        for m, parallel in ((least, False), (least + 3, True)):
            key = ScheduleKey(method, depth, m, parallel)
            assert known._made(key)[0] == known.proof(key).lowered
    for m in range(depth, least):  # fewer microbatches than stages are no candidates
        with pytest.raises(ScheduleError):
            known.proof(ScheduleKey(method, depth, m, False))


@pytest.mark.parametrize("method", METHODS)
def test_no_plan_is_faster_than_its_bound(method):
    """On random chains, links and cuts: of the evenly divided compute, and of the slowest stage."""
    known, random = KnownSchedules(), Random(METHODS.index(method))
    for _ in range(40):
        depth, width = random.randint(1, 4), random.randint(1, 3)
        graph, m = chain(random, random.randint(depth, 6)), random.randint(max(depth, 2), 8)
        of = Candidate(Sized(graph, 1, m * width), method, depth, width, random.random() < 0.3)
        devices = Devices((DeviceLevel(12, random.choice([1.0, 10.0, 1e4])),), latency=random.choice([0.0, 0.7]))
        blocks = BlockChain(graph, of.recompute, 2.0)
        trial = CandidateTrial(of, blocks, devices, known)
        cuts = (0, *sorted(random.sample(range(1, len(graph.layers)), depth - 1)), len(graph.layers))
        if of.microbatches < least_microbatches(method, depth):
            continue
        (batch,) = trial._batch_times([cuts])
        slowest = max(blocks.times[a, b] for a, b in itertools.pairwise(cuts))
        assert of.bound(blocks, devices, slowest) * m * width <= batch * (1 + 1e-9)
        assert trial.least_batch(cuts) <= batch * (1 + 1e-9)


def test_what_does_not_fit_is_skipped_with_its_size():
    graph = chain(Random(1), 4)
    plans, skipped = simulated_plans({1: Sized(graph, 1, 4)}, Devices((DeviceLevel(3, 1e4),), 20.0))
    assert plans == []
    assert skipped
    assert all("does not fit" in each.bound for each in skipped)


def test_updates_are_no_bubble():
    """One device is never idle: what is not passes are updates, shared by the four microbatches of a batch."""
    text = "format: penstock profile 1\nlayers:\n- {name: a, forward: 1, backward: 2, step: 2}\n"
    graph = layer_graph(parse_profile(text, "one"))
    plans, _ = simulated_plans({1: Sized(graph, 1, 4)}, Devices((DeviceLevel(1, 1e9),)))
    (stage,) = plans[0].rating.stages
    assert stage.parts == {"compute": 3.0, "updates": 0.5, "bubble": 0.0}
    assert plans[0].rating.seconds == 3.5
