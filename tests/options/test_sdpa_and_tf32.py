"""Settings of torch for kernels hold while the passes of a pipeline run, not while its caller does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock import Pipeline, Precision
from penstock.errors import ConfigError
from penstock.options.sdpa_and_tf32 import Kernels
from penstock.train.config.schema import TrainConfig
from penstock.verify.verify import verify

Settings = tuple[str, str, str, bool, bool]


def settings() -> Settings:
    """Those of TF32, and whether attention may take the flash and the math backend."""
    backends: Any = torch.backends
    cuda, cudnn = backends.cuda, backends.cudnn
    products = cuda.matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision
    return *products, cuda.flash_sdp_enabled(), cuda.math_sdp_enabled()


class Noting(nn.Module):
    """Notes the settings under which its forward and its backward run."""

    def __init__(self, seen: list[Settings]) -> None:
        super().__init__()
        self.seen = seen
        self.map = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(settings())
        y: Tensor = self.map(x)
        if y.requires_grad:
            y.register_hook(lambda _: self.seen.append(settings()))  # type: ignore[no-untyped-call]
        return y


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.maps(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


def make(precision: Any, blocks: list[nn.Module], stages: int = 2) -> Pipeline:
    def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(named, lr=0.1)

    return Pipeline(
        blocks, method="1f1b", stages=stages, microbatches=2, loss=F.mse_loss, optimizer=sgd, precision=precision
    )


@pytest.mark.parametrize("tf32", [True, False])
def test_passes_run_under_them_and_the_caller_does_not(tf32: bool) -> None:
    before, seen, here = settings(), list[Settings](), list[Settings]()
    inside = *("tf32" if tf32 else "ieee",) * 3, False, True
    assert inside != before
    pipeline = make(Precision(tf32=tf32, sdpa="math"), [Noting(seen), Noting(seen)])
    data = [(torch.ones(4, 4), torch.ones(4, 4))] * 3

    def batches() -> Any:
        yield from ((x.clone(), y.clone()) for x, y in data)

    here += [settings() for _ in pipeline.run(batches())]
    assert pipeline.evaluate(data[:1]) is not None
    assert here == [before] * 3
    assert set(seen) == {inside}
    assert len(seen) == 2 * 2 * (2 * 3 + 1)
    assert settings() == before


def test_they_are_taken_back_after_an_error() -> None:
    before = settings()

    def fails(_: Tensor) -> Tensor:
        raise ArithmeticError

    pipeline = make(Precision(tf32=True, sdpa="math"), [nn.Linear(4, 4), fails])  # type: ignore[list-item]
    with pytest.raises(ArithmeticError):
        list(pipeline.run([(torch.ones(4, 4), torch.ones(4, 4))]))
    assert settings() == before


def test_two_pipelines_in_turns_have_their_own() -> None:
    seen: tuple[list[Settings], list[Settings]] = ([], [])
    pipelines = [make(Precision(tf32=tf32), [Noting(seen[tf32]), Noting(seen[tf32])]) for tf32 in (False, True)]
    data = [(torch.ones(4, 4), torch.ones(4, 4)) for _ in range(3)]
    for _ in zip(*(pipeline.run(data) for pipeline in pipelines), strict=True):
        pass
    assert {products[0] for products in seen[False]} == {"ieee"}
    assert {products[0] for products in seen[True]} == {"tf32"}


def test_attention_has_the_bits_of_its_backend() -> None:
    """The loss is that of torch under the same backend."""
    data = [(torch.randn(4, 64, 16), torch.randn(4, 64, 16))]
    for name in ("math", "flash"):
        torch.manual_seed(0)
        blocks = [Attention(), Attention()]
        with Kernels(sdpa=name).applied():  # type: ignore[arg-type]
            halves = [blocks[1](blocks[0](x)) for x in data[0][0].chunk(2)]
        losses = [F.mse_loss(half, y).item() for half, y in zip(halves, data[0][1].chunk(2), strict=True)]
        (report,) = make(Precision(sdpa=name), blocks).run(data)  # type: ignore[arg-type]
        assert report.loss is not None
        assert report.loss == pytest.approx(sum(losses) / 2, rel=1e-7)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tf32": "yes"}, "tf32 must be True, False, or None .* got 'yes'"),
        ({"sdpa": "fast"}, "sdpa must be one of flash, efficient, cudnn, math, or None .* got 'fast'"),
    ],
)
def test_what_is_no_setting_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Precision(**given)


def test_a_backend_of_gpus_is_refused_on_the_cpu() -> None:
    with pytest.raises(ConfigError, match="sdpa=cudnn is a backend of GPUs, but ranks compute on the CPU"):
        make(Precision(sdpa="cudnn"), [nn.Linear(4, 4), nn.Linear(4, 4)])


def test_keys_of_penstock_train_are_verified_under_their_settings() -> None:
    """The reference and plain torch run under them, too."""
    small = {"layers": 2, "width": 16, "heads": 2, "context": 8}
    config = TrainConfig(method="1f1b", stages=2, microbatches=2, batches=2, sdpa="math", tf32=True, model=small)
    assert verify(config, 2).agrees
