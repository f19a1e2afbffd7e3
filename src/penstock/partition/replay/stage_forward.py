"""One forward of a whole model, as one of its stages runs it.

Every stage runs the model's own forward. *Units* are calls of layers with weights; the operations between them are the
*frame*. All are numbered as they happen. What depends on weights, or on floating-point inputs, is computed on one stage
only: a unit on its own, an operation on that of the last unit before it. Elsewhere a `Placeholder` stands in its place,
or what was sent. What the rest of the forward, behind a stage's last unit, takes of the values that are there is what
later stages need; it is sent on. All else, such as masks, every stage computes for itself.

A stage that computes with the wrong values would be silent, so whatever is not seen is refused: a placeholder has no
values, and the shapes that it was expected to have are compared where the values are.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode_temporarily
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from penstock.errors import CapabilityError
from penstock.partition.replay.auxiliary import auxiliary
from penstock.partition.replay.placeholder import (
    Placeholder,
    ResultSpec,
    SameTensor,
    TensorSpec,
    result_as_text,
    result_of_text,
)
from penstock.partition.replay.specs import Specs, leaves_in, line_of_user, op_name, spec_of

Seed = Callable[[str], None]
"""Seeds torch's generators for a unit or an operation of the frame, by its name."""
Note = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any], Any], None]
"""Takes down that a function was called with such arguments, and what it returned."""


class Cut(NamedTuple):
    """Where the units of a model run.

    Attributes:
        stages: of each unit, by the path of its module.
        last: the number of the last stage.
    """

    stages: Mapping[str, int]
    last: int


class HiddenWriteError(CapabilityError):
    """A unit, or code around units, does something that stages see if they know of it.

    Attributes:
        path: of a unit that others see into if it is opened, or else if its hooks run on every stage.
        buffer: the name of one that code around units changes.
    """

    def __init__(self, said: str, path: str = "", buffer: str = "") -> None:
        super().__init__(said)
        self.path, self.buffer = path, buffer


@dataclass(slots=True)
class _Value:
    """What is known of a tensor that is here.

    Attributes:
        key: by which stages know it.
        alone: one stage computes it; every stage, otherwise.
        taken: how many calls of units came before it, and before it was last taken.
        nbytes: of the tensor.
        behind: a later stage writes into it.
    """

    key: str
    alone: bool
    taken: tuple[int, int]
    nbytes: int
    behind: bool = False


@dataclass(slots=True)
class _Memory:
    """What is known of the memory of values that one stage computes.

    Attributes:
        there: whether it still is.
        stale: every stage has made it, and another one has written into it.
        name: of the buffer of code around units that it is of.
    """

    there: StorageWeakRef
    stale: bool = False
    name: str = ""


class _EndedError(BaseException):
    """A stage cannot follow the forward any further."""


