"""What cached views of buckets are worth, beside what is published of Megatron-LM's.

    python benchmarks/buckets.py --machine cpu-2-cores

writes ``validation/<machine>/buckets.json``: microseconds of a slice, of a cached one, of
``shard_buffer`` and of launching a bucket's collectives; bytes of the cache; steps of a model in
about 20 buckets, with the views of every bucket kept and made anew, in turns; and, by simulation,
how dear a slice would have to be to make a step of 64 ranks 1.2 % longer. All on one thread,
medians; small operations and launches are CPU time, in which other programs do not count.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import socket
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from fsdp import _join
from fsdp_contestants import SIZES, adamw, batch_of, model_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardwright as sw
from shardwright.models.transformer import next_token_loss
from shardwright.runtime.units.buffers import VIEW_BYTES
from shardwright.runtime.units.dstorage import DStorage, units_in
from shardwright.runtime.units.unit import Unit

ROOT = Path(__file__).resolve().parent.parent
BUCKETS = 20
# An A100, buckets of 40 MB, a step of a model of 175 billion parameters on 64 of them.
PUBLISHED = {
    "slice_us": [28.0, 35.0],
    "cached_us": [0.01, 0.02],
    "slices_a_step": 2 * BUCKETS,
    "slices_ms_a_step": 1.2,
    "bytes_of_20_buckets": 16 * 1024,
    "step_seconds": [3.42, 3.38],
    "step_saved_percent": 1.2,
    "cpu_percent": [15.0, 8.0],
}
RANKS = 64


def us(call: Callable[[], object], calls: int = 2000, repeats: int = 15) -> float:
    """Median microseconds of a call, of CPU time: other programs do not count."""
    found = []
    for _ in range(repeats):
        began = time.thread_time()
        for _ in range(calls):
            call()
        found.append((time.thread_time() - began) / calls)
    return statistics.median(found) * 1e6


def small_operations() -> dict[str, float]:
    """Microseconds of what a bucket's step would do without a cache, and does with one."""
    buffer = torch.empty(64 * 1024, dtype=torch.uint8)
    cache = [[part] for part in sw.shard_buffer(buffer, 8)]
    nothing = us(lambda: None)
    return {
        "slice": us(lambda: buffer[128:256]),
        "slice and two views": us(lambda: buffer[128:256].view(torch.float32).view(4, 8)),
        "shard_buffer of 2": us(lambda: sw.shard_buffer(buffer, 2), 500),
        "shard_buffer of 8": us(lambda: sw.shard_buffer(buffer, 8), 500),
        f"shard_buffer of {RANKS}": us(lambda: sw.shard_buffer(buffer, RANKS), 100),
        "cached": us(lambda: cache[3][0]),
        "cached, without the call": max(0.0, us(lambda: cache[3][0]) - nothing),
    }


class _Heap(ctypes.Structure):
    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks")
    _fields_ = [(name, ctypes.c_size_t) for name in (*_names, "fordblks", "keepcost")]


def view_bytes(count: int = 20000) -> dict[str, float]:
    """Bytes that one more view takes, outside of Python and inside."""
    heap = ctypes.CDLL("libc.so.6").mallinfo2
    heap.restype = _Heap
    buffer, kept = torch.empty(1 << 16, dtype=torch.uint8), [None] * count
    before: Any = heap()
    tracemalloc.start()
    python = tracemalloc.get_traced_memory()[0]
    for index in range(count):
        kept[index] = buffer[index : index + 8]  # type: ignore[call-overload]
    python = tracemalloc.get_traced_memory()[0] - python
    tracemalloc.stop()
    after: Any = heap()
    used = after.uordblks + after.hblkhd - before.uordblks - before.hblkhd
    return {"native": used / count, "python": python / count, "counted": VIEW_BYTES}


