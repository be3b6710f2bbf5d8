"""The memory that is free on a rank, beside what its plan takes."""

# A rank that runs out of memory is killed by the system without a word, often another one than the
# one that took too much. So the plan's peak is compared with what is free before anything is made.
# All limits count, of which the least holds: the host's, shared by its ranks; that of the control
# group, which containers set; that of the address space. Where nobody says, nothing is refused.

from __future__ import annotations

import contextlib
import resource
import sys
from collections import defaultdict
from pathlib import Path

import torch
from torch import nn

from shardwright.core.errors import NoPlanError, RunError, expected
from shardwright.core.quantities import format_bytes
from shardwright.job.plan import Plan
from shardwright.report.wording import fitting
from shardwright.runtime.meter import exact_events

MOST_NAMED = 3
GROUPS = (  # of control groups, by version: limit, what counts against it
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def free_bytes(device: torch.device, ranks: int) -> int | None:
    """What this rank can still allocate, where ``ranks`` share a host; None where nobody says."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    shared = [_available(), *(_left(*names) for names in GROUPS)]
    # The host's ranks start together, and each will take its part.
    known = [room // ranks for room in shared if room is not None]
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and (own := _status("VmSize")) is not None:
        known.append(max(limit - own, 0))
    return min(known, default=None)


def check_room(plan: Plan, rank: int, device: torch.device, copied: bool) -> None:
    """NoPlanError unless the plan's peak is free now; ``copied``: a save's copy is beside it. On an
    accelerator rank 0 says it if it hangs on what the allocator keeps; what else is on the device
    is not free by now."""
    local = plan.cluster.local_world_size
    free = free_bytes(device, min(local, plan.world_size))
    totals = plan.ranks[rank]
    needed = totals.peak_bytes
    what = f"a peak of {format_bytes(needed)}"
    if copied and device.type == "cpu":
        copy = sum(totals.exact.get(kind, 0) for kind in ("weight", "optimizer_state"))
        needed += copy
        what += f", and {format_bytes(copy)} for the copy that a save writes"
    least, most = plan.needed
    # What the allocator keeps is a range: between its ends a run may do well, so it is told, not
    # refused.
    if free is not None and needed <= free < needed + most - least:
        if rank == 0:
            print(fitting(needed, needed + most - least, free, "rank 0"), file=sys.stderr)
        return
    if free is None or needed <= free:
        return
    where = f"free memory on rank {rank}"
    remedy = "End what else takes memory, or plan for less: --set cluster.ddr_cap, or more ranks."
    if device.type == "cuda":
        remedy = remedy.replace("ddr", "hbm")
    wanted = f"{format_bytes(needed)} ({what}, as planned)"
    raise NoPlanError(expected(where, wanted, format_bytes(free), remedy))


def out_of_memory_at(
    error: Exception,
    plan: Plan,
    rank: int,
    where: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> RunError:
    """What to say where memory ran out: what was predicted, what there is, and what is largest."""
    device = next((t.device for t in model.parameters()), torch.device("cpu"))
    free = free_bytes(device, 1)
    taken = torch.cuda.memory_allocated(device) if device.type == "cuda" else _status("VmRSS")
    sizes: dict[str, int] = defaultdict(int)
    with contextlib.suppress(Exception):  # what is said must not depend on what is broken
        for event in exact_events(rank, model, optimizer):
            sizes[f"{event.kind} of {event.name}"] += event.bytes
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:MOST_NAMED]
    totals = plan.ranks[rank]
    parts = [
        f"the plan predicts a peak of {format_bytes(totals.peak_bytes)} in {totals.peak_phase}"
    ]
    if taken is not None:
        parts.append(f"this process has {format_bytes(taken)}")
    if free is not None:
        parts.append(f"{format_bytes(free)} are free")
    if largest:
        named = ", ".join(f"{what} {format_bytes(size)}" for what, size in largest)
        parts.append(f"the largest are {named}")
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return RunError(f"out of memory in {where}: {'; '.join(parts)}. {reason}")


def _available() -> int | None:
    """MemAvailable of the host."""
    return _kilobytes(Path("/proc/meminfo"), "MemAvailable")


def _status(key: str) -> int | None:
    return _kilobytes(Path("/proc/self/status"), key)


def _kilobytes(path: Path, key: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == key:
                return int(value.split()[0]) * 1024
    return None


def _left(limit: str, used: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return max(int(Path(limit).read_text()) - int(Path(used).read_text()), 0)
    return None
