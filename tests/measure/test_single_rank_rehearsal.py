"""`penstock profile --rehearse`: a rank alone holds what it holds among others, to the byte, and runs its passes."""

import copy
import json
import re

import pytest
import torch

from penstock.errors import ConfigError
from penstock.measure.single_rank_rehearsal import StandIn, rehearse
from penstock.train.config.load import load_config
from penstock.train.prepare.build_pipeline import make_pipeline
from penstock.train.prepare.prepare_run import prepare

SMALL = [
    "model.layers=4", "model.width=16", "model.heads=2", "model.context=8", "microbatches=4", "microbatch_size=2",
    "device=cpu", "threads=1", "warm_up=0",
]  # fmt: skip


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text("all work and no play makes jack a dull boy. " * 40)
    return str(tmp_path / "text.txt")


def config_for(text, *changes):
    small = [each for each in SMALL if not each.startswith("warm_up")]
    return load_config(None, [*small, f"data={text}", *changes])


def whole_run(config, batches):
    """The peaks and the passes of every rank of the whole pipeline in this process."""
    prepared = prepare(config)
    pipeline, size = make_pipeline(prepared), config.microbatch_size
    sample = prepared.windows.samples(0, size)
    count = config.microbatches * config.width
    for _ in pipeline.run([copy.deepcopy(sample) for _ in range(count)] for _ in range(batches)):
        pass
    return pipeline.peak_bytes()


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        (["method=2bw", "stages=3"], (0, 1, 2)),
        (["method=1f1b", "stages=2", "recompute=block"], (0, 1)),
        (["method=interleaved", "stages=2", "options.chunks=2"], (0, 1)),
        (["method=zb-h1", "stages=3"], (1,)),
        (["method=gpipe", "stages=2", "precision=bf16"], (1,)),
        (["method=vocabulary-1f1b", "stages=3"], (0, 1, 2)),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_rank_alone_holds_what_it_holds_among_others(text, changes, ranks):
    config = config_for(text, *changes)
    peaks = whole_run(config, 4)
    for rank in ranks:
        found = rehearse(config, rank, batches=2)
        assert found.peak["total"] == peaks[rank]["total"]
        chunks = len(found.stages)
        assert found.passes["F"][0] == 4 * chunks
        assert 0 < found.fastest <= found.busy
        assert found.samples == 8


@pytest.mark.parametrize(
    "changes",
    [
        ["method=1f1b", "width=2", "sharding=optimizer"],
        ["method=2bw", "width=3", "sharding=gradients"],
        ["method=layered", "width=3", "sharding=full", "options.chunks=2"],
        ["method=1f1b", "width=2", "sharding=full", "recompute=block"],
    ],
    ids=lambda changes: " ".join(changes[:3]),
)
def test_a_sharded_rank_alone_holds_its_own_part(text, changes):
    """Without waits for the others a message may be held sooner or later; all else is the same to the byte."""
    config, message = config_for(text, "stages=2", *changes), 2 * 8 * 16 * 4  # samples, positions, numbers, bytes
    peaks = whole_run(config, 4)
    for rank in (0, 1):
        found = rehearse(config, rank, batches=2)
        kinds = [
            {k: n for k, n in each.items() if k not in ("messages", "total")} for each in (found.peak, peaks[rank])
        ]
        assert kinds[0] == kinds[1]
        assert abs(found.peak["total"] - peaks[rank]["total"]) <= message


def test_what_is_not_rehearsed_is_said(text):
    found = rehearse(config_for(text, "method=1f1b", "stages=2", "width=2", "model.tied=true"), 0, batches=1)
    assert [said.split()[0] for said in found.left_out] == ["sums", "the"]
    found = rehearse(config_for(text, "method=1f1b", "stages=2", "width=2", "sharding=gradients"), 0, batches=1)
    assert found.left_out == ("sums of gradients and gathers of weights over 2 pipelines",)
    found = rehearse(config_for(text, "stages=2", "options.in_flight=auto", "fallback.at=2"), 0, batches=1)
    assert found.left_out == (
        "the microbatches in flight that links ask for (options.in_flight=auto), which take memory",
        "the methods that take turns with 2bw (sync, fallback)",
    )


def test_the_command_says_whether_a_rank_fits(command, text, tmp_path):
    values = [each.partition("=") for each in SMALL if not each.startswith(("model", "warm_up"))]
    plan = {key: (int(value) if value.isdigit() else value) for key, _, value in values}
    plan |= {"method": "2bw", "stages": 2, "width": 2, "balance": [2, 4], "data": text}
    plan["model"] = {"layers": 4, "width": 16, "heads": 2, "context": 8}
    (tmp_path / "plan.yaml").write_text(json.dumps(plan))
    given = "profile", "--rehearse", "1", "--plan", str(tmp_path / "plan.yaml"), "--batches", "1"
    run = command(*given, "--memory", "1GiB")
    assert (run.returncode, run.stderr) == (0, "")
    assert "Rank 1 of 2, 2bw: layers.1 .. head (4)" in run.stdout
    assert "It fits into 1GiB." in run.stdout
    assert re.search(r"work +times +s each +s per batch *\n forward +4 +\S+ +\S+ *\n backward +4 ", run.stdout)
    said = " ".join(run.stdout.split())
    assert "s by the fastest of each kind (1 thread): at most" in said
    one, both = re.search(r"at most (\S+) samples per second in a pipeline, (\S+) in 2 pipelines\.", said).groups()
    assert float(both) == pytest.approx(2 * float(one), rel=1e-3)
    run = command(*given, "--memory", "1kB", "--json")
    found = json.loads(run.stdout)
    assert run.returncode == 1
    assert found["fits"] is False
    assert found["peak"]["total"] > 1000


@pytest.mark.long
def test_rehearse_recomputes_what_auto_chooses(text):
    method = "method=1f1b", "stages=2"
    most = rehearse(config_for(text, *method), 0, batches=1).peak
    auto = config_for(text, *method, "recompute=auto", f"memory_limit={most['total'] - 1}")
    assert rehearse(auto, 0, batches=1).peak["activations"] < most["activations"]


def test_what_rehearse_refuses(text):
    with pytest.raises(ConfigError, match="rank must be at most 1"):
        rehearse(config_for(text, "method=1f1b", "stages=2"), 2)
    with pytest.raises(ConfigError, match="one rank cannot rehearse alone"):
        rehearse(config_for(text, "method=1f1b", "stages=2", "width=2", "combine.kind=average"), 0)


def test_a_stand_in_passes_gradients_on():
    given = torch.ones(3, requires_grad=True)
    out = StandIn({"x": torch.ones(2, 2), "n": torch.arange(3)})(given)
    out["x"].sum().backward()
    assert given.grad is not None
    assert not out["n"].requires_grad
