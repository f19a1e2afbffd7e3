"""The cost function of DawnPiper's planner (Peng et al., arXiv 2505.05856): the slowest stage, with its memory choices.

Stages are on single devices, one each, and a pipeline is as slow as its slowest stage, per microbatch: the compute of
its layers, or the messages on one side of it if they take longer, since they are sent meanwhile. Stage i of p holds
what its layers always take and min(p - i, M) microbatches, i counted from 0. The activations of each layer are

- kept: `plain`, or the first option of the profile on one device;
- recomputed: another option of the profile; or, where forwards are known, one that takes another forward;
- swapped: to the memory of the host, which holds them in place of the device. They leave during the layer's forward and
  return during its backward; what a transfer takes longer than these it costs. The device holds those of one
  microbatch.

The paper fixes that compute is balanced against memory, and that nodes are swapped or recomputed by their cost; the
formulas are our reading. Optimizer states count only where the profile counts them.
"""

from __future__ import annotations

from penstock.checks import did_you_mean
from penstock.errors import ConfigError
from penstock.plan.profile.layer_graph import GraphLayer, LayerGraph, Way
from penstock.plan.stages.graph_cost import GraphCost
from penstock.plan.stages.layer_row import border_bytes_of, single_device_options
from penstock.plan.stages.planned import PlannedStage, Rating, StageRating
from penstock.plan.stages.two_bw_cost import bandwidths

SWAP = "swap"
"""The name of the way of a layer whose activations are on the host between its passes."""


def memory_ways(graph: LayerGraph, host: float | None) -> list[tuple[Way, ...]]:
    """Return the ways of each layer on one device: those of the profile, and swapped.

    Args:
        graph: the layers.
        host: bytes per second to the memory of the host, and as much back; None if nothing is swapped.

    Raises:
        ConfigError: a layer cannot run on a single device.
    """
    found = single_device_options(graph, "planner 'dawnpiper'")
    if host is None:
        return found
    return [_with_swap(layer, ways, host) for layer, ways in zip(graph.layers, found, strict=True)]


def _with_swap(layer: GraphLayer, ways: tuple[Way, ...], host: float) -> tuple[Way, ...]:
    """Return the ways of a layer, and the one in which its activations are swapped if it has any."""
    plain = ways[0]
    held = plain.memory_per_microbatch
    if not held or any(way.name == SWAP for way in ways):
        return ways
    if layer.forward is None:
        late = max(0.0, 2 * held / host - plain.seconds)
    else:
        late = sum(max(0.0, held / host - passed) for passed in (layer.forward, plain.seconds - layer.forward))
    return (*ways, Way(SWAP, 1, plain.seconds + late, plain.parameters, plain.memory + held, 0.0))


class DawnPiperCost(GraphCost):
    """Rates pipelines of single devices. Of links up to two speeds count."""

    name = "dawnpiper"

    def rate(self, stages: tuple[PlannedStage, ...]) -> Rating:
        """Return what a plan costs.

        Raises:
            ConfigError: a layer cannot run on a single device, or has no such way.
        """
        if any((stage.replicas, stage.tensor, stage.inner) != (1, 1, ()) for stage in stages):
            return self.refused("its stages are not on one device each")
        options = memory_ways(self.graph, self.devices.host)
        along = bandwidths(self.devices, 1, len(stages))[1]
        hops = [size / along for size in border_bytes_of(self.graph, stages)]
        ratings = list[StageRating]()
        for at, stage in enumerate(stages):
            names = stage.ways or ("",) * len(stage.layers)
            ways = [self._way(options, number, name) for number, name in zip(stage.layers, names, strict=True)]
            parts = {"compute": sum(way.seconds for way in ways), "links": max(hops[at : at + 2])}
            flight = min(len(stages) - at, self.microbatches)
            memory = sum(way.memory + flight * way.memory_per_microbatch for way in ways)
            ratings.append(StageRating(max(parts.values()), parts, memory))
        return self.rating(ratings, len(stages), lambda: max(rating.seconds for rating in ratings))

    def _way(self, options: list[tuple[Way, ...]], number: int, name: str) -> Way:
        """Return a way of a layer; the first one if no name is given.

        Raises:
            ConfigError: it has no such way.
        """
        for way in options[number]:
            if name in ("", way.name):
                return way
        known = [way.name for way in options[number]]
        where = f"layer {self.graph.layers[number].name!r}"
        raise ConfigError(f"{where} has no way {name!r} to keep its activations.{did_you_mean(name, known)}")
