"""A microbatch on a stage: what a pass works on, and what is kept of it from its forward to its backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.schedule.proof.in_flight import Piece
from penstock.stage.autograd.deferred_weight_grads import Late
from penstock.stage.autograd.recompute import Kept
from penstock.stage.module import Graph
from penstock.stage.rng import Draw
from penstock.weights.memory.buffers import Handle


class Microbatch(NamedTuple):
    """What a pass works on.

    Attributes:
        k: its number in the span.
        draw: what its random numbers depend on.
        target: what the loss compares with, on the last stage.
        scale: S, which its backward multiplies the loss by.
        piece: (j, k) for slice j of k; None for all of it.
    """

    k: int
    draw: Draw
    target: Any = None
    scale: float = 1.0
    piece: tuple[int, int] | None = None

    @property
    def key(self) -> Piece:
        """What tells it from others."""
        return self.k, self.piece[0] if self.piece else 0


@dataclass
class Flight:
    """A microbatch between its forward and its backward on one stage.

    Attributes:
        microbatch: which.
        version: that its forward read.
        handle: the weights that its graphs are made on; None where nothing is trained.
        work: what its backward goes through, first things first: a graph, or what graphs are made of again.
        late: what the second half of its backward goes through, once the first is done.
        late_nbytes: that it keeps alive.
        carried: leaves of its input that a slice before has made, the last ones.
        carries: leaves of its output that go on to the next slice, the last ones.
    """

    microbatch: Microbatch
    version: int
    handle: Handle | None
    work: Sequence[Graph | Kept]
    carried: int = 0
    carries: int = 0
    late: list[Late] = field(default_factory=list)
    late_nbytes: int = 0

    @property
    def weights(self) -> Handle:
        """Those that its graphs are made on."""
        assert self.handle is not None
        return self.handle

    @property
    def remade(self) -> bool:
        """Whether its graphs are made only in its backward."""
        return any(isinstance(piece, Kept) for piece in self.work)
