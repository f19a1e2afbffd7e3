"""Splits the batches that a loader yields into microbatches."""

from __future__ import annotations

import dataclasses
import numbers
from collections import Counter
from collections.abc import Mapping, Sequence, Sized
from enum import Enum
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.comm.p2p.trees import Whole, is_marked, open_dataclasses
from penstock.errors import DataError
from penstock.options.parallelism import Dims

Microbatches = Sequence[tuple[Any, Any]]
LABELS = "labels"  # the part of a batch that collators make for the loss
_TARGETS = ("label", "targets", "target", "y")  # what else people call it
_SETTINGS = (type(None), str, bytes, numbers.Number, Enum, torch.dtype, torch.device)  # which samples have in common


def in_pairs(batch: Any) -> Any:
    """Return a batch with its labels by itself, where a collator has made a dict of it; others as they are.

    A dict, a BatchEncoding, a dataclass or a named tuple that has `labels` is a pair (the rest as a dict, labels); a
    list of such ones is a list of pairs. Mappings within become dicts, whose parts can be split.
    """
    if type(batch) in (list, tuple):
        if all(isinstance(part, Tensor) for part in batch):
            return batch
    elif not isinstance(batch, Mapping | tuple) and not dataclasses.is_dataclass(batch):
        return batch
    open_dataclasses(batch)
    batch = pytree.tree_map(lambda leaf: dict(leaf) if isinstance(leaf, Mapping) else leaf, batch, is_leaf=is_marked)
    if type(batch) is list and batch and all(LABELS in _fields(part) for part in batch):
        return [_labelled(part) for part in batch]
    return _labelled(batch)


