"""Passes that read predictions, backwards that read newer weights than their forwards, updates that make up for it."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.errors import CapabilityError, ConfigError, ScheduleError
from penstock.runtime.pipeline import Pipeline
from penstock.schedule.methods.corrections import CORRECTIONS
from penstock.schedule.methods.method_parsing import written_method
from penstock.schedule.methods.table import METHODS
from penstock.stage.trained_stage_weights import TrainedWeights
from penstock.verify.reference import Scaling
from support.cases import (
    Case,
    assert_same,
    expected,
    make_batches,
    make_blocks,
    make_pipeline,
    train,
    train_on_ranks,
)  # fmt: skip
from support.correction_cases import KINDS, assert_near, case_of, snapshots_of
from support.own_methods import correction_of, prove, row_of
from support.pool import Pool
from support.snapshots import Kept

SHAPES = [(1, 2), (2, 1), (4, 3), (8, 2)]


@pytest.mark.parametrize(("depth", "m"), SHAPES)
@pytest.mark.parametrize("name", KINDS)
def test_the_equations_of_corrections(name: str, depth: int, m: int) -> None:
    """Updates in two spans, one of them skipped: with each optimizer on four stages, with one on every other shape.

    So every pair of method and shape is there, and of method and optimizer. The first of eight stages with two
    microbatches is four updates late; rates that rise over four updates have risen.
    """
    kind, spans = KINDS[name], (8, 5) if depth >= 4 else (5, 3)
    for optimizer in kind.optimizers if depth == 4 else kind.optimizers[:1] if depth == 8 else kind.optimizers[-1:]:
        case = case_of(name, depth, m, optimizer=optimizer, spans=spans)
        found, wanted = train(None, case), expected(case, options=kind.options)
        (assert_same if kind.exact else assert_near)(found, wanted)


@pytest.mark.parametrize(
    "name", [n for n, kind in KINDS.items() if {"sgd", "undecayed", "momentum"} & {*kind.optimizers}]
)
def test_parameters_with_rates_of_their_own(name: str) -> None:
    kind, case = KINDS[name], case_of(name, 3, 2, optimizer="two rates", spans=(6, 4))
    (assert_same if kind.exact else assert_near)(train(None, case), expected(case, options=kind.options))


MUON = ["newest", "pipemare", "spectrain-stash", "xpipe", "pipeoptim", "lwp", "error-feedback", "2bw-ahead by motion"]


@pytest.mark.parametrize(("name", "depth"), [*((name, 4) for name in MUON), ("pipemare", 8), ("xpipe", 8), ("lwp", 1)])
def test_late_weights_under_muon(name: str, depth: int) -> None:
    """Each on four stages; late by most updates, and by none, those that predict in the three ways there are."""
    kind, case = KINDS[name], case_of(name, depth, 2, optimizer="configured muon", spans=(8, 5))
    assert_same(train(None, case), expected(case, options=kind.options))


ON_RANKS = sorted({kind.method: name for name, kind in reversed(KINDS.items()) if "timeprest" not in name}.values())
"""One choice of options of each method; the others with one backward for a batch are in `test_timeprest.py`."""


@pytest.mark.parametrize("name", [*ON_RANKS, "v-timeprest"])
def test_corrections_on_ranks_as_in_one_process(pool: Pool, name: str) -> None:
    case = case_of(name, 3, 2, clip=0.6, spans=(3, 4))
    assert_same(train_on_ranks(pool, case), train(None, case))


SCALED = {"precision": "fp16", "scaling": Scaling(2.0**10, 2.0, 0.5, 2)}


@pytest.mark.parametrize(
    "changes",
    [{"clip": 0.6, "tied": True}, {"width": 2}, {"model": "gpt"}, SCALED],
    ids=["tied", "width", "gpt", "fp16"],
)
@pytest.mark.parametrize(
    "name", ["newest", "spectrain", "pipeoptim", "error-feedback", "2bw-ahead", "ftpipe-aggregated"]
)
def test_corrections_with_other_features(name: str, changes: dict[str, Any]) -> None:
    case = case_of(name, 3, 2, **changes)
    assert_same(train(None, case), expected(case, options=KINDS[name].options))


@pytest.mark.parametrize(
    ("name", "model"), [("newest", "gpt"), ("pipemare without T2", "mixed"), ("spectrain", "gpt"), ("2bw-ahead", "gpt")]
)
def test_low_precision(name: str, model: str) -> None:
    """A norm casts its input, which is no weight, though it may be a leaf of the graph of a stage."""
    case = case_of(name, 3, 2, precision="bf16", model=model)
    assert_same(train(None, case), expected(case, options=KINDS[name].options))


def test_recompute_reads_what_is_newest_then() -> None:
    """A forward that is run again right before its backward reads the same weights, so there is no mismatch: FTPipe."""
    case = Case("newest", 3, 1, recompute="block", spans=(9,))
    found, kept = train(None, case), train(None, replace(case, recompute="none"))
    assert any(not torch.equal(w, kept.weights[name]) for name, w in found.weights.items())
    last = [name for name in found.gradients[0] if name.startswith("head")]
    for name in last:  # the last stage has no delay
        assert torch.equal(found.gradients[1][name], kept.gradients[1][name])


@pytest.mark.parametrize("name", KINDS)
def test_a_run_goes_on_from_a_snapshot(name: str) -> None:
    """As one that drained there, with all that a correction remembers."""
    case = case_of(name, 3, 2, spans=(8,), skips=())
    whole = make_pipeline(case)
    taken = [snapshot for snapshot in snapshots_of(case, 4, whole) if snapshot.batch == 4]
    resumed = make_pipeline(case)
    resumed.load(Kept(taken))
    for _ in resumed.run(make_batches(case)[4:]):
        pass
    for key, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[key], value), key


BYTES = {  # parameter-sized buffers on the first of three stages, but for the optimizer: weights, gradient, and ...
    "newest": 2,
    "pipemare": 3,  # delta
    "pipemare without T2": 2,
    "spectrain": 3,  # one copy at a time
    "xpipe": 4,  # one for forwards, one for backwards
    "pipeoptim": 3,
    "lwp-weights": 4,  # a copy, and the last motion
    "ftpipe-aggregated": 3,
    "spectrain-stash": 5,  # three copies: two forwards under way, and one more
    "2bw-ahead": 4,  # the weights, and two predictions and a gradient that rotate
    "2bw-ahead by motion": 4,
    "error-feedback": 4,  # two versions and a gradient that rotate, and the last step
}


@pytest.mark.parametrize("name", BYTES)
def test_what_every_byte_of_a_correction_is_for(name: str) -> None:
    case = case_of(
        name, 3, 2 if name in ("error-feedback", "2bw-ahead", "2bw-ahead by motion", "xpipe") else 1, model="matrices"
    )
    pipeline = make_pipeline(case)
    for _ in pipeline.run(make_batches(case)):
        pass
    stage = next(iter(pipeline.stages.values()))
    live = pipeline.live_bytes()[0]
    kinds = ("weights", "master weights", "gradients", "idle buffers", "copies", "correction")
    assert sum(live.get(kind, 0) for kind in kinds) == BYTES[name] * stage.weights.store.layout.nbytes


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.correction is not None])
def test_the_table_says_what_a_correction_keeps(name: str) -> None:
    case = case_of(name, 3, 1, model="matrices")
    stage = next(iter(make_pipeline(case).stages.values()))
    assert stage.weights.corrector is not None
    said = 0 if name == "pipemare without T2" else row_of(case.method).spec.buffers
    kept = stage.weights.corrector.nbytes + stage.weights.store.bytes_by_role().get("master weights", 0)
    assert kept == said * stage.weights.store.layout.nbytes


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("pipemare", {"tied": True}, "steps every stage in its own way, so parameters which stages share would part"),
        ("spectrain", {"recompute": "stage"}, "needs an order that places its own recomputes"),
        ("spectrain", {"recompute": "block"}, "set recompute=none"),
        ("spectrain", {"optimizer": "adafactor"}, "not of Adafactor"),
        ("spectrain", {"correction": None}, r"pass staleness=correction_of\('spectrain'\)"),
        ("spike", {"optimizer": "sgd"}, "without nesterov"),
        ("nag-pp", {"optimizer": "adamw"}, "needs NAdam, not AdamW"),
        ("2bw-ahead", {"optimizer": "adafactor"}, "not of Adafactor; use their option motion=1"),
        ("gap-aware", {"optimizer": "adamw"}, "need SGD with momentum, not AdamW"),
        ("newest", {"correction": correction_of("spike-lwp")}, "goes with version rule predicted-forward"),
    ],
)
def test_what_does_not_go_with_a_correction_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((CapabilityError, ConfigError, ScheduleError), match=message):
        make_pipeline(case_of(name, 3, 2, **changes))


@pytest.mark.parametrize("method", [row.name for row in METHODS.values() if row.correction != "none"])
def test_a_correction_that_is_missing_or_another_s(method: str) -> None:
    """Else another method would be trained under its name."""
    proof = prove(method, 2, 1)
    said = rf"{method}: .* pass staleness=correction_of\('{method}'\)"
    case = Case(method, 2, 1, optimizer="momentum", model="matrices")
    with pytest.raises(ConfigError, match=said):
        make_pipeline(case)
    pipeline = make_pipeline(replace(case, method="1f1b"))
    with pytest.raises(ConfigError, match=said):
        pipeline.switch(proof)
    other = "nag-pp"
    own = METHODS[method].correction
    with pytest.raises(ConfigError, match=rf"{method}: this schedule's method has correction '{own}', but"):
        make_pipeline(replace(case, correction=correction_of(other)))


def test_gap_aware_gradients_are_for_one_microbatch() -> None:
    with pytest.raises(CapabilityError, match="one microbatch per update, not 2"):
        make_pipeline(replace(case_of("gap-aware", 3, 1), m=2))


def test_options_are_checked() -> None:
    for options, message in (
        ({"decay": 0.1}, r"over how many updates .*penstock.correction_of\('pipemare', reschedule=500\)"),
        ({"reschedule": -1}, "reschedule takes a whole number of at least 0, or null; got -1"),
        ({"reschedule": 1, "decay": 1.5}, "decay takes a number between 0 and 1, or null; got 1.5"),
        ({"speed": 1}, "has no option 'speed'; it has reschedule, decay"),
    ):
        with pytest.raises(ConfigError, match=message):
            correction_of("pipemare", **options)


@pytest.mark.parametrize(
    ("method", "option", "wrong", "takes"),
    [
        ("pipemare", "reschedule", 0.9, "a whole number of at least 0, or null; got 0.9"),
        ("nag-pp-no-stash", "reschedule", math.inf, "a whole number of at least 0, or null; got inf"),
        ("pipemare", "decay", math.nan, "a number between 0 and 1, or null; got nan"),
        ("ftpipe", "weight_decay", 0.01, "0 or 1; got 0.01"),
        ("ftpipe-aggregated", "ahead", None, "0 or 1; got null"),
        ("xpipe", "uncorrected", 2, "0 or 1; got 2"),
        ("i-timeprest", "beta", None, "a number from 0 to 1; got null"),
        ("gap-aware", "average", None, "a number from 0 to below 1; got null"),
        ("gap-aware", "eps", None, "a number above 0; got null"),
        ("gap-aware", "eps", 0, "a number above 0; got 0"),
        ("2bw-ahead", "horizon", -1, "a number of at least 0, or null; got -1"),
        ("3bw-ahead", "horizon", -1, "a number of at least 0, or null; got -1"),
        ("error-feedback", "share", None, "a number from 0 to 1; got null"),
    ],
)
def test_options_that_are_not_what_they_take_are_refused(method: str, option: str, wrong: Any, takes: str) -> None:
    """None is rounded, or taken for a switch or zero."""
    given = {"reschedule": 1, option: wrong} if option == "decay" else {option: wrong}
    with pytest.raises(ConfigError, match=re.escape(f": {option} takes {takes}")):
        correction_of(method, **given)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("3bw-ahead:horizon=-1", "horizon takes a number of at least 0, or null; got -1"),
        ("2bw-ahead:a=1", "set both a and b, or none of them; got a=1, b=None"),
        ("2bw-ahead:motion=1:a=1:b=0", "a and b weigh gradients, but motion=1 repeats the motion"),
    ],
)
def test_a_method_with_nonsense_is_refused_where_it_is_read(written: str, said: str) -> None:
    """So by `show` and `simulate`, too, which make no correction."""
    with pytest.raises(ConfigError, match=said):
        written_method(written)


def test_defaults_are_what_options_take() -> None:
    for row in CORRECTIONS.values():
        for name, option in row.options.items():
            assert option.fits(option.default), (row.name, name)


class Odd(nn.Module):
    """A map that does something with its weight."""

    def __init__(self, run: Any, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.run, self.weight = run, nn.Parameter(torch.randn(8, 8, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.run(self.weight, x)
        return y


def written_over(w: Tensor, x: Tensor) -> Tensor:
    h = torch.sigmoid(x @ w)
    y = h * 2
    h.mul_(3)
    return y


def train_odd(run: Any, method: str = "newest", dtype: torch.dtype = torch.float32) -> None:
    pipeline = Pipeline(
        [Odd(run, dtype), nn.Linear(8, 8)],
        prove(method, 2, 1),
        loss=lambda y, t: (((y - t) ** 2).sum(), 1.0),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9),
        staleness=correction_of(method),
    )
    list(pipeline.run([[(torch.randn(2, 8), torch.randn(2, 8))]] * 3))


@pytest.mark.parametrize(
    "run",
    [
        lambda w, x: F.linear(x.bfloat16(), w.bfloat16()).float(),
        lambda w, x: (x.bfloat16() @ w.t().bfloat16()).float(),
        lambda w, x: (x.bfloat16() @ w[:, :].unsqueeze(0)[0].bfloat16()).float(),
    ],
    ids=["weight", "transposed", "view of a view"],
)
def test_casts_of_weights_are_refused(run: Any) -> None:
    """A cast stays as the forward made it, whatever the weights are by then."""
    with pytest.raises(CapabilityError, match="casts its weights"):
        train_odd(run)


@pytest.mark.parametrize("method", ["newest", "spectrain", "pipeoptim", "stash"])
def test_writing_over_an_activation_is_an_error_as_ever(method: str) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train_odd(written_over, method)


def test_complex_weights_are_refused() -> None:
    for method in ("newest", "spectrain-stash"):
        with pytest.raises(CapabilityError, match="0.weight is complex"):
            train_odd(lambda w, x: (x @ w.conj()).real, method, torch.complex64)


@pytest.mark.parametrize(("before", "name"), [("1f1b", "error-feedback"), ("1f1b", "2bw-ahead"), ("1f1b", "gap-aware")])
def test_a_correction_that_begins_later_begins_anew(before: str, name: str) -> None:
    """Five batches of plain training, then the method: as one that starts from there with the optimizer's state."""
    m = 1 if name == "gap-aware" else 2
    case = replace(case_of(name, 2, m, spans=(9,), skips=(), rate=False), optimizer="undecayed")
    batches, phases = make_batches(case), [(before, None, 5), (name, KINDS[name].correction, 9)]
    pipeline = make_pipeline(replace(case, method=before, correction=None))
    begun = 0
    weights: list[dict[str, Tensor]] = []
    for method, correction, end in phases:
        if begun:
            pipeline.switch(prove(method, 2, m), correction=correction)
        for k in range(begun, end):
            list(pipeline.run(batches[k : k + 1]))
            weights.append({key: value.clone() for key, value in pipeline.state_dict().items()})
        begun = end
    plain = make_pipeline(replace(case, method=before, correction=None))
    list(plain.run(batches[:6]))  # drained, no pass has read anything old, and nothing is known of steps before
    for key, value in plain.state_dict().items():
        assert torch.allclose(weights[5][key], value, rtol=1e-6, atol=1e-7), key


