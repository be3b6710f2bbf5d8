"""A model as a plan sees it: tables reached by route, and a recorded step with dense units that are
reached by gather. Free of torch.
"""

# Planner, clock, heap and report all see a model through this and nothing else. It imports no
# torch and holds no module: a plan made on one machine is explained on another that has neither.
# What is derived (units, the unfolded step) is found once and kept, for a search asks thousands of
# times.

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from shardwright.core.bucketing import in_buckets
from shardwright.core.optimizers import OptimizerName, TableOptimizer
from shardwright.core.recording import Pooling, Recording, Unfolded
from shardwright.core.sharding import ShardingType
from shardwright.core.tensor import TensorSpec, element_bytes

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


PoolingType = Literal["sum", "mean"]
Zipf = Annotated[float, msgspec.Meta(ge=0, le=10)]

# A cache of rows keeps the slot of every row as int32, and of every slot its row and last use as
# int64: as fbgemm's.
QUANTIZED: tuple[ComputeKernel, ...] = ("quant", "quant_uvm", "quant_uvm_caching")  # of inference
DENSE: ComputeKernel = "dense"  # the kernel of replicas with a dense gradient
ON_DISK: ComputeKernel = "key_value"  # of tables whose rows lie on disk
INDEX_BYTES_PER_ROW = 4
STATE_BYTES_PER_SLOT = 16


class CacheSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a table that lives in slower memory is cached.

    Attributes:
        load_factor: the cached share of its rows, from 0 to 1
        prefetch_pipeline: whether rows are fetched ahead of the step that reads them
        passes: passes that a prefetch takes
        stats: expected lookups of a step, the cacheability from 0 to 1, and the miss rate of a
            cache of size 0, which falls linearly to none at a load factor of 1
    """

    load_factor: float | None = None
    prefetch_pipeline: bool | None = None
    passes: int | None = None
    stats: tuple[float, float, float] | None = None


KindName = Literal[
    "full", "hash", "double_hash", "qr", "mixed_dim", "memcom", "tt", "dhe", "robe", "int8", "int4"
]
Ids = Annotated[int, msgspec.Meta(ge=1, le=2**40)]
Size = Annotated[int, msgspec.Meta(ge=1, le=2**16)]


class KindKeys(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """How the rows of an embedding are made (``core/kinds.py``), and what of it can be said.

    Attributes:
        kind (that of ``[embeddings]``, else ``"full"``): how its rows are made: ``"full"``,
            ``"hash"``, ``"double_hash"``, ``"qr"``, ``"mixed_dim"``, ``"memcom"``, ``"tt"``,
            ``"dhe"``, ``"robe"``, for inference ``"int8"``, ``"int4"``, [see
            below](#kinds-of-embeddings)
        collisions, operation (4, ``"mult"``): of ``hash``, ``double_hash``, ``qr``, ``memcom``: ids
            that share a row, of ``robe`` a number; of ``qr`` how rows are combined: ``"mult"``,
            ``"add"``, ``"concat"``
        width, rank, block (by ``temperature``, 16, ``dim``): columns of ``mixed_dim``; rank of
            ``tt``; numbers that ``robe`` finds at a time, a divisor of ``dim``
        hashes, hidden, layers (1024, 1800, 5): of ``dhe``: hashes of an id, width and number of its
            network's layers
    """

    kind: KindName | UnsetType = UNSET
    collisions: Ids | UnsetType = UNSET
    operation: Literal["mult", "add", "concat"] | UnsetType = UNSET
    width: Size | UnsetType = UNSET
    rank: Size | UnsetType = UNSET
    hashes: Size | UnsetType = UNSET
    hidden: Size | UnsetType = UNSET
    layers: Annotated[int, msgspec.Meta(ge=2, le=100)] | UnsetType = UNSET
    block: Size | UnsetType = UNSET


class TableSpec(KindKeys, frozen=True, forbid_unknown_fields=True):
    """An embedding table of ``rows`` x ``dim`` and the traffic that one sample sends to it.

    Attributes:
        name: letters, digits, underscores; of tables alone, anything without white space
        rows, dim: size; with ``interaction = "dot"`` every table has the same ``dim``
        dtype: of the weights: a DLRM trains ``"fp32"``, ``"fp16"`` and ``"bf16"``, the latter with
            [states, sums and updates in fp32](runtime.md#tables) and ``kind = "full"``
        optimizer (from ``train.optimizer``; of tables alone ``"none"``): ``"sgd"``, ``"adagrad"``,
            ``"rowwise_adagrad"``, ``"adam"``, ``"partial_rowwise_adam"``; of tables alone also
            ``"none"``
        sharding_types (all): which of ``data_parallel``, ``table_wise``, ``row_wise``,
            ``column_wise``, ``table_row_wise``, ``table_column_wise``, ``grid_shard`` may be
            chosen. Of a model that is trained the last three have to be named where all ranks are
            one host, and so has ``column_wise`` for an optimizer with one number a row. A key that
            leaves a table nothing that can be planned is refused, with what ``--why-not`` says of
            it; columns that cannot be cut are one shard with TorchRec's costs or options alone, and
            a note says so
        compute_kernels (all): ``"dense"`` for replicas, ``"fused"`` for those of which a step looks
            few rows up; ``"fused"``, ``"fused_uvm"``, ``"fused_uvm_caching"``, ``"key_value"`` for
            routed tables; what is trained runs ``dense``, ``fused`` and, on a CPU where it is named
            here and ``cluster.ssd_cap`` is given, [``key_value``](planner.md#tables-on-disk)
        min_partition (4; half of ``dim`` for a DLRM; 128 with ``options = "torchrec"``): the
            narrowest column shard
        pooled, pooling_factors, num_poolings (``true``, ``[1.0]``, ones): bags or plain embeddings;
            ids per bag and bags per sample of each feature. The interaction of a DLRM takes one row
            of each feature and sample, so it has no sequences and one bag, that of a feature:
            several are several ``features``
        features (the table's ``name``): names of the features that read the table, one for each
            pooling factor: columns of a log
        zipf (that of ``data``): the exponent of the popularity of the table's ids, as ``shardwright
            inspect`` finds it in a log: a plan's peak counts how many of a step's rows are
            different
        pooling_type (``"sum"``): ``"sum"`` or ``"mean"`` of the rows of a bag
        batch_sizes (``batch.size``): samples of each feature; of a DLRM there is no other than
            ``batch.size``
        output_dtype (``dtype``; of a DLRM ``"fp32"``, for it computes in that): of the rows that
            come back
        module_weighted, constraint_weighted: weighted ids: of a pooled table (and of the DLRM that
            is trained), of a sequence
        cache: of a table in slower memory: what of it is cached
        kv_l1_mb: largest cache of a ``key_value`` table, MiB
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
    features: tuple[str, ...] | UnsetType = UNSET
    pooling_type: PoolingType | UnsetType = UNSET
    zipf: Zipf | UnsetType = UNSET

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of what reads the table: its own where nothing is said, numbered if there are
        several."""
        if self.features is not UNSET:
            return self.features
        several = len(self.pooling_factors) > 1
        return tuple(
            f"{self.name}_{i}" if several else self.name for i in range(len(self.pooling_factors))
        )

    @property
    def pooling(self) -> Pooling:
        """What becomes of the rows of a bag; without one each stays."""
        if not self.pooled:
            return "none"
        return "sum" if self.pooling_type is UNSET else self.pooling_type

    @property
    def weighted(self) -> bool:
        """Whether its ids carry weights; what a module says is of its bags."""
        return self.constraint_weighted or (self.module_weighted and self.pooled)

    @property
    def jagged(self) -> bool:
        """Whether bags are pooled that have not one id each."""
        return self.pooled and any(length != 1.0 for length in self.pooling_factors)

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
    ``modules`` are the paths of its modules, and ``members`` the recorded units that it is made of;
    ``frozen`` names tensors without gradients. Of its modules those ``checkpointed`` ran under the
    policy ``checkpointing``.
    """

    name: str
    tensors: tuple[TensorSpec, ...]
    optimizer: OptimizerName = "sgd"
    series: str = ""
    modules: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    checkpointing: str = "none"
    checkpointed: tuple[str, ...] = ()


ROOT = "root"  # what is in no other unit is one of its own


class ModelSpec(msgspec.Struct, frozen=True, dict=True):
    """Tables, and the recording of a step with its dense units; tables alone have none. With a
    ``bucket_size`` the units of the step are buckets of so many elements."""

    kind: str
    tables: tuple[TableSpec, ...]
    recording: Recording | None = None
    optimizer: OptimizerName = "sgd"
    bucket_size: int = 0

    @property
    def is_trained(self) -> bool:
        """Whether there is a step to plan, not tables alone."""
        return self.recording is not None

    @cached_property
    def step(self) -> Unfolded:
        """The recording at its full depth."""
        found = self.recording or Recording((), ())
        return Unfolded(in_buckets(found, self.bucket_size) if self.bucket_size else found)

    @cached_property
    def known(self) -> dict[bytes, Any]:
        """What was worked out of it, by the job that it was for."""
        return {}

    @cached_property
    def units(self) -> tuple[UnitSpec, ...]:
        """Dense units in the order in which their forwards begin."""
        found = self.step.units.items()
        root = ROOT if ROOT not in self.step.units else f"({ROOT})"
        return tuple(
            UnitSpec(
                name=name or root,
                tensors=u.tensors,
                optimizer=self.optimizer,
                series=u.series,
                modules=u.modules,
                members=(name,),
                frozen=u.frozen,
                checkpointing=u.checkpointing or "none",
                checkpointed=(u.checkpointed or u.modules) if u.checkpointing else (),
            )
            for name, u in found
            if u.tensors
        )

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Every parameter, tables first."""
        dense = tuple(tensor for unit in self.units for tensor in unit.tensors)
        return tuple(table.tensor for table in self.tables) + dense

    def units_of(self, members: Collection[str]) -> tuple[UnitSpec, ...]:
        """The units that a unit of these ``members`` is made of."""
        return tuple(unit for unit in self.units if set(unit.members) <= set(members))

    def table(self, name: str) -> TableSpec:
        """A table by name or fqn."""
        return next(t for t in self.tables if name in (t.name, t.fqn))

    def unit(self, name: str) -> UnitSpec:
        """A dense unit by name."""
        return next(u for u in self.units if u.name == name)
