"""Every method with everything else that a run may want: what is built, and what is refused before it runs.

`python tests/support/combinations.py` writes the table in docs/combinations.md anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from penstock.errors import CapabilityError, ConfigError, ScheduleError
from penstock.options.updates import Divergence
from penstock.runtime.pipeline import Pipeline
from penstock.schedule.build import smallest_microbatches
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.methods.corrections import CORRECTIONS
from penstock.schedule.methods.data_parallel_sync import Combine
from penstock.schedule.methods.table import METHODS
from penstock.verify.reference import Scaling
from support.cases import BALANCE, Case, make_pipeline
from support.offered_methods import OFFERED
from support.own_methods import correction_of
from support.schedules import make_schedule

PAGE = Path(__file__).parents[2] / "docs" / "combinations.md"
REFUSALS = (ConfigError, CapabilityError, ScheduleError)
SCALING = Scaling(initial=2.0**4, growth=2.0, backoff=0.5, interval=2)
AVERAGE = 0.8
MEETING = Combine("average", every=2)
DELAYS = {"mixed": {"table": 2, "second": 1}, "gpt": {"embedding": 2, "head": 1}}
BLOCKS = 6  # of each model
_OPTIMIZERS = ("adamw", "momentum", "undecayed", "nadam")


@cache
def case_of(method: str) -> Case:
    """A small run of a method: the depth shows its delays, the optimizer is one that it takes."""
    row = METHODS[method]
    depth = 2 if RULES[row.rule].flushes else 4
    if make_schedule(method, depth, smallest_microbatches(method, depth, beyond=1) or 1).num_stages > BLOCKS:
        depth = 2
    options = {"reschedule": 3} if "reschedule" in CORRECTIONS[row.correction].options else {}
    for m in (smallest_microbatches(method, depth, beyond=1), 1):
        model = "gpt" if make_schedule(method, depth, m).slices > 1 else "mixed"
        for optimizer in _OPTIMIZERS if model == "mixed" else ("momentum",):  # Adam would enlarge roundings of slices
            correction = correction_of(method, **options)
            case = Case(method, depth, m, model, optimizer, spans=(4,), skips=(), correction=correction)
            try:
                make_pipeline(case)
            except REFUSALS:
                continue
            return case
    raise AssertionError(f"{method} takes none of {_OPTIMIZERS}")


Build = Callable[[Case], Pipeline | None]


def changed(**changes: Any) -> Build:
    """A pipeline of the case with these changes."""
    return lambda case: make_pipeline(replace(case, **changes))


def given(**arguments: Any) -> Build:
    """A pipeline with these arguments."""
    return lambda case: make_pipeline(case, **arguments)


def built_before(_: Case) -> None:
    """Nothing is wanted of the pipeline before it runs."""


def delayed(case: Case) -> Pipeline:
    return make_pipeline(case, delays=DELAYS[case.model])


def fallen(case: Case) -> Pipeline:
    """On under 1F1B, from a batch on; and where one has diverged, which stages decide together."""
    other = make_schedule("1f1b", case.depth, case.m)
    make_pipeline(case).switch(other)
    pipeline = make_pipeline(replace(case, clip=0.6), divergence=Divergence())
    pipeline.switch(other)
    return pipeline


def synchronous_first(case: Case) -> Pipeline:
    first = make_schedule("1f1b", case.depth, case.m)
    pipeline = make_pipeline(replace(case, correction=None), method=first, balance=BALANCE[first.num_stages])
    pipeline.switch(case.schedule, correction=case.correction)
    return pipeline


SHARDS = {f"shard {level}": level for level in ("optimizer", "gradients", "full")}
"""Feature -> what parallel pipelines split of the state of a stage."""


def sharded(level: str) -> Build:
    """A pipeline of the case that is divided so over two."""
    return lambda case: make_pipeline(replace(case, width=2), sharding=level)


BUILDS: Mapping[str, Build] = {
    "clip": changed(clip=0.6),
    "loss scale": changed(scaling=SCALING),
    "bf16": changed(precision="bf16"),
    "tied": changed(tied=True),
    "recompute block": changed(recompute="block"),
    "recompute stage": changed(recompute="stage"),
    "evaluate": built_before,
    "average": given(ema_decay=AVERAGE),
    "resume": built_before,
    "offload optimizer": given(offload_optimizer="stages"),
    "width": changed(width=2),
    **{feature: sharded(level) for feature, level in SHARDS.items()},
    "combine": lambda case: make_pipeline(replace(case, width=2), combine=MEETING),
    "delays": delayed,
    "slices": changed(options=(("slices", 2),)),
    "fallback": fallen,
    "sync": synchronous_first,
}


@cache
def answer(method: str, feature: str) -> str | None:
    """Why the pipeline cannot be had, or None where it can."""
    try:
        BUILDS[feature](case_of(method))
    except REFUSALS as error:
        return str(error)
    return None


# --- the page ---------------------------------------------------------------------------------------------------------

_PART = re.compile(r"(<!-- combinations -->\n).*?(<!-- end -->)", re.DOTALL)
Stated = Mapping[str, Mapping[str, str | None]]
"""Method -> feature -> reason, or None where it runs."""


def reason(method: str, feature: str) -> str | None:
    """The answer without what is only this method's: names, and numbers of its schedule."""
    text = answer(method, feature)
    if text is None:
        return None
    row = METHODS[method]
    text = re.sub(rf"^{re.escape(method)}: ", "", text)
    text = re.sub(
        r"^(?:order|method) [\w-]+ has no option ('\w+'); it has [^.]*\.", r"the order has no option \1.", text
    )
    text = re.sub(r" \(\d+ and \d+\)", "", text)
    text = re.sub(r"^sharding \w+ (goes|is not offered)", r"sharding \1", text)
    text = text.replace(f"not with {row.rule!r}", "not with its rule")
    for kind, own in (("rule", row.rule), ("correction", row.correction)):
        text = text.replace(f"{kind} {own!r}", f"its {kind}")
    return re.sub(rf"(?<![\w-]){re.escape(method)}(?![\w-]| gradients)", "the method", text)


