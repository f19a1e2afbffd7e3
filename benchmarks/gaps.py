"""The gap to synchronous training against the number of updates: a table and a picture of runs that were made.

    python -m benchmarks.gaps                                  # text-clipped-5000, and docs/gaps.svg
    python -m benchmarks.gaps text-clipped-5000-muon --out -   # the table only

Runs are in the results.csv of a comparison with one rate for each method, copied to a folder of
`benchmarks/results/quality`, or in files that earlier comparisons left (`METHOD-seed-S-lr-L.json`). Each is
compared with the synchronous run of the same seed, at equal numbers of updates.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

from benchmarks.throughput import RESULTS
from penstock.view.comparison_page import RESULTS as ROWS
from penstock.view.line_plot import Curve, plot_svg

FOLDERS = RESULTS / "quality"
BASELINE = "1f1b"
AT = (500, 1000, 2000, 3000, 4000, 5000)
_FIRST = 300  # of the picture; before that all methods are about equal
_EVERY = 200

Losses = Mapping[tuple[str, int], Mapping[int, float]]
"""Of a method and a seed: held-out loss by updates."""


def losses_of(folder: Path) -> Losses:
    """Read the losses of all runs in a folder."""
    found: dict[tuple[str, int], dict[int, float]] = {}
    for row in csv.DictReader((folder / ROWS).open()) if (folder / ROWS).exists() else ():
        if row["validation_loss"]:
            found.setdefault((row["method"], int(row["seed"])), {})[int(row["updates"])] = float(row["validation_loss"])
    for file in sorted(folder.glob("*.json")):
        if named := re.fullmatch(r"(.+)-seed-(\d+)-lr-.+\.json", file.name):
            scores = json.loads(file.read_text())["scores"]
            key = named[1].replace("+", ":"), int(named[2])
            if key in found:
                raise SystemExit(
                    f"{folder} has {key[0]} with seed {key[1]} twice; keep the run with the rate that counts"
                )
            found[key] = {score["updates"]: score["loss"] for score in scores}
    return found


def gaps_of(losses: Losses) -> dict[str, dict[int, list[float]]]:
    """Return by how many percent methods lie above the baseline: by method and updates, a number for each seed."""
    found: dict[str, dict[int, list[float]]] = {}
    for (method, seed), own in losses.items():
        base = losses.get((BASELINE, seed), {})
        for updates in sorted(own.keys() & base.keys()) if method != BASELINE else ():
            found.setdefault(method, {}).setdefault(updates, []).append(100 * (own[updates] / base[updates] - 1))
    return dict(sorted(found.items(), key=lambda each: fmean(each[1][max(each[1])])))


def table(gaps: Mapping[str, Mapping[int, Sequence[float]]], at: Sequence[int] = AT) -> str:
    """Return gaps as Markdown: the mean over seeds, and their standard deviation at the end."""
    lines = ["| method | seeds | " + " | ".join(f"{updates:,}" for updates in at) + " |", "|---" * (2 + len(at)) + "|"]
    for method, found in gaps.items():
        if not (there := [updates for updates in at if updates in found]):
            raise SystemExit(f"{method} was not evaluated after any of {', '.join(map(str, at))} updates")
        last = there[-1]
        cells = [_said(found.get(updates), updates == last) for updates in at]
        lines.append(f"| `{method}` | {len(found[last])} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _said(values: Sequence[float] | None, spread: bool) -> str:
    if not values:
        return ""
    more = f" ± {stdev(values):.1f}" if spread and len(values) > 1 else ""
    return f"{fmean(values):+.1f}{more}"


def picture(gaps: Mapping[str, Mapping[int, Sequence[float]]]) -> str:
    """Return gaps as SVG: the mean over seeds, between the least and the most of them."""
    curves = []
    for style, (method, found) in enumerate(gaps.items()):
        points = [
            (float(updates), fmean(values), min(values), max(values))
            for updates, values in found.items()
            if (updates >= _FIRST and (updates - _FIRST) % _EVERY == 0) or updates == max(found)
        ]
        curves.append(Curve(f"{method} ({len(found[max(found)])})", points, style))
    drawn = plot_svg(curves, "Held-out loss above 1f1b's", "updates", "%", width=680, height=330)
    return drawn.replace("<svg ", "<svg xmlns='http://www.w3.org/2000/svg' style='background:#fff' ", 1) + "\n"


def main() -> None:
    """Print the table, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="text-clipped-5000", help="of benchmarks/results/quality")
    parser.add_argument("--out", default="docs/gaps.svg", help="file for the picture; - for none")
    arguments = parser.parse_args()
    gaps = gaps_of(losses_of(FOLDERS / arguments.folder))
    print(table(gaps))
    if arguments.out != "-":
        Path(arguments.out).write_text(picture(gaps))


if __name__ == "__main__":
    main()
