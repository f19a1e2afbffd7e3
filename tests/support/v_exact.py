"""The shortest order on a V of two chunks per rank that there is, for very small cases: a mixed-integer program.

Written from the rules of the machine alone: it knows passes, what each waits for, and what it holds. Unknown are the
starts of all passes and, where nothing says which of two passes of a rank is first, that.
"""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array

KINDS = ("F0", "F1", "I1", "I0", "W1", "W0")
Pass = tuple[int, str, int]


def shortest_span(p: int, m: int, times: tuple[int, int, int], hop: int, chunks: int) -> float:
    """The shortest possible longest time of a rank from its first start to its last end.

    Args:
        p: ranks.
        m: microbatches.
        times: of F, I and W of a chunk.
        hop: time of a message.
        chunks: activations of chunks that a rank may hold; they are freed by W.
    """
    length = {kind: times["FIW".index(kind[0])] for kind in KINDS}
    passes = list(product(range(p), KINDS, range(m)))
    starts = {x: i for i, x in enumerate(passes)}
    before = {(a, b): _is_before(a, b) for a in passes for b in passes if a[0] == b[0]}
    open_pairs = [(a, b) for a, b in combinations(passes, 2) if a[0] == b[0] and not before[a, b] and not before[b, a]]
    first = {pair: len(passes) + i for i, pair in enumerate(open_pairs)}
    span = len(passes) + len(first)
    horizon = sum(length[kind] for _, kind, _ in passes) + 4 * p * m * hop
    rows: list[tuple[dict[int, float], float]] = []

    def after(late: Pass, early: Pass, wait: float = 0.0) -> None:
        rows.append(({starts[early]: 1.0, starts[late]: -1.0}, -length[early[1]] - wait))

    for (a, b), known in before.items():
        if known:
            after(b, a)
    for a in passes:
        source = _source(a, p)
        if source is not None and source[0] != a[0]:
            after(a, source, hop)
        rows.append(({starts[a]: 1.0, starts[a[0], "F0", 0]: -1.0, span: -1.0}, -length[a[1]]))
    for (a, b), y in first.items():  # y = 1: a before b
        rows.append(({starts[a]: 1.0, starts[b]: -1.0, y: horizon}, horizon - length[a[1]]))
        rows.append(({starts[b]: 1.0, starts[a]: -1.0, y: -horizon}, -float(length[b[1]])))
    for x in passes:
        if x[1][0] == "F":
            rows.append(_held(x, passes, before, first, chunks))
    return _solved(rows, span + 1, set(first.values()), span)


def _source(a: Pass, p: int) -> Pass | None:
    rank, kind, k = a
    previous = {"F1": "F0", "I1": "F1", "I0": "I1"}.get(kind)
    if kind[0] == "W":
        return rank, "I" + kind[1], k
    neighbour = rank - 1 if kind in ("F0", "I1") else rank + 1
    if 0 <= neighbour < p:
        return neighbour, kind, k
    return None if previous is None else (rank, previous, k)


def _is_before(a: Pass, b: Pass) -> bool:
    """Whether a pass is before another one of its rank in every order (those of a kind come by microbatch)."""
    (_, one, j), (_, other, k) = a, b
    if j > k or a == b:
        return False
    chain = KINDS[:4]
    if one in chain and other in chain:
        return chain.index(one) <= chain.index(other)
    if other[0] == "W":
        return one == other or (one in chain and chain.index(one) <= chain.index("I" + other[1]))
    return False


def _held(
    x: Pass,
    passes: list[Pass],
    before: dict[tuple[Pass, Pass], bool],
    first: dict[tuple[Pass, Pass], int],
    chunks: int,
) -> tuple[dict[int, float], float]:
    """When a forward begins, there are no more than `chunks` activations with its own."""
    row: dict[int, float] = {}
    bound = float(chunks - 1)
    for other in passes:
        sign = {"F": 1.0, "W": -1.0}.get(other[1][0], 0.0)
        if other[0] != x[0] or other == x or not sign or before[x, other]:
            continue
        if before[other, x]:
            bound -= sign
        elif (other, x) in first:
            row[first[other, x]] = sign
        else:
            row[first[x, other]] = -sign
            bound -= sign
    return row, bound


def _solved(rows: list[tuple[dict[int, float], float]], count: int, binary: set[int], span: int) -> float:
    matrix = lil_array((len(rows), count))
    for i, (row, _) in enumerate(rows):
        for j, value in row.items():
            matrix[i, j] = value
    whole = np.array([j in binary for j in range(count)])
    found = milp(
        (np.arange(count) == span).astype(float),
        integrality=whole.astype(int),
        bounds=Bounds(np.zeros(count), np.where(whole, 1.0, np.inf)),
        constraints=LinearConstraint(matrix.tocsr(), ub=[bound for _, bound in rows]),
        options={"time_limit": 120.0},
    )
    assert found.status == 0, found.message
    return float(found.fun)
