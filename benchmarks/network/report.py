"""The summary of `benchmarks.links`: throughput and bytes per link and arm, and what was to be reached."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from benchmarks.network.arms import CASES, MAKERS, MODELS, STREAMS, TINY, case_named
from benchmarks.network.compare import clock_means, stage_costs
from benchmarks.network.hosts import LINKS
from benchmarks.throughput import interval

Turns = dict[tuple[str, str, str], list[dict[str, Any]]]
"""Case, link, arm -> its turns in the order of rounds."""

FLAGSHIP, TORCH = "penstock 2bw auto", "torch 1f1b"
LOOPBACK = next(name for name, link in LINKS.items() if link.mbit is None)


def group(rows: Iterable[dict[str, Any]]) -> Turns:
    """Sort the turns of a run; a round that was interrupted is left out."""
    turns: Turns = {}
    for row in sorted(rows, key=lambda row: row["round"]):
        turns.setdefault((row["case"], row["link"], row["arm"]), []).append(row)
    whole = min((len(found) for found in turns.values()), default=0)
    return {key: found[:whole] for key, found in turns.items()}


def rate(row: dict[str, Any]) -> float:
    """Microbatches per second."""
    return float(row["microbatches"] / row["seconds"])


def ratios(turns: Turns, case: str, over: tuple[str, str], under: tuple[str, str]) -> list[float]:
    """Throughput of a link and arm over that of others, per round; empty if either was not measured."""
    pairs = zip(turns.get((case, *over), []), turns.get((case, *under), []), strict=False)
    return [rate(a) / rate(b) for a, b in pairs]


def most_sent(row: dict[str, Any]) -> float:
    """Bytes that a host sent, of the one that sent most; all ranks of the loopback share its counter."""
    sent = [float(rank["sent"]) for rank in row["ranks"]]
    return statistics.fmean(sent) / len(sent) if row["link"] == LOOPBACK else max(sent)


def print_summary(turns: Turns) -> None:
    """Tables as Markdown."""
    for case in (case.name for case in (*CASES, *TINY)):
        if case not in {name for name, _, _ in turns}:
            continue
        links = list(dict.fromkeys(link for name, link, _ in turns if name == case))
        links.sort(key=list(LINKS).index)
        arms = list(dict.fromkeys(arm for name, _, arm in turns if name == case))
        arms.sort(key=list(MAKERS).index)
        rounds = len(turns[case, links[0], arms[0]])
        print(f"\n{case}: microbatches per second, median of {rounds} rounds (95 % interval)\n")
        _table(links, arms, lambda link, arm, case=case: _cell([rate(row) for row in turns[case, link, arm]], 1))
        print("\nkB that a host sends per microbatch, the host that sends most\n")
        _table(
            links, arms, lambda link, arm, case=case: f"{1e-3 * statistics.median(_sent(turns[case, link, arm])):.0f}"
        )
    print_ratios(turns)
    print_work(turns)
    print_answer(turns)
    print("\nwhat was to be reached; ratios of throughput within a round, median (95 % interval)\n")
    print("| aim | case | link | at least | reached | |")
    print("|---|---|---|---|---|---|")
    for aim in aims(turns):
        verdict = "yes" if statistics.median(aim.found) >= aim.least else "no"
        print(f"| {aim.what} | {aim.case} | {aim.link} | {aim.least} | {_cell(aim.found, 3)} | {verdict} |")


def print_ratios(turns: Turns) -> None:
    """Every arm beside torch's 1F1B on the same link, cases below each other."""
    links = [link for link in LINKS if any(link == other for _, other, _ in turns)]
    print("\nthroughput / that of torch 1f1b in the same round, median (95 % interval)\n")
    print("| case | arm | " + " | ".join(links) + " |")
    print("|---" * (len(links) + 2) + "|")
    for case in (case.name for case in (*CASES, *TINY)):
        for arm in (arm for arm in MAKERS if arm != TORCH and any((case, link, arm) in turns for link in links)):
            found = [ratios(turns, case, (link, arm), (link, TORCH)) for link in links]
            print(f"| {case} | {arm} | " + " | ".join(_cell(of, 2) if of else "" for of in found) + " |")


def print_work(turns: Turns) -> None:
    """What a rank works per microbatch in each pipeline, and how long the rest takes: waits, messages and Python."""
    rows = {key: found for key, found in turns.items() if found and found[0]["ranks"][0].get("work")}
    links = [link for link in LINKS if any(link == other for _, other, _ in rows)]
    print(
        "\nms of work of a rank per microbatch + ms of all else, means over the ranks; time / work of the slowest rank,"
    )
    print("which passes that take longer from turn to turn do not change; medians of the rounds\n")
    print("| case | arm | " + " | ".join(links) + " |")
    print("|---" * (len(links) + 2) + "|")
    for case, arm in dict.fromkeys((case, arm) for case, _, arm in rows):
        cells = [_work_cell(rows.get((case, link, arm), [])) for link in links]
        print(f"| {case} | {arm} | " + " | ".join(cells) + " |")


def _work_cell(rows: Sequence[dict[str, Any]]) -> str:
    if not rows:
        return ""
    work, rest, over = (statistics.median(part) for part in zip(*map(_work_and_rest, rows), strict=True))
    return f"{1e3 * work:.1f} + {1e3 * rest:.1f}; {over:.3f}"


