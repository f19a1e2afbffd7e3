"""The blocks of some models of `transformers`, whose forwards take too many arguments to be followed."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from torch import nn

_SDPA = 'model.set_attn_implementation("sdpa")  # hides later tokens without a mask'

_GPT2 = """\
class Embeddings(torch.nn.Module):  # of tokens and of their positions
    def __init__(self, parent):
        super().__init__()
        self.wte, self.wpe = parent.wte, parent.wpe

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.wte(tokens) + self.wpe(positions)

blocks = {
    'transformer': Embeddings(model.transformer),
    'transformer.drop': model.transformer.drop,
    **{f'transformer.h.{i}': block for i, block in enumerate(model.transformer.h)},
    'transformer.ln_f': model.transformer.ln_f,
    'lm_head': model.lm_head,
}"""

_LLAMA = """\
class Layer(torch.nn.Module):  # that makes the positions by itself
    def __init__(self, layer, rotary):
        super().__init__()
        self.layer, self.rotary = layer, rotary

    def forward(self, x):
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        return self.layer(x, position_embeddings=self.rotary(x, positions), position_ids=positions)

blocks = {
    'model.embed_tokens': model.model.embed_tokens,
    **{f'layers.{i}': Layer(layer, copy.deepcopy(model.model.rotary_emb))
       for i, layer in enumerate(model.model.layers)},
    'model.norm': model.model.norm,
    'lm_head': model.lm_head,
}"""


def _always(_: Any) -> bool:
    return True


def _alike_layers(config: Any) -> bool:
    """Whether all layers see all earlier tokens, and positions do not depend on what came before."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    window = getattr(config, "sliding_window", None) if not hasattr(config, "layer_types") else None
    rope = getattr(config, "rope_parameters", None) or {}
    return set(kinds) == {"full_attention"} and window is None and rope.get("rope_type", "default") == "default"


_KNOWN: MappingProxyType[str, tuple[str, Callable[[Any], bool]]] = MappingProxyType(
    {
        "GPT2LMHeadModel": (_GPT2, _always),
        "LlamaForCausalLM": (f"import copy\n{_LLAMA}", _alike_layers),
        "MistralForCausalLM": (f"import copy\n{_LLAMA}", _alike_layers),
        "Qwen2ForCausalLM": (f"import copy\n{_LLAMA}", _alike_layers),
        "Qwen3ForCausalLM": (f"import copy\n{_LLAMA}", _alike_layers),
    }
)
"""Class of a model -> the lines that make its blocks, and whether they do with a configuration."""


def is_of_transformers(model: nn.Module) -> bool:
    """Return whether a model is one of that library."""
    return type(model).__module__.startswith("transformers.")


def known_lines(model: nn.Module) -> str | None:
    """Return the lines that make the blocks of a model; None if it is not known."""
    lines, fits = _KNOWN.get(type(model).__name__, ("", _always))
    config = getattr(model, "config", None)
    if not lines or not fits(config):
        return None
    eager = getattr(config, "_attn_implementation", None) == "eager"
    return f"{_SDPA}\n{lines}" if eager else lines
