"""The units of a whole model: the layers that stages are made of, in the order of their calls, with their work."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import accumulate, pairwise, takewhile
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from penstock.checks import did_you_mean
from penstock.errors import CapabilityError, ConfigError
from penstock.partition.replay.specs import Specs, leaves_in, without_graphs
from penstock.partition.replay.stage_forward import Cut, HiddenWriteError, StageForward
from penstock.partition.replay.state import HOOKS, FrameState, nothing_outside, variables_of
from penstock.partition.replay.watch import UnitBorders

_DIVIDED_OF_TORCH = (
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder,
)  # fmt: skip

_OF_ANOTHER = "@."  # between a number and the name of a parameter that another group has


class Guard:
    """Has methods which, as hooks before the forward of a module, refuse its use, and otherwise change nothing."""


_UNLIKELY = 0x5EED_0F_A_F0_12A4D  # as a seed that a forward sets
_RUNS = 6  # of a forward and a backward that is measured


class UnitGroup(NamedTuple):
    """Units that have to be on one stage, with what else of the model is with them.

    Attributes:
        units: their paths, in the order of their first calls: one, or several that are called in turns.
        unused: paths of units that the example does not call.
        bare: names of parameters and buffers of modules around units, which code behind these units uses; and, as
            `name_in_model` reads them, of parameters of other groups that it uses, too.
        work: of the units, and of the code between them and the next ones.
        taken: bytes of the values that these units, or later ones, take of earlier ones.
    """

    units: tuple[str, ...]
    unused: tuple[str, ...]
    bare: tuple[str, ...]
    work: float
    taken: int = 0


class CountedWork(NamedTuple):
    """What the modules of a model compute in a forward.

    Attributes:
        work: of each module that is called, by path: its floating-point operations, and its parameters.
        calls: of modules, in the order of their ends: the path, and the operations counted before and after.
    """

    work: dict[str, float]
    calls: list[tuple[str, int, int]]


class RecordedForward(NamedTuple):
    """What a forward of a model has shown.

    Attributes:
        groups: its units, in the order of the first calls.
        specs: of them.
        changed: names of what code between units changes.
    """

    groups: list[UnitGroup]
    specs: Specs
    changed: set[str]


def record_forward(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], largest: float, opened: Collection[str] = ()
) -> RecordedForward:
    """Find the units of a model by a forward.

    Larger units are opened, so that their code runs between units. Where such code cannot be divided, the module whose
    code it is stays one unit, as do those of its class; where no module within the model is at fault, larger ones do. A
    unit that writes into its argument, or leaves something elsewhere, is opened, since what code between units does is
    seen; and hooks of units that the forward itself registers run on every stage.

    Args:
        model: which.
        args, kwargs: what it is called with.
        largest: the share of the work of the model that a unit may take, if it can be divided.
        opened: paths of modules that are opened whatever their share.

    Raises:
        CapabilityError: the code between the largest layers, or in modules that have to be opened, cannot be divided.
        ConfigError: the model calls no layers.
    """
    first = None
    with copies_of(model, args, kwargs) as (twin, given, named):
        counted = work_of_modules(twin, given, named)
    writing, closed, paths = set(opened), set[str](), dict(model.named_modules())
    hooked, left, state = set[str](), set[str](), dict[str, str]()
    while True:
        with copies_of(model, args, kwargs) as (twin, given, named):
            units = units_of(twin, counted.work, largest, writing, closed)
            try:
                found = _grouped(twin, units, counted, given, named, hooked, state)
            except CapabilityError as error:
                if isinstance(error, HiddenWriteError):
                    if error.buffer and error.buffer not in state:
                        state[error.buffer] = ""
                        continue
                    alike = _alike(paths, error.path) - closed
                    if error.path in alike and _can_be_opened(paths[error.path]):
                        writing |= alike
                        left |= alike
                        continue
                path = _running(error.__traceback__, twin, units)
                first = first or error.with_traceback(None)  # which would keep the copy
            else:
                seen = {path for path, unit in units.items() if unit._forward_hooks and not unit._backward_hooks}
                with_hooks = {
                    path for path in seen
                    if len(units[path]._forward_hooks) > len(paths[path]._forward_hooks) or _within(path, left)
                }  # fmt: skip
                if with_hooks <= hooked:
                    return found
                hooked |= with_hooks
                continue
        alike = _alike(paths, path)
        if path and path not in closed and not alike & {*opened}:
            closed |= alike
        elif largest < 1:
            largest *= 2
        else:
            raise first


def _alike(paths: Mapping[str, nn.Module], path: str) -> set[str]:
    """Return the paths of modules of the same class; only the one for a class of torch."""
    kind = type(paths[path])
    return {path} if kind.__module__.startswith("torch.") else {p for p, m in paths.items() if type(m) is kind}


def _within(path: str, others: Iterable[str]) -> bool:
    return any(path.startswith(f"{other}.") for other in others)


def _running(trace: TracebackType | None, model: nn.Module, units: Collection[str]) -> str:
    """Return the path of the innermost module around units whose code has raised an error; "" for the model."""
    found, modules = "", model.named_modules()
    paths = {id(module): path for path, module in modules if any(True for _ in module.parameters())}
    while trace is not None:
        path = paths.get(id(trace.tb_frame.f_locals.get("self")), "")
        if path in units:
            break
        found, trace = path or found, trace.tb_next
    return found


def units_of(
    model: nn.Module,
    work: Mapping[str, float],
    largest: float,
    opened: Collection[str] = (),
    closed: Collection[str] = (),
) -> dict[str, nn.Module]:
    """Return the units of a model by path, in the order of the model.

    Args:
        model: which.
        work: of its modules.
        largest: the share of the work of the model up to which modules are units.
        opened: paths of modules that are none, if they are not among the next.
        closed: paths of modules that are units, or within one.
    """
    units: dict[str, nn.Module] = {}
    total = work.get("", 0.0) or 1.0

    def walk(path: str, module: nn.Module) -> None:
        if not any(True for _ in module.parameters()):
            return
        small = path in work and work[path] <= largest * total  # what is not called itself, its children may be
        whole = path in closed or not _can_be_opened(module) or (small and path not in opened)
        if path and whole:
            units[path] = module
            return
        for name, child in module.named_children():
            walk(f"{path}.{name}".removeprefix("."), child)

    walk("", model)
    return units


def opened_for(model: nn.Module, units: Sequence[str], cut: Sequence[str]) -> set[str]:
    """Return the paths of the modules that have to be opened for units and cuts that somebody asks for.

    Args:
        model: which.
        units: paths of units, or of containers (`nn.ModuleList` and the like) of them.
        cut: paths of the first units of stages.

    Raises:
        ConfigError: there is no such module, or it is within one that cannot be opened.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    opened = {path for path in units if isinstance(modules.get(path), _DIVIDED_OF_TORCH)}
    for option, path in [*(("units", path) for path in units), *(("cut", path) for path in cut)]:
        if path not in modules or not path:
            raise ConfigError(f"{option}: the model has no module {path!r}.{did_you_mean(path, modules)}")
        keys = path.split(".")
        opened |= {".".join(keys[:depth]) for depth in range(len(keys))}
    closed = next((path for path in sorted(opened) if path and not _can_be_opened(modules[path])), None)
    if closed is not None:
        raise ConfigError(f"{closed} ({type(modules[closed]).__name__}) runs as a whole; name it, or what is around it")
    return opened


