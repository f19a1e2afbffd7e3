"""Outputs that take nothing: what is written then is dropped, which is told once, and the run goes on."""

from __future__ import annotations

import errno
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest

from penstock.cli import main
from penstock.view.closed_terminal_stream import LastingStream
from support.command_line import only_folder, settings, start


def test_what_nobody_reads_is_dropped() -> None:
    """Also what the stream itself still holds when it is closed."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        lasting = LastingStream(stream)
        assert lasting.write("read\n") == 5
        lasting.flush()
        assert os.read(reader, 100) == b"read\n"
        os.close(reader)
        for _ in range(2):
            assert lasting.write("not read\n") == 9
            lasting.flush()
        assert not lasting.isatty()


class Full(io.StringIO):
    """Takes nothing any more when it is flushed."""

    def flush(self) -> None:
        if self.getvalue():
            raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_told_once() -> None:
    said = list[str]()
    lasting = LastingStream(Full(), said.append)
    for _ in range(2):
        lasting.write("too much")
        lasting.flush()
    assert said == ["standard output cannot be written: No space left on device; what else goes there is lost"]


STATES: dict[str, Callable[[], TextIO | None]] = {
    "closed": lambda: None,
    "closed later": lambda: closed(),
    "full": Full,
    "not UTF-8": lambda: io.TextIOWrapper(io.BytesIO(), "ascii"),
}


def closed() -> TextIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(
    ("arguments", "code"),
    [("show 2bw", 0), ("methods --json", 0), ("config", 0), ("--help", 0), ("--version", 0), ("show nope", 2)],
)
def test_outputs_in_any_state_end_no_command(
    monkeypatch: pytest.MonkeyPatch, state: str, arguments: str, code: int
) -> None:
    """Standard output whose text is lost is said on standard error; that in any state changes no exit code."""
    monkeypatch.setattr(sys, "argv", ["penstock", *arguments.split()])
    err = io.StringIO()
    lost = state != "not UTF-8" and code == 0
    for out, told in ((STATES[state](), err), (io.StringIO(), STATES[state]())):
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", told)
        with pytest.raises(SystemExit) as ended:
            main()
        assert (ended.value.code or 0) == (1 if lost and told is err else code)
        assert (sys.stdout, sys.stderr) == (out, told)
    said = err.getvalue().splitlines()
    assert len(said) == (code == 2) + (lost or state == "closed")
    assert all(line.startswith(("error: ", "warning: standard output ")) for line in said)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("state", [">&-", ">/dev/full", "2>&-", "2>/dev/full", ">&- 2>&- <&-"])
def test_outputs_in_any_state_end_no_run(tmp_path: Path, state: str) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    command = [sys.executable, "-m", "penstock", "train", "--data", str(tmp_path / "text.txt")]
    command += settings(f"out={tmp_path / 'runs'}")
    done = subprocess.run(
        ["sh", "-c", f"exec {shlex.join(command)} {state}"], capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("warning: standard output") == (state in (">&-", ">/dev/full"))
    assert "Traceback" not in done.stderr
    assert (only_folder(tmp_path / "runs") / "weights").exists()


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("size", ["16k", "100k"])
def test_a_run_on_a_full_disk_says_so(tmp_path: Path, size: str) -> None:
    """Also where not even a worker's report can be written."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", tmp_path], capture_output=True).returncode:
        pytest.skip("no right to mount a small file system")
    try:
        done = start("-m", "penstock", "train", *settings("checkpoint.every=1", f"out={tmp_path / 'runs'}"))
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)
    assert done.returncode == 1
    assert "its weights could not be written" in done.stderr
    assert "No space left on device" in done.stderr
    assert not re.search("Traceback|EOFError", done.stderr)


@pytest.mark.long
@pytest.mark.processes
def test_a_run_whose_output_nobody_reads_goes_on_to_its_end(tmp_path: Path) -> None:
    """As with `penstock train ... | head -1`."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    command = [sys.executable, "-m", "penstock", "train", "--data", str(tmp_path / "text.txt")]
    command += settings(f"out={tmp_path / 'runs'}")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None
        err = process.stderr.read()
        assert process.wait(60) == 0, err
    assert "error" not in err
    assert "Traceback" not in err
    assert "Broken" not in err
    assert (only_folder(tmp_path / "runs") / "weights").exists()
