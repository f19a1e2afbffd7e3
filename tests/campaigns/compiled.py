"""The compiled simulator against the object machine, to the last bit: random schedules, costs, spans and windows."""

import argparse
import sys
from collections import Counter
from pathlib import Path
from random import Random

from penstock.errors import ConfigError, ScheduleError
from penstock.schedule.add_options import extended
from penstock.schedule.build import ScheduleRequest
from penstock.schedule.compiled.collective_events import NotCompiledError
from penstock.schedule.lowering.lower import lower
from penstock.schedule.machine.play import Machine
from penstock.schedule.methods.table import METHODS
from penstock.schedule.text import parse_schedule
from penstock.simulate.compiled_span import CompiledSpan
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.sharding_traffic import Network
from penstock.simulate.simulate import play

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


def random_costs(random, stages, schedule=None):
    """Times of which sums are rounded, some of them zero; where the schedule is given it may have a network."""

    def time():
        return random.choice([0.0, 1.0, 1 / 3, random.uniform(0.01, 10.0)])

    return Costs(
        tuple(StageCost(time(), time(), time(), time()) for _ in range(stages)),
        latency=random.choice([0.0, 0.1, time()]),
        transfer=random.choice([0.0, 0.0, time()]),
        collective=time(),
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
    costs = [random_costs(random, schedule.num_stages, schedule) for _ in range(random.randint(1, 3))]
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


def run(count, seed):
    """Compare until `count` cases were equal; returns how often each outcome was seen, and the methods that were."""
    random, found = Random(seed), Counter()
    while found["equal"] < count:
        try:
            found[compare(random)] += 1
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
