"""Weights as shards (level full): every number is that of the reference, and what is whole is what the proof says."""

from __future__ import annotations

import gc
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.comm.collective.shard_exchange import LocalShards
from penstock.errors import VersionError
from penstock.options.parallelism import DataParallel
from penstock.options.passes import Precision, PrecisionName
from penstock.runtime.pipeline import Pipeline
from penstock.schedule.ir.schedule import Op
from penstock.stage.autograd.recompute import RecomputeMode
from penstock.verify.reference import Scaling
from penstock.weights.fully_sharded.full_precision_versions import ExactShardsOfVersions
from penstock.weights.fully_sharded.one_version import FullyShardedExactStore, FullyShardedStore
from support.cases import Case, Outcome, assert_equal_tensors, expected, make_batches, make_pipeline
from support.pool import Pool
from support.schedules import make_schedule
from support.sharded import assert_as_whole, storages_of, train_sharded, with_late_sums
from support.state_bytes import state_bytes

CLIP = 0.4  # of most batches
TWO, THREE = (("chunks", 2),), (("chunks", 3),)
CASES = [
    Case("breadth-first", 2, 4, width=2, spans=(12, 8), clip=CLIP, options=THREE),
    Case("breadth-first", 2, 4, width=3, spans=(4, 3), clip=CLIP, options=TWO, recompute="block"),
    Case("1f1b", 2, 3, width=3, spans=(5, 4), clip=CLIP),
    Case("gpipe", 3, 2, "mixed", "sgd", width=2, spans=(7,), clip=CLIP, recompute="block"),
    Case("interleaved", 2, 2, "mixed", "nadam", width=2, spans=(7,), clip=CLIP, options=TWO),
    Case("interleaved", 2, 2, "faint", "momentum", width=3, spans=(5,), tied=True, recompute="stage", options=TWO),
    Case("breadth-first", 2, 2, "faint", "adamw", width=2, spans=(3, 4), clip=0.7, tied=True, options=THREE),
    Case("breadth-first", 2, 2, "half", width=2, spans=(9,), scaling=Scaling(2.0**24, 2.0, 0.5, 2), options=TWO),
    Case("zb-h1", 2, 4, width=2, spans=(6,)),
    Case("breadth-first", 2, 2, "mixed", "configured muon", width=3, spans=(5,), clip=CLIP, options=THREE),
    Case("breadth-first", 1, 2, "mixed", "adafactor", width=2, spans=(5,), clip=CLIP, options=THREE),
    Case("breadth-first", 2, 2, "mixed", width=2, spans=(4, 3), clip=CLIP, options=THREE, precision="bf16"),
    Case(
        "1f1b", 2, 2, "mixed", "momentum", width=3, spans=(5,), scaling=Scaling(2.0**10, 2.0, 0.5, 2), precision="fp16"
    ),
    Case("breadth-first", 2, 2, "mixed", width=2, spans=(5,), clip=CLIP, recompute="stage", options=TWO),
]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"{c.method}-{c.depth}-{c.width}-{c.model}-{c.optimizer}-{c.precision}"
)
def test_a_run_with_weights_as_shards_has_the_numbers_of_the_reference(case: Case) -> None:
    wanted = expected(case)
    assert case.clip is None or sum(norm > case.clip for _, _, norm, *_ in wanted.decided) >= len(wanted.decided) / 2
    outcome, parts, _ = train_sharded(None, case, "full")
    assert_as_whole(outcome, [parts], wanted)


def on_rank(group: dist.ProcessGroup, case: Case) -> Any:
    return train_sharded(group, case, "full")


@pytest.mark.parametrize(
    "case",
    [
        Case("breadth-first", 2, 4, width=2, spans=(6, 4), clip=CLIP, options=THREE),
        Case("1f1b", 1, 2, "mixed", "momentum", width=3, spans=(6,), clip=CLIP),
    ],
    ids=lambda c: c.method,
)
def test_processes_have_the_same_numbers(pool: Pool, case: Case) -> None:
    outcomes, parts, _ = zip(*pool.submit(on_rank, case, ranks=case.depth * case.width), strict=True)
    whole = Outcome(decided=outcomes[0].decided)
    for place, outcome in enumerate(outcomes):
        assert repr(outcome.decided) == repr(whole.decided)
        for name, weight in outcome.weights.items():
            assert torch.equal(whole.weights.setdefault(name, weight), weight), (place, name)
    assert_as_whole(whole, parts, expected(case))


def layers(number: int) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {f"layer {n}": nn.Linear(48, 48, bias=False) for n in range(number)}


def pipeline_of_layers(schedule: Any, width: int) -> Pipeline:
    return Pipeline(
        layers(schedule.num_stages),
        schedule,
        loss=nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.Adam(named, lr=0.01),
        data_parallel=DataParallel(width),
    )


