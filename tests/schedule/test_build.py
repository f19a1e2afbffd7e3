"""From a name or a user's function to a schedule: names, aliases, refusals, and what a user may hand in."""

import re
from dataclasses import replace

import pytest

from penstock.errors import ConfigError, PenstockError, ScheduleError
from penstock.schedule.build import prove, smallest_microbatches
from penstock.schedule.ir.order import make_order, pass_of
from penstock.schedule.ir.schedule import Op, straight
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.methods.compatibility import compatible
from penstock.schedule.methods.find_method import find_method
from penstock.schedule.methods.table import METHODS
from penstock.schedule.orders import ORDERS
from support.schedules import make_schedule


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("gpipe", "gpipe"), ("GPipe", "gpipe"), ("afab", "gpipe"), ("pipedream_flush", "1f1b"), ("dapple", "1f1b"),
        ("eager-1f1b", "eager"), ("PipeDream-2BW", "2bw"), ("double-buffer", "2bw"), ("pipedream", "stash"),
        ("weight_stashing", "stash"), ("vertical", "vertical-sync"), ("ampnet", "newest"),
        ("depth-first", "interleaved"),
    ],
)  # fmt: skip
def test_methods_are_found_by_name_and_alias(alias, name):
    assert find_method(alias) is METHODS[name]


def test_no_name_means_two_methods():
    names = [name for row in METHODS.values() for name in (row.name, *row.aliases)]
    assert len(names) == len(set(names))


def test_every_row_names_an_order_and_a_rule_that_exist():
    for row in METHODS.values():
        assert row.order in ORDERS
        assert row.rule in RULES
        assert row.source
        assert row.title


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zb-1p", r"unknown method 'zb-1p'\. Use 'zb-auto' with .* ranks: options limit=4 for 4 stages\."),
        (
            "ZB_exact",
            r"It is an order, whose search may take minutes: zb-auto with order zb-exact",
        ),
    ],
)
def test_names_that_are_no_methods_lead_to_one(name, message):
    with pytest.raises(ConfigError, match=message):
        find_method(name)
    assert make_schedule("zb-auto", 4, 4, options={"limit": 4}).name == "zb-auto"


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("1f2b", "1f1b"), ("2wb", "2bw"), ("pipemaer", "pipemare"), ("interleave", "interleaved"), ("pipedram", "stash")],
)
def test_an_unknown_method_is_refused_with_the_nearest_three_names(name, nearest):
    """Of methods, not the other names that some have."""
    with pytest.raises(
        ConfigError, match=rf"unknown method '{name}'. Did you mean .*\? `penstock methods` lists"
    ) as said:
        make_schedule(name, 2, 2)
    near = re.findall("'([^']+)'", str(said.value))[1:]
    assert near[0] == nearest
    assert len(near) == 3
    assert set(near) <= METHODS.keys()


def test_a_name_like_no_other_has_no_nearest():
    with pytest.raises(ConfigError, match=r"unknown method 'zzz'\. `penstock methods` lists all \d+\."):
        make_schedule("zzz", 2, 2)


@pytest.mark.parametrize(
    ("extra", "telling"),
    [
        ({"order": "1f2b"}, "unknown order '1f2b'; known: sequential"),
        ({"rule": "2bw"}, "unknown version rule '2bw'. It is a method, whose rule is double-buffer. Known: "),
        ({"rule": "fresh"}, "unknown version rule 'fresh'. Did you mean 'flush'"),
        ({"rule": "flush", "order": "endless-1f1b"}, "the order lets batches overlap"),
        ({"rule": "provisional", "order": "endless-eager-1f1b"}, "the order lets batches overlap"),
    ],
)
def test_choices_that_cannot_go_together_are_refused(extra, telling):
    with pytest.raises(ConfigError, match=telling):
        make_schedule("2bw", 3, 4, **extra)


@pytest.mark.parametrize(
    ("stages", "microbatches", "what"),
    [
        (0, 1, "stages"), (1, 0, "microbatches"), (-2, 3, "stages"), (2.0, 3, "stages"), (True, 3, "stages"),
        (2, "4", "microbatches"),
    ],
)  # fmt: skip
def test_numbers_must_be_positive_whole_numbers(stages, microbatches, what):
    with pytest.raises(ConfigError, match=f"{what} must be a whole number of at least 1"):
        make_schedule("1f1b", stages, microbatches)


def test_choices_nobody_offers_yet_are_named():
    order, rule = ORDERS["1f1b"](2, 2), RULES["flush"]
    assert compatible(order, rule) is None
    with pytest.raises(ConfigError, match="unknown correction 'magic'"):
        compatible(order, rule, correction="magic")
    assert "combine 'gossip' is not supported" in compatible(order, rule, combine="gossip")


# --- a user's own order ----------------------------------------------------------------------------------------------

ROWS = ["F0 F1 B0 B1", "F0 B0 F1 B1"]


def as_text(stages, microbatches):
    return ROWS


def as_words(stages, microbatches):
    return [row.split() for row in ROWS]


