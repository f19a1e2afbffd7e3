"""2BW on fully sharded state: all versions are rows, and every number is that of the reference of 2bw."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from penstock.checkpoint.manager import Checkpoints
from penstock.comm.collective.shard_exchange import LocalShards
from penstock.errors import CapabilityError, ConfigError, VersionError
from penstock.options.number_formats import PrecisionName
from penstock.options.parallelism import DataParallel
from penstock.runtime.execute.evaluation import Evaluating
from penstock.runtime.ops.batch_ops import GatherAction, ReleaseAction
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.rank.memory_ledger import MemoryLedger
from penstock.runtime.rank.snapshot import Saving, Snapshot
from penstock.runtime.update.gathers import Gathers
from penstock.schedule.build import prove
from penstock.schedule.ir.schedule import Schedule
from penstock.stage.autograd.recompute import RecomputeMode
from penstock.verify.reference import Scaling
from penstock.weights.corrections.registry import correction_of
from support.cases import (
    Case,
    Outcome,
    add_decisions,
    assert_equal_tensors,
    expected,
    make_batches,
    make_blocks,
    make_pipeline,
)
from support.pool import Pool
from support.schedules import make_schedule
from support.sharded import assert_as_whole, parts_of_state, storages_of, train_sharded, with_late_sums
from support.snapshots import Kept
from support.state_bytes import state_bytes

CLIP = 0.4  # of most batches
TWO, THREE = (("chunks", 2),), (("chunks", 3),)


def layered(m: int, width: int, options: Any = THREE, **changes: Any) -> Case:
    """Twenty updates on two ranks, drained in between."""
    given = {"spans": (12, 8), "clip": CLIP} | changes
    return Case("2bw-layered", 2, m, width=width, options=options, **given)


CASES = [
    layered(4, 2),
    layered(2, 3),
    layered(3, 3, precision="bf16"),
    layered(4, 2, precision="bf16", skips=(3, 12)),
    layered(4, 2, TWO, optimizer="sgd"),
    layered(2, 2, TWO, optimizer="momentum", recompute="block"),
    layered(3, 2, THREE, optimizer="nadam", recompute="stage", precision="bf16"),
    layered(2, 3, THREE, optimizer="configured muon"),
    layered(2, 2, TWO, optimizer="configured muon", precision="bf16"),
    layered(2, 2, THREE, optimizer="adafactor"),
    layered(2, 2, THREE, model="faint", clip=0.7, tied=True),
    layered(2, 3, TWO, model="faint", clip=0.7, tied=True, precision="bf16", recompute="stage"),
    layered(2, 2, TWO, model="half", clip=None, spans=(9,), scaling=Scaling(2.0**24, 2.0, 0.5, 2)),
    layered(2, 2, TWO, clip=None, spans=(6, 3), scaling=Scaling(2.0**10, 2.0, 0.5, 2), precision="fp16"),
    replace(layered(6, 2, TWO, spans=(6, 5)), depth=3),
]


def run_sharded(
    case: Case, group: dist.ProcessGroup | None = None, level: str = "full"
) -> tuple[Outcome, Any, dict[int, dict[str, int]]]:
    """A run whose schedule is sharded behind its recomputes."""
    return train_sharded(group, case, level, method=plain(case))


@cache
def plain(case: Case) -> Schedule:
    return make_schedule(case.method, case.depth, case.m, options=dict(case.options), sharding="none")


@cache
def said(case: Case) -> Outcome:
    """What the reference says."""
    return expected(case)


@pytest.mark.parametrize(
    "case",
    CASES,
    ids=lambda c: f"{c.depth}-{c.m}-{c.width}-{dict(c.options)['chunks']}-{c.model}-{c.optimizer}-{c.precision}",
)
def test_a_run_with_versions_as_shards_has_the_numbers_of_the_reference(case: Case) -> None:
    wanted = said(case)
    assert case.clip is None or sum(norm > case.clip for _, _, norm, *_ in wanted.decided) >= len(wanted.decided) / 2
    outcome, parts, _ = run_sharded(case)
    assert_as_whole(outcome, [parts], wanted)


@pytest.mark.parametrize("weights", [3, 4])
def test_more_places_than_it_takes(weights: int) -> None:
    """Several versions of a stage may be gathered at once, or be on their way."""
    case = layered(4, 2, spans=(9,))
    outcome, parts, _ = run_sharded(case, level=f"full:weights={weights}")
    assert_as_whole(outcome, [parts], said(case))


def on_rank(group: dist.ProcessGroup, case: Case) -> Any:
    return run_sharded(case, group)


@pytest.mark.parametrize(
    "case",
    [
        layered(4, 2),
        layered(3, 2, TWO, precision="bf16", recompute="stage"),
        replace(layered(2, 3, optimizer="momentum"), depth=1),
    ],
    ids=lambda c: f"{c.depth}-{c.width}-{c.precision}",
)
def test_processes_with_versions_as_shards_have_the_same_numbers(pool: Pool, case: Case) -> None:
    outcomes, parts, _ = zip(*pool.submit(on_rank, case, ranks=case.depth * case.width), strict=True)
    whole = Outcome(decided=outcomes[0].decided)
    for place, outcome in enumerate(outcomes):
        assert repr(outcome.decided) == repr(whole.decided)
        for name, weight in outcome.weights.items():
            assert torch.equal(whole.weights.setdefault(name, weight), weight), (place, name)
    assert_as_whole(whole, parts, said(case))


# --- gathers, reductions and memory -----------------------------------------------------------------------------------


def pipeline_of_layers(schedule: Any, width: int, precision: PrecisionName = "fp32") -> Pipeline:
    torch.manual_seed(0)
    return Pipeline(
        {f"layer {n}": nn.Linear(48, 48, bias=False) for n in range(schedule.num_stages)},
        schedule,
        loss=nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.Adam(named, lr=0.01),
        data_parallel=DataParallel(width),
        precision=precision,
    )


def counted(monkeypatch: pytest.MonkeyPatch, pipeline: Pipeline, batches: int) -> Counter[tuple[str, int, int]]:
    """How often each rank of each pipeline joins a gather or a reduction in a run."""
    counts: Counter[tuple[str, int, int]] = Counter()
    with monkeypatch.context() as patch:
        for name in ("gather", "scatter"):
            real = getattr(LocalShards, name)

            def joined(self: Any, members: Any, me: Any, *rest: Any, name: str = name, real: Any = real) -> Any:
                counts[name, me.pipeline, me.stage.rank] += 1
                return real(self, members, me, *rest)

            patch.setattr(LocalShards, name, joined)
        m = pipeline.schedule.microbatches * pipeline.grid.width
        list(pipeline.run([(torch.randn(2 * m, 48), torch.randn(2 * m, 48))] * batches))
    return counts


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 2), (2, 3), (3, 2), (4, 3)])
@pytest.mark.parametrize("times", [1, 2])
def test_each_batch_gathers_and_reduces_what_the_proof_says(
    monkeypatch: pytest.MonkeyPatch, ranks: int, chunks: int, times: int
) -> None:
    """2v - k + 1 gathers, 2v - k on the last rank, and v reductions for each batch, with m = p and m = 2p."""
    schedule = make_schedule("2bw-layered", ranks, times * ranks, options={"chunks": chunks}, sharding="full")
    pipeline = pipeline_of_layers(schedule, 2)
    first, longer = (counted(monkeypatch, pipeline, batches) for batches in (4, 7))  # from two versions on, both
    first = counted(monkeypatch, pipeline, 4)
    for pipe in range(2):
        for rank in range(ranks):
            facts = pipeline.proof.shards[rank]
            for name, proven in (("gather", facts.gathers), ("scatter", facts.reductions)):
                assert longer[name, pipe, rank] - first[name, pipe, rank] == 3 * proven
            assert facts.gathers == 2 * chunks - 2 + (rank < ranks - 1)
            assert facts.reductions == chunks
            assert first["scatter", pipe, rank] == 4 * chunks
            assert first["gather", pipe, rank] == 4 * facts.gathers + chunks  # and so that users find whole weights


def test_one_version_is_gathered_once_where_it_is_read_as_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first span begins with one version, which its second batch reads as well."""
    schedule = make_schedule("2bw-layered", 2, 4, options={"chunks": 2}, sharding="full")
    pipeline = pipeline_of_layers(schedule, 2)
    first, second = (counted(monkeypatch, pipeline, 4) for _ in range(2))
    for pipe in range(2):
        assert second["gather", pipe, 0] - first["gather", pipe, 0] == 1
        assert second["scatter", pipe, 0] == first["scatter", pipe, 0]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("microbatches", "chunks", "width"), [(2, 2, 2), (4, 3, 2), (4, 3, 4), (2, 2, 3)])