@pytest.mark.parametrize(
    ("method", "options", "width"),
    [("layered", THREE, 2), ("layered", THREE, 4), ("layered", TWO, 3), ("1f1b", (), 2), ("gpipe", (), 3)],
)
def test_the_memory_is_what_the_proof_derives(
    monkeypatch: pytest.MonkeyPatch, method: str, options: Any, width: int
) -> None:
    """To the byte: (16/v + 16/w) P with fewer places than chunks, of which 4/w are sums that wait."""
    with_late_sums(monkeypatch)
    schedule = make_schedule(method, 2, 4, options=dict(options), sharding="full")
    pipeline = pipeline_of_layers(schedule, width)
    batch = torch.randn(8 * width, 48), torch.randn(8 * width, 48)
    for _ in pipeline.run([batch] * 3):
        pass
    stages = len(schedule.on_rank(0))
    share, counters = stages * 48 * 48, stages * 4  # a number of steps for each parameter
    for number, peak in pipeline.peak_bytes().items():
        derived = state_bytes(pipeline.proof, number % 2, width)
        assert peak["gathered weights"] == derived.weights * share
        assert peak["gradients"] == derived.gradients * share
        assert peak.get("summed gradients", 0) == derived.sums * share
        assert peak["weights"] == derived.master * share
        assert peak["optimizer"] - counters == derived.optimizer * share
        assert peak["weights between runs"] == 4 * share
        if options == THREE:
            assert sum(derived) == Fraction(16, 3) + Fraction(16, width)


@pytest.mark.parametrize("microbatches", [2, 4, 16])
@pytest.mark.parametrize(("method", "chunks"), [("layered", 3), ("layered", 4), ("interleaved", 2), ("1f1b", 1)])
def test_gathers_and_reductions_are_those_of_the_proof(
    monkeypatch: pytest.MonkeyPatch, method: str, chunks: int, microbatches: int
) -> None:
    """2v - k gathers and v reductions with layered accumulation, whatever the number of microbatches."""
    counts: Counter[tuple[str, Any]] = Counter()
    for name in ("gather", "scatter"):
        real = getattr(LocalShards, name)

        def counted(self: Any, members: Any, me: Any, *rest: Any, name: str = name, real: Any = real) -> Any:
            counts[name, (me.pipeline, me.stage.rank)] += 1
            return real(self, members, me, *rest)

        monkeypatch.setattr(LocalShards, name, counted)
    options = {} if chunks == 1 else {"chunks": chunks}
    schedule = make_schedule(method, 2, microbatches, options=options, sharding="full")
    pipeline = pipeline_of_layers(schedule, 2)
    batch = torch.randn(4 * microbatches, 48), torch.randn(4 * microbatches, 48)
    for _ in pipeline.run([batch] * 3):
        pass
    for pipe in range(2):
        for rank in range(2):
            facts = pipeline.proof.shards[rank]
            at_the_end = chunks  # so that users find whole weights
            assert counts["gather", (pipe, rank)] == 3 * facts.gathers + at_the_end
            assert counts["scatter", (pipe, rank)] == 3 * facts.reductions
            if method == "layered":
                assert (facts.gathers, facts.reductions) == (2 * chunks - 2, chunks)


def test_weights_are_whole_between_two_runs_only() -> None:
    case = Case("breadth-first", 2, 2, width=2, spans=(3,), options=THREE)
    pipeline = make_pipeline(case, sharding="full")
    for _ in pipeline.run(make_batches(case)):
        with pytest.raises(VersionError, match=r"stage \d on rank \d: \S+ is not whole at the moment, only its rows"):
            pipeline.state_dict()
    assert pipeline.is_finite()


@pytest.mark.parametrize(
    "store",
    [
        FullyShardedExactStore({"w": torch.ones(4, 3)}, "stage 0", 2, 1),
        ExactShardsOfVersions({"w": torch.ones(4, 3)}, 3, "stage 0", 2, 1),
    ],
    ids=lambda store: type(store).__name__,
)
def test_memory_that_a_span_gives_back_is_not_taken_for_weights(store: FullyShardedStore) -> None:
    """Activations may get the same place, and count."""
    assert not store.storages & store.master.storages
    store.begin_run()
    assert store.storages > store.versions[0].storages


def test_what_users_write_between_two_runs_is_taken_over() -> None:
    case = Case("breadth-first", 2, 2, width=2, spans=(2, 2), options=TWO)
    found = []
    for level in ("none", "full"):
        pipeline = make_pipeline(case, sharding=level)
        batches = make_batches(case)
        for _ in pipeline.run(batches[:2]):
            pass
        with torch.no_grad():
            pipeline.state_dict()["head.weight"].mul_(0.5)
        for _ in pipeline.run(batches[2:]):
            pass
        found.append(pipeline.state_dict())
    assert_equal_tensors(found[1], found[0], "weights")


