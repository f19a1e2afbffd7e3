"""Plans by simulation: the best of every candidate and cut, and a file that `penstock train` runs."""

import itertools
import json
import math
from collections import defaultdict
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from penstock.cli.plans.plan_tables import _said_of_delay
from penstock.errors import ConfigError, ScheduleError
from penstock.plan.candidates import candidate as candidate_module, schedule_cache
from penstock.plan.candidates.block_chain import BlockChain
from penstock.plan.candidates.candidate import Candidate, NoPlanError
from penstock.plan.candidates.candidate_bounds import least_of_largest
from penstock.plan.candidates.planned_methods import (
    METHODS,
    PLANNED,
    USUAL,
    ActivationMemory,
    least_microbatches,
    stage_forecast,
)
from penstock.plan.candidates.schedule_cache import KnownSchedules, ScheduleKey
from penstock.plan.planners.two_bw import Sized
from penstock.plan.profile.files import parse_profile
from penstock.plan.profile.layer_graph import layer_graph
from penstock.plan.profile.other_programs import from_piper
from penstock.plan.simulated.candidate_trial import CandidateTrial
from penstock.plan.simulated.fitting_cuts import place_of
from penstock.plan.simulated.plan_search import simulated_plans
from penstock.plan.stages.device_hierarchy import DeviceLevel, Devices, StageDevices
from penstock.schedule.ir.rank_numbers import RANK_ORDERS
from penstock.simulate.memory.held import HeldKind
from penstock.simulate.memory.memory_simulation import most_held
from support.every_plan import KEPT, RECOMPUTED, Case, EveryPlan, kinds_of, looked_into, proof_of

HEAD = "format: penstock profile 1\nlayers:\n"
BLOCK = "- {{name: b{}, forward: {}, backward: {}, output: {}, stored: {}, parameters: {}}}\n"
HOST = 4e7  # bytes per second
OTHERS = [name for name in METHODS if name not in USUAL]


def key_of(method, depth, m, parallel, sharding="none"):
    """A schedule as candidates have it: some methods are fully sharded by themselves."""
    return ScheduleKey(method, depth, m, parallel, "full" if method.full else sharding)


def chain(random, layers, large=1, moves=False):
    """Blocks whose backwards also come in halves, which take a bit longer.

    With large parameters, or activations that can be moved to the host, if asked for.
    """
    text = HEAD
    for n in range(layers):
        forward, first, second = (random.randint(1, 4) for _ in range(3))
        text += f"- {{name: b{n}, forward: {forward}, backward: {first + second - 0.5}, backward_input: {first}, "
        text += f"backward_weight: {second}, late: {random.randint(10, 40)}, output: {random.randint(0, 9)}, "
        text += f"stored: {30 if large == 1 else 4 * large}, parameters: {2 * large * random.randint(0, 4)}, "
        text += f"movable: {random.randint(22, 26)}, movable_with: {random.randint(2, 4)}, " if moves else ""
        text += f"largest: {large}, step: {n % 3}}}\n"
    return layer_graph(parse_profile(text, "c"))


def best_of_all(graph, method, devices, m, skipped=()):
    """The fastest of all plans with one method; None if none fits."""
    case = Case({1: graph}, m, devices, (method,))
    rated = (EveryPlan(case, kind).plans() for kind in kinds_of(case, looked_into(case, skipped)))
    return min(itertools.chain.from_iterable(rated), default=None)


def assert_best_of_all(graph, methods, devices, m=4):
    """Plans of some methods, each alone: the best of each; returns how many fit."""
    fits = 0
    for method in methods:
        found = simulated_plans({1: Sized(graph, 1, m)}, devices, methods=(method,))
        plans, skipped = found.plans, found.skipped
        best = best_of_all(graph, method, devices, m, skipped)
        assert (not plans) == (best is None), method
        if plans:
            fits += 1
            assert plans[0].seconds_per_sample == pytest.approx(best.seconds, rel=1e-9), method
            assert max(stage.memory for stage in plans[0].rating.stages) <= (devices.memory or math.inf)
    return fits


def limited(limit=None, bandwidth=1e4, count=3):
    return Devices((DeviceLevel(count, bandwidth),), limit)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, 230.0])
def test_simulated_plans_are_the_best_of_all(limit):
    """Four layers, three devices: depths, widths, cuts, recompute of each rank, sharding."""
    assert assert_best_of_all(chain(Random(0), 4), ("1f1b", "2bw", "zb-h1", "zb-v"), limited(limit)) > 2


