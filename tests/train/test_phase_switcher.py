"""Runs of several phases on four processes: two stages of two parallel pipelines."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from penstock.checkpoint.format import checkpoints
from penstock.errors import CheckpointError
from penstock.runtime.update.decisions import Decisions
from penstock.stage.blocks.loss import Loss
from penstock.stage.trained_stage_weights import TrainedWeights
from penstock.train.config.load import validate_config
from penstock.train.graceful_stop import DrainRequest
from penstock.train.loop import _Loop
from penstock.train.prepare.prepare_run import prepare
from support.pool import Pool
from support.worker_functions import Silent

pytestmark = pytest.mark.processes

AT = 12  # the batch at which training diverges
LAG = 7


@contextmanager
def spike() -> Iterator[None]:
    """Where weights are delayed, the loss of batch 12 is reported to be 50 times what it was."""
    real = Decisions.share

    def share(self: Decisions, batch: int, loss: Loss | None) -> Any:
        if loss is not None and batch == AT and self.delay:
            loss = Loss(50 * loss.total, loss.weight)
        return real(self, batch, loss)

    with patch.object(Decisions, "share", share):
        yield


@contextmanager
def ruin() -> Iterator[None]:
    """Where weights are delayed, those of stage 0 are not numbers from version 12 on."""
    real = TrainedWeights.step

    def step(self: TrainedWeights, batch: int, factor: float, keeps_old: bool) -> None:
        real(self, batch, factor, keeps_old)
        if batch == AT - 1 and keeps_old and self.store.where.startswith("stage 0 "):
            for view in self.store.master.views.values():
                view.fill_(math.nan)

    with patch.object(TrainedWeights, "step", step):
        yield


PLANTS = {"spike": spike, "ruin": ruin}


def train(group: dist.ProcessGroup, values: dict[str, Any], folder: str, plant: str) -> tuple[dict[str, Tensor], Any]:
    """One rank's run; its weights, and where it thinks that methods have changed."""
    with PLANTS[plant]():
        loop = _Loop(
            prepare(validate_config(values)), Path(folder), _get_default_store(), Silent(), DrainRequest(None), group
        )
        loop.run()
    weights = {name: w.clone() for name, w in loop.pipeline.state_dict().items()}
    return weights, loop.phases._course.falls


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return {
        "data": str(text),
        "batches": 28,
        "width": 2,
        "microbatches": 2,
        "microbatch_size": 1,
        "sample_length": 0,
        "validation_samples": 4,
        "lr_schedule": {"warm_up": 0, "decay": "none"},
        "model": {"layers": 2, "width": 16, "heads": 2, "context": 8},
        "checkpoint": {"every": 5},
        "sync": {"batches": 3},
        "fallback": {"when": ["spike", "nonfinite"], "window": 6, "spike": 4.0},
    }


def run(pool: Pool, values: dict[str, Any], folder: Path, plant: str = "spike") -> tuple[dict[str, Tensor], list[Any]]:
    """The weights of all ranks, and the falls that all agree on."""
    folder.mkdir(exist_ok=True)
    found = pool.submit(train, values, str(folder), plant, ranks=4)
    weights: dict[str, Tensor] = {}
    for part, falls in found:
        assert falls == found[0][1]
        for name, w in part.items():
            assert weights.setdefault(name, w).equal(w)
    return weights, found[0][1]


def lines(folder: Path, key: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if key in line]


def switches(folder: Path) -> list[tuple[int, str]]:
    return [(line["switch"], line["method"]) for line in lines(folder, "switch")]


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], w) for name, w in wanted.items())


