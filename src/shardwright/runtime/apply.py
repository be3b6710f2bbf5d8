"""``apply``: turn a model into the sharded one that a plan describes, in place."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from msgspec import UNSET
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright import __version__
from shardwright.core.block import Block, Role, check_tiling
from shardwright.core.errors import InputError, MismatchError, check_type
from shardwright.core.layout import ReplicaGrid, unit_layout
from shardwright.core.optimizers import OPTIMIZERS
from shardwright.core.placement import Replicate
from shardwright.core.recording import Unfolded
from shardwright.core.sharding import traits
from shardwright.core.tensor import TensorSpec
from shardwright.job.model_of_job import rows_dtype, step_dtypes
from shardwright.job.plan import Plan, TablePlan, UnitPlan
from shardwright.job.planner import trained_communication
from shardwright.runtime.comm import Comm, check_mesh, fingerprint_of, flat
from shardwright.runtime.embeddings.disk import disk_for_tables
from shardwright.runtime.embeddings.initial import (
    Initial,
    InitialBlock,
    InitialWeight,
    facts_of,
    filled,
    freeing,
    initial_blocks,
)
from shardwright.runtime.embeddings.lookup import note_trained, reach_tables
from shardwright.runtime.embeddings.modules import RoutedCollection, RoutedEmbedding
from shardwright.runtime.embeddings.route import Table, make_route
from shardwright.runtime.embeddings.shard import check_kernels, look_ahead
from shardwright.runtime.embeddings.tables import ShardedTables
from shardwright.runtime.fully_shard import attach, check_members, check_offload, make_unit
from shardwright.runtime.guard import Guard
from shardwright.runtime.model_parts import tables_in
from shardwright.runtime.probe import Probe
from shardwright.runtime.sharded_module import move_buffers
from shardwright.runtime.units import replicas
from shardwright.runtime.units.cutting import Cutting, MixedPrecision, UnitNames
from shardwright.runtime.units.dstorage import units_in
from shardwright.runtime.units.flow import Flow
from shardwright.runtime.units.hooks import cast_inputs
from shardwright.runtime.units.parameter import DTYPES, Member, find_members
from shardwright.runtime.units.rebind import absorb
from shardwright.trace.checkpointing import apply_checkpointing
from shardwright.trace.tables import collected

HOSTS = ("host", "device")  # dimensions of a mesh of several hosts


def apply(
    model: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    *,
    probe: Probe | None = None,
    guard: Guard | None = None,
    folder: Path | None = None,
    initial: Initial | None = None,
) -> nn.Module:
    """Shard ``model`` in place as ``plan`` says and return it (collective).

    Weights start from the model's own, each of which is freed once this rank has its part, or on
    the meta device, where no rank ever has a whole table, from ``model.initial_block(fqn, offsets,
    sizes)`` if there is one, else from a module's own initialisation; ``initial`` comes before all
    of these, as with :func:`shard_embeddings`. Tables are updated inside their backward, which
    raises :class:`RunError` on every rank, and updates no row, where a row gradient is not finite;
    with a ``guard`` when that is settled, by the gradients of all backwards until then. Without
    one, :class:`UnsupportedError` where gradients are accumulated over several. Parameters that
    the plan has no gradient for, since they got none when it was made, are frozen. Raises
    :class:`MismatchError` before anything moves if ranks disagree on plan, model or versions, or if
    the mesh or the model is not the plan's; :class:`UnsupportedError` for what this version plans
    but does not run. Blocks that the plan has checkpointed are computed again in their backward,
    with the same random numbers. Tables whose rows the plan has on disk lie in ``folder``, by
    default that of the job. A mesh of two dimensions named ``HOSTS`` has the plan's hosts and
    their ranks; any other one is of one dimension.
    """
    check_type(plan, Plan, "plan", "read_plan reads a file.")
    check_type(model, nn.Module, "model")
    check_mesh(mesh)
    if guard is not None:
        check_type(guard, Guard, "guard", "Make one with sw.Guard(mesh).")
    if mesh.mesh_dim_names == HOSTS:
        mesh = flat(mesh)
    comm = Comm(mesh, probe)
    starts = _starts(model)
    _agree(comm, model, plan, facts_of([*starts.values()], initial))
    if comm.size != plan.world_size:
        remedy = f"Start {plan.world_size} ranks or plan for {comm.size}."
        raise MismatchError("mesh", f"{plan.world_size} ranks, as the plan", f"{comm.size}", remedy)
    blocks = plan.expanded()
    _check_model(model, plan, blocks)
    check_kernels(plan.tables, mesh)
    # Disk and rows before any parameter is touched: where they fail the model is as it was.
    folder = disk_for_tables(plan, comm, folder)
    members = {m.fqn: m for m in find_members([model], [""], (), lambda _: False)}
    _freeze(members, plan, blocks)
    _check_trained(model, plan, blocks)
    for unit in plan.units:
        _check_unit_blocks(unit, blocks, plan.grid, [members[fqn] for fqn in unit.tensors])
    initial_block = initial_blocks(model, [*starts.values()], initial, comm)
    check_offload(comm, any(unit.offloaded is True for unit in plan.units))
    flow = Flow(plan.prefetch, guard)
    if plan.tables:
        for table in plan.tables:
            members.pop(table.fqn)  # so that nothing but the model has the whole of it
        own = [starts[table.fqn] for table in plan.tables]
        tables_start = freeing(initial_block, own, blocks, comm.rank)
        _shard_tables(model, plan, blocks, comm, tables_start, flow, folder)
        reach_tables(model)
    _shard_units(model, plan, comm, members, initial_block, flow)
    note_trained(model)
    if plan.job.train.overlap not in (UNSET, "none"):
        look_ahead(model)
    vars(model).pop("initial_block", None)  # of one model only: what it keeps is needed no more
    move_buffers(model, torch.device(mesh.device_type))
    _agree_on_replicas(comm, model)
    return model


def _shard_units(
    model: nn.Module,
    plan: Plan,
    comm: Comm,
    members: Mapping[str, Member],
    initial_block: InitialBlock,
    flow: Flow,
) -> None:
    """Every unit with the parameters that the plan gives it, inner ones first: a unit of the whole
    model has what no other has, and begins the step."""
    # No unit has the whole model, so no unit's forward is the step's: somebody has to tell the flow
    # that a step begins.
    if not any(_leads(unit) for unit in plan.units):
        model.register_forward_pre_hook(flow.begin_forward, prepend=True)

    grid, shared = plan.grid, comm
    if grid.replicas > 1:
        shared = Comm(comm.as_replicas(grid.replicas), comm.probe, twice=grid.twice)

    def initial(fqn: str) -> torch.Tensor:
        shape = tuple(members[fqn].shape)
        return initial_block(fqn, (0,) * len(shape), shape)

    precision = MixedPrecision(*(DTYPES.get(name) for name in step_dtypes(plan.job)))
    in_buckets = plan.model.bucket_size > 0
    if in_buckets:
        precision = _cast_as_recorded(model, plan, precision)
    # Inner ones first: what looks through a module leaves out what is a unit of its own by then,
    # and the first unit to claim an inner module is taken for its innermost.
    for units in _inner_first(_together(plan) if in_buckets else [(u,) for u in plan.units]):
        modules = [model.get_submodule(path) for path in units[0].modules]
        made = []
        for unit in units:
            own = [members[fqn] for fqn in unit.tensors]
            check_members(own, modules, unit.name)
            cutting = Cutting(
                dict.fromkeys(unit.tensors, unit.optimizer_state),
                precision,
                unit.roles.zero or 3,
                unit.offloaded is True,
                OPTIMIZERS[unit.optimizer].block,
            )
            name, bucket = ("", unit.name) if in_buckets else (unit.name, "")
            names = UnitNames(name, unit.modules, bucket)
            # What is replicated is so on all ranks, and has no replicas of shards.
            ranks = comm if _replicated(unit) else shared
            made.append(make_unit(own, ranks, cutting, names, unit.reshard_after_forward, initial))
        attach(modules, units[0].modules, made, flow, leads=_leads(units[0]))
        for unit in units:
            blocks = [model.get_submodule(path) for path in unit.checkpointed]
            apply_checkpointing(blocks, unit.checkpointing, preserve_rng_state=True)


def _cast_as_recorded(model: nn.Module, plan: Plan, precision: MixedPrecision) -> MixedPrecision:
    """Inputs are cast where modules are entered that were recorded as units, not where buckets are,
    whose precision is returned."""
    if precision.param_dtype is not None and plan.recording is not None:
        for unit in Unfolded(plan.recording).units.values():
            for path in unit.modules:
                cast_inputs(model.get_submodule(path), precision.param_dtype)
    return dataclasses.replace(precision, cast_forward_inputs=False)


def _together(plan: Plan) -> list[tuple[UnitPlan, ...]]:
    """All buckets, which have hooks in common, in the order in which their gradients come."""
    units = {unit.name: unit for unit in plan.units}
    moments = plan.model.step.backward
    done = [m.unit for m in moments if m.piece.point == "leave_backward"]
    return [tuple(units[name] for name in dict.fromkeys((*done, *units)))]


def _replicated(unit: UnitPlan) -> bool:
    return isinstance(unit.optimizer_state, Replicate)


def _leads(unit: UnitPlan) -> bool:
    """Whether the unit's forward is that of the whole model."""
    return unit.modules == ("",)


