"""A learning-rate scheduler of torch, and parameter groups: `python examples/one_cycle.py`.

`lr_scheduler` makes one for each stage. Nobody steps it: it sets the rate and the momentum of every update.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

import penstock

EPOCHS, BATCHES = 2, 20  # batches of an epoch


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))


def make_loader() -> DataLoader:
    inputs = torch.randn(16 * BATCHES, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs.sin().sum(1, keepdim=True)), batch_size=16)


def make_optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    weights, biases = [p for name, p in named if "bias" not in name], [p for name, p in named if "bias" in name]
    groups = [{"params": weights, "weight_decay": 1e-2}, {"params": biases, "weight_decay": 0.0}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def make_scheduler(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, max_lr=[0.1, 0.2], total_steps=EPOCHS * BATCHES)  # a rate for each group


def main() -> tuple[list[float], dict[str, torch.Tensor]]:
    pipeline = penstock.Pipeline(
        make_model(),
        method="1f1b",
        stages=2,
        microbatches=4,
        loss=F.mse_loss,
        optimizer=make_optimizer,
        lr_scheduler=make_scheduler,
    )
    losses = []
    for epoch in range(EPOCHS):
        losses += [report.loss for report in pipeline.run(make_loader())]
        print(f"epoch {epoch}: loss {losses[-1]:.4f}")
    return losses, pipeline.full_state_dict()


if __name__ == "__main__":
    main()
