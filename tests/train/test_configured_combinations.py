"""What a configuration asks of a method is refused before a process starts, or can be built."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock import cli
from penstock.runtime.from_checked_plan import continue_under
from penstock.train.config.load import load_config
from penstock.train.prepare.build_pipeline import make_pipeline
from penstock.train.prepare.prepare_run import Prepared, prepare
from penstock.train.setup.phase_plan import FALLBACK, SYNC
from support.combinations import PAGE, REFUSALS, answer, case_of, stated_on

CHANGES: Mapping[str, tuple[str, ...]] = {
    "resume": ("evaluate.every=2", "ema_decay=0.9", "checkpoint.every=2"),  # what no method refuses
    "clip": ("max_grad_norm=0.6",),
    "bf16": ("precision=bf16",),
    "tied": ("model.tied=true",),
    "recompute block": ("recompute=block",),
    "recompute stage": ("recompute=stage",),
    "width": ("width=2",),
    "combine": ("width=2", "combine.kind=average", "combine.every=2"),
    "delays": ("delays={layers.0: 2}",),
    "slices": ("options={slices: 2}",),
    "fallback": ("fallback.at=3", "fallback.batches=2", "fallback.when=[nonfinite]"),
    "sync": ("sync.batches=2",),
}
OPTIMIZERS = {
    "adamw": (),
    "nadam": ("optimizer.name=nadam",),
    "momentum": ("optimizer.name=sgd", "optimizer.nesterov=false"),
    "undecayed": ("optimizer.name=sgd", "optimizer.nesterov=false", "optimizer.weight_decay=0"),
}
_TEXT = "a text of no meaning, but of many letters\n" * 40


UNLIKE = {str(answers): method for method, answers in reversed(stated_on(PAGE.read_text()).items())}.values()
"""One method of each row of the page."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(_TEXT)
    return path


def changes_of(method: str, feature: str, data: Path) -> list[str]:
    case = case_of(method)
    small = ("batches=6", "microbatch_size=1", "model.layers=4", "model.width=8", "model.heads=2", "model.context=8")
    shape = (f"method={method}", f"stages={case.depth}", f"microbatches={case.m}", f"data={data}", "held_out=0.2")
    plain = () if answer(method, "clip") is None else ("max_grad_norm=null",)  # there is clipping by default
    return [*small, *shape, *plain, *OPTIMIZERS[case.optimizer], *CHANGES[feature]]


def built(prepared: Prepared) -> None:
    """All that a worker does before it trains."""
    pipeline = make_pipeline(prepared)
    for phase in (SYNC, FALLBACK):
        if phase in prepared.others:
            pipeline = make_pipeline(prepared)
            for other in ("main", phase, "main"):
                continue_under(pipeline, prepared.plan_of(other))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_sharded_updates_are_built_or_refused_before(optimizer: str, data: Path) -> None:
    changes = [*changes_of("2bw", "width", data), f"optimizer.name={optimizer}"]
    for level in ("optimizer", "gradients"):
        built(prepare(load_config(None, [*changes, f"sharding={level}", "fallback.at=3", "fallback.method=gpipe"])))
    flushing = changes_of("1f1b", "width", data)
    built(prepare(load_config(None, [*flushing, f"optimizer.name={optimizer}", "sharding=full", "precision=bf16"])))
    for wrong in ("sharding=full", "sharding=some", "sharding=optimizer width=1"):
        with pytest.raises(REFUSALS):
            prepare(load_config(None, [*changes, *wrong.split()]))


@pytest.mark.parametrize("feature", CHANGES)
@pytest.mark.parametrize("method", UNLIKE)
def test_what_cannot_be_built_is_refused_before(method: str, feature: str, data: Path) -> None:
    """With the same answer as in Python."""
    config = load_config(None, changes_of(method, feature, data))
    if answer(method, feature) is None:
        built(prepare(config))
        return
    with pytest.raises(REFUSALS):
        prepare(config)


def test_low_precision_is_refused_whatever_it_is(data: Path) -> None:
    with pytest.raises(REFUSALS, match="blends of two versions need fp32"):
        prepare(load_config(None, [*changes_of("i-timeprest", "resume", data), "precision=fp16"]))


@pytest.mark.parametrize(
    ("method", "feature", "message"),
    [
        ("seq1f1b", "recompute block", "seq1f1b: recompute='block' does not go with slices of sequences"),
        ("pipemare", "tied", "pipemare: correction 'pipemare' steps every stage in its own way"),
        ("spectrain", "combine", "combine 'average' is not supported with correction 'spectrain'"),
        ("zb-v", "sync", "sync.method: zb-v cannot be followed by 1f1b: they differ in stages"),
        ("2bw", "delays", "delays need version rule 'flush'"),
        ("i-timeprest", "recompute stage", "needs an order that places its own recomputes"),
    ],
)
def test_the_command_says_so_and_starts_nothing(
    method: str,
    feature: str,
    message: str,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("a process would be started")

    monkeypatch.setattr("penstock.launch.launch.launch_local", start)
    given = [part for change in changes_of(method, feature, data) for part in ("--set", change)]
    monkeypatch.setattr("sys.argv", ["penstock", "train", *given])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
