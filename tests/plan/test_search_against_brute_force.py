"""The simulated search finds what rating every plan finds: random chains of at most 8 blocks on at most 4 devices."""

import itertools
import math
import re
from dataclasses import replace

import pytest
from hypothesis import Phase, given, seed, settings, strategies as st

from penstock.plan.candidates.planned_methods import METHODS, PLANNED, USUAL, activations_of
from penstock.plan.planners.two_bw import Sized
from penstock.plan.profile.files import parse_profile
from penstock.plan.profile.layer_graph import layer_graph
from penstock.plan.simulated.plan_search import simulated_plans
from penstock.plan.stages.device_hierarchy import DeviceKind, DeviceLevel, Devices
from penstock.schedule.methods.table import METHODS as METHOD_TABLE
from support.every_plan import OFFLOADED, Case, EveryPlan, kinds_of, looked_into

CLOSE = 1e-9
UNIT = 12  # bytes: 2, 3 and 4 pipelines share them evenly


@st.composite
def cases(draw):
    """Draw blocks, devices, a batch, and methods; memory is limited to a part of what one device would need."""
    large = draw(st.sampled_from([False, False, True]))  # so that pieces of optimizer states are smaller than the whole
    unit = UNIT << 22 if large else UNIT
    sizes = draw(st.sampled_from([(1,), (1,), (2,), (1, 2)]))
    profile = parse_profile(draw(profiles(sizes, unit)), "drawn")
    graphs = {size: layer_graph(profile, size) for size in sizes}
    names = draw(st.lists(st.sampled_from(USUAL) | st.sampled_from(METHODS), min_size=1, max_size=3, unique=True))
    samples = draw(st.sampled_from([2, 3, 4, 4, 6, 8])) * max(sizes)
    copies = 2.0 if large else draw(st.sampled_from([0.0, 1.0, 2.0]))
    layers = graphs[min(sizes)].layers
    need = sum((2 + copies) * layer.buffer + 2 * layer.stored for layer in layers)
    percent = draw(st.integers(10, 60) | (st.integers(60, 90) if large else st.none()))
    limit = None if percent is None else need * percent // (100 * unit) * unit + 0.5
    return Case(graphs, samples, draw(devices_of(unit, limit)), tuple(names), draw(st.booleans()), copies)


@st.composite
def moving_cases(draw):
    """Draw cases in which activations take most of the memory, and copies to the host as long as passes, or less."""
    graph = layer_graph(parse_profile(draw(profiles((1,), UNIT, moves=True)), "drawn"), 1)
    stored = sum(layer.stored for layer in graph.layers)
    limit = stored * draw(st.integers(20, 40)) // 10 + 0.5
    devices = Devices((DeviceLevel(draw(st.sampled_from([2, 3])), draw(st.sampled_from([2.0, 1e3])) * UNIT),), limit)
    there = draw(st.sampled_from([None, None, 1.0, 3.0]))  # of the host's memory
    devices = replace(
        devices, host=draw(st.sampled_from([15.0, 50.0, 1e3])) * UNIT, host_memory=(there or 0.0) * stored or None
    )
    names = (draw(st.sampled_from(["gpipe", "gpipe", "eager", "1f1b", "2bw", "2bw-eager"])),)
    return Case({1: graph}, draw(st.sampled_from([8, 12])), devices, names)


@st.composite
def few_microbatches(draw):
    """Draw cases of methods whose weights are two updates late, beside others: many have too few for one update."""
    case, late = draw(cases()), draw(st.sampled_from([("3bw",), ("3bw",), ("3bw-ahead",), ("3bw", "3bw-ahead")]))
    others = draw(st.lists(st.sampled_from(["1f1b", "2bw", "2bw", "2bw-eager", "2bw-ahead"]), max_size=2, unique=True))
    samples = draw(st.sampled_from([1, 2, 2, 3, 4])) * max(case.graphs)
    return replace(case, methods=(*others, *late), samples=samples)


