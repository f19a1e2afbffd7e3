"""Predicted beside measured step times: the distribution of errors, the control's noise, and the planner's regret."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median, quantiles
from typing import Any

from benchmarks.predicted.configurations import of_row

Row = Mapping[str, Any]


def steps_of(rows: Sequence[Row], of: Mapping[str, Any], copy: int = 0) -> list[float]:
    """Return the seconds of a batch of a configuration (or of its replica), in every round.

    The slowest rank counts.
    """
    return [max(rank["step"] for rank in row["ranks"]) for row in rows if _is(row, of, copy)]


def paced_steps(rows: Sequence[Row], of: Mapping[str, Any], copy: int = 0) -> list[float]:
    """Return the same, as if the machine had been as fast as when the profile was measured."""
    profiled = next((row["pace"] for row in rows if "paces" in row), 0.0)
    paces = [[rank.get("pace", 0.0) for rank in row["ranks"][:2]] for row in rows if _is(row, of, copy)]
    steps = steps_of(rows, of, copy)
    if not profiled or not all(map(all, paces)):
        return steps
    return [step * profiled * len(p) / sum(p) for step, p in zip(steps, paces, strict=True)]


def _is(row: Row, of: Mapping[str, Any], copy: int) -> bool:
    return bool(row.get("configuration") == of and row.get("copy") == copy)


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the value that so many percent of some values do not exceed, interpolated."""
    return values[0] if len(values) == 1 else quantiles(values, n=100, method="inclusive")[percent - 1]


def noise_of(rows: Sequence[Row], steps: Callable[..., list[float]]) -> list[float]:
    """Return by which part the medians of each replicated configuration and its replica differ.

    Args:
        rows: of the raw file.
        steps: `steps_of` or `paced_steps`.
    """
    twice = [row["of"] for row in rows if row.get("replicated")]
    pairs = [[median(steps(rows, of, copy)) for copy in (0, 1)] for of in twice]
    return [abs(b / a - 1) for a, b in pairs]


def print_errors(rows: Sequence[Row]) -> None:
    """Print measured over predicted for every configuration, and their distribution, as Markdown."""
    forecasts = [row for row in rows if row.get("part") == "times"]
    if not forecasts:
        return
    print(
        "\n| configuration | predicted, ms | measured, ms | measured / predicted | rounds | at the profile's pace |\n"
        "|---|---|---|---|---|---|"
    )
    errors, paced = list[float](), list[float]()
    for row in forecasts:
        seconds, found = row["predicted"], steps_of(rows, row["of"])
        ratio, same = median(found) / seconds, median(paced_steps(rows, row["of"])) / seconds
        errors.append(abs(1 / ratio - 1))
        paced.append(abs(1 / same - 1))
        cells = f"{1e3 * seconds:.1f} | {1e3 * median(found):.1f} | {ratio:.3f}"
        print(
            f"| {of_row(row['of'])} | {cells} | {min(found) / seconds:.3f} .. {max(found) / seconds:.3f} | {same:.3f} |"
        )
    print(f"\n{len(errors)} configurations, aims 3 % and 8 % (or twice the control's noise):")
    print(f"- errors: {_distribution(errors)}")
    if all("uncalibrated" in row for row in forecasts):
        alone = [abs(row["uncalibrated"] / median(steps_of(rows, row["of"])) - 1) for row in forecasts]
        print(f"- errors of the profile without its calibration: {_distribution(alone)}")
    print(f"- errors at the profile's pace: {_distribution(paced)}")
    for what, steps in (("", steps_of), (", at the profile's pace", paced_steps)):
        noise = noise_of(rows, steps)
        print(f"- control, {len(noise)} configurations run twice{what}: {_distribution(noise)}")


def _distribution(errors: Sequence[float]) -> str:
    return f"median {median(errors):.1%}, 90th percentile {percentile(errors, 90):.1%}, largest {max(errors):.1%}"


def print_regret(rows: Sequence[Row], processes: int) -> None:
    """Print the grid of so many processes, the fastest first, and what the planner's choice reaches, as Markdown."""
    of_grid = [row for row in rows if row.get("part") == f"grid {processes}"]
    if not of_grid:
        return
    steps = {str(of_row(row["of"])): median(steps_of(rows, row["of"])) for row in of_grid}
    chosen = str(of_row(min(of_grid, key=lambda row: row["predicted"])["of"]))
    paced = {str(of_row(row["of"])): median(paced_steps(rows, row["of"])) for row in of_grid}
    best = min(steps.values())
    print("\n| configuration | stages | predicted, ms | measured, ms | best / measured |\n|---|---|---|---|---|")
    for row in sorted(of_grid, key=lambda row: steps[str(of_row(row["of"]))]):
        of = of_row(row["of"])
        seconds, name = steps[str(of)], f"**{of}**" if str(of) == chosen else str(of)
        stages = " ".join(map(str, of.stages))
        print(f"| {name} | {stages} | {1e3 * row['predicted']:.1f} | {1e3 * seconds:.1f} | {best / seconds:.3f} |")
    print(
        f"\n{processes} processes, {len(of_grid)} configurations: the planner chooses {chosen}, which reaches "
        f"{best / steps[chosen]:.3f} of the best measured throughput (aim 0.97); at an equal pace of the machine "
        f"{min(paced.values()) / paced[chosen]:.3f}"
    )
