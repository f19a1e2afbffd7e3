"""Numbers that a loss returns beside its sum, outputs without a loss, and single steps."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import ConfigError, DataError
from support.pool import Pool


def counting(output: Tensor, target: Tensor) -> tuple[Tensor, int, dict[str, Any]]:
    right = (output.argmax(-1) == target.argmax(-1)).sum()
    return F.mse_loss(output, target, reduction="sum"), target.numel(), {"right": right, "samples": len(target)}


def blocks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(3, 4), nn.Tanh()).double(), nn.Linear(4, 2).double()]


def data(sizes: tuple[int, ...] = (8, 5, 9)) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(n, 3, generator=generator).double(), torch.randn(n, 2, generator=generator).double())
        for n in sizes
    ]


def make(method: str = "1f1b", group: dist.ProcessGroup | None = None, **options: Any) -> penstock.Pipeline:
    return penstock.Pipeline(
        options.pop("blocks", None) or blocks(), method, stages=2, group=penstock.Group(group, 20.0),
        **{"loss": counting, "microbatches": 2, "optimizer": lambda named: torch.optim.SGD(named, lr=0.1)} | options,
    )  # fmt: skip


def plainly() -> tuple[list[dict[str, float]], list[dict[str, float]], list[Tensor]]:
    """Train as everybody does; returns numbers in training and after it, and outputs after it."""
    model = nn.Sequential(*blocks())
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for x, y in data():
        optimizer.zero_grad()
        output = model(x)
        F.mse_loss(output, y).backward()
        optimizer.step()
        found.append({"right": float((output.argmax(-1) == y.argmax(-1)).sum()), "samples": float(len(x))})
    outputs = [model(x).detach() for x, _ in data()]
    right = [float((output.argmax(-1) == y.argmax(-1)).sum()) for output, (_, y) in zip(outputs, data(), strict=True)]
    return found, [{"right": sum(right), "samples": 22.0}], outputs


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("1f1b", {}),
        ("zb-h1", {}),
        ("1f1b", {"data_parallel": 2}),
        ("1f1b", {"max_grad_norm": 1e6, "recompute": "block"}),
        ("zb-h2", {"data_parallel": 2}),
    ],
)
def test_numbers_beside_the_loss_are_added_up(method: str, options: Any) -> None:
    wanted, after, _ = plainly()
    pipeline = make(method, **options)
    reports = list(pipeline.run(data(), evaluate=penstock.Evaluating(3, data())))
    assert [report.numbers for report in reports] == wanted
    evaluated = pipeline.evaluate(data())
    assert evaluated is not None
    mean, weight = evaluated  # still a pair
    assert (mean, weight) == (evaluated.mean, 44.0)
    assert [evaluated.numbers] == after
    late = [found for report in reports for found in report.evaluated] + list(pipeline.evaluated())
    assert [dict(found.numbers) for found in late] == after


def test_evaluations_on_the_way_add_up_numbers_of_parallel_pipelines() -> None:
    pipeline = make("2bw", data_parallel=2)
    reports = list(pipeline.run(data((8,) * 4), evaluate=penstock.Evaluating(1, data())))
    found = [each for report in reports for each in report.evaluated] + list(pipeline.evaluated())
    assert [each.numbers["samples"] for each in found] == [22.0] * 4


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"auxiliary": 1.0}, "is the name of those of blocks"),
        ({"a": "b"}, "dict of numbers"),
        (3.0, "got tuple"),
        ({str(k): 1.0 for k in range(9)}, "at most 8"),
        (itertools.cycle([{"a": 1.0}, {}]), r"the numbers \['a'\] before, and \[\] now"),
    ],
)
def test_what_are_no_numbers_is_refused(numbers: Any, said: str) -> None:
    def loss(output: Tensor, target: Tensor) -> Any:
        return (
            F.mse_loss(output, target, reduction="sum"),
            target.numel(),
            next(numbers) if isinstance(numbers, itertools.cycle) else numbers,
        )

    with pytest.raises(ConfigError, match=said):
        list(make(loss=loss, data_parallel=2).run(data()))


@pytest.mark.parametrize(("method", "options"), [("1f1b", {}), ("2bw", {"data_parallel": 2}), ("zb-v", {})])
def test_outputs_come_in_order_for_batches_of_any_size(method: str, options: Any) -> None:
    _, _, wanted = plainly()
    made, batches = blocks(), [*data(), (torch.ones(1, 3).double(), None)]
    pipeline = make(method, blocks=made if method != "zb-v" else [*made[0], nn.Identity(), made[1]], **options)
    found = list(pipeline.predict(batches))
    alone = list(pipeline.predict(x for x, _ in batches))
    model = nn.Sequential(*made)
    for output, other, (x, _) in zip(found, alone, batches, strict=True):
        torch.testing.assert_close(output, model(x).detach(), rtol=1e-12, atol=1e-12)
        assert torch.equal(output, other)
        assert not output.requires_grad
    if method == "1f1b":
        list(pipeline.run(data()))
        for output, plain in zip(pipeline.predict(data()), wanted, strict=True):
            torch.testing.assert_close(output, plain, rtol=1e-12, atol=1e-12)


def test_outputs_that_are_trees_are_joined() -> None:
    def both(x: Tensor) -> Any:
        return {"x": x, "mean": x.mean(), "kind": "both"}

    pipeline = make(blocks=[*blocks(), both], partition=[1, 2])
    (found,) = pipeline.predict([torch.ones(5, 3).double()])
    assert (found["x"].shape, found["mean"].shape, found["kind"]) == ((5, 2), (2,), "both")


@pytest.mark.parametrize("dims", [1, {"inputs": 1, "targets": 1}], ids=str)
def test_outputs_are_joined_along_the_dimension_of_samples(dims: Any) -> None:
    made, x = blocks(), torch.rand(4, 5, 3).double()
    (found,) = make(blocks=made, microbatches=penstock.Microbatches(2, dims=dims)).predict([x])
    torch.testing.assert_close(found, nn.Sequential(*made)(x).detach(), rtol=1e-12, atol=1e-12)


def test_a_loop_over_outputs_can_be_left_and_a_failure_is_raised_in_order() -> None:
    pipeline = make()
    for _ in pipeline.predict(torch.ones(4, 3).double() for _ in itertools.count()):
        break
    with pytest.raises(DataError, match="no tensor that could be split"):
        list(pipeline.predict([torch.ones(4, 3).double(), 3]))
    assert len(list(pipeline.run(data()))) == 3


def test_a_step_is_a_run_of_one_batch_where_batches_do_not_overlap() -> None:
    stepped, whole = make(), make()
    found = [stepped.step(batch) for batch in data()]
    wanted = list(whole.run(data()))
    assert [(report.batch, report.loss) for report in found] == [(report.batch, report.loss) for report in wanted]
    assert all(map(torch.equal, stepped.full_state_dict().values(), whole.full_state_dict().values()))
    with pytest.raises(ConfigError, match="batches of 2bw overlap"):
        make("2bw").step(data()[0])


class Adding(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        penstock.auxiliary(h.square().mean(), 0.5)
        return h


def trained(group: dist.ProcessGroup | None) -> list[Any]:
    torch.manual_seed(0)
    pipeline = make("1f1b", group, blocks=[Adding(3, 4).double(), nn.Linear(4, 2).double()])
    found: list[Any] = [(report.loss, dict(report.numbers)) for report in pipeline.run(data())]
    evaluated = pipeline.evaluate(data())
    assert evaluated is not None
    weights = {name: weight.clone() for name, weight in pipeline.state_dict().items()}
    return [found, (evaluated, evaluated.numbers), list(pipeline.predict(data())), weights]


def test_processes_add_up_numbers_and_auxiliary_losses_as_one_does(pool: Pool) -> None:
    """To the bits; outputs are on the rank of the last stage."""
    wanted = trained(None)
    first, last = pool.submit(trained, ranks=2)
    assert last[0] == wanted[0]
    assert first[0] == [(None, {})] * 3
    assert first[1] == last[1] == wanted[1]
    assert first[2] == [None] * 3
    assert all(map(torch.equal, last[2], wanted[2]))
    assert all(torch.equal(weight, wanted[3][name]) for name, weight in {**first[3], **last[3]}.items())


def test_labels_are_no_input_of_predictions() -> None:
    def names(batch: Any) -> Any:
        return batch["x"] * len(batch)

    x = torch.ones(4, 3).double()
    (found,) = make(blocks=[names, *blocks()], partition=[2, 1]).predict([{"x": x, "labels": torch.ones(4, 2)}])
    torch.testing.assert_close(found, nn.Sequential(*blocks())(x).detach())
