"""`penstock profile` and `penstock plan`, and graphs of every shape."""

import json

import pytest

from penstock.errors import CapabilityError, ConfigError
from penstock.plan.planners.pipedream import Choices, plan_as_pipedream, plan_for_pipedream_cost
from penstock.plan.planners.piper import plan_as_piper, plan_for_piper_cost
from penstock.plan.planning import PlanRequest, make_plan, with_cost
from penstock.plan.profile.files import parse_profile, read_profile
from penstock.plan.profile.layer_graph import layer_graph
from penstock.plan.stages.device_hierarchy import DeviceLevel, Devices

HEAD = "format: penstock profile 1\nname: toy\n"
BLOCK = "- {{name: b{}, kind: block, forward: {}, backward: {}, output: 8, stored: 64, parameters: 32}}\n"
CHAIN = HEAD + "layers:\n" + "".join(BLOCK.format(n, 1 + n % 3, 2 + n % 2) for n in range(6))
FOUR = Devices((DeviceLevel(4, 100.0),))


@pytest.fixture
def chain(tmp_path):
    (tmp_path / "chain.yaml").write_text(CHAIN)
    return tmp_path / "chain.yaml"


def wide(branches, length):
    """A source, parallel branches, and a layer that joins them."""
    layers = ["- {name: in, forward: 1, backward: 1, output: 1, parameters: 1}"]
    for branch in range(branches):
        for at in range(length):
            before = f"x{branch}_{at - 1}" if at else "in"
            layers.append(
                f"- {{name: x{branch}_{at}, forward: 1, backward: 1, output: 1, parameters: 1, inputs: [{before}]}}"
            )
    ends = ", ".join(f"x{branch}_{length - 1}" for branch in range(branches))
    layers.append(f"- {{name: out, forward: 1, backward: 1, inputs: [{ends}]}}")
    return layer_graph(parse_profile(HEAD + "layers:\n" + "\n".join(layers), "wide"))


def test_the_ranked_table(command, chain):
    run = command(
        "plan", "--profile", chain, "--devices", "4", "--bandwidth", "1kB", "--cost", "piper", "--memory", "1kB"
    )
    assert run.returncode == 0
    lines = [line.split() for line in run.stdout.splitlines()]
    ranks = [
        line[1] for line in lines if line[:1] in (["1"], ["2"], ["3"]) and line[1] in ("default", "piper", "2bw-paper")
    ]
    assert ranks == ["default", "piper", "2bw-paper"]
    assert "limits: compute" in run.stdout
    assert "By the cost function 2bw-paper" in run.stdout


def test_a_folder_that_is_not_there_is_told_before_the_search(command, chain, tmp_path):
    given = ["plan", "--profile", chain, "--devices", "4", "--bandwidth", "1kB", "--cost", "simulated"]
    for option in ("--out", "--timeline"):
        run = command(*given, option, tmp_path / "no" / "p")
        assert (run.returncode, run.stdout) == (2, "")
        assert "there is no folder" in " ".join(run.stderr.split())


def test_a_file_gets_tables_whole(command, tmp_path):
    """Nothing is cut or wrapped where no terminal says how wide it is."""
    names = [f"a_layer_with_a_long_name_{n}" for n in range(3)]
    layers = "".join(f"- {{name: {name}, forward: 1, backward: 1, output: 1, parameters: 1}}\n" for name in names)
    (tmp_path / "long.yaml").write_text(f"format: penstock profile 1\nlayers:\n{layers}")
    run = command("plan", "--profile", tmp_path / "long.yaml", "--devices", "1")
    assert run.returncode == 0, run.stderr
    assert any(" ".join(names) in line for line in run.stdout.splitlines())
    assert "…" not in run.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "plan needs --profile FILE and --devices N and --bandwidth B"),
        (["--profile"], "plan needs --devices N and --bandwidth B"),
        (["--devices", "4"], "plan needs --profile FILE and --bandwidth B"),
    ],
)
def test_all_that_is_missing_is_named_at_once(command, chain, arguments, said):
    run = command("plan", *arguments, *([chain] if arguments == ["--profile"] else []))
    assert run.returncode == 2
    assert said in " ".join(run.stderr.split())