def bucketed(size: str, mesh: DeviceMesh) -> tuple[nn.Module, list[Unit]]:
    """A model whose parameters lie in ``BUCKETS`` buckets, or a few less."""
    model = model_of(size)
    numels = [p.numel() for p in model.parameters()][::-1]
    elements = sum(numels) // BUCKETS
    while _count(numels, elements) > BUCKETS:
        elements += max(1, elements // 200)
    sw.fully_shard_flat(
        model, mesh, shard_strategy="flat", zero=1, prefetch=1, bucket_size=elements
    )
    return model, list(units_in(model))


def _count(numels: list[int], elements: int) -> int:
    buckets, room = 0, 0
    for numel in numels:
        if room <= 0:
            buckets, room = buckets + 1, elements
        room -= numel
    return buckets


def make_anew(units: list[Unit]) -> None:
    """Let every collective of every bucket slice its buffer for all ranks first."""

    def before(unit: Unit, name: str, buffer: torch.Tensor, take: Callable[[], None]) -> None:
        launch = getattr(unit, name)

        def sliced() -> None:
            take()  # there are no slices of memory that is freed
            sw.shard_buffer(buffer, unit.comm.size)
            launch()

        setattr(unit, name, sliced)

    for unit in units:
        send = unit.gradients.segments[0].send
        before(unit, "start_gather", DStorage(unit).byte_storage, lambda: None)
        before(unit, "start_reduce", send.tensor, send.take)


def launches(rank: int, out: str) -> None:
    """Microseconds of CPU from a bucket's turn to its collective having been issued, of 64 ranks of
    a group that moves nothing, for buckets so small that their bytes take no time."""
    torch.set_num_threads(1)
    mesh = _join("fake", 0, RANKS, 0)
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(BUCKETS)))
    sw.fully_shard_flat(model, mesh, shard_strategy="flat", zero=1, bucket_size=256)
    units = list(units_in(model))
    clocks: dict[str, list[float]] = {"gather": [], "reduce": []}
    for _ in range(60):
        model(torch.ones(2, 16)).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1e-3)
        for unit in units:
            unit.gradients.hold(0, unit.buffers.parameters[0].detach())
            for name, launch in (("gather", unit.start_gather), ("reduce", unit.start_reduce)):
                began = time.thread_time()
                launch()
                clocks[name].append(time.thread_time() - began)
            unit.free()
            unit.finish_reduce()
        model.zero_grad()
    found: dict[str, float] = {n: statistics.median(c) * 1e6 for n, c in clocks.items()}
    found["ms_a_step"] = BUCKETS * sum(found.values()) / 1e3
    Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


