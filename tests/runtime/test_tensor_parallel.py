"""Tensor parallelism within stages: numbers are those of the same run without it, up to roundings of float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import penstock
from penstock.errors import CapabilityError, CheckpointError, ConfigError
from penstock.models.gpt import Embedding, Head
from penstock.options.parallelism import DataParallel, Partition
from penstock.partition.tensor_parallel import divide_blocks
from penstock.runtime.rank.tensor_pieces import joined_pieces, pieces_in
from penstock.runtime.restore.saved_state import saved_older
from support.pool import Pool
from support.tensor_parallel_cases import SHAPE, TensorCase, Trained, gpt_pipeline, tokens, train_gpt


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """A loss of a user, who knows nothing of parts."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


CASES = [
    TensorCase(),
    TensorCase("2bw"),
    TensorCase("gpipe", stages=1, tensor=4),
    TensorCase("1f1b", stages=1, width=2, tied=True, options=(("loss", mean_loss),)),
    TensorCase("stash", clip=None),
    TensorCase("1f1b", tied=True),
    TensorCase("interleaved", options=(("recompute", "block"),)),
    TensorCase("chimera", microbatches=4),
]


def close(found: Tensor, wanted: Tensor) -> bool:
    """Whether two tensors are equal up to the roundings of a few sums in another order."""
    return found.shape == wanted.shape and bool((found - wanted).norm() <= 2e-5 * wanted.norm() + 1e-12)


def part_of(name: str, whole: Tensor, index: int, size: int) -> Tensor:
    """The part of a weight of a layer that a tensor rank has, by hand."""
    if name.endswith("query_key_value.weight"):  # the heads of this rank, of queries, keys and values
        heads = whole.view(3, SHAPE.heads, -1, SHAPE.width)
        here = SHAPE.heads // size
        return heads[:, index * here : (index + 1) * here].reshape(-1, SHAPE.width)
    if name.endswith(("mlp_in.weight", "embedding.weight", "head.out.weight")):  # rows, of a vocabulary those of tokens
        return whole.chunk(size)[index]
    if name.endswith(("attention_out.weight", "mlp_out.weight")):
        return whole.chunk(size, 1)[index]
    return whole


def assert_same_run(found: list[Trained], wanted: Trained, case: TensorCase) -> None:
    for place, trained in enumerate(found):
        assert trained.losses == found[place - place % case.tensor].losses  # those of a stage know the same
        assert trained.decided == found[0].decided
    assert len(found[0].decided) == len(wanted.decided) > 0
    if case.clip is not None:  # else nobody asks without tensor parallelism
        assert found[0].decided == [pytest.approx(figures, rel=2e-5) for figures in wanted.decided]
    if case.width == 1 and case.method != "chimera":  # of several pipelines and directions each knows its part
        assert found[-1].losses == pytest.approx(wanted.losses, rel=2e-5)
    whole = found[0].whole
    assert list(whole) == list(wanted.whole)
    assert all(close(whole[name], tensor) for name, tensor in wanted.whole.items())
    assert not any(trained.whole for trained in found[1:])


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.method}-{c.stages}-{c.width}-{c.tensor}")
def test_a_run_has_the_numbers_of_one_without_tensor_parallelism(pool: Pool, case: TensorCase) -> None:
    wanted = train_gpt(None, case.alone)
    ranks = case.stages * case.width * case.tensor
    found = pool.submit(train_gpt, case, ranks=ranks)
    assert_same_run(found, wanted, case)
    if case.clip is not None:
        assert sum(norm > case.clip for _, norm in wanted.decided) >= len(wanted.decided) / 2
    for rank, trained in enumerate(found):
        index = rank % case.tensor
        for name, tensor in trained.own.items():
            assert close(tensor, part_of(name, wanted.whole[name], index, case.tensor)), name
        assert_moments(trained.saved, wanted.saved, index, case.tensor)
        assert bool(trained.saved) == (rank < case.stages * case.tensor)  # of several pipelines the first saves


def assert_moments(saved: Mapping[str, Tensor], wanted: Mapping[str, Tensor], index: int, size: int) -> None:
    """The moments of Adam are those of the parts."""
    moments = [name for name in saved if name.startswith("optimizer/exp_avg")]
    for name in moments:
        what, kind, parameter = name.split("/", 2)
        whole = wanted[f"{what}/{kind.partition('~')[0]}/{parameter}"]
        assert ("~" in kind) == (part_of(parameter, whole, index, size) is not whole)
        assert close(saved[name], part_of(parameter, whole, index, size)), name


