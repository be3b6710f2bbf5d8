"""What the pool's workers do with checkpoints."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import checkpoint_cases as cases
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwright.core.errors import ShardwrightError
from shardwright.runtime.checkpoint import TensorPart, read_checkpoint, run_through, save_in_parts
from shardwright.runtime.comm import Comm


def held_by(mesh: DeviceMesh, seed: int) -> list[TensorPart]:
    """This rank's share of the cases' tensors, copies among them."""
    return cases.deal(cases.tensors(), mesh.size(), seed, copies=True)[mesh.get_local_rank()]


def write(mesh: DeviceMesh, folder: str, step: int, seed: int, keep: int | None = None) -> str:
    """Save; the name of the folder."""
    rank = mesh.get_local_rank()
    final = run_through(
        save_in_parts(
            folder,
            step,
            held_by(mesh, seed),
            Comm(mesh),
            facts={"plan": "p1"},
            scalars={"rank": rank, "step": step},
            keep=keep,
        )
    )
    return final.name


def collectives_of_a_save(mesh: DeviceMesh, folder: str) -> int:
    """How many collectives a save takes."""
    comm = Comm(mesh)
    before = comm.sequence
    run_through(save_in_parts(folder, 1, held_by(mesh, 1), comm, facts={}, scalars={}, keep=1))
    return comm.sequence - before


def write_on_grid(mesh: DeviceMesh, folder: str) -> str:
    """Save from a (replicate, shard) mesh of all four ranks, rows being copies of each other."""
    grid = DeviceMesh("cpu", [[0, 1], [2, 3]])
    held = cases.deal(cases.tensors(), 2, seed=9, copies=True)[grid.get_local_rank(1)]
    rank = mesh.get_local_rank()
    facts, scalars = {"plan": "p1"}, {"rank": rank, "step": 4}
    parts = save_in_parts(folder, 4, held, Comm(grid), facts=facts, scalars=scalars)
    return run_through(parts).name


def read_on_grid(mesh: DeviceMesh, folder: str) -> Any:
    """Restore on a (replicate, shard) mesh of all four ranks."""
    grid = DeviceMesh("cpu", [[0, 1], [2, 3]])
    true = cases.deal(cases.tensors(), 2, seed=10, copies=True)[grid.get_local_rank(1)]
    wanted = cases.blank(true)
    restored = read_checkpoint(folder, wanted, Comm(grid))
    return cases.said(restored, mesh.get_local_rank()), cases.equal(wanted, true)


def read(mesh: DeviceMesh, folder: str, seed: int, step: int | None = None) -> Any:
    """Restore into another cut; what was restored and whether every bit is right."""
    true = held_by(mesh, seed)
    wanted = cases.blank(true)
    restored = read_checkpoint(folder, wanted, Comm(mesh), step=step)
    return cases.said(restored, mesh.get_local_rank()), cases.equal(wanted, true)


def refused_read(mesh: DeviceMesh, folder: str, spoil: str = "", rank: int = 0) -> tuple[str, bool]:
    """The error of a read, and whether nothing has changed; ``rank`` wants something odd."""
    wanted, step = cases.blank(held_by(mesh, 1)), 2 if spoil == "missing step" else None
    if mesh.get_local_rank() == rank:
        wanted = spoiled(wanted, spoil)
        step = 1 if spoil == "step" else step
    before = [cases.bits(part.tensor) for part in wanted]
    try:
        read_checkpoint(folder, wanted, Comm(mesh), step=step)
    except ShardwrightError as error:
        kept = before == [cases.bits(part.tensor) for part in wanted]
        return f"{type(error).__name__}: {error}", kept
    return "no error", False


def spoiled(wanted: list[TensorPart], how: str) -> list[TensorPart]:
    """The list with something that no checkpoint of the cases has."""
    odd = {
        "name": TensorPart("odd", (1,), (0,), (1,), torch.zeros(1)),
        "shape": TensorPart("cube", (1,), (0,), (1,), torch.zeros(1)),
        "dtype": TensorPart("float64", (6, 7), (0,), (1,), torch.zeros(1)),
        "tensor": TensorPart("int8", (12, 7), (0,), (1,), torch.zeros(2, dtype=torch.int8)),
    }
    if how not in odd:
        return wanted
    return [part for part in wanted if part.name != odd[how].name] + [odd[how]]


def refused_write(mesh: DeviceMesh, folder: str, how: str, rank: int) -> tuple[str, bool, float]:
    """The error of a save that fails on ``rank``, whether what is held is as it was, and a sum.

    The sum over ranks shows that training can go on.
    """
    own = mesh.get_local_rank()
    comm = Comm(mesh)
    held = [
        *held_by(mesh, 1),
        TensorPart("large", (mesh.size(), 40_000), (own, 0), (1, 40_000), large()),
    ]
    facts, scalars, step, place = {"plan": "p1"}, {"value": 1.0}, 2, Path(folder)
    before = [cases.bits(part.tensor) for part in held]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if own == rank:
        if how == "disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, limits[1]))
        elif how == "folder":
            place = place / "gone"
        elif how == "scalars":
            scalars = {"value": float("nan")}
        elif how == "facts":
            facts = {"plan": "p2"}
        elif how == "step":
            step = 3
        elif how == "gap":
            held = held[:-1]
        elif how == "dtype":
            held[-1] = held[-1]._replace(tensor=held[-1].tensor.double())
    try:
        run_through(save_in_parts(place, step, held, comm, facts=facts, scalars=scalars, keep=1))
        text = "no error"
    except ShardwrightError as error:
        text = f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    together = torch.ones(1)
    comm.all_reduce("after the save", together)
    expected_bits = before[: len(held)] if how != "dtype" else before[:-1]
    found = [cases.bits(part.tensor) for part in held][: len(expected_bits)]
    return text, found == expected_bits, together.item()


def refused_write_in_halves(mesh: DeviceMesh, folder: str, how: str) -> str:
    """The error of a save of two ranks of four that fails on the second."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    own = Path(folder) / str(grid.get_local_rank(0))
    return refused_write(grid["shard"], str(own), how, 1)[0]


def large() -> torch.Tensor:
    """More bytes than the limited rank may write."""
    return torch.arange(40_000, dtype=torch.float32).view(1, -1)
