"""Updates before the decision of all stages: whatever is decided, the numbers are those of updates after it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from penstock.errors import CapabilityError
from penstock.runtime.execute.evaluation_without_draining import Evaluating
from penstock.runtime.rank.snapshot import Saving
from penstock.schedule.ir.schedule import Op, Schedule
from penstock.stage.trained_stage_weights import TrainedWeights
from penstock.verify.reference import Scaling
from penstock.weights.memory.squared_norm import Squares
from penstock.weights.optim.undo import undo_step
from support.cases import (
    OPTIMIZERS,
    Case,
    Outcome,
    add_state,
    assert_equal_tensors,
    assert_same,
    expected,
    make_batches,
    make_pipeline,
    run_spans,
    together,
    token_loss,
)  # fmt: skip
from support.pool import Pool

SPIKES: dict[str, Any] = {"scaling": Scaling(4.0, 2.0, 0.5, 2), "loss": "spiky", "spikes": (1, 4)}
SPANS = (4, 3)
LAST = (3, 6)  # the last batches of the spans: nothing has read the versions that they bear
EVENTS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {  # with the batches whose update is made again
    "nothing": ({}, ()),
    "clipped": ({"clip": 0.5}, (0, 1, 2, 4, 5, 6)),
    "never clipped": ({"clip": 1e9}, ()),
    # Two batches that overflow; after the third batch in a row that does not the scale grows (batch 3 counts for none).
    "overflow": (SPIKES, (1, 4, 6)),
}
GRID = [
    (name, rule, p, m)
    for name, rule in (("zb-h2-post", None), ("zb-auto-post", None), ("1f1b", "provisional"), ("zb-v", "provisional"))
    for p, m in ((1, 2), (2, 1), (2, 4), (3, 5))
]
PAIRS = [  # each event at each order, and at each shape; every order has every shape
    (*cell, event) for i, cell in enumerate(GRID) for j, event in enumerate(EVENTS) if (i // 4 + i + j) % 2 == 0
]


def train(group: dist.ProcessGroup | None, case: Case, **changes: Any) -> tuple[Outcome, int]:
    """Run a case; also how many forwards have been run again in this process."""
    pipeline = make_pipeline(case, group, optimizer=OPTIMIZERS[case.optimizer], **changes)
    outcome = run_spans(pipeline, case)
    outcome.weights = {name: w.clone() for name, w in pipeline.state_dict().items()}
    for optimizer in pipeline.optimizers().values():
        add_state(outcome, optimizer.state_dict())
    mine = {recorder.rank for recorder in (rank.recorder for rank in pipeline._ranks)}
    return outcome, sum(i.what == "REDO" and i.rank in mine for i in pipeline.timeline().intervals)


def wanted(case: Case) -> Outcome:
    return replace(expected(case), gradients=[])


def drafts(schedule: Schedule) -> int:
    """Forwards of a batch that stand before VALIDATE on their rank."""
    return sum(
        action.op is Op.F and any(later.op is Op.VALIDATE for later in period[place:])
        for period, _ in schedule.programs
        for place, action in enumerate(period)
    )


@pytest.mark.parametrize(("name", "rule", "p", "m", "event"), PAIRS)
def test_post_validation_in_one_process(name: str, rule: str | None, p: int, m: int, event: str, device: str) -> None:
    changes, rejected = EVENTS[event]
    case = Case(name, p, m, rule=rule, spans=SPANS, device=device, **changes)
    found, redone = train(None, case)
    assert_same(found, wanted(case))
    assert redone == drafts(case.schedule) * len(set(rejected) - set(LAST))


def test_a_decision_says_that_its_update_was_made_again() -> None:
    for event, (changes, rejected) in EVENTS.items():
        case = Case("zb-h2-post", 2, 4, spans=SPANS, **changes)
        pipeline, batches = make_pipeline(case), make_batches(case)
        decided = [d for span in (batches[:4], batches[4:]) for r in pipeline.run(span) for d in r.decided]
        decided += pipeline.decided()
        assert [d.batch for d in decided] == list(range(7))
        assert tuple(d.batch for d in decided if d.again) == rejected, event


@pytest.mark.parametrize("event", ["never clipped", "clipped", "overflow"])
@pytest.mark.parametrize(("name", "p", "m"), [("zb-h2-post", 2, 4), ("zb-h2-post", 4, 8), ("zb-auto-post", 2, 3)])
def test_post_validation_on_ranks(pool: Pool, name: str, p: int, m: int, event: str) -> None:
    changes, rejected = EVENTS[event]
    case = Case(name, p, m, spans=SPANS, **changes)
    parts = pool.submit(train, case, ranks=p)
    assert_same(together([outcome for outcome, _ in parts]), wanted(case))
    assert sum(redone for _, redone in parts) == drafts(case.schedule) * len(set(rejected) - set(LAST))


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "restless", "seed": 3},
        {"model": "restless", "recompute": "block"},
        {"model": "restless", "recompute": "stage"},
        {"precision": "bf16"},
        {"precision": "fp16", **SPIKES},
        {"tied": True},
        {"width": 2},
        {"optimizer": "sgd"},
        {"optimizer": "muon", "model": "matrices", "clip": 0.005},
        {"model": "gpt"},
    ],
    ids=str,
)
@pytest.mark.parametrize("event", ["clipped", "never clipped"])
def test_post_validation_with_other_features(changes: dict[str, Any], event: str) -> None:
    given = EVENTS[event][0] | (changes if event == "clipped" else {k: v for k, v in changes.items() if k != "clip"})
    case = Case("zb-h2-post", 3, 5, spans=SPANS, **given)
    found, redone = train(None, case)
    assert_same(found, wanted(case))
    assert (redone > 0) is (event == "clipped" or "spikes" in changes or "width" in changes)


@pytest.mark.parametrize("changes", [{"model": "restless"}, {"tied": True}, {"precision": "bf16"}], ids=str)
def test_whatever_else_a_run_does_on_ranks(pool: Pool, changes: dict[str, Any]) -> None:
    case = Case("zb-h2-post", 2, 4, spans=SPANS, clip=0.5, **changes)
    assert_same(together([outcome for outcome, _ in pool.submit(train, case, ranks=2)]), wanted(case))


def test_the_losses_of_repeated_forwards_count() -> None:
    """All forwards of the last stage but one are drafts in GPipe, so a report made of drafts would be wrong."""
    case = Case("gpipe", 2, 4, rule="provisional", spans=(3,), clip=0.1)
    found, redone = train(None, case)
    assert redone == 2 * 2 * 3
    assert found.reports == expected(case).reports


# --- what a run does beside -----------------------------------------------------------------------------------------


def test_evaluations_and_snapshots_drain_the_pipeline_and_change_nothing() -> None:
    case = Case("zb-h2-post", 2, 4, spans=(6,), clip=0.5)
    held_out = make_batches(replace(case, spans=(2,)))
    pipeline, saved = make_pipeline(case), []
    save = Saving(2, lambda snapshot: saved.append((snapshot.batch, snapshot.stage, snapshot.tensors)))
    reports = list(pipeline.run(make_batches(case), save=save, evaluate=Evaluating(3, lambda: held_out)))
    assert [r.batch for r in reports] == list(range(6))
    plain = make_pipeline(replace(case, method="zb-h2"))
    again: list[tuple[int, int, dict[str, torch.Tensor]]] = []
    save = Saving(2, lambda snapshot: again.append((snapshot.batch, snapshot.stage, snapshot.tensors)))
    others = list(plain.run(make_batches(case), save=save, evaluate=Evaluating(3, lambda: held_out)))
    evaluated = [(e.version, e.total, e.weight) for r in reports for e in r.evaluated] + list(pipeline.evaluated())
    wanted_evaluations = [e for r in others for e in r.evaluated] + list(plain.evaluated())
    assert wanted_evaluations == evaluated
    assert [version for version, *_ in evaluated] == [3, 6]
    assert sorted(key[:2] for key in saved) == sorted(key[:2] for key in again)
    assert {batch for batch, *_ in saved} == {2, 4, 6}
    by_place = {(batch, c): tensors for batch, c, tensors in again}
    for batch, c, tensors in saved:
        assert_equal_tensors(tensors, by_place[batch, c], f"snapshot of stage {c} before batch {batch}")


def test_a_loop_that_is_left_early_is_drained() -> None:
    case = Case("zb-h2-post", 3, 5, spans=(6,), clip=0.5)
    pipeline = make_pipeline(case)
    for report in pipeline.run(make_batches(case)):
        if report.batch == 2:
            break
    done = pipeline.batches
    assert 3 <= done <= 5
    reference = expected(case, done)
    assert_equal_tensors(pipeline.state_dict(), reference.weights, "weights")


def test_averaged_weights_follow_what_was_decided() -> None:
    case = Case("zb-h2-post", 2, 4, spans=(4,), clip=0.5)
    averages = []
    for method in ("zb-h2-post", "zb-h2"):
        pipeline = make_pipeline(replace(case, method=method), ema_decay=0.5)
        list(pipeline.run(make_batches(case)))
        averages.append(pipeline.state_dict(averaged=True))
    assert_equal_tensors(averages[0], averages[1], "averaged weights")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_it_takes(precision: Any) -> None:
    """Apart: two versions, a gradient, and the optimizer's state twice; in place: one of each."""
    case = Case("zb-h2", 2, 4, spans=(4,), clip=0.5, precision=precision)
    peaks = {}
    for rule in ("provisional", "provisional-in-place", "flush"):
        pipeline = make_pipeline(replace(case, rule=rule))
        list(pipeline.run(make_batches(case)))
        peaks[rule] = pipeline.peak_bytes()[1]
    size = peaks["flush"]["gradients"]
    full, low = (size, size // 2) if precision == "bf16" else (0, size)
    assert peaks["provisional"]["gradients"] == peaks["provisional-in-place"]["gradients"] == size
    assert peaks["provisional"]["weights"] == 2 * peaks["flush"]["weights"]
    assert peaks["provisional-in-place"]["weights"] == peaks["flush"]["weights"] >= low
    assert peaks["provisional"].get("master weights", 0) == 2 * full
    assert 1.5 * size <= peaks["provisional"]["optimizer before"] <= 2 * size  # buffers are padded, moments are not
    assert not peaks["provisional-in-place"].get("optimizer before", 0)
    activations = {rule: peak["activations"] for rule, peak in peaks.items()}
    assert len(set(activations.values())) == 1


def test_no_activations_are_left_behind() -> None:
    case = Case("zb-h2-post", 3, 5, spans=SPANS, clip=0.5, model="restless", recompute="block")
    pipeline = make_pipeline(case)
    list(pipeline.run(make_batches(case)))
    gone = ("activations", "messages", "optimizer before")
    assert all(live.get(kind, 0) == 0 for live in pipeline.live_bytes().values() for kind in gone)


# --- undone in place ------------------------------------------------------------------------------------------------

UNDOABLE: dict[str, Any] = {
    "adamw": lambda named: torch.optim.AdamW(named, lr=0.01, weight_decay=0.1),
    "adam": lambda named: torch.optim.Adam(named, lr=0.01, weight_decay=0.1, maximize=True),
    "no moments": lambda named: torch.optim.AdamW(named, lr=0.01, betas=(0.0, 0.9)),
    "sgd": lambda named: torch.optim.SGD(named, lr=0.1, weight_decay=0.1),
    "momentum": lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "nesterov": lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
}
STEP_TOLERANCE = 1e-6  # of one step undone, of the largest element; that of docs/orders.md
RUN_TOLERANCE = 2e-5  # of twelve, and of what training makes of them


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("name", UNDOABLE)
def test_a_step_is_taken_back(name: str, steps: int) -> None:
    torch.manual_seed(1)
    parameter = torch.nn.Parameter(torch.randn(1000))
    optimizer = UNDOABLE[name]([("weight", parameter)])
    for _ in range(steps):
        before = parameter.detach().clone(), {k: v.clone() for k, v in optimizer.state[parameter].items()}
        parameter.grad = torch.randn(1000)
        optimizer.step()
    undo_step(optimizer, {parameter: parameter.grad}, first=steps == 1)
    assert parameter.grad is not None
    _assert_near(parameter.detach(), before[0], STEP_TOLERANCE)
    state = {k: v for k, v in optimizer.state[parameter].items() if (name, k) != ("no moments", "exp_avg")}
    assert state.keys() == before[1].keys() - ({"exp_avg"} if name == "no moments" else set())
    for key, value in state.items():
        _assert_near(value, before[1][key], STEP_TOLERANCE)


PAIRWISE = [  # each optimizer at each event; each of them in both precisions
    (name, event, ("fp32", "bf16")[(i + j) % 2])
    for i, name in enumerate(UNDOABLE)
    for j, event in enumerate(("clipped", "never clipped", "overflow"))
]


@pytest.mark.parametrize(("name", "event", "precision"), PAIRWISE)
def test_updates_undone_in_place_are_off_by_roundings(name: str, event: str, precision: Any) -> None:
    case = Case("zb-h2", 3, 5, spans=SPANS, precision=precision, **EVENTS[event][0])
    found = []
    for rule in ("provisional", "provisional-in-place"):
        pipeline = make_pipeline(replace(case, rule=rule), optimizer=UNDOABLE[name])
        for batch in make_batches(case):
            list(pipeline.run([batch, batch]))
        states = [o.state_dict()["state"] for o in pipeline.optimizers().values()]
        kept = {f"{i} {k} {n}": v for i, s in enumerate(states) for k, here in s.items() for n, v in here.items()}
        found.append({**pipeline.state_dict(), **kept})
    exact, inexact = found
    assert exact.keys() == inexact.keys()
    for key, value in exact.items():
        _assert_near(inexact[key], value, RUN_TOLERANCE if event != "never clipped" else 0.0)


def train_slowly(group: dist.ProcessGroup | None, case: Case) -> list[tuple[int, float]]:
    """The norms of a run in which it takes long to take them."""
    whole = TrainedWeights.gradient_squares

    def squares(self: TrainedWeights, batch: int) -> Squares:
        time.sleep(0.02)
        return whole(self, batch)

    TrainedWeights.gradient_squares = squares  # type: ignore[method-assign]
    try:
        outcome, _ = train(group, case)
    finally:
        TrainedWeights.gradient_squares = whole  # type: ignore[method-assign]
    return [(batch, norm) for batch, _, norm, _, _ in outcome.decided]


@pytest.mark.parametrize("changes", [{"tied": True}, {"width": 2}], ids=str)
def test_norms_are_taken_before_an_update_in_place(pool: Pool, changes: dict[str, Any]) -> None:
    case = Case("zb-h2", 2 if "tied" in changes else 1, 4, rule="provisional-in-place", clip=0.5, skips=(), **changes)
    found = pool.submit(train_slowly, case, ranks=2)
    wanted_norms = [(batch, norm) for batch, _, norm, _, _ in expected(case).decided]
    for norms in found:
        assert norms == [(batch, pytest.approx(norm, rel=1e-3)) for batch, norm in wanted_norms]


@pytest.mark.parametrize("k", [1, 10, 100])
@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_what_a_large_gradient_costs_when_it_is_taken_back(name: str, k: int) -> None:
    """The bounds of docs/orders.md."""
    torch.manual_seed(2)
    parameter = torch.nn.Parameter(torch.randn(1000))
    optimizer = UNDOABLE[name]([("weight", parameter)])
    for step in range(20):
        before = parameter.detach().clone(), {key: v.clone() for key, v in optimizer.state[parameter].items()}
        parameter.grad = torch.randn(1000) * (k if step == 19 else 1)
        optimizer.step()
    undo_step(optimizer, {parameter: parameter.grad}, first=False)
    bounds = {"exp_avg": 1e-6 + 1e-7 * k, "momentum_buffer": 1e-6 + 1e-7 * k, "exp_avg_sq": 1e-6 + 1e-7 * k**2}
    for key, value in before[1].items():
        _assert_near(optimizer.state[parameter][key], value, bounds.get(key, 0.0))
    _assert_near(parameter.detach(), before[0], STEP_TOLERANCE * (k if name == "momentum" else 1))


def steep_loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, float]:
    total, weight = token_loss(output, target)
    return 1e4 * total, weight


