"""What a newcomer sees first: the README's code, the example, the public names."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import penstock
from penstock import ConfigError
from support.pool import Pool

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


CODE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def readme_names() -> dict[str, Any]:
    """What the README leaves to the reader."""
    torch.manual_seed(0)
    batches = [[(torch.randn(2, 4), torch.randn(2, 1)) for _ in range(4)] for _ in range(3)]
    loader = DataLoader(TensorDataset(torch.randn(24, 4), torch.randn(24, 1)), batch_size=8)
    return {"model": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), "batches": batches, "loader": loader}


def test_the_code_in_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(CODE) == 2
    monkeypatch.chdir(tmp_path)
    exec(compile(CODE[0], "README.md", "exec"), readme_names())
    assert (tmp_path / "trace.json").stat().st_size > 1000


class Model(nn.Module):
    """A model of one's own, whose parts the start page names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def code_on(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


class Transformer(nn.Module):
    """A model of one's own: tokens -> logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def make_loader() -> DataLoader[Any]:
    """Tokens, with the next ones as targets."""
    tokens = torch.randint(16, (24, 6), generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=8)


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """What the scripts of the start page import as `my_project`, in a folder of their own."""
    found = ModuleType("my_project")
    monkeypatch.setitem(sys.modules, "my_project", found)
    monkeypatch.chdir(tmp_path)
    return found


def run_first_script(group: dist.ProcessGroup | None, folder: str) -> tuple[list[str], bool]:
    """The first script of the start page, on this rank if there is a group: what it prints, and whether it saves."""
    code = code_on("start.md")[0].replace("dist.group.WORLD", "group").replace("dist.is_initialized()", "False")
    assert code.count("group=group") == 1
    project = ModuleType("my_project")
    project.Transformer, project.make_loader = Transformer, make_loader  # type: ignore[attr-defined]
    names = {"group": group}
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as printed:
        sys.modules["my_project"] = project
        try:
            exec(compile(code, "start.md", "exec"), names)
        finally:
            del sys.modules["my_project"]
    print(names["mean"], names["samples"], file=(said := io.StringIO()))
    return [*printed.getvalue().splitlines(), said.getvalue()], bool(names["weights"])


def test_the_first_script_of_the_start_page_runs(tmp_path: Path, pool: Pool) -> None:
    """In one process, and with a process per stage: the same losses, and weights that the whole model can load."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    alone, saved = run_first_script(None, str(tmp_path / "one"))
    assert saved
    assert len(alone) == 7  # two epochs of three batches, and the evaluation
    first, last = pool.submit(run_first_script, str(tmp_path / "two"), ranks=2)
    assert first == (alone[-1:], True)
    assert last == (alone, False)
    one, two = (torch.load(tmp_path / which / "transformer.pt") for which in ("one", "two"))
    assert list(one) == list(Transformer().state_dict())
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def test_the_second_script_of_the_start_page_runs(project: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """With a short last batch; examples/ compares such training with plain torch."""
    inputs = torch.randn(41, 4)
    project.dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))  # type: ignore[attr-defined]
    project.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))  # type: ignore[attr-defined]
    names: dict[str, Any] = {}
    exec(compile(code_on("start.md")[1], "start.md", "exec"), names)
    said = capsys.readouterr().out.splitlines()
    assert [line.rpartition(" of ")[2] for line in said[:-1]] == ["16 samples", "16 samples", "9 samples"] * 2
    assert [decision.batch for decision in names["decisions"]] == list(range(6))
    assert float(said[-1]) == max(decision.norm for decision in names["decisions"]) > 0
    with pytest.raises(ConfigError, match="no rate for update 8"):  # OneCycleLR has one after its last step
        list(names["pipeline"].run(names["loader"]))


def test_the_gpt2_of_the_start_page_is_trained_and_put_together(project: ModuleType) -> None:
    transformers = pytest.importorskip("transformers")
    tokens = torch.randint(16, (48, 6), generator=torch.Generator().manual_seed(3))
    project.dataset = TensorDataset(tokens[:, :-1], tokens[:, 1:])  # type: ignore[attr-defined]
    small = "GPT2LMHeadModel(transformers.GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=2, n_head=2))"
    code = code_on("start.md")[3].replace('GPT2LMHeadModel.from_pretrained("gpt2")', small)
    assert small in code
    names: dict[str, Any] = {"transformers": transformers}
    exec(compile(code, "start.md", "exec"), names)
    again = transformers.GPT2LMHeadModel.from_pretrained("trained")
    assert all(torch.equal(tensor, names["weights"][name]) for name, tensor in again.state_dict().items())
    assert again.lm_head.weight is again.transformer.wte.weight


