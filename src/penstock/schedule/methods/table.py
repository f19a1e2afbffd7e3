"""The method table: every published method is a row, not a class.

A row combines an order, a version rule, a correction, a sharding and a way to combine parallel pipelines;
`compatible` says what cannot be combined. Everything else about a method (weight copies, delay, activations in
flight, bubble, the smallest batch) is derived from its schedule by `penstock.schedule.proof.check` and the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

from penstock.checks import in_words, similarity
from penstock.errors import ConfigError
from penstock.schedule.ir.order import Order
from penstock.schedule.ir.rules import Source, VersionRule
from penstock.schedule.ir.sharding import Level, Sharding, read_sharding
from penstock.schedule.methods.combine import COMBINES, combine_fault
from penstock.schedule.methods.corrections import CORRECTIONS, correction_fault, options_of
from penstock.schedule.orders.nf1b import one_version_fault
from penstock.schedule.transforms.sharding import sharding_fault


@dataclass(frozen=True)
class Method:
    """One row of the table.

    Attributes:
        name: the value of `--set method=`.
        title: the name in the literature.
        source: paper and section.
        order: a name in `penstock.schedule.orders.ORDERS`.
        rule: a name in `penstock.schedule.ir.rules.RULES`.
        correction: the remedy for stale weights, a name in `penstock.schedule.methods.corrections.CORRECTIONS`.
        sharding: what of the state of a stage is split over parallel pipelines unless a user says otherwise, as
            `read_sharding` reads it.
        combine: the default way to combine parallel pipelines, a name in
            `penstock.schedule.methods.combine.COMBINES`.
        aliases: other names in use.
        limit: (stages, microbatches, options of the order) -> why they cannot be combined, beyond what the proof finds.
        settings: defaults of `penstock train --set` keys under this method, as it requires or as its paper says.
    """

    name: str
    title: str
    source: str
    order: str
    rule: str
    correction: str = "none"
    sharding: str = "none"
    combine: str = "reduce"
    aliases: tuple[str, ...] = ()
    limit: Callable[..., str | None] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def needs_sharded_state(self) -> bool:
        """Whether it splits the state of stages unless a user says otherwise."""
        return self.sharding != Level.NONE

    @property
    def in_turns(self) -> bool:
        """Whether ranks alternate between stages, or versions of them, with every microbatch or a few of them."""
        return self.order not in ("breadth-first", "endless-breadth-first")

    @property
    def shardings(self) -> tuple[Level, ...]:
        """The levels of sharding that it takes, without `none`."""
        return tuple(
            level
            for level in tuple(Level)[1:]
            if sharding_fault(self.rule, level, self.correction, self.in_turns) is None
        )


_BACKPROP = MappingProxyType({"optimizer.name": "sgd", "optimizer.nesterov": False})
_NADAM = MappingProxyType({"optimizer.name": "nadam", "optimizer.weight_decay": 0.01})
_TABLE = (
    Method("sequential", "one microbatch at a time", "the definition of training", "sequential", "flush"),
    Method("gpipe", "GPipe", "arXiv 1811.06965", "gpipe", "flush", aliases=("afab", "fill-drain")),
    Method(
        "1f1b",
        "1F1B, PipeDream-Flush, DAPPLE P_A",
        "arXiv 2006.09503 sec. 3.2; arXiv 2007.01045",
        "1f1b",
        "flush",
        aliases=("pipedream-flush", "dapple"),
    ),
    Method("eager", "eager 1F1B, DAPPLE P_B", "arXiv 2007.01045", "eager-1f1b", "flush", aliases=("eager-1f1b",)),
    Method(
        "2bw",
        "PipeDream-2BW, double-buffered weights",
        "arXiv 2006.09503 sec. 3.1",
        "endless-1f1b",
        "double-buffer",
        aliases=("pipedream-2bw", "double-buffer"),
    ),
    Method(
        "2bw-eager",
        "PipeDream-2BW in eager order: 2bw:in_flight=2p-1",
        "arXiv 2006.09503 sec. 3.1 for the versions; arXiv 2007.01045 (P_B) for the order",
        "endless-eager-1f1b",
        "double-buffer",
    ),
    Method(
        "stash",
        "PipeDream, weight stashing",
        "arXiv 1806.03377",
        "endless-1f1b",
        "stash",
        aliases=("pipedream", "weight-stashing"),
    ),
    Method(
        "interleaved",
        "interleaved 1F1B, Megatron-LM",
        "arXiv 2104.04473 sec. 2.2",
        "interleaved",
        "flush",
        aliases=("megatron", "interleaved-1f1b", "depth-first"),
    ),
    Method(
        "depth-first-full",
        "interleaved 1F1B on fully sharded state, to compare with layered: gathers again for every p microbatches",
        "arXiv 2104.04473 sec. 2.2; arXiv 1910.02054 sec. 5.3",
        "interleaved",
        "flush",
        sharding="full",
        aliases=("interleaved-full",),
    ),
    Method(
        "breadth-first",
        "breadth-first on round-robin placement",
        "arXiv 2211.05953",
        "breadth-first",
        "flush",
        aliases=("looped-bfs",),
    ),
    Method(
        "layered",
        "layered accumulation, modular pipeline: breadth-first on fully sharded state",
        "arXiv 2106.02679; arXiv 2211.05953",
        "breadth-first",
        "flush",
        sharding="full",
        aliases=("modular", "lga"),
    ),
    Method(
        "2bw-layered",
        "layered accumulation without flushes, double-buffered: PipeDream-2BW's versions on fully sharded state",
        "this project (docs/sharded-state.md), from arXiv 2006.09503 sec. 3.1 and arXiv 2106.02679",
        "endless-breadth-first",
        "double-buffer",
        sharding="full",
    ),
    Method("zb-h1", "zero bubble H1", "arXiv 2401.10241 sec. 2", "zb-h1", "flush", aliases=("zero-bubble",)),
    Method("zb-h2", "zero bubble H2, without post-validation", "arXiv 2401.10241 sec. 2", "zb-h2", "flush"),
    Method(
        "zb-h2-post", "zero bubble H2 with post-validation", "arXiv 2401.10241 sec. 2 and 4", "zb-h2", "provisional"
    ),
    Method("zb-interleaved", "zero bubble H1 on several chunks", "arXiv 2401.10241", "zb-interleaved", "flush"),
    Method(
        "zb-auto",
        "zero bubble for given times and memory, ZB-1p and ZB-2p, without post-validation",
        "arXiv 2401.10241 sec. 3.1",
        "zb-auto",
        "flush",
        aliases=("zb-2p",),
    ),
    Method(
        "zb-auto-post",
        "zero bubble for given times and memory, ZB-1p and ZB-2p, with post-validation",
        "arXiv 2401.10241 sec. 3.1 and 4",
        "zb-auto",
        "provisional",
    ),
    Method("zb-v", "zero bubble on a V", "arXiv 2401.10241 sec. 6", "zb-v", "flush", aliases=("zbv",)),
    Method("v-half", "V-Half, controllable memory", "arXiv 2405.15362", "v-half", "flush"),
    Method("v-min", "V-Min, controllable memory", "arXiv 2405.15362", "v-min", "flush"),
    Method("v-auto", "controllable memory for given times and memory", "arXiv 2405.15362 sec. 3", "v-auto", "flush"),
    Method("hanayo", "Hanayo, waves", "arXiv 2308.15762", "hanayo", "flush"),
    Method("chimera", "Chimera, two directions", "arXiv 2107.06925", "chimera", "flush"),
    Method("dualpipe", "DualPipe", "arXiv 2412.19437 sec. 3.2", "dualpipe", "flush"),
    Method("dualpipe-v", "DualPipeV", "arXiv 2412.19437 and its code", "dualpipe-v", "flush", aliases=("dualpipev",)),
    Method("bitpipe", "BitPipe", "arXiv 2410.19367", "bitpipe", "flush"),
    Method("seq1f1b", "Seq1F1B, slices of sequences", "arXiv 2406.03488", "seq1f1b", "flush"),
    Method("terapipe", "TeraPipe, slices of sequences", "arXiv 2102.07988", "terapipe", "flush"),
    Method("bpipe", "BPipe, 1F1B with balanced activations", "ICML 2023", "bpipe", "flush"),
    Method(
        "vertical-sync",
        "PipeDream with vertical sync",
        "arXiv 1806.03377",
        "endless-1f1b",
        "vertical-sync",
        aliases=("vertical",),
    ),
    Method(
        "newest",
        "newest weights everywhere, no stash",
        "arXiv 1910.05124 without its corrections",
        "endless-1f1b",
        "newest",
        aliases=("stale", "ampnet"),
    ),
    Method(
        "pipemare",
        "PipeMare, newest weights with corrections",
        "arXiv 1910.05124",
        "endless-1f1b",
        "newest",
        correction="pipemare",
    ),
    Method(
        "spectrain",
        "SpecTrain, predicted weights for both passes",
        "arXiv 1809.02839",
        "endless-1f1b",
        "predicted",
        correction="spectrain",
    ),
    Method(
        "spectrain-stash",
        "SpecTrain's second form, predicted weights stashed",
        "code of arXiv 1809.02839",
        "endless-1f1b",
        "predicted-stash",
        correction="spectrain-stash",
    ),
    Method(
        "xpipe",
        "XPipe, predictions shared by a batch",
        "arXiv 1911.04610",
        "endless-1f1b",
        "predicted-shared",
        correction="xpipe",
    ),
    Method(
        "pipeoptim",
        "PipeOptim, predicted weights for forwards",
        "arXiv 2312.00839",
        "endless-1f1b",
        "predicted-forward",
        correction="pipeoptim",
    ),
    Method(
        "spike",
        "pipelined backpropagation with spike compensation",
        "arXiv 2003.11666",
        "endless-1f1b",
        "newest",
        correction="spike",
        settings=_BACKPROP,
    ),
    Method(
        "lwp",
        "pipelined backpropagation with linear weight prediction",
        "arXiv 2003.11666",
        "endless-1f1b",
        "predicted-forward",
        correction="lwp",
    ),
    Method(
        "lwp-weights",
        "the same, predicted from the last motion of the weights",
        "arXiv 2003.11666",
        "endless-1f1b",
        "predicted-forward",
        correction="lwp-weights",
    ),
    Method(
        "spike-lwp",
        "spike compensation and linear weight prediction",
        "arXiv 2003.11666",
        "endless-1f1b",
        "predicted-forward",
        correction="spike-lwp",
        settings=_BACKPROP,
    ),
    Method(
        "spike-lwp-weights",
        "the same, predicted from the last motion of the weights",
        "arXiv 2003.11666",
        "endless-1f1b",
        "predicted-forward",
        correction="spike-lwp-weights",
        settings=_BACKPROP,
    ),
    Method(
        "nag-pp",
        "NAG-PP, Nesterov's momentum on stashed weights",
        "arXiv 2505.01099",
        "endless-1f1b",
        "stash",
        correction="nag-pp",
        settings=MappingProxyType({**_NADAM, "optimizer.beta1": 0.99}),
    ),
    Method(
        "nag-pp-no-stash",
        "NAG-PP on the newest weights",
        "arXiv 2505.01099",
        "endless-1f1b",
        "newest",
        correction="nag-pp-no-stash",
        settings=_NADAM,
    ),
    Method(
        "gap-aware",
        "gap-aware gradients on stashed weights",
        "arXiv 1909.10802, in FTPipe's form (USENIX ATC 2021)",
        "endless-1f1b",
        "stash",
        correction="gap-aware",
        settings=MappingProxyType({"optimizer.name": "sgd", "microbatches": 1}),
    ),
    Method(
        "error-feedback",
        "PipeDream-2BW with error feedback",
        "arXiv 2606.30634 (variant penstock)",
        "endless-1f1b",
        "double-buffer",
        correction="error-feedback",
    ),
    Method(
        "2bw-ahead",
        "PipeDream-2BW that reads ahead",
        "this project (docs/delays.md)",
        "endless-1f1b",
        "double-buffer",
        correction="2bw-ahead",
    ),
    Method(
        "timeprest",
        "TiMePReSt, n forwards and one backward on the newest weights",
        "arXiv 2410.14312",
        "nf1b",
        "admitted-newest",
    ),
    Method(
        "v-timeprest",
        "V-TiMePReSt, the newest weights everywhere",
        "arXiv 2509.23241; order and constraint of arXiv 2410.14312",
        "nf1b",
        "newest",
        limit=one_version_fault,
    ),
    Method(
        "i-timeprest",
        "I-TiMePReSt, backwards between stale and newest weights",
        "arXiv 2509.23241 (variant penstock)",
        "nf1b",
        "blended",
        correction="i-timeprest",
    ),
    Method(
        "wpipe",
        "WPipe, two groups of stages of which one has no delay",
        "ICLR 2022 (Yang et al., group-based interleaved pipeline parallelism), and its code",
        "wpipe",
        "stash",
        aliases=("2gw",),
        settings=MappingProxyType({"max_grad_norm": None}),
    ),
    Method(
        "ftpipe",
        "FTPipe, weights predicted by momentum that decays (msnag)",
        "FTPipe, USENIX ATC 2021, and its code",
        "endless-1f1b",
        "predicted-forward",
        correction="ftpipe",
    ),
    Method(
        "ftpipe-aggregated",
        "the same with the gradient under way (aggmsnag)",
        "FTPipe, USENIX ATC 2021, and its code",
        "endless-1f1b",
        "predicted-forward",
        correction="ftpipe-aggregated",
    ),
)

METHODS: Mapping[str, Method] = MappingProxyType({row.name: row for row in _TABLE})
"""Every method by its name."""


def find_method(name: str) -> Method:
    """Return the row of a method, by name or alias.

    Raises:
        ConfigError: no such method; the message suggests the nearest names.
    """
    names = {alias: row for row in _TABLE for alias in (row.name, *row.aliases)}
    key = name.lower().replace("_", "-")
    key = _CLASSES.get(key.removeprefix("schedule"), key)
    if key in names:
        return names[key]
    near = _nearest_rows(key)
    hint = _HINTS.get(key) or _FILES.get(PurePath(name).suffix) or (f" Did you mean {in_words(near)}?" if near else "")
    raise ConfigError(f"unknown method {name!r}.{hint} `penstock methods` lists all {len(METHODS)}.")


def _nearest_rows(key: str) -> list[str]:
    """Return the names of the three rows that are spelled most like `key`, by name or, if not quite as near, alias.

    None where not even the nearest is similar.
    """
    alike = {
        row.name: max(similarity(key, row.name), *(similarity(key, alias) - 0.01 for alias in row.aliases), 0.0)
        for row in _TABLE
    }
    near = sorted(alike, key=lambda name: -alike[name])[:3]
    return near if alike[near[0]] > _SIMILAR else []


_SIMILAR = 0.55
_COMBINED = " It is a way to combine parallel pipelines, under most methods: width=2 combine.kind={}."
_OPTIMIZER = " It is an optimizer, for use with most methods: optimizer.name={}."
_HINTS = MappingProxyType(
    {
        "zb-1p": " Use 'zb-auto' with as many microbatches on a rank as ranks: options limit=4 for 4 stages.",
        "zb-exact": " It is an order, whose search may take minutes: zb-auto with order zb-exact (show --order).",
        "forward-only": " It is the order of evaluations: any method with order forward-only (show --order).",
        **dict.fromkeys(("hetpipe", "wsp"), _COMBINED.format("wsp")),
        **dict.fromkeys(("average", "model-averaging", "local-sgd"), _COMBINED.format("average")),
        **dict.fromkeys(("bmuf", "block-momentum"), _COMBINED.format("bmuf")),
        **dict.fromkeys(("avgpipe", "elastic"), _COMBINED.format("elastic")),
        **{name: _OPTIMIZER.format(name) for name in ("basis-rotation", "muon", "nadam", "adan", "soap")},
    }
)
"""Advice for names that are options, orders or optimizers rather than methods."""

_CLASSES = MappingProxyType(
    {
        "1f1b": "1f1b",
        "gpipe": "gpipe",
        "interleaved1f1b": "interleaved",
        "loopedbfs": "breadth-first",
        "interleavedzerobubble": "zb-interleaved",
        "zbvzerobubble": "zb-v",
        "dualpipev": "dualpipe-v",
        "pipedream2bw": "2bw",
    }
)
"""What torch.distributed.pipelining calls its schedules (without "Schedule") -> the method."""

_OWN = " An order of your own goes after --file (in Python, to load_schedule)."
_CONFIGURATION = " A configuration goes after --config."
_FILES = MappingProxyType(
    {".py": _OWN, ".txt": _OWN, ".csv": _OWN, ".yaml": _CONFIGURATION, ".yml": _CONFIGURATION, ".json": _CONFIGURATION}
)
"""Advice for files in the place of a method."""


def correction_options(method: Method, given: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return the options of a method's correction, with the defaults where none are given.

    Raises:
        ConfigError: it has no correction or no such option, or the option does not accept the value.
    """
    if given and not CORRECTIONS[method.correction].options:
        option = next(iter(given))
        owners = ", ".join(row.name for row in _TABLE if option in CORRECTIONS[row.correction].options)
        lacks = "no correction" if method.correction == "none" else "a correction without options"
        raise ConfigError(
            f"method {method.name!r} has {lacks}, so correction.{option} does not apply; methods that have it: "
            f"{owners or 'none'}"
        )
    return options_of(method.correction, given)


