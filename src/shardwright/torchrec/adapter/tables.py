"""The tables of a TorchRec model, read without touching their data: a model on "meta" will do."""

# TorchRec's own planner is handed the same model, sharders and constraints, so everything is read
# where it would look: a constraint, then fused parameters, then defaults. What its runtime cannot
# run is left out here, since its planner would not find out either: the process would die in a
# kernel, or go on with wrong sums. Only shapes are read, for a model on "meta" has nothing else.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import nn
from torchrec import optim
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import CacheParams, ModuleSharder
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)

from shardwright.core.errors import InputError, UnsupportedError, expected
from shardwright.core.model import CacheSpec, ComputeKernel, TableSpec
from shardwright.core.optimizers import TableOptimizer
from shardwright.core.option import column_width, column_widths, row_runs
from shardwright.core.sharding import TYPES, ShardingType, traits
from shardwright.job.plan import Plan
from shardwright.planner.options import USUAL_MIN_PARTITION
from shardwright.torchrec.profile import TYPES_ON_REQUEST
from shardwright.tracker.tensors import NAMES

OPTIMIZER_CLASSES: dict[type, TableOptimizer] = {
    torch.optim.SGD: "sgd",
    optim.SGD: "sgd",
    torch.optim.Adam: "adam",
    optim.Adam: "adam",
    optim.RowWiseAdagrad: "rowwise_adagrad",
}
FUSED_OPTIMIZERS: dict[str, TableOptimizer] = {
    "none": "none",
    "sgd": "sgd",
    "exact_sgd": "sgd",
    "adam": "adam",
    "row_wise_adagrad": "rowwise_adagrad",
    "exact_row_wise_adagrad": "rowwise_adagrad",
}
ONE_STATE: TableOptimizer = "adagrad"  # of any other: a state as large as the table
BAGS = (EmbeddingBagCollection, FusedEmbeddingBagCollection)
ROWS = (EmbeddingCollection, FusedEmbeddingCollection)

Constraints = Mapping[str, ParameterConstraints]
Sharders = Sequence[ModuleSharder[nn.Module]]


@dataclass(frozen=True)
class TorchRecTable:
    """A table of a model: ``name`` in the module at ``module_path``, and who shards that module.

    ``spec`` is what a plan needs to know: its name is unique among all tables, its fqn that of the
    parameter, and its limits those of ``constraint``. ``is_averaged`` of a table whose bags are,
    beside others in its module.
    """

    spec: TableSpec
    name: str
    module_path: str
    sharder: ModuleSharder[nn.Module]
    constraint: ParameterConstraints | None
    is_averaged: bool = False


def read_tables(
    module: nn.Module,
    sharders: Sharders | None = None,
    constraints: Constraints | None = None,
    device: str = "cuda",
) -> tuple[TorchRecTable, ...]:
    """Every table that TorchRec would shard on ``device``, in the order the model declares them.

    A table without a constraint gets one id per sample for each of its features; TorchRec counts
    only one feature there.

    :raises UnsupportedError: a module that can be sharded holds other tables than those of
        EmbeddingBagCollection and EmbeddingCollection, fused or with processors of features.
    """
    found = []
    for path, outer, sharder in sharded_modules(module, sharders):
        parameters = sharder.shardable_parameters(outer)
        child, inside = _collection(outer)
        if parameters:
            configs = _configs(path, child)
            for name, parameter in parameters.items():
                constraint = (constraints or {}).get(name)
                if constraint and constraint.device_group not in (None, device):
                    continue
                config = configs[name]
                place = f"{path}{inside}".lstrip(".")
                spec = _spec(place, child, sharder, config, parameter, constraint)
                averaged = len(configs) > 1 and spec.pooled and config.pooling is PoolingType.MEAN
                found.append(TorchRecTable(spec, name, path, sharder, constraint, averaged))
    return _named_apart(found)


