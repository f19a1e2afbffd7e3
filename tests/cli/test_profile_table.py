"""The tables of `penstock profile`: layers alike in one row, the whole model at each size, in units for people."""

from __future__ import annotations

import re
from io import StringIO

from rich.console import Console

from penstock.cli.plans.profile_table import profile_tables
from penstock.plan.profile.files import parse_profile
from penstock.plan.profile.schema import UNRESOLVED, Profile

MEASURED = """
format: penstock profile 1
name: small
source: measured somewhere
microbatch_sizes: [1, 4]
settings: {model: {preset: small}, threads: 2}
links: [{latency: 0.00025, bandwidth: 1.25e9}]
layers:
- {name: embedding, forward: [0.001, 0.003], backward: [0.002, 0.005], output: 2048, stored: 0, parameters: 1048576}
- &layer
  {name: l0, forward: [0.01, 0.03], backward: [0.02, 0.05], output: 2048, stored: [4096, 16384], shared: 2048,
   parameters: 2097152, optimizer: 4194304, step: 0.5}
- {<<: *layer, name: l1}
- {<<: *layer, name: l2}
"""
CHOICES = """
format: penstock profile 1
layers:
- {name: a, options: [{name: plain, seconds: 12.5, memory: 3}, {name: recompute, seconds: 13}]}
"""


def test_cores_that_ranks_share_are_told() -> None:
    assert not any("full speed" in line for line in shown(parse_profile(MEASURED, "a")))
    assert "At most 2.5 ranks of its machine work at full speed at once." in shown(
        parse_profile(MEASURED + "cores: 2.5\n", "a")
    )


def test_more_samples_that_take_less_are_told() -> None:
    assert not any("slowed" in line for line in shown(parse_profile(MEASURED, "a")))
    lines = shown(parse_profile(MEASURED.replace("[0.01, 0.03]", "[0.15, 0.03]"), "a"))
    assert any(line.startswith("A microbatch of 4 takes less than one of 1") for line in lines)


def shown(profile: Profile, width: int = 200) -> list[str]:
    console = Console(file=StringIO(), width=width)
    console.print(profile_tables(profile, width))
    assert isinstance(console.file, StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def cells(lines: list[str], first: str) -> list[str]:
    return re.split(r"\s{2,}", next(line for line in lines if line.strip().startswith(first)).strip())


def test_a_measured_profile_is_shown_in_units_for_people() -> None:
    lines = shown(parse_profile(MEASURED, "small.yaml"))
    assert lines[0] == "small: 4 layers, measured somewhere"
    assert lines[2] == "layers, for each microbatch of 4 samples; kept: from forward to backward"
    heads = ["layers", "forward ms", "backward ms", "update ms", "parameters", "optimizer", "output", "kept"]
    assert cells(lines, "layers  ") == heads
    assert cells(lines, "embedding") == ["embedding", "3", "5", "1.0 MiB", "2.0 KiB", "0"]
    assert cells(lines, "l0") == ["l0 .. l2 (3, each)", "30", "50", "500", "2.0 MiB", "4.0 MiB", "2.0 KiB", "16.0 KiB"]
    assert cells(lines, "1 ") == ["1", "31", "62", "93", "1500", "7.0 MiB", "6.0 KiB"]
    assert cells(lines, "4 ") == ["4", "93", "155", "62", "1500", "7.0 MiB", "42.0 KiB"]
    assert lines[-2:] == [
        "A message takes 250 us + bytes / (1.25 GB/s).",
        "Measured with --set model.preset=small --set threads=2, which plans take over.",
    ]


def test_layers_with_ways_to_execute_them_have_both_passes_together() -> None:
    lines = shown(parse_profile(CHOICES, "choices.yaml"))
    assert cells(lines, "layers  ") == ["layers", "both ms", "ways"]
    assert cells(lines, "a ") == ["a", "12500", "plain, recompute"]


def test_columns_that_do_not_fit_are_left_out_as_a_whole() -> None:
    lines = shown(parse_profile(MEASURED, "small.yaml"), 60)
    assert max(map(len, lines)) <= 60
    assert "Left out at this width: optimizer, output, update ms (--json has all)." in " ".join(lines)
    assert cells(lines, "embedding")[:3] == ["embedding", "3", "5"]


def test_of_a_link_whose_bytes_took_no_time_no_bandwidth_is_told() -> None:
    lines = shown(parse_profile(MEASURED.replace("1.25e9", f"{UNRESOLVED}"), "a"))
    said = "A message takes 250 us (its bytes are lost in the noise: measure again, or give plan --bandwidth)."
    assert said in lines
