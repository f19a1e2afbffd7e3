"""What a method with a set of features is compared with: the reference, or runs without them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.options.updates import Divergence
from penstock.runtime.execute.evaluation_without_draining import Evaluating
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.rank.batch_reports import Report
from penstock.runtime.rank.snapshot import Saving, Snapshot
from penstock.runtime.update.divergence import Trouble
from penstock.runtime.update.run_events import Evaluated
from penstock.schedule.machine.evaluation_without_draining_check import border_fault
from penstock.schedule.methods.table import METHODS
from penstock.stage.autograd.recompute import RecomputeMode
from penstock.verify.config_to_reference import reference_options
from penstock.verify.derived_delays import order_of
from penstock.verify.reference import Reference
from penstock.verify.reference.delays import version_read
from penstock.verify.reference.supported_methods import FLUSH
from penstock.weights.corrections.base import Correction
from support.cases import (
    BALANCE,
    LOSSES,
    OPTIMIZERS,
    TIED,
    Case,
    Named,
    Outcome,
    Recording,
    add_decisions,
    assert_equal_tensors,
    assert_same,
    cut,
    finish,
    make_batches,
    make_blocks,
    make_pipeline,
    outcome_of,
    parts_of,
    reference_run,
    run_spans,
    token_loss,
    train,
    warm_up,
)
from support.combinations import (
    AVERAGE,
    DELAYS,
    MEETING,
    SCALING,
    SHARDS,
)
from support.correction_cases import assert_near
from support.delay_cases import assert_trained, sequential
from support.meetings import (
    Reference as Meetings,
    assert_close,
    precise_blocks,
    precise_loss,
    states_of,
    uneven_batches,
)
from support.own_methods import prove, train_reference
from support.rest_of_a_run import rest_of
from support.schedules import make_schedule
from support.sharded import assert_as_whole, train_sharded
from support.snapshots import Kept

ROUNDED = {"spike", "spike-lwp", "spike-lwp-weights", "gap-aware"}
"""Methods whose steps are written otherwise than in the reference, so that they differ by roundings; slices do, too."""

Features = Collection[str]
"""Those of a check that the method does not refuse; they are wanted all at once."""
Check = Callable[[Case, Features], None]


# --- what is compared -------------------------------------------------------------------------------------------------


@cache
def _reference(case: Case) -> Reference:
    return reference_run(case, options=reference_options(case.correction, case.schedule.rule))


def wanted(case: Case) -> Reference:
    """What the reference says; the order of passes changes no number, so methods that flush share theirs."""
    if case.method in FLUSH and parts_of(case) == parts_of(replace(case, method="1f1b", options=())):
        case = replace(case, method="1f1b", depth=case.schedule.num_stages, options=())
    return _reference(case)


def compare(case: Case, found: Outcome, said: Outcome) -> None:
    """Reports, gradients, weights, optimizer state and decisions."""
    if case.method not in ROUNDED and case.schedule.slices == 1:
        assert_same(found, said)
        return
    assert [(d[0], d[-1]) for d in found.decided] == [(d[0], d[-1]) for d in said.decided]
    if case.precision == "fp32":
        finite = [r for r in said.reports if r[1] is None or math.isfinite(r[1])]
        assert_near(replace(found, reports=[r for r in found.reports if r[0] in {b for b, *_ in finite}]),
                    replace(said, reports=finite))  # fmt: skip
        return
    for name, weight in said.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=1e-2, atol=1e-2)


def drained(case: Case, every: int) -> Case:
    """The case with the drains that something takes which is made after every so many batches."""
    if border_fault(prove(case.method, case.depth, case.m).lowered) is None:
        return case
    count = sum(case.spans)
    return replace(case, spans=tuple(b - a for a, b in pairwise([*range(0, count, every), count])))


def note(case: Case, outcome: Outcome, report: Report) -> None:
    """Take down what a report says."""
    outcome.reports.append((report.batch, report.loss, report.weight))
    add_decisions(outcome, case, report.decided)


def loss_on(case: Case, weights: Mapping[str, Tensor], data: Any) -> float:
    """The mean loss of a model with these weights, as everybody computes it."""
    (blocks,) = cut(make_blocks(case.model), BALANCE[1])
    load(blocks, weights)
    total = count = 0.0
    for tokens, targets in (sample for batch in data for sample in batch):
        x = tokens
        for block in blocks.values():
            x = block(x)
        loss, weight = token_loss(x, targets)
        total, count = total + float(loss.detach()), count + weight
    return total / count


def load(blocks: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Give blocks their weights."""
    for name, block in blocks.items():
        if isinstance(block, nn.Module):
            own = {key.removeprefix(f"{name}."): w for key, w in weights.items() if key.startswith(f"{name}.")}
            block.load_state_dict(own)