@pytest.mark.parametrize(("before", "after"), [("pipemare", "lwp-weights"), ("pipemare", "nag-pp-no-stash")])
def test_another_correction_s_memory_is_of_no_use(before: str, after: str) -> None:
    case = case_of(before, 3, 1, spans=(8,), skips=(), optimizer="nadam")
    taken = [snapshot for snapshot in snapshots_of(case, 4, make_pipeline(case)) if snapshot.batch == 4]
    other = make_pipeline(case_of(after, 3, 1, optimizer="nadam"))
    other.load(Kept(taken))
    for stage in other.stages.values():
        corrector = stage.weights.corrector if isinstance(stage.weights, TrainedWeights) else None
        assert corrector is None or corrector.began == 4
        for buffer in corrector.buffers.values() if corrector is not None else ():
            assert not any(view.any() for view in buffer.views.values())


def test_a_correction_s_memory_at_another_depth() -> None:
    """A stage that had no delay has remembered nothing."""
    case = case_of("pipemare", 2, 1, spans=(8,), skips=())
    taken = [snapshot for snapshot in snapshots_of(case, 4, make_pipeline(case)) if snapshot.batch == 4]
    deeper = make_pipeline(case_of("pipemare", 3, 1))
    deeper.load(Kept(taken))
    assert len(list(deeper.run(make_batches(case)[4:]))) == 4