def test_the_memory_of_shards_of_versions_is_what_is_derived(
    monkeypatch: pytest.MonkeyPatch, precision: PrecisionName, microbatches: int, chunks: int, width: int
) -> None:
    """To the byte: of gathered stages, of gradients at full size, of sums that wait, and of all rows together."""
    with_late_sums(monkeypatch)
    schedule = make_schedule("2bw-layered", 2, microbatches, options={"chunks": chunks}, sharding="full")
    pipeline, low = pipeline_of_layers(schedule, width, precision), precision == "bf16"
    m = microbatches * width
    together: Counter[int] = Counter()
    rows = ("weights", "master weights", "summed gradients", "idle buffers")
    record = MemoryLedger.record

    def watched(self: MemoryLedger, *, optimizers: bool) -> None:
        record(self, optimizers=optimizers)
        for number, live in pipeline.live_bytes().items():
            together[number] = max(together[number], sum(live.get(kind, 0) for kind in rows))

    monkeypatch.setattr(MemoryLedger, "record", watched)
    list(pipeline.run([(torch.randn(2 * m, 48), torch.randn(2 * m, 48))] * 4))
    stages = len(schedule.on_rank(0))
    share, counters = stages * 48 * 48, stages * 4  # a number of steps for each parameter
    scratch = 0 if low else stages * 48 * 4 * (48 // width)
    for number, peak in pipeline.peak_bytes().items():
        rank = number % 2
        facts, derived = pipeline.proof.shards[rank], state_bytes(pipeline.proof, rank, width, low)
        assert peak["gathered weights"] == derived.weights * share
        assert peak["gradients"] == derived.gradients * share == 4 * facts.gradients_share * share
        assert peak["summed gradients"] == 4 * facts.waiting_share * Fraction(share, width)
        assert together[number] == (derived.sums + derived.master) * share
        assert peak["optimizer"] - counters - scratch == derived.optimizer * share


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_whole_versions_are_those_of_the_ledger(precision: PrecisionName) -> None:
    """What is alive in the size of a stage, in a run and between two: nothing for each microbatch."""
    size = 44 * 44 * 4
    gc.collect()  # what tests before this one have left
    model = nn.Sequential(*(nn.Linear(44, 44, bias=False) for _ in range(6)))
    before = storages_of(size) - len(model)
    pipeline = Pipeline(
        model,
        make_schedule("2bw-layered", 2, 4, options={"chunks": 3}, sharding="full"),
        loss=nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.01),
        data_parallel=DataParallel(2),
        precision=precision,
    )
    kinds = {"gradients", "weights between runs", *(["gathered weights"] if precision == "fp32" else [])}
    batch = torch.randn(16, 44), torch.randn(16, 44)
    for _ in range(2):
        for _ in pipeline.run([batch] * 4):
            held = sum(live.get(kind, 0) for live in pipeline.live_bytes().values() for kind in kinds) // size
            assert storages_of(size) - before == held <= 16  # two places of each kind on each of four ranks
        assert storages_of(size) - before == 12