# --- decisions, averages, evaluations and snapshots -------------------------------------------------------------------


def kept_and_looked_at(case: Case, chosen: Features) -> None:
    """One run with all of these, and one that goes on from its snapshot."""
    changes: dict[str, Any] = {"clip": 0.6} if "clip" in chosen else {}
    if "loss scale" in chosen:
        changes |= {"scaling": SCALING, "loss": "spiky", "spikes": (1,)}
    case = replace(case, spans=(6,), **changes)
    stopping = drained(case, 3) if {"evaluate", "resume"} & set(chosen) else case
    result, data = wanted(stopping), make_batches(replace(case, spans=(8,)))[6:]
    said, average = outcome_of(case, result), {"ema_decay": AVERAGE} if "average" in chosen else {}
    away = {"offload_optimizer": "stages"} if "offload optimizer" in chosen else {}
    taken: list[Snapshot] = []
    evaluations: list[Evaluated] = []
    recording, outcome = Recording(OPTIMIZERS[case.optimizer]), Outcome()
    pipeline = make_pipeline(case, optimizer=recording, **average, **away)
    save = Saving(3, taken.append) if "resume" in chosen else None
    look = Evaluating(3, lambda: data) if "evaluate" in chosen else None
    for report in pipeline.run(make_batches(case), save=save, evaluate=look):
        note(case, outcome, report)
        evaluations += report.evaluated
    add_decisions(outcome, case, pipeline.decided())
    compare(case, finish(outcome, pipeline, recording), said)
    assert_decided(said, chosen)
    if look is not None:
        evaluations += pipeline.evaluated()
        assert [e.version for e in evaluations] == [3, 6]
        for e in evaluations:
            assert e.loss == pytest.approx(loss_on(case, result.versions[e.version], data), rel=1e-4), "evaluate"
    if average:
        assert_averaged(case, pipeline, result)
    if save is not None:
        assert_goes_on(case, pipeline, Kept([s for s in taken if s.batch == 3]), rest_of(said, 3), average)


def assert_decided(said: Outcome, chosen: Features) -> None:
    """That there was something to decide."""
    if "clip" in chosen:
        assert any(norm > 0.6 for _, _, norm, _, _ in said.decided if math.isfinite(norm))
    if "loss scale" in chosen:
        assert [skipped for *_, skipped in said.decided] == [t == 1 for t in range(6)]
        assert len({scale for _, _, _, scale, _ in said.decided}) > 1


def assert_averaged(case: Case, pipeline: Pipeline, result: Reference) -> None:
    """The average of the versions that updates have made."""
    mean = {name: w.double() for name, w in result.versions[0].items()}
    for weights, gradients in zip(result.versions[1:], result.gradients, strict=True):
        if gradients:
            mean = {name: AVERAGE * mean[name] + (1 - AVERAGE) * w.double() for name, w in weights.items()}
    found = pipeline.state_dict(averaged=True)
    for name, value in mean.items():
        torch.testing.assert_close(
            found[name].double(), value, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"average of {n}: {text}"
        )
    data = make_batches(replace(case, spikes=()))[:1]
    loss, _ = pipeline.evaluate(data, averaged=True) or (math.nan, 0.0)
    assert loss == pytest.approx(loss_on(case, {n: w.float() for n, w in mean.items()}, data), rel=1e-4), "average"