def test_any_model_of_the_start_page_is_trained(capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install penstock[hf]")
    names: dict[str, Any] = {"penstock": penstock, "torch": torch, "F": nn.functional}
    names |= {name: getattr(transformers, name) for name in ("BertConfig", "BertForMaskedLM")}
    exec(compile(code_on("start.md")[4], "start.md", "exec"), names)
    assert 3 < float(capsys.readouterr().out) < 6


def test_the_other_code_of_the_start_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, blocks, _, options, _, resume, _ = code_on("start.md")  # others: above, below, test_shuffled_epochs.py
    monkeypatch.chdir(tmp_path)
    names = readme_names() | {"model": Model(), "loss": nn.functional.mse_loss, "penstock": penstock, "torch": torch}
    names |= {"batches": names["batches"] * 20, "validation_loader": names["loader"]}
    exec(compile(blocks, "start.md", "exec"), names)
    exec(compile(options, "start.md", "exec"), names)
    assert list(names["blocks"]) == [name for part in names["pipeline"].parts for name in part]
    assert len(list(names["pipeline"].run(names["loader"]))) == 3
    assert names["pipeline"].state_dict(averaged=True)
    assert "where the time went" in penstock.summary(names["pipeline"])
    names["pipeline"] = penstock.Pipeline(
        Model(),
        method="2bw",
        stages=2,
        microbatches=4,
        loss=nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
        example=next(iter(names["loader"]))[0],
    )
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(resume, "start.md", "exec"), names)
    assert re.fullmatch(r"held-out loss [\d.]+ after 50 batches\n", printed.getvalue())
    assert [path.name for path in (tmp_path / "runs/mine/checkpoints").iterdir()] == ["batch-00000060"]


def test_the_code_that_reads_metrics_takes_the_last_of_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a batch that was trained again, and no line that was cut."""
    file = tmp_path / "runs/FOLDER/metrics.jsonl"
    file.parent.mkdir(parents=True)
    lines = ['{"batch": 0, "loss": 3.0}', '{"update": 0, "loss": 3.0}', '{"batch": 1, "lo', '{"batch": 0, "loss": 2.0}']
    file.write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(code_on("start.md")[-1], "start.md", "exec"), names)
    assert names["losses"] == {0: 2.0}


def run_divided_block(group: dist.ProcessGroup | None, tensor_parallel: int) -> dict[str, torch.Tensor]:
    """Train blocks of the start page that divide themselves; returns the whole weights, on the first rank."""
    names: dict[str, Any] = {"torch": torch}
    exec(compile(code_on("start.md")[-3], "start.md", "exec"), names)
    torch.manual_seed(0)
    pipeline = penstock.Pipeline(
        [names["Mlp"](8) for _ in range(4)],
        method="1f1b",
        stages=2,
        microbatches=2,
        loss=nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=1.0),
        partition=penstock.Partition(tensor_parallel=tensor_parallel),
        group=group,
    )
    list(pipeline.run([(torch.randn(4, 8), torch.randn(4, 8))]))
    return dict(pipeline.full_state_dict())


def test_the_block_of_the_start_page_is_divided(pool: Pool) -> None:
    wanted, (found, *_) = run_divided_block(None, 1), pool.submit(run_divided_block, 2, ranks=4)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor)


def run_distributed_readme(group: dist.ProcessGroup, folder: str) -> str:
    """The README's script on this rank, after the parts of the first snippet that it builds on."""
    names = readme_names() | {"penstock": penstock, "group": group}
    names["loss"] = lambda output, target: (((output - target) ** 2).sum(), target.numel())
    names["optimizer"] = lambda named: torch.optim.AdamW(named, lr=1e-3)
    code = CODE[1].replace('dist.init_process_group("gloo")\n', "").replace("dist.group.WORLD", "group")
    assert code.count("group") == 4
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), names)
    return printed.getvalue()


def test_the_distributed_code_in_the_readme_runs(tmp_path: Path, pool: Pool) -> None:
    printed = pool.submit(run_distributed_readme, str(tmp_path), ranks=2)
    assert printed[0] == ""
    assert [line.split()[0] for line in printed[1].splitlines()] == ["0", "1", "2"]


def test_the_example_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = (ROOT / "examples" / "any_blocks.py").read_text()
    assert len(source.splitlines()) <= 60
    short = tmp_path / "any_blocks.py"
    short.write_text(source.replace("= 4, 8, 16, 60", "= 4, 8, 16, 40"))
    runpy.run_path(str(short))
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert len(losses) == 4  # two methods, at batches 20 and 40
    assert losses[1] < losses[0]
    assert losses[3] < losses[2]


def test_every_public_name_is_there_and_described() -> None:
    for name in penstock.__all__:
        thing = getattr(penstock, name)
        assert thing.__doc__, name
    assert set(penstock.__all__) <= set(dir(penstock))
    with pytest.raises(AttributeError, match="No penstock attribute nothing"):
        _ = penstock.nothing


def test_schedules_need_no_torch() -> None:
    code = (
        "import sys, penstock\n"
        "schedule = penstock.make_schedule('2bw', 4, 4)\n"
        "schedule.simulate()\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_make_targets_of_the_readme_exist() -> None:
    targets = set(re.findall(r"^make ([a-z-]+)", README, re.MULTILINE))
    assert targets == {"train", "test"}
    for target in targets:
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_the_files_that_the_readme_names_exist() -> None:
    named = set(re.findall(r"`([\w/]+\.(?:md|py))`", README)) | set(re.findall(r"\]\(([^)]+)\)", README))
    assert {"docs/design.md", "docs/2bw.svg"} <= named
    assert [name for name in named if not (ROOT / name).exists()] == ["my_script.py"] * ("my_script.py" in named)