def _inner_first(units: Sequence[tuple[UnitPlan, ...]]) -> list[tuple[UnitPlan, ...]]:
    """The units in their order, but for those around others, which come after these."""

    def around(outer: tuple[UnitPlan, ...], inner: tuple[UnitPlan, ...]) -> bool:
        starts = tuple(f"{path}." if path else "" for path in outer[0].modules)
        paths = inner[0].modules
        return outer is not inner and any(path.startswith(starts) for path in paths)

    def depth(unit: tuple[UnitPlan, ...]) -> int:
        return max((1 + depth(inner) for inner in units if around(unit, inner)), default=0)

    return sorted(units, key=depth)


def _agree_on_replicas(comm: Comm, model: nn.Module) -> None:
    """Ranks exchange only mean gradients, so replicas that start apart would stay apart."""
    facts: dict[str, str] = {}
    for unit in units_in(model):
        if unit.is_replicated:
            absorb(unit)
            facts[f"start of unit '{unit.name}'"] = fingerprint_of(unit.buffers.shard)
    for tables in tables_in(model):
        for store in tables.replicas.stores:
            name = f"start of replicas in {tables.path}"
            facts[f"{name} of {store.held[0].block.tensor}"] = fingerprint_of(store.weight)
    if facts:
        comm.agree("apply", facts)


