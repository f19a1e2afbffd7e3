"""Parallel pipelines with weights of their own: what they have after every meeting equals the equations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from penstock.runtime.execute.evaluation_without_draining import Evaluating
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.update.run_events import Evaluated
from penstock.schedule.methods.data_parallel_sync import COMBINES, Combine
from support.averaging_cases import FEW, KINDS, merged, trained
from support.cases import BALANCE, OPTIMIZERS, TIED, Case, make_batches, make_blocks, make_pipeline
from support.grouped import grouped
from support.meetings import (
    Reference,
    assert_close,
    even_batches,
    precise_blocks,
    precise_loss,
    states_of,
    uneven_batches,
)
from support.pool import Pool
from support.schedules import make_schedule


def reads_of(method: str, depth: int, m: int) -> Any:
    """(batch, microbatch, stage) -> version, from the papers."""
    if method == "2bw":
        return lambda t, _k, _s: max(t - 1, 0)
    if method == "stash":
        return lambda t, k, s: max(0, t * m + k - (depth - 1 - s)) // m
    return lambda t, _k, _s: t


def model_of(depth: int) -> str:
    return "long" if depth == 8 else "mixed"


def precise(method: str, depth: int, m: int, width: int, combine: Combine, **changes: Any) -> Pipeline:
    arguments: dict[str, Any] = {
        "loss": precise_loss,
        "optimizer": OPTIMIZERS["adamw"],
        "divisor": 7.0,
        "width": width,
        "combine": combine,
    }
    schedule = make_schedule(method, depth, m)
    return Pipeline(
        precise_blocks(model_of(depth)),
        schedule,
        partition=BALANCE[schedule.num_stages],
        **grouped(arguments | changes),
    )


CHOICES = [
    ("1f1b", 1, 2, 2, Combine("average", every=3)),
    ("1f1b", 2, 2, 3, Combine("average", every=2, optimizer_state="average")),
    ("2bw", 2, 2, 2, Combine("average", every=4, optimizer_state="reset")),
    ("stash", 2, 2, 2, Combine("average", every=3)),
    ("interleaved", 1, 2, 2, Combine("average", every=1)),
    ("1f1b", 1, 2, 3, Combine("bmuf", every=3)),
    ("2bw", 2, 2, 2, Combine("bmuf", every=2, momentum=0.7, step=0.8, optimizer_state="reset")),
    ("1f1b", 2, 2, 2, Combine("bmuf", every=4, nesterov=True)),
    ("2bw", 1, 2, 2, Combine("bmuf", every=1, nesterov=True, optimizer_state="average")),
    ("1f1b", 2, 2, 3, Combine("elastic", every=2)),
    ("2bw", 2, 2, 2, Combine("elastic", every=3, pull=0.3, optimizer_state="average")),
    ("stash", 2, 2, 2, Combine("elastic", every=1)),
    ("2bw", 4, 4, 2, Combine("average", every=3)),
    ("1f1b", 4, 2, 2, Combine("bmuf", every=3)),
    ("stash", 4, 2, 2, Combine("elastic", every=4)),
    ("stash", 8, 2, 2, Combine("average", every=2)),
    ("2bw", 8, 8, 2, Combine("bmuf", every=4, nesterov=True)),
    ("1f1b", 8, 2, 2, Combine("elastic", every=3)),
]


@pytest.mark.parametrize(("method", "depth", "m", "width", "combine"), CHOICES)
def test_twenty_updates_of_averaging_pipelines(method: str, depth: int, m: int, width: int, combine: Combine) -> None:
    """Weights and optimizer state of every pipeline, where they have loss weights, norms and skips of their own."""
    factory = OPTIMIZERS["sgd" if combine.kind == "bmuf" else "adamw"]
    batches = uneven_batches(20, m, width, nothing=[(0, 0), (5, width - 1)])
    clip = 1.5 / m**0.5  # norms are means over m microbatches
    pipeline = precise(method, depth, m, width, combine, max_grad_norm=clip, optimizer=factory)
    norms = [d.norm for report in pipeline.run(batches) for d in report.decided]
    assert min(norms[1:]) < clip < max(norms[1:])  # some are clipped
    wanted = Reference(combine, width, m, depth, factory, reads_of(method, depth, m), clip=clip, model=model_of(depth))
    for t, batch in enumerate(batches):
        wanted.train(t, batch)
    assert_close(states_of(pipeline), wanted.states(), 1e-9)


def test_two_directions_and_meetings() -> None:
    """The copies of a stage add their gradients in every batch, within their pipeline."""
    combine, batches = Combine("average", every=2), uneven_batches(5, 4, 2)
    pipeline = precise("chimera", 2, 4, 2, combine)
    list(pipeline.run(batches))
    wanted = Reference(combine, 2, 4, 2, OPTIMIZERS["adamw"], lambda t, _k, _s: t, clip=None)
    for t, batch in enumerate(batches):
        wanted.train(t, batch)
    assert_close(states_of(pipeline), wanted.states(), 1e-9)


def test_stages_without_weights_meet_the_others() -> None:
    """One block per stage, of which one has no parameters; three pipelines."""
    combine, batches = Combine("elastic", every=2), uneven_batches(4, 2, 3)
    pipeline = precise("1f1b", 6, 2, 3, combine)
    list(pipeline.run(batches))
    wanted = Reference(combine, 3, 2, 6, OPTIMIZERS["adamw"], lambda t, _k, _s: t, clip=None)
    for t, batch in enumerate(batches):
        wanted.train(t, batch)
    assert_close(states_of(pipeline), wanted.states(), 1e-9)


def test_averaging_after_every_batch_is_adding_gradients() -> None:
    """With plain SGD and equal loss weights the mean of the updates is the update of the mean."""

    def sgd(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(named, lr=0.1)

    batches = even_batches(8, 6)
    found, wanted = (precise("1f1b", 2, 2, 3, c, optimizer=sgd) for c in (Combine("average"), Combine()))
    for pipeline in (found, wanted):
        list(pipeline.run(batches))
    for name, weight in wanted.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("spans", [(7,), (1, 1, 5), (3, 4)])
def test_meetings_count_from_the_start_of_training(spans: tuple[int, ...]) -> None:
    """Not from the start of a run; with a flush, where a run was divided does not matter."""
    case, combine = Case("1f1b", 2, 2, width=2, spans=(7,), skips=()), Combine("elastic", every=3)
    pipeline, batches = make_pipeline(case, combine=combine), make_batches(case)
    for span in spans:
        list(pipeline.run(batches[pipeline.batches : pipeline.batches + span]))
    whole = make_pipeline(case, combine=combine)
    list(whole.run(batches))
    assert_close(states_of(pipeline), states_of(whole), 0.0)


@pytest.mark.parametrize(("method", "combine"), [*zip(["2bw", "stash", "1f1b"], FEW, strict=True)])
def test_processes_have_the_bits_of_one(pool: Pool, method: str, combine: Combine) -> None:
    """Each version rule and each way to combine once; in one process the equations are compared for many pairs."""
    case = Case(method, 2, 2, "restless", width=2, spans=(7,), skips=(3,), clip=0.4)
    wanted, decided = trained(None, case, combine)
    parts = pool.submit(trained, case, combine, ranks=4)
    assert_close(merged([part for part, _ in parts]), wanted, 0.0)
    assert repr(parts[0][1]) == repr(parts[1][1]) == repr(decided)  # of the first pipeline
    assert repr(parts[2][1]) == repr(parts[3][1]) != repr(decided)  # another norm and another loss


def test_four_pipelines_in_processes(pool: Pool) -> None:
    case, combine = Case("1f1b", 1, 2, width=4, spans=(5,), skips=()), Combine("bmuf", every=2)
    wanted, _ = trained(None, case, combine)
    assert_close(merged([part for part, _ in pool.submit(trained, case, combine, ranks=4)]), wanted, 0.0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_tied_parameters_and_recompute(pool: Pool, precision: Any) -> None:
    """Copies of one parameter stay equal on all stages."""
    case = Case("2bw", 2, 3, "faint", width=2, spans=(6,), skips=(), tied=True, recompute="stage", precision=precision)
    combine = Combine("elastic", every=2, optimizer_state="average")
    wanted, _ = trained(None, case, combine)
    for name, owner in TIED["faint"].items():
        for state in wanted.values():
            assert torch.equal(state.weights[name], state.weights[owner])
            assert torch.equal(state.model[name], state.model[owner])
    assert not torch.equal(wanted[0].weights["head.weight"], wanted[1].weights["head.weight"])
    assert_close(merged([part for part, _ in pool.submit(trained, case, combine, ranks=4)]), wanted, 0.0)


def test_what_passes_read_in_low_precision_is_the_mean() -> None:
    case = Case("1f1b", 2, 2, width=2, spans=(4,), skips=(), precision="bf16")
    pipeline = make_pipeline(case, combine=Combine("average", every=4))
    list(pipeline.run(make_batches(case)))
    for stage in (stage for rank in pipeline._ranks for stage in rank.stages.values()):
        for name, view in stage.weights.store.versions[4].views.items():
            assert torch.equal(view, stage.weights.store.master.views[name].bfloat16())
    first, second = states_of(pipeline).values()
    assert all(torch.equal(w, second.weights[name]) for name, w in first.weights.items())


def stops(group: dist.ProcessGroup, case: Case, combine: Combine, who: int) -> int:
    pipeline = make_pipeline(case, group, combine=combine)
    for report in pipeline.run(make_batches(case)):
        if report.batch == 3 and dist.get_rank(group) == who:
            pipeline.stop()
    return pipeline.batches


@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_any_rank_may_stop_averaging_pipelines(pool: Pool, method: str) -> None:
    """It ends after the same batch everywhere: that which had been announced when pipelines met next."""
    case, combine = Case(method, 2, 2, width=2, spans=(40,), skips=()), Combine("average", every=4)
    for who in (0, 3):
        ends = set(pool.submit(stops, case, combine, who, ranks=4))
        assert len(ends) == 1
        assert 4 <= ends.pop() <= 12


# --- evaluation -------------------------------------------------------------------------------------------------------


def evaluations(
    group: dist.ProcessGroup | None, case: Case, combine: Combine, every: int
) -> tuple[tuple[Evaluated, ...], Any]:
    pipeline, batches = make_pipeline(case, group, combine=combine), make_batches(case)
    list(pipeline.run(batches, evaluate=Evaluating(every, lambda: batches[:2])))
    return pipeline.evaluations, pipeline.evaluate(batches[:2])


@pytest.mark.long
@pytest.mark.parametrize("method", ["1f1b", "2bw"])
@pytest.mark.parametrize("combine", FEW, ids=lambda c: c.kind)
def test_evaluations_are_of_what_pipelines_agree_on(pool: Pool, method: str, combine: Combine) -> None:
    case = Case(method, 2, 2, width=2, spans=(13,), skips=())
    every = 2 * combine.every
    found, end = evaluations(None, case, combine, every)
    assert [evaluation.version for evaluation in found] == [v for v in (4, 6, 8, 12) if v % every == 0]
    for version, total, weight in found:
        pipeline = make_pipeline(case, combine=combine)
        list(pipeline.run(make_batches(case)[:version]))
        loss, counted = pipeline.evaluate(make_batches(case)[:2]) or (0.0, 0.0)
        assert (total / weight, weight) == pytest.approx((loss, counted), rel=1e-6)
        alone = replace(case, width=1, m=4)  # one pipeline with these weights finds the same
        model = {name: w.clone() for name, w in pipeline.state_dict().items()}
        assert loss == pytest.approx(loss_of(alone, model), rel=1e-5)
    assert pool.submit(evaluations, case, combine, every, ranks=4) == [(found, end)] * 4


def loss_of(case: Case, weights: dict[str, torch.Tensor]) -> float:
    blocks = make_blocks(case.model)
    for name, block in blocks.items():
        if isinstance(block, torch.nn.Module):
            block.load_state_dict(
                {key.removeprefix(f"{name}."): w for key, w in weights.items() if key.startswith(f"{name}.")}
            )
    found = make_pipeline(case, blocks=blocks).evaluate(make_batches(replace(case, width=1, m=4))[:2])
    assert found is not None
    return found[0]


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_is_counted(kind: str) -> None:
    case = Case("1f1b", 2, 2, width=2, spans=(4,), skips=())
    pipeline = make_pipeline(case, combine=Combine(kind, every=2))
    list(pipeline.run(make_batches(case)))
    for rank in pipeline._ranks:
        (stage,) = rank.stages.values()
        whole, rank = stage.weights.store.layout.nbytes, rank.recorder.rank
        live, peak = pipeline.live_bytes()[rank], pipeline.peak_bytes()[rank]
        kept = [live.get(role, 0) for role in ("common model", "block momentum", "weights before the wave")]
        assert sum(kept) == whole * COMBINES[kind].buffers
        assert live.get("sums over pipelines", 0) == 0
        assert peak.get("sums over pipelines", 0) == whole * COMBINES[kind].passing
        assert live.get("waves", 0) == 0
        assert peak.get("waves", 0) == whole * COMBINES[kind].per_wave * 2
