"""What a run reports to its caller beside losses: decisions on updates, and evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from penstock.weights.decision import Decision


class _Beside:
    """Numbers beside the fields of a tuple, which is unpacked without them.

    Attributes:
        numbers: as `Report.numbers`, on ranks of the last stage; of evaluations that were loaded, none.
    """

    numbers: Mapping[str, float] = MappingProxyType({})


Beside = TypeVar("Beside", bound=_Beside)


def with_numbers(found: Beside, numbers: Mapping[str, float]) -> Beside:
    """Set the numbers beside a tuple, if there are any, and return it."""
    if numbers:  # else it needs no dict of its own, of which there would be one for each evaluation
        found.numbers = numbers
    return found


class _Evaluated(NamedTuple):
    version: int
    total: float
    weight: float


class Evaluated(_Beside, _Evaluated):
    """What an evaluation during a run has found.

    Attributes:
        version: of the weights, as the number of batches that they were trained on.
        total: the sum of the loss.
        weight: what the sum is divided by, such as the number of samples.
    """

    def __repr__(self) -> str:
        """Return the mean in place of the sum."""
        loss = "None" if self.loss is None else f"{self.loss:.6g}"
        return f"Evaluated(version={self.version}, loss={loss}, weight={self.weight:g})"

    @property
    def loss(self) -> float | None:
        """The mean; None where the weight is zero."""
        return self.total / self.weight if self.weight else None


class _Mean(NamedTuple):
    mean: float
    weight: float


class Evaluation(_Beside, _Mean):
    """What `Pipeline.evaluate` has found: a pair (mean, weight), with the numbers that the loss returns beside these.

    Attributes:
        mean: of the loss.
        weight: what its sum was divided by, such as the number of samples.
    """

    def __repr__(self) -> str:
        """Return the figures."""
        more = f", numbers={self.numbers}" * bool(self.numbers)
        return f"Evaluation(mean={self.mean:.6g}, weight={self.weight:g}{more})"


class RunEvents:
    """The decisions and evaluations of one rank that its caller has not received yet, in the order of their coming.

    Attributes:
        evaluations: all evaluations that every rank knows of, since the start of training; part of every snapshot.
    """

    def __init__(self) -> None:
        self.evaluations: list[Evaluated] = []
        self._decided: list[Decision] = []
        self._evaluated: list[Evaluated] = []

    def decided(self, decision: Decision) -> None:
        """Report a decision."""
        self._decided.append(decision)

    def correct(self, decision: Decision) -> None:
        """Replace the last decision."""
        self._decided[-1] = decision

    def evaluated(self, found: Evaluated) -> None:
        """Report an evaluation that this rank knows of, and maybe others."""
        self._evaluated.append(found)

    def evaluated_everywhere(self, found: Evaluated) -> None:
        """Report an evaluation that all ranks know of; once per version, which two methods may evaluate at a border."""
        if all(found.version != other.version for other in self.evaluations):
            self.evaluations.append(found)
            self._evaluated.append(found)

    def take_decided(self) -> tuple[Decision, ...]:
        """Take the decisions since the last call."""
        taken, self._decided = tuple(self._decided), []
        return taken

    def take_evaluated(self) -> tuple[Evaluated, ...]:
        """Take the evaluations since the last call."""
        taken, self._evaluated = tuple(self._evaluated), []
        return taken

    def give_back(self, decided: Sequence[Decision], evaluated: Sequence[Evaluated]) -> None:
        """Return to the queue what was taken but has not reached the caller."""
        self._decided[:0] = decided
        self._evaluated[:0] = evaluated

    def restart(self, evaluations: Sequence[Sequence[float]]) -> None:
        """Go on from a snapshot that has these evaluations; nothing is waiting to be received."""
        self.evaluations = [Evaluated(int(version), total, weight) for version, total, weight in evaluations]
        self._decided.clear()
        self._evaluated.clear()
