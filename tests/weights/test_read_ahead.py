"""2BW that reads ahead, around its runs: evaluations, weights written from outside, and going back to a flush."""

from __future__ import annotations

import pytest
import torch

from penstock.errors import ConfigError
from penstock.runtime.execute.evaluation_without_draining import Evaluating
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.update.run_events import Evaluated
from support.cases import Case, assert_equal_tensors, expected, make_batches, make_pipeline
from support.correction_cases import KINDS, case_of, snapshots_of
from support.schedules import prove
from support.snapshots import Kept

NAMES = ("2bw-ahead", "2bw-ahead by motion")


def case_named(name: str, batches: int) -> Case:
    return case_of(name, 3, 4, spans=(batches,), skips=())


def loss_of(case: Case, weights: dict[str, torch.Tensor], data: list) -> float:
    """The loss of a pipeline that reads just these weights."""
    plain = make_pipeline(Case("1f1b", case.depth, case.m, case.model))
    plain.load_state_dict(weights)
    found = plain.evaluate(data)
    assert found is not None
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_evaluations_read_the_weights_and_not_what_is_predicted(name: str) -> None:
    case = case_named(name, 7)
    batches, data = make_batches(case), make_batches(case)[:1]
    pipeline, found = make_pipeline(case), list[Evaluated]()
    for report in pipeline.run(batches, evaluate=Evaluating(2, data)):
        found += report.evaluated
    found += pipeline.evaluated()
    assert [e.version for e in found] == [2, 4, 6]
    parts = make_pipeline(case)
    for each in found:
        list(parts.run(batches[parts.batches : each.version]))
        here = parts.evaluate(data)
        assert here is not None
        assert each.loss == here[0] == loss_of(case, parts.state_dict(), data)


def ends_of(pipeline: Pipeline, batches: list) -> dict[str, torch.Tensor]:
    list(pipeline.run(batches))
    return pipeline.state_dict()


@pytest.mark.parametrize("name", NAMES)
def test_a_flush_after_it_goes_on_from_the_weights(name: str) -> None:
    case = case_named(name, 7)
    batches, first = make_batches(case), case_named(name, 4)
    pipeline = make_pipeline(case)
    list(pipeline.run(batches[:4]))
    assert_equal_tensors(
        pipeline.state_dict(), expected(first, options=KINDS[name].options).weights, "weights before the switch"
    )
    pipeline.switch(prove("1f1b", case.depth, case.m))
    taken = [snapshot for snapshot in snapshots_of(first, 4, make_pipeline(first)) if snapshot.batch == 4]
    other = make_pipeline(Case("1f1b", case.depth, case.m, case.model, case.optimizer, rate=case.rate))
    other.load(Kept(taken))
    wanted = loss_of(case, pipeline.state_dict(), [batches[4]])
    (report,) = pipeline.run([batches[4]])
    assert report.loss == wanted
    list(other.run([batches[4]]))
    assert_equal_tensors(ends_of(pipeline, batches[5:]), ends_of(other, batches[5:]), "after the switch")


@pytest.mark.parametrize("name", NAMES)
def test_the_first_batch_after_a_write_reads_what_was_written(name: str) -> None:
    case = case_named(name, 6)
    batches, pipeline = make_batches(case), make_pipeline(case)
    list(pipeline.run(batches[:4]))
    written = {key: 0.5 * value for key, value in pipeline.state_dict().items()}
    pipeline.load_state_dict(written)
    (report,) = pipeline.run([batches[4]])
    assert report.loss == loss_of(case, written, [batches[4]])


def test_it_cannot_go_back_without_its_correction() -> None:
    case = case_named("2bw-ahead", 2)
    pipeline = make_pipeline(case)
    list(pipeline.run(make_batches(case)))
    pipeline.switch(prove("1f1b", case.depth, case.m))
    with pytest.raises(ConfigError, match="correction"):
        pipeline.switch(prove("2bw-ahead", case.depth, case.m))
