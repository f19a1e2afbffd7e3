"""What passes and updates take under `torch.distributed.pipelining`, by the clock of their rank."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from benchmarks.arms import TorchArm


class TorchPasses:
    """Adds up the passes and updates of an arm from now on; all between them is waits, messages and Python.

    A forward of the last stage includes its loss, and an update the division of gradients by the number of microbatches
    and their reset, as in Penstock's passes and updates.

    Args:
        arm: whose stages and optimizer it times.
    """

    def __init__(self, arm: TorchArm) -> None:
        self._times = defaultdict[str, list[float]](list)
        self._loss = 0.0  # seconds of the last one, which belong to the forward before it
        schedule = arm.schedule
        stages = getattr(schedule, "_stages", None) or [schedule._stage]
        for stage in stages:
            self._clock(stage, "forward_one_chunk", f"{stage.stage_index}:F")
            self._clock(stage, "backward_one_chunk", f"{stage.stage_index}:B")
            self._clock(stage, "perform_reduce_grad", "STEP")
        last = max(stage.stage_index for stage in stages)
        self._clock(schedule, "_compute_loss", f"{last}:F", more=True)
        self._clock(arm.optimizer, "step", "STEP", more=True)
        self._clock(arm.optimizer, "zero_grad", "STEP", more=True)

    def clear(self) -> None:
        """Forget all."""
        self._times.clear()

    def work(self) -> dict[str, list[float]]:
        """Return for each "stage:operation", and for STEP, their number and mean seconds."""
        return {name: [len(times), sum(times) / len(times)] for name, times in self._times.items()}

    def _clock(self, owner: Any, method: str, name: str, *, more: bool = False) -> None:
        call: Callable[..., Any] = getattr(owner, method)

        def timed(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            found = call(*arguments, **named)
            seconds = time.perf_counter() - start
            if more and self._times[name]:  # a part of what came before
                self._times[name][-1] += seconds
            else:
                self._times[name].append(seconds)
            return found

        setattr(owner, method, timed)
