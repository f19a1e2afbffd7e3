"""PipeMare's recompute variant, against a player of its equations that knows neither schedules nor the runtime.

A stage s of d runs, in slot k: F(k); R(k - (d-1-s) + n), where n stages of its segment follow; B(k - (d-1-s)); and an
update when a batch is complete. Each reads what is newest then, or w - (updates since the forward) delta.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from penstock.errors import ConfigError, ScheduleError
from penstock.schedule.build import prove
from penstock.schedule.extend import extend
from penstock.schedule.ir.absolute_actions import actions_of
from penstock.schedule.ir.schedule import Op, Payload
from penstock.schedule.text import parse_schedule
from penstock.schedule.transforms.recompute import length_of, with_recompute
from penstock.simulate.costs import Costs
from penstock.simulate.long_run import steady_bubble
from penstock.simulate.simulate import simulate_schedule
from penstock.stage.autograd.recompute import RecomputeInput, RecomputeMode
from penstock.train.config.load import validate_config
from penstock.train.setup.prepare import prepare
from penstock.weights.corrections.pipemare import PipeMare
from penstock.weights.corrections.registry import correction_of
from support import snapshots as snapshots_in_memory
from support.cases import (
    LENGTH,
    OPTIMIZERS,
    VOCABULARY,
    WIDTH,
    Case,
    Outcome,
    add_state,
    assert_same,
    expected,
    make_batches,
    make_pipeline,
    together,
    token_loss,
    train,
)
from support.pool import Pool
from support.schedules import make_schedule
from support.smallest_batch import least

K, D, C = 4, 0.135, 7.0
Blocks = dict[str, Any]


def elementary() -> Blocks:
    """16 blocks whose gradients keep only their input, so that the gradient at any weights is known from that."""
    maps: Blocks = {}
    for i in range(6):
        maps |= {f"map{i}": nn.Linear(WIDTH, WIDTH), f"tanh{i}": torch.tanh}
    begin = {"table": nn.Embedding(VOCABULARY, WIDTH), "begin": nn.LayerNorm(WIDTH)}
    return {**begin, **maps, "end": nn.LayerNorm(WIDTH), "head": nn.Linear(WIDTH, VOCABULARY)}


class Twice(nn.Module):
    """A block that keeps more than its input: what comes between two maps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.second(torch.tanh(self.first(x)))
        return y


def composed() -> Blocks:
    middle = {f"twice{i}": Twice() for i in range(14)}
    return {"table": nn.Embedding(VOCABULARY, WIDTH), **middle, "head": nn.Linear(WIDTH, VOCABULARY)}


def made(model: str) -> Blocks:
    torch.manual_seed(5)
    return {"elementary": elementary, "composed": composed}[model]()


# --- the equations --------------------------------------------------------------------------------------------------


@dataclass
class Microbatch:
    """Of a stage."""

    version: int
    inputs: list[Any]  # of the blocks, as a backward sees them
    batch: int


