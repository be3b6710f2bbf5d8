"""``fully_shard_flat``: wrap modules so that their parameters live as one sharded buffer."""

# Ranks that disagree on what a unit is would exchange bytes of other tensors, or wait for ever. So
# everything is checked before anything moves, the arguments by each rank and that all have the same
# ones by one exchange (``_agree``), and a difference between ranks is an error on every rank.

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from shardwright.core.errors import InputError, UnsupportedError, not_one_of
from shardwright.core.layout import balanced_owners
from shardwright.core.placement import BlockShard, Flat, Owned, Placement, Replicate, Shard, Zero
from shardwright.runtime.comm import Comm, check_mesh
from shardwright.runtime.flat_tensors import TAKEN, take
from shardwright.runtime.sharded_module import as_sharded, class_name, move_buffers
from shardwright.runtime.state import follow_state_dict
from shardwright.runtime.units import replicas
from shardwright.runtime.units.cutting import Cutting, UnitNames, as_precision
from shardwright.runtime.units.dstorage import (
    DStorage,
    get_dstorage,
    holder_of,
    register,
    storages_of,
    units_in,
    units_of,
)
from shardwright.runtime.units.flow import Flow
from shardwright.runtime.units.hooks import UnitHooks
from shardwright.runtime.units.parameter import Member, check_materials, find_members
from shardwright.runtime.units.unit import Initial, Unit
from shardwright.tracker.private import own_parameters

STRATEGIES = ("per_param", "param_boundary", "flat")

AnyPlacement = Placement | TorchPlacement
PlacementFunction = Callable[[str, nn.Parameter], AnyPlacement | None]


def fully_shard_flat(
    module: nn.Module | Sequence[nn.Module],
    mesh: DeviceMesh,
    placements: tuple[AnyPlacement, ...] = (Shard(0),),
    reshard_after_forward: bool | int | None = None,
    register_hooks: bool = True,
    shard_strategy: str = "per_param",
    shard_placement_fn: PlacementFunction | None = None,
    *,
    precision: Any = None,
    zero: Zero | tuple[Zero, Zero] = 3,
    ignored_params: Collection[nn.Parameter] = (),
    prefetch: int | None = None,
    cpu_offload: bool = False,
    bucket_size: int | None = None,
    block_size: int = 1,
) -> DStorage:
    """Shard the parameters of ``module`` over ``mesh`` as one buffer (collective).

    Wrap inner modules first: a module's storage has the parameters that no inner one has. Several
    modules that run one after the other can be one unit. From then on the module shows sharded
    parameters, each with its reduced gradient after a backward, and full ones while it computes.
    What is returned prints as a table of what was done.

    Args:
        mesh: 1-D, or 2-D of replicas x shards.
        placements: for parameters that nothing below decides: ``Shard(dim)``, ``Owned(rank)``,
            ``BlockShard(size, dim)`` or ``Replicate()``, torch's own included.
        reshard_after_forward: free full parameters after the forward and gather them again in the
            backward; a number: keep them among so few ranks. By default all do but the root.
        register_hooks: False: the caller drives ``unshard()`` and ``reshard()``.
        shard_strategy: ``"per_param"`` cuts every parameter as ``placements`` say;
            ``"param_boundary"`` gives each whole to one rank, the largest first to the rank with
            least; ``"flat"`` cuts the buffer evenly, so that a gather needs no copy.
        shard_placement_fn: the placement of each parameter by name, None for the strategy's.
        precision: a :class:`MixedPrecision`, or torch's ``MixedPrecisionPolicy``.
        zero: ZeRO's stage: 3 cuts everything, 2 gradients and optimizer states, 1 these states
            (gradients wait, whole, under ``no_sync``); below 3 every rank keeps whole parameters.
            A pair is for replicas and shards: ``(2, 3)`` cuts what is no parameter over both.
        ignored_params: stay as they are: neither sharded nor reduced.
        prefetch: how many units are on their way while one computes; by default 1, on the CPU 0.
        cpu_offload: keep shards, reduced gradients and so optimizer states in host memory.
        bucket_size: cut parameters that stay whole, from the last to the first, into units of so
            many elements, each reduced when its last gradient is there; gives the first.
        block_size: elements of a parameter that no cut divides, counted from its first, as
            :class:`AdamW8bit` quantizes 256; of fewer than 4,096 all may be cut.

    Raises:
        InputError: for what can be mended by the caller, on every rank, naming the parameter.
        UnsupportedError: for what this version cannot do.
        MismatchError: if ranks do not agree.
    """
    modules = _modules(module, register_hooks)
    comm, zero = _ranks(mesh, zero)
    names, unit = _names(modules), " + ".join(map(class_name, modules))
    _check_reshard(reshard_after_forward, zero, comm.shards.size, unit)
    prefetch, precision = _depth(prefetch, mesh), as_precision(precision)
    members = unit_members(modules, names, unit, ignored_params)
    chosen = _placements(members, placements, shard_strategy, shard_placement_fn, comm.size, zero)
    # What may be wrong on one rank alone comes before ``_agree``: found after it, that rank would
    # leave the others in a collective.
    check_offload(comm, cpu_offload)
    _check_sizes(bucket_size, block_size, chosen, zero, register_hooks)
    cut = (chosen, reshard_after_forward, zero, comm.kept, bucket_size, cpu_offload, block_size)
    _agree(comm, members, chosen, (*cut, register_hooks, precision, prefetch))
    cutting = Cutting(chosen, precision, zero, cpu_offload, block_size)
    parts = [("", members)] if bucket_size is None else _buckets(members, bucket_size)
    called = (unit,) * len(modules)
    units = [
        make_unit(part, comm, cutting, UnitNames(unit, called, bucket), reshard_after_forward)
        for bucket, part in parts
    ]
    ignored = set(map(id, ignored_params))
    left_out = (n for m in modules for n, p in m.named_parameters() if id(p) in ignored)
    units[0].structure.left_out = tuple(left_out)
    # A flow of its own for each call: the one of an outer module takes those of inner ones over, so
    # that a model has one.
    attach(modules, names, units, Flow(prefetch), register_hooks=register_hooks)
    _begin_alike(modules, names)
    return storages_of(modules[0])[0]


