"""Models with frozen or shared parameters, with none at all, with functions and buffers; optimizers of all kinds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runtime_cases import (
    BALANCE,
    METHODS,
    OPTIMIZERS,
    VOCABULARY,
    WIDTH,
    Case,
    Named,
    Outcome,
    Recording,
    Residual,
    as_outcome,
    assert_equal_tensors,
    assert_same,
    cut,
    expected,
    finish,
    gpt,
    make_batches,
    make_blocks,
    make_pipeline,
    mixed,
    together,
    token_loss,
    train,
    train_on_ranks,
    warm_up,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.errors import CapabilityError, ConfigError, PenstockError
from penstock.runtime.blocks import LazyBlock
from penstock.train.reference import Reference, train_reference
from pool import Pool

# --- the built-in model and other optimizers ------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("model", "optimizer"), [("gpt", "adamw"), ("matrices", "muon"), ("mixed", "adafactor")])
def test_models_and_optimizers(method: str, model: str, optimizer: str) -> None:
    for depth, m in ((1, 2), (4, 3)):
        case = Case(method, depth, m, model, optimizer)
        assert_same(train(None, case), expected(case))


@pytest.mark.parametrize("method", ["1f1b", "2bw", "stash"])
def test_gpt_on_ranks(pool: Pool, method: str) -> None:
    case = Case(method, 4, 3, "gpt", "nadam")
    assert_same(train_on_ranks(pool, case), expected(case))


@pytest.mark.parametrize("method", METHODS)
def test_scalar_loss_and_constant_rate(method: str) -> None:
    """A scalar is a sum of weight 1, so the batch's loss is the mean over microbatches, and c / N is 1."""
    case = Case(method, 2, 3, loss="mean", rate=False, skips=())
    found = train(None, case)
    assert_same(found, expected(case))
    assert {weight for _, _, weight in found.reports} == {3.0}


@pytest.mark.parametrize("method", ["1f1b", "2bw", "stash"])
@pytest.mark.parametrize("skips", [(0,), (0, 1), (5,), (1, 3, 4)])
def test_batches_without_weight(method: str, skips: tuple[int, ...]) -> None:
    case = Case(method, 3, 2, skips=skips)
    found = train(None, case)
    assert_same(found, expected(case))
    assert [batch for batch, loss, _ in found.reports if loss is None] == list(skips)
    assert len(found.gradients) == 6 - len(skips)


def test_groups_with_their_own_rates() -> None:
    """A factory may divide the parameters; the schedule multiplies each group's rate."""
    case = Case("2bw", 3, 3, skips=(2,))
    recording = Recording(two_groups)
    pipeline, outcome = make_pipeline(case, optimizer=recording), Outcome()
    outcome.reports = [(r.batch, r.loss, r.weight) for r in pipeline.run(make_batches(case))]
    result = train_reference(
        *(cut(make_blocks("mixed"), BALANCE[3]), token_loss, make_batches(case)),
        method="2bw",
        optimizer=two_groups,
        rate=warm_up,
        divisor=case.divisor,
    )
    wanted = as_outcome(result)
    assert_same(finish(outcome, pipeline, recording), wanted)
    assert wanted.rates["head.weight"] == 4 * wanted.rates["head.bias"]


def two_groups(named: Named) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "lr": 0.005, "weight_decay": 0.0}]
    for name, parameter in named:
        groups["bias" in name or "norm" in name]["params"].append((name, parameter))
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.02)


class OneGo(torch.optim.AdamW):
    """A class of its own may look at all parameters in one step, so it is never given some at a time."""

    def __init__(self, named: Named) -> None:
        super().__init__(named, lr=0.01, weight_decay=0.1)
        self.parameters_per_step: list[int] = []

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        self.parameters_per_step.append(sum(p.grad is not None for g in self.param_groups for p in g["params"]))
        return super().step(closure)


@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_an_optimizer_class_of_one_s_own_steps_everything_at_once(method: str) -> None:
    case = Case(method, 1, 2)
    made: list[OneGo] = []

    def factory(named: Named) -> torch.optim.Optimizer:
        made.append(OneGo(named))
        return made[-1]

    pipeline = make_pipeline(case, optimizer=factory)
    list(pipeline.run(make_batches(case)))
    count = sum(len(list(b.parameters())) for b in mixed().values() if isinstance(b, nn.Module))
    assert made[0].parameters_per_step == [count] * 5  # one batch of six has no weight
    assert_equal_tensors(pipeline.state_dict(), expected(case).weights, "weights")


# --- refused optimizers ---------------------------------------------------------------------------------------------


def leaving_out(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD(named[1:], lr=0.1)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda named: torch.optim.LBFGS([p for _, p in named]), "LBFGS needs a closure"),
        (leaving_out, r"left out 1 trained parameters, the first of them table\.weight"),
        (lambda named: "adam", "returned str, not a torch optimizer"),
    ],
)
def test_optimizers_that_are_refused(factory: Any, message: str) -> None:
    with pytest.raises(CapabilityError, match=message):
        make_pipeline(Case("2bw", 1, 1), optimizer=factory)


