"""Memory: what lives, for how long, and whether the pipeline's own account of it is right."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.runtime.pipeline import Pipeline
from penstock.timeline import Timeline
from penstock.weights.store import VersionStore
from penstock.weights.writes_between_runs import WrittenCheck
from support.cases import METHODS, ONE_OF_EACH, OPTIMIZERS, Named
from support.grouped import grouped
from support.live_storage import LiveStorage
from support.pool import Pool
from support.schedules import make_schedule

WIDTH, SIZE = 32, 4
BALANCE = {1: (5,), 2: (3, 2), 3: (2, 1, 2), 4: (2, 1, 1, 1)}


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    """Nothing may need the garbage collector to die."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def fresh(x: Tensor) -> Tensor:
    """So that what the first layer saves is not the data, which lives anyway."""
    return x * 1.0


def squares(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    return ((output - target) ** 2).sum(), 1.0


def make_pipeline(method: str, depth: int, m: int, layers: list[nn.Module], **changes: Any) -> Pipeline:
    arguments: dict[str, Any] = {"loss": squares, "optimizer": OPTIMIZERS["adamw"], "balance": BALANCE[depth]}
    return Pipeline([fresh, *layers], make_schedule(method, depth, m), **grouped(arguments | changes))


def make_layers(width: int = WIDTH) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.Tanh()) for _ in range(4)]


def make_data(batches: int, m: int, width: int = WIDTH, size: int = SIZE) -> list[list[tuple[Tensor, Tensor]]]:
    return [[(torch.randn(size, width), torch.randn(size, width)) for _ in range(m)] for _ in range(batches)]


def test_the_tracker_sees_what_a_graph_keeps() -> None:
    with LiveStorage() as tracker:
        x = torch.ones(100, requires_grad=True)
        y = x.exp().sum()
        assert tracker.live == 400 + 400 + 4  # exp keeps its result
        view = x[:50]
        assert tracker.live == 804
        del y
        assert tracker.live == 400
        del x, view
        assert tracker.live == 0
        assert tracker.peak == 804


