"""The table of times of the benchmark of sharded pipelines on links."""

from benchmarks.network.arms import SHARDED
from benchmarks.sharded_links import print_times

FAST, SLOW = "penstock layered x 2", "torch layered x 2"
CASE = SHARDED[-1]._replace(arms=(FAST, SLOW))
LINKS = ("1 Gbit/s", "200 Mbit/s")


def rows_of(arm, link, batches, seconds):
    """A turn for each round."""
    return [
        {"case": CASE.name, "arm": arm, "link": link, "microbatches": batches * CASE.m, "seconds": each}
        for each in seconds
    ]


def test_times_of_a_batch_are_those_of_the_longer_runs(capsys):
    """Shorter runs, in which pipelines fill and weights are made whole, do not count."""
    rows = [
        *rows_of(FAST, LINKS[0], 2, [90.0] * 3),
        *rows_of(FAST, LINKS[0], 8, [0.8, 1.6, 2.4]),
        *rows_of(FAST, LINKS[1], 8, [4.0] * 3),
        *rows_of(SLOW, LINKS[0], 8, [8.0] * 3),
        *rows_of(SLOW, LINKS[1], 8, [80.0, 88.0, 96.0]),
        {"case": "another", "arm": FAST, "link": LINKS[0], "microbatches": 8 * CASE.m, "seconds": 1e3},
    ]
    print_times(rows, [CASE], LINKS)
    title, rule, fast, slow = capsys.readouterr().out.split("\n")[1:5]
    assert title == "| arm | m | 1 Gbit/s | 200 Mbit/s |"
    assert rule == "|---|---|---|---|"
    assert fast == f"| {FAST} | {CASE.m} | 200 (100, 300) | 500 (500, 500) |"
    assert slow == f"| {SLOW} | {CASE.m} | 1000 (1000, 1000) | 11000 (10000, 12000) |"
