"""The reference of methods that train on delayed weights, against recursions in plain floats and published numbers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import CapabilityError, ConfigError
from penstock.verify.reference import FLUSH, METHODS
from penstock.verify.reference.supported_methods import OPTIONS
from support import scalar_pipelines as by_hand
from support.delayed_by_hand import begin, nadam, referred
from support.own_methods import train_reference
from support.reference_cases import BATCHES, PIPEMARE, Times, adamw, assert_equal, half_square, inputs, of, sgd
from support.scalar_pipelines import run as run_by_hand

SHAPES = [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2), (4, 3), (2, 3)]  # stages, microbatches


def computed(kind: Callable[..., by_hand.Stage], d: int, m: int, drain: int = BATCHES) -> list[list[float]]:
    """The same from stages that run by themselves, in plain floats."""
    stages = [kind(w, s, d, m) for s, w in enumerate(begin(d))]
    run_by_hand(stages, [span for span in (inputs(m)[:drain], inputs(m)[drain:]) if span])
    return [stage.history for stage in stages]


CASES: dict[str, tuple[str, Any, Any, dict[str, Any]]] = {
    "stash": ("stash", by_hand.Stage, sgd, {}),
    "newest": ("newest", by_hand.Newest, sgd, {}),
    "pipemare": ("pipemare", by_hand.PipeMare, sgd, PIPEMARE),
    "pipemare without T1": ("pipemare", by_hand.NoT1, sgd, {"reschedule": 0}),
    "pipemare without T2": ("pipemare", by_hand.NoT2, sgd, PIPEMARE | {"decay": None}),
    "spectrain": ("spectrain", by_hand.SpecTrain, sgd, {}),
    "spectrain with AdamW": ("spectrain", by_hand.SpecTrainAdamW, adamw, {}),
    "spectrain-stash": ("spectrain-stash", by_hand.SpecTrainStash, sgd, {}),
    "xpipe": ("xpipe", by_hand.XPipe, sgd, {}),
    "xpipe with AdamW": ("xpipe", by_hand.XPipeAsPrinted, adamw, {}),
    "xpipe with powers": ("xpipe", by_hand.XPipeAdamW, adamw, {"bias": "adam"}),
    "pipeoptim": ("pipeoptim", by_hand.PipeOptim, sgd, {}),
    "lwp": ("lwp", by_hand.Lwp, sgd, {}),
    "lwp by weights": ("lwp-weights", by_hand.LwpWeight, sgd, {}),
    "spike": ("spike", by_hand.SpikeNewest, sgd, {}),
    "spike-lwp": ("spike-lwp", by_hand.SpikeLwp, sgd, {}),
    "nag-pp": ("nag-pp", by_hand.NagPP, nadam, {}),
    "nag-pp-no-stash": ("nag-pp-no-stash", by_hand.NagPPNoStash, nadam, PIPEMARE),
    "gap-aware": ("gap-aware", by_hand.GapAware, sgd, {"average": by_hand.GapAware.G}),
}


@pytest.mark.parametrize("case", CASES)
def test_recursions_by_hand(case: str) -> None:
    """25 batches, one of them without weight, of a product of weights; in two shapes drained in between."""
    method, kind, optimizer, options = CASES[case]
    for d, m in SHAPES if method != "gap-aware" else [(1, 1), (2, 1), (4, 1)]:
        drain = 11 if (d, m) in ((4, 1), (4, 3)) else BATCHES
        found = referred(method, d, m, optimizer, options=options, drains=[drain])
        assert_equal(found, computed(kind, d, m, drain))


def test_the_cases_by_hand_differ() -> None:
    """Each says something of its own; but (d-1-s)/m microbatches are the mean delay: two papers, one equation."""
    ends = {
        name: torch.tensor(computed(kind, 4, 2))[:, -1]
        for name, (method, kind, *_) in CASES.items()
        if method != "gap-aware"
    }
    same = {pair for pair in combinations(ends, 2) if float((ends[pair[0]] - ends[pair[1]]).abs().max()) <= 1e-6}
    assert same == {("pipeoptim", "lwp")}


@pytest.mark.parametrize("method", ["newest", "pipemare", "spectrain", "xpipe", "lwp", "spike", "error-feedback"])
def test_two_pipelines_with_the_same_samples(method: str) -> None:
    options = PIPEMARE if method == "pipemare" else {}
    batches = [[(of(x), of(1.0)) for x in xs] for xs in inputs(2)]
    stages = [{f"b{s}": Times(w)} for s, w in enumerate(begin(3))]
    wanted, found = (
        train_reference(stages, half_square, data, method=method, optimizer=sgd, parts=parts, options=options)
        for data, parts in ((batches, None), ([batch * 2 for batch in batches], [[0, 1], [2, 3]]))
    )
    for a, b in zip(found.versions, wanted.versions, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0.0)


NO_DELAY = ["newest", "pipemare", "spectrain", "spectrain-stash", "pipeoptim", "lwp", "spike", "spike-lwp", "gap-aware"]


@pytest.mark.parametrize("method", NO_DELAY)
def test_nothing_is_done_where_nothing_is_late(method: str) -> None:
    m = 1 if method == "gap-aware" else 3
    options = {"reschedule": 100} if method == "pipemare" else {}
    assert_equal(referred(method, 1, m, options=options), referred("gpipe", 1, m))


def test_parameter_groups_have_rates_of_their_own() -> None:
    """SpecTrain on a stash: the first of two stages predicts one update ahead, matrices and vectors by their rates."""
    torch.manual_seed(1)
    first, second = nn.Sequential(nn.Linear(4, 5), nn.Tanh()).double(), nn.Linear(5, 2).double()
    batches = [[tuple(torch.randn(6, n, dtype=torch.float64) for n in (4, 2))] for _ in range(5)]

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return ((y - target) ** 2).sum() / 2

    def groups(named: Any) -> torch.optim.Optimizer:
        of_rate = {0.05: [p for _, p in named if p.ndim == 2], 0.01: [p for _, p in named if p.ndim == 1]}
        return torch.optim.SGD([{"params": ps, "lr": lr} for lr, ps in of_rate.items()], lr=1.0, momentum=0.9)

    stages = [{"a": first}, {"b": second}]
    result = train_reference(
        stages, loss, batches, method="spectrain-stash", optimizer=groups, rate=lambda k: 1 - k / 9
    )
    buffers = {name: [torch.zeros_like(w)] for name, w in result.versions[0].items()}
    for t, [(x, target)] in enumerate(batches):
        v = max(t - 1, 0)
        leaves = {}
        for name, w in result.versions[t].items():
            if name.startswith("a"):
                w = result.versions[v][name] - (0.05 if w.ndim == 2 else 0.01) * (1 - v / 9) * buffers[name][v]
            leaves[name] = w.clone().requires_grad_()
        hidden = torch.tanh(x @ leaves["a.0.weight"].T + leaves["a.0.bias"])
        y = hidden @ leaves["b.weight"].T + leaves["b.bias"]
        wanted = dict(zip(leaves, torch.autograd.grad(loss(y, target), list(leaves.values())), strict=True))
        torch.testing.assert_close(result.gradients[t], wanted, rtol=1e-10, atol=1e-12)
        for name, g in wanted.items():
            buffers[name].append(0.9 * buffers[name][-1] + g)


EVERYTHING = [method for method in METHODS if method not in FLUSH]


@pytest.mark.parametrize("method", EVERYTHING)
def test_stages_without_parameters_and_frozen_ones(method: str) -> None:
    """They are nothing but delay: the weights of the others are learned, theirs stay."""
    frozen = Times(0.5)
    frozen.w.requires_grad_(False)
    stages: list[dict[str, Any]] = [{"b0": Times(0.9)}, {"f": torch.tanh}, {"z": frozen}, {"b3": Times(1.3)}]
    options = PIPEMARE if "reschedule" in OPTIONS.get(method, {}) else {}
    optimizer = nadam if method.startswith("nag") else sgd
    batches = [[(of(x), of(1.0)) for x in xs] for xs in inputs(1)]
    result = train_reference(stages, half_square, batches, method=method, optimizer=optimizer, options=options)
    assert list(result.versions[-1]) == ["b0.w", "b3.w"]
    assert result.losses[-1] < 0.5 * result.losses[0]
    assert float(frozen.w) == 0.5
    assert [bool(state) for state in result.optimizers] == [True, False, False, True]


@pytest.mark.parametrize("method", ["newest", "pipemare", "spectrain", "pipeoptim", "lwp"])
def test_low_precision_without_delay(method: str) -> None:
    """Weights of the backward are cast as those of the forward are."""
    torch.manual_seed(2)
    stages = [{"a": nn.Linear(4, 5), "norm": nn.LayerNorm(5), "b": nn.Linear(5, 1)}]
    batches = [[(torch.randn(3, 4), torch.zeros(3, 1)) for _ in range(2)] for _ in range(4)]
    options = {"reschedule": 100} if method == "pipemare" else {}
    found, wanted = (
        train_reference(
            *(stages, lambda y, target: ((y - target) ** 2).sum(), batches),
            method=name,
            optimizer=sgd,
            precision=torch.bfloat16,
            options=more,
            clip=0.5,
        )
        for name, more in ((method, options), ("1f1b", {}))
    )
    for a, b in zip(found.versions, wanted.versions, strict=True):
        assert all(torch.equal(a[name], w) for name, w in b.items())
    assert found.norms == wanted.norms


# --- the backward with other weights ----------------------------------------------------------------------------------


class Affine(nn.Module):
    """a * x + c, element by element."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = (nn.Parameter(0.5 + torch.rand(5, dtype=torch.float64)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.a * x + self.c