def test_a_plan_as_json(command, chain):
    run = command(
        "plan", "--profile", chain, "--devices", "2x2", "--bandwidth", "100,10", "--planner", "pipedream", "--json"
    )
    found = json.loads(run.stdout)
    assert (found["devices"], found["cost"], found["planner"]) == (4, "pipedream", "pipedream")
    best = found["plans"][0]
    assert found["objective"] == best["seconds_per_microbatch"] == max(stage["seconds"] for stage in best["stages"])
    assert sum(len(stage["layers"]) for stage in best["stages"]) == 6
    assert sum(stage["devices"] for stage in best["stages"]) == best["devices"] == 4
    assert all(sum(inner["devices"] for inner in stage["inner"]) == 2 for stage in best["stages"])


def test_skipped_classes_have_bounds(command, chain):
    run = command(
        "plan", "--profile", chain, "--devices", "6", "--bandwidth", "1kB", "--planner", "2bw-paper", "--json"
    )
    found = json.loads(run.stdout)
    assert found["skipped"]
    for each in found["skipped"]:
        words = each["bound"].replace(",", "").split()
        assert float(words[words.index("takes") + 1]) >= found["seconds_per_sample"] * (1 - 1e-3)


def test_what_does_not_fit_is_said(command, chain):
    run = command(
        "plan", "--profile", chain, "--devices", "4", "--bandwidth", "1kB", "--cost", "piper", "--memory", "50"
    )
    assert run.returncode == 1
    assert "no plan fits: layer 'b0' alone needs" in " ".join(run.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--devices", "4"], "--bandwidth is missing"),
        (["--devices", "0", "--bandwidth", "1GB"], "at least 1"),
        (["--devices", "4x", "--bandwidth", "1GB"], "--devices takes a number"),
        (["--devices", "4x2", "--bandwidth", "1,2,3"], "3 numbers for 2 levels"),
        (["--devices", "4", "--bandwidth", "fast"], "takes a size such as"),
        (["--devices", "4", "--bandwidth", "0"], "above 0"),
        (["--devices", "4", "--bandwidth", "1GB", "--planner", "pipedram"], "Did you mean 'pipedream'"),
        (
            ["--devices", "4", "--bandwidth", "1GB", "--planner", "piper", "--cost", "pipedream"],
            "searches for its own cost",
        ),
        (["--devices", "4", "--bandwidth", "1GB", "--microbatches", "4", "--global-batch", "8"], "not both"),
    ],
)
def test_options_that_cannot_be(command, chain, arguments, said):
    run = command("plan", "--profile", chain, *arguments)
    assert run.returncode == 2
    assert said in " ".join(run.stderr.split())


def test_links_that_do_not_fit_the_devices_are_said(command, tmp_path):
    """It is the profile that has them; nobody has given --bandwidth."""
    text = "format: penstock profile 1\nlayers: [{name: a, forward: 1, backward: 1}]\n"
    (tmp_path / "p.yaml").write_text(text + "links: [{bandwidth: 100}, {bandwidth: 10}]\n")
    run = command("plan", "--profile", tmp_path / "p.yaml", "--devices", "4")
    assert run.returncode == 2
    said = " ".join(run.stderr.split())
    assert "the profile has 2 links for 1 level of devices" in said
    assert "--bandwidth has" not in said


def test_profiles_are_converted(command, tmp_path):
    line = (
        "{} -- Linear -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=4.0, parameter_size=8.0\n"
    )
    (tmp_path / "two.graph.txt").write_text(line.format("a") + line.format("b") + "\ta -- b\n")
    run = command("profile", "--from", "pipedream", tmp_path / "two.graph.txt", "--out", tmp_path / "two.yaml")
    assert (run.returncode, run.stderr) == (0, "")
    assert "name: two\n" in (tmp_path / "two.yaml").read_text()
    again = command("profile", tmp_path / "two.yaml", "--json")
    (tmp_path / "again.yaml").write_text(again.stdout)  # JSON is a profile, too
    assert command("profile", tmp_path / "again.yaml", "--json").stdout == again.stdout
    again = command("plan", "--profile", tmp_path / "two.yaml", "--devices", "1", "--json")
    assert json.loads(again.stdout)["objective"] == pytest.approx(0.006)
    refused = command("profile", "--from", "alpa", tmp_path / "two.graph.txt")
    assert (refused.returncode, "--from takes pipedream or piper" in refused.stderr) == (2, True)


