"""The reference of WPipe and TiMePReSt: against recursions in plain floats, and at the limits of their numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.errors import ConfigError
from penstock.verify.reference import Reference, ReferenceOrder
from support.own_methods import train_reference
from support.reference_cases import BATCHES, Times, adamw, assert_equal, half_square, of, sgd
from support.reference_players import assert_same, bent, played, referred, samples, trained
from support.scalar_orders import nf1b, two_groups
from support.scalar_pipelines import AdamW, Newest, Stage, rate

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
    found = referred("timeprest", 4, 2, drains=[11], order=ReferenceOrder(delays=[[n, n] for n in ahead]))
    assert_equal(found, played(Newest, 4, 2, lambda s, d, m, n: nf1b(s, d, m, n, ahead[s]), 11))
    assert found != referred("timeprest", 4, 2, drains=[11])


@pytest.mark.parametrize("method", ["newest", "stash", "pipemare", "lwp"])
def test_the_delays_of_1f1b_may_be_given(method: str) -> None:
    options = {"reschedule": 10} if method == "pipemare" else {}
    delays = [[-((k - ahead) // 2) if k < ahead else 0 for k in range(2)] for ahead in (3, 2, 1, 0)]
    given, own = (
        trained(method, 4, 2, options=options, drains=[11], order=order)
        for order in (ReferenceOrder(delays), ReferenceOrder())
    )
    assert delays == [[2, 1], [1, 1], [1, 0], [0, 0]]
    assert_same(given, own)


def test_the_two_ends_of_a_blend() -> None:
    """beta = 1 is a stash on nF1B, beta = 0 the newest weights."""
    one, zero = (trained("i-timeprest", 4, 2, options={"beta": beta}) for beta in (1.0, 0.0))
    assert_same(one, trained("stash", 4, 2, order=ReferenceOrder(delays=[[n, n] for n in (3, 2, 1, 0)])))
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
        ("2bw", 2, {"order": ReferenceOrder([[1], [0]])}, "delays of 2bw do not depend on an order"),
        (
            "timeprest",
            2,
            {"order": ReferenceOrder([[1, 1], [0, 0]])},
            "for 2 stages and 1 microbatches give 2 lists of 1",
        ),
        ("timeprest", 2, {"order": ReferenceOrder([[1]])}, r"delays are \[\[1\]\]"),
        ("timeprest", 2, {"order": ReferenceOrder([[-1], [0]])}, "none of them below 0"),
        ("i-timeprest", 2, {"options": {"beta": 1.5}}, "beta is 1.5; give a number from 0"),
    ],
    ids=range(5),
)
def test_what_does_not_fit_2bw_or_timeprest(method: str, d: int, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trained(method, d, 1, **more)
