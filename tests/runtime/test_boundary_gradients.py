"""What crosses between stages: activations as passes compute them, and gradients, which may be rounded to bf16."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from penstock.comm.p2p.tensor_message import TensorMessage
from penstock.comm.p2p.transport import LocalLane
from penstock.comm.p2p.trees import leaves_of
from penstock.errors import ConfigError
from penstock.options.passes import PrecisionName
from penstock.schedule.ir.schedule import Payload
from support.cases import ONE_OF_EACH, Case, assert_same, expected, make_pipeline, train, train_on_ranks
from support.pool import Pool

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Crossed = dict[Payload, set[torch.dtype]]


@pytest.fixture
def crossed() -> Iterator[Crossed]:
    """The types of the tensors that are sent, by payload."""
    found: Crossed = {}
    send = LocalLane.send

    def spy(lane: LocalLane, message: TensorMessage) -> object:
        types = {leaf.dtype for leaf in leaves_of(message.tree) if isinstance(leaf, Tensor)}
        found.setdefault(lane.lane.payload, set()).update(types)
        return send(lane, message)

    with patch.object(LocalLane, "send", spy):
        yield found


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_both_cross_in_the_format_of_passes(precision: PrecisionName, crossed: Crossed) -> None:
    train(None, Case("1f1b", 2, 2, spans=(2,), precision=precision))
    assert crossed == {Payload.ACTIVATION: {FORMATS[precision]}, Payload.GRADIENT: {FORMATS[precision]}}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_only_gradients_are_rounded(precision: PrecisionName, crossed: Crossed) -> None:
    train(None, Case("1f1b", 3, 3, spans=(2,), precision=precision, boundary_gradients="bf16"))
    assert crossed == {Payload.ACTIVATION: {FORMATS[precision]}, Payload.GRADIENT: {torch.bfloat16}}


@pytest.mark.parametrize("method", [*ONE_OF_EACH, "zb-h1", "newest", "interleaved"])
def test_rounded_gradients_equal_the_reference(pool: Pool, method: str) -> None:
    case = Case(method, 2, 4, spans=(4, 3), boundary_gradients="bf16", clip=0.5)
    wanted = expected(case)
    assert_same(train(None, case), wanted)
    if method in ONE_OF_EACH:
        assert_same(train_on_ranks(pool, case), wanted)
    with pytest.raises(AssertionError):
        assert_same(train(None, Case(method, 2, 4, spans=(4, 3), clip=0.5)), wanted)


@pytest.mark.parametrize("recompute", ["block", "stage"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_together_with_other_options(recompute: str, precision: PrecisionName) -> None:
    case = Case(
        "2bw", 2, 2, boundary_gradients="bf16", precision=precision, recompute=recompute, width=2, tied=True, spans=(5,)
    )
    found, wanted = train(None, case), expected(case)
    found.gradients = found.gradients[: len(wanted.gradients)]
    assert_same(found, wanted)


def test_in_low_precision_nothing_is_left_to_round() -> None:
    same, rounded = (
        train(None, Case("1f1b", 2, 2, precision="bf16", boundary_gradients=each)) for each in ("same", "bf16")
    )
    assert_same(rounded, same)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="boundary_gradients must be one of same, bf16; got 'fp8'"):
        make_pipeline(Case("1f1b", 2, 2), boundary_gradients="fp8")
