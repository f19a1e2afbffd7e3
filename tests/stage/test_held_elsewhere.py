"""What a process has of the stages of others is not taken for the trained model."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim import swa_utils

import penstock
from penstock.errors import ConfigError, DataError
from penstock.stage.checks.remotely_trained_modules import HeldElsewhere, HeldModule
from support.pool import Pool

BATCHES = [(torch.full((4, 3), 0.5), torch.zeros(4, 2))] * 2


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def make_pipeline(model: nn.Module, group: dist.ProcessGroup | None, **options: Any) -> penstock.Pipeline:
    given = {"method": "1f1b", "stages": 2, "microbatches": 2, "partition": [3, 2]} | options
    return penstock.Pipeline(
        model,
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        group=penstock.Group(group, 20.0),
        **given,
    )


def refused(call: Any) -> str:
    with pytest.raises(ConfigError, match="is trained by another process") as error:
        call()
    return str(error.value)


def saved(model: nn.Module) -> bytes:
    """The file of a whole model."""
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


def save_after_a_run(group: dist.ProcessGroup) -> tuple[list[str], Any]:
    """Whatever a script does with its model after a run, from whole to nothing."""
    model = make_model()
    pipeline = make_pipeline(model, group)
    list(pipeline.run([]))
    model.state_dict()  # before a batch is trained it is the model
    assert b"penstock" not in saved(model)
    list(pipeline.run(BATCHES))
    other = 2 if dist.get_rank(group) else 4  # a layer of the other rank
    x = torch.zeros(1, 4)
    said = [
        refused(model.state_dict),
        refused(lambda: model(torch.zeros(1, 3))),
        refused(lambda: torch.save(model, io.BytesIO())),
        refused(copy.deepcopy(model).state_dict),
        refused(lambda: model[other](x)),
    ]
    model[6 - other].state_dict()  # one of this rank
    weights = pipeline.full_state_dict()
    if weights:
        model.load_state_dict(weights)
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in weights.items())
        model(torch.zeros(1, 3))
        assert b"penstock" not in saved(model)
        copy.deepcopy(model).state_dict()
    list(pipeline.run(BATCHES))  # and what was loaded is from before again
    said.append(refused(model.state_dict))
    return said, dict(weights)


def test_a_state_dict_of_a_model_in_several_processes_is_refused(pool: Pool) -> None:
    (first, weights), (second, _) = pool.submit(save_after_a_run, ranks=2)
    assert [said[:9] for said in first] == ["block '4'"] * 6
    assert [said[:9] for said in second] == ["block '0'"] * 4 + ["block '2'", "block '0'"]
    for said in (*first, *second):
        assert "weights = pipeline.full_state_dict(model)  # all ranks call it" in said
    assert "torch.save(weights, path)" in first[0]
    assert "model.load_state_dict(weights)" in first[1]
    alone = make_model()
    list(make_pipeline(alone, None).run(BATCHES))
    for name, tensor in alone.state_dict().items():
        assert torch.equal(weights[name], tensor), name


def refused_together(pipeline: penstock.Pipeline, group: dist.ProcessGroup) -> None:
    """Neither a run nor an evaluation begins on any rank, where rank 1 has old weights of block 2."""
    said = "block '2' was trained by another process for another pipeline"
    kind, said = (ConfigError, said) if dist.get_rank(group) else (DataError, f"rank 1 could not begin .*{said}")
    with pytest.raises(kind, match=said):
        list(pipeline.run(BATCHES))
    with pytest.raises(kind, match=said):
        pipeline.evaluate(BATCHES)


def cut_otherwise(group: dist.ProcessGroup, loads: str, folder: str) -> Any:
    """A second pipeline of the same model, another part of which each process trains."""
    model = make_model()
    first = make_pipeline(model, group)
    list(first.run(BATCHES))
    weights = first.full_state_dict()
    sent = [dict(weights)]
    dist.broadcast_object_list(sent, src=0, group=group)
    second = make_pipeline(model, group, partition=[1, 4])
    for _ in range(2):
        refused_together(second, group)
    if loads == "weights":
        second.load_state_dict(sent[0])
    elif loads == "checkpoint":
        penstock.Checkpoints(first, folder).save()
        penstock.Checkpoints(second, folder).load()
    else:
        model.load_state_dict(sent[0])
    list(second.run(BATCHES))
    return dict(second.full_state_dict())


def hands_out_nothing(pipeline: penstock.Pipeline, group: dist.ProcessGroup, folder: str) -> None:
    """What rank 0 has of block 2 is from before the run of another pipeline."""
    checkpoints = penstock.Checkpoints(pipeline, folder)
    said = "block '2' was trained by another process for another pipeline"
    for call in (pipeline.full_state_dict, checkpoints.save):
        with pytest.raises(ConfigError, match=said):
            call()
    for own in (pipeline.state_dict, pipeline.snapshots):
        if dist.get_rank(group):
            assert own()
        else:
            with pytest.raises(ConfigError, match=said):
                own()


def two_at_once(group: dist.ProcessGroup, folder: str) -> dict[str, Any]:
    """Two pipelines of one model are made before either of them has trained it."""
    model = make_model()
    first, second = make_pipeline(model, group), make_pipeline(model, group, partition=[1, 4])
    list(first.run(BATCHES))
    refused_together(second, group)
    sent = [dict(first.full_state_dict(model))]
    dist.broadcast_object_list(sent, src=0, group=group)
    model.load_state_dict(sent[0])
    list(second.run(BATCHES))
    hands_out_nothing(first, group, folder)
    return dict(second.full_state_dict())


@pytest.mark.parametrize("loads", ["weights", "model", "checkpoint"])
def test_weights_from_before_are_not_trained_further(pool: Pool, loads: str, tmp_path: Path) -> None:
    found, _ = pool.submit(cut_otherwise, loads, str(tmp_path), ranks=2)
    alone = make_model()
    list(make_pipeline(alone, None).run(BATCHES))
    list(make_pipeline(alone, None, partition=[1, 4]).run(BATCHES))
    assert all(torch.equal(found[name], tensor) for name, tensor in alone.state_dict().items())


def test_a_pipeline_made_before_another_has_trained_does_not_train_what_is_from_before(
    pool: Pool, tmp_path: Path
) -> None:
    found, _ = pool.submit(two_at_once, str(tmp_path), ranks=2)
    alone = make_model()
    list(make_pipeline(alone, None).run(BATCHES))
    list(make_pipeline(alone, None, partition=[1, 4]).run(BATCHES))
    assert all(torch.equal(found[name], tensor) for name, tensor in alone.state_dict().items())


# --- one module -------------------------------------------------------------------------------------------------------


def test_what_is_loaded_whole_counts() -> None:
    layer = nn.Linear(2, 2)
    held = HeldModule("head", layer)
    assert not held.stale
    held.mark()
    assert held.stale
    layer.load_state_dict({"weight": torch.ones(2, 2)}, strict=False)
    assert held.stale  # the bias is from before
    layer.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.ones(2)})
    assert not held.stale
    state = layer.state_dict()
    held.mark()
    layer.load_state_dict(state, assign=True)  # the same values, but somebody has loaded them
    assert not held.stale


def test_tensors_of_other_processes_may_be_written_without_torch_knowing() -> None:
    """As a broadcast into p.data is."""
    layer = nn.Linear(2, 2)
    held = HeldModule("head", layer)
    held.mark()
    for p in layer.parameters():
        p.data.add_(1)
    assert not held.stale


def test_a_copy_of_a_stale_module_is_stale_until_it_is_loaded() -> None:
    layer = nn.Linear(2, 2)
    held = HeldModule("head", layer)
    state = layer.state_dict()
    held.mark()
    twin = copy.deepcopy(layer)
    with pytest.raises(ConfigError, match="block 'head' is trained by another process"):
        twin.state_dict()
    twin.load_state_dict(state)
    twin.state_dict()
    assert held.stale


def test_an_average_that_was_made_while_the_model_was_stale_is_fresh_once_it_is_updated() -> None:
    """It is a deep copy, which is written into, not loaded."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    state = model.state_dict()
    HeldElsewhere(dict(model.named_children()), ["0"]).begin()
    averaged = swa_utils.AveragedModel(model)
    with pytest.raises(ConfigError, match="block '1' is trained by another process"):
        averaged.state_dict()
    again = copy.deepcopy(averaged)
    model.load_state_dict(state)
    for stale in (averaged, again):
        stale.update_parameters(model)
        stale.state_dict()
        stale(torch.zeros(1, 2))


