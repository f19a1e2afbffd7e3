"""Passes that are recorded and replayed: on a GPU as CUDA graphs, here as functions that are called again.

`tests/comm/test_cuda.py` has what only a GPU can show.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import CapabilityError, ConfigError
from penstock.options.run import Device
from penstock.runtime.data import batch_source
from penstock.runtime.data.batch_source import BatchSource
from penstock.stage.trained_stage_weights import TrainedWeights
from penstock.verify.reference import Scaling
from support.cases import Case, assert_same, expected, make_pipeline, train
from support.recorder import CallsAgain, pairs, tiny

REPLAYED = [
    Case("1f1b", 2, 4, loss="mean"),
    Case("1f1b", 3, 2, loss="even", skips=(), clip=0.5),
    Case("gpipe", 4, 3, loss="mean"),
    Case("2bw", 2, 4, loss="mean"),
    Case("2bw", 4, 4, loss="mean", precision="bf16"),
    Case("2bw", 3, 3, loss="mean", precision="fp16"),
    Case("interleaved", 2, 4, loss="mean", options=(("chunks", 2),), clip=0.5),
    Case("stash", 3, 2, loss="even", skips=()),
    Case("breadth-first", 2, 2, loss="mean", options=(("chunks", 2),), precision="bf16"),
    Case("hanayo", 2, 2, loss="mean", options=(("waves", 1),)),
    Case("2bw", 2, 2, loss="mean", tied=True, width=2),
    Case("1f1b", 2, 3, loss="mean", scaling=Scaling(8.0, 2.0, 0.5, 1)),
    Case("zb-h1", 3, 4, loss="mean"),
    Case("zb-v", 2, 4, loss="mean", precision="bf16"),
    Case("zb-h1", 2, 3, loss="even", skips=(), tied=True, model="gpt"),
    Case("eager", 2, 4, loss="mean", spans=(2, 1, 3)),
]


@pytest.mark.parametrize("case", REPLAYED, ids=lambda case: f"{case.method}-{case.depth}-{case.width}-{case.precision}")
def test_replayed_passes_compute_the_same(recorder: CallsAgain, case: Case) -> None:
    """As the reference; in low precision, where that reads a mean in less than float32, as passes that are not."""
    assert_same(train(None, case, cuda_graphs=True), expected(case) if case.precision == "fp32" else train(None, case))
    forwards, backwards = (recorder.replayed.count(f"_run_{what}") for what in ("forward", "backward"))
    assert forwards >= backwards > 0


def test_recordings_are_made_once(recorder: CallsAgain) -> None:
    """For each microbatch in flight, one for each buffer of weights, which are three under 2BW; but the first two
    batches read the same weights and add to different gradients."""
    train(None, Case("2bw", 2, 4, loss="mean", spans=(12,)), cuda_graphs=True)
    in_flight = {"first": 2, "last": 1}
    assert recorder.recorded == 2 * (3 + 1) * sum(in_flight.values())


def test_memory_of_a_microbatch_is_shared_by_its_recordings(recorder: CallsAgain) -> None:
    train(None, Case("2bw", 2, 4, loss="mean", spans=(12,)), cuda_graphs=True)
    assert len(recorder.pools) == (2 + 1) + 2  # one per microbatch in flight, and per stage for what passes away


@pytest.mark.parametrize("model", ["drops", "rolls dice", "counts"])
def test_blocks_that_do_something_on_the_host_run_as_they_are(
    recorder: CallsAgain, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With a warning, and the numbers that they have without CUDA graphs."""
    found = []
    for cuda_graphs in (False, True):
        random.seed(1)
        found.append([report.loss for report in tiny(HOST_EFFECTS[model](), cuda_graphs).run(pairs(4))])
    assert found[0] == found[1]
    why = "write attributes of their modules" if model == "counts" else "draw random numbers"
    assert [f"its blocks run without CUDA graphs, since they {why}" in r.message for r in caplog.records] == [True]
    assert "stage 0" in caplog.text
    assert recorder.recorded == 2, "the other stage is recorded"


class RollsDice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()


class Counts(nn.Linear):
    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes = self.passes + 1
        return super().forward(x) / self.passes


HOST_EFFECTS: dict[str, Callable[[], nn.Module]] = {
    "drops": lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)),
    "rolls dice": lambda: RollsDice(3, 3),
    "counts": lambda: Counts(3, 3),
}


