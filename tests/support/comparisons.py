"""Small comparisons, and an observer that counts what it is told."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from penstock.compare.config import ComparisonConfig, comparison_config
from penstock.compare.results import Findings
from penstock.compare.run import ComparisonRun, text_task
from penstock.train.data.window_sampler import batches

TEXT = Path(__file__).parents[2] / "LICENSE"  # any text that stays the same
TINY = (
    "stages=2", "microbatches=4", "microbatch_size=1", "batches=6", "seeds=1", "evaluate.every=2", "evaluate.samples=8",
    "model.layers=2", "model.width=16", "model.heads=2", "model.context=8", "lr_schedule.warm_up=2",
    "optimizer.lr=0.01",
    f"data={TEXT}",
)  # fmt: skip


SGD = ("optimizer.name=sgd", "optimizer.lr=0.1", "optimizer.nesterov=false")  # spike compensation takes no other


class Quiet:
    """An observer that counts."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.last: Any = None

    def __getattr__(self, name: str) -> Any:
        def note(*arguments: Any) -> None:
            self.seen[name] += 1
            self.last = arguments

        return note


def configured(*changes: str) -> ComparisonConfig:
    return comparison_config([*TINY, *changes], {})


def compared(folder: Path, *changes: str, observer: Quiet | None = None) -> Findings:
    return ComparisonRun(configured(*changes), folder, observer or Quiet()).run()


def curves(findings: Findings, *what: str) -> dict[str, list[list[Any]]]:
    return {
        key.method: [[getattr(row, name) for name in what] for row in findings.rows() if row.method == key.method]
        for key in findings.results
    }


def task_of(config: ComparisonConfig) -> tuple[Any, Any]:
    return text_task(config, Path("nowhere"))(config)


def data(config: ComparisonConfig) -> list[Any]:
    _, windows = task_of(config)
    size = config.microbatches, config.microbatch_size
    return [list(batch) for batch in batches(windows, 0, config.batches, *size)]
