"""Schedules of arrays: built, lowered, proven and simulated as the same actions are one by one."""

from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest

from penstock.errors import ConfigError, ScheduleError
from penstock.schedule.array_schedules.array_lowering import ArrayLowered, ArrayLowering
from penstock.schedule.build import ScheduleRequest
from penstock.schedule.compiled.instruction_arrays import coded
from penstock.schedule.ir.arrays import OPERATIONS, STEP, ActionArrays, ArrayOrder, ArraySchedule, ProgramArrays
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.lowering.lower import lower
from penstock.schedule.orders import ORDERS
from penstock.schedule.proof import check as proofs
from penstock.schedule.proof.check import check
from penstock.schedule.transforms.apply_version_rule import apply_rule
from penstock.schedule.transforms.recompute import with_recompute
from penstock.simulate import simulate as simulation
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.play import play
from penstock.simulate.simulate import simulate_schedule

METHODS = ("1f1b", "eager", "2bw", "2bw-eager", "interleaved", "breadth-first", "zb-v")
RECOMPUTING = ("1f1b, recomputing", "2bw, recomputing", "zb-v, recomputing")
SIZES = ((1, 2), (2, 1), (2, 3), (3, 4), (3, 7), (4, 9))


def of_arrays(method, stages, microbatches):
    """The schedule of a method, or None where the sizes are too small for it."""
    name, _, recomputes = method.partition(", ")
    try:
        schedule = ScheduleRequest(name, stages, microbatches).schedule
    except (ScheduleError, ConfigError):
        return None
    if recomputes:
        schedule = with_recompute(schedule)
    assert isinstance(schedule, ArraySchedule)
    return schedule


def outcome(schedule):
    """What is proven, or what is wrong."""
    try:
        proof = check(schedule)
    except ScheduleError as error:
        return str(error)
    except (IndexError, KeyError, AssertionError) as error:  # of actions that name what is not there
        return type(error)
    return proof.stages, proof.activations, proof.steady_from, proof.lowered.window


@pytest.mark.parametrize("rule", ["flush", "double-buffer", "stash", "newest"])
@pytest.mark.parametrize("order", ["1f1b", "endless-1f1b", "interleaved", "breadth-first", "zb-v"])
def test_a_rule_is_written_into_arrays_as_into_actions(order, rule):
    for stages, m in SIZES:
        made = ORDERS[order](stages, m)
        assert isinstance(made, ArrayOrder)
        plain = replace(made)
        assert not isinstance(plain, ArrayOrder)
        assert plain.endless == made.endless
        fast, slow = (apply_rule(each, RULES[rule], m, "name") for each in (made, plain))
        assert fast == slow
        assert hash(fast) == hash(slow)
        for fact in ("operations", "first_trained", "recomputed", "slices", "deciding", "ranks"):
            assert getattr(fast, fact) == getattr(slow, fact)


@pytest.mark.parametrize("method", METHODS)
def test_recomputes_are_added_to_arrays_as_to_actions(method):
    for (stages, m), some in product(SIZES, (None, {0}, {1, 2})):
        schedule = of_arrays(method, stages, m)
        if schedule is None:
            continue
        fast, slow = (with_recompute(each, stages=some) for each in (schedule, replace(schedule)))
        assert isinstance(fast, ArraySchedule)
        assert fast == slow
        for fact in ("operations", "first_trained", "recomputed", "slices", "deciding", "ranks"):
            assert getattr(fast, fact) == getattr(slow, fact)


def instructions(code, rank, part):
    """Readable rows of a program."""
    there, examples = code.programs[rank][part], code.classes.examples
    rows = zip(there.kind, there.what, there.first, there.on_batch, there.ahead, strict=True)
    named = [(int(k), int(w) if k else (examples[w].op, examples[w].stage), *map(int, n)) for k, w, *n in rows]
    return named, sorted(map(tuple, there.needs.tolist()))


@pytest.mark.parametrize("method", METHODS + RECOMPUTING)
def test_arrays_are_lowered_as_actions_are(method):
    for (stages, m), window, lookahead in product(SIZES, (1, 2, 3, 50), (None, 0, 2)):
        schedule = of_arrays(method, stages, m)
        if schedule is None:
            continue
        fast, slow = ArrayLowering(schedule).at(window, lookahead), lower(schedule, lookahead, window)
        assert (fast.routes, fast.lanes, fast.window) == (slow.routes, slow.lanes, slow.window)
        for rank, part in product(range(stages), (0, 1)):
            assert instructions(fast.code, rank, part) == instructions(coded(slow), rank, part)
        assert fast == slow


@pytest.mark.parametrize("method", METHODS + RECOMPUTING)
def test_the_short_proof_derives_what_the_long_one_does(method):
    short = 0
    for stages, m in SIZES:
        schedule = of_arrays(method, stages, m)
        if schedule is not None:
            assert outcome(schedule) == outcome(replace(schedule))
            short += proofs._check_arrays(schedule, None, None) is not None
    assert short >= 3


