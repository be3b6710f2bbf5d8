"""Collectives among threads: right results, and no wait that does not end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

from shardwright.core.errors import MismatchError, PeerError
from shardwright.runtime import devices
from shardwright.runtime.comm import Comm
from shardwright.runtime.devices import Devices
from shardwright.tracker.memory import MemoryTracker

SECONDS = 30.0  # after which a test gives up


def together(
    size: int, body: Callable[[Comm], Any], timeout: float = SECONDS
) -> list[Any | BaseException]:
    """What every rank returned or raised."""
    made = Devices(size, timedelta(seconds=timeout))
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            with made.rank(rank):
                found[rank] = body(Comm(init_device_mesh("cpu", (size,))))
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    before = c10d._world
    with made.here():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
            assert not thread.is_alive()
    assert c10d._world is before
    assert not dist.is_initialized()
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_collective_gives_what_its_name_says(size: int) -> None:
    def body(comm: Comm) -> dict[str, list[float]]:
        rank = comm.rank
        own = torch.tensor([rank, 10.0 * rank])
        full, part = own.new_empty(2 * size), own.new_empty(1)
        comm.all_gather("gather", full, own)
        total, most, given = own.clone(), own.clone(), own + 1
        comm.all_reduce("sum", total)
        comm.all_reduce("max", most, largest=True)
        comm.broadcast("give", given, size - 1)
        comm.reduce_scatter("scatter", part, torch.arange(float(size)) + rank)
        uneven = own.new_empty(size * (rank + 1))
        sizes = [[to + 1 for to in range(size)], [rank + 1] * size]
        sent = torch.full((sum(sizes[0]),), float(rank))
        comm.all_to_all("exchange", uneven, sent, sizes[1], sizes[0])
        tensors = {"gather": full, "sum": total, "max": most, "give": given, "exchange": uneven}
        return {name: each.tolist() for name, each in {**tensors, "scatter": part}.items()}

    ranks = range(size)
    for rank, found in enumerate(together(size, body)):
        assert found == {
            "gather": [number for each in ranks for number in (each, 10.0 * each)],
            "sum": [sum(ranks), 10.0 * sum(ranks)],
            "max": [size - 1, 10.0 * (size - 1)],
            "give": [size, 10.0 * (size - 1) + 1],
            "exchange": [float(each) for each in ranks for _ in range(rank + 1)],
            "scatter": [size * rank + sum(ranks)],
        }


def test_what_is_not_waited_for_holds_nobody() -> None:
    """Rank 0 begins two collectives before rank 1 has come to any."""
    begun = threading.Event()

    def body(comm: Comm) -> list[float]:
        if comm.rank == 1:
            assert begun.wait(SECONDS)
        one, other = torch.ones(1), torch.full((1,), 2.0)
        works = [comm.all_reduce("one", one, wait=False), comm.all_reduce("two", other, wait=False)]
        begun.set()
        for work in works:
            assert work is not None
            work.wait()
        return [one.item(), other.item()]

    assert together(2, body) == [[2.0, 4.0], [2.0, 4.0]]


def test_an_error_of_one_rank_ends_the_others_which_name_it() -> None:
    def body(comm: Comm) -> None:
        if comm.rank == 1:
            raise ValueError("spoilt")
        comm.all_reduce("rows", torch.ones(1))

    first, second, third = together(3, body)
    assert isinstance(second, ValueError)
    for error in (first, third):
        assert isinstance(error, PeerError)
        assert str(error).startswith("rows: expected all 3 ranks at collective 1, got no sign of ")
        assert "rank 1" in str(error)


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_the_timeout() -> None:
    """And when it comes, it hears that it was given up."""

    def body(comm: Comm) -> None:
        if comm.rank == 0:
            late.wait(SECONDS)
        try:
            comm.all_reduce("rows", torch.ones(1))
        finally:
            late.set()

    late = threading.Event()
    first, second = together(2, body, timeout=0.5)
    assert isinstance(second, PeerError)
    assert "no sign of rank 0" in str(second)
    assert isinstance(first, PeerError)


def test_what_a_signal_raised_in_one_rank_is_raised_in_all() -> None:
    def body(comm: Comm) -> None:
        if comm.rank == 0:
            raise KeyboardInterrupt
        comm.all_reduce("rows", torch.ones(1))

    assert [type(found) for found in together(2, body)] == [KeyboardInterrupt] * 2


def test_a_signal_in_the_rank_that_copies_is_raised_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(devices, "_summed", interrupted)

    def body(comm: Comm) -> None:
        comm.all_reduce("rows", torch.ones(1))

    assert [type(found) for found in together(3, body)] == [KeyboardInterrupt] * 3


DIFFER = {
    "kinds": "all_reduce on rank 3 where others have broadcast 2|broadcast 2 on rank 2 where",
    "compared": r"\(broadcast 2 of 8 B, .* on rank 2 but .* \(all_reduce of 8 B, .* on rank 3\.",
    "splits": r"rank 3 expects \(3,\) of rank 2, got \(1,\)",
}


@pytest.mark.parametrize("what", DIFFER)
def test_ranks_at_different_collectives_are_told_so(what: str) -> None:
    def body(every: Comm) -> None:
        comm = Comm(every.as_replicas(2)["shard"], checked=what == "compared")
        tensor = torch.ones(2)
        if what == "splits":
            wanted = [1, 1] if comm.rank == 0 else [3, 1]
            comm.all_to_all("rows", torch.empty(sum(wanted)), tensor, wanted, [1, 1])
        elif comm.rank == 0:
            comm.broadcast("rows", tensor, 0)
        else:
            comm.all_reduce("rows", tensor)

    for found in together(4, body)[2:]:
        assert isinstance(found, RuntimeError | MismatchError)
        with pytest.raises(type(found), match=DIFFER[what]):
            raise found


def test_trackers_of_threads_each_see_their_own_rank_alone() -> None:
    """Nothing of what another rank makes, resizes or sends, at the same time."""
    start = threading.Barrier(2, timeout=SECONDS)

    def body(comm: Comm) -> tuple[int, int]:
        start.wait()
        with MemoryTracker() as tracker:
            start.wait()
            kept = torch.ones(100 * (comm.rank + 1))
            spare = torch.ones(50)
            spare.untyped_storage().resize_(0)
            comm.all_reduce("rows", kept[:10])
            start.wait()
            seen = tracker.total
        start.wait()
        return seen, kept.nbytes

    for seen, own in together(2, body):
        assert seen == own


def test_threads_of_two_meshes_meet_in_their_own_groups() -> None:
    def body(comm: Comm) -> list[float]:
        grid = Comm(comm.as_replicas(2))
        over_all, over_shards = torch.tensor([float(comm.rank)]), torch.tensor([float(comm.rank)])
        grid.all_reduce("all", over_all)
        grid.all_reduce("shards", over_shards, replicas=False)
        return [over_all.item(), over_shards.item()]

    assert together(4, body) == [[6.0, 1.0], [6.0, 1.0], [6.0, 5.0], [6.0, 5.0]]


def test_the_parts_of_a_grid_have_the_rank_of_the_job_that_holds_them() -> None:
    def body(every: Comm) -> list[list[int]]:
        grid = every.as_replicas(2)
        each = (Comm(grid), Comm(grid["shard"]), Comm(grid, twice=True))
        return [[comm.global_rank(part) for part in range(comm.size)] for comm in each]

    first, last = [0, 1], [2, 3]
    cut_again = [0, 2, 1, 3]  # every shard among its replicas
    of_first, of_last = ([own, own, cut_again] for own in (first, last))
    assert together(4, body) == [of_first, of_first, of_last, of_last]


def test_a_reduction_that_is_none_of_ours_is_refused() -> None:
    def body(comm: Comm) -> None:
        dist.all_reduce(torch.ones(2), op=dist.ReduceOp.MIN)

    found = together(2, body)
    assert all("a reduction that threads do not have" in str(each) for each in found)