class StageForward(TorchFunctionMode):
    """Runs one forward of a model as one stage does.

    Args:
        model: the whole model.
        specs: of its units.
        cut: where they run.
        stage: this one; None to run all of it.
        received: values from earlier stages.
        seed: for units and operations that may draw random numbers.
        bound: versions of weights are in the places of the parameters that this stage trains.
        note: is told of the operations that run here, and of their results; None where nobody asks.

    Attributes:
        specs: the same.
        sent: what later stages need of the values that are here, and as text what they cannot know of results.
        calls: the units that were called, in their order.
        used: identities of the parameters and buffers that the frame took, with the units before (None before the
            first), each with the operation.
        lives: of the values that one stage computes, where all of the model runs: how many calls of units came before
            them, how many before they were last taken, and their bytes.
        spans: of the buffers that code around units changes, likewise: how many calls of units came before they were
            first taken, and before they were last changed.
        ended: the stage could not follow the forward to its end.
    """

    def __init__(
        self,
        model: nn.Module,
        specs: Specs,
        cut: Cut,
        stage: int | None,
        received: Mapping[str, Any],
        seed: Seed,
        *,
        bound: bool = False,
        note: Note | None = None,
    ) -> None:
        super().__init__()
        self._model, self.specs, self._cut, self._stage, self._seed = model, specs, cut, stage, seed
        self._received, self._bound, self._note = received, bound, note
        self._number, self._minor, self._at = 0, 0, 0
        self.borders: Any = None  # what watches them, in a recording
        self._values: Any = WeakTensorKeyDictionary()  # of tensors that are here, each with its _Value
        self._memories: dict[int, _Memory] = {}  # by storage
        self._held: list[Tensor] = []  # graphs may keep others when the forward is run again
        self._records: list[_Value] = []  # of all values, where all of the model runs
        self._names: dict[int, str] = {}  # of tensors that were there before
        self.ended = False
        self.sent: dict[str, Any] = {}
        self.calls: list[str] = []
        self.used: dict[int, dict[str | None, str]] = {}
        self.spans: dict[str, tuple[int, int]] = {}

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the forward, and return the output of the model; on an earlier stage it has placeholders.

        Raises:
            CapabilityError: the model does something between its units that cannot be divided.
        """
        units = self.specs.units
        before = {path: vars(unit).pop("_compiled_call_impl", None) for path, unit in units.items()}
        try:
            for path, unit in units.items():
                call = before[path] or unit._call_impl
                vars(unit)["_compiled_call_impl"] = _UnitCall(self, path, call)
            args, kwargs = pytree.tree_map(self._given, (tuple(args), dict(kwargs)))
            output = None
            with self, _functions_as_operations(), suppress(_EndedError):
                output = self._model(*args, **kwargs)
        finally:
            for path, unit in units.items():
                vars(unit).pop("_compiled_call_impl", None)
                if before[path] is not None:
                    vars(unit)["_compiled_call_impl"] = before[path]
        self._at = self._cut.last
        for leaf in leaves_in(() if self.ended else output):
            self._use(leaf, "the output of the model")
        self._check_views()
        return output

    @property
    def lives(self) -> dict[str, tuple[int, int, int]]:
        return {value.key: (*value.taken, value.nbytes) for value in self._records}

    def end(self) -> None:
        """End the forward, if its way depends on what a later stage computes: that gets all that is here."""
        if not self._behind:
            return
        if not self.ended:
            self.ended = True
            for tensor, value in self._values.items():
                if value.alone:
                    self.sent[value.key] = tensor
                    value.behind |= value.key in self.specs.written
        raise _EndedError

    def _check_views(self) -> None:
        """Refuse to send several views of memory into which a later stage writes: there they would be apart."""
        written = [_storage(tensor) for tensor, value in self._values.items() if value.behind]
        if written:
            sent = [_storage(tensor) for tensor in leaves_in(self.sent)]
            if any(sent.count(storage) > 1 for storage in written):
                raise CapabilityError(
                    "a later stage writes into a tensor of which it also has another view; let it write into a copy"
                )

    def kept(self, name: str, tensor: Tensor, alone: bool) -> Tensor:
        """Return what a stage has in the place of a tensor that was there before the forward.

        Args:
            name: of it.
            tensor: what it finds.
            alone: it alone has computed this.
        """
        key, unit = f"state {name}", self.specs.state.get(name)
        if isinstance(tensor, nn.Parameter):
            return tensor
        if key in self._received:
            tensor = self._taken(key)
        elif isinstance(tensor, Placeholder) or (
            unit is not None and self._stage is not None and self._cut.stages[unit] != self._stage
        ):
            return Placeholder(TensorSpec.of(tensor), f"{name}, as an earlier forward has left it")
        elif unit is None and not alone:
            self._names[id(tensor)] = name
            return tensor
        self._own(tensor, key)
        self._memories[_storage(tensor)].name = name if unit is not None else ""
        return tensor

    def born(self, tensor: Tensor) -> int | None:
        """Return how many calls of units came before a value that one stage computes; None for others."""
        found = self._values.get(tensor)
        return found.taken[0] if found is not None and found.alone else None

    def check_state(self, name: str, buffer: bool) -> None:
        """Make sure that the forward may have changed a tensor that was there before.

        Raises:
            CapabilityError: stages do not know of it.
        """
        if name not in self.specs.state:
            self._refuse_write("code between layers", name, buffer)

    def _refuse_write(self, by: str, name: str, buffer: bool) -> NoReturn:
        if buffer and self._stage is None:
            raise HiddenWriteError(f"{by} changes the buffer {name}{line_of_user()}", buffer=name)
        hint = "take an example that does so, too" if buffer else "make it a buffer (register_buffer)"
        raise CapabilityError(
            f"{by} writes into {name or 'a tensor'}, which was there before the forward{line_of_user()}; let it make a "
            f"new tensor, or {hint}"
        )

    def _given(self, leaf: Any) -> Any:
        """Return an argument of the model; one in floating point is a value of the first stage."""
        if isinstance(leaf, Placeholder | TensorSpec) or (isinstance(leaf, Tensor) and leaf.is_floating_point()):
            spec = leaf if isinstance(leaf, TensorSpec) else TensorSpec.of(leaf)
            return self._noted(leaf if self._mine and isinstance(leaf, Tensor) else spec, (), "an input of the model")
        return leaf

    def _next(self) -> None:
        """Number what one stage alone computes. What all compute is counted in between: it may come from a cache."""
        self._number, self._minor = self._number + 1, 0

    # --- values -------------------------------------------------------------------------------------------------------

    @property
    def _mine(self) -> bool:
        return self._stage is None or self._at == self._stage

    @property
    def _behind(self) -> bool:
        return self._stage is not None and self._at > self._stage

    def _noted(self, result: Any, leaves: Sequence[Tensor], origin: str) -> Any:
        """Number the tensors of a result, and put placeholders, or what was received, for those of other stages."""
        self._next()
        count, known = 0, list(leaves)

        def one(leaf: Any) -> Any:
            nonlocal count
            if isinstance(leaf, SameTensor):
                return known[leaf.place]
            if not isinstance(leaf, Tensor | TensorSpec) or any(leaf is given for given in known):
                return leaf
            count += 1
            key = f"{self._number}.{count} {origin}"
            if not isinstance(leaf, TensorSpec):
                self._own(leaf, key)
            elif key in self._received:
                leaf = self._taken(key)
                self._own(leaf, key)
            else:
                leaf = Placeholder(leaf, origin)
            known.append(leaf)
            return leaf

        if isinstance(result, ResultSpec):
            return pytree.tree_unflatten([one(leaf) for leaf in result.leaves], result.tree)
        return pytree.tree_map(one, result)

    def _elsewhere(self, what: Any, expected: Callable[[], ResultSpec], leaves: Sequence[Tensor], origin: str) -> Any:
        """Return what stands for a result of another stage."""
        key = f"{self._number + 1} {origin}"
        if (text := self._received.get(key)) is not None:
            self.sent[key] = text
            device = next((leaf.device for leaf in leaves), torch.device("cpu"))
            return self._noted(result_of_text(text, device), leaves, origin)
        if what in self.specs.units and what in self.specs.untold:
            self.end()
        try:
            found = expected()
            if _has_numbers(found):
                raise CapabilityError(f"the example does not show that {origin} gives numbers{line_of_user()}")
        except CapabilityError:
            self.end()
            raise
        return self._noted(found, leaves, origin)

    def _tell(self, what: Any, expected: Callable[[], ResultSpec], leaves: Sequence[Tensor], result: Any) -> None:
        """Send what other stages cannot know of a result; in a recording, note whether there is such a thing.

        Raises:
            CapabilityError: the example did not show that there is.
        """
        specs, found = self.specs, spec_of(result, leaves)
        if self._stage is None:
            try:
                known = _essence(found) == _essence(expected()) and not _has_numbers(found)
            except CapabilityError:
                known = False
            if not known:
                specs.untold.add(what)
                result_as_text(found)
        elif what in specs.untold:
            self.sent[f"{self._number + 1} {op_name(what)}"] = result_as_text(found)
        elif _essence(found) != _essence(expected()):
            raise CapabilityError(
                f"{op_name(what)} returned {_in_words(found)}, and {_in_words(expected())} for arguments of the same "
                "shapes with other values, which stages that do not compute it cannot know; take an example that shows "
                "that it depends on values"
            )

    def _taken(self, key: str) -> Tensor:
        """Return a value that was received; a copy, if it may be written into."""
        received: Tensor = self._received[key]
        return received.clone() if key in self.specs.written else received

    def _own(self, value: Tensor, key: str) -> None:
        if value.layout != torch.strided:
            raise CapabilityError(
                f"a {value.layout} tensor of values of layers{line_of_user()} cannot be sent to others"
            )
        found = self._values.get(value)
        if found is None or not found.alone:
            self._values[value] = record = _Value(key, True, (len(self.calls), len(self.calls)), value.nbytes)
            if self._stage is None:
                self._records.append(record)
        if self._stage not in (None, self._cut.last) and torch.is_grad_enabled():
            self._held.append(value)
        self._memory_of(value)

    def _memory_of(self, value: Tensor) -> _Memory:
        storage = value.untyped_storage()
        found = self._memories.get(storage._cdata)
        if found is None or found.there.expired():  # type: ignore[no-untyped-call]
            found = self._memories[storage._cdata] = _Memory(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
        return found

    def _key_of(self, value: Tensor) -> str | None:
        """Return the key of a value that one stage computes, and that is here."""
        found = self._values.get(value)
        return found.key if found is not None and found.alone else None

    def _is_stale(self, value: Tensor) -> bool:
        return bool(self._memories) and (found := self._memories.get(_storage(value))) is not None and found.stale

    def depends(self, value: Tensor) -> bool:
        """Whether one stage alone computes a value."""
        if isinstance(value, Placeholder | nn.Parameter) or self._key_of(value) is not None:
            return True
        if value.requires_grad and value.is_leaf:  # weights of a version
            return True
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            return self.depends(torch._C._functorch.get_unwrapped(value))
        if not self._memories:
            return False
        found = self._memories.get(_storage(value))
        return found is not None and not found.there.expired()  # type: ignore[no-untyped-call]

    def _use(self, value: Tensor, by: str) -> None:
        """Note that something at the present place takes a value: it has to be here, or is sent on."""
        if self._mine:
            if isinstance(value, Placeholder):
                raise CapabilityError(
                    f"{by} takes the value of {value.origin}, which earlier stages did not expect to be needed, so it "
                    f"was not sent{line_of_user()}"
                )
            if self._is_stale(value):
                raise CapabilityError(f"{by} takes a tensor into which an earlier stage wrote{line_of_user()}")
            if (known := self._values.get(value)) is not None:
                known.taken = known.taken[0], len(self.calls)
            if self._stage is None and (name := self._name_of(value)):
                self.spans.setdefault(name, (len(self.calls), len(self.calls)))
            return
        if self._stage is None or self._at < self._stage or isinstance(value, Placeholder | nn.Parameter):
            return
        key = self._key_of(value)
        if key is not None:
            self.sent[key] = value
        elif self._is_stale(value):
            return  # a later stage makes and writes it itself
        elif self.depends(value) and not (value.requires_grad and value.is_leaf):
            raise CapabilityError(f"{by} takes a tensor that was made in a way that cannot be seen{line_of_user()}")

    def _name_of(self, value: Tensor) -> str:
        """Return the name of the buffer that a tensor is of; "" for others."""
        found = self._memories.get(_storage(value)) if self.specs.state else None
        return found.name if found is not None else ""

    # --- units --------------------------------------------------------------------------------------------------------

    def call_unit(self, path: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a unit, or return what stands for its result."""
        if self.ended:  # and somebody has caught that
            raise _EndedError
        stage = self._cut.stages[path]
        if stage < self._at:
            raise CapabilityError(
                f"{path} belongs to stage {stage}, but is called behind layers of stage {self._at}{line_of_user()}"
            )
        self._at = stage
        self.calls.append(path)
        leaves = list(leaves_in((args, kwargs)))
        for leaf in leaves:
            self._use(leaf, path)
        expected = partial(self.specs.of_unit, path, args, kwargs, leaves)
        if not self._mine:
            return self._elsewhere(path, expected, leaves, path)
        versions = [leaf._version for leaf in leaves if not leaf.is_inference()]
        held = _sizes((args, tuple(kwargs.values()))) if self._stage is None else None
        self._seed(f"{path}/{len(self.calls)}")
        if self.borders is None:
            result = call(*args, **kwargs)
        else:
            self.borders.begin(path, leaves)
            with torch.random.fork_rng(devices=[]):
                result = call(*args, **kwargs)
            self.borders.end((*leaves_in(result), *leaves))
        if [leaf._version for leaf in leaves if not leaf.is_inference()] != versions:
            raise HiddenWriteError(
                f"{path} writes into its argument, which other stages cannot see; let it make a new tensor "
                "(inplace=False)", path,
            )  # fmt: skip
        if held is not None and _sizes((args, tuple(kwargs.values()))) != held:
            raise CapabilityError(
                f"{path} puts something into a list or dict that it is given, as caches do, which other stages cannot "
                "see (models of transformers: use_cache=False)"
            )
        if self._stage is None or self._cut.last:
            self._tell(path, expected, leaves, result)
        return self._noted(result, leaves, path)

    # --- operations ---------------------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation of the frame, or return what stands for its result."""
        kwargs = kwargs or {}
        if self.ended:
            raise _EndedError
        if func in _ABOUT_TENSORS:
            return func(*args, **kwargs)
        if func is auxiliary:
            loss, coefficient = args
            value = self.__torch_function__(Tensor.detach, types, (loss,))
            if self._mine:
                func(loss, coefficient)
            return self.__torch_function__(torch.mul, types, (value, coefficient))
        name, leaves = op_name(func), list(leaves_in((args, kwargs)))
        if name in DRAWING:
            self._seed(f"operation {self._number}/{self._minor}")
        written = _written(name, args, kwargs)
        if not any(map(self.depends, leaves)):
            return self._by_all(func, name, args, kwargs, leaves, written)
        if any(map(torch._C._functorch.is_functorch_wrapped_tensor, leaves)):
            raise CapabilityError(
                f"{name} is under torch.func, with values of layers{line_of_user()}; put it into a layer"
            )
        if func in _OF_ITS_GRAPH:
            raise CapabilityError(
                f"code between layers asks for the graph of a value, which ends at stages{line_of_user()}"
            )
        if self._stage is None and _within_checkpoint():
            raise CapabilityError(
                f"{name} is under torch's checkpoint, with layers of different stages{line_of_user()}"
            )
        if name in _REFUSED:
            raise CapabilityError(f"{name} between layers of different stages{line_of_user()}: {_REFUSED[name]}")
        for leaf in leaves:
            self._use(leaf, name)
            if leaf.is_leaf and self._stage is None:
                before = self.calls[-1] if self.calls else None
                self.used.setdefault(id(leaf), {}).setdefault(before, f"{name}{line_of_user()}")
        if self._mine or (name == "detach" and self._key_of(leaves[0])):  # of a received value, for torch's checkpoint
            return self._here(func, name, args, kwargs, leaves, written)
        if written is not None:
            if not isinstance(written, Placeholder):
                self._held.append(written)
                if self._key_of(written) is None:
                    self._memory_of(written).stale = True
                elif self._behind:
                    self._values[written].behind = True
            self._next()
            return None if name == "__setitem__" else written
        if name in _ON_OWNER:
            self._next()
            return None
        return self._elsewhere(
            func, partial(self.specs.of_operation, func, args, kwargs, leaves, self.depends), leaves, name
        )

    def _here(
        self, func: Any, name: str, args: Any, kwargs: Any, leaves: Sequence[Tensor], written: Tensor | None
    ) -> Any:
        """Run an operation of this stage.

        Raises:
            CapabilityError: others could not know of what it does.
        """
        if self._bound and any(isinstance(leaf, nn.Parameter) and leaf.requires_grad for leaf in leaves):
            raise CapabilityError(f"{name} takes a parameter that another stage trains{line_of_user()}")
        versions = [leaf._version for leaf in leaves if leaf is not written and not leaf.is_inference()]
        result = func(*args, **kwargs)
        if self._note is not None:
            self._note(func, args, kwargs, result)
        if [leaf._version for leaf in leaves if leaf is not written and not leaf.is_inference()] != versions:
            raise CapabilityError(f"{name} writes into a tensor unseen{line_of_user()}; let it make a new one")
        if written is not None and self._key_of(written) is None:
            if written not in self._values:
                before = self._names.get(id(written), "")
                self._refuse_write(name, before, before in dict(self._model.named_buffers()))
            self._own(written, self._values[written].key)
        if written is not None and self._stage is None:
            storage = _storage(written)
            self.specs.written.update(
                value.key for tensor, value in self._values.items() if value.alone and _storage(tensor) == storage
            )
            if buffer := self._name_of(written):
                self.spans[buffer] = self.spans[buffer][0], len(self.calls)
        elif (
            written is not None
            and (key := self._values[written].key) in self._received
            and (key not in self.specs.written)
        ):
            raise CapabilityError(
                f"{name} writes into a value of an earlier stage, which the example does not{line_of_user()}; take an "
                "example that does, or let it make a new tensor"
            )
        if written is None and name not in _ON_OWNER and (self._stage is None or func in self.specs.untold):
            expected = partial(self.specs.of_operation, func, args, kwargs, leaves, self.depends)
            self._tell(func, expected, leaves, result)
        return self._noted(result, leaves, name)

    def _by_all(
        self, func: Any, name: str, args: Any, kwargs: Any, leaves: Sequence[Tensor], written: Tensor | None
    ) -> Any:
        """Run an operation that every stage runs, such as one that makes a mask."""
        if written is not None and written not in self._values:
            before = self._names.get(id(written), "")
            self._refuse_write(name, before, before in dict(self._model.named_buffers()))
        result = func(*args, **kwargs)
        self._minor += 1
        if not isinstance(result, Tensor) or any(result is leaf for leaf in leaves):
            for count, leaf in enumerate(leaves_in(result)):
                if not any(leaf is given for given in leaves):
                    self._values.setdefault(leaf, self._by_every_stage(count + 1))
            return result
        key = f"{self._number}/{self._minor}.1"
        if key in self._received:  # an earlier stage wrote into it
            result = self._taken(key)
            self._own(result, key)
        else:
            self._values[result] = self._by_every_stage(1)
        return result

    def _by_every_stage(self, count: int) -> _Value:
        return _Value(f"{self._number}/{self._minor}.{count}", False, (0, 0), 0)


