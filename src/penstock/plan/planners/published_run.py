"""Plans by published costs as runs of `penstock train`, where it can run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import ConfigError
from penstock.plan.profile.layer_graph import LayerGraph
from penstock.plan.stages.planned import Plan, PlannedStage

METHODS: Mapping[str, str] = {
    "2bw-paper": "2bw",
    "dapple": "1f1b",
    "dawnpiper": "1f1b",
    "mist": "1f1b",
    "piper": "1f1b",
}
"""The method of a cost function, by its name; the order of others is none of the method table, or no pipeline."""


def recompute_of(graph: LayerGraph, stage: PlannedStage) -> str | None:
    """Return whether a stage recomputes its blocks, as `penstock train` knows it; None if it does so with some of them.

    Layers that have no option with recompute do not count.
    """
    found = set()
    for number, way in zip(stage.layers, stage.ways, strict=True) if stage.ways else ():
        can = any("recomp" in each.name for each in graph.layers[number].ways if each.tensor == 1)
        if can or "recomp" in way:
            found.add("recomp" in way)
    return None if len(found) > 1 else "block" if found == {True} else "none"


def published_run(cost: str, plan: Plan, graph: LayerGraph, microbatches: int) -> dict[str, Any]:
    """Return the keys of `penstock train` that run a plan.

    Args:
        cost: the function by which it is the best.
        plan: the plan.
        graph: of its layers, at its microbatch size.
        microbatches: of a batch, in all pipelines.

    Raises:
        ConfigError: no run does what it says; the message tells what.
    """
    stages, width = plan.stages, plan.stages[0].replicas
    parts = cost == "dapple"  # whose replicas share each microbatch
    count, what = (plan.samples, "samples of a microbatch") if parts else (microbatches, "microbatches")
    modes = [recompute_of(graph, stage) for stage in stages]
    faults = {
        f"cost {cost!r} is of an order that is no method of penstock": cost not in METHODS,
        "its stages are no chain of layers that follow each other": not _is_chain(stages),
        "its stages have different numbers of replicas": len({stage.replicas for stage in stages}) > 1,
        "it spreads layers over several devices": any(stage.tensor > 1 or stage.inner for stage in stages),
        "it swaps activations layer by layer": any("swap" in way for stage in stages for way in stage.ways),
        "some stage recomputes a part of its layers": None in modes,
        "only some stages divide their optimizer states": len({stage.sharded for stage in stages}) > 1,
        f"{count} {what} cannot be divided among {width} pipelines": count % width > 0,
    }
    for fault, applies in faults.items():
        if applies:
            raise ConfigError(f"the best plan cannot be run: {fault}; --cost simulated finds plans that can")
    found: dict[str, Any] = {"method": METHODS[cost], "stages": len(stages), "width": width}
    if stages[0].sharded and width > 1:
        found["sharding"] = "optimizer"
    return found | {
        "microbatches": microbatches if parts else microbatches // width,
        "microbatch_size": plan.samples // width if parts else plan.samples,
        "recompute": modes[0] if len(set(modes)) == 1 else modes,
        "balance": [len(stage.layers) for stage in stages],
    }


def _is_chain(stages: Sequence[PlannedStage]) -> bool:
    """Return whether stages hold runs of layers, one after the other, each on devices of its own."""
    layers = [layer for stage in stages for layer in stage.layers]
    return layers == list(range(len(layers))) and not any(stage.in_turns for stage in stages)