class Watched(nn.Module):
    """Keeps weak references to an activation of each microbatch, and notes which are alive at each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.seen: list[weakref.ref[torch.UntypedStorage]] = []
        self.alive: list[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.alive.append(self.living())
        hidden = self.layer(x)
        self.seen.append(weakref.ref(hidden.untyped_storage()))
        return torch.nn.functional.gelu(hidden)

    def living(self) -> list[int]:
        return [g for g, reference in enumerate(self.seen) if reference() is not None]


def in_flight(method: str, stage: int, depth: int, m: int, g: int) -> list[int]:
    """The microbatches between forward and backward on a stage when it begins the forward of microbatch g."""
    start = 0 if method in ("2bw", "2bw-eager", "stash") else g // m * m
    plain = depth - 1 - stage
    ahead = {"sequential": 0, "gpipe": m, "eager": 2 * plain, "2bw-eager": 2 * plain}.get(method, plain)
    return list(range(max(start, g - ahead), g))


@pytest.mark.parametrize("method", [*METHODS, "2bw-eager"])
@pytest.mark.parametrize("depth", [1, 3])
def test_activations_die_at_their_backward(method: str, depth: int) -> None:
    m, batches = 6, 3
    layers = [Watched() for _ in range(4)]
    list(make_pipeline(method, depth, m, list(layers)).run(make_data(batches, m)))
    stages = [stage for stage, blocks in enumerate(BALANCE[depth]) for _ in range(blocks)][1:]
    for layer, stage in zip(layers, stages, strict=True):
        assert layer.alive == [in_flight(method, stage, depth, m, g) for g in range(m * batches)]
        assert layer.living() == []


def peak_activations(method: str, depth: int, m: int) -> int:
    data = make_data(3, m)
    with LiveStorage() as tracker:
        pipeline = make_pipeline(method, depth, m, make_layers())
        list(pipeline.run(data[:1]))
        static = tracker.peak = tracker.live
        list(pipeline.run(data[1:]))
        return tracker.peak - static


@pytest.mark.long
def test_peak_memory_does_not_depend_on_m() -> None:
    def growth(method: str) -> float:
        return peak_activations(method, 4, 16) / peak_activations(method, 4, 4)

    assert growth("1f1b") == pytest.approx(1.0, abs=0.05)
    assert growth("2bw") == pytest.approx(1.0, abs=0.05)
    assert growth("gpipe") > 2.5


@pytest.mark.parametrize("method", ["gpipe", "1f1b", "2bw", "stash"])
def test_nothing_as_large_as_a_parameter_is_kept_per_microbatch(method: str) -> None:
    def most_large_tensors(m: int) -> int:
        width = 128
        data = make_data(3, m, width, size=1)
        with LiveStorage() as tracker:
            tracker.watch_large(width * width * 4)
            list(make_pipeline(method, 2, m, [nn.Linear(width, width) for _ in range(4)]).run(data))
            return tracker.peak_large

    assert most_large_tensors(12) == most_large_tensors(4)


def of_kind(pipeline: Pipeline, *kinds: str) -> int:
    return sum(live.get(kind, 0) for live in pipeline.live_bytes().values() for kind in kinds)


@pytest.mark.parametrize("method", ONE_OF_EACH)
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_ledger_is_right(method: str, depth: int) -> None:
    m = 4
    data = make_data(4, m)
    with LiveStorage() as tracker:
        pipeline = make_pipeline(method, depth, m, make_layers())
        list(pipeline.run(data[:1]))
        static = of_kind(pipeline, "weights", "gradients", "idle buffers", "optimizer")
        assert static == tracker.live
        assert of_kind(pipeline, "activations", "messages") == 0
        for _ in pipeline.run(data[1:]):
            # Seeds of backward passes (4 bytes each) are left out; a message may be counted a little longer than it
            # lives, but never less long.
            moving = tracker.live - static
            activations = of_kind(pipeline, "activations")
            assert activations <= moving <= activations + of_kind(pipeline, "messages") + 4 * m * depth
            assert (activations == 0) is (depth == 1 and method != "gpipe")  # a report comes after the last backward
        assert static == of_kind(pipeline, "weights", "gradients", "idle buffers", "optimizer") == tracker.live


def test_activations_count_wherever_they_lie() -> None:
    """They may lie where the modules' own parameters were, before these moved into the store."""
    for width in range(8, 264, 8):  # activations as large as weights, so that memory is used again
        pipeline = make_pipeline("gpipe", 1, 4, make_layers(width))
        list(pipeline.run(make_data(1, 4, width, size=width)))
        per_microbatch = 14 * width * width * 4  # the input, three per layer, and the difference in the loss
        assert pipeline.peak_bytes()[0]["activations"] == 4 * per_microbatch, width


@pytest.mark.parametrize("method", [*METHODS, "2bw-eager"])
def test_the_peak_of_activations_is_the_schedule_s(method: str) -> None:
    """Each stage has equal layers here, so its peak is the proof's number of microbatches times those of one."""
    m, depth = 6, 4
    pipeline = make_pipeline(method, depth, m, make_layers())
    list(pipeline.run(make_data(3, m)))
    one = [size * SIZE * WIDTH * 4 for size in (4, 4, 4, 5)]  # inputs of 4 layers; of the difference in the loss
    peaks = [pipeline.peak_bytes()[rank]["activations"] for rank in range(depth)]
    assert peaks == [int(number) * size for number, size in zip(pipeline.proof.activations, one, strict=True)]


def make_chunked(name: str, depth: int, m: int) -> Pipeline:
    """One layer in every stage but the first one, which also has `fresh`."""
    stages = make_schedule(name, depth, m).num_stages
    layers = make_layers() + make_layers() * (stages == 8)
    return make_pipeline(name, depth, m, layers, balance=[2, *[1] * (stages - 1)])


def together(timeline: Timeline, rank: int, *kinds: str) -> float:
    """The most bytes of several kinds at one time."""
    changes = sorted((when, kind, held) for kind in kinds for when, held in timeline.memory.get((rank, kind), ()))
    live, peak = dict.fromkeys(kinds, 0.0), 0.0
    for _, kind, held in changes:
        live[kind] = held
        peak = max(peak, sum(live.values()))
    return peak


