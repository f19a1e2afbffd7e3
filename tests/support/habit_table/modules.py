"""Habits with modules: kinds of layers, hooks, parametrizations, wrappers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.flop_counter import FlopCounterMode

from penstock import Precision
from support.habits import SAMPLES, WIDTH, Differs, Refused, Script, around, bodies, habit, linear, regression, tokens

LAYERS = "Layers"
SHARING = "Frozen and shared parts"
HOOKS = "Hooks and parametrizations"
RUNNING = "Ways of running a block"
F64 = torch.float64


def of(make: Callable[[], Any], **more: Any) -> Script:
    return Script(around(make), regression(), **more)


STATISTICS = "statistics are those of a microbatch, as with accumulated gradients"


@habit(LAYERS, Differs(STATISTICS))
def batch_norm() -> Script:
    """`BatchNorm1d`."""
    return of(lambda: nn.BatchNorm1d(WIDTH, dtype=F64))


@habit(LAYERS)
def accumulated_batch_norm() -> Script:
    """`BatchNorm1d`, where plain torch accumulates gradients over the microbatches, too."""
    return of(lambda: nn.BatchNorm1d(WIDTH, dtype=F64), accumulates=True)


@habit(LAYERS)
def cumulative_batch_norm() -> Script:
    """The same with `momentum=None`."""
    return of(lambda: nn.BatchNorm1d(WIDTH, momentum=None, dtype=F64), accumulates=True)


@habit(LAYERS)
def frozen_batch_norm() -> Script:
    """`BatchNorm1d` in `eval()` mode."""
    return of(lambda: nn.BatchNorm1d(WIDTH, dtype=F64).eval())


@habit(LAYERS)
def layer_norm() -> Script:
    """`LayerNorm`, `RMSNorm`, `GroupNorm`."""
    return of(
        lambda: nn.Sequential(
            nn.LayerNorm(WIDTH, dtype=F64), nn.RMSNorm(WIDTH, dtype=F64), nn.GroupNorm(2, WIDTH, dtype=F64)
        )
    )


@habit(LAYERS)
def convolution() -> Script:
    """`Conv2d` in `channels_last`."""
    shape = (2, 2, 1)

    def conv() -> nn.Module:
        return nn.Conv2d(2, 2, 3, padding=1, dtype=F64).to(memory_format=torch.channels_last)

    return Script(
        {
            "split": nn.Sequential(linear(), nn.Unflatten(1, shape)),
            "first": conv(),
            "second": nn.Sequential(nn.ReLU(), conv()),
            "head": nn.Sequential(nn.Flatten(), linear()),
        },
        regression(),
    )


@habit(LAYERS)
def lstm() -> Script:
    """`LSTM` and `GRU`."""
    return of(Recurrent)


class Recurrent(nn.Module):
    """An LSTM and a GRU over a sequence of one vector."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(WIDTH, WIDTH, dtype=F64), nn.GRU(WIDTH, WIDTH, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.gru(self.lstm(x[None])[0])[0][0]
        return found


@habit(LAYERS)
def attention() -> Script:
    """`TransformerEncoderLayer`."""

    def layer() -> nn.Module:
        return nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.0, batch_first=True, dtype=F64)

    script = classified(nn.Embedding(WIDTH, WIDTH, dtype=F64))
    script.blocks |= {"first": layer(), "second": layer()}
    return script


@habit(LAYERS)
def embedding() -> Script:
    """`Embedding` with `padding_idx`."""
    return classified(nn.Embedding(WIDTH, WIDTH, padding_idx=0, dtype=F64))


def classified(table: nn.Module, **more: Any) -> Script:
    blocks = {"table": table, "first": linear(), "second": nn.Tanh(), "head": linear()}
    return Script(blocks, tokens(), lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()), **more)


MAX_NORM = "the forward writes into the weights, which other microbatches are reading"


@habit(LAYERS, Refused("max_norm", MAX_NORM))
def max_norm() -> Script:
    """`Embedding(max_norm=...)`."""
    return classified(nn.Embedding(WIDTH, WIDTH, max_norm=0.5, dtype=F64))


@habit(LAYERS)
def sparse_embedding() -> Script:
    """`Embedding(sparse=True)`, with SGD."""
    return classified(
        nn.Embedding(WIDTH, WIDTH, sparse=True, dtype=F64), optimizer=lambda n: torch.optim.SGD(n, lr=0.1)
    )


LAZY = "its parameters have no shape yet; run the model once on a sample first"


