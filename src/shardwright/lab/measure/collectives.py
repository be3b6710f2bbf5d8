"""What collectives are timed, and how much of one hides behind work that takes as long."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from shardwright.cost.network import CROSSINGS, Collective
from shardwright.lab.measure.bench import Bench, Run
from shardwright.lab.measure.sizes import (
    BUFFERS,
    FLOAT,
    OVERLAPPED,
    PARTS,
    collective_case,
    overlap_case,
)
from shardwright.runtime.comm import Comm, Pending

LAYER = 256


def collectives(comm: Comm) -> dict[str, Run]:
    """Every collective over every size of the full buffer; an amount is the buffer's bytes."""
    device = comm.mesh.device_type
    full = torch.zeros(BUFFERS[-1] // FLOAT, device=device)
    other = torch.zeros_like(full)
    runs = {}
    for nbytes in BUFFERS:
        for name in CROSSINGS:
            work = _work(comm, name, full, other, nbytes)
            runs[collective_case(name, nbytes)] = Run(nbytes, work, together=True)
    return runs


def _work(
    comm: Comm, name: Collective, full: torch.Tensor, other: torch.Tensor, nbytes: int
) -> Callable[[], object]:
    """One call; buffers are cut to a whole number of elements for each rank, as units are."""
    share = max(nbytes // FLOAT // comm.size, 1)
    whole, shard = full[: share * comm.size], other[:share]
    sent = other[: share * comm.size]
    if name == "all_gather":  # units travel as bytes
        filled, part = whole.view(torch.uint8), shard.view(torch.uint8)
        return lambda: comm.all_gather("calibrate", filled, part)
    if name == "reduce_scatter":
        return lambda: comm.reduce_scatter("calibrate", shard, whole)
    if name == "all_reduce":
        return lambda: comm.all_reduce("calibrate", whole)
    return lambda: comm.all_to_all("calibrate", whole, sent)


def overlaps(comm: Comm, bench: Bench) -> dict[str, Run]:
    """Each overlapped collective alone, work that takes as long alone, and both at once."""
    device = comm.mesh.device_type
    left, right = (torch.randn(LAYER, LAYER, device=device) for _ in range(2))
    out = torch.empty_like(left)

    def compute(count: int) -> None:
        for _ in range(count):
            torch.mm(left, right, out=out)

    unit = bench.seconds(lambda: compute(1))
    runs = {}
    for collective, nbytes in OVERLAPPED:
        begin = _begin(comm, collective, nbytes)
        count = max(1, round(bench.seconds(partial(_both, begin, _nothing)) / unit))
        work = partial(compute, count)
        works = (partial(_both, begin, _nothing), work, partial(_both, begin, work))
        for part, both in zip(PARTS, works, strict=True):
            runs[overlap_case(collective, nbytes, part)] = Run(nbytes, both, together=True)
    return runs


def _begin(comm: Comm, collective: Collective, nbytes: int) -> Callable[[], Pending | None]:
    """Begins a collective over a full buffer of its own and does not wait for it."""
    share = nbytes // FLOAT // comm.size
    full = torch.zeros(share * comm.size, device=comm.mesh.device_type)
    shard = torch.zeros(share, device=comm.mesh.device_type)
    if collective == "all_gather":
        whole, part = full.view(torch.uint8), shard.view(torch.uint8)
        return lambda: comm.all_gather("calibrate", whole, part, wait=False)
    assert collective == "reduce_scatter"
    return lambda: comm.reduce_scatter("calibrate", shard, full, wait=False)


def _both(begin: Callable[[], Pending | None], work: Callable[[], None]) -> None:
    pending = begin()
    work()
    if pending is not None:
        pending.wait()


def _nothing() -> None:
    """No work beside a collective."""
