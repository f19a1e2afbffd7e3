"""What a machine lacks is said in a line, before anything is started."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.job.surroundings import check_surroundings
from support.command_line import Command, run, settings


@pytest.fixture
def few_files():
    """A process that may open a few files only."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (36, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_an_interface_that_is_not_there_is_named(command: Command, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nope0")
    (tmp_path / "text.txt").write_text("the quick brown fox " * 500)
    done = command("train", "1f1b", "--data", tmp_path / "text.txt", *settings(f"out={tmp_path / 'runs'}"))
    assert done.returncode == 2
    assert "GLOO_SOCKET_IFNAME names the network interface 'nope0', which this machine does not have" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "runs").exists()
    check_surroundings({"GLOO_SOCKET_IFNAME": "lo"}, 2)


def test_a_limit_of_open_files_is_told_with_what_is_needed(few_files: None) -> None:
    with pytest.raises(ConfigError, match=r"may open 36 files here, .* 8 processes training needs about 64; .*-n 1024"):
        check_surroundings({}, 8)
    check_surroundings({}, 1)


def test_a_working_folder_that_is_gone(monkeypatch, capsys, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for arguments in (["methods"], ["train"], ["sample", "/tmp"], ["show", "2bw", "--svg", "x"]):
        code, out, err = run(monkeypatch, capsys, *arguments)
        assert (code, out) == (2, "")
        assert err == "error: the working folder has been removed; change to another one (cd), and try again\n"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device", "a"), "error: 'a': No space left on device"),
        (OSError(24, "Too many open files"), "error: Too many open files"),
        (MemoryError(), "error: there is no memory left"),
        (ImportError("libtorch.so: failed to map segment"), "error: a module cannot be imported: libtorch.so: failed"),
    ],
)
def test_what_the_system_refuses_is_no_traceback(monkeypatch, capsys, error: Exception, said: str) -> None:
    def refused(*_: object) -> None:
        raise error

    monkeypatch.setattr("penstock.view.tables.methods_table", refused)
    code, _, err = run(monkeypatch, capsys, "methods")
    assert (code, err[: len(said)]) == (1, said)
