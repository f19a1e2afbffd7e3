"""Delays of backwards: their formulas read W(max(t - delay, 0)), whatever the forward of the block has read."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.errors import CapabilityError, ConfigError
from penstock.options.passes import Staleness
from penstock.runtime.pipeline import Pipeline
from support.cases import Case, Outcome, assert_same, make_batches, make_blocks, make_pipeline, together, train
from support.delay_cases import VARIED, assert_trained, go_on, long_case, sequential, snapshots
from support.pool import Pool
from support.schedules import make_schedule

LATE = {"table": 0, "first": 3, "norm": 2, "second": 0, "head": 4}  # longer, shorter, the same, none and longer
BOTH: dict[str, Any] = {"delays": VARIED, "backward_delays": LATE}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_every_depth_trains_what_the_equations_of_backward_delays_say(depth: int, optimizer: str) -> None:
    """22 updates; SGD has momentum here."""
    case = long_case(depth=depth, optimizer=optimizer)
    wanted = sequential(case, VARIED, backward=LATE)
    assert_trained(train(None, case, **BOTH), wanted)
    assert wanted.losses != sequential(case, VARIED).losses


class Map(nn.Module):
    """tanh(x W + b)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight + self.bias)


@pytest.mark.parametrize(("forward", "backward"), [(0, 2), (3, 0), (1, 3), (2, 2)])
def test_the_formulas_written_out(forward: int, backward: int) -> None:
    """dL/dx = (dL/dy (1 - y^2)) W_b^T with y of W_f: activations of the forward, weights of the backward."""
    torch.manual_seed(3)
    maps = [Map() for _ in range(3)]
    data = [(torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)) for _ in range(12)]
    history = [[(m.weight.detach().clone(), m.bias.detach().clone()) for m in maps]]
    pipeline = Pipeline(
        maps,
        make_schedule("1f1b", 3, 1),
        loss=lambda y, t: (((y - t) ** 2).sum(), 1.0),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        staleness=Staleness(delays=forward, backward_delays=backward),
    )
    list(pipeline.run([[pair] for pair in data]))
    for t, (x, target) in enumerate(data):
        read, late = history[max(t - forward, 0)], history[max(t - backward, 0)]
        inputs = [x]
        for w, b in read:
            inputs.append(torch.tanh(inputs[-1] @ w + b))
        g, updated = 2 * (inputs[-1] - target), []
        for place in (2, 1, 0):
            inner = g * (1 - inputs[place + 1] ** 2)
            w, b = history[t][place]
            updated.append((w - 0.1 * inputs[place].T @ inner, b - 0.1 * inner.sum(0)))
            g = inner @ late[place][0].T
        history.append(updated[::-1])
    for place, (w, b) in enumerate(history[-1]):
        assert torch.allclose(pipeline.state_dict()[f"{place}.weight"], w, rtol=1e-10)
        assert torch.allclose(pipeline.state_dict()[f"{place}.bias"], b, rtol=1e-10)