def _fields(batch: Any) -> dict[str, Any]:
    """Return the parts of a dict, a dataclass or a named tuple by name; none of anything else."""
    if isinstance(batch, Mapping):
        return dict(batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return batch._asdict() if isinstance(batch, tuple) and hasattr(batch, "_asdict") else {}


def _labelled(batch: Any) -> Any:
    parts = _fields(batch)
    if LABELS not in parts or len(parts) < 2:
        return batch
    return {name: part for name, part in parts.items() if name != LABELS}, parts[LABELS]


def microbatches_of(batch: Any, count: int, number: int, dims: Dims = 0, *, fewer: bool = False) -> Microbatches:
    """Return the microbatches of a batch: as they are given, or a whole batch split along the dimension of samples.

    A tuple of two, or a list of two that are not both pairs, is a whole batch (inputs, targets), as a DataLoader yields
    it. Its parts differ by one sample at most, the larger ones first. Tensors and arrays are divided, BlockMasks, and
    lists without tensors that have one value for each sample; numbers, texts, None and tensors without a dimension go
    to every microbatch, and so does what is marked as `Whole`, or by `dims`. Any other sequence is one of microbatches.
    A list of two pairs could be either: it is taken as two microbatches if both are tuples, and refused otherwise,
    whatever the number of microbatches.

    Args:
        batch: as `in_pairs` returns it.
        count: of microbatches.
        number: of the batch in the run, for messages.
        dims: of samples (`penstock.options.parallelism.Microbatches`).
        fewer: a whole batch may have fewer samples, and then has as many microbatches.

    Raises:
        DataError: the batch is neither, or could be both, or has too few samples, or parts of several lengths.
    """
    if not isinstance(batch, Sequence) or isinstance(batch, str):
        raise DataError(_no_batch(batch, count, number))
    if _is_pair(batch):
        if isinstance(batch, tuple) or not all(map(_is_pair, batch)):
            return _split(batch, count, number, dims, fewer)
        if not all(type(pair) is tuple for pair in batch):
            raise DataError(_either(number))
    if isinstance(batch, tuple | list) and any(isinstance(part, Tensor) for part in batch):
        raise DataError(_several_tensors(batch, number))
    return batch


def joined_outputs(parts: Sequence[Any], dims: Dims = 0) -> Any:
    """Return the outputs for the microbatches of a batch as one: tensors of samples one behind the other.

    Those of one number are stacked; of what is no tensor the first one counts. Samples are along the dimension that
    `dims` says of targets.
    """
    said = dims.get("targets", 0) if isinstance(dims, Mapping) else dims

    def one(*each: Any) -> Any:
        if not isinstance(each[0], Tensor):
            return each[0]
        return torch.cat(each, said if said and said < each[0].dim() else 0) if each[0].dim() else torch.stack(each)

    return pytree.tree_map(one, *parts)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _split(batch: Sequence[Any], count: int, number: int, dims: Dims, fewer: bool) -> Microbatches:
    leaves, places, spec = _located(batch, dims, number)
    sizes = {
        name: leaves[name].shape[dim] for name, dim in places.items() if dim is not None and _is_tensor(leaves[name])
    }
    if not sizes:
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves.values()}))
        raise DataError(f"batch {number} has no tensor that could be split, only {kinds}; make tensors of its parts")
    if type(batch[0]) is int:
        raise DataError(
            f"batch {number} has no tensor as inputs, but {batch[0]}; leave enumerate out, as reports have a number "
            "(report.batch)"
        )
    samples, _ = Counter(sizes.values()).most_common(1)[0]
    odd = next((name for name, size in reversed(sizes.items()) if size != samples), None)
    if odd is not None:
        shapes = ", ".join(f"{name} {tuple(leaves[name].shape)}" for name in sizes)
        raise DataError(
            f"batch {number} cannot be split into {count} microbatches: its tensors have shapes {shapes}, so not as "
            f"many samples each. {_say_whole(odd)}. Microbatches of your own are a list of pairs"
        )
    least = 1 if fewer else count
    if samples < least:
        raise DataError(
            f"batch {number} has {samples} samples, too few for {least} microbatches; use larger "
            "batches, and drop_last=True in the DataLoader where the last batch is short"
        )
    count = min(samples, count)
    ends = [0, *accumulate(samples // count + (k < samples % count) for k in range(count))]
    parts = []
    for name, leaf in leaves.items():
        divided = _divided(leaf, places[name], ends)
        if divided is None:
            what = f"{leaf.layout} tensor" if isinstance(leaf, Tensor) else type(leaf).__name__
            what += f" of {len(leaf)}" if isinstance(leaf, Sized) else ""
            raise DataError(
                f"batch {number} has tensors of {samples} samples, beside which {name}, a {what}, cannot be split. "
                f"{_say_whole(name)}"
            )
        if name.startswith("targets"):  # the loss has to know
            divided = [_mark(part, places[name]) for part in divided]
        parts.append(divided)
    trees = [pytree.tree_unflatten([part[k] for part in parts], spec) for k in range(count)]
    return [(tree["inputs"], tree["targets"]) for tree in trees]


def marked(pair: Sequence[Any], dims: Dims, number: int) -> tuple[Any, Any]:
    """Return a microbatch as a loader has made it, with marks at the targets whose samples are elsewhere."""
    leaves, places, spec = _located(pair, dims, number)
    tree = pytree.tree_unflatten([_mark(leaf, places[name]) for name, leaf in leaves.items()], spec)
    return pair[0], tree["targets"]


def _mark(leaf: Any, dim: int | None) -> Any:
    return Whole(leaf, dim) if isinstance(leaf, Tensor) and leaf.dim() and dim != 0 else leaf


def _located(pair: Sequence[Any], dims: Dims, number: int) -> tuple[dict[str, Any], dict[str, int | None], Any]:
    """Return the parts of a pair by name, the dimension of samples of each, and how to put them together."""
    open_dataclasses(tuple(pair))
    tree = dict(zip(("inputs", "targets"), pair, strict=True))
    found, spec = pytree.tree_flatten_with_path(tree, is_leaf=_is_leaf)
    leaves = {_name(path): leaf for path, leaf in found}
    said = _named(leaves, dims, number)
    return leaves, {name: _dim(leaves[name], name, said[name], number) for name in leaves}, spec


def _divided(leaf: Any, dim: int | None, ends: Sequence[int]) -> Sequence[Any] | None:
    """Return the parts of a leaf, from each end to the next one; None if it has other lengths, or cannot be split."""
    count, samples = len(ends) - 1, ends[-1]
    if dim is None:
        return [_mark(leaf, None)] * count
    if isinstance(leaf, Tensor):
        return torch.tensor_split(leaf, count, dim) if leaf.layout is torch.strided else None
    if type(leaf).__name__ == "BlockMask":
        if leaf.shape[0] == 1:  # for all samples alike
            return [leaf] * count
        return [_block_mask(leaf, *part) for part in pairwise(ends)] if leaf.shape[0] == samples else None
    if hasattr(leaf, "__array__") and leaf.shape[dim] == samples:
        return [leaf[(slice(None),) * dim + (slice(*part),)] for part in pairwise(ends)]
    if isinstance(leaf, list | tuple) and len(leaf) == samples:
        return [leaf[begin:end] for begin, end in pairwise(ends)]
    return None


def _block_mask(mask: Any, begin: int, end: int) -> Any:
    """Return the mask of some samples, whose function gets their numbers in the batch."""
    part, of_batch = mask[begin:end], mask.mask_mod
    part.mask_mod = lambda b, h, q, kv: of_batch(b + begin, h, q, kv)
    return part


def _is_leaf(value: Any) -> bool:
    """Whether a part is divided as one: a mark, or a list without tensors, as a DataLoader makes it of texts."""
    if type(value) not in (list, tuple):
        return is_marked(value)
    leaves = [leaf for leaf in pytree.tree_leaves(value, is_leaf=is_marked) if leaf is not None]
    return bool(leaves) and not any(
        is_marked(leaf) or hasattr(leaf, "__array__") or type(leaf).__name__ == "BlockMask" for leaf in leaves
    )


def _name(path: Sequence[Any]) -> str:
    """Return the name of a part: "inputs" or "targets", then keys of dicts, fields and places."""
    return ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)


def _named(leaves: Mapping[str, Any], dims: Dims, number: int) -> dict[str, int | None]:
    """Return the dimensions of samples that are said of leaves; the first one if nothing is."""
    if not isinstance(dims, Mapping):
        return dict.fromkeys(leaves, dims)
    said: dict[str, int | None] = dict.fromkeys(leaves, 0)
    for key in sorted(dims, key=lambda key: key.count(".")):  # the longest one is the last
        inside = [name for name in leaves if f".{key}." in f".{name}."]
        if not inside:
            raise DataError(f"batch {number} has no {key!r}, which dims names; it has {', '.join(leaves)}")
        said |= dict.fromkeys(inside, dims[key])
    return said


def _dim(leaf: Any, name: str, said: int | None, number: int) -> int | None:
    """Return the dimension of samples of a leaf; None if it goes whole to every microbatch."""
    shape = getattr(leaf, "shape", None) if isinstance(leaf, Tensor) or hasattr(leaf, "__array__") else None
    if said is None or is_marked(leaf) or isinstance(leaf, _SETTINGS) or shape == ():
        return None
    if shape is not None and said >= len(shape):
        raise DataError(
            f"batch {number}: {name} has shape {tuple(shape)}, so no dimension {said}; say where its samples are, and "
            f"where those of others, such as dims={{'inputs': {said}, {name!r}: 0}}"
        )
    return said if shape is not None else 0


def _say_whole(name: str) -> str:
    return (
        f"If {name} belongs to no sample, microbatches=penstock.Microbatches(..., dims={{{name!r}: None}}), or "
        "penstock.Whole(...) around it in the batch, gives it to every microbatch as it is; a number in place of None "
        "is its dimension of samples"
    )


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
        target = next((key for key in _TARGETS if key in batch), list(batch)[-1])
        rest = [key for key in batch if key != target]
        inputs = f"batch[{rest[0]!r}]" if len(rest) == 1 else f"{{key: batch[key] for key in {rest!r}}}"
        takes += (
            ". A dict is taken if it has 'labels', which go to the loss (as they are: it shifts them if it has to). "
            f"Else make pairs of its parts:\n    batches = (({inputs}, batch[{target!r}]) for batch in loader)\n"
            "    for report in pipeline.run(batches): ..."
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