def test_a_spike_that_a_rank_sees_itself_is_not_even_tried() -> None:
    """So what the optimizer remembers does not suffer from it."""
    case = Case("zb-h2", 1, 4, spans=(6,), skips=(), clip=1.0)
    batches = make_batches(case)
    found = []
    for rule in ("flush", "provisional-in-place"):
        pipeline = make_pipeline(replace(case, rule=rule), loss=steep_loss)
        list(pipeline.run(batches))
        states = [o.state_dict()["state"] for o in pipeline.optimizers().values()]
        found.append([v["exp_avg_sq"] for s in states for v in s.values()])
    for a, b in zip(*found, strict=True):
        _assert_near(b, a, 1e-6)


def _assert_near(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    assert float((found - wanted).abs().max()) <= tolerance * max(float(wanted.abs().max()), 1e-30)


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rule", "changes", "message"),
    [
        ("zb-h2", "provisional-in-place", {"optimizer": "nadam"}, "steps of NAdam cannot be undone in place"),
        ("chimera", "provisional", {}, "needs the loss weight of the batch, which does not reach every stage"),
        ("bpipe", "provisional", {}, "no activations are moved away"),
    ],
)
def test_refused_before_anything_runs(name: str, rule: str, changes: dict[str, Any], message: str) -> None:
    case = Case(name, 4 if name == "bpipe" else 2, 4, rule=rule, **changes)
    with pytest.raises(CapabilityError, match=message):
        make_pipeline(case)


