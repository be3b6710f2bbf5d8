"""How far the clocks of ranks are apart."""

from __future__ import annotations

import time

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwright.runtime.torch_private import Operations

ROUNDS, SECONDS = 128, 0.5  # with each rank; no more begin after so long
_ASKED, _ANSWERED = 1 << 20, (1 << 20) + 1  # tags that no other letter has


def clock_offset(mesh: DeviceMesh) -> tuple[float, float]:
    """Seconds from this rank's ``time.perf_counter`` to that of rank 0 of the 1-D ``mesh``, and the
    most by which they may be wrong; all ranks leave together (collective).

    Rank 0 asks each rank what time it is. The answer was given between question and answer, in the
    middle if both took as long; the quickest round is believed.
    """
    if mesh.size() == 1:
        return 0.0, 0.0
    operations = Operations(mesh.get_group())
    found = _offset(operations, mesh.get_local_rank(), mesh.size(), mesh.device_type)
    here = torch.ones(1, device=mesh.device_type)
    if (work := operations.all_reduce(here, True, False)) is not None:
        work.wait()
    assert here.item() == mesh.size()  # waits for the device, too
    return found


def _offset(operations: Operations, rank: int, size: int, device: str) -> tuple[float, float]:
    def send(values: list[float], to: int, tag: int) -> None:
        operations.send(torch.tensor(values, dtype=torch.float64, device=device), to, tag).wait()

    def receive(count: int, source: int, tag: int) -> list[float]:
        values = torch.empty(count, dtype=torch.float64, device=device)
        operations.receive(values, source, tag).wait()
        found: list[float] = values.tolist()
        return found

    if rank:
        while True:
            is_last, offset, error = receive(3, 0, _ASKED)
            if is_last:
                return offset, error
            send([time.perf_counter()], 0, _ANSWERED)
    for other in range(1, size):
        rounds: list[tuple[float, float]] = []
        began = time.perf_counter()
        while len(rounds) < ROUNDS and (not rounds or time.perf_counter() - began < SECONDS):
            asked = time.perf_counter()
            send([0.0, 0.0, 0.0], other, _ASKED)
            (theirs,) = receive(1, other, _ANSWERED)
            answered = time.perf_counter()
            rounds.append((answered - asked, (asked + answered) / 2 - theirs))
        took, offset = min(rounds)
        send([1.0, offset, took / 2], other, _ASKED)
    return 0.0, 0.0
