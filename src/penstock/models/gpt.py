"""A GPT as a list of blocks: pre-norm, rotary positions, scaled dot-product attention.

Shapes: B microbatch, L positions, D width, H heads, K width of a head (D = H K), V vocabulary.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from penstock.errors import ConfigError
from penstock.models.gpt_shape import GPTConfig
from penstock.partition.blocks import LazyBlock

KeysValues = tuple[Tensor, Tensor]
"""Keys and values of the tokens so far, each (B, H, L, K)."""
Known = tuple[Tensor, Tensor]
"""What a part knows of each token: the logarithm of the sum of its exponentials, and the target's logit or 0."""


class Embedding(nn.Module):
    """Embedding of tokens: (B, L) -> (B, L, D)."""

    tokenwise = True

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocabulary, config.width))
        nn.init.normal_(self.weight, std=0.02)

    def parallelize(self, mesh: DeviceMesh) -> None:
        """Divide the vocabulary among the processes of a mesh, if they can share it evenly."""
        from torch.distributed.tensor import Shard, distribute_tensor

        if len(self.weight) % mesh.size() == 0:
            self.weight = nn.Parameter(distribute_tensor(self.weight, mesh, [Shard(0)], src_data_rank=None))

    def forward(self, tokens_BL: Tensor) -> Tensor:
        """Look up the vectors of the tokens."""
        return embed(tokens_BL, self.weight)


