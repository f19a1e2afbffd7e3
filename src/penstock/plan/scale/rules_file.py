"""The rules of the scaling analysis: numbers that are inputs, in one file."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from penstock.plan.cluster.schema import ClusterPart, Sourced, parsed, text_of


class PowerLaw(ClusterPart):
    """factor * x^power.

    Attributes:
        factor, power: the law.
        source: where it is from.
    """

    factor: Annotated[float, Field(gt=0, le=1e30)]
    power: Annotated[float, Field(ge=-10, le=10)]
    source: Annotated[str, Field(min_length=1, max_length=500)]

    def at(self, x: float) -> float:
        return float(self.factor * x**self.power)


class FamilyRules(ClusterPart):
    """The family of models X_[x]; laws of x.

    Attributes:
        layers, hidden, sequence, heads: of a model; rounded to whole numbers.
        critical_batch: in sequences.
    """

    layers: PowerLaw
    hidden: PowerLaw
    sequence: PowerLaw
    heads: PowerLaw
    critical_batch: PowerLaw


class ScalingRules(ClusterPart):
    """A file of rules; `rules.yaml` beside this module says what each is and where it is from."""

    format: Literal["penstock scaling rules 1"]
    family: FamilyRules
    expansion: Sourced
    critical_tokens: PowerLaw
    steps: Sourced
    forward: Sourced
    backward: Sourced
    recompute: Sourced
    state: Sourced
    weight: Sourced
    gradient: Sourced
    number: Sourced
    layer_buffers: Sourced
    activations_per_value: Sourced
    activations_per_score: Sourced
    tensor_all_reduces: Sourced
    least_batch: Sourced
    least_efficiency: Sourced
    most_exposed: Annotated[float, Field(ge=0, le=1e6)] | None = None
    split_checkpoints: bool = True

    @property
    def work(self) -> float:
        """Operations per parameter and token, all passes together."""
        return self.forward.value + self.backward.value + self.recompute.value


def read_rules(path: Path | None = None) -> ScalingRules:
    """Read a file of rules; those that come with Penstock if none is given.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    if path is None:
        return parsed(ScalingRules, rules_text(), "rules.yaml", "file of scaling rules")
    return parsed(ScalingRules, text_of(path, "rules"), str(path), "file of scaling rules")


def rules_text() -> str:
    """Return the file of rules that comes with Penstock, with its comments."""
    return files("penstock.plan.scale").joinpath("rules.yaml").read_text()
