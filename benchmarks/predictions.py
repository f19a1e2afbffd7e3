"""Are predictions right? Step times predicted from a profile, beside those of runs; and what a planner's choice loses.

    python -m benchmarks.predictions times         # predicted and measured; about 8 minutes on two cores, needs root
    python -m benchmarks.predictions grid          # the planner's choice among all of a grid; about 10 minutes
    python -m benchmarks.predictions --summary FILE

A profile is measured first, in this process and alone, through `penstock.measure`: blocks, and each link by pings. In
turns with that, two other configurations of each model run for some seconds on the loopback, with as many ranks as
those that are predicted, and tell by how much passes take longer there (`penstock.plan.calibration`). What the profile
then predicts is written to the raw file *before* any configuration runs. Then all of them take turns in random order,
for so many rounds; some of them are there twice, which tells the noise. A turn is a span of so many batches, of which
the first two and the last one do not count. Links are those of `benchmarks.links`: network namespaces whose interfaces
are limited; loopback is a namespace without other hosts.

`grid` does the same with an exhaustive grid of configurations, cut into stages as the planner does, for two and for
four processes: the planner takes the one that is predicted to be fastest. Its throughput over that of the fastest one
measured is what its choice reaches.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

from benchmarks.links import stop
from benchmarks.machine import core_seconds
from benchmarks.network.hosts import LINKS, Network, why_not
from benchmarks.network.team import Team
from benchmarks.predicted.configurations import LOOPBACK, Configuration, calibrating, grid, timed
from benchmarks.predicted.forecasts import CalibratingRuns, measured_link, planned, predicted, profiled
from benchmarks.predicted.report import print_errors, print_regret
from benchmarks.throughput import RESULTS, open_raw, read_raw
from penstock.plan.profile.schema import Profile, ProfiledLink

Teams = Mapping[tuple[int, bool], Team]
"""By their number of ranks, and whether they are on the loopback."""

_REPLICATED = 4  # every so many configurations one is there twice
_RANKS = "benchmarks.predicted.ranks"


def measure(part: str, configurations: Sequence[Configuration], arguments: argparse.Namespace, out: Path) -> None:
    """Predict configurations, write that down, and measure them; the raw data grow by a line per turn.

    Args:
        part: of the benchmark; of a grid, configurations are cut by the planner.
        configurations: all of them.
        arguments: of the command.
        out: raw file.
    """
    sizes = dict[str, list[int]]()
    for of in configurations:
        sizes.setdefault(of.model, []).append(of.samples)
    worlds = sorted({of.ranks for of in configurations})
    for model, found in sizes.items():
        found += [of.samples for of in calibrating(model, worlds[0])]
    with ExitStack() as stack, out.open("a") as file:
        network = stack.enter_context(Network(max(of.ranks for of in configurations)))
        keys = dict.fromkeys([*((ranks, True) for ranks in worlds), *map(_key, configurations)])
        teams = {key: stack.enter_context(Team(network, *key, _RANKS)) for key in keys}
        paces = [pace(next(iter(teams.values())))]
        runs = CalibratingRuns({ranks: teams[ranks, True] for ranks in worlds}, sizes, arguments.batches)
        alone, links = profiled(sizes, arguments.seconds, runs.turn), measured_links(configurations, teams)
        messages = {of.shape.message for of in configurations}
        loopback = {ranks: measured_link(teams[ranks, True], LINKS[LOOPBACK], messages) for ranks in worlds}
        profiles = runs.calibrated(alone, loopback)
        paces.append(pace(next(iter(teams.values()))))
        say(file, pace=sum(paces) / 2, paces=paces)
        for (name, ranks), profile in profiles.items():
            say(file, profile=name, ranks=ranks, **profile.model_dump(exclude_none=True))
        for (ranks, name), link in links.items():
            say(file, link=name, ranks=ranks, **link.model_dump())
        run(forecast(part, configurations, profiles, links, file), network, teams, arguments, file)
        for team in teams.values():
            team.ask("close")


def pace(team: Team) -> float:
    """Return the seconds that a piece of work takes just now, in the mean of several times."""
    found = [rank["pace"] for _ in range(5) for rank in team.ask("pace")[:2]]
    return sum(found) / len(found)


def measured_links(configurations: Sequence[Configuration], teams: Teams) -> dict[tuple[int, str], ProfiledLink]:
    """Measure the links of all configurations."""
    found = {}
    for of in configurations:
        if (of.ranks, of.link) not in found:
            messages = {each.shape.message for each in configurations}
            found[of.ranks, of.link] = measured_link(teams[_key(of)], LINKS[of.link], messages)
    return found


def forecast(
    part: str,
    configurations: Sequence[Configuration],
    profiles: Mapping[tuple[str, int], Profile],
    links: Mapping[tuple[int, str], ProfiledLink],
    file: TextIO,
) -> list[tuple[Configuration, int]]:
    """Write down what every configuration is predicted to take; return them and their replicas."""
    arms = list[tuple[Configuration, int]]()
    for number, given in enumerate(configurations):
        of, profile, link = given, profiles[given.model, given.ranks], links[given.ranks, given.link]
        if part != "times":
            ((of, seconds),) = planned([of], profile, link)
        else:
            seconds = predicted(of, profile, link)
        twice = part == "times" and number % _REPLICATED == 0
        alone = predicted(of, profile.model_copy(update={"calibration": None}), link)
        say(file, part=part, of=of._asdict(), predicted=seconds, uncalibrated=alone, replicated=twice)
        arms += [(of, copy) for copy in range(1 + twice)]
    return arms


def run(
    arms: Sequence[tuple[Configuration, int]],
    network: Network,
    teams: Teams,
    arguments: argparse.Namespace,
    file: TextIO,
) -> None:
    """Make all arms, and measure them in turns."""
    for number, (of, _) in enumerate(arms):
        network.set(LINKS[of.link])
        teams[_key(of)].ask("build", name=str(number), configuration=of._asdict())
    for round_ in range(arguments.rounds):
        began = time.perf_counter()
        for number in random.Random(round_).sample(range(len(arms)), len(arms)):
            of, copy = arms[number]
            network.set(LINKS[of.link])
            before = core_seconds()
            ranks = teams[_key(of)].ask("step", name=str(number), batches=arguments.batches)
            cores = {name: round(after - before[name], 3) for name, after in core_seconds().items()}
            say(file, round=round_, configuration=of._asdict(), copy=copy, ranks=ranks, cores=cores)
        print(f"round {round_}: {len(arms)} turns, {time.perf_counter() - began:.0f} s", flush=True)


def _key(of: Configuration) -> tuple[int, bool]:
    """Return the team of a configuration."""
    return of.ranks, LINKS[of.link].mbit is None


def say(file: TextIO, **row: Any) -> None:
    """Write a line of the raw data, at once."""
    print(json.dumps(row), file=file, flush=True)


def summarize(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print all tables of some raw data."""
    rows = [json.loads(json.dumps(row)) for row in rows]
    print_errors(rows)
    for processes in (2, 4):
        print_regret(rows, processes)