def steps(rank: int, port: int, size: str, rounds: int, out: str) -> None:
    """Steps with views kept and made anew, in turns."""
    torch.set_num_threads(1)
    mesh = _join("gloo", rank, 2, port)
    runs = {}
    for name in ("kept", "made anew"):
        model, units = bucketed(size, mesh)
        if name == "made anew":
            make_anew(units)
        optimizer = adamw(sw.optimizer_parameters(model), fused=True)
        runs[name] = (model, units, optimizer, [], [])  # type: ignore[var-annotated]
    for number in range(rounds + 3):
        for name in runs if number % 2 else reversed(runs):
            model, _, optimizer, wall, cpu = runs[name]
            dist.barrier()
            began, busy = time.perf_counter(), time.process_time()
            tokens, targets = batch_of(size, number, rank, 2)
            next_token_loss(model(tokens), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number >= 3:
                cpu.append(time.process_time() - busy)
                wall.append(time.perf_counter() - began)
    if rank == 0:
        figures: dict[str, Any] = {}
        for name, (_, _, _, wall, cpu) in runs.items():
            figures[name] = {
                "wall_ms": statistics.median(wall) * 1e3,
                "cpu_ms": statistics.median(cpu) * 1e3,
                "least_wall_ms": min(wall) * 1e3,
                "least_cpu_ms": min(cpu) * 1e3,
                "cpu_percent": 100 * sum(cpu) / sum(wall),
            }
        units = runs["kept"][1]
        views = [DStorage(unit).views() for unit in units]
        figures["buckets"] = len(units)
        figures["views"] = sum(v.entries for v in views)
        figures["bytes_of_cache"] = sum(v.nbytes for v in views)
        figures["outside"] = [name for v in views for name in v.outside]
        for key in ("wall_ms", "cpu_ms", "least_wall_ms", "least_cpu_ms"):
            kept, anew = figures["kept"][key], figures["made anew"][key]
            figures[f"saved_percent_of_{key}"] = 100 * (1 - kept / anew)
        Path(out).write_text(json.dumps(figures))
    dist.destroy_process_group()


def simulated(step: float, host_share: float, slice_seconds: float, slices: int) -> float:
    """Seconds of a step of ``BUCKETS`` buckets on three clocks. The host issues a bucket's kernels
    and then, after ``slices`` slices, its collective, and runs ahead of the device; the device
    computes a bucket when its kernels are issued and, in the forward, it was gathered; the network
    moves one bucket at a time. A third of ``step`` is forward; the host issues kernels in
    ``host_share`` of it; collectives take half the time of what they overlap with."""
    host = device = network = 0.0
    for share in (1 / 3, 2 / 3):
        compute = step * share / BUCKETS
        move = compute / 2
        for _ in range(BUCKETS):
            if share < 0.5:
                host += slices * slice_seconds
                network = max(network, host) + move
                host += host_share * compute
                device = max(device, host, network) + compute
            else:
                host += host_share * compute
                device = max(device, host) + compute
                host += slices * slice_seconds
                network = max(network, host, device) + move
    return max(device, network)


def needed(step: float, host_share: float, slices: int, percent: float) -> float:
    """Microseconds a slice would have to take for a step to be ``percent`` longer than without."""
    bare = simulated(step, host_share, 0.0, slices)
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        longer = simulated(step, host_share, middle, slices) / bare - 1
        low, high = (middle, high) if longer < percent / 100 else (low, middle)
    return high * 1e6


def what_it_would_need(slice_us: float) -> dict[str, Any]:
    """Of a step of 3.38 s on 64 ranks: what slices cost there, and what 1.2 % would take."""
    step, percent = 3.38, PUBLISHED["step_saved_percent"]
    published = statistics.mean(PUBLISHED["slice_us"])  # type: ignore[arg-type]
    rows = {}
    for host_share in (0.15, 0.9, 1.0):
        for slices in (1, RANKS):
            bare = simulated(step, host_share, 0.0, slices)
            longer = {
                name: 100 * (simulated(step, host_share, each * 1e-6, slices) / bare - 1)
                for name, each in (("measured", slice_us), ("published", published))
            }
            rows[f"host busy {host_share:.0%}, {slices} slices a buffer"] = {
                "percent_of_step": longer,
                "slice_us_for_1.2_percent": needed(step, host_share, slices, float(percent)),  # type: ignore[arg-type]
            }
    return {
        "step_seconds": step,
        "percent_if_nothing_hides_it": {
            "own slice, measured": 100 * 2 * BUCKETS * slice_us * 1e-6 / step,
            "own slice, published": 100 * 2 * BUCKETS * published * 1e-6 / step,
            "all ranks' slices, measured": 100 * 2 * BUCKETS * RANKS * slice_us * 1e-6 / step,
        },
        "simulated": rows,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--machine", required=True, help="the folder under validation/")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"published": PUBLISHED, "us": small_operations()}
    found["bytes_of_a_view"] = view_bytes()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        processes.spawn(launches, args=(str(out),), nprocs=1)
        found["load_average"] = os.getloadavg()[0]  # other programs' share is noise in wall time
        found["launch_us"] = json.loads(out.read_text())
        for size in SIZES:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            rounds = options.rounds if size == "tiny" else max(3, options.rounds // 3)
            processes.spawn(steps, args=(port, size, rounds, str(out)), nprocs=2)
            found[f"steps of {size}"] = json.loads(out.read_text())
            slices = 2 * found[f"steps of {size}"]["buckets"]
            found[f"steps of {size}"]["slices_ms"] = slices * found["us"]["shard_buffer of 2"] / 1e3
    found["at 64 ranks"] = what_it_would_need(found["us"]["slice"])
    found |= {"torch": torch.__version__, "date": datetime.date.today().isoformat()}
    path = ROOT / "validation" / options.machine / "buckets.json"
    path.write_text(json.dumps(_rounded(found), indent=1) + "\n")
    print(json.dumps(_rounded(found), indent=1))
    return 0


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


if __name__ == "__main__":
    raise SystemExit(main())
