"""The compiled simulator: equal to the object machine to the last bit, for many costs at once."""

import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from campaigns.compiled import random_costs, run
from penstock.errors import ConfigError, ScheduleError
from penstock.schedule.add_options import extended
from penstock.schedule.build import prove
from penstock.schedule.compiled.collective_events import NotCompiledError
from penstock.schedule.compiled.evaluate import evaluate
from penstock.schedule.compiled.event_graph_builder import graph_of
from penstock.schedule.compiled.instruction_arrays import coded
from penstock.schedule.ir.schedule import Op
from penstock.schedule.lowering.lower import lower
from penstock.schedule.machine.instructions import LoweredProgram
from penstock.schedule.text_parser import parse_schedule
from penstock.simulate import compiled_span as module
from penstock.simulate.compiled_span import CompiledSpan
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.play import play, predict
from penstock.simulate.sharding_traffic import Network
from support.schedules import make_schedule

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("*.txt"))


@pytest.mark.slow
def test_random_spans_are_equal_to_the_last_bit():
    assert run(count=60, seed=11)["equal"] == 60


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_every_golden_file(path):
    """Collectives, fused pairs, slices, activations moved to a peer or the host, swapped optimizer states, recomputes,
    validations: none is left to the machine."""
    schedule, random = parse_schedule(path.read_text()), Random(path.stem)
    lowered = lower(schedule)
    costs = [random_costs(random, schedule.num_stages, ranks=schedule.ranks) for _ in range(3)]
    bubbles = CompiledSpan(lowered, 3, transfers=True).bubbles(costs)
    played = [play(lowered, each, 3)[0].bubble() for each in costs]
    assert [vars(bubble) for bubble in bubbles] == [vars(bubble) for bubble in played]


@pytest.mark.parametrize("method", ["1f1b", "gpipe", "2bw", "2bw-eager"])
def test_copies_to_the_host_are_compiled(method):
    """Of some stages or of all; those of a stage may take longer than those of others."""
    for stages in (True, (0, 2)):
        schedule = prove(method, 3, 6).schedule
        lowered = lower(extended(schedule, offloads=stages, decides=True, swaps=stages is True))
        own = (StageCost(1.0, 1.0, 1.0, 0.5, 5.0), StageCost(1.2, 1.0, 1.0, 0.5, 0.3), StageCost(1.0, 1.0, 1.0))
        costs = [
            Costs(alike, copy=3.0, swap=2.0, latency=0.1)
            for alike in (own, tuple(replace(each, copy=0.0) for each in own))
        ]
        span = CompiledSpan(lowered, 4, transfers=True)
        bubbles = span.bubbles(costs)
        assert [vars(b) for b in bubbles] == [vars(play(lowered, each, 4)[0].bubble()) for each in costs]
        assert bubbles[0].makespan > bubbles[1].makespan
        slow, fast = (span.not_gone(each) for each in costs)
        assert all(slow[rank] >= fast[rank] for rank in slow)
        assert method != "gpipe" or slow[0] > fast[0]


@pytest.mark.parametrize("sharding", ["optimizer", "gradients:gradients=1", "full:weights=1:gradients=1", "full"])
def test_sharded_spans_are_compiled(sharding):
    """Passes wait for the version that they read and for the room of a gradient, and all of a rank shares a lane."""
    random = Random(sharding)
    cases = [("interleaved", 2, 4, {"chunks": 3}), ("breadth-first", 2, 4, {"chunks": 3}), ("2bw", 3, 4, {})]
    for method, stages, m, options in [*cases, ("2bw-layered", 2, 4, {"chunks": 3}), ("dualpipe", 2, 4, {})]:
        if method == "dualpipe" and not sharding.startswith("full"):
            continue  # several ranks of a pipeline take part in a GATHER, which is left to the machine
        try:
            proof = prove(method, stages, m, options=options, sharding=sharding, decides=random.random() < 0.5)
        except ConfigError:  # 2bw has no full
            continue
        costs = [random_costs(random, proof.schedule.num_stages, proof.schedule, stages) for _ in range(3)]
        costs.append(replace(costs[0], network=Network(proof.schedule, 2, 0.1)))  # on which much is waited for
        bubbles = CompiledSpan(proof.lowered, 4, transfers=True).bubbles(costs)
        assert [vars(b) for b in bubbles] == [vars(play(proof.lowered, each, 4)[0].bubble()) for each in costs]