@pytest.mark.long
def test_a_spike_is_followed_by_synchronous_batches_whenever_the_run_is_interrupted(
    pool: Pool, values: dict[str, Any], tmp_path: Path
) -> None:
    """In the first phase, between the spike and the switch, at the switch, after it."""
    values["fallback"]["batches"] = 6
    values["evaluate"] = {"every": 3, "samples": 4}
    wanted, falls = run(pool, values, tmp_path / "whole")
    assert [(fall.first, fall.end) for fall in falls] == [(AT + LAG, AT + LAG + 6)]
    order = [(0, "1f1b"), (3, "2bw"), (AT + LAG, "1f1b"), (AT + LAG + 6, "2bw")]
    assert switches(tmp_path / "whole") == order
    (why,) = [line["why"] for line in lines(tmp_path / "whole", "switch") if line["switch"] == AT + LAG]
    assert why.startswith(f"diverged at batch {AT}: the loss was ")
    assert lines(tmp_path / "whole", "batch")[-1]["loss"] < 6
    part = tmp_path / "part"
    stops = (2, 15, AT + LAG, 22)
    for stop in stops:
        run(pool, {**values, "batches": stop}, part)
        assert checkpoints(part)[-1].name == f"batch-{stop:08d}"
    assert_equal(run(pool, values, part)[0], wanted)
    assert set(switches(part)) - {(2, "1f1b"), (22, "1f1b")} == set(order)  # who goes on in a later phase says so
    evaluated = [
        {line["evaluated"]: line["loss"] for line in lines(f, "evaluated")} for f in (tmp_path / "whole", part)
    ]
    assert evaluated[0] == evaluated[1]
    assert sorted(evaluated[0]) == list(range(3, 28, 3))


def test_weights_that_are_no_numbers_are_those_of_a_checkpoint_again(
    pool: Pool, values: dict[str, Any], tmp_path: Path
) -> None:
    """Batch 13 is the first that reads them, so the checkpoint of batch 10 is the last good one."""
    folder = tmp_path / "run"
    weights, falls = run(pool, values, folder, "ruin")
    assert [(fall.first, fall.end) for fall in falls] == [(10, None)]
    assert all(bool(w.isfinite().all()) for w in weights.values())
    (line,) = [line for line in lines(folder, "switch") if "back_from" in line]
    assert (line["switch"], line["back_from"], line["method"]) == (10, AT + 1 + LAG, "1f1b")
    assert line["why"] == f"diverged at batch {AT + 1}: the loss was nan"
    assert [line["batch"] for line in lines(folder, "batch")] == [*range(AT + 1 + LAG), *range(10, 28)]
    assert lines(folder, "validation_loss")[0]["validation_loss"] < 6
    # It is the run that is synchronous from batch 10 on.
    planned = {**values, "fallback": {"at": 10}}
    assert_equal(weights, run(pool, planned, tmp_path / "planned")[0])


@pytest.mark.long
def test_a_spike_may_send_the_run_back_as_well(pool: Pool, values: dict[str, Any], tmp_path: Path) -> None:
    values["fallback"] |= {"restore": "always", "batches": 2}
    values["checkpoint"] = {"every": 4, "keep": 1}
    weights, falls = run(pool, values, tmp_path / "run")
    assert [(fall.first, fall.end) for fall in falls] == [(12, AT + LAG + 2)]
    planned = {**values, "fallback": {"at": 12, "batches": AT + LAG + 2 - 12}}
    assert_equal(weights, run(pool, planned, tmp_path / "planned")[0])


def test_without_a_checkpoint_from_before_it_is_an_error(pool: Pool, values: dict[str, Any], tmp_path: Path) -> None:
    values["checkpoint"] = {"every": 2, "keep": 9}
    assert len(run(pool, values, tmp_path / "more", "ruin")[1]) == 1  # as the message advises
    values["checkpoint"]["keep"] = 1  # that of batch 12 is the first one that is ruined
    said = r"diverged at batch 13 .*no checkpoint of batch 13 or before.* keep more of them \(checkpoint\.keep\)"
    with pytest.raises(CheckpointError, match=said):
        run(pool, values, tmp_path / "run", "ruin")
    pool.close()  # a rank may still have been in a call that all make together
