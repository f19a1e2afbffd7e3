"""Which method on my network? Throughput of pipelines, DDP and FSDP2 on hosts with links of several rates.

    python -m benchmarks.links                 # about 45 minutes on two cores; needs root on Linux
    python -m benchmarks.links --short         # about 5 minutes
    python -m benchmarks.links --check         # only the rate and the delay of each link
    python -m benchmarks.links --compare FILE  # the simulator beside the measured times of an earlier run

Hosts are network namespaces (`benchmarks.network.hosts`), with one rank of one thread on each; loopback is a namespace
without other hosts. The same processes stay for the whole run, and the link changes between two turns, so all links and
arms of a round take turns in random order. In a turn an arm trains at least 64 microbatches and is not halted; arms
that divide a batch among whole models, whose batches are all alike, train a quarter of that. A link has its rate in
each direction of each host, and its delay on each way.

Raw data have a line per turn: seconds of the slowest rank and of all cores, bytes of each host's interface, and for
arms of Penstock the times of passes, waits and messages of each rank. Bounds are those of a 95 % interval for the
median.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from benchmarks.machine import core_seconds
from benchmarks.network.arms import AUTO, CASES, DIVIDED, MAKERS, TINY, Case
from benchmarks.network.compare import print_comparison
from benchmarks.network.hosts import LINKS, Link, Network, why_not
from benchmarks.network.probe import MESSAGE
from benchmarks.network.report import group, print_summary
from benchmarks.network.team import Team
from benchmarks.throughput import RESULTS, open_raw, read_raw


class Turn(NamedTuple):
    """An arm of a case on a link."""

    case: Case
    link: Link
    arm: str


def turns_of(cases: Sequence[Case], arguments: argparse.Namespace) -> list[Turn]:
    """All that a round measures."""
    return [
        Turn(case, LINKS[link], arm)
        for case in cases
        for link in arguments.links
        if not case.links or link in case.links
        for arm in case.arms
        if arm in arguments.arms
    ]


def batches_of(turn: Turn, count: int) -> int:
    """How many batches an arm trains in a turn in which pipelines train `count` microbatches."""
    return max(count // (4 if turn.arm in DIVIDED else 1) // turn.case.m, 1)


def run(cases: Sequence[Case], arguments: argparse.Namespace, out: Path) -> None:
    """Measure all rounds; the raw data grow by a line per turn."""
    turns = turns_of(cases, arguments)
    with ExitStack() as stack, out.open("a") as file:
        network = stack.enter_context(Network(max(case.hosts for case in cases)))
        for row in check(network, [LINKS[name] for name in arguments.links], arguments.probe):
            print(json.dumps(row), file=file, flush=True)
        teams = {
            key: stack.enter_context(Team(network, *key))
            for key in dict.fromkeys((turn.case.hosts, turn.link.mbit is None) for turn in turns)
        }
        for (hosts, alone), team in teams.items():
            for case in cases:
                found = (t.arm for t in turns if t.case is case and (t.link.mbit is None) is alone)
                arms = [arm for arm in dict.fromkeys(found) if arm not in AUTO]
                if case.hosts == hosts and arms:
                    team.ask("make", case=case.name, arms=arms)
        for turn in turns:
            if turn.arm in AUTO:
                network.set(turn.link)
                team = teams[turn.case.hosts, turn.link.mbit is None]
                team.ask("make", case=turn.case.name, arms=[turn.arm], link=turn.link.name)
        for round_ in range(arguments.rounds):
            began = time.perf_counter()
            for turn in random.Random(round_).sample(turns, len(turns)):
                row = take(turn, network, teams[turn.case.hosts, turn.link.mbit is None], arguments.count)
                print(json.dumps({"round": round_, **row}), file=file, flush=True)
            print(f"round {round_}: {len(turns)} turns, {time.perf_counter() - began:.0f} s", flush=True)
        for team in teams.values():
            team.ask("close")


def take(turn: Turn, network: Network, team: Team, count: int) -> dict[str, Any]:
    """Run a turn, and return its line of the raw data."""
    network.set(turn.link)
    batches, before = batches_of(turn, count), core_seconds()
    link = turn.link.name if turn.arm in AUTO else ""
    ranks = team.ask("turn", case=turn.case.name, arm=turn.arm, batches=batches, link=link)
    return {
        "case": turn.case.name,
        "link": turn.link.name,
        "arm": turn.arm,
        "m": turn.case.m,
        "microbatches": batches * turn.case.m,
        "seconds": max(rank["seconds"] for rank in ranks),
        "cores": {name: round(after - before[name], 3) for name, after in core_seconds().items()},
        "ranks": ranks,
    }


def check(network: Network, links: Sequence[Link], seconds: float) -> Iterator[dict[str, Any]]:
    """Measure links with a plain socket between two hosts, for about so many seconds each, and print what was found."""
    for link in links:
        found = network.probe(link, int(seconds * 125_000 * (link.mbit or 10_000)))
        message, rtt = (f"{1e3 * found[name]:.2f} ms" for name in ("message", "rtt"))
        print(
            f"{link.name}: {found['mbit']:.1f} Mbit/s of payload, {MESSAGE >> 10} KiB in {message}, there and back in "
            f"{rtt}, {found['sent'] / 1e6:.2f} MB sent by the interface",
            flush=True,
        )
        yield {"probe": link.name, **found}


def choose(arguments: argparse.Namespace) -> tuple[Case, ...]:
    """The cases that were asked for."""
    if arguments.tiny:
        return TINY
    return tuple(case for case in CASES if case.name in arguments.cases)


def stop(number: int, _: object) -> NoReturn:
    """End as by an exception, so that everything is cleaned up."""
    sys.exit(128 + number)


def main() -> None:
    """Run the benchmark, or say what an earlier run has found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--count", type=int, default=64, help="microbatches per turn")
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", default=names, choices=names, metavar="CASE", help="; ".join(names))
    parser.add_argument("--links", nargs="+", default=list(LINKS), choices=list(LINKS))
    parser.add_argument("--arms", nargs="+", default=list(MAKERS), choices=list(MAKERS))
    parser.add_argument("--short", action="store_true", help="a round of two hosts on three links")
    parser.add_argument("--tiny", action="store_true", help="a model of no size, to see that everything works")
    parser.add_argument("--check", action="store_true", help="measure the links with a plain socket, and nothing else")
    parser.add_argument("--probe", type=float, default=0.5, help="seconds for which a plain socket measures a link")
    parser.add_argument("--summary", type=Path, help="print the summary of this raw file instead")
    parser.add_argument("--compare", type=Path, help="compare this raw file with the simulator instead")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the raw data")
    arguments = parser.parse_args()
    if old := arguments.summary or arguments.compare:
        machine, *rows = map(json.loads, old.read_text().splitlines())
        rows = [row for row in rows if "arm" in row]
        print_comparison(rows, machine["machine"]["cores"]) if arguments.compare else print_summary(group(rows))
        return
    if reason := why_not():
        print(f"skipped: {reason}")
        return
    for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
        signal.signal(number, stop)
    if arguments.check:
        with Network(2) as network:
            list(check(network, [LINKS[name] for name in arguments.links], arguments.probe))
        return
    if arguments.short:
        arguments.rounds, arguments.cases = 1, [case.name for case in CASES if case.hosts == 2]
        arguments.links = ["loopback", "1 Gbit/s", "100 Mbit/s"]
    out = open_raw("links", arguments.out)
    run(choose(arguments), arguments, out)
    rows = [row for row in read_raw(out) if "arm" in row]
    print_summary(group(rows))
    print_comparison(rows, os.cpu_count() or 1)


if __name__ == "__main__":
    main()
