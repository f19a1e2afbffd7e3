"""The graph of a forward that was replayed: its backward is replayed, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from penstock.stage.autograd.deferred_weight_grads import DeferredWeightGrads
from penstock.stage.autograd.forward_graph import Graph
from penstock.stage.cuda_graphs.captured_pass import CapturedPass
from penstock.stage.cuda_graphs.in_flight_room import Claim
from penstock.weights.memory.buffers import Buffer


class ReplayedGraph(Graph):
    """The graph of a forward that was replayed; its backward is replayed, too.

    Args:
        captured: the recording.
        claim: on the memory of the microbatch.
        elsewhere: replays the forward again, by a recording that adds to another gradient, and returns that.
        nbytes: kept until the backward, and of these until its second half.
    """

    def __init__(
        self,
        captured: CapturedPass,
        claim: Claim,
        elsewhere: Callable[[Buffer], CapturedPass],
        nbytes: tuple[int, int],
    ) -> None:
        super().__init__({}, 0, [], captured.seed, nbytes[0], deferred_nbytes=nbytes[1])
        self._captured, self._claim, self._elsewhere = captured, claim, elsewhere

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replay the backward, or its first half."""
        gradient = self._captured.weights.gradient
        assert gradient is not None
        gradient.finish_gradient()  # a recording adds, be it the first of its batch
        if gradient is not self._captured.gradient:
            self._captured = self._elsewhere(gradient)
        found = self._captured.backward(gradients)
        if self._captured.halves:
            self.deferred = ReplayedWeightGrads(self._captured, self._claim)
            self.deferred_nbytes += self._captured.deferred_nbytes
        return found


class ReplayedWeightGrads(DeferredWeightGrads):
    """The second half of a backward that is replayed.

    Args:
        captured: the recording.
        claim: on the memory of the microbatch.
    """

    def __init__(self, captured: CapturedPass, claim: Claim) -> None:
        super().__init__()
        self._captured, self._claim = captured, claim

    def run(self, weights: Mapping[str, Tensor], add: Callable[[str, Tensor], None]) -> None:  # noqa: ARG002
        """Replay it; the recording knows its weights and where it adds."""
        self._captured.backward_for_weights()
