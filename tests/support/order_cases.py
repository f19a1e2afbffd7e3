"""Cases for every order of the literature."""

from __future__ import annotations

from dataclasses import replace

from support.cases import Case

ORDERS = (
    "interleaved", "breadth-first", "zb-h1", "zb-h2", "zb-interleaved", "zb-auto", "zb-v", "v-half", "v-min", "v-auto",
    "hanayo", "chimera", "dualpipe", "dualpipe-v", "bitpipe", "bpipe",
)  # fmt: skip


PAIRS = (("pairs", 2),)


def case_of(name: str, p: int, m: int) -> Case:
    """A case whose model has as many blocks as the order has stages."""
    case = Case(name, p, m, spans=(3, 2), skips=(3,))
    return replace(case, model="long") if case.schedule.num_stages == 8 else case
