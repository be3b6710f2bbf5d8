"""Collectives: right on every path, and clear when ranks disagree or stay away."""

from __future__ import annotations

import itertools
from typing import Any

import comm_tasks as tasks
import pytest
import torch
from pool import COLLECTIVE_SECONDS, Pool

SIZES = [1, 2, 3]
WAYS = {"backend": "backend", "other": tasks.FORCED}
FP8 = torch.float8_e4m3fn
CALLS = [  # the backend's own or the other way, waited for at once or later, of one or more
    {"paths": paths, "wait": wait, "count": count}
    for paths, wait, count in itertools.product(WAYS.values(), (True, False), (1, 1003))
]

all_sizes = pytest.mark.parametrize("world_size", SIZES)


@all_sizes
def test_a_gather_gives_every_rank_the_bytes_of_all(pool: Pool, world_size: int) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.uint8, FP8)
    given = [{"dtype": dtype, **call} for dtype in dtypes for call in CALLS]
    for found in pool.run(world_size, tasks.each, of=tasks.gathers, given=given):
        wrong = [call for call, right in zip(given, found, strict=True) if not all(right)]
        assert wrong == []


@all_sizes
def test_reductions_are_sums(pool: Pool, world_size: int) -> None:
    close = {torch.float32: 1e-6, torch.bfloat16: 2e-2}
    given = [{"dtype": dtype, **call} for dtype in close for call in CALLS]
    for results in pool.run(world_size, tasks.each, of=tasks.reductions, given=given):
        for call, (scattered, reduced, kept) in zip(given, results, strict=True):
            assert kept, call
            near = close[call["dtype"]]
            tolerance = {"atol": near * world_size, "rtol": near, "msg": str(call)}
            torch.testing.assert_close(*scattered, **tolerance)
            torch.testing.assert_close(*reduced, **tolerance)


@all_sizes
def test_the_largest_of_each_element_is_found(pool: Pool, world_size: int) -> None:
    given = [{"wait": True}, {"wait": False}]
    found = pool.run(world_size, tasks.each, of=tasks.maxima, given=given)
    assert found == [[[world_size - 1.0, 0.0]] * 2] * world_size


@all_sizes
def test_parts_that_were_exchanged_are_summed_in_rank_order(pool: Pool, world_size: int) -> None:
    for count in (1, 7, 1003):
        assert all(pool.run(world_size, tasks.sums_in_rank_order, count=count))


@pytest.mark.parametrize("world_size", [2, 3])
def test_parts_that_were_summed_have_no_memory_after_the_wait(pool: Pool, world_size: int) -> None:
    for found in pool.run(world_size, tasks.bytes_held_after_a_sum, count=1003):
        assert found == ([world_size * 1003 * 4], [0])


@pytest.mark.parametrize(
    ("world_size", "paths"), [(2, tasks.FORCED), (2, "backend"), (3, tasks.FORCED)]
)
def test_collectives_under_way_own_their_tensors(pool: Pool, world_size: int, paths: Any) -> None:
    for right in pool.run(world_size, tasks.several_at_once, paths=paths):
        assert right == [True] * 8


def test_a_gather_that_nobody_waits_for_disturbs_no_later_one(pool: Pool) -> None:
    assert all(pool.run(3, tasks.dropped))


@all_sizes
def test_uneven_parts_are_put_one_after_the_other(pool: Pool, world_size: int) -> None:
    parts = ([3, 0, 5, 1], [2, 2, 2, 2], [0, 9, 0, 0], [0, 0, 0, 0])
    both = itertools.product((torch.float32, FP8), parts)
    given = [{"dtype": dtype, "sizes": sizes} for dtype, sizes in both]
    for results in pool.run(world_size, tasks.each, of=tasks.uneven, given=given):
        for call, (right, calls) in zip(given, results, strict=True):
            assert right, call
            assert calls <= 1, call


