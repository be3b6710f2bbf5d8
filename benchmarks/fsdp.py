"""Our flat-buffer runtime beside FSDP2: overhead, whole steps, memory, optimizer, unit sizes.

    python benchmarks/fsdp.py --machine cpu-2-cores

runs every case with all contestants in the same processes, in turns, and writes
``validation/<machine>/fsdp.json``; ``--cases overhead,tiny`` runs some. Every figure is a median
over steps, every comparison a ratio within one run. The cases:

* ``overhead``: fake process group of 8 ranks, no data moves: CPU time a unit costs per step.
* ``tiny``, ``mid``: two gloo ranks, wall and CPU time, peak of live bytes over what rests.
* ``gpt2``: the same of GPT-2's shape, a small and a large vocabulary, tied and not, with defaults.
* ``optimizer``: one step over 288 sharded tensors, and clipping their norm.
* ``muon``, ``muon mid``: Muon over matrices, as torch has it and as ours has it.
* ``zero``, ``zero mid``, ``zero 4``: stages of ZeRO beside DDP and its ZeroRedundancyOptimizer.
* ``stages``, ``stages 4``: what each keeps by role, sends and computes, replicas of shards too.
* ``eight bits``, ``eight bits mid``: AdamW with averages in 8 bits beside the usual one.
* ``offload``, ``offload mid``: shards in host memory, which is where all is here: the copies.
* ``tensor``: shards of two by tensor-parallel MLPs of two, four gloo ranks.
* ``granularity``: one, two, four and eight layers to a unit, with small and with large layers.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import math
import os
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from fsdp_contestants import (
    GPT2_SIZES,
    SIZES,
    Contestant,
    adamw,
    batch_of,
    contestants,
    flat_case,
    job_of,
    model_of,
    planned,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright.models.transformer import next_token_loss
from shardwright.tracker.memory import MemoryTracker

ROOT = Path(__file__).resolve().parent.parent
WARM_STEPS = 5
_OFFLOADED = ["fsdp2 offload", "fsdp2", "flat", "flat offload", "zero 2", "zero 2 offload"]
_EIGHT_BITS = ["fsdp2", "flat", "flat 8 bits", "flat merged 4", "flat merged 4, 8 bits"]
_MUONS = ["fsdp2 muon", "flat torch's muon", "flat muon", "owned muon"]
PEER_OF_STAGES = "ddp, zero redundancy"
_STAGES = [
    *("fsdp2", "fsdp2 kept", "ddp", PEER_OF_STAGES, "replicated", "zero 2"),
    *("zero 2 prefetch", "zero 2 merged 4", "zero 1 buckets", "zero 2 buckets"),
    *("zero 2 buckets prefetch", "flat"),
]
_ROLES = [
    *("fsdp2", "ddp", PEER_OF_STAGES, "replicated", "zero 1", "zero 2"),
    *("zero 1 buckets", "zero 2 buckets", "flat"),
]
CASES: dict[str, tuple[str, str, int, list[str]]] = {
    "overhead": ("fake", "tiny", 8, ["single", "fsdp2", "flat", "per_param"]),
    "tiny": (
        "gloo",
        "tiny",
        2,
        ["fsdp2", "flat", "per_param", "flat prefetch", "flat kept", "fsdp2 kept", "planned"],
    ),
    "mid": ("gloo", "mid", 2, ["fsdp2", "flat", "per_param", "flat prefetch", "planned"]),
    "zero": ("gloo", "tiny", 2, _STAGES),
    "zero mid": ("gloo", "mid", 2, _STAGES),
    "zero 4": ("gloo", "tiny", 4, _STAGES),
    "stages": ("gloo", "tiny", 2, _ROLES),
    "stages 4": ("gloo", "tiny", 4, [*_ROLES, "fsdp2 hsdp", "hsdp", "hsdp, zero 2", "hfsdp"]),
    "offload": ("gloo", "tiny", 2, _OFFLOADED),
    "offload mid": ("gloo", "mid", 2, _OFFLOADED),
    "eight bits": ("gloo", "tiny", 2, _EIGHT_BITS),
    "eight bits mid": ("gloo", "mid", 2, _EIGHT_BITS),
    "muon": ("gloo", "tiny", 2, _MUONS),
    "muon mid": ("gloo", "mid", 2, _MUONS),
    "tensor": (
        "gloo",
        "gpt2 500",
        4,
        ["fsdp2 tensor", "flat tensor", "per_param tensor", "flat tensor kept"],
    ),
}
DEFAULTS = ["fsdp2 defaults", "per_param defaults", "flat defaults"]


class Run:
    """One contestant under way: its model, optimizer and clocks."""

    def __init__(
        self, name: str, contestant: Contestant, size: str, rank: int, mesh: DeviceMesh
    ) -> None:
        self.name = name
        self.size = size
        self.rank = rank // contestant.tensor
        self.world_size = mesh.size() // contestant.tensor
        self.peers = mesh.size() // contestant.replicas  # in every collective
        self.model = contestant.wrap(model_of(size), mesh)
        self.optimizer = contestant.optimizer(self.model)
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.optimizer_cpu: list[float] = []

    def step(self, number: int) -> float:
        """Forward, backward, update; its loss."""
        tokens, targets = batch_of(self.size, number, self.rank, self.world_size)
        wall, cpu = time.perf_counter(), time.process_time()
        loss = next_token_loss(self.model(tokens), targets)
        loss.backward()
        middle = time.process_time()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.cpu.append(time.process_time() - cpu)
        self.optimizer_cpu.append(time.process_time() - middle)
        self.wall.append(time.perf_counter() - wall)
        return loss.item()

    def clear(self) -> None:
        """Start the clocks anew."""
        for clock in (self.wall, self.cpu, self.optimizer_cpu):
            clock.clear()

    def peak_over_rest(self) -> tuple[int, int]:
        """The most bytes alive in a step beyond those that live between steps, and these, those of
        other contestants among them."""
        gc.collect()
        tracker = MemoryTracker()
        for found in gc.get_objects():
            if isinstance(found, DTensor):
                tracker.adopt(found._local_tensor, "weight")
            elif isinstance(found, torch.Tensor):
                tracker.adopt(found, "weight")
        resting = tracker.total
        with tracker:
            self.step(0)
        tracker.close()
        peak = max(sum(kinds.values()) for kinds in tracker.peaks.values())
        return peak - resting, resting

    def collectives(self) -> dict[str, int]:
        """Calls of a step, as torch's profiler sees them, and bytes of their whole buffers."""
        kinds = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=kinds, record_shapes=True) as seen:
            self.step(0)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            seen.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        calls = [event for event in events if event.get("name", "").startswith("gloo:")]
        return {"collectives": len(calls), "collective_bytes": sum(map(self._whole, calls))}

    def _whole(self, call: dict[str, Any]) -> int:
        """A gather is given a part of its buffer, all others the whole."""
        sizes = zip(call["args"]["Input Dims"], call["args"]["Input type"], strict=True)
        given = sum(math.prod(dims) * _BYTES[kind] for dims, kind in sizes)
        return given * (self.peers if "gather" in call["name"] else 1)

    def roles(self) -> dict[str, Any]:
        """Bytes of this rank by role after a backward, and how far its gradient is from the mean
        of those of one process, as a share of the largest element."""
        model: Any = model_of(self.size)
        for rank in range(self.world_size):
            tokens, targets = batch_of(self.size, 0, rank, self.world_size)
            (next_token_loss(model(tokens), targets) / self.world_size).backward()
        tokens, targets = batch_of(self.size, 0, self.rank, self.world_size)
        next_token_loss(self.model(tokens), targets).backward()
        given = [p for group in self.optimizer.param_groups for p in group["params"]]
        kept = {
            "parameter_bytes": _stored(self.model.parameters()),
            "gradient_bytes": _stored(p.grad for p in given if p.grad is not None),
        }
        apart = 0.0
        for mine, true in zip(self.model.parameters(), model.parameters(), strict=True):
            assert mine.grad is not None, "every parameter of this model has a gradient"
            found = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
            apart = max(apart, ((found - true.grad).abs().max() / true.grad.abs().max()).item())
        self.optimizer.step()
        inner = getattr(self.optimizer, "optim", self.optimizer)
        kept["state_bytes"] = _stored(
            value for state in inner.state.values() for key, value in state.items() if key != "step"
        )
        self.optimizer.zero_grad()
        return {**kept, "gradient_apart": apart}

    def figures(self) -> dict[str, Any]:
        """Medians in milliseconds."""
        return {
            "wall_ms": _ms(self.wall),
            "cpu_ms": _ms(self.cpu),
            "optimizer_cpu_ms": _ms(self.optimizer_cpu),
            "steps": len(self.wall),
        }