# --- saved states, evaluations, what is written -----------------------------------------------------------------------


def others(case: Case) -> dict[str, Any]:
    return make_blocks(case.model, seed=99)


def saved_by(case: Case, level: str, batch: int) -> Kept:
    found: list[Snapshot] = []
    for _ in make_pipeline(case, sharding=level).run(make_batches(case), save=Saving(batch, found.append)):
        pass
    return Kept([snapshot for snapshot in found if snapshot.batch == batch])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("2bw-layered", "full", THREE), ("2bw-layered", "full", THREE)),
        (("2bw-layered", "full", THREE), ("2bw-layered", "full", TWO)),
        (("2bw-layered", "full", TWO), ("2bw", "none", ())),
        (("2bw", "gradients", ()), ("2bw-layered", "full", THREE)),
        (("2bw-layered", "full", THREE), ("2bw", "optimizer", ())),
    ],
    ids=str,
)
def test_a_run_goes_on_from_both_versions(before: Any, after: Any, precision: PrecisionName) -> None:
    """At a batch where it is drained; the older version is rows in the saved state, and any method reads it."""

    def case_of(method: str, options: Any) -> Case:
        return Case(
            method, 2, 2, width=2, spans=(8,), clip=CLIP, skips=(), options=options, rate=False, precision=precision
        )

    first, second = case_of(before[0], before[2]), case_of(after[0], after[2])
    wanted, kept = said(first), saved_by(first, before[1], 4)
    assert any(name.startswith("older@") for name in kept.names) is (before[1] == "full")
    pipeline, outcome = make_pipeline(second, sharding=after[1], blocks=others(second)), Outcome()
    pipeline.load(kept)
    for report in pipeline.run(make_batches(first)[4:]):
        add_decisions(outcome, second, report.decided)
    add_decisions(outcome, second, pipeline.decided())
    outcome.weights, outcome.decided = pipeline.state_dict(), [*wanted.decided[:4], *outcome.decided]
    if after[1] != "none":
        assert_as_whole(outcome, [parts_of_state(pipeline)], wanted)
    assert repr(outcome.decided) == repr(wanted.decided)
    assert_equal_tensors({n: outcome.weights[n] for n in wanted.weights}, wanted.weights, "weights")


