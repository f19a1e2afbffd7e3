"""The live display of a training run, and its plain form without a terminal."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleRenderable, Group
from rich.control import Control
from rich.live import Live
from rich.progress import BarColumn, Progress as Bar, TextColumn
from rich.segment import ControlType, Segment
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from penstock.byte_sizes import human_bytes
from penstock.comm.collective.control_plane import gather_json
from penstock.idle_time import split_time
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.pipeline_stats import TOTAL_ON_DEVICE
from penstock.runtime.plan.adapted_in_flight import AdaptedInFlight
from penstock.runtime.update.run_events import Evaluated
from penstock.schedule.ir.sharding import Level
from penstock.timeline import Timeline
from penstock.train.observer import Observer, Progress, RunSummary, Switched
from penstock.train.prepare.prepare_run import Prepared
from penstock.view.perfetto import write_trace
from penstock.view.plurals import counted
from penstock.view.tables import bytes_table, time_table, width_to_fit

TRACE = "trace.json"
_BAR = 30  # columns; a bar as wide as the terminal would be wrapped as soon as that becomes narrower
_PLAIN_EVERY = 5.0  # seconds between two lines without a terminal
_PEAKS = (
    "Each purpose at its own most, which others may have had at another time; total: the most of all together at one "
    "time, so it may be less than the sum of its column."
)
_IDLE = " Idle buffers: kept for the weights and gradients of later batches, and not in use at that time."
_ON_DEVICE = " Total on the device: the same without what is in the memory of the host."


class TerminalObserver(Observer):
    """Shows the progress and the summary of a run, and writes its trace."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self._live: ResizableLive | None = None
        self._bar: Bar | None = None
        self._printed = -_PLAIN_EVERY
        self._evaluation = ""
        self._latest: Progress | None = None

    def started(self, prepared: Prepared, parts: list[list[str]], batch: int) -> None:
        """Print what will run, and start the live display."""
        config, model = prepared.config, prepared.model.shape
        windows, level = prepared.windows, prepared.plan.schedule.sharding.level
        pipelines = f" in each of {config.width} parallel pipelines" if config.width > 1 else ""
        sharded = f", sharding {level}" if level is not Level.NONE else ""
        self.console.print(
            f"[bold]{prepared.plan.schedule.name}[/bold] on {counted(config.stages, 'stage')}{pipelines}{sharded}, "
            f"{counted(config.batches, 'batch')} of {counted(config.microbatches, 'microbatch')} of "
            f"{config.microbatch_size} x {model.context} tokens"
        )
        self.console.print(
            f"{model.described}; {windows.corpus.described}",
            markup=False,
        )
        for stage, names in enumerate(parts):
            label = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
            self.console.print(f"  stage {stage}: {label} ({counted(len(names), 'block')})")
        if prepared.recompute or not isinstance(config.recompute, str):
            self.console.print(f"recompute: {prepared.recompute or ', '.join(config.recompute)}", markup=False)
        if config.delayed:
            late = "" if config.backward_delays is None else f", backward_delays {config.backward_delays}"
            self.console.print(f"weights are read with chosen delays: delays {config.delays}{late}", markup=False)
        if said := prepared.about_in_flight():
            self.console.print(f"in flight: {said}", markup=False)
        if batch:
            self.console.print(f"resuming from the checkpoint after {batch} batches")
        if self.console.is_terminal:
            columns = (
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=_BAR),
                TextColumn("{task.fields[eta]}"),
            )
            self._bar = Bar(*columns)
            self._bar.add_task("batch 0", total=config.batches, eta="")
            self._live = ResizableLive(self._bar, console=self.console, refresh_per_second=4)
            self._live.start()

    def progress(self, progress: Progress) -> None:
        """Show one more batch."""
        if self._live is not None and self._bar is not None:
            self._bar.update(
                self._bar.task_ids[0],
                completed=progress.batch,
                description=f"batch {progress.batch} of {progress.batches}",
                eta=f"ETA {_duration(_remaining(progress))}",
            )
            self._latest = progress
            self._draw()
        elif time.monotonic() - self._printed >= _PLAIN_EVERY or progress.batch == progress.batches:
            self._printed = time.monotonic()
            self.console.print(
                f"batch {progress.batch} of {progress.batches}  {_line(progress)}",
                highlight=False,
                soft_wrap=width_to_fit(self.console) is None,
            )

    def _draw(self, *more: Spinner) -> None:
        """Refresh the live display, with something more at its end."""
        if self._live is not None and self._bar is not None and self._latest is not None:
            said = [self._evaluation] if self._evaluation else []
            figures, held = _figures(self._latest), bytes_table(self._latest.live_bytes, width=self.console.width)
            self._live.update(Group(self._bar, figures, *said, held, *more))

    def evaluated(self, found: Evaluated) -> None:
        """Show the result of an evaluation during training."""
        loss = "-" if found.loss is None else f"{found.loss:.4f}"
        self._evaluation = f"held-out loss {loss} after {found.version} batches"
        if self._live is None:
            self.console.print(self._evaluation, highlight=False)

    def switched(self, switched: Switched) -> None:
        """Print which method takes over, and why, in a permanent line."""
        back = "" if switched.came is None else f"back from {switched.came} batches to {switched.batch}; "
        self.console.print(
            f"{back}{switched.method} from batch {switched.batch} on ({switched.why})",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )

    def adapted(self, found: AdaptedInFlight) -> None:
        """Print how many microbatches are in flight from here on, and why, in a permanent line."""
        self.console.print(f"in flight: {found}", highlight=False, markup=False, soft_wrap=True)

    def warned(self, trouble: str) -> None:
        """Print what has gone wrong, in a permanent line."""
        self.console.print(Text.assemble(("warning: ", "yellow"), trouble), soft_wrap=True)

    def ending(self) -> None:
        """Print that a stop was requested, in a permanent line."""
        said = "stopping after the batches in flight, with a checkpoint; repeat to stop at once"
        self.console.print(said, highlight=False)

    def interrupted(self, folder: Path, batches: int, timeline: Timeline, troubles: Sequence[str]) -> None:
        """Print where the time went, what went wrong, and how to resume the run."""
        if self._live is not None and self._bar is not None and self._latest is not None:
            self._live.update(Group(self._bar, _figures(self._latest)))  # nothing is held any more
        self.close()
        print_ = partial(self.console.print, soft_wrap=True, highlight=False, markup=False)
        if timeline.makespan:
            self._trace(timeline, folder)
            self.console.print(time_table(split_time(timeline)))
        for trouble in troubles:
            self.warned(trouble)
        print_(f"\nstopped early; a checkpoint holds all {batches} batches done. To resume:")
        print_(f"  penstock train --resume {folder}")

    def sampling(self) -> None:
        """Show that a text is being sampled."""
        self._draw(Spinner("dots", "sampling a text from the trained model"))

    def finished(self, summary: RunSummary, timeline: Timeline, sample: str | None) -> None:
        """Print what was sampled, where the time and the memory went, and last the loss and where the results are."""
        self._draw()
        self.close()
        self._trace(timeline, summary.folder)
        print_ = partial(self.console.print, soft_wrap=True, highlight=False)
        if sample is not None:
            print_("\n[bold]sample[/bold]")
            print_(sample, markup=False)
        if summary.time.makespan:
            self.console.print()
            self.console.print(time_table(summary.time))
        self.console.print(peak_bytes_table(summary.peak_bytes, self.console.width))
        now = "" if summary.tokens_now == summary.tokens else f"; {summary.tokens_now:,} of them now,"
        if summary.again is not None:
            print_(f"{summary.again} updates were undone and repeated")
        print_(
            f"\n{summary.batches} batches, {summary.tokens:,} tokens{now} in {_duration(summary.seconds)} "
            f"({summary.tokens_now / summary.seconds:,.0f} tokens/s), bubble {summary.bubble:.1%}"
        )
        if sample is not None:
            print_(f"more text: penstock sample {summary.folder}", markup=False)
        print_(f"timeline (ui.perfetto.dev): {summary.folder / TRACE}", markup=False)
        if summary.averaged_loss is not None:
            print_(f"validation loss with averaged weights {summary.averaged_loss:.4f}")
        if summary.validation_loss is not None:
            print_(
                f"[bold]validation loss {summary.validation_loss:.4f}[/bold] nats per token on held-out text; "
                f"unigram entropy {summary.entropy:.4f}"
            )
        for trouble in summary.troubles:
            self.warned(trouble)
        print_(f"run folder: {summary.folder}", markup=False)

    def _trace(self, timeline: Timeline, folder: Path) -> None:
        """Write the trace; a failure to write does not fail the run."""
        try:
            write_trace(timeline, folder / TRACE)
        except OSError as error:
            self.console.print(f"no {TRACE}: {error.strerror or error}", markup=False, highlight=False)

    def close(self) -> None:
        """End the live display."""
        if self._live is not None:
            self._live.stop()


