"""Faults to plant in a run, and what came of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from penstock.errors import PenstockError
from penstock.runtime.pipeline import Pipeline
from support.cases import BALANCE, Case, make_batches, make_blocks, make_pipeline


class Fails:
    """A block that does something bad when it meets microbatch `at`."""

    def __init__(self, at: int, deed: Callable[[], object]) -> None:
        self.at, self.deed, self.passed = at, deed, 0

    def __call__(self, x: Tensor) -> Tensor:
        self.passed += 1
        if self.passed == self.at + 1:
            self.deed()
        return x


def divide_by_zero() -> None:
    raise ZeroDivisionError("a block of the user's")


def with_block(stage: int, block: Any, depth: int) -> dict[str, Any]:
    """Blocks and balance with one more block at the start of a stage."""
    items, balance = list(make_blocks("mixed").items()), list(BALANCE[depth])
    items.insert(sum(balance[:stage]), ("extra", block))
    balance[stage] += 1
    return {"blocks": dict(items), "balance": balance}


def refuses_to_go_on(pipeline: Pipeline, case: Case) -> None:
    with pytest.raises(PenstockError, match="broke in an earlier run") as caught:
        list(pipeline.run(make_batches(case)))
    assert caught.value.__cause__ is not None
    with pytest.raises(PenstockError, match="broke in an earlier run"):
        pipeline.evaluate(make_batches(case))


def what_happens(group: dist.ProcessGroup, case: Case, batches: Any, timeout: float, **changes: Any) -> tuple[str, str]:
    """The kind of error on this rank and what it says."""
    try:
        list(make_pipeline(case, group, timeout=timeout, **changes).run(batches))
    except Exception as error:
        return type(error).__name__, " ".join([str(error), *getattr(error, "__notes__", ())])
    return "nothing", ""
