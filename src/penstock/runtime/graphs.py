"""The graphs of a stage: made by its forwards, kept until their backwards or made again for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.runtime.parcel import detached
from penstock.runtime.randomness import Draw
from penstock.runtime.recompute import Keeper, Kept
from penstock.runtime.saved import SavedBytes, signature
from penstock.runtime.stage import Graph, Stage, edges_of, open_inputs, trained_leaves
from penstock.weights.buffers import Handle


@dataclass(frozen=True)
class Loss:
    """Loss sum and weight of one microbatch."""

    total: float
    weight: float


class Microbatch(NamedTuple):
    """What a pass works on.

    Attributes:
        k: its number in the span.
        draw: what its random numbers depend on.
        target: what the loss compares with, on the last stage.
        scale: S, which its backward multiplies the loss by.
    """

    k: int
    draw: Draw
    target: Any = None
    scale: float = 1.0


class Result(NamedTuple):
    """What some blocks have made."""

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
        hold: told how many bytes of activations begin to live, or (negative) cease to.
    """

    def __init__(
        self,
        stage: Stage,
        storages: Collection[int],
        divisor: float,
        parts: Sequence[Sequence[str]],
        hold: Callable[[int], None],
    ) -> None:
        self.hold = hold
        self._stage, self._divisor, self._parts = stage, divisor, parts
        self._trained = bool(storages)
        self._keeper = Keeper(stage.blocks, stage.where)
        # Memory that lives anyway, to tell it from activations.
        self._known = {*storages, *(t.untyped_storage().data_ptr() for t in stage.fixed)}
        self._saved: dict[tuple[object, ...], int] = {}  # bytes that graphs hold, by blocks and shapes

    def make(
        self, microbatch: Microbatch, value: Any, wants: tuple[bool, ...], handle: Handle | None
    ) -> tuple[list[Graph | Kept], Result]:
        """Run the blocks; returns what a backward goes through, first things first, and what came of them."""
        if self._parts:
            return self._run_in_parts(microbatch, value, wants, handle)
        result = self._build(tuple(self._stage.blocks), microbatch, value, wants, handle)
        return [result.graph], result

    def remake(self, kept: Kept, microbatch: Microbatch, handle: Handle | None) -> Graph:
        """The graph of a part again: the same random numbers, the buffers as they were, and left as they are."""
        with torch.enable_grad(), self._keeper.as_it_was(kept):
            graph = self._build(kept.names, microbatch, kept.value, kept.wants, handle).graph
        self.hold(-kept.nbytes)
        return graph

    def evaluate(self, microbatch: Microbatch, value: Any) -> tuple[Any, Loss | None]:
        """Run the blocks and keep nothing."""
        output, _, loss = self._compute(tuple(self._stage.blocks), microbatch, value)
        return output, loss

    def _run_in_parts(
        self, microbatch: Microbatch, value: Any, wants: tuple[bool, ...], handle: Handle | None
    ) -> tuple[list[Graph | Kept], Result]:
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
    ) -> tuple[Kept, Result]:
        kept = self._keeper.keep(names, value, wants, self._known)
        result = self._build(names, microbatch, value, wants, handle)
        self._keeper.settle(kept)
        self.hold(kept.nbytes - result.graph.nbytes)
        return kept, result

    def _build(
        self, names: Sequence[str], microbatch: Microbatch, value: Any, wants: tuple[bool, ...], handle: Handle | None
    ) -> Result:
        """Run a part of the stage and keep its graph."""
        value, opened, leaves = open_inputs(value, wants)
        key = (tuple(names), signature((value, microbatch.target)))
        counter = None if key in self._saved else SavedBytes(self._known)
        if counter is None:
            output, total, loss = self._compute(names, microbatch, value)
        else:
            with counter:
                output, total, loss = self._compute(names, microbatch, value)
            counter.add(opened.values())
            self._saved[key] = counter.total
            self._check_owned(output if total is None else total, handle, opened)
        edges = edges_of(output if total is None else total)
        if total is not None and edges == [None] and (opened or self._trained):
            raise ConfigError(
                f"{self._stage.where}: the loss has no graph, so nothing would be learnt; it was detached, or made "
                "under torch.no_grad()"
            )
        seed = None
        if total is not None:
            seed = torch.ones_like(total.detach()) / self._divisor * microbatch.scale
        self.hold(self._saved[key])
        return Result(Graph(opened, leaves, edges, seed, self._saved[key]), output, loss)

    def _compute(
        self, names: Sequence[str], microbatch: Microbatch, value: Any
    ) -> tuple[Any, Tensor | None, Loss | None]:
        try:
            output = self._stage.run(names, value, microbatch.draw)
        except RuntimeError as error:
            if "a leaf Variable that requires grad" in str(error):
                raise ConfigError(
                    f"{self._stage.where}: a block writes in place into what the stage received, or into a parameter; "
                    "let it make a new tensor (inplace=False), or cut the model elsewhere"
                ) from error
            raise
        if not self._stage.has_loss or names[-1] != self._stage.last:
            return output, None, None
        total, weight = self._stage.evaluate_loss(output, microbatch.target, microbatch.draw)
        if total.dtype in (torch.bfloat16, torch.float16):
            total = total.float()  # S / c may be out of its range on the way
        return None, total, Loss(float(total.detach()), weight)

    def _check_owned(self, result: Any, handle: Handle | None, opened: dict[int, Tensor]) -> None:
        """Make sure that whatever would gather a gradient is stepped by somebody."""
        known = {id(t) for t in (*opened.values(), *(handle.buffer.leaves.values() if handle is not None else ()))}
        foreign = next((t for t in trained_leaves(result) if id(t) not in known), None)
        if foreign is not None:
            raise ConfigError(
                f"{self._stage.where}: a block or the loss trains a tensor of shape {tuple(foreign.shape)} that "
                "belongs to no module among the blocks, so no optimizer would ever step it; pass the module that owns "
                "it as a block (not one of its methods), or detach it"
            )
