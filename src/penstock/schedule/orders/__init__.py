"""Orders of the literature, one family a file; each is a pure function (stages, microbatches, options) -> Order."""

from collections.abc import Mapping
from types import MappingProxyType

from penstock.schedule.ir.order import OrderFunction
from penstock.schedule.orders.bitpipe import bitpipe
from penstock.schedule.orders.bpipe import bpipe
from penstock.schedule.orders.breadth_first import breadth_first, endless_breadth_first
from penstock.schedule.orders.chimera import chimera
from penstock.schedule.orders.controllable_memory import v_half, v_min
from penstock.schedule.orders.dualpipe import dualpipe, dualpipe_v
from penstock.schedule.orders.forward_only import forward_only
from penstock.schedule.orders.gpipe import gpipe
from penstock.schedule.orders.hanayo import hanayo
from penstock.schedule.orders.interleaved import interleaved
from penstock.schedule.orders.nf1b import nf1b
from penstock.schedule.orders.one_f_one_b import (
    eager_1f1b,
    endless_1f1b,
    endless_eager_1f1b,
    fine_grained,
    one_f_one_b,
)
from penstock.schedule.orders.sequence_slices import seq1f1b, terapipe
from penstock.schedule.orders.sequential import sequential
from penstock.schedule.orders.v_auto import v_auto
from penstock.schedule.orders.vocabulary_parallel import vocabulary_1f1b
from penstock.schedule.orders.zb_exact import zb_exact
from penstock.schedule.orders.zb_v import zb_v
from penstock.schedule.orders.zero_bubble import zb_auto, zb_h1, zb_h2, zb_interleaved

ORDERS: Mapping[str, OrderFunction] = MappingProxyType(
    {
        "sequential": sequential,
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "eager-1f1b": eager_1f1b,
        "endless-1f1b": endless_1f1b,
        "endless-eager-1f1b": endless_eager_1f1b,
        "fine-grained": fine_grained,
        "interleaved": interleaved,
        "breadth-first": breadth_first,
        "endless-breadth-first": endless_breadth_first,
        "zb-h1": zb_h1,
        "zb-h2": zb_h2,
        "zb-interleaved": zb_interleaved,
        "zb-auto": zb_auto,
        "zb-exact": zb_exact,
        "zb-v": zb_v,
        "v-half": v_half,
        "v-min": v_min,
        "v-auto": v_auto,
        "hanayo": hanayo,
        "chimera": chimera,
        "dualpipe": dualpipe,
        "dualpipe-v": dualpipe_v,
        "bitpipe": bitpipe,
        "seq1f1b": seq1f1b,
        "terapipe": terapipe,
        "bpipe": bpipe,
        "vocabulary-1f1b": vocabulary_1f1b,
        "nf1b": nf1b,
        "forward-only": forward_only,
    }
)
"""All orders by their names."""

CHAINS = (one_f_one_b, endless_1f1b, zb_h1, zb_h2)
"""Orders with a stage on each rank whose option in_flight may be one number for each of them, or "auto"."""

ASK_LINKS = (*CHAINS, interleaved, zb_interleaved, zb_v)
"""Orders whose option in_flight may be "auto"; `WITHOUT_AUTO` says of the others why not."""

IN_ARRAYS = (
    one_f_one_b,
    eager_1f1b,
    endless_1f1b,
    endless_eager_1f1b,
    fine_grained,
    interleaved,
    breadth_first,
    zb_v,
)
"""Orders that are made as arrays."""
