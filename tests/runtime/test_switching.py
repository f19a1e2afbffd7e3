"""One run under several methods, one after the other: the numbers, the memory, snapshots and evaluations."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.runtime.execute.evaluation_without_draining import Evaluating
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.update.run_events import Evaluated
from penstock.stage.trained_stage_weights import TrainedWeights
from penstock.verify.reference import run
from penstock.weights.memory.buffers import Buffer
from support import cases
from support.cases import (
    Case,
    Outcome,
    assert_same,
    expected,
    make_batches,
    make_blocks,
    make_pipeline,
    together,
    token_loss,
)
from support.own_methods import correction_of
from support.phases import RESTLESS, Phases, case_of, expected_of, run_on, schedule, train_phases
from support.pool import Pool
from support.snapshots import Kept

THERE_AND_BACK = [("1f1b", 3), ("2bw", 4), ("gpipe", 2), ("stash", 3), ("2bw", 2), ("1f1b", 1)]
RUNS: list[tuple[Phases, Case]] = [
    (phases, case_of(phases, depth, m, **more))
    for phases, depth, m, more in (
        (THERE_AND_BACK, 1, 2, {"optimizer": "nadam"}),
        (THERE_AND_BACK, 3, 4, {"model": "restless", "clip": 0.6, "skips": (4,)}),
        ([("1f1b", 2), ("stash", 4), ("vertical-sync", 3), ("2bw", 3)], 4, 3, {"optimizer": "sgd"}),
        (
            [("2bw", 3), ("2bw-eager", 3), ("1f1b", 2), ("2bw-eager", 2)],
            3,
            4,
            {"optimizer": "muon", "model": "matrices"},
        ),
        ([("1f1b", 3), ("2bw", 3), ("1f1b", 3)], 2, 2, {"model": "half", "optimizer": "sgd", "scaling": RESTLESS}),
        ([("2bw", 3), ("1f1b", 2), ("stash", 3)], 2, 3, {"precision": "bf16", "clip": 0.6}),
        ([("1f1b", 2), ("2bw", 3), ("gpipe", 2)], 3, 3, {"model": "faint", "tied": True, "clip": 0.6}),
        (
            [("2bw", 2), ("1f1b", 2), ("2bw", 2)],
            3,
            2,
            {"recompute": "stage", "spikes": (1,), "loss": "spiky", "clip": 0.6},
        ),
        ([("1f1b", 2), ("2bw", 3), ("gpipe", 2), ("2bw", 2)], 2, 3, {"width": 2, "optimizer": "sgd"}),
        ([("zb-h1", 2), ("1f1b", 2), ("zb-h2-post", 3), ("2bw", 2)], 2, 4, {"model": "restless"}),
        ([("2bw", 2), ("3bw", 3), ("2bw", 1), ("3bw", 1), ("1f1b", 1), ("3bw", 3)], 3, 2, {"clip": 0.6}),
    )
]


def name_of(which: tuple[Phases, Case]) -> str:
    return f"{'-'.join(method for method, _ in which[0])}-{which[1].depth}-{which[1].model}-{which[1].precision}"


@pytest.mark.parametrize("which", RUNS, ids=name_of)
def test_switching_in_one_process(which: tuple[Phases, Case], monkeypatch: pytest.MonkeyPatch) -> None:
    phases, case = which
    assert_same(train_phases(None, case, phases), expected_of(case, phases, monkeypatch))


@pytest.mark.parametrize("which", [RUNS[1], RUNS[4], RUNS[7]], ids=name_of)
def test_switching_on_ranks(which: tuple[Phases, Case], monkeypatch: pytest.MonkeyPatch, pool: Pool) -> None:
    phases, case = which
    outcomes = pool.submit(train_phases, case, phases, ranks=case.depth)
    assert_same(together(outcomes), expected_of(case, phases, monkeypatch))


@pytest.mark.parametrize(
    ("phases", "optimizer"),
    [
        ([("1f1b", 3), ("pipemare", 5), ("gpipe", 2), ("pipemare", 3)], "adamw"),
        ([("1f1b", 2), ("spectrain", 3), ("2bw", 3), ("pipeoptim", 3)], "sgd"),
    ],
)
def test_corrections_come_and_go_with_their_methods(
    phases: Phases, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(phases, 3, 2, optimizer=optimizer, clip=0.6)
    found, wanted = train_phases(None, case, phases), expected_of(case, phases, monkeypatch)
    assert_same(found, wanted)
    uncorrected = expected_of(case, [("1f1b", phases[0][1]), ("newest", 11)], monkeypatch).weights
    assert not all(torch.allclose(found.weights[name], w, rtol=0, atol=1e-4) for name, w in uncorrected.items())


DELAYS = {"1f1b": (0, None), "2bw": (1, None), "3bw": (2, None), "2bw-ahead": (1, 1), "3bw-ahead": (2, 2)}
"""Of a method the delay, and how many steps of SGD its passes read ahead; None where they read weights."""
CHANGES = [
    ("2bw", "3bw"), ("3bw", "2bw"), ("2bw", "2bw-ahead"), ("3bw-ahead", "2bw-ahead"), ("2bw-ahead", "3bw-ahead"),
    ("2bw-ahead", "2bw"), ("3bw", "3bw-ahead"), ("3bw-ahead", "3bw-ahead"), ("2bw-ahead", "1f1b"),
    ("1f1b", "3bw-ahead"),
]  # fmt: skip


def by_a_plain_loop(blocks: list[nn.Module], batches: Any, phases: Phases, rate: float) -> list[Tensor]:
    """Batch t reads version t - k, or W - h * step where that is predicted; what of before is another thing is gone."""
    model = nn.Sequential(*blocks)
    weights = [p.detach().clone() for p in model.parameters()]
    read, first, ahead_before, t = {0: weights}, 0, None, 0
    for method, count in phases:
        delay, ahead = DELAYS[method]
        if t and ahead != ahead_before:
            read, first = {t: weights}, t
        for x, y in batches[t : t + count]:
            version = max(t - delay, first, min(read))
            torch.nn.utils.vector_to_parameters(torch.cat([w.flatten() for w in read[version]]), model.parameters())
            model.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            steps = [rate * p.grad for p in model.parameters() if p.grad is not None]
            weights = [w - step for w, step in zip(weights, steps, strict=True)]
            t += 1
            read[t] = [w - (ahead or 0) * step for w, step in zip(weights, steps, strict=True)]
        read = {version: found for version, found in read.items() if version >= t - delay}
        ahead_before = ahead
    return weights


@pytest.mark.parametrize("way", ["switch", "load"])
@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_older_versions_are_taken_over_where_they_are_the_same_thing(before: str, after: str, way: str) -> None:
    """Else all passes begin with the newest weights, after a switch and after a checkpoint was loaded alike."""
    generator = torch.Generator().manual_seed(2)
    batches = [(torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)) for _ in range(8)]

    def blocks() -> list[nn.Module]:
        torch.manual_seed(1)
        return [nn.Sequential(nn.Linear(4, 6), nn.Tanh()), nn.Linear(6, 2)]

    def make(method: str) -> Pipeline:
        loss, sgd = nn.functional.mse_loss, lambda named: torch.optim.SGD(named, lr=0.2)
        return Pipeline(blocks(), method, stages=2, microbatches=2, loss=loss, optimizer=sgd)

    made = make(before)
    list(made.run(batches[:3]))
    other = made
    if way == "switch":
        other.switch(after)
    else:
        other = make(after)
        other.load(Kept(made.snapshots()))
    list(other.run(batches[3:]))
    wanted = by_a_plain_loop(blocks(), batches, [(before, 3), (after, 5)], 0.2)
    for found, want in zip(other.full_state_dict().values(), wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-6)


def test_the_rates_of_a_correction_begin_where_it_does() -> None:
    """T1 of the first of four stages, three updates behind: a third of the rate at its own first update."""
    case = case_of([("1f1b", 5)], 4, 1, optimizer="sgd", rate=False)
    pipeline = make_pipeline(case)
    batches = make_batches(case)
    list(pipeline.run(batches[:3]))
    pipeline.switch(schedule(case, "pipemare"), correction=correction_of("pipemare", reschedule=4))
    list(pipeline.run(batches[3:4]))
    rates = [optimizer.param_groups[0]["lr"] for optimizer in pipeline.optimizers().values()]
    assert rates[0] == pytest.approx(0.1 / 3)
    list(pipeline.run(batches[4:5]))
    rates = [optimizer.param_groups[0]["lr"] for optimizer in pipeline.optimizers().values()]
    assert rates[0] == pytest.approx(0.1 / 3**0.75)


def test_a_correction_gives_back_what_it_took() -> None:
    """Buffers of its own, copies, scratch, and settings of the optimizer that it has changed."""
    case = case_of([("stash", 2)], 3, 3, optimizer="nadam")
    pipeline = make_pipeline(case)
    stages = [stage for stage in pipeline.stages.values() if isinstance(stage.weights, TrainedWeights)]

    def held() -> list[Any]:
        return [
            (n.weights.bytes_by_role(), n.weights.updater.nbytes, n.weights.updater.optimizer.param_groups[0]["betas"])
            for n in stages
        ]

    pipeline.switch(schedule(case, "1f1b"))
    plain = held()
    for method in ("pipemare", "nag-pp-no-stash", "lwp-weights"):
        options = {} if method == "lwp-weights" else {"reschedule": 4}
        pipeline.switch(schedule(case, method), correction=correction_of(method, **options))
        assert held() != plain
        pipeline.switch(schedule(case, "1f1b"))
        assert held() == plain


def test_the_reference_notices_a_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the tests above mean something."""
    phases = [("1f1b", 3), ("2bw", 4)]
    case = case_of(phases, 2, 2)
    head = "head.weight"
    whole = [expected(replace(case, method=method)).weights[head] for method in ("1f1b", "2bw")]
    found = expected_of(case, phases, monkeypatch).weights[head]
    assert not any(found.equal(weights) for weights in whole)