def test_microbatch_sizes_are_chosen(command, tmp_path):
    """A larger microbatch is faster per sample and does not fit without recompute."""
    block = "- {{name: b{}, forward: [2, 3, 5], backward: [4, 6, 10], output: [1, 2, 4], stored: [8, 16, 32]}}\n"
    text = HEAD + "microbatch_sizes: [1, 2, 4]\nlayers:\n" + "".join(map(block.format, range(4)))
    (tmp_path / "sizes.yaml").write_text(text)
    found = {}
    for memory in ("150", "40", "10"):
        arguments = ["--devices", "2", "--bandwidth", "1kB", "--memory", memory, "--global-batch", "16", "--json"]
        run = command("plan", "--profile", tmp_path / "sizes.yaml", "--planner", "2bw-paper", *arguments)
        best = (json.loads(run.stdout)["plans"] or [None])[0]
        again = best and any("recompute" in stage["options"] for stage in best["stages"])
        found[memory] = best and (best["samples_per_microbatch"], bool(again), best["microbatches"])
    assert found == {"150": (4, False, 4), "40": (1, False, 16), "10": None}


def test_plans_of_stages_that_processes_share_are_refused(chain, tmp_path):
    """Whatever the cost function: its plans would be of whole blocks, or of half as many devices."""
    shared = tmp_path / "shared.yaml"
    shared.write_text(f"{chain.read_text()}\nsettings: {{tensor_parallel: 2}}\n")
    profile = read_profile(shared)
    assert profile.tensor_parallel == 2
    for cost in ("simulated", "piper"):
        with pytest.raises(CapabilityError, match="plans with tensor_parallel=2, with which the profile was measured"):
            make_plan(PlanRequest(profile, Devices((DeviceLevel(4, 1e9),)), cost=cost))


def test_a_single_layer():
    graph = layer_graph(parse_profile(HEAD + "layers: [{name: a, forward: 1, backward: 2, parameters: 50}]", "one"))
    for search in (plan_as_pipedream(graph, FOUR), plan_for_pipedream_cost(graph, FOUR)):
        assert search.plan.rating.seconds == pytest.approx((3 + 4 * 3 * 50 / 400) / 4)
    assert plan_as_piper(graph, FOUR, 4).plan.stages[0].replicas == 4
    straight = plan_as_pipedream(graph, FOUR, Choices(straight=True))
    assert straight.plan is None
    assert "needs as many stages, but the graph can be cut into 1 at most" in straight.why


def test_layers_that_take_no_time():
    graph = layer_graph(
        parse_profile(CHAIN.replace("forward: 1,", "forward: 0,").replace("backward: 2,", "backward: 0,"), "z")
    )
    free = layer_graph(
        parse_profile(HEAD + "layers: [{name: a, forward: 0, backward: 0}, {name: b, forward: 0, backward: 0}]", "f")
    )
    for each in (graph, free):
        found = [plan_as_pipedream(each, FOUR), plan_as_piper(each, FOUR, 8)]
        assert all(search.plan is not None for search in found)
    assert plan_as_piper(free, FOUR, 8).plan.rating.seconds == 0


def test_graphs_with_too_many_cuts():
    """Twelve branches of three layers have 4^12 prefixes: published planners say so, the default one takes fewer."""
    graph = wide(12, 3)
    with pytest.raises(ConfigError, match="more than 5,000 prefixes"):
        plan_as_piper(graph, FOUR, 8)
    with pytest.raises(ConfigError, match="more than 20,000 antichains"):
        plan_as_pipedream(graph, FOUR)
    for search in (plan_for_pipedream_cost(graph, FOUR), plan_for_piper_cost(graph, FOUR, 8)):
        assert search.plan.notes == ("cuts are along one topological order",) or "not every cut" in search.plan.notes[0]
        assert search.plan.rating.seconds < graph.seconds / 3