class Layer(nn.Module):
    """One transformer layer: (B, L, D) -> (B, L, D)."""

    tensor_sections: Mapping[str, int] = MappingProxyType({"query_key_value.weight": 3})  # of each, heads are divided

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        d = config.width
        self.heads = config.heads
        self.attention_norm = nn.RMSNorm(d)
        self.query_key_value = nn.Linear(d, 3 * d, bias=False)
        self.attention_out = nn.Linear(d, d, bias=False)
        self.mlp_norm = nn.RMSNorm(d)
        self.mlp_in = nn.Linear(d, 4 * d, bias=False)
        self.mlp_out = nn.Linear(4 * d, d, bias=False)
        for linear in (self.query_key_value, self.mlp_in):
            nn.init.normal_(linear.weight, std=0.02)
        for linear in (self.attention_out, self.mlp_out):  # keeps the scale of the sum of 2 x layers branches
            nn.init.normal_(linear.weight, std=0.02 * (2 * config.layers) ** -0.5)
        cos_LK, sin_LK = rotary_table(config.context, d // config.heads)
        self.register_buffer("cos", cos_LK, persistent=False)
        self.register_buffer("sin", sin_LK, persistent=False)

    def parallelize(self, mesh: DeviceMesh) -> None:
        """Divide the heads and the MLP among the processes of a mesh (Shoeybi et al., arXiv 1909.08053).

        Raises:
            ConfigError: they do not share the heads evenly.
        """
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        if self.heads % mesh.size():
            raise ConfigError(f"model.heads {self.heads} must be a multiple of tensor_parallel ({mesh.size()})")
        columns, rows = ColwiseParallel(), RowwiseParallel()
        plan = {"query_key_value": columns, "attention_out": rows, "mlp_in": columns, "mlp_out": rows}
        parallelize_module(self, mesh, plan, src_data_rank=None)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Apply attention and MLP, each to a normalized copy and added to the residual stream."""
        return self.forward_slice(x_BLD, None)[0]

    def forward_slice(self, x_BLD: Tensor, carry: KeysValues | None) -> tuple[Tensor, KeysValues]:
        """Process a slice of the sequence, with the keys and values of the slices before in `carry`."""
        y_BLD, carry = self.attend(self.attention_norm(x_BLD), carry)
        x_BLD = x_BLD + y_BLD
        mlp_BLD: Tensor = self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x_BLD))))
        return x_BLD + mlp_BLD, carry

    def attend(self, x_BLD: Tensor, carry: KeysValues | None) -> tuple[Tensor, KeysValues]:
        """Apply causal self-attention with rotary positions, also over the carried tokens; P tokens came before."""
        b, length, d = x_BLD.shape
        before = 0 if carry is None else carry[0].shape[2]
        qkv = self.query_key_value(x_BLD).view(b, length, 3, -1, d // self.heads)  # of the heads that are here
        q_BHLK, k_BHLK, v_BHLK = qkv.permute(2, 0, 3, 1, 4)
        cos, sin = (self.get_buffer(name)[before : before + length].to(x_BLD.dtype) for name in ("cos", "sin"))
        q_BHLK, k_BHLK = rotate(q_BHLK, cos, sin), rotate(k_BHLK, cos, sin)
        if carry is None:
            y_BHLK = F.scaled_dot_product_attention(q_BHLK, k_BHLK, v_BHLK, is_causal=True)
        else:
            k_BHLK, v_BHLK = (torch.cat(pair, dim=2) for pair in zip(carry, (k_BHLK, v_BHLK), strict=True))  # P + L
            mask_LM = torch.ones(length, before + length, dtype=torch.bool, device=x_BLD.device).tril(before)
            y_BHLK = F.scaled_dot_product_attention(q_BHLK, k_BHLK, v_BHLK, attn_mask=mask_LM)
        out: Tensor = self.attention_out(y_BHLK.transpose(1, 2).reshape(b, length, -1))
        return out, (k_BHLK, v_BHLK)


class Head(nn.Module):
    """Projection of vectors to logits: (B, L, D) -> (B, L, V)."""

    tokenwise = True

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.width)
        self.out = nn.Linear(config.width, config.vocabulary, bias=False)
        nn.init.normal_(self.out.weight, std=0.02)

    def parallelize(self, mesh: DeviceMesh) -> None:
        """Divide the vocabulary among the processes of a mesh, if they can share it evenly; logits stay divided."""
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        if self.out.out_features % mesh.size() == 0:
            parallelize_module(self, mesh, {"out": ColwiseParallel(use_local_output=False)}, src_data_rank=None)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Normalize and project."""
        logits: Tensor = self.out(self.norm(x_BLD))
        return logits


def rotary_table(length: int, head_width: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of RoPE (Su et al., arXiv 2104.09864, eq. 34), each (L, K)."""
    rates_K = base ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width).repeat(2)
    angles_LK = torch.arange(length, dtype=torch.float64)[:, None] * rates_K
    return angles_LK.cos().float(), angles_LK.sin().float()


def rotate(x_BHLK: Tensor, cos_LK: Tensor, sin_LK: Tensor) -> Tensor:
    """Rotate each pair (x_i, x_{i + K/2}) by the angle of its position."""
    first, second = x_BHLK.chunk(2, dim=-1)
    return x_BHLK * cos_LK + torch.cat((-second, first), dim=-1) * sin_LK


def gpt_blocks(config: GPTConfig, seed: int) -> dict[str, LazyBlock]:
    """Return a GPT as lazy blocks by name, each with initial weights that depend on the seed and its name alone.

    Args:
        config: its shape.
        seed: of the whole model.
    """
    d, context = config.width, config.context
    layer = 12 * d * d + 2 * context * d  # multiplications per token
    parts: dict[str, tuple[type[nn.Module], float]] = {"embedding": (Embedding, d)}
    parts |= {f"layers.{i}": (Layer, layer) for i in range(config.layers)}
    parts["head"] = (Head, config.vocabulary * d)
    return {
        name: LazyBlock(partial(kind, config), seed=zlib.crc32(f"{seed} {name}".encode()), cost=cost)
        for name, (kind, cost) in parts.items()
    }


TIED_EMBEDDINGS: Mapping[str, str] = MappingProxyType({"head.out.weight": "embedding.weight"})
"""The `tied` argument of `penstock.runtime.pipeline.Pipeline` that ties input and output embedding."""


def language_loss(logits_BLV: Tensor, targets_BL: Tensor) -> tuple[Tensor, float]:
    """Return the sum of the cross-entropy over all tokens, in nats, and their number: a loss for `Pipeline`."""
    if hasattr(logits_BLV, "device_mesh"):
        total = cross_entropy_of_processes(logits_BLV, targets_BL).sum()
    else:
        total = F.cross_entropy(logits_BLV.flatten(0, 1).float(), targets_BL.flatten(), reduction="sum")
    return total, float(targets_BL.numel())


language_loss.takes_parts = True  # type: ignore[attr-defined]  # of logits; other losses are given whole ones


# Embeddings and cross-entropies whose vocabulary is divided into parts, each of which has some consecutive tokens.
#
# Of tokens of other parts a part knows nothing: it adds zeros to their embeddings, and knows of a logit's cross-entropy
# the logarithm of its own sum of exponentials, and the target's logit if the target is its own.
#
# Shapes: B microbatch, L positions, D width, V the part of the vocabulary, P parts.


def embed(tokens_BL: Tensor, rows_VD: Any) -> Tensor:
    """Return the vectors of tokens: of a whole table, or of a DTensor whose rows processes have parts of."""
    if not hasattr(rows_VD, "device_mesh"):
        return F.embedding(tokens_BL, rows_VD)
    from torch.distributed.tensor import DTensor, Partial

    mesh, own_VD = rows_VD.device_mesh, rows_VD.to_local()
    # Not torch's lookup in a DTensor, whose backward makes the gradient of the whole table on every process.
    own_BL, here_BL = _own(tokens_BL, len(own_VD), mesh.get_local_rank() * len(own_VD))
    part_BLD = torch.where(here_BL[..., None], F.embedding(own_BL, own_VD), 0.0)
    whole: Tensor = DTensor.from_local(part_BLD, mesh, [Partial()], run_check=False).full_tensor()
    return whole


def known_of_part(logits_BLV: Tensor, targets_BL: Tensor, first: int) -> Known:
    """Return what a part knows, in float32, each (B, L).

    Args:
        logits_BLV: of the part.
        targets_BL: tokens of the whole vocabulary.
        first: token of the part.
    """
    logits_BLV = logits_BLV.float()
    own_BL, here_BL = _own(targets_BL, logits_BLV.shape[-1], first)
    target_BL = logits_BLV.gather(-1, own_BL[..., None])[..., 0]
    return logits_BLV.logsumexp(-1), torch.where(here_BL, target_BL, 0.0)


def cross_entropy_of_parts(sums_PBL: Tensor, targets_PBL: Tensor) -> Tensor:
    """Return the cross-entropy of each token, by what all parts know of it."""
    return sums_PBL.logsumexp(0) - targets_PBL.sum(0)


def cross_entropy_of_processes(logits_BLV: Any, targets_BL: Tensor) -> Tensor:
    """Return the cross-entropy of each token, of logits of which processes have parts; they call this together.

    Args:
        logits_BLV: a DTensor that is divided along its last dimension.
        targets_BL: the same on all.
    """
    from torch.distributed.tensor import DTensor, Shard

    mesh, own_BLV = logits_BLV.device_mesh, logits_BLV.to_local()
    known = known_of_part(own_BLV, targets_BL, mesh.get_local_rank() * own_BLV.shape[-1])
    parts = DTensor.from_local(torch.stack(known)[None], mesh, [Shard(0)], run_check=False).full_tensor()
    return cross_entropy_of_parts(parts[:, 0], parts[:, 1])


def _own(tokens_BL: Tensor, size: int, first: int) -> tuple[Tensor, Tensor]:
    """Return tokens as a part counts them, 0 for others, and which are its own."""
    own_BL = tokens_BL - first
    here_BL = (own_BL >= 0) & (own_BL < size)
    return torch.where(here_BL, own_BL, 0), here_BL
