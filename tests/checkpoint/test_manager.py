"""`penstock.Checkpoints` on several ranks: each checks its share, all agree on which one is whole."""

from __future__ import annotations

import gc
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock
from penstock.checkpoint import format as disk
from penstock.checkpoint.folder_claim import Owner
from penstock.checkpoint.format import checkpoint_folder, checkpoints
from penstock.checkpoint.index import write_index
from penstock.errors import CheckpointError, ConfigError, PenstockError
from penstock.options.run import Group
from penstock.runtime.pipeline import Pipeline
from support.pool import Pool

pytestmark = pytest.mark.processes


def squares(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    return ((output - target) ** 2).sum(), float(target.numel())


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-2)


def make(group: dist.ProcessGroup | None, optimizer: Any = adamw) -> Pipeline:
    torch.manual_seed(1)
    return Pipeline(
        [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)],
        penstock.make_schedule("2bw", stages=3, microbatches=2),
        loss=squares,
        optimizer=optimizer,
        group=Group(group, 20.0),
    )


def batches() -> list[list[tuple[Tensor, Tensor]]]:
    g = torch.Generator().manual_seed(2)
    return [[(torch.randn(2, 4, generator=g), torch.randn(2, 1, generator=g)) for _ in range(2)] for _ in range(8)]


def train(group: dist.ProcessGroup | None, folder: str) -> dict[str, Tensor]:
    """Train from the newest checkpoint, with one after every third batch and one at the end."""
    pipeline = make(group)
    found = penstock.Checkpoints(pipeline, folder)
    found.load()
    for _ in pipeline.run(batches()[pipeline.batches :], save=found.every(3)):
        pass
    found.save()
    return pipeline.state_dict()


def load(group: dist.ProcessGroup | None, folder: str) -> tuple[int, list[str]]:
    """Where a run would go on, and what it has passed over."""
    pipeline = make(group)
    found = penstock.Checkpoints(pipeline, folder)
    loaded = found.load()
    assert (loaded is None) == (pipeline.batches == 0)
    assert loaded is None or (loaded and loaded == (pipeline.batches, {}))  # true even if there is no extra data
    return pipeline.batches, found.damaged


def refused(group: dist.ProcessGroup, folder: str) -> str:
    try:
        load(group, folder)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.long
@pytest.mark.parametrize("index", range(3))
def test_a_damaged_file_is_seen_by_all_whoever_reads_it(tmp_path: Path, pool: Pool, index: int) -> None:
    whole = pool.submit(train, str(tmp_path), ranks=3)
    assert [path.name for path in checkpoints(tmp_path)] == ["batch-00000006", "batch-00000008"]
    damage(checkpoint_folder(tmp_path, 8) / f"stage-{index}.safetensors")
    found = pool.submit(load, str(tmp_path), ranks=3)
    assert [batch for batch, _ in found] == [6, 6, 6]
    for _, passed in found:
        (fault,) = passed
        assert f"batch-00000008/stage-{index}.safetensors' is damaged: it has other content" in fault
    assert [path.name for path in checkpoints(tmp_path)] == ["batch-00000006"]  # the other one was set aside
    again = pool.submit(train, str(tmp_path), ranks=3)
    for before, after in zip(whole, again, strict=True):
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.long
def test_when_none_is_whole_all_ranks_say_so(tmp_path: Path, pool: Pool) -> None:
    pool.submit(train, str(tmp_path), ranks=3)
    damage(checkpoint_folder(tmp_path, 8) / "stage-1.safetensors")
    (checkpoint_folder(tmp_path, 6) / "stage-2.safetensors").unlink()
    told = pool.submit(refused, str(tmp_path), ranks=3)
    assert len(set(told)) == 1
    assert "none of the 2 checkpoints" in told[0]
    assert "stage-1.safetensors' is damaged" in told[0]
    assert [path.name for path in checkpoints(tmp_path)] == ["batch-00000006", "batch-00000008"]  # nothing was touched


