"""What messages about checkpoints, resuming and changed models advise is done to the letter, and works."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
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
from penstock.checkpoint.index import layout_of, write_index
from penstock.errors import PenstockError
from support.command_line import Command, only_folder, settings

GENERATOR = torch.Generator().manual_seed(2)
DATA = [(torch.randn(8, 4, generator=GENERATOR), torch.randn(8, 4, generator=GENERATOR)) for _ in range(8)]


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-2)


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=1e-2)


def make_blocks() -> list[nn.Module]:
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), nn.Linear(4, 4)]


class Whole(nn.Module):
    """The same blocks, as a model with a forward of its own."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.first, self.second, self.third = blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.third(self.second(self.first(x)))
        return found


class Trained:
    """A pipeline that has trained four batches, with a checkpoint after the second and the fourth, and its blocks.

    Args:
        folder: of the checkpoints.
        blocks: of the model; those of `make_blocks` if None.
        model: makes of the blocks what the pipeline is made of.
        options: of the pipeline.
    """

    def __init__(
        self,
        folder: Path,
        blocks: Sequence[nn.Module] | None = None,
        model: Callable[[list[nn.Module]], Any] = list,
        **options: Any,
    ) -> None:
        self.folder, self.blocks, self.options = folder, list(blocks or make_blocks()), options
        self.model = model(self.blocks)
        self.pipeline = self.make()
        self.checkpoints = penstock.Checkpoints(self.pipeline, folder)
        list(self.pipeline.run(DATA[:4], save=self.checkpoints.every(2)))
        self.checkpoints.save()

    def make(self, **options: Any) -> penstock.Pipeline:
        given: dict[str, Any] = {"method": "1f1b", "stages": 3, "microbatches": 2, "loss": F.mse_loss}
        model = self.blocks if isinstance(self.model, list) else self.model
        return penstock.Pipeline(model, **{**given, "optimizer": adamw, **self.options, **options})

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


def tied(within: bool = False) -> list[nn.Module]:
    """The blocks, two of which share a weight: of two stages, or of one."""
    first, second, third = make_blocks()
    owner, other = (second, nn.Linear(4, 4)) if within else (first, third)
    other.weight = next(iter(owner.children())).weight  # type: ignore[assignment]
    return [first, nn.Sequential(second[0], other), third] if within else [first, second, third]  # type: ignore[index]


def untie(t: Trained) -> None:
    for path, parameter in list(nn.ModuleList(t.blocks).named_parameters(remove_duplicate=False))[2:]:
        if parameter is linear(t).weight or path == "1.1.weight":
            module = nn.ModuleList(t.blocks).get_submodule(path.rpartition(".")[0])
            module.weight = nn.Parameter(parameter.detach().clone())


def tied_again(t: Trained) -> int:
    last = list(t.blocks[1].children())[-1]
    if isinstance(last, nn.Linear):
        last.weight = linear(t, 1).weight
    else:
        linear(t, 2).weight = linear(t).weight
    return going_on(t)


def in_the_loop(change: Callable[[Trained], Any]) -> Callable[[Trained], None]:
    """Make a change in the loop over reports, where it is refused; and then again, between two runs."""

    def act(t: Trained) -> None:
        run = t.pipeline.run(DATA[4:6])
        next(run)
        change(t)
        with pytest.raises(PenstockError, match=r"in the loop over reports.*load its last checkpoint"):
            next(run)
        change(t)

    return act


def written(t: Trained) -> int:
    """What was to be written is written between two runs."""
    pipeline = t.make()
    penstock.Checkpoints(pipeline, t.folder).load()
    with torch.no_grad():
        linear(t).weight.mul_(2)
    list(pipeline.run(DATA[4:6]))
    return pipeline.batches


def going_on(t: Trained) -> int:
    t.go_on()
    return t.pipeline.batches


def values_again(t: Trained) -> int:
    t.blocks[0].load_state_dict(make_blocks()[0].state_dict(), assign=True)
    return going_on(t)


