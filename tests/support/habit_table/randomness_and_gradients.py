"""Habits with random numbers, gradients taken by hand, precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from support.habits import WIDTH, Differs, Refused, Script, around, habit, linear, regression

GRADIENTS = "Gradients by hand"
RANDOMNESS = "Randomness"
PRECISION = "Precision"
IN_PLACE = "In-place operations"
F64 = torch.float64


def of(make: Callable[[], Any], **more: Any) -> Script:
    return Script(around(make), regression(), **more)


class Applied(nn.Module):
    """A layer followed by a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = linear(), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


class Square(torch.autograd.Function):
    """x squared."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


@habit(GRADIENTS)
def custom_function() -> Script:
    """A custom `autograd.Function`."""
    return of(lambda: Applied(Square.apply))


class Product(torch.autograd.Function):
    """x times a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


@habit(GRADIENTS)
def custom_function_of_weights() -> Script:
    """A custom `autograd.Function` of a weight."""
    return of(Scaled)


class Scaled(nn.Module):
    """Scales by a weight, by a custom function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Product.apply(x, self.weight)
        return found


@habit(GRADIENTS)
def straight_through() -> Script:
    """A straight-through estimator (`x + (q - x).detach()`)."""
    return of(lambda: Applied(lambda x: x + (x.round() - x).detach()))


@habit(GRADIENTS)
def no_grad_part() -> Script:
    """A part of a block under `torch.no_grad()`."""
    return of(NoGrad)


class NoGrad(nn.Module):
    """A layer, normalised by a scale without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.layer(x).abs().amax(1, keepdim=True)
        found: Tensor = self.layer(x) / scale
        return found


HALVES = "the gradients of weights are not in the graph of the first half; use a method without halves, such as 1f1b"


