"""Train any list of blocks through a pipeline, in one process, in sixty lines.

Run it with `python examples/any_blocks.py`. For one process per stage, start it under torchrun, initialise
torch.distributed with gloo, and pass `group=torch.distributed.group.WORLD` to Pipeline: nothing else changes.
"""

import torch
from rich.console import Console
from torch import nn

import penstock

STAGES = 4  # d, ranks of the pipeline; each holds one stage
MICROBATCHES = 8  # m, per batch, that is per update
BATCHES = 60
SIZE = 16  # samples per microbatch

torch.manual_seed(0)
console = Console()


class Residual(nn.Module):  # a block takes what the block before it returned: a tensor here, any pytree in general
    def __init__(self, width: int) -> None:
        super().__init__()
        wide, narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.inner = nn.Sequential(nn.LayerNorm(width), wide, nn.GELU(), narrow)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def make_blocks():  # cut into stages by cost, or by `balance=[2, 2, 2, 2]`
    torch.manual_seed(0)
    return [nn.Linear(8, 32), *(Residual(32) for _ in range(6)), nn.Linear(32, 1)]


teacher = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)).requires_grad_(False)


def batches():  # any iterable; a batch is a sequence of m pairs (input, target)
    for _ in range(BATCHES):
        inputs = torch.randn(MICROBATCHES, SIZE, 8)
        yield [(x, teacher(x)) for x in inputs]


def loss(output, target):  # (sum, weight): the update takes the weighted mean over the whole batch
    return ((output - target) ** 2).sum(), target.numel()


# A schedule from the method table ("2bw": no flush; every batch reads the weights of one update ago) ...
schedule = penstock.make_schedule("2bw", stages=STAGES, microbatches=MICROBATCHES)
predicted = penstock.simulate_schedule(schedule, penstock.Costs.uniform(schedule, 1.0, 1.0, 1.0), batches=2)
console.print(penstock.draw_timeline(predicted.timeline, console.width), soft_wrap=True)


# ... or from a function of your own: the passes of every rank, here GPipe's. It is proven before it runs.
def my_order(stages, microbatches):
    forwards, backwards = ([f"{op}{k}" for k in range(microbatches)] for op in "FB")
    return [forwards + backwards for _ in range(stages)]


for plan in (schedule, penstock.make_schedule(my_order, STAGES, MICROBATCHES)):
    pipeline = penstock.Pipeline(
        make_blocks(),
        plan,
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=3e-3),
        divisor=MICROBATCHES * SIZE,
    )
    for report in pipeline.run(batches()):
        if report.batch % 20 == 19:
            console.print(f"{plan.name}: batch {report.batch + 1}, loss {report.loss:.4f}")
    console.print(f"peak bytes of rank 0: {pipeline.peak_bytes()[0]}")