def sharded_modules(
    module: nn.Module, sharders: Sharders | None = None
) -> Iterator[tuple[str, nn.Module, ModuleSharder[nn.Module]]]:
    """Path, module and sharder of each outermost module that has a sharder."""
    known = {sharder.module_type: sharder for sharder in sharders or get_default_sharders()}
    # Depth first in the order of declaration, and not into a module that has a sharder: tables
    # inside of it are the sharder's.
    waiting = [("", module)]
    while waiting:
        path, child = waiting.pop()
        sharder = known.get(type(child))
        if sharder is not None:
            yield path, child, sharder
            continue
        inner = [(f"{path}.{name}" if path else name, m) for name, m in child.named_children()]
        waiting.extend(reversed(inner))


def _collection(module: nn.Module) -> tuple[nn.Module, str]:
    """The collection of tables in a module that is sharded, and its path there."""
    # The only module that holds its tables one step further down; the sharder takes it as a whole.
    if isinstance(module, FeatureProcessedEmbeddingBagCollection):
        return module._embedding_bag_collection, "._embedding_bag_collection"
    return module, ""


def _configs(path: str, module: nn.Module) -> dict[str, Any]:
    """The configuration of each table of a module by name."""
    where = f"module '{path}'"
    if isinstance(module, BAGS):
        configs = module.embedding_bag_configs()
    elif isinstance(module, ROWS):
        configs = module.embedding_configs()
    else:
        wanted = "an EmbeddingBagCollection or an EmbeddingCollection"
        remedy = "Leave its sharder out, or plan it by TorchRec's own planner."
        raise UnsupportedError(where, wanted, type(module).__name__, remedy)
    for config in configs:
        if config.use_virtual_table:
            wanted = "tables with rows of their own"
            raise UnsupportedError(where, wanted, f"virtual table '{config.name}'")
    return {config.name: config for config in configs}


def _spec(
    path: str,
    module: nn.Module,
    sharder: ModuleSharder[nn.Module],
    config: Any,
    parameter: nn.Parameter,
    constraint: ParameterConstraints | None,
) -> TableSpec:
    rows, dim = parameter.shape
    pooled = isinstance(module, BAGS)
    part = "embedding_bags" if pooled else "embeddings"
    fused = getattr(sharder, "fused_params", None) or {}
    limits: dict[str, Any] = {}
    if constraint is not None:
        limits = {
            "num_poolings": _tuple(constraint.num_poolings),
            "batch_sizes": _tuple(constraint.batch_sizes),
            "output_dtype": constraint.output_dtype and constraint.output_dtype.value.lower(),
            "constraint_weighted": bool(constraint.is_weighted),
            "sharding_types": _tuple(constraint.sharding_types),
            "compute_kernels": _tuple(constraint.compute_kernels),
            "min_partition": constraint.min_partition,
            "kv_l1_mb": _l1_megabytes(constraint),
        }
    return TableSpec(
        name=config.name,
        rows=rows,
        dim=dim,
        fqn=".".join(filter(None, (path, part, config.name, "weight"))),
        dtype=NAMES.get(parameter.dtype, str(parameter.dtype)),
        optimizer=_optimizer(f"table '{config.name}'", module, parameter, fused),
        pooled=pooled,
        pooling_factors=_pooling_factors(constraint, len(config.feature_names) or 1),
        module_weighted=isinstance(module, BAGS) and module.is_weighted(),
        cache=_cache(constraint.cache_params if constraint else None, fused),
        **limits,
    )


def _tuple(values: Sequence[Any] | None) -> tuple[Any, ...] | None:
    return tuple(values) if values else None


def _pooling_factors(constraint: ParameterConstraints | None, features: int) -> tuple[float, ...]:
    """Ids per sample of each feature; TorchRec's default, a single 1, says nothing."""
    if constraint is None:
        return (1.0,) * features
    given = tuple(float(factor) for factor in constraint.pooling_factors)
    # A constraint that limits sharding types has this default too: it says nothing of the features.
    silent = given == (1.0,) and not constraint.num_poolings and not constraint.batch_sizes
    return (1.0,) * features if silent else given


