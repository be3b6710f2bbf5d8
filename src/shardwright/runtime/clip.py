"""Clipping by the norm of all gradients: one local norm, one reduction, one scale."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from shardwright.core.errors import InputError, RunError, check_type
from shardwright.runtime.torch_private import C_GRAD, local_of
from shardwright.runtime.units.dstorage import units_in
from shardwright.runtime.units.reductions import norms
from shardwright.runtime.units.shard_tensor import ShardTensor
from shardwright.runtime.units.unit import Unit


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale the gradients of ``model`` so that their norm is at most ``max_norm`` (collective).

    Returns the norm before, a scalar that is the same on every rank and equals that of the
    unsharded model. Gradients may be on ``model.parameters()`` or on ``optimizer_parameters``.
    Parameters that no unit has are counted as replicas, once. With ``error_if_nonfinite`` a norm
    that is not finite raises :class:`RunError` on every rank, naming the parameter and the rank,
    before anything is scaled. ``torch.nn.utils.clip_grad_norm_`` does the same, tensor by tensor.
    """
    check_type(model, nn.Module, "model", "torch.nn.utils.clip_grad_norm_ takes parameters.")
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        if not isinstance(value, int | float | torch.Tensor):
            raise InputError(name, "a number", repr(value))
    if not max_norm >= 0 or not norm_type > 0:
        raise InputError(
            "clip_grad_norm_", "max_norm >= 0 and norm_type > 0", f"{max_norm}, {norm_type}"
        )
    gradients = list(_gradients(model))
    total = _norm(gradients, norm_type)
    if error_if_nonfinite and not math.isfinite(total.item()):
        raise _blame(list(units_in(model)), total)
    # Without a look at the number, for which the host would wait for the device; torch's own
    # epsilon, so that clipped gradients are the same.
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        local_of(gradient).mul_(scale.to(gradient.device))
    return total


def _gradients(model: nn.Module) -> Iterator[torch.Tensor]:
    """Every gradient once: of flat tensors, and of the parameters that none has."""
    flats = {id(s.flat): s.flat for unit in units_in(model) for s in unit.all_flat_parts}
    for flat in flats.values():
        gradient = C_GRAD.__get__(flat.parameter)  # whether or not all of it has one
        if gradient is not None:
            yield gradient
    sharded = [m.parameter for unit in units_in(model) for m in unit.members]  # whatever shows
    # Not model.parameters(), which shows whole ones inside of ``unsharded()``.
    known = set(map(id, sharded))
    for parameter in (*sharded, *(p for p in model.parameters() if id(p) not in known)):
        if getattr(parameter, "home", None) is None and parameter.grad is not None:
            yield parameter.grad


def _norm(gradients: list[torch.Tensor], order: float) -> torch.Tensor:
    if not gradients:
        return torch.zeros(())
    parts = [(local_of(g), g.cut.comm if isinstance(g, ShardTensor) else None) for g in gradients]
    # A norm of norms is the norm of all. They are fp64, so it does not show how many there were.
    total = torch.linalg.vector_norm(torch.stack(norms(parts, order)), order)
    wide = any(gradient.dtype is torch.float64 for gradient in gradients)
    return total if wide else total.float()


def _blame(units: list[Unit], total: torch.Tensor) -> RunError:
    """The first parameter whose gradient is not finite on some rank, known to every rank."""
    for unit in units:
        bad = torch.zeros(len(unit.members), device=unit.buffers.shard.device)
        for index, member in enumerate(unit.members):
            gradient = member.parameter.grad
            if gradient is not None and not torch.isfinite(local_of(gradient)).all():
                # One maximum tells which gradient and on which rank; 0 is nobody's.
                bad[index] = float(unit.comm.mesh.get_rank() + 1)
        unit.comm.all_reduce("which gradient is not finite", bad, largest=True)
        found = bad.nonzero()
        if len(found):
            index = int(found[0])
            return _not_finite(
                f"gradient of {unit.members[index].fqn} in unit '{unit.name}' "
                f"on rank {int(bad[index].item()) - 1}",
                total,
            )
    return _not_finite("gradient of a parameter of no unit", total)


def _not_finite(where: str, total: torch.Tensor) -> RunError:
    remedy = "Nothing was updated: lower the learning rate or look at the batch."
    return RunError(where, "finite numbers", f"a norm of {total.item()}", remedy)
