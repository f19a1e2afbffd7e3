"""Wave-synchronous pipelines and the sequential reference: what optimizers remember and the global model, every bit.

The reference goes on after the last wave; here a run ends with everything added, which is its common model.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.options.passes import low_precision
from penstock.schedule.methods.data_parallel_sync import Combine
from penstock.verify.reference.decisions import Scaling
from penstock.verify.reference.waves import Wsp, train_wsp
from support.cases import (
    BALANCE,
    LOSSES,
    OPTIMIZERS,
    Case,
    Outcome,
    add_state,
    assert_equal_tensors,
    cut,
    make_batches,
    make_blocks,
    make_pipeline,
    warm_up,
)
from support.meetings import states_of

RESTLESS = Scaling(initial=2.0**24, growth=2.0, backoff=0.5, interval=2)
CASES = [
    (Case("1f1b", 2, 2, "restless", width=2, spans=(12,), clip=0.4), Combine("wsp", every=2, distance=1)),
    (Case("2bw", 2, 2, optimizer="sgd", width=3, spans=(12,)), Combine("wsp", every=3, distance=1)),
    (Case("2bw", 2, 2, loss="spiky", width=2, spans=(12,), scaling=RESTLESS, spikes=(1, 2)), Combine("wsp", every=2)),
    (Case("stash", 3, 2, width=2, spans=(12,)), Combine("wsp", every=2, distance=3, lag=[3, 1])),
    (Case("2bw", 4, 4, width=2, spans=(21,), clip=0.4), Combine("wsp", every=3, distance=1)),
    (Case("stash", 8, 2, "long", width=2, spans=(20,)), Combine("wsp", every=2, distance=2)),
    (Case("vertical-sync", 2, 1, width=2, spans=(12,), clip=0.4), Combine("wsp", every=4, distance=1)),
    (Case("1f1b", 2, 2, width=2, spans=(12,), precision="bf16"), Combine("wsp", every=2, distance=2)),
    (Case("stash", 2, 2, width=2, spans=(12,)), Combine("wsp", every=2, distance=2, lag="record")),
]


def name_of(value: Any) -> str:
    return value.method if isinstance(value, Case) else f"every{value.every}-within{value.distance}"


@pytest.mark.parametrize(("case", "combine"), CASES, ids=name_of)
def test_every_pipeline_is_that_of_the_reference(case: Case, combine: Combine) -> None:
    pipeline = make_pipeline(case, combine=combine)
    list(pipeline.run(make_batches(case)))
    lags = pipeline.lags()
    lag = combine.lags(case.width) if combine.chosen else lambda s, r, q, w: lags[f"{r}/{s}"][2 * w + 1][q]
    wanted = train_wsp(
        cut(make_blocks(case.model), BALANCE[case.depth]),
        LOSSES[case.loss],
        make_batches(case),
        Wsp(case.width, combine.every, lag),
        method=case.method,
        optimizer=OPTIMIZERS[case.optimizer],
        rate=warm_up,
        divisor=case.divisor if case.precision == "fp32" else 8.0,
        clip=case.clip,
        scaling=case.scaling,
        seed=case.seed,
        precision=low_precision(case.precision),
    )
    for r, state in states_of(pipeline).items():
        other = Outcome()
        for own in wanted.pipelines[r].optimizers:
            add_state(other, own)
        assert other.state.keys() == state.optimizer.keys()
        for name, remembered in other.state.items():
            assert_equal_tensors(state.optimizer[name], remembered, f"pipeline {r}, {name}")
        for name, weight in wanted.common[-1].items():
            assert torch.equal(state.model[name], weight), (r, name)
            assert torch.equal(state.weights[name], weight), (r, name)
