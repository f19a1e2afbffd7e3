"""How whole batches are split into microbatches, and which cannot be."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask

from penstock import Pipeline
from penstock.comm.p2p.trees import Whole
from penstock.errors import ConfigError, DataError
from penstock.options.parallelism import Dims, Microbatches
from penstock.runtime.data.checksum import checksum
from penstock.runtime.data.microbatches import in_pairs, microbatches_of

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
        ({"y": A, "x": B}, r"(?s)is a dict; .*if it has 'labels'.*\(\(batch\['x'\], batch\['y'\]\) for"),
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
        (
            ({"x": A, "ids": [1, 2, 3]}, B),
            r"of 4 samples, beside which inputs.ids, a list of 3, cannot .*dims=\{'inputs.ids': None\}",
        ),
        (({"x": A, "rows": np.ones((3, 4))}, B), r"inputs.rows, a ndarray of 3, .*penstock.Whole\(...\) around it"),
        (((A, object()), B), "inputs.1, a object, cannot be split"),
        (((A, A.to_sparse()), B), "inputs.1, a torch.sparse_coo tensor of 4, cannot be split"),
        (((A, torch.ones(2, 4)), B), r"inputs.0 \(4, 2\), inputs.1 \(2, 4\), .*If inputs.1 belongs to no sample"),
    ],
)
def test_what_cannot_be_split(batch: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        microbatches_of(batch, 3, 5)


class Encoding(UserDict[str, Any]):
    """A mapping that is no dict, as the BatchEncoding of a tokenizer."""


@dataclass
class Collated:
    """A batch of a collator of one's own."""

    ids: Tensor
    mask: Tensor
    labels: Tensor


class Triple(NamedTuple):
    ids: Tensor
    mask: Tensor
    labels: Tensor


@pytest.mark.parametrize("kind", [dict, Encoding, Collated, Triple])
@pytest.mark.parametrize("alone", [True, False])
def test_labels_of_a_collator_go_to_the_loss(kind: Callable[..., Any], alone: bool) -> None:
    given = kind(ids=torch.arange(4), mask=torch.ones(4, 2), labels=torch.arange(4))
    (inputs, labels), second = microbatches_of(in_pairs(given), 2, 0) if alone else in_pairs([given, given])
    assert list(inputs) == ["ids", "mask"]
    assert (second[0]["ids"].tolist(), second[1].tolist()) == (([2, 3],) * 2 if alone else ([0, 1, 2, 3],) * 2)
    assert torch.equal(inputs["ids"], labels)


def test_a_mapping_within_a_pair_is_split() -> None:
    (first, _), _ = microbatches_of(in_pairs((Encoding(ids=torch.arange(4)), torch.arange(4))), 2, 0)
    assert first["ids"].tolist() == [0, 1]


def test_lists_and_arrays_are_split_like_tensors() -> None:
    inputs = {"x": A, "ids": [1, 2, 3, 4], "tokens": [[1], [2, 3], [], [4]], "rows": np.arange(8).reshape(4, 2)}
    (_, _), (last, _) = microbatches_of((inputs, B), 2, 0)
    assert (last["ids"], last["tokens"], last["rows"].tolist()) == ([3, 4], [[], [4]], [[4, 5], [6, 7]])


def test_a_block_mask_is_split_with_its_batch() -> None:
    places = torch.arange(4)
    mask = create_block_mask(lambda b, h, q, k: q >= k + 64 * places[b], 4, None, 256, 256, device="cpu")
    common = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cpu")
    (first, _), (second, _) = microbatches_of(({"x": A, "mask": mask, "common": common}, B), 2, 0)
    assert first["common"] is second["common"] is common
    for begin, part in ((0, first["mask"]), (2, second["mask"])):
        assert torch.equal(part.to_dense(), mask.to_dense()[begin : begin + 2])
        assert [bool(part.mask_mod(torch.tensor(1), 0, q, 64)) for q in (127, 191, 255)] == [
            q >= 64 + 64 * (begin + 1) for q in (127, 191, 255)
        ]
    with pytest.raises(DataError, match="inputs.mask, a BlockMask, cannot be split"):
        microbatches_of(({"x": A[:3], "mask": mask}, B[:3]), 3, 0)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Any:
        return x * self.weight


