"""The methods in `examples/methods`, by name: tests give them wherever they give the name of a row of the table."""

from __future__ import annotations

import copyreg
import runpy
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from penstock.schedule.build import prove as prove_row
from penstock.schedule.load import load_method
from penstock.schedule.methods.corrections import options_of
from penstock.schedule.methods.find_method import find_method
from penstock.schedule.methods.method import Method
from penstock.schedule.proof.proof import Proof
from penstock.verify import reference
from penstock.verify.config_to_reference import base_of
from penstock.verify.reference.order_delays import USUAL, ReferenceOrder
from penstock.weights.corrections.base import Correction, OwnCorrection
from penstock.weights.corrections.registry import correction_of as correction_of_row

FOLDER = Path(__file__).parents[2] / "examples" / "methods"
FILES = {
    "gap-aware": "gap_aware",
    **dict.fromkeys(("nag-pp", "nag-pp-no-stash"), "nag_pp"),
    **dict.fromkeys(("spike", "lwp", "lwp-weights", "spike-lwp", "spike-lwp-weights"), "pipelined_backprop"),
    **dict.fromkeys(("ftpipe", "ftpipe-aggregated"), "ftpipe"),
    "wpipe": "wpipe",
}


@cache
def own(name: str) -> Method:
    """A method of a file."""
    return load_method(FOLDER / f"{FILES[name]}.py", name)


def names_in(file: str) -> dict[str, Any]:
    """What a file defines."""
    return runpy.run_path(str(FOLDER / f"{file}.py"))


def written(name: str) -> str:
    """What follows --file for a method of a file."""
    return f"{FOLDER / FILES[name]}.py:method={name}"


def chosen(name: str) -> str:
    """What chooses a method in a configuration."""
    return f"schedule={written(name)}" if name in FILES else f"method={name}"


def asked(name: Any) -> Any:
    """A method of a file in place of its name; all else as it is."""
    return own(name) if name in FILES else name


def row_of(name: str) -> Method:
    """A method of a file, or the row of the table."""
    return find_method(asked(name))


def prove(method: Any, *arguments: Any, **options: Any) -> Proof:
    """As `penstock.schedule.build.prove`."""
    return prove_row(asked(method), *arguments, **options)


def correction_of(method: str, **options: float | None) -> Correction | None:
    """As `penstock.correction_of`."""
    return correction_of_row(asked(method), **options)


def _remade(name: str, options: Mapping[str, float | None]) -> Correction | None:
    return correction_of(name, **options)


copyreg.pickle(OwnCorrection, lambda own: (_remade, (own.name, dict(own.options))))  # for processes of the pool


def train_reference(
    stages: Sequence[Any],
    loss: Any,
    batches: Any,
    *,
    method: str,
    options: Mapping[str, Any] = {},
    order: ReferenceOrder = USUAL,
    **rest: Any,
) -> reference.Reference:
    """As `penstock.verify.reference.train_reference`."""
    if method not in FILES:
        return reference.train_reference(stages, loss, batches, method=method, options=options, order=order, **rest)
    row, batches = own(method), list(batches)
    if row.delays is not None and order.delays is None:
        parts = rest.get("parts")
        order = order._replace(delays=row.delays(len(stages), len(parts[0]) if parts else len(batches[0])))
    given = {"method": base_of(row), "options": options_of(row.spec, options), "equations": row.reference}
    return reference.train_reference(stages, loss, batches, order=order, **given, **rest)