def as_actions(stages, microbatches):
    return [
        [pass_of(Op(word[0]), int(word[1:]), stage) for word in row.split()]
        for row, stage in zip(ROWS, straight(2), strict=True)
    ]


def as_order(stages, microbatches):
    return make_order(as_actions(stages, microbatches))


@pytest.mark.parametrize("function", [as_text, as_words, as_actions, as_order])
def test_a_users_order_in_every_form(function):
    schedule = make_schedule(function, 2, 2)
    assert schedule.name == function.__name__
    assert schedule.programs == make_schedule("1f1b", 2, 2).programs


def test_a_users_order_under_another_rule():
    assert make_schedule(as_text, 2, 2, rule="double-buffer").rule == "double-buffer"
    assert make_schedule("1f1b", 2, 2, order=as_text).programs == make_schedule("1f1b", 2, 2).programs


@pytest.mark.parametrize("result", [None, 7, "F0 B0", {"rank": 0}])
def test_what_is_no_order_is_refused(result):
    def strange(stages, microbatches):
        return result

    with pytest.raises(ScheduleError, match="strange: expected an Order, or a list with the passes of each rank"):
        make_schedule(strange, 1, 1)


def test_a_users_order_that_is_wrong_is_refused_with_the_action():
    def wrong(stages, microbatches):
        return ["F0 F1 B0 B1", "B0 F0 F1 B1"]

    with pytest.raises(ScheduleError, match="wrong: rank 1, B0 needs the forward of microbatch 0 on stage 1"):
        make_schedule(wrong, 2, 2)


def test_a_users_token_that_cannot_be_read_is_named():
    with pytest.raises(ScheduleError, match="cannot read 'G0'"):
        make_schedule(lambda stages, microbatches: ["F0 G0"], 1, 1)


def test_a_rank_that_lacks_a_pass_is_refused():
    with pytest.raises(ScheduleError, match="microbatch 1, stage 1 has 0 forwards per batch"):
        prove(lambda stages, microbatches: ["F0 F1 B0 B1", "F0 B0"], 2, 2)


def test_a_row_with_a_choice_that_is_not_offered_is_refused(monkeypatch):
    """Not built without it."""
    row = replace(METHODS["newest"], name="corrected", correction="prediction")
    monkeypatch.setattr("penstock.schedule.build.find_method", lambda name: row)
    with pytest.raises(ConfigError, match="unknown correction 'prediction'. Did you mean 'spectrain'"):
        make_schedule("corrected", 2, 2)


def test_a_function_s_next_legal_number_is_not_called_the_smallest():
    def odd(stages, microbatches):
        passes = [f"F{k} B{k}" for k in range(microbatches)]
        return [" ".join(passes[: microbatches - 1] if microbatches == 5 else passes)]

    with pytest.raises(ScheduleError, match="odd with 1 stages cannot run with the given .* but with 6"):
        make_schedule(odd, 1, 5)


def test_every_refusal_is_one_of_our_errors():
    """`except PenstockError` is enough, and so is `except ValueError`."""
    for bad in (("none", 2, 2), ("2bw", 4, 1), ("1f1b", 0, 1)):
        with pytest.raises(PenstockError) as caught:
            make_schedule(*bad)
        assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([], "asked for 2 stages, it returned the passes of 0 ranks"),
        (["F0 B0"], "asked for 2 stages, it returned the passes of 1 ranks"),
        ([None, None], "expected the passes of rank 0, got None"),
        ([[("F", 0)], []], r"expected a pass on rank 0, such as 'F0', got \('F', 0\)"),
        ("F0 B0", "expected an Order, or a list"),
    ],
)
def test_what_is_no_order_is_refused_by_name(returned, message):
    with pytest.raises(ScheduleError, match=message):
        make_schedule(lambda stages, microbatches: returned, 2, 1)


def test_a_node_without_forwards_is_refused():
    with pytest.raises(ScheduleError, match="stage 0 on rank 0 has backwards but no forwards"):
        make_schedule(lambda stages, microbatches: ["B0", "F0 B0"], 2, 1, rule="double-buffer")


def test_cuts_that_run_different_microbatches_are_refused():
    with pytest.raises(ScheduleError, match=r"stage 0 runs no forward of microbatches \[1\]"):
        make_schedule(lambda stages, microbatches: ["F0 B0", "F0 F1 B0 B1"], 2, 2, rule="vertical-sync")


def only_multiples_of_four(stages, microbatches):
    if microbatches % 4:
        raise ValueError("this order wants multiples of four")
    return [[f"{op}{k}" for op in "FB" for k in range(microbatches)] for _ in range(stages)]


def test_an_error_of_the_user_s_function_is_not_hidden():
    with pytest.raises(ValueError, match="multiples of four"):
        make_schedule(only_multiples_of_four, 2, 2)


def test_the_smallest_legal_number_is_found_among_the_few():
    assert smallest_microbatches(only_multiples_of_four, 2, beyond=1) == 4
