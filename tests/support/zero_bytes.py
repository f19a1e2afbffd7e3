"""Bytes of weights, gradients and optimizer states by how far they are divided (ZeRO, arXiv 1910.02054)."""

from __future__ import annotations

WEIGHTS, GRADIENTS, OPTIMIZER = 2.0, 2.0, 12.0
"""Bytes per parameter with Adam in mixed precision; the optimizer's include the weights in 32 bits."""


def state_bytes_of_zero(parameters: float, devices: int, stage: int) -> float:
    """Return the bytes of a device.

    Args:
        parameters: how many.
        devices: that they are divided over.
        stage: 0 divides nothing, 1 the optimizer's state, 2 gradients, too, 3 weights, too.
    """
    divided = [stage >= 3, stage >= 2, stage >= 1]
    parts = zip((WEIGHTS, GRADIENTS, OPTIMIZER), divided, strict=True)
    return parameters * sum(part / devices if each else part for part, each in parts)
