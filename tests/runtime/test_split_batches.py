"""How whole batches are split into microbatches, and which cannot be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from penstock.errors import DataError
from penstock.runtime.data.microbatches import microbatches_of

PAIR = (torch.arange(6.0).reshape(6, 1), torch.arange(6))


@pytest.mark.parametrize("kind", [tuple, list])
def test_parts_differ_by_one_sample_at_most(kind: Callable[[Any], Any]) -> None:
    parts = microbatches_of(kind(PAIR), 4, 0)
    assert [y.tolist() for _, y in parts] == [[0, 1], [2, 3], [4], [5]]
    assert torch.equal(torch.cat([x for x, _ in parts]), PAIR[0])


def test_trees_are_split_leaf_by_leaf() -> None:
    """What is no tensor, or has no dimension, goes to every microbatch."""
    inputs = {"ids": torch.arange(4), "mask": torch.ones(4, 2), "name": "text", "scale": torch.tensor(3.0)}
    parts = microbatches_of((inputs, torch.arange(4)), 2, 0)
    assert [(x["ids"].tolist(), tuple(x["mask"].shape), x["name"], float(x["scale"])) for x, _ in parts] == [
        ([0, 1], (2, 2), "text", 3.0),
        ([2, 3], (2, 2), "text", 3.0),
    ]


@pytest.mark.parametrize(
    "batch", [[PAIR, PAIR], [PAIR] * 3, (PAIR,) * 3, [(None, 1.0), (torch.ones(2), torch.ones(2))]], ids=str
)
def test_microbatches_are_taken_as_they_are(batch: Any) -> None:
    assert microbatches_of(batch, len(batch), 0) is batch


@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize("count", [2, 3])
def test_a_tuple_of_pairs_is_a_whole_batch(kind: Callable[[Any], Any], count: int) -> None:
    masked, weighted = kind([torch.arange(6), torch.ones(6)]), kind([torch.arange(6), torch.zeros(6)])
    parts = microbatches_of((masked, weighted), count, 0)
    (ids, mask), (labels, weights) = parts[0]
    assert (ids.tolist(), mask.tolist()) == (list(range(6 // count)), [1.0] * (6 // count))
    assert (labels.tolist(), weights.tolist()) == (list(range(6 // count)), [0.0] * (6 // count))
    assert (len(parts), type(parts[0][0])) == (count, kind)


A, B = torch.ones(4, 2), torch.ones(4)


class Both(NamedTuple):
    ids: Tensor
    mask: Tensor


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("batch", [[[A, B], [A, B]], [[A, B], (A, B)], [Both(A, B), Both(A, B)]])
def test_a_list_of_two_pairs_could_be_either(count: int, batch: Any) -> None:
    """Of a loader of samples of two pairs, or of two batches of a loader; whatever the number of microbatches."""
    both = r"(?s)batch 5 is a list of two pairs, .*for batch in loader\).*tuple\(pair\) for pair in batch\]"
    with pytest.raises(DataError, match=both):
        microbatches_of(batch, count, 5)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (
            PAIR[0],
            r"batch 5 is a Tensor; a batch is a pair.*For a single batch: pipeline.run\(\[\(inputs, targets\)\]\)",
        ),
        ("text", "batch 5 is a str; a batch is a pair"),
        (
            {"x": A, "labels": B},
            r"(?s)is a dict; .*batches = \(\(batch\['x'\], batch\['labels'\]\) for batch in loader\)",
        ),
        ({"y": A, "x": B}, r"\(\(batch\['x'\], batch\['y'\]\) for"),
        ({"a": A, "b": A, "c": B}, r"\(\(\{key: batch\[key\] for key in \['a', 'b'\]\}, batch\['c'\]\) for"),
        ({"a": A}, "batch 5 is a dict; a batch is a pair"),
        ([A], r"batch 5 has 1 parts; .*What is the loss compared with\? TensorDataset\(inputs, targets\)"),
        ((A, A, B), r"(?s)has 3 parts; .*batches = \(\(\(a, b\), target\) for a, b, target in loader\)"),
        ((A,) * 12, r"\(\(\(\*inputs\), target\)"),
        ((A.numpy(), B.numpy()), "batch 5 has no tensor that could be split, only ndarray; make tensors"),
        (
            (PAIR[0], torch.arange(5)),
            r"shapes inputs \(6, 1\), targets \(5,\), so not as many samples each. If targets belongs to no",
        ),
        ((PAIR[0][:2], PAIR[1][:2]), "batch 5 has 2 samples, too few for 3 microbatches"),
        (("text", 3), "batch 5 has no tensor that could be split, only int, str"),
    ],
)
def test_what_cannot_be_split(batch: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        microbatches_of(batch, 3, 5)
