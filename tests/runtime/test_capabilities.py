"""What the runtime does not offer is refused before anything runs, by name."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from penstock.errors import CapabilityError, ConfigError, ScheduleError
from penstock.options.all_options import PipelineOptions
from penstock.options.parallelism import DataParallel, Microbatches, Partition
from penstock.options.passes import Precision, Recompute, Staleness
from penstock.options.run import Device, Group
from penstock.options.updates import Divergence
from penstock.partition.sequence_slices import Slicing
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.plan.capabilities import check_offered, idle_options
from penstock.schedule.methods.data_parallel_sync import Combine
from penstock.schedule.text_parser import parse_schedule
from penstock.weights.decision import LossScale
from support.cases import Case, assert_same, expected, make_pipeline, train
from support.plain_training import make_model
from support.pool import Pool
from support.schedules import make_schedule

OFFERED = (
    "chimera", "dualpipe_v", "frozen_front", "interleaved", "local_losses", "offload", "seq1f1b", "two_branches",
    "zb_h1", "breadth_first", "post_validation", "parked", "zb_v", "xpipe", "nf1b", "blend", "pipemare_recompute",
    "swapped",
)  # fmt: skip
GOLDEN = sorted((Path(__file__).parent.parent / "golden").glob("*.txt"))


def wrong_group(group: dist.ProcessGroup) -> str:
    with pytest.raises(ConfigError) as caught:
        make_pipeline(Case("1f1b", 3, 2), group)
    return str(caught.value)


def test_a_group_of_the_wrong_size(pool: Pool) -> None:
    (said,) = set(pool.submit(wrong_group, ranks=2))
    assert said.startswith("the schedule has 3 ranks, the process group 2; start 3 processes (torchrun")


@pytest.mark.parametrize("divisor", [0.0, -1.0, float("nan")])
def test_a_divisor_that_is_not_positive(divisor: float) -> None:
    with pytest.raises(ConfigError, match="divisor must be positive"):
        make_pipeline(Case("1f1b", 2, 2), divisor=divisor)


@pytest.mark.parametrize("path", [path for path in GOLDEN if path.stem not in OFFERED], ids=lambda path: path.stem)
def test_schedules_that_the_runtime_does_not_offer(path: Path) -> None:
    schedule = parse_schedule(path.read_text())
    with pytest.raises(CapabilityError, match=f"{schedule.name}: the runtime"):
        make_pipeline(Case("1f1b", 4, 1), method=schedule, balance=None)


@pytest.mark.parametrize("path", [path for path in GOLDEN if path.stem in OFFERED], ids=lambda path: path.stem)
def test_schedules_that_it_offers(path: Path) -> None:
    check_offered(parse_schedule(path.read_text()))


@pytest.mark.parametrize("passes", ["F0^t F1^t I0..1^t W0^t W1^t", "F0..1^t B0^t B1^t"])
def test_units_of_several_microbatches_are_not_run_in_part(passes: str) -> None:
    text = f"schedule several\nrule flush\nmicrobatches 2\nnodes 0@0\nrank 0: {passes} STEP[t]\n"
    with pytest.raises(CapabilityError, match="several: the runtime"):
        make_pipeline(Case("1f1b", 1, 2), method=parse_schedule(text))


def test_fused_pairs_are_run_one_after_the_other() -> None:
    case = Case("1f1b", 1, 2)
    text = "schedule 1f1b\nrule flush\nmicrobatches 2\nnodes 0@0\nrank 0: F0^t [B0^t+F1^t] B1^t STEP[t]\n"
    assert_same(train(None, case, method=parse_schedule(text)), expected(case))


def test_a_drain_of_several_microbatches_is_not_run_in_part() -> None:
    """Whatever the books count has run."""
    text = """
        schedule stash
        rule stash
        microbatches 2
        nodes 0@0
        rank 0: F0^t-1 B-2^t-2 F1^t-1 B-1^t-2 STEP[t-1]
        drain 0: B-2..-1^t-2 STEP[t-1]
    """
    late = Case("stash", 1, 2)
    assert_same(train(None, late, method=parse_schedule(text)), expected(Case("2bw", 1, 2)))  # a delay of one


def test_periods_of_the_batch_before_are_not_run() -> None:
    """Their messages would say too late that the data has ended."""
    row = "F-1^t-1 B-1^t-1 STEP[t-1]"
    text = f"rule stash\nmicrobatches 1\nnodes 0@0\nrank 0: {row}\ndrain 0: {row}\n"
    with pytest.raises(CapabilityError, match="periods that begin the forwards of their own batch"):
        make_pipeline(Case("1f1b", 1, 1), method=parse_schedule(text))


@pytest.mark.parametrize("schedule", [["F0 B0"], 3])
def test_what_is_no_schedule(schedule: Any) -> None:
    with pytest.raises(ConfigError, match="method must be .* make_schedule, check or load_schedule returned"):
        make_pipeline(Case("1f1b", 1, 2), method=schedule)


def test_a_schedule_that_is_wrong_is_not_run() -> None:
    """A schedule is proven before anything runs, whoever made it."""
    text = str(make_schedule("1f1b", 2, 2))
    assert "B1^t" in text
    with pytest.raises(ScheduleError, match="microbatch 0"):
        make_pipeline(Case("1f1b", 2, 2), method=parse_schedule(text.replace("B1^t", "B0^t")))


# --- options that find nothing to act on ------------------------------------------------------------------------------

WIDE, ONE = {"data_parallel": 2}, {"stages": 1}
BF16 = Precision(boundary_gradients="bf16")
IN_FLIGHT = Microbatches(4, in_flight=9)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bf16 of float64": (
        {"dtype": torch.float64, "precision": "bf16"},
        r"precision='bf16' is for .*\(0\.weight, 0\.bias\)",
    ),
    "fp16 of float64": ({"dtype": torch.float64, "precision": "fp16"}, r"leave precision out"),
    "boundaries of float64": ({"dtype": torch.float64, "precision": BF16}, r"boundary_gradients='bf16' is for float32"),
    "graphs on a CPU": ({"device": Device("cpu", cuda_graphs=True)}, "cuda_graphs takes a GPU"),
    "sharding of one": (
        {"data_parallel": DataParallel(1, sharding="optimizer")},
        "but there is one; set data_parallel",
    ),
    "sharding of one that overlaps": (
        {"method": "2bw-eager", "data_parallel": DataParallel(1, sharding="full")},
        "there is one; set data_parallel .* to 2 or more. Besides, sharding full does not go with rule 'double-buffer'",
    ),
    "averaging of one": ({"data_parallel": DataParallel(1, combine=Combine("average", every=4))}, "at least 2"),
    "slices of whole sequences": ({"partition": Partition(slicing=Slicing(dimension=0))}, "takes whole ones"),
    "a tie to itself": ({"partition": Partition(tied={"0.weight": "0.weight"})}, "tied: 0.weight is tied to itself"),
    "a delay of nothing": ({"staleness": Staleness(delays={"1": 2})}, "block '1' has no trained parameters"),
    "segments beyond stages": ({"recompute": Recompute("stage", segments=5)}, "from 1 to 2 here"),
    "nothing diverges": (
        {"max_grad_norm": 1.0, "divergence": Divergence(nonfinite=False)},
        "divergence: nothing counts as one",
    ),
    "bytes of a given number": (
        {"microbatches": Microbatches(4, in_flight_bytes=1e9)},
        r"in_flight_bytes limits what in_flight='auto' takes \(",
    ),
    "in flight where all are": ({"method": "gpipe", "microbatches": IN_FLIGHT}, "gpipe has no option 'in_flight'"),
    **{
        f"more in flight than {method} runs with": ({"method": method, "microbatches": IN_FLIGHT, **more}, said)
        for method, more, said in (
            ("2bw", {}, "raise microbatches to 8, or lower in_flight from 9 to 5"),
            ("interleaved", {}, "raise microbatches to 5, or lower in_flight from 9 to 7"),
            ("depth-first-full", WIDE, "raise microbatches to 5, or lower in_flight from 9 to 7"),
        )
    },
    "many more in flight": (
        {"method": "depth-first-full", **WIDE, "microbatches": Microbatches(4, in_flight=40)},
        "would wait for ever; with fewer microbatches in flight it runs: lower in_flight from 40 to 7",
    ),
}
"""Where something else would be run than was asked for, or another reason would be given: options, and what is said."""

TOLD: dict[str, tuple[dict[str, Any], str]] = {
    "a fast sum of one": ({"data_parallel": DataParallel(1, reduce="fast")}, "reduce='fast'"),
    "a fast sum here": ({"data_parallel": DataParallel(2, reduce="fast")}, "reduce='fast'"),
    "an order of ranks": ({"data_parallel": DataParallel(1, rank_order="tp-dp-pp")}, "rank_order='tp-dp-pp'"),
    "recompute at once": ({**ONE, "recompute": "stage"}, "recompute='stage'"),
    "activations offloaded": ({"recompute": Recompute(offload="activations")}, "offload='activations'"),
    "an optimizer offloaded": ({"device": Device(offload_optimizer="stages")}, "offload_optimizer='stages'"),
    "tf32 on a CPU": ({"precision": Precision(tf32=True)}, "tf32=True"),
    "boundaries of one stage": ({**ONE, "precision": BF16}, "boundary_gradients='bf16'"),
    "boundaries in bf16": ({"precision": Precision("bf16", boundary_gradients="bf16")}, "boundary_gradients='bf16'"),
    "waits for nobody": ({"group": Group(None, waits="shared")}, "waits='shared'"),
    **{
        f"more in flight than {method} has": ({"method": method, "microbatches": IN_FLIGHT}, "in_flight=9")
        for method in ("1f1b", "zb-h1", "zb-v", "hanayo")
    },
    "more in flight of each rank": ({"microbatches": Microbatches(4, in_flight=(9, 2))}, "in_flight=(9, 2)"),
    "in flight on one rank": ({**ONE, "method": "2bw", "microbatches": Microbatches(4, in_flight=3)}, "in_flight=3"),
}
"""Where nothing is left out but time or memory: options, and the one that the log names."""

ACTS: dict[str, dict[str, Any]] = {
    "a loss scale in float32": {"precision": Precision(loss_scale=LossScale())},
    "recompute": {"recompute": "stage"},
    "a recompute of blocks": {**ONE, "recompute": "block"},
    "boundaries": {"precision": BF16},
    "in flight": {"microbatches": Microbatches(4, in_flight=4)},
    "bytes in flight": {"method": "1f1b:in_flight=auto", "microbatches": Microbatches(4, in_flight_bytes=1e9)},
    "float64": {"dtype": torch.float64, "max_grad_norm": 1.0},
    "no tf32 on a CPU": {"precision": Precision(tf32=False)},
    "nothing asked for": {},
}


def made_with(dtype: torch.dtype = torch.float32, **options: Any) -> Pipeline:
    arguments = {"method": "1f1b", "stages": 2, "microbatches": 4} | options
    optimizer = partial(torch.optim.SGD, lr=0.1)
    return Pipeline(make_model().to(dtype), loss=nn.functional.mse_loss, optimizer=optimizer, **arguments)


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_would_be_left_out_is_refused_with_the_reason(name: str) -> None:
    options, said = REFUSED[name]
    with pytest.raises((ConfigError, CapabilityError, ScheduleError), match=said):
        made_with(**options)


@pytest.mark.parametrize("name", TOLD)
def test_an_option_that_finds_nothing_to_act_on_is_told(name: str, caplog: pytest.LogCaptureFixture) -> None:
    options, option = TOLD[name]
    made_with(**options)
    assert [m.startswith(f"{option} has no effect: ") for m in caplog.messages] == [True], caplog.messages


class Divided(nn.Linear):
    def parallelize(self, mesh: Any) -> None:
        """Say how it would be divided."""


@pytest.mark.parametrize(
    ("options", "block", "optimizer", "said"),
    [
        ({"tensor_parallel": 2}, nn.Linear, torch.optim.Adam, "tensor_parallel=2 has no effect: no block has a method"),
        ({"tensor_parallel": 2}, Divided, torch.optim.Adam, ""),
        ({"offload_optimizer": "stages"}, nn.Linear, torch.optim.SGD, "offload_optimizer='stages' has no effect: SGD"),
        ({"offload_optimizer": "stages"}, nn.Linear, torch.optim.Adam, ""),
        ({"offload_optimizer": "stages"}, nn.Linear, partial(torch.optim.SGD, momentum=0.9), ""),
    ],
)
def test_what_acts_on_blocks_and_optimizers_is_told_where_none_has_it(
    options: dict[str, Any], block: type[nn.Linear], optimizer: Any, said: str
) -> None:
    blocks, schedule = [block(2, 2), block(2, 2)], make_schedule("1f1b", 2, 2)
    optimizers = [optimizer(each.parameters(), lr=0.1) for each in blocks]
    given = PipelineOptions().changed(**options)
    told = list(idle_options(schedule, given, None, {torch.device("cuda")}, 2, blocks, optimizers))
    assert [text.startswith(said) for text in told] == [True] * bool(said), told


@pytest.mark.parametrize("name", ACTS)
def test_an_option_that_acts_is_not_told_of(name: str, caplog: pytest.LogCaptureFixture) -> None:
    made_with(**ACTS[name])
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
