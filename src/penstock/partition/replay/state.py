"""What code around the layers of a model keeps from one forward to the next, apart for each stage that runs it.

Attributes of modules, what containers and objects on them hold, attributes of their classes, variables of files and
generators are *nodes*: objects whose contents a forward may change. All stages run the same code on the same objects,
so a stage finds in them what its own last forward left there, as in a process of its own. Between forwards they hold
what was really computed, for whoever looks.
"""

from __future__ import annotations

import operator
import random
import sys
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from penstock.errors import CapabilityError
from penstock.partition.replay.placeholder import Placeholder, Unknown

_COUNTING = (int, float, list, dict, set, deque, np.ndarray)  # of a class
_DEEP = 4  # levels of containers and objects that are looked into
_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
_IN_FILES = (*_PLAIN, *_COUNTING, Tensor, torch.Generator, SimpleNamespace, bytearray, array, Iterator, partial)
HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
_OF_TORCH = {*vars(nn.Module()), "_compiled_call_impl"} - {"_parameters", "_buffers"}
_ABSENT = object()


class Variables(NamedTuple):
    """Variables of a file that code of a model names.

    Attributes:
        file: its name.
        held: all of its variables.
        names: of those.
    """

    file: str
    held: dict[str, Any]
    names: frozenset[str]


class _Drawn(NamedTuple):
    """The state of a generator, and what it is compared by."""

    key: Any
    state: Any


class Node(NamedTuple):
    """An object, and what it holds, shallowly.

    Attributes:
        name: for messages.
        held: the object.
        contents: by key or place, or the state of a generator.
        versions: how often tensors among them were written.
    """

    name: str
    held: Any
    contents: Any
    versions: dict[Any, int]

    def name_of(self, key: Any) -> str:
        """Return the name of a part; None is the object itself, and buffers are named as modules name them."""
        return self.name if key in (None, "_buffers", "_parameters") else f"{self.name}.{key}".strip(".")

    def changes(self, now: Node) -> list[Any]:
        """Return the keys of what has changed, or [None] for something without keys."""
        old, new = self.contents, now.contents
        if isinstance(old, dict):
            keys = dict.fromkeys((*old, *new))
            return [
                key for key in keys if not _same(old.get(key, _ABSENT), new.get(key, _ABSENT))
                or self.versions.get(key) != now.versions.get(key)
            ]  # fmt: skip
        if isinstance(old, list):
            same = len(old) == len(new) and all(map(_same, old, new)) and self.versions == now.versions
        elif isinstance(old, np.ndarray):
            same = old.tobytes() == new.tobytes()
        else:
            same = old.key == new.key if isinstance(old, _Drawn) else old == new
        return [] if same else [None]

    def put(self) -> None:
        """Give the object these contents."""
        held, contents = self.held, self.contents
        if isinstance(contents, dict):
            now = _contents(held)
            for key in now.keys() - contents.keys():
                _set(held, key, _ABSENT)
            for key, value in contents.items():
                if now.get(key, _ABSENT) is not value:
                    _set(held, key, value)
        elif isinstance(held, set | deque):
            held.clear()
            (held.update if isinstance(held, set) else held.extend)(contents)
        elif isinstance(held, torch.Generator):
            held.set_state(contents.state)
        elif isinstance(held, np.random.Generator):
            held.bit_generator.state = contents.state
        elif isinstance(held, random.Random):
            held.setstate(contents.state)
        elif isinstance(held, np.ndarray):
            held[...] = contents
        elif isinstance(held, list | bytearray | array):
            held[:] = contents


def node_of(name: str, held: Any) -> Node | None:
    """Return an object with what it holds; None if it has nothing that a forward might change."""
    contents = _contents(held)
    if contents is None:
        return None
    tensors = [(key, value) for key, value in _items(contents) if isinstance(value, Tensor)]
    return Node(name, held, contents, {key: value._version for key, value in tensors if not value.is_inference()})