_BYTES = {  # by the names in torch's traces
    "unsigned char": 1,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "float": 4,
    "int": 4,
    "double": 8,
    "long int": 8,
}


def _stored(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind this rank's parts."""
    local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in local)}.values())


def _ms(clock: list[float]) -> float:
    return round(statistics.median(clock) * 1e3, 4)


def worker(rank: int, port: int, case: dict[str, Any], out: str) -> None:
    """One rank of a case; rank 0 writes what it measured."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    mesh = _join(case["backend"], rank, case["world_size"], port)
    known = contestants()
    for size in case.get("merged", ()):
        known[f"flat merged {size}"] = flat_case(merged=size)
    if "plan" in case:
        known["planned"] = planned(sw.read_plan(case["plan"]))
    real = case["backend"] == "gloo"
    runs, found, earlier = [], {}, 0
    for name in case["names"]:
        contestant = known[name]
        run = Run(name, contestant, case["size"], rank, mesh)
        found[name] = run.roles() if case["roles"] else {}
        losses = [run.step(number) for number in range(WARM_STEPS)]
        found[name]["losses"] = [round(loss, 6) for loss in losses]
        over, rest = run.peak_over_rest()
        found[name] |= {"peak_over_rest_bytes": over, "resting_bytes": rest - earlier}
        earlier = rest
        if real:
            found[name] |= run.collectives()
        run.clear()
        runs.append(run)
    gc.collect()
    gc.disable()
    for turn in range(case["rounds"]):
        for run in runs if turn % 2 == 0 else reversed(runs):
            if real:
                dist.barrier()
            for number in range(case["steps"]):
                run.step(number)
    for run in runs:
        found[run.name].update(run.figures())
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


def _join(backend: str, rank: int, world_size: int, port: int) -> DeviceMesh:
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=address)
    return init_device_mesh("cpu", (world_size,))


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """Start the ranks of a case and read what rank 0 wrote."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "figures.json")
        started = 1 if case["backend"] == "fake" else case["world_size"]
        processes.spawn(worker, args=(port, case, out), nprocs=started)
        return json.loads(Path(out).read_text())  # type: ignore[no-any-return]