def _agree(
    comm: Comm,
    members: Sequence[Member],
    placements: Mapping[str, Placement],
    options: tuple[Any, ...],
) -> None:
    """MismatchError unless all ranks shard the same in the same way (collective)."""
    shapes = [
        (m.fqn, tuple(m.shape), str(m.dtype), m.parameter.requires_grad, m.parameter.is_meta)
        for m in members
    ]
    facts = {"module": repr(shapes), "options": repr(options)}
    cut = {m.fqn: m.parameter for m in members if not isinstance(placements[m.fqn], Replicate)}
    replicas.agree("fully_shard_flat", comm, facts, cut)


def _begin_alike(modules: Sequence[nn.Module], names: Sequence[str]) -> None:
    """Let replicas begin with the values of one of them, inner units have their paths, and buffers
    be where parameters are."""
    for module, name in zip(modules, names, strict=True):
        _name_inner(module, name)
        move_buffers(module, torch.device(units_of(module)[0].mesh.device_type))
    for unit in units_of(modules[0]):
        # As DDP does. What is cut is of one start by itself: each rank keeps a part of its own
        # values, which ``_agree`` has compared.
        if replicas.differ(unit.name, unit.buffers, unit.comm):
            replicas.level(unit.name, unit.buffers, unit.comm)


