"""Evaluation in the midst of a run finds what it would find after a drain, and leaves no trace."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from penstock.errors import ConfigError, DataError
from penstock.runtime.execute.evaluation_without_draining import Evaluating
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.rank.snapshot import Saving, Snapshot
from penstock.runtime.update.run_events import Evaluated
from penstock.schedule.build import prove
from penstock.schedule.machine.evaluation_without_draining_check import border_fault
from support.cases import VOCABULARY, WIDTH, Case, assert_equal_tensors, expected, make_batches, make_pipeline
from support.combinations import case_of
from support.combined_features import loss_on, wanted
from support.offered_methods import OFFERED
from support.pool import Pool
from support.smallest_batch import least
from support.snapshots import Kept

Found = list[tuple[int, float | None, float]]
PARTS = {4: [2, 4], 5: [6, 8], 2: [10]}
"""Batches of runs, and the versions that each evaluates: the newest at its end, the one before, and that before it."""


def data_of(case: Case, batches: int = 2) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Other batches than those of the run."""
    return make_batches(replace(case, spans=(batches + 9,), skips=(9,)))[9:]


def run(pipeline: Pipeline, case: Case, every: int, batches: int = 2) -> list[Evaluated]:
    found: list[Evaluated] = []
    for report in pipeline.run(make_batches(case), evaluate=Evaluating(every, lambda: data_of(case, batches))):
        found += report.evaluated
    return found + list(pipeline.evaluated())


def plain(found: list[Evaluated]) -> Found:
    return [(e.version, e.loss, e.weight) for e in found]


def after_drains(case: Case, every: int) -> Found:
    """What evaluations between runs find; the weights of flushed and double-buffered methods do not notice drains."""
    pipeline, found = make_pipeline(case), []
    batches = make_batches(case)
    for first in range(0, len(batches), every):
        list(pipeline.run(batches[first : first + every]))
        if pipeline.batches % every == 0:
            result = pipeline.evaluate(data_of(case))
            assert result is not None
            found.append((pipeline.batches, *result))
    return found


@pytest.mark.parametrize(
    ("method", "depth"),
    [(method, depth) for method in ("1f1b", "2bw", "stash") for depth in (1, 2, 4)]
    + [("sequential", 2), ("gpipe", 3), ("eager", 3), ("2bw-eager", 3), ("3bw", 4)],
)
def test_it_finds_the_same_as_after_a_drain(method: str, depth: int, device: str) -> None:
    model = "mixed" if method.startswith(("2bw", "3bw")) else "restless"  # buffers have no versions: theirs are later
    case = Case(method, depth, least(method, depth) + depth % 2, model, spans=(7,), skips=(), device=device)
    pipeline = make_pipeline(case)
    found, drained = plain(run(pipeline, case, 2)), after_drains(case, 2)
    assert [version for version, *_ in found] == [2, 4, 6]
    assert found == drained
    drains = () if method != "stash" else (2, 2, 2, 1)
    assert_equal_tensors(
        pipeline.state_dict(), expected(replace(case, spans=drains or case.spans)).weights, "weights after training"
    )


@pytest.mark.parametrize("method", OFFERED)
def test_a_run_evaluates_every_version_that_it_makes(method: str) -> None:
    """Also the last ones, which later batches would read; with the weights of the reference, under every method."""
    case = replace(case_of(method), spans=tuple(PARTS))
    stops = border_fault(prove(method, case.depth, case.m).lowered) is not None
    result = wanted(replace(case, spans=(2, 2, 2, 2, 1, 1, 1)) if stops else case)
    data, batches, pipeline = make_batches(replace(case, spans=(2,))), make_batches(case), make_pipeline(case)
    for size, versions in PARTS.items():
        found: list[Evaluated] = []
        for report in pipeline.run([batches.pop(0) for _ in range(size)], evaluate=Evaluating(2, data)):
            found += report.evaluated
        found += pipeline.evaluated()
        assert [e.version for e in found] == versions
        for e in found:
            assert e.loss == pytest.approx(loss_on(case, result.versions[e.version], data), rel=1e-4), e.version


@pytest.mark.parametrize("method", ["1f1b", "2bw", "3bw", "2bw-ahead", "stash"])
def test_a_run_that_was_left_is_made_up_for_by_the_next_one(method: str) -> None:
    case = replace(case_of(method), spans=(9,))
    batches, pipeline, found = make_batches(case), make_pipeline(case), []
    evaluate = Evaluating(1, batches[:1])
    for report in pipeline.run(batches, evaluate=evaluate):
        found += report.evaluated
        if report.batch == 1:
            break
    left = pipeline.batches
    for report in pipeline.run(batches[left:], evaluate=evaluate):
        found += report.evaluated
    assert 1 < left < 9
    assert [e.version for e in (*found, *pipeline.evaluated())] == list(range(1, 10))