def _can_be_opened(module: nn.Module) -> bool:
    plain = type(module) is nn.Module or isinstance(module, _DIVIDED_OF_TORCH)
    if type(module).__module__.startswith("torch.") and not plain:
        return False
    if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "parametrizations"):
        return False
    return any(any(True for _ in child.parameters()) for child in module.children())


def work_of_modules(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CountedWork:
    """Return what each module that a forward calls computes."""
    counter, work, begun = FlopCounterMode(display=False), dict[str, float](), list[int]()
    handles, calls = [], list[tuple[str, int, int]]()

    def begin(*_: Any) -> None:
        begun.append(counter.get_total_flops())

    def end(path: str, module: nn.Module, *_: Any) -> None:
        calls.append((path, begun.pop(), counter.get_total_flops()))
        before = work.get(path, float(sum(p.numel() for p in module.parameters())))
        work[path] = before + calls[-1][2] - calls[-1][1]

    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CapabilityError(
                f"{path} is scripted (torch.jit), and cannot be watched; use the module that it was made of"
            )
        handles.append(module.register_forward_pre_hook(begin))
        handles.append(module.register_forward_hook(partial(end, path)))
    try:
        with counter:
            model(*args, **kwargs)
    except Exception as error:
        raise CapabilityError(
            f"the forward of a copy of {type(model).__name__} fails on the example: {type(error).__name__}: {error}"
        ) from error
    for handle in handles:
        handle.remove()
    return CountedWork(work, calls)


class PassClock:
    """Measures parts of a forward, which run one after the other, and of its backward.

    Args:
        paths: of the parts, in their order. A part lasts until the next one begins; the first begins with the forward.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths
        self._begun, self._ended = dict[str, float](), dict[str, float]()
        self._devices = set[torch.device]()

    def begin(self, path: str, arguments: Any) -> Any:
        """Note that a part begins, and return its arguments, whose gradients say when its backward has ended."""
        self._devices |= {leaf.device for leaf in leaves_in(arguments)}
        self._begun.setdefault(path, self._now())

        def watched(leaf: torch.Tensor) -> torch.Tensor:
            if not leaf.requires_grad:
                return leaf
            leaf = leaf.view_as(leaf)
            leaf.register_hook(lambda _: self._ended.update({path: self._now()}))  # type: ignore[no-untyped-call]
            return leaf

        return pytree.tree_map_only(torch.Tensor, watched, arguments)

    def hook(self, path: str, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """Do so as a hook of a module."""
        return self.begin(path, (args, kwargs))

    def seconds(self, forward: Callable[[], Any]) -> list[float]:
        """Return the seconds of the parts, which call `begin`: the least of some runs, as others only take longer."""
        return list(map(min, *(self._run(forward) for _ in range(_RUNS))))

    def _run(self, forward: Callable[[], Any]) -> list[float]:
        self._begun.clear()
        self._ended.clear()
        begun = self._now()
        ends = [leaf for leaf in leaves_in(forward()) if leaf.requires_grad]
        turned = self._now()
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
        ended = self._now()
        forwards = [begun, *(self._begun[path] for path in self.paths[1:]), turned]
        found = (self._ended.get(path, ended) for path in reversed(self.paths[1:]))  # ended: no gradient comes there
        backwards = [*accumulate((turned, *found), max), ended]
        passes = zip(pairwise(forwards), reversed([*pairwise(backwards)]), strict=True)
        return [(end - start) + (after - before) for (start, end), (before, after) in passes]

    def _now(self) -> float:
        for device in self._devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return perf_counter()


class _RealBesideMeta(TorchFunctionMode):
    """Runs a model on meta, but gives values to whatever does not depend on its weights, such as positions and masks,
    which code may look at.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation: on meta if one of its tensors is there, else where tensors have values."""
        meta, kwargs = torch.device("meta"), kwargs or {}
        if any(leaf.is_meta for leaf in leaves_in((args, kwargs))):
            args, kwargs = pytree.tree_map_only(
                (torch.Tensor, torch.device),
                lambda leaf: leaf.to(meta) if torch.is_tensor(leaf) else meta,
                (args, kwargs),
            )
        else:
            args, kwargs = pytree.tree_map_only(
                torch.device, lambda device: torch.device("cpu") if device == meta else device, (args, kwargs)
            )
        return func(*args, **kwargs)


@contextmanager
def copies_of(model: nn.Module, *given: Any) -> Iterator[Any]:
    """Yield copies of a model and of what it is called with, so that running them changes nothing of the originals.

    Guards of modules that other processes train stay with these: a copy is called only for what it does.

    Raises:
        CapabilityError: the model cannot be copied.
    """
    try:
        made = copy.deepcopy((model, *given), without_graphs(model))
    except Exception as error:  # whatever an attribute of a model says
        raise CapabilityError(
            f"{type(model).__name__} cannot be copied, to be run on the example without being changed: {error}"
        ) from error
    for module in made[0].modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(getattr(hook, "__self__", None), Guard):
                del module._forward_pre_hooks[key]
    real = _RealBesideMeta() if any(p.is_meta for p in made[0].parameters()) else nullcontext()
    with nothing_outside(model), torch.random.fork_rng(devices=[]), torch.enable_grad(), real:
        yield made


def _grouped(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    counted: CountedWork,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    hooked: Collection[str],
    state: Mapping[str, str],
) -> RecordedForward:
    specs = Specs(units, hooked=hooked, state=state)
    frame, changed = _watched(model, specs, args, kwargs)
    groups = _in_turns(frame.calls, frame.spans.values())
    if not groups:
        raise ConfigError(f"{type(model).__name__} calls no layers with weights, so it is one block: pass [model]")
    home = {path: number for number, group in enumerate(groups) for path in group}
    unused: list[list[str]] = [[] for _ in groups]
    bare: list[list[str]] = [[] for _ in groups]
    for path, neighbour in _nearest_called(units, home).items():
        unused[home[neighbour]].append(path)
        home[path] = home[neighbour]
    owners = {f"{path}.{name}": home[path] for path, unit in units.items() for name, _ in named_tensors(unit)}
    taken = {id(tensor) for unit in units.values() for _, tensor in named_tensors(unit)}
    for name, tensor in named_tensors(model):
        uses = {0 if unit is None else home[unit]: by for unit, by in frame.used.get(id(tensor), {}).items()}
        if name not in owners and (uses or id(tensor) not in taken):
            first, _ = frame.spans.get(name, (0, 0))
            owners[name] = home[frame.calls[max(first, 1) - 1]] if name in state else min(uses, default=0)
            bare[owners[name]].append(name)
        others = [group for group in sorted(uses) if group != owners.get(name)]
        if not isinstance(tensor, nn.Parameter) and others and id(tensor) in taken:
            raise CapabilityError(f"{name} is used outside of the layer that it belongs to, by {uses[others[0]]}")
        for number, group in enumerate(others if isinstance(tensor, nn.Parameter) else (), 1):
            bare[group].append(f"{number}{_OF_ANOTHER}{name}")
    called = {path: number for number, group in enumerate(groups) for path in group}
    work = [sum(counted.work.get(path, 0.0) for path in group) for group in groups]
    calls = [call for call in counted.calls if call[0] in called]
    ends = [begun for _, begun, _ in calls[1:]] + [counted.calls[-1][2]]
    for (path, _, ended), begun in zip(calls, ends, strict=True):
        work[called[path]] += begun - ended  # by code between units
    begins = [frame.calls.index(group[0]) for group in groups]
    bytes_taken = [sum(size for made, last, size in frame.lives.values() if made <= at < last) for at in begins]
    made = map(UnitGroup, map(tuple, groups), map(tuple, unused), map(tuple, bare), work, [0, *bytes_taken[1:]])
    specs.state = {name: groups[owners[name]][0] for name in state}
    return RecordedForward(list(made), specs, changed)


def named_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return parameters and buffers under each of their names."""
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def name_in_model(name: str) -> str:
    """Return the name that a model has for a parameter of a stage, which may be a copy of that of another stage."""
    number, sign, rest = name.partition(_OF_ANOTHER)
    return rest if sign and number.isdecimal() else name


def _nearest_called(units: Iterable[str], called: Collection[str]) -> dict[str, str]:
    """Return for each unit that was not called the one that was, before or behind it, with most modules in common.

    So the experts of a layer are together, whichever of them the example asks.
    """
    found: dict[str, list[str]] = {path: [] for path in units if path not in called}
    for order in list(units), list(units)[::-1]:
        last = None
        for path in order:
            if path in called:
                last = path
            elif last is not None:
                found[path].append(last)
    return {path: max(near, key=lambda other: _common(path, other)) for path, near in found.items()}


def _common(path: str, other: str) -> int:
    """Return how many modules two paths have in common, from the model on."""
    pairs = zip(path.split("."), other.split("."), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _in_turns(calls: Sequence[str], spans: Iterable[tuple[int, int]]) -> list[list[str]]:
    """Return units in the order of their first calls; those whose calls lie between two of another unit are with it, as
    are those while which code between units uses and changes a buffer.
    """
    last = {path: place for place, path in enumerate(calls)}
    for first, end in spans:
        path = calls[max(first, 1) - 1]
        last[path] = max(last[path], end - 1)
    groups: list[list[str]] = []
    end = -1
    for path in dict.fromkeys(calls):
        if calls.index(path) > end:
            groups.append([])
        groups[-1].append(path)
        end = max(end, last[path])
    return groups


def _watched(
    model: nn.Module, specs: Specs, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[StageForward, set[str]]:
    """Run a forward and watch it; returns it, and the names of what its code between units has changed.

    Raises:
        CapabilityError: it does something that stages which compute a part of it could not do alike.
    """
    around = modules_around(model, specs.units.values())
    hooked = hooked_backwards(around)
    if hooked is not None:
        raise CapabilityError(
            f"{hooked or 'the model'} has hooks on backwards, but its code runs on every stage; put them on its layers"
        )
    buffers = {
        f"{path}.{name}".removeprefix("."): (b, b.clone())
        for path, m in around.items() for name, b in m.named_buffers(recurse=False)
    }  # fmt: skip
    forward = StageForward(model, specs, Cut(dict.fromkeys(specs.units, 0), 0), None, {}, no_seed)
    state = FrameState(around, others_of(model))
    state.add_stage(None)
    torch.manual_seed(_UNLIKELY)
    with state.of(None, forward) as left, UnitBorders(specs.units, forward.depends) as borders:
        forward.borders = borders
        forward.run(args, kwargs)
    if torch.initial_seed() != _UNLIKELY:
        raise CapabilityError(
            f"code of {type(model).__name__} between layers seeds torch's random numbers, which are seeded for each of "
            "its operations, so that all stages draw alike; leave torch.manual_seed out, or put it into a layer"
        )
    for name, (buffer, copied) in buffers.items():
        if (
            name not in specs.state
            and not buffer.is_meta
            and not copied.isnan().any()
            and not torch.equal(buffer, copied)
        ):
            raise HiddenWriteError(f"an operation between layers writes into the buffer {name}", buffer=name)
    for name in specs.state.keys() & left.keys():
        born = forward.born(left[name])
        first, last = forward.spans.get(name, (born, born))
        if first is not None and last is not None:
            forward.spans[name] = min(first, born or first), max(last, born or last)
    return forward, state.changed


def modules_around(model: nn.Module, units: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """Return the modules that are in no unit, whose code every stage runs, by path."""
    inner = {id(module) for unit in units for module in unit.modules()}
    return {path: module for path, module in model.named_modules() if id(module) not in inner}


def others_of(model: nn.Module) -> list[tuple[str, Any]]:
    """Return what a forward may change elsewhere than on modules around units: hooks, and variables of files."""
    hooks = [(f"{path}.{key}".strip("."), vars(m)[key]) for path, m in model.named_modules() for key in HOOKS]
    return [*hooks, *((variables.file, variables) for variables in variables_of(model.modules()))]


def has_hooks(module: nn.Module) -> bool:
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return any(getattr(module, kind) for kind in kinds)


def hooked_backwards(modules: Mapping[str, nn.Module]) -> str | None:
    """Return the path of one that has hooks on its backward, if any has: those on forwards run with its code."""
    found = (path for path, module in modules.items() if module._backward_pre_hooks or module._backward_hooks)
    return next(found, None)


def no_seed(name: str) -> None:
    """Let random numbers come as they do."""