def test_many_costs_give_what_each_gives_alone():
    lowered, random = lower(make_schedule("2bw", 4, 6)), Random(5)
    costs = [random_costs(random, 4, ranks=4) for _ in range(20)]
    assert predict(lowered, costs, 3) == [predict(lowered, [each], 3)[0] for each in costs]


def test_ranks_that_wait_for_ever_are_said_to():
    """Where nothing can be compiled the object machine gives the reason."""
    lowered = lower(parse_schedule("microbatches 2\nnodes 0@0 1@1\nrank 0: F0 B0 F1 B1\nrank 1: F1 B1 F0 B0\n"))
    with pytest.raises(NotCompiledError):
        CompiledSpan(lowered)
    with pytest.raises(ScheduleError, match="deadlock: 2 ranks"):
        predict(lowered, [Costs.uniform(lowered.schedule)])


def test_collectives_in_different_orders_are_left_to_the_machine():
    schedule = extended(make_schedule("interleaved", 2, 4), reduces=True, decides=True)
    lowered = lower(schedule)
    first = lowered.programs[0]
    decides = [i for i in first.period if i.action.op is Op.DECIDE]
    turned = iter([*decides[1:], decides[0]])
    period = tuple(next(turned) if i.action.op is Op.DECIDE else i for i in first.period)
    crossed = replace(lowered, programs=(LoweredProgram(period, first.epilogue), *lowered.programs[1:]))
    costs = Costs.uniform(schedule)
    assert predict(crossed, [costs])[0] == play(crossed, costs, 1)[0].bubble()


def test_a_message_in_the_place_of_another_one_is_refused():
    lowered = lower(make_schedule("gpipe", 2, 2))
    first, second = lowered.programs
    sends = [i for i in first.period if i.action.op is Op.SEND]
    turned = iter(reversed(sends))
    period = tuple(next(turned) if i.action.op is Op.SEND else i for i in first.period)
    crossed = replace(lowered, programs=(LoweredProgram(period, first.epilogue), second))
    with pytest.raises(ScheduleError, match="both ends must use one order"):
        predict(crossed, [Costs.uniform(lowered.schedule)])


@pytest.mark.parametrize("method", ["1f1b", "2bw", "zb-v"])
def test_events_and_steps_grow_linearly(method):
    """In microbatches: a graph has as many events as there are passes and SENDs, computed in as many steps a rank."""

    def sizes(m):
        graph = graph_of(coded(lower(make_schedule(method, 4, m))), 1)
        return np.array([len(graph.cls), len(graph.posted), len(graph.steps.ends)])

    small, large = sizes(24), sizes(48)
    assert (large <= 2.1 * small).all()


def test_python_is_not_called_for_every_event():
    """More costs take no more calls of Python; more ranks hardly any."""

    def calls(ranks, count):
        lowered = lower(make_schedule("1f1b", ranks, 32))
        span, costs = CompiledSpan(lowered), [Costs.uniform(lowered.schedule)] * count
        durations = [[each.duration(a) for each in costs] for a in span._graph.classes.examples]
        number = 0

        def tally(frame, event, argument):
            nonlocal number
            number += event in ("call", "c_call")

        zeros = np.zeros(count)
        sys.setprofile(tally)
        try:
            evaluate(span._graph, np.array(durations), zeros, zeros)
        finally:
            sys.setprofile(None)
        return number

    assert calls(4, 50) <= 1.5 * calls(4, 1)
    assert calls(16, 1) <= 2 * calls(4, 1)


def test_the_campaign_notices_a_wrong_time(monkeypatch):
    """Otherwise it would prove nothing."""
    real = module.evaluate
    monkeypatch.setattr(
        module, "evaluate", lambda g, d, latency, transfer: real(g, d * (1 + 2**-50), latency, transfer)
    )
    with pytest.raises(AssertionError, match="window"):
        run(count=20, seed=3)
