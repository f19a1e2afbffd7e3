"""The orders as their papers print them, written out by hand."""

import pytest

from penstock.schedule.ir.absolute_actions import actions_of
from penstock.schedule.orders import ORDERS
from support.schedules import make_schedule

# PipeDream-Flush / DAPPLE P_A with p = 4 and m = 8, as Megatron runs it.
ONE_F_ONE_B = """
F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7
F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7
F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7
F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7
"""

# DAPPLE P_B with p = 3 and m = 6: 5, 3 and 1 microbatches in flight.
EAGER = """
F0 F1 F2 F3 F4 B0 F5 B1 B2 B3 B4 B5
F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5
F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
"""

GPIPE = """
F0 F1 F2 B0 B1 B2
F0 F1 F2 B0 B1 B2
"""

# Fewer microbatches than stages: the warm-up is capped at m (PyTorch's own table refuses this case).
SHORT = """
F0 F1 B0 B1
F0 F1 B0 B1
F0 F1 B0 B1
F0 B0 F1 B1
"""

# PipeDream with p = 3 and m = 2, three batches: the warm-up happens once, the drain once.
ENDLESS = """
F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5
F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5
F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
"""

# The same, eager, with p = 3, m = 4 and two batches.
ENDLESS_EAGER = """
F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 F7 B3 B4 B5 B6 B7
F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7
F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7
"""


def passes_of(schedule, rank, batches):
    """What a rank runs in a span, without updates, as `F3 B0 ...`."""
    return " ".join(f"{a.op}{a.unit.first}" for a in actions_of(schedule, rank, batches) if a.op in ("F", "B"))


@pytest.mark.parametrize(
    ("order", "rule", "stages", "microbatches", "batches", "table"),
    [
        ("1f1b", "flush", 4, 8, 1, ONE_F_ONE_B),
        ("1f1b", "flush", 4, 2, 1, SHORT),
        ("eager-1f1b", "flush", 3, 6, 1, EAGER),
        ("gpipe", "flush", 2, 3, 1, GPIPE),
        ("endless-1f1b", "stash", 3, 2, 3, ENDLESS),
        ("endless-1f1b", "double-buffer", 3, 2, 3, ENDLESS),
        ("endless-eager-1f1b", "stash", 3, 4, 2, ENDLESS_EAGER),
        ("sequential", "flush", 2, 2, 1, "F0 B0 F1 B1\nF0 B0 F1 B1"),
    ],
)
def test_order_equals_the_published_table(order, rule, stages, microbatches, batches, table):
    schedule = make_schedule("1f1b", stages, microbatches, order=order, rule=rule)
    got = [passes_of(schedule, rank, batches) for rank in range(stages)]
    assert got == table.strip().splitlines()


@pytest.mark.parametrize("stages", range(1, 7))
@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 9])
@pytest.mark.parametrize(("method", "factor"), [("1f1b", 1), ("eager", 2)])
def test_1f1b_rule_of_the_papers(method, factor, stages, microbatches):
    """Warm-up min(m, w) forwards, then (F, B) pairs, then the rest of the backwards."""
    schedule = make_schedule(method, stages, microbatches)
    for rank in range(stages):
        warm_up = min(microbatches, factor * (stages - 1 - rank))
        row = [f"F{k}" for k in range(warm_up)]
        for k in range(microbatches - warm_up):
            row += [f"F{warm_up + k}", f"B{k}"]
        row += [f"B{k}" for k in range(microbatches - warm_up, microbatches)]
        assert passes_of(schedule, rank, 1) == " ".join(row)


@pytest.mark.parametrize("batches", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 5])
@pytest.mark.parametrize("stages", [1, 2, 4, 5])
@pytest.mark.parametrize("factor", [1, 2])
def test_endless_order_is_one_long_1f1b(factor, stages, microbatches, batches):
    """T endless batches of m run like one flushed batch of T*m, however the batches stage it up."""
    order, flushing = {1: ("endless-1f1b", "1f1b"), 2: ("endless-eager-1f1b", "eager")}[factor]
    endless = make_schedule("stash", stages, microbatches, order=order)
    flushed = make_schedule(flushing, stages, microbatches * batches)
    for rank in range(stages):
        assert passes_of(endless, rank, batches) == passes_of(flushed, rank, 1)


def test_forward_only_runs_evaluation_units():
    order = ORDERS["forward-only"](2, 3)
    for program in order.programs:
        assert [str(a).split("@")[0] for a in program.period] == ["Fe0", "Fe1", "Fe2"]
        assert program.epilogue == ()