@pytest.mark.parametrize("limit", [100.0, 160.0])
def test_fully_sharded_plans_are_the_best_of_all(limit):
    """Five layers as four stages of a rank, and two or four pipelines."""
    methods, devices = ("layered:chunks=4", "2bw-layered:chunks=4"), limited(limit, 30.0, 4)
    assert assert_best_of_all(chain(Random(3), 5), methods, devices) == 2


@pytest.mark.parametrize(("method", "limit"), [("1f1b", 3.5e8), ("2bw", 5e8)])
def test_plans_with_optimizer_states_on_the_host_are_the_best_of_all(method, limit):
    graph, devices = chain(Random(4), 4, 10**7), replace(limited(limit, 1e9), host=HOST)
    assert assert_best_of_all(graph, (method,), devices) == 1
    (plan,) = simulated_plans({1: Sized(graph, 1, 4)}, devices, methods=(method,)).plans
    assert plan.settings["offload_optimizer"] == "pieces"
    assert assert_best_of_all(graph, (method,), limited(limit, 1e9)) == 0


MOVING = [(360.0, 1e3, True), (360.0, 12.0, True), (280.0, 20.0, True), (280.0, 15.0, False), (360.0, 4.0, False)]


@pytest.mark.long
@pytest.mark.parametrize(("limit", "host", "offloads"), MOVING)
def test_plans_with_activations_on_the_host_are_the_best_of_all(limit, host, offloads):
    graph, devices = chain(Random(4), 4, moves=True), replace(limited(limit, count=4), host=host)
    assert assert_best_of_all(graph, ("gpipe",), devices, 12) == 1


@pytest.mark.parametrize(("limit", "host", "offloads"), MOVING[1:4:2])
def test_plans_have_activations_on_the_host_where_that_is_faster(limit, host, offloads):
    """With copies that ranks wait for, but not with such as leave too much on the device."""
    graph, devices = chain(Random(4), 4, moves=True), replace(limited(limit, count=4), host=host)
    found = simulated_plans({1: Sized(graph, 1, 12)}, devices, methods=("gpipe",))
    (plan,), skipped = found.plans, found.skipped
    (other,) = simulated_plans({1: Sized(graph, 1, 12)}, replace(devices, host=None), methods=("gpipe",)).plans
    assert ("offload" in plan.settings) == (plan.seconds_per_sample < other.seconds_per_sample) == offloads
    assert max(stage.memory for stage in plan.rating.stages) <= limit
    assert any("wait for them" in each.bound for each in skipped) or offloads


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_simulated_plans_of_all_methods_are_the_best_of_all(seed):
    """Five layers; ranks with several stages, too, and slow links."""
    graph, fits = chain(Random(seed), 5), 0
    for devices in (limited(), limited(bandwidth=3.0), limited(300.0), limited(180.0), limited(140.0)):
        fits += assert_best_of_all(graph, METHODS, devices)
    assert fits > 40


def test_other_methods_are_listed_where_they_are_faster():
    """Of all that flush the best plan is that of all methods, tried one by one; it is proven."""
    graph, devices = chain(Random(1), 5), limited(bandwidth=30.0)
    found = simulated_plans({1: Sized(graph, 1, 4)}, devices)
    plans, skipped = found.plans, found.skipped
    seconds = [float(f"{p.seconds_per_sample:.9g}") for p in plans]
    assert seconds == sorted(seconds)
    alone = [simulated_plans({1: Sized(graph, 1, 4)}, devices, methods=(name,)).plans for name in METHODS]
    flushing = [found[0].seconds_per_sample for found in alone if found and PLANNED[found[0].planner].flushes]
    assert min(p.seconds_per_sample for p in plans if PLANNED[p.planner].flushes) == pytest.approx(min(flushing))
    assert any(each.what.startswith("zb-v") and "at least" in each.bound for each in skipped)
    (ahead,), (late,) = (alone[METHODS.index(name)] for name in ("2bw-ahead", "2bw"))
    assert ahead.seconds_per_sample == late.seconds_per_sample
    assert any(each.what == "2bw-ahead" and "as long as 2bw" in each.bound for each in skipped)


