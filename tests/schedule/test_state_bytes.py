"""Bytes of weights, gradients and optimizer state for each parameter, against formulas of papers and of other code."""

from fractions import Fraction

import pytest

from penstock.schedule.build import prove
from support.state_bytes import state_bytes


def total(proof, width, low, rank=0):
    return sum(state_bytes(proof, rank, width, low))


@pytest.mark.parametrize("w", [2, 3, 8])
@pytest.mark.parametrize(
    ("sharding", "fp32", "bf16"),
    [
        ("none", lambda _: 20, lambda _: 24),
        ("optimizer", lambda w: 12 + Fraction(8, w), lambda w: 12 + Fraction(12, w)),
        ("gradients:gradients=1", lambda w: 12 + Fraction(8, w), lambda w: 8 + Fraction(16, w)),
    ],
)
def test_2bw_with_adam(sharding, fp32, bf16, w):
    proof = prove("2bw", 4, 16, sharding=sharding)
    for rank in range(4):
        assert (total(proof, w, False, rank), total(proof, w, True, rank)) == (fp32(w), bf16(w))


@pytest.mark.parametrize(("v", "w"), [(3, 2), (4, 4), (8, 64)])
def test_layered_accumulation_with_adam(v, w):
    """Two gathered stages and two full-size gradients of v, and 16/w for everything else: Fast-LLM's stages 2 and 3."""
    full = prove("breadth-first", 2, 4, options={"chunks": v}, sharding="full")
    split = prove("breadth-first", 2, 4, options={"chunks": v}, sharding="gradients")
    for rank in range(2):
        assert total(full, w, True, rank) == Fraction(12, v) + Fraction(16, w)
        assert total(full, w, False, rank) == Fraction(16, v) + Fraction(16, w)
        assert total(split, w, True, rank) == 2 + Fraction(8, v) + Fraction(16, w)


@pytest.mark.parametrize(("v", "w"), [(3, 2), (4, 64)])
def test_fully_sharded_2bw_with_adam(v, w):
    """Three buffers of 4 bytes and two moments, all of them shards, and what is gathered and accumulates.

    In low precision an older version is of 2 bytes beside the weights that are updated, and most is held when it is not
    needed any more: then two sums wait at once, but one of a rank's first stage.
    """
    proof = prove("2bw-layered", 2, 4, options={"chunks": v})
    for rank in range(2):
        assert total(proof, w, False, rank) == Fraction(20, w) + Fraction(16, v)
        assert total(proof, w, True, rank) == (20 - Fraction(4, v)) / w + Fraction(12, v)


@pytest.mark.parametrize("low", [False, True])
def test_a_flush_without_sharding_has_16_or_18_bytes(low):
    assert total(prove("1f1b", 2, 4), 4, low) == (18 if low else 16)
