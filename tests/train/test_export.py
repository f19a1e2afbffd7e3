"""Trained weights on disk, and text from them."""

import json
import math

import pytest
import torch

from penstock.checkpoint.index import write_index
from penstock.errors import CheckpointError, ConfigError
from penstock.models.gpt import gpt_blocks
from penstock.models.gpt_shape import GPTConfig
from penstock.train.export.sample import generate, load_model, sample_text
from penstock.train.export.weights_folder import load_index, load_weights, save_index, save_stage
from penstock.train.setup.model_shape import describe_model

SHAPE = GPTConfig(layers=2, width=16, heads=2, context=8, vocabulary=256)


@pytest.fixture
def run_folder(tmp_path):
    """A model saved in two stages."""
    blocks = {name: block.make() for name, block in gpt_blocks(SHAPE, 3).items()}
    state = {f"{name}.{key}": t for name, block in blocks.items() for key, t in block.state_dict().items()}
    names = list(state)
    halves = enumerate((names[:5], names[5:]))
    parts = [save_stage(tmp_path, 7, stage, 2, {name: state[name] for name in part}) for stage, part in halves]
    save_index(tmp_path, parts, describe_model(SHAPE), text=True)
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
    for temperature in (-1, math.nan, math.inf):
        with pytest.raises(ConfigError, match="temperature"):
            list(generate(model, config, [3], 1, temperature=temperature))
    for seed in (-1, 10**26):
        with pytest.raises(ConfigError, match="seed must be from 0"):
            list(generate(model, config, [3], 1, seed=seed))
    with pytest.raises(ConfigError, match="the prompt is not UTF-8"):
        sample_text(run_folder[0], "a\udcff", 1)
    for cold in (1e-320, 1e-30, 1e-7):
        assert list(generate(model, config, [3], 9, cold)) == list(generate(model, config, [3], 9, 0))
    model[0].weight.data.fill_(math.nan)
    with pytest.raises(CheckpointError, match="output of the model is not finite"):
        list(generate(model, config, [3], 1))


def test_escape_sequences_of_a_prompt_are_shown_and_not_obeyed(run_folder):
    said = sample_text(run_folder[0], "a\x1b[2J\x07é\n", 1)
    assert said.startswith("a\\x1b[2J\\x07é\n")


def test_no_weights(tmp_path):
    with pytest.raises(CheckpointError, match="no saved weights"):
        load_weights(tmp_path)


def test_a_missing_a_cut_and_an_incomplete_file(run_folder):
    folder, state = run_folder
    path = folder / "weights" / "batch-7-stage-1-of-2.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"stage-1-of-2.*is damaged: it has \d+ of \d+ bytes"):
        load_weights(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*stage-1-of-2"):
        load_weights(folder)
    index = {key: value for key, value in load_index(folder).items() if key not in ("schema", "sha256")}
    part = save_stage(folder, 7, 1, 2, {next(reversed(state)): torch.zeros(1)})
    write_index(folder / "weights", 3, index | {"files": index["files"] | part["files"]})
    with pytest.raises(CheckpointError, match=r"cannot read .* from .*stage-1-of-2"):
        load_weights(folder)


def test_weights_of_two_moments_are_never_mixed(run_folder):
    """Killed between the files of two stages, a run leaves the weights that it had saved before."""
    folder, state = run_folder
    newer = {name: tensor + 1 for name, tensor in state.items()}
    parts = [save_stage(folder, 9, 0, 2, {name: newer[name] for name in list(state)[:5]})]
    assert all(torch.equal(tensor, state[name]) for name, tensor in load_weights(folder).items())
    parts.append(save_stage(folder, 9, 1, 2, {name: newer[name] for name in list(state)[5:]}))
    assert all(torch.equal(tensor, state[name]) for name, tensor in load_weights(folder).items())
    save_index(folder, parts, describe_model(SHAPE), text=True)
    assert all(torch.equal(tensor, newer[name]) for name, tensor in load_weights(folder).items())
    assert sorted(path.name for path in (folder / "weights").glob("*.safetensors")) == sorted(
        name for part in parts for name in part["files"]
    )


def test_a_sample_takes_no_longer_than_it_may(run_folder):
    assert sample_text(run_folder[0], "ab", 10**9, seconds=0.2).startswith("ab")


def test_every_changed_bit_of_the_weights_is_noticed(run_folder):
    """In the header, in any tensor, at the end; the error names the file. Nothing of a changed file is used."""
    folder, _ = run_folder
    path = folder / "weights" / "batch-7-stage-0-of-2.safetensors"
    whole = path.read_bytes()
    for place in range(0, len(whole), len(whole) // 40):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        for load in (load_weights, load_model):
            with pytest.raises(CheckpointError, match=r"batch-7-stage-0-of-2.safetensors' is damaged"):
                load(folder)
    path.write_bytes(whole)
    load_weights(folder)


def test_every_changed_character_of_the_index_is_noticed(run_folder):
    folder, _ = run_folder
    path = folder / "weights" / "index.json"
    whole = path.read_bytes()
    for place in range(0, len(whole), 37):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match=r"index.json"):
            load_weights(folder)


def test_damaged_and_foreign_indexes(run_folder):
    folder, _ = run_folder
    path = folder / "weights" / "index.json"
    index = load_index(folder)
    path.write_text(json.dumps(index | {"schema": 99}))
    with pytest.raises(CheckpointError, match="schema 99"):
        load_index(folder)
    for changes, message in FOREIGN:
        write_index(folder / "weights", 3, index | changes)
        with pytest.raises(CheckpointError, match=message):
            load_model(folder)
    path.write_text("{")
    with pytest.raises(CheckpointError, match="is damaged"):
        load_index(folder)
    path.write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="nested too deep"):
        load_index(folder)


SHAPED = describe_model(SHAPE)
FOREIGN = [
    ({"model": {"kind": "other"}}, "does not hold a GPT"),
    ({"model": SHAPED | {"width": 32}}, "do not fit"),
    ({"model": SHAPED | {"layers": 10_000_000}}, "does not hold a GPT: model.layers"),
    ({"model": SHAPED | {"layers": 9_999}}, "do not fit"),
    ({"model": SHAPED | {"context": 10**12}}, "does not hold a GPT: model.context"),
    ({"model": SHAPED | {"vocabulary": 1 << 24}}, "do not fit"),
    ({"model": SHAPED | {"layers": "2"}}, "does not hold a GPT: model.layers must be a whole number"),
    ({"model": SHAPED | {"heads": 2.0}}, "does not hold a GPT"),
    ({"model": [1]}, "model is a list, not a dict"),
    ({"text": 1}, "text is a int, not a bool"),
    ({"files": {"x": "../../secret"}}, "does not say how large 'x' is"),
    ({"files": {"../x": {"bytes": 1, "sha256": "0" * 64}}}, "not a file of its folder"),
    ({"files": {}}, "names no file of tensor"),
    ({"tensors": {"embedding.weight": ["x"]}}, "names no file of tensor"),
    ({"tensors": {}}, "do not fit"),
]
"""Indexes with a valid digest, and what is said of them."""