def defective(schedule, random):
    """A schedule of arrays with one defect somewhere."""
    rank, part = random.randrange(schedule.ranks), int(random.random() < 0.3)
    actions = schedule.arrays[rank][part]
    if not len(actions):
        part, actions = 0, schedule.arrays[rank][0]
    columns = [getattr(actions, name).copy() for name in ActionArrays.__dataclass_fields__]
    places, place = list(range(len(actions))), random.randrange(len(actions))
    kind = random.choice(["swap", "move", "drop", "double", "op", "microbatch", "version", "stage"])
    if kind == "swap":
        other = random.randrange(len(actions))
        places[place], places[other] = places[other], places[place]
    elif kind == "move":
        places.insert(random.randrange(len(actions)), places.pop(place))
    elif kind == "drop":
        del places[place]
    elif kind == "double":
        places.insert(place, places[random.randrange(len(actions))])
    elif kind == "op":
        columns[0][place] = random.randrange(len(OPERATIONS) - 1)
    elif kind == "microbatch":
        columns[2][place] += random.choice([-schedule.microbatches, schedule.microbatches, -1, 1])
    elif kind == "version":
        columns[3][place] += random.choice([-1, 1]) if columns[3][place] > -10 else 0
    else:
        columns[1][place] = random.randrange(len(schedule.stages))
    broken = ActionArrays(*(column[np.array(places, dtype=np.int64)] for column in columns))
    return with_actions(schedule, rank, part, broken)


def with_actions(schedule, rank, part, actions):
    """The schedule of arrays with other actions in the period (0) or the epilogue (1) of a rank."""
    arrays = list(schedule.arrays)
    arrays[rank] = ProgramArrays(*(actions if i == part else old for i, old in enumerate(arrays[rank])))
    made = object.__new__(ArraySchedule)
    made.__dict__.update(schedule.__dict__, arrays=tuple(arrays))
    for known in ("programs", "operations", "first_trained", "recomputed"):
        made.__dict__.pop(known, None)
    return made


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS + RECOMPUTING)
def test_the_short_proof_refuses_what_the_long_one_refuses(method):
    """One defect each; where one is none (two forwards that may be swapped), both derive the same."""
    random, refused = Random(method), 0
    for _ in range(60):
        schedule = of_arrays(method, random.choice([2, 3]), random.choice([4, 5, 6]))
        if schedule is None:
            continue
        broken = defective(schedule, random)
        found = outcome(broken)
        assert found == outcome(replace(broken))
        refused += isinstance(found, str)
    assert refused >= 15


@pytest.mark.parametrize("method", METHODS)
def test_a_pass_of_the_next_batch_is_refused_by_both_proofs(method):
    """It reads the version that its batch reads, and stands where a pass of this batch stood."""
    schedule = of_arrays(method, 2, 6)
    places = [(rank, place) for rank in (0, 1) for place in range(len(schedule.arrays[rank][0]))]
    for on, place in places:
        period = schedule.arrays[on][0]
        if period.op[place] != STEP:
            first, version = period.first.copy(), period.version.copy()
            first[place] += schedule.microbatches
            version[place] += 1
            broken = with_actions(schedule, on, 0, replace(period, first=first, version=version))
            found = outcome(broken)
            assert isinstance(found, str)
            assert found == outcome(replace(broken))


@pytest.mark.parametrize("method", METHODS + RECOMPUTING)
def test_simulated_arrays_have_the_figures_of_the_object_machine(method):
    random, compiled = Random(method), 0
    for stages, m in SIZES:
        schedule = of_arrays(method, stages, m)
        if schedule is None or isinstance(outcome(schedule), str):
            continue
        random_stages = tuple(StageCost(*(random.choice([1.0, 1 / 3, 0.7]) for _ in "fbw")) for _ in schedule.stages)
        for costs in (Costs.uniform(schedule), Costs(random_stages, latency=random.choice([0.0, 0.4]), left=0.5)):
            for batches, window in product((1, 3), (None, 3)):
                fast = simulate_schedule(check(schedule), costs, batches, window=window)
                slow = simulate_schedule(check(replace(schedule)), costs, batches, window=window)
                compiled += isinstance(fast.lowered, ArrayLowered)
                assert fast.figures() == slow.figures()
                assert vars(fast.bubble) == vars(play(slow.lowered, costs, batches)[0].bubble())
    assert compiled >= 16  # where a window is larger than a batch of an endless order, actions are looked at


def test_a_span_is_played_only_where_somebody_draws_it(monkeypatch):
    played = []
    real = simulation.play
    monkeypatch.setattr(simulation, "play", lambda *span: played.append(span) or real(*span))
    schedule = of_arrays("2bw", 3, 4)
    found = simulate_schedule(check(schedule), Costs.uniform(schedule), 2)
    found.figures()
    assert not played
    assert "programs" not in vars(schedule)
    assert found.timeline is found.timeline
    assert len(played) == 1
    assert found.timeline.bubble() == found.bubble


def test_arrays_with_another_field_are_a_plain_schedule():
    schedule = of_arrays("1f1b", 2, 3)
    renamed = replace(schedule, name="other")
    assert type(renamed) is Schedule
    assert renamed.programs == schedule.programs
    wider = schedule.with_window(5)
    assert isinstance(wider, ArraySchedule)
    assert (wider.window, schedule.window) == (5, None)
