"""A model, an optimizer or data that fail: said where it happens, and nobody goes on with wrong numbers."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock
from penstock.errors import CapabilityError, ConfigError, DataError, PenstockError
from support.cases import METHODS, Case, make_batches, make_pipeline
from support.pool import Pool
from support.runtime_faults import Fails, divide_by_zero, refuses_to_go_on, what_happens, with_block


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_block_that_raises(method: str, stage: int) -> None:
    case = Case(method, 3, 2)
    pipeline = make_pipeline(case, **with_block(stage, Fails(5, divide_by_zero), 3))
    with pytest.raises(ZeroDivisionError, match="a block of the user's") as caught:
        list(pipeline.run(make_batches(case)))
    block, place, left = caught.value.__notes__
    assert block == "raised in block 'extra'"
    assert place == f"raised by F5 of stage {stage} on rank {stage}, the forward of microbatch 1 of batch 2"
    assert re.match(r"batch(es \d to)? \d (was|were) under way .* the weights here are whole, of (one|diff)", left)
    refuses_to_go_on(pipeline, case)


class FailsBackward(torch.autograd.Function):
    """The identity, the backward of which fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ZeroDivisionError("a backward of the user's")


def test_a_backward_that_raises() -> None:
    case = Case("2bw", 3, 2)
    pipeline = make_pipeline(case, **with_block(1, FailsBackward.apply, 3))
    with pytest.raises(ZeroDivisionError, match="a backward of the user's") as caught:
        list(pipeline.run(make_batches(case)))
    assert caught.value.__notes__[0] == "raised by B0 of stage 1 on rank 1, the backward of microbatch 0 of batch 0"
    refuses_to_go_on(pipeline, case)


def test_an_optimizer_that_raises() -> None:
    class Third(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> None:
            self.steps += 1
            1 / (3 - self.steps)

    case = Case("1f1b", 2, 2, skips=())
    pipeline = make_pipeline(case, optimizer=lambda named: Third(named, lr=0.1))
    with pytest.raises(ZeroDivisionError) as caught:
        list(pipeline.run(make_batches(case)))
    assert re.match("raised by STEP2 of stage . on rank ., the optimizer step of batch 2$", caught.value.__notes__[0])
    assert "the update to the newest has failed" in caught.value.__notes__[1]
    refuses_to_go_on(pipeline, case)


def test_a_block_that_raises_after_the_loop_was_left() -> None:
    """Python swallows the error if the loop's `break` closes the run, so the pipeline must remember it."""
    case = Case("2bw", 3, 3)
    pipeline = make_pipeline(case, **with_block(0, Fails(5, divide_by_zero), 3))
    run = pipeline.run(make_batches(case))
    next(run)
    with pytest.raises(ZeroDivisionError):
        run.close()  # type: ignore[attr-defined]
    refuses_to_go_on(pipeline, case)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda output, target: output, r"scalar tensor, or \(sum, weight\); got a tensor of shape"),
        (lambda output, target: 3.0, r"scalar tensor, or \(sum, weight\); got float"),
        (lambda output, target: (output.sum(), 1.0, 2.0), r"scalar tensor, or \(sum, weight\); got tuple"),
        (lambda output, target: (output.sum(), -1.0), r"must not be negative, got -1\.0"),
        (lambda output, target: (output.sum(), float("nan")), r"must not be negative, got nan"),
    ],
)
def test_a_loss_that_is_none(loss: Any, message: str) -> None:
    pipeline = make_pipeline(Case("1f1b", 2, 2), loss=loss)
    with pytest.raises(ConfigError, match="stage 1 on rank 1: .*" + message):
        list(pipeline.run(make_batches(Case("1f1b", 2, 2))))


@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_wrong_number_of_microbatches(batch: int, count: int) -> None:
    case = Case("1f1b", 2, 2)
    batches = make_batches(case)
    batches[batch] = (batches[batch] * 2)[:count]
    with pytest.raises(DataError, match=f"batch {batch} has {count} microbatches, but the schedule takes 2 per batch"):
        list(make_pipeline(case).run(batches))


