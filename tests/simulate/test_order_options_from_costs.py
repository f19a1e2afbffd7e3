"""Costs reach the orders that are searched for given times, as whole numbers in the same ratios."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.order_options_from_costs import with_search_options
from support.command_line import run

MEASURED = ("--forward", 18.522, "--backward-input", 18.086, "--backward-weight", 9.337, "--latency", 0.601)
AS_OPTIONS = {"forward": 18522, "input": 18086, "weight": 9337, "hop": 601, "held": 37}


def of_rank(*times: float, latency: float = 0.0, left: float = 1.0) -> Costs:
    return Costs((StageCost(*times),), latency, left=left)


@pytest.mark.parametrize(
    ("times", "latency", "wanted"),
    [
        ((1, 1, 1), 0, (1, 1, 1, 0)),
        ((0.1, 0.1, 0.3), 0, (1, 1, 3, 0)),
        ((18.522, 18.086, 9.337), 0.601, (18522, 18086, 9337, 601)),
        ((1.5, 2, 0.5), 0.25, (6, 8, 2, 1)),
        ((2e-3, 4e-3, 2e-3), 0, (1, 2, 1, 0)),
        ((1, 2, 0), 0, (1000, 2000, 1, 0)),  # an option is at least 1
        ((1e9, 2e9, 3e9 + 1), 0, (333333, 666667, 1000000, 0)),  # no larger than that, rounded
        ((1, 1, 1), 1e9, (1, 1, 1, 1000000)),
    ],
)
def test_whole_numbers_in_the_same_ratios(times: tuple[float, ...], latency: float, wanted: tuple[int, ...]) -> None:
    found = with_search_options("zb-auto", None, {}, of_rank(*times, latency=latency), 1)
    assert tuple(found[name] for name in ("forward", "input", "weight", "hop")) == wanted


def test_what_is_left_of_activations_becomes_a_percentage() -> None:
    held = [
        with_search_options("zb-auto", None, {}, of_rank(1, 1, 1, left=left), 1)["held"] for left in (0, 0.37, 1, 2)
    ]
    assert held == [1, 37, 100, 100]


def test_times_that_the_user_sets_are_left_alone_with_all_others() -> None:
    """They are in a unit of their own."""
    given = {"weight": 3, "limit": 5}
    assert with_search_options("zb-auto", None, given, of_rank(2, 2, 1), 1) == given | {"held": 100}


@pytest.mark.parametrize(("method", "order"), [("1f1b", None), ("hanayo", None), ("zb-auto", "gpipe"), ("1f1b", "no")])
def test_other_orders_get_nothing(method: str, order: str | None) -> None:
    assert with_search_options(method, order, {"chunks": 2}, of_rank(2, 2, 1), 1) == {"chunks": 2}


def test_passes_that_take_no_time_say_nothing() -> None:
    assert with_search_options("zb-auto", None, {}, of_rank(0, 0, 0), 1) == {"held": 100}


def test_an_unknown_method_is_refused_as_everywhere() -> None:
    with pytest.raises(ConfigError, match="unknown method 'zb-aut'"):
        with_search_options("zb-aut", None, {}, of_rank(1, 1, 1), 1)


def test_simulate_hands_its_times_to_the_search(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The published case (arXiv 2401.10241, table 4: 0.0433), in the units of its table and with its memory model."""
    base = ("simulate", "zb-auto", "--stages", 8, "--microbatches", 24, *MEASURED, "--left", 0.3664, "--json")
    _, out, _ = run(monkeypatch, capsys, *base)
    set_by_hand = [word for name, value in AS_OPTIONS.items() for word in ("--set", f"options.{name}={value}")]
    _, by_hand, _ = run(monkeypatch, capsys, *base, *set_by_hand)
    assert round(json.loads(out)["rank_span_bubble"], 4) == 0.0434
    assert out == by_hand
    _, others, _ = run(monkeypatch, capsys, *base, "--set", "options.forward=1")
    assert round(json.loads(others)["rank_span_bubble"], 4) == 0.1083  # that of H2, which unit times lead to


def test_a_search_gets_the_mean_of_the_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = [{"forward": f, "backward_input": 2.0, "backward_weight": 0.5} for f in (1, 1, 2, 2)]
    (tmp_path / "costs.json").write_text(json.dumps(rows))
    base = ("simulate", "zb-auto", "--stages", 4, "--microbatches", 8, "--per-stage", tmp_path / "costs.json", "--json")
    _, out, _ = run(monkeypatch, capsys, *base)
    _, by_hand, _ = run(
        monkeypatch,
        capsys,
        *base,
        "--set",
        "options.forward=3",
        "--set",
        "options.input=4",
        "--set",
        "options.weight=1",
    )
    assert out == by_hand
    _, others, _ = run(monkeypatch, capsys, *base, "--set", "options.forward=1")
    assert json.loads(others)["makespan"] != json.loads(out)["makespan"]


def test_show_hands_its_times_to_the_search(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ("show", "zb-auto", "--stages", 4, "--microbatches", 8, "--forward", 3, "--backward", 2, "--json")
    _, out, _ = run(monkeypatch, capsys, *base)
    _, by_hand, _ = run(
        monkeypatch,
        capsys,
        *base,
        "--set",
        "options.forward=3",
        "--set",
        "options.input=1",
        "--set",
        "options.weight=1",
    )
    _, others, _ = run(monkeypatch, capsys, *base, "--set", "options.forward=1")
    assert out == by_hand != others


def test_an_exact_search_gets_them_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("scipy")
    base = ("simulate", "zb-auto", "--order", "zb-exact", "--stages", 2, "--microbatches", 3, *MEASURED, "--json")
    _, out, _ = run(monkeypatch, capsys, *base)
    _, searched, _ = run(monkeypatch, capsys, *(word for word in base if word not in ("--order", "zb-exact")))
    assert json.loads(out)["rank_span"] <= json.loads(searched)["rank_span"] + 1e-9