def nodes_of(modules: Iterable[tuple[str, nn.Module]], others: Iterable[tuple[str, Any]] = ()) -> dict[int, Node]:
    """Return modules, their classes, and other objects, with all that they hold, by identity."""
    found: dict[int, Node] = {}

    def look(name: str, held: Any, deep: int) -> None:
        outer = deep < _DEEP and isinstance(held, nn.Module | type)
        if outer or id(held) in found or type(held) is Unknown or (node := node_of(name, held)) is None:
            return
        found[id(held)] = node
        if deep:
            for key, part in _items(node.contents):
                if type(part) not in _PLAIN:
                    look(node.name_of(key), part, deep - 1)

    given = list(modules)
    for name, one in [*given, *_classes(module for _, module in given), *others]:
        look(name, one, _DEEP)
    return found


def _classes(modules: Iterable[nn.Module]) -> list[tuple[str, type]]:
    kinds = dict.fromkeys(kind for own in dict.fromkeys(map(type, modules)) for kind in own.__mro__)
    return [(kind.__name__, kind) for kind in kinds if not _of_library(kind.__module__)]


@contextmanager
def nothing_outside(model: nn.Module) -> Iterator[None]:
    """Put back what a copy of a model changes on classes, in files, and in functions that both have."""
    modules = list(model.modules())
    files = ((variables.file, variables) for variables in variables_of(modules))
    before = nodes_of(model.named_modules(), files)
    try:
        yield
    finally:
        for node in before.values():
            node.put()


def _contents(held: Any) -> Any:
    if isinstance(held, nn.Module):
        return {key: value for key, value in vars(held).items() if key not in _OF_TORCH}
    if isinstance(held, type):
        return {k: v for k, v in vars(held).items() if not k.startswith("__") and isinstance(v, _COUNTING)}
    if isinstance(held, Variables):
        return {name: held.held[name] for name in held.names if name in held.held}
    if isinstance(held, FunctionType):
        cells = enumerate(held.__closure__ or ())
        inner: dict[Any, Any] = {place: cell.cell_contents for place, cell in cells if _filled(cell)}
        return inner | {("default", place): part for place, part in enumerate(held.__defaults__ or ())} | vars(held)
    if isinstance(held, partial):
        return [held.func, *held.args, *held.keywords.values()]
    if isinstance(held, MethodType):
        return [held.__self__]
    if isinstance(held, bytearray | array):
        return held[:]
    if isinstance(held, Iterator) and _of_library(type(held).__module__):
        return _Drawn((repr(held), operator.length_hint(held, -1)), None)
    if isinstance(held, dict):
        return dict(dict.items(held))  # of some, indexing makes another value
    if isinstance(held, list | deque | tuple):
        return list(held)
    if isinstance(held, set):
        return set(held)
    if isinstance(held, np.ndarray):
        return held.copy()
    if isinstance(held, torch.Generator):
        return _Drawn((state := held.get_state()).numpy().tobytes(), state)
    if isinstance(held, np.random.Generator):
        return _Drawn(repr(held.bit_generator.state), held.bit_generator.state)
    if isinstance(held, random.Random):
        return _Drawn(held.getstate(), held.getstate())
    if isinstance(held, Tensor | ModuleType) or (callable(held) and _of_library(type(held).__module__)):
        return None
    if hasattr(held, "__dict__"):
        return dict(vars(held))
    slots = getattr(type(held), "__slots__", ()) if not _of_library(type(held).__module__) else ()
    return {name: getattr(held, name) for name in slots if hasattr(held, name)} or None


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _items(contents: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(contents, dict):
        return contents.items()
    return enumerate(contents) if isinstance(contents, list) else ()


def _set(held: Any, key: Any, value: Any) -> None:
    """Set a part of what an object holds, or remove it."""
    if isinstance(held, FunctionType) and isinstance(key, int):
        held.__closure__[key].cell_contents = value  # type: ignore[index]
    elif isinstance(held, type) or (not hasattr(held, "__dict__") and not isinstance(held, dict | Variables)):
        delattr(held, key) if value is _ABSENT else setattr(held, key, value)
    else:
        target = held if isinstance(held, dict) else held.held if isinstance(held, Variables) else vars(held)
        if value is _ABSENT:
            del target[key]
        else:
            target[key] = value


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, _PLAIN) and bool(one == other))


