"""What a plan is to be best at: throughput, time to a target, the fewest devices, or the price of a sample.

Each asks the planner several times, for other numbers of devices or other batches, and keeps every answer as a trial.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from penstock.checks import check_whole, in_words
from penstock.errors import ConfigError
from penstock.plan.planning import Planning, PlanRequest, make_plan, sizes_for
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.planned import Plan

OBJECTIVES = ("throughput", "time-to-target", "devices", "cost")
_HOUR = 3600.0


@dataclass(frozen=True)
class Target:
    """How training gets to its target (Pal et al., arXiv 1907.13257: epochs grow with the batch).

    Attributes:
        epochs: by samples of a batch.
        samples: of an epoch.
    """

    epochs: Mapping[int, float]
    samples: float

    def __post_init__(self) -> None:
        if not self.epochs:
            raise ConfigError("the curve of epochs needs points, as in 256:10,1024:12.5")
        for batch, epochs in self.epochs.items():
            check_whole("samples per batch", batch, 1, 1 << 30)
            if not 0 < epochs < 1e12:
                raise ConfigError(f"epochs must be above 0, got {epochs:g} for a batch of {batch}")
        if not 0 < self.samples < 1e18:
            raise ConfigError(f"samples of an epoch must be above 0, got {self.samples:g}")


@dataclass(frozen=True)
class PlannedTrial:
    """A question to the planner, and what is made of its answer.

    Attributes:
        devices: that there were.
        batch: samples per batch; None where it is the request's.
        plan: the best one; None if none fits.
        value: what the objective minimizes: seconds, devices, or the price of a million samples; None without a plan.
        flat: the value of the best plan without a pipeline, for "time-to-target"; None if none fits.
    """

    devices: int
    batch: int | None
    plan: Plan | None
    value: float | None
    flat: float | None = None


@dataclass(frozen=True)
class Chosen:
    """The plan that is best by an objective.

    Attributes:
        objective: one of `OBJECTIVES`.
        planning: the answer with the least value, or the last one if no plan fits.
        trials: all questions.
    """

    objective: str
    planning: Planning
    trials: tuple[PlannedTrial, ...]


def choose(request: PlanRequest, objective: str, target: Target | None = None, price: float | None = None) -> Chosen:
    """Plan for an objective.

    Args:
        request: with all devices there are.
        objective: one of `OBJECTIVES`.
        target: of "time-to-target".
        price: of a device for an hour, for "cost"; 1 if None.

    Raises:
        ConfigError: as of `check_objective`, or of `make_plan`.
    """
    price = check_objective(request, objective, target, price) or 1.0
    if objective == "throughput":
        planning = make_plan(request)
        return _best(objective, [(planning, _trial(planning, request.devices.count, None, _seconds))])
    if objective == "devices":
        return _fewest(request)
    if objective == "cost":

        def value(plan: Plan, _: int) -> float:
            return plan.devices * plan.seconds_per_sample * 1e6 / _HOUR * price

        asked = []
        for count in _counts(request.devices):
            planning = make_plan(replace(request, devices=fewer_devices(request.devices, count)))
            asked.append((planning, _trial(planning, count, None, value)))
        return _best(objective, asked)
    assert target is not None
    return _to_target(request, target)


def check_objective(
    request: PlanRequest, objective: str, target: Target | None, price: float | None = None
) -> float | None:
    """Refuse what does not go with an objective, before anything is searched; return the price.

    Args:
        request, objective, target, price: as of `choose`.

    Raises:
        ConfigError: there is no such objective, it lacks something, or no microbatches make the batch.
    """
    if objective not in OBJECTIVES:
        raise ConfigError(f"objective must be {in_words(OBJECTIVES)}, got {objective!r:.80}")
    if (target is None) == (objective == "time-to-target"):
        raise ConfigError("objective time-to-target, and no other, takes --epochs and --epoch-samples")
    if price is not None and objective != "cost":
        raise ConfigError("objective cost, and no other, takes --price")
    if price is not None and not 0 < price < 1e12:
        raise ConfigError(f"the price of a device must be above 0, got {price:g}")
    if objective != "throughput" and request.devices.kinds:
        raise ConfigError(
            f"objective {objective} plans for fewer devices, too, which have to be alike: give devices of one kind, or "
            "leave --objective out"
        )
    if objective != "time-to-target":  # which has batches of its own
        sizes_for(request)
    return price


def fewer_devices(devices: Devices, count: int) -> Devices:
    """Return so many of some devices, filling the innermost levels first.

    Raises:
        ConfigError: there are not so many, they do not fill whole units, or they differ.
    """
    check_whole("devices", count, 1, devices.count)
    if devices.kinds:
        raise ConfigError(f"which {count} of {devices.count} devices that differ is not known: plan for these alone")
    levels, left = [], count
    for level in devices.levels:
        units = min(level.units, left)
        if left % units:
            raise ConfigError(f"{count} devices do not fill whole units of {devices}")
        levels.append(replace(level, units=units))
        left //= units
    while len(levels) > 1 and levels[-1].units == 1:
        levels.pop()
    return replace(devices, levels=tuple(levels))


def _counts(devices: Devices) -> list[int]:
    """Return powers of two up to the number of devices, and that number, where they fill whole units."""
    found = []
    for count in sorted({1 << k for k in range(devices.count.bit_length())} | {devices.count}):
        try:
            fewer_devices(devices, count)
        except ConfigError:
            continue
        found.append(count)
    return found


def _seconds(plan: Plan, _: int) -> float:
    return plan.seconds_per_sample


def _trial(planning: Planning, count: int, batch: int | None, value: object) -> PlannedTrial:
    assert callable(value)
    plan = planning.plans[0] if planning.plans else None
    return PlannedTrial(count, batch, plan, None if plan is None else float(value(plan, count)))


def _best(objective: str, asked: list[tuple[Planning, PlannedTrial]]) -> Chosen:
    """Return the answer with the least value."""
    fitting = [each for each in asked if each[1].value is not None]
    planning, _ = min(fitting, key=lambda each: each[1].value or 0.0) if fitting else asked[-1]
    return Chosen(objective, planning, tuple(trial for _, trial in asked))


def _fewest(request: PlanRequest) -> Chosen:
    """Return the plan for the fewest devices on which any fits; fewer never fit where more do not."""
    counts = []
    for count in range(1, request.devices.count + 1):
        try:
            fewer_devices(request.devices, count)
        except ConfigError:
            continue
        counts.append(count)
    asked = dict[int, Planning]()

    def ask(at: int) -> Planning:
        if at not in asked:
            asked[at] = make_plan(replace(request, devices=fewer_devices(request.devices, counts[at])))
        return asked[at]

    low, high = 0, len(counts) - 1
    if ask(high).plans:
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if ask(middle).plans else (middle + 1, high)
        ask(low)
    rows = [(asked[at], _trial(asked[at], counts[at], None, lambda _, count: count)) for at in sorted(asked)]
    return _best("devices", rows)


def _to_target(request: PlanRequest, target: Target) -> Chosen:
    """Return the plan and batch that reach a target soonest, for growing numbers of devices, too."""
    rows = list[tuple[Planning, PlannedTrial]]()
    for count in _counts(request.devices):
        devices = fewer_devices(request.devices, count)
        for batch, epochs in sorted(target.epochs.items()):
            try:
                planning = make_plan(replace(request, devices=devices, microbatches=None, samples=batch))
            except ConfigError:
                if count == request.devices.count and batch == max(target.epochs) and not rows:
                    raise
                continue  # no profiled size of microbatches divides this batch
            total = epochs * target.samples
            trial = _trial(planning, count, batch, lambda plan, _, t=total: plan.seconds_per_sample * t)
            flat = [plan.seconds_per_sample * total for plan in _flat_plans(planning)]
            rows.append((planning, replace(trial, flat=min(flat, default=None))))
    return _best("time-to-target", rows)


def _flat_plans(planning: Planning) -> Iterator[Plan]:
    """Yield the plans without a pipeline."""
    return (plan for plan in planning.plans if len(plan.stages) == 1)


# --- the report -------------------------------------------------------------------------------------------------------


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
    plan, batches = trial.plan, objective == "time-to-target"
    cells = ["best" if best else "", str(trial.devices), *([str(trial.batch)] if batches else [])]
    if plan is None or trial.value is None:
        return [*cells, "none fits"]
    cells += [plan.planner, str(len(plan.stages)), str(plan.devices), f"{plan.seconds_per_sample:.5g}"]
    cells += [f"{trial.value:.5g}"] if objective in ("cost", "time-to-target") else []
    if batches:
        cells.append("none fits" if trial.flat is None else f"{trial.flat:.5g}")
    return cells
