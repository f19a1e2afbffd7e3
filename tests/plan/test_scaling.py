"""`penstock scale`: the search against every layout tried one by one, from the equations, and what is refused."""

import json
import math
from random import Random
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml

from penstock.errors import ConfigError
from penstock.plan.cluster.schema import Cluster, find_cluster, preset_names
from penstock.plan.scale.fastest import AXES, Layouts, ScaledTraining, by_devices, fastest, memory_of
from penstock.plan.scale.model_shape import ModelShape, critical_batch, family_model
from penstock.plan.scale.report import IMPROVED, analyse
from penstock.plan.scale.rules_file import read_rules, rules_text

RULES = read_rules()


def cluster_of(random, node):
    """A cluster whose links and memory bind for small models."""
    numbers = {
        "flops": 1e12,
        "memory": 10 ** random.uniform(6.5, 9),
        "inside": 10 ** random.uniform(9, 11),
        "between": 10 ** random.uniform(8, 10),
    }
    sourced = {key: {"value": value, "source": "random"} for key, value in numbers.items()}
    return Cluster.model_validate({"format": "penstock cluster 1", "name": "small", "node": node, **sourced})


def seconds_of(t, layout, layered, sharded):
    """The whole training by the equations of arXiv 2106.02679, written anew; None if it does not fit."""
    data, depth, tensor, count, size = layout
    shape, c = t.shape, t.cluster
    layers, hidden, sequence = shape.layers, shape.hidden, shape.sequence
    devices, batch = data * depth * tensor, data * count * size
    fast = c.flops.value / c.inside.value
    slow = c.flops.value / c.between.value if devices > c.node else fast
    overhead = (depth - 1) / count / (layers / depth if layered else 1)
    window = size * sequence * (count if layered else 1)
    if data > 1 and sharded:
        overhead += max(0, slow / (window / 2) - 1) / 4 + max(0, slow / (3 / 4 * window) - 1) * 3 / 4
    elif data > 1:
        overhead += max(0, slow / (3 / 4 * window) - 1) * 3 / 4 / (1 if layered else count)
    if depth > 1:
        overhead += max(0, slow * tensor / (12 * hidden * (1 if layered else layers / depth)) - 1)
    shared = fast * (tensor - 1) / (3 * hidden)
    efficiency = 1 / ((1 + overhead) * (1 + shared))
    parameters = 12 * layers * hidden**2
    state = 12 * parameters / depth / tensor / (data if sharded else 1)
    buffers = 6 * 12 * hidden**2 / tensor if sharded else 4 * parameters / depth / tensor
    flying = count if layered else min(depth, count)
    checkpoints = 2 * sequence * hidden * size * flying * layers / depth / tensor
    inner = size * (34 * sequence * hidden + 5 * shape.heads * sequence**2) / tensor
    if state + buffers + checkpoints + inner > c.memory.value or efficiency < 0.5 or batch < 0.9 * int(t.critical):
        return None
    if layered and count < depth:
        return None
    steps = t.steps / 2 * (1 + t.critical / batch)
    return steps * batch * 8 * parameters * sequence / (devices * c.flops.value * efficiency), devices