class Whole(nn.Module):
    """A map by whole numbers, so that sums are exact in any order."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.map = nn.Parameter(torch.randint(-1, 2, (4, 4), generator=generator).float())

    def forward(self, x: Any) -> Any:
        return x @ self.map


@pytest.mark.parametrize("level", ["gradients:gradients=1", "full:gradients=1", "full"])
@pytest.mark.parametrize(("method", "parts"), [("depth-first-full", 2), ("breadth-first", 1)])
def test_gradients_that_are_added_up_in_parts(level: str, method: str, parts: int) -> None:
    """Numbers that are exact in any order, as the parts are added in another one than a whole gradient."""
    found = []
    for wanted in ("none", level):
        pipeline = Pipeline(
            {f"block {n}": Whole(n) for n in range(6)},
            make_schedule(method, 2, 4, options={"chunks": 3}, sharding=wanted),
            loss=lambda output, target: ((output * target).sum(), 1),
            optimizer=lambda named: torch.optim.SGD(named, lr=2.0**-12),
            data_parallel=DataParallel(2),
            precision=Precision(divisor=1.0),
        )
        reductions = Counter(a.stage for p in pipeline.schedule.programs for a in p.period if a.op is Op.REDUCE)
        if wanted != "none" and "gradients=1" in level:
            assert max(reductions.values()) == parts
        generator = torch.Generator().manual_seed(1)
        batches = [[torch.randint(-2, 3, (2, 8, 4), generator=generator).float() for _ in "ab"] for _ in range(2)]
        for _ in pipeline.run([(a.flatten(0, 1), b.flatten(0, 1)) for a, b in batches[:1]]):
            pass
        found.append(pipeline.state_dict())
    assert_equal_tensors(found[1], found[0], "weights")


@pytest.mark.parametrize("recompute", ["none", "block", "stage"])
def test_layered_by_name(recompute: RecomputeMode) -> None:
    """It is sharded by itself, behind recomputes; another method that follows is sharded alike."""
    found = []
    for sharding in ("none", None):
        torch.manual_seed(3)
        pipeline = Pipeline(
            layers(4),
            "layered",
            stages=2,
            microbatches=2,
            loss=nn.functional.mse_loss,
            optimizer=lambda named: torch.optim.Adam(named, lr=0.01),
            recompute=recompute,
            data_parallel=DataParallel(2, sharding=sharding),
        )
        batches = [(torch.randn(8, 48), torch.randn(8, 48)) for _ in range(4)]
        losses = [report.loss for report in pipeline.run(batches[:2])]
        if sharding is None:
            assert str(pipeline.schedule.sharding) == "full:weights=2:gradients=2"
        pipeline.switch(method="interleaved")
        assert pipeline.schedule.sharding.level == (sharding or "full")
        losses += [report.loss for report in pipeline.run(batches[2:])]
        found.append((losses, pipeline.full_state_dict()))
    (losses, weights), (others, sharded) = found
    assert losses == others
    assert_equal_tensors(sharded, weights, "weights")


@pytest.mark.long
@pytest.mark.parametrize(("level", "precision"), [("full", "fp32"), ("gradients", "bf16"), ("full", "bf16")])
def test_nothing_else_keeps_whole_weights(level: str, precision: PrecisionName) -> None:
    """What is alive in the size of a stage is what the ledger says, in a run and between two."""
    size = 44 * 44 * 4
    gc.collect()  # what tests before this one have left
    model = nn.Sequential(*(nn.Linear(44, 44, bias=False) for _ in range(6)))
    before = storages_of(size) - len(model)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        assert storages_of(size) - before == held() < 12
        return nn.functional.mse_loss(output, target)

    pipeline = Pipeline(
        model,
        make_schedule("breadth-first", 2, 2, options={"chunks": 3}, sharding=level),
        loss=loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.01),
        data_parallel=DataParallel(2),
        precision=precision,
    )
    kinds = {"gradients", "weights between runs", *(["gathered weights"] if precision == "fp32" else [])}

    def held() -> int:
        return sum(live.get(kind, 0) for live in pipeline.live_bytes().values() for kind in kinds) // size

    batch = torch.randn(8, 44), torch.randn(8, 44)
    for _ in range(2):
        for _ in pipeline.run([batch] * 3):
            pass
        between = 12 if level == "gradients" or precision == "fp32" else 18  # with casts of half the size
        assert storages_of(size) - before == 12
        assert held() == between
