"""Messages survive being turned into bytes and back, whatever is in them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.comm.p2p.codec import HEADER_BYTES, Codec, bytes_of, split, transport_fields
from penstock.comm.p2p.tensor_message import Header, TensorMessage
from penstock.comm.p2p.trees import detached, find_classes, open_dataclasses
from penstock.errors import CapabilityError, TransportError
from support.examples import examples

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
DTYPES += [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any bytes as any dtype, 0-d and empty ones too, sometimes not contiguous."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    raw = draw(st.binary(min_size=math.prod(shape) * dtype.itemsize, max_size=math.prod(shape) * dtype.itemsize))
    if dtype is torch.bool:
        raw = bytes(b & 1 for b in raw)
    tensor = torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape) if raw else torch.empty(shape, dtype=dtype)
    if len(shape) > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, -1)
    return tensor


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
leaves = tensors() | plain
keys = st.text() | st.integers()
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
)
headers = st.builds(
    Header,
    batch=st.integers(-(2**62), 2**62),
    first=st.integers(-(2**62), 2**62),
    more=st.booleans(),
    checksum=st.integers(0, 2**32 - 1),
    weight=st.floats(),
    piece=st.integers(0, 2**20),
    stop=st.integers(0, 255),
)


def raw_bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def assert_same_tree(found: Any, wanted: Any) -> None:
    """The same structure, and leaves of the same type and bits."""
    a, found_spec = pytree.tree_flatten(found)
    b, wanted_spec = pytree.tree_flatten(wanted)
    assert found_spec == wanted_spec
    for x, y in zip(a, b, strict=True):
        assert type(x) is type(y)
        if isinstance(x, Tensor):
            assert (x.dtype, x.shape) == (y.dtype, y.shape)
            assert raw_bytes(x) == raw_bytes(y)  # of NaNs, too
            if x.numel():
                assert [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1] == [
                    stride for stride, size in zip(y.stride(), y.shape, strict=True) if size > 1
                ]
        else:
            assert repr(x) == repr(y)


many = settings(
    max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@many
@given(st.lists(st.tuples(headers, trees), min_size=1, max_size=3))
def test_round_trip(messages: list[tuple[Header, Any]]) -> None:
    sender, receiver = Codec("a lane"), Codec("a lane")
    for header, tree in messages:
        block = sender.encode(TensorMessage(header, tree, (True, False)))
        assert block.dtype == torch.uint8
        assert transport_fields(bytes_of(block))[:2] == (block.numel(), False)
        message = receiver.decode(block)
        assert repr(message.header) == repr(header)
        assert message.wants_gradient == (True, False)
        assert_same_tree(message.tree, tree)


@many
@given(headers, tensors(), st.integers(0, 300))
def test_round_trip_in_a_larger_block(header: Header, tensor: Tensor, spare: int) -> None:
    """A receiver posts a block that may be larger than the message."""
    block = Codec("a lane").encode(TensorMessage(header, tensor, (False,)))
    posted = torch.cat([block, torch.full((spare,), 255, dtype=torch.uint8)])
    assert_same_tree(Codec("a lane").decode(posted).tree, tensor)


@given(headers, tensors())
@settings(max_examples=examples(30), deadline=None)
def test_round_trip_in_two_parts(header: Header, tensor: Tensor) -> None:
    block = Codec("a lane").encode(TensorMessage(header, tensor, (False,)))
    head, rest = split(block)
    assert head.numel() == HEADER_BYTES
    assert transport_fields(bytes_of(head))[:2] == (block.numel(), True)
    assert_same_tree(Codec("a lane").decode(torch.cat([head, rest])).tree, tensor)


def test_the_structure_is_sent_only_when_it_changes() -> None:
    codec = Codec("a lane")
    sizes = []
    for width in (100, 100, 101, 101):
        message = TensorMessage(Header(0, 0, True), {"some name": torch.zeros(width, dtype=torch.uint8)}, (True,))
        sizes.append(codec.encode(message).numel())
    assert sizes[1] == HEADER_BYTES + 100 + 1
    assert sizes[3] == HEADER_BYTES + 101 + 1
    assert sizes[0] > sizes[1]
    assert sizes[2] > sizes[3]


def test_received_tensors_are_views_of_the_block() -> None:
    block = Codec("a lane").encode(TensorMessage(Header(0, 0, True), [torch.ones(3), torch.ones(5)], (True, True)))
    received = Codec("a lane").decode(block).tree
    assert {t.untyped_storage().data_ptr() for t in received} == {block.untyped_storage().data_ptr()}
    assert [t.data_ptr() % 64 for t in received] == [block.data_ptr() % 64] * 2


@pytest.mark.parametrize("pair", [(1, True), (1, 1.0), (0.0, -0.0), (False, 0)], ids=repr)
def test_values_that_are_equal_but_not_the_same(pair: tuple[Any, Any]) -> None:
    sender, receiver = Codec("a lane"), Codec("a lane")
    for value in (*pair, *pair):
        assert_same_tree(
            receiver.decode(sender.encode(TensorMessage(Header(0, 0, True), {"x": value}))).tree, {"x": value}
        )


class Pair(NamedTuple):
    x: Tensor
    y: Any


@dataclass
class Data:
    """A dataclass, which torch does not know before it travels."""

    x: Tensor
    pair: Pair
    missing: Any = None


@dataclass
class Unset:
    """A dataclass with a field that is no argument, so that it could not be made again."""

    x: int = field(init=False, default=1)


def local_classes() -> tuple[Any, Any]:
    """Classes that a receiver could not find by their names."""

    class Local(NamedTuple):
        x: Tensor
        y: Tensor

    @dataclass
    class LocalData:
        x: Tensor

    return Local, LocalData


LOCAL = local_classes()


def test_dataclasses_and_named_tuples_travel() -> None:
    sender, receiver, x = Codec("the lane"), Codec("the lane"), torch.ones(2)
    for k, tree in enumerate([Data(x, Pair(x + 1, 3)), Data(x, Pair(x + 2, Data(x, Pair(x, None)))), [Pair(x, "a")]]):
        open_dataclasses(tree)
        got = receiver.decode(sender.encode(TensorMessage(Header(0, k, True), tree))).tree
        assert repr(got) == repr(tree)
        assert type(got) is type(tree)


@pytest.mark.parametrize("name", ["nowhere:Pair", f"{__name__}:Nothing", "builtins:eval", "builtins:tuple", "json"])
def test_only_dataclasses_and_named_tuples_are_looked_up(name: str) -> None:
    """Whatever a message says."""
    with pytest.raises(NotImplementedError, match=f"no dataclass or named tuple {name}"):
        find_classes([name])


@pytest.mark.parametrize(
    ("tree", "named"),
    [
        ({"x": object()}, "object"),
        ([{1, 2}], "set"),
        ({"x": b"bytes"}, "bytes"),
        (LOCAL[0](torch.ones(1), torch.ones(1)), "<locals>.Local.* top of a module"),
        (LOCAL[1](torch.ones(1)), "<locals>.LocalData.* top of a module"),
        (Unset(), "Unset"),
        ({("a", 1): torch.ones(1)}, "tuple"),
    ],
)
def test_what_cannot_travel_is_refused_by_the_sender(tree: Any, named: str) -> None:
    open_dataclasses(tree)
    with pytest.raises(CapabilityError, match=rf"the lane.*{named}"):
        Codec("the lane").encode(TensorMessage(Header(0, 0, True), tree))


def test_a_damaged_block_is_refused() -> None:
    block = Codec("the lane").encode(TensorMessage(Header(0, 0, True), {"x": torch.ones(2)}, (True,)))
    garbled, shortened = block.clone(), block.clone()
    garbled[HEADER_BYTES] = ord("?")
    shortened[:8].view(torch.int64)[0] = 80
    with pytest.raises(TransportError, match="the lane: cannot read the structure"):
        Codec("the lane").decode(garbled)
    with pytest.raises(TransportError, match="the lane: a message of 80 bytes is too short"):
        Codec("the lane").decode(shortened)
    second = Codec("the lane")
    second.encode(TensorMessage(Header(0, 0, True), 1))
    with pytest.raises(TransportError, match="before any description"):
        Codec("the lane").decode(second.encode(TensorMessage(Header(0, 1, True), 1)))


def test_detaching_notes_who_wants_a_gradient() -> None:
    x = torch.ones(2, requires_grad=True)
    tree, wants = detached({"a": x * 2, "b": (torch.ones(1), 3, None), "c": x})
    assert wants == (True, False, False, False, True)
    assert not tree["a"].requires_grad
    assert tree["c"].data_ptr() == x.data_ptr()
