"""A DataLoader whose last batch is short: `python examples/short_batch.py`.

Each batch is split into microbatches that differ by one sample at most, and a mean counts by its samples, so updates
are those of the whole batch. A batch of fewer samples than microbatches ends the run with an error, after all
batches before it have been trained on and reported; the pipeline goes on from there. `drop_last=True` leaves it out.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import penstock


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))


def make_loader(samples: int) -> DataLoader:
    inputs = torch.randn(samples, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs.sin().sum(1, keepdim=True)), batch_size=16)


def main() -> tuple[list[float], dict[str, torch.Tensor]]:
    pipeline = penstock.Pipeline(
        make_model(),
        method="1f1b",
        stages=2,
        microbatches=4,
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
    )
    reports = list(pipeline.run(make_loader(73)))  # 16, 16, 16, 16 and 9 samples: microbatches of 3, 2, 2 and 2
    try:
        for report in pipeline.run(make_loader(35)):  # 16, 16 and 3
            reports.append(report)
    except penstock.DataError as error:
        print(f"after {pipeline.batches} batches: {error}")
    for report in reports:
        print(f"batch {report.batch}: loss {report.loss:.4f} of {report.weight:g} samples")
    return [report.loss for report in reports], pipeline.full_state_dict()


if __name__ == "__main__":
    main()