def every_layout(t):
    """All layouts, by loops."""
    most = int(t.critical)
    for depth in (d for d in range(1, t.shape.layers + 1) if t.shape.layers % d == 0):
        for tensor in (n for n in (1, 2, 4, 8) if n <= t.cluster.node):
            for size in range(1, most + 1):
                for count in range(1, most // size + 1):
                    yield most // (size * count), depth, tensor, count, size


@pytest.mark.parametrize("layered", [False, True])
def test_the_fastest_layout_equals_brute_force(layered):
    random, found = Random(5 + layered), 0
    for _ in range(25):
        shape = ModelShape("small", random.choice([2, 4, 6]), random.choice([16, 32]), random.choice([16, 64]), 2)
        t = ScaledTraining(shape, cluster_of(random, random.choice([1, 2, 4])), RULES, random.uniform(2, 24), 100.0)
        tried = [
            seconds
            for sharded in ((True,) if layered else (True, False))
            for layout in every_layout(t)
            if (seconds := seconds_of(t, layout, layered, sharded))
        ]
        best, _ = fastest(t, AXES, layered=layered)
        assert (best is None) == (not tried)
        if best is not None:
            found += 1
            assert float(best.seconds[0]) == pytest.approx(min(tried)[0], rel=1e-12)
            front = by_devices(t, layered=layered)
            for devices, days in front:
                least = min(seconds for seconds, count in tried if count <= devices)
                assert days * 86400 == pytest.approx(least, rel=1e-9)
            assert front[-1][1] * 86400 == pytest.approx(min(tried)[0], rel=1e-9)
    assert found > 12


def test_hiding_all_traffic_gives_the_papers_data_parallel_cluster():
    shape = family_model(160, RULES)
    hidden = RULES.model_copy(update={"most_exposed": 0.0})
    t = ScaledTraining(shape, find_cluster("a100-lga"), hidden, critical_batch(shape, RULES, 160), 1e5)
    _, found = fastest(t, ("data",), layered=True)
    assert [int(each[0]) for each in (found.layouts.data, found.layouts.microbatch)] == [483, 5]


@pytest.mark.parametrize(("layered", "flying"), [(True, 8), (False, 2)])
def test_layered_pipelines_keep_all_microbatches_and_others_one_for_each_stage(layered, flying):
    shape = ModelShape("small", 4, 32, 16, 2)
    found = memory_of(shape, RULES, Layouts(*(np.array([n]) for n in (1, 2, 1, 8, 3)), layered=layered, sharded=False))
    assert float(found["checkpoints"][0]) == 2 * 16 * 32 * 3 * flying * 4 / 2


def test_limits_of_devices_and_efficiency():
    shape = family_model(32, RULES)
    t = ScaledTraining(shape, find_cluster("a100"), RULES, critical_batch(shape, RULES, 32), 1e5, most_devices=100)
    rows = analyse(t, 32).rows
    assert max(int(row.rated.layouts.devices[0]) for row in rows) <= 100
    assert min(float(row.rated.efficiency[0]) for row in rows) >= 0.5


@pytest.mark.parametrize("name", preset_names())
def test_presets_have_sources(name):
    cluster = find_cluster(name)
    assert cluster.name == name
    assert cluster.threshold("between") > cluster.threshold("inside")
    devices = cluster.devices(4 * cluster.node)
    assert devices.count == 4 * cluster.node
    assert devices.levels[0].bandwidth == cluster.inside.value / 2


@pytest.mark.smoke
def test_the_command_prints_tables_and_draws(command, tmp_path):
    run = command("scale", "--x", "32", "--cluster", "h100", "--plots", str(tmp_path / "drawings"))
    assert (run.returncode, run.stderr) == (0, "")
    assert "Critical batch 827 sequences, 100,000 steps" in run.stdout
    assert "of h100; smaller batches take fewer samples in all, and more steps." in " ".join(run.stdout.split())
    assert "layered, data+pipeline+tensor" in run.stdout
    for name in ("days-by-devices.svg", "days-by-size.svg"):
        root = ElementTree.parse(tmp_path / "drawings" / name).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert {"depth-first", "layered"} <= {element.text for element in root.iter()}


def test_the_command_answers_in_json(command):
    given = "--layers 96 --hidden 12288 --sequence 2048 --heads 96 --vocabulary 51200 --critical-batch 1536"
    run = command("scale", *given.split(), "--cluster", "h100", "--json", "--steps", "1000", "--memory", "40GB")
    found = json.loads(run.stdout)
    assert found["model"]["parameters"] == pytest.approx(174.6e9, rel=1e-3)
    assert (found["critical_batch"], found["steps"]) == (1536, 1000)
    assert found["thresholds"]["between"] == pytest.approx(9894)
    best = min((row for row in found["trainings"] if row["fits"]), key=lambda row: row["seconds"])
    assert best["way"] == IMPROVED
    assert sum(best["memory"].values()) <= 40e9
    assert all(value is None or math.isfinite(value) for value in best["intensities"].values())


def test_rules_of_a_users_own(command, tmp_path):
    (tmp_path / "mine.yaml").write_text(rules_text().replace("factor: 82.0", "factor: 41.0"))
    run = command("scale", "--x", "32", "--rules", str(tmp_path / "mine.yaml"), "--json")
    assert json.loads(run.stdout)["critical_batch"] == pytest.approx(41 * 32 ** (2 / 3))
    assert command("scale", "--print-rules").stdout == rules_text()


def test_a_model_that_fits_nowhere(command):
    run = command("scale", "--x", "160", "--memory", "1MB")
    assert run.returncode == 1
    assert "does not fit" in run.stdout


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "--layers, --hidden, --sequence missing"),
        (["--x", "32", "--hidden", "3"], "leave --hidden out"),
        (["--x", "1"], "x must be between 2 and 4000"),
        (["--x", "32", "--cluster", "h10"], "Did you mean 'h100'"),
        (["--x", "32", "--cluster", "no/such.yaml"], "cannot read the cluster"),
        (["--x", "32", "--critical-batch", "1e9"], "the critical batch must be"),
        (["--x", "32", "--steps", "0"], "steps must be above 0"),
        (["--layers", "0", "--hidden", "8", "--sequence", "8"], "layers must be a whole number"),
        (
            ["--layers", "2", "--hidden", "9", "--sequence", "8", "--heads", "2"],
            "--hidden must be a multiple of --heads; 9 is none of 2",
        ),
    ],
)
def test_what_scale_refuses(command, given, said):
    run = command("scale", *given)
    assert run.returncode == 2
    assert said in " ".join(run.stderr.split())


def test_a_cluster_file_with_faults(tmp_path):
    values = find_cluster("a100").model_dump()
    values["flops"]["value"] = -1.0
    del values["memory"]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=r"is no cluster:\n(?s:.*)memory(?s:.*)"):
        find_cluster(str(tmp_path / "mine.yaml"))


def test_a_cluster_file_takes_numbers_as_people_write_them(tmp_path):
    """YAML 1.1 reads 3e14 as text; names and sources stay texts."""
    values = find_cluster("a100").model_dump() | {"name": "NAME", "flops": {"value": 1.0, "source": "SOURCE"}}
    text = (
        yaml.safe_dump(values).replace("NAME", "1e5").replace("SOURCE", "3.5").replace("value: 1.0\n", "value: 3e14\n")
    )
    (tmp_path / "mine.yaml").write_text(text.replace("source: 3.5", "source: '3.5'"))
    found = find_cluster(str(tmp_path / "mine.yaml"))
    assert (found.flops.value, found.flops.source, found.name) == (3e14, "3.5", "1e5")