def test_what_is_no_pair() -> None:
    batches: Any = [[[torch.zeros(2, 4, dtype=torch.int64)]] * 3] * 2
    with pytest.raises(DataError, match=r"microbatch 0 is not a pair \(input, target\) but a list of 1"):
        list(make_pipeline(Case("1f1b", 2, 3)).run(batches))


def with_own_data(
    group: dist.ProcessGroup, case: Case, data: dict[int, Any], timeout: float, stream: bool = False
) -> tuple[str, str]:
    """Each rank with its own idea of the data, which may not say how many they are."""
    own = data.get(dist.get_rank(group), make_batches(case))
    return what_happens(group, case, iter(own) if stream else own, timeout)


@pytest.mark.parametrize("part", ["input", "target", "length"])
def test_data_that_differ_between_first_and_last_stage(pool: Pool, part: str) -> None:
    case = Case("1f1b", 3, 2)
    other = make_batches(case)
    inputs, targets = other[1][1]
    if part == "length":
        other[1][1] = inputs[:1], targets[:1]
    else:
        other[1][1] = (inputs.roll(1, 0), targets) if part == "input" else (inputs, targets.roll(1, 0))
    said = pool.submit(with_own_data, case, {2: other}, 1.0, ranks=3, fresh=True)
    assert said[2][0] == "DataError"
    assert "microbatch 1 of batch 1 is not the same on the first and the last stage" in said[2][1]
    assert "the forward of microbatch 1 of batch 1" in said[2][1]
    assert [kind for kind, _ in said[:2]] == ["TransportError"] * 2


def test_data_that_end_too_early_where_updates_may_be_taken_back(pool: Pool) -> None:
    """Nobody can tell in time there that a batch is missing; all are told the cause."""
    case = Case("zb-h2-post", 2, 4, width=2)
    said = pool.submit(with_own_data, case, {3: make_batches(case)[:3]}, 4.0, True, ranks=4, fresh=True)
    reason = "the data ends after 3 batches, but the first stage has sent batch 3"
    assert said[3][0] == "DataError"
    assert said[3][1].startswith(f"{reason} raised by F12 of stage 1 on rank 1, the forward of microbatch 0 of batch 3")
    assert all(f"rank 3 could not go on (DataError: {reason}; raised by F12" in text for _, text in said[:3])


def test_data_that_fail_at_once_on_the_first_stage(pool: Pool) -> None:
    case = Case("1f1b", 2, 2)
    said = pool.submit(with_own_data, case, {0: [[]]}, 1.0, ranks=2, fresh=True)
    reason = "batch 0 has 0 microbatches, but the schedule takes 2 per batch"
    assert said[0] == ("DataError", reason)
    assert said[1] == ("DataError", f"rank 0 could not begin (DataError: {reason})")


@pytest.mark.parametrize("rank", [0, 1])
def test_data_that_are_none_on_one_rank(pool: Pool, rank: int) -> None:
    """Nothing has begun, so all ranks hear of it, and the pipelines are as good as before."""
    said = pool.submit(with_own_data, Case("1f1b", 2, 2), {rank: 5}, 1.0, ranks=2)
    reason = "batches must be an iterable of batches, such as a DataLoader or a list; got int"
    assert said[rank] == ("DataError", reason)
    assert said[1 - rank] == ("DataError", f"rank {rank} could not begin (DataError: {reason})")


def test_a_batch_that_is_no_sequence() -> None:
    case = Case("1f1b", 2, 2)
    with pytest.raises(DataError, match=r"batch 0 is a generator; a batch is a pair \(inputs, targets\)"):
        list(make_pipeline(case).run([(pair for pair in make_batches(case)[0])]))  # type: ignore[list-item]