def _optimizer(
    where: str, module: nn.Module, parameter: nn.Parameter, fused: Mapping[str, Any]
) -> TableOptimizer | None:
    """What updates the table: that of a fused module, the parameter's own, else the kernel's."""
    # From the nearest to the farthest: a fused module is updated by its own optimizer whatever the
    # sharder says.
    if isinstance(module, FusedEmbeddingBagCollection | FusedEmbeddingCollection):
        return OPTIMIZER_CLASSES.get(module.optimizer_type(), ONE_STATE)
    classes = [c for c in getattr(parameter, "_optimizer_classes", ()) if c is not None]
    if len(classes) > 1:
        raise InputError(where, "one optimizer", ", ".join(c.__name__ for c in classes))
    if classes:
        return OPTIMIZER_CLASSES.get(classes[0], ONE_STATE)
    if "optimizer" in fused:
        return FUSED_OPTIMIZERS.get(str(fused["optimizer"]), ONE_STATE)
    return None


def _cache(given: CacheParams | None, fused: Mapping[str, Any]) -> CacheSpec | None:
    """The table's own cache parameters, else those of its sharder."""
    cache = given or CacheParams()
    load_factor = cache.load_factor or fused.get("cache_load_factor")
    passes = cache.multipass_prefetch_config or fused.get("multipass_prefetch_config")
    stats = None
    if cache.stats is not None:
        share = load_factor or 0.0
        # Statistics give the rate at one size of cache; formulas want that of an empty one, from
        # which it falls in a line.
        misses = cache.stats.expected_miss_rate(share) / (1 - share) if share < 1 else 0.0
        stats = (cache.stats.expected_lookups, cache.stats.cacheability, misses)
    found = CacheSpec(
        load_factor=load_factor,
        prefetch_pipeline=cache.prefetch_pipeline or fused.get("prefetch_pipeline"),
        passes=passes.num_passes if passes else None,
        stats=stats,
    )
    return None if found == CacheSpec() else found


def _l1_megabytes(constraint: ParameterConstraints) -> int | None:
    parameters = constraint.key_value_params
    return getattr(parameters, "max_l1_cache_size", None)


def _named_apart(tables: Sequence[TorchRecTable]) -> tuple[TorchRecTable, ...]:
    """Tables of one name in several modules get their module's path in front."""
    # TorchRec's plan is by module, ours by name of table: only names that clash are changed, so
    # that others are found as the model has them.
    names = [table.spec.name for table in tables]
    return tuple(
        table
        if names.count(table.spec.name) == 1
        else replace(
            table,
            spec=msgspec.structs.replace(table.spec, name=f"{table.module_path}.{table.spec.name}"),
        )
        for table in tables
    )


KERNELS: dict[str, tuple[ComputeKernel, ...]] = {
    "cpu": ("dense", "fused"),
    "cuda": ("dense", "fused", "fused_uvm", "fused_uvm_caching"),
}
GUARDED_KERNELS: tuple[ComputeKernel, ...] = ("key_value",)
COLUMNS = 4  # a fused kernel's rows are multiples of
NARROWEST = 32  # columns; a lookup of fewer costs TorchRec as much, and its kernels too


@dataclass(frozen=True)
class Hardware:
    """``world`` ranks of one kind of device, ``ssd`` bytes each; ``group`` of them are linked."""

    device: str
    world: int
    group: int
    ssd: int = 0