# --- kinds of stages ------------------------------------------------------------------------------------------------


class Shared(nn.Module):
    """Two layers with one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.two(torch.tanh(self.one(x)))
        return y


def half(x: Tensor) -> Tensor:
    return x / 2


def frozen_table() -> dict[str, Any]:
    """The first stage trains nothing, and its output wants no gradient."""
    return mixed() | {"table": nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)}


def partly_frozen() -> dict[str, Any]:
    blocks = mixed()
    blocks["first"].wide.requires_grad_(False)
    blocks["norm"].bias.requires_grad_(False)
    return blocks


def shared_in_a_block() -> dict[str, Any]:
    return mixed() | {"second": Shared()}


def shared_between_blocks() -> dict[str, Any]:
    """`norm` and `second` stand on one stage at every depth tested."""
    blocks = mixed() | {"norm": nn.Linear(WIDTH, WIDTH), "second": nn.Linear(WIDTH, WIDTH)}
    blocks["second"].weight = blocks["norm"].weight
    return blocks


def functions() -> dict[str, Any]:
    """A stage of functions alone."""
    return mixed() | {"norm": torch.relu, "tanh": half, "second": torch.sigmoid}


def unused_parameter() -> dict[str, Any]:
    """A parameter without a gradient counts as one with a gradient of zero, so that weight decay acts on it."""
    block = Residual()
    block.extra = nn.Parameter(torch.ones(3))
    return mixed() | {"second": block}


KINDS = [frozen_table, partly_frozen, shared_in_a_block, shared_between_blocks, functions, unused_parameter]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("make", KINDS)
def test_kinds_of_stages(method: str, make: Callable[[], dict[str, Any]]) -> None:
    for depth, m in ((1, 2), (3, 3), (4, 3)):
        case = Case(method, depth, m, spans=(4,), skips=())
        balance = (1, 2, 2, 1) if depth == 4 else BALANCE[depth]
        found, result = train_kind(None, case, make, balance), reference_of(case, make, balance)
        assert_same(found, as_outcome(result))


@pytest.mark.parametrize("make", [frozen_table, shared_between_blocks, functions])
def test_kinds_of_stages_on_ranks(pool: Pool, make: Callable[[], dict[str, Any]]) -> None:
    case, balance = Case("2bw", 4, 3, spans=(4,), skips=(1,)), (1, 2, 2, 1)
    outcomes = pool.submit(train_kind, case, make, balance, ranks=4)
    assert_same(together(outcomes), as_outcome(reference_of(case, make, balance)))


def train_kind(
    group: dist.ProcessGroup | None, case: Case, make: Callable[[], dict[str, Any]], balance: tuple[int, ...]
) -> Outcome:
    torch.manual_seed(5)
    recording = Recording(OPTIMIZERS[case.optimizer])
    pipeline = make_pipeline(case, group, blocks=make(), balance=balance, optimizer=recording)
    outcome = Outcome([(r.batch, r.loss, r.weight) for r in pipeline.run(make_batches(case))])
    return finish(outcome, pipeline, recording)


def reference_of(case: Case, make: Callable[[], dict[str, Any]], balance: tuple[int, ...]) -> Reference:
    torch.manual_seed(5)
    return train_reference(
        cut(make(), balance),
        token_loss,
        make_batches(case),
        method=case.method,
        optimizer=OPTIMIZERS[case.optimizer],
        rate=warm_up,
        divisor=case.divisor,
    )


def test_frozen_parameters_stay_as_they_are() -> None:
    blocks = partly_frozen()
    before = blocks["first"].wide.weight.clone()
    pipeline = make_pipeline(Case("2bw", 2, 2), blocks=blocks)
    list(pipeline.run(make_batches(Case("2bw", 2, 2))))
    assert blocks["first"].wide.weight.equal(before)
    assert pipeline.state_dict()["first.wide.weight"].equal(before)
    trained = {name for node in pipeline.nodes.values() for name in node.stage.trained}
    assert "first.wide.weight" not in trained
    assert sum(live["frozen parameters and buffers"] for live in pipeline.live_bytes().values()) == 4 * (
        2 * WIDTH * WIDTH + 2 * WIDTH + WIDTH
    )


def test_shared_parameters_go_by_their_first_name() -> None:
    blocks = shared_between_blocks()
    pipeline = make_pipeline(Case("2bw", 2, 2), blocks=blocks)
    list(pipeline.run(make_batches(Case("2bw", 2, 2))))
    state = pipeline.state_dict()
    assert "norm.weight" in state
    assert "second.weight" not in state
    assert "second.bias" in state
    assert blocks["second"].weight is blocks["norm"].weight


def test_a_model_with_nothing_to_train() -> None:
    pipeline = make_pipeline(Case("1f1b", 3, 2), blocks=[half] * 6, loss=lambda out, target: out.sum())
    reports = list(pipeline.run([[(torch.ones(2), 0.0)] * 2] * 3))
    assert [(r.loss, r.weight) for r in reports] == [(2 / 64, 2.0)] * 3
    assert pipeline.optimizers() == {}


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


@pytest.mark.parametrize("on_ranks", [False, True])
def test_parameters_shared_between_stages_are_refused(pool: Pool, on_ranks: bool) -> None:
    said = pool.submit(refused_tie, ranks=2, fresh=True) if on_ranks else [refused_tie(None)]
    assert all("head.weight" in text and "table.weight" in text for text in said)


def refused_tie(group: dist.ProcessGroup | None) -> str:
    blocks = mixed() | {"head": nn.Linear(WIDTH, VOCABULARY, bias=False)}
    blocks["head"].weight = blocks["table"].weight
    try:
        make_pipeline(Case("1f1b", 2, 2), group, blocks=blocks)
    except PenstockError as error:
        return str(error)
    return "accepted"


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


# --- buffers --------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("method", METHODS)
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
    assert all(module.training for node in pipeline.nodes.values() for module in node.stage.modules)


# --- blocks and cuts ------------------------------------------------------------------------------------------------


def test_lazy_blocks_are_made_only_where_they_are_needed(pool: Pool) -> None:
    made = pool.submit(made_blocks, ranks=3)
    assert made == [["0", "1"], ["2"], ["3", "4", "5"]]
    assert made_blocks(None) == ["0", "1", "2", "3", "4", "5"]


def made_blocks(group: dist.ProcessGroup | None) -> list[str]:
    made: list[str] = []

    def build(name: str) -> nn.Module:
        made.append(name)
        return nn.Linear(2, 2)

    blocks = {str(i): LazyBlock(lambda i=i: build(str(i)), seed=i, cost=1.0) for i in range(6)}  # type: ignore[misc]
    make_pipeline(Case("1f1b", 3, 2), group, blocks=blocks)
    return made


def test_lazy_blocks_do_not_depend_on_the_cut_or_on_the_global_seed() -> None:
    states = []
    for depth in (1, 2, 4):
        torch.manual_seed(depth)
        states.append(make_pipeline(Case("1f1b", depth, 2, "gpt"), blocks=gpt()).state_dict())
        after = torch.rand(1)
        torch.manual_seed(depth)
        assert after.equal(torch.rand(1))
    assert_equal_tensors(states[1], states[0], "weights")
    assert_equal_tensors(states[2], states[0], "weights")


@pytest.mark.parametrize("balance", [(3, 2), (7, -1), (6,), (2, 2, 2), (6, 0), ()])
def test_a_balance_that_does_not_fit(balance: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="must hold 2 positive numbers that add up to the model's 6 blocks"):
        make_pipeline(Case("1f1b", 2, 2), balance=balance)


def test_too_few_blocks() -> None:
    with pytest.raises(ConfigError, match="2 blocks, which cannot be cut into 3 stages; use fewer stages"):
        make_pipeline(Case("1f1b", 3, 2), blocks=[half, half], balance=None)
    with pytest.raises(ConfigError, match="no blocks"):
        make_pipeline(Case("1f1b", 1, 2), blocks=[], balance=None)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [([half, 3], "block .1. is a int"), ("half", "block .0. is a str"), (3, "must be a list or a dict")],
)
def test_what_is_no_block(blocks: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_pipeline(Case("1f1b", 1, 2), blocks=blocks, balance=None)


@pytest.mark.parametrize("container", [list, nn.Sequential, nn.ModuleList, lambda b: nn.ModuleDict(enumerate_names(b))])
def test_containers_of_blocks(container: Any) -> None:
    blocks = [nn.Linear(2, 2) for _ in range(3)]
    made = container(*[blocks] if container is not nn.Sequential else blocks)
    pipeline = make_pipeline(Case("1f1b", 3, 1), blocks=made, balance=None)
    assert [list(node.stage.blocks) for node in pipeline.nodes.values()] == [["0"], ["1"], ["2"]]


def enumerate_names(blocks: list[nn.Module]) -> dict[str, nn.Module]:
    return {str(i): block for i, block in enumerate(blocks)}


def test_the_costliest_stage_is_as_cheap_as_can_be() -> None:
    """Against all ways to cut."""
    g = torch.Generator().manual_seed(0)
    for _ in range(20):
        costs = torch.randint(1, 20, (7,), generator=g).tolist()
        blocks = {str(i): LazyBlock(lambda: nn.Identity(), seed=0, cost=float(c)) for i, c in enumerate(costs)}
        for stages in (1, 2, 3, 4):
            pipeline = make_pipeline(Case("1f1b", stages, 1), blocks=blocks, balance=None)
            found = max(sum(costs[int(name)] for name in part) for part in pipeline.parts)
            ways = [(0, *inner, 7) for inner in combinations(range(1, 7), stages - 1)]
            best = min(max(sum(costs[a:b]) for a, b in pairwise(way)) for way in ways)
            assert found == best
