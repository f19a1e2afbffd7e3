"""A period that repeats describes no structure again and makes no buffer: what a capture of it would need."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch.distributed as dist

from penstock.comm.p2p.codec import Codec
from penstock.stage.trained_stage_weights import TrainedWeights
from penstock.weights.memory.buffers import Buffer
from support.cases import Case, make_batches, make_pipeline
from support.pool import Pool

STEADY = [("1f1b", 2, 4), ("2bw", 2, 4), ("interleaved", 2, 4), ("zb-h1", 2, 4), ("stash", 3, 1), ("newest", 3, 1)]
BATCHES = 6


def count(group: dist.ProcessGroup | None, method: str, depth: int, m: int) -> tuple[list[int], list[int], list[bool]]:
    """After each batch: descriptions encoded and buffers made so far, and whether weights lie where they lay before."""
    with pytest.MonkeyPatch.context() as patch:
        seen = Counter[str]()
        change, make = Codec._change, Buffer.__init__

        def described(self: Codec, *given: object) -> bytes:
            changed = change(self, *given)  # type: ignore[arg-type]
            seen["descriptions"] += bool(changed)
            return changed

        def made(self: Buffer, *given: object) -> None:
            seen["buffers"] += 1
            make(self, *given)  # type: ignore[arg-type]

        patch.setattr(Codec, "_change", described)
        patch.setattr(Buffer, "__init__", made)
        case = Case(method, depth, m, spans=(BATCHES,), skips=())
        pipeline = make_pipeline(case, group)
        described_, made_, places = list[int](), list[int](), list[set[int]]()
        for _ in pipeline.run(make_batches(case)):
            described_.append(seen["descriptions"])
            made_.append(seen["buffers"])
            stages = [s.weights for s in pipeline.stages.values() if isinstance(s.weights, TrainedWeights)]
            state = {tensor.data_ptr() for weights in stages for tensor in weights.updater.tensors}
            places.append(state.union(*(weights.store.storages for weights in stages)))
        return described_, made_, [now == before for before, now in pairwise(places)]


@pytest.mark.parametrize(("method", "depth", "m"), STEADY)
def test_a_period_makes_no_buffer(method: str, depth: int, m: int) -> None:
    """Weights, gradients and the optimizer's state stay where they are, and nothing of their kind is made."""
    _, made, stays = count(None, method, depth, m)
    assert made == [made[0]] * BATCHES
    assert all(stays[depth:])  # an optimizer makes its state at its first update, up to depth - 1 batches later


@pytest.mark.parametrize(("method", "depth", "m"), [("1f1b", 2, 4), ("2bw", 2, 4), ("interleaved", 2, 4)])
def test_a_period_describes_no_message(pool: Pool, method: str, depth: int, m: int) -> None:
    """Each lane describes the structure of its messages once, with the first; all others have a header and tensors."""
    for described, made, _ in pool.submit(count, method, depth, m, ranks=depth):
        assert described[-1] >= 1
        assert described[1:] == [described[1]] * (BATCHES - 1)
        assert made == [made[0]] * BATCHES
