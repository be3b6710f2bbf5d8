"""Clipping by the norm of all gradients: one local norm, one reduction, one scale."""

from __future__ import annotations

import math

import torch
from torch import nn

from shardwright.core.errors import InputError, RunError, expected
from shardwright.runtime.optimizer import FlatSink
from shardwright.runtime.torch_private import local_of
from shardwright.runtime.units.dstorage import DStorage
from shardwright.runtime.units.registry import storages_in


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale the gradients of all units so that their norm is at most ``max_norm`` (collective).

    Returns the norm before, a scalar that is the same on every rank and equals that of the
    unsharded model. Gradients may be on ``model.parameters()`` or on ``optimizer_parameters``.
    Parameters that no unit has are counted as replicas, once. With ``error_if_nonfinite`` a norm
    that is not finite raises :class:`RunError` on every rank, naming the parameter and the rank,
    before anything is scaled.
    """
    if not max_norm >= 0 or not norm_type > 0:
        raise InputError(
            expected(
                "clip_grad_norm_", "max_norm >= 0 and norm_type > 0", f"{max_norm}, {norm_type}"
            )
        )
    units = list(storages_in(model))
    sharded, replicas = _gradients(model, units)
    total = _norm(sharded, replicas, units, norm_type)
    if error_if_nonfinite and not math.isfinite(total.item()):
        raise _blame(units, total)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in (*sharded, *replicas):
        gradient.mul_(scale.to(gradient.device))
    return total


def _gradients(
    model: nn.Module, units: list[DStorage]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Local gradients that are parts of one, and those that every rank has whole."""
    sharded: list[torch.Tensor] = []
    replicas: list[torch.Tensor] = []
    ours = {id(member.parameter) for unit in units for member in unit.members}
    for unit in units:
        for index, views in enumerate(unit.buffers.segments):
            target = replicas if views.segment.cut == "replicated" else sharded
            if isinstance(unit.sink, FlatSink):
                for stretch in unit.sink.stretches.get(index, ()):
                    if stretch.flat.grad is not None:
                        length = stretch.end - stretch.begin
                        target.append(stretch.flat.grad[stretch.offset : stretch.offset + length])
            else:
                grads = (parameter.grad for parameter in unit.faces.parameters[index])
                target.extend(local_of(g) for g in grads if g is not None and g.numel())
    replicas.extend(p.grad for p in model.parameters() if id(p) not in ours and p.grad is not None)
    return sharded, replicas


def _norm(
    sharded: list[torch.Tensor],
    replicas: list[torch.Tensor],
    units: list[DStorage],
    norm_type: float,
) -> torch.Tensor:
    device = units[0].buffers.shard.device if units else torch.device("cpu")
    largest = math.isinf(norm_type)
    kept = [views.dtype for unit in units for views in unit.buffers.segments]  # alike on all ranks
    wide = torch.float64 in (*kept, *(gradient.dtype for gradient in replicas))
    dtype = torch.float64 if wide else torch.float32

    def power(tensors: list[torch.Tensor]) -> torch.Tensor:
        if not tensors:
            return torch.zeros((), dtype=dtype, device=device)
        norms = torch.stack(
            [torch.linalg.vector_norm(t, norm_type, dtype=dtype) for t in tensors if t.numel()]
            or [torch.zeros((), dtype=dtype, device=device)]
        )
        return norms.max() if largest else norms.pow(norm_type).sum()

    parts = power(sharded)
    if units:
        comm = units[0].comm
        comm.all_reduce("gradient norm", parts, largest=largest, replicas=False)
    whole = power(replicas)
    if largest:
        return torch.maximum(parts, whole)
    return (parts + whole).pow(1.0 / norm_type)


def _blame(units: list[DStorage], total: torch.Tensor) -> RunError:
    """The first parameter whose gradient is not finite on some rank, told to every rank."""
    named = [(unit.name, m.fqn) for unit in units for m in unit.members]
    bad = torch.zeros(len(named), device=units[0].buffers.shard.device)
    index = 0
    for unit in units:
        for finite in _finite(unit):
            bad[index] = 0.0 if finite else float(unit.comm.rank + 1)
            index += 1
    units[0].comm.all_reduce("which gradient is not finite", bad, largest=True)
    place = next((i for i in range(len(named)) if bad[i] > 0), None)
    unit_name, fqn = named[place] if place is not None else ("", "a parameter of no unit")
    rank = f" on rank {int(bad[place].item()) - 1}" if place is not None else ""
    return RunError(
        expected(
            f"gradient of {fqn} in unit '{unit_name}'{rank}",
            "finite numbers",
            f"a norm of {total.item()}",
            "Nothing was updated: lower the learning rate or look at the batch.",
        )
    )


def _finite(unit: DStorage) -> list[bool]:
    """Of every member, whether this rank's part of its gradient is finite."""
    found = []
    pieces = iter(unit.buffers.pieces)
    for index, views in enumerate(unit.buffers.segments):
        for parameter in unit.faces.parameters[index]:
            piece = next(pieces)
            gradient = None if parameter.grad is None else local_of(parameter.grad)
            if isinstance(unit.sink, FlatSink) and piece.numel:
                gradient = unit.sink.part(index, views.segment.begin(piece), piece.numel)
            found.append(gradient is None or bool(torch.isfinite(gradient).all()))
    return found
