"""Rounds of turns of parallel pipelines, in random order, whose raw data grow by a line per turn."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.links import Turn, take
from benchmarks.network.arms import Case
from benchmarks.network.hosts import LINKS, Network
from benchmarks.network.team import Team


def measure(cases: Sequence[Case], links: Sequence[str], batches: Sequence[int], rounds: int, out: Path) -> None:
    """Run every arm on every link in every round, in random order; the raw data grow by a line per turn.

    Args:
        cases: all of as many hosts.
        links: by name.
        batches: of each run of a turn.
        rounds: how many.
        out: the file of the raw data.
    """
    turns = [Turn(case, LINKS[link], arm) for case in cases for link in links for arm in case.arms]
    with ExitStack() as stack, out.open("a") as file:
        network = stack.enter_context(Network(cases[0].hosts))
        team = stack.enter_context(Team(network, cases[0].hosts, alone=LINKS[links[0]].mbit is None))
        for case in cases:
            team.ask("make", case=case.name, arms=list(case.arms))
        for round_ in range(rounds):
            for turn in random.Random(round_).sample(turns, len(turns)):
                for count in batches:
                    row = take(turn, network, team, count * turn.case.m)
                    print(json.dumps({"round": round_, **row}), file=file, flush=True)
            print(f"round {round_}: {len(turns)} turns", flush=True)
        team.ask("close")
