"""Write a comparison as one self-contained HTML page: tables, curves, delays, timelines."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from penstock.compare.contender_run import TrialResult
from penstock.compare.prepared_contender import PreparedContender
from penstock.compare.results import EvaluationRow, Findings, MethodSummary, as_csv
from penstock.errors import ConfigError
from penstock.guarded_files import write_whole
from penstock.view.comparison_progress import caption, delay_by_rank, plus_minus
from penstock.view.line_plot import Curve, plot_svg
from penstock.view.plurals import counted
from penstock.view.svg import escape, timeline_svg
from penstock.view.tables import DELAY, RANGES

_POINTS = 50  # of a curve of all batches, at most
_STYLE = """
:root { color-scheme: light }
body { font: 14px/1.5 ui-sans-serif, system-ui, sans-serif; color: #222; margin: 24px auto; max-width: 1180px;
  padding: 0 16px; background: #fff; overflow-wrap: anywhere }
h1 { font-size: 22px } h2 { font-size: 16px; margin-top: 28px }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap }
th { font-weight: 600; border-bottom: 1px solid #888 }
th, td { padding: 3px 12px; text-align: right } th:first-child, td:first-child, td.words { text-align: left }
tr:nth-child(even) td { background: #f6f6f6 } p.note, summary { color: #555; max-width: 90ch }
.scroll { overflow-x: auto } .plots { margin-top: 14px; display: flex; flex-wrap: wrap; gap: 16px 8px }
.plots svg { max-width: 100%; height: auto }
.worse, .diverged { color: #b3261e } .better { color: #146c2e }
"""
_DELAY = (
    "A stage computes a gradient with the weights that it reads. When the gradient is applied, newer weights may have "
    "been made: the delay is the number of updates in between. 0: as in training without a pipeline; 1: the gradient "
    "is that of the weights one update ago. These are means over the microbatches of a batch, so they may be "
    "fractions, and come from the proof of the schedule. Where forwards and backwards read different weights, each has "
    "a row."
)


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
    config, tokens = findings.config, findings.contenders[0].run.tokens_per_batch
    title = " / ".join(prepared.label for prepared in findings.contenders)
    optimizer = f"{config.optimizer.name}, rates {', '.join(f'{lr:g}' for lr in config.rates)}"
    setting = (
        f"{findings.title}. {counted(config.stages, 'stage')}, {counted(config.microbatches, 'microbatch')} of "
        f"{config.microbatch_size}, {counted(config.batches, 'batch')} of {tokens} tokens; "
        f"{counted(config.seeds, 'seed')}; {optimizer}, "
        f"{'no clipping' if config.max_grad_norm is None else f'clipped at {config.max_grad_norm:g}'}."
    )
    parts = [
        f"<h1>{escape(title)}</h1><p class='note'>{escape(setting)}</p>",
        _summary(findings),
        f"<p class='note'>{escape(caption(findings))} {DELAY} Per rank where the ranks differ; {RANGES}.</p>",
        "<h2>Curves</h2><p class='note'>At the best rate of each method: means over seeds, and bands from minimum to "
        f"maximum. Training loss and norm: {_group_in_words(config.batches)}. A cross marks the last value of a run "
        "that diverged.</p>",
        f"<div class='plots'>{''.join(_plots(findings))}</div>",
        _delays(findings.contenders),
        *_rates(findings),
        *_timelines(findings.contenders, min(config.batches, 3)),
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
    rate = "best rate" if len(findings.config.rates) > 1 else "rate"
    header = ["method", rate, "loss", "difference", "", "diverged", "time", "delay"]
    delays = {prepared.label: delay_by_rank(prepared) for prepared in findings.contenders}
    rows = []
    for s in summaries:
        rows.append(
            [
                s.method, f"{s.lr:g}", plus_minus(s.loss, s.spread, ".4f"),
                plus_minus(s.difference, s.difference_spread, "+.2f", " %"), _verdict(s), f"{s.diverged} of {s.runs}",
                f"{s.simulated_time:g}", delays[s.method],
            ]
        )  # fmt: skip
    return _table(header, rows)


def _verdict(summary: MethodSummary) -> str:
    return f"!{summary.verdict}"


def _plots(findings: Findings) -> Iterator[str]:
    for x_label, x in (
        ("updates", lambda row: float(row.updates)),
        ("tokens", lambda row: float(row.tokens)),
        ("simulated time", lambda row: row.simulated_time),
    ):
        curves = _curves(findings, _evaluated(findings, x, lambda row: row.validation_loss))
        yield plot_svg(curves, f"validation loss against {x_label}", x_label, "loss")
    curves = _curves(findings, lambda _, result: _grouped(result.losses, findings.config.batches))
    yield plot_svg(curves, "training loss against updates", "updates", "loss")
    curves = _curves(
        findings, lambda _, result: _grouped([n or math.nan for n in result.norms], findings.config.batches)
    )
    yield plot_svg(curves, "norm of the gradient against updates", "updates", "norm", log=True)
    delays = [
        Curve(e.label, [(float(index), d, d, d) for index, d in enumerate(e.delays_forward)], style)
        for style, e in enumerate(findings.contenders)
    ]
    yield plot_svg(delays, "delay of the forward on every stage", "stage", "updates")


_Points = list[tuple[float, float]]


def _evaluated(
    findings: Findings, x: Callable[[EvaluationRow], float], y: Callable[[EvaluationRow], float | None]
) -> Callable[[PreparedContender, TrialResult], _Points]:
    """Return a function that gives the points of a run, one for each evaluation."""

    def points(prepared: PreparedContender, result: TrialResult) -> _Points:
        return [(x(row), value) for row in findings.rows_of(prepared, result) if (value := y(row)) is not None]

    return points


def _grouped(values: Sequence[float], batches: int) -> _Points:
    """Return the means of groups of batches that follow each other, at the number of updates made by then."""
    size = _group(batches)
    found = []
    for start in range(0, len(values), size):
        finite = [value for value in values[start : start + size] if math.isfinite(value)]
        if finite:
            found.append((float(min(start + size, len(values))), statistics.fmean(finite)))
    return found


def _group(batches: int) -> int:
    return -(-batches // _POINTS)


def _group_in_words(batches: int) -> str:
    return "of every batch" if _group(batches) == 1 else f"means over {_group(batches)} batches"


def _curves(findings: Findings, points: Callable[[PreparedContender, TrialResult], _Points]) -> list[Curve]:
    """Return per method the mean curve of the runs that end well, and each diverged run separately."""
    curves = []
    for style, prepared in enumerate(findings.contenders):
        well: dict[float, list[float]] = {}
        lost = []
        for result in findings.at_best_rate(prepared):
            if result.diverged is not None:
                lost.append(points(prepared, result))
                continue
            for where, value in points(prepared, result):
                well.setdefault(where, []).append(value)
        mean = [(where, statistics.fmean(found), min(found), max(found)) for where, found in sorted(well.items())]
        if mean:
            curves.append(Curve(prepared.label, mean, style))
        for number, run in enumerate(lost):
            label = "" if mean or number else f"{prepared.label} (diverged)"
            curves.append(Curve(label, [(where, v, v, v) for where, v in run], style, ends=True))
    return curves


def _delays(contenders: Sequence[PreparedContender]) -> str:
    """List the delays as numbers; a method with several stages per rank has more of them."""
    num_stages = max(len(prepared.delays_forward) for prepared in contenders)
    rows = []
    for prepared in contenders:
        kinds = [("", prepared.delays_forward)]
        if prepared.delays_backward != prepared.delays_forward:
            kinds = [(", forward", prepared.delays_forward), (", backward", prepared.delays_backward)]
        for kind, delays in kinds:
            cells = [f"{delay:.3g}" for delay in delays]
            rows.append([prepared.label + kind, *cells, *[""] * (num_stages - len(cells))])
    header = ["stage", *map(str, range(num_stages))]
    return f"<h2>Delays</h2><p class='note'>{_DELAY}</p>" + _table(header, rows)


def _rates(findings: Findings) -> Iterator[str]:
    """Yield a table and a plot over all learning rates, if there are several."""
    if len(findings.config.rates) < 2:
        return
    rows, curves = [], []
    for style, prepared in enumerate(findings.contenders):
        points = []
        for lr, results in sorted(findings.by_rate(prepared).items()):
            ends = [result.scores[-1].loss for result in results if result.diverged is None]
            mean = statistics.fmean(ends) if ends else None
            spread = statistics.stdev(ends) if len(ends) > 1 else None
            lost = f"{len(results) - len(ends)} of {len(results)}"
            rows.append([prepared.label, f"{lr:g}", plus_minus(mean, spread, ".4f"), lost])
            if mean is not None:
                points.append((lr, mean, min(ends), max(ends)))
        curves.append(Curve(prepared.label, points, style))
    yield "<h2>Learning rates</h2>" + _table(["method", "rate", "loss", "diverged"], rows)
    plot = plot_svg(curves, "validation loss at the end by learning rate", "rate", "loss", log_x=True)
    yield f"<div class='plots'>{plot}</div>"


def _timelines(contenders: Sequence[PreparedContender], batches: int) -> Iterator[str]:
    yield "<h2>What runs when</h2>"
    for prepared in contenders:
        title = f"{prepared.label}: {counted(batches, 'batch')}, simulated"
        drawing = _inside(timeline_svg(prepared.begin, title, width=1140))
        yield f"<details><summary>{escape(prepared.label)}</summary><div class='scroll'>{drawing}</div></details>"


def _inside(svg: str) -> str:
    """Remove the XML namespace of a drawing, which inline SVG does not need."""
    return svg.replace(" xmlns='http://www.w3.org/2000/svg'", "", 1)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in a box that scrolls.

    Cells that begin with an exclamation mark are words, with their text as CSS class.
    """
    lines = ["<div class='scroll'><table><tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in header) + "</tr>"]
    for row in rows:
        cells = [
            f"<td class='words {escape(cell[1:].replace(' ', '-'))}'>{escape(cell[1:])}</td>"
            if cell.startswith("!")
            else f"<td>{escape(cell)}</td>"
            for cell in row
        ]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return "\n".join([*lines, "</table></div>"])
