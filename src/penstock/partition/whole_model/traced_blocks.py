"""The blocks of a whole model, found by following its forward.

What lies between two cuts (`partition.whole_model.forward_cuts`) is a module of the model, or some steps of the forward
(`partition.whole_model.fx_subgraph_module`); several values go on in a tuple. Where the forward cannot be followed,
there are no blocks.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set
from typing import Any

from torch import fx, nn
from torch.fx.node import Node

from penstock.partition.whole_model.forward_cuts import ForwardCuts, ForwardPart, name_of_step
from penstock.partition.whole_model.fx_subgraph_module import ModelPart, value_at
from penstock.partition.whole_model.fx_trace import forward_graph, hooked


def blocks_of_forward(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of a model by name.

    Raises:
        CannotFollowError: there are none that are known to compute the same.
    """
    return blocks_of_graph(model, forward_graph(model))


def blocks_of_graph(model: nn.Module, graph: fx.Graph) -> dict[str, nn.Module]:
    """Return the blocks by which a model computes what a graph says.

    Raises:
        CannotFollowError: the graph returns something else than one value, or uses weights twice.
    """
    return _Blocks(model, graph).made()


class _Blocks:
    """The blocks of a model.

    Args:
        model: which.
        graph: of its forward.
    """

    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        self._model, self._modules = model, dict(model.named_modules(remove_duplicate=False))
        self._cuts = ForwardCuts(model, graph)
        called = {str(step.target) for step in graph.nodes if step.op == "call_module"}
        self._taken = {f"{path}.{name}" for path in called for name, _ in self._modules[path].named_parameters()}
        self._blocks: dict[str, nn.Module] = {}

    def made(self) -> dict[str, nn.Module]:
        """Return them by name."""
        for part in self._cuts.parts():
            self._add(part)
        return self._blocks

    def _add(self, of: ForwardPart) -> None:
        """Add the block of some steps."""
        steps, given, found = of
        first = steps[0]
        alone = len(steps) == len(given) == 1 and found == [first]
        if alone and first.op == "call_module" and (first.args, first.kwargs) == ((given[0],), {}):
            path = str(first.target)
            for name, module in called_parts(path, self._modules[path]).items():
                self._blocks[self._name(name)] = module
            return
        title = self._name(_title(steps))
        aliases = self._aliases(steps, title)
        part = ModelPart(self._model, _graph_of_steps(steps, given, found, aliases, self._cuts.again), aliases)
        part.joined = self._cuts.joined(of)
        if part.joined:
            part.why_joined = self._cuts.why_joined(of)
        self._blocks[title] = part

    def _aliases(self, steps: Sequence[Node], title: str) -> dict[str, str]:
        """Return other names for the bare parameters in a block that other blocks have, too, with their paths."""
        aliases = {}
        for path in dict.fromkeys(str(n.target) for step in steps for n in step.all_input_nodes if n.op == "get_attr"):
            if not isinstance(value_at(self._model, path), nn.Parameter):
                continue
            if path in self._taken:
                aliases[f"{title.replace('.', '_')}.{path}"] = path
            self._taken.add(path)
        return aliases

    def _name(self, wanted: str) -> str:
        name, number = wanted, 1
        while name in self._blocks:
            number += 1
            name = f"{wanted}_{number}"
        return name


def _graph_of_steps(
    steps: Sequence[Node],
    given: Sequence[Node],
    found: Sequence[Node],
    aliases: Mapping[str, str],
    again: Set[Node],
) -> fx.Graph:
    """Return a graph of its own of some steps, and of what they take again; several values come and go as a tuple."""
    graph, names = fx.Graph(), {path: alias for alias, path in aliases.items()}
    value = graph.placeholder("x")
    if len(given) == 1:
        known = {given[0]: value}
    else:
        known = {node: graph.call_function(operator.getitem, (value, place)) for place, node in enumerate(given)}

    def here(node: Node) -> Node:
        if node not in known and node.op == "get_attr":
            known[node] = graph.get_attr(names.get(str(node.target), str(node.target)))
        elif node not in known and node in again:
            take(node)
        return known[node]

    def take(step: Node) -> None:
        for needed in step.all_input_nodes:  # a get_attr stands before the step, not within it
            here(needed)
        known[step] = graph.node_copy(step, here)
        known[step].meta.pop("is_wrapped", None)  # its code would wrap the function in every later trace

    for step in steps:
        take(step)
    results = tuple(map(here, found))
    graph.output(results[0] if len(results) == 1 else results)
    return graph


def _title(steps: Sequence[Node]) -> str:
    """Return a name for a block: that of its modules, or of its last step."""
    called = list(dict.fromkeys(str(step.target) for step in steps if step.op == "call_module"))
    if not called:
        return name_of_step(steps[-1]).strip("_")
    return called[0] if len(called) == 1 else f"{called[0]}..{called[-1]}"


def called_parts(path: str, module: nn.Module) -> dict[str, nn.Module]:
    """Return a module by name, or the parts that it calls in turn, where it is one of torch's that does no more."""
    prefix = f"{path}." if path else ""
    if type(module) is nn.TransformerEncoder and not hooked(module):
        layers = {f"{prefix}layers.{i}": layer for i, layer in enumerate(module.layers)}
        return layers if module.norm is None else {**layers, f"{prefix}norm": module.norm}
    plain = type(module).forward is nn.Sequential.forward and type(module).__call__ is nn.Module.__call__
    if not plain or hooked(module) or module._parameters or module._buffers or "forward" in vars(module):
        return {path: module}
    children: dict[str, Any] = dict(module._modules)
    if len(set(map(id, children.values()))) < len(children) or not children:
        return {path: module}
    if any(getattr(child, "inplace", False) for child in children.values()):  # it may write into what a stage received
        return {path: module}
    found: dict[str, nn.Module] = {}
    for name, child in children.items():
        found |= called_parts(f"{prefix}{name}", child)
    return found