def limited(table: TorchRecTable, hardware: Hardware, *, lean: bool) -> TableSpec:
    """The table with the types and kernels that may be chosen for it.

    ``lean``: without types of which another one covers every placement at the same cost, and
    without column shards that are too narrow, unless the table's constraint names them.

    :raises InputError: nothing is left.
    """
    spec = table.spec
    offered = table.sharder.sharding_types(hardware.device)
    named: tuple[str, ...] = spec.sharding_types or ()
    types = [t for t in TYPES if t in (named or offered) and t in offered]
    types = [t for t in types if named or t not in TYPES_ON_REQUEST]
    types = [t for t in types if _runs(t, spec, hardware)]
    # Row shards give sums, which have to be divided by lengths afterwards. TorchRec does that for
    # all tables of a module or for none, so averaged tables are not cut by rows unless somebody
    # asks for it.
    if table.is_averaged and not named:
        types = [t for t in types if not traits(t).cuts_rows]
    if lean and spec.min_partition is None:
        spec = msgspec.structs.replace(spec, min_partition=NARROWEST)
    # Fewer options and the same best plan: a type that another one covers at the same cost makes
    # the search longer and nothing better.
    if lean and not named:
        types = [t for t in types if not _covered(t, types, spec, hardware)]
    kernels = _kernels(table, types, hardware)
    if not types or not kernels:
        raise InputError(_nothing_left(table, hardware))
    changed: dict[str, Any] = {"sharding_types": tuple(types)}
    if spec.compute_kernels or set(kernels) != set(KERNELS[hardware.device]):
        changed["compute_kernels"] = kernels
    return msgspec.structs.replace(spec, **changed)


def check_averages(plan: Plan, tables: Sequence[TorchRecTable]) -> None:
    """UnsupportedError where averages of one table would be taken of the sums of another."""
    types = {table.name: table.sharding_type for table in plan.tables}
    whole = {t.module_path: t for t in tables if not traits(types[t.spec.name]).cuts_rows}
    for table in tables:
        other = whole.get(table.module_path)
        if table.is_averaged and traits(types[table.spec.name]).cuts_rows and other:
            kind, beside = types[table.spec.name], types[other.spec.name]
            raise UnsupportedError(
                f"table '{table.spec.name}'",
                f"a type that cuts no rows, for TorchRec divides the sums of "
                f"'{other.spec.name}' ({beside}) too where averaged bags are cut by rows",
                kind,
                "Constrain all tables of the module to types that cut rows, or this one to "
                "types that do not.",
            )


def _runs(sharding_type: ShardingType, spec: TableSpec, hardware: Hardware) -> bool:
    if traits(sharding_type).replicated:
        return spec.pooled or hardware.device != "cpu"
    # The fused kernels take vectors of four numbers, and fail on others when they run.
    if spec.dim % COLUMNS:
        return False
    if traits(sharding_type).cuts_rows and hardware.device == "cpu":
        parts = traits(sharding_type).row_parts(hardware.world, hardware.group)
        return all(run.rows for run in row_runs(spec.rows, spec.dim, parts))
    return True


def _covered(
    sharding_type: ShardingType, types: list[ShardingType], spec: TableSpec, hardware: Hardware
) -> bool:
    match sharding_type:
        case "column_wise":
            narrowest = column_width(spec, spec.min_partition or USUAL_MIN_PARTITION)
            cuts = column_widths(spec) or narrowest < spec.dim
            return not cuts and "table_wise" in types
        case "table_row_wise":
            return hardware.group >= hardware.world and "row_wise" in types
        case _:
            return traits(sharding_type).freer in types


def _kernels(
    table: TorchRecTable, types: list[ShardingType], hardware: Hardware
) -> tuple[ComputeKernel, ...]:
    named: tuple[str, ...] = table.spec.compute_kernels or ()
    offered = {k for t in types for k in table.sharder.compute_kernels(t, hardware.device)}
    known = KERNELS[hardware.device] + (GUARDED_KERNELS if named and hardware.ssd else ())
    return tuple(k for k in known if k in offered and (k in named or not named))


def _nothing_left(table: TorchRecTable, hardware: Hardware) -> str:
    spec = table.spec
    kind = "pooled" if spec.pooled else "sequence"
    named = [*(spec.sharding_types or ("any type",)), *(spec.compute_kernels or ("any kernel",))]
    remedy = "Widen the table's constraint, or give its module's sharder more types."
    if spec.dim % COLUMNS:
        remedy = f"All types but data_parallel need a dim that is a multiple of {COLUMNS}."
    wanted = (
        f"a sharding type and a kernel that TorchRec runs on {hardware.device} for a {kind} table "
        f"of {spec.rows} x {spec.dim} on {hardware.world} ranks"
    )
    return expected(f"table '{spec.name}'", wanted, ", ".join(named), remedy)
