"""Samples text from trained weights."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.checks import check_text, in_short
from penstock.errors import CheckpointError, ConfigError, EndedError, PenstockError
from penstock.models.gpt import gpt_blocks
from penstock.models.gpt_shape import GPTConfig
from penstock.train.config.schema import TrainConfig
from penstock.train.export.weights_folder import fill_module, load_index, load_weights

_SAMPLED_PARAMETERS = 200_000_000  # largest model to sample from after training: one rank must load all of it
_SAMPLING = 20.0  # seconds for that sample


def load_model(folder: Path) -> tuple[nn.Sequential, GPTConfig]:
    """Load the trained model of a run folder, on one device, in evaluation mode.

    Raises:
        CheckpointError: the weights are missing, damaged, or not those of a GPT.
    """
    config = _shape(load_index(folder)["model"], folder)
    state = load_weights(folder)
    held = sum(tensor.numel() for tensor in state.values())
    if held != config.parameters:  # before anything as large as the shape says is made
        raise CheckpointError(
            f"the saved weights do not fit their index: the files in {str(folder)!r} hold {held:,} numbers, but the "
            f"model that it describes has {config.parameters:,}"
        )
    blocks = {name: block.make() for name, block in gpt_blocks(config, seed=0).items()}
    for name, module in blocks.items():
        fill_module(module, name, state)
    return nn.Sequential(*blocks.values()).eval(), config


def _shape(described: Mapping[str, Any], folder: Path) -> GPTConfig:
    """Return the shape that an index describes.

    Raises:
        CheckpointError: it is not that of a GPT.
    """
    try:
        return GPTConfig(**described)
    except TypeError:
        reason = f"its index describes {described!r:.200}"
    except ConfigError as error:
        reason = str(error)
    raise CheckpointError(f"{str(folder)!r} does not hold a GPT: {reason}")


_COLDEST = 1e-6  # a lower temperature is 0: logits are not known more exactly


@torch.no_grad()
def generate(
    model: nn.Module,
    config: GPTConfig,
    prompt: list[int],
    length: int,
    temperature: float = 0.8,
    seed: int = 0,
    alphabet: int | None = None,
) -> Iterator[int]:
    """Sample tokens one by one.

    Args:
        model: tokens (1, L) -> logits (1, L, V).
        config: of the model; the oldest tokens beyond its context are dropped.
        prompt: at least one token.
        length: the number of tokens to sample.
        temperature: below 1 for likelier text, 0 for the likeliest token each time.
        seed: of the sampling.
        alphabet: sample only tokens below this, if the vocabulary is padded; all if None.

    Raises:
        ConfigError: the prompt is empty or holds unknown tokens, or temperature or seed cannot be.
        CheckpointError: the model's output is not finite.
    """
    if not prompt:
        raise ConfigError("the prompt is empty; give at least one character")
    if max(prompt) >= config.vocabulary:
        raise ConfigError(f"the prompt holds token {max(prompt)}, but the vocabulary ends at {config.vocabulary - 1}")
    if not 0 <= temperature < math.inf:
        raise ConfigError(f"temperature must be a finite number, not negative; got {temperature}")
    if not 0 <= seed < 1 << 63:
        raise ConfigError(f"seed must be from 0 to 2^63 - 1, got {in_short(seed)}")
    random = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(length):
        logits_V = model(torch.tensor([tokens[-config.context :]]))[0, -1, :alphabet]
        if not logits_V.isfinite().all():
            raise CheckpointError("the output of the model is not finite: its weights are not, or are far too large")
        if temperature < _COLDEST:
            token = int(logits_V.argmax())
        else:
            token = int(torch.multinomial(torch.softmax(logits_V / temperature, 0), 1, generator=random))
        tokens.append(token)
        yield token


def sample_text(
    folder: Path, prompt: str, length: int, temperature: float = 0.8, seed: int = 0, seconds: float = math.inf
) -> str:
    """Return the prompt and its continuation; invalid text is replaced, control characters of both are escaped.

    Args:
        folder: of the run.
        prompt: the beginning of the text.
        length: the number of bytes to sample.
        temperature, seed: see `generate`.
        seconds: after which sampling stops.

    Raises:
        ConfigError: the model was trained on tokens that are not bytes of text, or the prompt is not UTF-8.
        CheckpointError: the weights are missing or damaged.
    """
    check_text("the prompt", prompt)
    if not load_index(folder)["text"]:
        raise ConfigError(
            f"the model in {str(folder)!r} was trained on an array of tokens; only its tokenizer could turn them into "
            "text: use penstock.train.export.sample.generate with it"
        )
    model, config = load_model(folder)
    end = time.monotonic() + seconds
    tokens = generate(model, config, list(prompt.encode()), length, temperature, seed, alphabet=256)
    made = itertools.takewhile(lambda _: time.monotonic() < end, tokens)
    return _shown(prompt) + _shown(bytes(made).decode(errors="replace"))


def sample_if_possible(folder: Path, parameters: int, config: TrainConfig) -> str:
    """Return a sample for the end of a run, or why there is none: it is not worth a failed run.

    Args:
        folder: of the run, whose weights are saved.
        parameters: of the model.
        config: of the run.

    Raises:
        EndedError: the process is to end.
    """
    if parameters > _SAMPLED_PARAMETERS:
        return f"(none: {parameters / 1e6:.0f} M parameters at once may be more than this rank can hold)"
    try:
        seconds = min(_SAMPLING, config.timeout / 4)  # by now the launcher waits for this rank only
        return sample_text(folder, config.prompt, config.sample_length, seed=config.seed, seconds=seconds)
    except EndedError:
        raise
    except (RuntimeError, PenstockError) as error:  # for example because weights are NaN
        return f"(none: {error})"


def _shown(text: str) -> str:
    """Escape control characters: an untrained model samples some, and terminals would interpret them."""
    return "".join(c if c in "\n\t" or c.isprintable() else ascii(c)[1:-1] for c in text)
