"""The table of a verification in a narrow terminal."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from penstock.cli.verify import print_verification
from penstock.train.config.load import load_config
from penstock.verify.differences import Difference, TensorPlace
from penstock.verify.report import ReportRow, Verification

NAME = "exp_avg_sq of encoder.layers.23.self_attention.relative_position_bias.output_projection.weight"


def found(place: TensorPlace | None) -> Verification:
    same = Difference(12, 0.0, 0, 0, None, None)
    other = Difference(12, 1e-5, 0, 0, place, None)
    rows = tuple(ReportRow(kind, same, other) for kind in ("gradients", "optimizer state"))
    return Verification(load_config(None, ["method=1f1b"]), 4, rows, None, None)


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("width", [40, 80, 120])
def test_names_of_tensors_are_in_one_piece(width: int, terminal: bool) -> None:
    """Whatever the width: who copies a name, or looks for it with grep, gets the name."""
    console = Console(file=StringIO(), width=width, force_terminal=terminal, color_system=None)
    print_verification(console, found(TensorPlace(4, NAME, 1e-9, 1e-7)))
    lines = [line.strip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    at = lines.index("most in, compared with plain torch:")
    assert [" ".join(line.split()) for line in lines[at + 1 : at + 3]] == [
        f"gradients {NAME}",
        f"optimizer state {NAME}",
    ]
    if width >= 80:
        assert "optimizer state 0 of 12 1.0e-07 1.0e-09 end" in [" ".join(line.split()) for line in lines]


def test_nothing_is_named_where_nothing_differs() -> None:
    console = Console(file=StringIO(), width=80)
    print_verification(console, found(None))
    assert "most in" not in console.file.getvalue()  # type: ignore[attr-defined]


def test_it_says_with_which_options_of_the_order() -> None:
    several = replace(found(None), config=load_config(None, ["method=interleaved", "options.chunks=3"]))
    console = Console(file=StringIO(), width=200)
    print_verification(console, several)
    assert console.file.getvalue().lstrip().startswith("interleaved:chunks=3: stages")  # type: ignore[attr-defined]
    assert "the pipeline trains what interleaved:chunks=3 says" in replace(several, rows=several.rows[:1]).verdict


@pytest.mark.parametrize("batches", [1, 2, 3])
def test_it_says_where_too_few_batches_were_compared(batches: int) -> None:
    """To see a delay of one update."""
    console = Console(file=StringIO(), width=300)
    print_verification(console, replace(found(None), batches=batches))
    assert ("delays do not show" in console.file.getvalue()) == (batches < 3)  # type: ignore[attr-defined]
