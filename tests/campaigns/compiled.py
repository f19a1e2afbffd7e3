"""The compiled simulator against the object machine, to the last bit: random schedules, costs, spans and windows.

Every other case is a schedule of arrays, which is played without a graph of events: there the window that costs no
time, the table of idle time and the counts of messages are compared, too, with those of the same actions one by one.
"""

import argparse
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

from penstock.errors import ConfigError, ScheduleError
from penstock.idle_time import split_time
from penstock.schedule.add_options import extended
from penstock.schedule.array_schedules.array_lowering import ArrayLowered, ArrayLowering
from penstock.schedule.array_schedules.array_send_windows import lower_arrays_freely
from penstock.schedule.build import ScheduleRequest
from penstock.schedule.compiled.collective_events import NotCompiledError
from penstock.schedule.ir.arrays import ArraySchedule
from penstock.schedule.lowering.lower import lower
from penstock.schedule.lowering.send_window_search import lower_freely
from penstock.schedule.machine.play import Machine
from penstock.schedule.methods.table import METHODS
from penstock.schedule.text_parser import parse_schedule
from penstock.simulate.compiled_span import CompiledSpan
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.message_counts import count_messages, receive_buffers
from penstock.simulate.play import play
from penstock.simulate.sharding_traffic import Network

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("*.txt"))
SEARCHED = ("zb-auto", "zb-exact", "v-auto")


def random_schedule(random):
    """A golden file, or a method of random size with random additions; it need not be legal otherwise."""
    if random.random() < 0.3:
        return parse_schedule(random.choice(GOLDEN).read_text())
    name = random.choice([name for name, row in METHODS.items() if row.order not in SEARCHED])
    stages, m, options = random.randint(1, 5), random.randint(1, 12), {}
    if name in ("1f1b", "2bw") and random.random() < 0.5:
        options["in_flight"] = random.randint(stages, 2 * stages + 2)
    schedule = ScheduleRequest(name, stages, m, options=options).schedule
    return extended(
        schedule,
        decides=random.random() < 0.3,
        reduces=random.random() < 0.3,
        recomputes=random.random() < 0.2,
        averages=random.randint(1, 3) if random.random() < 0.1 else None,
        sharding=random_sharding(random) if random.random() < 0.3 else "none",
        offloads=random.random() < 0.3,
        swaps=random.random() < 0.2,
    )


def random_sharding(random):
    """Few places, so that passes wait for gathers and for the room of gradients."""
    level, cache = (
        random.choice(["optimizer", "gradients", "full", "full", "full"]),
        random.choice(["optimal", "direct"]),
    )
    weights, gradients = random.randint(1, 3), random.randint(1, 3)
    return (
        level
        + {
            "optimizer": "",
            "gradients": random.choice(["", f":gradients={gradients}"]),
            "full": random.choice(["", f":weights={weights}:gradients={gradients}:cache={cache}"]),
        }[level]
    )


def random_costs(random, stages, schedule=None, ranks=0):
    """Times of which sums are rounded, some of them zero; where the schedule is given it may have a network, and of
    several ranks each link a latency of its own."""

    def time():
        return random.choice([0.0, 1.0, 1 / 3, random.uniform(0.01, 10.0)])

    return Costs(
        tuple(StageCost(time(), time(), time(), time(), random.choice([None, time()])) for _ in range(stages)),
        latency=random.choice([0.0, 0.1, time(), *[tuple(time() for _ in range(ranks - 1))] * 2 * (ranks > 1)]),
        transfer=random.choice([0.0, 0.0, time()]),
        collective=time(),
        copy=time(),
        swap=time(),
        fused=random.choice([1.0, 0.7]),
        network=None if schedule is None or random.random() < 0.3 else Network(schedule, 3, random.uniform(0.1, 10.0)),
    )


def compare(random):
    """Compare one case; returns what it was: equal, both refuse, or that only the object machine plays it.

    Raises:
        ScheduleError, ConfigError: the choices make no schedule.
    """
    schedule = random_schedule(random)
    window = random.choice([None, 1, 2, 3, 4, 8, 100])
    lowered = lower(schedule, random.choice([None, None, 0, 2]), window)
    batches = random.randint(1, 5)
    costs = [random_costs(random, schedule.num_stages, schedule, schedule.ranks) for _ in range(random.randint(1, 3))]
    transfers = any(each.transfer for each in costs)
    try:
        span = CompiledSpan(lowered, batches, transfers)
    except NotCompiledError as error:
        try:
            Machine(lowered).play(batches)
        except ScheduleError:
            return "both refuse"
        return f"played: {error}"
    bubbles, times = span.bubbles(costs), span.times(costs)
    for i, each in enumerate(costs):
        machine = Machine(lowered, each.duration, each.latency, transfer=each.transfer)
        machine.play(batches)
        where = f"{schedule.name}, window {lowered.window}, {batches} batches, {each!r}:\n{schedule}"
        assert machine.clock == times.clocks[:, i].tolist(), where
        assert machine.held_up == times.held_up[i], where
        wanted = play(lowered, each, batches)[0].bubble()
        assert (wanted.makespan, wanted.rank_span, wanted.busy) == (
            bubbles[i].makespan, bubbles[i].rank_span, bubbles[i].busy
        ), where  # fmt: skip
    return "equal"


