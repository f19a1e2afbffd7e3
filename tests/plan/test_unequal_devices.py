"""Plans by simulation for devices that differ in speed and memory: best of all cuts and places, and known answers."""

import itertools
import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.plan.candidates.block_chain import BlockChain
from penstock.plan.candidates.candidate import Candidate, NoPlanError
from penstock.plan.candidates.device_choice import placements
from penstock.plan.candidates.planned_methods import PLANNED, USUAL, ActivationMemory
from penstock.plan.candidates.schedule_cache import KnownSchedules
from penstock.plan.planners.two_bw import Sized
from penstock.plan.profile.files import parse_profile
from penstock.plan.profile.layer_graph import layer_graph
from penstock.plan.simulated.candidate_trial import CandidateTrial
from penstock.plan.simulated.plan_search import simulated_plans
from penstock.plan.stages.device_hierarchy import DeviceKind, DeviceLevel, Devices

KNOWN = KnownSchedules()


def blocks(rows):
    """A chain of blocks: forward, backward, output, stored, parameters of each; all updates take half a second."""
    text = "format: penstock profile 1\nlayers:\n"
    for n, (forward, backward, output, stored, parameters) in enumerate(rows):
        text += f"- {{name: b{n}, forward: {forward}, backward: {backward}, backward_input: {backward / 2}, "
        text += f"backward_weight: {backward / 2}, late: 10, output: {output}, stored: {stored}, "
        text += f"parameters: {parameters}, step: 0.5}}\n"
    return layer_graph(parse_profile(text, "p"))


def random_blocks(random, count):
    pairs = ((random.randint(1, 4), random.randint(2, 7)) for _ in range(count))
    return blocks([(*pair, random.randint(0, 9), random.randint(10, 40), random.randint(0, 8)) for pair in pairs])


def unlike(*kinds, bandwidth=1e4):
    """Devices: (count, speed, memory) of each kind."""
    found = tuple(DeviceKind("ABC"[n], *kind) for n, kind in enumerate(kinds))
    memories = [kind.memory for kind in found]
    level = DeviceLevel(sum(kind.count for kind in found), bandwidth)
    return Devices((level,), None if None in memories else max(memories), kinds=found)


def places(devices, depth, width):
    """The slowest speed and the least memory of each stage, for all ways to give replicas a device."""
    each = [(kind.speed, kind.memory or math.inf) for kind in devices.kinds for _ in range(kind.count)]
    for chosen in set(itertools.permutations(each, depth * width)):
        yield tuple(
            tuple(map(min, zip(*chosen[at : at + width], strict=True))) for at in range(0, depth * width, width)
        )


def best_of(graph, method, devices, m):
    """The least seconds per sample of all depths, widths, places and cuts, from plans of devices that are all alike."""
    best, alike = math.inf, replace(devices, kinds=(), memory=devices.memory and 1e29)
    chain, levels = BlockChain(graph, 2.0), ("none", "gradients" if method.chunks == 1 else "optimizer")
    for depth, width, level in itertools.product(range(1, devices.count + 1), range(1, devices.count + 1), levels):
        of = Candidate(Sized(graph, 1, m), method, depth, width, level)
        if depth * width > devices.count or m % width or of.stages > chain.blocks or (width == 1 and level != "none"):
            continue
        if (level != "none" and devices.memory is None) or (depth == 1 and method.name not in USUAL):
            continue
        trial = CandidateTrial(of, chain, alike, KNOWN)
        try:
            _ = list(trial.bounds())
        except NoPlanError:  # fewer microbatches than the method needs
            continue
        best = min(best, *best_times(trial, of, chain, set(places(devices, depth, width))), math.inf)
    return best


def best_times(trial, of, chain, all_places):
    """Seconds per sample of all places and cuts; what two batches take less than the busiest rank does not count."""
    fit, batches, limited = trial.fit_of_span(), (3, 5), max(m for p in all_places for _, m in p) < math.inf
    costs, slowest = [], []
    for inner in itertools.combinations(range(1, chain.blocks), of.stages - 1):
        cuts = (0, *inner, chain.blocks)
        tried = (ActivationMemory.KEPT, ActivationMemory.RECOMPUTED if limited else ActivationMemory.KEPT)
        held = [[fit.held(rank, cuts, does) for does in tried] for rank in range(of.depth)]
        for place in all_places:
            again = [limited and bytes_[0] > memory for bytes_, (_, memory) in zip(held, place, strict=True)]
            if any(bytes_[a] > memory for bytes_, a, (_, memory) in zip(held, again, place, strict=True)):
                continue
            usual = trial.times.costs(np.array(cuts), [tried[each] for each in again])
            stages = tuple(
                type(each)(*(None if s is None else s / place[rank][0] for s in vars(each).values()))
                for rank, each in zip(of.method.ranks(of.depth), usual.stages, strict=True)
            )
            costs.append(replace(usual, stages=stages))
            busy = np.zeros(of.depth)
            for rank, each in zip(of.method.ranks(of.depth), stages, strict=True):
                busy[rank] += of.microbatches * (each.forward + each.backward_input + each.backward_weight) + each.step
            slowest.append(busy.max())
    short, long = (KNOWN.span(of.schedule, n)(costs) if costs else [] for n in batches)
    for a, b, least in zip(short, long, slowest, strict=True):
        if (b.makespan - a.makespan) / 2 >= least * (1 - 1e-9):
            yield (b.makespan - a.makespan) / 2 / of.samples


