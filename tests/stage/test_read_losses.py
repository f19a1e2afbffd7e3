"""Loss sums that are still on a device are read together."""

from __future__ import annotations

import pytest
import torch

from penstock.runtime.rank.batch_reports import LossLedger
from penstock.stage.blocks.loss import Loss, UnreadLoss, read_losses


def test_numbers_and_tensors_are_read_in_their_order() -> None:
    third = torch.tensor(1 / 3)
    losses = [UnreadLoss(third, 1.0), UnreadLoss(0.5, 2.0), UnreadLoss(torch.tensor(0.1, dtype=torch.float64), 3.0)]
    assert read_losses(losses) == [Loss(float(third), 1.0), Loss(0.5, 2.0), Loss(0.1, 3.0)]
    assert read_losses([]) == []


def test_a_batch_waits_for_its_losses_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, looks = LossLedger(1, waits=False), list[int]()
    for k in range(4):
        ledger.add(0, (k, 0), UnreadLoss(torch.tensor(float(k)), 2.0))
    real = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: looks.append(1) or real(self))  # type: ignore[func-returns-value]
    monkeypatch.setattr(torch.Tensor, "__float__", lambda _: pytest.fail("a look of its own"))
    assert ledger.close(0, shares=False) == (0.75, 8.0, {})
    assert looks == [1]
