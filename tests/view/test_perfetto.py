"""Traces for Perfetto: names, lanes, and arrows that a viewer can bind to the slices that they belong to."""

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from itertools import pairwise

import pytest

from penstock.timeline import Interval, Timeline
from penstock.view.perfetto import trace_events, write_trace
from support.cases import Case, make_batches, make_pipeline
from support.pool import Pool
from support.simulated import simulated


class Viewer:
    """Reads a trace as Chrome's and Perfetto's importers do, written from the description of the format alone.

    Times are whole nanoseconds. A flow event is bound to the slice of its process and thread that is open at its time;
    events of one arrow have the same category, name and id.
    """

    def __init__(self, events):
        self.slices = defaultdict(list)
        for event in events:
            if event["ph"] == "X":
                begin = round(event["ts"] * 1000)
                self.slices[event["pid"], event["tid"]].append((begin, begin + round(event["dur"] * 1000), event))
        for row in self.slices.values():
            row.sort(key=lambda found: found[:2])
            assert all(end <= begin for (_, end, _), (begin, *_) in pairwise(row)), "slices overlap"
        self.arrows = self._arrows([e for e in events if e["ph"] in "stf"])

    def _arrows(self, flows):
        """Per arrow, the slices that it joins, in order."""
        chains = defaultdict(list)
        for event in sorted(flows, key=lambda e: round(e["ts"] * 1000)):
            chains[event["cat"], event["name"], event["id"]].append(event)
        assert len({number for _, _, number in chains}) == len(chains), "one id for two arrows"
        for chain in chains.values():
            times = [round(e["ts"] * 1000) for e in chain]
            assert [e["ph"] for e in chain] == ["s", *["t"] * (len(chain) - 2), "f"]
            assert all(before < after for before, after in pairwise(times)), times
            assert chain[-1]["bp"] == "e"
        return [[self.bound(event) for event in chain] for chain in chains.values()]

    def bound(self, event):
        row, time = self.slices[event["pid"], event["tid"]], round(event["ts"] * 1000)
        begin, end, found = row[bisect_right(row, time, key=lambda s: s[0]) - 1]
        assert begin < time < end, f"{event} stands in no slice"
        return found


def check_arrows(timeline):
    """Every message has an arrow, from the pass that made it to the one that uses it, over its transfer; the arrows."""
    arrows = Viewer(trace_events(timeline)).arrows
    sends = [i for i in timeline.intervals if i.what == "SEND"]
    assert len(arrows) == len(sends) > 0
    joined = Counter()
    for first, *middle, last in arrows:
        source, target = first["args"], last["args"]
        assert source["microbatch"] == target["microbatch"]
        step = target["stage"] - source["stage"]
        assert (step, first["cat"], last["cat"] in "BI") in {(1, "F", False), (-1, "B", True), (-1, "I", True)}
        assert [m["cat"] for m in middle] in ([], ["SEND"])
        assert all(m["pid"] == first["pid"] for m in middle)
        joined[first["pid"], last["pid"], first["ts"], source["microbatch"]] += 1
    assert max(joined.values()) == 1
    assert Counter((a, b) for a, b, *_ in joined) == Counter((i.rank, i.peer) for i in sends)
    return arrows


@pytest.mark.parametrize("latency", [0.0, 0.5])
@pytest.mark.parametrize("method", ["1f1b", "2bw", "interleaved", "zb-v", "chimera"])
def test_arrows_of_simulated_messages(method, latency):
    """Several chunks of a rank use the same microbatch: rank and microbatch alone do not tell who takes a message."""
    arrows = check_arrows(simulated(method, 4, 4, 2, latency=latency))
    assert {len(arrow) for arrow in arrows} >= ({3} if latency else {2})


def test_arrows_of_slices_pairs_and_several_microbatches():
    """Where a slice is half a microbatch, where two passes run together, and where a backward takes a whole batch."""
    for method, latency in (("seq1f1b", 0.0), ("dualpipe-v", 0.0), ("dualpipe", 0.5), ("v-timeprest", 0.5)):
        timeline = simulated(method, 4, 8, 1, latency=latency)
        arrows = Viewer(trace_events(timeline)).arrows
        assert len(arrows) == sum(i.what == "SEND" for i in timeline.intervals) > 0
        for first, *_, last in arrows:
            assert first["ts"] + first["dur"] <= last["ts"]


def run_measured(group, case):
    pipeline = make_pipeline(case, group)
    list(pipeline.run(make_batches(case)))
    return pipeline.timeline()


@pytest.mark.parametrize("method", ["2bw", "stash"])
def test_arrows_of_measured_messages(pool: Pool, method):
    """In one process and between processes, whose clocks agree only so well."""
    case = Case(method, 3, 2, spans=(4,), skips=())
    for timeline in (run_measured(None, case), pool.submit(run_measured, case, ranks=3)[0]):
        assert any(len(arrow) == 3 for arrow in check_arrows(timeline))


