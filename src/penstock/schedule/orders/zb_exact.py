"""The zero-bubble order with the shortest span that there is, for small cases (Qi et al., arXiv 2401.10241, app. G).

A mixed-integer program, solved by HiGHS through scipy (the extra `exact`). Unknown are the starts of all passes and, on
each rank, which of two passes comes first; passes of one kind come in microbatch order. Minimal is the longest time
from the first forward of a rank to its last W. It serves to judge the search (`zb_auto.py`), which takes no time.
"""

from __future__ import annotations

import math
from itertools import pairwise, product

from penstock.errors import CapabilityError, ScheduleError
from penstock.schedule.ir.order import Order, make_order, pass_of
from penstock.schedule.ir.schedule import Op, straight
from penstock.schedule.orders.zero_bubble import check_percentage

_OPS = (Op.F, Op.I, Op.W)
_Pass = tuple[int, Op, int]
"""Rank, operation, microbatch."""


def zb_exact(
    stages: int,
    microbatches: int,
    *,
    limit: int | None = None,
    forward: int = 1,
    input: int = 1,
    weight: int = 1,
    hop: int = 0,
    held: int = 100,
    seconds: int = 60,
) -> Order:
    """The best order; arguments as of `zb_auto`.

    Args:
        seconds: that it may take.

    Raises:
        CapabilityError: scipy is not installed.
        ScheduleError: no order was proven to be the best in that time; `held` is no percentage.
    """
    check_percentage("zb-exact", held)
    times = dict(zip(_OPS, (forward, input, weight), strict=True))
    program = _Program(stages, microbatches, times, hop)
    program.sequence()
    program.remember(limit or 2 * stages, held / 100)
    starts = program.solve(seconds)
    passes = list(product(_OPS, range(microbatches)))
    ranks = [sorted(passes, key=lambda p, rank=rank: starts[rank, p[0], p[1]]) for rank in range(stages)]  # type: ignore[misc]
    return make_order([[pass_of(op, k, stage) for op, k in ranks[stage.rank]] for stage in straight(stages)])


class _Program:
    """The constraints: rows of coefficients by variable, each at most a bound."""

    def __init__(self, ranks: int, microbatches: int, times: dict[Op, int], hop: int) -> None:
        self._ranks, self._m, self._times, self._hop = ranks, microbatches, times, hop
        self._passes: list[_Pass] = list(product(range(ranks), _OPS, range(microbatches)))
        self._number: dict[object, int] = {p: i for i, p in enumerate(self._passes)}
        self._number["span"] = len(self._number)
        self._rows: list[tuple[dict[int, float], float]] = []
        self._long = microbatches * ranks * (sum(times.values()) + 2 * hop)  # one pass after the other

    def sequence(self) -> None:
        """What must come after what."""
        for rank, k in product(range(self._ranks), range(self._m)):
            self._after((rank, Op.I, k), (rank, Op.F, k))
            self._after((rank, Op.W, k), (rank, Op.I, k))
            if rank:
                self._after((rank, Op.F, k), (rank - 1, Op.F, k), self._hop)
                self._after((rank - 1, Op.I, k), (rank, Op.I, k), self._hop)
        for rank, op in product(range(self._ranks), _OPS):
            for before, k in pairwise(range(self._m)):
                self._after((rank, op, k), (rank, op, before))
        for rank, (late, early) in product(range(self._ranks), ((Op.F, Op.I), (Op.F, Op.W), (Op.I, Op.W))):
            for k in range(self._m):
                for j in range(k):  # the other way round is given
                    self._either((rank, late, k), (rank, early, j))
            self._row({"span": -1, (rank, Op.W, self._m - 1): 1, (rank, Op.F, 0): -1}, -self._times[Op.W])

    def remember(self, limit: int, held: float) -> None:
        """Activations of at most so many microbatches on a rank, of which a part is left between I and W."""
        for rank, k in product(range(self._ranks), range(limit, self._m)):
            freed: dict[object, float] = {("first", (rank, op, j), (rank, Op.F, k)): -part
                     for op, part in ((Op.I, 1 - held), (Op.W, held)) for j in range(k)}  # fmt: skip
            self._row(freed, limit - k - 1)

    def solve(self, seconds: int) -> dict[_Pass, float]:
        """The starts of the best order."""
        try:
            from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]
            from scipy.sparse import lil_array  # type: ignore[import-untyped]
        except ImportError:
            raise CapabilityError("the exact search needs scipy; install penstock with the extra 'exact'") from None
        count = len(self._number)
        matrix = lil_array((len(self._rows), count))
        for i, (row, _) in enumerate(self._rows):
            for j, coefficient in row.items():
                matrix[i, j] = coefficient
        binary = [isinstance(key, tuple) and key[0] == "first" for key in self._number]
        found = milp(
            [float(key == "span") for key in self._number],
            integrality=list(map(int, binary)),
            bounds=Bounds([0.0] * count, [1.0 if whole else math.inf for whole in binary]),
            constraints=LinearConstraint(matrix.tocsr(), ub=[bound for _, bound in self._rows]),
            options={"time_limit": float(seconds)},
        )
        if found.status != 0:
            raise ScheduleError(
                f"no best order of {self._ranks} ranks and {self._m} microbatches was found in {seconds} seconds "
                f"({found.message}); take fewer of them, or the search (zb-auto)"
            )
        return {p: float(found.x[self._number[p]]) for p in self._passes}

    def _after(self, late: _Pass, early: _Pass, hop: int = 0) -> None:
        self._row({late: -1, early: 1}, -self._times[early[1]] - hop)

    def _either(self, late: _Pass, early: _Pass) -> None:
        """One of two passes of a rank comes first: 1 if that is `early`."""
        first = ("first", early, late)
        self._number.setdefault(first, len(self._number))
        self._row({late: -1, early: 1, first: self._long}, self._long - self._times[early[1]])
        self._row({late: 1, early: -1, first: -self._long}, -self._times[late[1]])

    def _row(self, row: dict[object, float], bound: float) -> None:
        self._rows.append(({self._number[key]: value for key, value in row.items()}, bound))
