"""The stored figures of `penstock methods` are those that are derived.

`python tests/simulate/test_method_facts.py` renews them.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from penstock.schedule.methods.table import METHODS
from penstock.simulate import method_figures
from penstock.simulate.method_figures import STORED, USUAL, Links, derived_facts, facts_of_methods

_FIGURES = ("weight_copies", "delay", "activations", "bubble", "problem")


def derived() -> dict[str, dict[str, Any]]:
    """By method, what a schedule of the usual size costs, without what there is none of."""
    facts = {found.name: asdict(found) for found in derived_facts(METHODS.values(), *USUAL)}
    return {name: {key: of[key] for key in _FIGURES if of[key] is not None} for name, of in facts.items()}


def test_stored_figures_are_those_that_are_derived() -> None:
    """To the last bit."""
    assert json.loads(STORED.read_text()) == derived(), "run python tests/simulate/test_method_facts.py"


def test_they_stand_for_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for other sizes or links, nor for rows that are not of the table."""
    asked = list[tuple[Any, ...]]()

    def figures(rows: Any, *of: Any) -> list[dict[str, Any]]:
        asked.append((len(rows), *of))
        return [{} for _ in rows]

    monkeypatch.setattr(method_figures, "figures_of_methods", figures)
    row = METHODS["2bw"]
    assert facts_of_methods([row], *USUAL)[0].bubble == 0
    assert not asked
    facts_of_methods([row], 4, 9)
    facts_of_methods([row], *USUAL, Links(0.1))
    facts_of_methods([row], *USUAL, Links(in_flight=2))
    monkeypatch.setattr(method_figures, "METHODS", {})
    facts_of_methods([row], *USUAL)
    assert asked == [(1, 4, 9, 0.0, None), (1, *USUAL, 0.1, None), (1, *USUAL, 0.0, 2), (1, *USUAL, 0.0, None)]


if __name__ == "__main__":
    lines = [f"{json.dumps(name)}: {json.dumps(of)}" for name, of in derived().items()]
    STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