class Fused(nn.Module):
    """Two maps in one parameter: tanh(x A) B."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.weight.chunk(2, dim=1)
        return torch.tanh(x @ first) @ second


def test_a_part_of_a_parameter_is_looked_up_at_its_place() -> None:
    """The gradient of A contains B as the backward reads it."""
    torch.manual_seed(3)
    block = Fused()
    data = [(torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)) for _ in range(8)]
    history = [block.weight.detach().clone()]
    pipeline = Pipeline(
        [block],
        make_schedule("1f1b", 1, 1),
        loss=lambda y, t: (((y - t) ** 2).sum(), 1.0),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.02),
        staleness=Staleness(backward_delays=2),
    )
    list(pipeline.run([[pair] for pair in data]))
    for t, (x, target) in enumerate(data):
        (a, b), late = history[t].chunk(2, dim=1), history[max(t - 2, 0)].chunk(2, dim=1)[1]
        h = torch.tanh(x @ a)
        g = 2 * (h @ b - target)
        gradient = torch.cat([x.T @ (g @ late.T * (1 - h**2)), h.T @ g], dim=1)
        history.append(history[t] - 0.02 * gradient)
    assert torch.allclose(pipeline.state_dict()["0.weight"], history[-1], rtol=1e-10)


@pytest.mark.parametrize(
    "case",
    [
        long_case("gpipe", 3, 3),
        long_case("interleaved", 2, 2, options=(("chunks", 2),)),
        long_case("chimera", 2, 2),
        long_case(width=2),
        long_case(clip=0.3),
        long_case(model="matrices", precision="bf16"),
    ],
    ids=lambda case: f"{case.method}-{case.width}-{case.clip}-{case.precision}",
)
def test_orders_width_and_precision_change_nothing(case: Case) -> None:
    case = replace(case, spans=(8,))
    delays = dict.fromkeys(make_blocks(case.model), 2) | {"head": 1} if case.model == "matrices" else VARIED
    late = dict.fromkeys(make_blocks(case.model), 3) if case.model == "matrices" else LATE
    dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
    found = train(None, case, delays=delays, backward_delays=late)
    if case.clip is None:
        assert_trained(found, sequential(case, delays, dtype=dtype, backward=late))
        return
    wanted = sequential(case, delays, clip=case.clip, backward=late)
    for name, weight in wanted.history[-1].items():
        assert torch.allclose(found.weights[name], weight, rtol=1e-4, atol=1e-6), name


def test_backward_delays_of_sequence_slices() -> None:
    case = long_case(model="gpt", spans=(5,))
    delays: dict[str, Any] = {"delays": {"layers.1": 1}, "backward_delays": {"layers.0": 2, "layers.1": 3}}
    whole = train(None, case, **delays)
    sliced = train(None, replace(case, method="seq1f1b", options=(("slices", 2),)), **delays)
    other = train(None, case, delays=delays["delays"])
    assert any(not torch.allclose(w, other.weights[name], rtol=1e-4, atol=1e-6) for name, w in whole.weights.items())
    for name, weight in whole.weights.items():
        assert torch.allclose(sliced.weights[name], weight, rtol=1e-4, atol=1e-6), name


def test_the_same_profile_twice_is_one_profile() -> None:
    """To the bit, and to the byte; also given in another form, and with recompute, which two do not go with."""
    case = long_case(spans=(6,))
    once, twice = (
        make_pipeline(case, delays=VARIED),
        make_pipeline(case, delays=VARIED, backward_delays=[5, 0, 0, 2, 2, 1]),
    )
    for pipeline in (once, twice):
        list(pipeline.run(make_batches(case)))
    assert once.live_bytes() == twice.live_bytes()
    assert once.peak_bytes() == twice.peak_bytes()
    make_pipeline(replace(case, recompute="block"), delays=VARIED, backward_delays=VARIED)
    assert once.backward_delays == twice.backward_delays == twice.delays
    assert_same(train(None, case, **(BOTH | {"backward_delays": VARIED})), train(None, case, delays=VARIED))


@pytest.mark.parametrize("given", [{"backward_delays": 0}, {"delays": 0, "backward_delays": "1f1b:1"}], ids=str)
def test_no_delays_are_synchronous_training(given: dict[str, Any]) -> None:
    case = long_case(spans=(5,))
    assert_same(train(None, case, **given), train(None, case))


def test_blocks_with_equal_delays_change_not_a_bit_beside_others() -> None:
    """Looked up by name they are what their forward has read: only the last block's formulas differ, none of which
    its own gradient contains."""
    case = long_case(depth=1, spans=(2,))
    plain, other = (
        train(None, case, delays=1),
        train(
            None, case, delays=1, backward_delays={**dict.fromkeys(("table", "first", "norm", "second"), 1), "head": 0}
        ),
    )
    for name, g in plain.gradients[1].items():
        assert torch.equal(g, other.gradients[1][name]) == name.startswith("head"), name


@pytest.mark.processes
def test_backward_delays_between_processes(pool: Pool) -> None:
    case = long_case(spans=(6,))
    assert_same(together(pool.submit(train_late, case, ranks=2)), train(None, case, **BOTH))


def train_late(group: dist.ProcessGroup, case: Case) -> Outcome:
    return train(group, case, **BOTH)


@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize(("depth", "other"), [(2, 2), (1, 4)])
def test_a_run_with_backward_delays_goes_on_bit_for_bit(batch: int, depth: int, other: int) -> None:
    case = long_case(depth=depth, spans=(12,))
    kept = snapshots(case, batch, **BOTH)
    assert_trained(go_on(replace(case, depth=other), kept, **BOTH), sequential(case, VARIED, backward=LATE))


def test_nothing_is_left_of_the_weights_before_a_load() -> None:
    """A pipeline that has read batch 4 loads another run, without older versions, from the same batch."""
    case = long_case(depth=1, spans=(8,))
    kept = snapshots(replace(case, optimizer="adamw"), 4, None)
    used = make_pipeline(case, blocks=make_blocks(case.model, seed=77), **BOTH)
    list(used.run(make_batches(case)[:5]))
    used.load(kept)
    list(used.run(make_batches(case)[4:]))
    fresh = go_on(case, kept, **BOTH)
    for name, weight in used.state_dict().items():
        assert torch.equal(weight, fresh.weights[name]), name


def test_a_block_keeps_as_many_versions_as_the_later_pass_needs() -> None:
    case = long_case(depth=1, model="matrices", spans=(2,))
    pipeline = make_pipeline(case, delays={"a": 2, "b": 1}, backward_delays={"a": 1, "c": 3})
    list(pipeline.run(make_batches(case)))
    size = 8 * 8 * 4
    assert pipeline.live_bytes()[0]["delayed weights"] == (2 + 1 + 3) * size


@pytest.mark.parametrize(
    ("case", "given", "message"),
    [
        (long_case(recompute="block"), BOTH, "backward_delays cannot be combined with recompute"),
        (long_case(recompute="stage"), BOTH, "cannot be combined with recompute"),
        (long_case("zb-h1", 2, 3), BOTH, "backward_delays: zb-h1 splits backwards into two halves"),
        (long_case("bpipe", 4, 4), BOTH, "backward_delays: bpipe offloads activations"),
        (long_case("stash"), {"backward_delays": 1}, "backward_delays need version rule 'flush'"),
        (long_case(), {"backward_delays": {"haed": 1}}, "backward_delays: the model has no block 'haed'"),
        (long_case(), {"backward_delays": {"tanh": 1}}, "backward_delays: block 'tanh' has no trained parameters"),
        (
            long_case(),
            {"backward_delays": {"head": -1}},
            "backward_delays: the delay of block 'head', in updates, must be a whole number of at least 0, got -1",
        ),
        (long_case(), {"backward_delays": "1f1b:7"}, "backward_delays: profile '1f1b:7' has 7 stages"),
        (
            long_case(tied=True),
            {"backward_delays": {"head": 1}},
            "backward_delays: blocks 'table' (0 updates) and 'head'",
        ),
    ],
    ids=["block", "stage", "halves", "moves", "rule", "name", "untrained", "negative", "profile", "tied"],
)
def test_what_does_not_go_with_backward_delays_is_refused(case: Case, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_pipeline(case, **given)


class Cast(nn.Linear):
    """Computes in bfloat16 by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.bfloat16() @ self.weight.t().bfloat16()).float()