# --- memory ---------------------------------------------------------------------------------------------------------


def test_buffers_are_as_many_as_the_method_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freed means freed: nobody keeps a buffer alive that is not counted."""
    made: list[weakref.ref[Buffer]] = []
    init = Buffer.__init__

    def note(self: Buffer, *arguments: Any) -> None:
        init(self, *arguments)
        made.append(weakref.ref(self))

    monkeypatch.setattr(Buffer, "__init__", note)
    phases = [("1f1b", 2), ("2bw", 3), ("1f1b", 2), ("stash", 4), ("gpipe", 1)]
    case = case_of(phases, 3, 2, spikes=(4,), loss="spiky", clip=1.0)
    pipeline, batches = make_pipeline(case), make_batches(case)
    for (method, _), (first, end) in zip(phases, pairwise((0, *accumulate(case.spans))), strict=True):
        if first:
            pipeline.switch(schedule(case, method))
        list(pipeline.run(batches[first:end]))
        wanted = sum(
            pipeline.proof.stages[place].buffers
            for place, n in pipeline.stages.items()
            if isinstance(n.weights, TrainedWeights)
        )
        gc.collect()
        alive = [buffer for known in made if (buffer := known()) is not None]
        assert len(alive) == wanted, method
        storages = {
            s
            for stage in pipeline.stages.values()
            if isinstance(stage.weights, TrainedWeights)
            for s in stage.weights.store.storages
        }
        assert storages == {s for buffer in alive for s in buffer.storages}
        counted = {"weights", "gradients", "idle buffers"}
        live = sum(n for kinds in pipeline.live_bytes().values() for kind, n in kinds.items() if kind in counted)
        assert live == sum(buffer.nbytes for buffer in alive), method
        del alive
        for stage in pipeline.stages.values():  # what the optimizer steps is what passes read
            if isinstance(stage.weights, TrainedWeights):
                for name, parameter in stage.weights.updater.parameters.items():
                    assert parameter.data_ptr() in {
                        b.views[name].data_ptr() for b in stage.weights.store.versions.values()
                    }


def test_the_memory_of_buffers_is_freed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their flat tensors: a view of one, in an optimizer or a leaf, would keep it."""
    flats: list[weakref.ref[Any]] = []
    init = Buffer.__init__

    def note(self: Buffer, *arguments: Any) -> None:
        init(self, *arguments)
        flats.extend(weakref.ref(flat.untyped_storage()) for flat in self.flats)

    case = case_of([("2bw", 3)], 2, 2, spikes=(2,), loss="spiky", clip=1.0)
    monkeypatch.setattr(Buffer, "__init__", note)
    pipeline, batches = make_pipeline(case), make_batches(case)
    list(pipeline.run(batches))
    assert sum(known() is not None for known in flats) == 6
    pipeline.switch(schedule(case, "1f1b"))
    gc.collect()
    assert sum(known() is not None for known in flats) == 4