@st.composite
def devices_of(draw, unit, limit):
    """Draw up to four devices, on one level, of one kind or two."""
    levels = draw(st.sampled_from([(4,), (3,), (2,), (1,)]))
    bandwidths = sorted(draw(st.lists(st.sampled_from([1000, 20, 4, 1]), min_size=len(levels), max_size=len(levels))))
    kinds = ()
    if levels[0] in (2, 3) and len(levels) == 1 and draw(st.booleans()):
        speed, less, many = (
            draw(st.sampled_from([0.5, 1.0, 1.5])),
            draw(st.sampled_from([0.4, 0.7, 1.0])),
            levels[0] - 1,
        )
        counts = draw(st.sampled_from([(1, many), (many, 1)]))
        kinds = (DeviceKind("A", counts[0], 1.0, limit), DeviceKind("B", counts[1], speed, limit and limit * less))
    return Devices(
        tuple(DeviceLevel(n, float(b * unit)) for n, b in zip(levels, reversed(bandwidths), strict=True)),
        limit,
        latency=draw(st.sampled_from([0.0, 0.0, 0.3, 2.0])),
        host=draw(st.sampled_from([None, 3.0 * unit, 50.0 * unit, 50.0 * unit])),
        between=draw(st.sampled_from([0.0, 0.0, 0.1])),
        update=draw(st.sampled_from([0.0, 0.0, 1.5])),
        kinds=kinds,
    )


