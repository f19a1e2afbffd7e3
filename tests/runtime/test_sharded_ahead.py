"""2BW that reads ahead on sharded state: predictions are gathered, the weights that are stepped stay rows."""

from __future__ import annotations

import gc
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from penstock import method
from penstock.errors import CapabilityError, ConfigError, VersionError
from penstock.options.parallelism import DataParallel
from penstock.runtime.execute.evaluation_without_draining import Evaluating
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.rank.snapshot import Saving, Snapshot
from penstock.verify.reference import Scaling
from support.cases import (
    Case,
    Outcome,
    add_decisions,
    assert_equal_tensors,
    expected,
    make_batches,
    make_blocks,
    make_pipeline,
    run_spans,
)
from support.correction_cases import KINDS, case_of
from support.pool import Pool
from support.schedules import prove
from support.sharded import Scaled, assert_as_whole, joined, parts_of_state, storages_of, train_sharded
from support.snapshots import Kept
from support.state_bytes import state_bytes

CLIP = 0.4  # of most batches
MOTION, MUON, WEIGHED = "2bw-ahead by motion", "2bw-ahead of Muon", "2bw-ahead, a and b"
LEVELS = ["optimizer", "gradients"]


def ahead(kind: str, optimizer: str, width: int, **changes: Any) -> tuple[str, Case]:
    """Twenty updates, drained in between, of which one batch has no token that counts."""
    given = {"spans": (12, 8), "clip": CLIP} | changes
    return kind, case_of(kind, 2, 2, optimizer=optimizer, width=width, **given)


CASES = [
    ahead("2bw-ahead", "adamw", 2),
    ahead("2bw-ahead", "adamw", 3, precision="bf16"),
    ahead("2bw-ahead", "sgd", 3),
    ahead("2bw-ahead", "nadam", 2, precision="bf16"),
    ahead("2bw-ahead", "configured adan", 2),
    ahead(MUON, "configured muon", 3),
    ahead(MUON, "configured muon", 2, precision="bf16"),
    ahead(MOTION, "adamw", 3),
    ahead(MOTION, "adafactor", 2, precision="bf16"),
    ahead(MOTION, "configured soap", 2),
    ahead(WEIGHED, "adamw", 2, precision="bf16"),
    ahead("2bw-ahead", "adamw", 2, model="faint", tied=True, clip=0.7, recompute="stage"),
    ahead("2bw-ahead", "adamw", 3, model="faint", tied=True, clip=0.7, precision="bf16", recompute="block"),
    ahead(MOTION, "undecayed", 2, spans=(9,), clip=None, precision="fp16", scaling=Scaling(2.0**10, 2.0, 0.5, 2)),
]


@cache
def said(kind: str, case: Case) -> Outcome:
    """What the reference says, which is the same at every level."""
    return expected(case, options=KINDS[kind].options)


def whole(case: Case, **changes: Any) -> Outcome:
    """What a run of the same width says without sharding."""
    pipeline = make_pipeline(case, **changes)
    outcome = run_spans(pipeline, case)
    outcome.weights = pipeline.state_dict()
    outcome.state = joined([{name: states[:1] for name, states in parts_of_state(pipeline).items()}])
    return outcome


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("kind", "case"), CASES, ids=[f"{c.width}-{c.model}-{c.optimizer}-{c.precision}-{k[10:]}" for k, c in CASES]
)
def test_a_run_that_reads_ahead_has_the_numbers_of_the_reference(kind: str, case: Case, level: str) -> None:
    wanted = said(kind, case)
    assert case.clip is None or sum(norm > case.clip for _, _, norm, *_ in wanted.decided) >= len(wanted.decided) / 2
    outcome, parts, _ = train_sharded(None, case, level)
    assert_as_whole(outcome, [parts], wanted)


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.long), "bf16"])
@pytest.mark.parametrize("level", LEVELS)
def test_frozen_parameters_and_some_of_which_a_pipeline_has_no_row(level: str, precision: str) -> None:
    def blocks() -> dict[str, Any]:
        torch.manual_seed(5)
        return make_blocks("mixed") | {"tanh": Scaled(), "norm": nn.LayerNorm(8).requires_grad_(False)}

    _, case = ahead("2bw-ahead", "adamw", 3, precision=precision)
    wanted = whole(case, blocks=blocks())
    assert sum(norm > CLIP for _, _, norm, *_ in wanted.decided) >= len(wanted.decided) / 2
    outcome, parts, _ = train_sharded(None, case, level, blocks=blocks())
    assert_as_whole(outcome, [parts], wanted)