def _agree(comm: Comm, model: nn.Module, plan: Plan, more: Mapping[str, str]) -> None:
    """Every rank must run the same plan on the same model with the same versions."""
    shapes = [f"{n}:{tuple(p.shape)}:{p.dtype}" for n, p in model.named_parameters()]
    facts = {
        "plan": plan.fingerprint,
        "model": ";".join(shapes),
        "torch version": torch.__version__,
        "shardwright version": __version__,
        "python version": platform.python_version(),
        **more,
    }
    whole = {fqn for unit in plan.units if _replicated(unit) for fqn in unit.tensors}
    whole |= {t.fqn for t in plan.tables if traits(t.sharding_type).replicated}
    replicas.agree(
        "apply", comm, facts, {n: p for n, p in model.named_parameters() if n not in whole}
    )


def _check_model(model: nn.Module, plan: Plan, blocks: list[Block]) -> None:
    """The model's parameters must be exactly the plan's tensors, each covered by its blocks."""
    have = dict(model.named_parameters())
    planned = {block.tensor for block in blocks if block.role == "parameter"}
    for fqn in have:
        if fqn not in planned:
            raise MismatchError(
                fqn, "a tensor of the plan", "none there", "Plan again for this very model."
            )
    for fqn in sorted(planned):
        if fqn not in have:
            raise MismatchError(
                fqn, "a parameter of the model", "none", "Plan again for this model."
            )
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            remedy = "A plan says nothing of buffers: give this one its memory and its values."
            raise InputError(name, "a real buffer", "one on the meta device", remedy)
    modules = {name for name, _ in model.named_modules()}
    for unit in plan.units:
        absent = [*set(unit.tensors).difference(have), *set(unit.modules) - modules]
        if absent:
            wanted = f"a part of the model, as unit '{unit.name}' has"
            raise MismatchError(min(absent), wanted, "none", "Plan again for this model.")
    for spec in plan.model.tensors:
        shape = tuple(have[spec.fqn].shape) if spec.fqn in have else spec.shape
        if shape != spec.shape:
            wanted = f"shape {spec.shape} as planned"
            raise MismatchError(spec.fqn, wanted, f"{shape}", "Plan again for this model.")
    step = plan.model.step
    for table in plan.tables:
        if not step.tables_of(table.fqn):
            wanted = "a table of a module that the plan's recording looks up"
            raise MismatchError(table.fqn, wanted, "none", "Plan with this version.")
    check_tiling(blocks, [TensorSpec(n, tuple(p.shape)) for n, p in have.items()], plan.world_size)


