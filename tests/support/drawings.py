"""Makes the drawings in docs, and tables from the simulator.

`python tests/support/drawings.py` writes docs/orders.md, docs/sharded-state.md and docs/2bw.svg anew.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

from penstock.errors import ScheduleError
from penstock.schedule.build import prove
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.methods.method_parsing import written_method
from penstock.schedule.methods.table import METHODS
from penstock.simulate.costs import Costs
from penstock.simulate.method_figures import facts_of_methods
from penstock.simulate.sharding_traffic import Network
from penstock.simulate.simulate import simulate_schedule
from penstock.view.svg import timeline_svg
from penstock.view.text import draw_timeline

PAGE = Path(__file__).parents[2] / "docs" / "orders.md"
SHARDED = PAGE.parent / "sharded-state.md"
PICTURE = PAGE.parent / "2bw.svg"
WIDTH = 118
STAGES, MICROBATCHES = 4, 8
_DRAWING = re.compile(r"```text\n\$ penstock show ([^\n]*)\n.*?```", re.DOTALL)
_TRAFFIC = re.compile(r"(<!-- traffic -->\n).*?(<!-- end -->)", re.DOTALL)
_TABLE = re.compile(r"(<!-- figures -->\n).*?(<!-- end -->)", re.DOTALL)


def drawing(command: str) -> str:
    """What `penstock show` draws, without title and legend."""
    method, *rest = shlex.split(command)
    chosen = written_method(method)
    numbers = {"--stages": STAGES, "--microbatches": MICROBATCHES, "--batches": None}
    order = None
    for key, value in zip(rest[::2], rest[1::2], strict=True):
        if key == "--order":
            order = value
        else:
            numbers[key] = int(value)
    size = numbers["--stages"] or 0, numbers["--microbatches"] or 0
    proof = prove(chosen.name, *size, order=order, options=chosen.options)
    span = numbers["--batches"] or (3 if any(program.epilogue for program in proof.schedule.programs) else 1)
    costs = Costs.uniform(proof.schedule, 1.0, 1.0, 1.0)
    if proof.shards:
        costs = replace(costs, network=Network.of_time(proof.schedule, 1.0))
    simulation = simulate_schedule(proof, costs, span)
    rows = "\n".join(line.rstrip() for line in str(draw_timeline(simulation.timeline, WIDTH)).splitlines())
    return f"```text\n$ penstock show {command}\n{rows}\n```"


def figures() -> str:
    """A row for every method that flushes, from the simulator."""
    lines = ["| method | bubble | activations | weights | volume |", "|---|---|---|---|---|"]
    for name, row in METHODS.items():
        if RULES[row.rule].name != "flush":
            continue
        try:
            proof = prove(name, STAGES, MICROBATCHES)
        except ScheduleError:
            continue
        found = simulate_schedule(proof, Costs.uniform(proof.schedule, 1.0, 1.0, 1.0))
        (facts,) = facts_of_methods([row], STAGES, MICROBATCHES)
        copies = max(facts.weight_copies or [])
        held = f"{max(found.activations):g}"
        lines.append(f"| `{name}` | {found.bubble.bubble:.3f} | {held} | {copies:g} | {found.volume:g} |")
    return "\n".join(lines) + "\n"


COMPARED = (
    ("layered:chunks=4", (4, 8, 16)),
    ("depth-first-full:chunks=4", (4, 8, 16)),
    ("breadth-first:chunks=4:group=8", (16,)),
    ("1f1b", (16,)),
)
"""What docs/sharded-state.md compares, with the microbatches of each."""


def traffic() -> str:
    """A row for each method on fully sharded state, from the simulator; the figures of the rank that sends most."""
    lines = [
        "| method | m | gathers | reductions | bytes sent | at once | hidden | exposed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, numbers in COMPARED:
        chosen = written_method(name)
        for m in numbers:
            proof = prove(chosen.name, STAGES, m, options=chosen.options, sharding="full")
            network = Network(proof.schedule, 4, 3.0, 1 / proof.schedule.num_stages)
            found = simulate_schedule(proof, replace(Costs.uniform(proof.schedule), network=network)).shards
            assert found is not None
            sent = [sum(each.values()) for each in found.sent]
            rank = sent.index(max(sent))
            of, hidden = found.ranks[rank], found.hidden[rank] / found.busy[rank]
            counts = f"{of.gathers} | {of.reductions} | {sent[rank]:.3g} | {of.gathered}, {of.gradients}"
            lines.append(f"| `{name}` | {m} | {counts} | {hidden:.0%} | {found.exposed_per_batch:.3f} |")
    return "\n".join(lines) + "\n"


def sharded_anew(text: str) -> str:
    """The page on sharded state with its table and its drawing as they come out now."""
    text = _TRAFFIC.sub(lambda match: match[1] + traffic() + match[2], text)
    return _DRAWING.sub(lambda match: drawing(match[1]), text)


def made_anew(text: str) -> str:
    """The page with all drawings and figures as they come out now."""
    text = _TABLE.sub(lambda match: match[1] + figures() + match[2], text)
    return _DRAWING.sub(lambda match: drawing(match[1]), text)


def picture() -> str:
    """The README's picture: four batches of PipeDream-2BW, which read three versions of the weights."""
    proof = prove("2bw", 4, 4)
    simulation = simulate_schedule(proof, Costs.uniform(proof.schedule, 1.0, 1.0, 1.0), 4)
    return timeline_svg(simulation.timeline, "PipeDream-2BW: 4 stages, 4 microbatches in a batch, 4 batches")


if __name__ == "__main__":
    PAGE.write_text(made_anew(PAGE.read_text()))
    PICTURE.write_text(picture())
    SHARDED.write_text(sharded_anew(SHARDED.read_text()))
