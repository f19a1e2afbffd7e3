"""What messages about checkpoints, resuming and changed models advise is done to the letter, and works."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import nn
from torch.nn import functional as F

import penstock
from penstock.checkpoint.format import checkpoint_folder
from penstock.checkpoint.index import write_index
from penstock.checkpoint.tensor_file import layout_of
from penstock.errors import PenstockError

GENERATOR = torch.Generator().manual_seed(2)
DATA = [(torch.randn(8, 4, generator=GENERATOR), torch.randn(8, 4, generator=GENERATOR)) for _ in range(8)]


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-2)


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=1e-2)


def make_blocks() -> list[nn.Module]:
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), nn.Linear(4, 4)]


class Trained:
    """A pipeline that has trained four batches, with a checkpoint after the second and the fourth, and its blocks."""

    def __init__(self, folder: Path, blocks: Sequence[nn.Module] | None = None) -> None:
        self.folder, self.blocks = folder, list(blocks or make_blocks())
        self.pipeline = self.make()
        self.checkpoints = penstock.Checkpoints(self.pipeline, folder)
        list(self.pipeline.run(DATA[:4], save=self.checkpoints.every(2)))
        self.checkpoints.save()

    def make(self, optimizer: Any = adamw, **options: Any) -> penstock.Pipeline:
        given: dict[str, Any] = {"method": "1f1b", "stages": 3, "microbatches": 2, "loss": F.mse_loss} | options
        return penstock.Pipeline(self.blocks, optimizer=optimizer, **given)

    def go_on(self) -> None:
        list(self.pipeline.run(DATA[4:6]))

    def with_the_checkpoint(self, **options: Any) -> int:
        """Do what is said of a new Pipeline and a checkpoint; returns how many batches it has."""
        pipeline = self.make(**options)
        penstock.Checkpoints(pipeline, self.folder).load()
        list(pipeline.run(DATA[4:6]))
        return pipeline.batches

    def anew(self) -> int:
        """A new Pipeline begins with the present weights."""
        named = {name: p.clone() for name, p in nn.ModuleList(self.blocks).named_parameters(remove_duplicate=False)}
        pipeline = self.make()
        assert all(torch.equal(weights, named[name]) for name, weights in pipeline.full_state_dict().items())
        list(pipeline.run(DATA[:2]))
        return pipeline.batches

    def rewrite(self, batch: int, change: Callable[[dict[str, Any]], None]) -> None:
        """Change an index, with a digest that fits."""
        place = checkpoint_folder(self.folder, batch)
        index = json.loads((place / "index.json").read_text())
        del index["schema"], index["sha256"]
        change(index)
        write_index(place, 1, index)


def linear(t: Trained, at: int = 0) -> nn.Linear:
    """The linear layer of a block."""
    return next(module for module in t.blocks[at].modules() if isinstance(module, nn.Linear))


def share(t: Trained) -> None:
    linear(t, 2).weight = linear(t).weight


def add_group(t: Trained) -> None:
    group = {"params": [("more", nn.Parameter(torch.ones(1)))]}
    next(iter(t.pipeline.optimizers().values())).add_param_group(group)


def break_it(t: Trained) -> None:
    with pytest.raises(RuntimeError):
        list(t.pipeline.run([(DATA[0][0][:, :3], DATA[0][1])]))


def double(t: Trained) -> int:
    """Go on in float64, for which the data have to be."""
    t.blocks = [block.double() for block in t.blocks]
    pipeline = t.make()
    penstock.Checkpoints(pipeline, t.folder).load()
    list(pipeline.run([(x.double(), y.double()) for x, y in DATA[4:6]]))
    return pipeline.batches


CHANGES: list[tuple[str, Callable[[Trained], Any], str, Callable[[Trained], int], int]] = [
    ("frozen", lambda t: linear(t).weight.requires_grad_(False), "no longer requires gradients.* can be loaded",
     Trained.with_the_checkpoint, 6),
    ("another type", lambda t: linear(t).double(), "is torch.float64 now.* can be loaded",
     double, 6),
    ("new", lambda t: linear(t).register_parameter("scale", nn.Parameter(torch.ones(1))), "is new since .* present "
     "weights", Trained.anew, 2),
    ("gone", lambda t: linear(t).register_parameter("bias", None), "is gone since .* present weights", Trained.anew, 2),
    ("another shape", lambda t: setattr(linear(t, 2), "bias", nn.Parameter(torch.zeros(1))), "has shape .* present "
     "weights", Trained.anew, 2),
    ("shared", share, "one parameter with .* can be loaded", Trained.with_the_checkpoint, 6),
    ("another group", add_group, "add_param_group.* can be loaded", Trained.with_the_checkpoint, 6),
    ("broken", break_it, "broke in an earlier run.* make a new one, and load its last checkpoint",
     Trained.with_the_checkpoint, 6),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message", "advice", "batches"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES]
)
def test_a_changed_model_goes_on_as_the_message_says(
    tmp_path: Path, change: Callable[[Trained], Any], message: str, advice: Callable[[Trained], int], batches: int
) -> None:
    trained = Trained(tmp_path)
    change(trained)
    with pytest.raises(PenstockError, match=f"(?s){message}"):
        trained.go_on()
    assert advice(trained) == batches


def other_block(t: Trained) -> int:
    t.blocks.append(nn.Linear(4, 4))
    return t.with_the_checkpoint()


def narrower(t: Trained) -> int:
    t.blocks[2] = nn.Linear(4, 3)
    return t.with_the_checkpoint()


def another_run(t: Trained) -> int:
    pipeline = t.make()
    list(pipeline.run(DATA[:1], save=penstock.Checkpoints(pipeline, t.folder).every(1)))
    return pipeline.batches


def own_folder(t: Trained) -> int:
    t.blocks = make_blocks()
    found = Trained(t.folder / "own", t.blocks)
    return found.pipeline.batches


def weights_alone(t: Trained) -> int:
    with_its_optimizer = t.make()
    penstock.Checkpoints(with_its_optimizer, t.folder).load()
    pipeline = t.make(sgd)
    pipeline.load_state_dict(with_its_optimizer.full_state_dict())
    list(pipeline.run(DATA[:2]))
    return pipeline.batches


def damage(t: Trained, *batches: int) -> None:
    for batch in batches:
        path = checkpoint_folder(t.folder, batch) / "stage-1.safetensors"
        path.write_bytes(path.read_bytes()[:-1])


def spoil(t: Trained, change: Callable[[dict[str, Any]], None]) -> int:
    t.rewrite(4, change)
    return t.with_the_checkpoint()


def remove_newest(t: Trained) -> int:
    checkpoint_folder(t.folder, 4).rename(t.folder / "removed")
    return t.with_the_checkpoint()


def within_a_run(t: Trained) -> int:
    for _ in t.pipeline.run(DATA[4:6]):
        t.checkpoints.save()
    return 0


def every_batch(t: Trained) -> int:
    pipeline = t.make()
    checkpoints = penstock.Checkpoints(pipeline, t.folder)
    checkpoints.load()
    list(pipeline.run(DATA[4:6], save=checkpoints.every(1)))
    checkpoints.wait()
    return t.with_the_checkpoint() - 2


LOADS: list[tuple[str, Callable[[Trained], Any], str, Callable[[Trained], int], int]] = [
    ("another optimizer", lambda t: t.with_the_checkpoint(optimizer=sgd), "use the same optimizer, or", weights_alone,
     2),
    ("its optimizer", lambda t: t.with_the_checkpoint(optimizer=sgd), "use the same optimizer",
     Trained.with_the_checkpoint, 6),
    ("another model", other_block, "needs; load it into the model .* or give this one a folder", own_folder, 4),
    ("another model, load", other_block, "needs; load it into the model", Trained.with_the_checkpoint, 6),
    ("another shape", narrower, "give the model the shape", own_folder, 4),
    ("a longer run", another_run, r"call checkpoints.load\(\) first", Trained.with_the_checkpoint, 6),
    ("a longer run, other folder", another_run, "give this run a folder of its own", own_folder, 4),
    ("none intact", lambda t: (damage(t, 2, 4), t.with_the_checkpoint()), "begin again in another folder", own_folder,
     4),
    ("another form", lambda t: spoil(t, lambda index: index["facts"].update(updates="six")), "remove that folder",
     remove_newest, 4),
    ("within a run", within_a_run, r"pipeline.run\(loader, save=checkpoints.every\(n\)\)", every_batch, 6),
]  # fmt: skip


@pytest.mark.parametrize(
    ("act", "message", "advice", "batches"), [case[1:] for case in LOADS], ids=[c[0] for c in LOADS]
)
def test_a_checkpoint_that_does_not_load_goes_on_as_the_message_says(
    tmp_path: Path, act: Callable[[Trained], Any], message: str, advice: Callable[[Trained], int], batches: int
) -> None:
    trained = Trained(tmp_path)
    with pytest.raises(PenstockError, match=f"(?s){message}"):
        act(trained)
    if message.startswith(("use", "needs", "give")):
        trained.blocks = make_blocks()
    assert advice(trained) == batches


SWAPPED: list[tuple[str, Callable[[Trained], Any], str]] = [
    ("a file of another batch", lambda t: swap(t, 2, 4), "is of another checkpoint, after '2' batches, not after 4"),
    ("another number of batches", lambda t: t.rewrite(4, lambda i: i["facts"].update(batch=5)), "not after 5"),
    ("another type", lambda t: recast(t, torch.float16), "'torch.float16', .* by the index .'torch.float32'"),
    ("whole numbers", lambda t: recast(t, torch.int64, told=True), "is torch.int64 in the checkpoint"),
    ("another shape of a state", lambda t: recast(t, None), "and by the index"),
]


def swap(t: Trained, source: int, place: int) -> None:
    """Put a file of one checkpoint into another, with the digest that it has there."""
    name = "stage-1.safetensors"
    data = (checkpoint_folder(t.folder, source) / name).read_bytes()
    put(t, place, name, data, told=False)


def recast(t: Trained, dtype: torch.dtype | None, told: bool = False) -> None:
    """Write tensors of another type, or states of optimizers of another shape, into a file."""
    name = "stage-1.safetensors"
    found = load((checkpoint_folder(t.folder, 4) / name).read_bytes())
    if dtype is None:
        found = {key: w[:1].clone() if w.dim() and key.startswith("optimizer/") else w for key, w in found.items()}
    else:
        found = {key: w.to(dtype) if key.startswith("weights/") else w for key, w in found.items()}
    put(t, 4, name, save(found, {"batch": "4"}), told)


def put(t: Trained, batch: int, name: str, data: bytes, told: bool) -> None:
    (checkpoint_folder(t.folder, batch) / name).write_bytes(data)

    def change(index: dict[str, Any]) -> None:
        index["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        if told:
            for key, tensor in load(data).items():
                index["layouts"][key] = layout_of(tensor)

    t.rewrite(batch, change)


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in SWAPPED], ids=[case[0] for case in SWAPPED])
def test_swapped_content_behind_right_digests_is_refused(
    tmp_path: Path, change: Callable[[Trained], Any], message: str
) -> None:
    trained = Trained(tmp_path)
    checkpoint_folder(tmp_path, 2).rename(tmp_path / "other")  # none to go back to
    if "'2'" in message:
        (tmp_path / "other").rename(checkpoint_folder(tmp_path, 2))
    change(trained)
    pipeline = trained.make()
    found = penstock.Checkpoints(pipeline, tmp_path)
    if "'2'" in message:
        found.load()
        assert re.search(message, found.damaged[0])
        assert pipeline.batches == 2
    else:
        with pytest.raises(PenstockError, match=message):
            found.load()


def test_weights_that_are_not_finite_are_told_and_an_earlier_checkpoint_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained = Trained(tmp_path)
    with torch.no_grad():
        linear(trained, 1).weight[0, 0] = float("nan")
    list(trained.pipeline.run(DATA[4:5], save=trained.checkpoints.every(1)))
    trained.checkpoints.save()
    pipeline = trained.make()
    checkpoints = penstock.Checkpoints(pipeline, tmp_path)
    checkpoints.load()
    assert pipeline.batches == 5  # it may have been saved on purpose
    (said,) = [record.getMessage() for record in caplog.records]
    assert "after 5 batches" in said
    assert re.search(r"\d\..*weight and \d+ more had infinities or NaN.*checkpoints.load\(limit=4\)", said)
    caplog.clear()
    checkpoints.load(limit=4)
    assert (pipeline.batches, pipeline.is_finite(), caplog.records) == (4, True, [])
