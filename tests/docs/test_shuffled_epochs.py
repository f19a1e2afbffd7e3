"""The lines of docs/start.md that go on within an epoch of a shuffled DataLoader train on every batch once."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import penstock

PAGE = Path(__file__).parents[2] / "docs" / "start.md"


def train(folder: Path, epochs: int, leave_after: int | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Run the lines of the page, as a script does that is started again; leave after some batches, as if killed."""
    (code,) = re.findall(r"```python\n(import itertools\n\ngenerator = .*?)```", PAGE.read_text(), re.DOTALL)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    pipeline = penstock.Pipeline(
        model, "2bw", stages=2, microbatches=2, loss=F.mse_loss, optimizer=lambda named: torch.optim.Adam(named, 1e-2)
    )
    inputs = torch.randn(80, 4, generator=torch.Generator().manual_seed(2))
    losses: list[float] = []

    def note(loss: float) -> None:
        losses.append(loss)
        if len(losses) == leave_after:
            raise InterruptedError

    names = {
        "penstock": penstock, "torch": torch, "DataLoader": DataLoader, "pipeline": pipeline, "EPOCHS": epochs,
        "dataset": TensorDataset(inputs, inputs.sum(1, keepdim=True)), "print": note,
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    with contextlib.chdir(folder):
        try:
            exec(code, names)
        except InterruptedError:  # and the run is closed, as nothing holds it
            assert len(losses) == leave_after
            names["checkpoints"].save()
    return losses, pipeline.full_state_dict()


@pytest.mark.parametrize("leave_after", [2, 5, 7])
def test_a_shuffled_loader_goes_on_where_it_was(
    tmp_path: Path, leave_after: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Within the first epoch, at its border, and within the second."""
    whole, wanted = train(tmp_path / "whole", 3, None)
    assert len(whole) == 15
    train(tmp_path / "left", 3, leave_after)
    rest, found = train(tmp_path / "left", 3, None)
    assert rest == whole[-len(rest) :]
    assert 0 < len(rest) <= 15 - leave_after
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert "begin again" not in caplog.text
