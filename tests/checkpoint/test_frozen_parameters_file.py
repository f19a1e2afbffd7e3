"""Frozen parameters are written once, however many checkpoints refer to them, and come back bit for bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import penstock
from penstock.checkpoint import format as disk, index as indexes
from penstock.checkpoint.format import Checkpoint, checkpoints
from penstock.checkpoint.index import TensorFile
from penstock.errors import CheckpointError
from penstock.guarded_files import fingerprint
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.rank.snapshot import Saving, Snapshot

FILE = "frozen-0.safetensors"
WEIGHT = "fixed/0.0.weight"


def squares(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    return ((output - target) ** 2).sum(), float(target.numel())


def frozen_layer(seed: int = 1) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(4, 4).requires_grad_(False)


def make(seed: int = 1, layer: nn.Linear | None = None) -> Pipeline:
    """Two stages, of which the first has a frozen layer and statistics that change with every batch."""
    still = frozen_layer(seed) if layer is None else layer
    return Pipeline(
        [nn.Sequential(still, nn.BatchNorm1d(4), nn.Linear(4, 4)), nn.Linear(4, 1)],
        penstock.make_schedule("1f1b", stages=2, microbatches=2),
        loss=squares,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
    )


def batches() -> list[list[tuple[Tensor, Tensor]]]:
    g = torch.Generator().manual_seed(2)
    return [[(torch.randn(3, 4, generator=g), torch.randn(3, 1, generator=g)) for _ in range(2)] for _ in range(8)]


def train(folder: Path, until: int) -> Pipeline:
    """Train from the newest checkpoint, with one after every batch."""
    pipeline = make()
    found = penstock.Checkpoints(pipeline, folder, keep=3)
    found.load()
    for _ in pipeline.run(batches()[pipeline.batches : until], save=found.every(1)):
        pass
    assert found.wait() is None
    return pipeline


def numbers(folder: Path) -> list[int]:
    """The inode of the file of frozen parameters, by checkpoint."""
    return [os.stat(place / FILE).st_ino for place in checkpoints(folder)]


def test_checkpoints_share_the_file_of_frozen_parameters(tmp_path: Path) -> None:
    train(tmp_path, 5)
    assert len(numbers(tmp_path)) == 3
    assert len(set(numbers(tmp_path))) == 1
    newest = checkpoints(tmp_path)[-1]
    assert os.stat(newest / FILE).st_nlink == 3  # those that were removed have given up theirs
    saved = Checkpoint(newest)
    assert saved.tensor(WEIGHT).equal(make().state_dict()["0.0.weight"])
    inside = load_file(newest / "stage-0.safetensors")
    assert WEIGHT not in inside
    assert "fixed/0.1.running_mean" in inside  # statistics change, so each checkpoint has its own


def test_restored_from_shared_files_training_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    train(tmp_path / "cut", 4)
    resumed = train(tmp_path / "cut", 8)
    whole = train(tmp_path / "whole", 8)
    for name, tensor in whole.state_dict().items():
        assert tensor.equal(resumed.state_dict()[name]), name


def test_a_run_that_goes_on_does_not_write_them_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path, 2)
    before, written = set(numbers(tmp_path)), list[str]()
    write = disk.write_tensors

    def counted(path: Path, tensors: Any, *batch: int) -> Any:
        written.append(path.name)
        return write(path, tensors, *batch)

    monkeypatch.setattr(disk, "write_tensors", counted)
    train(tmp_path, 4)
    assert FILE not in written
    assert len(written) == 4
    assert set(numbers(tmp_path)) == before
    assert Checkpoint(checkpoints(tmp_path)[-1]).tensor(WEIGHT).equal(make().state_dict()["0.0.weight"])


def test_a_run_that_goes_on_with_other_ones_writes_these(tmp_path: Path) -> None:
    train(tmp_path, 2)
    layer = frozen_layer()
    pipeline = make(layer=layer)
    found = penstock.Checkpoints(pipeline, tmp_path, keep=3)
    found.load()
    torch.nn.init.ones_(layer.weight)
    for _ in pipeline.run(batches()[2:3], save=found.every(1)):
        pass
    assert found.wait() is None
    *_, before, newest = map(Checkpoint, checkpoints(tmp_path))
    assert newest.tensor(WEIGHT).equal(torch.ones(4, 4))
    assert before.tensor(WEIGHT).equal(make().state_dict()["0.0.weight"])


@pytest.mark.parametrize("traceless", [False, True])
def test_frozen_parameters_that_are_changed_get_a_file_of_their_own(tmp_path: Path, traceless: bool) -> None:
    layer = frozen_layer()
    pipeline = make(layer=layer)
    found = penstock.Checkpoints(pipeline, tmp_path, keep=3)
    for _ in pipeline.run(batches()[:1], save=found.every(1)):
        pass
    found.wait()
    old = pipeline.state_dict()["0.0.weight"].clone()
    with torch.no_grad():
        (layer.weight.data if traceless else layer.weight).mul_(2)  # .data: no version counter tells
    for _ in pipeline.run(batches()[1:2], save=found.every(1)):
        pass
    found.wait()
    first, second = map(Checkpoint, checkpoints(tmp_path))
    assert first.tensor(WEIGHT).equal(old)
    assert second.tensor(WEIGHT).equal(old * 2)


def test_where_the_earlier_file_is_gone_or_cut_it_is_written_again(tmp_path: Path) -> None:
    pipeline = make()
    found = penstock.Checkpoints(pipeline, tmp_path, keep=4)
    spoils: list[Callable[[Path], Any]] = [os.unlink, lambda path: os.truncate(path, 10), lambda path: None]
    for k, spoil in enumerate(spoils):
        for _ in pipeline.run(batches()[k : k + 1], save=found.every(1)):
            pass
        assert found.wait() is None
        newest = checkpoints(tmp_path)[-1]
        assert Checkpoint(newest).tensor(WEIGHT).equal(pipeline.state_dict()["0.0.weight"])
        spoil(newest / FILE)


def test_where_files_cannot_be_linked_each_checkpoint_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuses)
    train(tmp_path, 2)
    assert len(set(numbers(tmp_path))) == 2
    assert [Checkpoint(place).batch for place in checkpoints(tmp_path)] == [1, 2]


def test_a_damaged_file_of_frozen_parameters_is_named(tmp_path: Path) -> None:
    train(tmp_path, 2)
    path = checkpoints(tmp_path)[-1] / FILE
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"frozen-0\.safetensors' is damaged"):
        penstock.Checkpoints(make(), tmp_path).load()


def test_a_checkpoint_that_has_frozen_parameters_among_the_others_is_loaded(tmp_path: Path) -> None:
    trained = train(tmp_path, 1)
    (place,) = checkpoints(tmp_path)
    index = disk._read_index(place)
    inside = place / "stage-0.safetensors"
    save_file(load_file(inside) | load_file(place / FILE), inside)
    os.unlink(place / FILE)
    del index["files"][FILE]
    index["files"][inside.name] = fingerprint(inside)
    index["tensors"] = {n: inside.name if f == FILE else f for n, f in index["tensors"].items()}
    indexes.write_index(place, disk.SCHEMA, index)
    pipeline = make(seed=9)
    assert penstock.Checkpoints(pipeline, tmp_path).load() is not None
    for name, tensor in trained.state_dict().items():
        assert tensor.equal(pipeline.state_dict()[name]), name


def test_loading_opens_each_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path, 1)
    opened: list[str] = []

    def counted(path: Path) -> TensorFile:
        opened.append(path.name)
        return TensorFile(path)

    monkeypatch.setattr(indexes, "TensorFile", counted)
    penstock.Checkpoints(make(), tmp_path).load()
    assert sorted(opened) == [FILE, "stage-0.safetensors", "stage-1.safetensors"]


def test_snapshots_for_checkpoints_copy_frozen_parameters_once(tmp_path: Path) -> None:
    layer, shared, sizes = frozen_layer(), list[bool](), list[int]()
    pipeline = make(layer=layer)
    found = penstock.Checkpoints(pipeline, tmp_path, keep=3)
    saving = found.every(1)

    def sink(snapshot: Snapshot) -> None:
        if not snapshot.stage:
            shared.append(snapshot.tensors[WEIGHT].data_ptr() == layer.weight.data_ptr())
            sizes.append(snapshot.nbytes)
        saving.sink(snapshot)

    for k in range(4):
        for _ in pipeline.run(batches()[k : k + 1], save=saving._replace(sink=sink)):
            pass
        if k == 2:
            layer.weight.data.mul_(2)
    assert found.wait() is None
    assert shared == [False, True, True, False]
    copies = sum(parameter.nbytes for parameter in layer.parameters())
    assert [size - min(sizes) for size in sizes] == [copies, 0, 0, copies]


def test_other_snapshots_have_copies_of_their_own() -> None:
    layer, kept = frozen_layer(), list[Snapshot]()
    pipeline = make(layer=layer)
    before = layer.weight.clone()
    list(pipeline.run(batches()[:3], save=Saving(1, kept.append)))
    kept += pipeline.snapshots()
    layer.weight.data.mul_(2)
    assert [s.tensors[WEIGHT].equal(before) for s in kept if not s.stage] == [True] * 4


def test_frozen_parameters_that_change_while_they_are_written_cost_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the file of the checkpoint before is gone, and the parameters are written once more."""
    layer = frozen_layer()
    pipeline = make(layer=layer)
    found = penstock.Checkpoints(pipeline, tmp_path, keep=3)
    list(pipeline.run(batches()[:1], save=found.every(1)))
    assert found.wait() is None
    (checkpoints(tmp_path)[-1] / FILE).unlink()
    write = disk.write_tensors

    def late(path: Path, tensors: Any, *batch: int) -> Any:
        if path.name == FILE:
            layer.weight.data.mul_(2)
        return write(path, tensors, *batch)

    monkeypatch.setattr(disk, "write_tensors", late)
    list(pipeline.run(batches()[1:2], save=found.every(1)))
    assert found.wait() == f"{FILE}: frozen parameters were changed while they were being written"
    monkeypatch.undo()
    list(pipeline.run(batches()[2:3], save=found.every(1)))
    assert found.wait() is None
    assert Checkpoint(checkpoints(tmp_path)[-1]).tensor(WEIGHT).equal(layer.weight)
