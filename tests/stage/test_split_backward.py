"""A backward in two halves: the bits of a whole one, and what lives between the halves."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from penstock.errors import CapabilityError
from penstock.runtime.ops.bound import BoundAction
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.setup.stage_builder import _halved
from penstock.schedule.ir.schedule import Op
from penstock.schedule.text import parse_schedule
from penstock.stage.autograd.split_backward import BackwardSplitter, ProxyWeights
from support.cases import OPTIMIZERS, Residual
from support.live_storage import LiveStorage
from support.schedules import make_schedule

WIDTH, TOKENS, SAMPLES = 8, 5, 3


class Plain(nn.Module):
    """Any function of x and the parameters of a module."""

    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


class Scaled(torch.autograd.Function):
    """x w, with a backward of the user's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return gradient * w, (gradient * x).sum((0, 1))


class Stop(torch.autograd.Function):
    """The identity, from which no gradient comes back."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, _gradient: Tensor) -> None:  # type: ignore[override]
        return None


def downhill(self: Any, x: Tensor) -> Tensor:
    """Moves x along the gradient of an energy, which is a number like any other."""
    at = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(self.norm(self.map(at)).pow(4).sum(), at)
    y: Tensor = self.norm(self.map(x)) - 0.1 * slope
    return y


def under_autocast(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y: Tensor = self.map(x)
    return y


def frozen_norm(self: Any, x: Tensor) -> Tensor:
    y: Tensor = x * self.norm(self.w)
    return y


def attention(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.attention(x, x, x, need_weights=False)[0]
    return x + y


def twice(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.map(torch.tanh(self.map(x)))
    return y


def convolved(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.norm(self.map(x.transpose(1, 2)))
    return F.relu_(y).transpose(1, 2)


def added_in_place(self: Any, x: Tensor) -> Tensor:
    y = self.map(x)
    y += self.shift
    return torch.tanh(y)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "residual": Residual,
    "rms norm": lambda: Plain(lambda s, x: x + torch.tanh(s.map(s.norm(x))), norm=nn.RMSNorm(8), map=nn.Linear(8, 8)),
    "in-place activation": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
    "convolution": lambda: Plain(convolved, map=nn.Conv1d(WIDTH, WIDTH, 3), norm=nn.GroupNorm(2, WIDTH)),
    "one weight twice": lambda: Plain(twice, map=nn.Linear(WIDTH, WIDTH)),
    "attention": lambda: Plain(attention, attention=nn.MultiheadAttention(WIDTH, 2, batch_first=True)),
    "recurrent": lambda: Plain(lambda s, x: s.cell(x)[0], cell=nn.LSTM(WIDTH, WIDTH, batch_first=True)),
    "made of weights": lambda: Plain(lambda s, x: F.linear(x, s.w * s.g / s.w.norm()), w=weight(4, 8), g=weight(4, 1)),
    "a table by position": lambda: Plain(lambda s, x: torch.tanh(x + s.w[: x.shape[1]]), w=weight(9, WIDTH)),
    "an embedding by position": lambda: Plain(lambda s, x: x + s.t(torch.arange(TOKENS)), t=nn.Embedding(9, WIDTH)),
    "einsum": lambda: Plain(lambda s, x: torch.einsum("btc,cd->btd", x, s.w), w=weight(WIDTH, 4)),
    "chunks": lambda: Plain(lambda s, x: (lambda a, b: a * b.tanh())(*torch.chunk(x @ s.w, 2, -1)), w=weight(8, 8)),
    "two outputs": lambda: Plain(lambda s, x: torch.std_mean(x * s.w, 2)[0] + torch.max(x * s.w, 2)[0], w=weight(8)),
    "weights alone in the sum": lambda: Plain(lambda s, x: s.map(x) + s.map.weight.square().sum(), map=nn.Linear(8, 8)),
    "norms by keyword": lambda: Plain(lambda s, x: F.rms_norm(x, normalized_shape=[8], weight=s.w), w=weight(8)),
    "written over": lambda: Plain(lambda s, x: F.relu_(s.map(x)[:, 1:]), map=nn.Linear(8, 8)),
    "rows": lambda: Plain(lambda s, x: F.relu_(s.map(x.flatten(0, 1))), map=nn.Linear(8, 8, bias=False)),
    "not in one piece": lambda: Plain(lambda s, x: s.map(x.transpose(0, 1)), map=nn.Linear(8, 8, bias=False)),
    "a weight of one dimension": lambda: Plain(lambda s, x: F.linear(x, s.w)[..., None] + x, w=weight(8)),
    "nothing comes back": lambda: Plain(lambda s, x: s.map(x) + Stop.apply(s.other(x)), map=nn.Linear(8, 8),
                                        other=nn.Linear(8, 8)),
    "frozen bias": lambda: Plain(lambda s, x: s.map(x) + s.b, map=nn.Linear(8, 8), b=weight(8).requires_grad_(False)),
    "a gradient of its own": lambda: Plain(downhill, map=nn.Linear(8, 8), norm=nn.LayerNorm(8)),
    "autocast": lambda: Plain(under_autocast, map=nn.Linear(8, 8)),
    "batch statistics": lambda: Plain(lambda s, x: s.norm(x.flatten(0, 1)), norm=nn.BatchNorm1d(WIDTH)),
}  # fmt: skip
AT_ONCE: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "added in place": (lambda: Plain(added_in_place, map=nn.Linear(8, 8), shift=weight(8)), {"shift"}),
    "a frozen norm of a parameter": (
        lambda: Plain(frozen_norm, norm=nn.RMSNorm(8).requires_grad_(False), w=weight(8)),
        {"w"},
    ),
    "a Function": (lambda: Plain(lambda s, x: Scaled.apply(s.map(x), s.w), map=nn.Linear(8, 8), w=weight(8)), {"w"}),
}
"""With the parameters whose gradients are not put off."""


@contextmanager
def split(module: nn.Module) -> Iterator[BackwardSplitter]:
    """As in a stage: stand-ins are in the places of the weights."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    watch = ProxyWeights(trained)
    stands = {id(p): watch.tensors[name] for name, p in trained.items()}
    places = [(inner, key, p) for inner in module.modules() for key, p in inner._parameters.items() if id(p) in stands]
    for inner, key, p in places:
        inner._parameters[key] = stands[id(p)]
    try:
        with BackwardSplitter(watch) as splitting:
            yield splitting
    finally:
        for inner, key, p in places:
            inner._parameters[key] = p