class InputGradient(nn.Module):
    """The gradient of an energy by its input, as in models of forces and scores.

    `enters` says how the input of the energy is made.
    """

    def __init__(self, enters: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.outer, self.enters = linear(), nn.Linear(WIDTH, 1, dtype=F64), enters

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = self.enters(x)
            energy = self.outer(torch.tanh(self.inner(x))).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force + x


@habit(GRADIENTS)
def detached_input_gradient() -> Script:
    """`x.detach().requires_grad_()` and `autograd.grad(create_graph=True)` in a block (energies, scores)."""
    return Script(
        {
            "first": InputGradient(lambda x: x.detach().requires_grad_()),
            "second": linear(),
            "third": nn.Tanh(),
            "head": linear(),
        },
        regression(),
    )


@habit(GRADIENTS, zb_h1=Refused("1f1b", HALVES))
def detached_in_the_middle() -> Script:
    """The same in the last stage, cut off from the stages before."""
    return Script(
        {
            "first": linear().requires_grad_(False),
            "second": nn.Tanh(),
            "third": InputGradient(lambda x: x.detach().requires_grad_()),
            "head": linear(),
        },
        regression(),
    )


@habit(GRADIENTS, zb_h1=Refused("1f1b", HALVES))
def input_gradient() -> Script:
    """`autograd.grad(create_graph=True)` by the input of a block."""
    return of(lambda: InputGradient(lambda x: x if x.requires_grad else x.requires_grad_()))


@habit(GRADIENTS, zb_h1=Refused("within a backward", HALVES))
def implicit_layer() -> Script:
    """A hook that solves for a gradient with `autograd.grad`, as implicit layers (DEQ) do."""
    return of(Implicit)


class Implicit(nn.Module):
    """z = tanh(W z + x), after one step, with the gradient of two."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.inner(x) + x)
        if z.requires_grad:
            at = z.detach().requires_grad_()
            again = torch.tanh(self.inner(at) + x)
            z.register_hook(lambda g: g + torch.autograd.grad(again, at, g, retain_graph=True)[0])
        return z


@habit(GRADIENTS)
def inputs_that_require_grad() -> Script:
    """Inputs of the model that require gradients (PINNs)."""
    script = Script(
        {"first": InputGradient(lambda x: x), "second": linear(), "third": nn.Tanh(), "head": linear()}, regression()
    )
    script.batches = [(x.requires_grad_(), y) for x, y in script.batches]
    return script


@habit(GRADIENTS)
def inputs_that_require_grad_unused() -> Script:
    """Inputs that require gradients, which nobody asks for."""
    script = of(nn.Tanh)
    script.batches = [(x.requires_grad_(), y) for x, y in script.batches]
    return script


@habit(GRADIENTS)
def input_views_that_require_grad() -> Script:
    """Inputs that are results of an operation on tensors that require gradients."""
    script = of(nn.Tanh)
    script.batches = [(x.requires_grad_() * 2, y) for x, y in script.batches]
    return script


TRANSFORMS = "torch.func refuses hooks on saved tensors, which this way needs; use a method such as 1f1b, or stash"


@habit(GRADIENTS, zb_h1=Refused("1f1b", TRANSFORMS), newest=Refused("torch.autograd.grad", TRANSFORMS))
def functional_gradient() -> Script:
    """`torch.func.grad` in a block."""
    return of(FunctionalGradient, accumulates=True)


class FunctionalGradient(nn.Module):
    """The gradient of an energy by its input, by torch.func; it counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = linear(), nn.Linear(WIDTH, 1, dtype=F64)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        found: Tensor = torch.func.grad(lambda x: self.outer(torch.tanh(self.inner(x))).sum())(x)
        return found


@habit(GRADIENTS)
def penalty() -> Script:
    """A gradient penalty in the loss, by the output of the last stage; gradients accumulated in plain torch, too."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        fit = (output - target).square().mean()
        (slope,) = torch.autograd.grad(fit, output, create_graph=True)
        return fit + slope.square().mean()

    return of(nn.Tanh, loss=loss, accumulates=True)


@habit(GRADIENTS, zb_h1=Refused("1f1b", TRANSFORMS), newest=Refused("torch.autograd.grad", TRANSFORMS))
def functional_jacobian() -> Script:
    """`torch.func.jacrev`, `torch.func.vjp` in a block."""
    return of(lambda: Jacobian(lambda f, x: torch.vmap(torch.func.jacrev(f))(x).sum(2)))


@habit(GRADIENTS)
def functional_tangent() -> Script:
    """`torch.func.jvp` in a block."""
    return of(lambda: Jacobian(lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]))


class Jacobian(nn.Module):
    """Derivatives of a layer by its input."""

    def __init__(self, derive: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.derive = linear(), derive

    def forward(self, x: Tensor) -> Tensor:
        return self.derive(lambda x: torch.tanh(self.layer(x)), x)


class Several(torch.autograd.Function):
    """x and its largest index, with the newer interface."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x.argmax(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Tensor:
        return gradient * 2


@habit(GRADIENTS)
def newer_custom_function() -> Script:
    """A custom `autograd.Function` with `setup_context` and outputs without gradients."""
    return of(lambda: Applied(lambda x: Several.apply(x)[0] + Several.apply(x)[1][:, None]))


@habit(GRADIENTS)
def reversed_gradient() -> Script:
    """Gradient reversal."""
    return of(lambda: Applied(Reversal.apply))


class Reversal(torch.autograd.Function):
    """x, with the gradient reversed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


@habit(GRADIENTS)
def detached_block() -> Script:
    """A block that detaches what it received (stop-gradient between stages)."""
    blocks = {"first": linear(), "second": linear(), "third": Detached(), "head": linear()}
    return Script(blocks, regression(), optimizer=lambda named: torch.optim.SGD(named, lr=0.1))


class Detached(nn.Module):
    """A layer on detached values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x.detach())
        return found


@habit(GRADIENTS)
def retained_gradient() -> Script:
    """`retain_grad()` on an activation."""

    def keep(x: Tensor) -> Tensor:
        if x.requires_grad:
            x.retain_grad()
        return x

    return of(lambda: Applied(keep))


@habit(GRADIENTS, Refused("under torch.no_grad()", "nothing would be learnt; leave the context"))
def without_gradients() -> Script:
    """`torch.no_grad()` around the loop."""
    return of(nn.Tanh, around=torch.no_grad)


@habit(GRADIENTS, Refused("under torch.no_grad()", "nothing would be learnt; leave the context"))
def in_inference_mode() -> Script:
    """`torch.inference_mode()` around the loop."""
    return of(nn.Tanh, around=torch.inference_mode)


# --- in place ---------------------------------------------------------------------------------------------------------


@habit(IN_PLACE)
def in_place_activation() -> Script:
    """`ReLU(inplace=True)` after a layer."""
    return of(lambda: nn.Sequential(linear(), nn.ReLU(inplace=True)))


@habit(IN_PLACE)
def in_place_sum() -> Script:
    """`x += y`, `x[:, 0] = 0` on what a block computed."""

    def change(x: Tensor) -> Tensor:
        x += 1
        x[:, 0] = 0
        return x

    return of(lambda: Applied(change))


