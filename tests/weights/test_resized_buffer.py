"""Buffers whose memory comes and goes: graphs on them stay valid, and nobody reads what is not there."""

from __future__ import annotations

import pytest
import torch

from penstock.errors import VersionError
from penstock.weights.memory.buffers import NOT_WHOLE, Buffer, Handle, Layout
from penstock.weights.memory.resized_buffer import ResizedBuffer
from penstock.weights.memory.row_shards import RowShards
from penstock.weights.memory.sharded_buffer import DividedRows

WEIGHTS = {"matrix": torch.arange(12.0).view(4, 3), "scale": torch.tensor(2.0), "double": torch.ones(5).double()}


def buffer() -> ResizedBuffer:
    made = ResizedBuffer(Layout(WEIGHTS), "b")
    made.load(WEIGHTS)
    return made


def test_a_graph_outlives_the_memory_of_its_weights() -> None:
    whole = buffer()
    x = torch.randn(2, 4)
    loss = (x @ whole.leaves["matrix"]).square().sum() * whole.leaves["scale"]
    storages = whole.storages
    whole.free()
    assert all(flat.untyped_storage().nbytes() == 0 for flat in whole.flats)
    other = [torch.full((1000,), float("nan")) for _ in range(50)]  # takes the memory that was freed
    whole.allocate()
    for name, rows in whole.rows.items():
        rows.copy_(WEIGHTS[name])
    whole.complete()
    loss.backward()
    wanted = WEIGHTS["matrix"].clone().requires_grad_()
    ((x @ wanted).square().sum() * 2.0).backward()
    assert torch.equal(whole.leaves["matrix"].grad, wanted.grad)  # type: ignore[arg-type]
    assert whole.storages == storages
    assert len(other) == 50


def test_handles_of_what_is_not_whole() -> None:
    whole = buffer()
    handle = Handle(whole, whole.epoch, 7)
    handle.check("F3")
    whole.free()
    with pytest.raises(VersionError, match="F3 needs version 7 of the weights, which are not whole: buffer b was rel"):
        handle.check("F3")
    whole.allocate()
    with pytest.raises(VersionError, match="not whole"):
        handle.check("F3")
    whole.complete()
    handle.check("F3")
    whole.free()
    whole.rewrite()  # another version
    assert whole.epoch == NOT_WHOLE
    whole.allocate()
    whole.complete()
    with pytest.raises(VersionError, match="buffer b has been rewritten since"):
        handle.check("F3")


def test_rows_become_whole_and_back() -> None:
    layout = Layout(WEIGHTS)
    holders = []
    for place in range(3):
        whole = Buffer(layout, "weights")
        whole.load(WEIGHTS)
        holders.append(DividedRows(whole, layout, RowShards(layout, 3, place)))
    for each in holders:
        each.divide()
        for rows in each.present.values():
            rows.mul_(10)
        assert each.nbytes == each.own.nbytes
    parts = [each.begin_whole() for each in holders]
    for owner, sources in enumerate(parts[i][i] for i in range(3)):
        for taken in parts:
            for mine, theirs in zip(taken[owner], sources, strict=True):
                mine.copy_(theirs)
    for each in holders:
        assert each.whole is not None
        for name, view in each.whole.views.items():
            assert torch.equal(view, WEIGHTS[name] * 10)
            view.mul_(2)  # by a user
        assert each.nbytes == each.own.nbytes + each.whole.nbytes
        each.divide()
        assert all(
            torch.equal(rows, view) for rows, view in zip(each.present.values(), each.own.views.values(), strict=True)
        )
    assert torch.equal(holders[0].own.views["matrix"], WEIGHTS["matrix"][:2] * 20)
