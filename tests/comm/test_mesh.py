"""Parallel pipelines on a device mesh: what fits trains as ever, and what does not is refused with its numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.errors import ConfigError, PenstockError
from support.cases import Case, Outcome, assert_same, expected, make_batches, make_pipeline, train
from support.joined_pipelines import together
from support.pool import Pool

NAMES = ("width", "depth", "inner")
CASE = Case("2bw", 2, 2, width=2, reduce="fast", clip=0.6)


def on_a_mesh(group: dist.ProcessGroup, shape: tuple[int, ...]) -> Outcome:
    """The width comes from the mesh, and so do the groups."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=NAMES[: len(shape)])
    with (
        patch.object(dist, "new_group", side_effect=AssertionError("a group beside those of the mesh")),
        patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sums,
    ):
        outcome = train(None, CASE, mesh=mesh, width=1)
    assert sums.call_count == len(outcome.decided)
    return outcome


@pytest.mark.parametrize("shape", [(2, 2), (2, 2, 1)])
def test_a_mesh_gives_the_same_numbers(pool: Pool, shape: tuple[int, ...]) -> None:
    assert_same(together(pool.submit(on_a_mesh, shape, ranks=4), CASE), expected(CASE))


def with_one_stage(group: dist.ProcessGroup, case: Case) -> int:
    """The group along the width is the whole job's, in which the pipeline makes other calls, too."""
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=NAMES[:2])
    assert mesh.get_group("width") is dist.group.WORLD
    with patch.object(dist, "new_group", wraps=dist.new_group) as groups:
        pipeline = make_pipeline(case, None, mesh=mesh)
        reports = pipeline.run(make_batches(case))
        for _ in reports:
            pipeline.timeline()
    return groups.call_count


def test_a_group_that_is_used_otherwise_is_not_taken(pool: Pool) -> None:
    assert pool.submit(with_one_stage, Case("2bw", 1, 2, width=4, reduce="fast"), ranks=4) == [1] * 4


def swapped() -> dict[str, Any]:
    """Ranks 0 and 2 are a pipeline, and so are 1 and 3."""
    return {"mesh": DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=NAMES[:2])}


def swapped_group() -> dict[str, Any]:
    return {"group": dist.new_group([0, 2, 1, 3], sort_ranks=False)}


def in_another_order(group: dist.ProcessGroup) -> Outcome:
    return train(swapped_group()["group"], CASE, **swapped())


def test_a_mesh_in_another_order_and_a_group_in_the_same(pool: Pool) -> None:
    outcomes = pool.submit(in_another_order, ranks=4)
    assert_same(together([outcomes[rank] for rank in (0, 2, 1, 3)], CASE), expected(CASE))


def shaped(*shape: int, names: tuple[str, ...] = NAMES) -> dict[str, Any]:
    return {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=names[: len(shape)])}


REFUSED: list[tuple[Callable[[], dict[str, Any]], str]] = [
    (
        lambda: shaped(2, 2, names=("stages", "width")),
        "ConfigError: the mesh has 2 dimensions named ('stages', 'width'); name them ('width', 'depth') or ('width', ",
    ),
    (
        lambda: shaped(2, 2) | {"rank_order": "tp-dp-pp"},
        "ConfigError: rank_order is 'tp-dp-pp', but the dimensions of the mesh are ('width', 'depth'), which is "
        "'tp-pp-dp'; leave rank_order out",
    ),
    (lambda: shaped(4), "ConfigError: the mesh has 1 dimensions named ('width',); name them ("),
    (
        lambda: {"mesh": DeviceMesh("cpu", [[0, 1], [2, 3]])},
        "ConfigError: the mesh has 2 dimensions named (); name them (",
    ),
    (
        lambda: shaped(1, 2, 2) | {"tensor_parallel": 4},
        "ConfigError: tensor_parallel is 4, but the inner dimension of the mesh is 2; leave tensor_parallel out",
    ),
    (lambda: shaped(4, 1), "ConfigError: the schedule has 2 ranks, but the depth of the mesh is 1"),
    (
        lambda: shaped(2, 2) | {"width": 3},
        "ConfigError: data_parallel is 3, but the mesh has a width of 2; leave data_parallel out",
    ),
    (
        swapped,
        "ConfigError: the mesh has the ranks [0, 2, 1, 3], but the job has [0, 1, 2, 3]; pass a group of the mesh",
    ),
    (
        lambda: shaped(2, 2) | swapped_group(),
        "ConfigError: the mesh has the ranks [0, 1, 2, 3], but group has [0, 2, 1, 3]; pass a group of the mesh",
    ),
]


def refusals(group: dist.ProcessGroup) -> list[str]:
    said = []
    for make, _ in REFUSED:
        try:
            make_pipeline(CASE, **make())
        except PenstockError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_a_mesh_that_does_not_fit(pool: Pool) -> None:
    for said in pool.submit(refusals, ranks=4):
        for text, (_, wanted) in zip(said, REFUSED, strict=True):
            assert text.startswith(wanted)


def test_something_else_than_a_mesh() -> None:
    with pytest.raises(ConfigError, match=r"mesh must be a torch.distributed.device_mesh.DeviceMesh, got \(2, 2\)"):
        make_pipeline(CASE, mesh=(2, 2))