@pytest.mark.parametrize("rule", ["provisional", "provisional-in-place"])
def test_an_update_that_no_stage_alone_could_have_known_to_be_wrong(rule: str) -> None:
    """The norm of all stages is above `clip`, that of each below it: the update is made, taken back and made again."""
    free = Case("zb-h2", 2, 4, "gpt", spans=SPANS, clip=1e9)
    norms = [norm for _, _, norm, _, _ in expected(free).decided]
    case = replace(free, clip=0.98 * norms[0], rule=rule)
    steps: list[int] = []

    def counted(named: Any) -> torch.optim.Optimizer:
        optimizer = OPTIMIZERS["adamw"](named)
        optimizer.register_step_post_hook(lambda *_: steps.append(1))
        return optimizer

    pipeline = make_pipeline(case, optimizer=counted)
    reports = list(pipeline.run(make_batches(case)[:1]))
    assert len(reports) == 1
    assert [d.again for d in pipeline.decided()] == [True]
    assert len(steps) == 2 * 2
    reference = expected(replace(case, method="zb-h2"), 1)
    for name, weights in reference.weights.items():
        _assert_near(pipeline.state_dict()[name], weights, STEP_TOLERANCE if "place" in rule else 0.0)


def test_roundings_leave_no_negative_second_moment() -> None:
    """After a gradient ten thousand times the usual one nothing of what was before can be seen any more."""
    torch.manual_seed(2)
    parameter = torch.nn.Parameter(torch.randn(1000))
    optimizer = UNDOABLE["adamw"]([("weight", parameter)])
    for size in (1.0, 1e4):
        parameter.grad = torch.randn(1000) * size
        optimizer.step()
    undo_step(optimizer, {parameter: parameter.grad}, first=False)
    assert float(optimizer.state[parameter]["exp_avg_sq"].min()) == 0
