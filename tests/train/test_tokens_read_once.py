"""All tokens of an array are read by one rank of a job, and the others hear what it has found."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

from penstock.errors import DataError
from penstock.train.config.load import validate_config
from penstock.train.loop import train
from support.pool import Pool
from support.worker_functions import Silent

pytestmark = pytest.mark.processes

TOKENS = 4000


def values_of(file: Path) -> dict[str, Any]:
    return {
        "method": "1f1b", "stages": 4, "batches": 2, "microbatches": 2, "microbatch_size": 1, "sample_length": 0,
        "validation_samples": 2, "data": str(file), "out": str(file.parent / "runs"),
        "model": {"layers": 2, "width": 8, "heads": 2, "context": 8},
    }  # fmt: skip


def reads_of_a_run(group: dist.ProcessGroup, values: dict[str, Any]) -> tuple[int, str]:
    """How often a rank has looked through the whole array, and what was wrong."""
    del group
    reads, loaded = [], np.load

    class Watched(np.memmap):
        def max(self, *arguments: Any, **named: Any) -> Any:
            reads.append(self.size)
            return super().max(*arguments, **named)

    with mock.patch.object(np, "load", lambda *a, **k: loaded(*a, **k).view(Watched)):
        try:
            train(validate_config(values), None, Silent())
            said = ""
        except DataError as error:
            said = str(error)
    return reads.count(TOKENS), said


@pytest.mark.parametrize(("worst", "said"), [(200, ""), (1 << 25, "holds 33554432, but the numbers of tokens end")])
def test_one_rank_looks_for_the_largest_token(pool: Pool, tmp_path: Path, worst: int, said: str) -> None:
    """A token that is too large is an error on all of them, the same."""
    tokens = np.arange(TOKENS, dtype="<i8") % 100
    tokens[17] = worst
    np.save(tmp_path / "t.npy", tokens)
    first, *others = pool.submit(reads_of_a_run, values_of(tmp_path / "t.npy"), ranks=4)
    assert first[0] == 1
    assert said in first[1]
    assert others == [(0, first[1])] * 3
