"""What passes that are replayed would not do again, or would do on other memory: it is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.runtime.pipeline import Pipeline
from penstock.stage.blocks.loss import times_weight
from support.recorder import CallsAgain, pairs, tiny


def losses(pipeline: Pipeline, batches: list[Any]) -> list[float | None]:
    return [report.loss for report in pipeline.run(batches)]


# --- what is changed between runs -------------------------------------------------------------------------------------


def test_hooks_of_parameters_that_come_between_runs(recorder: CallsAgain) -> None:
    """From the first microbatch on, also where its forward comes before any backward."""
    model, seen = nn.Linear(3, 3), list[Tensor]()
    pipeline = tiny(model)
    losses(pipeline, pairs(3))
    model.weight.register_hook(seen.append)  # type: ignore[no-untyped-call]
    losses(pipeline, pairs(3))
    assert len(seen) == 3 * 2
    assert recorder.recorded


def change_loss(_: nn.Sequential, loss: nn.CrossEntropyLoss) -> None:
    loss.label_smoothing = 0.5


def change_list(model: nn.Sequential, _: nn.Module) -> None:
    model.scales[0] = 3.0  # type: ignore[index, operator]


def move_frozen(model: nn.Sequential, _: nn.Module) -> None:
    model[1].weight.data = torch.ones(3, 3)


def move_buffer(model: nn.Sequential, _: nn.Module) -> None:
    model.offset.data = torch.ones(3)  # type: ignore[union-attr]


@pytest.mark.parametrize("change", [change_loss, change_list, move_frozen, move_buffer])
def test_changes_between_runs_of_what_recordings_read(recorder: CallsAgain, change: Callable[..., None]) -> None:
    frozen = nn.Linear(3, 3)
    frozen.requires_grad_(False)
    model, loss = nn.Sequential(nn.Linear(3, 3), frozen), nn.CrossEntropyLoss()
    model.scales = [1.0]  # type: ignore[assignment]
    model.register_buffer("offset", torch.zeros(3))
    pipeline = tiny(model, loss=loss)
    losses(pipeline, pairs(3))
    before = recorder.recorded
    losses(pipeline, pairs(3))
    assert recorder.recorded == before
    change(model, loss)
    losses(pipeline, pairs(3))
    assert recorder.recorded > before


def test_new_recordings_take_no_pool_whose_recordings_are_gone(recorder: CallsAgain) -> None:
    """Torch refuses such a pool, where memory in it is still taken, as by workspaces of cuBLAS."""
    leaky = nn.LeakyReLU(0.1)
    pipeline = tiny(nn.Sequential(nn.Linear(3, 3), leaky))
    losses(pipeline, pairs(3))
    first = set(recorder.pools)
    recorder.pools.clear()
    leaky.negative_slope = 0.7
    losses(pipeline, pairs(3))
    assert recorder.pools
    assert not first & recorder.pools


def test_recordings_do_not_multiply_from_run_to_run(recorder: CallsAgain) -> None:
    pipeline, made = tiny(method="2bw"), list[int]()
    for _ in range(5):
        losses(pipeline, pairs(4))
        made.append(recorder.recorded)
    assert made[2] == made[-1]


# --- what forwards do -------------------------------------------------------------------------------------------------


class Keeps(nn.Linear):
    """Keeps something in a list of its own."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.shapes: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.shapes.append(x.shape)
        return super().forward(x)


class Doubles(nn.Linear):
    """Writes into its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


def hooked(register: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    getattr(model[1], register)(lambda *_: None)
    return model


NOT_REPEATED = [
    (Keeps, "they write attributes of their modules"),
    (lambda: Doubles(3, 3), "they write in place into what they get"),
    (lambda: hooked("register_forward_hook"), "their modules have hooks"),
    (lambda: hooked("register_full_backward_hook"), "their modules have hooks"),
]


@pytest.mark.parametrize(("model", "why"), NOT_REPEATED)
def test_what_a_recording_would_not_repeat(
    recorder: CallsAgain, model: Callable[[], nn.Module], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    losses(tiny(model()), [pairs(2, 2) for _ in range(3)])
    assert [f"its blocks run without CUDA graphs, since {why}" in message for message in caplog.messages] == [True]
    assert recorder.recorded == 2, "the other stage is recorded"


class Follows(nn.Linear):
    """Computes with a buffer that each forward changes."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.mul_(0.9)
        return super().forward(x) * self.scale.clone()


def test_a_forward_that_is_replayed_again_finds_buffers_as_they_were(recorder: CallsAgain) -> None:
    """Under 2BW the second batch adds to another gradient than the first one on the same weights."""
    with_graphs, without = (losses(tiny(Follows(), graphs, method="2bw"), pairs(6)) for graphs in (True, False))
    assert with_graphs == without
    forwards = sum(name == "_run_forward" for name in recorder.replayed)
    backwards = sum(name == "_run_backward" for name in recorder.replayed)
    assert forwards > backwards, "some forwards are replayed again"


# --- what they get ----------------------------------------------------------------------------------------------------


class OneOfTwo(nn.Linear):
    """Computes on the first of two optional inputs, or on minus the second."""

    def forward(self, given: Any) -> Tensor:  # type: ignore[override]
        first, second = given
        return super().forward(-second if first is None else first)


def test_optional_inputs_have_recordings_of_their_own(recorder: CallsAgain) -> None:
    batches = [
        [((x, None) if (number + k) % 3 else (None, x), y) for k, (x, y) in enumerate(pairs(2, 2))]
        for number in range(6)
    ]
    with_graphs, without = (losses(tiny(OneOfTwo(3, 3), graphs), batches) for graphs in (True, False))
    assert with_graphs == without
    assert recorder.recorded


class OnSparse(nn.Linear):
    """A linear map of a sparse matrix."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(x, self.weight.t()) + self.bias


def test_sparse_inputs_are_computed_without_recordings(recorder: CallsAgain) -> None:
    batches = [[(x.to_sparse(), y) for x, y in pairs(2, 2)] for _ in range(3)]
    with_graphs, without = (losses(tiny(OnSparse(3, 3), graphs), batches) for graphs in (True, False))
    assert with_graphs == without
    assert recorder.recorded == 2, "the other stage is recorded"


def masked_mean(output: Tensor, target: Tensor) -> Tensor:
    """A mean over targets that count, of which there may be none."""
    counts = target != -100
    each = F.cross_entropy(output, target.clamp(min=0), reduction="none")
    return (each * counts).sum() / counts.sum()


def test_a_microbatch_without_targets_adds_no_gradient(recorder: CallsAgain) -> None:
    """Not NaN, whatever the loss is divided by."""
    targets = [torch.tensor(batch) for batch in ([0, 1, 1, -100], [0, 1, -100, -100])]
    batches = [(x, targets[number % 2]) for number, (x, _) in enumerate(pairs(6))]
    with_graphs, without = (losses(tiny(None, graphs, loss=masked_mean), batches) for graphs in (True, False))
    assert with_graphs == without
    assert all(loss is not None and loss > 0 for loss in with_graphs)
    assert recorder.recorded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_weight_on_the_gpu_multiplies_as_a_number_does(dtype: torch.dtype) -> None:
    mean = torch.tensor(0.7, dtype=dtype)
    assert torch.equal(times_weight(mean, torch.tensor(257.0, dtype=torch.float64), torch.rand(257, 2)), mean * 257.0)
