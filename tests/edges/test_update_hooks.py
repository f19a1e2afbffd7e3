"""`Pipeline.on_update`: what is averaged or recorded at the updates themselves, not in the loop over reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from penstock import Checkpoints
from penstock.errors import ConfigError
from support.plain_training import PlainTraining, assert_close_weights, make_data, make_model, pipeline_of_model

Seen = list[tuple[int, list[str]]]


class Average:
    """The moving average of swa_utils, stage by stage."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def __call__(self, update: int, weights: Mapping[str, Tensor]) -> None:
        known = [self.weights.setdefault(name, tensor.clone()) for name, tensor in weights.items()]
        get_ema_multi_avg_fn(0.9)(known, list(weights.values()), update)


@pytest.mark.parametrize("options", [{}, {"data_parallel": 2}, {"max_grad_norm": 1e9}])
@pytest.mark.parametrize("method", ["1f1b", "2bw", "zb-h2-post"])
def test_an_average_made_at_updates_is_that_of_swa_utils(method: str, options: dict[str, Any]) -> None:
    pipeline, average = pipeline_of_model(make_model(), method=method, **options), Average()
    pipeline.on_update(average)
    list(pipeline.run(make_data()))
    plain = PlainTraining(make_model(), delay=int(method == "2bw"))
    wanted = AveragedModel(plain.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for batch in make_data():
        plain.run([batch])
        wanted.update_parameters(plain.model)
    assert_close_weights(average.weights, dict(wanted.module.state_dict()))


def test_numbers_go_on_in_a_resumed_run_and_end_with_the_handle(tmp_path: Any) -> None:
    first, second = pipeline_of_model(make_model(), method="2bw"), pipeline_of_model(make_model(), method="2bw")
    list(first.run(make_data()[:2]))
    Checkpoints(first, tmp_path).save()
    Checkpoints(second, tmp_path).load()
    seen: Seen = []
    handle = second.on_update(lambda update, weights: seen.append((update, list(weights))))
    list(second.run(make_data()[2:]))
    names = [[name for name in make_model().state_dict() if name[0] in part] for part in second.parts]
    assert sorted(seen) == sorted([(3, names[0]), (3, names[1]), (4, names[0]), (4, names[1])])
    handle.remove()
    list(second.run(make_data()[2:]))
    assert len(seen) == 4


def test_a_skipped_update_is_none() -> None:
    pipeline, seen, data = pipeline_of_model(make_model(), max_grad_norm=1.0), [], make_data()
    data[1][0][0] = torch.nan
    pipeline.on_update(lambda update, _: seen.append(update))
    list(pipeline.run(data))
    assert sorted(seen) == [1, 1, 2, 2, 3, 3]


def test_in_low_precision_the_weights_are_those_of_the_optimizer() -> None:
    pipeline, last = pipeline_of_model(make_model().float(), precision="bf16"), dict[str, Tensor]()
    pipeline.on_update(lambda _, weights: last.update({name: tensor.clone() for name, tensor in weights.items()}))
    list(pipeline.run([(x.float(), y.float()) for x, y in make_data()]))
    assert_close_weights(last, pipeline.state_dict())


def test_a_hook_that_writes_into_weights_is_refused() -> None:
    pipeline = pipeline_of_model(make_model())
    pipeline.on_update(lambda _, weights: weights["0.weight"].clamp_(-0.1, 0.1) if "0.weight" in weights else None)
    with pytest.raises(ConfigError, match=r"on_update has written into the weights of stage 0.*step hook"):
        list(pipeline.run(make_data()))


def test_something_that_is_no_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="on_update takes a function"):
        pipeline_of_model(make_model()).on_update(3)  # type: ignore[arg-type]