def ratios(figures: dict[str, Any], peer: str) -> dict[str, dict[str, float]]:
    """Times, peaks over rest and all memory of every contestant as a share of the peer's."""
    keys = {"wall": "wall_ms", "cpu": "cpu_ms", "peak": "peak_over_rest_bytes"}
    most = {
        name: row["peak_over_rest_bytes"] + row["resting_bytes"] for name, row in figures.items()
    }
    return {
        name: {short: round(row[key] / figures[peer][key], 3) for short, key in keys.items()}
        | {"memory": round(most[name] / most[peer], 3)}
        for name, row in figures.items()
    }


def measured_case(name: str, plan: str, steps: int, rounds: int) -> dict[str, Any]:
    """One of ``CASES`` with its figures and the ratios that are claimed."""
    backend, size, world_size, names = CASES.get(name) or ("gloo", name, 2, DEFAULTS)
    case = {
        "backend": backend,
        "size": size,
        "world_size": world_size,
        "names": names,
        "steps": steps,
        "rounds": rounds,
        "roles": name.startswith("stages"),
    }
    if "planned" in names:
        case["plan"] = plan
    figures = run_case(case)
    found: dict[str, Any] = {"setting": {**case, "plan": bool(plan)}, "figures": figures}
    first = next(contestant for contestant in names if contestant.startswith("fsdp2"))
    found["ratios_to_fsdp2"] = ratios(figures, first)
    if PEER_OF_STAGES in names:
        found["ratios_to_zero_redundancy"] = ratios(figures, PEER_OF_STAGES)
    if "single" in figures:
        units = SIZES[size]["layers"] + 1
        bare = figures["single"]["cpu_ms"] - figures["single"]["optimizer_cpu_ms"]
        found["cpu_ms_per_unit"] = {
            other: round((row["cpu_ms"] - row["optimizer_cpu_ms"] - bare) / units, 4)
            for other, row in figures.items()
            if other != "single"
        }
    return found


def planned_here(size: str, cluster: Path, folder: Path) -> tuple[str, dict[str, Any]]:
    """A plan for this machine, where it lies, and what it chose."""
    made = sw.plan(job_of(size, 2, {"file": str(cluster)}))
    path = folder / f"{size}.json"
    sw.write_plan(made, path)
    units = [unit.name for unit in made.units]
    resharded = sum(unit.reshard_after_forward for unit in made.units)
    return str(path), {
        "units": units,
        "prefetch": made.prefetch,
        "resharded": resharded,
        "seconds": made.max_rank_seconds,
    }


