"""The examples, each next to the same training in plain torch: the same numbers, to the bit where rounding allows."""

from __future__ import annotations

import copy
import fcntl
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).parents[2]
M = 4  # microbatches, in all of them
Loss = Callable[[Tensor, Tensor], Tensor]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def example(name: str) -> dict[str, Any]:
    """What the file of an example defines; its main is not called."""
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"))


def accumulate(model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor) -> float:
    """Add up the gradients of a batch's mean over its microbatches, as everybody does; return the mean."""
    model.zero_grad()
    total = 0.0
    for x, y in zip(inputs.tensor_split(M), targets.tensor_split(M), strict=True):
        share = loss(model(x), y) * (len(x) / len(inputs))
        share.backward()
        total += share.item()
    return total


def train_2bw(
    model: nn.Module, loss: Loss, batches: Iterable[tuple[Tensor, Tensor]], optimizer: torch.optim.Optimizer
) -> list[float]:
    """PipeDream-2BW's equation: the gradient of batch t is taken at W(t-1), and changes W(t)."""
    parameters, losses = list(model.parameters()), []
    older = [p.detach().clone() for p in parameters]
    for inputs, targets in batches:
        newest = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for p, w in zip(parameters, older, strict=True):
                p.copy_(w)
        losses.append(accumulate(model, loss, inputs, targets))
        with torch.no_grad():
            for p, w in zip(parameters, newest, strict=True):
                p.copy_(w)
        optimizer.step()
        older = newest
    return losses


def assert_same(found: dict[str, Tensor], model: nn.Module) -> None:
    """Every bit."""
    wanted = model.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def assert_close(found: dict[str, Tensor], model: nn.Module) -> None:
    wanted = model.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