MADE: dict[str, Callable[[], dict[str, Any]]] = {
    "untied": lambda: {"blocks": tied()},
    "untied, again": lambda: {"blocks": tied()},
    "untied in a stage": lambda: {"blocks": tied(within=True)},
    "untied in a stage, again": lambda: {"blocks": tied(within=True)},
    "a child": lambda: {"model": lambda blocks: nn.Sequential(*blocks)},
    "a part": lambda: {"model": Whole, "example": DATA[0][0]},
    **dict.fromkeys(("another width", "another combine"), lambda: {"data_parallel": apart(2, "average", 3)}),
    **dict.fromkeys(("no common model", "at a meeting"), lambda: {"data_parallel": apart(2, "average", 3)}),
}
"""How pipelines are made that are not made of a list of blocks alone."""

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
    ("broken", break_it, "broke in an earlier run.*load the last checkpoint into it", Trained.with_the_checkpoint, 6),
    ("broken, anew", break_it, "broke in an earlier run.*Make a new Pipeline .* begins with them", Trained.anew, 2),
    ("untied", untie, "0.0.weight, of another stage, were one .* present weights", Trained.anew, 2),
    ("untied, again", untie, "make them one again", tied_again, 6),
    ("untied in a stage", untie, "were one parameter .* present weights", Trained.anew, 2),
    ("untied in a stage, again", untie, "make them one again", tied_again, 6),
    ("a child", lambda t: setattr(t.model, "2", nn.Linear(4, 4)), "block '2' is another .* can be loaded",
     Trained.with_the_checkpoint, 6),
    ("a part", lambda t: setattr(t.model, "third", nn.Linear(4, 4)), "third is another .* can be loaded",
     Trained.with_the_checkpoint, 6),
    ("no values", lambda t: t.blocks[0].to("meta"), r"load some with load_state_dict\(assign=True\)", values_again, 6),
    ("frozen in the loop", in_the_loop(lambda t: linear(t).weight.requires_grad_(False)), "load the last checkpoint",
     Trained.with_the_checkpoint, 6),
    ("written in the loop", in_the_loop(lambda t: linear(t).weight.detach().mul_(2)), "load the last checkpoint",
     written, 6),
    ("replaced in the loop", in_the_loop(lambda t: setattr(linear(t), "weight", nn.Parameter(torch.ones(4, 4)))),
     "load the last checkpoint", Trained.with_the_checkpoint, 6),
    ("zeroed in the loop", in_the_loop(lambda t: linear(t).zero_grad()), "load the last checkpoint",
     Trained.with_the_checkpoint, 6),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "message", "advice", "batches"), CHANGES, ids=[c[0] for c in CHANGES])
def test_a_changed_model_goes_on_as_the_message_says(
    tmp_path: Path,
    name: str,
    change: Callable[[Trained], Any],
    message: str,
    advice: Callable[[Trained], int],
    batches: int,
) -> None:
    trained = Trained(tmp_path, **MADE.get(name, dict)())
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


def complex_weights(t: Trained) -> int:
    linear(t, 2).weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.complex64))
    return t.with_the_checkpoint()


def another_run(t: Trained) -> int:
    pipeline = t.make()
    list(pipeline.run(DATA[:1], save=penstock.Checkpoints(pipeline, t.folder).every(1)))
    return pipeline.batches


def own_folder(t: Trained) -> int:
    return Trained(t.folder / "own", t.blocks).pipeline.batches


def original(t: Trained) -> int:
    t.blocks = make_blocks()
    return t.with_the_checkpoint()


def apart(width: int, kind: str, every: int) -> penstock.DataParallel:
    """Pipelines that have weights of their own between two meetings; after four batches if `every` is 3."""
    return penstock.DataParallel(width, combine=penstock.Combine(kind, every=every))


def after_a_meeting(**options: Any) -> Callable[[Trained], int]:
    """Train on to where pipelines have just been averaged, take a checkpoint there, and change what was to be changed.

    Returns how many batches that has, less the two that the last run takes.
    """

    def advice(t: Trained) -> int:
        pipeline = t.make()
        checkpoints = penstock.Checkpoints(pipeline, t.folder)
        checkpoints.load()
        list(pipeline.run(DATA[4:6], save=checkpoints.every(1)))
        checkpoints.save()
        return t.with_the_checkpoint(**options) - 2

    return advice