def sharding_of(method: Method, given: str | Sharding | None, rule: str | None = None) -> Sharding:
    """Return what of a stage's state is split under a method: what is given, or else what the method has.

    Args:
        method: which.
        given: as it is written, or the sharding itself; None for that of the method.
        rule: another version rule than the method's.

    Raises:
        ConfigError: what is given is no sharding, or does not go with the method.
    """
    sharding = read_sharding(method.sharding if given is None else given)
    fault = sharding_fault(rule or method.rule, sharding.level, method.correction, method.in_turns)
    if fault is not None:
        raise ConfigError(f"{method.name}: {fault}")
    return sharding


def compatible(order: Order, rule: VersionRule, correction: str = "none", combine: str = "reduce") -> str | None:
    """Return why these choices cannot be combined, or None if they can."""
    if rule.forward is Source.BATCH and order.endless:
        return (
            f"rule {rule.name!r} empties the pipeline after each batch, but the order lets batches overlap; name "
            "another rule, such as double-buffer"
        )
    for what, value, known in (
        ("correction", correction, tuple(CORRECTIONS)),
        ("combine", combine, tuple(COMBINES)),
    ):
        if value not in known:
            return f"{what} {value!r} is not supported; known: {', '.join(known)}"
    if correction != "none" and (fault := correction_fault(rule, correction)):
        return fault
    return combine_fault(combine, rule.name, correction)
