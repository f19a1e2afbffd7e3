"""What does not go with averaging pipelines, and weights that are written between their runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.errors import CapabilityError, ConfigError
from penstock.options.updates import Divergence
from penstock.runtime.execute.evaluation_without_draining import Evaluating
from penstock.runtime.pipeline import Pipeline
from penstock.schedule.methods.data_parallel_sync import Combine
from penstock.schedule.text_parser import parse_schedule
from support.cases import Case, make_batches, make_pipeline
from support.meetings import (
    assert_close,
    states_of,
)
from support.schedules import make_schedule


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"kind": "averag"}, "unknown kind 'averag'. Did you mean 'average'"),
        ({"kind": "average", "every": 0}, "every must be a whole number of at least 1, got 0"),
        ({"kind": "average", "every": True}, "every must be a whole number"),
        ({"kind": "average", "momentum": 0.5}, "momentum is an option of bmuf, not of average"),
        ({"every": 4}, "every is an option of average, bmuf, elastic, wsp, not of reduce"),
        ({"kind": "bmuf", "momentum": 1.0}, "momentum must be at least 0 and less than 1, got 1.0"),
        ({"kind": "bmuf", "step": 0.0}, "step must be a positive number"),
        ({"kind": "elastic", "pull": 1.5}, "pull must be more than 0 and at most 1/w"),
        ({"kind": "elastic", "optimizer_state": "drop"}, "optimizer_state is one of keep, average, reset; got 'drop'"),
    ],
)
def test_choices_of_averaging_that_make_no_sense(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Combine(**arguments)
    assert said in str(caught.value)


AVERAGE = Combine("average", every=2)


@pytest.mark.parametrize(
    ("method", "changes", "said"),
    [
        ("1f1b", {"width": 1, "combine": AVERAGE}, "combine=average needs parallel pipelines; set data_parallel"),
        ("1f1b", {"combine": Combine("elastic", pull=0.6)}, "pull must be at most 1/w = 0.5 with 2 pipelines, got 0.6"),
        ("1f1b", {"combine": AVERAGE, "reduce": "fast"}, "reduce=fast cannot be used with combine=average"),
        ("1f1b", {"combine": AVERAGE, "ema_decay": 0.9}, "ema_decay=0.9 and combine=average do not go together"),
        ("1f1b", {"combine": "average"}, "combine must be a Combine, such as Combine('average', every=4)"),
        ("zb-h2-post", {"combine": AVERAGE}, "use the method without post-validation"),
        ("newest", {"combine": AVERAGE}, "under which a microbatch reads several versions"),
        ("1f1b", {"combine": AVERAGE, "delays": 2}, "delays cannot be used with combine=average"),
        ("1f1b", {"combine": AVERAGE, "divergence": Divergence()}, "so they would not agree on a divergence"),
    ],
)
def test_what_does_not_go_with_averaging(method: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_pipeline(Case(method, 2, 4, width=2), **changes)
    assert said in str(caught.value)


def test_they_do_not_go_on_under_another_method() -> None:
    pipeline = make_pipeline(Case("1f1b", 2, 2, width=2), combine=AVERAGE)
    with pytest.raises(ConfigError, match="combine=average cannot go on under another method"):
        pipeline.switch(make_schedule("gpipe", 2, 2))


def test_evaluations_between_two_meetings_are_refused() -> None:
    pipeline = make_pipeline(Case("1f1b", 2, 2, width=2), combine=AVERAGE)
    with pytest.raises(ConfigError, match="every is 3, but pipelines meet every 2 batches"):
        list(pipeline.run([], evaluate=Evaluating(3, list)))


WRITTEN = """
schedule mine
rule flush
microbatches 2
nodes 0@0
rank 0: F0^t B0^t F1^t B1^t STEP[t] AVERAGE[t]%4
"""


def test_a_schedule_that_says_itself_when_it_averages() -> None:
    case = Case("1f1b", 1, 2, width=2)
    schedule = parse_schedule(WRITTEN)
    assert make_pipeline(case, method=schedule, combine=Combine("average", every=4)).schedule.name == "mine"
    with pytest.raises(ConfigError, match="the schedule has AVERAGEs of its own, but pipelines that meet every 2"):
        make_pipeline(case, method=schedule, combine=AVERAGE)
    with pytest.raises(CapabilityError, match="the runtime averages parallel pipelines where it is told how"):
        make_pipeline(case, method=schedule)


APART = [
    Combine("average", every=2),
    Combine("bmuf", every=2, momentum=0.7),
    Combine("elastic", every=2),
    Combine("wsp", every=2),
    Combine("wsp", every=2, share=0.5),
]


def overwrite(pipeline: Pipeline, pipelines: tuple[int, ...] = (0, 1)) -> None:
    """Give some of the pipelines other weights, the same to each."""
    for rank in pipeline._ranks:
        for stage in rank.stages.values() if rank.key.pipeline in pipelines else ():
            for name, parameter in stage.module.tensors.trained.items():
                draw = torch.Generator().manual_seed(len(name))
                with torch.no_grad():
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw))


@pytest.mark.parametrize("combine", APART, ids=lambda combine: f"{combine.kind}-{combine.share}")
def test_what_is_written_between_two_runs_is_a_new_beginning(combine: Combine) -> None:
    """What pipelines have in common as well; without a state of the optimizer it is that of a new pipeline."""
    case = Case("1f1b", 2, 2, width=2, loss="even", rate=False, spans=(8,), skips=())
    used, new = (
        make_pipeline(case, combine=combine, optimizer=lambda named: torch.optim.SGD(named, lr=0.1)) for _ in range(2)
    )
    batches = make_batches(case)
    list(used.run(batches[:4]))
    before = {name: weight.clone() for name, weight in used.state_dict().items()}
    overwrite(used)
    overwrite(new)
    written = {name: weight.clone() for name, weight in used.state_dict().items()}
    assert any(not torch.equal(weight, before[name]) for name, weight in written.items())
    assert all(torch.equal(weight, new.state_dict()[name]) for name, weight in written.items())
    for pipeline in (used, new):
        list(pipeline.run(batches[4:]))
    assert_close(states_of(used), states_of(new), 0.0)


@pytest.mark.parametrize("combine", APART, ids=lambda combine: f"{combine.kind}-{combine.share}")
@pytest.mark.parametrize("asked", [True, False])
def test_what_is_written_into_one_pipeline_alone_is_refused(combine: Combine, asked: bool) -> None:
    """Also where the state has been asked for in between."""
    case = Case("1f1b", 2, 2, width=2, loss="even", spans=(4,), skips=())
    pipeline, batches = make_pipeline(case, combine=combine), make_batches(case)
    list(pipeline.run(batches[:2]))
    overwrite(pipeline, (0,))
    if asked:
        pipeline.state_dict()
    with pytest.raises(ConfigError, match="weights of stage 0 were written into between two runs, but not the same"):
        list(pipeline.run(batches[2:]))
