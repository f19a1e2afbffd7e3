"""Killed at any moment, it goes on from its last checkpoint when it is started again, to the same bits.

python examples/resume.py runs/mine
torchrun --nproc-per-node 2 examples/resume.py runs/mine
"""

import itertools
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import penstock

EPOCHS = 20


def make_loader() -> DataLoader:
    generator = torch.Generator().manual_seed(1)  # the same order on every rank, and after every start
    inputs = torch.randn(320, 8, generator=generator)
    dataset = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
    return DataLoader(dataset, batch_size=16, shuffle=True, generator=generator)


def main(folder: Path) -> dict[str, torch.Tensor]:
    if dist.is_torchelastic_launched():  # by torchrun
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    pipeline = penstock.Pipeline(
        nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)),
        method="2bw",
        stages=2,
        microbatches=4,
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
        group=dist.group.WORLD,  # None without torchrun
    )
    checkpoints = penstock.Checkpoints(pipeline, folder)
    checkpoints.load()
    loader = make_loader()
    batches = itertools.chain.from_iterable(loader for _ in range(EPOCHS))
    rest = itertools.islice(batches, pipeline.batches, None)  # what it has not been trained on
    for report in pipeline.run(rest, save=checkpoints.every(10)):
        if report.loss is not None:
            print(f"batch {report.batch}: loss {report.loss:.4f}", flush=True)
    checkpoints.save()
    weights = pipeline.full_state_dict()
    if dist.is_initialized():
        dist.destroy_process_group()
    return weights


if __name__ == "__main__":
    main(Path(sys.argv[1]))