def by_group(named: Any) -> torch.optim.Optimizer:
    """Weights and biases in groups of their own."""
    named = list(named)
    groups = [[pair for pair in named if pair[0].endswith(end)] for end in ("weight", "bias")]
    return torch.optim.AdamW([{"params": group} for group in groups if group], lr=1e-2)


def set_by_hand(t: Trained) -> int:
    """Train on with a setting for one of two groups, and load the checkpoint of that into one group."""
    t.folder, t.options = t.folder / "grouped", {"optimizer": by_group}
    pipeline = t.make()
    for optimizer in pipeline.optimizers().values():
        optimizer.param_groups[0]["weight_decay"] = 0.5
    list(pipeline.run(DATA[:4], save=penstock.Checkpoints(pipeline, t.folder).every(4)))
    penstock.Checkpoints(pipeline, t.folder).save()
    return t.with_the_checkpoint(optimizer=adamw)


def weights_alone(t: Trained) -> int:
    with_its_optimizer = t.make()
    penstock.Checkpoints(with_its_optimizer, t.folder).load()
    pipeline = t.make(optimizer=sgd)
    pipeline.load_state_dict(with_its_optimizer.full_state_dict())
    list(pipeline.run(DATA[:2]))
    return pipeline.batches


def damage(t: Trained, *batches: int) -> None:
    shutil.copytree(t.folder / "checkpoints", t.folder / "copies")
    for batch in batches:
        path = checkpoint_folder(t.folder, batch) / "stage-1.safetensors"
        path.write_bytes(path.read_bytes()[:-1])


def put_back(t: Trained) -> int:
    shutil.copytree(t.folder / "copies", t.folder / "checkpoints", dirs_exist_ok=True)
    return t.with_the_checkpoint()


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
    ("another model, load", other_block, "needs; load it into the model", original, 6),
    ("another shape", narrower, "give the model the shape", original, 6),
    ("another type", complex_weights, "give the model the type", original, 6),
    ("another width", lambda t: t.with_the_checkpoint(data_parallel=apart(4, "average", 3)),
     "goes on with width 2 .* To change either, take a checkpoint from where pipelines have just been averaged",
     after_a_meeting(data_parallel=apart(4, "average", 3)), 6),
    ("another combine", lambda t: t.with_the_checkpoint(data_parallel=2), "To change either, take a checkpoint from",
     after_a_meeting(data_parallel=2), 6),
    ("no common model", lambda t: t.with_the_checkpoint(data_parallel=apart(2, "bmuf", 2)), "go on as before, or",
     Trained.with_the_checkpoint, 6),
    ("at a meeting", lambda t: t.with_the_checkpoint(data_parallel=apart(2, "bmuf", 2)), "or take a checkpoint from",
     after_a_meeting(data_parallel=apart(2, "bmuf", 2)), 6),
    ("settings that conflict", set_by_hand, "use the parameter groups that it was written with",
     Trained.with_the_checkpoint, 6),
    ("a longer run", another_run, r"call checkpoints.load\(\) first", Trained.with_the_checkpoint, 6),
    ("a longer run, other folder", another_run, "give this run a folder of its own", own_folder, 4),
    ("none intact", lambda t: (damage(t, 2, 4), t.with_the_checkpoint()), "begin again in another folder", own_folder,
     4),
    ("copies put back", lambda t: (damage(t, 2, 4), t.with_the_checkpoint()), "put intact copies back", put_back, 6),
    ("another form", lambda t: spoil(t, lambda index: index["facts"].update(updates="six")), "remove that folder",
     remove_newest, 4),
    ("within a run", within_a_run, r"pipeline.run\(loader, save=checkpoints.every\(n\)\)", every_batch, 6),
    ("a folder in use", lambda t: (penstock.Checkpoints(t.make(), t.folder).load(), t.go_on(), t.checkpoints.save()),
     "another Checkpoints has been loaded from", Trained.with_the_checkpoint, 6),
]  # fmt: skip