def test_stages_that_share_a_module_do_not_change_its_mode_for_each_other() -> None:
    case = Case("2bw", 3, 3, spans=(6,), skips=())

    def train(evaluate: Evaluating | None) -> tuple[nn.Module, Pipeline]:
        torch.manual_seed(3)
        drop = nn.Dropout(0.5)
        blocks = [
            nn.Embedding(VOCABULARY, WIDTH),
            drop,
            nn.Linear(WIDTH, WIDTH),
            drop,
            nn.Linear(WIDTH, VOCABULARY),
            drop,
        ]
        pipeline = make_pipeline(case, blocks=blocks, balance=(2, 2, 2))
        for _ in pipeline.run(make_batches(case), evaluate=evaluate):
            pass
        return drop, pipeline

    drop, found = train(Evaluating(1, lambda: data_of(case)))
    _, wanted = train(None)
    assert drop.training
    assert_equal_tensors(found.state_dict(), wanted.state_dict(), "weights")


@pytest.mark.parametrize("method", ["1f1b", "2bw", "2bw-eager", "gpipe"])
def test_nothing_is_drained(method: str) -> None:
    """The first stage has begun the batch after an evaluation before the last one has ended the batch before it."""
    case = Case(method, 3, 4, spans=(6,), skips=())
    pipeline = make_pipeline(case)
    run(pipeline, case, 1)
    timeline = pipeline.timeline()
    assert any(i.batch == -1 for i in timeline.intervals)
    labels = [i.label for i in timeline.intervals if i.rank == 0 and i.lane == "compute" and i.is_work]
    first = labels.index("Fe0")
    before = [label for label in labels[:first] if label.startswith("F")]
    done = [label for label in labels[:first] if label.startswith("B")]
    assert len(before) - len(done) == (0 if method in ("1f1b", "gpipe") else 2 if method == "2bw" else 4)


def test_decided_together_all_ranks_know() -> None:
    case = Case("2bw", 2, 3, spans=(6,), skips=(), clip=0.6)
    assert plain(run(make_pipeline(case), case, 2)) == after_drains(case, 2)


def test_width_evaluates_all_of_the_data() -> None:
    case = Case("2bw", 2, 2, spans=(5,), skips=(), width=2)
    found, drained = plain(run(make_pipeline(case), case, 1)), after_drains(case, 1)
    assert [(v, pytest.approx(loss), weight) for v, loss, weight in found] == drained


def test_evaluations_and_snapshots_at_once() -> None:
    case = Case("2bw", 2, 3, "restless", spans=(7,), skips=())
    snapshots: list[Snapshot] = []
    pipeline = make_pipeline(case)
    evaluate = Evaluating(2, lambda: data_of(case))
    found = [e for r in pipeline.run(make_batches(case), save=Saving(3, snapshots.append), evaluate=evaluate)
             for e in r.evaluated]  # fmt: skip
    assert [e.version for e in (*found, *pipeline.evaluated())] == [2, 4, 6]
    assert sorted((s.batch, s.stage) for s in snapshots) == [(3, 0), (3, 1), (6, 0), (6, 1)]
    assert_equal_tensors(pipeline.state_dict(), expected(case).weights, "weights")


@pytest.mark.parametrize(
    ("method", "known"), [("1f1b", {3: [2], 4: [2], 6: [2, 4]}), ("2bw", {3: [], 4: [2], 6: [2, 4]})]
)
def test_a_snapshot_holds_what_evaluations_had_found(method: str, known: dict[int, list[int]]) -> None:
    """What decisions had told by then; what is under way is found again by a run that goes on from it."""
    case = Case(method, 2, 2, spans=(8,), skips=(), clip=0.6)
    pipeline = make_pipeline(case)
    kept: list[Snapshot] = []
    evaluating = Evaluating(2, lambda: data_of(case))
    found: list[Evaluated] = []
    for report in pipeline.run(make_batches(case), evaluate=evaluating, save=Saving(1, kept.append)):
        found += report.evaluated
    found += pipeline.evaluated()
    assert list(pipeline.evaluations) == found
    for batch, versions in known.items():
        parts = [snapshot for snapshot in kept if snapshot.batch == batch]
        assert len({str(part.facts) for part in parts}) == 1
        again = make_pipeline(case)
        again.load(Kept(parts))
        assert [e.version for e in again.evaluations] == versions
        list(again.run(make_batches(case)[batch:], evaluate=evaluating))
        assert list(again.evaluations) == found


def test_a_snapshot_that_was_drained_for_holds_them_too() -> None:
    case = Case("stash", 2, 2, spans=(5,), skips=(), clip=0.6)
    pipeline = make_pipeline(case)
    kept: list[Snapshot] = []
    list(pipeline.run(make_batches(case), evaluate=Evaluating(2, lambda: data_of(case)), save=Saving(4, kept.append)))
    again = make_pipeline(case)
    again.load(Kept(kept))
    assert again.evaluations == pipeline.evaluations
    assert [e.version for e in again.evaluations] == [2, 4]


