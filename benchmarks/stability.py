"""Computes the largest stable rates of descent with momentum on a quadratic, with a delay of one update.

    python -m benchmarks.stability     # the table of docs/delays.md

With momentum as a mean, m <- beta m + (1 - beta) g, W <- W - eta m and the curvature h, a gradient h P(t-1) is taken at
the read point P(t) = W(t) - eta (a m + b g), m and g being those of the update that made W(t). With W(t) = z^t this is

    (z - beta)(z - 1) z^2 + eta h ((1 - beta) (z^2 + a z (z - 1)) + b (z - beta)(z - 1)) = 0,

and stable where all roots lie within the unit circle. a = b = 0 is the plain delay, a = 1, b = 0 the prediction of
XPipe and SpecTrain, and the last motion once more.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from rich.console import Console

BETAS = (0.9, 0.95, 0.97, 0.99)
_STEP = 0.01
_LARGEST = 2000.0


def roots_of(coefficients: list[float]) -> torch.Tensor:
    """Return the roots of a polynomial, as eigenvalues of its companion matrix; the highest coefficient comes first."""
    first, *rest = coefficients
    size = len(rest)
    matrix = torch.zeros(size, size, dtype=torch.float64)
    matrix[0] = -torch.tensor(rest, dtype=torch.float64) / first
    matrix[1:, :-1] = torch.eye(size - 1, dtype=torch.float64)
    return torch.linalg.eigvals(matrix)


def delayed(beta: float, a: float, b: float) -> Callable[[float], list[float]]:
    """Return the polynomial of a delay of one as a function of eta h."""

    def polynomial(x: float) -> list[float]:
        c = 1.0 - beta
        return [
            1.0,
            -1.0 - beta,
            beta + x * (c * (1.0 + a) + b),
            -x * (c * a + b * (1.0 + beta)),
            x * b * beta,
        ]

    return polynomial


def synchronous(beta: float) -> Callable[[float], list[float]]:
    """Return the polynomial without a delay, (z - beta)(z - 1) + eta h (1 - beta) z."""
    return lambda x: [1.0, x * (1.0 - beta) - 1.0 - beta, beta]


def limit_of(polynomial: Callable[[float], list[float]]) -> float:
    """Return the smallest eta h from which on a root leaves the unit circle, to six digits."""

    def stable(x: float) -> bool:
        return float(roots_of(polynomial(x)).abs().max()) < 1.0

    low = high = _STEP
    while stable(high):
        if high > _LARGEST:
            return high
        low, high = high, high * 1.02
    while high - low > 1e-7 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if stable(middle) else (low, middle)
    return low


def best_of(beta: float) -> tuple[float, float, float]:
    """Return the largest limit, with its a and b: a search that halves its steps around the best point so far."""
    a, b, size_a, size_b = beta / 2, 1.0 - beta, 0.2, (1.0 - beta) / 2
    best = limit_of(delayed(beta, a, b))
    while size_a > 1e-3:
        near = [(a + i * size_a, b + j * size_b) for i in (-1, 0, 1) for j in (-1, 0, 1)]
        found, other_a, other_b = max((limit_of(delayed(beta, *point)), *point) for point in near)
        if found > best:
            best, a, b = found, other_a, other_b
        else:
            size_a, size_b = size_a / 2, size_b / 2
    return best, a, b


def table() -> str:
    """Format the limits as Markdown."""
    lines = [
        "| beta | synchronous | delay | a = 1, b = 0 | a = beta, b = 1 - beta | best a, b |",
        "|---" * 6 + "|",
    ]
    for beta in BETAS:
        named = [delayed(beta, *point) for point in ((0.0, 0.0), (1.0, 0.0), (beta, 1.0 - beta))]
        limits = [limit_of(synchronous(beta)), *map(limit_of, named)]
        best, a, b = best_of(beta)
        cells = [f"{beta}", *(f"{limit:.3g}" for limit in limits), f"{best:.3g} ({a:.2f}, {b:.3f})"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    Console(soft_wrap=True).print(table(), markup=False, highlight=False)
