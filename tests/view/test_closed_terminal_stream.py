"""Output whose reader has gone: what is written then is dropped, and the run goes on."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.view.closed_terminal_stream import LastingStream
from support.command_line import only_folder, settings


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


def test_a_full_disk_is_no_reader_that_has_gone() -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    lasting = LastingStream(Full())
    lasting.write("too much")
    with pytest.raises(OSError, match="No space left"):
        lasting.flush()


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
