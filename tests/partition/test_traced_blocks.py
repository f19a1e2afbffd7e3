"""The blocks that are proposed for a whole model train as plain torch does; where they would not, none are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import ConfigError
from penstock.partition.blocks import named_blocks
from penstock.partition.whole_model import in_place_of
from support.asserting_model import Asserts
from support.traceable_models import (
    Asks,
    Branches,
    Counts,
    D,
    Decoder,
    Drops,
    Foreign,
    Frozen,
    Half,
    Joins,
    Noise,
    Pairs,
    Patches,
    ResNet,
    Shares,
    Skips,
    Straight,
    Twofold,
    Unwritten,
    hooked,
    images,
    loss,
    proposed,
    tokens,
    vectors,
)

ENCODER = ["encoder.layers.0", "encoder.layers.1", "encoder.norm"]
PROPOSED: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]], list[str]]] = {
    "resnet": (
        ResNet, images,
        ["conv1", "bn1", "relu", "maxpool", "layer1.0", "layer1.1", "layer2", "relu_2", "avgpool", "flatten", "fc"],
    ),
    "vision": (
        Patches, images,
        ["embed", "flatten", "transpose", "part1", "part2", *ENCODER, "getitem", "head"],
    ),
    "decoder": (Decoder, tokens, ["part1", "part2.0", "part2.1", "part2.2", "body.norm", "mul", "lm_head", "truediv"]),
    "asserts": (Asserts, tokens, ["part1", "drop", "h.0", "h.1"]),
    "skips": (Skips, vectors, ["first", "tanh", "part1", "gelu", "last"]),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 16, dropout=0.0, batch_first=True), 3),
        vectors, ["layers.0", "layers.1", "layers.2"],
    ),
    "sequential": (lambda: Twofold(nn.Linear(D, D), nn.Tanh()), vectors, ["0", "1", "mul"]),
}  # fmt: skip


@pytest.mark.parametrize("case", PROPOSED)
def test_what_is_proposed_trains_a_batch_as_plain_torch(case: str) -> None:
    """The message leaves the model as it was; the pipeline writes into it."""
    make, batch, names = PROPOSED[case]
    torch.manual_seed(0)
    model = make()
    plain, kept = copy.deepcopy(model), {name: set(vars(part)) for name, part in model.named_modules()}
    blocks = proposed(model)
    assert list(blocks) == names
    assert {name: set(vars(part)) for name, part in model.named_modules()} == kept
    inputs, targets = batch()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    plain_loss = loss(plain(inputs), targets[:, None, None] if plain(inputs).dim() == 3 else targets[:, None])
    optimizer.zero_grad()
    plain_loss.backward()
    optimizer.step()
    pipeline = penstock.Pipeline(
        blocks, "1f1b", stages=2, microbatches=1,
        loss=lambda output, target: loss(output, target[:, None, None] if output.dim() == 3 else target[:, None]),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.5),
    )  # fmt: skip
    (report,) = pipeline.run([(inputs, targets)])
    assert report.loss == pytest.approx(plain_loss.item(), rel=1e-5)
    found = pipeline.full_state_dict(model)
    wanted = dict(plain.state_dict())
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        if "running" not in name and "num_batches" not in name:  # plain torch was called twice
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


NOT_PROPOSED: dict[Callable[[], nn.Module], str] = {
    Branches: r"it looks at its input \(TraceError: symbolically traced variables cannot be used",
    Drops: "it does something else in training, beside its modules",
    Frozen: r"it has a part under torch.no_grad\(\)",
    Half: "it has a part under torch.autocast",
    Straight: r"it has a part under torch.no_grad\(\), or a torch.autograd.Function",
    Counts: r"it keeps something on the module \(step\)",
    Noise: "it makes a tensor of its own, whatever the input",
    Asks: r"it asks for types \(isinstance\)",
    Shares: "it calls first more than once",
    Pairs: "it does not return one value",
    Joins: r"it takes 2 values \(x, y\), and a block takes one",
    Foreign: "a part of it calls fft",
    Unwritten: "it has none",
    hooked: "it has hooks, which blocks would not call",
    lambda: nn.Transformer(D, 2, 1, 1, 16, batch_first=True): r"it takes 2 values \(src, tgt\)",
}


@pytest.mark.parametrize("make", NOT_PROPOSED, ids=lambda make: getattr(make, "__name__", ""))
def test_where_blocks_would_compute_something_else_it_says_what_to_write(make: Callable[[], nn.Module]) -> None:
    model = make()
    before = {name: dict(vars(part)) for name, part in model.named_modules()}
    with pytest.raises(ConfigError, match=rf"cannot be followed to find its parts: {NOT_PROPOSED[make]}") as refused:
        named_blocks(model)
    said = str(refused.value)
    assert "class Part(torch.nn.Module):" in said
    assert "pipeline = penstock.Pipeline(blocks, ...)" in said
    for name, part in model.named_modules():
        assert all(vars(part)[key] is value for key, value in before[name].items())
        assert vars(part).keys() == before[name].keys()


def test_what_it_says_to_write_runs() -> None:
    model = Shares().eval()
    with pytest.raises(ConfigError) as refused:
        named_blocks(model)
    lines = [line.removeprefix("    ") for line in str(refused.value).splitlines()[1:-2]]
    names: dict[str, Any] = {"torch": torch, "model": model, "inputs": torch.ones(1, D)}
    with pytest.raises(AssertionError):  # the blocks of this example are those of another forward
        exec("\n".join(lines), names)
    assert set(names["blocks"]) == {"first", "second"}


# --- models of transformers -------------------------------------------------------------------------------------------


def config_of(kind: str, **more: Any) -> Any:
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install penstock[hf]")
    sizes = {
        "vocab_size": 16,
        "hidden_size": D,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
    }
    config = getattr(transformers, f"{kind}Config")(**sizes | more, num_attention_heads=2)
    return transformers, config


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("Llama", {"num_key_value_heads": 1}),
        ("Llama", {"tie_word_embeddings": True, "attn_implementation": "eager"}),
        ("Mistral", {"sliding_window": None}),
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 4}),
    ],
)
def test_decoders_of_transformers_train_a_batch_as_plain_torch(kind: str, more: dict[str, Any]) -> None:
    transformers, config = config_of(kind, **more)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    plain = copy.deepcopy(model)
    blocks = proposed(model)
    assert len(blocks) == 5
    inputs = torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(0))
    targets = inputs.roll(-1, 1)

    def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    wanted = cross_entropy(plain(inputs).logits, targets)
    wanted.backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    pipeline = penstock.Pipeline(
        blocks, "1f1b", stages=2, microbatches=1, loss=cross_entropy,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.5),
    )  # fmt: skip
    (report,) = pipeline.run([(inputs, targets)])
    assert report.loss == pytest.approx(wanted.item(), rel=1e-5)
    model.load_state_dict(pipeline.full_state_dict(model))
    with torch.no_grad():
        torch.testing.assert_close(model(inputs).logits, plain(inputs).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "head", "more"),
    [
        ("Bert", "BertForMaskedLM", {}),
        ("Llama", "LlamaForSequenceClassification", {"pad_token_id": 0}),
        ("Mistral", "MistralForCausalLM", {"sliding_window": 4}),
    ],
)
def test_of_other_models_of_transformers_none_are_proposed(kind: str, head: str, more: dict[str, Any]) -> None:
    transformers, config = config_of(kind, **more)
    with pytest.raises(
        ConfigError, match=f"{head} is one module.*: models of transformers take masks, caches and more"
    ):
        named_blocks(getattr(transformers, head)(config))


class MaskMadeOnce(nn.Module):
    """A Transformer as users write it: a causal mask, made once, goes to every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(4))
        self.head = nn.Linear(8, 11)
        self.register_buffer("future", torch.triu(torch.full((6, 6), float("-inf")), diagonal=1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        mask = self.future.tril(2)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.head(x)  # type: ignore[no-any-return]


def test_layers_that_stay_together_are_named_with_the_reason() -> None:
    said = in_place_of(MaskMadeOnce())
    assert "layers.0 to layers.3 are one block, because each of them takes what tril makes, too; to cut between" in said