ONES, TIMES = torch.ones(2, 1), torch.ones(2, 2, 1)
WEIGHTS = torch.tensor([1.0, 3.0])
LOGITS, CLASSES = torch.arange(12.0).reshape(2, 3, 2).cos(), torch.tensor([[0, 1, 1], [1, 0, 0]])


@pytest.mark.parametrize(
    ("block", "batch", "dims", "loss", "wanted"),
    [
        (lambda x: x.cumsum(0), (TIMES, 0 * TIMES), 1, F.mse_loss, 2.5),
        (lambda x: x.cumsum(0), (TIMES, 0 * TIMES), {"inputs": 1, "targets": 1}, F.mse_loss, 2.5),
        (lambda d: d["t"].sum() * d["x"], ({"t": Whole(ONES), "x": ONES}, 0 * ONES), 0, F.mse_loss, 4.0),
        (lambda d: d["t"].sum() * d["x"], ({"t": ONES, "x": ONES}, 0 * ONES), {"t": None}, F.mse_loss, 4.0),
        (lambda d: d["t"].sum() * d["x"], ({"t": ONES, "x": ONES}, 0 * ONES), {"inputs.t": None}, F.mse_loss, 4.0),
        (lambda d: sum(d[0]) * d[1], (([2, 3], ONES), 0 * ONES), {"inputs.0": None}, F.mse_loss, 25.0),
        (  # one of the targets is a table: three samples of time 2 in microbatches of two and one
            lambda x: x, (LOGITS, {"t": CLASSES, "w": Whole(WEIGHTS)}), {"inputs": 1, "t": 1},
            lambda o, t: F.cross_entropy(o.flatten(0, 1), t["t"].flatten(), weight=t["w"]),
            F.cross_entropy(LOGITS.flatten(0, 1), CLASSES.flatten(), weight=WEIGHTS).item(),
        ),
        (  # the last of each sequence
            lambda x: x, (LOGITS, CLASSES), 1, lambda o, t: F.cross_entropy(o[-1], t[-1]),
            F.cross_entropy(LOGITS[-1], CLASSES[-1]).item(),
        ),
    ],
)  # fmt: skip
def test_what_belongs_to_no_sample_is_said(block: Any, batch: Any, dims: Dims, loss: Any, wanted: float) -> None:
    pipeline = Pipeline(
        [block, Scale(), Scale()], "1f1b", stages=2, microbatches=Microbatches(2, dims=dims), loss=loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.0),
    )  # fmt: skip
    assert [report.loss for report in pipeline.run([batch])] == pytest.approx([wanted], rel=1e-6)
    found = pipeline.evaluate([batch])
    assert found is not None
    assert found[0] == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("batch", "dims", "said"),
    [
        ((A, B), {"mask": None}, "has no 'mask', which dims names; it has inputs, targets"),
        ((A, B), 1, r"targets has shape \(4,\), so no dimension 1; .* such as dims=\{'inputs': 1, 'targets': 0\}"),
        ((A, B), {"inputs": None, "targets": None}, "has no tensor that could be split"),
    ],
)
def test_dims_that_do_not_fit_a_batch(batch: Any, dims: Dims, said: str) -> None:
    with pytest.raises(DataError, match=said):
        microbatches_of(batch, 2, 5, dims)


@pytest.mark.parametrize("dims", [-1, 1.0, True, None, {"a": -1}, {0: 1}, "a"])
def test_dims_that_are_none(dims: Any) -> None:
    with pytest.raises(ConfigError, match="dims must be the dimension of samples, such as 1"):
        Microbatches(4, dims=dims)


def test_microbatches_of_a_loader_count_samples_along_their_dimension() -> None:
    torch.manual_seed(0)
    batch = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    halves = [(batch[0][:, :1], batch[1][:, :1]), (batch[0][:, 1:], batch[1][:, 1:])]
    pipeline = Pipeline(
        [Scale(), Scale()], "1f1b", stages=2, microbatches=Microbatches(2, dims=1), loss=F.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.0),
    )  # fmt: skip
    (report,) = pipeline.run([halves])
    assert (report.loss, report.weight) == (pytest.approx(F.mse_loss(*batch).item(), rel=1e-6), 3.0)


def test_values_of_no_sample_are_alike_on_all_ranks_wherever_they_are_in_memory() -> None:
    first, second = (({"x": A, "of": Whole(object())}, B) for _ in range(2))
    assert checksum(first) == checksum(second)
