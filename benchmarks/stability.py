"""Computes the largest stable rates of descent with momentum on a quadratic, with a delay of one update, or of two.

    python -m benchmarks.stability     # the tables of docs/delays.md

With momentum as a mean, m <- beta m + (1 - beta) g, W <- W - eta m and the curvature h, a gradient h P(t-k) is taken at
the read point P(t) = W(t) - eta (a m + b g), m and g being those of the update that made W(t). With W(t) = z^t this is

    (z - beta)(z - 1) z^(k+1) + eta h ((1 - beta) (z^2 + a z (z - 1)) + b (z - beta)(z - 1)) = 0,

and stable where all roots lie within the unit circle. a = b = 0 is the plain delay, a = k, b = 0 the prediction of
XPipe and SpecTrain, and the last motion k times more. Other remedies for a delay of one are played instead: each is
linear, so what it makes of a unit in each number that it keeps is a matrix, whose eigenvalues these roots are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

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


def delayed(beta: float, a: float, b: float, delay: int = 1) -> Callable[[float], list[float]]:
    """Return the polynomial of a delay as a function of eta h."""
    c = 1.0 - beta
    last = c * (1.0 + a) + b, -c * a - b * (1.0 + beta), b * beta

    def polynomial(x: float) -> list[float]:
        found = [1.0, -1.0 - beta, beta, *[0.0] * (delay + 1)]
        for place, coefficient in enumerate(last, delay + 1):
            found[place] += x * coefficient
        return found

    return polynomial


def synchronous(beta: float) -> Callable[[float], list[float]]:
    """Return the polynomial without a delay, (z - beta)(z - 1) + eta h (1 - beta) z."""
    return lambda x: [1.0, x * (1.0 - beta) - 1.0 - beta, beta]


class Kept(NamedTuple):
    """What a remedy knows between two updates, each a multiple of what it began with, h being 1.

    Attributes:
        w, m, g: weights, mean of gradients and last gradient.
        read: the point at which the next gradient has been taken.
        before: the weights before the last update.
    """

    w: torch.Tensor
    m: torch.Tensor
    g: torch.Tensor
    read: torch.Tensor
    before: torch.Tensor


Remedy = Callable[[Kept, float, float], Kept]
"""What is kept, beta, eta -> what is kept after the next update; its gradient is `read`."""


def _update(kept: Kept, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The next mean, and the step of Nesterov's momentum (NAdam's): beta m + (1 - beta) g."""
    m = beta * kept.m + (1.0 - beta) * kept.read
    return m, beta * m + (1.0 - beta) * kept.read


def plain(kept: Kept, beta: float, eta: float) -> Kept:
    """The delay, and nothing against it."""
    m, _ = _update(kept, beta)
    return Kept(kept.w - eta * m, m, kept.read, kept.w, kept.w)


def repeat(kept: Kept, beta: float, eta: float) -> Kept:
    """`2bw-ahead`: read where the last gradient once more leads."""
    m, _ = _update(kept, beta)
    return Kept(kept.w - eta * m, m, kept.read, kept.w - eta * (beta * kept.m + (1.0 - beta) * kept.g), kept.w)


def motion(share: float) -> Remedy:
    """`2bw-ahead:motion=...`: read where the last motion once more leads."""

    def step(kept: Kept, beta: float, eta: float) -> Kept:
        m, _ = _update(kept, beta)
        return Kept(kept.w - eta * m, m, kept.read, kept.w + share * (kept.w - kept.before), kept.w)

    return step


def nesterov(kept: Kept, beta: float, eta: float) -> Kept:
    """NAG-PP's step, and that of spike compensation for a delay of one."""
    m, nag = _update(kept, beta)
    return Kept(kept.w - eta * nag, m, kept.read, kept.w, kept.w)


