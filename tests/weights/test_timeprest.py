"""TiMePReSt, V-TiMePReSt and I-TiMePReSt at work: n forwards, one backward for all of them, weights by version.

The oracle has stages that do in each slot what they can, backwards first, with what there is by then, and gradients
written out by hand: no schedule, no table of versions, no autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.errors import CapabilityError, ConfigError, ScheduleError
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.rank.snapshot import Saving, Snapshot
from penstock.schedule.text_parser import parse_schedule
from penstock.weights.corrections.blending import Blending
from penstock.weights.store import VersionStore
from support.cases import Case, Recording, assert_same, expected, make_batches, make_pipeline, train, train_on_ranks
from support.grouped import grouped
from support.own_methods import correction_of, prove
from support.pool import Pool

METHODS = ("timeprest", "v-timeprest", "i-timeprest")
SPANS = (13, 9)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda named: torch.optim.SGD(named, lr=0.2, momentum=0.8, weight_decay=0.01),
    "adamw": lambda named: torch.optim.AdamW(named, lr=0.02, weight_decay=0.1),
}


def loss(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    return 0.5 * ((output - target) ** 2).sum(), float(len(output))


def blocks_of(depth: int) -> dict[str, nn.Module]:
    torch.manual_seed(1)
    return {f"b{s}": nn.Sequential(nn.Linear(5, 5), nn.Tanh()).double() for s in range(depth)}


def data_of(m: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Microbatches of one to three rows."""
    g = torch.Generator().manual_seed(2)
    rows = [[1 + (t + 2 * k) % 3 for k in range(m)] for t in range(sum(SPANS))]
    return [[tuple(torch.randn(2, n, 5, generator=g, dtype=torch.float64)) for n in batch] for batch in rows]  # type: ignore[misc]


# --- the oracle -------------------------------------------------------------------------------------------------------


class Again(NamedTuple):
    """Which stages run their forwards again for their backwards, and whether the loss is made again as well."""

    stages: Collection[int] = ()
    loss: bool = False


NEVER = Again()


@dataclass
class Oracle:
    """A stage: y = tanh(x W' + b).

    Attributes:
        versions: (W, b) after each update.
        kept: microbatch -> input, output, version read.
        forwards, backwards: the slot in which each microbatch and each unit of microbatches was done.
        out, back: what is handed on: activations, and gradients of inputs.
    """

    weights: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    versions: list[list[Tensor]] = field(default_factory=list)
    kept: dict[int, tuple[Tensor, Tensor, int]] = field(default_factory=dict)
    forwards: dict[int, int] = field(default_factory=dict)
    backwards: dict[int, int] = field(default_factory=dict)
    out: dict[int, Tensor] = field(default_factory=dict)
    back: dict[int, Tensor] = field(default_factory=dict)
    gradients: list[list[Tensor]] = field(default_factory=list)

    def forward(self, k: int, x: Tensor, version: int) -> None:
        w, b = self.versions[version]
        self.out[k] = torch.tanh(x @ w.T + b)
        self.kept[k] = x, self.out[k], version

    def backward(self, k: int, g: Tensor, beta: float, again: bool, target: Tensor | None) -> list[Tensor]:
        x, a, version = self.kept.pop(k)
        newest, bias = self.versions[-1]
        if again:
            a = torch.tanh(x @ newest.T + bias)
        if again and target is not None:  # the loss is part of the last stage, and made again with it
            g = a - target
        share = beta ** (len(self.versions) - 1 - version)
        dz = g * (1 - a * a)
        self.back[k] = dz @ (share * self.versions[version][0] + (1 - share) * newest)
        return [dz.T @ x, dz.sum(0)]

    def step(self, gradient: list[Tensor]) -> None:
        for p, g in zip(self.weights, gradient, strict=True):
            p.grad = g
        self.gradients.append(gradient)
        self.optimizer.step()
        self.keep()

    def keep(self) -> None:
        self.versions.append([p.detach().clone() for p in self.weights])