def test_any_depth_and_width_reads_any_other() -> None:
    """A state goes through all shapes and comes back as it was."""
    wanted = kept = saved_by(Case("2bw-layered", 2, 2, width=2, spans=(5,), clip=CLIP, options=TWO), "full", 3)
    shapes = [("2bw-layered", 3, 3, TWO, "full"), ("2bw", 2, 1, (), "none"), ("2bw", 1, 4, (), "gradients")]
    for method, depth, width, options, level in (*shapes, ("2bw-layered", 2, 2, TWO, "full")):
        case = Case(method, depth, 3, width=width, spans=(5,), clip=CLIP, options=options)
        pipeline = make_pipeline(case, sharding=level, blocks=others(case))
        pipeline.load(kept)
        kept = Kept(pipeline.snapshots())
    tensors = {n: t for n, t in kept.tensors.items() if not n.startswith("fixed")}
    assert_equal_tensors(tensors, {n: t for n, t in wanted.tensors.items() if not n.startswith("fixed")}, "state")
    assert {name.partition("/")[0] for name in tensors} >= {"older@0", "weights@0"}


def save_on_ranks(group: dist.ProcessGroup, case: Case, folder: str) -> None:
    pipeline = make_pipeline(case, group, sharding="full")
    checkpoints = Checkpoints(pipeline, folder)
    for _ in pipeline.run(make_batches(case)[:4], save=checkpoints.every(2)):
        pass
    checkpoints.wait()


