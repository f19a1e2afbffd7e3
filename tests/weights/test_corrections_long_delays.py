"""Many updates, one for each microbatch: of eight stages the first is seven updates late, and all buffers rotate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from support.cases import BALANCE, MODELS, VOCABULARY, WIDTH, Case, Residual, assert_same, expected, train
from support.correction_cases import KINDS, case_of
from support.smallest_batch import least

SPANS = (13, 9)  # one of them skipped


@pytest.mark.long
@pytest.mark.parametrize("depth", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("method", "m", "optimizer"),
    [("stash", 1, "adamw"), ("vertical-sync", 1, "momentum"), ("2bw", 0, "adamw")],
)
def test_versions_of_many_updates(method: str, m: int, optimizer: str, depth: int) -> None:
    """21 updates; one batch makes none."""
    model = "long" if depth == 8 else "mixed"
    case = Case(method, depth, m or least(method, depth), model, optimizer, spans=SPANS)
    assert_same(train(None, case), expected(case))


def sixteen() -> dict[str, Any]:
    middle = {f"{name}{i}": block for i in range(7) for name, block in (("map", Residual()), ("tanh", torch.tanh))}
    return {"table": nn.Embedding(VOCABULARY, WIDTH), **middle, "head": nn.Linear(WIDTH, VOCABULARY)}


@pytest.mark.long
def test_two_groups_on_eight_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """WPipe, which has two stages on each rank."""
    monkeypatch.setitem(MODELS, "sixteen", sixteen)
    monkeypatch.setitem(BALANCE, 16, (1,) * 16)
    case = Case("wpipe", 8, 2, "sixteen", "momentum", spans=SPANS)
    assert_same(train(None, case), expected(case))


@pytest.mark.parametrize("name", ["pipemare", "spectrain-stash", "xpipe", "lwp", "ftpipe", "timeprest"])
def test_corrections_on_eight_stages(name: str) -> None:
    """The last of its optimizers; `test_corrections.py` has the first one, with half of the delay."""
    kind = KINDS[name]
    case = case_of(name, 8, 1, optimizer=kind.optimizers[-1], spans=SPANS)
    assert_same(train(None, case), expected(case, options=kind.options))
