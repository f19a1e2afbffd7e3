"""Files of a run: what is no regular file is not opened, and a line that was cut keeps to itself."""

from __future__ import annotations

import os
import re
import resource
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import penstock
from penstock.guarded_files import (
    append_line,
    check_own_folder,
    fingerprint,
    new_file,
    open_regular,
    parse_json,
    read_text,
    write_whole,
)


def irregular(folder: Path) -> dict[str, Path]:
    """What may stand in the place of a file, by what is said of it."""
    (folder / "outside").write_text("mine")
    (folder / "link").symlink_to(folder / "outside")
    (folder / "zero").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(folder / "socket"))
    return {
        "symbolic link": folder / "link", "link, which is not followed": folder / "zero", "pipe": folder / "pipe",
        "device": Path("/dev/zero"), "a folder": folder / "folder",
    }  # fmt: skip


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    """None of them hangs, and nothing is written through a link."""
    for said, path in irregular(tmp_path).items():
        for opens in (open_regular, fingerprint, lambda path: read_text(path, 10), lambda path: append_line(path, "x")):
            with pytest.raises(OSError, match=".") as refused:
                opens(path)
            if opens is not append_line or path.name != "folder":
                assert said in str(refused.value) or "Is a directory" in str(refused.value)
    with pytest.raises(OSError, match="."):
        open_regular(tmp_path / "socket")
    assert (tmp_path / "outside").read_text() == "mine"


def test_nothing_but_a_file_is_replaced(tmp_path: Path) -> None:
    """Not a link either, nor what a link in the place of its temporary file leads to."""
    for said, path in irregular(tmp_path).items():
        with pytest.raises(OSError, match="link|regular|directory") as refused:
            write_whole(path, "new")
        assert said in str(refused.value) or "irectory" in str(refused.value)
    (tmp_path / "file").write_text("old")
    with new_file(tmp_path / "file") as temporary:
        name = temporary
    name.symlink_to(tmp_path / "outside")
    write_whole(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "new"
    assert (tmp_path / "outside").read_text() == "mine"


def test_a_name_may_be_as_long_as_the_file_system_allows(tmp_path: Path) -> None:
    for name in ("f" * 255, "\u00e9" * 127):
        write_whole(tmp_path / name, "new")
        assert (tmp_path / name).read_text() == "new"
    with pytest.raises(OSError, match="File name too long"):
        write_whole(tmp_path / ("f" * 256), "new")


@contextmanager
def no_room(folder: Path, how: str) -> Iterator[Path]:
    """A folder in which no more than some bytes can be written."""
    if how == "limit":
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        try:
            yield folder
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        return
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", folder], capture_output=True).returncode:
        pytest.skip("no right to mount a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize(("how", "said"), [("limit", "File too large"), ("disk", "No space left on device")])
def test_of_what_cannot_be_written_nothing_is_left(tmp_path: Path, how: str, said: str) -> None:
    """So that there is room to say so; what had the name stays."""
    with no_room(tmp_path, how) as folder:
        write_whole(folder / "file", "old")
        with pytest.raises(OSError, match=said):
            write_whole(folder / "file", "new" * 10_000)
        with pytest.raises(Exception, match=said), new_file(folder / "file") as temporary:
            save_file({"a": torch.zeros(10_000)}, temporary)
        assert [path.name for path in folder.iterdir()] == ["file"]
        assert (folder / "file").read_text() == "old"


WRITES = re.compile(
    r"\.write_(text|bytes)\(|\bopen\([^)]*\"[wax]b?\"|\bos\.(replace|open)\(|\bsave_file\(|json\.dump\("
)
ELSEWHERE = {
    "guarded_files.py", "checkpoint/format.py", "train/export/weights_folder.py",  # the latter two by `new_file`
    "measure/local_processes.py", "verify/tensor_parallel_run.py", "launch/worker_exit.py",  # temporary folders
    "view/closed_terminal_stream.py", "comm/core/gloo_threads.py",  # devices
    "checkpoint/folder_claim.py",  # locks a folder
}  # fmt: skip


def test_everything_is_written_through_one_door() -> None:
    root = Path(penstock.__file__).parent
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if WRITES.search(path.read_text())}
    assert found <= ELSEWHERE


def test_folders_may_not_lead_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "to").symlink_to("/tmp")
    (tmp_path / "file").touch()
    check_own_folder(tmp_path)
    check_own_folder(tmp_path / "nothing")
    for name in ("to", "file"):
        with pytest.raises(OSError, match=r"symbolic link|not a folder"):
            check_own_folder(tmp_path / name)


def test_a_cut_line_does_not_swallow_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_line(path, "one")
    with path.open("a") as file:
        file.write('{"tw')
    append_line(path, "three")
    append_line(path, "four")
    assert path.read_text() == 'one\n{"tw\nthree\nfour\n'


def test_no_more_is_read_than_may_be(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("12345")
    assert read_text(tmp_path / "text", 5) == "12345"
    with pytest.raises(ValueError, match="larger than 4 bytes"):
        read_text(tmp_path / "text", 4)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "9" * 10_000, "{", "\ud800"])
def test_what_is_no_json_is_one_kind_of_error(text: str) -> None:
    with pytest.raises(ValueError, match="."):
        parse_json(text)