@all_sizes
def test_a_broadcast_gives_every_rank_the_source(pool: Pool, world_size: int) -> None:
    given = [{"dtype": dtype} for dtype in (torch.float32, torch.bfloat16, FP8)]
    for found in pool.run(world_size, tasks.each, of=tasks.broadcasts, given=given):
        assert all(all(right) for right in found)


@all_sizes
def test_splits_go_where_they_are_sent(pool: Pool, world_size: int) -> None:
    assert all(pool.run(world_size, tasks.exchange))


REFUSALS = {
    "narrow": "InputError: ranks to gather from: expected a divisor of 4: 1, 2, 4, got 3.",
    "uneven": "sizes [3, 3, 3, 3] and shape (2,)",
    "path": "{'all_gather': 'point_to_point', 'reduce_scatter': 'all_to_all'}",
    "path name": "got 'fastest'.",
}


@pytest.mark.parametrize("what", REFUSALS)
def test_a_call_that_cannot_be_is_refused(pool: Pool, what: str) -> None:
    for text in pool.run(4, tasks.refused, what=what):
        assert text.startswith("InputError: ")
        assert REFUSALS[what] in text


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_narrow_group_is_a_block_of_consecutive_ranks(pool: Pool, ranks: int) -> None:
    for me, found in enumerate(pool.run(4, tasks.narrowed, ranks=ranks)):
        first = me // ranks * ranks
        block = [float(rank) for rank in range(first, first + ranks)]
        assert found == (me % ranks, ranks, block, True)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("shape", "wait"), [((2, 2), False), ((1, 4), True), ((4, 1), False), ((2, 2), True)], ids=str
)
def test_a_2d_mesh_gathers_within_the_shards_and_sums_over_the_replicas_too(
    pool: Pool, shape: tuple[int, int], wait: bool
) -> None:
    replicas, shards = shape
    results = pool.run(4, tasks.two_dimensions, shape=shape, wait=wait)
    for me, (facts, gathered, scattered, sums, differs) in enumerate(results):
        assert facts == (me % shards, shards, 4, replicas)
        first = me // shards * shards
        assert gathered == [float(rank) for rank in range(first, first + shards)]
        torch.testing.assert_close(*scattered, atol=4e-6, rtol=1e-6)
        assert sums == (4.0, float(shards))
        assert differs.startswith("MismatchError: two dimensions: expected the same rank on every")
        assert "another one on rank 2 than on rank 0." in differs


def test_a_mesh_that_cannot_be_used_is_refused_by_its_dimensions(pool: Pool) -> None:
    for me, (cube, others) in enumerate(pool.run(4, tasks.bad_meshes)):
        assert cube.startswith("UnsupportedError: mesh: expected a 1-D mesh, or a 2-D one")
        assert "3 dimensions (pipe 1, replicate 2, shard 2)" in cube
        assert "1-D or 2-D sub-mesh" in cube
        if me < 2:
            assert others.startswith("InputError: mesh: expected a mesh that this rank is in")
            assert f"got ranks [2, 3] (dim 0 2) on rank {me}." in others
        else:
            assert others == "nothing"


@all_sizes
def test_all_who_use_a_group_count_together(pool: Pool, world_size: int) -> None:
    for found in pool.run(world_size, tasks.counted):
        assert found == (2, True, 12, [("mine", 12)])


def test_one_rank_needs_no_backend(pool: Pool) -> None:
    backend = {"all_gather": "backend", "reduce_scatter": "backend"}
    assert pool.run(1, tasks.alone) == [(True, True, backend, 0, 3)]


@pytest.mark.slow
def test_a_probe_chooses_once_and_alike_on_every_rank(pool: Pool) -> None:
    backend = {"all_gather": "backend", "reduce_scatter": "backend"}
    results = pool.run(4, tasks.probed)
    for before, sequence, paths, right, shared, forced in results:
        assert forced == backend
        assert before == {**backend, "reduce_scatter": "all_to_all"}
        assert sequence == 0
        assert paths == results[0][2]
        assert set(paths) == set(backend)
        assert right
        assert shared


