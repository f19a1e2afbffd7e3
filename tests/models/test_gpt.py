"""The built-in GPT."""

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError
from penstock.models.gpt import gpt_blocks, language_loss, rotary_table, rotate
from penstock.models.gpt_shape import PRESETS, GPTConfig, preset

SHAPE = GPTConfig(layers=2, width=32, heads=4, context=16, vocabulary=11)


def build(shape=SHAPE, seed=0):
    return nn.Sequential(*(block.make() for block in gpt_blocks(shape, seed).values()))


def test_tokens_become_logits():
    assert build()(torch.zeros(3, 7, dtype=torch.long)).shape == (3, 7, 11)


def test_no_position_sees_a_later_token():
    model, tokens = build(), torch.randint(11, (1, 12))
    changed = tokens.clone()
    changed[0, 8] = (changed[0, 8] + 1) % 11
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.allclose(before[:, 8:], after[:, 8:])


def test_rotary_products_depend_on_the_distance_alone():
    cos, sin = rotary_table(16, 8)
    q, k = torch.randn(8), torch.randn(8)
    turned = [
        rotate(q.expand(1, 1, 16, 8), cos, sin)[0, 0],
        rotate(k.expand(1, 1, 16, 8), cos, sin)[0, 0],
    ]
    products = turned[0] @ turned[1].T
    for distance in range(1, 10):
        diagonal = products.diagonal(distance)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-5)
    assert not torch.allclose(products[0, 1], products[0, 5])


def test_the_order_of_the_tokens_before_matters():
    """Without positions attention would see a bag of tokens."""
    model, tokens = build(), torch.tensor([[1, 2, 3, 4, 5, 6]])
    swapped = tokens[:, [1, 0, 2, 3, 4, 5]]
    assert not torch.allclose(model(tokens)[0, -1], model(swapped)[0, -1], atol=1e-4)


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_the_count_of_parameters_is_that_of_the_modules(name):
    shape = PRESETS[name]
    made = sum(p.numel() for block in gpt_blocks(shape, 0).values() for p in block.make().parameters())
    assert shape.parameters == made


@pytest.mark.parametrize(("name", "billions"), [("355m", 0.355), ("1.3b", 1.314), ("2.2b", 2.159), ("3.8b", 3.784)])
def test_large_presets_have_the_published_sizes(name, billions):
    """Sizes of the PipeDream-2BW evaluation, whose input and output embeddings are one."""
    shape = PRESETS[name]
    tied = shape.parameters - shape.vocabulary * shape.width
    assert tied / 1e9 == pytest.approx(billions, rel=0.006)


def test_initialisation_is_seeded_per_block():
    first, again, other = gpt_blocks(SHAPE, 1), gpt_blocks(SHAPE, 1), gpt_blocks(SHAPE, 2)
    torch.rand(5)  # whatever else draws numbers does not matter
    for name in reversed(list(first)):  # nor does the order in which blocks are made
        a, b, c = (blocks[name].make().state_dict() for blocks in (first, again, other))
        assert all(torch.equal(a[key], b[key]) for key in a)
        assert any(not torch.equal(a[key], c[key]) for key in a)
    layers = [first[f"layers.{i}"].make().state_dict()["mlp_in.weight"] for i in range(2)]
    assert not torch.equal(*layers)


def test_loss_is_a_sum_over_tokens_with_their_number():
    logits, targets = torch.randn(2, 5, 11), torch.randint(11, (2, 5))
    total, weight = language_loss(logits, targets)
    by_hand = -sum(logits[b, i].log_softmax(0)[targets[b, i]] for b in range(2) for i in range(5))
    assert weight == 10
    assert torch.allclose(total, by_hand, atol=1e-4)


def test_costs_favour_layers_over_embeddings():
    blocks = gpt_blocks(PRESETS["tiny"], 0)
    assert blocks["embedding"].cost < blocks["head"].cost < blocks["layers.0"].cost


def test_impossible_shapes_are_refused():
    with pytest.raises(ConfigError, match=r"model.width 30 must be a multiple of twice model.heads \(8\)"):
        GPTConfig(layers=1, width=30, heads=4)
    with pytest.raises(ConfigError, match="model.layers must be a whole number of at least 1, got 0"):
        GPTConfig(layers=0, width=32, heads=4)
    with pytest.raises(ConfigError, match="unknown model preset 'huge'; known: tiny"):
        preset("huge")
