"""Trained weights on disk, and text from them."""

import json

import pytest
import torch

from penstock.errors import CheckpointError, ConfigError
from penstock.models.gpt import GPTConfig, gpt_blocks
from penstock.train.export.sample import generate, load_model, sample_text
from penstock.train.export.weights_format import load_index, load_weights, save_index, save_stage
from penstock.train.setup.prepare import describe_model

SHAPE = GPTConfig(layers=2, width=16, heads=2, context=8, vocabulary=256)


@pytest.fixture
def run_folder(tmp_path):
    """A model saved in two stages."""
    blocks = {name: block.make() for name, block in gpt_blocks(SHAPE, 3).items()}
    state = {f"{name}.{key}": t for name, block in blocks.items() for key, t in block.state_dict().items()}
    names = list(state)
    files = {}
    for stage, part in enumerate((names[:5], names[5:])):
        files |= save_stage(tmp_path, 7, stage, 2, {name: state[name] for name in part})
    save_index(tmp_path, files, describe_model(SHAPE), text=True)
    return tmp_path, state


def test_weights_come_back_by_name(run_folder):
    folder, state = run_folder
    loaded = load_weights(folder)
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    assert not list((folder / "weights").glob("*.part"))


def test_the_model_is_the_one_that_was_saved(run_folder):
    folder, _ = run_folder
    model, config = load_model(folder)
    fresh = torch.nn.Sequential(*(block.make() for block in gpt_blocks(SHAPE, 3).values()))
    tokens = torch.randint(256, (2, 8))
    assert config == SHAPE
    assert torch.equal(model(tokens), fresh(tokens))


def test_sampling_is_seeded_and_greedy_at_temperature_zero(run_folder):
    folder, _ = run_folder
    first, again, other = (sample_text(folder, "ab", 20, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    model, config = load_model(folder)
    greedy = list(generate(model, config, [97, 98], 12, temperature=0))
    tokens = [97, 98]
    for _ in range(12):
        tokens.append(int(model(torch.tensor([tokens[-8:]]))[0, -1].argmax()))
    assert greedy == tokens[2:]


def test_what_is_no_text_is_shown_as_such(run_folder, monkeypatch):
    """Of a model that knows little: broken characters, and control characters that a terminal would obey."""
    made = "é\x1b[2J\x00\x9b\r\n\tb".encode() + b"\xff\xc3"
    monkeypatch.setattr("penstock.train.export.sample.generate", lambda *_, **__: iter(made))
    assert sample_text(run_folder[0], "a", 9) == "aé\\x1b[2J\\x00\\x9b\\r\n\tb\ufffd\ufffd"


def test_prompts_that_cannot_be(run_folder):
    model, config = load_model(run_folder[0])
    with pytest.raises(ConfigError, match="the prompt is empty"):
        list(generate(model, config, [], 1))
    with pytest.raises(ConfigError, match="holds token 300, but the vocabulary ends at 255"):
        list(generate(model, config, [300], 1))
    with pytest.raises(ConfigError, match="temperature"):
        list(generate(model, config, [3], 1, temperature=-1))


def test_no_weights(tmp_path):
    with pytest.raises(CheckpointError, match="no saved weights"):
        load_weights(tmp_path)


def test_a_missing_a_cut_and_an_incomplete_file(run_folder):
    folder, state = run_folder
    path = folder / "weights" / "batch-7-stage-1-of-2.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"cannot read .*stage-1-of-2"):
        load_weights(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*stage-1-of-2"):
        load_weights(folder)
    save_stage(folder, 7, 1, 2, {next(reversed(state)): torch.zeros(1)})
    with pytest.raises(CheckpointError, match="tensors of the index are in no file"):
        load_weights(folder)


def test_weights_of_two_moments_are_never_mixed(run_folder):
    """Killed between the files of two stages, a run leaves the weights that it had saved before."""
    folder, state = run_folder
    newer = {name: tensor + 1 for name, tensor in state.items()}
    files = save_stage(folder, 9, 0, 2, {name: newer[name] for name in list(state)[:5]})
    assert all(torch.equal(tensor, state[name]) for name, tensor in load_weights(folder).items())
    files |= save_stage(folder, 9, 1, 2, {name: newer[name] for name in list(state)[5:]})
    assert all(torch.equal(tensor, state[name]) for name, tensor in load_weights(folder).items())
    save_index(folder, files, describe_model(SHAPE), text=True)
    assert all(torch.equal(tensor, newer[name]) for name, tensor in load_weights(folder).items())
    assert sorted(path.name for path in (folder / "weights").glob("*.safetensors")) == sorted(set(files.values()))


def test_a_sample_takes_no_longer_than_it_may(run_folder):
    assert sample_text(run_folder[0], "ab", 10**9, seconds=0.2).startswith("ab")


def test_damaged_and_foreign_indexes(run_folder):
    folder, _ = run_folder
    path = folder / "weights" / "index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps(index | {"schema": 99}))
    with pytest.raises(CheckpointError, match="schema 99"):
        load_index(folder)
    path.write_text(json.dumps(index | {"model": {"kind": "other"}}))
    with pytest.raises(CheckpointError, match="does not hold a GPT"):
        load_model(folder)
    path.write_text(json.dumps(index | {"model": describe_model(SHAPE) | {"width": 32}}))
    with pytest.raises(CheckpointError, match="do not fit block 'embedding'"):
        load_model(folder)
    path.write_text(json.dumps(index | {"files": {"x": "../../secret"}}))
    with pytest.raises(CheckpointError, match="not a file of its folder"):
        load_weights(folder)
    path.write_text("{")
    with pytest.raises(CheckpointError, match="is damaged"):
        load_index(folder)
