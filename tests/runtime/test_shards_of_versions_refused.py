"""What goes wrong with shards of versions is found by the books, and what cannot be is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.errors import CapabilityError, ConfigError, VersionError
from penstock.runtime.ops.batch_ops import GatherAction, ReleaseAction
from penstock.runtime.update.gathers_and_reduce_scatters import Gathers
from support.cases import Case, make_batches, make_pipeline
from support.layered_cases import TWO, layered
from support.own_methods import correction_of


class Planted:
    """Faults of the runtime that no proof can see, each in one method."""

    @staticmethod
    def gather_of_the_version_before(patch: pytest.MonkeyPatch) -> None:
        begin = Gathers.begin
        patch.setattr(Gathers, "begin", lambda self, stage, version: begin(self, stage, version - 1))

    @staticmethod
    def no_gather(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(GatherAction, "work", lambda *_: None)

    @staticmethod
    def no_release(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(ReleaseAction, "work", lambda *_: None)

    @staticmethod
    def no_last_release(patch: pytest.MonkeyPatch) -> None:
        work = ReleaseAction.work
        patch.setattr(ReleaseAction, "work", lambda self, turn: None if turn.t == 1 else work(self, turn))

    @staticmethod
    def release_twice(patch: pytest.MonkeyPatch) -> None:
        work = ReleaseAction.work
        patch.setattr(ReleaseAction, "work", lambda self, turn: (work(self, turn), work(self, turn))[0])

    @staticmethod
    def pass_before_its_gather(patch: pytest.MonkeyPatch) -> None:
        def never(*_: Any) -> Any:
            yield from ()

        patch.setattr(Gathers, "wait", never)


@pytest.mark.parametrize(
    ("fault", "said_"),
    [
        ("gather_of_the_version_before", "a GATHER of version -1 of the weights, but the rows .* are those of 0"),
        ("no_gather", "of version 0 of the weights only the rows of pipeline 0 are here; no GATHER has made it whole"),
        ("no_release", r"stage .*: no buffer is free for the gradient of batch 2; versions \[0, 1\] and"),
        ("no_last_release", r"stage .*: version 0 of the weights is still gathered at the end of a span; its RELEASE"),
        ("release_twice", "a RELEASE of version 0 of the weights comes while it is not whole"),
        ("pass_before_its_gather", "of version 0 of the weights only the rows of pipeline"),
    ],
)
def test_faults_in_overlapping_gathers_are_found(monkeypatch: pytest.MonkeyPatch, fault: str, said_: str) -> None:
    case = layered(2, 2, spans=(1 if "last" in fault else 4,))
    getattr(Planted, fault)(monkeypatch)
    with pytest.raises(VersionError, match=said_):
        list(make_pipeline(case, sharding="full").run(make_batches(case)))


@pytest.mark.parametrize("method", ["2bw", "2bw-eager"])
@pytest.mark.parametrize("depth", [2, 4])
def test_orders_whose_batches_overlap_in_turns_are_refused(method: str, depth: int) -> None:
    case = Case(method, depth, 6, width=2)
    with pytest.raises(ConfigError, match=f"{method}: sharding full does not go with rule .* take optimizer or grad"):
        make_pipeline(case, sharding="full")


def test_what_else_is_refused_by_name() -> None:
    case = layered(4, 2, TWO)
    pipeline = make_pipeline(case, sharding="full")
    with pytest.raises(ConfigError, match="2bw-layered: .*divides state among parallel pipelines, but there is one"):
        make_pipeline(replace(case, width=1), sharding="full")
    with pytest.raises(CapabilityError, match="full is not offered with correction '2bw-ahead' yet"):
        make_pipeline(replace(case, correction=correction_of("2bw-ahead")), sharding="full")
    with pytest.raises(CapabilityError, match="on_update: .* where passes read other weights than the newest"):
        pipeline.on_update(lambda *_: None)
    for method in ("layered", "breadth-first", "interleaved"):
        with pytest.raises(ConfigError, match=r"differ in sharding \(full under rule double-buffer and full under rul"):
            pipeline.switch(method=method)
    flushing = make_pipeline(replace(case, method="breadth-first"), sharding="full")
    with pytest.raises(ConfigError, match=r"differ in sharding \(full under rule flush and full under rule double-buf"):
        flushing.switch(method="2bw-layered")
    list(pipeline.run(make_batches(case)[:2]))
