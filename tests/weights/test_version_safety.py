"""Planted violations of the life of a version are caught, by the store's epochs and by autograd behind them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.errors import PenstockError, ScheduleError, VersionError
from penstock.runtime.pipeline import Pipeline
from penstock.weights.memory.buffers import Buffer, Handle, Layout
from penstock.weights.store import VersionStore
from support.cases import Case, make_batches, make_pipeline

SHAPES = {"a": (3, 5), "b": (7,), "c": ()}


def parameters(value: float = 1.0) -> dict[str, Tensor]:
    return {name: torch.full(shape, value) for name, shape in SHAPES.items()}


def make_store(buffers: int) -> VersionStore:
    return VersionStore(parameters(), buffers, "stage 0 on rank 0")


# --- buffers --------------------------------------------------------------------------------------------------------


def test_parameters_lie_aligned_and_apart() -> None:
    mixed = parameters() | {"half": torch.ones(3, dtype=torch.bfloat16), "more": torch.ones(2, 2, dtype=torch.bfloat16)}
    buffer = Buffer(Layout(mixed), "0")
    spans = []
    for name, view in buffer.views.items():
        assert view.shape == mixed[name].shape
        assert view.dtype == mixed[name].dtype
        assert view.data_ptr() % 64 == buffer.views["a" if view.dtype is torch.float32 else "half"].data_ptr() % 64
        assert buffer.leaves[name].data_ptr() == view.data_ptr()
        assert buffer.leaves[name].is_leaf
        assert buffer.leaves[name].requires_grad
        spans.append((view.data_ptr(), view.data_ptr() + view.nbytes))
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_a_handle_notices_every_kind_of_rewrite() -> None:
    rewrites: list[Callable[[Buffer], None]] = [
        Buffer.rewrite,
        Buffer.begin_gradient,
        lambda b: b.load(parameters(2.0)),
    ]
    for rewrite in rewrites:
        buffer = Buffer(Layout(parameters()), "7")
        handle = Handle(buffer, buffer.epoch, 3)
        handle.check("a backward")
        rewrite(buffer)
        with pytest.raises(VersionError, match=r"a backward needs version 3 .* buffer 7 has been rewritten"):
            handle.check("a backward")


def test_autograd_notices_a_rewrite_behind_the_handle() -> None:
    """The second net: leaves share the buffer's version counter."""
    buffer = Buffer(Layout(parameters()), "0")
    loss = (buffer.leaves["a"] ** 2).sum()
    buffer.rewrite()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_optimizer_parameters_do_not_hide_rewrites() -> None:
    """A Parameter made over the buffer's memory counts versions for itself; the leaves' counter must not suffer."""
    pipeline = make_pipeline(Case("2bw", 1, 1))
    list(pipeline.run(make_batches(Case("2bw", 1, 1, spans=(3,)))))
    store = pipeline.stages[min(pipeline.stages)].weights.store
    assert store is not None
    for version in store.versions:
        buffer = store.versions[version]
        loss = (buffer.leaves["head.weight"] ** 2).sum()
        buffer.rewrite()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# --- the store ------------------------------------------------------------------------------------------------------


def test_gradients_of_a_batch_accumulate_in_one_buffer() -> None:
    store = make_store(3)
    for batch in (0, 1):
        for k in range(3):
            handle = store.read(0)
            total = sum((leaf * (k + 1)).sum() for leaf in handle.buffer.leaves.values())
            store.accumulate(handle, batch)
            assert isinstance(total, Tensor)
            total.backward()
    for batch in (0, 1):
        assert all(view.eq(6).all() for view in store.gradients[batch].views.values())
    assert store.bytes_by_role() == {
        "weights": store.layout.nbytes,
        "gradients": 2 * store.layout.nbytes,
        "idle buffers": 0,
    }


def test_microbatches_of_a_batch_may_read_two_versions() -> None:
    """What backwards on one version have added is not lost when others reach a parameter for the first time."""
    store = make_store(4)
    store.accumulate(store.read(0), 0)
    store.rotate(0)
    late, *early = store.layout.slots
    for version, names in ((0, early), (1, [late, *early]), (0, [late, *early])):
        handle = store.read(version)
        store.accumulate(handle, 1)
        sum(handle.buffer.leaves[name].sum() for name in names).backward()  # type: ignore[union-attr]
    assert all(view.eq(2 if name == late else 3).all() for name, view in store.gradients[1].views.items())


def test_sparse_gradients_become_dense() -> None:
    store = VersionStore({"table": torch.ones(4, 2)}, 2, "stage 0 on rank 0")
    handle = store.read(0)
    for _ in range(2):
        store.accumulate(handle, 0)
        rows = torch.nn.functional.embedding(torch.tensor([1, 1, 3]), handle.buffer.leaves["table"], sparse=True)
        rows.sum().backward()  # type: ignore[no-untyped-call]
    assert store.gradients[0].views["table"].tolist() == [[0, 0], [4, 4], [0, 0], [2, 2]]


def test_reading_a_version_that_is_not_alive() -> None:
    store = make_store(3)
    with pytest.raises(VersionError, match=r"stage 0 on rank 0: version 1 .* does not exist; existing: 0"):
        store.read(1)
    store.accumulate(store.read(0), 0)
    store.rotate(0)
    store.read(1)
    store.retain([1])
    with pytest.raises(VersionError, match="version 0 .* existing: 1"):
        store.read(0)


def test_a_version_that_was_freed_is_void_at_once() -> None:
    """Not only when somebody takes its buffer."""
    store = make_store(3)
    handle = store.read(0)
    store.accumulate(handle, 0)
    store.rotate(0)
    store.retain([1])
    with pytest.raises(VersionError, match="rewritten"):
        handle.check("a late backward")


