"""Layers whose parameters are frozen: as measured, as `trained: false` says, and in plans."""

import pytest
import torch
from torch import nn

from penstock.cli.plans.profiled_runs import _check_same_model
from penstock.errors import ConfigError
from penstock.measure.model_profile import measure_blocks, profile_of
from penstock.options.all_options import PipelineOptions
from penstock.plan.candidates.block_chain import BlockChain
from penstock.plan.candidates.candidate import Candidate
from penstock.plan.candidates.planned_methods import PLANNED
from penstock.plan.candidates.schedule_cache import KnownSchedules
from penstock.plan.plan_export import plan_file
from penstock.plan.planners.two_bw import Sized
from penstock.plan.planning import PlanRequest, make_plan
from penstock.plan.profile.files import parse_profile, profile_text
from penstock.plan.profile.layer_graph import layer_graph
from penstock.plan.profile.schema import ProfiledLink
from penstock.plan.run_forecast import RunSettings, run_forecast
from penstock.plan.simulated.candidate_trial import CandidateTrial
from penstock.plan.stages.device_hierarchy import DeviceLevel, Devices
from penstock.train.config.load import load_config, validate_config
from penstock.train.setup.model_shape import shape_of

WIDTH = 64
BYTES = ("parameters", "frozen", "buffer", "optimizer", "whole", "stored", "shared", "movable", "returned")
LAYER = "forward: 1, backward: 3, backward_input: 2, backward_weight: 1, output: 10, stored: 30, late: 5, step: 0.5"


class Layer(nn.Module):
    """Keeps what it is given, and what it hands on."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def measured(frozen, precision):
    """The profile of four blocks, some of which are frozen."""
    blocks = {f"b{n}": Layer() for n in range(4)}
    for n in frozen:
        blocks[f"b{n}"].requires_grad_(False)
    options = PipelineOptions().changed(precision=precision, max_grad_norm=None)
    sample = {2: (torch.randn(2, WIDTH), torch.randn(2, WIDTH))}
    found = measure_blocks(blocks, sample, nn.functional.mse_loss, torch.optim.AdamW, options, 0.0)
    return parse_profile(profile_text(profile_of("model", found)), "measured")


def said_frozen(profile, frozen):
    """The same profile with `trained: false` at some layers."""
    layers = [
        each.model_copy(update={"trained": False}) if n in frozen else each for n, each in enumerate(profile.layers)
    ]
    return profile.model_copy(update={"layers": layers})


def chain_of(count, frozen, parameters=100, more=""):
    """A profile of equal layers."""
    rows = [
        f"- {{name: l{n}, {LAYER}, parameters: {parameters}, trained: {'false' if n in frozen else 'true'}{more}}}"
        for n in range(count)
    ]
    return parse_profile("\n".join(["format: penstock profile 1", "layers:", *rows]), "p")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("frozen", [(0, 1), (1, 2), (0, 2), (3,)])
def test_bytes_of_layers_that_are_said_to_be_frozen_are_those_of_frozen_blocks(frozen, precision):
    """But for what frozen blocks keep behind something that is trained, which is taken to be as much."""
    said = layer_graph(said_frozen(measured((), precision), frozen), 2).layers
    found = layer_graph(measured(frozen, precision), 2).layers
    first = next(n for n in range(4) if n not in frozen)
    for n, (ours, there) in enumerate(zip(said, found, strict=True)):
        keys = BYTES if n <= first else [key for key in BYTES if key not in ("stored", "shared", "movable")]
        assert {key: getattr(ours, key) for key in keys} == {key: getattr(there, key) for key in keys}, n
        assert ours.stored >= there.stored
        if n < first:
            assert (ours.stored, ours.returned, ours.seconds, ours.step) == (0, 0, ours.forward, 0)
        elif n in frozen:
            assert (ours.halves[1], ours.halves[2], there.halves[2]) == (0, 0, 0)
            assert ours.seconds == ours.forward + ours.halves[0]


def test_what_is_frozen_follows_from_what_is_trained():
    """Layers before the first trained one have a forward only; others no part of the backward for their weights."""
    layers = layer_graph(chain_of(4, (0, 2))).layers
    assert [layer.seconds - layer.forward for layer in layers] == [0, 3, 2, 3]
    assert [layer.halves for layer in layers] == [(0, 0, 0), (2, 1, 5), (2, 0, 0), (2, 1, 5)]
    assert [layer.stored for layer in layers] == [0, 30, 30, 30]
    assert [layer.step for layer in layers] == [0, 0.5, 0, 0.5]
    assert [(layer.parameters, layer.frozen) for layer in layers] == [(0, 100), (100, 0), (0, 100), (100, 0)]
    assert [layer.returned for layer in layers] == [0, 1, 1, 1]
    assert [layer.ways[0].memory for layer in layers] == [100, 200, 100, 200]  # of published cost functions


def test_without_halves_a_frozen_layer_has_half_a_backward():
    text = "format: penstock profile 1\nmicrobatch_sizes: [1, 2]\nlayers:\n- {name: a, forward: 1, backward: 2}\n"
    profile = parse_profile(text + "- {name: b, forward: [1, 2], backward: [2, 4], trained: false}", "p")
    assert [layer_graph(profile, size).layers[1].seconds for size in (1, 2)] == [2, 4]


def test_a_branch_before_the_first_trained_layer_has_no_backward():
    """Of two branches one is trained: its gradient comes back where they join, and none to the other one."""
    text = """