CASES = {
    "speeds": unlike((1, 1.0, None), (2, 0.5, None)),
    "speeds, slow links": unlike((2, 2.0, None), (1, 0.7, None), bandwidth=5.0),
    "memories": unlike((1, 1.0, 400.0), (2, 1.0, 140.0)),
    "fast and large": unlike((1, 2.0, 300.0), (2, 1.0, 150.0)),
    "fast and small": unlike((2, 1.5, 110.0), (1, 1.0, 250.0)),
    "three kinds": unlike((1, 1.5, 120.0), (1, 1.0, 200.0), (1, 0.7, 400.0)),
}


def check_all(seed, devices, methods, blocks_):
    graph, fits = random_blocks(Random(seed), blocks_), 0
    for name in methods:
        plans = simulated_plans({1: Sized(graph, 1, 4)}, devices, methods=(name,)).plans
        best = best_of(graph, PLANNED[name], devices, 4)
        assert bool(plans) == (best < math.inf), (name, best)
        if plans:
            fits += 1
            assert plans[0].seconds_per_sample == pytest.approx(best, rel=1e-9), name
            for stage, rating in zip(plans[0].stages, plans[0].rating.stages, strict=True):
                assert rating.memory <= (stage.on.memory or math.inf)
    return fits


@pytest.mark.parametrize(
    "case",
    [
        "speeds, slow links",
        "memories",
        *(pytest.param(each, marks=pytest.mark.long) for each in list(CASES)[3:]),
        pytest.param("speeds", marks=pytest.mark.long),
    ],
)
def test_plans_for_unequal_devices_are_the_best_of_all(case):
    """Four blocks on three devices: depths, widths, orders of devices, cuts, recompute, sharding."""
    assert check_all(1, CASES[case], ("1f1b", "2bw"), 4) > 0


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
def test_plans_for_random_unequal_devices_are_the_best_of_all(seed):
    """Four or five blocks on three or four devices of two or three kinds; in half of the cases memory is limited."""
    random, limited = Random(1000 + seed), seed % 2
    counts = random.choice([(1, 2), (2, 1), (1, 3), (2, 2), (3, 1), (1, 1, 1), (2, 1, 1), (1, 1, 2)])
    speeds, memories = (0.5, 0.7, 1.0, 1.5, 2.0), [float(random.randint(60, 400)) if limited else None for _ in counts]
    kinds = [(count, random.choice(speeds), memory) for count, memory in zip(counts, memories, strict=True)]
    devices = unlike(*kinds, bandwidth=random.choice([1e4, 20.0, 3.0]))
    check_all(seed, devices, random.sample(("1f1b", "gpipe", "eager", "2bw", "zb-h1"), 3), 4 + seed % 2)


def test_plans_of_ranks_with_several_stages_on_unequal_devices_are_the_best_of_all():
    assert check_all(2, unlike((1, 2.0, None), (1, 1.0, None)), ("zb-v", "interleaved:chunks=2"), 5) == 2


def best_plan(graph, devices, method="2bw", m=8):
    (plan,) = simulated_plans({1: Sized(graph, 1, m)}, devices, methods=(method,)).plans
    return plan


def test_a_device_twice_as_fast_gets_twice_the_blocks():
    """No rank is idle, and the pipeline takes a third of what the slower device alone would."""
    plan = best_plan(blocks([(1, 2, 1, 10, 1e6)] * 6), unlike((1, 2.0, None), (1, 1.0, None), bandwidth=1e6))
    assert (plan.settings["balance"], plan.settings["placement"]) == ([4, 2], ["A", "B"])
    assert [stage.on.speed for stage in plan.stages] == [2.0, 1.0]
    assert plan.rating.seconds == pytest.approx((6 * 3 + 6 * 0.5 / 8) / 3, rel=1e-3)
    assert [each.parts["compute"] for each in plan.rating.stages] == [4 * 3 / 2, 2 * 3]


