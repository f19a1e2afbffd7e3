"""The reference of recompute where the second forward reads other weights: PipeMare, with T2 and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import CapabilityError, ConfigError
from penstock.verify.reference import Reference, ReferenceOrder
from support import scalar_pipelines as by_hand
from support.own_methods import train_reference
from support.reference_cases import PIPEMARE, Times, adamw, assert_equal, half_square, of, sgd
from support.reference_players import assert_same, bent, played, samples
from support.scalar_orders import Pass, with_recompute
from support.scalar_pipelines import AdamW, Stage, rate


class Bent(Times):
    """tanh(w x), in one block."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.w * x)


def bent_blocks(d: int) -> list[dict[str, Any]]:
    return [{f"b{s}": Bent(0.8 + 0.1 * s)} for s in range(d)]


def trained(method: str, stages: list[dict[str, Any]], m: int, optimizer: Any = sgd, **more: Any) -> Reference:
    arguments = {"method": method, "optimizer": optimizer, "rate": rate, "drains": [11]} | more
    return train_reference(stages, half_square, samples(m), **arguments)


def referred(d: int, result: Reference) -> list[list[float]]:
    return [[float(version[f"b{s}.w"]) for version in result.versions] for s in range(d)]


class PipeMare(by_hand.PipeMare):
    """The second forward estimates what the first one has read, from what there is at its own time."""

    def reread(self, g: int) -> float:
        return self.back(g)


class PipeMareAdamW(AdamW, PipeMare):
    """AdamW's update, PipeMare's delta."""

    def update(self, gradient: float) -> None:
        before = self.w
        AdamW.update(self, gradient)
        if self.tau:
            gamma = self.D ** (1 / self.tau)
            self.delta = gamma * self.delta + (1 - gamma) * (self.w - before)


class NoT2(by_hand.NoT2):
    def reread(self, g: int) -> float:
        return self.w


class Newest(by_hand.Newest):
    def reread(self, g: int) -> float:
        return self.w


def endless(early: int) -> Callable[[int, int, int, int], list[Pass]]:
    """1F1B, in which a forward is run again so many backwards before its own, or after its first run."""

    def rows(s: int, d: int, m: int, batches: int) -> list[Pass]:
        return with_recompute([(op, (g,)) for op, g in by_hand.order(s, d, batches * m)], early)

    return rows


