"""One command, whoever starts its processes: the same weights, bit for bit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from penstock.train.config.load import load_config, validate_config
from penstock.train.export.weights_folder import load_weights
from penstock.train.loop import train
from support.command_line import TINY, Command, only_folder, settings, start
from support.pool import Pool
from support.worker_functions import Silent

pytestmark = pytest.mark.processes


def srun(ranks: int, *command: object) -> str:
    """A program that does for a command what `srun --ntasks` does, without its daemons."""
    return f"""
import os, sys
import penstock.train.loop, torch._dynamo  # once, before the forks
from penstock.cli import main
children = []
for rank in range({ranks}):
    child = os.fork()
    if not child:
        os.environ |= {{
            "SLURM_JOB_ID": str(os.getppid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "{ranks}",
            "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "node[1]", "SLURM_STEP_TASKS_PER_NODE": "{ranks}",
            "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0",
        }}
        sys.argv = ["penstock", *{[str(part) for part in command]!r}]
        main()
    children.append(child)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return str(path)


@pytest.mark.long
def test_every_launcher_ends_with_the_same_weights(tmp_path: Path, text: str, command: Command) -> None:
    """`penstock train` starts its own workers; those of torchrun and srun join one job."""
    changes = ("stages=2", "microbatches=2", f"data={text}", "sample_length=0")

    def asked(name: str) -> list[str]:
        return ["train", *settings(f"out={tmp_path / name}", *changes)]

    ran = [
        command(*asked("ours")),
        start(
            "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "penstock", *asked("torchrun")
        ),
        start("-c", srun(2, *asked("srun"))),
    ]
    for process in ran:
        assert process.returncode == 0, process.stderr
    wanted, *others = (load_weights(only_folder(tmp_path / name)) for name in ("ours", "torchrun", "srun"))
    for found in others:
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def _train_in(group: dist.ProcessGroup, values: dict[str, Any]) -> bool:
    """Train in the process group that this process has already."""
    train(validate_config(values), None, Silent())
    return dist.is_initialized()


def test_an_existing_process_group_is_taken_and_left(tmp_path: Path, text: str, pool: Pool, command: Command) -> None:
    """As under Ray, whose workers have one, and go on with it."""
    config = load_config(None, [*TINY, "stages=4", "microbatches=4", f"data={text}", f"out={tmp_path / 'a'}"])
    for _ in range(2):
        assert all(pool.submit(_train_in, config.model_dump(), ranks=4))
    lines = [(folder / "metrics.jsonl").read_text().splitlines() for folder in (tmp_path / "a").iterdir()]
    losses = [[record["loss"] for line in run if "batch" in (record := json.loads(line))] for run in lines]
    assert len(losses) == 2
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]
    assert "RANK" not in os.environ
