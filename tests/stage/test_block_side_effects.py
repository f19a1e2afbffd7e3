"""What blocks do besides computing: recompute, autocast, detach, share across stages, keep buffers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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