def test_casts_and_complex_weights_are_refused() -> None:
    arguments: dict[str, Any] = {
        "method": make_schedule("1f1b", 1, 1),
        "loss": lambda y, _: (y.abs().sum(), 1.0),
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.1),
        "staleness": Staleness(backward_delays=1),
    }
    pipeline = Pipeline([Cast(4, 4)], **arguments)
    with pytest.raises(
        CapabilityError, match="casts its weights .* not those of its backward delay; .* leave backward"
    ):
        list(pipeline.run([[(torch.ones(2, 4), None)]]))
    with pytest.raises(CapabilityError, match="0.weight is complex; backward_delays are offered for real parameters"):
        Pipeline([nn.Linear(4, 4, dtype=torch.complex64)], **arguments)


class Checkpointed(Map):
    """The same, forgotten after the forward and run again in the backward."""

    def __init__(self, reentrant: bool, captured: bool) -> None:
        super().__init__()
        self.reentrant, self.captured = reentrant, captured

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight

        def run(x: Tensor) -> Tensor:
            return torch.tanh(x @ weight + self.bias) if self.captured else Map.forward(self, x)

        found: Tensor = checkpoint(run, x, use_reentrant=self.reentrant)
        return found


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_that_run_their_forward_again_are_refused(reentrant: bool, captured: bool) -> None:
    """In the first batch; where both delays are the same, nothing is lost and nothing refused."""
    blocks = [Map(), Checkpointed(reentrant, captured)]
    arguments: dict[str, Any] = {
        "method": make_schedule("1f1b", 1, 1),
        "loss": lambda y, _: ((y**2).sum(), 1.0),
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.1),
    }
    batches = [[(torch.ones(2, 3, dtype=torch.float64), None)]] * 4
    refused = Pipeline(blocks, staleness=Staleness(delays=2, backward_delays=0), **arguments)
    with pytest.raises(CapabilityError, match="torch.utils.checkpoint.*take the checkpoint out .* backward_delays"):
        list(refused.run(batches))
    same = [Map(), Checkpointed(reentrant, captured)]
    plain = [Map(), Map()]
    for ours, theirs in zip(plain, same, strict=True):
        ours.load_state_dict(theirs.state_dict())
    late = Staleness(delays=2, backward_delays={"0": 0, "1": 2})
    found, wanted = (Pipeline(b, staleness=late, **arguments) for b in (same, plain))
    for pipeline in (found, wanted):
        list(pipeline.run(batches))
    for name, weight in wanted.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], weight, rtol=1e-12, atol=0)
