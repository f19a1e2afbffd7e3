"""DualPipe and DualPipeV (DeepSeek-V3, arXiv 2412.19437, sec. 3.2; the orders as in its published code): pairs of a
forward and a backward of different microbatches run as one overlapped action, so that one computes while the other
communicates.

DualPipe feeds the pipeline from both ends: rank r holds stage r of one copy of the model (direction 0) and stage p - 1
- r of another (direction 1); each direction takes half of the microbatches. DualPipeV holds one copy, stage in 2p, on a
V.

DualPipe, p=4, m=8 (> and < are the directions):
    r0: F0> F1> F2> F0< I0< W0< F1< [F3>+B1<] [F2<+B0>] B2< [F3<+B1>] B3< I2> W2> I3> W3>
    r1: F0> F0< F1> F1< F2> B0< [F2<+B0>] [F3>+B1<] [F3<+B1>] B2< B2> I3< I3> W3< W3>
"""

from __future__ import annotations

from collections import deque

from penstock.errors import ScheduleError
from penstock.schedule.ir.order import Order, make_order, pass_of
from penstock.schedule.ir.placement import by_rank, looped, zigzag
from penstock.schedule.ir.schedule import Action, Op, Stage


def dualpipe(stages: int, microbatches: int) -> Order:
    """Feed the pipeline from both ends, with two directions and two copies of the weights.

    Raises:
        ScheduleError: an odd number of ranks or microbatches, or fewer than 2p microbatches.
    """
    if stages % 2 or microbatches % 2 or microbatches < 2 * stages:
        raise ScheduleError(
            "dualpipe needs an even number of stages, and an even number of microbatches at least twice as large; got "
            f"{stages} and {microbatches}"
        )
    placed, half = (*looped(stages, 1), *looped(stages, 1, direction=1, reverse=True)), microbatches // 2
    programs = []
    for rank, held in enumerate(by_rank(placed, stages)):
        down, up = sorted(held, key=lambda stage: stage.direction)
        inner = min(rank, stages - 1 - rank)
        own, other = (down, up) if rank < stages // 2 else (up, down)
        first = {down: 0, up: half}
        programs.append(
            _eight_phases((own, other), (first[own], first[other]), stages // 2, inner, half - stages + inner + 1)
        )
    return make_order(programs, stages=placed)


def dualpipe_v(stages: int, microbatches: int) -> Order:
    """Place one copy of the model on a V and pair its passes as DualPipe does.

    Raises:
        ScheduleError: fewer than 2p microbatches.
    """
    if microbatches < 2 * stages:
        raise ScheduleError(
            f"dualpipe-v needs at least twice as many microbatches as stages; got {microbatches} for {stages}"
        )
    placed = zigzag(stages, 2)
    return make_order(
        [
            _eight_phases((held[0], held[1]), (0, 0), stages, rank, microbatches - 2 * stages + rank + 1)
            for rank, held in enumerate(by_rank(placed, stages))
        ],
        stages=placed,
    )


def _eight_phases(held: tuple[Stage, Stage], first: tuple[int, int], half: int, rank: int, pairs: int) -> list[Action]:
    """Return the passes of one rank in the eight phases that DualPipe and DualPipeV share.

    Args:
        held: the stage of phase 0, where microbatches enter from the rank's own end, and that of phase 1.
        first: the first microbatch of each phase.
        half: number of ranks from an end to where the directions meet, or to the fold.
        rank: the rank, counted from the nearest end at which microbatches enter.
        pairs: number of rounds in the steady state.
    """
    line = _Line(held, first)
    outer = half - rank - 1
    for _ in range(2 * outer):
        line.forward(0)
    for _ in range(rank + 1):
        line.forward(0)
        line.forward(1)
    for _ in range(outer):
        line.backward_in_halves(1)
        line.weights()
        line.forward(1)
    for k in range(pairs):
        line.pair(0, 1, fused=k > 0 or outer > 0)
        line.pair(1, 0)
    for _ in range(outer):
        line.backward(1)
        line.pair(1, 0)
    whole = rank + 1  # the first of the 2 (rank + 1) backwards
    for k in range(2 * (rank + 1)):
        (line.backward if k < whole else line.backward_in_halves)(1 - k % 2)
    for _ in range(outer):
        line.weights()
        line.backward_in_halves(0)
    for _ in range(rank + 1):
        line.weights()
    return line.found


class _Line:
    """Builds the passes of one rank, in microbatch order per phase; deferred weight backwards wait in a queue."""

    def __init__(self, held: tuple[Stage, Stage], first: tuple[int, int]) -> None:
        self.found: list[Action] = []
        self._held = held
        self._forwards, self._backwards = list(first), list(first)
        self._late: deque[Action] = deque()

    def forward(self, phase: int) -> None:
        """Add the next forward of a phase."""
        self.found.append(self._forward(phase))

    def backward(self, phase: int) -> None:
        """Add the next full backward of a phase."""
        self.found.append(self._backward(phase, Op.B))

    def backward_in_halves(self, phase: int) -> None:
        """Add the next backward for the inputs; that for the weights is deferred."""
        half = self._backward(phase, Op.I)
        self.found.append(half)
        self._late.append(half._replace(op=Op.W))

    def weights(self) -> None:
        """Add the oldest deferred backward for the weights."""
        self.found.append(self._late.popleft())

    def pair(self, ahead: int, back: int, fused: bool = True) -> None:
        """Add a forward of one phase and a backward of the other, as one fused action or one after the other."""
        parts = self._forward(ahead), self._backward(back, Op.B)
        self.found += [Action(Op.FUSED, parts[0].stage, parts[0].unit, parts=parts)] if fused else parts

    def _forward(self, phase: int) -> Action:
        self._forwards[phase] += 1
        return pass_of(Op.F, self._forwards[phase] - 1, self._held[phase])

    def _backward(self, phase: int, op: Op) -> Action:
        self._backwards[phase] += 1
        return pass_of(op, self._backwards[phase] - 1, self._held[phase])