def on_rank(group: dist.ProcessGroup, case: Case, level: str) -> Any:
    return train_sharded(group, case, level)


@pytest.mark.parametrize(
    ("kind", "case", "level"),
    [
        (*ahead("2bw-ahead", "adamw", 2), "gradients"),
        (*ahead(MUON, "configured muon", 2, precision="bf16"), "optimizer"),
        ("2bw-ahead by motion", replace(ahead(MOTION, "adamw", 3)[1], depth=1), "gradients"),
    ],
    ids=["w=2", "Muon in bf16", "w=3 by motion"],
)
def test_processes_that_read_ahead_have_the_same_numbers(pool: Pool, kind: str, case: Case, level: str) -> None:
    results = pool.submit(on_rank, case, level, ranks=case.depth * case.width)
    outcomes, parts, _ = zip(*results, strict=True)
    found = Outcome(decided=outcomes[0].decided)
    for place, outcome in enumerate(outcomes):
        assert repr(outcome.decided) == repr(found.decided)
        for name, weight in outcome.weights.items():
            assert torch.equal(found.weights.setdefault(name, weight), weight), (place, name)
    assert_as_whole(found, parts, said(kind, case))


# --- saved states -----------------------------------------------------------------------------------------------------


def saved_by(case: Case, level: str, batch: int) -> Kept:
    """The snapshots that a run takes on the way."""
    found: list[Snapshot] = []
    for _ in make_pipeline(case, sharding=level).run(make_batches(case), save=Saving(batch, found.append)):
        pass
    return Kept([snapshot for snapshot in found if snapshot.batch == batch])


def go_on(case: Case, level: str, kept: Kept, at: int) -> tuple[Pipeline, Outcome]:
    """Resume with other blocks; the decisions from there on."""
    pipeline, outcome = make_pipeline(case, sharding=level, blocks=make_blocks(case.model, seed=99)), Outcome()
    pipeline.load(kept)
    for report in pipeline.run(make_batches(case)[at:]):
        add_decisions(outcome, case, report.decided)
    add_decisions(outcome, case, pipeline.decided())
    outcome.weights = pipeline.state_dict()
    return pipeline, outcome


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("kind", "optimizer", "before", "after"),
    [
        ("2bw-ahead", "adamw", "gradients", "none"),
        ("2bw-ahead", "adamw", "none", "optimizer"),
        (MUON, "configured muon", "optimizer", "gradients"),
        (MOTION, "adamw", "gradients", "gradients"),
    ],
)
def test_predictions_go_on_under_another_sharding(
    kind: str, optimizer: str, before: str, after: str, precision: str
) -> None:
    _, case = ahead(kind, optimizer, 2, spans=(7,), skips=(), precision=precision)
    wanted = said(kind, case)
    pipeline, outcome = go_on(case, after, saved_by(case, before, 4), 4)
    outcome.decided = [*wanted.decided[:4], *outcome.decided]
    if after != "none":
        assert_as_whole(outcome, [parts_of_state(pipeline)], wanted)
    assert repr(outcome.decided) == repr(wanted.decided)
    assert_equal_tensors({n: outcome.weights[n] for n in wanted.weights}, wanted.weights, "weights")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["2bw-ahead", MOTION])