def assert_goes_on(case: Case, whole: Pipeline, kept: Kept, said: Outcome, average: Mapping[str, float]) -> None:
    """A pipeline that began with other weights comes to the same end, to the bit."""
    recording, outcome = Recording(OPTIMIZERS[case.optimizer]), Outcome()
    pipeline = make_pipeline(case, optimizer=recording, blocks=make_blocks(case.model, seed=99), **average)
    pipeline.load(kept)
    for report in pipeline.run(make_batches(case)[3:]):
        note(case, outcome, report)
    add_decisions(outcome, case, pipeline.decided())
    compare(case, finish(outcome, pipeline, recording), said)
    for kind in (False, True) if average else (False,):
        ends = pipeline.state_dict(averaged=kind), whole.state_dict(averaged=kind)
        assert_equal_tensors(*ends, f"resume, averaged={kind}")


# --- changes of the model, and forwards that are run again ------------------------------------------------------------


def with_recompute(feature: str, changes: Mapping[str, Any], again: RecomputeMode) -> Check:
    """A change that is told to the reference, and recompute, which changes numbers under late weights alone."""

    def check(case: Case, chosen: Features) -> None:
        case = replace(case, **(changes if feature in chosen else {}))
        case = replace(case, recompute=again if f"recompute {again}" in chosen else "none")
        found = train(None, case)
        compare(case, found, outcome_of(case, wanted(case)))
        for name, owner in TIED[case.model].items() if case.tied else ():
            assert torch.equal(found.weights[name], found.weights[owner])

    return check


# --- parallel pipelines, delays by choice, slices ---------------------------------------------------------------------


def wide(case: Case, _: Features) -> None:
    case = replace(case, width=2)
    compare(case, train(None, case), outcome_of(case, wanted(case)))


def sharded(case: Case, chosen: Features) -> None:
    """With the most that may be split; fewer levels run in test_sharded_state.py."""
    case, level = replace(case, width=2), SHARDS[list(chosen)[-1]]
    outcome, parts, _ = train_sharded(None, case, level)
    sliced = case.schedule.slices > 1  # roundings are those of the whole pipeline, not of the reference
    assert_as_whole(outcome, [parts], train(None, case) if sliced else outcome_of(case, wanted(case)))


def combined(case: Case, _: Features) -> None:
    case = replace(case, width=2)
    schedule, batches, blocks = case.schedule, uneven_batches(4, case.m, 2), precise_blocks(case.model)
    pipeline = make_pipeline(case, blocks=blocks, loss=precise_loss, lr_scheduler=None, combine=MEETING)
    list(pipeline.run(batches))

    def reads(t: int, k: int, s: int) -> int:
        return version_read(case.method, t, k, case.m, s, schedule.num_stages, 0)

    said = Meetings(
        MEETING, 2, case.m, schedule.num_stages, OPTIMIZERS[case.optimizer], reads, clip=None, model=case.model
    )
    for t, batch in enumerate(batches):
        said.train(t, batch)
    assert_close(states_of(pipeline), said.states(), 1e-9 if schedule.slices == 1 else 1e-4)


def delayed(case: Case, _: Features) -> None:
    case, delays = replace(case, rate=False, spans=(5,)), DELAYS[case.model]
    recording = Recording(OPTIMIZERS[case.optimizer])
    pipeline = make_pipeline(case, optimizer=recording, delays=delays)
    found, said = finish(run_spans(pipeline, case), pipeline, recording), sequential(case, delays)
    if case.schedule.slices == 1:
        assert_trained(found, said)
    for name, weight in said.history[-1].items():
        torch.testing.assert_close(found.weights[name], weight, rtol=1e-4, atol=1e-6)