@habit(LAYERS, Refused("run the model once", LAZY))
def lazy_linear() -> Script:
    """`LazyLinear`, not yet run."""
    return of(lambda: nn.LazyLinear(WIDTH, dtype=F64))


@habit(LAYERS)
def parameter_list() -> Script:
    """`ParameterList`, `ParameterDict`, `ModuleDict`."""
    return of(Containers)


class Containers(nn.Module):
    """Parameters and modules in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(WIDTH, dtype=F64), torch.ones(WIDTH, dtype=F64)])
        self.shifts = nn.ParameterDict({"one": torch.zeros(WIDTH, dtype=F64)})
        self.inner = nn.ModuleDict({"layer": linear()})

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = x * scale
        found: Tensor = self.inner["layer"](x + self.shifts["one"])
        return found


@habit(LAYERS)
def scalar_parameter() -> Script:
    """A parameter without dimensions, and one without elements."""
    return of(Scalar)


class Scalar(nn.Module):
    """Scales by a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.empty = nn.Parameter(torch.ones((), dtype=F64)), nn.Parameter(torch.empty(0, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.empty.sum()


@habit(LAYERS)
def functions() -> Script:
    """Functions as blocks."""
    return of(lambda: torch.tanh)


@habit(LAYERS)
def counting_buffer() -> Script:
    """A buffer that the forward assigns anew."""
    return of(Counting, accumulates=True)


class Counting(nn.Module):
    """Keeps a running mean, assigned rather than written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


@habit(LAYERS)
def codebook() -> Script:
    """A codebook that the forward updates in place (VQ-VAE with an EMA); gradients accumulated in plain torch, too."""
    return of(Codebook, accumulates=True)


class Codebook(nn.Module):
    """Replaces each vector by the nearest code, which follows what it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(6, WIDTH, dtype=F64))
        self.register_buffer("counts", torch.ones(6, dtype=F64))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x.detach(), self.codes).argmin(1)
        if self.training:
            chosen = F.one_hot(nearest, 6).to(F64)
            self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.sums.mul_(0.9).add_(chosen.T @ x.detach(), alpha=0.1)
            self.codes.copy_(self.sums / self.counts[:, None])
        return x + (self.codes[nearest] - x).detach()


COUNTED_TWICE = "forwards that are run again count again, as under `torch.utils.checkpoint`; keep the count in a buffer"


@habit(LAYERS, recompute=Differs(COUNTED_TWICE))
def python_counter() -> Script:
    """A count in a Python attribute (annealing); gradients accumulated in plain torch, too."""
    return of(Annealed, accumulates=True)