def test_a_small_device_gets_few_blocks_and_the_last_stage():
    """With 2bw the last rank keeps one microbatch, the others two and three; one block is all that fits there."""
    graph = blocks([(1, 2, 100, 100, 4)] * 7)  # recompute saves nothing
    plan = best_plan(graph, unlike((1, 1.0, 225.0), (2, 1.0, 1e4), bandwidth=1e5))
    assert (plan.settings["balance"], plan.settings["placement"]) == ([3, 3, 1], ["B", "B", "A"])
    assert [stage.on.memory for stage in plan.stages] == [1e4, 1e4, 225.0]
    assert plan.rating.stages[2].memory <= 225.0 < plan.rating.stages[1].memory


def test_replicas_of_a_stage_lie_on_devices_that_are_alike():
    """Two fast and two slow devices as two pipelines: each has one of both, the fast one two thirds of the blocks."""
    graph = blocks([(1, 2, 1, 10, 1)] * 6)
    plan = best_plan(graph, unlike((2, 1.0, None), (2, 2.0, None), bandwidth=1e6), "1f1b", 32)
    assert (plan.settings["balance"], plan.settings["placement"]) == ([2, 4], ["A", "A", "B", "B"])
    assert plan.settings["rank_order"] == "tp-dp-pp"  # so ranks on each kind follow each other
    assert [stage.on.kinds for stage in plan.stages] == [("A", "A"), ("B", "B")]


def test_a_stage_is_as_fast_as_the_slowest_of_its_replicas():
    """One block: two copies wait for the slow one, and three devices of which two are fast take these."""
    graph = blocks([(1, 2, 1, 10, 1)])
    plan = best_plan(graph, unlike((1, 1.0, None), (1, 1.5, None)), "1f1b")
    assert (plan.settings["placement"], plan.stages[0].on.speed) == (["A", "B"], 1.0)
    assert str(plan.stages[0].on) == "1 A + 1 B"
    plan = best_plan(graph, unlike((1, 1.0, None), (2, 2.5, None)), "1f1b")
    assert (plan.settings["placement"], plan.stages[0].on.speed) == (["B", "B"], 2.5)


def test_of_many_orders_of_devices_those_with_equal_ones_side_by_side_are_tried():
    kinds = unlike((4, 1.0, None), (4, 2.0, None))
    assert [[str(each) for each in order] for order in placements(kinds, 8, 1)] in (
        [[*"BBBBAAAA"], [*"AAAABBBB"]], [[*"AAAABBBB"], [*"BBBBAAAA"]],
    )  # fmt: skip
    assert {"".join(map(str, order)) for order in placements(kinds, 5, 1)} == {
        "".join(order) for order in itertools.permutations("BBBBA")
    }
    assert [[each.kinds for each in order] for order in placements(kinds, 1, 8)] == [[(*"AAAABBBB",)]]
    trade = unlike((300, 2.0, 1e9), (300, 1.0, 2e9))
    assert len(list(placements(trade, 2, 256))) < 10


def test_devices_of_one_kind_are_as_without():
    """To the last bit, as of seconds, cuts and what was skipped; a speed of 0.5 doubles the times."""
    graph, methods = random_blocks(Random(5), 5), ("1f1b", "2bw", "zb-v")
    found = simulated_plans({1: Sized(graph, 1, 4)}, Devices((DeviceLevel(3, 5.0),), 200.0), methods=methods)
    plain, skipped = found.plans, found.skipped
    kind = DeviceKind("A", 3, 1.0, 200.0)
    of_a_kind = Devices((DeviceLevel(3, 5.0),), 200.0, kinds=(kind,))
    found = simulated_plans({1: Sized(graph, 1, 4)}, of_a_kind, methods=methods)
    same, left = found.plans, found.skipped
    assert [plan.rating for plan in same] == [plan.rating for plan in plain]
    assert len(left) == len(skipped) + 1
    slow = replace(of_a_kind, levels=(DeviceLevel(3, 2.5),), kinds=(replace(kind, speed=0.5),))
    late = simulated_plans({1: Sized(graph, 1, 4)}, slow, methods=methods).plans
    assert [plan.seconds_per_sample for plan in late] == pytest.approx([2 * plan.seconds_per_sample for plan in plain])


def test_devices_that_contradict_themselves_are_refused():
    level = DeviceLevel(3, 1.0)
    for kinds, said in (
        ((DeviceKind("A", 2),), "2 devices are of some kind, but there are 3"),
        ((DeviceKind("A", 2), DeviceKind("A", 1)), "with a name each"),
        ((DeviceKind("A", 3, 1.0, 5.0),), "memory of devices A is 5 bytes"),
    ):
        with pytest.raises(ConfigError, match=said):
            Devices((level,), kinds=kinds)
    for wrong in ({"speed": 0.0}, {"speed": math.nan}, {"memory": -1.0}):
        with pytest.raises(ConfigError, match="must be a number above 0"):
            DeviceKind("A", 1, **wrong)
