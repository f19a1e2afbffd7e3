"""Failures between wave-synchronous pipelines, and what does not go with waves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.comm.collective.wave_exchange import LocalExchange
from penstock.comm.core.rank_grid import Holder
from penstock.errors import ConfigError, PenstockError, TransportError
from penstock.options.updates import Divergence
from penstock.schedule.methods.data_parallel_sync import Combine
from support.cases import Case, make_batches, make_pipeline, mean_loss
from support.schedules import make_schedule
from support.wave_cases import WAVES, case_of


def test_a_pipeline_that_fails_is_no_reason_to_go_on() -> None:
    """The other one waits for its wave, and the error is its own."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if target[0, 0] < 0:
            raise ValueError("a target that cannot be")
        return mean_loss(output, target)

    case = case_of("1f1b", 2, 1, 2, "momentum", spans=(8,))
    batches = make_batches(case)
    batches[3][1][1][0, 0] = -7
    pipeline = make_pipeline(case, combine=Combine("wsp", every=2, distance=1), loss=loss)
    with pytest.raises(ValueError, match="a target that cannot be"):
        list(pipeline.run(batches))
    with pytest.raises(PenstockError, match="broke in an earlier run"):
        pipeline.snapshots()


def test_waves_that_never_come_are_named() -> None:
    """In a group whose other member does not post, here."""
    stage = make_schedule("1f1b", 1, 1).stages[0]
    members = tuple(Holder(r, stage) for r in range(2))
    posted = LocalExchange().post(members, members[1], 3, [[torch.zeros(1)], [torch.ones(1)]])
    with pytest.raises(TransportError, match=r"the end of wave 3: nothing moved on the lane of waves from pipeline 0"):
        posted.came[0].wait(0.01, "the end of wave 3")
    assert not posted.sent.done


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"kind": "wsp", "distance": -1}, "distance must be a whole number of at least 0, got -1"),
        ({"kind": "wsp", "distance": True}, "distance must be a whole number"),
        ({"kind": "wsp", "lag": 1}, "lag must be a whole number of waves from 0 to distance=0, one for each pipe"),
        ({"kind": "wsp", "distance": 2, "lag": [0, 3]}, "from 0 to distance=2, one for each pipeline, 'record'"),
        ({"kind": "wsp", "distance": 2, "lag": []}, "or recorded lags; got ()"),
        ({"kind": "wsp", "distance": 2, "lag": "soon"}, "or recorded lags; got 'soon'"),
        ({"kind": "wsp", "share": 0.0}, "share must be a positive number, got 0.0"),
        ({"kind": "wsp", "optimizer_state": "average"}, "optimizer_state is an option of average, bmuf, elastic, not"),
        ({"kind": "average", "distance": 1}, "distance is an option of wsp, not of average"),
        ({"kind": "reduce", "lag": 0}, "lag is an option of wsp, not of reduce"),
    ],
    ids=str,
)
def test_choices_of_waves_that_make_no_sense(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Combine(**arguments)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("method", "changes", "said"),
    [
        ("1f1b", {"width": 1}, "combine=wsp needs parallel pipelines; set data_parallel"),
        ("1f1b", {"combine": Combine("wsp", distance=1, lag=[0, 1, 0])}, "lag has 3 numbers for 2 pipelines; give one"),
        ("1f1b", {"reduce": "fast"}, "reduce=fast cannot be used with combine=wsp"),
        ("1f1b", {"ema_decay": 0.9}, "ema_decay=0.9 and combine=wsp do not go together"),
        ("1f1b", {"delays": 2}, "delays cannot be used with combine=wsp"),
        ("1f1b", {"divergence": Divergence()}, "so they would not agree on a divergence"),
        ("zb-h2-post", {}, "use the method without post-validation"),
        ("newest", {}, "under which a microbatch reads several versions"),
    ],
    ids=str,
)
def test_what_does_not_go_with_waves(method: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_pipeline(Case(method, 2, 4, width=2), **({"combine": WAVES} | changes))
    assert said in str(caught.value)
