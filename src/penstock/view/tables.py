"""Tables for the terminal: methods, and figures derived from schedules."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from penstock.byte_sizes import human_bytes
from penstock.idle_time import TimeSplit
from penstock.schedule.ir.sharding import Level
from penstock.schedule.methods.data_parallel_sync import COMBINES
from penstock.schedule.methods.table import METHODS
from penstock.simulate.method_figures import NO_LINKS, Links, MethodFacts, facts_of_methods
from penstock.view.plurals import counted

if TYPE_CHECKING:
    from penstock.simulate.simulate import Simulation


def methods_json(stages: int, microbatches: int, links: Links = NO_LINKS) -> list[dict[str, Any]]:
    """Return every row as plain values."""
    return [asdict(facts) for facts in facts_of_methods(METHODS.values(), stages, microbatches, links)]


def methods_table(stages: int, microbatches: int, width: int | None = None, links: Links = NO_LINKS) -> Group:
    """Return all rows as a table, and below it why methods have no figures for these numbers.

    Args:
        stages: stages of the pipeline.
        microbatches: microbatches of a batch.
        width: width of the terminal in characters: columns that do not fit are left out, descriptive ones first. None
            for all columns.
        links: between ranks.
    """
    facts = facts_of_methods(METHODS.values(), stages, microbatches, links)
    problems = list(dict.fromkeys(f.problem for f in facts if f.problem is not None))
    title = f"methods at {counted(stages, 'stage')} and {counted(microbatches, 'microbatch')}"
    if links.latency:
        title += f", messages take {links.latency:g}"
    left_out: list[str] = []
    table = _methods(title, facts, problems, left_out)
    while width is not None and len(left_out) < len(_LEAST_NEEDED) and _natural_width(table) > width:
        left_out.append(_LEAST_NEEDED[len(left_out)])
        table = _methods(title, facts, problems, left_out)
    reasons = Table.grid(padding=(0, 1))
    reasons.add_column(no_wrap=True)
    for number, problem in enumerate(problems, 1):
        reasons.add_row(f"({number})", Text(problem))
    return Group(table, *([reasons] if problems else []))


_LEAST_NEEDED = ("order", "sharding", "correction", "version rule", "activations\nin flight", "weight\ncopies")


def _methods(title: str, facts: list[MethodFacts], problems: Sequence[str | None], left_out: Sequence[str]) -> Table:
    """Return the table without the columns in `left_out`."""
    columns: dict[str, list[str]] = {
        "method": [f"[bold]{f.name}[/bold]" for f in facts],
        "order": [f.order for f in facts],
        "version rule": [f.rule for f in facts],
        "correction": ["" if f.correction == "none" else f.correction for f in facts],
        "sharding": [_shardings(f) for f in facts],
        "weight\ncopies": [
            briefly(f.weight_copies) + (f" + {f.buffers}" if f.buffers and f.weight_copies else "") for f in facts
        ],
        "delay": [briefly(f.delay) for f in facts],
        "activations\nin flight": [briefly(f.activations) for f in facts],
        "bubble": [
            f"refused ({problems.index(f.problem) + 1})" if f.bubble is None else f"{f.bubble:.3f}" for f in facts
        ],
    }
    table = Table(title=title, title_justify="left", box=None)
    shown = {heading: cells for heading, cells in columns.items() if heading not in left_out}
    for heading in shown:
        words = heading in ("method", "order", "version rule", "correction", "sharding")
        least = max(len(f.name) for f in facts) if heading == "method" else None
        table.add_column(heading, justify="left" if words else "right", no_wrap=True, min_width=least)
    for row in zip(*shown.values(), strict=True):
        table.add_row(*row)
    table.caption = (
        f"Per rank where the ranks differ; {RANGES}; + n: and n buffers of the correction. {DELAY} Bubble: idle / "
        "total of one more batch in a long run, F = 1, B = 2. Sharding: levels that simulate --sharding takes "
        "(optimizer, gradients, full); = full: the method's own."
    )
    if left_out:
        names = ", ".join(heading.replace("\n", " ") for heading in left_out)
        table.caption += f" Left out at this width: {names} (--json has all)."
    table.caption_justify = "left"
    return table


def _shardings(facts: MethodFacts) -> str:
    """Return the levels of sharding that a method takes, and the one that it has by itself."""
    levels = "all" if len(facts.shardings) == len(Level) - 1 else ", ".join(facts.shardings)
    return levels if facts.sharding == Level.NONE else f"{levels}; = {facts.sharding}"


def _natural_width(table: Table) -> int:
    return Console(width=UNBOUNDED).measure(table).maximum


DELAY = (
    "Delay: updates between the weights that forwards read and the weights updated, mean over a batch and over the "
    "stages of a rank."
)
RANGES = "a .. b: from the first to the last, a to b: from the minimum to the maximum"
UNBOUNDED = 10_000  # characters, more than any table needs
_BRIEF = 10  # characters of figures per rank, beyond which they are summarized


def width_to_fit(console: Console) -> int | None:
    """Return the width that lines must fit: of a terminal, or of COLUMNS; None for programs, which get lines whole."""
    asked = os.environ.get("COLUMNS", "")
    return console.width if console.is_terminal or (asked.isdecimal() and int(asked)) else None


def table_console() -> Console:
    """Return a console on standard output for tables."""
    console = Console()
    return console if width_to_fit(console) is not None else Console(width=UNBOUNDED)


def briefly(values: list[float] | None) -> str:
    """Format the figures of all ranks in one line; long lists by their ends, if monotonic, or their range."""
    text = _per_rank(values)
    if values is None or len(text) <= _BRIEF:
        return text
    if values in (sorted(values), sorted(values, reverse=True)):
        return f"{values[0]:.3g} .. {values[-1]:.3g}"
    return f"{min(values):.3g} to {max(values):.3g}"


def combines_table() -> Table:
    """Return a table of the ways to combine parallel pipelines."""
    table = Table(title="ways to combine parallel pipelines: combine.kind", title_justify="left", box=None)
    for column in ("kind", "title"):
        table.add_column(column)
    for column in ("copies kept", "while meeting"):
        table.add_column(column, justify="right")
    table.add_column("evaluated and saved", style="dim")
    for spec in COMBINES.values():
        passing = "w (lag + 1)" if spec.per_wave else str(spec.passing)
        table.add_row(f"[bold]{spec.name}[/bold]", spec.title, str(spec.buffers), passing, spec.model)
    table.caption = (
        "Copies: buffers as large as the trained weights, on every rank, besides those of the method; w is the "
        "number of pipelines, lag the number of waves."
    )
    table.caption_justify = "left"
    return table


def _per_rank(values: list[int] | list[float] | None) -> str:
    """Format one number if all ranks agree, otherwise all of them."""
    if values is None:
        return "-"
    return _each_once([f"{value:.3g}" for value in values])


def _each_once(texts: Sequence[str]) -> str:
    """Return one text if all are the same, otherwise all."""
    return texts[0] if len(set(texts)) == 1 else " ".join(texts)


def simulation_table(simulation: Simulation, batches: int, in_a_long_run: float) -> Table:
    """Return a table of the figures of a simulated span, and of the bubble of one more batch in a long run."""
    bubble = simulation.bubble
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    rows = (
        ("makespan", f"{bubble.makespan:g}", "first start to last end on any rank"),
        ("rank span", f"{bubble.rank_span:g}", "longest first start to last end of one rank"),
        ("ideal", f"{bubble.ideal:g}", "busy time of the busiest rank"),
        (
            "bubble",
            f"{bubble.bubble:.4f}",
            f"idle / (ranks x makespan), {counted(batches, 'batch')}, drained at the end",
        ),
        ("bubble in a long run", f"{in_a_long_run:.4f}", "of one more batch, as in penstock methods"),
        ("bubble of ideal", f"{bubble.bubble_of_ideal:.4f}", "(makespan - ideal) / ideal"),
        ("rank span bubble", f"{bubble.rank_span_bubble:.4f}", "1 - ideal / rank span"),
        ("peak activations", _per_rank(list(simulation.activations)), "microbatches in flight, per rank"),
        (
            "live versions",
            _per_rank(list(simulation.versions)),
            "weight versions alive at once in a span of any length, per rank",
        ),
        *(
            (f"delay of {what}s", _per_rank([0.0 if d is None else d for d in delays]), _DELAY)
            for what, delays in simulation.delays.items()
            if any(delay is not None for delay in delays)
        ),
        *_missing(simulation),
        (
            "messages",
            str(simulation.messages),
            "sends of activations (also of recomputed ones) and gradients; sums of gradients are not counted",
        ),
        ("volume", f"{simulation.volume:g}", "what they carry, in outputs of a stage for one microbatch"),
        ("window", str(simulation.window), "messages that may be outstanding on a lane, on either side"),
        (
            "receive buffers",
            _per_rank(list(simulation.receive_buffers)),
            "outputs of a stage that a rank has room for before it uses them, at most, per rank",
        ),
        *(
            [("parked", str(simulation.parked), "sends of parked activations, there and back")]
            if simulation.parked
            else []
        ),
    )
    for row in rows:
        table.add_row(*row)
    return table


def _missing(simulation: Simulation) -> list[tuple[str, str, str]]:
    """Return the row of updates that forwards lack, where pipelines agree now and then."""
    missing = simulation.missing_updates
    said = "updates of another pipeline that a forward lacks, at most, per rank (s_global)"
    return [] if missing is None else [("missing updates", _per_rank(list(missing)), said)]


def sharding_table(simulation: Simulation) -> Table | None:
    """Return a table of what a sharded schedule gathers and sums, and of what that costs; None where none is."""
    shards = simulation.shards
    if shards is None:
        return None
    network, figures = shards.network, shards.per_rank()
    sharding = network.schedule.sharding
    table = Table(title=f"sharded state: {sharding}, {counted(network.width, 'pipeline')}", title_justify="left")
    table.title_style, table.box, table.show_header, table.pad_edge = "dim", None, False, False
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    for name, said in _SHARDED.items():
        values = list(figures[name])
        large = "bytes" in name and max(values, default=0) >= _LARGE
        text = _each_once([human_bytes(round(value)) for value in values]) if large else _per_rank(values)
        table.add_row(name.replace("_", " "), text, said)
    ratios = [sent / least for sent, least in zip(figures["bytes_sent"], shards.layered, strict=True) if least]
    if ratios and max(ratios) > 1:
        said = (
            "what a breadth-first order with as many places sends (method layered), whose traffic does not grow with m"
        )
        table.add_row("times layered", _per_rank(ratios), said)
    return table


_LARGE = 1024  # bytes; fewer are numbers of a model without sizes
_SHARDED = {
    "gathers": "of stages, per rank and batch",
    "reductions": "of gradients, per rank and batch",
    "bytes_gathered": "sent (and received) in gathers, per rank and batch",
    "bytes_reduced": "sent (and received) in sums of gradients, per rank and batch",
    "bytes_sent": "both together",
    "gathered_at_once": "stages whose weights are gathered, at most, per rank",
    "gathered_bytes": "what they take",
    "gradients_at_once": "full-size gradients, at most, per rank",
    "gradient_bytes": "what they take",
    "network_time": "of gathers and sums in this span, per rank",
    "hidden": "the part of it while the rank runs passes",
    "exposed": "what the network adds to the makespan of this span",
    "exposed_per_batch": "what it adds to each batch of a long run",
}


_DELAY = "updates between the weights read and the weights updated, per rank"
_CAUSES = (
    "fill, drain: the pipeline fills and empties. imbalance: a peer is still working. communication: a message is "
    "posted or in transit. data: samples are read. control: gradients are summed, or all stages decide. engine: the "
    "rest. Idle time of all ranks is the bubble."
)
_COPY = " copy: something comes back from the memory of the host."


def time_table(split: TimeSplit, unit: str = " s") -> Table:
    """Return a table of where the time went, per rank and in total; the idle shares of all ranks sum to the bubble."""
    part = "the last " if split.partial else ""
    title = f"where the time went, % of {part}{split.makespan:.4g}{unit}"
    table = Table(title=title, title_justify="left", title_style="dim", box=None, padding=(0, 0, 0, 1), pad_edge=False)
    everything = split.shares()
    copies = everything["copy"] > 0  # which few runs have
    table.caption, table.caption_justify = _CAUSES + (_COPY if copies else ""), "left"
    left_out = () if copies else ("copy",)
    everything = _without(everything, left_out)
    for column in ("", *everything, "idle"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    rows = [(f"rank {rank}", _without(split.shares(rank), left_out)) for rank in range(len(split.busy))]
    for name, shares in [*rows, ("all ranks", everything)]:
        figures = [*shares.values(), sum(shares.values()) - shares["work"]]
        style = "bold" if shares is everything else None
        table.add_row(name, *(f"{100 * share:.1f}" for share in figures), style=style)
    return table


def _without(shares: dict[str, float], causes: Collection[str]) -> dict[str, float]:
    return {cause: share for cause, share in shares.items() if cause not in causes}


def keys_table(keys: list[tuple[str, Any, str]], title: str = "keys of --set and --config") -> Table:
    """Return a table of configuration keys with their defaults and meanings."""
    table = Table(title=title, title_justify="left", title_style="dim", box=None, padding=(0, 2))
    for heading in ("key", "default", "meaning"):
        table.add_column(heading, no_wrap=heading == "key")
    for key, default, meaning in keys:
        table.add_row(key, "-" if default is None else str(default), meaning)
    return table


def bytes_table(by_rank: dict[int, dict[str, int]], title: str = "live bytes", width: int | None = None) -> Table:
    """Return a table of bytes with a row per purpose and a column per rank.

    Args:
        by_rank: rank -> purpose -> bytes.
        title: above the table.
        width: of the terminal in characters: where ranks are too many for it, the table has the least and the most of
            them and the sum of all. None for all ranks.
    """
    kinds = sorted({kind for kinds in by_rank.values() for kind, number in kinds.items() if number})
    kinds.sort(
        key=lambda kind: (kind.startswith("device: "), kind.startswith("total"))
    )  # the device's are no part of it
    ranks = sorted(by_rank)
    columns = {f"rank {rank}": [human_bytes(by_rank[rank].get(kind, 0)) for kind in kinds] for rank in ranks}
    table = _bytes(title, kinds, columns)
    if width is None or _natural_width(table) <= width:
        return table
    held = {kind: [by_rank[rank].get(kind, 0) for rank in ranks] for kind in kinds}
    summary = {
        "least": [
            f"{human_bytes(min(held[kind]))} (rank {ranks[held[kind].index(min(held[kind]))]})" for kind in kinds
        ],
        "most": [f"{human_bytes(max(held[kind]))} (rank {ranks[held[kind].index(max(held[kind]))]})" for kind in kinds],
        f"{len(ranks)} ranks": [human_bytes(sum(held[kind])) for kind in kinds],
    }
    return _bytes(title, kinds, summary)


def _bytes(title: str, kinds: Sequence[str], columns: dict[str, list[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="dim", box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for row, kind in enumerate(kinds):
        table.add_row(kind, *(cells[row] for cells in columns.values()))
    return table