def _freeze(members: Mapping[str, Member], plan: Plan, blocks: list[Block]) -> None:
    """What the plan has no gradient for is not trained."""
    trained = {block.tensor for block in blocks if block.role == "gradient"}
    for fqn in {fqn for unit in plan.units for fqn in unit.tensors} - trained:
        members[fqn].parameter.requires_grad_(False)


def _check_trained(model: nn.Module, plan: Plan, blocks: list[Block]) -> None:
    """What the plan has a gradient for, or rows that learn, is trained."""
    trained = {block.tensor for block in blocks if block.role == "gradient"}
    trained |= {table.fqn for table in plan.tables}
    for fqn, parameter in model.named_parameters():
        if fqn in trained and not parameter.requires_grad:
            wanted, found = "a parameter that is trained, as in the plan", "a frozen one"
            remedy = "Freeze it after sw.apply, or plan again for the model with it frozen."
            raise MismatchError(fqn, wanted, found, remedy)


def _check_unit_blocks(
    unit: UnitPlan, blocks: list[Block], grid: ReplicaGrid, members: Sequence[Member]
) -> None:
    """What the unit's layout will do must be what the block list says."""
    frozen = {member.fqn for member in members if not member.parameter.requires_grad}
    own = set(unit.tensors)
    planned = {
        b for b in blocks if b.tensor in own and (b.role == "parameter" or b.tensor not in frozen)
    }
    specs = [member.spec for member in members]
    grid = ReplicaGrid(1, len(grid.ranks)) if _replicated(unit) else grid
    zero = unit.roles.zero or 3
    how: dict[str, Any] = {"zero": zero, "kept": grid.kept}
    how["block"] = OPTIMIZERS[unit.optimizer].block
    layout = unit_layout(specs, unit.optimizer_state, grid.parts, frozen, **how)
    rows = zip(get_args(Role), unit.roles, strict=True)
    cut = {b for role, placement in rows for b in grid.blocks(layout, role, placement)}
    # The block list is the truth: a layout that would do anything else must not run under its name.
    if planned != cut or unit.roles.zero is None:
        where, remedy = f"unit '{unit.name}'", "Make the plan again with this version."
        raise MismatchError(where, "the blocks of its even cut", "other ones in the plan", remedy)


def _shard_tables(
    model: nn.Module,
    plan: Plan,
    blocks: list[Block],
    comm: Comm,
    initial: InitialBlock,
    flow: Flow,
    folder: Path,
) -> None:
    """Every module of tables by one whose rows lie as the plan says."""
    step, train = plan.model.step, plan.job.train
    rate = train.table_learning_rate or train.learning_rate

    def make(path: str) -> ShardedTables:
        planned = (table for table in plan.tables if step.tables_of(table.fqn) == path)
        tables = [_looked_up(plan, table) for table in planned]
        return ShardedTables(
            tables,
            make_route(tables, blocks, comm.size),
            comm,
            initial,
            rate,
            flow,
            path=path,
            folder=folder,
            communication=trained_communication(plan.job.planner.estimator),
        )

    made = filled(comm, lambda: {path: make(path) for path in step.lookups})
    for path, tables in made.items():
        sharded: nn.Module = tables
        own = model.get_submodule(path)
        if isinstance(own, (nn.Embedding, nn.EmbeddingBag)):
            sharded = RoutedEmbedding(path, own, tables)
        elif collected(own):
            sharded = RoutedCollection(tables, own)
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, sharded)


def _looked_up(plan: Plan, table: TablePlan) -> Table:
    """A table with its features and dtypes, as the plan's job has them."""
    spec = plan.model.table(table.fqn)
    return dataclasses.replace(
        Table.of(table),
        features=spec.feature_names,
        pooling=spec.pooling,
        dtype=spec.dtype,
        output_dtype=rows_dtype(plan.job, spec),
    )


def _starts(model: nn.Module) -> dict[str, InitialWeight]:
    """Every parameter of the model, and what initialises it."""
    more = {
        f"{path}.{each.inside}" if path else each.inside: each.start
        for path, part in model.named_modules()
        for each in collected(part)
    }
    found = {}
    for fqn, _ in model.named_parameters():
        path, _, name = fqn.rpartition(".")
        found[fqn] = InitialWeight(fqn, model.get_submodule(path), name, more.get(fqn))
    return found
