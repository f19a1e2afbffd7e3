"""Planners on published profiles against what the published programs answer, and planning by simulation.

    python -m benchmarks.planning [FOLDER] [--write]

Prints the tables of `docs/planning.md`, with the processor time of each search; with --write they replace those in the
page. FOLDER holds `answers.json` and the profiles of PipeDream and Piper, which are not part of the repository; without
it there is only the table of plans by simulation.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from penstock.plan.cluster.schema import find_cluster
from penstock.plan.planners.pipedream import Choices
from penstock.plan.planning import Planning, PlanRequest, make_plan
from penstock.plan.profile.other_programs import from_pipedream, from_piper
from penstock.plan.scale.analytic_profile import analytic_profile
from penstock.plan.scale.model_shape import ModelShape
from penstock.plan.stages.device_hierarchy import DeviceLevel, Devices

PAGE = Path(__file__).parents[1] / "docs" / "planning.md"
GIB = 2.0**30
SIMULATED = ((64, None, 256), (64, 80.0, 256), (64, 30.0, 256), (1024, 80.0, 2048))  # devices, GiB of each, samples


def timed(request: PlanRequest) -> tuple[Planning, float]:
    """What was planned, and the seconds of the processor that it took."""
    started = time.process_time()
    found = make_plan(request)
    return found, time.process_time() - started


def difference(found: Planning, published: float | None) -> str:
    """How far an objective is from the published one."""
    if not found.plans:
        return "infeasible, too" if published is None else "none"
    seconds = found.plans[0].rating.seconds
    return f"{seconds:.7g}" if published is None else f"{seconds / published - 1:+.1e}"


def pipedream_table(folder: Path, rows: list[dict[str, Any]]) -> list[str]:
    """The rows of PipeDream."""
    lines = [
        "| profile | machines | bytes/s | published, s | `pipedream` | s of CPU | `default` | s of CPU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        text = (folder / "pipedream" / f"{row['profile']}.graph.txt").read_text()
        levels = zip(row["machines"], row["bandwidth_bytes_per_s"], strict=True)
        devices = Devices(tuple(DeviceLevel(*level) for level in levels))
        cells = []
        for planner in ("pipedream", "default"):
            request = PlanRequest(
                from_pipedream(text, row["profile"]), devices, planner, "pipedream", choices=Choices(row["straight"])
            )
            found, seconds = timed(request)
            cells += [difference(found, row["seconds_per_stage"]), f"{seconds:.2f}"]
        speeds = ", ".join(f"{speed:.4g}" for speed in row["bandwidth_bytes_per_s"])
        machines = " x ".join(map(str, row["machines"])) + (", straight" if row["straight"] else "")
        head = [row["profile"], machines, speeds, f"{row['seconds_per_stage']:.7g}"]
        lines.append(f"| {' | '.join([*head, *cells])} |")
    return lines


def piper_table(folder: Path, rows: list[dict[str, Any]]) -> list[str]:
    """The rows of Piper and of equal stages."""
    lines = [
        "| devices | GiB | Piper, s | `piper` | s of CPU | equal stages, s | `2bw-paper` | s of CPU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    profile = from_piper((folder / "piper" / "bert32a100.json").read_text(), "bert32a100")
    for row in rows:
        devices = Devices((DeviceLevel(row["devices"], 25 * GIB),), row["gib"] * GIB)
        published = row.get("piper_time_per_sample")
        equal = (row.get("equal_stages") or {}).get("time_per_sample")
        cells = []
        for planner, theirs in (("piper", published), ("2bw-paper", equal)):
            found, seconds = timed(PlanRequest(profile, devices, planner, "piper", row["microbatches"]))
            cells += ["none" if theirs is None else f"{theirs:.9g}", difference(found, theirs), f"{seconds:.2f}"]
        lines.append(f"| {row['devices']} | {row['gib']:g} | {' | '.join(cells)} |")
    return lines


def simulated_table() -> list[str]:
    """The rows of planning by simulation."""
    lines = [
        "| H100 | GiB each | samples | best plan | ms per sample | classes left out | s of CPU |",
        "|---|---|---|---|---|---|---|",
    ]
    shape, cluster = ModelShape("48 x 6144", 48, 6144, 2048, 48, vocabulary=51200), find_cluster("h100")
    profile = analytic_profile(shape, cluster, (1, 2, 4))
    for count, memory, samples in SIMULATED:
        devices = cluster.devices(count)
        memory = memory and memory * GIB
        request = PlanRequest(profile, replace(devices, memory=memory), cost="simulated", samples=samples)
        found, seconds = timed(request)
        best = found.plans[0]
        plan = f"`{best.planner}`, {len(best.stages) // best.chunks} x {best.stages[0].replicas}"
        limit = "any" if memory is None else f"{memory / GIB:g}"
        numbers = f"{1e3 * best.seconds_per_sample:.4g} | {len(found.skipped):,} | {seconds:.1f}"
        lines.append(f"| {count:,} | {limit} | {samples:,} | {plan} | {numbers} |")
    return lines


def replaced(page: str, name: str, lines: list[str]) -> str:
    """The page with other lines between the marks of a table."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, _, rest = page.partition(begin)
    return before + begin + "\n".join(lines) + "\n" + end + rest.partition(end)[2]


def main() -> None:
    """Print the tables, or write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    tables: dict[str, Callable[[], list[str]]] = {"simulated": simulated_table}
    if arguments.folder is not None:
        answers = json.loads((arguments.folder / "answers.json").read_text())
        for name, table, key in (
            ("pipedream", pipedream_table, "pipedream"),
            ("piper", piper_table, "piper_bert32_25GiBps"),
        ):
            tables[name] = partial(table, arguments.folder, answers[key])
    page = PAGE.read_text()
    for name, rows in tables.items():
        lines = rows()
        print("\n".join(lines), end="\n\n")
        page = replaced(page, name, lines)
    if arguments.write:
        PAGE.write_text(page)


if __name__ == "__main__":
    main()
