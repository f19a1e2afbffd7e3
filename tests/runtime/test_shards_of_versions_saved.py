"""Between two runs of 2BW on fully sharded state: saved states, evaluations, what users write, other schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from penstock.checkpoint.manager import Checkpoints
from penstock.errors import VersionError
from penstock.options.passes import PrecisionName
from penstock.runtime.execute.evaluation_without_draining import Evaluating
from penstock.runtime.rank.snapshot import Saving, Snapshot
from penstock.schedule.build import prove
from support.cases import (
    Case,
    Outcome,
    add_decisions,
    assert_equal_tensors,
    make_batches,
    make_blocks,
    make_pipeline,
)
from support.layered_cases import CLIP, THREE, TWO, layered, said
from support.pool import Pool
from support.sharded import assert_as_whole, parts_of_state
from support.snapshots import Kept


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


@pytest.mark.long
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