def test_any_width_and_level_goes_on_from_any_other(kind: str) -> None:
    """Of one batch: its sums are those of another width up to roundings, so the run that is not sharded is compared."""
    _, case = ahead(kind, "adamw", 2, spans=(6,), skips=())
    kept = saved_by(case, "gradients", 4)
    assert {name.partition("@")[0] for name in kept.names if "@" in name} >= {"weights", "optimizer/exp_avg"}
    for width, level in ((3, "optimizer"), (4, "gradients"), (1, "none")):
        other = replace(case, width=width, m=12 // width)
        (_, found), (_, wanted) = (go_on(other, each, kept, 4) for each in (level, "none"))
        assert repr(found.decided) == repr(wanted.decided)
        assert_equal_tensors(found.weights, wanted.weights, f"width {width}")


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_after_a_method_without_predictions_passes_begin_with_the_newest_weights(precision: str) -> None:
    """Until updates have made predictions: they were no other weights under a method with a flush."""
    plain = Case("2bw", 2, 2, width=2, spans=(4,), clip=CLIP, skips=(), precision=precision)
    kept = saved_by(plain, "gradients", 4)
    _, case = ahead("2bw-ahead", "adamw", 2, spans=(7,), skips=(), precision=precision)
    (_, wanted), *others = (go_on(case, level, kept, 4) for level in ("none", *LEVELS))
    before = make_pipeline(
        replace(plain, method="1f1b", spans=(5,)), sharding="gradients", blocks=make_blocks("mixed", seed=99)
    )
    before.load(kept)
    (report,) = before.run(make_batches(case)[4:5])
    assert [decision.loss for decision in report.decided] == [wanted.decided[0][1]]
    for _, found in others:
        assert repr(found.decided) == repr(wanted.decided)
        assert_equal_tensors(found.weights, wanted.weights, "weights")


# --- what is read besides passes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["2bw-ahead", MOTION])
def test_evaluations_and_averages_are_of_the_weights(kind: str, precision: str) -> None:
    """The pipeline is drained for an evaluation; a flush that follows, and its average, go on."""
    _, case = ahead(kind, "adamw", 2, spans=(7,), precision=precision)
    batches, seen = make_batches(case), []
    for level in ("none", *LEVELS):
        pipeline, found = make_pipeline(case, sharding=level, ema_decay=0.9), []
        for report in pipeline.run(batches, evaluate=Evaluating(2, batches[:1])):
            found += report.evaluated
        found += pipeline.evaluated()
        states = [pipeline.full_state_dict(), pipeline.full_state_dict(averaged=True)]
        found += [pipeline.evaluate(batches[:1]), pipeline.evaluate(batches[:1], averaged=True)]
        pipeline.switch(prove("1f1b", case.depth, case.m))
        list(pipeline.run(batches[:2]))
        states += [pipeline.full_state_dict(), pipeline.full_state_dict(averaged=True)]
        seen.append((found, states))
    (wanted, states), *others = seen
    assert [each.version for each in wanted[:3]] == [2, 4, 6]
    for found, here in others:
        assert found == wanted
        for mine, theirs in zip(here, states, strict=True):
            assert_equal_tensors(mine, theirs, "weights, or their average")


def test_between_processes_evaluations_are_the_same(pool: Pool) -> None:
    _, case = ahead("2bw-ahead", "adamw", 2, spans=(7,))
    wanted = evaluated(None, case, "none")
    assert [version for version, _ in wanted] == [2, 4, 6]
    for found in pool.submit(evaluated, case, "gradients", ranks=4):
        assert found == wanted


def evaluated(group: dist.ProcessGroup | None, case: Case, level: str) -> Any:
    pipeline, batches, found = make_pipeline(case, group, sharding=level), make_batches(case), []
    for report in pipeline.run(batches, evaluate=Evaluating(2, batches[:1])):
        found += report.evaluated
    return [(each.version, each.loss) for each in (*found, *pipeline.evaluated())]


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_written_between_two_runs_is_read_by_the_next_batch(level: str) -> None:
    _, case = ahead("2bw-ahead", "adamw", 2, spans=(6,), skips=())
    batches, found = make_batches(case), []
    for each in ("none", level):
        pipeline = make_pipeline(case, sharding=each)
        list(pipeline.run(batches[:4]))
        with torch.no_grad():
            pipeline.state_dict()["head.weight"].mul_(0.5)
        losses = [report.loss for report in pipeline.run(batches[4:])]
        found.append((losses, pipeline.state_dict()))
    (losses, weights), (others, sharded) = found
    assert losses == others
    assert_equal_tensors(sharded, weights, "weights")


def test_weights_behind_predictions_are_whole_between_two_runs() -> None:
    _, case = ahead("2bw-ahead", "adamw", 2, spans=(3,))
    pipeline = make_pipeline(case, sharding="optimizer")
    for _ in pipeline.run(make_batches(case)):
        with pytest.raises(
            VersionError, match=r"stage \d on rank \d: the weights are sharded, and whole between two runs only"
        ):
            pipeline.state_dict()
    assert pipeline.is_finite()


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [2, 3])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_takes_no_more_than_rows_of_the_weights(precision: Any, level: str, width: int) -> None:
    """fp32: 12 + 12/w bytes for each parameter with Adam, 4/w more than 2bw (unsharded 24); in bf16 as many as 2bw."""
    torch.manual_seed(0)
    pipeline = Pipeline(
        {name: nn.Linear(48, 48, bias=False) for name in "abcd"},
        "2bw-ahead",
        stages=2,
        microbatches=2,
        loss=nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.Adam(named, lr=0.01),
        data_parallel=DataParallel(width, sharding=level),
        precision=precision,
    )
    batch = torch.randn(4 * width, 48), torch.randn(4 * width, 48)
    held: dict[int, dict[str, int]] = {}
    for _ in pipeline.run([batch] * 4):
        held = {rank: dict(live) for rank, live in pipeline.live_bytes().items()}
    parameters, counters, low = 2 * 48 * 48, 2 * 4, precision == "bf16"
    kinds = ("weights", "master weights", "gradients", "idle buffers", "optimizer")
    for number, live in held.items():
        derived = sum(state_bytes(pipeline.proof, number % 2, width, low)) + (0 if low else Fraction(4, width))
        assert low or derived == 12 + Fraction(12, width)
        assert sum(live.get(kind, 0) for kind in kinds) - counters == derived * parameters
        assert live["master weights"] == Fraction(4, width) * parameters
        assert live.get("weights between runs", 0) == live.get("correction", 0) == 0
    for live in pipeline.live_bytes().values():
        assert live["weights between runs"] == 4 * parameters


