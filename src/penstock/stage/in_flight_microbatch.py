"""Microbatches on a stage: the arguments of a pass, and the state kept from a forward to its backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.schedule.stage_state.microbatch_state import Piece
from penstock.stage.autograd.deferred_weight_grads import DeferredWeightGrads
from penstock.stage.autograd.forward_graph import Graph
from penstock.stage.autograd.recompute import RecomputeInput
from penstock.stage.blocks.rng import RngKey
from penstock.weights.memory.buffers import Handle


class Microbatch(NamedTuple):
    """One microbatch, or a slice of one, as a pass works on it.

    Attributes:
        k: its number in the span.
        rng_key: the pass that its random numbers belong to.
        target: the second argument of the loss, on stages that have one.
        scale: S, by which its backward multiplies the loss.
        piece: (j, k) for slice j of k; None for the whole microbatch.
    """

    k: int
    rng_key: RngKey
    target: Any = None
    scale: float = 1.0
    piece: tuple[int, int] | None = None

    @property
    def key(self) -> Piece:
        """Its number and that of the slice, by which the stage finds it again."""
        return self.k, self.piece[0] if self.piece else 0


@dataclass
class InFlightMicrobatch:
    """A microbatch between its forward and its backward on one stage.

    Attributes:
        microbatch: the microbatch.
        version: the version of the weights that its forward read.
        handle: the weights that its graphs are made on; None where nothing is trained.
        work: what its backward goes through, in the order of the forward: graphs, or inputs to recompute graphs from.
        deferred: the weight gradients that wait for the second half of its backward, once the first is done.
        deferred_nbytes: bytes that they keep alive.
        carried: how many leaves of its input, the last ones, come from the slice before.
        carries: how many leaves of its output, the last ones, go on to the next slice.
        auxiliary: the gradient of an auxiliary loss of it, before its coefficient; NaN while nobody has told.
    """

    microbatch: Microbatch
    version: int
    handle: Handle | None
    work: Sequence[Graph | RecomputeInput]
    carried: int = 0
    carries: int = 0
    deferred: list[DeferredWeightGrads] = field(default_factory=list)
    deferred_nbytes: int = 0
    auxiliary: float = math.nan

    @property
    def weights(self) -> Handle:
        """The weights that its graphs are made on, on a stage that trains some."""
        assert self.handle is not None
        return self.handle

    @property
    def recomputes_in_backward(self) -> bool:
        """True if its graphs are made only in its backward."""
        return any(isinstance(piece, RecomputeInput) for piece in self.work)
