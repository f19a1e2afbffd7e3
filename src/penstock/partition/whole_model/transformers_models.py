"""The forwards of some models of `transformers`, which take too many arguments to be followed.

Each is written out here for token ids without masks or caches, and compared with that of the model before it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from penstock.partition.whole_model.fx_trace import CannotFollowError, first_sentence, graph_of_function
from penstock.partition.whole_model.traced_blocks import blocks_of_graph

_SHAPE = (2, 5)  # of the tokens that both forwards are compared on


def _gpt2(model: Any, tokens: Tensor) -> Tensor:
    body = model.transformer
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    x = body.drop(body.wte(tokens) + body.wpe(positions))
    for layer in body.h:
        x = layer(x)
    logits: Tensor = model.lm_head(body.ln_f(x))
    return logits


def _llama(model: Any, tokens: Tensor) -> Tensor:
    body = model.model
    x = body.embed_tokens(tokens)
    for layer in body.layers:
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        x = layer(x, position_embeddings=body.rotary_emb(x, positions), position_ids=positions)
    logits: Tensor = model.lm_head(body.norm(x))
    return logits


_FORWARDS: MappingProxyType[str, Callable[[Any, Tensor], Tensor]] = MappingProxyType(
    {
        "GPT2LMHeadModel": _gpt2,
        "LlamaForCausalLM": _llama,
        "MistralForCausalLM": _llama,
        "Qwen2ForCausalLM": _llama,
        "Qwen3ForCausalLM": _llama,
    }
)


def is_of_transformers(model: nn.Module) -> bool:
    """Return whether a model is one of that library."""
    return type(model).__module__.startswith("transformers.")


def blocks_of_known(model: nn.Module, *, compare: bool) -> dict[str, nn.Module]:
    """Return the blocks of a model of `transformers`, the last of which returns the logits.

    Args:
        model: whose blocks.
        compare: call the model to see whether the blocks compute the same. Not during training: then its weights may
            be on several devices, and no finite numbers.

    Raises:
        CannotFollowError: the model is not known, or computes something else.
    """
    forward = _FORWARDS.get(type(model).__name__)
    if forward is None or not _alike_layers(getattr(model, "config", None)):
        raise CannotFollowError("models of transformers take masks, caches and more")
    if getattr(model.config, "_attn_implementation", None) == "eager":
        raise CannotFollowError(
            "under eager attention its layers see later tokens where they get no mask; before the pipeline is made, "
            'write model.set_attn_implementation("sdpa")'
        )
    blocks = blocks_of_graph(model, graph_of_function(model, forward))
    if compare:
        _compare(model, forward)
    return blocks


def _alike_layers(config: Any) -> bool:
    """Whether all layers see all earlier tokens, and positions do not depend on what came before."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    window = getattr(config, "sliding_window", None) if not hasattr(config, "layer_types") else None
    rope = getattr(config, "rope_parameters", None) or {}
    return set(kinds) == {"full_attention"} and window is None and rope.get("rope_type", "default") == "default"


@torch.no_grad()
def _compare(model: Any, forward: Callable[[Any, Tensor], Tensor]) -> None:
    """Compare both forwards on a few tokens.

    Raises:
        CannotFollowError: they differ, as they may in another version of the library.
    """
    modes = [(module, module.training) for module in model.modules()]
    device = next(model.parameters()).device
    tokens = (torch.arange(_SHAPE[0] * _SHAPE[1], device=device) % model.config.vocab_size).view(_SHAPE)
    what = "its own forward fails on a few tokens"
    try:
        model.eval()
        wanted = model(tokens, use_cache=False).logits
        what = "in this version of transformers it fails without masks"
        found = forward(model, tokens)
    except Exception as error:  # whatever another version of the library says
        raise CannotFollowError(f"{what} ({type(error).__name__}: {first_sentence(error)})") from error
    finally:
        for module, mode in modes:
            module.training = mode
    close = torch.finfo(wanted.dtype).eps ** 0.5
    if not torch.allclose(found, wanted, rtol=close, atol=close * float(wanted.abs().max())):
        raise CannotFollowError("in this version of transformers it computes something else without masks")
