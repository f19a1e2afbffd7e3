"""Switches that a pipeline refuses, before anything changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from penstock.errors import CapabilityError, ConfigError, PenstockError
from penstock.weights.corrections.pipemare import PipeMare
from support.cases import (
    Case,
    make_batches,
    make_pipeline,
)
from support.phases import case_of, schedule
from support.pool import Pool
from support.schedules import make_schedule


@pytest.mark.parametrize(
    ("method", "changes", "says"),
    [
        ("1f1b", {"m": 4}, r"microbatches per batch \(3 and 4\)"),
        ("1f1b", {"depth": 3}, r"differ in stages \(2 and 3\)"),
        ("interleaved", {"options": {"chunks": 2}, "m": 4}, "microbatches"),
        ("zb-v", {}, "differ in stages"),
        ("seq1f1b", {}, "slices of a sequence"),
    ],
)
def test_another_placement_is_refused(method: str, changes: dict[str, Any], says: str) -> None:
    case = case_of([("2bw", 2)], 2, 3)
    pipeline, batches = make_pipeline(case), make_batches(case)
    sizes = {"depth": 2, "m": 3, "options": {}} | changes
    with pytest.raises(ConfigError, match=says):
        pipeline.switch(make_schedule(method, sizes["depth"], sizes["m"], options=sizes["options"]))
    assert len(list(pipeline.run(batches))) == 2  # nothing has changed


def test_what_the_runtime_or_an_optimizer_does_not_offer_is_refused() -> None:
    case = case_of([("2bw", 2)], 2, 4, optimizer="nadam")
    pipeline = make_pipeline(case)
    with pytest.raises(ConfigError, match="nothing says how they are predicted"):
        pipeline.switch(schedule(case, "spectrain"))
    with pytest.raises(ConfigError, match="'pipemare' goes with version rule newest"):
        pipeline.switch(schedule(case, "1f1b"), correction=PipeMare(4))
    with pytest.raises(CapabilityError, match="undone in place"):
        pipeline.switch(schedule(case, "zb-h2", rule="provisional-in-place"))
    assert len(list(pipeline.run(make_batches(case)))) == 2


def test_chosen_delays_stay_with_their_schedule() -> None:
    case = case_of([("1f1b", 2)], 2, 4)
    for given in ({"delays": 1}, {"backward_delays": 1}):
        with pytest.raises(ConfigError, match="leave delays out"):
            make_pipeline(case, **given).switch(schedule(case, "gpipe"))


def test_in_the_midst_of_a_run_it_is_refused() -> None:
    case = case_of([("2bw", 3)], 2, 2)
    pipeline = make_pipeline(case)
    for _ in pipeline.run(make_batches(case)):
        with pytest.raises(PenstockError, match="under way"):
            pipeline.switch(schedule(case, "1f1b"))


def switch_apart(group: dist.ProcessGroup, case: Case) -> str:
    pipeline = make_pipeline(case, group)
    try:
        pipeline.switch(schedule(case, ("1f1b", "gpipe")[dist.get_rank(group)]))
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_that_disagree_are_told(pool: Pool) -> None:
    for said in pool.submit(switch_apart, case_of([("2bw", 2)], 2, 2), ranks=2):
        assert "ranks build different pipelines: this one " in said
