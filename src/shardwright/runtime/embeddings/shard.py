"""``shard_embeddings``: the embeddings of a module, sharded by a plan of tables alone."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.core.block import Block, check_tiling
from shardwright.core.errors import InputError, MismatchError, UnsupportedError, check_type
from shardwright.core.model import ON_DISK, QUANTIZED
from shardwright.core.recording import Pooling
from shardwright.core.sharding import traits
from shardwright.core.tensor import TensorSpec
from shardwright.job.plan import Plan, TablePlan
from shardwright.job.planner import IN_FULL, Communication, trained_communication
from shardwright.runtime.comm import Comm, check_mesh, flat
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
from shardwright.runtime.embeddings.lookup import note_trained
from shardwright.runtime.embeddings.modules import LookupModule, RoutedCollection, RoutedEmbedding
from shardwright.runtime.embeddings.route import Table, cache_of, is_by_rows, make_route
from shardwright.runtime.embeddings.tables import ShardedTables
from shardwright.runtime.guard import Guard
from shardwright.runtime.torch_private import outside_graphs
from shardwright.runtime.units import replicas
from shardwright.runtime.units.flow import Flow
from shardwright.trace.tables import (
    Embedding,
    GivenArguments,
    Reached,
    collected,
    own_reason,
    value_at,
)
from shardwright.tracker.private import in_backward
from shardwright.tracker.tensors import NAMES

_WEIGHTS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class _Found:
    """A table in a module, and where its weight starts; ``names`` are those that a plan may have
    for it."""

    start: InitialWeight
    names: tuple[str, ...]
    pooling: Pooling
    features: tuple[str, ...]

    def planned(self, plan: TablePlan, optimizer: str) -> Table:
        """The table as ``plan`` has it."""
        weight, fqn = self.start.weight, self.start.fqn
        shape = tuple(weight.shape)
        if shape != (plan.rows, plan.dim):
            raise MismatchError(fqn, f"shape ({plan.rows}, {plan.dim}) as planned", str(shape))
        named = plan.optimizer if plan.optimizer != "none" else optimizer
        if not named:
            remedy = "Pass optimizer=..., or name one in the job."
            raise InputError(f"optimizer of {fqn}", "one", "none", remedy)
        dtype = NAMES[weight.dtype]
        replicated = traits(plan.sharding_type).replicated
        return Table(
            fqn,
            plan.name,
            *shape,
            self.features,
            named,
            self.pooling,
            dtype,
            dtype,
            replicated,
            is_by_rows(plan),
            cache_of(plan),
            plan.dedup is True,
        )


def shard_embeddings(
    module: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    *,
    optimizer: str = "",
    learning_rate: float | None = None,
    guard: Guard | None = None,
    overlap: bool = False,
    initial: Initial | None = None,
) -> nn.Module:
    """Replace the embeddings of ``module`` that ``plan`` has tables for by sharded ones.

    Collective. They are ``nn.Embedding``, ``nn.EmbeddingBag``, and TorchRec's
    EmbeddingBagCollection and EmbeddingCollection; a table is found by the path of its embedding,
    that of its weight, or the path's last part, in a collection by its name there. Rank k of the
    plan is the k-th of ``mesh``.
    Rows are updated in the backward, by the mean of ranks' gradients, or with a ``guard`` when that
    is settled; ``optimizer`` is that of tables for which the job names none, ``learning_rate`` by
    default the job's. With ``overlap`` lookups of what ``module`` itself is given begin with its
    forward, and row gradients travel until its backward ends. Everything else of the module stays
    as it is.

    Rows start as the embeddings' weights, each of which is freed once its rows are taken, or on the
    meta device, where no rank ever has a whole table, from ``module.initial_block(fqn, offsets,
    sizes)`` if there is one, else from the embedding's own initialisation. ``initial`` comes before
    all of these: such a function, or a mapping of names of weights to tensors, arrays, which may be
    memory-mapped, or paths of .npy and .safetensors files.

    MismatchError where plan and module do not fit, UnsupportedError for an embedding that no table
    can be.
    """
    _check_given(module, plan, mesh)
    # Rows go to any rank, so replicas of a mesh of two dimensions are ranks like the others.
    mesh = flat(mesh)
    comm = Comm(mesh)
    # Before anything else is exchanged: ranks of other plans would wait for each other.
    comm.agree("shard_embeddings", {"plan": plan.fingerprint})
    parts = _parts_of(module, plan)
    tables = {
        path: [each.planned(named, optimizer) for each, named in own] for path, own in parts.items()
    }
    for path in parts:
        _check_own(path, module.get_submodule(path))
    starts = [each.start for own in parts.values() for each, _ in own]
    facts = facts_of(starts, initial)
    # Weights that differ between ranks are taken part by part: the table would be a mixture of
    # several, and train.
    replicas.agree("shard_embeddings", comm, facts, {each.fqn: each.weight for each in starts})
    blocks_at = initial_blocks(module, starts, initial, comm)
    train = plan.job.train
    rate = train.table_learning_rate or train.learning_rate
    rate = rate if learning_rate is None else learning_rate
    folder = disk_for_tables(plan, comm)

    def make(path: str, own: list[tuple[_Found, TablePlan]]) -> ShardedTables:
        blocks = list(_renamed(plan, {named.name: each.start.fqn for each, named in own}))
        return make_tables(
            tables[path],
            blocks,
            mesh,
            freeing(blocks_at, [each.start for each, _ in own], blocks, comm.rank),
            rate,
            guard=guard,
            folder=folder,
            communication=trained_communication(plan.job.planner.estimator),
        )

    # In one call for all modules: what fails on one rank for want of memory fails on all, before
    # anything of the model is replaced.
    made = filled(comm, lambda: {path: make(path, own) for path, own in parts.items()})
    for path, sharded in made.items():
        sharded.path = path or "tables"
        _freeze(sharded, [each.start for each, _ in parts[path]])
        module = _replaced(module, path, _stand_in(path, module.get_submodule(path), sharded))
    note_trained(module)
    if overlap:
        look_ahead(module)
    return module


def _check_given(module: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Before the first collective, and alike on every rank that has this plan."""
    check_type(plan, Plan, "plan", "read_plan reads a file.")
    check_type(module, nn.Module, "module")
    check_mesh(mesh)
    check_kernels(plan.tables, mesh)
    if mesh.size() != plan.world_size:
        raise MismatchError("mesh", f"{plan.world_size} ranks, as the plan", str(mesh.size()))