def _ranks(mesh: DeviceMesh, zero: Zero | tuple[Zero, Zero]) -> tuple[Comm, Zero]:
    """The ranks of a mesh and the stage among its shards."""
    check_mesh(mesh)
    if not isinstance(zero, tuple):
        return Comm(mesh), zero
    if zero not in ((1, 3), (2, 3)) or mesh.ndim != 2:
        wanted = "a stage, or (1, 3) or (2, 3) on a mesh of (replicate, shard)"
        remedy = "To cut parameters over all ranks, pass a mesh of one dimension."
        found = f"{zero} on {mesh.ndim} dimension{'s' * (mesh.ndim > 1)}"
        raise InputError("zero", wanted, found, remedy)
    return Comm(mesh, twice=True), 3


def _depth(prefetch: int | None, mesh: DeviceMesh) -> int:
    if prefetch is None:
        return int(mesh.device_type != "cpu")
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise InputError("prefetch", "0 or more units, or None", repr(prefetch))
    return prefetch


def _modules(given: nn.Module | Sequence[nn.Module], hooked: bool) -> list[nn.Module]:
    """The modules of a unit; with hooks they need a forward that hooks can follow."""
    modules = list(given) if isinstance(given, Sequence) else [given]
    if not modules or not all(isinstance(module, nn.Module) for module in modules):
        strays = [m for m in modules if not isinstance(m, nn.Module)] or [given]
        found = type(strays[0]).__name__ if modules else "none"
        raise InputError("module", "a module, or several", found)
    for module in modules if hooked else ():
        # They are never called, so no hook would ever run and the unit never be there.
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            wanted = "modules with a forward, which the unit's hooks follow"
            remedy = "Pass its layers as a list, if they run one after the other, or their parent."
            raise InputError("module", wanted, f"a {type(module).__name__}", remedy)
    return modules


def _names(modules: Sequence[nn.Module]) -> list[str]:
    """What names of parameters begin with: of several modules their numbers."""
    return [str(index) for index in range(len(modules))] if modules[1:] else [""]


def _name_inner(module: nn.Module, prefix: str) -> None:
    """Call inner units by their paths from here, which their own calls could not know."""
    found: dict[Unit, list[str]] = {}
    for path, inner in module.named_modules(prefix=prefix):
        for unit in () if inner is module else units_of(inner):
            found.setdefault(unit, []).append(path)
    for unit, paths in found.items():
        unit.rename(paths)


def check_offload(comm: Comm, cpu_offload: Any) -> None:
    """InputError unless shards of ``comm`` can be in host memory."""
    if not isinstance(cpu_offload, bool):
        raise InputError("cpu_offload", "True or False", repr(cpu_offload)[:60])
    if cpu_offload and not comm.on_host:
        wanted = "a process group that also moves tensors in host memory"
        remedy = "Begin with init_process_group('cpu:gloo,cuda:nccl')."
        raise InputError("cpu_offload", wanted, f"one of {comm.config}", remedy)


def _check_reshard(kind: bool | int | None, zero: Zero, size: int, unit: str) -> None:
    if isinstance(zero, bool) or zero not in get_args(Zero):
        remedy = "For DDP, of which nothing is cut, give placements=(Replicate(),)."
        raise InputError("zero", "1, 2 or 3", repr(zero), remedy)
    if zero < 3 and kind:
        wanted = f"False or None beside zero={zero}, which keeps parameters whole"
        raise InputError("reshard_after_forward", wanted, repr(kind))
    if kind is None or isinstance(kind, bool):
        return
    if not isinstance(kind, int) or kind < 1 or size % kind:
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        raise InputError(
            f"reshard_after_forward of unit '{unit}'",
            f"True, False, None or a number of ranks that divides {size}: "
            + ", ".join(map(str, divisors)),
            repr(kind),
        )


def _check_frozen_parts(members: Sequence[Member], zero: Zero) -> None:
    """What stays whole and is never updated is a replica on every rank of the unit; of parts that
    tensor parallelism made, no one would know of which tensor."""
    for member in members:
        is_part = member.parallel is not None and member.parallel.dim is not None
        if zero < 3 and is_part and not member.parameter.requires_grad:
            wanted = "zero=3 beside a frozen parameter that tensor parallelism has cut"
            raise UnsupportedError(member.fqn, wanted, f"zero={zero}", "Pass zero=3.")