@dataclass
class Stage:
    """One stage; `lag` is d-1-s, `follow` how many stages of its segment follow, None without recompute in actions."""

    blocks: Blocks
    lag: int
    follow: int | None
    first: bool  # of its segment
    m: int
    optimizer_name: str
    low: torch.dtype | None
    weights: dict[str, nn.Parameter] = field(init=False)
    delta: dict[str, Tensor] = field(init=False)
    version: int = 0
    updates: int = 0
    flights: dict[int, Microbatch] = field(default_factory=dict)
    gradients: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weights = {
            f"{block}.{name}": nn.Parameter(w.detach().clone())
            for block, module in self.blocks.items()
            if isinstance(module, nn.Module)
            for name, w in module.named_parameters()
        }
        self.delta = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.optimizer = OPTIMIZERS[self.optimizer_name](list(self.weights.items()))
        self.rate = self.optimizer.param_groups[0]["lr"]
        self.tau = self.lag / self.m

    def estimate(self, updates: int) -> dict[str, Tensor]:
        """What was read so many updates ago, as is thought now."""
        if not updates:
            return {name: w.detach().to(self.low) for name, w in self.weights.items()}
        return {name: (w.detach() - updates * self.delta[name]).to(self.low) for name, w in self.weights.items()}

    def apply(self, name: str, x: Any, weights: Mapping[str, Tensor]) -> Any:
        block = self.blocks[name]
        if not isinstance(block, nn.Module):
            return block(x)
        own = {key.removeprefix(f"{name}."): w for key, w in weights.items() if key.startswith(f"{name}.")}
        return functional_call(block, own, (x,))

    def run(self, x: Any, weights: Mapping[str, Tensor]) -> tuple[list[Any], Any]:
        inputs = []
        with torch.no_grad():
            for name in self.blocks:
                inputs.append(x)
                x = self.apply(name, x, weights)
        return inputs, x

    def forward(self, k: int, batch: int, x: Any) -> Any:
        inputs, y = self.run(x, self.estimate(0))
        self.flights[k] = Microbatch(self.version, inputs, batch)
        return y

    def recompute(self, k: int, x: Any) -> Any:
        """From the input that was kept, or what has come again."""
        flight = self.flights[k]
        flight.inputs, y = self.run(flight.inputs[0] if self.first else x, self.estimate(self.version - flight.version))
        return y

    def backward(self, k: int, gradient: Any) -> Any:
        """`gradient`: of the output, or what makes a loss of it."""
        flight = self.flights.pop(k)
        weights = self.estimate(self.version - flight.version)
        total = self.gradients.setdefault(flight.batch, {})
        for name, x in reversed(list(zip(self.blocks, flight.inputs, strict=True))):
            leaves = {key: w.requires_grad_() for key, w in weights.items() if key.startswith(f"{name}.")}
            x = x.detach().requires_grad_(x.is_floating_point())
            y = self.apply(name, x, leaves)
            seed = None if callable(gradient) else gradient
            wanted = [*([x] if x.requires_grad else []), *leaves.values()]
            found = list(torch.autograd.grad(gradient(y) if callable(gradient) else y, wanted, seed))
            gradient = found.pop(0) if x.requires_grad else None
            for key, g in zip(leaves, found, strict=True):
                total[key] = total[key] + g if key in total else g.float()
        return gradient

    def step(self, batch: int, weight: float, c: float) -> dict[str, Tensor]:
        """The update of a batch, and T2's mean; what the optimizer was handed."""
        self.version += 1
        gradients = self.gradients.pop(batch)
        if not weight:
            return {}
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * max(self.tau, 1.0) ** -(1.0 - min(self.updates / K, 1.0))
        before = {name: w.detach().clone() for name, w in self.weights.items()}
        for name, w in self.weights.items():
            w.grad = gradients[name] * (c / weight)
        handed = {name: g.clone() for name, w in self.weights.items() if (g := w.grad) is not None}
        self.optimizer.step()
        self.updates += 1
        if self.tau:
            gamma = D ** (1 / self.tau)
            for name, w in self.weights.items():
                self.delta[name] = gamma * self.delta[name] + (1 - gamma) * (w.detach() - before[name])
        return handed

    def events(self, batches: int) -> Iterator[tuple[str, int]]:
        """What it does in a span."""
        count = batches * self.m
        for slot in range(count + self.lag):
            k = slot - self.lag
            if slot < count:
                yield "F", slot
            if self.follow is not None and 0 <= k + self.follow < count:
                yield "R", k + self.follow
            if k >= 0:
                yield "B", k
                if (k + 1) % self.m == 0:
                    yield "STEP", k // self.m


def segments_of(depth: int, length: int) -> list[tuple[int, bool]]:
    """Per stage that recomputes, how many of its segment follow, and whether it is the first; not the last stage."""
    groups = [range(a, min(a + length, depth - 1)) for a in range(0, depth - 1, length)]
    return [(group[-1] - s, s == group[0]) for group in groups for s in group]