class Annealed(nn.Module):
    """Grows with each forward in training."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return x * (1 + 0.1 * self.calls)


# --- frozen and shared ------------------------------------------------------------------------------------------------


@habit(SHARING)
def frozen_layer() -> Script:
    """A frozen layer (`requires_grad_(False)`)."""
    return of(lambda: linear().requires_grad_(False))


@habit(SHARING)
def frozen_front() -> Script:
    """A frozen first stage."""
    return Script(
        bodies(linear().requires_grad_(False), nn.Tanh()) | {"first": linear().requires_grad_(False)}, regression()
    )


@habit(SHARING)
def lora() -> Script:
    """LoRA: a frozen layer and a trained low-rank part."""
    return of(Lora)


class Lora(nn.Module):
    """A frozen layer plus a product of two thin matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.base = linear().requires_grad_(False)
        self.down = nn.Parameter(torch.randn(WIDTH, 2, dtype=F64))
        self.up = nn.Parameter(torch.zeros(2, WIDTH, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) + x @ self.down @ self.up
        return found


@habit(SHARING)
def tied_weights() -> Script:
    """Weight tying between the first and the last stage (`head.weight = table.weight`)."""
    script = classified(nn.Embedding(WIDTH, WIDTH, dtype=F64))
    script.blocks["head"].weight = script.blocks["table"].weight
    return script


@habit(SHARING)
def shared_module() -> Script:
    """One module used twice in a stage."""
    layer = linear()
    return Script({"first": layer, "again": layer, "act": nn.Tanh(), "head": linear()}, regression())


ONE_MODULE = "a stage binds weights to its modules; make two modules that share their parameters"


@habit(SHARING, Refused("holds the same parameter", ONE_MODULE))
def shared_over_stages() -> Script:
    """One module used in both stages."""
    layer = linear()
    return Script({"first": layer, "act": nn.Tanh(), "again": layer, "head": linear()}, regression())


@habit(SHARING)
def unused_parameter() -> Script:
    """A parameter that the forward does not use, without weight decay."""
    return of(Unused)


class Unused(nn.Module):
    """Has a layer that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.used(x)
        return found


ZERO = "a parameter that a batch does not use has a gradient of zero, so weight decay and momentum act on it"


@habit(SHARING, Differs(ZERO))
def unused_decayed() -> Script:
    """A parameter that the forward does not use, with weight decay."""
    return of(Unused, optimizer=lambda named: torch.optim.SGD(named, lr=0.1, weight_decay=0.1))


@habit(SHARING)
def data_dependent() -> Script:
    """A layer that the forward uses in some batches only, with plain SGD."""
    return of(Branching, optimizer=lambda named: torch.optim.SGD(named, lr=0.1), accumulates=True)


@habit(SHARING, Differs(ZERO))
def data_dependent_momentum() -> Script:
    """A layer that the forward uses in some batches only, with momentum."""
    return of(Branching, accumulates=True)


class Branching(nn.Module):
    """Takes one layer in the first batch, another one later."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = linear(), linear()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        found: Tensor = self.one(x) if int(self.calls) <= 2 else self.two(x)
        return found


# --- hooks ------------------------------------------------------------------------------------------------------------


@habit(HOOKS)
def forward_hook() -> Script:
    """`register_forward_hook` and `register_forward_pre_hook` that change values."""

    def make() -> nn.Module:
        layer = linear()
        layer.register_forward_hook(lambda _, __, output: output * 2)
        layer.register_forward_pre_hook(lambda _, inputs: (inputs[0] + 1,))
        return layer

    return of(make)


@habit(HOOKS)
def backward_hook() -> Script:
    """`register_full_backward_hook` that scales gradients."""

    def make() -> nn.Module:
        layer = nn.Sequential(linear(), nn.Tanh())
        layer.register_full_backward_hook(lambda _, gradients, __: (gradients[0] * 0.5,))
        return layer

    return of(make)


@habit(HOOKS)
def backward_pre_hook() -> Script:
    """`register_full_backward_pre_hook`."""

    def make() -> nn.Module:
        layer = linear()
        layer.register_full_backward_pre_hook(lambda _, gradients: (gradients[0] * 0.5,))
        return layer

    return of(make)


@habit(HOOKS)
def activation_hook() -> Script:
    """`register_hook` on an activation."""
    return of(lambda: Hooked())


@habit(HOOKS)
def input_hook() -> Script:
    """`register_hook` on what a block was given, as layers that reverse or scale gradients do."""
    return of(lambda: HookedInput())


class HookedInput(nn.Module):
    """Doubles the gradient of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 2)
        y: Tensor = self.layer(x)
        return y


class Hooked(nn.Module):
    """Doubles the gradient of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 2)
        return y


@habit(HOOKS)
def weight_norm() -> Script:
    """`parametrizations.weight_norm`."""
    return of(lambda: parametrizations.weight_norm(linear()))


@habit(HOOKS)
def spectral_norm() -> Script:
    """`parametrizations.spectral_norm`, which iterates at every forward; gradients accumulated in plain torch, too."""
    return of(lambda: parametrizations.spectral_norm(linear()), accumulates=True)


@habit(HOOKS)
def orthogonal() -> Script:
    """`parametrizations.orthogonal`."""
    return of(lambda: parametrizations.orthogonal(linear()))


@habit(HOOKS)
def old_weight_norm() -> Script:
    """`nn.utils.weight_norm` (the older one)."""
    return of(lambda: nn.utils.weight_norm(linear()))


@habit(HOOKS)
def old_spectral_norm() -> Script:
    """`nn.utils.spectral_norm` (the older one); the same."""
    return of(lambda: nn.utils.spectral_norm(linear()), accumulates=True)


class Symmetric(nn.Module):
    """A matrix of which the upper half counts."""

    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


@habit(HOOKS)
def own_parametrization() -> Script:
    """A parametrization of one's own (`register_parametrization`)."""

    def make() -> nn.Module:
        layer = linear()
        parametrize.register_parametrization(layer, "weight", Symmetric())
        return layer

    return of(make)


@habit(HOOKS)
def cached_parametrization() -> Script:
    """`parametrize.cached()` within a block."""
    return of(Cached)


