"""`penstock train` with the replicas of a stage in a row: what it reports and writes is that of the usual order."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.train.config.load import load_config
from support.command_line import Command
from support.same_runs import assert_same_reports, assert_same_weights, train, write_text

pytestmark = pytest.mark.processes

OTHER = "rank_order=tp-dp-pp"


@pytest.mark.long
def test_what_a_run_writes_does_not_depend_on_the_order(tmp_path: Path, command: Command) -> None:
    """Who reports, who writes weights, and what a run that goes on with the other order makes of a checkpoint."""
    text, shape = write_text(tmp_path), ("width=2", "sharding=gradients", "batches=4")
    usual = train(command, "1f1b", tmp_path / "usual", text, *shape)
    other = train(command, "1f1b", tmp_path / "other", text, *shape, OTHER)
    assert_same_reports(other, usual)
    for folder, order in ((usual, OTHER), (other, "rank_order=tp-pp-dp")):
        ran = command("train", "--resume", folder, "--set", "batches=6", "--set", order)
        assert ran.returncode == 0, ran.stderr
    assert_same_weights(other, usual)
    assert len(list((other / "weights").glob("*.safetensors"))) == 2
    assert load_config(usual / "config.yaml", []).rank_order == "tp-dp-pp"


def test_an_order_of_ranks_that_there_is_not(tmp_path: Path, command: Command) -> None:
    ran = command("train", "1f1b", "--set", "rank_order=dp-pp", "--set", f"out={tmp_path}")
    assert ran.returncode == 2
    assert "rank_order" in ran.stderr
    assert "tp-dp-pp" in ran.stderr