def test_plans_of_ranks_that_share_cores_are_the_best_of_all():
    """Two ranks have one and a half cores; parallel pipelines are in step, so each has its part of them."""
    graph, devices = chain(Random(1), 3), Devices((DeviceLevel(2, 1e4),), cores=1.5)
    plans = simulated_plans({1: Sized(graph, 1, 4)}, devices).plans
    for method in ("1f1b", "gpipe", "2bw"):
        found = next(p for p in plans if p.settings["method"] == method).seconds_per_sample
        slowed, alone = (
            best_of_all(graph, method, each, 4).seconds for each in (devices, replace(devices, cores=None))
        )
        assert found == pytest.approx(slowed, rel=1e-9)
        assert slowed > 1.05 * alone


@pytest.mark.long
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
    written = yaml.safe_load(out.read_text())
    assert written.pop("predicted")["batch"] > 0
    assert best["settings"] | {"model": {"planned": "model"}} == written
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
        (["3bw", "2bw", "1f1b"], "plan 3 is the first without"),
        ([None], None),
    ],
)
def test_a_best_plan_that_reads_late_weights_says_so(methods, said):
    """Times alone do not tell what that costs; plans of other cost functions name no method."""
    plans = [SimpleNamespace(settings={} if name is None else {"method": name}) for name in methods]
    lines = list(_said_of_delay(SimpleNamespace(plans=plans)))
    late = "weights that are 2 updates late" if methods[0] == "3bw" else "weights that are late"
    assert lines == [] if said is None else late in lines[0] and said in lines[0]


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
    given = "plan", "--profile", tmp_path / "p.yaml", "--devices", "1", "--cost", "graphpipe"
    run = command(*given, "--out", tmp_path / "plan.yaml")
    assert run.returncode == 2
    assert "those by cost 'graphpipe' cannot, use --cost simulated" in " ".join(run.stderr.split())


@pytest.mark.all_cases
@pytest.mark.parametrize("method", [*USUAL, "3bw"])
def test_the_forecast_is_what_the_proof_says(method):
    """So that what does not fit need not be proven; gradients of divided updates are free again earlier."""
    sizes = ((1, 1), (1, 3), (2, 1), (2, 2), (2, 5), (3, 1), (3, 2), (3, 3), (3, 4), (3, 6))
    sizes += ((5, 1), (5, 2), (5, 3), (5, 7), (5, 8), (5, 13), (7, 3))
    for (depth, m), divided in itertools.product(sizes, (False, True) if PLANNED[method].divides else (False,)):
        proof = proof_of(method, depth, m, divided, "gradients" if divided else "none", True)
        assert (proof is None) == (m < least_microbatches(PLANNED[method], depth))
        for stage, facts in enumerate(proof.stages.values() if proof else ()):
            found = stage_forecast(PLANNED[method], depth, m, stage, divided)
            assert found == (proof.schedule.rule, facts, proof.activations[stage]), (depth, m, stage)


@pytest.mark.parametrize("name", OTHERS)
def test_the_forecast_of_other_methods_is_what_is_held_at_least(name):
    """At one moment a rank holds of each of its stages as many microbatches, or more."""
    method = PLANNED[name]
    for depth, m in ((2, 3), (3, 4), (2, 4), (3, 3), (2, 2), (3, 8)):
        key = key_of(method, depth, m, method.full)
        proof = KnownSchedules().proof(key)
        of = Candidate(Sized(chain(Random(0), 24), 1, m * 2), method, depth, 2, key.sharding)
        blocks = BlockChain(of.sized.graph, 2.0)
        assert method.ranks(depth) == tuple(stage.rank for stage in proof.schedule.stages)
        foreseen = [stage_forecast(method, depth, m, stage) for stage in range(proof.schedule.num_stages)]
        assert all(each.facts == facts for each, facts in zip(foreseen, proof.stages.values(), strict=True))
        for rank, moments in enumerate(KnownSchedules().moments(key, KEPT)):
            own = [s for s, r in enumerate(method.ranks(depth)) if r == rank]
            assert any(
                all(
                    each.get((s, HeldKind.GRAPH), 0) + each.get((s, HeldKind.HALVED), 0) >= foreseen[s].activations
                    for s in own
                )
                for each in moments
            )
            if method.row == "interleaved":  # whatever the number of microbatches is, no less than there is
                assert max(sum(each.get((s, HeldKind.GRAPH), 0) for s in own) for each in moments) == sum(
                    foreseen[s].activations for s in own
                )
            trial = CandidateTrial(of, blocks, limited(1e9), KnownSchedules())
            for does in () if method.halved else (KEPT, RECOMPUTED):
                moments = KnownSchedules().moments(key, does)[rank]
                for least in trial.memory.foreseen(rank, does):
                    assert any(all(each.get(what, 0) >= n for what, n in least.items()) for each in moments)