def test_arrows_of_an_evaluation_are_its_own():
    """Its microbatches have the numbers of others that are under way, but another span."""
    case = Case("1f1b", 3, 2, spans=(3,), skips=())
    pipeline = make_pipeline(case)
    list(pipeline.run(make_batches(case)))
    pipeline.evaluate(make_batches(case))
    timeline = pipeline.timeline()
    arrows = Viewer(trace_events(timeline)).arrows
    assert len(arrows) == sum(i.what == "SEND" for i in timeline.intervals)
    for first, *_, last in arrows:
        assert ("Fe" in first["name"]) == ("Fe" in last["name"])


def message(rank, peer, start, end, **other):
    lane = f"activation {rank}>{peer}"
    return Interval(rank, lane, start, end, "SEND", "activation 0", **{"stage": 1, **other}, microbatch=0, peer=peer)


def passed(rank, what, start, end, **other):
    return Interval(rank, "compute", start, end, what, f"{what}0", rank, 0, 0, 0, microbatch=0, **other)


def test_an_arrow_may_bend_to_clocks_but_not_go_back_in_time():
    """The second clock is late: a little, and the arrow still ends in its pass; a lot, and there is none."""
    for late, arrows in ((0.4, 1), (0.6, 1), (5.0, 0)):
        second = passed(1, "F", 2 - late, 3 - late)
        timeline = Timeline(2, [passed(0, "F", 0, 1), message(0, 1, 1.5, 1.9), second], unit="")
        assert len(Viewer(trace_events(timeline)).arrows) == arrows


def test_arrows_need_two_ends_that_last():
    """A pass that was not kept, or takes no time, has none; and a message goes to its stage and span."""
    whole = [passed(0, "F", 0, 1), message(0, 1, 1, 2), passed(1, "F", 2, 3)]
    ends = [[event["name"] for event in arrow] for arrow in Viewer(trace_events(Timeline(2, whole))).arrows]
    assert ends == [["F0 stage 0 v0", "activation 0", "F0 stage 1 v0"]]
    without = Viewer(trace_events(Timeline(2, whole[1:]))).arrows
    assert [event["cat"] for arrow in without for event in arrow] == ["SEND", "F"]
    for other in (
        [whole[0], message(0, 1, 1, 1), passed(1, "F", 2, 2)],
        [whole[0], message(0, 1, 1, 1, stage=2), whole[2]],
        [whole[0], message(0, 1, 1, 1, span=1), whole[2]],
    ):
        assert Viewer(trace_events(Timeline(2, other))).arrows == []


def test_a_trace_names_ranks_lanes_stages_and_versions(tmp_path):
    timeline = simulated()
    write_trace(timeline, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert events == json.loads(json.dumps(trace_events(timeline)))
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {"rank 0", "rank 2", "compute"} <= names
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == sum(i.what != "SEND" or i.end > i.start for i in timeline.intervals)
    first = next(e for e in slices if e["name"] == "F6 stage 1 v1" and e["pid"] == 1)
    assert first["args"] == {"stage": 1, "batch": 2, "microbatch": 6, "version": 1}
    update = next(e for e in slices if e["name"] == "STEP1 stage 0 v2")
    assert update["args"] == {"stage": 0, "batch": 1, "version": 2}
    assert {e["name"] for e in events if e["ph"] == "C"} == {"activations"}


def test_messages_under_way_together_have_rows_of_their_own():
    """A row of a trace cannot show slices that overlap."""
    spans = {"activation 0": (0, 4), "activation 1": (1, 3), "activation 2": (3, 5), "activation 3": (4, 6)}
    intervals = [Interval(0, "activation 0>1", *span, "SEND", label) for label, span in spans.items()]
    events = trace_events(Timeline(1, intervals[::-1]))
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {e["name"]: names[e["tid"]] for e in events if e["ph"] == "X"} == {
        "activation 0": "activation 0>1",
        "activation 1": "activation 0>1 (2)",
        "activation 2": "activation 0>1 (2)",
        "activation 3": "activation 0>1",
    }


def test_waits_say_for_what():
    wait = Interval(1, "compute", 0, 2, "wait", "wait for rank 0: activation 0", cause="rank 0: activation 0", peer=0)
    events = trace_events(Timeline(2, [wait, message(0, 1, 1, 2)]))
    assert [e["args"] for e in events if e.get("cat") == "wait"] == [{"waits for": "rank 0: activation 0"}]
    assert [e["args"] for e in events if e.get("cat") == "SEND"] == [{"microbatch": 0}]
