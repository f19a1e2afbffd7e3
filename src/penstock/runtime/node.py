"""A stage with its weights: what F, R, B and STEP do to tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.runtime.parcel import detached
from penstock.runtime.precision import cast
from penstock.runtime.randomness import Draw
from penstock.runtime.recompute import Keeper, Kept
from penstock.runtime.saved import SavedBytes, signature
from penstock.runtime.stage import Graph, Stage, edges_of, open_inputs, run_backward, trained_leaves
from penstock.runtime.ties import Tie
from penstock.schedule.ir import Node
from penstock.weights.buffers import Buffer, Handle
from penstock.weights.store import VersionStore
from penstock.weights.update import Updater

NO_LEAVES: Mapping[str, Tensor] = MappingProxyType({})


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


@dataclass
class Flight:
    """A microbatch between its forward and its backward on one stage.

    Attributes:
        microbatch: which.
        handle: the weights that its forward read; None where nothing is trained.
        work: what its backward goes through, first things first: a graph, or what graphs are made of again.
    """

    microbatch: Microbatch
    handle: Handle | None
    work: Sequence[Graph | Kept]


class _Result(NamedTuple):
    """What a part of a stage has made."""

    graph: Graph
    output: Any
    loss: Loss | None


@dataclass
class NodeRuntime:
    """One stage at work.

    Attributes:
        store, updater: None where the stage has no trained parameters.
        divisor: c; backward runs on the loss sum divided by it.
        has_loss: whether this is the last stage.
        parts: names of the blocks that are recomputed together; empty where graphs are kept from forward to backward.
        ties: parameters that other stages share.
        average: exponential moving average of the weights; None where none is kept.
        decay: of it: A(t+1) = decay A(t) + (1 - decay) W(t+1) at every update that is made; A(0) = W(0).
        hold: told how many bytes of activations begin to live, or (negative) cease to.
        flights: microbatches between forward and backward, by their number in the span.
        averaged: what evaluations read instead of the newest weights, while they do.
    """

    node: Node
    stage: Stage
    store: VersionStore | None
    updater: Updater | None
    divisor: float
    has_loss: bool
    parts: Sequence[Sequence[str]]
    ties: Sequence[Tie]
    average: Buffer | None
    decay: float
    hold: Callable[[int], None]
    flights: dict[int, Flight] = field(default_factory=dict)
    averaged: Mapping[str, Tensor] | None = None
    _saved: dict[tuple[object, ...], int] = field(default_factory=dict)
    _fixed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Note the memory that lives anyway, to tell it from activations."""
        self._keeper = Keeper(self.stage.blocks, self.stage.where)
        self._fixed = {t.untyped_storage().data_ptr() for t in self.stage.fixed}
        if self.store is not None:
            self._fixed |= self.store.storages

    # --- passes -----------------------------------------------------------------------------------------------------

    def forward(
        self, microbatch: Microbatch, value: Any, wants: tuple[bool, ...], version: int | None
    ) -> tuple[Any, Loss | None]:
        """Run the blocks on a microbatch and keep what its backward needs.

        Args:
            microbatch: which.
            value: the input tree, cut off from other graphs.
            wants: which of its leaves want a gradient; none for the model's own input.
            version: the weights to read.

        Returns:
            The output (still in its graph), or None and the loss on the last stage.
        """
        handle = self._claim(version)
        with self.stage.randomness.apart():
            if not self.parts:
                result = self._build(tuple(self.stage.blocks), microbatch, value, wants, handle)
                work: list[Graph | Kept] = [result.graph]
            else:
                work, result = self._run_in_parts(microbatch, value, wants, handle)
        self.flights[microbatch.k] = Flight(microbatch, handle, work)
        return result.output, result.loss

    @torch.no_grad()
    def evaluate(self, microbatch: Microbatch, value: Any) -> tuple[Any, Loss | None]:
        """Run the blocks on the newest weights, or on their average, and keep nothing."""
        if self.averaged is not None:
            self.stage.bind(self.averaged)
        else:
            self._claim(self.store.newest if self.store is not None else None)
        with self.stage.randomness.apart():
            output, _, loss = self._compute(tuple(self.stage.blocks), microbatch, value)
        return output, loss

    def recompute(self, k: int, version: int | None) -> None:
        """Make the graph of a microbatch again, on the weights that the schedule names."""
        flight = self.flights[k]
        (kept,) = flight.work
        assert isinstance(kept, Kept)
        if flight.handle is not None and version == flight.handle.version:
            flight.handle.check(f"the recomputed forward of microbatch {k} on {self.stage.where}")
        handle = self._claim(version)
        with self.stage.randomness.apart():
            graph = self._rebuild(kept, flight.microbatch, handle)
        self.hold(-kept.nbytes)
        self.flights[k] = Flight(flight.microbatch, handle, [graph])

    def backward(self, k: int, batch: int, gradients: list[Tensor | None] | None) -> list[Tensor | None]:
        """Backward of a microbatch; weight gradients are added to the gradient of `batch`.

        Args:
            k: the microbatch, counted through the span.
            batch: its batch, counted from the start of training.
            gradients: of the output's leaves; None on the last stage.

        Returns:
            The gradients of the input's leaves, None where none is wanted.
        """
        flight = self.flights.pop(k)
        if flight.handle is not None and self.store is not None:
            flight.handle.check(f"the backward of microbatch {k} on {self.stage.where}")
            self.store.accumulate(flight.handle, batch)
            self.stage.bind(flight.handle.buffer.leaves)  # blocks may run their forward again (torch's checkpoint)
        work = list(flight.work)
        del flight.work
        while work:
            piece = work.pop()
            graph = piece
            if isinstance(piece, Kept):
                with self.stage.randomness.apart():
                    graph = self._rebuild(piece, flight.microbatch, flight.handle)
                self.hold(-piece.nbytes)
            assert isinstance(graph, Graph)
            gradients = run_backward(graph, [graph.seed] if gradients is None else gradients)
            self.hold(-graph.nbytes)
        assert gradients is not None
        return gradients

    # --- updates ----------------------------------------------------------------------------------------------------

    def gradient(self, batch: int) -> list[Tensor]:
        """What the backwards of a batch have accumulated, all of them done, as flat tensors."""
        return [] if self.store is None else self.store.gradient(batch).flats

    def gradients_of(self, batch: int, names: Sequence[str]) -> list[Tensor]:
        """The same of some parameters."""
        assert self.store is not None
        views = self.store.gradient(batch).views
        return [views[name] for name in names]

    def gradient_squares(self, batch: int) -> tuple[float, float]:
        """The sum of the squares of the same, but for parameters that count with another stage, and its rounding."""
        if self.store is None:
            return 0.0, 0.0
        elsewhere = {n for tie in self.ties for n in tie.names_at(self.node.cut) if tie.cuts[0] != self.node.cut}
        return self.store.gradient(batch).squares(without=elsewhere)

    def step(self, batch: int, factor: float, keeps_old: bool) -> None:
        """Bear version batch + 1.

        Args:
            batch: counted from the start of training.
            factor: what the accumulated gradient is multiplied by first; zero skips the update.
            keeps_old: version `batch` stays readable, so the new one is written over the gradient.
        """
        if self.store is None or self.updater is None:
            return
        torch.clear_autocast_cache()  # it remembers casts of leaves whose memory changes now
        self.store.update(batch, self.updater, factor, keeps_old)
        if self.average is not None and factor:
            self.average.approach(self.store.master, 1.0 - self.decay)

    def average_leaves(self) -> dict[str, Tensor] | None:
        """The averaged weights as passes read them; None where none are kept."""
        if self.average is None:
            return None
        return {name: cast(view, self.stage.precision) for name, view in self.average.views.items()}

    def bytes_by_role(self) -> dict[str, int]:
        """Bytes of everything parameter-sized but the optimizer."""
        roles = {} if self.store is None else self.store.bytes_by_role()
        return roles if self.average is None else {**roles, "averaged weights": self.average.nbytes}

    def refresh(self) -> None:
        """Take over what has been written into the modules' parameters between two runs."""
        if self.store is not None:
            self.store.refresh()
        self.stage.refresh()

    def restore(self) -> None:
        """Give the modules their own parameters back, over the newest weights."""
        self.stage.restore({} if self.store is None else self.store.newest_tensors())

    # --- graphs -----------------------------------------------------------------------------------------------------

    def _run_in_parts(
        self, microbatch: Microbatch, value: Any, wants: tuple[bool, ...], handle: Handle | None
    ) -> tuple[list[Graph | Kept], _Result]:
        """Run part by part and keep the input of each, not its graph."""
        work: list[Graph | Kept] = []
        *before, last = self.parts
        for names in before:
            kept, result = self._run_part(names, microbatch, value, wants, handle)
            work.append(kept)
            value, wants = detached(result.output)
            del result  # or its graph would live while the next one is made
        kept, result = self._run_part(last, microbatch, value, wants, handle)
        return [*work, kept], result

    def _run_part(
        self, names: Sequence[str], microbatch: Microbatch, value: Any, wants: tuple[bool, ...], handle: Handle | None
    ) -> tuple[Kept, _Result]:
        kept = self._keeper.keep(names, value, wants, self._fixed)
        result = self._build(names, microbatch, value, wants, handle)
        self._keeper.settle(kept)
        self.hold(kept.nbytes - result.graph.nbytes)
        return kept, result

    def _rebuild(self, kept: Kept, microbatch: Microbatch, handle: Handle | None) -> Graph:
        """The graph of a part again: the same random numbers, the buffers as they were, and left as they are."""
        with torch.enable_grad(), self._keeper.as_it_was(kept):
            return self._build(kept.names, microbatch, kept.value, kept.wants, handle).graph

    def _build(
        self, names: Sequence[str], microbatch: Microbatch, value: Any, wants: tuple[bool, ...], handle: Handle | None
    ) -> _Result:
        """Run a part of the stage and keep its graph."""
        value, opened, leaves = open_inputs(value, wants)
        key = (tuple(names), signature((value, microbatch.target)))
        counter = None if key in self._saved else SavedBytes(self._fixed)
        if counter is None:
            output, total, loss = self._compute(names, microbatch, value)
        else:
            with counter:
                output, total, loss = self._compute(names, microbatch, value)
            counter.add(opened.values())
            self._saved[key] = counter.total
            self._check_owned(output if total is None else total, handle, opened)
        edges = edges_of(output if total is None else total)
        if total is not None and edges == [None] and (opened or self.store is not None):
            raise ConfigError(
                f"{self.stage.where}: the loss has no graph, so nothing would be learnt; it was detached, or made "
                "under torch.no_grad()"
            )
        seed = None
        if total is not None:
            seed = torch.ones_like(total.detach()) / self.divisor * microbatch.scale
        self.hold(self._saved[key])
        return _Result(Graph(opened, leaves, edges, seed, self._saved[key]), output, loss)

    def _compute(
        self, names: Sequence[str], microbatch: Microbatch, value: Any
    ) -> tuple[Any, Tensor | None, Loss | None]:
        try:
            output = self.stage.run(names, value, microbatch.draw)
        except RuntimeError as error:
            if "a leaf Variable that requires grad" in str(error):
                raise ConfigError(
                    f"{self.stage.where}: a block writes in place into what the stage received, or into a parameter; "
                    "let it make a new tensor (inplace=False), or cut the model elsewhere"
                ) from error
            raise
        if not self.has_loss or names[-1] != self.stage.last:
            return output, None, None
        total, weight = self.stage.evaluate_loss(output, microbatch.target, microbatch.draw)
        if total.dtype in (torch.bfloat16, torch.float16):
            total = total.float()  # S / c may be out of its range on the way
        return None, total, Loss(float(total.detach()), weight)

    def _check_owned(self, result: Any, handle: Handle | None, opened: dict[int, Tensor]) -> None:
        """Make sure that whatever would gather a gradient is stepped by somebody."""
        known = {id(t) for t in (*opened.values(), *(handle.buffer.leaves.values() if handle is not None else ()))}
        foreign = next((t for t in trained_leaves(result) if id(t) not in known), None)
        if foreign is not None:
            raise ConfigError(
                f"{self.stage.where}: a block or the loss trains a tensor of shape {tuple(foreign.shape)} that belongs "
                "to no module among the blocks, so no optimizer would ever step it; pass the module that owns it as a "
                "block (not one of its methods), or detach it"
            )

    def _claim(self, version: int | None) -> Handle | None:
        """Claim a version and let the modules compute with it."""
        if self.store is None or version is None:
            self.stage.bind(NO_LEAVES)
            return None
        handle = self.store.read(version)
        self.stage.bind(handle.buffer.leaves)
        return handle
