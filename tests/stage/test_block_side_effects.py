"""What blocks do besides computing: recompute, autocast, detach, share across stages, keep buffers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock import DataParallel, Device, Pipeline, Precision, Recompute, Staleness
from penstock.errors import CapabilityError, ConfigError, PenstockError
from support.cases import (
    BALANCE,
    ONE_OF_EACH,
    VOCABULARY,
    WIDTH,
    Case,
    Residual,
    assert_equal_tensors,
    expected,
    make_batches,
    make_blocks,
    make_pipeline,
    mixed,
    reference_of,
    token_loss,
)
from support.recorder import CallsAgain

# --- what torch does behind a stage's back --------------------------------------------------------------------------


class Again(Residual):
    """Keeps only its input, and runs its forward again in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(super().forward, x, use_reentrant=False)
        assert isinstance(y, Tensor)
        return y


@pytest.mark.parametrize("method", ["gpipe", "1f1b", "2bw", "stash"])
def test_blocks_that_run_their_forward_again(method: str) -> None:
    """They read the version of the microbatch's own forward again."""
    case = Case(method, 3, 2)
    torch.manual_seed(5)
    blocks: dict[str, Any] = {}
    for name, block in make_blocks("mixed").items():
        blocks[name] = Again() if isinstance(block, Residual) else block
        if isinstance(block, Residual):
            blocks[name].load_state_dict(block.state_dict())
    pipeline = make_pipeline(case, blocks=blocks)
    list(pipeline.run(make_batches(case)))
    assert_equal_tensors(pipeline.state_dict(), expected(case).weights, "weights")