def optimizer_case(steps: int = 60) -> dict[str, Any]:
    """AdamW and clipping over 288 small sharded tensors: DTensors beside flat tensors."""
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "figures.json")
        processes.spawn(_optimizer_worker, args=(steps, out), nprocs=1)
        return json.loads(Path(out).read_text())  # type: ignore[no-any-return]


def _optimizer_worker(rank: int, steps: int, out: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    mesh = _join("fake", 0, 8, 0)
    known = contestants()
    subjects: dict[str, tuple[nn.Module, torch.optim.Optimizer, Any]] = {}
    for name in ("fsdp2", "flat"):
        model = known[name].wrap(model_of("tiny"), mesh)
        optimizer = known[name].optimizer(model)
        clip = nn.utils.clip_grad_norm_ if name == "fsdp2" else sw.clip_grad_norm_
        subjects[name] = (model, optimizer, clip)
    one = known["flat"].wrap(model_of("tiny"), mesh)
    subjects["flat, one tensor"] = (
        one,
        adamw(sw.optimizer_parameters(one, per_unit=False), fused=True),
        sw.clip_grad_norm_,
    )
    clocks: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in subjects}
    tensors = {}
    for number in range(steps):
        for name, (model, optimizer, clip) in subjects.items():
            tokens, targets = batch_of("tiny", number, 0, 8)
            next_token_loss(model(tokens), targets).backward()
            began = time.process_time()
            clip(model.parameters() if name == "fsdp2" else model, 1.0)
            middle = time.process_time()
            optimizer.step()
            ended = time.process_time()
            optimizer.zero_grad()
            clocks[name][0].append(middle - began)
            clocks[name][1].append(ended - middle)
            tensors[name] = sum(len(group["params"]) for group in optimizer.param_groups)
    figures = {
        name: {
            "clip_cpu_ms": _ms(clip[5:]),
            "step_cpu_ms": _ms(step[5:]),
            "tensors": tensors[name],
        }
        for name, (clip, step) in clocks.items()
    }
    peer = figures["fsdp2"]["step_cpu_ms"]
    ratios = {name: round(peer / row["step_cpu_ms"], 2) for name, row in figures.items()}
    Path(out).write_text(json.dumps({"figures": figures, "fsdp2_over": ratios}))
    dist.destroy_process_group()


def granularity_case(steps: int, rounds: int) -> dict[str, Any]:
    """Merging layers wins where they are small and loses where they are large."""
    found = {}
    for size in SIZES:
        merged = [n for n in (1, 2, 4, 8) if SIZES[size]["layers"] % n == 0]
        names = [f"flat merged {n}" for n in merged]
        case = {
            "backend": "gloo",
            "size": size,
            "world_size": 2,
            "names": names,
            "merged": merged,
            "steps": steps,
            "rounds": rounds,
            "roles": False,
        }
        figures = run_case(case)
        found[size] = {name: figures[name]["wall_ms"] for name in names}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--machine", required=True, help="the folder under validation/")
    parser.add_argument("--cases", default=",".join([*CASES, "gpt2", "optimizer", "granularity"]))
    parser.add_argument("--cluster", type=Path, help="a cluster file; measured first if left out")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    path = ROOT / "validation" / options.machine / "fsdp.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        cluster = options.cluster
        for name in options.cases.split(","):
            if name in ("tiny", "mid") and cluster is None:
                cluster = _calibrated(Path(folder))
            results[name] = _one(name, cluster, Path(folder), options.steps, options.rounds)
            results[name]["torch"] = torch.__version__
            results[name]["date"] = datetime.date.today().isoformat()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(results, indent=1) + "\n")
            print(json.dumps({name: results[name]}, indent=1))
    return 0


def _one(name: str, cluster: Path | None, folder: Path, steps: int, rounds: int) -> dict[str, Any]:
    if name == "optimizer":
        return optimizer_case()
    if name == "granularity":
        return granularity_case(steps, rounds)
    if name == "gpt2":
        return {size: measured_case(size, "", steps // 4, rounds) for size in GPT2_SIZES}
    if cluster is None or name == "overhead":
        return measured_case(name, "", 3 * steps, rounds)
    plan, chosen = planned_here(CASES[name][1], cluster, folder)
    return {**measured_case(name, plan, steps, rounds), "plan": chosen}


def _calibrated(folder: Path) -> Path:
    """What this machine's constants are, now."""
    from shardwright.cli.main import main as command

    path = folder / "cluster.toml"
    code = command(["calibrate", "-o", str(path), "-n", "2"])
    if code:
        sys.exit(code)
    return path


if __name__ == "__main__":
    sys.exit(main())