@pytest.mark.parametrize(("name", "act", "message", "advice", "batches"), LOADS, ids=[c[0] for c in LOADS])
def test_a_checkpoint_that_does_not_load_goes_on_as_the_message_says(
    tmp_path: Path,
    name: str,
    act: Callable[[Trained], Any],
    message: str,
    advice: Callable[[Trained], int],
    batches: int,
) -> None:
    trained = Trained(tmp_path, **MADE.get(name, dict)())
    with pytest.raises(PenstockError, match=f"(?s){message}"):
        act(trained)
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


def at(run: Path, *more: str) -> list[str]:
    return ["train", "--resume", str(run), *more]


def lose(run: Path) -> None:
    shutil.copytree(run / "checkpoints", run.parent / "kept")
    shutil.rmtree(run / "checkpoints")


def unfinished(run: Path) -> None:
    """Leave what a run has that was stopped after three of nine batches."""
    shutil.rmtree(run / "weights")


RUNS: list[tuple[str, Callable[[Path], Any], list[str], str, Callable[[Path], Any], list[str]]] = [
    ("another model", id, ["--set", "model.width=64"], "leave the change out, or", id, []),
    ("another model, anew", id, ["--set", "model.width=64"], r"a run of its own \(without --resume\)", id, ["anew"]),
    ("a change", id, ["--set", "optimizer.lr=-1"], "optimizer.lr", id, []),
    ("a change of the loop", id, ["--set", "batches=1"], "set batches above that", id, ["--set", "batches=4"]),
    ("checkpoints lost", lose, [], "put the checkpoints back",
     lambda run: shutil.copytree(run.parent / "kept", run / "checkpoints"), []),
    ("checkpoints lost, restart", lose, [], "begin again with --restart", id, ["--restart"]),
    ("the folder of runs", id, ["around"], "the newest run in it is '{run}'", id, []),
    ("a whole vocabulary", id, ["--set", "method=1f1b"], "method=vocabulary-1f1b and stages=2", id,
     ["--set", "method=vocabulary-1f1b", "--set", "stages=2"]),
    ("parts of a vocabulary", id, ["--set", "method=vocabulary-1f1b"], "go on with a method with a whole output layer",
     id, ["--set", "method=gpipe"]),
    ("no weights to compare", unfinished, ["check"], "finish it with penstock train --resume {run}", id,
     ["--set", "batches=9"]),
]  # fmt: skip

BASES = {
    "a whole vocabulary": ["method=vocabulary-1f1b", "stages=2"],
    "parts of a vocabulary": ["method=1f1b"],
    "no weights to compare": ["microbatch_size=1"],
}
"""How runs are made that are not made as usual."""
PROFILE = ["--layers", 2, "--hidden", 32, "--heads", 2, "--sequence", 16, "--vocabulary", 256, "--cluster", "h100"]


@pytest.mark.processes
@pytest.mark.parametrize(("name", "change", "given", "message", "mend", "advised"), RUNS, ids=[c[0] for c in RUNS])
def test_a_run_goes_on_as_the_command_line_says(
    tmp_path: Path, command: Command, name: str, change: Callable[[Path], Any], given: list[str], message: str,
    mend: Callable[[Path], Any], advised: list[str],
) -> None:  # fmt: skip
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    train = ["train", "--data", str(tmp_path / "text.txt")]
    ran = command(*train, *settings(f"out={tmp_path / 'runs'}", "sample_length=0", *BASES.get(name, [])))
    assert ran.returncode == 0, ran.stderr
    run = only_folder(tmp_path / "runs")
    change(run)
    profile, checked = tmp_path / "profile.yaml", given == ["check"]
    compare = ["profile", str(profile), "--check", str(run)]
    assert not checked or command("profile", *map(str, PROFILE), "--out", str(profile)).returncode == 0
    refused = command(*(at(run.parent) if given == ["around"] else compare if checked else at(run, *given)))
    assert refused.returncode == 2
    assert re.search(message.replace("{run}", re.escape(str(run))), " ".join(refused.stderr.split()))
    mend(run)
    anew = [*train, *settings(f"out={tmp_path / 'own'}", "sample_length=0", "model.width=64")]
    for given in [anew if advised == ["anew"] else at(run, *advised), *([compare] if checked else [])]:
        ended = command(*given)
        assert ended.returncode == 0, ended.stderr
