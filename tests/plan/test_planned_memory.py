"""Measured, planned and run: the memory of a plan is that of the run's ledger, weights byte for byte."""

from collections import Counter

import pytest
import torch
from torch import nn

import penstock
import penstock.plan.planning as planning
from penstock.measure.model_profile import measure_blocks, profile_of
from penstock.options.all_options import PipelineOptions
from penstock.plan.candidates.block_chain import BlockChain
from penstock.plan.candidates.candidate import Candidate
from penstock.plan.candidates.planned_methods import PLANNED, ActivationMemory
from penstock.plan.candidates.rank_memory import BUFFERS
from penstock.plan.candidates.schedule_cache import KnownSchedules, ScheduleKey
from penstock.plan.planners.two_bw import Sized
from penstock.plan.profile.files import parse_profile, profile_text
from penstock.plan.profile.layer_graph import layer_graph
from penstock.plan.simulated.candidate_trial import CandidateTrial
from penstock.plan.simulated.chosen_plan import train_settings
from penstock.plan.stages.device_hierarchy import DeviceLevel, Devices
from penstock.plan.stages.planned import Search
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.pipeline_stats import TOTAL_ON_DEVICE
from penstock.schedule.ir.op_table import Op
from support.grouped import grouped

WIDTH, M = 32, 8
KEPT, OFFLOADED, RECOMPUTED = ActivationMemory
AWAY = "offloaded activations"  # of the ledger
POOLED = ("weights", "gradients", "summed gradients", "idle buffers")  # whose buffers change their roles
DEVICES = Devices((DeviceLevel(4, 1e12),), 1e9, host=1e9)