@pytest.mark.processes
@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_a_run_goes_on_from_its_checkpoint_to_the_same_bits(pool: Pool, tmp_path: Path, method: str) -> None:
    case = TensorCase(method)
    wanted = pool.submit(train_gpt, case, (3, 3), ranks=4)
    pool.submit(train_gpt, case, (3,), str(tmp_path), ranks=4)
    found = pool.submit(train_gpt, case, (3,), str(tmp_path), ranks=4)
    for here, there in zip(found, wanted, strict=True):
        assert here.saved.keys() == there.saved.keys()
        assert here.losses == there.losses[len(there.losses) // 2 :]
        assert all(torch.equal(tensor, there.saved[name]) for name, tensor in here.saved.items())
        assert all(torch.equal(tensor, there.whole[name]) for name, tensor in here.whole.items())


DEGREES = [
    (TensorCase(), TensorCase(tensor=1)),
    (TensorCase(tensor=1), TensorCase()),
    (TensorCase(), TensorCase(stages=1, tensor=4)),
    (TensorCase("2bw", stages=1, tensor=4), TensorCase("2bw")),
    (TensorCase("2bw"), TensorCase("2bw", tensor=1)),
    (TensorCase(tied=True), TensorCase(tied=True, stages=1, width=2, microbatches=3)),
]


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(("before", "after"), DEGREES, ids=str)
def test_a_checkpoint_goes_on_with_another_number_of_tensor_ranks(
    pool: Pool, tmp_path: Path, before: TensorCase, after: TensorCase
) -> None:
    """Weights, older weights and moments are found whatever parts they were saved in."""

    def train(case: TensorCase) -> list[Trained]:
        processes = case.stages * case.width * case.tensor if case.tensor > 1 else 0
        run = partial(pool.submit, train_gpt, ranks=processes) if processes else alone
        return run(case, (3,), str(tmp_path))

    def alone(*args: Any) -> list[Trained]:
        return [train_gpt(None, *args)]

    train(before)
    with_parts = train(after)[0]
    (tmp_path / "alone").mkdir()
    train_gpt(None, before.alone, (3,), str(tmp_path / "alone"))
    wanted = train_gpt(None, after.alone, (3,), str(tmp_path / "alone"))
    assert all(close(with_parts.whole[name], tensor) for name, tensor in wanted.whole.items())


def load_weights(group: dist.ProcessGroup, case: TensorCase) -> list[bool]:
    """Load what the whole model had before a run; then the next run is that run again."""
    pipeline = gpt_pipeline(group, case)
    first = {name: tensor.clone() for name, tensor in gpt_pipeline(None, case.alone).full_state_dict().items()}
    with torch.no_grad():
        for tensor in pipeline.state_dict().values():
            tensor.add_(1.0)
    pipeline.load_state_dict(first)
    whole = pipeline.full_state_dict()
    return [torch.equal(whole[name], tensor) for name, tensor in first.items()] if whole else []


@pytest.mark.processes
def test_weights_of_the_whole_model_are_loaded_and_come_back(pool: Pool) -> None:
    first, *others = pool.submit(load_weights, TensorCase(), ranks=4)
    assert first
    assert all(first)
    assert not any(others)


def by_mesh(group: dist.ProcessGroup, case: TensorCase) -> tuple[int, list[float]]:
    del group
    mesh = init_device_mesh("cpu", (case.width, case.stages, case.tensor), mesh_dim_names=("width", "depth", "inner"))
    pipeline = gpt_pipeline(None, case.alone, data_parallel=DataParallel(mesh=mesh))
    reports = list(pipeline.run(tokens(3)))
    return pipeline.grid.tensor.index, [report.loss for report in reports if report.loss is not None]


@pytest.mark.processes
def test_the_inner_dimension_of_a_mesh_says_how_many_share_a_stage(pool: Pool) -> None:
    wanted = pool.submit(train_gpt, TensorCase(), ranks=4)
    found = pool.submit(by_mesh, TensorCase(), ranks=4)
    assert [index for index, _ in found] == [0, 1, 0, 1]
    assert [losses for _, losses in found] == [trained.losses for trained in wanted]


class Mlp(nn.Module):
    """A block of a user, with biases: one is divided, the other is added once."""

    def __init__(self, width: int = 12, inner: int = 24) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def parallelize(self, mesh: DeviceMesh) -> None:
        parallelize_module(self, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def own_blocks(
    group: dist.ProcessGroup | None,
    tensor: int,
    inner: int = 24,
    seed: int = 0,
    tied: Mapping[str, str] | None = None,
) -> Any:
    """Train blocks of a user by SGD, whose steps are the gradients."""
    rank = 0 if group is None else dist.get_rank(group)
    torch.manual_seed(seed * rank)
    blocks = {f"block{i}": Mlp(inner=inner) for i in range(4)} | {"head": nn.Linear(12, 3)}
    torch.manual_seed(1)
    data = [(torch.randn(8, 12), torch.randn(8, 3)) for _ in range(2)]
    pipeline = penstock.Pipeline(
        blocks,
        method="1f1b",
        stages=2,
        microbatches=2,
        loss=nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=1.0),
        partition=Partition(tied=tied, tensor_parallel=tensor),
        group=group,
    )
    before = dict(pipeline.full_state_dict())
    list(pipeline.run(data[:1]))
    after = dict(pipeline.full_state_dict())
    list(pipeline.run(data[1:]))
    return {name: before[name] - tensor for name, tensor in after.items()}, pipeline.evaluate(data)


@pytest.mark.processes
def test_gradients_of_blocks_of_a_user_are_those_of_one_process(pool: Pool) -> None:
    wanted, evaluated = own_blocks(None, 1)
    found = pool.submit(own_blocks, 2, ranks=4)
    gradients, _ = found[0]
    assert gradients.keys() == wanted.keys()
    assert all(close(gradients[name], gradient) for name, gradient in wanted.items())
    assert wanted["block0.down.bias"].norm() > 0
    assert {pair for _, pair in found if pair is not None} == {found[-1][1]}
    assert found[-1][1] == pytest.approx(evaluated, rel=2e-5)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("inner", "seed", "said"),
    [
        (23, 0, r"dimension 0 of a tensor of shape \(23, 12\) cannot be divided into 1 x 2 equal parts"),
        (24, 5, r"do not begin with the same weights on ranks \d and \d, which share them by tensor parallelism"),
    ],
)
def test_what_cannot_be_shared_is_refused(pool: Pool, inner: int, seed: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        pool.submit(own_blocks, 2, inner, seed, ranks=4)


def tie_divided(group: dist.ProcessGroup) -> str:
    with pytest.raises(CapabilityError) as caught:
        own_blocks(group, 2, 12, tied={"block3.down.weight": "block0.up.weight"})
    return str(caught.value)


@pytest.mark.processes
def test_stages_that_share_a_parameter_divide_it_alike(pool: Pool) -> None:
    tied = {"block3.up.weight": "block0.up.weight"}
    wanted, _ = own_blocks(None, 1, tied=tied)
    gradients, _ = pool.submit(own_blocks, 2, 24, 0, tied, ranks=4)[0]
    assert gradients.keys() == wanted.keys()
    assert all(close(gradients[name], gradient) for name, gradient in wanted.items())
    for said in pool.submit(tie_divided, ranks=4):
        assert said.startswith("block3.down.weight and block0.up.weight are one parameter, but are divided by tensor")
        assert "along dimension 1 and along dimension 0" in said


def shared_in_a_stage(group: dist.ProcessGroup) -> tuple[bool, list[str]]:
    mesh, first, second, plain = DeviceMesh.from_group(group, "cpu"), Mlp(), Mlp(), nn.Linear(12, 24)
    second.up.weight = first.up.weight
    divide_blocks({"a": first, "b": second}, mesh)
    said = []
    for other in (plain, Mlp(12, 12)):
        block = Mlp(12, 12 if isinstance(other, Mlp) else 24)
        (other.down if isinstance(other, Mlp) else other).weight = block.up.weight
        with pytest.raises(CapabilityError) as caught:
            divide_blocks({"a": block, "b": other}, mesh)
        said.append(str(caught.value))
    return second.up.weight is first.up.weight, said


@pytest.mark.processes
def test_blocks_of_a_stage_that_share_a_parameter_share_its_part(pool: Pool) -> None:
    for one, said in pool.submit(shared_in_a_stage, ranks=2):
        assert one
        assert "b.weight and a.up.weight are one parameter, but are divided by tensor parallelism not at all" in said[0]
        assert "b.down.weight and a.up.weight are one parameter" in said[1]


def divided_in(group: dist.ProcessGroup, vocabulary: int) -> tuple[set[str], tuple[int, ...]]:
    """What is divided of embedding and head, and the shape of the logits that are here."""
    shape = replace(SHAPE, vocabulary=vocabulary)
    blocks = {"embedding": Embedding(shape), "head": Head(shape)}
    splits = divide_blocks(blocks, DeviceMesh.from_group(group, "cpu"))
    logits: Any = blocks["head"](blocks["embedding"](torch.zeros(1, 3, dtype=torch.long)))
    return set(splits), tuple((logits.to_local() if splits else logits).shape)


@pytest.mark.processes
def test_a_vocabulary_is_divided_where_processes_can_share_it_evenly(pool: Pool) -> None:
    assert pool.submit(divided_in, 64, ranks=2) == [({"embedding.weight", "head.out.weight"}, (1, 3, 32))] * 2
    assert pool.submit(divided_in, 63, ranks=2) == [(set(), (1, 3, 63))] * 2


def with_hooks(group: dist.ProcessGroup, size: int) -> str:
    block = Mlp()
    block.up.weight.register_hook(lambda gradient: gradient)  # type: ignore[no-untyped-call]
    with pytest.raises(CapabilityError) as caught:
        divide_blocks({"a": block}, DeviceMesh.from_group(group, "cpu"))
    assert size == dist.get_world_size(group)
    return str(caught.value)


@pytest.mark.processes
def test_hooks_that_would_be_lost_are_refused(pool: Pool) -> None:
    for said in pool.submit(with_hooks, 2, ranks=2):
        assert said.startswith("a.up.weight is divided by tensor parallelism, and has hooks, which would be lost")


class OlderParts:
    """A saved state of a model all of whose parameters are divided."""

    facts: Mapping[str, Any] = {}
    names = ("weights~0.1.0of2/a.weight", "weights~0.1.1of2/a.weight", "older~0.1.0of2/a.weight")

    def tensor(self, name: str) -> Tensor:
        raise KeyError(name)


def test_older_weights_are_found_where_there_are_parts_only() -> None:
    assert saved_older(OlderParts(), None) == 1


def test_a_part_that_is_missing_is_told() -> None:
    pieces = pieces_in(OlderParts.names)
    tensors = {name: torch.full((1, 2), float(place)) for place, name in enumerate(OlderParts.names)}
    assert joined_pieces("a", pieces["weights/a.weight"], tensors.__getitem__).tolist() == [[0.0, 0.0], [1.0, 1.0]]
    with pytest.raises(CheckpointError, match="the checkpoint lacks parts of older/a.weight: 1 of 2 are there"):
        joined_pieces("older/a.weight", pieces["older/a.weight"], tensors.__getitem__)


def skipped(group: dist.ProcessGroup | None, case: TensorCase) -> list[tuple[bool, float]]:
    """Train in float16 under a scale that overflows at first; returns what was decided of each batch."""
    scale = penstock.LossScale(initial=2.0**26, backoff=0.125)
    pipeline = gpt_pipeline(group, case, precision=penstock.Precision("fp16", loss_scale=scale))
    decided = [decision for report in pipeline.run(tokens(8)) for decision in report.decided]
    return [(decision.skipped, decision.scale) for decision in (*decided, *pipeline.decided())]


@pytest.mark.long
@pytest.mark.processes
def test_all_skip_an_update_whose_gradient_overflows(pool: Pool) -> None:
    wanted = skipped(None, TensorCase().alone)
    found = pool.submit(skipped, TensorCase(), ranks=4)
    assert all(decided == wanted for decided in found)
    assert {skips for skips, _ in wanted} == {True, False}


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_low_precision_is_off_by_its_own_roundings(pool: Pool, method: str) -> None:
    case = TensorCase(method, options=(("precision", "bf16"), ("recompute", "stage")))
    wanted, found = train_gpt(None, case.alone), pool.submit(train_gpt, case, ranks=4)
    losses = [trained.losses for trained in found if trained.losses]
    assert losses == [pytest.approx(wanted.losses, rel=2e-3)] * case.tensor
    for name, tensor in wanted.whole.items():
        assert (found[0].whole[name] - tensor).norm() <= 0.05 * tensor.norm(), name