class Cached(nn.Module):
    """Uses a parametrized weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = parametrizations.weight_norm(linear())

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            found: Tensor = self.layer(self.layer(x))
        return found


@habit(HOOKS)
def pruned() -> Script:
    """`prune.l1_unstructured`."""
    return of(lambda: prune.l1_unstructured(linear(), "weight", amount=0.5))


# --- running ----------------------------------------------------------------------------------------------------------


@habit(HOOKS)
def keyword_hooks() -> Script:
    """`register_forward_hook(with_kwargs=True, always_call=True)`, and such a pre-hook."""

    def make() -> nn.Module:
        layer = linear()
        layer.register_forward_pre_hook(lambda _, inputs, named: ((2 * inputs[0],), named), with_kwargs=True)
        layer.register_forward_hook(lambda _, inputs, named, y: y + 1, with_kwargs=True, always_call=True)
        return layer

    return of(make)


@habit(HOOKS)
def replaced_forward() -> Script:
    """A `forward` that is replaced on the object (`block.forward = ...`)."""

    def make() -> nn.Module:
        layer = linear()
        forward = layer.forward
        layer.forward = lambda x: 2 * forward(x)  # type: ignore[method-assign]
        return layer

    return of(make)


SUMS = "hooks see gradients of a sum over samples, divided by m; `Precision(divisor=samples)` makes it a mean"


def clamped(**options: Any) -> Script:
    """Clamps gradients in hooks."""
    script = Script(around(linear), regression(), accumulates=True, options=options)
    for name in ("first", "third"):
        script.blocks[name].weight.register_hook(lambda g: g.clamp(-0.02, 0.03))
    return script


@habit(HOOKS, Differs(SUMS))
def clamped_gradients() -> Script:
    """`register_hook` on a parameter that clamps its gradient."""
    return clamped()


@habit(HOOKS)
def clamped_gradients_in_scale() -> Script:
    """The same with `precision=Precision(divisor=samples)`; gradients accumulated in plain torch, too."""
    return clamped(precision=Precision(divisor=float(SAMPLES)))


@habit(HOOKS)
def masked_gradients() -> Script:
    """`register_hook` on a parameter that masks its gradient."""
    script = of(linear)
    for name in ("first", "third"):
        script.blocks[name].weight.register_hook(lambda g: g * torch.eye(WIDTH, dtype=F64))
    return script


@habit(RUNNING)
def default_dtype() -> Script:
    """`torch.set_default_dtype(torch.float64)` around the loop."""

    @contextmanager
    def in_double() -> Iterator[None]:
        torch.set_default_dtype(F64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)

    return of(nn.Tanh, around=in_double)


@habit(RUNNING)
def compiled() -> Script:
    """`block.compile(backend="eager")`."""

    def make() -> nn.Module:
        layer = nn.Sequential(linear(), nn.Tanh())
        layer.compile(backend="eager")
        return layer

    return of(make)


@habit(RUNNING)
def compiled_wrapper() -> Script:
    """`torch.compile(block, backend="eager")`."""
    return of(lambda: torch.compile(nn.Sequential(linear(), nn.Tanh()), backend="eager"))


class Checkpointed(nn.Module):
    """Runs a layer under `torch.utils.checkpoint`."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = nn.Sequential(linear(), nn.Tanh()), reentrant

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=self.reentrant)
        return found


@habit(RUNNING)
def checkpointed() -> Script:
    """`torch.utils.checkpoint` in a block."""
    return of(lambda: Checkpointed(False))


@habit(RUNNING)
def checkpointed_reentrant() -> Script:
    """`torch.utils.checkpoint(use_reentrant=True)` in a block."""
    return of(lambda: Checkpointed(True))


@habit(RUNNING)
def functional_call() -> Script:
    """`torch.func.functional_call` in a block."""
    return of(Functional)


class Functional(nn.Module):
    """Calls a layer with changed weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: p * 0.5 for name, p in self.layer.named_parameters()}
        found: Tensor = torch.func.functional_call(self.layer, weights, (x,))
        return found


@habit(RUNNING)
def vmapped() -> Script:
    """`torch.vmap` in a block."""
    return of(Vmapped)


class Vmapped(nn.Module):
    """Maps a layer over the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.vmap(self.layer)(x)
        return found


@habit(RUNNING)
def copied_blocks() -> Script:
    """Blocks made by `copy.deepcopy`."""
    layer = nn.Sequential(linear(), nn.Tanh())
    return of(lambda: copy.deepcopy(layer))


@habit(RUNNING)
def scripted() -> Script:
    """`torch.jit.script`, `torch.jit.trace`."""

    def make() -> nn.Module:
        inner = torch.jit.script(linear())
        return nn.Sequential(inner, torch.jit.trace(linear(), torch.zeros(2, WIDTH, dtype=F64)))

    return of(make)


@habit(RUNNING)
def symbolically_traced() -> Script:
    """`torch.fx.symbolic_trace`."""
    return of(lambda: torch.fx.symbolic_trace(nn.Sequential(linear(), nn.Tanh())))


