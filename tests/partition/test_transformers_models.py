"""Whole models of `transformers` in several runs, between processes too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from support.pool import Pool

VOCABULARY, LENGTH = 16, 6


def make_model(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install penstock[hf]")
    torch.manual_seed(0)
    if kind == "GPT2":
        drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 8, "n_layer": 2, "n_head": 2}
        more = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False} | drops
    else:
        sizes = {
            "vocab_size": VOCABULARY,
            "hidden_size": 8,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "use_cache": False,
        }
        more = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = getattr(transformers, f"{kind}Config")(**sizes, **more)
    model: nn.Module = getattr(transformers, {"GPT2": "GPT2LMHeadModel"}.get(kind, f"{kind}ForCausalLM"))(config)
    return model


def loss(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def batches() -> list[tuple[Tensor, Tensor]]:
    tokens = torch.randint(VOCABULARY, (4, 4, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return [(row[:, :-1], row[:, 1:]) for row in tokens]


def make_pipeline(model: nn.Module, group: dist.ProcessGroup | None = None, method: str = "2bw") -> penstock.Pipeline:
    return penstock.Pipeline(
        model, method, stages=2, microbatches=2, loss=loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1), group=penstock.Group(group, 20.0),
        example=batches()[0][0],
    )  # fmt: skip


def train_twice_and_resume(group: dist.ProcessGroup | None, kind: str, method: str, folder: str) -> list[Any]:
    """Two runs with an evaluation in between; then what a process that starts again does, with a model that is stale.

    Returns the losses, where a process has them.
    """
    model, data = make_model(kind), batches()
    pipeline = make_pipeline(model, group, method)
    found: list[Any] = [report.loss for report in pipeline.run(data[:2])]
    found.append(pipeline.evaluate(data))
    found += [report.loss for report in pipeline.run(data[2:3])]
    penstock.Checkpoints(pipeline, folder).save()
    for other in (make_model(kind), model):
        resumed = make_pipeline(other, group, method)
        penstock.Checkpoints(resumed, folder).load()
        assert resumed.batches == 3
        found += [report.loss for report in resumed.run(data[3:])]
        found.append(resumed.evaluate(data))
    return found


@pytest.mark.long
@pytest.mark.parametrize(("kind", "method"), [pytest.param("GPT2", "2bw", marks=pytest.mark.long), ("Llama", "1f1b")])
def test_a_model_of_transformers_goes_on_between_processes(pool: Pool, tmp_path: Any, kind: str, method: str) -> None:
    """To the bits of one process."""
    pytest.importorskip("transformers", reason="needs transformers: pip install penstock[hf]")
    _, found = pool.submit(train_twice_and_resume, kind, method, str(tmp_path / "two"), ranks=2)
    assert found == train_twice_and_resume(None, kind, method, str(tmp_path / "one"))
    assert found[4:6] == found[6:8]


def test_a_model_whose_weights_are_no_numbers_any_more_is_not_said_to_have_changed() -> None:
    model = make_model("GPT2")
    pipeline = make_pipeline(model, method="1f1b")
    list(pipeline.run(batches()[:1]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    value, _ = pipeline.evaluate(batches())
    assert value != value
