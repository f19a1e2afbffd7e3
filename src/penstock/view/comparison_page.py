"""Write a comparison as one self-contained HTML page: tables, curves, delays, timelines."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path

from penstock.compare.contenders import Entrant
from penstock.compare.result_files import write_whole
from penstock.compare.results import EvaluationRow, Findings, MethodSummary, as_csv
from penstock.errors import ConfigError
from penstock.view.comparing import caption, plus_minus
from penstock.view.plot import Curve, plot_svg
from penstock.view.svg import timeline_svg
from penstock.view.words import counted

_DRAWN = 2000  # most actions of a drawn timeline; a larger one is unreadable
_STYLE = """
body { font: 14px/1.5 ui-sans-serif, system-ui, sans-serif; color: #222; margin: 24px auto; max-width: 1180px;
  padding: 0 16px; background: #fff }
h1 { font-size: 22px } h2 { font-size: 16px; margin-top: 28px }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th { font-weight: 600; border-bottom: 1px solid #888 }
th, td { padding: 3px 12px; text-align: right } th:first-child, td:first-child, td.words { text-align: left }
tr:nth-child(even) td { background: #f6f6f6 } p.note, summary { color: #555; max-width: 90ch }
.plots { display: flex; flex-wrap: wrap; gap: 8px } svg { max-width: 100%; height: auto }
.worse, .diverged { color: #b3261e } .better { color: #146c2e }
"""


PAGE, RESULTS, SUMMARY = "comparison.html", "results.csv", "summary.csv"


def write_findings(findings: Findings, folder: Path) -> None:
    """Write the page and both tables.

    Raises:
        ConfigError: they cannot be written.
    """
    texts = {
        RESULTS: as_csv(findings.rows(), EvaluationRow),
        SUMMARY: as_csv(findings.summaries(), MethodSummary),
        PAGE: comparison_page(findings),
    }
    try:
        for name, text in texts.items():
            write_whole(folder / name, text)
    except OSError as error:
        raise ConfigError(f"cannot write to {str(folder)!r}: {error.strerror or error}") from None


def comparison_page(findings: Findings) -> str:
    """Return the whole page as HTML."""
    config, task = findings.config, findings.task
    title = f"{' / '.join(entrant.label for entrant in findings.entrants)} on {config.task}"
    batch = config.microbatches * config.microbatch_size * task.units
    optimizer = f"{config.optimizer.name}, rates {', '.join(f'{lr:g}' for lr in config.rates)}"
    setting = (
        f"{task.title}. {counted(config.stages, 'stage')}, {counted(config.microbatches, 'microbatch')} of "
        f"{config.microbatch_size}, {counted(config.batches, 'batch')} of {batch} {task.unit}; "
        f"{counted(config.seeds, 'seed')}; {optimizer}, "
        f"{'no clipping' if config.max_grad_norm is None else f'clipped at {config.max_grad_norm:g}'}."
    )
    parts = [
        f"<h1>{escape(title)}</h1><p class='note'>{escape(setting)}</p>",
        _summary(findings),
        f"<p class='note'>{escape(caption(findings))}</p>",
        "<h2>Curves</h2><p class='note'>At the best rate of each method: means over seeds, and bands from minimum to "
        "maximum. A cross marks the last value of a run that diverged.</p>",
        f"<div class='plots'>{''.join(_plots(findings))}</div>",
        _delays(findings.entrants),
        *_rates(findings),
        *_timelines(findings.entrants),
    ]
    return (
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _summary(findings: Findings) -> str:
    summaries = findings.summaries()
    scored = any(summary.accuracy is not None for summary in summaries)
    rate = "best rate" if len(findings.config.rates) > 1 else "rate"
    header = ["method", rate, "loss", *(["accuracy"] if scored else []), "difference", "", "diverged", "time"]
    rows = []
    for s in summaries:
        accuracy = ["-" if s.accuracy is None else f"{s.accuracy:.1%}"] if scored else []
        rows.append(
            [
                s.method, f"{s.lr:g}", plus_minus(s.loss, s.spread, ".4f"), *accuracy,
                plus_minus(s.difference, s.difference_spread, "+.2f", " %"), _verdict(s), f"{s.diverged} of {s.runs}",
                f"{s.simulated_time:g}",
            ]
        )  # fmt: skip
    return _table(header, rows)


def _verdict(summary: MethodSummary) -> str:
    return f"!{summary.verdict}"


def _plots(findings: Findings) -> Iterator[str]:
    unit = findings.task.unit
    for x_label, x in (
        ("updates", lambda row: float(row.updates)),
        (unit, lambda row: float(row.tokens if row.tokens is not None else row.samples)),
        ("simulated time", lambda row: row.simulated_time),
    ):
        curves = _curves(findings, x, lambda row: row.validation_loss)
        yield plot_svg(curves, f"validation loss against {x_label}", x_label, "loss")
    curves = _curves(findings, lambda row: row.updates, lambda row: row.training_loss)
    yield plot_svg(curves, "training loss against updates", "updates", "loss")
    if any(summary.accuracy is not None for summary in findings.summaries()):
        curves = _curves(findings, lambda row: row.updates, lambda row: row.accuracy)
        yield plot_svg(curves, "validation accuracy against updates", "updates", "accuracy")
    curves = _curves(findings, lambda row: row.updates, lambda row: row.gradient_norm or None)
    yield plot_svg(curves, "norm of the gradient against updates", "updates", "norm", log=True)
    delays = [
        Curve(e.label, [(float(index), d, d, d) for index, d in enumerate(e.delays_forward)], style)
        for style, e in enumerate(findings.entrants)
    ]
    yield plot_svg(delays, "delay of the forward on every stage", "stage", "updates")


def _curves(
    findings: Findings, x: Callable[[EvaluationRow], float], y: Callable[[EvaluationRow], float | None]
) -> list[Curve]:
    """Return per method the mean curve of the runs that end well, and each diverged run separately."""
    curves = []
    for style, entrant in enumerate(findings.entrants):
        well: dict[float, list[float]] = {}
        lost = []
        results = findings.at_best_rate(entrant)
        for result in results:
            points = [(x(row), value) for row in findings.rows_of(entrant, result) if (value := y(row)) is not None]
            if result.diverged is not None:
                lost.append(points)
                continue
            for where, value in points:
                well.setdefault(where, []).append(value)
        mean = [(where, statistics.fmean(found), min(found), max(found)) for where, found in sorted(well.items())]
        if mean:
            curves.append(Curve(entrant.label, mean, style))
        for number, points in enumerate(lost):
            label = "" if mean or number else f"{entrant.label} (diverged)"
            curves.append(Curve(label, [(where, v, v, v) for where, v in points], style, ends=True))
    return curves


def _delays(entrants: Sequence[Entrant]) -> str:
    """List the delays as numbers; a method with several stages per rank has more of them."""
    num_stages = max(len(entrant.delays_forward) for entrant in entrants)
    rows = []
    for entrant in entrants:
        kinds = [("", entrant.delays_forward)]
        if entrant.delays_backward != entrant.delays_forward:
            kinds = [(", forward", entrant.delays_forward), (", backward", entrant.delays_backward)]
        rows += [[entrant.label + kind, *(f"{delay:.3g}" for delay in delays)] for kind, delays in kinds]
    header = ["stage", *map(str, range(num_stages))]
    note = (
        "Updates between the weights that a stage reads and those that it updates, mean over a batch, from the proof."
    )
    return f"<h2>Delays</h2><p class='note'>{note}</p>" + _table(header, rows)


def _rates(findings: Findings) -> Iterator[str]:
    """Yield a table and a plot over all learning rates, if there are several."""
    if len(findings.config.rates) < 2:
        return
    rows, curves = [], []
    for style, entrant in enumerate(findings.entrants):
        points = []
        for lr, results in sorted(findings.by_rate(entrant).items()):
            ends = [result.scores[-1].loss for result in results if result.diverged is None]
            mean = statistics.fmean(ends) if ends else None
            spread = statistics.stdev(ends) if len(ends) > 1 else None
            lost = f"{len(results) - len(ends)} of {len(results)}"
            rows.append([entrant.label, f"{lr:g}", plus_minus(mean, spread, ".4f"), lost])
            if mean is not None:
                points.append((lr, mean, min(ends), max(ends)))
        curves.append(Curve(entrant.label, points, style))
    yield "<h2>Learning rates</h2>" + _table(["method", "rate", "loss", "diverged"], rows)
    yield plot_svg(curves, "validation loss at the end against the learning rate", "rate", "loss", log_x=True)


def _timelines(entrants: Sequence[Entrant]) -> Iterator[str]:
    yield "<h2>What runs when</h2>"
    for entrant in entrants:
        if len(entrant.begin.intervals) <= _DRAWN:
            drawing = timeline_svg(entrant.begin, f"{entrant.label}, simulated", width=1140)
            yield f"<details><summary>{escape(entrant.label)}</summary>{_inside(drawing)}</details>"


def _inside(svg: str) -> str:
    """Remove the XML namespace of a drawing, which inline SVG does not need."""
    return svg.replace(" xmlns='http://www.w3.org/2000/svg'", "", 1)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; cells that begin with an exclamation mark are words, with their text as CSS class."""
    lines = ["<table><tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in header) + "</tr>"]
    for row in rows:
        cells = [
            f"<td class='words {escape(cell[1:].replace(' ', '-'))}'>{escape(cell[1:])}</td>"
            if cell.startswith("!")
            else f"<td>{escape(cell)}</td>"
            for cell in row
        ]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return "\n".join([*lines, "</table>"])
