"""What this rank holds of a model, by the names of the unsharded one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwright.core.errors import InputError, MismatchError, UnsupportedError, check_type
from shardwright.runtime.checkpoint.region import TensorPart, whole
from shardwright.runtime.comm import Comm
from shardwright.runtime.embeddings.disk import DiskStore
from shardwright.runtime.embeddings.tables import ShardedTables
from shardwright.runtime.embeddings.update import RULES
from shardwright.runtime.units.dstorage import units_in
from shardwright.runtime.units.parameter import plain_name
from shardwright.runtime.units.rebind import absorb
from shardwright.runtime.units.unit import Unit
from shardwright.tracker.private import own_buffers

STATE = "optimizer/"  # what names of optimizer state begin with
STEP = "step"  # of it, how many updates were made


class ModelPart(NamedTuple):
    """This rank's part of a parameter, in the memory that the model computes with.

    ``held`` has its name in the model. ``parameter`` is what the module shows while sharded;
    ``slot`` its place in the layout of ``unit``, which is None for a parameter that every rank
    has whole and no unit keeps alike.
    """

    held: TensorPart
    parameter: nn.Parameter
    unit: Unit | None = None
    slot: int = 0

    @property
    def fqn(self) -> str:
        """Its name in the model; the first of several."""
        return self.held.name

    @property
    def numel(self) -> int:
        """Elements on this rank."""
        return self.held.tensor.numel()


def settle(model: nn.Module) -> list[Unit]:
    """Every unit of the model, SHARDED, with the values its parameters have now (collective)."""
    units = list(units_in(model))
    for unit in units:
        # First, so that parameters are the sharded ones; then what was put in their place is taken
        # over.
        unit.free()
        absorb(unit)
        if unit.buffers.shard.is_meta:
            raise unit.on_meta()
    return units


def comm_of(model: nn.Module, mesh: DeviceMesh | None = None) -> Comm | None:
    """The ranks that have parts of ``model``; None: this process has all of it.

    Units and tables name their mesh. ``mesh`` is for models without any, and for those whose units
    are on different ones: all ranks together.
    """
    if mesh is not None:
        return Comm(mesh)
    units = list(units_in(model))
    for joint in (joint for unit in units for joint in unit.joints.values()):
        return joint.grid.comm
    found = [unit.comm for unit in units]
    found += [tables.comm for tables in tables_in(model)]
    if len({tuple(comm.mesh.mesh.flatten().tolist()) for comm in found}) == 1:
        found = [comm for comm in found if comm.mesh.ndim == 1] or found  # some on a grid of them
    if any(comm.mesh != found[0].mesh for comm in found):
        raise InputError(
            "mesh", "one of all ranks, for units are on several", "none", "Pass mesh=..."
        )
    if found:
        return max(found, key=lambda comm: comm.size)  # replicas may have parts of their own
    if dist.is_initialized() and dist.get_world_size() > 1:
        where, wanted = "mesh", "the ranks that have the model, which has no units to know them by"
        raise InputError(where, wanted, "none", "Pass mesh=... of all ranks, or of this one alone.")
    return None


def parts_of(model: nn.Module) -> list[ModelPart]:
    """Every parameter of the model once, tied ones by their first name; units must be settled."""
    places = {
        id(member.parameter): (unit, index)
        for unit in units_in(model)
        for index, member in enumerate(unit.members)
    }
    parts = []
    for name, parameter in model.named_parameters():
        place = places.get(id(parameter))
        name = plain_name(name)
        if place is None:
            _refuse_dtensor(name, parameter)
            parts.append(ModelPart(whole(name, parameter.detach()), parameter))
            continue
        unit, index = place
        cut, local = unit.sharded.cuts[index], unit.buffers.locals[index]
        if cut is None:
            held = whole(name, local)
        else:
            held = TensorPart(name, tuple(cut.shape), cut.offsets, cut.sizes, local)
        parts.append(ModelPart(held, parameter, unit, index))
    return parts


def holdings(model: nn.Module, parts: list[ModelPart], *, leads: bool) -> list[TensorPart]:
    """Parameters, tables with the states of their rows, and persistent buffers of the model.

    What no unit keeps alike on all ranks, buffers and parameters outside of units, is listed by the
    rank that ``leads``: that one's is saved. To load it every rank asks for it.
    """
    held = [part.held for part in parts if leads or part.unit is not None]
    for tables in tables_in(model):
        held.extend(_of_tables(tables))
    if leads:
        held.extend(whole(name, buffer) for name, buffer in _buffers(model))
    return held


def table_states(model: nn.Module) -> set[str]:
    """Names of the optimizer state that belongs to tables, and so to the model."""
    return {
        f"{STATE}{table.fqn}/{name}"
        for tables in tables_in(model)
        for table in tables.tables
        for name in (*RULES[table.optimizer].states, STEP)
    }


def tables_in(model: nn.Module) -> Iterator[ShardedTables]:
    """The modules of sharded tables of ``model``, in module order."""
    return (module for module in model.modules() if isinstance(module, ShardedTables))


def on_disk(model: nn.Module) -> bool:
    """Whether this rank has rows of a table on disk, which change as training goes on."""
    return any(isinstance(store, DiskStore) for each in tables_in(model) for store in each.stores)


def tables_filled(model: nn.Module) -> None:
    """Rows whose columns this rank has in several blocks were filled with states in the first."""
    for tables in tables_in(model):
        for strip in tables.column_sums.own:
            (group, source), *others = strip.places
            for other, target in others:
                for name in tables.stores[group].rule.rows:
                    states = tables.stores[group].states[name][source]
                    tables.stores[other].states[name][target] = states


def _of_tables(tables: ShardedTables) -> Iterator[TensorPart]:
    shapes = {table.fqn: (table.rows, table.dim) for table in tables.tables}
    cut = {strip.fqn for strip in tables.column_sums.own}
    for store, item in tables.holdings():
        fqn, offsets, sizes = item.block.tensor, item.block.offsets, item.block.sizes
        yield TensorPart(fqn, shapes[fqn], offsets, sizes, store.block_view(item))
        for name, state in store.state_views(item).items():
            dims = state.dim()
            # A number a row, of rows whose columns lie in several blocks, is the same in all of
            # them: it is saved once, by strips.
            if dims == 2 or fqn not in cut:
                shape = shapes[fqn][:dims]
                yield TensorPart(f"{STATE}{fqn}/{name}", shape, offsets[:dims], sizes[:dims], state)
    for table in tables.tables:
        if RULES[table.optimizer].moves:
            yield whole(f"{STATE}{table.fqn}/{STEP}", tables.updates)
    for strip in tables.column_sums.own:
        group, rows = strip.places[0]
        for name in tables.stores[group].rule.rows:
            state = tables.stores[group].states[name][rows]
            key, shape = f"{STATE}{strip.fqn}/{name}", shapes[strip.fqn][:1]
            yield TensorPart(key, shape, (strip.row,), (len(state),), state)


def _buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that a state dict has, each once."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, buffer in own_buffers(module).items():
            if buffer is None or name in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            fqn = plain_name(f"{path}.{name}" if path else name)
            _refuse_dtensor(fqn, buffer)
            yield fqn, buffer


def _refuse_dtensor(fqn: str, tensor: torch.Tensor) -> None:
    if isinstance(tensor, DTensor):
        wanted, found = "a plain tensor or a parameter of a unit", "a DTensor of someone else's"
        raise UnsupportedError(fqn, wanted, found, "Save it with torch.distributed.checkpoint.")


ALIKE = "Make both by one function, and shard them alike."


@torch.no_grad()
def average_weights(average: nn.Module, model: nn.Module, decay: float) -> None:
    """Let the weights of ``average`` be ``decay`` times themselves plus the rest of ``model``'s::

        average = sw.apply(build(), plan, mesh)
        sw.average_weights(average, model, 0.0)  # begin with a copy
        for batch in batches:
            train(model, batch)
            sw.average_weights(average, model, 0.999)

    Parameters and rows of tables, on every rank what it keeps, so that nothing travels; buffers are
    those of ``model``. Both models are made alike and sharded alike. ``average`` takes as much
    memory as weights do, which no plan counts. MismatchError where the two differ,
    UnsupportedError for tables on disk.
    """
    check_type(average, nn.Module, "average")
    check_type(model, nn.Module, "model")
    if not 0 <= decay <= 1:
        raise InputError("decay", "a share from 0 to 1", str(decay))
    into, source = dict(_weights(average)), dict(_weights(model))
    for name in sorted({*into} ^ {*source}):
        raise MismatchError(name, "a weight of both models", "one of one", ALIKE)
    for name, weight in into.items():
        if weight.shape != source[name].shape or weight.dtype != source[name].dtype:
            found = f"{list(source[name].shape)} in one, {list(weight.shape)} in the other"
            raise MismatchError(name, "the same part in both models", found, ALIKE)
    if into:
        torch._foreach_lerp_(list(into.values()), [source[name] for name in into], 1 - decay)
    for buffer, other in zip(average.buffers(), model.buffers(), strict=True):
        buffer.copy_(other)


def _weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight that is averaged, as this rank keeps it, by name."""
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()
    for path, part in model.named_modules():
        if not isinstance(part, ShardedTables):
            continue
        for number, store in enumerate(part.every_store):
            if isinstance(store, DiskStore):
                wanted = "tables in memory, for an average of all their rows"
                raise UnsupportedError(f"tables '{path}'", wanted, "some on disk")
            yield f"{path}, store {number}", store.weight
