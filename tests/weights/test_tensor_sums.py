"""Any change of tensors changes their sums, wherever they lie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.weights.memory.tensor_sums import tensor_sums


def sum_of(tensor: Tensor) -> int:
    return tensor_sums({"it": tensor})["it"]


TYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", [0, 1, 7, 4099, 70001])
def test_every_bit_counts(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(0)
    tensor = torch.rand(size).to(dtype)
    seen, octets = {sum_of(tensor)}, tensor.view(torch.uint8)
    places = {int(place) for place in torch.linspace(0, max(len(octets) - 1, 0), 20)} if size else set()
    for place in places:
        before = octets[place].clone()
        octets[place] ^= 1 << place % 7 if dtype != torch.bool else 1
        seen.add(sum_of(tensor))
        octets[place] = before
    assert len(seen) == 1 + len(places)


def test_order_counts_and_place_does_not() -> None:
    """Rows, columns and single values that change places; views at odd addresses; other strides."""
    torch.manual_seed(0)
    matrix = torch.rand(300, 4096 * 2)
    swapped = matrix.clone()
    swapped[0, 0], swapped[7, 11] = matrix[7, 11], matrix[0, 0]
    shuffled = [matrix.flip(0), matrix.flip(1), matrix.roll(2, 1), matrix.roll(4096, 1), swapped]
    assert len({sum_of(one) for one in (matrix, *shuffled, -matrix, matrix.double(), -matrix.double())}) == 9
    moved = torch.cat([torch.zeros(1), matrix.reshape(-1)])[1:].view_as(matrix)
    assert sum_of(moved) == sum_of(matrix) == sum_of(matrix.t().contiguous().t())


def test_types_and_shapes_count() -> None:
    zeros = [torch.zeros(8), torch.zeros(2, 4), torch.zeros(8, dtype=torch.int32), torch.zeros(16, dtype=torch.int16)]
    assert len({sum_of(one) for one in zeros}) == 4


def test_sums_of_several_are_by_name() -> None:
    tensors = {"a": torch.ones(3), "b": torch.ones(3), "c": torch.nn.Parameter(torch.zeros(3))}
    found = tensor_sums(tensors)
    assert list(found) == ["a", "b", "c"]
    assert found["a"] == found["b"] != found["c"]
    assert tensor_sums({}) == {}
