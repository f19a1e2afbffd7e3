"""Embeddings and cross-entropies whose vocabulary is divided into parts, each of which has some consecutive tokens.

Of tokens of other parts a part knows nothing: it adds zeros to their embeddings, and knows of a logit's cross-entropy
the logarithm of its own sum of exponentials, and the target's logit if the target is its own.

Shapes: B microbatch, L positions, D width, V the part of the vocabulary, P parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Known = tuple[Tensor, Tensor]
"""What a part knows of each token: the logarithm of the sum of its exponentials, and the target's logit or 0."""


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