@habit(RUNNING)
def anomaly_mode() -> Script:
    """`torch.autograd.detect_anomaly()` around the loop."""
    return of(nn.Tanh, around=lambda: torch.autograd.detect_anomaly(check_nan=True))


@habit(RUNNING)
def counted_flops() -> Script:
    """`FlopCounterMode` around the loop."""
    return of(linear, around=lambda: FlopCounterMode(display=False))


@habit(RUNNING)
def profiled() -> Script:
    """`torch.profiler.record_function` in a block."""
    return of(Recorded)


class Recorded(nn.Module):
    """A layer under a name for the profiler."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Tensor:
        with torch.profiler.record_function("layer"):
            found: Tensor = self.layer(x)
        return found


@habit(RUNNING)
def deterministic() -> Script:
    """`torch.use_deterministic_algorithms(True)`."""
    return of(linear, around=DeterministicGuard)


class DeterministicGuard:
    """Deterministic algorithms for a while."""

    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(True)

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(False)


@habit(HOOKS)
def global_hook() -> Script:
    """`register_module_forward_hook` (for all modules)."""
    return of(linear, around=GlobalHook)


class GlobalHook:
    """Halves the outputs of all linear layers for a while."""

    def __enter__(self) -> None:
        def halve(module: nn.Module, _: Any, output: Any) -> Any:
            return output / 2 if isinstance(module, nn.Linear) else None

        self.handle = nn.modules.module.register_module_forward_hook(halve)

    def __exit__(self, *_: object) -> None:
        self.handle.remove()


@habit(LAYERS)
def packed_sequences() -> Script:
    """`pack_padded_sequence` within a block."""
    return of(Packed, accumulates=True)


class Packed(nn.Module):
    """An LSTM over sequences of two lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 2, batch_first=True, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        lengths = [2] * (x.shape[0] - 1) + [1]
        packed = nn.utils.rnn.pack_padded_sequence(x.view(-1, 2, 2), lengths, batch_first=True)
        output, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return output.reshape(x.shape)


@habit(LAYERS)
def indexed() -> Script:
    """`gather`, `scatter_add`, `index_put_`, advanced indexing."""

    def change(x: Tensor) -> Tensor:
        order = x.detach().argsort(1)
        y = x.gather(1, order) + torch.zeros_like(x).scatter_add(1, order, x)
        y[:, order[0, :2]] *= 2
        return y

    return of(lambda: nn.Sequential(linear(), FunctionModule(change)), accumulates=True)


class FunctionModule(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@habit(LAYERS)
def decomposed() -> Script:
    """`torch.linalg` of weights (`matrix_exp`, `qr`, `solve`)."""
    return of(Decomposed)


class Decomposed(nn.Module):
    """A layer whose matrix is made by linear algebra."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        rotation = torch.linalg.matrix_exp(self.weight - self.weight.T)
        return x @ rotation @ torch.linalg.qr(self.weight).R


@habit(LAYERS)
def mixture() -> Script:
    """A mixture of experts with hard routing."""
    return of(Experts, optimizer=lambda named: torch.optim.SGD(named, lr=0.1))


class Experts(nn.Module):
    """Sends each sample to one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 2, dtype=F64), nn.ModuleList([linear(), linear()])

    def forward(self, x: Tensor) -> Tensor:
        chances = self.router(x).softmax(1)
        chosen, y = chances.argmax(1), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == i)
            y = y.index_add(0, rows, expert(x[rows]) * chances[rows, i, None])
        return x + y


CLOSURE = "only modules bring their parameters with them; pass the module, and tie by `head.weight = table.weight`"


@habit(SHARING, Refused("belongs to no module", CLOSURE))
def tied_by_closure() -> Script:
    """A function as a block that uses a weight of another stage (`lambda x: x @ first.weight`)."""
    first = linear()
    blocks = {"first": first, "second": nn.Tanh(), "third": lambda x: x @ first.weight, "head": linear()}
    return Script(blocks, regression())


@habit(SHARING)
def shared_by_closure() -> Script:
    """The same with a weight of its own stage."""
    first = linear()
    blocks = {"first": first, "second": lambda x: x @ first.weight, "third": nn.Tanh(), "head": linear()}
    return Script(blocks, regression())


@habit(SHARING)
def unfrozen_by_name() -> Script:
    """All frozen but the biases (`BitFit`)."""

    def make() -> nn.Module:
        layer = linear()
        layer.weight.requires_grad_(False)
        return layer

    return of(make)