@pytest.mark.long
@pytest.mark.parametrize("motion", [0, 1])
def test_nothing_else_is_of_the_size_of_a_stage(motion: int) -> None:
    """In a run two predictions and a gradient of each stage, and between two the weights; nothing per microbatch."""
    size = 52 * 52 * 4
    gc.collect()  # what tests before this one have left
    model = nn.Sequential(*(nn.Linear(52, 52, bias=False) for _ in range(4)))
    before = storages_of(size) - len(model)
    pipeline = Pipeline(
        model, method("2bw-ahead", motion=motion), stages=4, microbatches=8, loss=nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.01), data_parallel=DataParallel(2, sharding="gradients"),
    )  # fmt: skip
    batch = torch.randn(32, 52), torch.randn(32, 52)
    for _ in range(2):
        for number, _ in enumerate(pipeline.run([batch] * 4)):
            if number < 3:  # with the last report some ranks have ended the run
                assert storages_of(size) - before == 2 * 4 * 3
        assert storages_of(size) - before == 2 * 4 * 4


# --- refused by name --------------------------------------------------------------------------------------------------


def test_functions_on_updates_would_see_rows() -> None:
    _, case = ahead("2bw-ahead", "adamw", 2)
    with pytest.raises(
        CapabilityError, match="on_update: .* where passes read other weights than the newest, no pipeline"
    ):
        make_pipeline(case, sharding="gradients").on_update(lambda *_: None)
    later = make_pipeline(Case("1f1b", 2, 2, width=2), sharding="gradients")
    handle = later.on_update(lambda *_: None)
    with pytest.raises(
        CapabilityError, match="on_update: .* where passes read other weights than the newest, no pipeline"
    ):
        later.switch(method="2bw-ahead")
    handle.remove()
    later.switch(method="2bw-ahead")
    list(later.run(make_batches(case)[:2]))


def test_other_levels_and_corrections_are_refused() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    def make(method: str, level: str, **changes: Any) -> Pipeline:
        return Pipeline(
            model, method, stages=2, microbatches=4, loss=nn.functional.mse_loss,
            optimizer=lambda named: torch.optim.SGD(named, lr=0.1), data_parallel=DataParallel(2, sharding=level),
            **changes,
        )  # fmt: skip

    with pytest.raises(
        ConfigError, match="2bw-ahead: sharding full does not go with rule .*: batches overlap in this ord"
    ):
        make("2bw-ahead", "full")
    with pytest.raises(
        CapabilityError, match="'error-feedback' yet, which is not known to work on a shard .* take 2bw"
    ):
        make("error-feedback", "gradients")