@st.composite
def profiles(draw, sizes, unit, moves=False):
    """Draw the text of a profile; times are quarters, and bytes whole units; many of what can be moved if asked for.

    In some the first blocks are frozen, and others may be.
    """
    low, halves = draw(st.booleans()), draw(st.booleans())
    rows = ["format: penstock profile 1", f"microbatch_sizes: {list(sizes)}", "layers:"]
    quarters, units = st.integers(1, 16), st.integers(0, 4)
    first_frozen, others = draw(st.sampled_from([0, 0, 0, 1, 3])), draw(st.sampled_from([0, 0, 1]))
    for n in range(draw(st.integers(3, 8) | st.integers(1, 8))):
        forward, first, second = (draw(quarters) for _ in range(3))
        parameters, stored = draw(units) * unit, draw(st.integers(1, 12) if not moves else st.integers(20, 40)) * unit
        shared = min(draw(units) * unit, stored) if n else 0
        each = {
            "forward": [forward / 4 * size for size in sizes],
            "backward": [(first + second - draw(st.sampled_from([-1, 0, 1]))) / 4 * size for size in sizes],
            "output": [draw(st.integers(0, 2)) * unit * size for size in sizes],
            "stored": [stored * size for size in sizes],
            "shared": [shared * size for size in sizes],
            "data": [draw(st.sampled_from([0, unit])) * size for size in sizes],
            "parameters": parameters,
            "frozen": draw(st.sampled_from([0, 0, unit])),
            "step": draw(units) / 4,
            "largest": unit // 4,
        }
        if moves:
            each["output"] = [unit * size for size in sizes]
            own = draw(st.integers((stored - shared) // (2 * unit), (stored - shared) // unit)) * unit
            more = draw(st.integers(0, (stored - shared - own) // unit)) * unit if n else 0
            each |= {"movable": [own * size for size in sizes], "movable_with": [more * size for size in sizes]}
        if halves:
            each |= {"backward_input": [first / 4 * size for size in sizes]}
            each |= {"backward_weight": [second / 4 * size for size in sizes], "late": draw(units) * unit}
        if low:
            each |= {"buffer": parameters, "whole": 2 * parameters}
        if draw(st.booleans()):
            each |= {"optimizer": draw(units) * unit}
        if n < first_frozen or (others and draw(st.booleans())):
            each |= {"trained": "false"}
        rows.append(f"- {{name: b{n}, " + ", ".join(f"{key}: {value}" for key, value in each.items()) + "}")
    return "\n".join(rows)


def settings_of(plan):
    """What a plan has chosen."""
    of = plan.settings
    own = plan.planner, of["microbatch_size"], of["stages"], of["width"], of.get("sharding", "none")
    ranks = tuple(activations_of(of, PLANNED[plan.planner].ranks(of["stages"])))
    cuts = (0, *itertools.accumulate(of["balance"]))
    speeds = tuple(plan.stages[rank].on.speed if plan.stages[rank].on else 1.0 for rank in range(of["stages"]))
    return *own, "offload_optimizer" in of, "offload" in of, cuts, ranks, speeds


def rated_plans(case, skipped):
    """All plans of a case, by what they have chosen."""
    found = {}
    for kind in kinds_of(case, looked_into(case, skipped)):
        own = kind.name, kind.size, kind.depth, kind.width, kind.level, kind.away
        for rated in EveryPlan(case, kind).plans():
            moves = OFFLOADED in rated.activations
            if kind.offloads and not moves:
                continue  # one of another kind
            found[*own, moves, rated.cuts, rated.activations, tuple(speed for speed, _ in rated.place)] = rated
    return found


def faults_of_list(skipped, every):
    """What is wrong with a list of what was skipped: plans that fit, or that take less than it says."""
    least, said = {}, []
    for rated in every.values():
        least[str(rated.kind)] = min(rated.seconds, least.get(str(rated.kind), math.inf))
    for each in skipped:
        bound = re.match(r"takes (\S+) s per sample at least", each.bound)
        fits = each.what in least and "does not fit" in each.bound
        if fits or (bound and float(bound[1]) > least.get(each.what, math.inf) * (1 + 1e-3)):
            said.append(f"{each}, but one takes {least[each.what]}")
    return said


def faults(case):
    """What is wrong with the plans of a search, in words; nothing if they are as they should be."""
    sizes = {size: Sized(graph, size, case.samples // size) for size, graph in case.graphs.items()}
    found = simulated_plans(sizes, case.devices, case.optimizer_copies, case.decides, case.methods)
    plans, skipped = found.plans, found.skipped
    every, said = rated_plans(case, skipped), []
    for plan in plans:
        rated = every.get(settings_of(plan))
        if rated is None:
            said.append(f"no such plan, or it does not fit: {plan.settings}")
        elif not math.isclose(plan.seconds_per_sample, rated.seconds, rel_tol=CLOSE):
            said.append(f"takes {rated.seconds}, not {plan.seconds_per_sample}: {plan.settings}")
        elif rated.held and list(rated.held) != [each.memory for each in plan.rating.stages[: len(rated.held)]]:
            said.append(f"holds {rated.held}, not {[each.memory for each in plan.rating.stages]}: {plan.settings}")
    said += faults_of_list(skipped, every)
    names = [{name} for name in case.methods if name in USUAL]
    late = {name for name in case.methods if not PLANNED[name].flushes}
    by_one = {name for name in late if METHOD_TABLE[name.partition(":")[0]].rule == "double-buffer"}
    for group in (*names, by_one, late, set(case.methods) - late):
        ours = min((plan.seconds_per_sample for plan in plans if plan.planner in group), default=math.inf)
        least = min((each for each in every.values() if each.kind.name in group), default=None)
        if least is not None and least.seconds < ours * (1 - CLOSE):
            said.append(f"{sorted(group)}: {least} takes less than {ours}")
    return said


@pytest.mark.slow
@seed(0)
@settings(max_examples=15, deadline=None, database=None, phases=[Phase.generate])
@given(cases())
def test_plans_are_the_best_of_all_that_there_are(case):
    assert faults(case) == []


@seed(0)
@settings(max_examples=10, deadline=None, database=None, phases=[Phase.generate])
@given(few_microbatches())
def test_plans_with_weights_two_updates_late_are_the_best_of_all(case):
    assert faults(case) == []


@seed(0)
@settings(max_examples=5, deadline=None, database=None, phases=[Phase.generate])
@given(moving_cases())
def test_plans_that_may_offload_are_the_best_of_all(case):
    assert faults(case) == []


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(few_microbatches())
def test_plans_of_100_cases_with_weights_two_updates_late_are_the_best_of_all(case):
    assert faults(case) == []


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(moving_cases())
def test_plans_of_100_cases_that_may_offload_are_the_best_of_all(case):
    assert faults(case) == []


@pytest.mark.long
@settings(max_examples=500, deadline=None)
@given(cases())
def test_plans_of_500_cases_are_the_best_of_all_that_there_are(case):
    assert faults(case) == []
