"""Orders of the literature, one family a file; each is a pure function (stages, microbatches) -> Order."""

from collections.abc import Mapping
from types import MappingProxyType

from penstock.schedule.order import OrderFunction
from penstock.schedule.orders.forward_only import forward_only
from penstock.schedule.orders.gpipe import gpipe
from penstock.schedule.orders.one_f_one_b import eager_1f1b, endless_1f1b, endless_eager_1f1b, one_f_one_b
from penstock.schedule.orders.sequential import sequential

ORDERS: Mapping[str, OrderFunction] = MappingProxyType(
    {
        "sequential": sequential,
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "eager-1f1b": eager_1f1b,
        "endless-1f1b": endless_1f1b,
        "endless-eager-1f1b": endless_eager_1f1b,
        "forward-only": forward_only,
    }
)
"""Every order by its name."""

__all__ = [
    "ORDERS",
    "sequential",
    "gpipe",
    "one_f_one_b",
    "eager_1f1b",
    "endless_1f1b",
    "endless_eager_1f1b",
    "forward_only",
]