def main() -> None:
    """Measure, or say what an earlier run has found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["times", "grid"], default="times")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4], choices=[2, 4])
    parser.add_argument("--only", default="", help="of times: configurations in whose name this is")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=7, help="of a turn, at least 4")
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="of the profile, for each kind of pass of each block"
    )
    parser.add_argument("--tiny", action="store_true", help="two configurations of no size, to see that all works")
    parser.add_argument("--summary", type=Path, help="print the summary of this raw file instead")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the raw data")
    arguments = parser.parse_args()
    if arguments.summary:
        summarize(read_raw(arguments.summary))
        return
    if reason := why_not():
        sys.exit(f"skipped: {reason}")
    for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
        signal.signal(number, stop)
    out = open_raw("predictions", arguments.out)
    if arguments.part == "times":
        configurations = [
            of for processes in arguments.processes for of in timed(processes) if arguments.only in str(of)
        ]
        measure("times", tiny() if arguments.tiny else configurations, arguments, out)
    else:
        for processes in [2] if arguments.tiny else arguments.processes:
            configurations = grid(processes, "tiny", 2) if arguments.tiny else grid(processes)
            measure(f"grid {processes}", configurations, arguments, out)
    summarize(read_raw(out))


def tiny() -> list[Configuration]:
    """Return one on each kind of link, for tests."""
    return [Configuration("tiny", "1f1b", 2, 1, 2, 1, link) for link in ("loopback", "100 Mbit/s")]


if __name__ == "__main__":
    main()