def adding(module: nn.Module) -> tuple[dict[str, Tensor], Callable[[str, Tensor], None]]:
    """The weights, and what adds to their gradients."""
    trained: dict[str, Tensor] = {name: p for name, p in module.named_parameters() if p.requires_grad}

    def add(name: str, found: Tensor) -> None:
        before = trained[name].grad
        trained[name].grad = found if before is None else before.add_(found)

    return trained, add


def gradients_of(module: nn.Module, x: Tensor, halves: bool, at_once: set[str]) -> dict[str, Tensor]:
    """Of the input and all parameters, from a backward in one or in two halves."""
    torch.manual_seed(3)
    x = x.detach().requires_grad_()
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if halves:
        with split(module) as splitting:
            y = module(x)
    else:
        y = module(x)
    torch.autograd.backward(y, torch.randn(y.shape, generator=torch.Generator().manual_seed(4)))
    if halves:
        assert {name for name, p in trained.items() if p.grad is not None} == at_once
        splitting.deferred.run(*adding(module))
    assert x.grad is not None
    found = {"x": x.grad, "y": y.detach()} | {name: p.grad for name, p in trained.items() if p.grad is not None}
    assert found.keys() | {name for name in trained if name.startswith("other.")} == {"x", "y", *trained}
    for parameter in module.parameters():
        parameter.grad = None
    return found


@pytest.mark.parametrize("name", [*MODULES, *AT_ONCE])
def test_the_bits_of_a_whole_backward(name: str) -> None:
    torch.manual_seed(2)
    make, at_once = AT_ONCE[name] if name in AT_ONCE else (MODULES[name], set())
    module, x = make(), torch.randn(SAMPLES, TOKENS, WIDTH)
    whole, halves = gradients_of(module, x, False, set()), gradients_of(module, x, True, at_once)
    for key, value in whole.items():
        assert torch.equal(halves[key], value), key


@pytest.mark.parametrize("kind", ["linear", "norm"])
def test_gradients_that_are_differentiated_again_are_refused(kind: str) -> None:
    """What they add to the gradients of the weights would be lost."""
    module = nn.Linear(WIDTH, WIDTH) if kind == "linear" else nn.LayerNorm(WIDTH)
    x = torch.randn(SAMPLES, TOKENS, WIDTH).requires_grad_()
    with pytest.raises(CapabilityError, match=r"create_graph=True\), which a backward in two halves"), split(module):
        torch.autograd.grad(module(x).pow(4).sum(), x, create_graph=True)


def test_gradients_of_weights_within_a_forward_are_refused() -> None:
    module = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(CapabilityError, match="asks for the gradients of its own weights while it runs"), split(module):
        torch.autograd.grad(module(torch.ones(2, WIDTH)).sum(), module.weight, allow_unused=True)