def random_arrays(random):
    """A schedule of arrays of random size."""
    name = random.choice(["1f1b", "eager", "2bw", "2bw-eager", "interleaved", "breadth-first", "zb-v"])
    stages, m, options = random.randint(1, 6), random.randint(1, 14), {}
    if name in ("1f1b", "2bw") and random.random() < 0.5:
        options["in_flight"] = random.randint(stages, 2 * stages + 2)
    if name in ("interleaved", "breadth-first"):
        options["chunks"] = random.randint(1, 3)
        if random.random() < 0.3:
            options["group"] = random.randint(stages, stages + 4)
    schedule = ScheduleRequest(name, stages, m, options=options).schedule
    if random.random() < 0.3:
        some = [stage.index for stage in schedule.stages if random.random() < 0.8]
        schedule = extended(schedule, recomputes=some or True)
    assert isinstance(schedule, ArraySchedule)
    return schedule


def searched(schedule, plain, costs, batches):
    """The schedule lowered with the window that costs no time, and the same by playing actions; None if neither is."""
    found = []
    hop = costs.duration, costs.latency, (batches,)
    for search, refused in (
        (lambda: lower_arrays_freely(ArrayLowering(schedule), *hop, costs.transfer), NotCompiledError),
        (lambda: lower_freely(plain, *hop, transfer=costs.transfer), ScheduleError),
    ):
        try:
            found.append(search())
        except refused:
            found.append(None)
    return found


def waits_for_ever(lowered, batches):
    """Whether the object machine says so."""
    try:
        Machine(lowered).play(batches)
    except ScheduleError:
        return True
    return False


def compare_arrays(random):
    """Compare one schedule of arrays with the same actions; returns and raises as `compare`."""
    schedule = random_arrays(random)
    plain, batches = replace(schedule), random.randint(1, 4)
    costs = [random_costs(random, schedule.num_stages, ranks=schedule.ranks) for _ in range(random.randint(1, 3))]
    if random.random() < 0.3:
        lowered, slow = searched(schedule, plain, costs[0], batches)
        assert (lowered and lowered.window) == (slow and slow.window), f"{costs[0]!r}, {batches}:\n{schedule}"
    else:
        window, lookahead = random.choice([1, 2, 3, 4, 8, 100]), random.choice([None, None, 0, 2])
        try:
            lowered, slow = ArrayLowering(schedule).at(window, lookahead), lower(plain, lookahead, window)
        except NotCompiledError:
            lowered = None
    if lowered is None:
        return "both refuse"
    assert isinstance(lowered, ArrayLowered)
    assert not isinstance(slow, ArrayLowered)
    where = f"{schedule.name}, window {lowered.window}, {batches} batches, {costs!r}:\n{schedule}"
    assert count_messages(lowered, batches) == count_messages(slow, batches), where
    assert receive_buffers(lowered, batches) == receive_buffers(slow, batches), where
    costs = [replace(each, transfer=0.0) for each in costs]
    span = CompiledSpan(lowered, batches)
    try:
        bubbles, times = span.bubbles(costs), span.times(costs)
    except NotCompiledError:
        assert waits_for_ever(slow, batches), where
        return "both refuse"
    for i, each in enumerate(costs):
        machine = Machine(slow, each.duration, each.latency, transfer=each.transfer)
        machine.play(batches)
        assert machine.clock == times.clocks[:, i].tolist(), where
        assert machine.held_up == times.held_up[i] == span.ends(each).held_up, where
        timeline = play(slow, each, batches)[0]
        assert vars(timeline.bubble()) == vars(bubbles[i]), where
        assert split_time(timeline) == span.time_split(each), where
    return "equal"


def run(count, seed):
    """Compare until `count` cases were equal; returns how often each outcome was seen, and the methods that were."""
    random, found = Random(seed), Counter()
    while found["equal"] < count:
        try:
            case = random.choice([compare, compare_arrays])
            found[case(random)] += 1
        except (ScheduleError, ConfigError):
            found["no schedule"] += 1
        assert sum(found.values()) < 20 * count, found
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for outcome, times in run(arguments.count, arguments.seed).most_common():
        sys.stdout.write(f"{times:6} {outcome}\n")
