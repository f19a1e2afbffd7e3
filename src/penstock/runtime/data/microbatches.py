"""Splits the batches that a loader yields into microbatches."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence, Sized
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, default_collate

from penstock.comm.message.tree_classes import open_dataclasses
from penstock.errors import DataError

Microbatches = Sequence[tuple[Any, Any]]
_TARGETS = ("labels", "label", "targets", "target", "y")  # what people call them in a dict


def microbatches_of(batch: Any, count: int, number: int) -> Microbatches:
    """Return the microbatches of a batch: as they are given, or a whole batch split along the first dimension.

    A tuple of two, or a list of two that are not both pairs, is a whole batch (inputs, targets), as a DataLoader yields
    it. Its parts differ by one sample at most, the larger ones first; what is no tensor goes to every microbatch, but
    for lists of texts with one for each sample, which are divided as well. Any other sequence is one of microbatches. A
    list of two pairs could be either: it is taken as two microbatches if both are tuples, and refused otherwise,
    whatever the number of microbatches.

    Args:
        batch: as the loader yields it.
        count: of microbatches.
        number: of the batch in the run, for messages.

    Raises:
        DataError: the batch is neither, or could be both, or has too few samples, or tensors of several lengths.
    """
    if not isinstance(batch, Sequence) or isinstance(batch, str):
        raise DataError(_no_batch(batch, count, number))
    if _is_pair(batch):
        if isinstance(batch, tuple) or not all(map(_is_pair, batch)):
            return _split(batch, count, number)
        if not all(type(pair) is tuple for pair in batch):
            raise DataError(_either(number))
    if isinstance(batch, tuple | list) and any(isinstance(part, Tensor) for part in batch):
        raise DataError(_several_tensors(batch, number))
    return batch


def joined_outputs(parts: Sequence[Any]) -> Any:
    """Return the outputs for the microbatches of a batch as one: tensors of samples one behind the other.

    Those of one number are stacked; of what is no tensor the first one counts.
    """

    def one(*each: Any) -> Any:
        return (torch.cat if each[0].dim() else torch.stack)(each) if isinstance(each[0], Tensor) else each[0]

    return pytree.tree_map(one, *parts)


def warn_of_short_end(batches: Any, count: int) -> None:
    """Warn if the last batch of a DataLoader will have too few samples, before those before it are trained on."""
    if not isinstance(batches, DataLoader) or not batches.batch_size or batches.drop_last:
        return
    if batches.collate_fn is not default_collate or not isinstance(batches.sampler, Sized):
        return  # what it makes of samples, or how many there are, is not known
    whole, left = divmod(len(batches.sampler), batches.batch_size)
    if 0 < left < count:
        warnings.warn(
            f"the last batch of the DataLoader will have {left} samples, too few for {count} microbatches, which ends "
            f"the run with a DataError after the {whole} before it; drop_last=True leaves it out",
            stacklevel=3,
        )


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _split(batch: Sequence[Any], count: int, number: int) -> Microbatches:
    open_dataclasses(tuple(batch))
    leaves, spec = pytree.tree_flatten(tuple(batch), is_leaf=_is_texts)
    shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    samples = {shape[0] for shape in shapes}
    if not samples:
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves}))
        raise DataError(f"batch {number} has no tensor that could be split, only {kinds}; make tensors of its parts")
    if type(batch[0]) is int:
        raise DataError(
            f"batch {number} has no tensor as inputs, but {batch[0]}; leave enumerate out, as reports have a number "
            "(report.batch)"
        )
    if len(samples) > 1:
        raise DataError(
            f"batch {number} cannot be split into {count} microbatches: its tensors have shapes "
            f"{', '.join(map(str, shapes))}, so not as many samples each; give all of them one first dimension (a "
            "DataLoader makes batches of the samples of a Dataset), or the microbatches themselves, as a list of pairs"
        )
    if min(samples) < count:
        raise DataError(
            f"batch {number} has {min(samples)} samples, too few for {count} microbatches; use larger "
            "batches, and drop_last=True in the DataLoader where the last batch is short"
        )
    parts = [_divided(leaf, count, min(samples)) for leaf in leaves]
    return [pytree.tree_unflatten([part[k] for part in parts], spec) for k in range(count)]


def _divided(leaf: Any, count: int, samples: int) -> Sequence[Any]:
    """Return the parts of a tensor, or of a list of texts that has one for each sample; other values for every part."""
    if isinstance(leaf, Tensor) and leaf.dim():
        return torch.tensor_split(leaf, count)
    if _is_texts(leaf) and len(leaf) == samples:
        ends = accumulate(samples // count + (k < samples % count) for k in range(count))
        return [leaf[begin:end] for begin, end in pairwise([0, *ends])]
    return [leaf] * count


def _is_texts(value: Any) -> bool:
    """Return whether a value is a list of texts, as a DataLoader makes it of those of samples."""
    return type(value) is list and bool(value) and all(isinstance(each, str | bytes) for each in value)


def _either(number: int) -> str:
    """What to say of a list of two pairs, as torch collates samples of two pairs, or as two batches of a loader."""
    return (
        f"batch {number} is a list of two pairs, which could be a whole batch (inputs, targets) of pairs, or two "
        "microbatches (input, target). A whole batch is a tuple:\n    batches = (tuple(batch) for batch in loader)\n"
        "and microbatches are tuples:\n    batches = ([tuple(pair) for pair in batch] for batch in loader)"
    )


def _no_batch(batch: Any, count: int, number: int) -> str:
    """What to say of something that is no batch."""
    takes = (
        f"a batch is a pair (inputs, targets) of tensors, as a DataLoader yields it, or a list of "
        f"{count} {'microbatch' if count == 1 else 'microbatches'}, each a pair (input, target)"
    )
    if isinstance(batch, Mapping) and len(batch) > 1:
        keys = list(batch)
        target = next((key for key in _TARGETS if key in keys), keys[-1])
        rest = [key for key in keys if key != target]
        tokens = next((key for key in rest if key == "input_ids"), rest[0])
        only = len(rest) == 1 or tokens == "input_ids"
        inputs = f"batch[{tokens!r}]" if only else f"{{key: batch[key] for key in {rest!r}}}"
        takes += (
            f". Make pairs of its parts:\n    batches = (({inputs}, batch[{target!r}]) for batch in loader)\n"
            "    for report in pipeline.run(batches): ..."
        )
        if only and len(rest) > 1:
            left = ", ".join(repr(key) for key in rest if key != tokens)
            takes += (
                f"\nA whole model of transformers takes tokens alone. Blocks of your own may take {left}, too, as a "
                "dict of inputs. Padding at the end needs no mask under causal attention, if its targets are -100."
            )
    if isinstance(batch, Tensor):
        takes += ". For a single batch: pipeline.run([(inputs, targets)])"
    return f"batch {number} is a {type(batch).__name__}; {takes}"


def _several_tensors(batch: Sequence[Any], number: int) -> str:
    """What to say of tensors that are not two."""
    said = f"batch {number} has {len(batch)} parts; a batch is a pair (inputs, targets)"
    if len(batch) == 1:
        return f"{said}. What is the loss compared with? TensorDataset(inputs, targets) yields pairs"
    names = ", ".join("abcdefgh"[: len(batch) - 1]) if len(batch) < 9 else "*inputs"
    return (
        f"{said}, either of which may be a tuple:\n    batches = ((({names}), target) for {names}, target in loader)\n"
        "    for report in pipeline.run(batches): ..."
    )