class Player:
    """All stages; an event runs as soon as what it needs is there."""

    def __init__(self, case: Case, model: str, segments: int | None) -> None:
        blocks = list(made(model).items())
        size = len(blocks) // case.depth
        again = [(n, first) for n, first in segments_of(case.depth, segments)] if segments else []
        low = torch.bfloat16 if case.precision == "bf16" else None
        self.c = 8.0 if low else C
        self.stages = [
            Stage(
                dict(blocks[s * size : (s + 1) * size]),
                case.depth - 1 - s,
                *(again[s] if s < len(again) else (None, True)),
                case.m,
                case.optimizer,
                low,
            )
            for s in range(case.depth)
        ]
        self.outcome, self.done = Outcome(), 0

    def span(self, batches: list[list[tuple[Tensor, Tensor]]]) -> None:
        there: dict[tuple[str, int, int], Any] = {}
        samples = [sample for batch in batches for sample in batch]
        weights = [sum(token_loss(torch.zeros(2, LENGTH, VOCABULARY), y)[1] for _, y in batch) for batch in batches]
        sums = [0.0] * len(batches)
        handed: list[dict[str, Tensor]] = [{} for _ in batches]
        waiting = [list(stage.events(len(batches)))[::-1] for stage in self.stages]
        while any(waiting):
            before = sum(map(len, waiting))
            for s, stage in enumerate(self.stages):
                while waiting[s]:
                    what, k = waiting[s][-1]
                    batch = k if what == "STEP" else k // stage.m
                    if what == "F" and (s == 0 or ("F", s - 1, k) in there):
                        x = samples[k][0] if s == 0 else there["F", s - 1, k]
                        y = there["F", s, k] = stage.forward(k, batch, x)
                        if s == len(self.stages) - 1:
                            sums[batch] += float(token_loss(y, samples[k][1])[0])
                    elif what == "R" and (stage.first or ("R", s - 1, k) in there):
                        there["R", s, k] = stage.recompute(k, there.get(("R", s - 1, k)))
                    elif what == "B" and s == len(self.stages) - 1:
                        target = samples[k][1]
                        there["B", s, k] = stage.backward(k, lambda y, t=target: token_loss(y, t)[0] / self.c)
                    elif what == "B" and ("B", s + 1, k) in there:
                        there["B", s, k] = stage.backward(k, there["B", s + 1, k])
                    elif what == "STEP":
                        handed[batch] |= stage.step(batch, weights[batch], self.c)
                    else:
                        break
                    waiting[s].pop()
            assert sum(map(len, waiting)) < before, "they would wait for ever"
        for total, weight in zip(sums, weights, strict=True):
            self.outcome.reports.append((self.done, total / weight if weight else None, weight))
            self.done += 1
        self.outcome.gradients += [gradients for gradients in handed if gradients]

    def finish(self) -> Outcome:
        for stage in self.stages:
            self.outcome.weights |= {name: w.detach() for name, w in stage.weights.items()}
            add_state(self.outcome, stage.optimizer.state_dict())
        return self.outcome


def played(case: Case, model: str, segments: int | None) -> Player:
    """`segments`: None where nothing is run again, or block by block, whose inputs are those of the forward."""
    player, batches = Player(case, model, segments), make_batches(case)
    for length in case.spans:
        player.span(batches[player.done : player.done + length])
    player.finish()
    return player


# --- the same numbers -----------------------------------------------------------------------------------------------


def case_of(depth: int, m: int, **changes: Any) -> Case:
    """21 updates in two spans, one of them skipped."""
    correction = correction_of("pipemare", reschedule=K)
    case = Case("pipemare", depth, m, spans=(13, 9), rate=False, correction=correction)
    return replace(case, **changes)


