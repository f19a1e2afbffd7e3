"""What is changed on modules after the pipeline was made: taken over when the next run begins, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from penstock import Checkpoints, DataParallel, Staleness
from penstock.errors import ConfigError
from support.plain_training import PlainTraining, assert_close_weights, make_data, make_model, pipeline_of_model
from support.pool import Pool

Change = Callable[[nn.Sequential], None]


def other_state() -> dict[str, Any]:
    """Weights from elsewhere."""
    torch.manual_seed(9)
    return {name: torch.randn_like(tensor) for name, tensor in make_model().state_dict().items()}


def load(model: nn.Sequential) -> None:
    model.load_state_dict(other_state())


def load_by_assignment(model: nn.Sequential) -> None:
    model.load_state_dict(other_state(), assign=True)


def assign_data(model: nn.Sequential) -> None:
    for name, p in model.named_parameters():
        p.data = other_state()[name]


def write_data(model: nn.Sequential) -> None:
    for name, p in model.named_parameters():
        p.data.copy_(other_state()[name])


def replace_a_parameter(model: nn.Sequential) -> None:
    load(model)
    model[0].weight = nn.Parameter(other_state()["0.weight"].clone())


@torch.no_grad()
def double_a_weight_of_the_first_stage(model: nn.Sequential) -> None:
    model[0].weight.mul_(2)


def assign_a_bias_of_the_last_stage(model: nn.Sequential) -> None:
    model[4].bias.data = other_state()["4.bias"]


ALL = [load, load_by_assignment, assign_data, write_data, replace_a_parameter]
SOME = [double_a_weight_of_the_first_stage, assign_a_bias_of_the_last_stage]
LATE: list[tuple[str, int, dict[str, Any]]] = [
    ("1f1b", 0, {}),
    ("2bw", 1, {}),
    ("2bw-eager", 1, {}),
    ("3bw", 2, {}),
    ("2bw-ahead", 1, {}),
    ("3bw-ahead", 2, {}),
    ("1f1b", 2, {"staleness": Staleness(delays={"0": 2, "2": 2, "4": 2})}),
    *(
        (method, 1, {"data_parallel": DataParallel(2, sharding=level)})
        for method, level in [("2bw", "gradients"), ("2bw-ahead", "optimizer"), ("2bw-layered", "none")]
    ),
]


def plainly(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer whose last step is that of the last gradient."""
    return torch.optim.SGD(parameters, lr=0.1)


WRITTEN = [*((write, *row) for write in ALL for row in LATE[:2]), *((write, *row) for write in SOME for row in LATE)]


@pytest.mark.parametrize(("write", "method", "delay", "options"), WRITTEN)
def test_weights_written_between_runs_are_what_the_next_batch_reads(
    write: Change, method: str, delay: int, options: dict[str, Any]
) -> None:
    """In all of its passes, on all stages, whichever was written: older versions are those of other weights."""
    model, data = make_model(), make_data(8)
    pipeline = pipeline_of_model(model, plainly, method, **options)
    plain = PlainTraining(make_model(), plainly, delay, ahead="ahead" in method)
    for part in (data[:4], data[4:]):
        list(pipeline.run(part))
        plain.run(part)
        assert_close_weights(dict(model.state_dict()), dict(plain.model.state_dict()))
        write(model)
        assert_close_weights(pipeline.full_state_dict(), dict(model.state_dict()))
        plain.model.load_state_dict(model.state_dict())
        plain.older = []