def _parts_of(module: nn.Module, plan: Plan) -> dict[str, list[tuple[_Found, TablePlan]]]:
    """Every part of the module with tables of the plan, by its path."""
    left = {table.name: table for table in plan.tables}
    parts: dict[str, list[tuple[_Found, TablePlan]]] = {}
    for path, part in module.named_modules():
        # In the order of named_modules(), so that ranks make their modules of tables, and exchange,
        # in one order.
        found = list(_tables_in(path, part))
        own = [(each, left.pop(name)) for each in found for name in each.names if name in left]
        # A collection is called for all of its tables at once, so all are routed or none.
        if own and len(own) != len(found):
            raise MismatchError(path, f"{len(found)} tables in the plan", str(len(own)))
        if own:
            parts[path] = own
    if left:
        remedy = "Name tables after the paths of embeddings."
        wanted = "an embedding for every table of the plan"
        raise MismatchError("module", wanted, f"none for '{next(iter(left))}'", remedy)
    return parts


def _freeze(sharded: ShardedTables, starts: Iterable[InitialWeight]) -> None:
    """Rows of what was frozen stay as they are."""
    for start in starts:
        if not start.weight.requires_grad:
            sharded.learning.say_of(start.fqn, False)


def make_tables(
    tables: Sequence[Table],
    blocks: Iterable[Block],
    mesh: DeviceMesh,
    initial: InitialBlock,
    learning_rate: float,
    *,
    guard: Guard | None = None,
    folder: Path = Path(),
    communication: Communication = IN_FULL,
) -> ShardedTables:
    """One module of ``tables`` whose parameters lie as ``blocks`` say (collective); rank k of these
    is the k-th of ``mesh``, and ``initial`` gives the starting values of a rectangle. Tables on
    disk lie in ``folder``. ``communication`` are the dtypes that rows and their gradients travel
    in."""
    blocks = list(blocks)
    mesh = flat(mesh)
    shapes = [TensorSpec(table.fqn, (table.rows, table.dim)) for table in tables]
    check_tiling(blocks, shapes, mesh.size())
    route = make_route(tables, blocks, mesh.size())
    # Of no units: it is where a guard is asked for, as for tables beside units.
    flow = Flow(0, guard)
    return ShardedTables(
        tables,
        route,
        Comm(mesh),
        initial,
        learning_rate,
        flow,
        path="tables",
        folder=folder,
        communication=communication,
    )


