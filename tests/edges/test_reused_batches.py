"""Loaders that use the memory of a batch again while it is trained on: noticed before anything is trained on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import penstock
from penstock.errors import DataError
from support.plain_training import PlainTraining, assert_close_weights, make_data, make_model, pipeline_of_model
from support.pool import Pool


def refilled() -> Iterator[Any]:
    """The same tensors with new values."""
    x, y = (torch.empty_like(part) for part in make_data()[0])
    for inputs, targets in make_data():
        x.copy_(inputs)
        y.copy_(targets)
        yield x, y


def refilled_targets() -> Iterator[Any]:
    y = torch.empty_like(make_data()[0][1])
    for inputs, targets in make_data():
        yield {"x": inputs}, y.copy_(targets)


def refilled_by_numpy() -> Iterator[Any]:
    """Without a word to torch."""
    arrays = [np.empty_like(part.numpy()) for part in make_data()[0]]
    for batch in make_data():
        for array, part in zip(arrays, batch, strict=True):
            array[...] = part.numpy()
        yield tuple(torch.from_numpy(array) for array in arrays)


def refilled_microbatches() -> Iterator[Any]:
    parts = [(torch.empty(4, 3).double(), torch.empty(4, 2).double()) for _ in range(2)]
    for inputs, targets in make_data():
        for (x, y), a, b in zip(parts, inputs.chunk(2), targets.chunk(2), strict=True):
            x.copy_(a)
            y.copy_(b)
        yield parts


def refilled_in_turns(count: int, by_numpy: bool) -> Iterator[Any]:
    """Several batches of memory, as loaders that copy ahead have them."""
    buffers = [[torch.empty_like(part) for part in make_data()[0]] for _ in range(count)]
    for number, batch in enumerate(make_data(12)):
        for buffer, part in zip(buffers[number % count], batch, strict=True):
            if by_numpy:
                buffer.numpy()[...] = part.numpy()
            else:
                buffer.copy_(part)
        yield tuple(buffers[number % count])


def take_x(value: Any) -> Any:
    return value["x"] if isinstance(value, dict) else value


@pytest.mark.parametrize("method", ["1f1b", "2bw"])
@pytest.mark.parametrize("loader", [refilled, refilled_targets, refilled_by_numpy, refilled_microbatches])
def test_a_loader_that_refills_its_tensors_is_refused(loader: Any, method: str) -> None:
    model = make_model()
    blocks = [take_x, *model] if loader is refilled_targets else model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pipeline = pipeline_of_model(blocks, method=method)
    with pytest.raises(DataError, match=r"(?s)batch 0 was written into.*x\.clone\(\)"):
        list(pipeline.run(loader()))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def train_on_buffers(group: Any, method: str, count: int, by_numpy: bool) -> tuple[str, dict[str, Tensor]]:
    """What is said, and the weights of the stages here."""
    pipeline = pipeline_of_model(make_model(), method=method, group=penstock.Group(group, 2.0))
    try:
        list(pipeline.run(refilled_in_turns(count, by_numpy)))
    except (penstock.PenstockError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", {}
    return "", {name: tensor.clone() for name, tensor in pipeline.state_dict().items()}


NEEDED = {"stash:in_flight=7/1": 5}  # buffers: batches that are read at a time, one of them ahead
ENDLESS = ["2bw", "stash", "newest", "stash:in_flight=7/1"]


@pytest.mark.parametrize(
    ("method", "count", "ranks"),
    [(method, count, 0) for method in ("1f1b", *ENDLESS) for count in (2, 3, 4, 5)]
    + [("1f1b", 2, 2), ("2bw", 3, 2), ("newest", 4, 2), ("stash:in_flight=7/1", 4, 2)],
)
def test_several_buffers_in_turns_are_refused_or_are_enough(pool: Pool, method: str, count: int, ranks: int) -> None:
    """Never silently: by numpy, so that autograd notices nothing; where batches overlap their memory is read longer."""
    if ranks:
        found = pool.submit(train_on_buffers, method, count, True, ranks=ranks, fresh=True)
    else:
        found = [train_on_buffers(None, method, count, True)]
    said = [text for text, _ in found]
    further = ranks > 0 and method in ENDLESS  # the last rank reads that much further ahead
    if count < NEEDED.get(method, 3) + further:
        assert any(text.startswith("DataError: batch 0 was written into") for text in said), said
        return
    assert not any(said), said
    whole = pipeline_of_model(make_model(), method=method)
    list(whole.run(make_data(12)))
    weights = {name: tensor for _, state in found for name, tensor in state.items()}
    assert all(torch.equal(tensor, weights[name]) for name, tensor in whole.state_dict().items())


def test_an_evaluation_refuses_one_too() -> None:
    with pytest.raises(DataError, match=r"batch 0 was written into"):
        pipeline_of_model(make_model()).evaluate(refilled())


def test_copies_of_what_a_loader_refills_are_fine() -> None:
    pipeline, plain = pipeline_of_model(make_model()), PlainTraining(make_model())
    list(pipeline.run((x.clone(), y.clone()) for x, y in refilled_by_numpy()))
    plain.run(make_data())
    assert_close_weights(pipeline.state_dict(), dict(plain.model.state_dict()))


@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_a_loader_may_clear_and_refill_its_lists(method: str) -> None:
    """Of microbatches, and inside of them: the tensors are new."""

    def loader() -> Iterator[Any]:
        parts: list[Any] = []
        inside: list[list[Tensor]] = [[], []]
        for inputs, targets in make_data():
            parts.clear()
            for held, x, y in zip(inside, inputs.chunk(2), targets.chunk(2), strict=True):
                held[:] = [x]
                parts.append((held, y))
            yield parts

    pipeline = pipeline_of_model([lambda value: value[0], *make_model()], method=method)
    list(pipeline.run(loader()))
    plain = PlainTraining(make_model(), delay=int(method == "2bw"))
    plain.run(make_data())
    found = {f"{int(name[0]) - 1}{name[1:]}": tensor for name, tensor in pipeline.state_dict().items()}
    assert_close_weights(found, dict(plain.model.state_dict()))


def test_the_same_batch_again_and_again_is_fine() -> None:
    pipeline, plain = pipeline_of_model(make_model()), PlainTraining(make_model())
    batch = make_data()[0]
    list(pipeline.run([batch] * 5))
    plain.run([batch] * 5)
    assert_close_weights(pipeline.state_dict(), dict(plain.model.state_dict()))