def test_a_switch_that_cannot_be_leaves_the_pipeline_whole() -> None:
    case = case_of("pipeoptim", 3, 1)
    pipeline = make_pipeline(replace(case, method="1f1b", correction=None, optimizer="adafactor"))
    with pytest.raises(CapabilityError, match="not of Adafactor"):
        pipeline.switch(prove("pipeoptim", 3, 1), correction=case.correction)
    assert len(list(pipeline.run(make_batches(case)[:2]))) == 2


def test_what_a_method_before_held_is_told_to_be_gone() -> None:
    case = case_of("pipemare", 3, 1)
    pipeline = make_pipeline(case)
    list(pipeline.run(make_batches(case)[:3]))
    assert pipeline.live_bytes()[0]["correction"] > 0
    pipeline.switch(prove("pipeoptim", 3, 1), correction=correction_of("pipeoptim"))
    list(pipeline.run(make_batches(case)[:3]))
    assert pipeline.live_bytes()[0]["correction"] == 0
    pipeline.switch(prove("1f1b", 3, 1))
    list(pipeline.run(make_batches(case)[:3]))
    assert pipeline.live_bytes()[0]["copies"] == 0


def test_rates_are_given_back() -> None:
    case = case_of("pipemare", 4, 1, rate=False)
    pipeline = make_pipeline(replace(case, correction=correction_of("pipemare", reschedule=1000)))
    list(pipeline.run(make_batches(case)[:3]))
    pipeline.switch(prove("1f1b", 4, 1))
    list(pipeline.run(make_batches(case)[:1]))
    assert {group["lr"] for optimizer in pipeline.optimizers().values() for group in optimizer.param_groups} == {0.1}


def test_a_load_leaves_no_prediction_of_other_weights() -> None:
    """Of the same version, but of another run."""
    case = case_of("xpipe", 3, 2, spans=(8,), skips=())
    taken = [snapshot for snapshot in snapshots_of(case, 4, make_pipeline(case)) if snapshot.batch == 4]
    ends = []
    for before in (0, 5):
        other = make_pipeline(case, blocks=make_blocks(case.model, seed=9))
        list(other.run(make_batches(case)[:before]))
        other.load(Kept(taken))
        list(other.run(make_batches(case)[4:]))
        ends.append({name: tensor.clone() for name, tensor in other.state_dict().items()})
    for name, tensor in ends[0].items():
        assert torch.equal(tensor, ends[1][name]), name