def _work_and_rest(row: dict[str, Any]) -> tuple[float, float, float]:
    """Seconds per microbatch: the mean work of a rank, and the rest; and all over the work of the slowest rank."""
    works = [sum(count * mean for count, mean in rank["work"].values()) for rank in row["ranks"]]
    work = statistics.fmean(works) / row["microbatches"]
    return work, row["seconds"] / row["microbatches"] - work, row["seconds"] / max(works)


def print_answer(turns: Turns) -> None:
    """Which method on which link, on one screen: the fastest of all, and of those that change no result."""
    links = [link for link in LINKS if any(link == other for _, other, _ in turns)]
    print("\nthe fastest method, and its median throughput / that of torch 1f1b there and of itself on the loopback\n")
    print("| case | of | " + " | ".join(links) + " |")
    print("|---" * (len(links) + 2) + "|")
    for case in dict.fromkeys(case.name for case in (*CASES, *TINY) if any(case.name == name for name, _, _ in turns)):
        for kind, left_out in (("all", ()), ("synchronous", STREAMS)):
            cells = [_fastest(turns, case, link, left_out) for link in links]
            print(f"| {case} | {kind} | " + " | ".join(cells) + " |")


def _fastest(turns: Turns, case: str, link: str, left_out: Sequence[str]) -> str:
    medians = {
        arm: statistics.median(map(rate, rows))
        for (name, other, arm), rows in turns.items()
        if (name, other) == (case, link) and arm not in left_out
    }
    if not medians:
        return ""
    best = max(medians, key=medians.__getitem__)
    found = [ratios(turns, case, (link, best), under) for under in ((link, TORCH), (LOOPBACK, best))]
    return ", ".join([best, *(f"{statistics.median(of):.2f}" if of else "-" for of in found)])


class Aim(NamedTuple):
    """What was to be reached, and what was found per round."""

    what: str
    case: str
    link: str
    least: float
    found: list[float]


def aims(turns: Turns) -> list[Aim]:
    """All aims for which this run has turns."""
    found = []
    known = [case.name for case in (*CASES, *TINY)]
    pairs = {(case, link) for case, link, _ in turns}
    for name, link in sorted(pairs, key=lambda pair: (known.index(pair[0]), list(LINKS).index(pair[1]))):
        case = case_named(name)
        found += _of_link(turns, name, link)
        one = next((arm for arm in ("penstock 1f1b auto", "penstock 1f1b") if (name, link, arm) in turns), "")
        for ours, theirs in ((one, TORCH), ("penstock zb-v", "torch zbv")):
            found.append(_against(turns, name, link, ours, theirs, 1.0))
        if case.hosts == 2 and case.model == "few" and (link, case.m) in (("100 Mbit/s", 8), ("loopback", 2)):
            found.append(_against(turns, name, link, FLAGSHIP, TORCH, 1.4 if case.m == 8 else 1.45))
        if case.model == "many" and link == "100 Mbit/s":
            found.append(_against(turns, name, link, FLAGSHIP, "torch ddp", 3.0))
    return [aim for aim in found if aim.found]


def _against(turns: Turns, case: str, link: str, ours: str, theirs: str, least: float) -> Aim:
    return Aim(f"{ours} / {theirs}", case, link, least, ratios(turns, case, (link, ours), (link, theirs)))


def _of_link(turns: Turns, case: str, link: str) -> list[Aim]:
    """What a link leaves of the throughput of the loopback where a message is hidden, or of its rate where it is not.

    Between them (a message takes longer than a forward, but less than all work on a microbatch) nothing is demanded.
    """
    rows, mbit = turns.get((case, link, FLAGSHIP), []), LINKS[link].mbit
    if not rows or mbit is None:
        return []
    nbytes = MODELS[case_named(case).model].message
    passes = [stage for row in rows for stage in stage_costs(clock_means(row), case_named(case).hosts)]
    forward = statistics.median(cost.forward for cost in passes)
    work = statistics.median(cost.forward + cost.backward_input + cost.backward_weight for cost in passes)
    if LINKS[link].seconds(nbytes) < forward:
        return [
            Aim(
                f"{FLAGSHIP} / itself on the loopback",
                case,
                link,
                0.95,
                ratios(turns, case, (link, FLAGSHIP), (LOOPBACK, FLAGSHIP)),
            )
        ]
    if LINKS[link].occupied(nbytes) > work:
        return [
            Aim(
                f"{FLAGSHIP}: bytes sent / rate of the link",
                case,
                link,
                0.9,
                [8e-6 * most_sent(row) / row["seconds"] / mbit for row in rows],
            )
        ]
    return []


def _sent(rows: Sequence[dict[str, Any]]) -> list[float]:
    return [most_sent(row) / row["microbatches"] for row in rows]


def _table(links: Sequence[str], arms: Sequence[str], cell: Any) -> None:
    print("| arm | " + " | ".join(links) + " |")
    print("|---" * (len(links) + 1) + "|")
    for arm in arms:
        print(f"| {arm} | " + " | ".join(cell(link, arm) for link in links) + " |")


def _cell(values: Sequence[float], digits: int) -> str:
    median, low, high = interval(values)
    return f"{median:.{digits}f} ({low:.{digits}f}, {high:.{digits}f})"
