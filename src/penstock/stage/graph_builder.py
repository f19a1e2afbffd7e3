"""Forwards of some blocks of a stage that build a graph, and the bytes that this keeps alive."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from penstock.comm.core.devices import side_stream
from penstock.comm.p2p.codec import check_dense
from penstock.comm.p2p.trees import open_dataclasses
from penstock.errors import CapabilityError, ConfigError
from penstock.partition.replay.auxiliary import Auxiliary, collecting
from penstock.partition.sequence_slices import storages
from penstock.schedule.stage_state.microbatch_state import Piece
from penstock.stage.autograd.activation_offload import ActivationOffload
from penstock.stage.autograd.forward_graph import Graph, open_inputs
from penstock.stage.autograd.graph_walk import edges_of, graph_nodes, trained_leaves
from penstock.stage.autograd.recompute import copied_buffers, put_back
from penstock.stage.autograd.saved_bytes import SavedBytes, SavedWeights, saved_of, signature
from penstock.stage.autograd.split_backward import BackwardSplitter
from penstock.stage.autograd.weight_proxy import ProxyWeights
from penstock.stage.blocks.loss import UnreadLoss, unread
from penstock.stage.blocks.module import StageModule
from penstock.stage.checks.forward_writes import ForwardWrites
from penstock.stage.in_flight_microbatch import Microbatch
from penstock.stage.weight_reads import WeightReads
from penstock.weights.memory.buffers import Handle, Readable

_NO_HOOKS = "support saved tensor hooks"  # torch.func refuses them in these words
_NO_STORAGES: frozenset[int] = frozenset()


class WrittenLeafError(ConfigError):
    """Some blocks write into a parameter, or into what they are given."""


class BlockOutput(NamedTuple):
    """The graph, output and loss of some blocks; for a slice the output is a pair with what it carries on.

    Attributes:
        auxiliary: the value of the losses that they have added on their way; None if there are none.
    """

    graph: Graph
    output: Any
    loss: UnreadLoss | None
    auxiliary: float | None = None


class GraphBuilder:
    """Runs blocks of one stage so that a backward can follow, and counts the activations that their graph keeps alive.

    Attributes:
        known: identities of memory that lives anyway, to tell it from activations.
        splits: as below.
        side: copies saved tensors beside the work of the device; None where none are moved, or it has no such stream.
        divisor: as below.
        auxiliary: the losses that the blocks have added when they last ran.

    Args:
        module: the blocks, to which the weights to be read are bound whenever this runs.
        storages: identities of those of its weights.
        divisor: c; backward runs on the loss sum divided by it.
        splits: returns True for a microbatch (or slice) whose backward comes in two halves
            (`penstock.stage.autograd.split_backward`); None if none does.
        offloads: saved tensors may be moved away for a while (`penstock.stage.autograd.activation_offload`).
        hold: notified of the bytes of activations that begin to live.
        reading: decides which weights its passes read.
    """

    def __init__(
        self,
        module: StageModule,
        storages: Collection[int],
        divisor: float,
        splits: Callable[[Piece], bool] | None,
        offloads: bool,
        hold: Callable[[int], None],
        reading: WeightReads,
    ) -> None:
        self._module, self.divisor, self._hold, self._reading = module, divisor, hold, reading
        self.auxiliary: list[Auxiliary] = []
        self.splits, self._offloads = splits, offloads
        self.side = side_stream(module.device) if offloads else None
        self._trained = bool(storages)
        self.known = {*storages, *(t.untyped_storage()._cdata for t in module.tensors.fixed)}
        self._leaf_check = LeafCheck(module.where)
        self._proxies: WeakKeyDictionary[Readable, ProxyWeights] = WeakKeyDictionary()
        # By blocks and shapes: the bytes a graph keeps alive, and those of them the second half of a backward needs.
        self._saved: dict[tuple[object, ...], tuple[int, int]] = {}
        self._saved_weights = SavedWeights()
        self._own_backwards: set[tuple[object, ...]] = set()  # of these, those with custom Functions
        self._writing: dict[tuple[str, ...], bool] = {}  # whether blocks write into what they are given
        self._seed_of: object = None  # the type and scale of the last loss, and its gradient
        self._last_seed = 0.0

    def build(
        self, names: Sequence[str], microbatch: Microbatch, value: Any, wants: tuple[bool, ...], handle: Handle | None
    ) -> BlockOutput:
        """Run some of the blocks and keep their graph; on copies of what they are given, if they write into it."""
        names = tuple(names)
        if names in self._writing:
            return self._built(names, microbatch, value, wants, handle)
        before = copied_buffers(self._module.blocks.values())
        try:
            result = self._built(names, microbatch, value, wants, handle)
        except WrittenLeafError:
            if not any(wants):
                raise
            self._writing[names] = True
            put_back(before, self._module.blocks.values())
            result = self._built(names, microbatch, value, wants, handle)
        self._writing.setdefault(names, False)
        return result

    def _built(
        self, names: tuple[str, ...], microbatch: Microbatch, value: Any, wants: tuple[bool, ...], handle: Handle | None
    ) -> BlockOutput:
        piece = microbatch.piece
        carried = storages((value[1], ())) if piece else _NO_STORAGES  # they count where they were made
        known = self.known | carried if carried else self.known
        value, opened, leaves = open_inputs(value, wants)
        if self._writing.get(names):
            received = {id(leaf) for leaf in opened.values()}
            value = pytree.tree_map(lambda leaf: leaf.clone() if id(leaf) in received else leaf, value)
        splits = handle is not None and self.splits is not None and self.splits(microbatch.key)
        key = (names, splits, signature(value), signature(microbatch.target))
        offload = ActivationOffload(known, self.side) if self._offloads else None
        counter: SavedBytes | None = offload
        guard: AbstractContextManager[object] | None = None
        if handle is not None and self._reading.looks_up:
            counter = self._reading.saved_tensor_hooks(known, handle) or offload
            if counter is not None and key not in self._saved:
                guard = ForeignHooksCheck(counter.pack_hook, handle.buffer.leaves.values(), self._module.where)
        if counter is None and key not in self._saved:
            counter = SavedBytes(known)
        splitting = self._splitter(handle, counter) if splits and handle is not None else None
        module, first = self._module, key not in self._saved
        writes = None
        if first:
            writes = ForwardWrites(module.where, module.tensors.bound, opened.values())
        if counter is None and splitting is None:
            output, total, loss = self.compute(names, microbatch, value)
        else:
            contexts = counter or nullcontext(), splitting or nullcontext(), guard or nullcontext()
            output, total, loss = self._compute_under(contexts, counter, splitting is None, names, microbatch, value)
        if writes is not None:
            writes.check()
        ends = output if total is None else (total, output[1]) if piece else total
        added = self.auxiliary
        if added:
            ends = ends, [loss for loss, _ in added]
        if counter is not None:
            if counter.gave_up:
                counter.add(saved_of(graph_nodes(ends)))
            counter.add(opened.values())
            counter.add(pytree.tree_leaves(output[1]) if piece else ())
            self._saved[key] = counter.total, counter.deferred
            if (first or key in self._own_backwards) and self._saved_weights.link(graph_nodes(ends)):
                self._own_backwards.add(key)
        if counter is not None or self._leaf_check.pending(names):
            own = [] if splitting is None else [splitting.gate]
            self._check_leaves(names, ends, handle, [*pytree.tree_leaves(value), *opened.values(), *own])
        edges = edges_of(ends)
        seed = None
        if total is not None:
            if edges[0] is None and (opened or self._trained) and not added:
                raise ConfigError(
                    f"{self._module.where}: the loss has no graph, so nothing would be learnt; it was detached, or "
                    "made under torch.no_grad()"
                )
            seed = self.seed(total, microbatch.scale)
        nbytes, deferred_nbytes = self._saved[key]
        self._hold(nbytes)
        if offload is not None:  # others keep the inputs alive anyway
            offload.pin([*opened.values(), *pytree.tree_leaves((value, microbatch.target))])
        deferred = None if splitting is None else splitting.deferred
        seeds = [(torch.zeros_like(each, requires_grad=False), factor) for each, factor in added]
        graph = Graph(opened, leaves, edges, seed, nbytes, deferred, deferred_nbytes, offload, seeds)
        return BlockOutput(graph, output, loss, value_of(added))

    def compute(
        self, names: Sequence[str], microbatch: Microbatch, value: Any
    ) -> tuple[Any, Tensor | None, UnreadLoss | None]:
        """Run blocks; returns the output (for a slice a pair with what is carried on), the loss in its graph, and its
        value.
        """
        try:
            if microbatch.piece:
                x, carry = value
                run = partial(self._module.run_slice, names, x, carry, microbatch.rng_key)
            else:
                run = partial(self._module.run, names, value, microbatch.rng_key)
            with collecting() as added:
                output: Any = run()
            self.auxiliary = [Auxiliary(wide(loss), coefficient) for loss, coefficient in added]
            if not isinstance(output, Tensor):
                open_dataclasses(output)
        except RuntimeError as error:
            if "a leaf Variable that requires grad" in str(error):
                raise WrittenLeafError(
                    f"{self._module.where}: a block writes in place into a parameter; let it make a new tensor "
                    "(inplace=False)"
                ) from error
            raise
        module = self._module
        if names[-1] == module.last and (module.loss is None or module.hands_on):
            for leaf in (output,) if isinstance(output, Tensor) else pytree.tree_leaves(output):
                if isinstance(leaf, Tensor):
                    check_dense(leaf, module.where)
        if module.weighed is None or names[-1] != module.last:
            return output, None, None
        result = output[0] if microbatch.piece else output
        total, weight = self._module.evaluate_loss(result, microbatch.target, microbatch.rng_key, microbatch.piece)
        total = wide(total)
        kept = result if self._module.hands_on else None
        return (
            (kept, output[1]) if microbatch.piece else kept,
            total,
            UnreadLoss(unread(total), weight, module.weighed.numbers, module.weighed.size),
        )

    def seed(self, total: Tensor, scale: float) -> Tensor:
        """Return the gradient of a loss: scale / divisor, in the precision of the loss."""
        key = total.dtype, scale
        if key != self._seed_of:
            one = torch.ones_like(total.detach())
            self._seed_of, self._last_seed = key, (one / self.divisor * scale).item()
        return torch.full_like(total, self._last_seed, requires_grad=False)

    def _splitter(self, handle: Handle, counter: SavedBytes | None) -> BackwardSplitter:
        """Bind proxies of the weights to the modules and make the context that detaches operations on them."""
        proxies = self._proxies.get(handle.buffer)
        if proxies is None:
            proxies = self._proxies[handle.buffer] = ProxyWeights(handle.buffer.leaves)
        self._module.tensors.bind(proxies.tensors)
        return BackwardSplitter(proxies, counter, moves=self._offloads)

    def _compute_under(
        self,
        contexts: Sequence[AbstractContextManager[object]],
        counter: SavedBytes | None,
        whole: bool,
        names: Sequence[str],
        microbatch: Microbatch,
        value: Any,
    ) -> tuple[Any, Tensor | None, UnreadLoss | None]:
        """Run blocks under saved-tensor hooks; again without them if a block refuses them and they only count."""
        only_counts = type(counter) is SavedBytes and whole
        before = copied_buffers(self._module.blocks.values()) if only_counts else {}
        try:
            with ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context)
                return self.compute(names, microbatch, value)
        except RuntimeError as error:
            if _NO_HOOKS not in str(error):
                raise
            if counter is None or not only_counts:
                raise CapabilityError(
                    f"{self._module.where}: a block uses torch.func (grad, vjp, jacrev), which does not go with the "
                    "hooks on saved tensors that this method needs; use torch.autograd.grad(..., create_graph=True) in "
                    "the block, or a method that keeps graphs as they are, such as 1f1b"
                ) from error
        put_back(before, self._module.blocks.values())
        counter.give_up()
        return self.compute(names, microbatch, value)

    def _check_leaves(self, names: Sequence[str], result: Any, handle: Handle | None, own: Collection[object]) -> None:
        """Make sure that an optimizer steps every tensor that is trained, and that backwards read what they should."""
        weights = handle.buffer.leaves.values() if handle is not None else ()
        self._leaf_check.check(names, result, (*own, *weights))
        if handle is not None:
            self._reading.check_graph(result, weights)


def wide(total: Tensor) -> Tensor:
    """Return a loss in float32 at least, as S / c may be out of the range of its type on the way."""
    return total.float() if total.dtype in (torch.bfloat16, torch.float16) else total


def value_of(added: Sequence[Auxiliary]) -> float | None:
    """Return the sum of auxiliary losses, for which the host waits; None if there are none."""
    if not added:
        return None
    total = sum(coefficient * float(loss.detach()) for loss, coefficient in added)
    return total if math.isfinite(total) else math.inf  # NaN in a message says that there are none


class ForeignHooksCheck(TorchFunctionMode):
    """A context of one forward, in which graphs keep the positions of weights by hooks of the pipeline's own.

    Hooks inside of it (`torch.autograd.graph.save_on_cpu`, `saved_tensors_hooks`) are given the weights themselves. If
    they copy them, the backward reads those of the forward. Those of torch's checkpoint run the forward again, which
    finds the right ones.

    Args:
        pack: of the pipeline's hooks.
        weights: the leaves that graphs are made on.
        where: the stage in messages.
    """

    def __init__(self, pack: Callable[..., Any], weights: Iterable[Tensor], where: str) -> None:
        super().__init__()
        self._pack, self._where = pack, where
        self._weights = {id(leaf) for leaf in weights}

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is not None and self._is_foreign(hooks[0]) and self._reads_weights(args, named):
            raise CapabilityError(
                f"{self._where}: a block reads weights under saved-tensor hooks of its own (save_on_cpu, "
                "saved_tensors_hooks), which may copy them, so its backward would read those of its forward, not those "
                "that the method says; leave the weights out of the hooks, or take a method that keeps the weights of "
                "the forward, such as stash or 2bw"
            )
        return func(*args, **named)

    def _is_foreign(self, pack: Callable[..., Any]) -> bool:
        return pack != self._pack and pack.__module__ != "torch.utils.checkpoint"

    def _reads_weights(self, args: Any, named: Mapping[str, Any]) -> bool:
        leaves = pytree.tree_leaves((args, named))
        return torch.is_grad_enabled() and not self._weights.isdisjoint(map(id, leaves))


class LeafCheck:
    """Finds tensors that accumulate gradients but belong to no module of the stage.

    A parameter is found at once. Another tensor may have been made in the forward, such as x.detach().requires_grad_()
    in a model of forces; it is found if a later forward trains the same one again.

    Args:
        where: the stage in messages.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._suspects: dict[tuple[str, ...], list[ref[Tensor]]] = {}

    def pending(self, names: Sequence[str]) -> bool:
        """Whether tensors that a forward of some blocks has trained still live: then the next one is to be checked."""
        if not self._suspects:
            return False
        return any(suspect() is not None for suspect in self._suspects.get(tuple(names), ()))

    def check(self, names: Sequence[str], result: Any, known: Iterable[object]) -> None:
        """Check the graph of a forward.

        Args:
            names: the blocks that ran.
            result: its ends.
            known: the leaves that it may train: those of the weights, and received inputs.

        Raises:
            ConfigError: it trains another tensor.
        """
        ours = {id(tensor) for tensor in known}
        before = {id(suspect()) for suspect in self._suspects.pop(tuple(names), ())}
        found = [leaf for leaf in trained_leaves(result) if id(leaf) not in ours]
        foreign = next((leaf for leaf in found if isinstance(leaf, nn.Parameter) or id(leaf) in before), None)
        if foreign is not None:
            raise ConfigError(
                f"{self._where}: a block or the loss trains a tensor of shape {tuple(foreign.shape)} that belongs to "
                "no module of this stage, so its optimizer would never step it. If it is a weight of another stage, of "
                "which something was kept on a module or by a hook, let the blocks between hand that on, as in (x, "
                "kept): what is kept belongs to another microbatch by now. Otherwise pass the module that owns it as a "
                "block (not one of its methods), or detach it"
            )
        if found and not before:
            self._suspects[tuple(names)] = [ref(leaf) for leaf in found]
