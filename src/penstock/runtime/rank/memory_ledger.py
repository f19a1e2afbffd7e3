"""The memory ledger of a rank: bytes of parameter-sized memory, by role."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from penstock.comm.core.trace_recorder import Recorder
from penstock.stage.stage_runtime import StageRuntime
from penstock.stage.trained_stage_weights import TrainedWeights
from penstock.stage.untrained_stage_weights import StageWeights
from penstock.weights.sharded_store import allocated

_OPTIMIZER, _OFFLOADED = "optimizer", "offloaded optimizer"


class MemoryLedger:
    """Reports the parameter-sized memory of one rank to its recorder, during one span.

    Args:
        recorder: receives the bytes of every role (weights, gradients, optimizer, ...).
        stages: the stages of the rank.

    Attributes:
        stale: memory was freed beside the actions of the rank since the last report.
    """

    def __init__(self, recorder: Recorder, stages: Collection[StageRuntime]) -> None:
        self._recorder, self._stages, self.stale = recorder, stages, False
        self._held: list[dict[str, int]] = []  # by stage, as last reported
        self._optimizers: list[tuple[int, int]] = []

    def freed(self) -> None:
        """Note that memory was freed, in whatever thread; the next action reports it."""
        self.stale = True

    def record(self, *, optimizers: bool) -> None:
        """Report the bytes that the stages hold now, by role.

        Args:
            optimizers: optimizer states may have changed since the last time, too.
        """
        self.stale = False
        weights = [stage.weights for stage in self._stages]  # mostly as before, and compared faster than reported
        held = [each.bytes_by_role() for each in weights]
        states = [(each.optimizer_bytes, each.offloaded_bytes) for each in weights] if optimizers else self._optimizers
        if held != self._held or states != self._optimizers:
            self._held, self._optimizers = held, states
            self._report(optimizers=optimizers)

    def _report(self, *, optimizers: bool) -> None:
        """Report the bytes of all roles to the recorder."""
        totals: Counter[str] = Counter()
        for part in self._held:
            totals.update(part)
        roles, live = totals.keys(), self._recorder.live
        for role in self._recorder.roles - roles:  # of a method before this one
            self._recorder.hold(role, 0)
        self._recorder.roles = set(roles)
        if optimizers:
            by_role = zip(*self._optimizers, strict=True)
            for role, bytes_of_stages in zip((_OPTIMIZER, _OFFLOADED), by_role, strict=False):
                if any(bytes_of_stages) or role in live:
                    totals[role] = sum(bytes_of_stages)
        # First those that shrink: a buffer that changes its role must not count twice meanwhile.
        for role, nbytes in sorted(totals.items(), key=lambda each: each[1] > live.get(each[0], 0)):
            self._recorder.hold(role, nbytes)


class StageMemory:
    """Has the memory of a rank reported after an action of one stage, unless the action was a pass that changed none.

    Args:
        ledger: of the rank.
        weights: of the stage.
    """

    def __init__(self, ledger: MemoryLedger, weights: StageWeights) -> None:
        self._ledger = ledger
        self._store = weights.store if isinstance(weights, TrainedWeights) else None
        self._seen: tuple[int, ...] | None = None

    def after_pass(self) -> None:
        """Report the memory if the pass has begun a gradient or ended a version."""
        if self._seen != self._buffers():
            self.after_action(optimizers=False)

    def after_action(self, *, optimizers: bool) -> None:
        """Report the memory.

        Args:
            optimizers: optimizer states may have changed, too.
        """
        self._seen = self._buffers()
        self._ledger.record(optimizers=optimizers)

    def _buffers(self) -> tuple[int, ...]:
        """Return how many versions and gradients there are; a pass changes nothing else."""
        return () if self._store is None else (len(self._store.versions), len(self._store.gradients))


class WatchfulMemory(StageMemory):
    """The same where memory is freed beside the actions of the rank: gradients whose sums have ended."""

    def after_pass(self) -> None:
        """Report the memory if the pass has changed any, or some was freed."""
        if self._ledger.stale:
            self.after_action(optimizers=False)
        else:
            super().after_pass()

    def _buffers(self) -> tuple[int, ...]:
        """Return the same, and how many gradients have their memory: a further part of one takes it again."""
        gradients = () if self._store is None else self._store.gradients.values()
        return (*super()._buffers(), sum(map(allocated, gradients)))
