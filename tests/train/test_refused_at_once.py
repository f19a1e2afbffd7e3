"""`penstock train` says what is wrong before it proves a schedule, let alone searches for a legal one."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from penstock import cli
from penstock.compare.config import comparison_config
from penstock.compare.prepared_contender import prepare_contender
from penstock.compare.run import text_task
from penstock.errors import ConfigError, PenstockError
from penstock.models.gpt import gpt_blocks
from penstock.models.gpt_shape import count_blocks, preset
from penstock.options.all_options import PipelineOptions
from penstock.schedule import add_options, build
from penstock.train.config.load import load_config
from penstock.train.config.schema import TrainConfig
from penstock.train.data.corpus import load_corpus
from penstock.train.prepare import phase_schedules, prepare_run
from penstock.train.prepare.prepare_run import prepare
from penstock.train.setup.model_shape import model_of, model_shape
from penstock.train.setup.pipeline_options import pipeline_options
from penstock.verify.verify import verify
from support.own_methods import chosen


@pytest.fixture(autouse=True)
def unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever proves a schedule fails the test."""

    def check(*_: object) -> None:
        raise AssertionError("a schedule was proven")

    for module in (build, add_options):
        monkeypatch.setattr(module, "check", check)


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    return f"data={path}"


WRONG = [
    (["stages=100"], "the model has 6 blocks, which cannot be cut into 100 stages; use fewer stages"),
    (["stages=6", "method=interleaved"], "the model has 6 blocks, which cannot be cut into 12 stages"),
    (["balance=[6]"], "must hold 6 positive numbers that add up to the model's 6 blocks"),
    (
        ["options.in_flight=auto", "recompute=auto", "memory_limit=2e9"],
        "recompute=auto fills memory_limit before it is known how many microbatches in flight",
    ),
    (["in_flight_bytes=2e9"], "in_flight_bytes limits what options.in_flight=auto takes; set that, or leave it out"),
    (
        ["method=1f1b", "options.in_flight=auto", "delays=2"],
        "in_flight='auto' does not go with delays of your own choice",
    ),
    (["method=gpipe", "options.in_flight=auto"], "method gpipe does not take in_flight='auto': it has all"),
    (["segments=2"], "segments=2 is for recompute='stage'"),
    (["recompute=stage", "segments=7"], "from 1 to 6 here"),
    (["delays=2"], "delays need version rule 'flush'"),
    (
        ["combine.kind=average"],
        "combine=average needs parallel pipelines; set data_parallel",
    ),
    (["combine.kind=average", "width=2", "ema_decay=0.9"], "ema_decay=0.9 and combine=average do not go together"),
    (["combine.kind=average", "width=2", "combine.every=7"], "batches is 1000, but with combine.kind=average"),
    (["method=pipemare", "model.tied=true"], "correction 'pipemare' steps every stage in its own way"),
    ([chosen("wpipe"), "stages=3", "max_grad_norm=1"], "wait for a decision of all stages, which max_grad_norm needs"),
    ([chosen("ftpipe"), "optimizer.name=muon"], "supports SGD with momentum, Adam and AdamW, not Muon"),
    (["undo=in-place"], "method '2bw' never takes an update back"),
    (["sync.batches=3", "sync.method=stash"], "sync.method must be synchronous"),
    (["sync.batches=3", "sync.method=zb-v"], "sync.method: 2bw cannot be followed by zb-v: they differ in stages"),
    (
        ["fallback.when=[spike]", "max_grad_norm=null"],
        "a divergence is noticed where all",
    ),
    (
        ["evaluate.every=5", "evaluate.patience=2", "max_grad_norm=null"],
        "evaluate.patience needs stages that decide together",
    ),
    (["prompt="], "prompt must not be empty"),
]


NO_GPU = [
    (["cuda_graphs=true"], "cuda_graphs takes a GPU, but ranks compute on cpu; leave cuda_graphs out"),
    (["device=cuda"], "device is 'cuda', but torch sees no GPU here"),
    (["sdpa=cudnn"], "sdpa=cudnn is a backend of GPUs, but ranks compute on the CPU"),
]


