"""The bytes that the weights of a stage take: in a run, and for a snapshot of it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from penstock.runtime.rank.stage_snapshot import optimizer_state
from penstock.stage.sharded_stage_weights import ShardedWeights
from penstock.stage.stage_runtime import StageRuntime
from penstock.stage.trained_stage_weights import TrainedWeights
from penstock.weights.mixed_store import MixedStore


class WeightBytes:
    """The bytes that the weights of a stage take.

    Args:
        stage: they are counted as they are when somebody asks.
    """

    def __init__(self, stage: StageRuntime) -> None:
        self._weights, self._module = stage.weights, stage.module

    @property
    def parameters(self) -> int:
        """Bytes of its trained parameters."""
        return sum(p.nbytes for p in self._module.tensors.trained.values())

    @property
    def buffer(self) -> int:
        """Bytes of one copy of these, as passes read it, with its padding."""
        weights = self._weights
        if not isinstance(weights, TrainedWeights):
            return 0
        return (weights.store.low_layout if isinstance(weights.store, MixedStore) else weights.store.layout).nbytes

    @property
    def whole(self) -> int:
        """Bytes of one of their gradients, or of what is updated; `buffer` unless passes compute in low precision."""
        weights = self._weights
        return weights.store.layout.nbytes if isinstance(weights, TrainedWeights) else 0

    @property
    def frozen(self) -> int:
        """Bytes of its frozen parameters and buffers."""
        return sum(tensor.nbytes for tensor in self._module.tensors.fixed)

    def copied_for_snapshots(self) -> tuple[int, int, int, int, int]:
        """Return the bytes of copies for a snapshot, as `SnapshotBytes` has them."""
        weights, module = self._weights, self._module
        frozen = module.tensors.frozen()
        fixed = (
            _bytes_of(t for name, t in module.tensors.unversioned().items() if name not in frozen),
            _bytes_of(frozen.values()),
        )
        if not isinstance(weights, TrainedWeights):
            return 0, 0, 0, *fixed
        store = weights.store
        version = _bytes_of(store.versions[store.newest].views.values())
        return _bytes_of(store.master.views.values()), version, _bytes_of(weights.updater.state().values()), *fixed

    def shares_for_snapshots(self) -> tuple[int, int, int]:
        """Return the bytes of what this pipeline copies for a snapshot, as `SnapshotBytes.shares` has them."""
        weights = self._weights
        if not isinstance(weights, ShardedWeights):
            return 0, 0, 0
        store, optimizer = weights.store, optimizer_state(weights, Tensor.detach)[0]
        own = (store.shards.own(views) for views in (store.master.views, store.versions[store.newest].views))
        rows, version = (_bytes_of(views.values()) for views in own)
        return _bytes_of(optimizer.values()), rows, version


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of some tensors."""
    return sum(tensor.nbytes for tensor in tensors)
