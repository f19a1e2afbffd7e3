"""Divides all models of `transformers`' auto classes that can be made small: `python -m tools.architectures`.

Causal and masked language models, sequence classification and sequence to sequence, each from its configuration class
with small sizes, in float64, with a batch padded left and right and the model's own loss. Each is divided into two,
three and four stages, and compared with itself: output and all gradients. `--out FILE` keeps the result of each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from penstock.errors import PenstockError
from penstock.partition.blocks import cut_blocks
from penstock.partition.replay.model_stages import UnitBlocks

SECONDS = 60  # of the processor, for one model
MOST = 20_000_000  # parameters of a model that counts as small
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim"), 16),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "hidden_dim"), 32
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 3),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"),
        2,
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "vocab_size"), 64),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("head_dim", "d_kv"), 8),
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "rotary_dim": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": 4,
    "type_vocab_size": 2,
    "num_labels": 3,
    **dict.fromkeys(("n_group", "topk_group", "mamba_n_groups", "n_groups", "mamba_ngroups"), 1),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim", "mamba_d_state"), 8),
    "decoder_vocab_size": 64,
    "use_cache": False,
}


HEADS = ("head_dim", "d_kv", "rotary_dim", "num_key_value_heads")  # what some compute of the rest
OF_ONE: dict[str, dict[str, Any]] = {  # by the type of a model
    "mamba2": {"num_heads": 4},
    "dots1": {"n_shared_experts": 1},
    "reformer": {"axial_pos_embds_dim": (8, 8), "axial_pos_shape": (4, 2)},
    "luke": {"entity_vocab_size": 8},
    "roc_bert": dict.fromkeys(
        ("pronunciation_vocab_size", "shape_vocab_size", "pronunciation_embed_dim", "shape_embed_dim"), 8
    ),
    "xmod": {"default_language": "en_XX"},
    "layoutlmv3": {"coordinate_size": 2, "shape_size": 4, "visual_embed": False},
    "funnel": {"block_sizes": [1, 1, 1]},
    "prophetnet": {"num_encoder_layers": 2, "num_decoder_layers": 2},
}


class TooLongError(Exception):
    """A model took too long."""


def small(configuration: Any, kind: Any) -> tuple[torch.nn.Module, dict[str, Any]] | str:
    """Make a model small, with a batch, in one of several ways; or say why none works."""
    reasons = []
    for without in ((), HEADS):
        sizes = {name: size for name, size in SIZES.items() if name not in without}
        for configured in (_set_after, small_config):
            try:
                return _made(configured(configuration, sizes), kind)
            except TooLongError:
                raise
            except Exception as error:  # whatever a configuration with these sizes says
                reasons.append(f"not made ({type(error).__name__}: {str(error).strip():.90})")
    return reasons[0]


def _set_after(configuration: Any, sizes: dict[str, Any]) -> Any:
    """Return a configuration whose sizes are set, those of what it contains, too."""
    config = configuration()
    walk = [config]
    while walk:
        one = walk.pop()
        own = OF_ONE.get(one.model_type, {})
        for name, value in {**sizes, **own}.items():
            with contextlib.suppress(AttributeError, NotImplementedError):  # what is computed of others
                if name in own or hasattr(one, name):
                    setattr(one, name, value)
        walk += [part for part in vars(one).values() if hasattr(part, "model_type")]
    return config


def small_config(configuration: Any, sizes: dict[str, Any]) -> Any:
    """Return a configuration that is made with sizes, from which it may compute others."""
    known = configuration()
    own = OF_ONE.get(known.model_type, {})
    parts = {name: small_config(type(part), sizes) for name, part in vars(known).items() if hasattr(part, "model_type")}
    return configuration(**{name: size for name, size in sizes.items() if hasattr(known, name)}, **own, **parts)


def _made(config: Any, kind: Any) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Make a model, and a batch that it takes."""
    if not isinstance(config, kind.config_class):  # of text in one of more
        config = config.get_text_config()
    model = small_model(config, kind)
    tokens = torch.randint(3, 60, (2, 8))
    mask = torch.ones_like(tokens)
    mask[0, :2] = mask[1, 6:] = 0
    tokens[:, 5] = 2  # the end of a sequence
    labels = tokens.masked_fill(mask == 0, -100)
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    if kind.__name__.endswith("ForSequenceClassification"):
        batch["labels"] = torch.tensor([1, 2])
    model(**batch).loss.backward()
    model.zero_grad()
    return model, batch


def small_model(config: Any, kind: Any) -> torch.nn.Module:
    """Return a model in float64, without dropout, and with experts that compute in it, too."""
    config.decoder_start_token_id = 1
    config._experts_implementation = "eager"  # the others compute in float32 alone
    with torch.device("meta"):
        count = sum(p.numel() for p in kind(config).parameters())
    if count > MOST:
        raise ValueError(f"{count} parameters")
    torch.manual_seed(0)
    model: torch.nn.Module = kind(config).double().train()
    for module in model.modules():  # plain and divided models draw alike only without: tests try dropout
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or name == "p"):
                setattr(module, name, 0.0)
    return model


def divided(model: torch.nn.Module, batch: dict[str, Any]) -> str:
    """Divide a model, and say whether its stages compute the same."""
    try:
        for stages in (2, 3, 4):
            blocks = UnitBlocks(model, batch, stages)
            if len(blocks) < stages:
                return "exact, fewer blocks" if stages > 2 else "one block"
            blocks.stage(cut_blocks(blocks, stages), 0)
    except PenstockError as error:
        return f"refused: {re.sub('[(]/[^ )]*/site-packages/', '(', str(error))}"
    return "exact"


def main() -> None:
    """Try all models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="a file for the results")
    parser.add_argument("--only", default="", help="a regular expression that is in a model's name")
    arguments = parser.parse_args()
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    warnings.filterwarnings("ignore")
    from transformers.models.auto import modeling_auto as auto

    def too_long(*_: Any) -> None:
        raise TooLongError

    signal.signal(signal.SIGPROF, too_long)
    kinds = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_FOR_MASKED_LM_MAPPING,
        auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    )  # fmt: skip
    found: dict[str, str] = {}
    for mapping in kinds:
        for configuration in list(mapping.keys()):
            kind = mapping[configuration]
            kind = kind[0] if isinstance(kind, tuple | list) else kind
            if not re.search(arguments.only, kind.__name__):
                continue
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                made = small(configuration, kind)
                found[kind.__name__] = made if isinstance(made, str) else divided(*made)
            except TooLongError:
                found[kind.__name__] = "took too long"
            except Exception as error:  # a finding, as nothing but errors of Penstock should come
                found[kind.__name__] = f"failed: {type(error).__name__}: {error}"
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            if not found[kind.__name__].startswith(("exact", "not made", "large")):
                sys.stdout.write(f"{kind.__name__}: {found[kind.__name__]:.300}\n")
    sys.stdout.write(f"{Counter(result.partition(':')[0].partition(' (')[0] for result in found.values())}\n")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