def test_frozen_and_shared_modules_are_nobody_elses() -> None:
    """A frozen layer stays what it is; of a tied parameter this process trains its own copy."""
    tied, frozen, other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)
    first = nn.Linear(2, 2, bias=False)
    tied.weight = first.weight
    blocks = {"first": first, "frozen": frozen, "other": other, "tied": tied}
    held = HeldElsewhere(blocks, ["first"])
    held.begin()
    for module in (first, frozen, tied):
        module.state_dict()
        module(torch.zeros(1, 2))
    with pytest.raises(ConfigError, match="block 'other'"):
        other.state_dict()
    later = HeldElsewhere(blocks, ["other", "tied"])
    with pytest.raises(ConfigError, match="block 'other' was trained by another process for another pipeline"):
        later.check()
    later.loaded()
    later.check()
    held.begin()
    HeldElsewhere(blocks, ["first"]).begin()  # a second pipeline adds no hooks
    assert len(other._state_dict_pre_hooks) == 1


def hooks_of(module: nn.Module) -> int:
    return len(module._state_dict_pre_hooks) + len(module._forward_pre_hooks) + len(module._load_state_dict_post_hooks)


def test_a_module_has_hooks_as_long_as_it_is_stale() -> None:
    """So before a run, and after fresh weights were loaded, it is scripted, compiled and pickled like any other."""
    layer = nn.Linear(2, 2)
    held, state = HeldElsewhere({"0": nn.Linear(2, 2), "1": layer}, ["0"]), layer.state_dict()
    assert hooks_of(layer) == 0
    for load in (lambda: layer.load_state_dict(state), held.loaded, lambda: layer.weight.data.add_(1)):
        held.begin()
        held.begin()
        assert hooks_of(layer) == 3
        load()
    layer.bias.data.add_(1)
    layer.state_dict()  # which sees that somebody has written both
    assert hooks_of(layer) == 0
    assert b"penstock" not in saved(layer)