class LowPrecision(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y: Tensor = self.inner(x)
            return y


def float_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    return token_loss(logits.float(), targets)


@pytest.mark.parametrize("method", ["1f1b", "2bw", "stash"])
def test_autocast_around_the_loop_is_autocast_in_each_block(method: str) -> None:
    case, plain = Case(method, 2, 2), make_blocks("mixed")
    blocks = {n: LowPrecision(copy.deepcopy(b)) if isinstance(b, nn.Module) else b for n, b in plain.items()}
    inside = make_pipeline(case, blocks=blocks, loss=float_loss)
    list(inside.run(make_batches(case)))
    around = make_pipeline(case, blocks=plain, loss=float_loss)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        list(around.run(make_batches(case)))
    wanted = {name.replace(".inner.", "."): w for name, w in inside.state_dict().items()}
    assert_equal_tensors(around.state_dict(), wanted, "weights")


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_a_tensor_that_nobody_would_step_is_refused(recompute: Any) -> None:
    """It is no parameter, so it is told from one that a forward makes when it is trained a second time."""
    scale = torch.ones((), requires_grad=True)
    blocks = mixed() | {"tanh": lambda x: x * scale}
    pipeline = make_pipeline(Case("1f1b", 2, 2, recompute=recompute), blocks=blocks)
    with pytest.raises(ConfigError, match=r"stage 0 on rank 0: .* tensor of shape \(\).*to no module"):
        list(pipeline.run(make_batches(Case("1f1b", 2, 2))[:1]))


@pytest.mark.parametrize("owner", ["method", "function", "loss"])
def test_parameters_that_nobody_would_step_are_refused(owner: str) -> None:
    """They would gather gradients for ever."""
    linear = nn.Linear(WIDTH, WIDTH)
    scale = nn.Parameter(torch.ones(()))

    def scaled(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
        total, weight = token_loss(output, target)
        return total * scale, weight

    blocks = mixed()
    if owner != "loss":
        blocks["tanh"] = linear.forward if owner == "method" else lambda x: linear(x)
    pipeline = make_pipeline(Case("1f1b", 2, 2), blocks=blocks, loss=scaled if owner == "loss" else token_loss)
    stage, shape = (1, r"\(\)") if owner == "loss" else (0, r"\(\d+,?")
    with pytest.raises(ConfigError, match=rf"stage {stage} on rank {stage}: .* tensor of shape {shape}.* to no module"):
        list(pipeline.run(make_batches(Case("1f1b", 2, 2))))


def test_what_a_function_does_not_train_may_be_anywhere() -> None:
    linear = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    pipeline = make_pipeline(Case("1f1b", 2, 2), blocks=mixed() | {"tanh": lambda x: linear(x)})
    assert len(list(pipeline.run(make_batches(Case("1f1b", 2, 2))))) == 6


def test_a_first_block_may_write_into_the_data() -> None:
    """The last stage must not take that for other data."""
    case = Case("2bw", 2, 2)
    states = []
    for add in (torch.add, Tensor.add_):
        torch.manual_seed(5)
        blocks = {"shift": lambda x, add=add: add(x, 1) % VOCABULARY, **mixed()}
        pipeline = make_pipeline(case, blocks=blocks, balance=(4, 3))
        list(pipeline.run(make_batches(case)))
        states.append(pipeline.state_dict())
    assert_equal_tensors(states[1], states[0], "weights")


@pytest.mark.parametrize("how", ["no_grad", "detached"])
def test_a_loss_that_does_not_reach_the_parameters_is_refused(how: str) -> None:
    """Torch's own backward raises; a stage that trains must not go on with gradients of zero."""

    def detached(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
        total, weight = token_loss(output, target)
        return total.detach(), weight

    pipeline = make_pipeline(Case("1f1b", 2, 2), loss=detached if how == "detached" else token_loss)
    with torch.set_grad_enabled(how == "detached"), pytest.raises(PenstockError):
        list(pipeline.run(make_batches(Case("1f1b", 2, 2))))


def test_low_precision_is_refused_before_gradients_accumulate_in_it() -> None:
    blocks = {name: b.bfloat16() if isinstance(b, nn.Module) else b for name, b in mixed().items()}
    with pytest.raises(CapabilityError, match=r"stage 0 on rank 0: table\.weight is torch\.bfloat16"):
        make_pipeline(Case("2bw", 2, 4), blocks=blocks, loss=float_loss)


# --- buffers ----------------------------------------------------------------------------------------------------------


class Statistics(nn.Module):
    """Batch norm over samples, and a list of the order in which microbatches came."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        y: Tensor = self.norm(x.flatten(0, 1)).view_as(x)
        return y


def with_statistics() -> dict[str, Any]:
    return mixed() | {"tanh": Statistics(), "norm": Statistics()}


@pytest.mark.parametrize("method", ONE_OF_EACH)
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_buffers_change_once_per_forward_in_order(method: str, depth: int) -> None:
    m = 3
    case = Case(method, depth, m, spans=(4,), skips=())
    torch.manual_seed(5)
    pipeline = make_pipeline(case, blocks=with_statistics())
    list(pipeline.run(make_batches(case)))
    wanted = reference_of(case, with_statistics, BALANCE[depth]).buffers
    found = {name: value for name, value in pipeline.state_dict().items() if name in wanted}
    assert_equal_tensors(found, wanted, "buffers")
    assert int(found["norm.calls"]) == 4 * m


def test_evaluation_leaves_modes_as_they_were() -> None:
    """A user may have frozen statistics inside a block."""
    case = Case("1f1b", 2, 2, spans=(2,), skips=())
    blocks = with_statistics()
    blocks["norm"].norm.eval()
    pipeline = make_pipeline(case, blocks=blocks)
    pipeline.evaluate(make_batches(case))
    assert blocks["norm"].training
    assert not blocks["norm"].norm.training
    assert blocks["tanh"].norm.training


def test_evaluation_changes_no_buffer() -> None:
    case = Case("2bw", 2, 2, spans=(2,), skips=())
    pipeline = make_pipeline(case, blocks=with_statistics())
    list(pipeline.run(make_batches(case)))
    before = {name: value.clone() for name, value in pipeline.state_dict().items()}
    pipeline.evaluate(make_batches(case))
    assert_equal_tensors(pipeline.state_dict(), before, "state")
    assert all(module.training for stage in pipeline.stages.values() for module in stage.module.modules.values())


# --- what a block's own backward does to gradients and attributes of weights ------------------------------------------


class Linear(torch.autograd.Function):
    """Its gradient of the weight goes through autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.w = w
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g @ w, g.t() @ x


class Rebinds(Linear):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        found = g.t() @ x
        w.grad = found if w.grad is None else w.grad + found
        return g @ w, None


class RebindsItsInput(Linear):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        found = g.t() @ x
        ctx.w.grad = found if ctx.w.grad is None else ctx.w.grad + found
        return g @ w, None


class AddsInPlace(Linear):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        if w.grad is None:
            w.grad = torch.zeros_like(w)
        w.grad.add_(g.t() @ x)
        return g @ w, None


class AddsToMainGrad(Linear):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        w.main_grad.add_((g.t() @ x).float())
        return g @ w, None


class Owner(nn.Module):
    """A layer with a weight that one of these Functions reads, and autograd too if it is `mixed`."""

    def __init__(self, function: Any, mixed: bool = False) -> None:
        super().__init__()
        self.function, self.mixed = function, mixed
        self.weight = nn.Parameter(torch.randn(6, 6) / 3)
        self.weight.scale = 1.5  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        self.weight.seen = getattr(self.weight, "seen", 0) + 1  # type: ignore[attr-defined]
        y: Tensor = self.function.apply(x, self.weight) * self.weight.scale  # type: ignore[attr-defined]
        return (y + nn.functional.linear(y, self.weight) if self.mixed else y).tanh()


def owners(function: Any, mixed: bool = False) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Owner(function, mixed) for _ in range(4)]


def batches(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(8, 6), torch.randn(8, 6)) for _ in range(count)]


def piped(blocks: list[nn.Module], method: str, **options: Any) -> Pipeline:
    return Pipeline(
        blocks, method=method, stages=2, microbatches=4, loss=nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.5, momentum=0.9), **options,
    )  # fmt: skip


