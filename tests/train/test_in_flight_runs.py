"""Runs of `penstock train` over slow links: what they find is in the run folder, and goes on when they are resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from penstock.train.config.load import validate_config
from penstock.train.graceful_stop import DrainRequest
from penstock.train.loop import _Loop
from penstock.train.prepare.prepare_run import prepare
from support.pool import Pool
from support.slow_links import slow_links
from support.worker_functions import Silent

pytestmark = pytest.mark.processes


def train(group: dist.ProcessGroup, values: dict[str, Any], folder: str) -> tuple[dict[str, Tensor], list[float]]:
    """One rank's run; its weights, and the activations in flight on each rank."""
    with slow_links(0.04):  # far longer than a pass, also on a machine with other work
        request = DrainRequest(None)
        loop = _Loop(prepare(validate_config(values)), Path(folder), _get_default_store(), Silent(), request, group)
        loop.run()
    weights = {name: w.clone() for name, w in loop.pipeline.state_dict().items()}
    return weights, [float(held) for held in loop.pipeline.proof.activations]


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return {
        "data": str(text),
        "batches": 12,
        "width": 2,
        "microbatches": 3,
        "microbatch_size": 1,
        "sample_length": 0,
        "validation_samples": 6,
        "lr_schedule": {"warm_up": 0, "decay": "none"},
        "model": {"layers": 2, "width": 16, "heads": 2, "context": 8},
        "checkpoint": {"every": 5},
        "evaluate": {"every": 3, "samples": 6},
        "options": {"in_flight": "auto"},
        "sync": {"batches": 2},
    }


def run(pool: Pool, values: dict[str, Any], folder: Path) -> tuple[dict[str, Tensor], list[float]]:
    """The weights of all ranks, and the activations in flight."""
    folder.mkdir(exist_ok=True)
    found = pool.submit(train, values, str(folder), ranks=4)
    return {name: w for weights, _ in found for name, w in weights.items()}, found[0][1]


def lines(folder: Path, key: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if key in line]


@pytest.mark.long
def test_what_was_found_is_written_and_goes_on_in_a_resumed_run(
    pool: Pool, values: dict[str, Any], tmp_path: Path
) -> None:
    whole, numbers = run(pool, values, tmp_path / "whole")
    (found,) = lines(tmp_path / "whole", "in_flight")
    assert found["from_batch"] == 6  # two are synchronous, four are measured
    assert found["in_flight"] == found["taken"] == numbers
    assert found["taken"] > found["plain"] == [2, 1]
    assert max(found["hops"][0]) > 0.03
    plain, _ = run(pool, values | {"options": {}}, tmp_path / "plain")
    run(pool, values | {"batches": 8}, tmp_path / "parts")
    again, numbers_then = run(pool, values, tmp_path / "parts")
    (told,) = lines(tmp_path / "parts", "in_flight")
    assert told["taken"] == numbers_then
    assert [x["evaluated"] for x in lines(tmp_path / "whole", "evaluated")] == [3, 6, 9, 12]
    assert [x["loss"] for x in lines(tmp_path / "whole", "evaluated")] == [
        x["loss"] for x in lines(tmp_path / "plain", "evaluated")
    ]
    for name, weights in whole.items():
        assert weights.equal(plain[name])
        assert weights.equal(again[name])


def test_a_method_that_comes_back_after_another_is_not_measured_again(
    pool: Pool, values: dict[str, Any], tmp_path: Path
) -> None:
    values |= {"batches": 14, "fallback": {"at": 8, "batches": 2}}
    _, numbers = run(pool, values, tmp_path / "run")
    (found,) = lines(tmp_path / "run", "in_flight")
    assert [line["switch"] for line in lines(tmp_path / "run", "switch")] == [0, 2, 8, 10]
    assert found["taken"] == numbers