def run_span(
    stages: list[Oracle], batches: Any, method: str, beta: float, unit: int, most: float, again: Again
) -> None:
    """One span. A unit is what has one backward; a stage s of d has at most `most` + d - s microbatches in flight."""
    d, m, never = len(stages), len(batches[0]), 10**9
    samples = [sample for batch in batches for sample in batch]
    admitted: dict[int, int] = {}
    sums: list[list[Tensor]] = [[] for _ in stages]
    slot = 0
    for stage in stages:
        stage.forwards, stage.backwards = {}, {}
    while len(stages[0].backwards) * unit < len(samples):
        for s, stage in enumerate(stages):
            u, k = len(stage.backwards), len(stage.forwards)
            last = s == d - 1
            given = stage.forwards.get(u * unit + unit - 1, never) if last else stages[s + 1].backwards.get(u, never)
            if given < slot:
                for i in range(u * unit, u * unit + unit):
                    g = stage.out[i] - samples[i][1] if last else stages[s + 1].back.pop(i)
                    target = samples[i][1] if last and again.loss else None
                    found = stage.backward(i, g, beta, s in again.stages, target)
                    sums[s] = [a + b for a, b in zip(sums[s], found, strict=True)] if sums[s] else found
                stage.backwards[u] = slot
                if (u + 1) * unit % m == 0:
                    weight = sum(len(x) for x, _ in batches[(u + 1) * unit // m - 1])
                    stage.step([g / weight for g in sums[s]])
                    sums[s] = []
            elif k < len(samples) and (not s or stages[s - 1].forwards.get(k, never) < slot):
                if k - u * unit >= most + d - s:
                    continue
                admitted.setdefault(k, len(stage.versions) - 1)
                version = admitted[k] if method == "timeprest" else len(stage.versions) - 1
                stage.forward(k, samples[k][0] if not s else stages[s - 1].out[k], version)
                stage.forwards[k] = slot
        slot += 1


def oracle(
    method: str, depth: int, m: int, optimizer: str, beta: float, order: str = "nf1b", again: Again = NEVER
) -> list[Oracle]:
    stages = []
    for block in blocks_of(depth).values():
        weights = [nn.Parameter(p.detach().clone()) for p in block.parameters()]
        stages.append(Oracle(weights, OPTIMIZERS[optimizer](weights)))
        stages[-1].keep()
    beta = beta if method == "i-timeprest" else 0.0
    unit, most = (m, float("inf")) if order == "nf1b" else (1, 0)
    first = 0
    for length in SPANS:
        run_span(stages, data_of(m)[first : first + length], method, beta, unit, most, again)
        first += length
    return stages


# --- the pipeline -----------------------------------------------------------------------------------------------------


def run(
    method: str, depth: int, m: int, optimizer: str, beta: float = 0.5, order: str = "nf1b", **changes: Any
) -> tuple[Pipeline, Recording]:
    recording = Recording(OPTIMIZERS[optimizer])
    correction = Blending(beta) if method == "i-timeprest" else None
    arguments = {"blocks": blocks_of(depth), "correction": correction, "balance": (1,) * depth} | changes
    proof = prove(method, depth, m, order=order)
    pipeline = Pipeline(method=proof, loss=loss, optimizer=recording, **grouped(arguments))
    first = 0
    for length in SPANS:
        assert len(list(pipeline.run(data_of(m)[first : first + length]))) == length
        first += length
    return pipeline, recording


def compare(found: tuple[Pipeline, Recording], wanted: list[Oracle]) -> None:
    """Gradients of each update, the weights, and what optimizers remember."""
    pipeline, recording = found
    weights, optimizers = pipeline.state_dict(), list(pipeline.optimizers().values())
    assert len(recording.gradients) == sum(SPANS)
    for s, (stage, optimizer) in enumerate(zip(wanted, optimizers, strict=True)):
        names = [name for name in weights if name.startswith(f"b{s}.")]
        for update, gradients in enumerate(stage.gradients):
            for name, g in zip(names, gradients, strict=True):
                torch.testing.assert_close(recording.gradients[update][name], g, rtol=1e-9, atol=1e-12)
        for number, (name, p) in enumerate(zip(names, stage.weights, strict=True)):
            torch.testing.assert_close(weights[name], p.detach(), rtol=1e-9, atol=1e-12)
            there, here = optimizer.state_dict()["state"][number], stage.optimizer.state_dict()["state"][number]
            assert there.keys() == here.keys()
            for key, value in here.items():
                torch.testing.assert_close(there[key], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("depth", "m"), [(1, 2), (2, 1), (2, 4), (4, 3), (8, 7)])
@pytest.mark.parametrize("method", METHODS)
def test_the_equations_of_timeprest(method: str, depth: int, m: int) -> None:
    """22 updates in two spans; every optimizer on four stages, and every one of them elsewhere, too."""
    for optimizer in OPTIMIZERS if depth == 4 else (list(OPTIMIZERS)[m % len(OPTIMIZERS)],):
        compare(run(method, depth, m, optimizer), oracle(method, depth, m, optimizer, 0.5))


@pytest.mark.parametrize(("method", "depth", "m"), [("timeprest", 6, 2), ("i-timeprest", 6, 2), ("timeprest", 4, 1)])
def test_with_fewer_microbatches_than_one_version_takes(method: str, depth: int, m: int) -> None:
    compare(run(method, depth, m, "momentum"), oracle(method, depth, m, "momentum", 0.5))


@pytest.mark.parametrize("beta", [0.0, 0.9, 1.0])
def test_shares_of_the_forward_s_weights(beta: float) -> None:
    compare(run("i-timeprest", 4, 3, "momentum", beta), oracle("i-timeprest", 4, 3, "momentum", beta))


@pytest.mark.parametrize(("depth", "m"), [(2, 1), (4, 1), (4, 3)])
def test_blends_in_another_order(depth: int, m: int) -> None:
    found = run("i-timeprest", depth, m, "adamw", order="endless-1f1b")
    compare(found, oracle("i-timeprest", depth, m, "adamw", 0.5, "endless-1f1b"))


def final(method: str, depth: int, m: int, **changes: Any) -> Tensor:
    return torch.cat([w.flatten() for w in run(method, depth, m, "momentum", **changes)[0].state_dict().values()])


@pytest.mark.long
def test_the_methods_differ_where_there_is_a_delay_and_only_there() -> None:
    deep = [final(method, 4, 3) for method in METHODS]
    assert all(float((a - b).abs().max()) > 1e-3 for i, a in enumerate(deep) for b in deep[:i])
    plain = final("sequential", 1, 2, order="sequential")
    for method in METHODS:
        assert torch.equal(final(method, 1, 2), plain), method  # a blend of a version with itself is that version


@pytest.mark.long
def test_the_ends_of_the_blend() -> None:
    """All of the forward's weights is stashing, none of them the newest everywhere."""
    assert torch.equal(final("i-timeprest", 4, 3, beta=0.0), final("v-timeprest", 4, 3))
    assert torch.equal(final("i-timeprest", 4, 3, beta=1.0), final("stash", 4, 3))


@pytest.mark.parametrize("recompute", ["block", "stage"])
@pytest.mark.parametrize("method", ["timeprest", "v-timeprest"])
def test_a_forward_that_is_run_again_reads_the_newest(method: str, recompute: str) -> None:
    wanted = oracle(method, 4, 3, "momentum", 0.0, again=Again(range(4), loss=True))
    compare(run(method, 4, 3, "momentum", recompute=recompute), wanted)


class Checkpointed(nn.Module):
    """Runs its forward again in its backward."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


@pytest.mark.long
@pytest.mark.parametrize("reentrant", [False, True])
def test_torch_s_own_checkpoint_reads_the_newest(reentrant: bool) -> None:
    """And not what lies by then where the weights of the forward were: another version, or a gradient."""
    blocks = {name: Checkpointed(block, reentrant) if name != "b0" else block for name, block in blocks_of(4).items()}
    found = run("timeprest", 4, 3, "momentum", blocks=blocks)
    compare(found, oracle("timeprest", 4, 3, "momentum", 0.0, again=Again(range(1, 4))))


def test_blends_with_recompute_change_nothing() -> None:
    """The forward's version is there until the backward is over, so that is what the forward reads again."""
    case = Case("i-timeprest", 4, 3, correction=correction_of("i-timeprest"), spans=(9,))
    assert_same(train(None, replace(case, recompute="block")), train(None, case))


WIDE = {
    "other units on the next rank": """
        nodes 0@0 1@1
        rank 0: F0 F1 F2 B0 B1..2
        rank 1: F0 F1 F2 B0..1 B2
    """,
    "both stages on one rank": """
        nodes 0@0 1@0
        rank 0: F0@0 F0@1 F1@0 F1@1 F2@0 F2@1 B0..2@1 B0..1@0 B2@0
    """,
    "with a forward": """
        nodes 0@0 1@1
        rank 0: F0 F1 F2 B0..2
        rank 1: F0 F1 [F2+B0..1] B2
    """,
}


@pytest.mark.parametrize("name", WIDE)
def test_units_of_any_size(name: str) -> None:
    """A message for each unit of the giver; whoever takes it needs another one or none."""
    schedule = parse_schedule("schedule gpipe\nrule flush\nmicrobatches 3" + WIDE[name])
    case = Case("gpipe", 2, 3, clip=0.6)
    assert_same(train(None, case, method=schedule), expected(case))


@pytest.mark.parametrize(("method", "m"), [("timeprest", 4), ("i-timeprest", 3)])
def test_timeprest_on_ranks_as_in_one_process(pool: Pool, method: str, m: int) -> None:
    case = Case(method, 2, m, correction=correction_of(method), clip=0.6, spans=(4, 5))
    assert_same(train_on_ranks(pool, case), train(None, case))


@pytest.mark.parametrize("method", METHODS)
def test_a_run_goes_on_from_a_snapshot_and_after_a_switch(method: str) -> None:
    """As one that drained there; batches that are drained one by one are those of any synchronous method."""
    case = Case(method, 3, 2, correction=correction_of(method), spans=(9,), skips=())
    batches, taken = make_batches(case), []
    whole = make_pipeline(case)
    list(whole.run(batches, save=Saving(4, taken.append)))
    resumed = make_pipeline(case)
    resumed.load(Held([snapshot for snapshot in taken if snapshot.batch == 4]))
    list(resumed.run(batches[4:8]))
    list(resumed.run(batches[8:]))
    drained, switched = make_pipeline(case), make_pipeline(replace(case, method="1f1b", correction=None))
    for batch in batches[:4]:
        list(drained.run([batch]))
    list(switched.run(batches[:4]))
    switched.switch(prove(method, 3, 2), correction=case.correction)
    for pipeline in (drained, switched):
        list(pipeline.run(batches[4:]))
    for name, weight in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], weight), name
    for name, weight in drained.state_dict().items():
        assert torch.equal(switched.state_dict()[name], weight), name


