"""Kinds of delayed and predicted weights, and the cases that train them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from penstock.runtime.pipeline import Pipeline
from penstock.runtime.rank.snapshot import Saving, Snapshot
from penstock.weights.corrections.base import Correction
from penstock.weights.corrections.pipemare import PipeMare
from support.cases import (
    Case,
    Outcome,
    make_batches,
)  # fmt: skip
from support.own_methods import correction_of


class Kind(NamedTuple):
    """A method with a choice of options, for the runtime and for the reference."""

    method: str
    correction: Correction | None
    options: Mapping[str, Any] = {}
    optimizers: tuple[str, ...] = ("sgd", "adamw")
    exact: bool = True
    largest: int | None = None  # number of microbatches
    rule: str | None = None


MARE = {"reschedule": 4}


KINDS = {
    "newest": Kind("newest", None),
    "pipemare": Kind("pipemare", correction_of("pipemare", **MARE), MARE),
    "pipemare without T1": Kind("pipemare", correction_of("pipemare", reschedule=0), {"reschedule": 0}),
    "pipemare without T2": Kind("pipemare", PipeMare(4, None), {**MARE, "decay": None}),
    "spectrain": Kind("spectrain", correction_of("spectrain")),
    "spectrain-stash": Kind("spectrain-stash", correction_of("spectrain-stash")),
    "xpipe": Kind("xpipe", correction_of("xpipe")),
    "xpipe with powers": Kind("xpipe", correction_of("xpipe", uncorrected=0), {"bias": "adam"}),
    "pipeoptim": Kind("pipeoptim", correction_of("pipeoptim")),
    "spike": Kind("spike", correction_of("spike"), {}, ("momentum",), exact=False),
    "lwp": Kind("lwp", correction_of("lwp")),
    "lwp-weights": Kind("lwp-weights", correction_of("lwp-weights"), {}, ("sgd", "adamw", "nadam")),
    "spike-lwp": Kind("spike-lwp", correction_of("spike-lwp"), {}, ("momentum",), exact=False),
    "spike-lwp-weights": Kind("spike-lwp-weights", correction_of("spike-lwp-weights"), {}, ("momentum",), exact=False),
    "nag-pp": Kind("nag-pp", correction_of("nag-pp"), {}, ("nadam",)),
    "nag-pp-no-stash": Kind("nag-pp-no-stash", correction_of("nag-pp-no-stash", **MARE), MARE, ("nadam",)),
    "gap-aware": Kind("gap-aware", correction_of("gap-aware"), {}, ("undecayed", "momentum"), exact=False, largest=1),
    "error-feedback": Kind("error-feedback", correction_of("error-feedback"), {}, ("sgd", "adamw", "nadam")),
    "2bw-ahead": Kind(
        "2bw-ahead", correction_of("2bw-ahead"), {}, ("undecayed", "adamw", "nadam", "configured adan", "sgd")
    ),
    "2bw-ahead, a and b": Kind(
        "2bw-ahead",
        correction_of("2bw-ahead", a=0.45, b=0.053, horizon=1.5),
        {"a": 0.45, "b": 0.053, "horizon": 1.5},
        ("nadam", "configured adan", "adamw", "sgd"),
    ),
    "2bw-ahead by motion": Kind(
        "2bw-ahead",
        correction_of("2bw-ahead", motion=1, horizon=0.5),
        {"motion": True, "horizon": 0.5},
        ("adafactor", "configured soap", "adamw", "sgd"),
    ),
    "3bw-ahead": Kind("3bw-ahead", correction_of("3bw-ahead"), {}, ("adamw", "sgd")),
    "2bw-ahead of Muon": Kind("2bw-ahead", correction_of("2bw-ahead"), {}, ("configured muon",)),
    "ftpipe": Kind("ftpipe", correction_of("ftpipe"), {}, ("adamw",)),
    "ftpipe-aggregated": Kind("ftpipe-aggregated", correction_of("ftpipe-aggregated"), {}, ("adamw",)),
    "timeprest": Kind("timeprest", None),
    "v-timeprest": Kind("v-timeprest", None),
    "i-timeprest": Kind("i-timeprest", correction_of("i-timeprest", beta=0.7), {"beta": 0.7}),
    "spectrain of Muon": Kind("spectrain", correction_of("spectrain"), {}, ("configured muon",)),
}


def case_of(name: str, depth: int, m: int, **changes: Any) -> Case:
    kind = KINDS[name]
    m = min(m, kind.largest or m)
    if kind.method in ("error-feedback", "2bw-ahead", "v-timeprest"):
        m = max(m, depth - 1)
    if kind.method == "3bw-ahead":
        m = max(m, depth // 2)
    case = Case(kind.method, depth, m, correction=kind.correction, optimizer=kind.optimizers[0], rule=kind.rule)
    return replace(case, **({"model": "long" if depth == 8 else "mixed"} | changes))


def assert_near(found: Outcome, wanted: Outcome) -> None:
    """The same numbers, up to what roundings grow to."""
    for (batch, loss, weight), said in zip(found.reports, wanted.reports, strict=True):
        assert (batch, weight) == (said[0], said[2])
        assert loss == (said[1] if said[1] is None else pytest.approx(said[1], rel=1e-4))
    tensors: dict[str, tuple[Tensor, Tensor]] = {n: (found.weights[n], w) for n, w in wanted.weights.items()}
    assert found.state.keys() == wanted.state.keys()
    for name, state in wanted.state.items():
        assert found.state[name].keys() == state.keys()
        tensors |= {f"{key} of {name}": (found.state[name][key], v) for key, v in state.items() if key != "step"}
    for update, (given, other) in enumerate(zip(found.gradients, wanted.gradients, strict=True)):
        assert given.keys() == other.keys()
        tensors |= {f"gradient {update} of {name}": (g, other[name]) for name, g in given.items()}
    for what, (a, b) in tensors.items():
        if isinstance(b, Tensor):
            scale = max(float(b.abs().max()), 1e-3)
            assert float((a - b).abs().max()) <= 1e-4 * scale, what
    assert found.rates == pytest.approx(wanted.rates, rel=1e-12)


def snapshots_of(case: Case, every: int, pipeline: Pipeline) -> list[Snapshot]:
    taken: list[Snapshot] = []
    for _ in pipeline.run(make_batches(case), save=Saving(every, taken.append)):
        pass
    return taken
