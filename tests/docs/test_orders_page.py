"""docs/orders.md draws every order as it is, and leaves none out."""

from __future__ import annotations

import pytest

from penstock.schedule.build import prove
from penstock.schedule.methods.table import METHODS
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from support.drawings import PAGE, drawing, made_anew


@pytest.mark.slow
def test_drawings_and_figures_are_those_of_the_schedules() -> None:
    text = PAGE.read_text()
    assert made_anew(text) == text, "run python tests/support/drawings.py"


DRAWN = [row.name for row in METHODS.values() if row.rule == "flush" and row.order != "sequential"] + ["v-timeprest"]


@pytest.mark.parametrize("name", DRAWN)
def test_every_order_is_drawn(name: str) -> None:
    assert f"$ penstock show {name}" in PAGE.read_text()


def test_a_drawing_tells_chunks_and_directions_apart() -> None:
    assert "|F0a|F0b|" in drawing("zb-v --stages 1 --microbatches 2")
    chimera = drawing("chimera --stages 2 --microbatches 2")
    assert "|F0>|" in chimera
    assert "|F1<|" in chimera


def test_what_the_page_says_of_spans() -> None:
    for name in ("zb-h2", "zb-auto", "zb-v"):
        proof = prove(name, 4, 8)
        assert simulate_schedule(proof, Costs.uniform(proof.schedule)).bubble.rank_span_bubble == 0
