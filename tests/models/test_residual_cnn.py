"""The residual network, and that it trains alike however it is cut."""

import pytest
import torch

from penstock.errors import ConfigError
from penstock.models.residual_cnn import CNNConfig, class_loss, count_correct, residual_cnn_blocks
from penstock.runtime.pipeline import Pipeline
from support.schedules import make_schedule

CONFIG = CNNConfig(layers=6, width=8)


def batches(count=2, microbatches=8):
    generator = torch.Generator().manual_seed(1)
    return [
        [
            (torch.randn(2, 1, 8, 8, generator=generator), torch.randint(10, (2,), generator=generator))
            for _ in range(microbatches)
        ]
        for _ in range(count)
    ]


def train(method, stages):
    pipeline = Pipeline(
        residual_cnn_blocks(CONFIG, seed=3),
        make_schedule(method, stages, 8),
        loss=class_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
    )
    losses = [report.loss for report in pipeline.run(batches())]
    return pipeline, losses, {name: tensor.clone() for name, tensor in pipeline.state_dict().items()}


@pytest.mark.long
@pytest.mark.parametrize("method", ["1f1b", "zb-h1"])
def test_eight_stages_train_what_one_does(method):
    whole, expected, weights = train("sequential", 1)
    pipeline, losses, found = train(method, 8)
    assert (len(whole.parts), len(pipeline.parts)) == (1, 8)
    assert losses == expected
    assert losses[1] != losses[0]
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_what_plain_torch_computes():
    """A whole batch at once in one model: no block looks at other images."""
    blocks = [block.make() for block in residual_cnn_blocks(CONFIG, seed=3).values()]
    x, target = (torch.cat(parts) for parts in zip(*batches()[0], strict=True))
    for block in blocks:
        x = block(x)
    total, weight = class_loss(x, target)
    assert (x.shape, weight) == ((16, 10), 16.0)
    assert float(total.detach()) / weight == pytest.approx(train("sequential", 1)[1][0], rel=1e-5)


def test_shapes_and_sizes():
    x, shapes = torch.zeros(3, 1, 8, 8), []
    for block in residual_cnn_blocks(CONFIG, seed=0).values():
        x = block.make()(x)
        shapes.append(tuple(x.shape[1:]))
    assert shapes == [*[(8, 8, 8)] * 4, *[(16, 4, 4)] * 3, (10,)]


def test_correct_answers_are_counted():
    assert count_correct(torch.tensor([[0.0, 2.0], [3.0, 1.0], [0.0, 1.0]]), torch.tensor([1, 1, 1])) == 2


@pytest.mark.parametrize("changes", [{"layers": 0}, {"width": 6}])
def test_shapes_that_cannot_be(changes):
    with pytest.raises(ConfigError, match=f"model.{next(iter(changes))}"):
        CNNConfig(**changes)