def table() -> str:
    """What every method says, methods with equal answers in one row."""
    stated = {method: {feature: reason(method, feature) for feature in BUILDS} for method in OFFERED}
    always = [f for f in BUILDS if not any(reasons[f] for reasons in stated.values())]
    others = [f for f in BUILDS if f not in always]
    notes = list(dict.fromkeys(r for f in others for reasons in stated.values() if (r := reasons[f])))
    rows: dict[tuple[str, ...], list[str]] = {}
    for method, reasons in stated.items():
        cells = tuple("yes" if (r := reasons[f]) is None else f"no ({1 + notes.index(r)})" for f in others)
        rows.setdefault(cells, []).append(f"`{method}`")
    lines = [f"Every method: {', '.join(always)}.", ""]
    lines += [f"| methods | {' | '.join(others)} |", "|---" * (len(others) + 1) + "|"]
    lines += [f"| {', '.join(methods)} | {' | '.join(cells)} |" for cells, methods in rows.items()]
    return "\n".join([*lines, "", *(f"{n}. {note}" for n, note in enumerate(notes, 1))]) + "\n"


def stated_on(page: str) -> Stated:
    """What a page says."""
    part = _PART.search(page)
    assert part is not None
    lines = part[0].splitlines()
    always = lines[1].removeprefix("Every method: ").removesuffix(".").split(", ")
    notes = {line.partition(". ")[0]: line.partition(". ")[2] for line in lines if re.match(r"\d+\. ", line)}
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|"))
    found: dict[str, dict[str, str | None]] = {}
    for names, *cells in rows:
        said = {f: None if c == "yes" else notes[c.strip("no ()")] for f, c in zip(head[1:], cells, strict=True)}
        for name in names.split(", "):
            found[name.strip("`")] = {**dict.fromkeys(always), **said}
    return found


if __name__ == "__main__":
    PAGE.write_text(_PART.sub(lambda match: match[1] + table() + match[2], PAGE.read_text()))