def _check_sizes(
    size: int | None, block: int, placements: Mapping[str, Placement], zero: Zero, hooked: bool
) -> None:
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise InputError("block_size", "1 or more elements", repr(block))
    if size is None:
        return
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InputError("bucket_size", "1 or more elements, or None", repr(size))
    if not hooked:
        raise InputError("register_hooks", "True beside bucket_size", "False")
    whole = all(isinstance(placement, Replicate) for placement in placements.values())
    if zero == 3 and not whole:
        remedy = "Under zero=3 give modules of the size that you want, or several as a list."
        wanted = "zero=1 or 2, or placements=(Replicate(),), where parameters stay whole"
        raise InputError("zero beside bucket_size", wanted, "3", remedy)


def _buckets(members: Sequence[Member], size: int) -> list[tuple[str, list[Member]]]:
    """Members from the last to the first, until those that train have ``size`` elements."""
    found: list[tuple[str, list[Member]]] = []
    room = 0
    # As gradients come in a backward, so that a bucket is complete early and its sum travels beside
    # the rest.
    for member in reversed(members):
        if room <= 0:
            found.append((f"bucket {len(found)}", []))
            room = size
        found[-1][1].append(member)
        # Frozen ones have no gradient to wait for, and come with whatever bucket they are next to.
        room -= member.shape.numel() if member.parameter.requires_grad else 0
    return found


def _is_unit(module: nn.Module) -> bool:
    return get_dstorage(module) is not None


def unit_members(
    modules: Sequence[nn.Module],
    prefixes: Sequence[str],
    unit: str,
    ignored: Collection[nn.Parameter] = (),
) -> list[Member]:
    """The parameters of a unit to be; those of other units are refused by name."""
    _refuse_sharded(modules, unit)
    members = find_members(modules, prefixes, ignored, _is_unit)
    inside = {
        # By the module's dictionary, which is where a member is shown.
        id(own_parameters(inner)): holder
        for module in modules
        for inner in module.modules()
        if (holder := holder_of(inner)) is not None
    }
    for member in members:
        holder = next((inside[id(d)] for d, _ in member.places if id(d) in inside), None)
        if holder is not None:
            where = f"{member.fqn} of unit '{unit}'"
            wanted = "a parameter that no other unit has"
            found = f"one that is part of unit '{holder.name}'"
            raise InputError(where, wanted, found, "Wrap inner modules first.")
    check_members(members, modules, unit)
    return members


def check_members(members: Sequence[Member], modules: Sequence[nn.Module], unit: str) -> None:
    """InputError unless ``members`` can be a unit of ``modules``, of which no other has any."""
    _refuse_sharded(modules, unit)
    for member in members:
        taken = vars(member.parameter).get(TAKEN)
        if taken is not None:
            there, other = taken
            what = "the same parameter" if member.parameter.numel() else "a parameter"
            raise InputError(
                f"{member.fqn} of unit '{unit}'",
                "a parameter that no other unit has",
                f"{what} as {there} of unit '{other}'",
                "Put both in one unit, such as their common ancestor, wrap inner modules "
                "first, or untie them.",
            )
    if members or not any(True for module in modules for _ in units_in(module)):
        check_materials(members, unit)


def _refuse_sharded(modules: Sequence[nn.Module], unit: str) -> None:
    if any(_is_unit(module) for module in modules):
        raise InputError(f"unit '{unit}'", "modules that are not sharded yet", "one that is")


