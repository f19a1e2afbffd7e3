"""Profile files: what is read and written, published forms, and what is said of broken ones."""

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from penstock.errors import ConfigError, PenstockError
from penstock.plan.profile.files import parse_profile, profile_text, read_profile
from penstock.plan.profile.layer_graph import layer_graph
from penstock.plan.profile.other_programs import from_pipedream, from_piper
from penstock.plan.profile.schema import Profile
from support.examples import examples

OURS = """
format: penstock profile 1
name: tower
microbatch_sizes: [1, 2]
layers:
- {name: embedding, forward: 1e-3, backward: [0.001, 2e-3], output: 10, parameters: 100}
- {name: left, forward: 1, backward: 2, output: [4, 8], stored: 40, inputs: [embedding]}
- name: 3
  inputs: [{layer: embedding, bytes: 6}]
  options:
  - {name: plain, seconds: 5, memory: 7, memory_per_microbatch: 3}
  - {tensor: 2, seconds: 3, sync_in: {embedding: 1e1}}
- {name: head, forward: 1, backward: 1, inputs: [left, 3]}
"""
COSTS = "forward_compute_time={}, backward_compute_time={}, activation_size={}, parameter_size={}"
PIPEDREAM = (
    f"node1 -- Input0 -- {COSTS.format('0.000', '0.000', '0.0', '0.0')}\n"
    f"node2 -- LSTM(2, 2) -- {COSTS.format('3.5', '1.5', '[6.0; 2.0]', '9.0')}\n"
    "\tnode1 -- node2\n"
)
PIPER = """{"maxDevices": 2, "mbsInBatch": 12, "nodes": [
 {"id": 7, "name": "first", "TMPCs": {"1": [{"id": "vanilla", "timePerSample": 0.5, "parameterSize": 4.0,
  "memoryUsageA": 2.0, "memoryUsageB": 8.0, "syncTimeFw": {}, "syncTimeBw": {"9": 0.0}}],
  "2": [{"id": "vanilla", "timePerSample": 0.3, "parameterSize": 2.0,
  "memoryUsageA": 1.0, "memoryUsageB": 4.0, "syncTimeFw": {}, "syncTimeBw": {"9": 6.0}}]}},
 {"id": 9, "TMPCs": {"1": [{"id": "vanilla", "timePerSample": 1, "parameterSize": 0.0, "memoryUsageA": 0.0,
  "memoryUsageB": 0.0, "syncTimeFw": {"7": 0.0}, "syncTimeBw": {}}]}}],
 "edges": [{"sourceId": 7, "destId": 9, "communicationCost": 64.0}]}"""


def test_a_profile_at_two_microbatch_sizes():
    profile = parse_profile(OURS, "tower.yaml")
    one, two = layer_graph(profile), layer_graph(profile, 2)
    assert [layer.seconds for layer in one.layers] == [0.002, 3, 5, 2]
    assert [layer.seconds for layer in two.layers] == [0.003, 3, 5, 2]
    assert [(edge.source, edge.target, edge.bytes) for edge in two.edges] == [
        (0, 1, 10),
        (0, 2, 6),
        (1, 3, 8),
        (2, 3, 0),
    ]
    assert two.layers[2].ways[1].sync_in == {0: 10}
    plain, again = two.layers[1].ways
    assert (plain.seconds, plain.memory_per_microbatch) == (3, 40)
    assert (again.name, again.seconds, again.memory, again.memory_per_microbatch) == ("recompute", 4, 40, 10)
    assert two.order == (0, 1, 2, 3)


def test_a_layer_without_inputs_reads_the_one_before():
    text = "format: penstock profile 1\nlayers:\n" + "- {name: %s, forward: 1, backward: 1, output: 5}\n" * 3
    graph = layer_graph(parse_profile(text % ("a", "b", "c"), "chain"))
    assert [(edge.source, edge.target, edge.bytes) for edge in graph.edges] == [(0, 1, 5), (1, 2, 5)]


@pytest.mark.parametrize("profile", [from_pipedream(PIPEDREAM, "p"), from_piper(PIPER, "q"), parse_profile(OURS, "o")])
def test_what_is_written_is_read_again(profile):
    text = profile_text(profile)
    again = parse_profile(text, "again")
    assert profile_text(again) == text
    assert layer_graph(again) == layer_graph(profile)


def test_a_profile_of_pipedream():
    graph = layer_graph(from_pipedream(PIPEDREAM + "\tnode1 -- node2\n", "tiny"))
    assert len(graph.edges) == 1
    first, second = graph.layers
    assert (first.name, first.kind, second.kind) == ("node1", "Input0", "LSTM(2, 2)")
    assert (second.seconds, second.output, second.parameters) == (pytest.approx(0.005), 8, 9)


def test_converted_layers_come_after_those_that_they_read():
    """As chains must; the files of PipeDream have edges against their order."""
    costs = COSTS.format("1", "1", "1", "1")
    text = "".join(f"{name} -- Linear() -- {costs}\n" for name in "cabd") + "\tb -- c\n\ta -- b\n\tb -- d\n"
    graph = layer_graph(from_pipedream(text, "three"))
    assert [layer.name for layer in graph.layers] == ["a", "b", "c", "d"]
    assert graph.order == (0, 1, 2, 3)
    turned = json.loads(PIPER)
    turned["nodes"].reverse()
    assert [layer.name for layer in layer_graph(from_piper(json.dumps(turned), "two")).layers] == ["7", "9"]