def losses_in(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^batch \d+: loss ([\d.]+)", printed, re.MULTILINE)]


# --- 1, 2: a Transformer of one's own, under 2bw ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def transformer() -> tuple[nn.Module, list[float]]:
    """In plain torch."""
    names = example("transformer")
    torch.manual_seed(0)
    model = names["Transformer"]()
    losses = train_2bw(model, names["loss"], names["make_loader"](), torch.optim.AdamW(model.parameters(), lr=3e-3))
    return model, losses


@pytest.mark.slow
def test_the_transformer_learns_what_plain_torch_does(
    transformer: tuple[nn.Module, list[float]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    plain, losses = transformer
    model = example("transformer")["main"]()
    assert_same(model.state_dict(), plain)
    assert_same(torch.load("transformer.pt"), plain)
    assert losses_in(capsys.readouterr().out) == [round(loss, 4) for loss in losses]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.long
@pytest.mark.processes
def test_under_torchrun_the_transformer_has_the_same_bits(
    transformer: tuple[nn.Module, list[float]], tmp_path: Path
) -> None:
    plain, losses = transformer
    command = [sys.executable, *TORCHRUN, ROOT / "examples" / "transformer.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environment())
    assert done.returncode == 0, done.stderr
    assert losses_in(done.stdout) == [round(loss, 4) for loss in losses]
    assert_same(torch.load(tmp_path / "transformer.pt"), plain)


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


# --- 3 to 6: a scheduler, clipping, low precision, a short batch ------------------------------------------------------


def test_one_cycle_sets_rates_and_momentum_as_in_plain_torch() -> None:
    names = example("one_cycle")
    losses, weights = names["main"]()
    model = names["make_model"]()
    optimizer = names["make_optimizer"](list(model.named_parameters()))
    scheduler, wanted = names["make_scheduler"](optimizer), []
    for _ in range(names["EPOCHS"]):
        for inputs, targets in names["make_loader"]():
            wanted.append(accumulate(model, F.mse_loss, inputs, targets))
            optimizer.step()
            scheduler.step()
    assert losses == pytest.approx(wanted, rel=1e-6)
    assert_same(weights, model)


def test_clipping_is_that_of_plain_torch() -> None:
    names = example("clipping")
    decisions, weights = names["main"]()
    model, wanted = names["make_model"](), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for inputs, targets in names["make_loader"]():
        loss = accumulate(model, F.mse_loss, inputs, targets)
        norm = nn.utils.clip_grad_norm_(model.parameters(), names["MAX_NORM"])
        optimizer.step()
        wanted.append((loss, norm.item()))
    assert [d.batch for d in decisions] == list(range(20))
    torch.testing.assert_close([(d.loss, d.norm) for d in decisions], wanted, rtol=1e-5, atol=1e-6)
    assert_close(weights, model)
    assert max(d.norm for d in decisions) > names["MAX_NORM"]


def test_bf16_casts_once_and_keeps_float32() -> None:
    names = example("bf16")
    losses, weights = names["main"]()
    model, wanted = names["make_model"](), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for inputs, targets in names["make_loader"]():
        low = copy.deepcopy(model).bfloat16()
        gradients, total = [torch.zeros_like(p) for p in model.parameters()], 0.0
        for x, y in zip(inputs.tensor_split(M), targets.tensor_split(M), strict=True):
            low.zero_grad()
            share = F.mse_loss(low(x.bfloat16()).float(), y) / M
            share.backward()
            total += share.item()
            for gradient, p in zip(gradients, low.parameters(), strict=True):
                gradient += p.grad.float()
        for gradient, p in zip(gradients, model.parameters(), strict=True):
            p.grad = gradient
        optimizer.step()
        wanted.append(total)
    assert losses == pytest.approx(wanted, rel=1e-6)
    assert_same(weights, model)


def test_a_short_last_batch_is_that_of_plain_torch(capsys: pytest.CaptureFixture[str]) -> None:
    names = example("short_batch")
    losses, weights = names["main"]()
    model, wanted = names["make_model"](), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for samples, count in ((73, 5), (35, 2)):
        for inputs, targets in list(names["make_loader"](samples))[:count]:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)  # of the whole batch
            loss.backward()
            optimizer.step()
            wanted.append(loss.item())
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert_close(weights, model)
    printed = capsys.readouterr().out
    assert "after 7 batches: batch 7 has 3 samples, too few for 4 microbatches" in printed
    assert re.search(r"^batch 4: loss [\d.]+ of 9 samples$", printed, re.MULTILINE)


# --- 7: killed and resumed --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Which is what plain torch has trained."""
    names = example("resume")
    weights: dict[str, Tensor] = names["main"](tmp_path_factory.mktemp("undisturbed"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    loader = names["make_loader"]()
    batches = [batch for _ in range(names["EPOCHS"]) for batch in loader]
    train_2bw(model, F.mse_loss, batches, torch.optim.AdamW(model.parameters(), lr=1e-2))
    assert_same(weights, model)
    return weights


@pytest.fixture
def killed(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The folder of a run one of whose processes was killed in its 25th batch, or soon after."""
    launcher = TORCHRUN if request.param == "worker" else []
    command = [sys.executable, *launcher, ROOT / "examples" / "resume.py", tmp_path]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    assert process.stdout is not None
    try:
        fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)  # so that it cannot be done before it is killed
        reached = next((line for line in process.stdout if line.startswith("batch 24:")), "")
        assert reached
        victim = psutil.Process(process.pid)
        (victim.children()[0] if launcher else victim).kill()
        process.communicate(timeout=60)
        assert process.returncode
        yield tmp_path
    finally:
        process.kill()
        process.wait()


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("killed", ["job", "worker"], indirect=True)
def test_a_killed_run_goes_on_to_the_same_bits(
    killed: Path, undisturbed: dict[str, Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    weights = example("resume")["main"](killed)
    first = int(re.findall(r"^batch (\d+):", capsys.readouterr().out, re.MULTILINE)[0])
    assert first >= 10  # the checkpoint after 20 batches may have been under way, not the one before
    assert first % 10 == 0
    assert weights.keys() == undisturbed.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in undisturbed.items())


# --- 8: a model of transformers ---------------------------------------------------------------------------------------


def train_gpt2(names: dict[str, Any], *, copies: bool) -> tuple[nn.Module, list[float]]:
    """In plain torch; with two copies of the shared parameter, whose gradients are added up once for a whole batch."""
    model, losses = names["make_model"](), []
    embedding, head = model.transformer.wte, model.lm_head
    if copies:
        head.weight = nn.Parameter(embedding.weight.detach().clone())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for inputs, targets in names["make_loader"]():
        losses.append(accumulate(model, lambda x, y: names["loss"](x, y), inputs, targets))
        if copies:
            embedding.weight.grad += head.weight.grad
            head.weight.grad = embedding.weight.grad.clone()
        optimizer.step()
    return model, losses


@pytest.mark.long
def test_a_tied_gpt2_comes_back_as_plain_torch_trains_it() -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install penstock[hf]")
    names = example("gpt2")
    found, (equal, _), (usual, losses) = names["main"](), *(train_gpt2(names, copies=c) for c in (True, False))
    assert losses[-1] < 0.7 * losses[0]
    assert found.lm_head.weight is found.transformer.wte.weight
    assert_same(found.state_dict(), equal)
    inputs, _ = next(iter(names["make_loader"]()))
    with torch.no_grad():
        logits = [model(inputs).logits for model in (found, equal, usual)]
    assert torch.equal(logits[0], logits[1])
    torch.testing.assert_close(logits[0], logits[2], rtol=1e-3, atol=1e-4)  # where sums are rounded otherwise