def test_no_free_buffer() -> None:
    store = make_store(2)
    store.accumulate(store.read(0), 0)
    with pytest.raises(VersionError, match=r"no buffer is free for the gradient of batch 1; versions \[0\] .* \[0\]"):
        store.accumulate(store.read(0), 1)


def test_a_buffer_is_used_again() -> None:
    """Gradient, version, nothing, gradient: three buffers serve for ever, and nothing old is left in a gradient."""
    store = make_store(3)
    for batch in range(5):
        handle = store.read(max(batch - 1, 0))
        store.accumulate(handle, batch)
        unused, *used = handle.buffer.leaves
        sum(handle.buffer.leaves[name].sum() for name in used).backward()  # type: ignore[union-attr]
        old, new = store.rotate(batch)
        assert all(new.views[name].eq(0 if name == unused else 1).all() for name in handle.buffer.leaves)
        assert old is store.versions[batch]
        assert new is store.versions[batch + 1]
        store.retain([batch, batch + 1])
    assert store.newest == 5
    assert len(store.storages) == 3


def test_an_update_in_place_frees_the_gradient() -> None:
    store = make_store(2)
    for batch in range(3):
        store.accumulate(store.read(batch), batch)
        weights, _ = store.overwrite(batch)
        assert store.versions == {batch + 1: weights}
    assert store.bytes_by_role()["idle buffers"] == store.layout.nbytes


# --- a running pipeline ---------------------------------------------------------------------------------------------


def store_of(pipeline: Pipeline, index: int = 0) -> VersionStore:
    store = next(stage.weights.store for place, stage in pipeline.stages.items() if place.index == index)
    assert store is not None
    return store


def run_with_violation(case: Case, plant: Callable[[Pipeline], None]) -> None:
    pipeline, batches = make_pipeline(case), make_batches(case)
    list(pipeline.run(batches[:1]))  # past the first microbatch, which is measured under hooks
    plant(pipeline)
    try:
        list(pipeline.run(batches[1:]))
    finally:
        with pytest.raises(PenstockError, match="broke in an earlier run"):
            list(pipeline.run(batches))


def patched(store: VersionStore, name: str, change: Callable[[Any], Callable[..., Any]]) -> None:
    setattr(store, name, change(getattr(store, name)))


@pytest.mark.parametrize("method", ["2bw", "stash"])
def test_freeing_a_version_too_early(method: str) -> None:
    def newest_only(pipeline: Pipeline) -> None:
        store = store_of(pipeline)
        patched(store, "retain", lambda retain: lambda alive: retain([max(alive)]))

    with pytest.raises(VersionError, match="does not exist|has been rewritten"):
        run_with_violation(Case(method, 3, 2), newest_only)


@pytest.mark.parametrize("method", ["2bw", "stash"])
def test_never_freeing_a_version(method: str) -> None:
    def keep_all(pipeline: Pipeline) -> None:
        patched(store_of(pipeline), "retain", lambda retain: lambda alive: None)

    with pytest.raises(VersionError, match="no buffer is free"):
        run_with_violation(Case(method, 3, 2), keep_all)


@pytest.mark.parametrize("method", ["gpipe", "1f1b", "2bw", "stash"])
def test_a_rewrite_between_forward_and_backward(method: str) -> None:
    def rewrite_what_is_read(pipeline: Pipeline) -> None:
        store = store_of(pipeline)
        seen: list[Handle] = []

        def change(read: Callable[[int], Handle]) -> Callable[[int], Handle]:
            def rewriting(version: int) -> Handle:
                handle = read(version)
                seen.append(handle)
                if len(seen) == 3:
                    seen[1].buffer.rewrite()
                return handle

            return rewriting

        patched(store, "read", change)

    with pytest.raises(VersionError, match="the backward of microbatch .* on stage 0"):
        run_with_violation(Case(method, 3, 2), rewrite_what_is_read)


@pytest.mark.parametrize("method", ["gpipe", "1f1b", "2bw", "stash"])
def test_autograd_stands_behind_the_handles(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the handles switched off, reading a buffer after its rewrite fails all the same."""

    def rewrite_after_reading(pipeline: Pipeline) -> None:
        passes = next(iter(pipeline.stages.values())).passes
        forward = passes.forward

        def rewriting(*args: Any) -> Any:
            result = forward(*args)
            handle = passes.flights[args[0].key].handle
            assert handle is not None
            handle.buffer.rewrite()
            return result

        monkeypatch.setattr(passes, "forward", rewriting)

    monkeypatch.setattr(Handle, "check", lambda self, who: None)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run_with_violation(Case(method, 2, 2), rewrite_after_reading)


def test_the_books_refuse_what_the_proof_would_refuse() -> None:
    """The schedule's own account is played along: a pass that reads another version does not run at all."""

    def shift_versions(pipeline: Pipeline) -> None:
        action = next(a for a in pipeline.schedule.programs[0].period if a.reads is not None)
        changed = action._replace(reads=action.reads._replace(versions=(action.reads.versions[0] + 1,)))
        period = pipeline.proof.lowered.programs[0].period
        at = next(i for i, instruction in enumerate(period) if instruction.action == action)
        instructions = (*period[:at], period[at]._replace(action=changed), *period[at + 1 :])
        programs = pipeline.proof.lowered.programs
        object.__setattr__(
            pipeline.proof.lowered, "programs", (programs[0]._replace(period=instructions), *programs[1:])
        )

    with pytest.raises(ScheduleError, match="must read version"):
        run_with_violation(Case("2bw", 3, 2), shift_versions)
