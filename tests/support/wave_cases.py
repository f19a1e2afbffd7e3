"""Wave-synchronous runs, and the same by hand."""

from __future__ import annotations

from itertools import accumulate

from penstock.schedule.methods.data_parallel_sync import Combine
from support.cases import OPTIMIZERS, Case
from support.waves_by_hand import Waved, reads_of


def case_of(method: str, depth: int, m: int, width: int, optimizer: str, spans: tuple[int, ...] = (21,)) -> Case:
    """Nothing is scaled, so that every bit of a gradient is the optimizer's."""
    model = "long" if depth == 8 else "mixed"
    return Case(
        method, depth, m, model, width=width, optimizer=optimizer, loss="even", rate=False, spans=spans, skips=()
    )


def by_hand(case: Case, combine: Combine) -> Waved:
    return Waved(
        combine.lags(case.width),
        combine.every,
        combine.share,
        list(accumulate(case.spans)),
        case.m,
        case.schedule.num_stages,
        OPTIMIZERS[case.optimizer],
        reads_of(case.method, case.depth, case.m),
        case.model,
    )


WAVES = Combine("wsp", every=2, distance=1)
