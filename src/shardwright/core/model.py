"""A model as a plan sees it: tables reached by route, dense units reached by gather, and the work
of one step. Free of torch.

A step visits the stages in order and then in reverse. What a stage allocates is told per sample,
so one description serves every batch size.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from shardwright.core.tensor import TensorSpec, element_bytes
from shardwright.core.timeline import Kind

ShardingType = Literal[
    "data_parallel",
    "table_wise",
    "column_wise",
    "row_wise",
    "table_row_wise",
    "table_column_wise",
    "grid_shard",
]
ComputeKernel = Literal[
    "dense",
    "fused",
    "fused_uvm",
    "fused_uvm_caching",
    "key_value",
    "quant",
    "quant_uvm",
    "quant_uvm_caching",
]
TableOptimizer = Literal["none", "sgd", "adam", "adagrad", "rowwise_adagrad"]
DenseOptimizer = Literal["sgd", "adagrad", "adam"]


class CacheSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a table that lives in slower memory is cached.

    ``load_factor`` is the cached share of its rows; ``stats`` are the expected lookups of a step,
    the cacheability from 0 to 1 and the miss rate of a cache of size 0, which falls linearly to
    none at a load factor of 1. ``passes`` is how many passes a prefetch takes.
    """

    load_factor: float | None = None
    prefetch_pipeline: bool | None = None
    passes: int | None = None
    stats: tuple[float, float, float] | None = None


class TableSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An embedding table of ``rows`` x ``dim`` and the traffic that one sample sends to it.

    There is a pooling factor (ids per bag), a number of bags per sample and, where ``batch_sizes``
    says so, a batch size for each feature that reads the table. ``sharding_types``,
    ``compute_kernels`` and ``min_partition`` (the narrowest column shard) limit the choice.
    """

    name: str
    rows: int
    dim: int
    fqn: str = ""
    dtype: str = "fp32"
    optimizer: TableOptimizer | None = None
    pooled: bool = True
    pooling_factors: tuple[float, ...] = (1.0,)
    num_poolings: tuple[float, ...] | None = None
    batch_sizes: tuple[int, ...] | None = None
    output_dtype: str | None = None
    module_weighted: bool = False
    constraint_weighted: bool = False
    sharding_types: tuple[ShardingType, ...] | None = None
    compute_kernels: tuple[ComputeKernel, ...] | None = None
    min_partition: int | None = None
    cache: CacheSpec | None = None
    kv_l1_mb: int | None = None

    @property
    def poolings(self) -> tuple[float, ...]:
        """Bags per sample of each feature; 1 where nothing is said."""
        return self.num_poolings or (1.0,) * len(self.pooling_factors)

    @property
    def tensor(self) -> TensorSpec:
        """The table's weight."""
        return TensorSpec(self.fqn or self.name, (self.rows, self.dim), self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole weight."""
        return self.rows * self.dim * element_bytes(self.dtype)


class UnitSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dense parameters that are gathered, reduced and updated together, in execution order.

    Neighbours with the same ``series`` may be merged into one unit; with none a unit stays alone.
    """

    name: str
    tensors: tuple[TensorSpec, ...]
    optimizer: DenseOptimizer = "sgd"
    series: str = ""


class Allocation(msgspec.Struct, frozen=True):
    """Memory an operation takes: ``per_sample`` bytes for each sample plus ``fixed`` bytes."""

    name: str
    kind: Kind
    per_sample: int
    fixed: int = 0

    def nbytes(self, batch_size: int) -> int:
        """Bytes for a batch of ``batch_size`` samples."""
        return self.per_sample * batch_size + self.fixed


class Work(msgspec.Struct, frozen=True):
    """One operation: it takes its allocations, computes, then frees allocations by name."""

    name: str
    flops_per_sample: int = 0
    takes: tuple[Allocation, ...] = ()
    frees: tuple[str, ...] = ()


class Stage(msgspec.Struct, frozen=True):
    """A part of the step: ``gather`` stages name a unit, ``route`` stages stand for the tables."""

    name: str
    access: Literal["gather", "route", "none"]
    forward: tuple[Work, ...] = ()
    backward: tuple[Work, ...] = ()


class ModelSpec(msgspec.Struct, frozen=True):
    """Tables, dense units, and the stages of a step in forward order."""

    kind: str
    tables: tuple[TableSpec, ...]
    units: tuple[UnitSpec, ...]
    stages: tuple[Stage, ...]
    inputs: tuple[Allocation, ...] = ()
    buffers: tuple[TensorSpec, ...] = ()

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Every parameter, tables first."""
        dense = tuple(tensor for unit in self.units for tensor in unit.tensors)
        return tuple(table.tensor for table in self.tables) + dense

    def table(self, name: str) -> TableSpec:
        """A table by name or fqn."""
        return next(t for t in self.tables if name in (t.name, t.fqn))

    def unit(self, name: str) -> UnitSpec:
        """A dense unit by name."""
        return next(u for u in self.units if u.name == name)
