"""The loss that a model computes itself from labels is the mean over the whole batch, as the library takes it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import ConfigError, PenstockError

VOCABULARY, LENGTH, SAMPLES = 17, 6, 8
BERT = {
    "vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
T5 = {
    "vocab_size": VOCABULARY, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0,
    "use_cache": False, "decoder_start_token_id": 0,
}  # fmt: skip
LLAMA = {
    "vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "use_cache": False,
}  # fmt: skip
CLASSES = {**BERT, "num_labels": 3, "problem_type": "single_label_classification"}
KINDS: dict[str, tuple[str, dict[str, Any], str, float]] = {  # model, config, what labels are, relative tolerance
    "causal": ("LlamaForCausalLM", LLAMA, "tokens", 1e-6),  # the library computes this loss in float32
    "masked": ("BertForMaskedLM", BERT, "tokens", 1e-12),
    "classes": ("BertForSequenceClassification", CLASSES, "classes", 1e-12),
    "sequences": ("T5ForConditionalGeneration", T5, "tokens", 1e-6),  # and these norms
}


def make(name: str, config: dict[str, Any]) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install penstock[hf]")
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model: nn.Module = kind(kind.config_class(**config)).double().train()
    return model


def labelled(what: str) -> dict[str, Tensor]:
    """A batch whose microbatches have other numbers of labels each: the first none at all."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    if what == "classes":
        return {"input_ids": tokens, "labels": torch.randint(3, (SAMPLES,), generator=generator)}
    labels = torch.randint(3, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    for row in range(SAMPLES):
        labels[row, : row if row > 1 else LENGTH] = -100
    return {"input_ids": tokens, "labels": labels}


def own(output: Any, _: Any) -> Any:
    return output.loss


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=1.0)


@pytest.mark.parametrize(
    ("kind", "method"), [("causal", "1f1b"), ("masked", "zb-h1"), ("classes", "gpipe"), ("sequences", "1f1b")]
)
def test_a_models_own_loss_is_that_of_the_library_over_the_whole_batch(kind: str, method: str) -> None:
    name, config, what, tolerance = KINDS[kind]
    model, batch = make(name, config), labelled(what)
    plain = copy.deepcopy(model)
    wanted = plain(**batch).loss
    wanted.backward()
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    pipeline = penstock.Pipeline(model, method, stages=2, microbatches=4, loss=own, optimizer=sgd, example=batch)
    evaluated = pipeline.evaluate([(batch, None)])
    (report,) = pipeline.run([(batch, None)])
    assert evaluated is not None
    assert (evaluated.mean, report.loss) == pytest.approx((wanted.item(),) * 2, rel=tolerance)
    for key, weight in pipeline.full_state_dict().items():
        torch.testing.assert_close(weight, plain.state_dict()[key], rtol=tolerance, atol=tolerance, msg=key)


class Measuring(nn.Module):
    """Computes its loss as its kind says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last, self.kind = nn.Linear(3, 4), nn.Linear(4, 5), kind

    def forward(self, x: Tensor, y: Tensor) -> Any:
        output = self.last(self.first(x).tanh())
        mean = F.cross_entropy(output, y)  # of kinds that replace it, a number that only the model looks at
        if self.kind == "a sum":
            mean = F.cross_entropy(output, y, reduction="sum") / 8
        elif self.kind == "by hand":
            mean = output.logsumexp(-1).mean()
        elif self.kind == "two numbers":
            mean = mean + F.mse_loss(output, torch.zeros_like(output))
        elif self.kind == "the same number twice":
            mean = (mean + F.nll_loss(output.log_softmax(-1), y)) / 2
        elif self.kind == "a number beside":
            mean = mean + 0.1 * output.mean(0).square().sum()
        elif self.kind == "a root":
            mean = mean.sqrt()
        elif self.kind == "a product with samples":
            mean = mean * len(x)
        elif self.kind == "a product with targets":
            mean = mean * (y >= 0).sum()
        elif self.kind == "a product":
            mean = mean * output.mean()
        if self.kind == "alone":
            return {"loss": mean}
        return {"loss": mean, "output": output}


def measured(
    kind: str, loss: Any = lambda output, _: output["loss"], microbatches: int = 4
) -> tuple[penstock.Pipeline, tuple[Any, None], nn.Module]:
    torch.manual_seed(0)
    model = Measuring(kind).double()
    y = torch.tensor([-100, -100, 1, -100, 2, 3, 4, 0])
    inputs = torch.randn(8, 3).double(), y
    pipeline = penstock.Pipeline(
        copy.deepcopy(model), "1f1b", stages=2, microbatches=microbatches, loss=loss, example=inputs, optimizer=sgd,
    )  # fmt: skip
    return pipeline, (inputs, None), model


@pytest.mark.parametrize("kind", ["one", "the same number twice", "a number beside", "alone"])
def test_a_models_own_mean_is_weighted_by_what_its_losses_count(kind: str) -> None:
    """What it adds itself is weighted alike, as by plain torch over the same microbatches."""
    pipeline, ((x, y), _), model = measured(kind)
    weight = (y != -100).sum()
    for inputs, targets in zip(x.chunk(4), y.chunk(4), strict=True):
        count = (targets != -100).sum()
        if count:
            (model(inputs, targets)["loss"] * count / weight).backward()
    (report,) = pipeline.run([((x, y), None)])
    assert report.weight == weight
    before = dict(model.named_parameters())
    for key, found in pipeline.full_state_dict().items():
        torch.testing.assert_close(found, before[key].detach() - before[key].grad, rtol=1e-12, atol=1e-12, msg=key)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("a sum", "otherwise"),
        ("by hand", "otherwise"),
        ("two numbers", "different"),
        ("a root", "sqrt is applied to a sum or mean"),
        ("a product", "mul is applied to a sum or mean"),
        ("a product with samples", "mul is applied to a sum or mean"),
        ("a product with targets", "mul is applied to a sum or mean"),
    ],
)
def test_a_models_own_number_that_has_no_weight_is_refused(kind: str, said: str) -> None:
    pipeline, batch, _ = measured(kind)
    with pytest.raises(ConfigError, match=said):
        list(pipeline.run([batch]))


@pytest.mark.parametrize("microbatches", [2, 4, 8])
@pytest.mark.parametrize("kind", ["alone", "one"])
@pytest.mark.parametrize("targets", [torch.arange(8), [*"abcdefgh"]], ids=["tensor", "texts"])
def test_a_models_own_mean_times_a_number_of_samples_is_refused(kind: str, microbatches: int, targets: Any) -> None:
    """Over the whole batch it would be another number."""
    pipeline, (inputs, _), _ = measured(kind, lambda output, ids: output["loss"] * len(ids), microbatches=microbatches)
    with pytest.raises(ConfigError, match="two samples"):
        list(pipeline.run([(inputs, targets)]))


def test_a_model_without_labels_is_told_that_it_computes_no_loss() -> None:
    model = make("BertForMaskedLM", BERT)
    inputs = {"input_ids": labelled("tokens")["input_ids"]}
    pipeline = penstock.Pipeline(model, "1f1b", stages=2, microbatches=2, loss=own, optimizer=sgd, example=inputs)
    with pytest.raises(PenstockError, match="labels"):
        list(pipeline.run([(inputs, None)]))
