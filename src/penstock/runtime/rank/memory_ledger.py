"""What the parameter-sized memory of a rank is used for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from penstock.comm.core.recorder import Recorder
from penstock.schedule.ir.schedule import Op, Stage
from penstock.stage.stage_runtime import StageRuntime

_OPTIMIZER = "optimizer"
_PASSES = frozenset({Op.F, Op.B, Op.I, Op.W, Op.R})


class Account:
    """Of one rank, for one span.

    Args:
        recorder: is told.
        stages: the stages of the rank.
    """

    def __init__(self, recorder: Recorder, stages: Collection[StageRuntime]) -> None:
        self._recorder, self._stages = recorder, stages
        self._seen: dict[Stage, tuple[int, int]] = {}

    def after(self, stage: StageRuntime, op: Op) -> None:
        """An action of a stage is over. Most passes change nothing, and then this must cost next to nothing."""
        in_use = stage.in_use
        if op not in _PASSES or self._seen.get(stage.key) != in_use:
            self._seen[stage.key] = in_use
            self.take_down(optimizers=op in (Op.STEP, Op.VALIDATE, Op.AVERAGE))

    def take_down(self, *, optimizers: bool) -> None:
        """Tell the recorder what the stages hold now, by what for, in bytes.

        Args:
            optimizers: their states may have changed since the last time, too.
        """
        totals: Counter[str] = Counter()
        for stage in self._stages:
            totals.update(stage.bytes_by_role())
            if optimizers and stage.updater is not None:
                totals[_OPTIMIZER] += stage.updater.nbytes
        roles = totals.keys() - {_OPTIMIZER}
        for role in self._recorder.roles - roles:  # of a method before this one
            self._recorder.hold(role, 0)
        self._recorder.roles = roles
        for role, nbytes in totals.items():
            self._recorder.hold(role, nbytes)