@pytest.mark.parametrize("method", ["2bw", "2bw-ahead"])
@pytest.mark.parametrize(("loads", "writes_again"), [(False, True), (True, False), (True, True)])
def test_a_checkpoint_of_written_weights_goes_on_from_them_on_all_stages(
    method: str, loads: bool, writes_again: bool, tmp_path: Any
) -> None:
    model, data = make_model(), make_data(8)
    pipeline, plain = pipeline_of_model(model, plainly, method), PlainTraining(make_model(), plainly, 1, "a" in method)
    list(pipeline.run(data[:4]))
    plain.run(data[:4])
    for one in (model, plain.model):
        double_a_weight_of_the_first_stage(one)
    Checkpoints(pipeline, tmp_path).save()
    if loads:
        model = make_model()
        pipeline = pipeline_of_model(model, plainly, method)
        Checkpoints(pipeline, tmp_path).load()
    for one in (model, plain.model) if writes_again else ():
        assign_a_bias_of_the_last_stage(one)
    plain.older = []
    list(pipeline.run(data[4:]))
    plain.run(data[4:])
    assert_close_weights(dict(model.state_dict()), dict(plain.model.state_dict()))


@pytest.mark.parametrize("width", [1, 2])
def test_weights_assigned_reach_evaluations_and_parallel_pipelines(width: int) -> None:
    model = make_model()
    pipeline = pipeline_of_model(model, data_parallel=width)
    load_by_assignment(model)
    wanted = make_model()
    wanted.load_state_dict(other_state())
    (x, y), *_ = make_data()
    found = pipeline.evaluate([(x, y)])
    assert found is not None
    assert found[0] == pytest.approx(nn.functional.mse_loss(wanted(x), y).item())


def writes_on(group: dist.ProcessGroup, method: str, sharding: str, ranks: list[int]) -> list[str]:
    """Runs with weights that are written on some ranks in between, and at last on all; what they have said."""
    model, data, said = make_model(), make_data(6), []
    pipeline = pipeline_of_model(model, plainly, method, group=group, data_parallel=DataParallel(2, sharding=sharding))
    list(pipeline.run(data[:2]))
    if dist.get_rank(group) in ranks:
        double_a_weight_of_the_first_stage(model)
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            list(pipeline.run(data[2:4]))
        said.append(str(caught.value))
    if dist.get_rank(group) not in ranks:
        double_a_weight_of_the_first_stage(model)
    list(pipeline.run(data[2:4]))
    return said


@pytest.mark.parametrize(("method", "sharding"), [("1f1b", "none"), ("2bw", "optimizer"), ("1f1b", "full")])
def test_weights_written_in_some_of_the_pipelines_are_refused(pool: Pool, method: str, sharding: str) -> None:
    for said in pool.submit(writes_on, method, sharding, [0], ranks=4):
        assert all("stage 0 were written into between two runs, but not the same on ranks 0 and 2" in s for s in said)