def check_kernels(tables: Iterable[TablePlan], mesh: DeviceMesh) -> None:
    """UnsupportedError for a kernel that does not run on the devices of ``mesh``."""
    known = ("fused", "dense", *((ON_DISK,) if mesh.device_type == "cpu" else ()))
    for table in tables:
        if table.compute_kernel not in known:
            wanted = f"a kernel of {', '.join(known)} on {mesh.device_type}"
            remedy = "Plan it with one of these as its compute_kernels."
            if table.compute_kernel in QUANTIZED:
                remedy = "One process looks rows of bytes up: examples/packing.py."
            raise UnsupportedError(table.fqn, wanted, table.compute_kernel, remedy)


def _tables_in(path: str, part: nn.Module) -> Iterator[_Found]:
    """The tables of an embedding, or of a collection of them."""
    above = f"{path}." if path else ""
    if isinstance(part, Embedding):
        names = (path, f"{above}weight", path.rpartition(".")[2])
        pooling: Pooling = "none"
        if isinstance(part, nn.EmbeddingBag):
            pooling = "mean" if part.mode == "mean" else "sum"
        start = InitialWeight(f"{above}weight", part)
        yield _Found(start, tuple(dict.fromkeys(names)), pooling, (path or "weight",))
        return
    for each in collected(part):
        owner, _, name = each.inside.rpartition(".")
        start = InitialWeight(f"{above}{each.inside}", part.get_submodule(owner), name, each.start)
        yield _Found(start, (each.name,), each.pooling, each.features)


def _check_own(path: str, part: nn.Module) -> None:
    """UnsupportedError for an embedding that no table can be."""
    if isinstance(part, Embedding) and (reason := own_reason(part, _WEIGHTS, frozen=True)):
        wanted = "an embedding that a table can be"
        raise UnsupportedError(f"embedding '{path}'", wanted, f"one {reason}")


def _stand_in(path: str, part: nn.Module, sharded: ShardedTables) -> nn.Module:
    if isinstance(part, Embedding):
        return RoutedEmbedding(path, part, sharded, sharded.features[0].name)
    return RoutedCollection(sharded, part)


def _renamed(plan: Plan, names: Mapping[str, str]) -> Iterator[Block]:
    """The blocks of some tables, by the names of their parameters."""
    fqns = {table.fqn: names[table.name] for table in plan.tables if table.name in names}
    for block in plan.expanded():
        if block.tensor in fqns:
            yield msgspec.structs.replace(block, tensor=fqns[block.tensor])


def _replaced(module: nn.Module, path: str, part: Any) -> nn.Module:
    if not path:
        return part
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, part)
    return module


# Lookups begin with the forward of the whole model, so that rows travel while what comes before
# them computes; their ids may have travelled while the batch before was computed.