def variables_of(modules: Iterable[nn.Module]) -> list[Variables]:
    """Return the variables of files that code of modules names, directly or in functions that it calls."""
    found: dict[int, tuple[dict[str, Any], set[str]]] = {}
    looked: set[int] = set()

    def look(function: Any) -> None:
        function = getattr(function, "__func__", getattr(function, "fget", function))
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        if not isinstance(function, FunctionType) or id(function) in looked or _of_library(function.__module__):
            return
        looked.add(id(function))
        names = _names_in(function.__code__)
        files = [function.__globals__]
        files += [
            vars(m) for n in names if isinstance(m := files[0].get(n), ModuleType) and not _of_library(m.__name__)
        ]
        for file in files:
            for name in names & file.keys():
                value = file[name]
                look(value)
                if isinstance(value, FunctionType) and not _of_library(value.__module__):
                    keeps = bool(value.__closure__ or value.__defaults__ or vars(value))
                else:
                    keeps = isinstance(value, _IN_FILES) or type(value).__module__ == file.get("__name__")
                if keeps and not isinstance(value, nn.Module):
                    found.setdefault(id(file), (file, set()))[1].add(name)

    for _, kind in _classes(modules):
        for function in vars(kind).values():
            look(function)
    return [Variables(str(file.get("__name__")), file, frozenset(names)) for file, names in found.values()]


def _of_library(name: str | None) -> bool:
    first = (name or "builtins").partition(".")[0]
    return first in sys.stdlib_module_names or first in ("torch", "penstock", "numpy")


def _names_in(code: CodeType) -> set[str]:
    inner = (_names_in(part) for part in code.co_consts if isinstance(part, CodeType))
    return set(code.co_names).union(*inner)


