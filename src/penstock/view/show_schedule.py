"""Show a simulated schedule in the terminal, in an SVG file, and as plain values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.errors import ConfigError
from penstock.guarded_files import write_whole
from penstock.schedule.ir.absolute_actions import actions_of
from penstock.schedule.ir.schedule import format_action
from penstock.simulate.simulate import Simulation
from penstock.view.plurals import counted
from penstock.view.svg import timeline_svg
from penstock.view.text import draw_timeline

_LINES = 40  # of a drawing, if the terminal has fewer
_BESIDE = 8  # lines of the terminal that title, legend and prompt take


def print_drawing(console: Console, simulation: Simulation, batches: int, *, whole: bool) -> None:
    """Print the timeline of a span, with its title, a legend and the bubble.

    Args:
        console: to print to; the drawing is as wide, and unless `whole` about as high.
        simulation: of the span.
        batches: its length.
        whole: leave nothing out of the middle of a long drawing.
    """
    lines = None if whole else max(console.height - _BESIDE, _LINES)
    drawing = draw_timeline(simulation.timeline, console.width, lines, legend=True)
    shortened = "left out" in drawing.plain
    drawing.rstrip()
    console.print(_title(simulation, batches), style="bold", highlight=False, soft_wrap=True)
    console.print(drawing, soft_wrap=True)
    bubble = (
        f"bubble {simulation.bubble.bubble:.4f} = idle / total over {counted(batches, 'batch')}, drained at the end"
    )
    console.print(bubble, style="dim", highlight=False)
    if shortened:
        console.print("--whole draws what is left out", style="dim", highlight=False)


def write_svg(path: Path, simulation: Simulation, batches: int) -> None:
    """Write the timeline of a span to an SVG file.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        write_whole(path, timeline_svg(simulation.timeline, _title(simulation, batches)))
    except OSError as error:
        raise ConfigError(f"cannot write the drawing to {str(path)!r}: {error.strerror or error}") from None


def schedule_json(simulation: Simulation, batches: int) -> dict[str, Any]:
    """Return a schedule, the order of every rank, the timeline and the figures of a span as plain values."""
    schedule = simulation.lowered.schedule
    orders = [[format_action(a, stage=False) for a in actions_of(schedule, r, batches)] for r in range(schedule.ranks)]
    intervals = [i._asdict() | {"parts": [p._asdict() for p in i.parts]} for i in simulation.timeline.intervals]
    return {"schedule": str(schedule), "orders": orders, "timeline": intervals, **simulation.figures()}


def _title(simulation: Simulation, batches: int) -> str:
    schedule = simulation.lowered.schedule
    shape = (schedule.ranks, "stage"), (schedule.microbatches, "microbatch"), (batches, "batch")
    return f"{schedule.name}: {', '.join(counted(*size) for size in shape)}"
