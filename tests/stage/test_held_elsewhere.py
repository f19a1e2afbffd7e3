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

import penstock
from penstock.errors import ConfigError, DataError
from penstock.stage.checks.remotely_trained_modules import HeldElsewhere
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
        refused(lambda: model[other](x)),
    ]
    model[6 - other].state_dict()  # one of this rank
    weights = pipeline.full_state_dict()
    if weights:
        model.load_state_dict(weights)
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in weights.items())
        model(torch.zeros(1, 3))
        saved(model)
        copy.deepcopy(model).state_dict()
    list(pipeline.run(BATCHES))  # and what was loaded is from before again
    said.append(refused(model.state_dict))
    return said, dict(weights)


def test_a_state_dict_of_a_model_in_several_processes_is_refused(pool: Pool) -> None:
    (first, weights), (second, _) = pool.submit(save_after_a_run, ranks=2)
    assert [said[:9] for said in first] == ["block '4'"] * 5
    assert [said[:9] for said in second] == ["block '0'"] * 3 + ["block '2'", "block '0'"]
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


def held_layer() -> tuple[nn.Linear, HeldElsewhere]:
    """A layer that another process trains."""
    layer = nn.Linear(2, 2)
    held = HeldElsewhere({"own": nn.Linear(2, 2), "head": layer}, ["own"])
    held.begin()
    refused(layer.state_dict)
    return layer, held


def write_as_data(layer: nn.Linear) -> None:
    """As a broadcast into p.data does, of which torch knows nothing."""
    for p in layer.parameters():
        p.data.add_(1)


@pytest.mark.parametrize(
    "load",
    [
        lambda layer: layer.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.ones(2)}),
        lambda layer: layer.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, assign=True),
        write_as_data,
    ],
)
def test_what_is_loaded_whole_counts(load: Any) -> None:
    layer, held = held_layer()
    layer.load_state_dict({"weight": torch.ones(2, 2)}, strict=False)
    refused(layer.state_dict)  # the bias is from before
    load(layer)
    layer.state_dict()
    layer(torch.zeros(1, 2))
    saved(layer)
    held.begin()
    held.begin()
    refused(layer.state_dict)
    assert len(layer._state_dict_pre_hooks) == 1


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
    refused(other.state_dict)
    later = HeldElsewhere(blocks, ["other", "tied"])
    with pytest.raises(ConfigError, match="block 'other' was trained by another process for another pipeline"):
        later.check()
    later.loaded()
    later.check()


@pytest.mark.parametrize("change", [lambda m: m.requires_grad_(False), nn.Module.bfloat16, nn.Module.double])
def test_what_leaves_values_as_they_are_makes_nothing_fresh(change: Any) -> None:
    layer, held = held_layer()
    change(layer)
    refused(layer.state_dict)
    held.begin()
    refused(layer.state_dict)