class _Float(nn.Module):
    """As Llama's norms and many heads do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()


@pytest.mark.parametrize("stages", [1, 2])  # in front of a block of the same stage, or of the next one
@pytest.mark.parametrize("second", [partial(nn.Linear, 3, 3), partial(nn.LayerNorm, 3)])
def test_a_block_that_returns_float32_to_weights_in_bf16_is_named(stages: int, second: Callable[[], nn.Module]) -> None:
    """Where plain torch says only `mat1 and mat2 must have the same dtype`."""
    blocks = {"one": nn.Sequential(nn.Linear(3, 3), _Float()), "two": second()}
    pipeline = penstock.Pipeline(
        blocks, method="1f1b", stages=stages, microbatches=2, precision="bf16",
        loss=nn.functional.mse_loss, optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )  # fmt: skip
    said = "block 'two': the block before it returned float32, but with precision='bf16' its weights are bfloat16"
    with pytest.raises(CapabilityError, match=said):
        list(pipeline.run([(torch.ones(4, 3), torch.ones(4, 3))]))


def test_the_last_block_may_return_float32_for_the_loss() -> None:
    blocks = [nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), _Float())]
    pipeline = penstock.Pipeline(
        blocks, method="1f1b", stages=2, microbatches=2, precision="bf16",
        loss=nn.functional.mse_loss, optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )  # fmt: skip
    assert len(list(pipeline.run([(torch.ones(4, 3), torch.ones(4, 3))]))) == 1


# --- what an error leaves -------------------------------------------------------------------------------------------


def pairs(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(8, 4, generator=generator), torch.randn(8, 4, generator=generator)) for _ in range(count)]


def picky(output: Tensor, target: Tensor) -> Tensor:
    if target.shape[1] == 7:
        raise ZeroDivisionError("a loss of the user's")
    return nn.functional.mse_loss(output, target)


_X = torch.ones(8, 4)
EVALUATIONS: dict[str, tuple[list[Any], str]] = {
    "a wrong shape": ([(torch.ones(8, 5), _X)], "mat1 and mat2"),
    "no target": ([(_X, None)], "'NoneType' object has no attribute"),
    "a loss that raises": ([*pairs(2, 1), (_X, torch.ones(8, 7)), *pairs(2, 2)], "a loss of the user's"),
}


def small(method: str, group: dist.ProcessGroup | None = None, width: int = 1, **changes: Any) -> penstock.Pipeline:
    torch.manual_seed(0)
    blocks = changes.pop("blocks", None) or [nn.Linear(4, 4), nn.Dropout(0.1), nn.Tanh(), nn.Linear(4, 4)]
    sharding = "full" if width > 1 and method == "1f1b" else None
    options: dict[str, Any] = {
        "stages": 2, "microbatches": 2, "loss": picky, "optimizer": lambda named: torch.optim.Adam(named, lr=0.1),
        "data_parallel": penstock.DataParallel(width, sharding=sharding), "group": group,
    }  # fmt: skip
    return penstock.Pipeline(blocks, method=method, **(options | changes))


def fails_to_evaluate(group: dist.ProcessGroup | None, method: str, width: int) -> dict[str, list[str]]:
    """All evaluations that fail, between and within runs, beside a pipeline that does not try them."""
    pipeline, wanted, said = small(method, group, width), small(method, group, width), dict[str, list[str]]()

    def raises(run: Callable[[], Iterable[Any] | None], name: str) -> None:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            list(run() or ())
        said.setdefault(name, []).append(f"{caught.type.__name__}: {caught.value}")

    for name, (data, _) in EVALUATIONS.items():
        raises(partial(pipeline.evaluate, data), name)
        assert [r.loss for r in pipeline.run(pairs(2, 3))] == [r.loss for r in wanted.run(pairs(2, 3))]
        assert pipeline.evaluate(pairs(2, 4)) == wanted.evaluate(pairs(2, 4))
        raises(partial(pipeline.run, pairs(5, 5), evaluate=penstock.Evaluating(2, data)), name)
        list(wanted.run(pairs(5, 5)[: pipeline.batches - wanted.batches]))
        assert pipeline.evaluate(pairs(2, 4)) == wanted.evaluate(pairs(2, 4))
    same, state = wanted.state_dict(), pipeline.state_dict()
    assert all(torch.equal(tensor, same[name]) for name, tensor in state.items())
    return said


@pytest.mark.parametrize(("method", "width"), [("2bw", 1), ("stash", 1), ("zb-v", 1), ("1f1b", 2)])
def test_an_evaluation_that_fails_takes_nothing_away(method: str, width: int) -> None:
    for name, said in fails_to_evaluate(None, method, width).items():
        assert len(said) == 2
        assert all(EVALUATIONS[name][1] in text for text in said)


@pytest.mark.parametrize(("method", "width"), [("2bw", 1), ("zb-v", 1), ("1f1b", 2)])
def test_all_ranks_hear_of_an_evaluation_that_fails(pool: Pool, method: str, width: int) -> None:
    for found in pool.submit(fails_to_evaluate, method, width, ranks=2 * width):
        for name, said in found.items():
            assert len(said) == 2
            assert all(EVALUATIONS[name][1] in text for text in said), said
            assert all("could not evaluate" in text for text in said if text.startswith("PenstockError"))


class Interrupts(nn.Linear):
    """Presses Ctrl-C in a forward of an evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and x.shape[1] == 4:
            signal.raise_signal(signal.SIGINT)
        return super().forward(x)


