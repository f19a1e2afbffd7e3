"""Account of a rank's parameter-sized memory, by role."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from penstock.comm.core.recorder import Recorder
from penstock.schedule.ir.schedule import Op, Stage
from penstock.stage.stage_runtime import StageRuntime

_OPTIMIZER = "optimizer"
_PASSES = frozenset({Op.F, Op.B, Op.I, Op.W, Op.R})


class MemoryLedger:
    """Reports the parameter-sized memory of one rank to its recorder, during one span.

    Args:
        recorder: receives the bytes of every role (weights, gradients, optimizer, ...).
        stages: the stages of the rank.
    """

    def __init__(self, recorder: Recorder, stages: Collection[StageRuntime]) -> None:
        self._recorder, self._stages = recorder, stages
        self._seen: dict[Stage, tuple[int, int]] = {}

    def after_action(self, stage: StageRuntime, op: Op) -> None:
        """Report the memory after an action of a stage, unless the action was a pass that changed nothing."""
        in_use = stage.weights.in_use
        if op not in _PASSES or self._seen.get(stage.key) != in_use:
            self._seen[stage.key] = in_use
            self.record(optimizers=op in (Op.STEP, Op.VALIDATE, Op.AVERAGE))

    def record(self, *, optimizers: bool) -> None:
        """Report the bytes that the stages hold now, by role.

        Args:
            optimizers: optimizer states may have changed since the last time, too.
        """
        totals: Counter[str] = Counter()
        for stage in self._stages:
            totals.update(stage.weights.bytes_by_role())
            if optimizers and stage.weights.optimizer_bytes:
                totals[_OPTIMIZER] += stage.weights.optimizer_bytes
        roles = totals.keys() - {_OPTIMIZER}
        for role in self._recorder.roles - roles:  # of a method before this one
            self._recorder.hold(role, 0)
        self._recorder.roles = roles
        for role, nbytes in totals.items():
            self._recorder.hold(role, nbytes)
