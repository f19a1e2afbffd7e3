"""The reference of wave-synchronous pipelines (HetPipe): against a loop over waves in plain floats, and at limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, DataError
from penstock.verify.reference import Reference, ReferenceOrder, ReferenceWaves, Wsp, train_wsp
from support import scalar_pipelines as by_hand
from support.own_methods import train_reference
from support.reference_cases import Times, adamw, half_square, of, sgd
from support.reference_players import assert_same
from support.scalar_pipelines import SKIPPED, rate

BATCHES = 24


def inputs(t: int, k: int) -> float:
    """Of microbatch k, counted over all pipelines."""
    return 0.7 + 0.2 * math.sin(3 * t + 5 * k)


def target(t: int, r: int) -> float:
    """The weight of a microbatch: one pipeline skips an update that the others make."""
    return float(t != SKIPPED or r != 0)


def samples(m: int, width: int) -> list[list[tuple[Tensor, Tensor]]]:
    return [[(of(inputs(t, k)), of(target(t, k // m))) for k in range(m * width)] for t in range(BATCHES)]


def trained(method: str, d: int, m: int, wsp: Wsp, optimizer: Any = sgd, **more: Any) -> ReferenceWaves:
    stages = [{f"b{s}": Times(0.8 + 0.1 * s)} for s in range(d)]
    arguments = {"method": method, "optimizer": optimizer, "rate": rate} | more
    return train_wsp(stages, half_square, samples(m, wsp.width), wsp, **arguments)


def version(method: str, t: int, k: int, m: int, ahead: int, first: int) -> int:
    if method == "2bw":
        return max(t - 1, 0)
    return max(first, first + ((t - first) * m + k - ahead) // m) if method == "stash" else t


class ByHand:
    """Stages of one number in floats; the sums of waves are posted, and taken when they may be seen."""

    def __init__(self, kind: Callable[..., by_hand.Stage], method: str, d: int, m: int, wsp: Wsp) -> None:
        self.method, self.d, self.m, self.wsp = method, d, m, wsp
        self.pipelines = [[kind(0.8 + 0.1 * s, s, d, m) for s in range(d)] for _ in range(wsp.width)]
        self.common = [[stage.w for stage in self.pipelines[0]]]

    def batch(self, r: int, t: int, first: int) -> None:
        stages, sums = self.pipelines[r], [0.0] * self.d
        for k in range(self.m):
            read = [s.history[version(self.method, t, k, self.m, self.d - 1 - s.s, first)] for s in stages]
            x = inputs(t, r * self.m + k)
            y = math.prod(read) * x
            for s in range(self.d):
                sums[s] += (y - 1) * math.prod(read[:s]) * math.prod(read[s + 1 :]) * x / self.m
        for stage, g in zip(stages, sums, strict=True):
            stage.step(g if target(t, r) else None)

    def run(self, lags: Callable[[int, int, int, int], int]) -> None:
        width, every, first = self.wsp.width, self.wsp.every, 0
        posted: list[list[list[float]]] = []
        inbox: dict[tuple[int, int], list[tuple[int, int]]] = {}  # stage, receiver -> wave and sender
        before = [[stage.w for stage in stages] for stages in self.pipelines]
        for t in range(BATCHES):
            first = t if t in self.wsp.settle else first
            for r in range(width):
                self.batch(r, t, first)
            if (t + 1) % every:
                continue
            c = t // every
            posted.append(
                [[s.w - old for s, old in zip(*one, strict=True)] for one in zip(self.pipelines, before, strict=True)]
            )
            self.common.append(
                [w + self.wsp.share * sum(u[s] for u in posted[c]) for s, w in enumerate(self.common[-1])]
            )
            for r, stages in enumerate(self.pipelines):
                for s, stage in enumerate(stages):
                    waiting = inbox.setdefault((s, r), [])
                    waiting += [(c, q) for q in range(width) if q != r]
                    for wave, q in list(waiting):
                        if wave <= c - lags(s, r, q, c) or t + 1 in self.wsp.settle:
                            stage.w += self.wsp.share * posted[wave][q][s]
                            waiting.remove((wave, q))
                    stage.history[-1] = before[r][s] = stage.w


def weights(result: Reference, d: int) -> list[list[float]]:
    return [[float(v[f"b{s}.w"]) for v in result.versions] for s in range(d)]


def assert_as_by_hand(found: ReferenceWaves, wanted: ByHand) -> None:
    for result, stages in zip(found.pipelines, wanted.pipelines, strict=True):
        for row, stage in zip(weights(result, wanted.d), stages, strict=True):
            assert row == pytest.approx(stage.history, rel=1e-9)
            assert len({round(w, 6) for w in row}) > BATCHES // 2
    for now, common in zip(found.common, wanted.common, strict=True):
        assert [float(now[f"b{s}.w"]) for s in range(wanted.d)] == pytest.approx(common, rel=1e-9)


@pytest.mark.parametrize("method", ["1f1b", "2bw", "stash"])
@pytest.mark.parametrize(
    ("width", "every", "lag", "share"),
    [(2, 1, 0, 1.0), (2, 4, 1, 1.0), (2, 2, [0, 2], 1.0), (3, 2, 1, 0.5), (3, 1, [0, 1, 2], 0.3), (1, 4, 0, 1.0)],
    ids=range(6),
)
def test_waves_by_hand(method: str, width: int, every: int, lag: Any, share: float) -> None:
    """24 batches of three stages; the first pipeline skips one update."""
    profile = [lag] * width if isinstance(lag, int) else lag
    for kind, optimizer, settle in ((by_hand.Stage, sgd, ()), (by_hand.AdamW, adamw, (4, 12, 24))):
        wsp = Wsp(width, every, lag, share, settle)
        hand = ByHand(kind, method, 3, 2, wsp)
        hand.run(lambda s, r, q, c: profile[q])
        assert_as_by_hand(trained(method, 3, 2, wsp, optimizer), hand)


def test_lags_that_were_taken_down() -> None:
    """By stage, receiver, sender and wave; what has been seen stays seen when a lag grows."""

    def lag(s: int, r: int, q: int, c: int) -> int:
        return (2 * s + r + 3 * q + c * c) % 3

    wsp = Wsp(3, 2, lag)
    hand = ByHand(by_hand.Stage, "stash", 3, 2, wsp)
    hand.run(lag)
    assert_as_by_hand(trained("stash", 3, 2, wsp), hand)


def test_sums_are_added_one_by_one_by_wave_and_pipeline() -> None:
    """In an order that can be seen: of 1e16 every other number is lost in doubles."""
    updates = [[0.0, 0.0], [1e16, 1e16], [-1e16, -1e16], [1.0, 3.0]]  # by pipeline and wave

    class Told(torch.optim.SGD):
        """Goes by numbers instead of gradients."""

        def step(self, closure: Any = None) -> None:
            (p,) = self.param_groups[0]["params"]
            p.add_(numbers.pop(0))

    numbers = [updates[r][t] for t in range(2) for r in range(4)]
    batches = [[(of(1.0), of(1.0))] * 4 for _ in range(2)]
    result = train_wsp(
        *([{"b0": Times(0.0)}], half_square, batches, Wsp(4, 1, lambda s, r, q, c: 9 if r or not c else 0)),
        method="1f1b",
        optimizer=lambda named: Told([p for _, p in named], lr=1.0),
    )
    # 1e16 - 1e16 + 1 = 1, and then 1 + 1e16 - 1e16 + 3 = 3; any other order, or whole waves at once, comes to 2 or 4.
    assert [float(v["b0.w"]) for v in result.pipelines[0].versions] == [0.0, 0.0, 3.0]


@pytest.mark.parametrize("method", ["1f1b", "2bw", "stash", "newest"])
def test_one_pipeline_and_pipelines_that_hear_nothing(method: str) -> None:
    """Are plain runs, of their own microbatches and random numbers; bit for bit."""

    class Dropped(Times):
        def forward(self, x: Tensor) -> Tensor:
            return torch.dropout(self.w * x.expand(4), 0.5, train=True).mean()

    stages = [{f"b{s}": Dropped(1.3 + 0.1 * s)} for s in range(2)]
    for width, lag in ((1, 0), (3, 99)):
        more: dict[str, Any] = {"method": method, "optimizer": sgd, "rate": rate, "seed": 7, "clip": 0.3}
        found = train_wsp(stages, half_square, samples(2, width), Wsp(width, 2, lag), **more).pipelines
        for r, result in enumerate(found):
            part = [range(2 * r, 2 * r + 2)]
            wanted = train_reference(stages, half_square, samples(2, width), parts=part, divisor=2.0, **more)
            assert_same(result, wanted)
            assert result.norms == wanted.norms
    assert float(found[1].versions[-1]["b0.w"]) != float(found[2].versions[-1]["b0.w"])


def test_without_lag_all_have_what_is_common() -> None:
    found = trained("stash", 2, 1, Wsp(3, 4))
    for c in range(BATCHES // 4 + 1):
        for result in found.pipelines:
            for name, w in found.common[c].items():
                assert float(result.versions[4 * c][name]) == pytest.approx(float(w), rel=1e-12)
    between = {float(result.versions[6]["b0.w"]) for result in found.pipelines}
    assert len(between) == 3


def test_low_precision_ties_and_buffers() -> None:
    """Copies of one parameter stay equal; buffers stay each pipeline's own."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += x.detach().float().sum()
            return x

    torch.manual_seed(3)
    stages: list[dict[str, Any]] = [{"a": nn.Linear(3, 3)}, {"n": Sums()}, {"b": nn.Linear(3, 3)}]
    batches = [[(torch.randn(5, 3), torch.zeros(5, 3)) for _ in range(4)] for _ in range(8)]
    found = train_wsp(
        *(stages, lambda y, target: ((y - target) ** 2).mean(), batches, Wsp(2, 2, 1)),
        method="2bw",
        optimizer=sgd,
        tied={"b.weight": "a.weight"},
        precision=torch.bfloat16,
    )
    for result in found.pipelines:
        assert all(torch.equal(v["a.weight"], v["b.weight"]) for v in result.versions)
    first, second = (result.buffers["n.seen"] for result in found.pipelines)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("wsp", "method", "message"),
    [
        (Wsp(0, 1), "1f1b", "width is 0: give 1 or more"),
        (Wsp(2, 0), "1f1b", "every is 0: give 1 or more"),
        (Wsp(2, 1, -1), "1f1b", "lag is -1: give 0 or more"),
        (Wsp(2, 1, [1]), "1f1b", r"lag is \[1\]: give 2 non-negative numbers"),
        (Wsp(2, 1, [1, -1]), "1f1b", "give 2 non-negative numbers"),
        (Wsp(2, 4, settle=(4, 6)), "1f1b", "settle has batch 6: give multiples of 4"),
        (Wsp(2, 1), "pipemare", "pipemare does not support waves; methods that do: .*stash"),
        (Wsp(2, 1), "spectrain", "spectrain does not support waves"),
        (Wsp(2, 1), "error-feedback", "error-feedback does not support waves"),
    ],
    ids=range(9),
)
def test_what_cannot_be(wsp: Wsp, method: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trained(method, 2, 1, wsp)


def test_batches_that_cannot_be_divided() -> None:
    stages: Sequence[Any] = [{"b0": Times(1.0)}]
    more: dict[str, Any] = {"method": "1f1b", "optimizer": sgd}
    with pytest.raises(DataError, match="batch 0 has 3 microbatches for 2 pipelines"):
        train_wsp(stages, half_square, [[(of(1.0), of(1.0))] * 3], Wsp(2, 1), **more)
    with pytest.raises(ConfigError, match="for 1 stages and 1 microbatches"):
        train_wsp(
            stages, half_square, samples(1, 2), Wsp(2, 1), **more | {"method": "stash"}, order=ReferenceOrder([[0, 0]])
        )
