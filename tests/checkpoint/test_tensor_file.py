"""Files of tensors are read as the library writes them, by ranges of bytes, and what is wrong with one is said."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import _TYPES, save_file

from penstock.checkpoint.index import TensorFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tensors = {"a": torch.arange(24.0).view(4, 3, 2), "b": torch.tensor(7), "none": torch.empty(0, 5)}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"schema": "1"})
    return tmp_path / "a.safetensors"


@pytest.mark.parametrize("name", sorted(_TYPES))
def test_every_type_that_the_library_writes_comes_back(tmp_path: Path, name: str) -> None:
    numbers = torch.arange(48, dtype=torch.uint8).view(_TYPES[name])
    if numbers.dtype == torch.bool:
        numbers = torch.arange(6) > 2
    tensor = numbers.view(torch.uint8).view(numbers.dtype).reshape(3, -1)
    save_file({"a": tensor}, tmp_path / "a.safetensors")
    found = TensorFile(tmp_path / "a.safetensors").rows("a", 1, 3)
    assert found.dtype == tensor.dtype
    assert torch.equal(found.view(torch.uint8), tensor[1:].contiguous().view(torch.uint8))


def test_rows_are_those_of_the_tensor(path: Path) -> None:
    file, whole = TensorFile(path), torch.arange(24.0).view(4, 3, 2)
    assert torch.equal(file.tensor("a"), whole)
    for first in range(6):
        for end in range(6):
            assert torch.equal(file.rows("a", first, end), whole[first:end]), (first, end)
    assert torch.equal(file.tensor("b"), torch.tensor(7))
    assert (file.shape("a"), file.shape("b"), file.shape("none")) == ((4, 3, 2), (), (0, 5))
    assert file.tensor("none").shape == file.rows("none", 0, 2).shape == (0, 5)


def test_only_the_bytes_of_the_rows_are_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, asked, preadv = TensorFile(path), list[int](), os.preadv

    def counted(number: int, buffers: list[memoryview], first: int) -> int:
        asked.append(len(buffers[0]))
        return preadv(number, [buffers[0][:7]], first)  # as on a disk that gives less than was asked for

    monkeypatch.setattr(os, "preadv", counted)
    assert torch.equal(file.rows("a", 1, 3), torch.arange(6.0, 18.0).view(2, 3, 2))
    assert asked == [48, 41, 34, 27, 20, 13, 6]


def test_what_a_file_does_not_hold_is_named(path: Path) -> None:
    file = TensorFile(path)
    for name in ("c", "__metadata__"):
        with pytest.raises(ValueError, match="holds no such tensor"):
            file.tensor(name)


def test_a_file_that_becomes_shorter(path: Path) -> None:
    """Where files are mapped into memory, this ends the process."""
    file = TensorFile(path)
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(ValueError, match=r"ends \d+ bytes too early"):
        file.tensor("a")


def written(path: Path, header: bytes, length: int | None = None) -> Path:
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + bytes(96))
    return path


def said(**changes: Any) -> bytes:
    return json.dumps({"a": {"dtype": "F32", "shape": [4, 3, 2], "data_offsets": [0, 96], **changes}}).encode()


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: path.write_bytes(b"short"), "too early"),
        (lambda path: written(path, said(), 1 << 40), "header is said to have 1099511627776 bytes"),
        (lambda path: written(path, b"[1]"), "no list of tensors"),
        (lambda path: written(path, b"{"), "Expecting"),
        (lambda path: written(path, b"[" * 100_000), "nested too deep"),
        (lambda path: written(path, b"\xff\xfe"), "decode"),
        (lambda path: written(path, said(dtype="F128")), "the header says of it"),
        (lambda path: written(path, said(dtype=["F32"])), "the header says of it"),
        (lambda path: written(path, said(shape=[-4, -6])), "the header says of it"),
        (lambda path: written(path, said(shape=None)), "the header says of it"),
        (lambda path: written(path, said(data_offsets=[0])), "the header says of it"),
        (lambda path: written(path, said(data_offsets=[0, 92])), "gives it 92 bytes for shape"),
        (lambda path: written(path, said(data_offsets=[4, 100])), "gives it 96 bytes for shape"),
    ],
)
def test_damaged_headers(tmp_path: Path, write: Callable[[Path], Any], message: str) -> None:
    write(tmp_path / "a")
    with pytest.raises(ValueError, match=message):
        TensorFile(tmp_path / "a").tensor("a")


def test_no_file_stays_open(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        TensorFile(path).tensor("a")
    assert len(os.listdir("/proc/self/fd")) == before
