"""The lines that errors say to write are run as they are, and train what plain torch would."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import ConfigError, DataError
from penstock.runtime.attribute_hints import ADVICE, HABITS

X = torch.linspace(-1, 1, 24).reshape(4, 6)
Y = X[:, :3].tanh()


class Two(nn.Module):
    """Takes a pair, or a dict of two."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 3)

    def forward(self, parts: Any) -> Tensor:
        first, second = parts.values() if isinstance(parts, dict) else parts
        found: Tensor = self.map(torch.cat((first, second), 1))
        return found


def make_pipeline(
    first: Callable[[], nn.Module] = lambda: nn.Linear(6, 3), loss: Any = F.mse_loss
) -> penstock.Pipeline:
    torch.manual_seed(0)
    blocks = {"first": first(), "second": nn.Linear(3, 3)}
    return penstock.Pipeline(
        blocks, "1f1b", stages=2, microbatches=2, loss=loss, optimizer=lambda named: torch.optim.SGD(named, lr=0.1)
    )


def lines_of(error: BaseException) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if line.startswith("    ")]


HALVES = X[:, :2], X[:, 2:]
BATCHES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "a dict": (lambda: nn.Linear(6, 3), {"input_ids": X, "targets": Y}),
    "a dict of three": (Two, {"a": HALVES[0], "label": Y, "b": HALVES[1]}),
    "three tensors": (Two, (*HALVES, Y)),
    "three tensors in a list": (Two, [*HALVES, Y]),
    "a list of two lists": (Two, [list(HALVES), [Y, Y]]),
}


@pytest.mark.parametrize("case", BATCHES)
def test_lines_for_batches_of_another_form(case: str) -> None:
    first, batch = BATCHES[case]
    pairs = case == "a list of two lists"  # the target is a pair, too, of which the loss takes the first
    pipeline = make_pipeline(first, (lambda output, target: F.mse_loss(output, target[0])) if pairs else F.mse_loss)
    with pytest.raises(DataError) as refused:
        list(pipeline.run([batch]))
    lines = lines_of(refused.value)
    names: dict[str, Any] = {"pipeline": pipeline, "loader": [batch]}
    exec("\n".join(lines[:1] if pairs else lines), names)  # the second one is for microbatches
    if pairs:
        list(pipeline.run(names["batches"]))
    assert pipeline.batches == 1
    plain = make_pipeline()
    list(plain.run([(X, Y)]))
    for found, wanted in zip(pipeline.full_state_dict().values(), plain.full_state_dict().values(), strict=True):
        torch.testing.assert_close(found, wanted)


def test_lines_for_microbatches_that_a_loader_has_made_lists_of() -> None:
    """torch collates pairs as lists."""
    pipeline = make_pipeline()
    loader = [[[X[:2], Y[:2]], [X[2:], Y[2:]]]]
    with pytest.raises(DataError, match="could be a whole batch") as refused:
        list(pipeline.run(loader))
    names: dict[str, Any] = {"loader": loader}
    exec(lines_of(refused.value)[1], names)
    assert [report.weight for report in pipeline.run(names["batches"])] == [4.0]


@pytest.mark.parametrize("loss", [nn.MSELoss(reduction="sum"), nn.MSELoss(reduction="none")])
def test_lines_for_a_loss_that_sums(loss: nn.Module) -> None:
    with pytest.raises(ConfigError) as refused:
        make_pipeline(loss=loss)
    names: dict[str, Any] = {"torch": torch, "penstock": penstock, "F": F}
    rest = "[torch.nn.Linear(6, 3)], '1f1b', stages=1, microbatches=2, optimizer=torch.optim.SGD"
    exec("\n".join(lines_of(refused.value)).replace("Pipeline(...", f"Pipeline({rest}"), names)
    (report,) = names["pipeline"].run([(X, Y)])
    model = nn.Linear(6, 3)
    model.load_state_dict({name[2:]: tensor for name, tensor in names["pipeline"].full_state_dict().items()})
    assert report.weight == Y.numel()


def test_lines_for_the_state_of_the_unsplit_model() -> None:
    model = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 3))
    pipeline = penstock.Pipeline(
        {"head": model[0], "tail": model[1]}, "1f1b", stages=2, microbatches=2, loss=F.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )  # fmt: skip
    state = {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()}
    with pytest.raises(ConfigError, match="belongs to no block") as refused:
        pipeline.load_state_dict(state)
    exec("\n".join(lines_of(refused.value)), {"model": model, "state": state})
    list(pipeline.run([]))
    assert all(torch.equal(found, torch.ones_like(found)) for found in pipeline.full_state_dict().values())


def names_for_hints(tmp_path: Any) -> dict[str, Any]:
    loader = [(X, Y)] * 3
    return {
        "penstock": penstock, "torch": torch, "itertools": itertools, "loader": loader, "validation_loader": loader,
        "folder": str(tmp_path), "pipeline": make_pipeline(), "group": None, "blocks": [nn.Linear(6, 3)],
    }  # fmt: skip


HINTS = [
    "for report in pipeline.run(loader): ...",
    "for epoch in range(2): [None for report in pipeline.run(loader)]",
    "itertools.islice(loader, 100)",
    "penstock.Evaluating(50, validation_loader)",
    "checkpoints = penstock.Checkpoints(pipeline, folder)",
    "penstock.Checkpoints(pipeline, folder)",
    "pipeline.evaluate(loader)",
    "pipeline.full_state_dict()",
    "pipeline.state_dict()",
    "pipeline.optimizers()",
    "print(penstock.summary(pipeline))",
    "penstock.check(pipeline.schedule).draw()",
    "penstock.draw_timeline(pipeline.timeline())",
    "lambda named: torch.optim.AdamW(named, lr=1e-3)",
    "penstock.Microbatches(8, in_flight='auto')",
    "penstock.Group(group, timeout=60.0)",
]


def test_what_hints_say_to_write_runs(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Each stands in a hint, but for the epochs, which are two loops there; and no hint calls anything else."""
    said = " ".join([*HABITS.values(), *ADVICE.values()])
    for code in HINTS:
        assert "for epoch" in code or code in said, code
        exec(code, names_for_hints(tmp_path))
    for name in set(re.findall(r"\bpenstock\.([A-Za-z_]+)", said)):
        assert hasattr(penstock, name), name
    for name in set(re.findall(r"\bpipeline\.([a-z_]+)", said)):
        assert hasattr(names_for_hints(tmp_path)["pipeline"], name), name