def weights_of(blocks: list[nn.Module]) -> dict[str, Tensor]:
    return {str(i): block.weight.detach().clone() for i, block in enumerate(blocks)}  # type: ignore[operator]


STORED = [
    (Rebinds, "1f1b", {}),
    (RebindsItsInput, "1f1b", {"precision": "bf16"}),
    (AddsInPlace, "zb-h1", {"precision": "bf16"}),
    (RebindsItsInput, "zb-v", {}),
    (Rebinds, "zb-v", {"recompute": "stage"}),
    (Rebinds, "stash", {}),
    (RebindsItsInput, "2bw-ahead", {}),
    (Rebinds, "newest", {}),
    (AddsInPlace, "newest", {"precision": "bf16"}),
    (RebindsItsInput, "pipeoptim", {}),
    (Rebinds, "layered", {"data_parallel": 2}),
    (RebindsItsInput, "2bw-layered", {"data_parallel": 2, "precision": "bf16"}),
    (AddsInPlace, "2bw", {"data_parallel": DataParallel(2, sharding="gradients")}),
    (Rebinds, "1f1b", {"recompute": Recompute(offload="activations")}),
    (Rebinds, "1f1b", {"staleness": Staleness(delays=[1, 0, 0, 1], backward_delays=[2, 1, 0, 1])}),
]


@pytest.mark.parametrize(("function", "method", "options"), STORED)
def test_gradients_that_a_block_stores_itself_count(function: Any, method: str, options: dict[str, Any]) -> None:
    """Those of all microbatches, to the bit as if they had gone through autograd."""
    found = []
    for each in (function, Linear):
        blocks = owners(each)
        list(piped(blocks, method, **options).run(batches()))
        found.append(weights_of(blocks))
    assert_equal_tensors(*found, "weights")


@pytest.mark.parametrize("method", ["1f1b", "zb-h1", "interleaved"])
@pytest.mark.parametrize("function", [Rebinds, AddsInPlace])
def test_gradients_that_a_block_stores_itself_are_those_of_plain_torch(function: Any, method: str) -> None:
    """Also of a weight to whose gradient autograd adds as well."""
    blocks, plain = owners(function, mixed=True), owners(function, mixed=True)
    list(piped(blocks, method).run(batches()))
    optimizer = torch.optim.SGD([p for block in plain for p in block.parameters()], lr=0.5, momentum=0.9)
    for inputs, targets in batches():
        for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True):
            (nn.functional.mse_loss(nn.Sequential(*plain)(x), y) / 4).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    for name, weight in weights_of(plain).items():
        torch.testing.assert_close(weights_of(blocks)[name], weight)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("method", ["1f1b", "zb-h1"])
def test_recordings_count_gradients_that_a_block_stores_itself(
    recorder: CallsAgain, method: str, precision: str
) -> None:
    found = []
    for cuda_graphs in (True, False):
        blocks = owners(RebindsItsInput)
        for block in blocks:
            block.forward = lambda x, block=block: block.function.apply(x, block.weight).tanh()  # type: ignore[method-assign,misc]
        pipeline = piped(blocks, method, precision=precision, device=Device(cuda_graphs=cuda_graphs))
        list(pipeline.run(batches(5)))
        found.append(weights_of(blocks))
    assert "_run_backward" in recorder.replayed
    assert_equal_tensors(*found, "weights")


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("1f1b", {}),
        ("1f1b", {"recompute": "stage"}),
        ("zb-h1", {}),
        ("2bw", {"precision": Precision("bf16", divisor=8)}),
        ("newest", {}),
        ("layered", {"data_parallel": 2}),
    ],
)
def test_attributes_of_parameters_are_those_of_plain_torch(method: str, options: dict[str, Any]) -> None:
    """Read in forwards and backwards, set between two runs, and written by blocks."""
    blocks, plain = owners(AddsToMainGrad), owners(Linear)
    for block in blocks:
        block.weight.main_grad = torch.zeros(6, 6)  # type: ignore[union-attr]
    pipeline = piped(blocks, method, **({"precision": Precision(divisor=8)} | options))
    for scale in (1.5, 0.5):
        for block in (*blocks, *plain):
            block.weight.scale = scale  # type: ignore[union-attr]
        list(pipeline.run(batches(2)))
        for x, y in batches(2):
            nn.functional.mse_loss(nn.Sequential(*plain)(x), y).backward()  # type: ignore[no-untyped-call]
    close = {"rtol": 0.1, "atol": 0.01} if "precision" in options else {"rtol": 1e-4, "atol": 1e-6}
    for i, block in enumerate(blocks):
        wanted = plain[i].weight.grad  # type: ignore[assignment]
        torch.testing.assert_close(block.weight.main_grad, wanted, **close)  # type: ignore[arg-type,union-attr]
        assert block.weight.seen >= 4 * 4 * options.get("data_parallel", 1)  # type: ignore[operator,union-attr]