def test_without_writes_a_run_in_parts_goes_on_under_2bw() -> None:
    """The version before the newest is kept then."""
    states = []
    for parts in ([4], [1, 2, 1]):
        pipeline, data = pipeline_of_model(make_model(), method="2bw"), make_data()
        for size in parts:
            list(pipeline.run([data.pop(0) for _ in range(size)]))
            pipeline.state_dict()
        states.append(pipeline.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_checkpoint_loaded_under_2bw_keeps_both_versions(tmp_path: Any) -> None:
    """Loading one is no write from outside."""
    first, second = (pipeline_of_model(make_model(), method="2bw") for _ in range(2))
    list(first.run(make_data()[:3]))
    Checkpoints(first, tmp_path).save()
    list(second.run(make_data()[:1]))
    Checkpoints(second, tmp_path).load()
    for pipeline in (first, second):
        list(pipeline.run(make_data()[3:]))
    found, wanted = second.state_dict(), first.state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_weights_written_reach_batches_that_read_with_a_chosen_delay_on_another_stage() -> None:
    model, states, late = make_model(), [], Staleness(delays={"0": 2})
    pipeline = pipeline_of_model(model, staleness=late)
    list(pipeline.run(make_data()[:2]))
    assign_a_bias_of_the_last_stage(model)
    fresh = make_model()
    fresh.load_state_dict(model.state_dict())
    for one in (pipeline, pipeline_of_model(fresh, staleness=late)):
        for optimizer in one.optimizers().values():
            optimizer.state.clear()
        list(one.run(make_data()[2:]))
        states.append(one.state_dict())
    assert_close_weights(*states)


def test_frozen_parameters_may_be_assigned() -> None:
    states = []
    for assign in (False, True):
        model = make_model()
        model[2].requires_grad_(False)
        pipeline = pipeline_of_model(model)
        list(pipeline.run(make_data()[:2]))
        model.load_state_dict({**model.state_dict(), "2.weight": other_state()["2.weight"]}, assign=assign)
        list(pipeline.run(make_data()[2:]))
        assert torch.equal(model[2].weight, other_state()["2.weight"])
        states.append(pipeline.state_dict())
    assert_close_weights(*states)


# --- what is refused --------------------------------------------------------------------------------------------------


def freeze(model: nn.Sequential) -> None:
    model[0].weight.requires_grad_(False)


def unfreeze(model: nn.Sequential) -> None:
    model[2].bias.requires_grad_()


def add_a_parameter(model: nn.Sequential) -> None:
    model[0].scale = nn.Parameter(torch.ones(()))


def remove_a_parameter(model: nn.Sequential) -> None:
    model[0].bias = None


def add_a_layer_inside(model: nn.Sequential) -> None:
    model[1].extra = nn.Linear(2, 2)


def replace_a_block(model: nn.Sequential) -> None:
    model[2] = nn.Linear(6, 5).double()


def append_a_block(model: nn.Sequential) -> None:
    model.append(nn.Linear(2, 2).double())


def parametrize(model: nn.Sequential) -> None:
    nn.utils.parametrizations.weight_norm(model[0])


def halve(model: nn.Sequential) -> None:
    model[0].half()


def reshape(model: nn.Sequential) -> None:
    model[0].bias.data = torch.zeros(3, 2, dtype=torch.double)


def lose_values(model: nn.Sequential) -> None:
    model[0].to("meta")


def wait_for_several_gradients(model: nn.Sequential) -> None:
    torch.autograd.graph.register_multi_grad_hook(list(model[0].parameters()), lambda gradients: None)


def share_between_stages(model: nn.Sequential) -> None:
    model[4].bias = model[0].bias


def share_within_a_stage(model: nn.Sequential) -> None:
    model[4].bias = model[2].bias


def hook_on_the_whole(model: nn.Sequential) -> None:
    model.register_forward_hook(lambda module, inputs, output: 2 * output)


REFUSED: list[tuple[Change, str]] = [
    (freeze, r"0\.weight no longer requires gradients"),
    (unfreeze, r"2\.bias requires gradients now"),
    (add_a_parameter, r"0\.scale is new"),
    (remove_a_parameter, r"0\.bias is gone"),
    (add_a_layer_inside, r"1\.extra\.\w+ is new"),
    (replace_a_block, r"block '2' is another"),
    (append_a_block, r"block '5' is new"),
    (parametrize, r"0\.(weight is gone|parametrizations\S+ is new)"),
    (halve, r"0\.weight is torch\.float16 now"),
    (reshape, r"0\.bias has shape \(3, 2\) now"),
    (lose_values, r"0\.weight has no values any more"),
    (wait_for_several_gradients, r"0\.weight has a hook of register_multi_grad_hook"),
    (share_between_stages, r"4\.bias has become one parameter with 0\.bias, of another stage"),
    (share_within_a_stage, r"4\.bias has become one parameter with 2\.bias since"),
    (hook_on_the_whole, r"Sequential has got hooks since the pipeline was made"),
]


@pytest.mark.parametrize(("change", "said"), REFUSED)
def test_changes_that_no_optimizer_would_follow_are_refused_when_the_next_run_begins(change: Change, said: str) -> None:
    model = make_model()
    model[2].bias.requires_grad_(False)
    pipeline = pipeline_of_model(model)
    list(pipeline.run(make_data()[:1]))
    change(model)
    with pytest.raises(ConfigError, match=said):
        list(pipeline.run(make_data()))
    assert pipeline.batches == 1
