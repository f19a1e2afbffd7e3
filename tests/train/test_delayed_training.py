"""`penstock train` with delays by choice: what is checked before it starts, and what it trains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from penstock.errors import ConfigError
from penstock.train.config.load import load_config
from penstock.train.data.window_sampler import batches
from penstock.train.export.weights_folder import load_weights
from penstock.train.prepare.build_pipeline import make_pipeline
from penstock.train.prepare.prepare_run import prepare
from penstock.verify.verify import verify
from support.command_line import TINY, Command, only_folder, settings


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return f"data={path}"


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("3", 3),
        ("null", None),
        ("1f1b:4", "1f1b:4"),
        ("[1, 0, 2, 0]", [1, 0, 2, 0]),
        ("{layers.0: 3, 5: 1}", {"layers.0": 3, "5": 1}),
    ],
)
def test_every_form_can_be_written_and_read_back(value: str, wanted: Any, tmp_path: Path) -> None:
    config = load_config(None, [f"delays={value}"])
    assert config.delays == wanted
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(config.model_dump()))
    assert load_config(path, []) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["delays={layer.1: 2}"], "delays: the model has no block 'layer.1'. Did you mean 'layers.1'?"),
        (["delays=[1, 2]"], "delays: 2 numbers were given, but the model has 4 blocks"),
        (
            ["delays=-1"],
            "delays: the delay of block 'embedding', in updates, must be a whole number of at least 0, got -1",
        ),
        (["delays=1f1b:5"], "delays: profile '1f1b:5' has 5 stages, but the model has only 4 blocks"),
        (["method=2bw", "delays=1"], "delays need version rule 'flush'"),
        (["model.tied=true", "delays=1f1b:2"], "blocks 'embedding' (1 updates) and 'head' (0) share a parameter"),
        (["backward_delays={layer.1: 2}"], "backward_delays: the model has no block 'layer.1'"),
        (["backward_delays=1", "recompute=block"], "backward_delays cannot be combined with recompute"),
        (["backward_delays=1", "method=zb-h1"], "backward_delays: zb-h1 splits backwards into two halves"),
        (["backward_delays=1", "method=2bw"], "backward_delays need version rule 'flush'"),
        (["backward_delays=1", "sync.batches=2"], "sync.method: a pipeline with delays of its own choice cannot go on"),
        (["backward_delays=1", "width=2", "combine.kind=average"], "delays cannot be used with combine=average"),
        (["backward_delays=0.5"], "backward_delays: input should be a number, a list of numbers"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_the_start(changes: list[str], message: str, text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        prepare(load_config(None, [*TINY, text, "method=1f1b", *changes]))


@pytest.mark.parametrize("key", ["delays", "backward_delays"])
def test_there_is_nothing_to_verify_against(key: str, text: str) -> None:
    with pytest.raises(ConfigError, match="no reference to verify chosen delays"):
        verify(load_config(None, [*TINY, text, "method=1f1b", f"{key}=1"]), 2)


def test_backwards_may_be_late_by_themselves(text: str) -> None:
    changes = [text, "method=1f1b", "delays=1f1b:4", "backward_delays={layers.0: 1}"]
    pipeline = make_pipeline(prepare(load_config(None, [*TINY, *changes])))
    assert pipeline.delays == {"embedding": 3, "layers.0": 2, "layers.1": 1, "head": 0}
    assert pipeline.backward_delays == {"embedding": 0, "layers.0": 1, "layers.1": 0, "head": 0}


@pytest.mark.processes
def test_the_command_trains_what_one_process_does(tmp_path: Path, text: str, command: Command) -> None:
    changes = [text, "method=1f1b", "batches=5", "delays=1f1b:4", "sample_length=0", "lr_schedule.warm_up=1"]
    out = tmp_path / "runs"
    result = command("train", *settings(f"out={out}", *changes))
    assert result.returncode == 0, result.stderr
    assert "weights are read with chosen delays: delays 1f1b:4" in result.stdout
    prepared = prepare(load_config(None, [*TINY, *changes]))
    torch.set_num_threads(1)
    pipeline = make_pipeline(prepared)
    assert pipeline.delays == {"embedding": 3, "layers.0": 2, "layers.1": 1, "head": 0}
    list(pipeline.run(batches(prepared.windows, 0, 5, prepared.microbatches, 2)))
    saved = load_weights(only_folder(out))
    state = pipeline.state_dict()
    assert saved.keys() == state.keys()
    for name, tensor in saved.items():
        assert torch.equal(tensor, state[name]), name