@pytest.mark.parametrize("name", USUAL)
def test_the_forecast_of_ranks_that_offload_is_what_they_hold_at_least(name):
    """At one moment a graph, and of others in flight at least what is left of them."""
    for depth, m in ((2, 3), (3, 4), (3, 6), (1, 5)):
        of = Candidate(Sized(chain(Random(0), 4), 1, m), PLANNED[name], depth, 1, offloads=True)
        trial = CandidateTrial(of, BlockChain(of.sized.graph, 2.0), limited(1e9), KnownSchedules())
        for rank, moments in enumerate(KnownSchedules().moments(of.schedule, ActivationMemory.OFFLOADED)):
            (least,) = trial.memory.foreseen(rank, ActivationMemory.OFFLOADED)
            graph, left = ((rank, kind) for kind in (HeldKind.GRAPH, HeldKind.LEFT))
            flight = least[graph] + least[left]
            assert any(each[graph] >= 1 and each[graph] + each.get(left, 0) >= flight for each in moments)


@pytest.mark.parametrize("name", USUAL)
def test_ranks_that_offload_hold_no_more_than_is_foreseen(name):
    """So it is known before there is a schedule which of them have room; nor is more of them on the host."""
    for (depth, m), level in itertools.product(((2, 3), (3, 4), (3, 6), (1, 5), (4, 13)), ("none", "gradients")):
        width = 1 if level == "none" else 2
        of = Candidate(Sized(chain(Random(0), 4), 1, m * width), PLANNED[name], depth, width, level, offloads=True)
        trial, known = CandidateTrial(of, BlockChain(of.sized.graph, 2.0), limited(1e9), KnownSchedules()), set()
        if m < least_microbatches(of.method, depth):
            continue
        for rank, moments in enumerate(trial.memory._known.moments(of.schedule, ActivationMemory.OFFLOADED)):
            most = trial.memory.most_beside_host(rank)
            above = [[n for n, up in enumerate(most) if all(up.get(k, 0) >= c for k, c in e.items())] for e in moments]
            assert all(above)
            known |= {n for each in above for n in each}
            flight = stage_forecast(of.method, depth, m, rank).activations
            assert trial.memory._known.copies(of.schedule)[rank].most_away <= max(flight - 1, 0)
        assert known


@pytest.mark.parametrize("name", [name for name in METHODS if PLANNED[name].divides and not PLANNED[name].full])
def test_gradients_of_divided_updates_are_whole_at_one_moment(name):
    """Of all stages of a rank, beside what the optimizer remembers: much of what does not fit is known by that."""
    method = PLANNED[name]
    of = Candidate(Sized(chain(Random(0), 24), 1, 16), method, 2, 2, "optimizer" if method.chunks > 1 else "gradients")
    memory = CandidateTrial(of, BlockChain(of.sized.graph, 2.0), limited(1e9), KnownSchedules()).memory
    for rank, does in itertools.product(range(2), (KEPT, RECOMPUTED)):
        found = memory._known.moments(of.schedule, does)[rank]
        whole = memory.foreseen(rank, does)[-1]
        assert {kind for _, kind in whole} == {HeldKind.OPTIMIZER, HeldKind.WHOLE, HeldKind.SCRATCH}
        assert any(all(each.get(what, 0) >= n for what, n in whole.items()) for each in found)


def test_a_rank_that_must_move_activations_takes_all_its_copies_at_least():
    """Known before there is a schedule: what it holds then fits for sure, so that it cannot recompute instead."""
    text = HEAD + "".join(
        f"- {{name: b{n}, forward: 1, backward: 2, output: 1, stored: 40, movable: 36, movable_with: 2}}\n"
        for n in range(4)
    )
    of = Candidate(Sized(layer_graph(parse_profile(text, "moves")), 1, 16), PLANNED["gpipe"], 2, 1, offloads=True)
    least = {}
    for limit in (400.0, 180.0):  # room for what is left and two graphs of any three blocks, or not
        devices = replace(limited(limit, count=2), host=1.0)
        trial = CandidateTrial(of, BlockChain(of.sized.graph, 2.0), devices, KnownSchedules())
        bounds = trial.bounds()
        least[limit] = [next(bounds) * 16, next(bounds) * 16]
    copies = 2 * 14 * (36 + 38)
    assert least[400.0][0] >= copies > least[180.0][0]
    assert least[400.0][1] >= least[400.0][0]