def test_a_checkpoint_of_processes_goes_on_in_one(pool: Pool, tmp_path: Any) -> None:
    case = layered(2, 2, TWO, spans=(7,), skips=())
    pool.submit(save_on_ranks, case, str(tmp_path), ranks=4)
    pipeline, outcome = make_pipeline(case, sharding="full", blocks=others(case)), Outcome()
    loaded = Checkpoints(pipeline, tmp_path).load()
    assert loaded is not None
    assert loaded.batch == 4
    for report in pipeline.run(make_batches(case)[4:]):
        add_decisions(outcome, case, report.decided)
    add_decisions(outcome, case, pipeline.decided())
    outcome.weights, outcome.decided = pipeline.state_dict(), [*said(case).decided[:4], *outcome.decided]
    assert_as_whole(outcome, [parts_of_state(pipeline)], said(case))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_evaluations_averages_and_what_is_written(precision: PrecisionName) -> None:
    """As in an unsharded run of the same order: evaluations of it drain, and so a batch reads the older version."""
    case = layered(3, 2, TWO, spans=(6,), precision=precision)
    batches, seen = make_batches(case), []
    for level in ("none", "full"):
        pipeline, found = make_pipeline(case, sharding=level, ema_decay=0.9), []
        for report in pipeline.run(batches[:5], evaluate=Evaluating(2, batches[:1])):
            found += report.evaluated
        found += pipeline.evaluated()
        found += [pipeline.evaluate(batches[:1]), pipeline.evaluate(batches[:1], averaged=True)]
        states = [pipeline.full_state_dict(), pipeline.full_state_dict(averaged=True)]
        with torch.no_grad():
            pipeline.state_dict()["head.weight"].mul_(0.5)
        found += [report.loss for report in pipeline.run(batches[5:])]
        seen.append((found, [*states, pipeline.full_state_dict()]))
    (wanted, states), (found, here) = seen
    assert [each.version for each in wanted[:2]] == [each.version for each in found[:2]] == [2, 4]
    assert found == wanted
    for mine, theirs in zip(here, states, strict=True):
        assert_equal_tensors(mine, theirs, "weights, or their average")


def test_of_two_versions_none_is_whole_in_a_run() -> None:
    case = layered(2, 2, TWO, spans=(3,))
    pipeline = make_pipeline(case, sharding="full")
    for _ in pipeline.run(make_batches(case)):
        with pytest.raises(VersionError, match=r"stage \d on rank \d: \S+ is not whole at the moment, only its rows"):
            pipeline.state_dict()
    assert pipeline.is_finite()


def test_the_same_method_may_follow() -> None:
    """With other places, or as many microbatches in flight; its versions stay."""
    case = layered(4, 2, spans=(8,), skips=())
    pipeline, outcome = make_pipeline(case, sharding="full"), Outcome()
    batches = make_batches(case)
    for part, weights in ((batches[:4], 3), (batches[4:], None)):
        for report in pipeline.run(part):
            add_decisions(outcome, case, report.decided)
        add_decisions(outcome, case, pipeline.decided())
        if weights:
            level = f"full:weights={weights}"
            pipeline.switch(prove("2bw-layered", 2, 4, options={"chunks": 3}, sharding=level))
    outcome.weights = pipeline.state_dict()
    assert_as_whole(outcome, [parts_of_state(pipeline)], said(case))


# --- faults -----------------------------------------------------------------------------------------------------------