def test_hooks_of_others_are_called_after_those_of_a_stale_module() -> None:
    """The dict of hooks that torch iterates over is not changed meanwhile."""
    layer, calls = nn.Linear(2, 2), []
    held, state = HeldElsewhere({"0": nn.Linear(2, 2), "1": layer}, ["0"]), layer.state_dict()
    for number in range(3):
        held.begin()
        layer.register_load_state_dict_post_hook(lambda *_: calls.append("load"))
        layer.register_state_dict_pre_hook(lambda *_: calls.append("state"))
        layer.load_state_dict(state)
        assert not layer._forward_pre_hooks
        held.begin()
        layer.register_state_dict_pre_hook(lambda *_: calls.append("state"))
        for p in layer.parameters():
            p.data.add_(1)
        layer.state_dict()
        assert calls == ["load"] * (number + 1) + ["state"] * (2 * number + 2)
        calls.clear()
    held.begin()
    assert hooks_of(layer) == 3 + 3 * 3  # none of earlier runs is left


def test_a_copy_loses_its_hooks_when_it_is_loaded() -> None:
    layer = nn.Linear(2, 2)
    state = layer.state_dict()
    HeldModule("head", layer).mark()
    twin = copy.deepcopy(layer)
    twin.load_state_dict(state)
    assert (hooks_of(twin), hooks_of(layer)) == (0, 3)


@pytest.mark.parametrize("change", [lambda m: m.requires_grad_(False), nn.Module.bfloat16, nn.Module.double])
def test_what_leaves_values_as_they_are_makes_nothing_fresh(change: Any) -> None:
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.bias[0] = torch.nan
    state = layer.state_dict()
    held = HeldModule("head", layer)
    held.mark()
    change(layer)
    assert held.stale
    held.mark()
    assert held.stale
    layer.load_state_dict(state)
    assert not held.stale
