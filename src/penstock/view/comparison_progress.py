"""Show the progress and the results of a comparison in the terminal."""

from __future__ import annotations

import math

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from penstock.compare.contender_run import Key, TrialResult
from penstock.compare.prepared_contender import PreparedContender
from penstock.compare.results import Findings, MethodSummary
from penstock.view.plurals import counted
from penstock.view.tables import DELAY, RANGES, briefly


class TerminalComparison:
    """Two progress bars, for all runs and for the current one; without a terminal, a line per run."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
        )  # fmt: skip
        self._bars = Progress(*columns, console=self.console)
        self._all = self._bars.add_task("runs", note="", start=False, total=None)
        self._run = self._bars.add_task("", note="", visible=False)
        self._here = 0  # runs of this command, from whose time that of the others is estimated
        if self.console.is_terminal:
            self._bars.start()

    def preparing(self, label: str) -> None:
        """Show what is being prepared."""
        self._bars.update(self._all, note=f"preparing {label}")

    def started(self, title: str, total: int, there: int) -> None:
        """Print what will be trained."""
        self.console.print(title, markup=False, highlight=False, soft_wrap=not self.console.is_terminal)
        if there:
            self.console.print(f"{there} of {total} runs had finished before", highlight=False)
        self._bars.update(self._all, total=total - there, note="")
        self._bars.start_task(self._all)

    def began(self, key: Key, batches: int) -> None:
        """Show a bar for the run."""
        self._bars.reset(self._run, description=str(key), total=batches, visible=True, note="")

    def progress(self, batches: int, loss: float) -> None:
        """Advance the bar of the run."""
        self._bars.update(self._run, completed=batches, note=f"loss {loss:.4f}")

    def finished(self, result: TrialResult) -> None:
        """Print the result of a run in a permanent line."""
        found = (
            f"validation loss {result.scores[-1].loss:.4f}"
            if result.diverged is None
            else f"[red]diverged[/red] after {result.diverged} batches"
        )
        self.console.print(f"{result.key}: {found}  [dim]{result.seconds:.1f} s[/dim]", highlight=False)
        self._bars.advance(self._all)
        self._bars.update(self._run, visible=False)

    def close(self) -> None:
        """End the live display."""
        self._bars.update(self._all, visible=False)
        self._bars.update(self._run, visible=False)
        if self.console.is_terminal:
            self._bars.stop()


def summary_table(findings: Findings) -> Table:
    """Return a table with a row per method, at its best rate."""
    config, summaries = findings.config, findings.summaries()
    title = (
        f"{counted(config.stages, 'stage')}, {counted(config.microbatches, 'microbatch')}, "
        f"{counted(config.batches, 'batch')} of {findings.contenders[0].run.tokens_per_batch} tokens"
    )
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("method", no_wrap=True, style="bold")
    several = len(config.rates) > 1
    for column in ["best rate" if several else "rate", "loss", "difference", "", "time", "delay"]:
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    delays = {prepared.label: delay_by_rank(prepared) for prepared in findings.contenders}
    for summary in summaries:
        cells = [f"{summary.lr:g}", _loss(summary), _difference(summary), _verdict(summary)]
        table.add_row(summary.method, *cells, f"{summary.simulated_time:g}", delays[summary.method])
    table.caption = f"{caption(findings)} {DELAY} Per rank where the ranks differ; {RANGES}."
    table.caption_justify = "left"
    return table


def delay_by_rank(prepared: PreparedContender) -> str:
    """Format the delay of the forwards of every rank, mean over its stages."""
    schedule = prepared.run.plan.schedule
    held = [[prepared.delays_forward[s.index] for s in schedule.on_rank(rank)] for rank in range(schedule.ranks)]
    return briefly([sum(delays) / len(delays) for delays in held])


def caption(findings: Findings) -> str:
    """Explain the columns of the summary."""
    base = findings.baseline
    to = (
        "There is no method without delay to compare with."
        if base is None
        else f"Difference: of the loss to that of {base.label}, mean and spread over the same seeds; not resolved "
        "where the spread is not smaller."
    )
    return (
        "Loss: on held-out data after the last update, mean and spread (standard deviation) over "
        f"{findings.config.seeds} seed{'s' * (findings.config.seeds > 1)}. {to} Time: of all updates, simulated, in "
        "forwards of a rank's share; a backward takes 2, messages and updates nothing."
        + "".join(f" {said}." for said in findings.other_settings())
    )


def _loss(summary: MethodSummary) -> str:
    return plus_minus(summary.loss, summary.spread, ".4f")


def _difference(summary: MethodSummary) -> str:
    return plus_minus(summary.difference, summary.difference_spread, "+.2f", " %")


def _verdict(summary: MethodSummary) -> str:
    colour = {"worse": "red", "better": "green", "diverged": "red"}.get(summary.verdict, "dim")
    some = f", {summary.diverged} of {summary.runs} diverged" if 0 < summary.diverged < summary.runs else ""
    return f"[{colour}]{summary.verdict}[/{colour}]{some}"


def plus_minus(value: float | None, spread: float | None, form: str, unit: str = "") -> str:
    """Format a value and its spread, as in `3.4703 ± 0.0102`; a dash for None."""
    if value is None or not math.isfinite(value):
        return "-"
    around = "" if spread is None else f" ± {spread:{form.lstrip('+')}}"
    return f"{value:{form}}{around}{unit}"