class Ahead:
    """The lookups of a model that begin with its forward.

    They are those of modules of tables that get what the model was given: the first forward tells,
    and all ranks have to have seen the same. It holds no module.
    """

    def __init__(self, model: nn.Module) -> None:
        self.given: dict[str, GivenArguments] = {}
        self._first: Reached | None = Reached(model, dict(_lookup_modules(model)))
        self._around: Any = model.register_forward_hook(self._learn)
        model.register_forward_pre_hook(self._begin, with_kwargs=True)

    @outside_graphs
    def _begin(self, model: nn.Module, arguments: Any, keywords: Any) -> None:
        if not in_backward():
            for part, given in self._found(model, (arguments, keywords)):
                part.rows_of().start(given)

    def ask(self, model: nn.Module, arguments: Any, keywords: Any) -> None:
        """Let the ids of a forward to come travel."""
        for part, given in self._found(model, (arguments, keywords)):
            part.rows_of().ask(given)

    def _found(self, model: nn.Module, call: tuple[Any, Any]) -> Iterator[tuple[LookupModule, Any]]:
        """What every module of tables is going to be given in a ``call`` of the model."""
        for path, given in self.given.items():
            try:
                values = [value_at(call, place) for place in given.arguments]
                named = {key: value_at(call, place) for key, place in given.keywords}
            except KeyError:  # the model is called in another way, on all ranks
                continue
            part: Any = model.get_submodule(path) if path else model
            yield part, part.prepared(*values, **named)

    @outside_graphs
    def _learn(self, model: nn.Module, *_: Any) -> None:
        """The first forward is over (collective)."""
        first, self._first = self._first, None
        if first is None:
            return
        # Once: what a model hands to its tables is looked for in its first forward only.
        self._around.remove()
        first.remove()
        parts: dict[str, Any] = dict(_lookup_modules(model))
        found = {p: given for p, given in first.found.items() if parts[p].rows_of().travels}
        tables = next((part.rows_of() for part in parts.values()), None)
        if tables is None or tables.comm.size == 1:
            return
        # Not hash(), which is another number in every process.
        number = zlib.crc32(repr(sorted(found.items())).encode())
        seen = torch.tensor([number], device=tables.device)
        # A rank that begins other lookups with its forward would be in other exchanges than the
        # rest.
        if not tables.comm.differs("what begins with a forward", seen, everywhere=True):
            self.given = found


_of: WeakKeyDictionary[nn.Module, Ahead] = WeakKeyDictionary()


def look_ahead(model: nn.Module) -> None:
    """Let the lookups of ``model`` begin with its forward, and gradients of rows travel while a
    backward goes on."""
    for part in model.modules():
        if isinstance(part, ShardedTables):
            part.overlap = True
    _of[model] = Ahead(model)


def start_sparse_data_dist(model: nn.Module, *arguments: Any, **keywords: Any) -> None:
    """Let the ids of the next batch travel while this one is computed (collective)::

        sw.start_sparse_data_dist(model, *following)  # what the next forward is going to be given
        loss_of(model(*batch)).backward()

    ``model`` is what ``apply`` or ``shard_embeddings`` returned with ``overlap``. Call it on every
    rank or on none, with the very objects that the forward gets; without a next batch, not at all.
    Ids that are no rows are named by that forward. The first forward tells where ids are among its
    arguments, so nothing travels before it.
    """
    ahead = _of.get(model)
    if ahead is None:
        wanted = "one that overlaps its exchanges"
        remedy = "Pass overlap=True to shard_embeddings, or plan with train.overlap."
        raise InputError("model", wanted, type(model).__name__, remedy)
    ahead.ask(model, arguments, keywords)


def _lookup_modules(model: nn.Module) -> Iterator[tuple[str, LookupModule]]:
    """The modules that a model calls to look rows up, by path."""
    inside: set[nn.Module] = set()
    for path, part in model.named_modules():
        if isinstance(part, LookupModule) and part not in inside:
            inside.update(part.modules())
            yield path, part
