"""What the planner was asked for an objective, and its answers: a table, and JSON."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from penstock.plan.objectives import Chosen, PlannedTrial

_VALUES = {
    "throughput": "s per\nsample",
    "time-to-target": "s to\ntarget",
    "devices": "devices",
    "cost": "price of\n1,000,000\nsamples",
}


def trials_json(chosen: Chosen, tokens: int | None = None) -> dict[str, Any]:
    """Return the trials as plain values.

    Args:
        chosen: the best plan by an objective, and all others that were asked for.
        tokens: of a sample, to tell the price of a million of them beside "cost"; None not to.
    """
    return {
        "optimized": chosen.objective,
        "trials": [
            {
                "devices": trial.devices,
                "batch": trial.batch,
                "value": trial.value,
                **({} if tokens is None else {"price_of_million_tokens": trial.value and trial.value / tokens}),
                "without_pipeline": trial.flat,
                "stages": None if trial.plan is None else len(trial.plan.stages),
                "devices_used": None if trial.plan is None else trial.plan.devices,
                "seconds_per_sample": None if trial.plan is None else trial.plan.seconds_per_sample,
            }
            for trial in chosen.trials
        ],
    }


def trials_table(chosen: Chosen, tokens: int | None = None) -> Table:
    """Return the trials, the best one marked; arguments as of `trials_json`."""
    table = Table(title=f"objective: {chosen.objective}", title_justify="left", box=None)
    batches = chosen.objective == "time-to-target"
    heads = ["", "devices", *(["batch"] if batches else []), "plan", "stages", "used", "s per\nsample"]
    heads += [_VALUES[chosen.objective]] if chosen.objective in ("cost", "time-to-target") else []
    heads += ["without\na pipeline"] if batches else []
    for heading in heads:
        table.add_column(heading, justify="left" if heading in ("", "plan") else "right", no_wrap=True)
    values = [trial.value for trial in chosen.trials if trial.value is not None]
    for trial in chosen.trials:
        table.add_row(*_cells(trial, chosen.objective, bool(values) and trial.value == min(values)))
    if values and tokens is not None:
        table.caption, table.caption_justify = f"1,000,000 tokens: {min(values) / tokens:.5g} at best", "left"
    return table


def _cells(trial: PlannedTrial, objective: str, best: bool) -> list[str]:
    """Return the cells of a trial."""
    plan, batches = trial.plan, objective == "time-to-target"
    cells = ["best" if best else "", str(trial.devices), *([str(trial.batch)] if batches else [])]
    if plan is None or trial.value is None:
        return [*cells, "none fits"]
    cells += [plan.planner, str(len(plan.stages)), str(plan.devices), f"{plan.seconds_per_sample:.5g}"]
    cells += [f"{trial.value:.5g}"] if objective in ("cost", "time-to-target") else []
    if batches:
        cells.append("none fits" if trial.flat is None else f"{trial.flat:.5g}")
    return cells
