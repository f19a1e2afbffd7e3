"""The reference of WPipe and TiMePReSt: against recursions in plain floats, and at the limits of their numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import by_order
import pytest
import torch
from asynchronous import SKIPPED, AdamW, Newest, Stage, rate
from by_order import Pass, nf1b, two_groups
from test_reference_async import BATCHES, Times, adamw, assert_equal, half_square, inputs, of, sgd
from torch import Tensor

from penstock.errors import ConfigError
from penstock.train.reference import Order, Reference, train_reference

Orders = Callable[[int, int, int, int], list[Pass]]


def bent(d: int) -> list[dict[str, Any]]:
    """Stages of one weight w: tanh(w x)."""
    return [{f"b{s}": Times(0.8 + 0.1 * s), f"t{s}": torch.tanh} for s in range(d)]


def samples(m: int) -> list[list[tuple[Tensor, Tensor]]]:
    """One batch has no weight."""
    return [[(of(x), of(float(t != SKIPPED))) for x in xs] for t, xs in enumerate(inputs(m))]


def trained(method: str, d: int, m: int, optimizer: Any = sgd, **more: Any) -> Reference:
    arguments = {"method": method, "optimizer": optimizer, "rate": rate} | more
    return train_reference(bent(d), half_square, samples(m), **arguments)


def referred(method: str, d: int, m: int, optimizer: Any = sgd, **more: Any) -> list[list[float]]:
    """Per stage, the weight of each version as the reference says."""
    result = trained(method, d, m, optimizer, **more)
    return [[float(version[f"b{s}.w"]) for version in result.versions] for s in range(d)]


def played(
    kind: Callable[..., Stage], d: int, m: int, orders: Orders, drain: int = BATCHES, segment: int = 1
) -> list[list[float]]:
    """The same from stages that run by themselves, in plain floats."""
    stages = [kind(0.8 + 0.1 * s, s, d, m) for s in range(d)]
    for first, span in ((0, inputs(m)[:drain]), (drain, inputs(m)[drain:])):
        if span:
            play = by_order.Play(stages, [x for batch in span for x in batch], m, first, segment)
            play.go([orders(s, d, m, len(span)) for s in range(d)])
    return [stage.history for stage in stages]


def assert_same(a: Reference, b: Reference) -> None:
    """Bit for bit: losses, gradients, weights and optimizer states."""
    assert [x for x in a.losses if x == x] == [x for x in b.losses if x == x]
    for found, wanted in zip((*a.versions, *a.gradients), (*b.versions, *b.gradients), strict=True):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], w) for name, w in wanted.items())
    for found, wanted in zip(a.optimizers, b.optimizers, strict=True):
        torch.testing.assert_close(found.get("state"), wanted.get("state"), rtol=0, atol=0)


# --- WPipe and TiMePReSt ----------------------------------------------------------------------------------------------


class Blended(Stage):
    """Backwards read what lies between the weight of their forward and the newest."""

    def back(self, g: int) -> float:
        share = 0.3 ** (len(self.history) - 1 - self.born[g])
        return share * self.read[g] + (1 - share) * self.w


class BlendedAdamW(AdamW, Blended):
    pass


class NewestAdamW(AdamW, Newest):
    pass


CASES: dict[str, tuple[str, Any, Any, Any, dict[str, Any]]] = {
    "wpipe": ("wpipe", Stage, two_groups, sgd, {}),
    "wpipe with AdamW": ("wpipe", AdamW, two_groups, adamw, {}),
    "timeprest": ("timeprest", Newest, nf1b, sgd, {}),
    "timeprest with AdamW": ("timeprest", NewestAdamW, nf1b, adamw, {}),
    "v-timeprest": ("v-timeprest", Newest, nf1b, sgd, {}),
    "i-timeprest": ("i-timeprest", Blended, nf1b, sgd, {"beta": 0.3}),
    "i-timeprest with AdamW": ("i-timeprest", BlendedAdamW, nf1b, adamw, {"beta": 0.3}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("d", "m"), [(2, 1), (2, 3), (4, 1), (4, 2), (8, 2)])
def test_orders_by_hand(case: str, d: int, m: int) -> None:
    """25 batches, one of them without weight, drained before the twelfth."""
    method, kind, orders, optimizer, options = CASES[case]
    found = referred(method, d, m, optimizer, options=options, drains=[11])
    assert_equal(found, played(kind, d, m, orders, 11))


def test_an_order_that_runs_fewer_batches_ahead() -> None:
    """Where backwards are fast, so are their updates: the first stages run two batches ahead, not three and two."""
    ahead = [2, 2, 1, 0]
    found = referred("timeprest", 4, 2, drains=[11], order=Order(delays=[[n, n] for n in ahead]))
    assert_equal(found, played(Newest, 4, 2, lambda s, d, m, n: nf1b(s, d, m, n, ahead[s]), 11))
    assert found != referred("timeprest", 4, 2, drains=[11])


@pytest.mark.parametrize("method", ["newest", "stash", "pipemare", "lwp"])
def test_the_delays_of_1f1b_may_be_given(method: str) -> None:
    options = {"reschedule": 10} if method == "pipemare" else {}
    delays = [[-((k - ahead) // 2) if k < ahead else 0 for k in range(2)] for ahead in (3, 2, 1, 0)]
    given, own = (
        trained(method, 4, 2, options=options, drains=[11], order=order) for order in (Order(delays), Order())
    )
    assert delays == [[2, 1], [1, 1], [1, 0], [0, 0]]
    assert_same(given, own)


def test_the_two_ends_of_a_blend() -> None:
    """beta = 1 is a stash on nF1B, beta = 0 the newest weights."""
    one, zero = (trained("i-timeprest", 4, 2, options={"beta": beta}) for beta in (1.0, 0.0))
    assert_same(one, trained("stash", 4, 2, order=Order(delays=[[n, n] for n in (3, 2, 1, 0)])))
    assert_same(zero, trained("timeprest", 4, 2))
    assert one.versions[-1] != zero.versions[-1]
    nearly = trained("i-timeprest", 4, 2, options={"beta": 1 - 1e-9})
    for name, w in one.versions[-1].items():
        assert float(nearly.versions[-1][name]) == pytest.approx(float(w), rel=1e-7)


def test_blends_as_written() -> None:
    """Three stages, one batch after another: the backward of the first reads beta^2 W(0) + (1 - beta^2) W(2)."""
    w = [0.8, 0.9, 1.0]
    result = train_reference(
        [{f"b{s}": Times(w[s])} for s in range(3)],
        *(half_square, [[(of(x), of(1.0))] for x in (0.5, 0.7, 0.9)]),
        method="i-timeprest",
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )
    v = [[float(version[f"b{s}.w"]) for s in range(3)] for version in result.versions]
    a, b, c = v[0][0], v[1][1], v[2][2]  # what the forward of batch 2 has read
    slope = c * b * a * 0.9 - 1.0
    assert float(result.gradients[2]["b2.w"]) == pytest.approx(slope * b * a * 0.9, rel=1e-12)
    assert float(result.gradients[2]["b1.w"]) == pytest.approx(slope * c * a * 0.9, rel=1e-12)
    between = 0.5 * v[1][1] + 0.5 * v[2][1]
    assert float(result.gradients[2]["b0.w"]) == pytest.approx(slope * c * between * 0.9, rel=1e-12)


def test_the_second_group_of_wpipe_has_no_delay() -> None:
    """Where only it learns, WPipe is plain training; where only the first one does, gradients are one update old."""

    def half(learns: slice) -> list[dict[str, Any]]:
        stages = bent(4)
        for s in set(range(4)) - set(range(4)[learns]):
            stages[s][f"b{s}"].w.requires_grad_(False)
        return stages

    def run(method: str, learns: slice, **more: Any) -> Reference:
        return train_reference(half(learns), half_square, samples(2), method=method, optimizer=sgd, rate=rate, **more)

    assert_same(run("wpipe", slice(2, 4)), run("1f1b", slice(2, 4)))
    assert_same(run("wpipe", slice(0, 2)), run("2bw", slice(0, 2)))
    drained, plain = (run(method, slice(0, 2), drains=range(BATCHES)) for method in ("wpipe", "1f1b"))
    assert_same(drained, plain)  # a span begins without delay, unlike double buffering


@pytest.mark.parametrize(
    ("method", "d", "more", "message"),
    [
        ("wpipe", 3, {}, "two groups of equally many stages, but the model has 3: take 4"),
        ("wpipe", 2, {"order": Order([[1], [0]])}, "delays of wpipe do not depend on an order"),
        ("2bw", 2, {"order": Order([[1], [0]])}, "delays of 2bw do not depend on an order"),
        ("timeprest", 2, {"order": Order([[1, 1], [0, 0]])}, "for 2 stages and 1 microbatches give 2 lists of 1"),
        ("timeprest", 2, {"order": Order([[1]])}, r"delays are \[\[1\]\]"),
        ("timeprest", 2, {"order": Order([[-1], [0]])}, "none of them below 0"),
        ("i-timeprest", 2, {"options": {"beta": 1.5}}, "beta is 1.5; give a number from 0"),
    ],
    ids=range(7),
)
def test_what_does_not_fit(method: str, d: int, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trained(method, d, 1, **more)
