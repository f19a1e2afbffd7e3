"""Faults of every kind at random moments of runs, in many seeded cases: `make faults`.

    PYTHONPATH=tests python -m campaigns.faults                          # 220 cases, 45 minutes or more on two cores
    PYTHONPATH=tests python -m campaigns.faults --cases 8 --seed 7       # eight of them
    PYTHONPATH=tests python -m campaigns.faults --from 100 --out FILE    # go on with the case of this number

Signals of all kinds to workers, launchers, fork servers and hosts; full disks; damaged files (`kinds.py`). Each case
must end in time and with the exit code and the words that its kind has, leave neither processes nor temporary files
nor broken checkpoints behind, and have the weights of an undisturbed run in the end, bit for bit, by itself or after
`penstock train --resume`.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from campaigns.faults.cases import draw
from campaigns.faults.kinds import KINDS
from campaigns.faults.trial import Trials

CASES = 220
DRAWS = 3  # a case whose run ends before its fault is drawn again, so often


def carry_out(trials: Trials, number: int, seed: int) -> dict[str, Any]:
    """The record of a case; if its fault came too late, of the same with another moment."""
    for again in range(DRAWS):
        case = draw(number, seed, again)
        row = trials.carry_out(case, f"case {number}.{again}")
        if row["in_time"] or row["wrong"]:
            break
    return {"seed": seed, **row}


def summarize(rows: list[dict[str, Any]]) -> Table:
    """A line for each group of kinds."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["kind"].partition(":")[0]].append(row)
    table = Table("faults", "cases", "as they should", "came too late", "longest end", "wrong")
    for name, found in sorted(groups.items()):
        good = [row for row in found if not row["wrong"]]
        ends = [row["ended_after"] for row in found if row["ended_after"] is not None]
        bad = ", ".join(str(row["case"]) for row in found if row["wrong"])
        late = sum(not row["in_time"] for row in found)
        table.add_row(name, str(len(found)), str(len(good)), str(late), f"{max(ends, default=0):.1f} s", bad)
    return table


def main() -> None:
    """Carry out a campaign; exit code 1 if a case ended as it should not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=CASES, help="number of cases")
    parser.add_argument("--from", type=int, default=0, dest="first", help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the cases to carry out")
    parser.add_argument("--kind", help="only cases whose kind has this in its name")
    parser.add_argument("--out", type=Path, help="append the record of every case to this file, as a line of JSON")
    parser.add_argument("--keep", type=Path, help="do everything in this folder, and leave what went wrong there")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGQUIT, signal.SIGHUP):  # jobs would inherit that a background job or nohup ignores them
        signal.signal(number, signal.SIG_DFL)
    console, rows, begun = Console(), [], time.monotonic()
    numbers = arguments.only or range(arguments.first, arguments.cases)
    if arguments.kind:
        numbers = [n for n in numbers if arguments.kind in draw(n, arguments.seed).kind.name]
    console.print(f"{len(numbers)} cases of {len(KINDS)} kinds, seed {arguments.seed}")
    with tempfile.TemporaryDirectory(prefix="penstock-faults-") as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        trials = Trials(folder)
        for number in numbers:
            row = carry_out(trials, number, arguments.seed)
            rows.append(row)
            verdict = "; ".join(row["wrong"]) or ("as it should" if row["in_time"] else "over before")
            line = f"{number}: {row['kind']} (rank {row['rank']}), {row['shape']}, {row['moment']}: {verdict} "
            console.print(f"{line}({row['seconds']} s)", markup=False, highlight=False, soft_wrap=True)
            if arguments.out:
                with arguments.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    console.print(summarize(rows))
    bad, late = sum(bool(row["wrong"]) for row in rows), sum(not row["in_time"] for row in rows)
    console.print(f"{bad} of {len(rows)} cases ended as they should not; {time.monotonic() - begun:.0f} s")
    if late > len(rows) // 10:
        console.print(f"in {late} cases the fault came too late: too many to say anything")
    sys.exit(1 if bad or late > len(rows) // 10 else 0)


if __name__ == "__main__":
    main()
