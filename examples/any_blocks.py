"""Train any list of blocks through a pipeline of four stages in this process: `python examples/any_blocks.py`.

One process per stage: under torchrun, call torch.distributed.init_process_group("gloo") at the start and pass
Pipeline(group=torch.distributed.group.WORLD); every rank runs all of this, and the numbers stay the same.
"""

import torch
from rich.console import Console
from torch import nn

import penstock

STAGES, MICROBATCHES, SIZE, BATCHES = 4, 8, 16, 60  # SIZE samples per microbatch, MICROBATCHES per update
torch.manual_seed(0)
console = Console()


class Residual(nn.Module):  # a block takes the output of the previous block: a tensor here, any pytree in general
    def __init__(self, width: int) -> None:
        super().__init__()
        wide, narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.inner = nn.Sequential(nn.LayerNorm(width), wide, nn.GELU(), narrow)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


teacher = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)).requires_grad_(False)


def batches():  # any iterable; a batch is a sequence of m pairs (input, target)
    for _ in range(BATCHES):
        yield [(x, teacher(x)) for x in torch.randn(MICROBATCHES, SIZE, 8)]


def loss(output, target):  # (sum, weight): the update takes the weighted mean over the whole batch
    return ((output - target) ** 2).sum(), target.numel()


def my_order(stages, microbatches):  # an order of your own: the passes of every rank, here GPipe's
    forwards, backwards = ([f"{op}{k}" for k in range(microbatches)] for op in "FB")
    return [forwards + backwards for _ in range(stages)]


# A schedule is proven before anything runs: complete, free of deadlock, every pass on the weights its rule names.
for method in ("2bw", my_order):
    torch.manual_seed(1)
    schedule = penstock.make_schedule(method, STAGES, MICROBATCHES)
    predicted = schedule.simulate(batches=2)
    console.print(penstock.draw_timeline(predicted.timeline, console.width), soft_wrap=True)
    pipeline = penstock.Pipeline(
        [nn.Linear(8, 32), *(Residual(32) for _ in range(6)), nn.Linear(32, 1)],  # cut by cost; or partition=[2, ...]
        schedule,
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=3e-3),  # one per stage
    )
    for report in pipeline.run(batches()):
        if report.batch % 20 == 19 and report.loss is not None:  # only the last stage reports it
            console.print(f"{schedule.name}: batch {report.batch + 1}, loss {report.loss:.4f}")
    console.print(f"peak bytes of each rank here: {pipeline.peak_bytes()}")
