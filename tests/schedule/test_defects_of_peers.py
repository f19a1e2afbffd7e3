"""What other systems have got wrong, or do not take, in their schedules: held for every method, order and option."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from itertools import product

import pytest

from penstock.errors import ScheduleError
from penstock.schedule.build import call_order, prove
from penstock.schedule.ir.order import Order, order_options
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.methods.table import METHODS
from penstock.schedule.orders import ORDERS
from penstock.schedule.proof.check import check
from penstock.schedule.text_parser import parse_schedule
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from support.schedules import make_schedule
from support.smallest_batch import least

# Whether a method refuses m microbatches on p stages; all others take any number.
REFUSES = {
    "2bw": lambda p, m: m < least("2bw", p),
    "2bw-eager": lambda p, m: m < least("2bw-eager", p),
    "error-feedback": lambda p, m: m < least("2bw", p),
    "2bw-ahead": lambda p, m: m < least("2bw", p),
    "3bw": lambda p, m: m < least("3bw", p),
    "3bw-ahead": lambda p, m: m < least("3bw", p),
    "chimera": lambda p, m: p % 2 or m < 2,
    "dualpipe": lambda p, m: p % 2 or m % 2 or m < 2 * p,
    "dualpipe-v": lambda p, m: m < 2 * p,
    "bitpipe": lambda p, m: p % 2 or m % 2,
    "v-timeprest": lambda p, m: m < p - 1,
}
PASS = re.compile(r"(?<![A-Z])([FBIW])(-?\d+)(?:\.\.(-?\d+))?(?::(\d+)/\d+)?(?:@(\d+))?")


def printed(schedule: Schedule, *ops: str) -> list[tuple[int, int, int]]:
    """(stage, microbatch, slice) of all passes of some kinds, read off the printed rows by a pattern."""
    rows = [line for line in str(schedule).splitlines() if line.startswith("rank")]
    return sorted(
        (int(index or rank), k % schedule.microbatches, int(piece or 0))
        for rank, row in enumerate(rows)
        for op, first, last, piece, index in PASS.findall(row)
        for k in range(int(first), int(last or first) + 1)
        if op in ops
    )


@pytest.mark.parametrize("method", METHODS)
def test_any_number_of_microbatches_is_proven_and_simulated_or_refused(method: str) -> None:
    """From one to more than twice the stages: each pass stands once in what is printed, which is read back as it is.

    Every number for up to three stages; for four those beside the bounds of methods: 1, p - 1, p, 2 p, and one more.
    """
    for p, counts in ((1, range(1, 4)), (2, range(1, 6)), (3, range(1, 8)), (4, (1, 3, 4, 8, 9))):
        for m in counts:
            if method in REFUSES and REFUSES[method](p, m):
                with pytest.raises(ScheduleError, match=rf"\b{p}\b"):
                    make_schedule(method, p, m)
                continue
            proof = prove(method, p, m)
            schedule = proof.schedule
            places = list(product(range(schedule.num_stages), range(m), range(schedule.slices)))
            assert printed(schedule, "F") == printed(schedule, "B", "I") == printed(schedule, "B", "W") == places
            assert check(parse_schedule(str(schedule))).schedule == schedule
            busy = simulate_schedule(proof, Costs.uniform(schedule)).bubble.busy
            assert busy == pytest.approx([3 * m] * p)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("lookahead", [0, 1, 8])
def test_receives_posted_late_or_early_deadlock_nobody(method: str, lookahead: int) -> None:
    schedule = make_schedule(method, 4, 8)
    proven = check(schedule).lowered.window
    for window in (proven, proven + 6):
        check(schedule, lookahead, window)


FLUSHED = [name for name, row in METHODS.items() if row.rule == "flush"]


@pytest.mark.parametrize("method", [name for name in FLUSHED if name != "sequential"])
def test_more_microbatches_bring_the_time_towards_the_ideal(method: str) -> None:
    few, many = (prove(method, 4, m) for m in (8, 32))
    bubbles = [simulate_schedule(proof, Costs.uniform(proof.schedule)).bubble.bubble for proof in (few, many)]
    assert bubbles[1] < bubbles[0]


@pytest.mark.parametrize(
    "method", [name for name in FLUSHED if name not in ("gpipe", "breadth-first", "layered", "terapipe")]
)
def test_activations_do_not_grow_with_the_microbatches(method: str) -> None:
    few, many = (prove(method, 4, m).activations for m in (16, 32))
    assert few == many


@cache  # without options for each of them, and some search for seconds
def called(name: str, options: tuple[tuple[str, int], ...]) -> Order:
    return call_order(ORDERS[name], 4, 8, dict(options))


OTHER_VALUES = {
    "chunks": 3, "group": 6, "waves": 2, "backward": 1, "in_flight": 2, "slices": 3, "limit": 3, "forward": 2,
    "input": 2, "weight": 2, "hop": 1, "held": 50, "pairs": 2, "ahead": 3, "late": 3,
}  # fmt: skip
OPTIONS = [
    (name, option)
    for name, function in ORDERS.items()
    for option in order_options(function)
    if name != "zb-exact"  # the options of zb-auto, and how long it may search
]


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_every_option_of_an_order_changes_it(name: str, option: str) -> None:
    """What is left of activations after I counts where their limit is felt."""
    given = {"limit": {"v-auto": 3}.get(name, 7)} if option == "held" else {}
    other = given | {option: OTHER_VALUES[option]}
    changed = called(name, tuple(other.items()))
    assert changed != called(name, tuple(given.items()))
    prove(ORDERS[name], 4, 8, options=other, rule="newest" if changed.endless else "flush")


def test_wrong_schedules_are_refused_without_asserts_too() -> None:
    """`python -O` leaves them out."""
    code = (
        "from penstock.errors import ScheduleError\n"
        "from penstock.schedule.build import prove\n"
        "for rows in (['F0 B0 F1 B1', 'F1 B1 F0 B0'], ['F0 F1 B0 B1', 'F0 B0 F1']):\n"
        "    try:\n"
        "        prove(lambda stages, microbatches: rows, 2, 2)\n"
        "    except ScheduleError as error:\n"
        "        print(error)\n"
    )
    found = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True).stdout
    assert "deadlock: 2 ranks would wait for ever" in found
    assert "microbatch 1, stage 1 needs one B" in found
