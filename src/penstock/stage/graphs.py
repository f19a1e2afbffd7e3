"""The graphs of a stage: made by its forwards, kept until their backwards or made again for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.comm.p2p.message import detached
from penstock.errors import ConfigError
from penstock.partition.sequence_slices import storages
from penstock.schedule.proof.in_flight import Piece
from penstock.stage.autograd.activation_offload import Parking
from penstock.stage.autograd.recompute import BufferPlace, Keeper, Kept
from penstock.stage.autograd.saved_bytes import SavedBytes, signature
from penstock.stage.autograd.split_backward import Splitting, StandIns
from penstock.stage.in_flight import Microbatch
from penstock.stage.module import Graph, StageModule, edges_of, open_inputs, trained_leaves
from penstock.stage.weight_reads import Reading
from penstock.weights.memory.buffers import Handle, Readable


@dataclass(frozen=True)
class Loss:
    """Loss sum and weight of one microbatch."""

    total: float
    weight: float


class BlockOutput(NamedTuple):
    """What some blocks have made; the output of a slice is a pair, with what is carried on."""

    graph: Graph
    output: Any
    loss: Loss | None


class Graphs:
    """Runs the blocks of one stage.

    Args:
        stage: with the weights that it is to read bound to its modules, whenever this runs.
        storages: addresses of the memory of its weights.
        divisor: c; backward runs on the loss sum divided by it.
        parts: names of the blocks that are recomputed together; empty where graphs are kept from forward to backward.
        splits: whether the backward of a microbatch (or slice) comes in two halves
            (`penstock.stage.autograd.split_backward`).
        parks: what graphs keep may be moved away for a while (`penstock.stage.autograd.activation_offload`).
        hold: told how many bytes of activations begin to live, or (negative) cease to.
        reading: how its passes find their weights.
        keeps_inputs: of forwards that are run again; else these come again.
    """

    def __init__(
        self,
        module: StageModule,
        storages: Collection[int],
        divisor: float,
        parts: Sequence[Sequence[str]],
        splits: Callable[[Piece], bool],
        parks: bool,
        hold: Callable[[int], None],
        reading: Reading,
        keeps_inputs: bool = True,
    ) -> None:
        self.hold, self._reading = hold, reading
        self._module, self._divisor, self._parts = module, divisor, parts
        self._splits, self._parks = splits, parks
        self._trained = bool(storages)
        self._keeper = Keeper(module.blocks, module.where, keeps_inputs)
        # Memory that lives anyway, to tell it from activations.
        self._known = {*storages, *(t.untyped_storage().data_ptr() for t in module.fixed)}
        self._before: Mapping[BufferPlace, Tensor] | None = None  # the buffers, before the first draft
        self._watches: WeakKeyDictionary[Readable, StandIns] = WeakKeyDictionary()
        # Bytes that graphs hold, and those of them that the second half of a backward needs, by blocks and shapes.
        self._saved: dict[tuple[object, ...], tuple[int, int]] = {}

    def make(
        self, microbatch: Microbatch, value: Any, wants: tuple[bool, ...], handle: Handle | None
    ) -> tuple[list[Graph | Kept], BlockOutput]:
        """Run the blocks; returns what a backward goes through, first things first, and what came of them."""
        if self._parts:
            return self._run_in_parts(microbatch, value, wants, handle)
        result = self._build(tuple(self._module.blocks), microbatch, value, wants, handle)
        return [result.graph], result

    def remake(self, kept: Kept, microbatch: Microbatch, handle: Handle | None, value: Any = None) -> BlockOutput:
        """A part again: the same random numbers, the buffers as they were, and left as they are.

        Args:
            kept: of its forward.
            microbatch: as it was.
            handle: the weights to read.
            value: the input, where it was not kept.
        """
        if not self._keeper.keeps_inputs:
            self._keeper.give(kept, value)
        with torch.enable_grad(), self._keeper.as_it_was(kept):
            result = self._build(kept.names, microbatch, kept.value, kept.wants, handle)
        self.hold(-kept.nbytes)
        return result

    def draft(self) -> None:
        """Before a forward that reads a version not decided on yet: keep what else it changes, the buffers."""
        if self._before is None:
            self._before = {place: tensor.clone() for place, tensor in self._buffers.items()}

    @torch.no_grad()
    def drop_drafts(self, work: Iterable[Graph | Kept]) -> None:
        """What forwards have made on a version that was rejected is of no use, nor what they have changed."""
        for piece in work:
            self.hold(-piece.nbytes)
        present = self._buffers
        for place, tensor in (self._before or {}).items():
            present[place].copy_(tensor)

    def accept_drafts(self) -> None:
        """What forwards have read since `draft` is decided on, or they were dropped."""
        self._before = None

    def park(self, work: Sequence[Graph | Kept], away: bool) -> int:
        """Move what graphs keep to the host's memory, or back; returns how many bytes."""
        host = torch.device("cpu") if away else None
        nbytes = sum(parking.move(host) for parking in _parkings(work))
        self.hold(-nbytes if away else nbytes)
        return nbytes

    def give(self, work: Sequence[Graph | Kept]) -> list[list[Tensor]]:
        """What graphs keep, as bytes, to be sent to another rank."""
        given = [parking.give() for parking in _parkings(work)]
        self.hold(-sum(tensor.nbytes for tensors in given for tensor in tensors))
        return given

    def take(self, work: Sequence[Graph | Kept], given: list[list[Tensor]]) -> None:
        """The same back."""
        for parking, tensors in zip(_parkings(work), given, strict=True):
            parking.take(tensors)
        self.hold(sum(tensor.nbytes for tensors in given for tensor in tensors))

    @property
    def _buffers(self) -> dict[BufferPlace, Tensor]:
        """Those of the modules."""
        return self._keeper.buffers(tuple(self._module.blocks))

    def evaluate(self, microbatch: Microbatch, value: Any) -> tuple[Any, Loss | None]:
        """Run the blocks and keep nothing."""
        output, _, loss = self._compute(tuple(self._module.blocks), microbatch, value)
        return output, loss

    def _run_in_parts(
        self, microbatch: Microbatch, value: Any, wants: tuple[bool, ...], handle: Handle | None
    ) -> tuple[list[Graph | Kept], BlockOutput]:
        """Run part by part and keep the input of each, not its graph."""
        work: list[Graph | Kept] = []
        *before, last = self._parts
        for names in before:
            kept, result = self._run_part(names, microbatch, value, wants, handle)
            work.append(kept)
            value, wants = detached(result.output)
            del result  # or its graph would live while the next one is made
        kept, result = self._run_part(last, microbatch, value, wants, handle)
        return [*work, kept], result

    def _run_part(
        self, names: Sequence[str], microbatch: Microbatch, value: Any, wants: tuple[bool, ...], handle: Handle | None
    ) -> tuple[Kept, BlockOutput]:
        kept = self._keeper.keep(names, value, wants, self._known)
        result = self._build(names, microbatch, value, wants, handle)
        self._keeper.settle(kept)
        self.hold(kept.nbytes - result.graph.nbytes)
        return kept, result

    def _build(
        self, names: Sequence[str], microbatch: Microbatch, value: Any, wants: tuple[bool, ...], handle: Handle | None
    ) -> BlockOutput:
        """Run a part of the stage and keep its graph."""
        carried = storages((value[1], ())) if microbatch.piece else set()  # they count where they were made
        value, opened, leaves = open_inputs(value, wants)
        splits = handle is not None and self._splits(microbatch.key)
        key = (tuple(names), splits, signature((value, microbatch.target)))
        parking = Parking(self._known | carried) if self._parks else None
        looking_up = None if handle is None else self._reading.saved(self._known | carried, handle)
        counter = looking_up or parking
        if counter is None and key not in self._saved:
            counter = SavedBytes(self._known | carried)
        splitting = None
        if splits and handle is not None:
            watch = self._watches.get(handle.buffer)
            if watch is None:
                watch = self._watches[handle.buffer] = StandIns(handle.buffer.leaves)
            self._module.bind(watch.tensors)
            splitting = Splitting(watch, counter, moves=self._parks)
        with counter or nullcontext(), splitting or nullcontext():
            output, total, loss = self._compute(names, microbatch, value)
        ends = output if total is None else (total, output[1]) if microbatch.piece else total
        if counter is not None:
            counter.add(opened.values())
            counter.add(pytree.tree_leaves(output[1]) if microbatch.piece else ())
            known = key in self._saved
            self._saved[key] = counter.total, counter.late
            gates = [] if splitting is None else [splitting.gate]
            if not known:
                self._check_owned(ends, handle, [*opened.values(), *gates])
        edges = edges_of(ends)
        if total is not None and edges[0] is None and (opened or self._trained):
            raise ConfigError(
                f"{self._module.where}: the loss has no graph, so nothing would be learnt; it was detached, or made "
                "under torch.no_grad()"
            )
        seed = None
        if total is not None:
            seed = torch.ones_like(total.detach()) / self._divisor * microbatch.scale
        nbytes, late_nbytes = self._saved[key]
        self.hold(nbytes)
        late = None if splitting is None else splitting.late
        if parking is not None:
            parking.stay([*opened.values(), *pytree.tree_leaves((value, microbatch.target))])  # others have them anyway
        return BlockOutput(Graph(opened, leaves, edges, seed, nbytes, late, late_nbytes, parking), output, loss)

    def _compute(
        self, names: Sequence[str], microbatch: Microbatch, value: Any
    ) -> tuple[Any, Tensor | None, Loss | None]:
        """The output, and where there is one the loss; with slices the output is a pair, with what is carried on."""
        try:
            if microbatch.piece:
                x, carry = value
                output: Any = self._module.run_slice(names, x, carry, microbatch.draw)
            else:
                output = self._module.run(names, value, microbatch.draw)
        except RuntimeError as error:
            if "a leaf Variable that requires grad" in str(error):
                raise ConfigError(
                    f"{self._module.where}: a block writes in place into what the stage received, or into a parameter; "
                    "let it make a new tensor (inplace=False), or stage the model elsewhere"
                ) from error
            raise
        if not self._module.has_loss or names[-1] != self._module.last:
            return output, None, None
        result = output[0] if microbatch.piece else output
        total, weight = self._module.evaluate_loss(result, microbatch.target, microbatch.draw, bool(microbatch.piece))
        if total.dtype in (torch.bfloat16, torch.float16):
            total = total.float()  # S / c may be out of its range on the way
        kept = result if self._module.hands_on else None
        return (kept, output[1]) if microbatch.piece else kept, total, Loss(float(total.detach()), weight)

    def _check_owned(self, result: Any, handle: Handle | None, opened: Collection[Tensor]) -> None:
        """Make sure that whatever would gather a gradient is stepped by somebody."""
        known = {id(t) for t in (*opened, *(handle.buffer.leaves.values() if handle is not None else ()))}
        foreign = next((t for t in trained_leaves(result) if id(t) not in known), None)
        if foreign is not None:
            raise ConfigError(
                f"{self._module.where}: a block or the loss trains a tensor of shape {tuple(foreign.shape)} that "
                "belongs to no module among the blocks, so no optimizer would ever step it; pass the module that owns "
                "it as a block (not one of its methods), or detach it"
            )
        if handle is not None:
            self._reading.check(result, handle.buffer.leaves.values())


def _parkings(work: Sequence[Graph | Kept]) -> list[Parking]:
    return [piece.parking for piece in work if isinstance(piece, Graph) and piece.parking is not None]