def test_hooks_on_parameters_keep_passes_as_they_are(recorder: CallsAgain) -> None:
    model, seen = nn.Linear(3, 3), list[Tensor]()
    model.weight.register_hook(seen.append)  # type: ignore[no-untyped-call]
    for _ in tiny(model).run(pairs(3)):
        pass
    assert len(seen) == 3 * 2
    assert recorder.recorded == 2, "the other stage is recorded"


def test_modules_changed_between_runs_are_recorded_anew(recorder: CallsAgain) -> None:
    found = []
    for cuda_graphs in (False, True):
        leaky = nn.LeakyReLU(0.1)
        pipeline = tiny(nn.Sequential(nn.Linear(3, 3), leaky), cuda_graphs)
        losses = [report.loss for report in pipeline.run(pairs(3))]
        before = recorder.recorded
        losses += [report.loss for report in pipeline.run(pairs(3))]
        assert recorder.recorded == before, "nothing was changed"
        leaky.negative_slope = 0.7
        losses += [report.loss for report in pipeline.run(pairs(3))]
        found.append(losses)
    assert found[0] == found[1]
    assert recorder.recorded > before


def test_two_halves_of_a_backward_are_recorded_once(recorder: CallsAgain) -> None:
    """And the room of a microbatch is free after the second half."""
    train(None, Case("zb-h1", 2, 4, loss="mean", spans=(8,)), cuda_graphs=True)
    assert len(recorder.pools) == (2 + 2) + 2, "with a W that waits, the last stage has two in flight"
    assert recorder.recorded == 2 * 2 + 3 * 2


def test_samples_of_another_shape_have_recordings_of_their_own(recorder: CallsAgain) -> None:
    batches = [batch for _ in range(3) for batch in (*pairs(1, 4), *pairs(1, 8))]
    found = [[report.loss for report in tiny(None, graphs).run(batches)] for graphs in (False, True)]
    assert found[0] == found[1]
    assert recorder.recorded == 2 * 2 * 3, "two shapes, three microbatches in flight"
    assert len(recorder.pools) == 3 + 2, "shapes share the memory"


def test_a_gradient_elsewhere_than_expected(recorder: CallsAgain) -> None:
    """The forward is replayed again, by a recording that adds to the right place; buffers of modules stay."""

    def train_moving(cuda_graphs: bool) -> list[float | None]:
        pipeline = tiny(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), cuda_graphs)
        stage, _ = pipeline.stages.values()
        assert isinstance(stage.weights, TrainedWeights)
        store, losses = stage.weights.store, [report.loss for report in pipeline.run(pairs(3))]
        before = recorder.recorded
        store._free.append(store._make("another"))
        losses += [report.loss for report in pipeline.run(pairs(3))]
        assert (recorder.recorded > before) == cuda_graphs
        buffers = (buffer for block in stage.module.modules.values() for buffer in block.buffers())
        return [*losses, *(float(buffer.sum()) for buffer in buffers)]

    assert train_moving(cuda_graphs=True) == train_moving(cuda_graphs=False)


REFUSED = [
    ({"method": "newest"}, "backwards look weights up"),
    ({"method": "bpipe", "stages": 4, "microbatches": 8}, "activations are moved to the host"),
    ({"recompute": "block"}, "forwards run a second time"),
]


@pytest.mark.parametrize(("changes", "why"), REFUSED, ids=[str(changes) for changes, _ in REFUSED])
def test_what_cuda_graphs_do_not_go_with(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(CapabilityError, match=f"cuda_graphs does not go with this: {why}.*leave cuda_graphs out"):
        tiny(**changes) if "stages" not in changes else make_pipeline(Case("bpipe", 4, 5), cuda_graphs=True)


def test_cuda_graphs_take_a_gpu() -> None:
    with pytest.raises(ConfigError, match="cuda_graphs takes a GPU, but ranks compute on cpu"):
        tiny()
    with pytest.raises(ConfigError, match="cuda_graphs must be True or False; got 1"):
        Device("cuda", cuda_graphs=1)  # type: ignore[arg-type]


def test_samples_on_a_gpu_are_compared_at_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """To read them back the host would have to wait for the GPU."""
    monkeypatch.setattr(batch_source, "batch_tensors", lambda _: [torch.empty(1, device="meta")])
    source = BatchSource([[(x, y)] for x, y in pairs(4)], 1)
    assert [source.sample(0, k).checksum != 0 for k in range(4)] == [True, True, False, False]