class _UnitCall:
    """What is called in the place of a unit, with its hooks: torch calls what `Module.compile` sets instead of it."""

    def __init__(self, forward: StageForward, path: str, call: Callable[..., Any]) -> None:
        self._forward, self._path, self._call = forward, path, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        specs = self._forward.specs
        if self._path not in specs.hooked:
            return self._without_hooks(args, kwargs)
        unit = specs.units[self._path]
        hooks, unit._forward_hooks = unit._forward_hooks, OrderedDict()
        try:
            result = self._without_hooks(args, kwargs)
        finally:
            unit._forward_hooks = hooks
        for key, hook in list(hooks.items()):
            given = (args, kwargs) if key in unit._forward_hooks_with_kwargs else (args,)
            found: Any = hook(unit, *given, result)
            result = result if found is None else found
        return result

    def _without_hooks(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stack: Any = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if not stack or stack[-1] is not self._forward:
            raise CapabilityError(
                f"{self._path} is called within an autograd.Function or under a mode such as torch.device(...)"
                f"{line_of_user()}; call it outside, or put that into one layer"
            )
        with _pop_mode_temporarily():
            return self._forward.call_unit(self._path, self._call, args, kwargs)


def _sizes(tree: Any) -> list[Any]:
    """Return identities and sizes of the containers in a tree, and of what other objects in it have as attributes."""
    if isinstance(tree, Tensor | str | bytes | nn.Module | type):
        return []
    if isinstance(tree, dict | list | tuple | set):
        parts = tree.values() if isinstance(tree, dict) else tree
        own = [] if isinstance(tree, tuple) else [(id(tree), len(tree))]
        return [*own, *(size for part in parts for size in _sizes(part))]
    return _sizes(vars(tree)) if hasattr(tree, "__dict__") and not callable(tree) else []


def _has_numbers(spec: ResultSpec) -> bool:
    return any(isinstance(leaf, bool | int | float | complex | str) for leaf in spec.leaves)


def _in_words(spec: ResultSpec) -> str:
    """Return shapes for a message."""
    return str([leaf.shape if isinstance(leaf, TensorSpec) else leaf for leaf in spec.leaves])


def _storage(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata) if value.layout == torch.strided else 0


def _written(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the tensor that an operation writes into; None if it makes a new one."""
    if isinstance(kwargs.get("out"), Tensor):
        return kwargs["out"]  # type: ignore[no-any-return]
    in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")) or kwargs.get("inplace")
    target = args[0] if args else None
    return target if in_place and isinstance(target, Tensor) and name not in ("requires_grad_", *_ON_OWNER) else None


def _essence(spec: ResultSpec) -> ResultSpec:
    """Return a spec without the strides of its tensors, which may differ on the meta device."""
    return spec.changed(strides=())


def _within_checkpoint() -> bool:
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.endswith("utils/checkpoint.py"):
            return True
        frame = frame.f_back
    return False


@contextmanager
def _functions_as_operations() -> Iterator[None]:
    """Let an autograd.Function be one operation: what is applied in forwards of stages comes to them."""
    base: Any = torch.autograd.function._SingleLevelFunction

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        own = super(base, cls).apply
        stack: Any = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if not stack or not isinstance(stack[-1], StageForward) or cls.__module__ == torch.utils.checkpoint.__name__:
            if stack and cls is torch.utils.checkpoint.CheckpointFunction:
                raise CapabilityError(f"checkpoint between layers{line_of_user()}: take use_reentrant=False")
            return own(*args, **kwargs)
        with _pop_mode_temporarily() as forward:
            return forward.__torch_function__(own, (), args, kwargs)

    before = vars(base).get("apply")
    base.apply = classmethod(apply)
    try:
        yield
    finally:
        if before is None:
            del base.apply
        else:
            base.apply = before


_IN_PLACE = frozenset(
    ("__setitem__", "__set__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__iand__", "__ior__", "__ixor__")
)
_ON_OWNER = frozenset(("register_hook", "retain_grad", "register_post_accumulate_grad_hook"))
_REFUSED = {
    "grad": "the graph is on several stages; take the gradient within one layer",
    "backward": "the graph is on several stages; take the gradient within one layer",
    "data_ptr": "each stage has memory of its own",
}
DRAWING = frozenset(
    (
        "dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "rand", "randn",
        "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "bernoulli_", "multinomial",
        "normal", "normal_", "uniform_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_", "poisson",
        "gumbel_softmax", "rrelu", "scaled_dot_product_attention", "dropout_", "alpha_dropout_", "binomial",
        "multi_head_attention_forward", "fractional_max_pool2d", "fractional_max_pool3d",
    )
)  # fmt: skip
_OF_ITS_GRAPH = frozenset(
    (*(getattr(Tensor, name).__get__ for name in ("is_leaf", "grad_fn", "_base")), Tensor._is_view)
)
_ABOUT_TENSORS = frozenset(
    (
        *(getattr(Tensor, name) for name in (
            "size", "dim", "stride", "numel", "nelement", "is_floating_point", "is_contiguous", "ndimension", "__len__",
            "element_size", "is_complex", "get_device", "storage_offset", "dim_order", "is_signed", "is_conj", "is_neg",
            "is_inference", "_is_zerotensor", "is_pinned", "is_shared",
            "is_coalesced", "is_same_size", "is_set_to",
        )),
        *(getattr(Tensor, name).__get__ for name in (
            "shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout", "is_meta", "is_sparse",
            "is_nested", "is_quantized", "is_mps", "is_xpu", "is_cpu", "itemsize", "nbytes", "_version",
        )),
        torch.is_floating_point, torch.numel, torch.is_complex, torch.is_tensor,
    )
)  # fmt: skip