class Around(nn.Module):
    """x + W x."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(5, 5, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.map(x)


def gradients_by_hand(f: dict[str, Tensor], b: dict[str, Tensor], x: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Of linear, tanh, affine, linear, residual under half the squared distance: activations of f, weights of b."""
    h = torch.tanh(x @ f["one.0.weight"].T + f["one.0.bias"])
    scaled = f["two.a"] * h + f["two.c"]
    y = scaled @ f["three.weight"].T + f["three.bias"]
    e = y + y @ f["four.map.weight"].T - target
    g = {"four.map.weight": e.T @ y}
    e = e + e @ b["four.map.weight"]
    g |= {"three.weight": e.T @ scaled, "three.bias": e.sum(0)}
    e = e @ b["three.weight"]
    g |= {"two.a": (e * h).sum(0), "two.c": e.sum(0)}
    e = e * b["two.a"] * (1 - h * h)
    return g | {"one.0.weight": e.T @ x, "one.0.bias": e.sum(0)}


def test_activations_of_the_forward_and_weights_of_the_backward() -> None:
    torch.manual_seed(3)
    first = nn.Sequential(nn.Linear(4, 5, dtype=torch.float64), nn.Tanh())
    stages = [{"one": first}, {"two": Affine()}, {"three": nn.Linear(5, 5, dtype=torch.float64), "four": Around()}]
    batches = [[tuple(torch.randn(6, n, dtype=torch.float64) for n in (4, 5)) for _ in range(2)] for _ in range(6)]
    result = train_reference(
        *(stages, lambda y, target: ((y - target) ** 2).sum() / 2, batches),
        method="newest",
        optimizer=lambda named: torch.optim.SGD(named, lr=0.05),
    )
    mixed = 0.0
    for t, batch in enumerate(batches):
        wanted: dict[str, Tensor] = {}
        for k, (x, target) in enumerate(batch):
            reads = [max(0, 2 * t + k - ahead) // 2 for ahead in (2, 1, 0)]
            forward = {
                name: result.versions[v][name]
                for stage, v in zip(stages, reads, strict=True)
                for name in result.versions[0]
                if name.split(".")[0] in stage
            }
            for name, g in gradients_by_hand(forward, result.versions[t], x, target).items():
                wanted[name] = wanted.get(name, 0.0) + g / 2
            stashed = gradients_by_hand(forward, forward, x, target)["one.0.weight"]
            mixed = max(
                mixed,
                float(
                    (gradients_by_hand(forward, result.versions[t], x, target)["one.0.weight"] - stashed).abs().max()
                ),
            )
        for name, g in wanted.items():
            torch.testing.assert_close(result.gradients[t][name], g, rtol=1e-10, atol=1e-12)
    assert mixed > 1e-3  # the weights do make a difference


def test_layer_norm_and_what_is_computed_from_weights() -> None:
    """LayerNorm's backward has its weight; what the forward itself computed from one stays as it was."""

    class Squared(Times):
        def forward(self, x: Tensor) -> Tensor:
            return (self.w * self.w) * x

    norm = nn.LayerNorm(3, dtype=torch.float64)
    batches = [
        [(torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(t)), of(1.0))]
        for t in range(4)
    ]

    def loss(output: Tensor, _: Tensor) -> Tensor:
        return (output**3).sum()

    result = train_reference(
        *([{"b0": Times(0.9)}, {"norm": norm, "sq": Squared(1.1)}, {"b2": Times(0.7)}], loss, batches),
        method="newest",
        optimizer=lambda named: torch.optim.SGD(named, lr=0.01),
    )
    t = 3
    v0, v1, newest = result.versions[1], result.versions[2], result.versions[3]
    x = batches[t][0][0]
    a = v0["b0.w"] * x
    mean, spread = a.mean(1, keepdim=True), (a.var(1, unbiased=False, keepdim=True) + norm.eps) ** -0.5
    hat = (a - mean) * spread
    n = hat * v1["norm.weight"] + v1["norm.bias"]
    y = v1["sq.w"] ** 2 * n
    e = 3 * (newest["b2.w"] * y) ** 2
    assert float(result.gradients[t]["b2.w"]) == pytest.approx(float((e * y).sum()), rel=1e-10)
    e = e * newest["b2.w"]
    # d(w * w) = 2 w dw, whose w is a weight in a formula: the newest. The product w * w is the forward's.
    assert float(result.gradients[t]["sq.w"]) == pytest.approx(float(2 * newest["sq.w"] * (e * n).sum()), rel=1e-10)
    e = e * v1["sq.w"] ** 2
    torch.testing.assert_close(result.gradients[t]["norm.weight"], (e * hat).sum(0), rtol=1e-10, atol=1e-12)
    e = e * newest["norm.weight"]
    e = spread * (e - e.mean(1, keepdim=True) - hat * (e * hat).mean(1, keepdim=True))
    assert float(result.gradients[t]["b0.w"]) == pytest.approx(float((e * x).sum()), rel=1e-10)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("pipemare", {}, "pipemare needs the option 'reschedule'"),
        ("pipemare", {"reschedule": 5, "gamma": 1}, "no option 'gamma'; it has: reschedule, decay"),
        ("newest", {"decay": 1}, "no option 'decay'; it has: none"),
        ("xpipe", {"bias": "mine"}, "bias is 'mine'; give one of paper, adam"),
    ],
)
def test_wrong_options(method: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        referred(method, 2, 1, options=options)


def test_optimizers_and_batches_that_do_not_fit() -> None:
    plain = lambda named: torch.optim.SGD(named, lr=0.1)  # noqa: E731
    with pytest.raises(CapabilityError, match="SGD has no velocity"):
        referred("spectrain", 2, 1, plain)
    with pytest.raises(CapabilityError, match="NAdam has no velocity"):
        referred("pipeoptim", 2, 1, nadam)
    with pytest.raises(CapabilityError, match="spike compensation"):
        referred("spike", 2, 1, adamw)
    with pytest.raises(CapabilityError, match="is NAdam, but the optimizer is"):
        referred("nag-pp", 2, 1, sgd)
    with pytest.raises(CapabilityError, match="is NAdam, but the optimizer is"):
        referred("nag-pp-no-stash", 2, 1, plain, options={"reschedule": 1})
    with pytest.raises(CapabilityError, match="one microbatch per update, not 2"):
        referred("gap-aware", 2, 2)
    with pytest.raises(ConfigError, match="untie"):
        referred("pipemare", 2, 1, tied={"b1.w": "b0.w"}, options={"reschedule": 1})