class NoForm(nn.Module):
    """Returns in an evaluation what cannot travel."""

    def forward(self, x: Tensor) -> Any:
        return x if self.training else [x, object()]


def evaluates_with(group: dist.ProcessGroup | None, block: type[nn.Module], width: int) -> list[str]:
    """An evaluation that a block ends; the training behind it is as if there had been none."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.manual_seed(0)
    found, said = [], []
    for evaluates in (False, True):
        torch.manual_seed(0)
        last = Interrupts(4, 4) if block is Interrupts else NoForm()
        pipeline = small(
            "2bw", group, width, blocks=[nn.Linear(4, 4), last, nn.Linear(4, 4)], stages=2, partition=[2, 1]
        )
        list(pipeline.run(pairs(2, 1)))
        for _ in range(2 * evaluates):
            with pytest.raises((KeyboardInterrupt, PenstockError)) as caught:
                pipeline.evaluate(pairs(50, 2))
            said.append(f"{caught.type.__name__}: {caught.value}")
        found.append([report.loss for report in pipeline.run(pairs(2, 3))])
    assert found[0] == found[1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return said


@pytest.mark.parametrize("block", [Interrupts, NoForm])
def test_ctrl_c_and_outputs_that_cannot_travel_end_an_evaluation_alone(block: type[nn.Module]) -> None:
    said = evaluates_with(None, block, 1)
    assert all(("KeyboardInterrupt" if block is Interrupts else "a block returned a object") in text for text in said)


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("block", [Interrupts, NoForm])
def test_ctrl_c_and_outputs_that_cannot_travel_end_an_evaluation_on_all_ranks(
    pool: Pool, block: type[nn.Module], width: int
) -> None:
    for said in pool.submit(evaluates_with, block, width, ranks=2 * width):
        assert all(
            ("KeyboardInterrupt" if block is Interrupts else "a block returned a object") in text for text in said
        ), said


class Refuses(nn.Linear):
    """Raises in its forward number `at`."""

    def __init__(self, at: int) -> None:
        super().__init__(4, 4)
        self.left = at

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if not self.left:
            raise ZeroDivisionError("a block of the user's")
        return super().forward(x)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("method", ["1f1b", "2bw", "2bw-ahead", "stash"])
def test_the_advice_after_an_error_in_training_works(tmp_path: Path, method: str, precision: Any) -> None:
    """Each of both ways, as the message says: with the weights that are left, and with the last checkpoint."""
    torch.manual_seed(0)
    blocks = [nn.Linear(4, 4), nn.Tanh(), Refuses(11), nn.Linear(4, 4)]
    make = partial(
        penstock.Pipeline, blocks, method=method, stages=2, microbatches=2, loss=nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.Adam(named, lr=0.1), precision=precision,
    )  # fmt: skip
    broken = make()
    with pytest.raises(ZeroDivisionError) as caught:
        list(broken.run(pairs(9, 1), save=penstock.Checkpoints(broken, tmp_path).every(2)))
    with pytest.raises(PenstockError) as again:
        broken.evaluate(pairs(1, 1))
    for said in (caught.value.__notes__[-1], str(again.value)):
        assert re.search(r"batch(es 5 to)? [56] (was|were) under way", said) or method.startswith("2bw")
        assert "Make a new Pipeline of the same model or blocks, which have these weights" in said
        assert "load the last checkpoint into it, which has both: penstock.Checkpoints(pipeline, folder).load()" in said
    left = {name: tensor.clone() for name, tensor in broken.state_dict().items()}
    pipeline = make()
    assert all(torch.equal(tensor, left[name]) for name, tensor in pipeline.state_dict().items())
    assert len(list(pipeline.run(pairs(2, 2)))) == 2
    pipeline = make()
    checkpoints = penstock.Checkpoints(pipeline, tmp_path)
    loaded = checkpoints.load()
    assert loaded is not None
    list(pipeline.run(pairs(9, 1)[loaded.batch :], save=checkpoints.every(2)))
    torch.manual_seed(0)
    blocks[:] = [nn.Linear(4, 4), nn.Tanh(), Refuses(0), nn.Linear(4, 4)]
    wanted = make()
    list(wanted.run(pairs(9, 1), save=penstock.Checkpoints(wanted, tmp_path / "wanted").every(2)))
    same = wanted.state_dict()
    assert all(torch.equal(tensor, same[name]) for name, tensor in pipeline.state_dict().items())


def breaks(group: dist.ProcessGroup, folder: str) -> tuple[list[str], dict[str, Tensor]]:
    """Train until a block raises on rank 1, and save the weights as the message says."""
    torch.manual_seed(0)
    blocks = [nn.Linear(4, 4), nn.Tanh(), Refuses(11 if dist.get_rank(group) else 0), nn.Linear(4, 4)]
    pipeline = small("2bw", group, blocks=blocks)
    with pytest.raises((ZeroDivisionError, PenstockError)) as caught:
        list(pipeline.run(pairs(9, 1), save=penstock.Checkpoints(pipeline, folder).every(2)))
    weights = pipeline.state_dict()
    torch.save(weights, f"{folder}/rank{dist.get_rank(group)}.pt")
    return [str(caught.value), *caught.value.__notes__], {name: tensor.clone() for name, tensor in weights.items()}


def starts_again(group: dist.ProcessGroup, folder: str) -> tuple[int, dict[str, Tensor]]:
    """Go on from the last checkpoint; and with the weights that were saved."""
    blocks = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4)]
    pipeline = small("2bw", group, blocks=blocks)
    loaded = penstock.Checkpoints(pipeline, folder).load()
    assert loaded is not None
    list(pipeline.run(pairs(9, 1)[loaded.batch :]))
    pipeline = small("2bw", group, blocks=blocks)
    pipeline.load_state_dict({**torch.load(f"{folder}/rank0.pt"), **torch.load(f"{folder}/rank1.pt")})
    left = {name: tensor.clone() for name, tensor in pipeline.state_dict().items()}
    assert len(list(pipeline.run(pairs(2, 2)))) == 2
    return loaded.batch, left


def test_all_processes_start_again_as_the_message_says(pool: Pool, tmp_path: Path) -> None:
    broken = pool.submit(breaks, str(tmp_path), ranks=2, fresh=True)
    assert all(
        re.search(r"Start all processes again, and load the last checkpoint: .*\.load\(\)", said[-1])
        for said, _ in broken
    )
    assert all(
        "pipeline.load_state_dict({**torch.load('rank0.pt'), **torch.load('rank1.pt')" in s[-1] for s, _ in broken
    )
    started = pool.submit(starts_again, str(tmp_path), ranks=2, fresh=True)
    for (_, wanted), (batch, found) in zip(broken, started, strict=True):
        assert batch == 4
        assert all(torch.equal(tensor, found[name]) for name, tensor in wanted.items())