def test_a_way_holds_from_its_size_on(pool: Pool) -> None:
    [(ways, table)] = pool.run(1, tasks.sized_ways)
    assert ways == ["backend", "point_to_point", "backend"]
    assert table["all_gather"] == "point_to_point from 1 MiB, backend from 16 MiB"


@all_sizes
def test_comparing_does_not_disturb_what_is_alike(pool: Pool, world_size: int) -> None:
    assert pool.run(world_size, tasks.checked_ones) == [7] * world_size


DIFFERENCES = {
    "order": ("'layers.first reduce' (all_reduce of 16 B", "'layers.second reduce' (all_reduce"),
    "size": ("'reduce' (all_reduce of 16 B", "'reduce' (all_reduce of 20 B"),
    "kind": ("'unit' (all_gather of", "'unit' (reduce_scatter of"),
}


@pytest.mark.parametrize(("how", "world_size"), [("order", 2), ("size", 3), ("kind", 2)])
def test_ranks_that_are_about_to_do_different_things_are_refused(
    pool: Pool, world_size: int, how: str
) -> None:
    texts = pool.run(world_size, tasks.disagreeing, how=how)
    assert len(set(texts)) == 1
    first, other = DIFFERENCES[how]
    assert texts[0].startswith("MismatchError: collective ")
    assert f"{first}" in texts[0]
    assert "on rank 0 but" in texts[0]
    assert f"{other}" in texts[0]
    assert f"on rank {world_size - 1}." in texts[0]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("all_gather", "other"),
        ("reduce_scatter", "other"),
        ("all_reduce", "backend"),
    ],
)
def test_a_rank_that_never_comes_is_named(pool: Pool, kind: str, way: str) -> None:
    results = [r for r in pool.run(4, tasks.absent, kind=kind, paths=WAYS[way]) if r is not None]
    assert len(results) == 3
    for text, caused, again in results:
        assert text.startswith("layers.3 ")
        assert "step 7: expected all 4 ranks at collective 2, got no sign of rank 1." in text
        assert caused != "NoneType"
        assert again.startswith("PeerError: layers.3 ")
        assert "no sign of rank 1." in again


@pytest.mark.slow
def test_a_rank_that_only_waits_for_the_lost_one_is_not_blamed(pool: Pool) -> None:
    texts = [text for text in pool.run(4, tasks.gone) if text is not None]
    assert len(texts) == 3
    for text in texts:
        assert text.startswith("PeerError: embed gather: expected all 4 ranks at collective 2")
        assert "no sign of rank 1" in text
        assert "rank 1," not in text.partition(", and")[0]


def test_a_rank_in_another_collective_is_named_with_it(pool: Pool) -> None:
    texts = pool.run(4, tasks.astray)
    assert all(text.startswith("PeerError: ") for text in texts)
    assert "rank 1 at collective 2 (head gather)" in texts[0]
    assert "rank 0 at collective 2 (layers.0 reduce)" in texts[1]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_mistake_of_ones_own_is_no_peers_fault(pool: Pool, world_size: int) -> None:
    for text in pool.run(world_size, tasks.own_mistake):
        assert text != "nothing"
        assert "PeerError" not in text


def test_a_group_with_torchs_bound_gets_that_of_the_job(pool: Pool) -> None:
    for before, inherited, named, kept, blocks in pool.run(4, tasks.limits):
        assert (before, inherited) == (1800.0, COLLECTIVE_SECONDS)
        assert (named, kept, blocks) == (9.0, 50.0, 9.0)


@pytest.mark.slow
def test_a_bound_that_is_set_later_holds_for_every_path(pool: Pool) -> None:
    for text in pool.run(4, tasks.late_limit):
        if text is not None:
            assert text.startswith("PeerError: gather: expected all 4 ranks")
            assert "no sign of rank 1." in text
