"""The task of images: the residual network trains alike however it is cut, and a comparison may have it."""

import pytest
import torch
from benchmarks.digits import Images, digits_of
from benchmarks.residual_cnn import CNNConfig, class_loss, residual_cnn_blocks

from penstock.compare.config import comparison_config
from penstock.compare.run import ComparisonRun
from penstock.errors import ConfigError
from penstock.runtime.pipeline import Pipeline
from support.comparisons import TINY, Quiet
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


@pytest.mark.parametrize("changes", [{"layers": 0}, {"width": 6}])
def test_shapes_that_cannot_be(changes):
    with pytest.raises(ConfigError, match=f"model.{next(iter(changes))}"):
        CNNConfig(**changes)


def test_a_comparison_of_images(tmp_path):
    pytest.importorskip("sklearn")
    changes = [change for change in TINY if not change.startswith(("model.", "data="))]
    config = comparison_config(
        [*changes, "model.layers=6", "model.width=4", "batches=2", "held_out=0.01", "methods=1f1b,2bw"], {}
    )
    findings = ComparisonRun(config, tmp_path / "out", Quiet(), digits_of).run()
    assert findings.title.startswith("residual CNN of 6 blocks, 4 channels; digits")
    assert [(row.updates, row.tokens) for row in findings.rows()] == [(2, 8)] * 2
    one, other = findings.results.values()
    assert one.losses[0] == other.losses[0]
    assert len(findings.contenders[0].run.windows.validation) == 18


def test_images_do_not_depend_on_how_they_are_read():
    pytest.importorskip("sklearn")
    one, other = Images(0.2, 0), Images(0.2, 5)
    together, apart = one.samples(1430, 16), [one.samples(first, 4) for first in (1430, 1434, 1438, 1442)]
    assert all(
        torch.equal(whole, torch.cat(parts)) for whole, parts in zip(together, zip(*apart, strict=True), strict=True)
    )
    epoch = {tuple(image.flatten().tolist()) for image in one.samples(0, 1438)[0]}
    assert epoch == {tuple(image.flatten().tolist()) for image in other.samples(1438, 1438)[0]}
    assert not epoch & {tuple(image.flatten().tolist()) for image in one.validation_samples(0, 359)[0]}
