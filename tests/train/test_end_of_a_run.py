"""What a run that is over, or goes on, makes of its folder."""

import pytest

from penstock import read_timeline
from penstock.train.export.weights_folder import load_weights
from support.command_line import only_folder, settings

pytestmark = pytest.mark.processes


def test_a_run_goes_on_with_its_own_text_and_ends_where_it_can_write(tmp_path, command):
    """Neither another text nor weights that cannot be written are taken for an end; nothing is lost by either."""
    text, other = tmp_path / "text.txt", tmp_path / "other.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    other.write_text("the quick brown fox jumps over the lazy cat. " * 200)
    ran = command("train", "--data", text, *settings(f"out={tmp_path / 'runs'}", "sample_length=0"))
    assert ran.returncode == 0, ran.stderr
    folder = only_folder(tmp_path / "runs")
    wanted, trained = load_weights(folder), read_timeline(folder)
    assert trained.intervals
    refused = command("train", "--resume", folder, "--data", other)
    assert refused.returncode == 1
    assert "was trained on other text: 9000 tokens" in " ".join(refused.stderr.split())
    assert "Traceback" not in refused.stderr
    (folder / "weights").rename(folder / "aside")
    (folder / "weights").write_text("in the way")
    refused = command("train", "--resume", folder)
    assert refused.returncode == 2
    assert "weights: it is a file, not a folder" in " ".join(refused.stderr.split())
    (folder / "weights").unlink()
    (folder / "weights" / "index.json").mkdir(parents=True)  # in the way, too
    failed = command("train", "--resume", folder)
    assert failed.returncode == 1
    assert "training has finished, but its weights could not be written" in " ".join(failed.stderr.split())
    assert "Traceback" not in failed.stderr
    (folder / "weights" / "index.json").rmdir()
    ended = command("train", "--resume", folder)
    assert ended.returncode == 0, ended.stderr
    found = load_weights(folder)
    assert found.keys() == wanted.keys()
    assert all(found[name].equal(wanted[name]) for name in wanted)
    assert read_timeline(folder).intervals == trained.intervals, "of the training, not of the resumed end"