@pytest.mark.parametrize("method", ["1f1b", "stash"])
def test_data_may_be_a_list_or_what_makes_one(method: str) -> None:
    case = Case(method, 2, 2, spans=(5,), skips=())
    found = []
    for data in (data_of(case), lambda: data_of(case)):
        pipeline = make_pipeline(case)
        reports = list(pipeline.run(make_batches(case), evaluate=Evaluating(2, data)))
        found.append([e for report in reports for e in report.evaluated] + list(pipeline.evaluated()))
    assert found[0] == found[1]
    assert [e.version for e in found[0]] == [2, 4]


def test_what_cannot_be_evaluated_is_refused() -> None:
    case = Case("2bw", 2, 2, spans=(4,), skips=())
    with pytest.raises(ConfigError, match="evaluate: every must be a whole number of at least 1, got -2"):
        list(make_pipeline(case).run(make_batches(case), evaluate=Evaluating(-2, list)))
    with pytest.raises(ConfigError, match="no averaged weights"):
        make_pipeline(case).evaluate(data_of(case), averaged=True)
    with pytest.raises(ConfigError, match="ema_decay must be between 0 and 1"):
        make_pipeline(case, ema_decay=1.0)


@pytest.mark.parametrize("method", ["2bw", "1f1b", "stash"])
def test_an_evaluation_without_data_says_so(method: str) -> None:
    """Also under stash, where the pipeline is drained for it; what has been trained on stays."""
    case = Case(method, 2, 2, spans=(4,), skips=())
    pipeline, reports = make_pipeline(case), []
    with pytest.raises(DataError, match="the data of an evaluation is empty; give at least one batch"):  # noqa: PT012
        for report in pipeline.run(make_batches(case), evaluate=Evaluating(1, list)):
            reports.append(report.batch)
    assert reports == list(range(pipeline.batches))
    assert pipeline.evaluated() == ()
    assert len(list(pipeline.run(make_batches(case)))) == 4


# --- averaged weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("method", ["1f1b", "2bw", "stash"])
def test_the_average_follows_its_equation(method: str, precision: str) -> None:
    """A(t+1) = 0.8 A(t) + 0.2 W(t+1), A(0) = W(0); a skipped update does not count."""
    case = Case(method, 2, 2, spans=(1,) * 5, skips=(2,), precision=precision)  # type: ignore[arg-type]
    pipeline = make_pipeline(case, ema_decay=0.8)
    wanted = {name: w.clone() for name, w in pipeline.state_dict().items()}
    for t, batch in enumerate(make_batches(case)):
        list(pipeline.run([batch]))
        for name, w in pipeline.state_dict().items():
            wanted[name] = torch.lerp(wanted[name], w, 0.2) if t != 2 else wanted[name]
    averaged = pipeline.state_dict(averaged=True)
    for name, a in wanted.items():
        assert torch.allclose(averaged[name], a, rtol=1e-6, atol=1e-7), name
        assert not torch.equal(averaged[name], pipeline.state_dict()[name])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_averaged_weights_are_evaluated_on_demand(precision: str) -> None:
    case = Case("2bw", 2, 2, spans=(4,), skips=(), precision=precision)  # type: ignore[arg-type]
    pipeline = make_pipeline(case, ema_decay=0.5)
    list(pipeline.run(make_batches(case)))
    averaged = pipeline.state_dict(averaged=True)
    found, newest = pipeline.evaluate(data_of(case), averaged=True), pipeline.evaluate(data_of(case))
    other = make_pipeline(case)
    for name, w in other.state_dict().items():
        w.copy_(averaged[name])
    assert found == other.evaluate(data_of(case)) != newest


# --- between processes ------------------------------------------------------------------------------------------------


def run_on_rank(group: dist.ProcessGroup, case: Case) -> Found:
    return plain(run(make_pipeline(case, group), case, 2, batches=3))


@pytest.mark.processes
@pytest.mark.parametrize("method", ["1f1b", "2bw", "2bw-eager", "stash"])
def test_evaluation_between_processes(pool: Pool, method: str) -> None:
    case = Case(method, 3, 4, "restless", spans=(5,), skips=())
    *others, last = pool.submit(run_on_rank, case, ranks=3)
    alone = plain(run(make_pipeline(case), case, 2, batches=3))
    assert last == alone
    assert all(part == [one for one in alone if one in part] for part in others)
    clipped = replace(case, clip=0.6)
    results = pool.submit(run_on_rank, clipped, ranks=3)
    assert results == [plain(run(make_pipeline(clipped), clipped, 2, batches=3))] * 3
