"""Gradients clipped by their global norm, over all stages: `python examples/clipping.py`.

`max_grad_norm` clips as `torch.nn.utils.clip_grad_norm_` does. Every update is decided on by all stages, and comes as a
decision with its norm; decisions lag behind the losses, so those of the last batches come when the run is over.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import penstock

MAX_NORM = 0.5


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))


def make_loader() -> DataLoader:
    inputs = torch.randn(320, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs.sin().sum(1, keepdim=True)), batch_size=16)


def main() -> tuple[list[penstock.Decision], dict[str, torch.Tensor]]:
    pipeline = penstock.Pipeline(
        make_model(),
        method="1f1b",
        stages=2,
        microbatches=4,
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
        max_grad_norm=MAX_NORM,
    )
    decisions = [decision for report in pipeline.run(make_loader()) for decision in report.decided]
    decisions += pipeline.decided()
    for decision in decisions:
        print(f"batch {decision.batch}: loss {decision.loss:.4f}, norm {decision.norm:.4f}")
    return decisions, pipeline.full_state_dict()


if __name__ == "__main__":
    main()