def test_graphs_on_a_version_whose_memory_is_a_gradient_by_now() -> None:
    """Their gradients are added to that of their batch, to nothing of the batch before, also if it lies in the same."""
    store = VersionStore({"w": torch.zeros(3)}, 3, "stage 0")
    handle = store.read(0)
    graphs = [(handle.buffer.leaves["w"] * factor).sum() for factor in (2.0, 3.0, 5.0)]
    store.accumulate(handle, 0)
    graphs[0].backward()
    store.rotate(0)
    store.retain([1])
    for batch, factor in ((1, 3.0), (2, 5.0)):
        store.accumulate(handle, batch)
        graphs[batch].backward()
        assert torch.equal(store.gradient(batch).views["w"], torch.full((3,), factor))
        store.overwrite(batch)


class Held:
    """Snapshots of all stages, without a file."""

    def __init__(self, snapshots: list[Snapshot]) -> None:
        self.tensors = {name: tensor for snapshot in snapshots for name, tensor in snapshot.tensors.items()}
        values = {name: value for snapshot in snapshots for name, value in snapshot.values.items()}
        self.facts = {key: value for s in snapshots for key, value in s.facts.items()} | {"values": values}
        self.names = self.tensors.keys()

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]


# method -> parameter-sized buffers of each of three stages with two microbatches: versions, gradients and copies
BYTES = {"timeprest": [2, 3, 3], "v-timeprest": [2, 2, 2], "i-timeprest": [3 + 1 + 1, 2 + 1 + 1, 1 + 1 + 1]}


