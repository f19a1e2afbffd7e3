"""What an evaluation finds is everywhere before the batch that an early stop would end at has been announced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from penstock.runtime.execute.evaluation_without_draining import Evaluating
from penstock.train.setup.early_stopping import Patience, known_after
from support.cases import Case, make_batches, make_pipeline
from support.pool import Pool
from support.smallest_batch import least


def announced(group: dist.ProcessGroup, case: Case, every: int) -> dict[int, int]:
    """Per version, how many batches this rank had asked for when it heard of its evaluation."""
    asked = 0

    def data() -> Iterator[Any]:
        nonlocal asked
        for batch in make_batches(case):
            asked += 1
            yield batch

    pipeline, found = make_pipeline(case, group), {}
    held_out = make_batches(case)[:1]
    for report in pipeline.run(data(), evaluate=Evaluating(every, lambda: held_out)):
        for evaluation in report.evaluated:
            found[evaluation.version] = asked
    return found


@pytest.mark.parametrize(
    ("method", "depth", "more", "width"),
    [
        ("2bw", 2, 0, 1),
        ("2bw", 4, 0, 1),
        ("2bw-eager", 3, 0, 1),
        ("1f1b", 3, 0, 1),
        ("stash", 4, 0, 1),
        ("2bw", 2, 1, 2),
    ],
)
def test_all_ranks_hear_in_time(pool: Pool, method: str, depth: int, more: int, width: int) -> None:
    m = least(method, depth) + more
    case = Case(method, depth, m, width=width, spans=(24,), skips=(), clip=0.6)
    for heard in pool.submit(announced, case, 3, ranks=depth * width):
        assert len(heard) >= 4
        for version, asked in heard.items():
            patience = Patience(1, known_after(depth, m))
            patience.record(version, None)
            assert asked <= patience.end