def test_a_long_chain_on_many_devices():
    """300 layers on 32 devices; a bound says how good the plan is."""
    layers = "".join(f"- {{name: n{n}, forward: 1, backward: {n % 5}, parameters: 3}}\n" for n in range(300))
    graph = layer_graph(parse_profile(HEAD + "layers:\n" + layers, "long"))
    found = plan_as_pipedream(graph, Devices((DeviceLevel(32, 1e9),))).plan
    assert graph.seconds / 32 <= found.rating.seconds <= graph.seconds / 32 * 1.001


def test_memory_of_pipedream():
    """The published test: outputs and parameters times ceil((M - used) / r)."""
    text = HEAD + "layers:\n" + "".join(f"- {{name: n{n}, forward: 1, backward: 0, output: 10}}\n" for n in range(4))
    graph = layer_graph(parse_profile(text, "m"))
    free = plan_as_pipedream(graph, Devices((DeviceLevel(4, 1e9),), 30), Choices(straight=True)).plan
    assert [rating.memory for rating in free.rating.stages] == [30, 20, 10, 0]
    tight = plan_as_pipedream(graph, Devices((DeviceLevel(4, 1e9),), 29), Choices(straight=True))
    assert tight.plan is None
    assert "no plan fits" in tight.why
    replicated = plan_as_pipedream(graph, Devices((DeviceLevel(4, 1e9),), 29)).plan
    assert replicated.rating.fault == ""
    assert replicated.rating.seconds == 1


def test_compressed_activations_take_time():
    """A transfer of 2 x 10 bytes over 5 bytes per second, compressed to a half, bounds every cut."""
    text = HEAD + "layers:\n" + "".join(f"- {{name: n{n}, forward: 1, backward: 0, output: 10}}\n" for n in range(4))
    graph, two = layer_graph(parse_profile(text, "m")), Devices((DeviceLevel(2, 5.0),))
    free = plan_as_pipedream(graph, two, Choices(straight=True)).plan
    sent = plan_as_pipedream(graph, two, Choices(straight=True, compression=0.5)).plan
    assert (free.rating.seconds, sent.rating.seconds) == (2, 8)
    assert sent.rating.stages[1].limit == "links"


def test_a_cost_function_that_cannot_rate_a_plan_is_left_out():
    request = PlanRequest(
        parse_profile(CHAIN, "c"), Devices((DeviceLevel(2, 100.0), DeviceLevel(2, 10.0))), "pipedream"
    )
    found = make_plan(request)
    assert list(found.ratings(found.plans[0])) == ["pipedream"]


ENOUGH = "forward: 1, backward: 2, stored: 3, optimizer: 4"


@pytest.mark.parametrize(
    ("layer", "cost"),
    [
        (ENOUGH, "simulated"),
        (ENOUGH.replace("optimizer: 4", "optimizer: 0"), "simulated"),
        (ENOUGH + ", inputs: [above]", "simulated"),
        (ENOUGH + ", inputs: [below]", "2bw-paper"),
        *[(", ".join(part for part in ENOUGH.split(", ") if key not in part), "2bw-paper") for key in ("stor", "opt")],
        ("options: [{seconds: 1}], stored: 3, optimizer: 4", "2bw-paper"),
    ],
)
@pytest.mark.parametrize("source", ["measured by hand", "analytic", ""])
def test_the_default_cost_follows_from_what_a_profile_says(source, layer, cost):
    """Not from the text of its source; one layer that says too little is enough."""
    rows = [
        f"- {{name: above, {ENOUGH}}}",
        f"- {{name: layer, {layer}}}",
        f"- {{name: below, {ENOUGH}, inputs: [above]}}",
    ]
    profile = parse_profile("\n".join([f"format: penstock profile 1\nsource: '{source}'\nlayers:", *rows]), "p")
    request = PlanRequest(profile, Devices((DeviceLevel(2, 1e9),)))
    assert with_cost(request).cost == cost