class FrameState:
    """What code around the units of a model keeps, apart for each stage.

    Args:
        around: the modules that are in no unit, by path.
        others: nodes elsewhere, by name.
        changed: names of what forwards are known to change; others are added.
    """

    def __init__(
        self, around: Mapping[str, nn.Module], others: Iterable[tuple[str, Any]] = (), changed: set[str] | None = None
    ) -> None:
        self._around, self._others = around, list(others)
        self._buffers = {id(module._buffers) for module in around.values()}
        self.changed: set[str] = set() if changed is None else changed
        self._own: dict[int | None, dict[int, Node]] = {}  # by stage: what its forwards have left, and found
        self._alone: dict[int | None, Any] = {}  # by stage: tensors there that one stage alone has computed
        self._public: dict[int, Node] = {}  # the same as it is between forwards

    def add_stage(self, stage: int | None) -> None:
        """Add a stage, ahead of the first forward of any."""
        self._own[stage], self._alone[stage] = {}, WeakTensorKeyDictionary()

    def saved(self, stage: int | None) -> dict[int, Node]:
        """Return what a forward of a stage would find now, to run it again later."""
        self._follow()
        return self._look() | self._own[stage]

    def restore(self, stage: int | None, saved: Mapping[int, Node]) -> None:
        """Let the next forward of a stage find what an earlier one has found."""
        self._own[stage] = {key: saved.get(key, node) for key, node in self._own[stage].items()}

    @contextmanager
    def of(
        self,
        stage: int | None,
        forward: Any,
        saved: Mapping[int, Node] | None = None,
        places: Mapping[str, Tensor] | None = None,
    ) -> Iterator[dict[str, Tensor]]:
        """Let objects hold what a stage has left in them, while it runs a forward.

        Args:
            stage: which.
            forward: what it runs, a `StageForward`.
            saved: what an earlier forward has found that is run again now (`saved`), and changes nothing any more.
            places: tensors that the stage has of the modules around units, by name.

        Yields:
            What the forward has left in these places, once it has ended.

        Raises:
            CapabilityError: the forward has changed something that stages cannot keep apart.
        """
        self._follow()
        for node in (self._own[stage] if saved is None else saved).values():
            node.put()
        random_numbers = random.getstate(), _numpy_state()
        found, left = self._look(), dict[str, Tensor]()
        places, alone = places or {}, self._alone[stage]

        def kept(name: str, tensor: Tensor) -> Tensor:
            kept: Tensor = forward.kept(name, places.get(name, tensor), tensor in alone)
            return kept

        try:
            begun = {key: _mapped(node, kept) for key, node in found.items()}
            yield left
            ended = self._look()
            pairs = ((key, node, ended[key]) for key, node in begun.items() if key in ended)
            changes = {key: keys for key, node, now in pairs if (keys := node.changes(now))}
            self._check(forward, begun, ended, changes, random_numbers)
        except BaseException:
            saved = saved or found
            raise
        finally:
            for key, node in (saved or {}).items():
                self._public.get(key, node).put()
        if saved is None:
            self._keep(stage, forward, found, begun, ended, changes, left)

    def _look(self) -> dict[int, Node]:
        return nodes_of(self._around.items(), self._others)

    def _follow(self) -> None:
        """Let all stages find what somebody else has changed between forwards."""
        for key, node in list(self._public.items()):
            now = node_of(node.name, node.held)
            if now is not None and node.changes(now):
                self._public[key] = now
                for own in self._own.values():
                    own.pop(key, None)

    def _check(
        self, forward: Any, begun: Mapping[int, Node], ended: Mapping[int, Node], changes: Mapping[int, Any], drawn: Any
    ) -> None:
        if drawn != (random.getstate(), _numpy_state()):
            raise CapabilityError(
                "code between layers changes Python's random numbers or NumPy's, and each stage would do that with "
                "what it has; draw from torch's random numbers"
            )
        for key, keys in changes.items():
            node, now = begun[key], ended[key]
            if isinstance(node.held, Iterator):
                raise CapabilityError(
                    f"code between layers takes the next of {node.name}, which stages cannot keep apart; count with a "
                    "number"
                )
            before, after = dict(_items(node.contents)), dict(_items(now.contents))
            for part in keys if isinstance(now.contents, dict) else after:
                one, other = before.get(part), after.get(part)
                if isinstance(one, nn.Parameter) or isinstance(other, nn.Parameter):
                    raise CapabilityError(
                        f"code between layers changes the parameter {node.name_of(part)}, and each stage would do that "
                        "with what it has; put it into a layer"
                    )
                written = one is other and node.versions.get(part) != now.versions.get(part)
                if written or key in self._buffers:
                    forward.check_state(node.name_of(part), key in self._buffers)
            self.changed.update(map(node.name_of, keys))

    def _keep(
        self,
        stage: int | None,
        forward: Any,
        found: dict[int, Node],
        begun: dict[int, Node],
        ended: dict[int, Node],
        changes: dict[int, list[Any]],
        left: dict[str, Tensor],
    ) -> None:
        """Keep what a stage has left, and let objects hold what was really computed."""
        alone = self._alone[stage]

        def note(name: str, tensor: Tensor) -> Tensor:
            left[name] = tensor
            if isinstance(tensor, Placeholder) or not forward.depends(tensor):
                return tensor
            alone[made := _without_graph(name, tensor)] = True
            return made

        if forward.ended:
            for key, node in ended.items():
                changes |= {key: []} if _forgotten(node, self.changed, alone) is not node else {}
        for key in changes:
            for own in self._own.values():
                own.setdefault(key, self._public.setdefault(key, found[key]))
        before = self._own[stage]
        own = self._own[stage] = {key: node for key, node in ended.items() if key in before}
        for key in own:
            ended[key] = own[key] = _mapped(ended[key], note)
            if forward.ended:
                own[key] = _forgotten(ended[key], self.changed, alone)
        for key, node in (before | found).items():
            if key in own:
                others = [held[key] for number, held in self._own.items() if number != stage and key in held]
                now = _merged([*others, self._public[key]], ended[key], changes.get(key, []))
                now.put()
                self._public[key] = node_of(now.name, now.held) or now
            elif key not in found or begun[key] is not node:
                self._public.get(key, node).put()