class Planted:
    """Faults of the runtime that no proof can see, each in one method."""

    @staticmethod
    def gather_of_the_version_before(patch: pytest.MonkeyPatch) -> None:
        begin = Gathers.begin
        patch.setattr(Gathers, "begin", lambda self, stage, version: begin(self, stage, version - 1))

    @staticmethod
    def no_gather(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(GatherAction, "work", lambda *_: None)

    @staticmethod
    def no_release(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(ReleaseAction, "work", lambda *_: None)

    @staticmethod
    def no_last_release(patch: pytest.MonkeyPatch) -> None:
        work = ReleaseAction.work
        patch.setattr(ReleaseAction, "work", lambda self, turn: None if turn.t == 1 else work(self, turn))

    @staticmethod
    def release_twice(patch: pytest.MonkeyPatch) -> None:
        work = ReleaseAction.work
        patch.setattr(ReleaseAction, "work", lambda self, turn: (work(self, turn), work(self, turn))[0])

    @staticmethod
    def pass_before_its_gather(patch: pytest.MonkeyPatch) -> None:
        def never(*_: Any) -> Any:
            yield from ()

        patch.setattr(Gathers, "wait", never)


@pytest.mark.parametrize(
    ("fault", "said_"),
    [
        ("gather_of_the_version_before", "a GATHER of version -1 of the weights, but the rows .* are those of 0"),
        ("no_gather", "of version 0 of the weights only the rows of pipeline 0 are here; no GATHER has made it whole"),
        ("no_release", r"stage .*: no buffer is free for the gradient of batch 2; versions \[0, 1\] and"),
        ("no_last_release", r"stage .*: version 0 of the weights is still gathered at the end of a span; its RELEASE"),
        ("release_twice", "a RELEASE of version 0 of the weights comes while it is not whole"),
        ("pass_before_its_gather", "of version 0 of the weights only the rows of pipeline"),
    ],
)
def test_faults_in_overlapping_gathers_are_found(monkeypatch: pytest.MonkeyPatch, fault: str, said_: str) -> None:
    case = layered(2, 2, spans=(1 if "last" in fault else 4,))
    getattr(Planted, fault)(monkeypatch)
    with pytest.raises(VersionError, match=said_):
        list(make_pipeline(case, sharding="full").run(make_batches(case)))


# --- refused by name --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["2bw", "2bw-eager"])
@pytest.mark.parametrize("depth", [2, 4])
def test_orders_whose_batches_overlap_in_turns_are_refused(method: str, depth: int) -> None:
    case = Case(method, depth, 6, width=2)
    with pytest.raises(ConfigError, match=f"{method}: sharding full does not go with rule .* take optimizer or grad"):
        make_pipeline(case, sharding="full")


def test_what_else_is_refused_by_name() -> None:
    case = layered(4, 2, TWO)
    pipeline = make_pipeline(case, sharding="full")
    with pytest.raises(ConfigError, match="2bw-layered: .*divides state among parallel pipelines, but there is one"):
        make_pipeline(replace(case, width=1), sharding="full")
    with pytest.raises(CapabilityError, match="full is not offered with correction '2bw-ahead' yet"):
        make_pipeline(replace(case, correction=correction_of("2bw-ahead")), sharding="full")
    with pytest.raises(CapabilityError, match="on_update: .* where passes read other weights than the newest"):
        pipeline.on_update(lambda *_: None)
    for method in ("layered", "breadth-first", "interleaved"):
        with pytest.raises(ConfigError, match=r"differ in sharding \(full under rule double-buffer and full under rul"):
            pipeline.switch(method=method)
    flushing = make_pipeline(replace(case, method="breadth-first"), sharding="full")
    with pytest.raises(ConfigError, match=r"differ in sharding \(full under rule flush and full under rule double-buf"):
        flushing.switch(method="2bw-layered")
    list(pipeline.run(make_batches(case)[:2]))


@pytest.mark.parametrize("recompute", ["none", "block", "stage"])
def test_2bw_layered_by_name(recompute: RecomputeMode) -> None:
    """It is sharded by itself, behind recomputes."""
    found = []
    for sharding in ("none", None):
        torch.manual_seed(3)
        pipeline = Pipeline(
            [nn.Linear(16, 16) for _ in range(4)],
            "2bw-layered",
            stages=2,
            microbatches=4,
            loss=nn.functional.mse_loss,
            optimizer=lambda named: torch.optim.Adam(named, lr=0.01),
            recompute=recompute,
            data_parallel=DataParallel(2, sharding=sharding),
        )
        batches = [(torch.randn(16, 16), torch.randn(16, 16)) for _ in range(5)]
        losses = [report.loss for report in pipeline.run(batches)]
        assert str(pipeline.schedule.sharding) == (sharding or "full:weights=2:gradients=2")
        found.append((losses, pipeline.full_state_dict()))
    (losses, weights), (others_, sharded) = found
    assert losses == others_
    assert_equal_tensors(sharded, weights, "weights")
