"""Rows of parameters: who owns which, and that neither updates nor norms depend on how they are divided."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from penstock.weights.memory.buffers import Layout
from penstock.weights.memory.row_shards import Rows, RowShards
from penstock.weights.memory.squared_norm import squared_norm
from penstock.weights.optim.optimizer_adapters import _ELEMENTWISE

SHAPES = ((37, 13), (101,), (5,), (), (2, 3, 4), (7, 20001))


def rows_of(tensor: Tensor, holders: int) -> list[Rows]:
    return [RowShards(Layout({"p": tensor}), holders, place).rows("p") for place in range(holders)]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8, 13])
@pytest.mark.parametrize("holders", [1, 2, 3, 4, 8])
def test_rows_are_divided_as_torch_divides_them(count: int, holders: int) -> None:
    """DTensor's Shard(0) takes torch.chunk, and empty tensors where that gives none."""
    tensor = torch.arange(count * 3.0).view(count, 3)
    chunks = [*tensor.chunk(holders), *[tensor[:0]] * holders]
    for rows, chunk in zip(rows_of(tensor, holders), chunks, strict=False):
        assert torch.equal(rows.of(tensor), chunk)


def test_whole_parameters_go_to_whoever_has_the_least() -> None:
    shapes = {"a": (8, 16), "b": (4, 16), "c": (4, 16), "d": (2, 16), "e": ()}
    layout = Layout({name: torch.empty(shape) for name, shape in shapes.items()})
    owned = [set(RowShards(layout, 2, place, whole=True).own(views(shapes))) for place in (0, 1)]
    assert owned == [{"a", "d"}, {"b", "c", "e"}]
    for name, count in (("a", 8), ("b", 4), ("e", 1)):
        first, second = (RowShards(layout, 2, 0, whole=True).rows(name, holder) for holder in (0, 1))
        assert (first.end, second.first) == ((count, count) if name == "a" else (0, 0))


def views(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


def test_what_has_no_dimensions_belongs_to_the_first_holder() -> None:
    tensor = torch.tensor(2.0)
    first, second = (rows.of(tensor) for rows in rows_of(tensor, 2))
    assert first is tensor
    assert second.shape == (0,)


@pytest.mark.parametrize("kind", sorted(_ELEMENTWISE, key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
def test_an_update_of_rows_has_the_bits_of_the_whole_update(kind: type[torch.optim.Optimizer]) -> None:
    """Whatever torch's kernels do in vectors and at their ends."""
    more = {"momentum": 0.9, "weight_decay": 0.01} if kind is torch.optim.SGD else {}
    torch.manual_seed(0)
    for shape in SHAPES[:-1]:
        before = torch.randn(shape)
        gradients = [torch.randn(shape) * 10 ** torch.randn(shape) for _ in range(4)]
        whole = stepped(kind, before.clone(), gradients, **more)
        for holders in (2, 3, 7):
            for rows in rows_of(before, holders):
                own = rows.of(before.clone())
                assert torch.equal(stepped(kind, own, [rows.of(g) for g in gradients], **more), rows.of(whole))


def stepped(kind: type[torch.optim.Optimizer], weights: Tensor, gradients: list[Tensor], **more: float) -> Tensor:
    parameter = nn.Parameter(torch.empty_like(weights))
    parameter.data = weights
    optimizer = kind([parameter], lr=0.01, **more)  # type: ignore[call-arg]
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.data


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("holders", [2, 3])
def test_a_norm_does_not_depend_on_who_has_which_rows(dtype: torch.dtype, holders: int) -> None:
    torch.manual_seed(1)
    tensors = [torch.randn(shape).to(dtype) for shape in (*SHAPES, (3000, 2))]
    whole = math.fsum(squared_norm(tensors)[:2])
    parts = [squared_norm([rows_of(t, holders)[place].of(t) for t in tensors]) for place in range(holders)]
    assert math.fsum(x for part in parts for x in part[:2]) == whole
    assert sum(part.elements for part in parts) == squared_norm(tensors).elements
    exact = sum(float(t.abs().double().square().sum()) for t in tensors)
    assert whole == pytest.approx(exact, rel=1e-2 if dtype == torch.bfloat16 else 1e-6)


def test_many_numbers_are_added_as_exactly_as_few() -> None:
    """Of 3,000 numbers with exponents far apart, zeros and the smallest ones among them."""
    torch.manual_seed(2)
    for power in (0, -150):
        column = torch.randn(3000, dtype=torch.float64) * 10.0 ** torch.randint(-40, 40, (3000,)).double()
        column = column * 10.0**power
        column[:3] = 0.0
        numbers = column.square().tolist()
        total = math.fsum(numbers)
        assert squared_norm([column]) == (total, math.fsum([*numbers, -total]), 3000)
    assert squared_norm([torch.zeros(3000)]) == (0.0, 0.0, 3000)


@pytest.mark.parametrize("wrong", [math.inf, math.nan])
@pytest.mark.parametrize("shape", [(3,), (4000,), (3000, 2)])
def test_a_norm_that_is_not_finite(wrong: float, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape)
    tensor[1] = wrong
    total, rest, _ = squared_norm([tensor])
    assert not math.isfinite(total)
    assert rest == 0.0
