"""The lines that errors say to write are run as they are, and train what plain torch would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import ConfigError, DataError

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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"save": 100}, r"save must be a Saving, such as checkpoints.every\(100\).*got 100"),
        ({"save": penstock.Saving(0, print)}, "save: every must be a whole number"),
        ({"evaluate": [(X, Y)] * 3}, r"evaluate must be penstock.Evaluating\(every=50, data=loader\)"),
        (
            {"evaluate": penstock.Evaluating(2, iter([(X, Y)] * 3))},
            "data is a list_iterator, which the first evaluation",
        ),
        ({"evaluate": penstock.Evaluating(0, [(X, Y)] * 3)}, "evaluate: every must be a whole number"),
    ],
)
def test_plans_are_checked_when_run_is_called(options: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_pipeline().run([(X, Y)] * 3, **options)


@pytest.mark.parametrize("saved", ["runs/mine", Path("runs/mine"), {"0.weight": torch.zeros(4, 3)}], ids=str)
def test_what_is_no_saved_state(saved: Any) -> None:
    with pytest.raises(ConfigError, match=r"to load a checkpoint: penstock.Checkpoints\(pipeline, folder\).load\(\)"):
        make_pipeline().load(saved)


def test_arguments_in_another_order(tmp_path: Path) -> None:
    pipeline = make_pipeline()
    with pytest.raises(ConfigError, match=r"the number of batches comes first: penstock.Evaluating\(50, loader\)"):
        pipeline.run([(X, Y)], evaluate=penstock.Evaluating([(X, Y)], 50))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"the pipeline comes first: penstock.Checkpoints\(pipeline, '.*mine'\)"):
        penstock.Checkpoints(tmp_path / "mine", pipeline)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Checkpoints takes the pipeline, not a Linear"):
        penstock.Checkpoints(nn.Linear(1, 1), tmp_path)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes 3 positional arguments but 5 were given"):
        penstock.Pipeline([nn.Linear(6, 3)], "1f1b", 2, 2)  # type: ignore[call-overload]


def test_batches_of_1f1b_first_are_no_option_of_a_method() -> None:
    with pytest.raises(ConfigError, match=r"sync is for comparisons .* --set sync.batches=10; .*pipeline.switch"):
        penstock.Pipeline(
            [nn.Linear(6, 3)], "2bw:sync=10", stages=1, microbatches=2, loss=F.mse_loss, optimizer=torch.optim.SGD
        )
