"""Models of `transformers`, whole, against plain `transformers` over the same microbatches, and between processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from tools.architectures import SIZES, small_config, small_model
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from support.plain_training import PlainTraining
from support.pool import Pool

VOCABULARY, MICROBATCHES, UPDATES = 64, 4, 5


def own(output: Any, _: Any) -> Any:
    """Return the loss that a model computes from labels, which the library does in float32 for causal ones."""
    return output.loss


def shifted(output: Any, labels: Tensor) -> Any:
    """Return the loss of a causal model in float64: its sum, and the number of labels."""
    labels = labels[:, 1:].flatten()
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels, reduction="sum"), (labels != -100).sum()


class Kind(NamedTuple):
    """How a model is made and called.

    Attributes:
        model: the name of its class.
        data: of batches.
        within: the relative distance of weights from those of whole batches at once; None where the loss is no mean.
        loss: of the pipeline.
        sizes: of the configuration.
        without: what it does not take of the sizes of others.
    """

    model: str
    data: tuple[str, ...]
    within: float | None = 1e-10
    loss: Callable[..., Any] = own
    sizes: dict[str, Any] = {}  # noqa: RUF012
    without: tuple[str, ...] = ()


FLOAT32 = 1e-6  # in which the library computes some norms and softmaxes, and the losses of causal models
TIED = {"tie_word_embeddings": True}
UNPACKED = ("left", "right", "unequal")
ROWS, PAIRS = (*UNPACKED, "packed"), ("right", "unequal")
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4,
    "original_max_position_embeddings": 16,
}  # fmt: skip
ROUTERS = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
KINDS = {
    "GPT-2": Kind("GPT2LMHeadModel", ROWS, loss=shifted, sizes=TIED),
    "OPT": Kind("OPTForCausalLM", UNPACKED, loss=shifted),
    "Bloom": Kind("BloomForCausalLM", PAIRS),
    "Falcon": Kind("FalconForCausalLM", PAIRS, without=("head_dim",)),
    "GPT-NeoX": Kind("GPTNeoXForCausalLM", ROWS),
    "Llama 3": Kind("LlamaForCausalLM", ROWS, sizes={"rope_parameters": LLAMA3}),
    "Mistral": Kind("MistralForCausalLM", ROWS),
    "Qwen 2": Kind("Qwen2ForCausalLM", ROWS, loss=shifted),
    "Qwen 3": Kind("Qwen3ForCausalLM", ROWS),
    "Gemma 2": Kind(
        "Gemma2ForCausalLM", ("right", "unequal", "packed"), FLOAT32, sizes={**TIED, "attn_implementation": "eager"}
    ),
    "Gemma 3": Kind("Gemma3ForCausalLM", ROWS, FLOAT32),
    "Phi-3": Kind("Phi3ForCausalLM", ROWS),
    "OLMo 2": Kind("Olmo2ForCausalLM", ROWS),
    "Cohere": Kind("CohereForCausalLM", ROWS),
    "Mixtral": Kind("MixtralForCausalLM", ROWS, None, sizes=ROUTERS),
    "Qwen 3 with experts": Kind("Qwen3MoeForCausalLM", ROWS, None, sizes=ROUTERS),
    "GPT-OSS": Kind("GptOssForCausalLM", ROWS),
    "DeepSeek-V3": Kind("DeepseekV3ForCausalLM", ROWS),
    "BERT": Kind("BertForMaskedLM", UNPACKED, sizes=TIED),
    "RoBERTa": Kind("RobertaForSequenceClassification", PAIRS),
    "ALBERT": Kind("AlbertForMaskedLM", UNPACKED),
    "T5": Kind("T5ForConditionalGeneration", PAIRS, FLOAT32, sizes=TIED),
    "BART": Kind("BartForConditionalGeneration", PAIRS),
    "Whisper": Kind("WhisperForConditionalGeneration", ("sounds",)),
    "ViT": Kind("ViTForImageClassification", ("images",)),
}
LAYERS: dict[str, Any] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 4),
    **dict.fromkeys(("num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    "tie_word_embeddings": False,
    "problem_type": "single_label_classification",
    "layer_types": None,
    "image_size": 8,
    "patch_size": 4,
    "num_mel_bins": 8,
    "max_source_positions": 8,
    "max_target_positions": 16,
}


def make_model(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install penstock[hf]")
    model = getattr(transformers, KINDS[kind].model)
    sizes = SIZES | LAYERS | KINDS[kind].sizes
    return small_model(
        small_config(model.config_class, {n: sizes[n] for n in sizes if n not in KINDS[kind].without}), model
    )


def microbatch(kind: str, data: str, rows: list[int], generator: torch.Generator) -> dict[str, Tensor]:
    """Draw samples of so many tokens, padded to the longest."""

    def draw() -> Tensor:
        return torch.randint(3, VOCABULARY, (len(rows), max(rows)), generator=generator)

    tokens, labels = draw(), draw()
    if data == "images":
        images = torch.randn(len(rows), 3, 8, 8, generator=generator, dtype=torch.double)
        return {"pixel_values": images, "labels": labels[:, 0] % 3}
    if data == "sounds":
        sounds = torch.randn(len(rows), 8, 16, generator=generator, dtype=torch.double)
        return {"input_features": sounds, "labels": labels}
    if data == "packed":  # two documents in each row
        ends = torch.tensor(rows)[:, None] // 2
        places = torch.arange(max(rows)).expand_as(tokens)
        return {
            "input_ids": tokens, "position_ids": places - ends * (places >= ends),
            "labels": labels.masked_fill((places == 0) | (places == ends), -100),
        }  # fmt: skip
    mask = (torch.arange(max(rows)) < torch.tensor(rows)[:, None]).long()
    mask = mask.flip(1) if data == "left" else mask
    if "Classification" in KINDS[kind].model:
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels[:, 0] % 3}
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}


def batches(kind: str, data: str) -> list[list[tuple[dict[str, Tensor], Tensor | None]]]:
    """Return the microbatches of some batches."""
    generator, found = torch.Generator().manual_seed(3), []
    for number in range(UPDATES):
        parts = []
        for part in range(MICROBATCHES):
            rows = [5 + (number + part) % 4] * 2 if data == "unequal" else [8, 5 + (number + part) % 3]
            given = microbatch(kind, data, rows, generator)
            parts.append((given, given.pop("labels") if KINDS[kind].loss is shifted else None))
        found.append(parts)
    return found


def together(parts: list[Any]) -> Any:
    """Return microbatches as a whole batch, padded at the end."""

    def joined(tensors: list[Tensor], fill: int) -> Tensor:
        if tensors[0].dim() != 2:
            return torch.cat(tensors)
        longest = max(tensor.shape[1] for tensor in tensors)
        return torch.cat([F.pad(tensor, (0, longest - tensor.shape[1]), value=fill) for tensor in tensors])

    inputs, labels = zip(*parts, strict=True)
    given = {key: joined([part[key] for part in inputs], -100 if key == "labels" else 0) for key in inputs[0]}
    return [(given, None if labels[0] is None else joined(list(labels), -100))]


def train_plainly(
    kind: str, data: list[Any], delay: int = 0, ahead: bool = False, model: nn.Module | None = None
) -> tuple[list[float], nn.Module]:
    """Train with microbatches, each weighted by its labels."""
    causal = KINDS[kind].model.endswith(("CausalLM", "LMHeadModel"))
    plain = PlainTraining(model or make_model(kind), make_sgd, delay, ahead)
    losses = []
    for parts in data:
        labelled = [(given, given.get("labels", labels)) for given, labels in parts]

        def loss(output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
            if KINDS[kind].loss is shifted:
                return shifted(output, labels)
            weight = ((labels[:, 1:] if causal else labels) != -100).sum()
            return output.loss * weight, weight

        losses.append(plain.update(labelled, loss))
    return losses, plain.model


def make_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def make_pipeline(kind: str, data: Any, method: str, stages: int = 2, *, model: Any = None, group: Any = None) -> Any:
    return penstock.Pipeline(
        model or make_model(kind), method, stages=stages, microbatches=MICROBATCHES, loss=KINDS[kind].loss,
        optimizer=make_sgd, group=penstock.Group(group, 20.0), example=data[0][0][0],
    )  # fmt: skip


def check_close(found: Any, wanted: nn.Module, within: float) -> None:
    """Compare weights and buffers, relative to the largest number of each; within 0, their bits."""
    state = wanted.state_dict()
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        scale = max(1e-3, float(tensor.abs().max())) if tensor.numel() else 0.0  # biases of keys have none
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=within * scale, msg=lambda t, n=name: f"{n}: {t}")


COMBINATIONS = list(itertools.product((4, 3, 2, 1), ("gpipe", "1f1b", "zb-h1", "2bw", "2bw-ahead")))
CASES = [
    (kind, KINDS[kind].data[number % len(KINDS[kind].data)], method, stages)
    for number, (kind, (stages, method)) in enumerate(
        zip(itertools.cycle(KINDS), COMBINATIONS + COMBINATIONS[::-1], strict=False)
    )
]


@pytest.mark.all_cases
@pytest.mark.filterwarnings("ignore:stages are uneven")
@pytest.mark.parametrize(("kind", "data", "method", "stages"), CASES)
def test_a_model_of_transformers_trains_as_in_plain_torch(kind: str, data: str, method: str, stages: int) -> None:
    """To the bits; to rounding where stages share a weight, since each of them adds up its own gradients first."""
    given, within = batches(kind, data), KINDS[kind].within
    losses, plain = train_plainly(kind, given, int("2bw" in method), method == "2bw-ahead")
    pipeline = make_pipeline(kind, given, method, stages)
    found = [report.loss for report in pipeline.run(given)]
    shared = stages > 1 and KINDS[kind].sizes.get("tie_word_embeddings")
    close = (within or 1e-10) if shared or method == "2bw-ahead" else 0.0
    assert found == (pytest.approx(losses, rel=close) if close else losses)
    check_close(pipeline.full_state_dict(), plain, close)
    if within is not None and "2bw" not in method:
        losses, plain = train_plainly(kind, [together(parts) for parts in given])
        assert found == pytest.approx(losses, rel=FLOAT32)
        check_close(pipeline.full_state_dict(), plain, within)


@pytest.mark.parametrize("kind", ["GPT-2", "Llama 3"])
def test_a_model_of_transformers_is_initialised_on_meta(kind: str) -> None:
    """Tied weights and tables of rotations, too, which code between layers reads; to the bits at any cut."""
    data, found = batches(kind, "right")[:1], []
    for stages in (1, 3):
        with torch.device("meta"):
            model = make_model(kind)
        pipeline = make_pipeline(kind, data, "1f1b", stages, model=model)
        found.append({name: tensor.clone() for name, tensor in pipeline.full_state_dict().items()})
        plain = make_model(kind)
        plain.load_state_dict(found[0])
        losses, plain = train_plainly(kind, data, model=plain)
        assert [report.loss for report in pipeline.run(data)] == pytest.approx(losses, rel=1e-10)
        check_close(pipeline.full_state_dict(), plain, 1e-10)
    assert all(torch.equal(found[1][name], tensor) for name, tensor in found[0].items())
    embedding = next(tensor for name, tensor in found[0].items() if "embed" in name or "wte" in name)
    assert embedding.std() < 0.03  # as transformers has it, not torch


def train_twice_and_resume(group: dist.ProcessGroup | None, kind: str, method: str, folder: str) -> list[Any]:
    """Two runs with an evaluation in between; then what a process that starts again does, with a model that is stale.

    Returns the losses, where a process has them.
    """
    model, data = make_model(kind), batches(kind, "right")
    pipeline = make_pipeline(kind, data, method, group=group, model=model)
    found: list[Any] = [report.loss for report in pipeline.run(data[:2])]
    found.append(pipeline.evaluate(data))
    found += [report.loss for report in pipeline.run(data[2:3])]
    penstock.Checkpoints(pipeline, folder).save()
    for other in (make_model(kind), model):
        resumed = make_pipeline(kind, data, method, group=group, model=other)
        penstock.Checkpoints(resumed, folder).load()
        assert resumed.batches == 3
        found += [report.loss for report in resumed.run(data[3:])]
        found.append(resumed.evaluate(data))
    return found


@pytest.mark.parametrize(
    ("kind", "method"), [pytest.param("GPT-2", "2bw", marks=pytest.mark.long), ("Llama 3", "1f1b")]
)
def test_a_model_of_transformers_goes_on_between_processes(pool: Pool, tmp_path: Any, kind: str, method: str) -> None:
    """To the bits of one process."""
    pytest.importorskip("transformers", reason="needs transformers: pip install penstock[hf]")
    _, found = pool.submit(train_twice_and_resume, kind, method, str(tmp_path / "two"), ranks=2)
    assert found == train_twice_and_resume(None, kind, method, str(tmp_path / "one"))
    assert found[4:7] == found[7:]


def test_a_model_whose_weights_are_no_numbers_any_more_is_not_said_to_have_changed() -> None:
    model, data = make_model("GPT-2"), batches("GPT-2", "right")
    pipeline = make_pipeline("GPT-2", data, "1f1b", model=model)
    list(pipeline.run(data[:1]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    value, _ = pipeline.evaluate(data)
    assert value != value
