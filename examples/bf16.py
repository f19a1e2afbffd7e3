"""Passes in bfloat16, weights and optimizer in float32: `python examples/bf16.py`.

Weights are cast once per version, not in every operation as by autocast; gradients are added up, and the loss is
computed, in float32.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import penstock


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))


def make_loader() -> DataLoader:
    inputs = torch.randn(320, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs.sin().sum(1, keepdim=True)), batch_size=16)


def main() -> tuple[list[float], dict[str, torch.Tensor]]:
    pipeline = penstock.Pipeline(
        make_model(),  # in float32
        method="1f1b",
        stages=2,
        microbatches=4,
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
        precision="bf16",
    )
    losses = [report.loss for report in pipeline.run(make_loader())]
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return losses, pipeline.full_state_dict()  # in float32, too


if __name__ == "__main__":
    main()