def test_the_scratch_of_rotating_updates_goes_and_comes() -> None:
    case = case_of([("2bw", 2)], 2, 2)
    pipeline = make_pipeline(case)
    updaters = [
        stage.weights.updater for stage in pipeline.stages.values() if isinstance(stage.weights, TrainedWeights)
    ]
    rotating = [updater.nbytes for updater in updaters]
    assert all(rotating)
    pipeline.switch(schedule(case, "1f1b"))
    assert [updater.nbytes for updater in updaters] == [0, 0]
    pipeline.switch(schedule(case, "2bw"))
    assert [updater.nbytes for updater in updaters] == rotating


# --- snapshots ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [2, 4])
def test_a_run_goes_on_from_a_snapshot_before_or_at_a_switch(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    phases = [("2bw", 4), ("1f1b", 3)]
    case = case_of(phases, 2, 3, model="restless", clip=0.6)
    batches, first = make_batches(case), make_pipeline(case)
    list(first.run(batches[:at]))
    second, outcome = make_pipeline(case), Outcome()
    second.load(Kept(first.snapshots()))
    run_on(second, case, outcome, batches[at:4])
    second.switch(schedule(case, "1f1b"))
    run_on(second, case, outcome, batches[4:])
    wanted = expected_of(case, phases, monkeypatch)
    assert outcome.reports == wanted.reports[at:]
    assert all(w.equal(wanted.weights[name]) for name, w in second.state_dict().items())


# --- evaluations ----------------------------------------------------------------------------------------------------


def evaluated_by_hand(case: Case, weights: dict[str, Tensor]) -> tuple[float, float]:
    """Loss sum and weight on the first two batches."""
    blocks, total, weight = make_blocks(case.model), 0.0, 0.0
    for name, block in blocks.items():
        if isinstance(block, nn.Module):
            own = {key: weights[f"{name}.{key}"] for key, _ in block.named_parameters()}
            block.load_state_dict(own)
            block.eval()
    for batch in make_batches(case)[:2]:
        for x, target in batch:
            for block in blocks.values():
                x = block(x)
            loss, count = token_loss(x, target)
            total, weight = total + float(loss.detach()), weight + count
    return total, weight


def train_and_evaluate(group: dist.ProcessGroup | None, case: Case, phases: Phases) -> list[tuple[int, float, float]]:
    pipeline, batches = make_pipeline(case, group), make_batches(case)
    plan = Evaluating(1, lambda: batches[:2])
    found: list[Evaluated] = []
    for (method, _), (first, end) in zip(phases, pairwise((0, *accumulate(case.spans))), strict=True):
        if first:
            pipeline.switch(schedule(case, method))
        for report in pipeline.run(batches[first:end], evaluate=plan):
            found += report.evaluated
        found += pipeline.evaluated()
    assert list(pipeline.evaluations) == found
    return [tuple(evaluated) for evaluated in found]


AROUND = [
    *(("1f1b", 2), ("2bw", 2), ("stash", 2), ("1f1b", 2), ("stash", 1), ("2bw", 3), ("2bw-eager", 3), ("gpipe", 2)),
    *(("3bw", 3), ("2bw", 2), ("3bw", 1), ("1f1b", 1), ("3bw", 1)),
]


@pytest.mark.long
def test_no_version_is_left_out_or_evaluated_twice(monkeypatch: pytest.MonkeyPatch, pool: Pool) -> None:
    """Each rule has its own border for the evaluation of a version: a batch later, or with the pipeline drained."""
    phases = [*AROUND, ("1f1b", 1)]
    drained = [
        part for method, count in phases for part in ([(method, 1)] * count if method == "stash" else [(method, count)])
    ]
    case, drains = case_of(phases, 2, 3, clip=1.0), case_of(drained, 2, 3, clip=1.0)
    found = train_and_evaluate(None, case, phases)
    with monkeypatch.context() as patch:
        versions: list[dict[str, Tensor]] = []
        real = run.train_reference

        def train(*arguments: Any, **more: Any) -> Any:
            result = real(*arguments, **more)
            versions.extend(result.versions)
            return result

        patch.setattr(cases, "train_reference", train)
        expected_of(drains, drained, patch)
    assert [v for v, _, _ in found] == list(range(1, sum(case.spans) + 1))
    for v, total, weight in found:
        wanted = evaluated_by_hand(case, versions[v])
        assert (total, weight) == (pytest.approx(wanted[0], rel=1e-5), wanted[1]), v
    assert pool.submit(train_and_evaluate, case, phases, ranks=2) == [found, found]