def changes_of(case: Case, model: str, segments: int | str = 1) -> dict[str, Any]:
    return {"blocks": made(model), "balance": (16 // case.depth,) * case.depth, "segments": segments}


SHAPES = [
    (1, 1, 1, "momentum"), (2, 1, 1, "adamw"), (4, 1, 2, "momentum"), (4, 3, 3, "adamw"), (8, 1, 3, "momentum"),
    (8, 1, 7, "adamw"),
]  # fmt: skip


@pytest.mark.parametrize(("depth", "m", "segments", "optimizer"), SHAPES)
def test_stages_recompute_on_estimates(depth: int, m: int, segments: int, optimizer: str) -> None:
    case = case_of(depth, m, recompute="stage", optimizer=optimizer)
    wanted = played(case, "elementary", segments).outcome
    assert_same(train(None, case, **changes_of(case, "elementary", segments)), wanted)


def test_blocks_recompute_on_estimates() -> None:
    """Each on the input that its forward had, and on the estimate that its backward reads as well."""
    case = case_of(4, 1, recompute="block", optimizer="adamw")
    found = train(None, case, **changes_of(case, "composed"))
    assert_same(found, played(case, "composed", None).outcome)
    kept = train(None, replace(case, recompute="none"), **changes_of(case, "composed"))
    assert any(not torch.equal(w, kept.weights[name]) for name, w in found.weights.items())


@pytest.mark.parametrize(("recompute", "m"), [("none", 3), ("block", 1), ("stage", 1)])
def test_estimates_in_low_precision(recompute: RecomputeMode, m: int) -> None:
    """Made of the weights in fp32, and cast once."""
    case = case_of(4, m, recompute=recompute, precision="bf16", optimizer="momentum", spans=(6, 3))
    segments = 2 if recompute == "stage" else 1
    wanted = played(case, "elementary", segments if recompute == "stage" else None).outcome
    assert_same(train(None, case, **changes_of(case, "elementary", segments)), wanted)


@pytest.mark.parametrize("depth", [2, 4])
def test_what_a_stage_has_received_may_be_cast(depth: int) -> None:
    """In low precision a norm casts its input, which is no weight."""
    case = Case("newest", depth, 2, model="gpt", precision="bf16")
    assert_same(train(None, case), expected(case))


def on_rank(group: dist.ProcessGroup, case: Case) -> Outcome:
    return train(group, case, **changes_of(case, "elementary", 3))


def test_pipemare_recompute_on_ranks_as_in_one_process(pool: Pool) -> None:
    case = case_of(4, 1, recompute="stage", clip=0.6, spans=(3, 4))
    wanted = train(None, case, **changes_of(case, "elementary", 3))
    assert_same(together(pool.submit(on_rank, case, ranks=4)), wanted)


def test_a_schedule_that_places_its_own_recomputes(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of docs/ir.md: the first stage recomputes far ahead, and the last one, too."""
    case = case_of(2, 2, correction=PipeMare(K), optimizer="momentum")
    schedule = parse_schedule((Path(__file__).parents[1] / "golden" / "pipemare_recompute.txt").read_text())
    player = Player(case, "elementary", None)
    (first, last), batches = player.stages, make_batches(case)
    first.follow, last.follow, last.first = 1, 0, False

    def events(stage: Stage, count: int) -> Iterator[tuple[str, int]]:
        for t in range(count):
            k = 2 * t
            if stage is last:
                yield from [("F", k), ("R", k), ("B", k), ("F", k + 1), ("R", k + 1), ("B", k + 1), ("STEP", t)]
                continue
            yield from [("F", k), *([("B", k - 1), ("STEP", t - 1)] if t else [])]
            yield from [("R", k), ("F", k + 1), ("B", k), ("R", k + 1)]
        if stage is first:
            yield from [("B", 2 * count - 1), ("STEP", count - 1)]

    monkeypatch.setattr(Stage, "events", events)
    for length in case.spans:
        player.span(batches[player.done : player.done + length])
    changes = changes_of(case, "elementary") | {"schedule": schedule}
    assert_same(train(None, case, **changes), player.finish())


@pytest.mark.parametrize("method", ["gpipe", "1f1b", "zb-h1", "2bw", "2bw-eager", "stash", "vertical-sync"])
def test_segments_change_no_number(method: str) -> None:
    """Where backwards read what their forwards read: dropout, batch statistics and clipping included."""
    case = Case(method, 3, least(method, 3) + 1, model="restless", spans=(3, 2), recompute="stage", clip=0.6)
    for segments in (2, 3):
        assert_same(train(None, case, segments=segments), expected(case))


# --- what is kept ---------------------------------------------------------------------------------------------------


def peaks(case: Case, segments: int = 1) -> list[int]:
    pipeline = make_pipeline(case, **changes_of(case, "elementary", segments))
    list(pipeline.run(make_batches(case)))
    assert all(live["activations"] == 0 for live in pipeline.live_bytes().values())
    return [peak["activations"] for peak in pipeline.peak_bytes().values()]


def test_only_the_first_of_a_segment_keeps_its_input() -> None:
    """Byte by byte, and as the schedule's proof says."""
    case = case_of(8, 1, spans=(20,), recompute="stage")
    graphs = [peak // (8 - s) for s, peak in enumerate(peaks(replace(case, recompute="none")))]
    proof = extend(prove("pipemare", 8, 1), recomputes=True, segments=3)
    assert proof.schedule.segments == ((0, 1, 2), (3, 4, 5))  # 6 by itself; 7 has nothing to wait for
    assert [float(a) for a in proof.activations] == [3, 2, 1, 3, 2, 1, 1, 1]
    for s, found in enumerate(peaks(case, 3)):
        wanted = int(proof.activations[s]) * graphs[s]
        if s in (0, 3, 6):  # inputs of what waits for its recompute; the graph of the next one is made meanwhile
            waiting = 8 - s - int(proof.activations[s]) + 1
            wanted += waiting * 2 * ((LENGTH + 1) * 8 if s == 0 else LENGTH * WIDTH * 4)
        assert found == wanted, s


def test_inputs_that_come_again_are_let_go_of() -> None:
    """Not only not counted."""
    case = case_of(4, 1, recompute="stage")
    pipeline = make_pipeline(case, **changes_of(case, "elementary", 3))
    there: list[tuple[int, bool]] = []
    for _ in pipeline.run(make_batches(case)):
        for stage, runtime in pipeline.stages.items():
            waiting = [
                piece
                for flight in runtime.flights.values()
                for piece in flight.work
                if isinstance(piece, RecomputeInput)
            ]
            there += [(stage.index, piece.value is not None) for piece in waiting]
    assert {index for index, _ in there} == {0, 1, 2}  # the last stage does not recompute
    assert all(has == (index == 0) for index, has in there)


def kept(depth: int, segments: int | None) -> int:
    """The most that all stages keep in endless 1F1B, where an input counts as much as a stage's activations."""
    schedule = make_schedule("pipemare", depth, 1)
    if segments is not None:
        schedule = with_recompute(schedule, segments)
    total = 0
    for rank in range(depth):
        inputs = activations = most = 0
        for action in actions_of(schedule, rank, 3 * depth):
            if action.op is Op.F and rank in schedule.recomputed:
                inputs += schedule.segment_before(rank) is None
            elif action.op in (Op.F, Op.R):
                activations += 1
                inputs -= action.op is Op.R and schedule.segment_before(rank) is None
            most = max(most, inputs + activations)
            activations -= action.op is Op.B
        total += most
    return total


@pytest.mark.parametrize("depth", [9, 16])
def test_activations_with_segments_of_the_square_root(depth: int) -> None:
    """The paper's P^2 to P^(3/2), by about 1 / sqrt(P). Here P (P+1) / 2 to not quite P^(3/2), by about 2 / sqrt(P)."""
    root = length_of("auto", depth)
    assert root**2 == depth
    assert kept(depth, None) == depth * (depth + 1) // 2
    assert (kept(depth, root), kept(depth, None)) == {9: (26, 45), 16: (62, 136)}[depth]
    assert kept(depth, root) == min(kept(depth, length) for length in (1, root - 1, root, root + 1, 2 * root, depth))


# --- when -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "m", "length"), [(2, 1, 1), (4, 2, 2), (5, 3, 4), (8, 2, 3), (8, 8, 8)])
def test_delays_of_recomputed_passes(depth: int, m: int, length: int) -> None:
    """A forward is (d-1-s) / m updates late; a recompute as many backwards ahead as stages of its segment follow."""
    proof = extend(prove("pipemare", depth, m), recomputes=True, segments=length)
    again = segments_of(depth, length)
    for stage, facts in proof.stages.items():
        assert facts.delay == (pytest.approx((depth - 1 - stage.index) / m), 0)
        wanted = again[stage.index][0] / m if stage.index < depth - 1 else None
        assert facts.recompute_delay == (wanted if wanted is None else pytest.approx(wanted))


@pytest.mark.parametrize("method", ["pipemare", "2bw", "2bw-eager"])
@pytest.mark.parametrize("backward", [0.5, 1.0, 2.0])
def test_nobody_waits_for_a_wave_of_recomputes(method: str, backward: float) -> None:
    bubbles = []
    for segments in (1, 2, 5):
        proof = extend(prove(method, 6, 12), recomputes=True, segments=segments)
        costs = Costs.uniform(proof.schedule, 1.0, backward / 2, backward / 2)
        bubbles.append(steady_bubble(proof.lowered, costs, proof.steady_from + 2))
    assert bubbles == pytest.approx([bubbles[0]] * 3, abs=1e-9)


def test_messages_of_recomputed_activations() -> None:
    """One for each microbatch, from every stage of a segment to the next one; on lanes of their own."""
    proof = extend(prove("2bw", 4, 4), recomputes=True, segments=2)
    lanes = {(lane.source, lane.target) for lane in proof.lowered.lanes if lane.payload is Payload.RECOMPUTE}
    assert lanes == {(0, 1)}
    plain, again = (simulate_schedule(p, Costs.uniform(p.schedule), 3).messages for p in (prove("2bw", 4, 4), proof))
    assert again - plain == 3 * 4


# --- what else ------------------------------------------------------------------------------------------------------


def test_a_switch_makes_room_for_estimates_and_lets_go_of_it() -> None:
    case = case_of(4, 2, recompute="stage", method="1f1b", correction=None)
    pipeline, batches = make_pipeline(case, **changes_of(case, "elementary", 2)), make_batches(case)
    copies = []
    for method, correction in (("1f1b", None), ("pipemare", PipeMare(K)), ("newest", None)):
        pipeline.switch(prove(method, 4, 2), correction=correction)
        assert pipeline.schedule.segments == ((0, 1),)
        list(pipeline.run(batches[:3]))
        copies.append([live.get("copies", 0) > 0 for live in pipeline.live_bytes().values()])
    assert copies == [[False] * 4, [True] * 3 + [False], [False] * 4]  # the last stage has no delay


def test_a_load_leaves_no_estimate_of_other_weights() -> None:
    """Of the same version and gap, but of another run."""
    case = case_of(4, 1, recompute="stage", spans=(9,), skips=())
    source = make_pipeline(case, **changes_of(case, "elementary", 2))
    list(source.run(make_batches(case)[:4]))
    snapshots, ends = snapshots_in_memory.Kept(source.snapshots()), []
    for before in ((), (4, 2)):  # the last estimate is that of the first backward after a load that is late
        other = make_pipeline(case, **changes_of(case, "elementary", 2))
        for length in before:
            list(other.run(make_batches(case)[::-1][:length]))
        other.load(snapshots)
        list(other.run(make_batches(case)[4:]))
        ends.append({name: tensor.clone() for name, tensor in other.state_dict().items()})
    for name, tensor in ends[0].items():
        assert torch.equal(tensor, ends[1][name]), name


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("2bw", {"segments": 2}, "segments=2 is for recompute='stage'.*recompute is 'none'"),
        ("2bw", {"recompute": "block", "segments": "auto"}, "recompute is 'block'"),
        ("2bw", {"recompute": "stage", "segments": 5}, "from 1 to 4 here, or 'auto'; got 5"),
        ("2bw", {"recompute": "stage", "segments": 0}, "got 0"),
        ("2bw", {"recompute": "stage", "segments": True}, "got True"),
        ("spectrain", {"recompute": "stage", "segments": 2}, "needs an order that places its own recomputes"),
        ("seq1f1b", {"recompute": "stage", "segments": 2}, "need backwards of one whole microbatch"),
        ("chimera", {"recompute": "stage", "segments": 3}, "segments of 3 stages .* do not go with this order"),
    ],
)
def test_what_segments_do_not_go_with_is_refused(method: str, changes: dict[str, Any], message: str) -> None:
    case = Case(method, 4, 4, correction=correction_of(method) if method == "spectrain" else None)
    with pytest.raises((ConfigError, ScheduleError), match=message):
        make_pipeline(case, **changes)


def test_a_schedule_with_recomputes_has_its_own_segments() -> None:
    schedule = with_recompute(make_schedule("2bw", 4, 4), 2)
    with pytest.raises(ConfigError, match="recomputes of its own, so leave segments=3 out"):
        extend(schedule, recomputes=True, segments=3)
    assert extend(schedule, recomputes=True).schedule == schedule


def test_the_configuration_is_checked_before_anything_runs(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be: that is the question. " * 200)
    values = {"method": "pipemare", "stages": 4, "microbatches": 2, "recompute": "stage", "data": str(text)}
    model = {"layers": 4, "width": 8, "heads": 2, "context": 8}
    prepare(validate_config({**values, "segments": "auto", "model": model}))
    for changes, message in (
        ({"segments": 9}, "from 1 to 4 here"),
        ({"segments": 2, "recompute": "none"}, "is for recompute='stage'"),
        ({"segments": 3, "method": "chimera", "microbatches": 4}, "do not go with this order"),
    ):
        with pytest.raises((ConfigError, ScheduleError), match=message):
            prepare(validate_config({**values, **changes, "model": model}))
