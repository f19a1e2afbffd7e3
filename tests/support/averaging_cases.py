"""Ways in which pipelines average, and a run of each."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from penstock.schedule.methods.data_parallel_sync import COMBINES, Combine
from support.cases import Case, make_batches, make_pipeline
from support.meetings import (
    State,
    states_of,
)

KINDS = [kind for kind in COMBINES if kind != "reduce"]
FEW = [
    Combine("average", every=2, optimizer_state="average"),
    Combine("bmuf", every=3, nesterov=True),
    Combine("elastic", every=2),
]


# --- processes --------------------------------------------------------------------------------------------------------


def trained(group: dist.ProcessGroup | None, case: Case, combine: Combine) -> tuple[dict[int, State], list[Any]]:
    pipeline = make_pipeline(case, group, combine=combine)
    decided = [d for report in pipeline.run(make_batches(case)) for d in report.decided]
    return states_of(pipeline), [tuple(d) for d in (*decided, *pipeline.decided())]


def merged(parts: list[dict[int, State]]) -> dict[int, State]:
    found: dict[int, State] = {}
    for part in parts:
        for r, state in part.items():
            whole = found.setdefault(r, State())
            whole.scale = state.scale
            for what in ("weights", "optimizer", "model", "motion"):
                getattr(whole, what).update(getattr(state, what))
    return found