@pytest.mark.parametrize("method", METHODS)
def test_what_every_byte_of_timeprest_is_for(method: str) -> None:
    case = Case(method, 3, 2, model="matrices", correction=correction_of(method))
    pipeline = make_pipeline(case)
    list(pipeline.run(make_batches(case)))
    kinds = ("weights", "gradients", "idle buffers", "copies", "correction")
    for stage, count in zip(pipeline.stages.values(), BYTES[method], strict=True):
        live = pipeline.live_bytes()[stage.key.rank]
        assert sum(live.get(kind, 0) for kind in kinds) == count * stage.weights.store.layout.nbytes


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("i-timeprest", {"precision": "bf16"}, "blends of two versions need fp32"),
        ("i-timeprest", {"recompute": "stage"}, "needs an order that places its own recomputes"),
        ("i-timeprest", {"correction": None}, r"pass staleness=correction_of\('i-timeprest'\)"),
        ("timeprest", {"correction": correction_of("i-timeprest")}, "goes with version rule blended"),
        ("v-timeprest", {"depth": 6}, "6 stages need at least 5 microbatches"),
    ],
)
def test_what_does_not_go_with_timeprest_is_refused(method: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((CapabilityError, ConfigError, ScheduleError), match=message):
        make_pipeline(replace(Case(method, 3, 2, correction=correction_of(method)), **changes))


@pytest.mark.parametrize("beta", [-0.1, 1.5, float("nan")])
def test_shares_are_checked(beta: float) -> None:
    with pytest.raises(ConfigError, match="beta takes a number from 0 to 1; got"):
        correction_of("i-timeprest", beta=beta)