def _remaining(progress: Progress) -> float:
    return progress.seconds / progress.trained * (progress.batches - progress.batch)


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _line(progress: Progress) -> str:
    loss = "-" if progress.loss is None else f"{progress.loss:.4f}"
    bubble = "-" if progress.bubble is None else f"{progress.bubble:.1%}"
    return (
        f"loss {loss}  {progress.tokens_per_second:,.0f} tokens/s  bubble {bubble}  lr {progress.rate:.2e}  "
        f"ETA {_duration(_remaining(progress))}  live bytes by rank {_totals(progress.live_bytes)}"
    )


def _totals(by_rank: dict[int, dict[str, int]]) -> str:
    return " + ".join(human_bytes(sum(by_rank[rank].values())) for rank in sorted(by_rank)) or "-"


def _figures(progress: Progress) -> Table:
    table = Table.grid(padding=(0, 3))
    loss = "-" if progress.loss is None else f"{progress.loss:.4f}"
    bubble = "-" if progress.bubble is None else f"{progress.bubble:.1%}"
    table.add_row(
        f"loss [bold]{loss}[/bold]",
        f"{progress.tokens_per_second:,.0f} tokens/s",
        f"bubble {bubble}",
        f"lr {progress.rate:.2e}",
    )
    return table


class ResizableLive(Live):
    """A live display that knows how many rows a terminal which has become narrower wraps it to.

    `rich.live.Live` goes back as many rows as it has written lines. Where lines have been wrapped since, that is too
    few, and the first of them would stay on the screen with every change of the width.
    """

    def __init__(self, *places: Any, **options: Any) -> None:
        self._widths: list[int] = []  # of the lines that it has written last
        super().__init__(*places, **options)

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Clear the rows that wrapped lines take besides, before `Live` clears one row per line and draws again."""
        drawn = super().process_renderables(renderables)
        if not self.console.is_interactive:
            return drawn
        width, height = self.console.size
        more = sum(ceil(line / width) - 1 for line in self._widths if line)
        lines = self.console.render_lines(self.get_renderable(), pad=False)
        self._widths = [Segment.get_line_length(line) for line in lines[:height]]
        up = (ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)
        return [Control(ControlType.CARRIAGE_RETURN, *up * more), *drawn] if more else drawn


def peak_bytes_table(by_rank: dict[int, dict[str, int]], width: int) -> Group:
    """Return a table of the most bytes of each purpose, and below it what its figures are.

    Args:
        by_rank: rank -> purpose -> bytes.
        width: of the terminal in characters.
    """
    said = _PEAKS + _IDLE * any(held.get("idle buffers") for held in by_rank.values())
    if any(TOTAL_ON_DEVICE in held for held in by_rank.values()):
        said += _ON_DEVICE
        by_rank = {r: {TOTAL_ON_DEVICE: held.get("total", 0), **held} for r, held in by_rank.items()}
    note = Text(said, style="dim italic")  # as the captions of tables are
    return Group(bytes_table(by_rank, "peak bytes", width), note)


def summary(pipeline: Pipeline, width: int = 120) -> str:
    """Return two tables as text: where the time of a pipeline went, and the peak bytes of every rank by purpose.

    Call it between two runs; between processes all ranks call it together, and all get the tables.

    Args:
        pipeline: that has run.
        width: characters of a line.

    Raises:
        TransportError: a peer is dead, or did not call this in time.
    """
    split, peaks = split_time(pipeline.timeline()), list(pipeline.peak_bytes().items())
    if pipeline.grid.group is not None:
        gathered = gather_json(peaks, "gathering the peak bytes", pipeline.grid.control)
        peaks = [(rank, held) for part in gathered for rank, held in part]
    console = Console(file=io.StringIO(), width=width)
    console.print(time_table(split), peak_bytes_table(dict(peaks), console.width))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())