def test_a_profile_of_piper():
    graph = layer_graph(from_piper(PIPER, "tiny"))
    assert (graph.microbatches, graph.layers[0].kind, graph.layers[0].output) == (12, "first", 64)
    assert [(way.tensor, way.seconds, way.sync_out) for way in graph.layers[0].ways] == [
        (1, 0.5, {}),
        (2, 0.3, {1: 6.0}),
    ]
    assert graph.layers[1].tensor_degrees == {1}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("format: penstock profile 1", "format: other", "`format` must be 'penstock profile 1'"),
        ("forward: 1e-3", "forwards: 1e-3", r"layers\.0\.forwards: no such key. Did you mean 'forward'"),
        ("forward: 1e-3", "forward: -1", "greater than or equal to 0"),
        ("forward: 1e-3", "forward: .nan", "layers.0.forward"),
        ("forward: 1e-3", "forward: yes", "layers.0.forward"),
        ("forward: 1e-3, ", "", "layer 'embedding' needs forward and backward"),
        ("[4, 8]", "[4, 8, 9]", "layer 'left', output has 3 numbers for 2 microbatch sizes"),
        ("inputs: [left, 3]", "inputs: [lef, 3]", "layer 'head', inputs: there is no layer 'lef'. Did you mean 'left'"),
        ("inputs: [left, 3]", "inputs: [left, left]", "has the input 'left' twice"),
        ("inputs: [left, 3]", "inputs: [head]", "layer 'head' reads itself"),
        ("inputs: [embedding]}", "inputs: [head]}", "is part of a cycle"),
        ("name: head", "name: left", "two of them are named 'left'"),
        ("{embedding: 1e1}", "{head: 1}", "sync_in: no edge joins it and 'head'"),
        ("microbatch_sizes: [1, 2]", "microbatch_sizes: [2, 1]", "must ascend"),
        ("- {tensor: 2, seconds: 3", "- {tensor: 1, name: plain, seconds: 3", "two options 'plain' of tensor degree 1"),
        ("layers:", "layer:", "layers: it is missing"),
    ],
)
def test_what_is_wrong_is_said(old, new, said):
    assert old in OURS
    with pytest.raises(ConfigError, match=said):
        layer_graph(parse_profile(OURS.replace(old, new, 1), "broken.yaml"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no line is a layer"),
        (PIPEDREAM.replace("\tnode1", "\tnode3"), "line 3: no layer above is named 'node3'. Did you mean"),
        (PIPEDREAM.replace("3.5", "x"), "line 2, forward_compute_time must be a number"),
        (PIPEDREAM.replace("3.5", "-3.5"), "line 2, forward_compute_time must be from 0"),
        (PIPEDREAM.replace("[6.0; 2.0]", "[6.0; inf]"), "line 2, activation_size must be from 0"),
        (PIPEDREAM.replace(", parameter_size=9.0", ""), "line 2: the costs must be"),
        (PIPEDREAM.replace("node2 -- LSTM", "node1 -- LSTM"), "line 2: layer 'node1' stands in the file twice"),
        ("node1\n", "line 1: neither a layer nor an edge"),
    ],
)
def test_what_is_wrong_with_a_profile_of_pipedream_is_said(text, said):
    with pytest.raises(ConfigError, match=said):
        from_pipedream(text)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("{", "[", "JSON"),
        ('"nodes"', '"node"', "nodes: Field required"),
        ('"sourceId": 7', '"sourceId": 8', "8 -> 9: there is no node 8"),
        ('"id": 9', '"id": 7', "two of them have one id"),
        ('"timePerSample": 0.5', '"timePerSample": "fast"', "nodes.0.TMPCs.1.0.timePerSample"),
        ('{"1": [', '{"one": [', "TMPCs"),
    ],
)
def test_what_is_wrong_with_a_profile_of_piper_is_said(old, new, said):
    with pytest.raises(ConfigError, match=said):
        from_piper(PIPER.replace(old, new, 1))


def test_a_published_profile_that_was_not_converted(tmp_path: Path):
    (tmp_path / "vgg.txt").write_text(PIPEDREAM)
    with pytest.raises(ConfigError, match="convert it: penstock profile --from pipedream"):
        read_profile(tmp_path / "vgg.txt")
    with pytest.raises(ConfigError, match="cannot read the profile"):
        read_profile(tmp_path / "missing.yaml")


PIECES = st.sampled_from(
    [
        "",
        "-1",
        "nan",
        "1e400",
        "[" * 50,
        "{a: 1}",
        "null",
        "&a [*a]",
        "é",
        "\x00",
        "9" * 400,
        "head",
        ": ",
        "[1, 2, 3]",
        "!!x",
    ]
)


@settings(max_examples=examples(40))
@given(st.sampled_from([OURS, PIPEDREAM, PIPER]), st.integers(0, 2_000), st.integers(0, 60), PIECES)
def test_random_damage_ends_in_an_error_or_a_profile(text, at, length, piece):
    at %= len(text)
    broken = text[:at] + piece + text[at + length :]
    reader = {OURS: lambda t: parse_profile(t, "f"), PIPEDREAM: from_pipedream, PIPER: from_piper}[text]
    with contextlib.suppress(PenstockError):
        found = reader(broken)
        assert isinstance(found, Profile)
        layer_graph(found)
