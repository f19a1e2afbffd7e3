"""The blocks of a whole model, found by following its forward.

The forward is cut where one value is alive; within a row of layers that all take another value, too, such as a mask
that is made once, also where few are, which then go on together in a tuple. Sizes of the input and parts of buffers do
not count: every block takes its own (`partition.recomputed_values`). What lies between two cuts is a module of the
model, or some steps of the forward (`partition.fx_subgraph_module`). Where the forward cannot be followed, there are no
blocks.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import pairwise
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.node import Node

from penstock.partition.fx_subgraph_module import ModelPart, value_at
from penstock.partition.fx_trace import CannotFollowError, forward_graph, hooked
from penstock.partition.recomputed_values import recomputed_among, size_in_words, sizes_among

_MANY = 2  # layers in one block, above which it is cut where several values are alive
_SHARE = 4  # of all layers one block may have no more than one in so many, if it can be cut at all
_MOST = 4  # values that go on in a tuple


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
    return _Cut(model, graph).blocks()


class _Cut:
    """A graph that is cut into blocks.

    Args:
        model: whose forward it is.
        graph: of it.
    """

    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        self._model, self._modules = model, dict(model.named_modules(remove_duplicate=False))
        nodes = list(graph.nodes)
        self._steps = [n for n in nodes if n.op not in ("placeholder", "output", "get_attr")]
        (self._input,) = (n for n in nodes if n.op == "placeholder")
        self._output = next(n for n in nodes if n.op == "output").args[0]
        if not isinstance(self._output, Node) or not self._steps:
            raise CannotFollowError("it does not return one value that its modules compute")
        self._sizes = sizes_among(self._steps)
        written = [step.all_input_nodes[0] for step in self._steps if self._writes(step)]
        self._in_place = bool(written) or any(getattr(module, "inplace", False) for module in self._modules.values())
        own = next((node for node in written if node.op == "get_attr"), None)
        if own is not None:
            raise CannotFollowError(f"it writes into {own.target}")
        called = {str(step.target) for step in self._steps if step.op == "call_module"}
        self._again = set() if self._in_place else self._recomputed(called)
        self._steps = [step for step in self._steps if step not in self._again]
        self._place = {step: place for place, step in enumerate(self._steps)}
        self._last: dict[Node, int] = {}  # where each value is used last
        for node in reversed(nodes):
            self._last[node] = max(
                (self._last[user] if user in self._again else self._at(user) for user in node.users), default=-1
            )
        self._layers = sum(map(self._is_layer, self._steps))
        self._taken = {f"{path}.{name}" for path in called for name, _ in self._modules[path].named_parameters()}
        self._blocks: dict[str, nn.Module] = {}

    def _at(self, node: Node) -> int:
        return len(self._steps) if node.op == "output" else self._place[node]

    def _recomputed(self, called: Set[str]) -> set[Node]:
        """The steps that are part of every block which needs their values."""

        def is_constant(path: str) -> bool:
            value = value_at(self._model, path)
            written = any(path.startswith(f"{module}.") for module in called)
            return isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not written

        found = recomputed_among(self._steps, self._sizes, self._input, is_constant)
        return set() if self._output in found else found

    def _writes(self, step: Node) -> bool:
        """Whether a step writes into the tensor that it gets."""
        if step.op == "call_module":
            return bool(getattr(self._modules[str(step.target)], "inplace", False))
        name, inputs = _name_of(step), step.all_input_nodes
        in_place = (name.endswith("_") and not name.startswith("_")) or step.kwargs.get("inplace", False) is not False
        return in_place and bool(inputs)

    def blocks(self) -> dict[str, nn.Module]:
        """Return the blocks.

        Raises:
            CannotFollowError: values are computed that are not returned, or weights are used twice.
        """
        self._check_calls()
        alive = ((place, self._alive(place)) for place in range(len(self._steps)))
        ends = [place for place, found in alive if len(found) == 1 and found != [self._input]]
        if not ends or ends[-1] != len(self._steps) - 1:
            raise CannotFollowError("it computes values that it does not return")
        ends = [place for place in ends if place == ends[-1] or not self._writes(self._steps[place + 1])]
        begun, given = 0, [self._input]
        for end in ends:
            for cut in (*self._inner_cuts(begun, end), end):
                found = self._alive(cut)
                self._add(self._steps[begun : cut + 1], given, found)
                begun, given = cut + 1, found
        return self._blocks

    def _alive(self, place: int) -> list[Node]:
        """The values that are made up to a step and used after it."""
        return [n for n in (self._input, *self._steps[: place + 1]) if self._last[n] > place]

    def _inner_cuts(self, begun: int, end: int, longest: int = _MANY) -> Iterator[int]:
        """Yield where a long part is cut although several values are alive: between layers, where they are fewest.

        What is still long then, as values that die early make the last layers differ from the first, is cut again.
        """
        layers = [place for place in range(begun, end + 1) if self._is_layer(self._steps[place])]
        if self._in_place or len(layers) <= longest:
            return
        alive: dict[int, int] = {}
        for before, place in pairwise([begun, *layers] if begun else layers):  # the first block has a layer
            gap = [(len(found), -cut) for cut in range(before, place) if self._may_go_on(found := self._alive(cut))]
            if gap:
                number, cut = min(gap)
                alive[-cut] = number
        least = min(alive.values(), default=0)
        cuts = [cut for cut, number in alive.items() if number == least]
        for before, cut in pairwise([begun - 1, *cuts, end]):
            if cuts:
                yield from self._inner_cuts(before + 1, cut, max(_MANY, self._layers // _SHARE))
            if cut < end:
                yield cut

    def _may_go_on(self, values: Sequence[Node]) -> bool:
        return len(values) <= _MOST and not any(value in self._sizes for value in values)

    def _is_layer(self, step: Node) -> bool:
        return step.op == "call_module" and next(self._modules[str(step.target)].parameters(), None) is not None

    def _add(self, steps: list[Node], given: list[Node], found: list[Node]) -> None:
        """Add the block of some steps."""
        first = steps[0]
        alone = len(steps) == len(given) == 1 and found == [first]
        if alone and first.op == "call_module" and (first.args, first.kwargs) == ((given[0],), {}):
            path = str(first.target)
            for name, module in called_parts(path, self._modules[path]).items():
                self._blocks[self._name(name)] = module
            return
        title = self._name(_title(steps))
        aliases = self._aliases(steps, title)
        part = ModelPart(self._model, _graph_of_steps(steps, given, found, aliases, self._again), aliases)
        layers = [step for step in steps if self._is_layer(step)]
        if len(layers) > _MANY:
            part.joined, part.why_joined = tuple(str(layer.target) for layer in layers), self._why_joined(layers)
        self._blocks[title] = part

    def _why_joined(self, layers: Sequence[Node]) -> str:
        """Return why a block has so many layers, and what to change in the forward."""
        if self._in_place:
            step = next((step for step in self._steps if self._writes(step)), None)
            which = "" if step is None else f" ({step.target if step.op == 'call_module' else _name_of(step)})"
            return (
                f"the forward writes into values in place{which}, which may be alive elsewhere; write x = x + y for "
                "x += y, and pass no inplace=True"
            )
        between = []
        for before, layer in pairwise(layers):
            gap = map(self._alive, range(self._place[before], self._place[layer]))
            between.append((layer, min(gap, key=len)))
        for layer, found in between:
            size = next((value for value in found if value in self._sizes), None)
            if size is not None:
                said = size_in_words(size)
                return (
                    f"{said} is read before {layer.target} and used after it, and is no tensor; read it where it is "
                    f"used, of a tensor that is there, or of {self._input.name}, the input of the model"
                )
        most = max((found for _, found in between), key=len)
        names = ", ".join(node.name for node in most)
        return (
            f"{len(most)} values are alive between its layers ({names}), and {_MOST} may be; compute some of them "
            "where they are used"
        )

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

    def _check_calls(self) -> None:
        """Refuse a second use of weights, of which each version would have to be known.

        Raises:
            CannotFollowError: there is one.
        """
        called: set[str] = set()
        for step in self._steps:
            if step.op == "call_module":
                path = str(step.target)
                module = self._modules[path]
                if path in called and (any(True for _ in module.parameters()) or module.state_dict()):
                    raise CannotFollowError(f"it calls {path} more than once")
                called.add(path)

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


def _name_of(step: Node) -> str:
    return str(step.target) if isinstance(step.target, str) else str(getattr(step.target, "__name__", "function"))


def _title(steps: Sequence[Node]) -> str:
    """Return a name for a block: that of its modules, or of its last step."""
    called = list(dict.fromkeys(str(step.target) for step in steps if step.op == "call_module"))
    if not called:
        return _name_of(steps[-1]).strip("_")
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