@pytest.mark.parametrize("method", METHODS)
def test_schedules_are_those_that_the_proof_accepts(method):
    """With the same messages and window, though only that of the best plan is proven; and with as few microbatches."""
    known, of = KnownSchedules(), PLANNED[method]
    for depth in (1, 2, 3, 4) if method in USUAL else (2,):
        least = least_microbatches(of, depth)
        level = "optimizer" if of.divides else "none"
        for m, parallel, sharding in ((least, False, "none"), (least + 3, True, "none"), (least, True, level)):
            key = key_of(of, depth, m, parallel or of.full, sharding)
            assert known._made(key)[0] == known.proof(key).lowered
        for m in range(1, least):
            with pytest.raises(ScheduleError):
                known.proof(key_of(of, depth, m, False))


@pytest.mark.parametrize("method", METHODS)
def test_no_plan_is_faster_than_its_bound(method):
    """On random chains, links and cuts: those of all cuts, of those that may fit, and of the cuts at hand."""
    random, of = Random(METHODS.index(method)), PLANNED[method]
    known = {decides: KnownSchedules(decides) for decides in (False, True)}
    for _ in range(40 if method in USUAL else 6):
        depth, width = random.randint(1 if method in USUAL else 2, max(4 // of.chunks, 1) + 1), random.randint(1, 3)
        width += of.full
        stages, m = depth * of.chunks, random.randint(max(depth, 2) if of.divides else least_microbatches(of, depth), 8)
        graph, level = (
            chain(random, random.randint(stages, stages + 2)),
            "full" if of.full else random.choice(["none", "optimizer", "gradients"]),
        )
        level = level if width > 1 and of.divides else "none"
        order = random.choice(RANK_ORDERS)
        made = Candidate(Sized(graph, 1, m * width), of, depth, width, level, rank_order=order)
        link, cores = random.choice([1.0, 10.0, 1e4]), random.choice([None, None, None, 1.5])
        levels = [
            DeviceLevel(units, link / (1 + n), random.choice([None, 0.1, 3.0]))
            for n, units in enumerate(random.choice([(12,), (2, 6), (3, 4), (2, 2, 3)]))
        ]
        devices = Devices(tuple(levels), latency=random.choice([0.0, 0.7]), cores=cores)
        blocks, again = BlockChain(graph, 2.0), [random.choice([KEPT, KEPT, RECOMPUTED]) for _ in range(depth)]
        trial = CandidateTrial(made, blocks, devices, known[random.random() < 0.5])
        cuts = (0, *sorted(random.sample(range(1, len(graph.layers)), stages - 1)), len(graph.layers))
        if m < least_microbatches(of, depth):
            continue
        (batch,) = trial.times.batch_times([(cuts, again)])
        assert trial.uncut.seconds_per_sample() * m * width <= batch * (1 + 1e-9)
        assert next(trial.bounds()) * m * width <= batch * (1 + 1e-9)
        assert trial.times.least_batch(cuts, again) <= batch * (1 + 1e-9)


@pytest.mark.parametrize("cores", [None, 1.0])
def test_bounds_count_devices_that_are_faster_than_the_profile(cores):
    text = HEAD + "".join(BLOCK.format(n, 1, 2, 6, 30, 0) for n in range(4))
    on = (StageDevices(("fast",), 4.0, None),) * 2
    made = Candidate(Sized(layer_graph(parse_profile(text, "equal")), 1, 8), PLANNED["2bw"], 2, 1, on=on)
    devices = Devices((DeviceLevel(2, 1e9),), cores=cores)
    trial = CandidateTrial(made, BlockChain(made.sized.graph, 2.0), devices, KnownSchedules())
    (batch,) = trial.times.batch_times([((0, 2, 4), (KEPT,) * 2)])
    assert batch == pytest.approx(8 * 12 / 4 * (1.0 if cores else 0.5), rel=0.01)
    assert trial.uncut.seconds_per_sample() * 8 <= batch * (1 + 1e-9)
    assert next(trial.bounds()) * 8 <= batch * (1 + 1e-9)


@pytest.mark.parametrize("method", ["1f1b", "eager", "gpipe", "2bw"])
@pytest.mark.parametrize("cores", [None, 2.0])
def test_bounds_are_near_where_stages_are_equal(method, cores):
    """Fill and drain, messages that microbatches in flight do not hide, shared cores, or a search simulates in vain."""
    text = HEAD + "".join(BLOCK.format(n, 1, 2, 6, 30, 0) for n in range(8))
    made = Candidate(Sized(layer_graph(parse_profile(text, "equal")), 1, 16), PLANNED[method], 4, 1)
    devices = Devices((DeviceLevel(4, 10.0),), latency=0.2, cores=cores)
    trial = CandidateTrial(made, BlockChain(made.sized.graph, 2.0), devices, KnownSchedules())
    (batch,) = trial.times.batch_times([((0, 2, 4, 6, 8), (KEPT,) * 4)])
    assert next(trial.bounds()) * 16 > (0.96 if cores is None else 0.8) * batch


def test_the_busiest_rank_has_at_least_its_share_of_the_longest_blocks():
    random = Random(0)
    for _ in range(50):
        times, ranks = [random.randint(1, 9) for _ in range(random.randint(2, 6))], random.randint(1, 3)
        loads = [
            max(sum(t for t, r in zip(times, on, strict=True) if r == rank) for rank in range(ranks))
            for on in itertools.product(range(ranks), repeat=len(times))
        ]
        assert least_of_largest(np.array(times, float), ranks) <= min(loads)
    assert least_of_largest(np.array([4.0] * 7), 3) == 12


@pytest.mark.parametrize(("limit", "again"), [(None, 0), (150.0, 1)])
def test_the_bound_of_ranks_with_several_stages_counts_whole_blocks(limit, again):
    """Of nine blocks one of two ranks has five, or recomputes as many; it was the half of all before."""
    text = HEAD + "".join(BLOCK.format(n, 1, 2, 0, 30, 2) for n in range(9))
    made = Candidate(Sized(layer_graph(parse_profile(text, "equal")), 1, 8), PLANNED["interleaved:chunks=2"], 2, 1)
    trial = CandidateTrial(made, BlockChain(made.sized.graph, 2.0), limited(limit), KnownSchedules())
    least = next(trial.bounds()) * 8
    assert least >= 8 * 5 * (3 + again)
    assert least <= trial.fastest((math.inf, 0)).batch


def test_what_has_no_room_for_whole_blocks_is_known_without_a_schedule():
    """Three blocks of two ranks: what they hold fits on average, and one of the ranks needs a third more."""
    text = HEAD + "".join(BLOCK.format(n, 1, 2, 0, 3, 100) for n in range(5))
    made = Candidate(Sized(layer_graph(parse_profile(text, "equal")), 1, 4), PLANNED["interleaved:chunks=2"], 2, 1)
    trial = CandidateTrial(made, BlockChain(made.sized.graph, 2.0), limited(1100.0, count=2), KnownSchedules())
    with pytest.raises(NoPlanError, match=r"does not fit: .* some stage takes more"):
        next(trial.bounds())
    assert not trial.memory._known._lowered


@pytest.mark.parametrize("method", ["1f1b", "eager", "2bw", "2bw-eager", "interleaved:chunks=2", "zb-h1", "zb-v"])
def test_more_microbatches_than_are_played_take_what_playing_them_says(method, monkeypatch):
    """And ranks hold as much, whatever is left over of the rounds of microbatches."""
    random, of = Random(METHODS.index(method)), PLANNED[method]
    for m in (44, 47):
        graph = chain(random, 6)
        made = Candidate(Sized(graph, 1, 2 * m), of, 3 if of.chunks == 1 else 2, 2)
        devices, known = limited(1e9, random.choice([10.0, 1e4])), KnownSchedules()
        cuts = (0, *sorted(random.sample(range(1, 6), made.stages - 1)), 6)
        found = []
        for many in (1 << 13, 8):
            monkeypatch.setattr(candidate_module, "_MANY", many)
            trial = CandidateTrial(made, BlockChain(graph, 2.0), devices, known)
            held = [known.moments(made.schedule, does) for does in ((KEPT,) if of.halved else (KEPT, RECOMPUTED))]
            found.append((trial.times.batch_times([(cuts, (KEPT,) * made.depth)])[0], held, made.played))
        assert found[0][2] == (m,)
        assert found[1][2][-1] < m
        assert found[1][0] == pytest.approx(found[0][0], rel=1e-9)
        for ours, theirs in zip(found[1][1], found[0][1], strict=True):
            assert [{frozenset(e.items()) for e in each} for each in ours] == [
                {frozenset(e.items()) for e in each} for each in theirs
            ]


def test_rounds_that_differ_are_no_prediction(monkeypatch):
    monkeypatch.setattr(candidate_module, "_MANY", 8)
    made = Candidate(Sized(chain(Random(0), 4), 1, 400), PLANNED["1f1b"], 2, 1)
    trial = CandidateTrial(made, BlockChain(made.sized.graph, 2.0), limited(), KnownSchedules())
    assert trial.times._of_all_rounds(np.array([[10.0], [12.0], [14.0]])) == 14 + 2 * (400 - made.played[-1]) / 4
    with pytest.raises(NoPlanError, match=r"do not take the same time by microbatch 20, .* 400 of them"):
        trial.times._of_all_rounds(np.array([[10.0], [12.0], [14.1]]))


def test_a_huge_batch_is_planned_without_playing_it(monkeypatch):
    """But not where ranks hold more activations with each microbatch: that is refused with the number."""
    made, lowered = [], schedule_cache._lowered
    monkeypatch.setattr(schedule_cache, "_lowered", lambda of, near: made.append(of.microbatches) or lowered(of, near))
    graph = chain(Random(0), 4)
    found = simulated_plans({1: Sized(graph, 1, 1 << 18)}, limited(count=2), methods=("1f1b", "gpipe"))
    plans, skipped = found.plans, found.skipped
    assert max(made) < 100
    assert plans[0].planner == "1f1b"
    assert plans[0].settings["microbatches"] * plans[0].settings["width"] == 1 << 18
    assert any(each.what.startswith("gpipe") and "131,072 forwards are too many" in each.bound for each in skipped)


def test_of_plans_that_take_as_long_the_one_that_recomputes_nothing_is_chosen():
    """Forwards take no time here: one stage in two pipelines recomputes, two stages need not; nothing flushes."""
    text = HEAD + BLOCK.format(0, 0, 2, 0, 10, 0) + BLOCK.format(1, 0, 2, 0, 30, 0)
    sized = {1: Sized(layer_graph(parse_profile(text, "free")), 1, 8)}
    plans = simulated_plans(sized, limited(35.0, count=2), methods=("2bw",)).plans
    assert (plans[0].settings["stages"], plans[0].settings["recompute"]) == (2, "none")
    plans = simulated_plans(sized, limited(35.0, count=2), methods=("2bw", "1f1b")).plans
    assert plans[0].planner == "2bw"  # that of 1f1b takes as long, and recomputes
    assert plans[1].seconds_per_sample == plans[0].seconds_per_sample
    assert plans[1].settings["recompute"] != "none"


def test_places_of_plans_count_time_but_for_rounding_then_what_ranks_recompute_or_move():
    kept, moved = (KEPT, KEPT), (KEPT, ActivationMemory.OFFLOADED)
    assert place_of(1.0 + 1e-12, kept) < place_of(1.0, moved) < place_of(1.0, (RECOMPUTED,) * 2)
    assert place_of(1.0, moved) < place_of(1.0 + 1e-7, kept)
    assert place_of(1.0, moved) < place_of(1.0, kept, away=True)


def test_a_search_simulates_few_of_its_candidates(monkeypatch):
    """Bounds leave out the others, however many there are."""
    made, lowered = [], schedule_cache._lowered
    monkeypatch.setattr(
        schedule_cache, "_lowered", lambda schedule, near: made.append(schedule) or lowered(schedule, near)
    )
    text = HEAD + "".join(BLOCK.format(n, 1, 2, 6, 30, 10) for n in range(12))
    graph, devices = layer_graph(parse_profile(text, "equal")), Devices((DeviceLevel(8, 100.0),), 450.0)
    found = simulated_plans({1: Sized(graph, 1, 16)}, devices, methods=USUAL)
    plans, skipped = found.plans, found.skipped
    assert [plan.planner for plan in plans[:2]] == ["2bw", "2bw-eager"]
    assert len(made) < 15 < 80 < len(skipped)  # some as they may be as fast and recompute less, one without a limit


@pytest.mark.parametrize("name", METHODS)
def test_what_is_held_without_recompute_is_known_from_a_run_with_it(name):
    """It takes as many bytes as in a run of its own, whatever the sizes are."""
    method, random = PLANNED[name], Random(0)
    key = key_of(method, 2, 4, parallel=True, sharding="optimizer" if method.divides else "none")
    known = KnownSchedules()
    alone = most_held(known._made(key)[0], {"flush": 2, "double-buffer": 4}.get(method.rule, 5), blockwise=False)
    for rank, moments in enumerate(known.moments(key, KEPT)):
        sizes = defaultdict(lambda: random.randint(1, 99))
        for stage in range(2 * method.chunks):  # a graph of halved backwards is as large as another
            sizes[stage, HeldKind.HALVED] = sizes[stage, HeldKind.GRAPH]
            sizes[stage, HeldKind.OPTIMIZER] = sizes[stage, HeldKind.SCRATCH] = 0  # always there here
        expected = max(sum(n * sizes[what.stage, what.kind] for what, n in each) for each in alone[0, rank])
        assert max(sum(n * sizes[what] for what, n in each.items()) for each in moments) == expected


def test_a_window_in_which_ranks_wait_for_ever_is_found_without_playing(monkeypatch):
    """The object machine is far slower."""
    monkeypatch.setattr(schedule_cache, "lower_freely", None)
    key = ScheduleKey(PLANNED["breadth-first:chunks=2"], 2, 8, parallel=False)
    assert KnownSchedules()._made(key)[0].window > 2


@pytest.mark.parametrize(("name", "m"), [("breadth-first:chunks=2", 16), ("2bw-layered:chunks=4", 8)])
def test_a_wide_window_is_found_at_the_first_guess(name, m, monkeypatch):
    """The narrowest, that with which nobody waits, the guess and one less; each is lowered once."""
    key, tried, at = key_of(PLANNED[name], 4, m, True), [], schedule_cache.Lowering.at
    monkeypatch.setattr(schedule_cache.Lowering, "at", lambda self, window: tried.append(window) or at(self, window))
    found = KnownSchedules()._made(key)[0].window
    assert found > 2
    assert sorted(tried)[:3] == [2, found - 1, found]
    assert len(tried) == 4


def test_what_does_not_fit_is_skipped_with_its_size():
    graph = chain(Random(1), 4)
    found = simulated_plans({1: Sized(graph, 1, 4)}, Devices((DeviceLevel(3, 1e4),), 20.0))
    plans, skipped = found.plans, found.skipped
    assert not plans
    assert skipped
    assert all("does not fit" in each.bound for each in skipped if "depth" in each.what)


def test_what_a_search_does_not_know_is_said():
    """Whatever is asked for: what it never tries, and what it would try with more options."""
    graph = chain(Random(1), 4)
    skipped = simulated_plans({1: Sized(graph, 1, 4)}, limited()).skipped
    said = {each.what: each.bound for each in skipped}
    assert "does not know them" in said["other methods and options"]
    assert "--memory" in said["layered:chunks=4"]
    assert not any("optimizer states" in what for what in said)
    skipped = simulated_plans({1: Sized(graph, 1, 4)}, limited(500.0)).skipped
    said = {each.what: each.bound for each in skipped}
    assert "--host-bandwidth" in said["optimizer states or activations on the host"]
    assert "layered:chunks=4" not in said


def test_updates_are_no_bubble():
    """One device is never idle: what is not passes are updates, shared by the four microbatches of a batch."""
    text = "format: penstock profile 1\nlayers:\n- {name: a, forward: 1, backward: 2, step: 2}\n"
    graph = layer_graph(parse_profile(text, "one"))
    plans = simulated_plans({1: Sized(graph, 1, 4)}, Devices((DeviceLevel(1, 1e9),))).plans
    (stage,) = plans[0].rating.stages
    assert stage.parts == {"compute": 3.0, "updates": 0.5, "bubble": 0.0}
    assert plans[0].rating.seconds == 3.5


@pytest.mark.parametrize("name", ["interleaved:chunks=2", "breadth-first:chunks=2"])
def test_the_least_recompute_of_ranks_with_several_stages_is_a_bound(name):
    """On random chains and limits no cuts are faster; where little fits the bound is that of a forward more."""
    random, method, recomputed = Random(METHODS.index(name)), PLANNED[name], 0
    for _ in range(16):
        graph, m = chain(random, random.randint(2 * method.chunks, 2 * method.chunks + 1)), random.choice([2, 4])
        made = Candidate(Sized(graph, 1, 2 * m), method, 2, 2, "full" if method.full else "none")
        devices = limited(random.choice([100.0, 130.0, 160.0, 200.0, 260.0]), count=4)
        trial = CandidateTrial(made, BlockChain(graph, 2.0), devices, KnownSchedules())
        plain = trial.uncut.seconds_per_sample()
        fit = trial.fit_of_span()
        cuts = [(c, does) for c in fit.all() if (does := fit.activations(c)) is not None]
        if cuts:
            least = next(trial.bounds()) * made.samples
            assert least <= min(trial.times.batch_times(cuts)) * (1 + 1e-9)
            recomputed += least > 1.05 * plain * made.samples
    assert recomputed
