"""The blocks of a whole model, found by following its forward.

Blocks are cut where one value is alive. What lies between two cuts is a module of the model, a function, or a few of
them with whatever else the forward does there, written out as a class. Where the forward cannot be followed, or the
blocks would not compute what it does, there are none.
"""

from __future__ import annotations

from torch import fx, nn
from torch.fx.node import Node

from penstock.partition.followed_forward import CannotFollowError, forward_graph, hooked
from penstock.partition.written_steps import PartLines, StepWriter, part_of, place_of


class BlockLines:
    """Lines that make the blocks of a model.

    Attributes:
        classes: that they need, each as a text.
        items: of a dict of blocks.
        notes: why some layers are one block.
    """

    def __init__(self) -> None:
        self.classes: list[str] = []
        self.items: list[str] = []
        self.notes: list[str] = []


def blocks_of_forward(model: nn.Module) -> BlockLines:
    """Return the lines that cut a model.

    Raises:
        CannotFollowError: there are none that compute the same.
    """
    return _Cut(model, forward_graph(model)).code()


class _Cut:
    """A graph that is cut where one value is alive.

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
        self._place = {step: place for place, step in enumerate(self._steps)}
        self._last = {n: max((self._at(user) for user in n.users), default=-1) for n in nodes}
        self._code = BlockLines()
        self._found: list[str | PartLines] = []
        self._called: set[str] = set()
        self._names: set[str] = set()

    def _at(self, node: Node) -> int:
        return len(self._steps) if node.op == "output" else self._place[node]

    def code(self) -> BlockLines:
        """Return the lines.

        Raises:
            CannotFollowError: a part cannot be written.
        """
        begun, given = 0, self._input
        for place, _ in enumerate(self._steps):
            alive = [n for n in (self._input, *self._steps[: place + 1]) if self._last[n] > place]
            if len(alive) == 1:
                self._part(self._steps[begun : place + 1], given, alive[0])
                begun, given = place + 1, alive[0]
        if begun != len(self._steps):
            raise CannotFollowError("it computes values that it does not return")
        self._write()
        self._merge()
        return self._code

    def _part(self, steps: list[Node], given: Node, found: Node) -> None:
        """Note the block of some steps."""
        (first, *more) = steps
        for step in steps:
            if step.op == "call_module":
                self._check_call(str(step.target))
        if first.op == "call_module" and not more and first.args == (given,) and not first.kwargs:
            path = str(first.target)
            self._found.append(f"{self._name(path)!r}: {place_of(path)}")
            return
        alone = first.op != "call_module" and not more and found is first
        if alone and all(n.op != "get_attr" for n in first.all_input_nodes):
            writer = StepWriter({given: "x"}, {})
            self._found.append(f"{self._name(writer.short(first))!r}: lambda x: {writer.text(first)}")
        else:
            self._found.append(part_of(self._model, steps, given, found))
            self._note(steps, given)

    def _note(self, steps: list[Node], given: Node) -> None:
        """Say why layers are one block, where that is because all of them take a value that is made once."""
        calls = [step for step in steps if step.op == "call_module"]
        layers = [call for call in calls if next(self._modules[str(call.target)].parameters(), None) is not None]
        for value in (given, *steps):
            taking = [str(call.target) for call in layers if value in call.all_input_nodes]
            if value not in calls and len(taking) > 2:
                made = "the input" if value is given else f"what {value.name} makes"
                self._code.notes.append(
                    f"{taking[0]} to {taking[-1]} are one block, because each of them takes {made}, too; to cut "
                    "between them, make that again inside a block around each, or pass it on in a tuple (x, mask)"
                )
                return

    def _write(self) -> None:
        """Write what was found, layers in a row that are alike as one class."""
        while self._found:
            first = self._found.pop(0)
            if isinstance(first, str):
                self._code.items.append(first)
                continue
            number = first.number
            last = -1 if number is None else number
            while number is not None and self._found:
                following = self._found[0]
                if isinstance(following, str) or following.number != last + 1 or following.numbered != first.numbered:
                    break
                self._found.pop(0)
                last += 1
            name = f"Part{len(self._code.classes) + 1}"
            own = self._name(name.lower())
            if number is None or last == number:
                self._code.classes.append(first.text(name))
                self._code.items.append(f"{own!r}: {name}(model)")
            else:
                self._code.classes.append(first.numbered.text(name, ", i"))
                row = f"range({number}, {last + 1})" if number else f"range({last + 1})"
                self._code.items.append(f"**{{f'{own}.{{i}}': {name}(model, i) for i in {row}}}")

    def _check_call(self, path: str) -> None:
        """Refuse a second use of weights."""
        module = self._modules[path]
        if path in self._called and next(iter((*module.parameters(), *module.buffers())), None) is not None:
            raise CannotFollowError(f"it calls {path} more than once")
        self._called.add(path)

    def _name(self, wanted: str) -> str:
        name, number = wanted, 1
        while name in self._names:
            number += 1
            name = f"{wanted}_{number}"
        self._names.add(name)
        return name

    def _merge(self) -> None:
        """Write layers in a row as one item, and the parts of a Sequential."""
        for prefix, module in self._modules.items():
            if not isinstance(module, nn.ModuleList | nn.Sequential) or not len(module):
                continue
            each = [f"{f'{prefix}.{i}'!r}: {place_of(f'{prefix}.{i}')}" for i in range(len(module))]
            items = self._code.items
            at = items.index(each[0]) if each[0] in items else -1
            if at >= 0 and items[at : at + len(each)] == each:
                items[at : at + len(each)] = [spread(prefix)]
        for path, module in self._modules.items():
            whole = f"{path!r}: {place_of(path)}" if path else ""
            if whole in self._code.items:
                at = self._code.items.index(whole)
                self._code.items[at : at + 1] = called_parts(path, module) or [whole]


def called_parts(path: str, module: nn.Module) -> list[str]:
    """Return the items of a dict with the parts that a module of torch calls in turn; none for others."""
    prefix = f"{path}." if path else ""
    if type(module) is nn.TransformerEncoder and not hooked(module):
        norm = [] if module.norm is None else [f"'{prefix}norm': {place_of(f'{prefix}norm')}"]
        return [spread(f"{prefix}layers"), *norm]
    plain = type(module).forward is nn.Sequential.forward and type(module).__call__ is nn.Module.__call__
    if not plain or hooked(module) or module._parameters or module._buffers or "forward" in vars(module):
        return []
    names = list(module._modules)
    if len({id(part) for part in module._modules.values()}) < len(names) or len(names) < 2:
        return []
    if names == [str(i) for i in range(len(names))]:
        return [spread(path)]
    return [f"**{{f'{path}.{{part}}': block for part, block in {place_of(path)}.named_children()}}"]


def spread(prefix: str) -> str:
    """Write the items of a dict with the parts of a list of modules."""
    return f"**{{f'{prefix}.{{i}}': block for i, block in enumerate({place_of(prefix)})}}"