def _mapped(node: Node, function: Callable[[str, Tensor], Tensor]) -> Node:
    """Put others in the place of tensors that an object holds, directly or in tuples."""
    if isinstance(node.held, tuple | partial | MethodType):
        return node

    def one(name: str, part: Any) -> Any:
        if isinstance(part, Tensor):
            return function(name, part)
        if type(part) is not tuple:
            return part
        parts = tuple(one(f"{name}.{place}", inner) for place, inner in enumerate(part))
        return part if all(map(operator.is_, parts, part)) else parts

    held = [pair for pair in _items(node.contents) if isinstance(pair[1], Tensor) or type(pair[1]) is tuple]
    parts = {key: one(node.name_of(key), part) for key, part in held}
    if all(parts[key] is part for key, part in held):
        return node
    contents = {**dict(_items(node.contents)), **parts}
    made = node._replace(contents=contents if isinstance(node.contents, dict) else list(contents.values()))
    made.put()
    return node_of(node.name, node.held) or made


def _without_graph(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor as the next forward may have it, without the graph of this one."""
    if tensor.grad_fn is None:
        return tensor

    def refuse(_: Tensor) -> None:
        raise CapabilityError(
            f"a gradient comes to {name}, which an earlier forward has left, whose backward is another; detach it"
        )

    made = tensor.detach().requires_grad_()
    made.register_hook(refuse)  # type: ignore[no-untyped-call]
    return made


def _merged(known: Sequence[Node], ended: Node, keys: Collection[Any]) -> Node:
    """Return what an object holds between forwards: what a stage has left, and what others have of what it has not."""
    public = known[-1]
    if not isinstance(public.contents, dict):
        contents = ended.contents
        for node in known if keys else ():
            contents = _joined(node.contents, contents)
        return ended._replace(contents=contents) if keys else public
    left = {key: ended.contents.get(key, _ABSENT) for key in keys}
    for node in known:
        left = {key: _joined(node.contents.get(key, _ABSENT), value) for key, value in left.items()}
    contents = {key: value for key, value in (public.contents | left).items() if value is not _ABSENT}
    return public._replace(contents=contents)


def _joined(old: Any, new: Any) -> Any:
    """Return a value with that of another stage wherever it is only a placeholder."""
    if type(new) is Unknown or isinstance(new, Placeholder):
        return old if type(old) is not Unknown else new
    if type(new) is dict:
        was = old if type(old) is dict else {}
        parts: Any = {key: _joined(was.get(key, part), part) for key, part in new.items()}
        return new if all(parts[key] is part for key, part in new.items()) else parts
    if type(new) in (list, tuple):
        known = [*(old if type(old) is type(new) else ())][: len(new)]
        parts = [*map(_joined, known, new), *new[len(known) :]]
        return new if all(map(operator.is_, parts, new)) else type(new)(parts)
    return new


def _forgotten(node: Node, changed: Collection[str], alone: Collection[Any]) -> Node:
    """Return what a stage has of an object that could not follow the forward to the end, which changes some names."""
    if not isinstance(node.held, nn.Module | type | Variables):
        return node
    contents = dict(node.contents)
    for name, key in [(node.name_of(key), key) for key in contents if key not in ("_buffers", "_parameters")]:
        known = isinstance(contents[key], Tensor) and contents[key] in alone
        if not known and any(f"{other}.".startswith(f"{name}.") for other in changed):
            contents[key] = Unknown(name)
    return node._replace(contents=contents)


def _numpy_state() -> Any:
    state = np.random.get_state(legacy=False)
    return state["state"]["pos"], state["state"]["key"].tobytes()
