"""Files of a run: what is no regular file is not opened, and a line that was cut keeps to itself."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from penstock.guarded_files import (
    append_line,
    check_own_folder,
    fingerprint,
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


def test_a_link_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    irregular(tmp_path)
    (tmp_path / f".link.{os.getpid()}.part").symlink_to(tmp_path / "outside")
    write_whole(tmp_path / "link", "new")
    assert (tmp_path / "outside").read_text() == "mine"
    assert (tmp_path / "link").read_text() == "new"
    assert not (tmp_path / "link").is_symlink()


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
