"""Computes which version each pass reads, and the number of updates between passes: numbers only, no weights.

s of d is the stage, counted from 0; m the microbatches of a pipeline to an update. Rules that read the newest version
depend on the order of the passes: here that of 1F1B, that of nF1B, or delays that are given.

1F1B (PipeDream, arXiv 1806.03377). Stage s runs d-1-s forwards ahead, then one backward and one forward in turn. So
the forward of the span's microbatch number g follows max(0, g - (d-1-s)) backwards, each m of which end with an
update.

nF1B (TiMePReSt, arXiv 2410.14312). All m forwards of a batch are consecutive, and on the last stage one backward of the
whole batch follows them at once. An earlier stage can run that backward no sooner than one backward of its successor
later; meanwhile it runs forwards of whole batches, one for each stage after it. That is 1F1B with batches in place of
microbatches: stage s runs the forwards of d-1-s batches ahead, then those of one batch and the backward of one in turn.
So all forwards of the span's batch number b follow max(0, b - (d-1-s)) backwards, each of which ends with an update;
its own backward follows b of them; min(b, d-1-s) updates lie between. With d = 2 that is one on the first stage and
none on the last. For an order that runs fewer batches ahead (where backwards are fast) `delays` are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from penstock.errors import ConfigError
from penstock.verify.reference.order_delays import Delays, ReferenceOrder
from penstock.verify.reference.supported_methods import FLUSH, NF1B, UPDATES_LATE


def version_read(method: str, t: int, k: int, m: int, s: int, d: int, first: int, delays: Delays | None = None) -> int:
    """Return the version that the forward of microbatch k of batch t reads or predicts from, in a span from `first`.

    Args:
        method, t, k, m, s, d, first: as above.
        delays: given ones; those of the method's own order if None.
    """
    if method in FLUSH:
        return t
    if method in UPDATES_LATE:
        return max(t - UPDATES_LATE[method], 0)
    if method == "vertical-sync":
        s = 0
    if method == "xpipe":  # all microbatches of a batch use the copy made for its first one
        k = 0
    if delays is not None:
        return max(first, t - delays[s][k])
    if method in NF1B:
        return max(first, t - (d - 1 - s))
    return first + max(0, (t - first) * m + k - (d - 1 - s)) // m


def check_early(method: str, order: ReferenceOrder, d: int, m: int) -> None:
    """Check that no forward is recomputed before it has run.

    Raises:
        ConfigError: one is.
    """
    late = max((delay for row in order.delays or () for delay in row), default=d)
    for s, row in enumerate(order.early or ()):
        for k, early in enumerate(row):
            delay = late - version_read(method, late, k, m, s, d, 0, order.delays)
            if early > delay:
                raise ConfigError(
                    f"stage {s} is to recompute microbatch {k}, {early} updates before its own, but its forward runs "
                    f"only {delay} before: set early[{s}][{k}] to {delay} at most"
                )


def mean_delay(s: int, d: int, m: int, delays: Sequence[int] | None = None) -> float:
    """Return the mean over a batch of the updates that stage s makes between a microbatch's forward and its own update.

    The batch is late enough that the beginning of the span has no influence; in 1F1B it is (d-1-s)/m.
    """
    if delays is not None:
        return sum(delays) / m
    t = d
    return sum(t - version_read("stash", t, k, m, s, d, 0) for k in range(m)) / m


def largest_delay(s: int, d: int, m: int, delays: Sequence[int] | None = None) -> int:
    """Return the most updates of stage s between a microbatch's forward and its own update: 1F1B ceil((d-1-s)/m)."""
    if delays is not None:
        return max(delays)
    return d - version_read("stash", d, 0, m, s, d, 0)


def prediction_horizons(method: str, s: int, d: int, m: int) -> tuple[float, float | None]:
    """Return by how many updates forward and backward predict; None if the backward has no prediction of its own.

    Sources: SpecTrain, arXiv 1809.02839, and its authors' code (spectrain-stash); XPipe, arXiv 1911.04610; PipeOptim,
    arXiv 2312.00839. All but XPipe count microbatches, each of which
    made an update in their experiments; with m to an update, it is one m-th of that (variant "penstock"). XPipe's is
    rounded half to even.
    """
    if method == "spectrain":
        return (s // 2 + d - s - 1) / m, (s // 2) / m
    if method == "xpipe":
        return round((Fraction(d + m - 2) - Fraction(s, 2)) / m), round(Fraction(m + s // 2 - 1, m))
    return (d - s - 1) / m, None