def test_a_weight_that_is_read_in_several_ways() -> None:
    """What one microbatch adds is summed up before it is added to what others have, as autograd does."""
    torch.manual_seed(2)
    module = Plain(
        lambda s, x: (
            torch.tanh(s.w[0] + F.linear(F.linear(x * s.v, s.w), s.w, s.v))
            + F.linear(x, s.w) * s.v
            + 0.1 * s.map(x) * s.map.weight.square().sum()
        ),
        w=weight(8, 8),
        v=weight(8),
        map=nn.Linear(8, 8),
    )
    found: list[list[Tensor]] = []
    for halves in (False, True):
        for p in module.parameters():
            p.grad = torch.full_like(p, 0.1)
        for k in range(3):
            x = torch.randn(SAMPLES, TOKENS, WIDTH, generator=torch.Generator().manual_seed(k)).requires_grad_()
            with split(module) if halves else nullcontext() as splitting:
                y = module(x)
            y.square().sum().backward()
            if splitting is not None:
                splitting.deferred.run(*adding(module))
        found.append([p.grad for p in module.parameters() if p.grad is not None])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("halves", [False, True])
def test_what_weights_have_read_must_not_be_written_into(halves: bool) -> None:
    torch.manual_seed(2)
    module = Plain(lambda s, x: (h := x * 1.0, s.map(h), h.add_(1))[1], map=nn.Linear(8, 8))
    x = torch.randn(SAMPLES, TOKENS, WIDTH).requires_grad_()
    with split(module) if halves else nullcontext() as splitting:
        y = module(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # noqa: PT012
        y.sum().backward()
        if splitting is not None:
            splitting.deferred.run(*adding(module))


def test_a_table_of_tokens_puts_everything_off() -> None:
    """Where tokens come in nothing wants a gradient, but what follows is cut off all the same."""
    torch.manual_seed(2)
    module = nn.Sequential(nn.Embedding(9, WIDTH), Residual())
    tokens, trained = torch.randint(9, (SAMPLES, TOKENS)), list(module.parameters())
    module(tokens).sum().backward()
    wanted = [p.grad for p in trained]
    for p in trained:
        p.grad = None
    with split(module) as splitting:
        y = module(tokens)
    y.sum().backward()
    assert all(p.grad is None for p in trained)
    splitting.deferred.run(*adding(module))
    for p, gradient in zip(trained, wanted, strict=True):
        assert p.grad is not None
        assert gradient is not None
        assert torch.equal(p.grad, gradient)


def test_what_lives_between_the_halves() -> None:
    """Of linear, gelu, linear: the inputs of both linear maps and two gradients, but not what gelu keeps."""
    torch.manual_seed(2)
    module = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    trained, row = list(module.parameters()), 32 * 4
    gc.collect()
    gc.disable()
    try:
        with LiveStorage() as tracker:
            x = torch.randn(32, 64).requires_grad_()
            with split(module) as splitting:
                y = module(x)
            kept = (64 + 256 + 256) * row  # x, what gelu reads, what it makes; y is only handed on
            assert tracker.live - kept - y.nbytes <= 8
            gradient = torch.randn(32, 64)
            edge = torch.autograd.graph.get_gradient_edge(y)
            del y
            torch.autograd.backward([edge], [gradient])
            del edge, gradient
            late = (64 + 256) * row + (256 + 64) * row  # inputs, and the gradients of outputs
            assert x.grad is not None
            assert tracker.live - late - x.grad.nbytes <= 8
            splitting.deferred.run(*adding(module))
            weights = sum(p.grad.nbytes for p in trained if p.grad is not None)
            assert tracker.live - x.nbytes - x.grad.nbytes - weights <= 8
    finally:
        gc.enable()


def squares(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).sum()


LATE = """schedule late
rule flush
microbatches 3
nodes 0@0
rank 0: F0^t I0^t F1^t W0^t I1^t F2^t I2^t W1^t W2^t STEP[t]
"""
SPLIT = [(LATE, 1, 3), ("zb-h1", 1, 3), ("1f1b", 1, 3), ("zb-v", 1, 4), ("dualpipe-v", 1, 4), ("zb-v", 2, 5)]


@pytest.mark.parametrize(("method", "p", "m"), SPLIT)
@pytest.mark.parametrize("recompute", ["none", "stage"])
def test_the_account_of_activations_is_what_lives(
    method: str, p: int, m: int, recompute: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every pass: what operations have made and is alive is what the pipeline says, but for a few scalars.

    Where stages meet it may say more: what a stage hands on is counted there, too, when its own graph keeps it as well.
    """
    width, schedule = 32, parse_schedule(method) if method == LATE else make_schedule(method, p, m)
    torch.manual_seed(2)
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.Tanh()) for _ in range(8)]
    balance = [9 - (schedule.num_stages - 1), *[1] * (schedule.num_stages - 1)]
    data = [[(torch.randn(64, width), torch.randn(64, width)) for _ in range(m)] for _ in range(4)]
    pipeline = Pipeline(
        [lambda x: x * 1.0, *layers],
        schedule,
        loss=squares,
        optimizer=OPTIMIZERS["sgd"],
        partition=balance,
        recompute=recompute,
    )
    for _ in pipeline.run(data[:2]):
        pass
    gaps: list[int] = []
    gc.collect()
    gc.disable()
    try:
        with LiveStorage() as tracker:
            real = BoundAction.act

            def act(self: BoundAction, *arguments: Any) -> None:
                real(self, *arguments)
                kinds = ("activations", "messages", "parked activations")
                said = sum(live.get(kind, 0) for live in pipeline.live_bytes().values() for kind in kinds)
                gaps.append(tracker.live - said)

            monkeypatch.setattr(BoundAction, "act", act)
            for _ in pipeline.run(data[2:]):
                pass
    finally:
        gc.enable()
    row = 64 * width * 4
    assert len(gaps) > 4 * m
    assert max(gaps) < row  # less than one activation
    if schedule.num_stages == 1 and (
        recompute == "none" or method != LATE
    ):  # else inputs count, which the data hold as well
        assert min(gaps) > -row
    assert all(live["activations"] == live.get("messages", 0) == 0 for live in pipeline.live_bytes().values())


def test_torch_s_checkpoint_inside_a_block() -> None:
    """It runs its forward again in the first half, and finds the operations cut off in the same way."""
    torch.manual_seed(2)
    inner = Residual()
    module = Plain(lambda s, x: checkpoint(s.inner, x, use_reentrant=False), inner=inner)
    x = torch.randn(SAMPLES, TOKENS, WIDTH)
    whole, halves = gradients_of(module, x, False, set()), gradients_of(module, x, True, set())
    for key, value in whole.items():
        assert torch.equal(halves[key], value), key


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_block() -> None:
    """What is compiled would be traced past the stages; it runs as it is."""
    torch.manual_seed(2)
    plain, x = Residual(), torch.randn(SAMPLES, TOKENS, WIDTH)
    whole = gradients_of(plain, x, False, set())
    compiled = torch.compile(plain, backend="aot_eager")
    assert isinstance(compiled, nn.Module)
    halves = gradients_of(compiled, x, True, set())
    for key, value in whole.items():
        assert torch.equal(halves[key if key in ("x", "y") else f"_orig_mod.{key}"], value), key


@pytest.mark.filterwarnings("ignore")
def test_a_pipeline_of_compiled_blocks() -> None:
    """Where halves are cut blocks run as they are, elsewhere compiled: the same numbers, to the bit."""
    used: set[int] = set()

    def compiled(block: nn.Module, number: int) -> Any:
        def backend(graph: Any, _inputs: Any) -> Any:
            used.add(number)
            return graph.forward

        return torch.compile(block, backend=backend)

    def train(method: str, change: Callable[[nn.Module, int], Any]) -> tuple[dict[str, Any], list[float | None]]:
        torch.manual_seed(4)
        blocks = [change(Residual(), number) for number in range(4)]
        schedule = make_schedule(method, 2, 4)
        pipeline = Pipeline(blocks, schedule, loss=squares, optimizer=OPTIMIZERS["sgd"], partition=[2, 2])
        data = [[tuple(torch.randn(2, SAMPLES, TOKENS, WIDTH)) for _ in range(4)] for _ in range(3)]
        losses = [report.loss for report in pipeline.run(data)]
        return {key.replace("_orig_mod.", ""): value for key, value in pipeline.state_dict().items()}, losses

    wanted, told = train("1f1b", lambda block, _: block)
    found, also_told = train("zb-h1", compiled)
    assert told == also_told
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[key], value) for key, value in wanted.items())
    assert used == {0, 1}  # nobody waits for the gradient of the first stage's input, so its backwards stay whole


def test_a_backward_is_cut_where_somebody_waits_for_its_first_half() -> None:
    """Of a stage whose W follows its I at once, only if the I has something to send."""
    schedule = make_schedule("zb-h1", 4, 8)
    first = next(stage for stage in schedule.stages if stage.index == 0)
    period = [a for a in schedule.programs[0].period if a.op in (Op.I, Op.W)]
    at_once = [k.unit.first for k, following in pairwise(period) if (k.op, following.op) == (Op.I, Op.W)]
    assert at_once
    for sends in (True, False):
        halved = _halved(schedule, first, sends)
        assert all(bool(halved and halved((k, 0))) is sends for k in at_once)