def sliced(case: Case, _: Features) -> None:
    case = replace(case, options=(("slices", 4),))
    compare(case, train(None, case), outcome_of(case, wanted(case)))


# --- several methods in one run ---------------------------------------------------------------------------------------

Phase = tuple[str, Correction | None, int]  # method, what it does about staleness, batches


def with_others(case: Case, chosen: Features) -> None:
    """1F1B first; the method, under which a batch diverges; 1F1B again, and the method again."""
    own = case.method, case.correction
    phases: list[Phase] = [(*own, 3)]
    if "sync" in chosen:
        phases.insert(0, ("1f1b", None, 2))
    trouble = None
    if "fallback" in chosen:
        phases += [("1f1b", None, 1), (*own, 2)]
        trouble = Trouble(3, "the loss was inf")
        case = replace(case, loss="spiky", spikes=(3,))
    case = replace(case, clip=0.6, spans=(sum(count for *_, count in phases),))
    recording, outcome, batches = Recording(OPTIMIZERS[case.optimizer]), Outcome(), make_batches(case)
    first = replace(case, method=phases[0][0], correction=phases[0][1])
    pipeline = make_pipeline(first, optimizer=recording, divergence=Divergence())
    for method, correction, count in phases:
        if pipeline.batches:
            pipeline.switch(make_schedule(method, case.depth, case.m), correction=correction)
        for report in pipeline.run(batches[pipeline.batches : pipeline.batches + count]):
            note(case, outcome, report)
        add_decisions(outcome, case, pipeline.decided())
    assert pipeline.trouble == trouble
    compare(case, finish(outcome, pipeline, recording), outcome_of(case, chained(case, phases)))


def chained(case: Case, phases: Sequence[Phase]) -> Reference:
    """References one after the other, each of which begins with weights and optimizer states of the one before."""
    batches, whole = make_batches(case), Reference()
    begin: Mapping[str, Tensor] = {}
    states: list[dict[str, Any]] = []
    for method, correction, count in phases:
        parts, first = cut(make_blocks(case.model), BALANCE[case.schedule.num_stages]), len(whole.losses)
        for part in parts if begin else ():
            load(part, begin)
        made = sum(1 for gradients in whole.gradients if gradients)
        result = train_reference(
            parts,
            LOSSES[case.loss],
            batches[first : first + count],
            method=method,
            optimizer=_going_on(OPTIMIZERS[case.optimizer], iter([state for state in states if state])),
            rate=lambda k, made=made: warm_up(k + made),
            divisor=case.divisor,
            clip=case.clip,
            parts=parts_of(case),
            options=reference_options(correction),
            order=order_of(METHODS[method], make_schedule(method, case.depth, case.m)),
        )
        begin, states = result.versions[-1] | result.buffers, result.optimizers
        for what in ("losses", "weights", "gradients", "norms", "scales"):
            getattr(whole, what).extend(getattr(result, what))
        whole.versions, whole.optimizers, whole.buffers = result.versions, result.optimizers, result.buffers
    return whole


def _going_on(factory: Callable[[Named], torch.optim.Optimizer], states: Iterator[dict[str, Any]]) -> Any:
    def make(named: Named) -> torch.optim.Optimizer:
        optimizer, before = factory(named), next(states, None)
        if before is not None:
            optimizer.load_state_dict({**optimizer.state_dict(), "state": before["state"]})
        return optimizer

    return make


# --- the cells --------------------------------------------------------------------------------------------------------

CHECKS: Mapping[tuple[str, ...], Check] = {
    ("clip", "loss scale", "evaluate", "average", "resume", "offload optimizer"): kept_and_looked_at,
    ("bf16", "recompute block"): with_recompute("bf16", {"precision": "bf16"}, "block"),
    ("tied", "recompute stage"): with_recompute("tied", {"tied": True}, "stage"),
    ("width",): wide,
    tuple(SHARDS): sharded,
    ("combine",): combined,
    ("delays",): delayed,
    ("slices",): sliced,
    ("fallback", "sync"): with_others,
}
