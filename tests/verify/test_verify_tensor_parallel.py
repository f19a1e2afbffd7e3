"""`penstock.verify.verify` of stages that processes share: passes where nothing is wrong, and sees what is planted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from penstock.errors import ConfigError, WorkerError
from penstock.models import gpt
from penstock.train.config.load import load_config, validate_config
from penstock.train.config.schema import TrainConfig
from penstock.train.prepare.prepare_run import prepare
from penstock.verify import tensor_parallel_run, verify as verify_module
from penstock.verify.report import Verification
from penstock.verify.tensor_parallel_run import show_numbers, write_numbers
from penstock.verify.verify import verify
from penstock.verify.watched_run import See
from support.command_line import Command
from support.pool import Pool

SETTINGS = (
    "tensor_parallel=2", "stages=2", "microbatches=4", "microbatch_size=1", "model.layers=2", "model.width=16",
    "model.heads=2", "model.context=8", "lr_schedule.warm_up=2", "optimizer.lr=0.01", "max_grad_norm=0.5", "threads=1",
)  # fmt: skip


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    return str(path)


def write(
    group: dist.ProcessGroup, values: dict[str, Any], folder: str, count: int, updated: list[int], bad: bool
) -> None:
    """What a worker does; a bad one takes its part of the vocabulary for the first."""
    with pytest.MonkeyPatch.context() as patch:
        if bad and dist.get_rank(group) % 2:
            own = gpt._own
            patch.setattr(gpt, "_own", lambda tokens, size, first: own(tokens, size, 0 * first))
        write_numbers(Path(folder), prepare(validate_config(values)), count, updated, group)


@pytest.fixture
def verified(pool: Pool, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Verify a configuration, with processes that are there."""

    def find(*changes: str, bad: bool = False) -> Verification:
        def run(config: TrainConfig, count: int, updated: list[int], see: See) -> None:
            pool.submit(write, config.model_dump(), str(tmp_path), count, updated, bad, ranks=4)
            show_numbers(tmp_path, config, see)

        monkeypatch.setattr(verify_module, "run_in_processes", run)
        return verify(load_config(None, [*SETTINGS, f"data={text}", *changes]), 3)

    return find


@pytest.mark.processes
@pytest.mark.parametrize(
    "changes",
    [
        ("method=1f1b",),
        ("method=2bw", "model.tied=true"),
        pytest.param(("method=1f1b", "stages=1", "width=2"), marks=pytest.mark.long),
        pytest.param(("method=chimera",), marks=pytest.mark.long),
        pytest.param(("method=vocabulary-1f1b",), marks=pytest.mark.long),
    ],
    ids=lambda changes: changes[0],
)
def test_shared_stages_train_what_their_method_says(verified: Any, changes: tuple[str, ...]) -> None:
    found = verified(*changes)
    assert found.agrees, found.verdict
    rows = {row.kind: row.reference for row in found.rows}
    assert all(row.compared > 0 and row.tolerance == 10 * verify_module.TOLERANCE for row in rows.values())
    assert rows["final state"].worst is not None  # sums in another order, so these are indeed of shared stages


@pytest.mark.processes
def test_a_process_with_another_part_is_seen(verified: Any) -> None:
    found = verified("method=1f1b", bad=True)
    first = {row.kind: row.reference.first for row in found.rows}
    assert {kind for kind, place in first.items() if place is not None and not place.batch} >= {"losses", "gradients"}


def test_shared_stages_in_low_precision_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="'1f1b' adds up parts of stages, whose rounding differs from the reference"):
        verify(load_config(None, [*SETTINGS, "method=1f1b", "precision=bf16", f"data={text}"]), 3)


def test_a_worker_that_fails_is_a_finding(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise WorkerError("worker 1 failed", "")

    monkeypatch.setattr(tensor_parallel_run, "start_method", lambda _: "spawn")
    monkeypatch.setattr(tensor_parallel_run, "launch_local", fail)
    found = verify(load_config(None, [*SETTINGS, "method=1f1b", f"data={text}"]), 3)
    assert not found.agrees
    assert "the pipeline of 1f1b ended with WorkerError: worker 1 failed" in found.verdict


@pytest.mark.processes
@pytest.mark.long
def test_the_command_verifies_shared_stages_in_processes_of_its_own(command: Command, text: str) -> None:
    ran = command("verify", "1f1b", *(part for each in (*SETTINGS, f"data={text}") for part in ("--set", each)))
    assert ran.returncode == 0, ran.stderr
    assert "the pipeline trains what 1f1b says" in " ".join(ran.stdout.split())
