"""A planner after PaSE (Elango, IPDPS 2021, arXiv 2407.04001): for each layer a data and a tensor degree.

The configurations of all layers are chosen at once so that the cost, a sum over layers and edges, is the least. This is
exact: a dynamic program over the graph in an order with small dependent sets (`least_sum`). Layers that follow each
other in topological order with one configuration are a stage of the plan; all stages run on the same devices, in turns.
"""

from __future__ import annotations

import math
from itertools import groupby

import numpy as np

from penstock.errors import ConfigError
from penstock.plan.layer_configurations.least_sum import least_sum
from penstock.plan.layer_configurations.pase_cost import PaseCost
from penstock.plan.profile.layer_graph import LayerGraph
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.planned import Plan, PlannedStage, Search

_IN_TURNS = (
    "stages are layers of one configuration, in turns on the same devices: computed here; Pipeline cannot run them"
)


def plan_as_pase(graph: LayerGraph, devices: Devices, microbatches: int) -> Search:
    """Return the fastest configurations.

    Raises:
        ConfigError: a layer has none for these devices, or the search would be too large.
    """
    cost = PaseCost(graph, devices, microbatches)
    every, options = cost.configurations, [cost.choices(number) for number in range(len(graph.layers))]
    own = [
        np.array([sum(cost.parts(number, every[at]).values()) for at in choices])
        for number, choices in enumerate(options)
    ]
    pairs = {}
    for source, target, size in graph.edges:
        seconds = size * cost.resharding[np.ix_(options[source], options[target])]
        pairs[min(source, target), max(source, target)] = seconds if source < target else seconds.T
    try:
        found = least_sum(own, pairs)
    except OverflowError:
        raise ConfigError(
            f"planner 'pase' would keep too many combinations of {len(every)} configurations for layers that are read "
            "together; merge layers, or plan for fewer devices"
        ) from None
    chosen = [every[choices[at]] for choices, at in zip(options, found, strict=True)]
    groups = [(each, tuple(numbers)) for each, numbers in groupby(graph.order, key=lambda number: chosen[number])]
    stages = tuple(PlannedStage(numbers, each.data, each.tensor, in_turns=True) for each, numbers in groups)
    rating = cost.rate(stages)
    if math.isinf(rating.seconds):
        return Search(None, why=f"the fastest configurations do not fit, and no others are looked for: {rating.fault}")
    return Search(Plan(PaseCost.name, stages, rating, (_IN_TURNS,) if len(stages) > 1 else ()))