@habit(IN_PLACE)
def in_place_on_received() -> Script:
    """`ReLU(inplace=True)` as the first block of a stage."""
    blocks = {"first": linear(), "second": linear(), "third": nn.ReLU(inplace=True), "head": linear()}
    return Script(blocks, regression())


# --- randomness -------------------------------------------------------------------------------------------------------

OWN_NUMBERS = (
    "random numbers are those of a block and microbatch, from `seed`, so that recomputed forwards and processes draw "
    "the same"
)


@habit(RANDOMNESS, Differs(OWN_NUMBERS))
def dropout() -> Script:
    """`Dropout`."""
    return of(lambda: nn.Dropout(0.5))


@habit(RANDOMNESS, Differs(OWN_NUMBERS))
def noise() -> Script:
    """`torch.randn_like` in a block."""
    return of(lambda: Applied(lambda x: x + torch.randn_like(x)))


@habit(RANDOMNESS, Differs(OWN_NUMBERS))
def distribution() -> Script:
    """`torch.distributions` in a block (`rsample`)."""
    return of(lambda: Applied(lambda x: torch.distributions.Normal(x, x.abs() + 1, validate_args=False).rsample()))


@habit(RANDOMNESS, Differs(OWN_NUMBERS))
def gumbel() -> Script:
    """`gumbel_softmax`."""
    return of(lambda: Applied(lambda x: nn.functional.gumbel_softmax(x)))


@habit(RANDOMNESS)
def dropout_in_eval() -> Script:
    """`Dropout` in `eval()` mode."""
    return of(lambda: nn.Dropout(0.5).eval())


# --- precision --------------------------------------------------------------------------------------------------------


def in_single(script: Script) -> Script:
    """The script in float32."""
    for block in script.blocks.values():
        block.float()
    script.batches = [(x.float(), y.float()) for x, y in script.batches]
    return script


@habit(PRECISION)
def single() -> Script:
    """float32, up to roundings."""
    return in_single(of(nn.Tanh))


AUTOCAST = 'backwards would read casts of the weights of the forward; use `precision="bf16"`'


def autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


@habit(PRECISION, newest=Refused("precision='bf16'", AUTOCAST))
def autocast_around() -> Script:
    """`torch.autocast` around the loop; gradients accumulated in plain torch, too."""
    script = in_single(of(nn.Tanh, accumulates=True))
    script.around = autocast
    return script


@habit(PRECISION, newest=Refused("precision='bf16'", AUTOCAST))
def autocast_inside() -> Script:
    """`torch.autocast` in a block; gradients accumulated in plain torch, too."""
    return in_single(of(Autocasting, accumulates=True))


class Autocasting(nn.Module):
    """A layer under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Tensor:
        with autocast():
            y = self.layer(x)
        found: Tensor = y.float()
        return found


BF16 = '`precision="bf16"` casts weights and activations everywhere; autocast chooses by operation'


@habit(PRECISION, Differs(BF16))
def low_precision() -> Script:
    """`precision="bf16"` in place of autocast."""
    script = in_single(of(nn.Tanh))
    script.options = {"precision": "bf16"}
    script.loss = lambda output, target: (output.float() - target).square().mean()
    return script


@habit(PRECISION, Differs(BF16))
def low_precision_batch_norm() -> Script:
    """`BatchNorm1d` under `precision="bf16"`."""
    script = in_single(of(lambda: nn.BatchNorm1d(WIDTH)))
    script.options = {"precision": "bf16"}
    script.loss = lambda output, target: (output.float() - target).square().mean()
    return script


@habit(PRECISION, Differs(BF16))
def half_precision_batch_norm() -> Script:
    """`BatchNorm1d` under `precision="fp16"`."""
    script = in_single(of(lambda: nn.BatchNorm1d(WIDTH)))
    script.options = {"precision": "fp16"}
    script.loss = lambda output, target: (output.float() - target).square().mean()
    return script


HALF = "gradients must accumulate in float32; keep weights in float32 and pass `precision`"


@habit(PRECISION, Refused("precision='bf16'", HALF))
def half_weights() -> Script:
    """`model.bfloat16()`."""
    script = of(nn.Tanh)
    for block in script.blocks.values():
        block.bfloat16()
    script.batches = [(x.bfloat16(), y.bfloat16()) for x, y in script.batches]
    return script


@habit(PRECISION)
def double_precision() -> Script:
    """float64."""
    return of(nn.Tanh)
