"""What only a GPU can show: that the pipeline's account of live bytes is that of the allocator."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from penstock.models.gpt import gpt_blocks, language_loss
from penstock.models.gpt_shape import GPTConfig
from penstock.options.passes import PrecisionName
from penstock.runtime.pipeline import Pipeline
from penstock.stage.autograd.recompute import RecomputeMode
from support.schedules import make_schedule

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

SHAPE = GPTConfig(layers=8, width=512, heads=8, context=256, vocabulary=4096)
WITHIN = 0.02


def make_batches(count: int, m: int) -> list[list[tuple[Tensor, Tensor]]]:
    shape = (8, SHAPE.context)
    return [[(torch.randint(4096, shape).cuda(), torch.randint(4096, shape).cuda()) for _ in range(m)]
            for _ in range(count)]  # fmt: skip


def temporaries(blocks: dict[str, nn.Module], batch: tuple[Tensor, Tensor], dtype: torch.dtype) -> int:
    """What plain torch takes during the backward of a microbatch besides what lives before it: no ledger knows that."""
    model = nn.Sequential(*deepcopy(blocks).values()).to(dtype)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for _ in range(2):  # the first pass makes the libraries' own workspaces
        total, weight = language_loss(model(batch[0]).float(), batch[1])
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        (total / weight).backward()
        torch.cuda.synchronize()
        found = torch.cuda.max_memory_allocated() - before
    return found


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("method", ["2bw", "1f1b", "stash"])
def test_the_ledger_is_the_allocators(method: str, precision: PrecisionName, recompute: RecomputeMode) -> None:
    """Both peaks over the same batches, but for what a backward takes for itself."""
    blocks = {name: block.make().cuda() for name, block in gpt_blocks(SHAPE, 0).items()}
    assert all(isinstance(block, nn.Module) for block in blocks.values())
    own = temporaries(blocks, make_batches(1, 1)[0][0], torch.bfloat16 if precision == "bf16" else torch.float32)
    pipeline = Pipeline(
        blocks,
        make_schedule(method, 1, 4),
        loss=language_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
        precision=precision,
        recompute=recompute,
    )
    list(pipeline.run(make_batches(2, 4)))
    data = make_batches(3, 4)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated() - sum(sum(kinds.values()) for kinds in pipeline.live_bytes().values())
    torch.cuda.reset_peak_memory_stats()
    list(pipeline.run(data))
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    ours = pipeline.peak_bytes()[0]["total"]
    assert ours <= peak * (1 + WITHIN)
    assert peak <= (ours + own) * (1 + WITHIN), (ours, own)