class Buffered(nn.Module):
    """A layer with a module buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("kept", torch.ones(WIDTH))

    def forward(self, x):
        return torch.tanh(self.linear(x))


def blocks(frozen=(), count=4):
    torch.manual_seed(0)
    found = {f"layer{n}": Buffered() for n in range(count)}
    for number in frozen:
        found[f"layer{number}"].requires_grad_(False)
    return found


def squared(output, target):
    return (output - target).square().mean()


def adam(named):
    return torch.optim.AdamW(named, lr=0.01)


def kinds_at_the_peak(pipeline, rank):
    """What the ledger says of a rank at each moment at which its device holds the most, by kinds of the planner."""
    changes = sorted(
        (when, kind, nbytes)
        for (of, kind), samples in pipeline.timeline().memory.items()
        for when, nbytes in samples
        if of == rank and kind != AWAY
    )
    live, moments = {}, []
    for _, kind, nbytes in changes:
        live[kind] = nbytes
        named = Counter()
        for each, held in live.items():
            named[BUFFERS if each in POOLED else each] += held
        moments.append({name: held for name, held in named.items() if held})
    most = max(sum(moment.values()) for moment in moments)
    return [moment for moment in moments if sum(moment.values()) == most]


def planned_and_found(
    method, precision, frozen=(), does=KEPT, count=4, width=1, sharding="none", depth=2, m=M, cuts=None
):
    """Plan some ranks with a profile of the blocks, run the plan; returns both peaks on each device.

    Where the two are equal, so is each kind.
    """
    options = PipelineOptions().changed(precision=precision, max_grad_norm=None)
    sample = {2: (torch.randn(2, WIDTH), torch.randn(2, WIDTH))}
    measured = measure_blocks(blocks(frozen, count), sample, squared, adam, options, 0.0)
    graph = layer_graph(parse_profile(profile_text(profile_of("model", measured, [], "", {})), "again"), 2)
    candidate = Candidate(
        Sized(graph, 2, m * width), PLANNED[method], depth, width, sharding, offloads=does is OFFLOADED
    )
    trial = CandidateTrial(candidate, BlockChain(graph, 2.0), DEVICES, KnownSchedules(decides=precision == "fp16"))
    cuts = cuts or (*range(0, count, count // candidate.stages), count)
    fit = trial.fit_of_span()
    run = train_settings(candidate, cuts, (does,) * depth)
    run["method"] = penstock.method(run["method"], **run.pop("options", {}))
    del run["microbatch_size"]
    whole = {"blocks": blocks(frozen, count), "loss": squared, "optimizer": adam, "max_grad_norm": None}
    pipeline = Pipeline(**grouped(whole | run | {"precision": precision}))
    batch = [(torch.randn(2, WIDTH), torch.randn(2, WIDTH)) for _ in range(m * width)]
    list(pipeline.run([batch] * (4 if m == M else 6)))
    peaks = list(pipeline.peak_bytes().values())[:depth]
    assert [fit.held_on_host(rank, cuts, does) for rank in range(depth)] == [each.get(AWAY, 0) for each in peaks]
    found = [each.get(TOTAL_ON_DEVICE, each["total"]) for each in peaks]
    planned = [fit.held(rank, cuts, does) for rank in range(depth)]
    for rank, kinds in enumerate(fit.held_by_kind(rank, cuts, does) for rank in range(depth)):
        assert sum(kinds.values()) == pytest.approx(planned[rank], rel=1e-12)
        if planned[rank] == found[rank]:
            assert kinds in kinds_at_the_peak(pipeline, rank)
    return planned, found


def assert_equal_but_for_a_message(planned, found):
    """The first stage is taken to keep its output beside the message with it, where they are one tensor."""
    assert planned[1:] == found[1:]
    assert 0 <= planned[0] - found[0] <= 2 * WIDTH * 4


@pytest.mark.parametrize("does", [KEPT, OFFLOADED, RECOMPUTED])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("method", ["1f1b", "2bw", "2bw-ahead", "gpipe"])
def test_planned_memory_is_that_of_the_ledger(method, precision, does):
    """Masters and gradients are in full size where passes read copies of 2 bytes a number.

    Under gpipe messages of a batch are held until the next one has begun.
    """
    planned, found = planned_and_found(method, precision, does=does)
    assert_equal_but_for_a_message(planned, found)
    if method == "gpipe":
        assert planned == found


@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("method", "precision", "does", "depth", "m"),
    [("3bw", "fp32", KEPT, 4, 2), ("3bw", "bf16", RECOMPUTED, 3, 1), ("3bw-ahead", "fp16", KEPT, 4, 2)],
)
def test_planned_memory_with_three_versions_is_that_of_the_ledger(method, precision, does, depth, m):
    """With as few microbatches as may be, so that up to three gradients of a stage are there at a time."""
    planned, found = planned_and_found(method, precision, does=does, depth=depth, count=depth, m=m)
    assert_equal_but_for_a_message(planned, found)


@pytest.mark.parametrize("method", ["1f1b", "eager", "2bw"])
def test_planned_memory_of_devices_that_offload(method):
    """Four ranks, the first of which have several microbatches in flight."""
    planned, found = planned_and_found(method, "fp32", does=OFFLOADED, depth=4, count=8)
    assert planned == pytest.approx(found, abs=2 * WIDTH * 4)
    kept, _ = planned_and_found(method, "fp32", depth=4, count=8)
    assert planned[0] < kept[0]


@pytest.mark.parametrize("does", [KEPT, RECOMPUTED])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("method", ["zb-h1", "zb-v", "interleaved:chunks=2", "breadth-first:chunks=2"])
def test_planned_memory_of_several_stages_and_halves(method, precision, does):
    """Eight blocks: of a rank with two stages both count at one time."""
    planned, found = planned_and_found(method, precision, does=does, count=8)
    for ours, ledger in zip(planned, found, strict=True):
        assert abs(ours - ledger) <= 0.02 * ledger


@pytest.mark.parametrize(
    ("method", "precision"),
    [
        *[("1f1b", "fp32"), ("2bw", "bf16"), ("2bw-ahead", "fp32"), ("zb-v", "fp32"), ("layered:chunks=4", "fp32")],
        *[("layered:chunks=4", "bf16"), ("2bw-layered:chunks=4", "fp32"), ("2bw-layered:chunks=4", "bf16")],
    ],
)
def test_planned_memory_of_divided_state(method, precision):
    level = "full" if PLANNED[method].full else "optimizer" if method == "zb-v" else "gradients"
    planned, found = planned_and_found(method, precision, count=8, width=2, sharding=level)
    for ours, ledger in zip(planned, found, strict=True):
        assert abs(ours - ledger) <= 0.02 * ledger


FROZEN = {  # blocks of four, of two stages or three
    "part of the first stage": ((0,), (0, 2, 4)),
    "all of the first stage": ((0, 1), (0, 2, 4)),
    "up to the middle of the second stage": ((0, 1, 2), (0, 2, 4)),
    "two stages": ((0, 1), (0, 1, 2, 4)),
    "the stage in the middle": ((1,), (0, 1, 2, 4)),
    "the last stage": ((2, 3), (0, 2, 4)),
    "the blocks beside a cut": ((1, 2), (0, 2, 4)),
}


@pytest.mark.parametrize(
    ("method", "precision", "does"),
    [("1f1b", "fp32", KEPT), ("2bw", "bf16", KEPT), ("zb-h1", "fp32", KEPT), ("1f1b", "bf16", RECOMPUTED)],
)
@pytest.mark.parametrize("where", FROZEN)
def test_planned_memory_of_frozen_blocks_is_that_of_the_ledger(where, precision, method, does):
    """Whether whole stages are frozen or not: no gradient comes back to blocks before the first one that is trained."""
    frozen, cuts = FROZEN[where]
    planned, found = planned_and_found(method, precision, frozen, does, depth=len(cuts) - 1, cuts=cuts)
    assert_equal_but_for_a_message(planned, found)


def test_loss_scales_and_parallel_pipelines_decide(monkeypatch):
    """Whether or not gradients are clipped; the planner hears of fp16 from the settings of the profile."""
    asked = []
    monkeypatch.setattr(planning, "simulated_plans", lambda *_, decides, **__: asked.append(decides) or Search(None))
    text = "format: penstock profile 1\nlayers: [{name: a, forward: 1, backward: 1}]\nsettings: "
    for settings in ("{max_grad_norm: null}", "{max_grad_norm: null, precision: fp16}", "{precision: bf16}"):
        planning.make_plan(planning.PlanRequest(parse_profile(text + settings, "p"), DEVICES, cost="simulated"))
    assert asked == [False, True, True]
    for parallel in (False, True):
        proof = KnownSchedules(decides=False).proof(ScheduleKey(PLANNED["1f1b"], 2, 4, parallel))
        assert (Op.DECIDE in proof.schedule.operations) == parallel