def test_one_process_reads_what_three_have_written(tmp_path: Path, pool: Pool) -> None:
    whole = pool.submit(train, str(tmp_path), ranks=3)
    merged = {name: w for part in whole for name, w in part.items()}
    alone = train(None, str(tmp_path))  # nothing is left to train
    assert all(torch.equal(merged[name], alone[name]) for name in merged | alone)


def test_nothing_there_is_a_beginning(tmp_path: Path) -> None:
    assert load(None, str(tmp_path)) == (0, [])


def test_nothing_is_saved_before_anything_was_trained(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing has been trained yet"):
        penstock.Checkpoints(make(None), tmp_path).save()
    assert checkpoints(tmp_path) == []


def save_within_a_run(group: dist.ProcessGroup | None, folder: str) -> tuple[list[str], int]:
    """Try it at the beginning, and after a checkpoint was loaded; returns what is said, and the batches in the end."""
    pipeline, told = make(group), []
    found = penstock.Checkpoints(pipeline, folder)
    for part in (batches()[:4], batches()[4:]):
        for report in pipeline.run(part):
            if report.batch % 4 == 1:
                for refuses in (found.save, found.load):
                    try:
                        refuses()
                    except PenstockError as error:
                        told.append(str(error))
        found.save()
        found.load()
    return told, pipeline.batches


@pytest.mark.parametrize("ranks", [1, 3])
def test_within_a_run_another_way_to_save_is_named(tmp_path: Path, pool: Pool, ranks: int) -> None:
    path = str(tmp_path)
    for told, trained in (
        [save_within_a_run(None, path)] if ranks == 1 else pool.submit(save_within_a_run, path, ranks=3)
    ):
        assert len(told) == 4
        assert all("is under way; end it first" in one for one in told)
        assert ["pipeline.run(loader, save=checkpoints.every(n))" in one for one in told] == [True, False] * 2
        assert trained == 8


def test_a_broken_pipeline_is_not_saved(tmp_path: Path) -> None:
    def fails(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
        raise RuntimeError("the loss of the user")

    torch.manual_seed(1)
    pipeline = Pipeline(
        nn.Sequential(nn.Linear(4, 1)), method="1f1b", stages=1, microbatches=2, loss=fails, optimizer=adamw
    )
    found = penstock.Checkpoints(pipeline, tmp_path)
    with pytest.raises(RuntimeError, match="the loss of the user"):
        list(pipeline.run(batches()))
    with pytest.raises(PenstockError, match="the pipeline broke in an earlier run .*the loss of the user"):
        found.save()


def test_one_that_was_not_written_is_an_error_and_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    pipeline = make(None)
    found = penstock.Checkpoints(pipeline, tmp_path)
    list(pipeline.run(batches()))
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"after 8 batches was not written: .*stage-0.safetensors"):
            found.save()
        assert "stage-0.safetensors" in str(found.wait())
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "the checkpoint after 8 batches was not written: " in caplog.text
    (tmp_path / "checkpoints").unlink()
    found.save()
    assert found.wait() is None
    assert [path.name for path in checkpoints(tmp_path)] == ["batch-00000008"]


def left_out(group: dist.ProcessGroup | None, folder: str) -> list[Any]:
    """One rank has a disk that is too slow for the last checkpoint, until the run is over."""
    told: list[tuple[int, bool]] = []
    pipeline = make(group)
    found = penstock.Checkpoints(
        pipeline, folder, timeout=2.0, tell=lambda batch, failure: told.append((batch, failure is None))
    )
    gate, real = threading.Event(), disk.save_file
    slow = group is None or dist.get_rank(group) == 1

    def wait(*arguments: Any, **options: Any) -> None:
        if slow:
            gate.wait(20)
        real(*arguments, **options)

    disk.save_file = wait
    try:
        for _ in pipeline.run(batches(), save=found.every(4)):
            pass
        threading.Timer(0.2, gate.set).start()
        found.save()
    finally:
        disk.save_file = real
    return [found.wait(), told]


@pytest.mark.parametrize("ranks", [1, 3])
def test_one_that_was_left_out_at_the_end_is_written_after_all(tmp_path: Path, pool: Pool, ranks: int) -> None:
    found = [left_out(None, str(tmp_path))] if ranks == 1 else pool.submit(left_out, str(tmp_path), ranks=3)
    assert [failure for failure, _ in found] == [None] * ranks
    assert found[0][1] == [(4, True), (8, False), (8, True)]
    assert [path.name for path in checkpoints(tmp_path)] == ["batch-00000004", "batch-00000008"]


def test_what_came_after_a_checkpoint_is_forgotten_when_it_is_loaded(tmp_path: Path) -> None:
    """A checkpoint of the same batch is written again, whatever became of the first one."""
    pipeline = make(None)
    found = penstock.Checkpoints(pipeline, tmp_path)
    every = found.every(3)
    list(pipeline.run(batches()[:6], save=every))
    assert found.wait() is None
    damage(checkpoint_folder(tmp_path, 6) / "stage-1.safetensors")
    found.load()
    assert pipeline.batches == 3
    found.save()
    list(pipeline.run(batches()[3:7], save=every))
    found.save()
    assert [path.name for path in checkpoints(tmp_path)] == ["batch-00000006", "batch-00000007"]
    other = make(None)
    penstock.Checkpoints(other, tmp_path).load()
    mine, wanted = other.state_dict(), pipeline.state_dict()
    assert all(torch.equal(mine[name], wanted[name]) for name in wanted)


WRONG_FACTS: list[tuple[str, Any]] = [
    ("updates", "six"), ("updates", None), ("decisions", 3),
    ("values", {"setting/lr": 1}), ("pipelines", "2"),
]  # fmt: skip


@pytest.mark.parametrize(("fact", "value"), WRONG_FACTS)
def test_facts_of_another_form_behind_a_valid_digest_are_named(tmp_path: Path, fact: str, value: Any) -> None:
    pipeline = make(None)
    list(pipeline.run(batches()[:2]))
    penstock.Checkpoints(pipeline, tmp_path).save()
    place = checkpoint_folder(tmp_path, 2)
    index = json.loads((place / "index.json").read_text())
    del index["schema"], index["sha256"]
    write_index(place, 1, index | {"facts": index["facts"] | {fact: value}})
    with pytest.raises(CheckpointError, match="batch-00000002' is whole, but not of the form|has the weights of"):
        load(None, str(tmp_path))


def test_what_json_cannot_say_costs_the_checkpoint_alone(tmp_path: Path) -> None:
    pipeline = make(None)
    found = penstock.Checkpoints(pipeline, tmp_path, extra=lambda batch: {"odd": object()})
    list(pipeline.run(batches()[:4], save=found.every(2)))
    failure = found.wait()
    assert failure is not None
    assert "not JSON serializable" in failure
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_none_to_keep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep must be at least 1, got 0"):
        penstock.Checkpoints(make(None), tmp_path, keep=0)


def test_stages_may_have_different_optimizers(tmp_path: Path) -> None:
    """Each goes on with its own; another one is refused."""

    def mixed(named: Any) -> torch.optim.Optimizer:
        named = list(named)
        if any(name.startswith("2.") for name, _ in named):
            return torch.optim.SGD(named, lr=0.1, momentum=0.9)
        return torch.optim.AdamW(named, lr=0.1)

    pipeline = make(None, mixed)
    list(pipeline.run(batches()[:4]))
    penstock.Checkpoints(pipeline, tmp_path).save()
    other = make(None, mixed)
    penstock.Checkpoints(other, tmp_path).load()
    assert other.batches == 4
    with pytest.raises(CheckpointError, match="has the state of SGD, but stage 2 .* is stepped by AdamW"):
        penstock.Checkpoints(make(None), tmp_path).load()


def test_two_pipelines_do_not_write_to_one_folder(tmp_path: Path) -> None:
    """Their checkpoints would mix without a word; the second one is refused until the first is gone."""
    first, second = make(None), make(None)
    mine, other = penstock.Checkpoints(first, tmp_path), penstock.Checkpoints(second, tmp_path, tell=lambda *_: None)
    list(first.run(batches()[:2]))
    list(second.run(batches()[:3]))
    mine.save()
    with pytest.raises(CheckpointError, match="another Checkpoints of this process writes to"):
        other.save()
    assert [path.name for path in checkpoints(tmp_path)] == ["batch-00000002"]
    other.load()  # takes it over
    assert second.batches == 2
    list(first.run(batches()[2:4]))
    with pytest.raises(CheckpointError, match="another Checkpoints has been loaded from"):
        mine.save()
    list(second.run(batches()[2:5]))
    other.save()
    assert [path.name for path in checkpoints(tmp_path)] == ["batch-00000002", "batch-00000005"]
    del other, second
    gc.collect()
    third = make(None)
    list(third.run(batches()[:6]))
    penstock.Checkpoints(third, tmp_path).save()  # what is gone owns nothing


def hold(group: dist.ProcessGroup, folder: str, moment: float) -> str:
    """Rank 0 claims the folder and keeps it for a moment; rank 1 wants it meanwhile."""
    del group
    one = Owner(Path(folder))
    if dist.get_rank() == 0:
        one.claim()
        time.sleep(moment)
        return "held"
    time.sleep(0.5)
    try:
        one.claim(take_over=True)
    except CheckpointError as error:
        return str(error)
    return "claimed"


def test_a_folder_is_not_taken_from_another_process(tmp_path: Path, pool: Pool) -> None:
    said = pool.submit(hold, str(tmp_path), 4.5, ranks=2)[1]
    assert "another Checkpoints of process" in said
    assert "a folder of its own" in said
    assert pool.submit(hold, str(tmp_path), 1.0, ranks=2) == ["held", "claimed"]  # it waits for one that ends


def test_another_run_is_not_mixed_with_a_longer_one(tmp_path: Path) -> None:
    """Its checkpoints would be passed over for those of that one; what was loaded, or goes on, is no other run."""
    first = make(None)
    saved = penstock.Checkpoints(first, tmp_path)
    list(first.run(batches()[:5], save=saved.every(2)))
    saved.save()
    del saved
    other = make(None)
    mixed = penstock.Checkpoints(other, tmp_path)
    with pytest.raises(ConfigError, match=r"after 5 batches in .* trained on 0, .*: call checkpoints.load\(\) first"):
        mixed.every(2)
    list(other.run(batches()[:3]))
    with pytest.raises(ConfigError, match=r"after 5 batches in .* trained on 3"):
        mixed.save()
    assert [path.name for path in checkpoints(tmp_path)] == ["batch-00000004", "batch-00000005"]
    list(first.run(batches()[5:6]))
    penstock.Checkpoints(first, tmp_path).save()  # of the same training, further
    mixed.load()
    list(other.run(batches()[6:], save=mixed.every(1)))
    mixed.wait()
    assert [path.name for path in checkpoints(tmp_path)] == ["batch-00000007", "batch-00000008"]


def test_ranks_refuse_the_folder_of_a_longer_run_together(tmp_path: Path, pool: Pool) -> None:
    train(None, str(tmp_path))
    gc.collect()
    found = pool.submit(saved_after_two, str(tmp_path), ranks=3)
    assert all("after 8 batches in" in said and "trained on 2" in said for said in found)


def saved_after_two(group: dist.ProcessGroup, folder: str) -> str:
    pipeline = make(group)
    list(pipeline.run(batches()[:2]))
    try:
        penstock.Checkpoints(pipeline, folder).save()
    except ConfigError as error:
        return str(error)
    return "saved"