@pytest.mark.parametrize("name", ["interleaved", "zb-h1", "zb-v", "v-half", "hanayo", "chimera", "dualpipe", "bpipe"])
def test_the_peak_on_every_rank_is_what_was_predicted(name: str) -> None:
    """The rank of the last stage also holds the difference in the loss: a quarter of what a layer keeps."""
    m, depth = 8, 4
    pipeline = make_chunked(name, depth, m)
    list(pipeline.run(make_data(2, m)))
    for rank, number in enumerate(pipeline.proof.activations):
        stages = pipeline.schedule.on_rank(rank)
        share = pipeline.schedule.chunks[stages[0]] * 4 * SIZE * WIDTH * 4
        peak = together(pipeline.timeline(), rank, "activations", "parked activations") / share
        if any(stage.index == pipeline.schedule.num_stages - 1 for stage in stages):
            assert number < peak <= 1.25 * number
        else:
            assert peak == number


@pytest.mark.parametrize("name", ["interleaved", "zb-v", "dualpipe", "bpipe"])
def test_no_order_keeps_graphs_from_batch_to_batch(name: str) -> None:
    m, depth = 8, 4
    data = make_data(3, m)
    with LiveStorage() as tracker:
        pipeline = make_chunked(name, depth, m)
        list(pipeline.run(data[:1]))
        static = tracker.live
        list(pipeline.run(data[1:]))
        assert tracker.live == static


@pytest.mark.parametrize(("method", "expected"), [("gpipe", 16), ("1f1b", 16), ("2bw", 20)])
@pytest.mark.parametrize("depth", [1, 2])
def test_bytes_per_parameter_with_adam(method: str, expected: int, depth: int) -> None:
    width, m = 1024, 2
    data = make_data(3, m, width)
    with LiveStorage() as tracker:
        layers = [nn.Linear(width, width, bias=False) for _ in range(4)]
        pipeline = make_pipeline(method, depth, m, list(layers))
        assert tracker.live <= 12 * 4 * width * width + depth * width * width * 4  # the modules' own memory is gone
        list(pipeline.run(data))
        matrix = 4 * width * width
        scratch = depth * matrix if method == "2bw" else 0  # as large as the largest parameter of the stage, 4 MiB
        steps = 4 * len(layers)  # Adam's counters
        assert tracker.live == expected * width * width * len(layers) + scratch + steps


@pytest.mark.parametrize("method", ["gpipe", "1f1b", "2bw", "stash"])
def test_nothing_leaks(method: str) -> None:
    """Tensors die without the collector. Other objects are counted after it, because torch's pytrees make cycles."""
    m, depth = 3, 3
    batch = make_data(1, m)[0]
    with LiveStorage() as tracker:
        pipeline = make_pipeline(method, depth, m, make_layers())
        for rank in pipeline._ranks:  # the recorder keeps a bounded number of entries: a small one
            rank.recorder._entries = deque(maxlen=10)
        tensors, objects = [], []
        gc.freeze()  # what is there already is neither looked through nor counted
        for report in pipeline.run(batch for _ in range(28)):
            if report.batch % 4 == 3:
                tensors.append(tracker.live)
                gc.collect()
                objects.append(len(gc.get_objects()))
        assert len(set(tensors)) == 1
        assert len(set(objects[3:-1])) == 1  # the first ones fill caches, the last one drains


