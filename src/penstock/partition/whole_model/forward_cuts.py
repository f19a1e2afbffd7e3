"""Where the forward of a model is cut into blocks, and why it is not cut further.

It is cut where one value is alive; within a row of layers that all take another value, too, such as a mask that is made
once, also where few are, which then go on together. Sizes of the input and parts of buffers do not count: every block
takes its own (`partition.whole_model.recomputed_values`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor, fx, nn
from torch.fx.node import Node

from penstock.partition.whole_model.fx_subgraph_module import value_at
from penstock.partition.whole_model.fx_trace import CannotFollowError
from penstock.partition.whole_model.recomputed_values import recomputed_among, size_in_words, sizes_among

_MANY = 2  # layers in one block, above which it is cut where several values are alive
_SHARE = 4  # of all layers one block may have no more than one in so many, if it can be cut at all
_MOST = 4  # values that go on in a tuple


class ForwardPart(NamedTuple):
    """What lies between two cuts.

    Attributes:
        steps: of the forward, in order.
        given: the values that are alive before.
        found: the values that are alive behind.
    """

    steps: list[Node]
    given: list[Node]
    found: list[Node]


class ForwardCuts:
    """A graph of a forward, and where it is cut.

    Args:
        model: whose forward it is.
        graph: of it.

    Attributes:
        again: the steps that are part of every block which needs their values.

    Raises:
        CannotFollowError: the graph returns something else than one value, or writes into the model.
    """

    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        self._model, self._modules = model, dict(model.named_modules(remove_duplicate=False))
        nodes = list(graph.nodes)
        self._steps = [n for n in nodes if n.op not in ("placeholder", "output", "get_attr")]
        (self._input,) = (n for n in nodes if n.op == "placeholder")
        self._output = next(n for n in nodes if n.op == "output").args[0]
        if not isinstance(self._output, Node) or not self._steps:
            raise CannotFollowError(f"it does not return one value that its modules compute{_returned(self._output)}")
        self._sizes = sizes_among(self._steps)
        written = [step.all_input_nodes[0] for step in self._steps if self._writes(step)]
        self._in_place = bool(written) or any(getattr(module, "inplace", False) for module in self._modules.values())
        own = next((node for node in written if node.op == "get_attr"), None)
        if own is not None:
            raise CannotFollowError(f"it writes into {own.target}")
        called = {str(step.target) for step in self._steps if step.op == "call_module"}
        self.again = set() if self._in_place else self._recomputed(called)
        self._steps = [step for step in self._steps if step not in self.again]
        self._place = {step: place for place, step in enumerate(self._steps)}
        self._last: dict[Node, int] = {}  # where each value is used last
        for node in reversed(nodes):
            self._last[node] = max(
                (self._last[user] if user in self.again else self._at(user) for user in node.users), default=-1
            )
        self._layers = sum(map(self._is_layer, self._steps))

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
        name, inputs = name_of_step(step), step.all_input_nodes
        in_place = (name.endswith("_") and not name.startswith("_")) or step.kwargs.get("inplace", False) is not False
        return in_place and bool(inputs)

    def parts(self) -> Iterator[ForwardPart]:
        """Yield the parts, one after the other.

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
                yield ForwardPart(self._steps[begun : cut + 1], given, found)
                begun, given = cut + 1, found

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

    def joined(self, part: ForwardPart) -> tuple[str, ...]:
        """Return the paths of the layers of a part, if it has too many for one block."""
        layers = [str(step.target) for step in part.steps if self._is_layer(step)]
        return tuple(layers) if len(layers) > _MANY else ()

    def why_joined(self, part: ForwardPart) -> str:
        """Return why a part has so many layers, and what to change in the forward."""
        if self._in_place:
            step = next((step for step in self._steps if self._writes(step)), None)
            which = "" if step is None else f" ({step.target if step.op == 'call_module' else name_of_step(step)})"
            return (
                f"the forward writes into values in place{which}, which may be alive elsewhere; write x = x + y for "
                "x += y, and pass no inplace=True"
            )
        between, layers = [], [step for step in part.steps if self._is_layer(step)]
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


def name_of_step(step: Node) -> str:
    """Return the name of what a step calls."""
    return str(step.target) if isinstance(step.target, str) else str(getattr(step.target, "__name__", "function"))


def _returned(output: object) -> str:
    """What a forward returns in place of one value, and what to do."""
    if not isinstance(output, dict | tuple | list) or not output:
        return ""
    named = f"dict with {', '.join(map(repr, output))}" if isinstance(output, dict) else f"sequence of {len(output)}"
    return f", but a {named}; let it return only what the loss takes"