@pytest.mark.parametrize(("changes", "message"), NO_GPU)
def test_what_takes_a_gpu_is_refused_before_processes_start(
    changes: list[str], message: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=message):
        prepare(load_config(None, ["stages=2", "model.layers=2", text, *changes]), local=True)


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_what_is_wrong_is_said_before_a_proof(changes: list[str], message: str, text: str) -> None:
    """Of 6 stages with 2 microbatches, which are too few for most methods here."""
    small = ["stages=6", "microbatches=2", "microbatch_size=1", "model.layers=4", "model.context=8", "held_out=0.2"]
    with pytest.raises(PenstockError) as refused:
        prepare(load_config(None, [*small, text, *changes]))
    assert message in str(refused.value)


def test_the_command_says_at_once_that_there_are_too_few_blocks(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["penstock", "train", "--set", "stages=100", "--set", text])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "which cannot be cut into 100 stages" in " ".join(capsys.readouterr().err.split())


def test_the_text_is_not_read_for_a_model_of_too_few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[object] = []
    monkeypatch.setattr(prepare_run, "load_corpus", lambda *given: reads.append(given))
    monkeypatch.setattr(phase_schedules, "UnprovenPlan", None)
    with pytest.raises(ConfigError, match=r"6 blocks, .* 100 stages.*or set model\.layers to at least 98"):
        prepare(load_config(None, ["method=2bw", "stages=100", "microbatches=100"]))
    assert not reads


def test_nor_is_torch_imported() -> None:
    """Which takes most of the time until the command says so; schedules that are arrays need numpy."""
    script = """
        import sys
        from penstock import cli
        sys.argv = ["penstock", "train", "2bw", "--stages", "100", "--microbatches", "100"]
        try:
            cli.main()
        finally:
            print(*(name for name in ("torch", "scipy") if name in sys.modules))
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2, ended.stderr
    assert "6 blocks" in ended.stderr
    assert not ended.stdout.strip()


@pytest.mark.long
def test_nor_is_the_compiler_of_torch_for_a_run_that_can_start(text: str) -> None:
    """The first optimizer of a process imports it, which takes a second; the fork server has done so for workers."""
    script = f"""
        import sys
        from penstock.train.config.load import load_config
        from penstock.train.prepare.prepare_run import prepare
        prepare(load_config(None, ["stages=2", {text!r}]), local=True)
        print(*(name for name in ("torch", "torch._dynamo") if name in sys.modules))
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.stdout.split() == ["torch"], ended.stderr


def test_blocks_are_counted_as_they_are_made() -> None:
    for layers in (1, 5):
        shape = preset("tiny", layers=layers)
        assert count_blocks(shape) == len(gpt_blocks(shape, seed=0))


def test_a_verification_has_no_links_to_ask(text: str) -> None:
    with pytest.raises(ConfigError, match="in_flight=auto: verify trains in one process, where there are no links"):
        verify(load_config(None, [text, "options.in_flight=auto"]), 2)


@pytest.mark.parametrize("method", ["2bw", "2bw:sync=2"])
def test_a_comparison_says_so_at_once(method: str, text: str) -> None:
    config = comparison_config([text, "stages=8", "model.layers=2", "model.context=8", f"methods={method}"], {})
    with pytest.raises(ConfigError, match=f"{method}: the model has 4 blocks, which cannot be cut into 8 stages"):
        prepare_contender(config, method, text_task(config, Path("nowhere")))


def test_a_key_with_the_name_of_an_option_is_that_option(text: str) -> None:
    changes = {
        "width": "2", "reduce": "fast", "precision": "bf16", "recompute": "stage", "segments": "auto",
        "max_grad_norm": "0.5", "ema_decay": "0.9", "seed": "3", "balance": "[3, 3]", "timeout": "7.5",
        "delays": "{head: 1}", "backward_delays": "2", "device": "cpu", "waits": "shared", "boundary_gradients": "bf16",
        "tf32": "true", "sdpa": "math", "compile": "true", "in_flight_bytes": "2e9", "sharding": "optimizer",
        "microbatches": "6", "offload": "activations", "tensor_parallel": "2", "cuda_graphs": "true",
        "offload_optimizer": "pieces", "rank_order": "tp-dp-pp",
    }  # fmt: skip
    config = load_config(None, [text, *(f"{key}={value}" for key, value in changes.items())])
    options = pipeline_options(config, model_of(config, model_shape(config, load_corpus(config.data))))
    found = {name: value for group in vars(options).values() for name, value in vars(group).items()}
    assert {key: found[key] for key in changes} == {key: getattr(config, key) for key in changes}
    named = {"combine", "correction", "cut"}  # whose values are of another kind; the last goes without balance
    assert PipelineOptions.names() & TrainConfig.model_fields.keys() == changes.keys() | named