def nesterov_repeat(kept: Kept, beta: float, eta: float) -> Kept:
    """`2bw-ahead` under NAdam."""
    m, nag = _update(kept, beta)
    ahead = beta * (beta * kept.m + (1.0 - beta) * kept.g) + (1.0 - beta) * kept.g
    return Kept(kept.w - eta * nag, m, kept.read, kept.w - eta * ahead, kept.w)


def fed_back(kept: Kept, beta: float, eta: float) -> Kept:
    """`error-feedback`: the step, and how much it is more than the one before it."""
    m, _ = _update(kept, beta)
    return Kept(kept.w - eta * (2.0 * m - kept.m), m, kept.read, kept.w, kept.w)


def own_error(kept: Kept, beta: float, eta: float) -> Kept:
    """Read where the last gradient once more leads, and as much further as the last prediction was short."""
    m, _ = _update(kept, beta)
    ahead = kept.w - eta * (beta * kept.m + (1.0 - beta) * kept.g) + (kept.w - kept.read)
    return Kept(kept.w - eta * m, m, kept.read, ahead, kept.w)


def from_prediction(kept: Kept, beta: float, eta: float) -> Kept:
    """Step the predicted weights, at which the gradient was taken, instead of the weights themselves."""
    m, _ = _update(kept, beta)
    return Kept(kept.read - eta * m, m, kept.read, kept.w - eta * (beta * kept.m + (1.0 - beta) * kept.g), kept.w)


REMEDIES: dict[str, Remedy] = {
    "no remedy": plain,
    "`error-feedback`": fed_back,
    "`nag-pp` (NAdam's step), spike compensation": nesterov,
    "the last motion once more": motion(1.0),
    "1.5 times the last motion": motion(1.5),
    "the last gradient once more": repeat,
    "the same under NAdam": nesterov_repeat,
    "the same, and the last error of the prediction": own_error,
    "the same, stepping the predicted weights": from_prediction,
}


def radius_of(remedy: Remedy, beta: float, eta: float) -> float:
    """Return by how much an update lengthens what is kept, in the long run."""
    units = Kept(*torch.eye(len(Kept._fields), dtype=torch.float64))
    return float(torch.linalg.eigvals(torch.stack(remedy(units, beta, eta))).abs().max())


def limit_of(polynomial: Callable[[float], list[float]]) -> float:
    """Return the smallest eta h from which on a root leaves the unit circle, to six digits."""
    return largest(lambda x: float(roots_of(polynomial(x)).abs().max()) < 1.0)


def largest(stable: Callable[[float], bool]) -> float:
    """Return up to which eta h descent is stable, to six digits."""
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


def of_two() -> str:
    """Format the limits for a delay of two as Markdown."""
    lines = ["| a delay of two | " + " | ".join(f"beta {beta}" for beta in BETAS) + " |", "|---" * 5 + "|"]
    rows = {
        "no remedy (`3bw`)": [(0.0, 0.0) for _ in BETAS],
        "twice the last motion (`motion=1`)": [(2.0, 0.0) for _ in BETAS],
        "twice the step with the last gradient (`3bw-ahead`)": [(2.0 * beta, 2.0 * (1.0 - beta)) for beta in BETAS],
    }
    for name, points in rows.items():
        limits = [limit_of(delayed(beta, *point, delay=2)) for beta, point in zip(BETAS, points, strict=True)]
        lines.append(f"| {name} | " + " | ".join(f"{limit:.3g}" for limit in limits) + " |")
    return "\n".join(lines)


def remedies() -> str:
    """Format the limits of remedies as Markdown."""
    lines = ["| a delay of one | " + " | ".join(f"beta {beta}" for beta in BETAS) + " |", "|---" * 5 + "|"]
    for name, remedy in REMEDIES.items():
        limits = [largest(lambda x, r=remedy, b=beta: radius_of(r, b, x) < 1.0) for beta in BETAS]  # type: ignore[misc]
        lines.append(f"| {name} | " + " | ".join(f"{limit:.3g}" for limit in limits) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    for found in (table(), remedies(), of_two()):
        Console(soft_wrap=True).print(found, "\n", markup=False, highlight=False)