class Spare(nn.Module):
    """Returns something that nobody uses, whose operation keeps its own result."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[torch.UntypedStorage]] = []

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        spare = torch.exp(x)
        self.made.append(weakref.ref(spare.untyped_storage()))
        return {"x": x, "spare": spare}


def take(tree: dict[str, Tensor]) -> Tensor:
    return tree["x"]


@pytest.mark.parametrize("depth", [1, 2])
def test_outputs_that_nobody_uses_die_too(depth: int) -> None:
    spare = Spare()
    layers = [make_layers()[0], spare, take, nn.Linear(WIDTH, WIDTH)]
    pipeline = make_pipeline("1f1b", depth, 2, layers)  # type: ignore[arg-type]
    for size in (2, 3, 4):  # a shape that is new is measured
        list(pipeline.run(make_data(1, 2, size=size)))
    assert [made() for made in spare.made] == [None] * 6


def test_optimizer_state_is_counted() -> None:
    def momentum(named: Named) -> torch.optim.Optimizer:
        return torch.optim.SGD(named, lr=0.1, momentum=0.9)

    pipeline = make_pipeline("1f1b", 2, 2, make_layers(), optimizer=momentum)
    list(pipeline.run(make_data(1, 2)))
    assert of_kind(pipeline, "optimizer") == sum(p.nbytes for layer in make_layers() for p in layer.parameters())


# --- between processes ----------------------------------------------------------------------------------------------


class WatchedInput(nn.Module):
    """Takes down which of the tensors it was given are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.given: list[weakref.ref[torch.UntypedStorage]] = []
        self.most = 0

    def forward(self, x: Tensor) -> Tensor:
        self.given.append(weakref.ref(x.untyped_storage()))
        self.most = max(self.most, sum(given() is not None for given in self.given))
        y: Tensor = self.layer(x)
        return y


def watched(group: dist.ProcessGroup, method: str, depth: int, m: int) -> tuple[int, int, dict[str, int], float]:
    """Received tensors alive at once, and at the end; peaks of the ledger; its activations at the end."""
    watch = WatchedInput()
    rank = dist.get_rank(group)
    layers: list[nn.Module] = [layer for _ in range(depth) for layer in (nn.Identity(), nn.Linear(WIDTH, WIDTH))]
    layers[2 * rank] = watch
    pipeline = make_pipeline(method, depth, m, layers, group=group, balance=[3] + [2] * (depth - 1))
    torch.manual_seed(1)  # the same data on every rank
    list(pipeline.run(make_data(6, m)))
    left = sum(given() is not None for given in watch.given)
    live = of_kind(pipeline, "activations", "messages")
    return watch.most, left, pipeline.peak_bytes()[rank], live


@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_received_tensors_die_at_their_backward(pool: Pool, method: str) -> None:
    """Nobody else keeps them: not a ticket, a lane's thread, nor the block they came in. Nothing grows with m."""
    depth = 3
    peaks = []
    for m in (4, 12):
        found = pool.submit(watched, method, depth, m, ranks=depth)
        for rank, (most, left, _, live) in enumerate(found):
            assert left == live == 0
            assert most <= depth - rank
        peaks.append([peak for _, _, peak, _ in found])
    for few, many in zip(*peaks, strict=True):
        assert few["activations"] == many["activations"] > 0
        assert all(0 < peak["messages"] <= 8 * 4096 for peak in (few, many))  # four lanes, two small blocks on each


@pytest.mark.parametrize("method", ONE_OF_EACH)
@pytest.mark.parametrize(("depth", "m"), [(1, 1), (2, 1), (3, 2), (4, 3)])
def test_versions_alive_are_those_of_the_proof(
    method: str, depth: int, m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: dict[str, int] = {}
    retain = VersionStore.retain

    def counted(store: VersionStore, versions: Iterable[int]) -> None:
        retain(store, versions)
        alive[store.where] = max(alive.get(store.where, 1), len(store.versions))

    monkeypatch.setattr(VersionStore, "retain", counted)
    pipeline = make_pipeline(method, depth, m, make_layers())
    list(pipeline.run(make_data(2 * depth + 4, m)))
    proven = {stage.module.where: pipeline.proof.stages[key].versions for key, stage in pipeline.stages.items()}
    assert alive == proven
    assert max(proven.values()) == {"2bw": 2, "stash": -(-(depth - 1) // m) + 1}.get(method, 1)


def test_a_pipeline_is_made_without_another_copy_of_its_weights() -> None:
    layers = make_layers(256)
    with LiveStorage() as tracker:
        make_pipeline("1f1b", 1, 2, layers)
    weights = sum(p.nbytes for layer in layers for p in layer.parameters())
    assert tracker.peak < 2.1 * weights  # their buffer, and that of gradients


def test_looking_for_writes_takes_little_memory() -> None:
    store = VersionStore({"w": torch.zeros(1 << 21)}, 1, "stage 0")
    with LiveStorage() as tracker:
        WrittenCheck(store).look()
    assert tracker.peak < 2 << 20