def before(early: int, d: int, m: int) -> list[list[int]]:
    """The same as updates between the second run and the microbatch's own."""
    return [[max(0, -((k - min(early, d - 1 - s)) // m)) for k in range(m)] for s in range(d)]


CASES: dict[str, tuple[str, Callable[..., Stage], Any, dict[str, Any]]] = {
    "pipemare": ("pipemare", PipeMare, sgd, PIPEMARE),
    "pipemare with AdamW": ("pipemare", PipeMareAdamW, adamw, PIPEMARE),
    "without T2": ("pipemare", NoT2, sgd, PIPEMARE | {"decay": None}),
    "newest": ("newest", Newest, sgd, {}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("d", "m", "early", "segment"), [(2, 1, 0, 1), (4, 1, 0, 4), (4, 1, 2, 2), (4, 2, 3, 4), (4, 3, 1, 3)]
)
def test_recompute_by_hand(case: str, d: int, m: int, early: int, segment: int) -> None:
    """25 batches, one of them without weight, drained before the twelfth; segments of all lengths."""
    method, kind, optimizer, options = CASES[case]
    order = ReferenceOrder(recompute="stage", segment=segment, early=before(early, d, m))
    found = trained(method, bent(d), m, optimizer, options=options, order=order)
    assert_equal(referred(d, found), played(kind, d, m, endless(early), 11, segment))
    one_block = trained(method, bent_blocks(d), m, optimizer, options=options, order=order)
    assert_equal(referred(d, one_block), referred(d, found))


@pytest.mark.long
def test_what_segments_and_early_runs_change() -> None:
    """Each choice has its own numbers."""
    orders = [
        ReferenceOrder(),
        *(ReferenceOrder(recompute="stage", segment=segment) for segment in (1, 2, 4)),
        *(ReferenceOrder(recompute="stage", segment=segment, early=before(1, 4, 1)) for segment in (1, 2, 4)),
    ]
    ends = [trained("pipemare", bent(4), 1, options=PIPEMARE, order=order).versions[-1]["b0.w"] for order in orders]
    assert len({float(end) for end in ends}) == len(orders)


@pytest.mark.parametrize("options", [PIPEMARE, PIPEMARE | {"decay": None}], ids=["T2", "newest"])
def test_blocks_keep_their_own_inputs(options: dict[str, Any]) -> None:
    """tanh is run again on the product that it had before, so nothing of the second one is seen; in one block it is."""
    order = ReferenceOrder(recompute="block")
    plain = trained("pipemare", bent(4), 1, options=options)
    assert_same(trained("pipemare", bent(4), 1, options=options, order=order), plain)
    one, stage = (
        trained("pipemare", bent_blocks(4), 1, options=options, order=ReferenceOrder(recompute=how))
        for how in ("block", "stage")
    )
    assert_same(one, stage)
    assert float(one.versions[-1]["b0.w"]) != float(plain.versions[-1]["b0.w"])


def test_the_loss_is_run_again_with_the_last_block() -> None:
    """Which is seen where the last stage reads late weights, too: blocks are the same as stages of one block each."""
    delays = [[2], [2], [1], [1]]
    for optimizer in (sgd, adamw):
        block, stage, none = (
            trained("newest", bent_blocks(4), 1, optimizer, order=ReferenceOrder(delays, how))
            for how in ("block", "stage", None)
        )
        assert_same(block, stage)
        assert float(block.versions[-1]["b3.w"]) != float(none.versions[-1]["b3.w"])


class Seen(nn.Module):
    """Dropout, a batch norm, whose statistics move, and a counter that it multiplies by."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.map = nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return torch.dropout(torch.tanh(self.map(self.norm(x))), 0.3, train=True) * (1 + self.count / 10)


def restless(method: str, depth: int, count: int = 6, m: int = 2, **more: Any) -> Reference:
    """Six blocks on so many stages."""
    torch.manual_seed(5)
    blocks = [Seen() for _ in range(6)]
    each = 6 // depth
    stages = [{f"b{i}": blocks[i] for i in range(s * each, (s + 1) * each)} for s in range(depth)]
    batches = [[(torch.randn(8, 4), torch.zeros(8, 4)) for _ in range(m)] for _ in range(count)]
    return train_reference(
        *(stages, lambda y, target: ((y - target) ** 2).sum(), batches),
        **{"method": method, "optimizer": lambda named: torch.optim.SGD(named, lr=0.01), "seed": 3} | more,
    )


@pytest.mark.parametrize(
    "order",
    [
        ReferenceOrder(recompute="block"),
        ReferenceOrder(recompute="stage"),
        ReferenceOrder(recompute="stage", segment=3),
    ],
)
@pytest.mark.parametrize("method", ["newest", "pipemare"])
def test_without_delay_nothing_changes(method: str, order: ReferenceOrder) -> None:
    """On one stage, and where delays are given as 0, bit for bit: random numbers and buffers, too."""
    options = PIPEMARE if method == "pipemare" else {}
    zero = [[0, 0]] * 3
    for depth, delays in ((1, None), (3, zero)):
        plain = restless(method, depth, options=options, order=ReferenceOrder(delays=delays))
        again = restless(method, depth, options=options, order=order._replace(delays=delays))
        assert_same(again, plain)
        assert again.buffers.keys() == plain.buffers.keys()
        assert all(torch.equal(again.buffers[name], b) for name, b in plain.buffers.items())
        assert float(plain.buffers["b5.count"]) == 12.0


@pytest.mark.parametrize("order", [ReferenceOrder(recompute="block"), ReferenceOrder(recompute="stage", segment=2)])
def test_buffers_are_those_of_the_first_run(order: ReferenceOrder) -> None:
    """After two batches all first forwards are still those without recompute; a second one reads W(1), not W(0)."""
    plain, again = (restless("newest", 2, 2, 1, order=o) for o in (ReferenceOrder(), order))
    assert all(torch.equal(again.buffers[name], b) for name, b in plain.buffers.items())
    assert not all(torch.equal(again.gradients[1][name], g) for name, g in plain.gradients[1].items())


@pytest.mark.parametrize("method", ["stash", "2bw", "1f1b", "spectrain-stash"])
def test_methods_whose_backward_reads_what_its_forward_read(method: str) -> None:
    order = ReferenceOrder(recompute="stage", segment=3)
    assert_same(trained(method, bent(3), 2, order=order), trained(method, bent(3), 2))


def test_as_early_as_possible_is_as_the_forward() -> None:
    """If the second run comes right after the first one, its activations are those of a run without recompute."""
    early = before(99, 3, 1)
    assert early == [[2], [1], [0]]
    for segment in (1, 3):
        order = ReferenceOrder(recompute="stage", segment=segment, early=early)
        assert_same(
            trained("pipemare", bent(3), 1, options=PIPEMARE, order=order),
            trained("pipemare", bent(3), 1, options=PIPEMARE),
        )


def test_two_parts_frozen_stages_and_low_precision() -> None:
    """Sums of gradients, casts, and stages that learn nothing: as without recompute, where nothing is late."""
    stages = [{"f": torch.tanh}, {"b1": Bent(0.9)}, {"b2": Bent(1.1)}, {"end": lambda x: (x, 2)}]
    more: dict[str, Any] = {"optimizer": sgd, "parts": [[0, 2], [1, 3]], "precision": torch.bfloat16, "clip": 0.01}
    batches = [[(torch.randn(3), of(1.0)) for _ in range(4)] for _ in range(4)]

    def loss(y: Any, weight: Tensor) -> Tensor:
        return half_square(y[0], weight)[0].sum() * y[1]

    zero = [[0, 0]] * 4
    plain, again = (
        train_reference(stages, loss, batches, method="newest", order=order, **more)
        for order in (ReferenceOrder(zero), ReferenceOrder(zero, recompute="stage", segment=2))
    )
    assert_same(again, plain)
    assert len(set(plain.losses)) == 4


@pytest.mark.parametrize(
    ("method", "order", "message"),
    [
        ("newest", ReferenceOrder(recompute="all"), "recompute is 'all'; give None, 'block' or 'stage'"),
        ("newest", ReferenceOrder(recompute="block", segment=2), "segment is 2"),
        ("newest", ReferenceOrder(segment=2), "segment is 2"),
        ("newest", ReferenceOrder(recompute="stage", segment=0), "segment is 0"),
        ("newest", ReferenceOrder(early=[[0], [0]]), "recompute is None: leave early out"),
        ("newest", ReferenceOrder(recompute="stage", early=[[0]]), "for 2 stages and 1 microbatches"),
        (
            "newest",
            ReferenceOrder(recompute="stage", early=[[1], [1]]),
            "stage 1 .*1 updates before its own.* 0 at most",
        ),
        ("1f1b", ReferenceOrder(recompute="stage", early=[[1], [0]]), r"set early\[0\]\[0\] to 0 at most"),
    ],
    ids=range(8),
)
def test_recompute_that_does_not_fit(method: str, order: ReferenceOrder, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trained(method, bent(2), 1, order=order)


@pytest.mark.parametrize("method", ["spectrain", "xpipe", "pipeoptim", "i-timeprest"])
def test_methods_whose_recompute_nobody_has_defined(method: str) -> None:
    with pytest.raises(CapabilityError, match=f"{method}: it is undefined which weights .* leave recompute out"):
        trained(method, bent(2), 1, order=ReferenceOrder(recompute="block"))