def _placements(
    members: Sequence[Member],
    placements: tuple[AnyPlacement, ...],
    strategy: str,
    function: PlacementFunction | None,
    size: int,
    zero: Zero,
) -> dict[str, Placement]:
    """The placement of every parameter by fqn."""
    _check_frozen_parts(members, zero)
    if strategy not in STRATEGIES:
        raise InputError(not_one_of("shard_strategy", strategy, STRATEGIES))
    if not isinstance(placements, Sequence) or len(placements) != 1:
        remedy = "shard_placement_fn gives single parameters another one."
        wanted = "one placement in a tuple, such as (Shard(0),)"
        raise InputError("placements", wanted, repr(placements)[:60], remedy)
    default = ours(placements[0], "placements")
    specs = [member.spec for member in members]
    if isinstance(default, Replicate) or strategy == "per_param":
        chosen: dict[str, Placement] = {spec.fqn: default for spec in specs}
    elif strategy == "flat":
        chosen = {spec.fqn: Flat() for spec in specs}
    else:
        chosen = balanced_owners(specs, size)
    for member in members:
        wanted = function(member.fqn, member.parameter) if function else None
        if wanted is not None:
            chosen[member.fqn] = ours(wanted, f"shard_placement_fn for {member.fqn}")
        if member.parallel is not None:
            # Last, whoever has chosen: what tensor parallelism has cut cannot be cut in every way
            # again.
            chosen[member.fqn] = member.parallel.cuts(chosen[member.fqn], member.fqn)
        _check_fits(member, chosen[member.fqn], size)
    return chosen


def ours(placement: Any, where: str) -> Placement:
    """A placement as the torch-free one of the same name."""
    if isinstance(placement, Placement):
        return placement
    # By its very type: subclasses of torch's Shard may cut other elements.
    if type(placement) is TorchShard:
        return Shard(placement.dim)
    if isinstance(placement, TorchReplicate):
        return Replicate()
    raise UnsupportedError(where, "Shard, Owned, BlockShard, Replicate or Flat", repr(placement))


def _check_fits(member: Member, placement: Placement, size: int) -> None:
    where, dims = member.fqn, len(member.shape)
    match placement:
        case Shard(dim) | BlockShard(_, dim):
            if dims and not 0 <= dim < dims:
                wanted = f"a dim from 0 to {dims - 1} of shape {tuple(member.shape)}"
                raise InputError(where, wanted, f"{placement!r}", "Use Shard(0), or Owned(rank).")
            if isinstance(placement, BlockShard) and placement.size < 1:
                raise InputError(where, "blocks of 1 or more", f"{placement.size}")
        case Owned(rank):
            if not 0 <= rank < size:
                raise InputError(where, f"an owner from 0 to {size - 1}", f"Owned({rank})")
        case _:
            pass


def make_unit(
    members: Sequence[Member],
    comm: Comm,
    cutting: Cutting,
    names: UnitNames,
    reshard_after_forward: bool | int | None = None,
    initial: Initial | None = None,
) -> Unit:
    """The unit of ``members``, whose parameters no other unit can have from then on."""
    # Before the unit replaces them by its own.
    originals = [(member.parameter, member.fqn) for member in members]
    unit = Unit(members, comm, cutting, names, reshard_after_forward, initial)
    for parameter, fqn in originals:
        take(parameter, fqn, names.name or names.bucket)
    return unit


def attach(
    modules: Sequence[nn.Module],
    prefixes: Sequence[str],
    units: Sequence[Unit],
    flow: Flow,
    *,
    leads: bool = True,
    register_hooks: bool = True,
) -> None:
    """What ``fully_shard_flat`` and ``apply`` share: give modules their unit, or one for each
    bucket, and the hooks."""
    first = units[0]
    for unit in units:
        flow.add(unit)
    inner = [unit for module in modules for unit in units_in(module)]
    for module, prefix in zip(modules, prefixes, strict=True):
        first.structure.add(module, prefix, _is_unit)
        as_sharded(module)
        for unit in units:
            register(module, unit)
            follow_state_dict(module, unit, prefix)
    for other in {id(unit.flow): unit.flow for unit in inner if unit.flow is not flow}.values():
        # After this unit is in the flow, so that it comes before the inner ones, as forwards enter
        # them.
        flow.join(other)
    if register_hooks:
        hooks = UnitHooks(units)
        if leads:
            flow.lead(first)
        hooks.register(modules)