format: penstock profile 1
layers:
- {name: root, forward: 1, backward: 2, output: 4, parameters: 8, trained: false}
- {name: left, forward: 1, backward: 2, output: 4, parameters: 8, trained: false, inputs: [root]}
- {name: right, forward: 1, backward: 2, output: 6, parameters: 8, inputs: [root]}
- {name: join, forward: 1, backward: 2, output: 2, parameters: 8, trained: false, inputs: [left, right]}
"""
    graph = layer_graph(parse_profile(text, "p"))
    assert [layer.seconds for layer in graph.layers] == [1, 1, 3, 2]
    chain = BlockChain(graph, 2.0)
    assert chain.crossing.tolist() == [0, 8, 8, 10, 0]
    assert chain.returning.tolist() == [0, 0, 0, 6, 0]


def test_options_are_not_made_those_of_a_frozen_layer():
    text = "format: penstock profile 1\nlayers: [{name: a, trained: false, options: [{seconds: 1}]}]"
    with pytest.raises(ConfigError, match="'a': `trained: false` is for layers with forward and backward"):
        layer_graph(parse_profile(text, "p"))


def test_profiles_say_what_gradient_comes_back():
    """Measured: none for the output of blocks before the first one that is trained; nothing is said where all does."""
    profile = measured((0, 1), "fp32")
    assert [layer.gradient for layer in profile.layers] == [0, 0, None, None]
    assert [layer.gradient for layer in measured((1,), "fp32").layers] == [None] * 4
    assert [layer.step > 0 or profile.update > 0 for layer in profile.layers[2:]] == [True, True]
    assert [(layer.step, layer.optimizer, layer.parameters) for layer in profile.layers[:2]] == [(0, 0, 0)] * 2


def test_stages_of_frozen_blocks_have_no_update_and_no_work_of_gradients():
    """A run of three stages: the first has nothing that is trained, the second only in part."""
    link = ProfiledLink(bandwidth=1.0, work=0.125, work_per_byte=0.5)
    profile = chain_of(6, (0, 1, 2)).model_copy(update={"update": 0.25, "cores": 1.0, "links": [link]})
    settings = RunSettings("1f1b", 3, 1, 4, 1, (False,) * 3, (2, 2, 2))
    _, costs = run_forecast(profile, settings)
    message, empty = 0.125 + 10 * 0.5, 0.125
    passes = [(each.forward, each.backward_input) for each in costs.stages]
    assert [each.step for each in costs.stages] == [0, 0.5 + 0.25, 2 * 0.5 + 0.25]
    assert passes == [(2 + message, empty), (2 + 2 * message, 3 + empty + message), (2 + message, 2 * 3 + message)]


@pytest.mark.parametrize(("frozen", "balance"), [((), [5, 5]), (range(5), [7, 3]), (range(5, 10), [4, 6])])
def test_plans_give_more_blocks_to_stages_of_frozen_ones(frozen, balance):
    """Equal blocks of 4: of frozen ones at the front 1 is left, of others 3. So 13 | 12, and 16 | 19.

    Replicas of the whole model would take longer, as their sums of gradients do.
    """
    profile, devices = chain_of(10, frozen, parameters=1e6), Devices((DeviceLevel(2, 1e3),))
    plans = make_plan(PlanRequest(profile, devices, cost="simulated", microbatches=16, methods=("2bw",))).plans
    assert plans[0].settings["balance"] == balance


def test_bounds_leave_out_the_updates_of_stages_that_may_be_frozen():
    """Two stages, as busy as each other: 4 x 10 of a frozen block, 4 x 8 and an update of 8 of a trained one."""
    text = """
format: penstock profile 1
layers:
- {name: frozen, forward: 10, backward: 20, parameters: 8, trained: false}
- {name: trained, forward: 3, backward: 5, parameters: 8}
"""
    graph, devices = layer_graph(parse_profile(text, "p")), Devices((DeviceLevel(2, 1e12),), update=8.0)
    chain, candidate = BlockChain(graph, 2.0), Candidate(Sized(graph, 1, 4), PLANNED["2bw"], 2, 1)
    trial = CandidateTrial(candidate, chain, devices, KnownSchedules())
    bounds = [trial.uncut.seconds_per_sample(), *trial.bounds()]
    assert [4 * each for each in bounds] == pytest.approx([40, 40])
    assert max(bounds) <= trial.fastest((float("inf"), 0)).seconds


def test_memory_limits_let_frozen_blocks_be_where_trained_ones_have_no_room():
    """Weights, gradients and two states of a trained block take four times its parameters, a frozen one once."""
    devices = Devices((DeviceLevel(1, 1e12),), memory=1_600.0)
    request = {"cost": "simulated", "microbatches": 4, "methods": ("1f1b",)}
    assert not make_plan(PlanRequest(chain_of(4, ()), devices, **request)).plans
    (plan, *_) = make_plan(PlanRequest(chain_of(4, (0, 1, 2)), devices, **request)).plans
    assert plan.rating.stages[0].memory == 3 * 100 + 4 * 100 + 30


def test_plans_with_frozen_blocks_are_not_trained_as_others(tmp_path):
    """`penstock train` freezes nothing, so it has to refuse them, and no run of it is compared with such a profile."""
    profile = chain_of(4, (0,)).model_copy(update={"settings": {"model": {"preset": "tiny"}}, "source": "analytic"})
    planning = make_plan(PlanRequest(profile, Devices((DeviceLevel(2, 1e12),)), cost="simulated", microbatches=4))
    file = tmp_path / "plan.yaml"
    file.write_text(plan_file(planning))
    assert "these blocks were planned frozen: l0" in file.read_text()
    with pytest.raises(ConfigError, match="which penstock train does not have"):
        shape_of(load_config(file, []))
    with pytest.raises(ConfigError, match="frozen blocks"):
        _check_same_model(profile, validate_config({}), tmp_path)
