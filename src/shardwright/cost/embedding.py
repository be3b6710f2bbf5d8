"""Bytes and seconds of a table shard, for numbers, arrays or Amounts alike.

Bytes are exact: they equal what the runtime allocates. Seconds are for one training step of one
rank; ``ids`` are those of one rank's batch, so a whole table sees ``ids * ranks`` of them. Of the
``ranks``, ``local`` are on each host, and all on one where it is None.

Ids go to the shards and rows come back in one exchange between all ranks: shards that are cut by
rows share a table's ids evenly (assumed) and send back at most one partial sum for each bag.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from shardwright.core.amount import ceil, maximum, minimum, named, noted, where
from shardwright.core.batch import INDEX_BYTES
from shardwright.core.cluster import Device, Tier
from shardwright.core.kinds import PACKED, packed_bytes
from shardwright.core.model import DENSE, INDEX_BYTES_PER_ROW, QUANTIZED, STATE_BYTES_PER_SLOT
from shardwright.core.schedule import RIDE_BYTES
from shardwright.core.sharding import traits
from shardwright.core.tensor import ELEMENT_BYTES
from shardwright.cost import network, optimizer


@dataclass(frozen=True, slots=True)
class Cache:
    """A shard's cache: the rows it holds, the miss rate of one that holds none, and the different
    rows that a step of all ranks asks of the whole table."""

    rows: Any
    miss_rate: Any
    distinct: Any


def cached_rows(rows: Any, load_factor: Any, limit: Any) -> Any:
    """Rows that are cached of a shard's ``rows``: a share of them, at most ``limit``."""
    return named("cached_rows", minimum(ceil(rows * load_factor), limit), "rows")


def cache_bytes(rows: Any, cached: Any, row_bytes: Any) -> Any:
    """Bytes of ``cached`` rows and of what finds them among a shard's ``rows``."""
    source = "slot of a row, int32"
    index = noted(INDEX_BYTES_PER_ROW, "index_bytes_per_row", "B", source, like=rows)
    source = "row and last use of a slot, int64"
    state = noted(STATE_BYTES_PER_SLOT, "state_bytes_per_slot", "B", source, like=rows)
    return named("cache_bytes", cached * (row_bytes + state) + rows * index, "B")


def fetched_rows(served: Any, rows: Any, parts: Any, cache: Cache) -> Any:
    """Rows that a shard of ``rows`` rows, one of ``parts``, brings into its cache per step.

    The miss rate falls linearly to none where the cache holds every row.
    """
    share = named("cached_share", cache.rows / maximum(rows, 1))
    missing = named("miss_rate", cache.miss_rate * (1 - share))
    return named("fetched_rows", minimum(served, missing * cache.distinct / parts), "rows")


HOST_KERNELS = ("fused_uvm", "quant_uvm")
CACHED_KERNELS = ("fused_uvm_caching", "quant_uvm_caching", "key_value")
QUANTIZED_KIND = "int8"  # of a table that names a kernel of quantised ones and no kind

# Batches whose ids are on a rank at once, by input pipeline; rows are those of one batch.
INPUTS_IN_FLIGHT = {
    "none": 1,
    "train_base": 1,
    "train_sparse_dist": 2,
    "train_prefetch_sparse_dist": 3,
}


@dataclass(frozen=True, slots=True)
class Demand:
    """What a step asks of a shard of ``rows`` x ``columns``, a row of which takes ``row_bytes``.

    ``ids`` are those of one rank's batch and ``bags`` the rows that it gets back for them; an
    element takes ``forward_bytes`` on its way back and its gradient ``backward_bytes``.
    ``passes`` is how many touches of a row its update costs; ``distinct`` are the different rows
    among a rank's ids, where these alone travel. ``swept`` are those of a table whose update needs
    sums over all its columns, ``dim``, among all ranks' ids; None where it needs none.
    """

    ids: Any
    bags: Any
    rows: Any
    columns: Any
    row_bytes: Any
    forward_bytes: Any
    backward_bytes: Any
    passes: Any
    cache: Cache | None = None
    distinct: Any = 0
    dim: Any = 0
    swept: Any = None


def home(kernel: str, device: Device) -> Tier:
    """The memory that keeps a shard's weights and optimizer states."""
    if kernel == "key_value":
        return "ssd"
    return "ddr" if device == "cpu" or kernel in (*HOST_KERNELS, *CACHED_KERNELS) else "hbm"


def row_bytes(columns: Any, dtype: str, kernel: str) -> Any:
    """Bytes of one row of a shard as it is kept; a quantised row has a scale and an offset."""
    if kernel in QUANTIZED:
        return packed_bytes(columns, dtype if dtype in PACKED else QUANTIZED_KIND)
    size = noted(ELEMENT_BYTES[dtype], "element_bytes", "B", f"dtype {dtype}", like=columns)
    return named("row_bytes", columns * size, "B")


def shard_bytes(
    rows: Any, columns: Any, dtype: str, kind: str, kernel: str, *, training: bool = True
) -> dict[str, Any]:
    """Bytes that a shard keeps, by kind; optimizer ``kind`` has its states only in training.

    The gradient of a dense kernel is as large as the shard in fp32; others update rows in backward.
    """
    weight = named("weight_bytes", rows * row_bytes(columns, dtype, kernel), "B")
    if not training or kernel in QUANTIZED:
        return {"weight": weight}
    gradient = noted(0, "gradient_bytes", "B", "fused: rows are updated in backward", like=rows)
    if kernel == DENSE:
        in_full = weight if dtype == "fp32" else rows * row_bytes(columns, "fp32", kernel)
        gradient = named("gradient_bytes", in_full, "B")
    return {
        "weight": weight,
        "gradient": gradient,
        "optimizer_state": optimizer.table_state_bytes(rows, columns, kind),
    }


def row_parts(sharding_type: str, ranks: Any, local: Any = None) -> Any:
    """How many shards share a table's ids: all ranks, the ranks of a host, or one."""
    kind = traits(sharding_type)
    if kind.cuts_rows:
        return kind.row_parts(ranks, ranks if local is None else local)
    return noted(1, "row_parts", "", f"{sharding_type}: rows are not cut", like=ranks)


def ids_at_shard(ids: Any, rows: Any, ranks: Any, sharding_type: str, local: Any = None) -> Any:
    """Ids that one shard serves per step; a shard of no rows serves none.

    A replica serves its own rank, a shard that is cut by rows its share of all ranks' ids.
    """
    kind = traits(sharding_type)
    served = ids
    # Rows that are cut over the ranks of one host are all there: their shards serve the ids of all
    # ranks, and share these among the host's ranks alone.
    if kind.rows_over == "host" and local is not None:
        served = ids * ranks / local
    # Ids of all ranks come to the one shard of a table that is whole or cut by columns, and so many
    # ids to each of its columns. Shards of rows over all ranks serve as many as a rank asks for.
    elif not (kind.replicated or kind.cuts_rows):
        served = ids * ranks
    return named("ids_at_shard", where(rows > 0, served, 0), "ids")


def rows_sent_back(served: Any, bags: Any, ranks: Any) -> Any:
    """Rows that a shard sends: one for each bag of every rank, and none without an id for it."""
    return named("rows_sent_back", minimum(served, bags * ranks), "rows")


def exchange_bytes(
    demand: Demand,
    sharding_type: str,
    element_bytes: Any,
    batches: Any,
    ranks: Any,
    local: Any = None,
) -> dict[str, Any]:
    """Bytes of the ids that a shard is sent, for ``batches`` at once, and of the rows it returns.

    An element of those rows takes ``element_bytes``. They live for a part of a step.
    """
    served = ids_at_shard(demand.ids, demand.rows, ranks, sharding_type, local)
    returned = minimum(served, demand.bags)
    if not traits(sharding_type).replicated:
        returned = rows_sent_back(served, demand.bags, ranks)
    index = noted(INDEX_BYTES, "index_bytes", "B", "ids travel as int64", like=demand.ids)
    row = named("output_row_bytes", demand.columns * element_bytes, "B")
    return {
        "input": named("input_bytes", ceil(served) * index * batches, "B"),
        "output": named("output_bytes", ceil(returned) * row, "B"),
    }


DEDUP_SORTS = 1.5  # measured on two cores: 1.3 ms more for 53,248 ids, beside 50 ns an id


def request_seconds(ids: Any, sharding_type: str, c: Any, *, dedup: bool = False) -> Any:
    """Seconds that every rank spends to address its own ids of a table, whoever holds it.

    Ids of a table that is cut by rows are sorted by owner; others go to one rank as they are. With
    ``dedup`` all are sorted by row, and what comes back once is handed to each.
    """
    cost = c["sort_cost"] if dedup or traits(sharding_type).cuts_rows else c["index_cost"]
    if dedup:
        source = "a sort by row, with the sums of gradients, in sorts by owner"
        cost = cost * noted(DEDUP_SORTS, "dedup_sorts", "", source, like=ids)
    return named("request_seconds", ids * cost, "s")


def dedup_pays(
    demand: Demand, sharding_type: str, kernel: str, ranks: float, c: Any, local: Any = None
) -> bool:
    """Whether a step takes less where a rank's ``distinct`` rows travel once each; numbers only."""
    columns = demand.columns * (demand.forward_bytes + demand.backward_bytes)
    # What each row that need not travel saves: its number out, its columns back, its gradient in,
    # and a lookup and update at its owner. It has to pay for sorting all ids, not only those that
    # repeat.
    moved = network.transfer_seconds("all_to_all", INDEX_BYTES + columns, ranks, c, local)
    row = moved + touch_seconds(demand, kernel, c) * (1 + demand.passes)
    sorted_, plain = (
        request_seconds(demand.ids, sharding_type, c, dedup=dedup) for dedup in (True, False)
    )
    return bool((demand.ids - demand.distinct) * row > sorted_ - plain)


def bytes_of_sums(demand: Demand, row_parts: Any) -> Any:
    """Bytes of a shard's sums over its columns, one of each row that is updated, to every shard
    that has others; of none where it has them all."""
    shards = named("column_shards", ceil(demand.dim / demand.columns), "shards")
    each = named("bytes_of_sums", demand.swept / row_parts * ELEMENT_BYTES["fp32"], "B")
    return named("sums_to_all", where(shards > 1, each * shards, 0), "B")


def slow_rate(kernel: str, c: Any) -> Any:
    """Bytes per second of the memory that keeps the rows of a kernel that is not all in HBM."""
    if kernel == "key_value":
        return c["ssd_rate"]
    return named("host_memory_rate", minimum(c["host_link_rate"], c["ddr_rate"]), "B/s")


def touch_seconds(demand: Demand, kernel: str, c: Any) -> Any:
    """Seconds to reach one row of a shard, cached if there is a cache."""
    # A cached kernel reads rows from its cache; what is not there is fetched first, which is
    # counted apart.
    rate = slow_rate(kernel, c) if kernel in HOST_KERNELS else c["memory_rate"]
    return named("row_seconds", demand.row_bytes / rate + c["row_latency"], "s")


def shard_seconds(
    demand: Demand,
    sharding_type: str,
    kernel: str,
    ranks: Any,
    c: Any,
    *,
    local: Any = None,
    training: bool = True,
    prefetch: bool = False,
) -> dict[str, Any]:
    """Seconds per step of one shard by phase; ``prefetch`` fills a cache ahead of the lookup.

    ``c`` maps constant names to numbers or Amounts. Latencies of collectives are per step and
    counted by :func:`step_latencies`.
    """
    if traits(sharding_type).replicated:
        return replicated_seconds(demand, kernel, ranks, c, local=local, training=training)
    served = ids_at_shard(demand.ids, demand.rows, ranks, sharding_type, local)
    returned = rows_sent_back(served, demand.bags, ranks)
    index = noted(INDEX_BYTES, "index_bytes", "B", "ids travel as int64", like=served)

    def moved(name: str, nbytes: Any) -> Any:
        return named(name, network.transfer_seconds("all_to_all", nbytes, ranks, c, local), "s")

    out = named("bytes_sent_back", returned * demand.columns * demand.forward_bytes, "B")
    reads, update = _memory_seconds(
        demand, kernel, served, row_parts(sharding_type, ranks, local), c, prefetch
    )
    seconds = {
        "exchange_ids": moved("exchange_ids_seconds", served * index),
        **reads,
        "exchange_rows": moved("exchange_rows_seconds", out),
    }
    if training and kernel not in QUANTIZED:
        back = named("bytes_of_gradients", returned * demand.columns * demand.backward_bytes, "B")
        seconds["reduce"] = moved("exchange_gradients_seconds", back)
        seconds["step"] = update
        if demand.swept is not None:
            parts = row_parts(sharding_type, ranks, local)
            sums = moved("exchange_sums_seconds", bytes_of_sums(demand, parts))
            seconds["step"] = named("step_seconds", update + sums, "s")
    return seconds


def _memory_seconds(
    demand: Demand, kernel: str, served: Any, parts: Any, c: Any, prefetch: bool
) -> tuple[dict[str, Any], Any]:
    """Seconds to read the rows that are asked for, by phase, and to update them.

    What misses a cache is fetched, ahead of the lookup if there is a prefetch, and what it drives
    out is written back with the update. A dense kernel updates every row of its shard.
    """
    touch = touch_seconds(demand, kernel, c)
    update = served * touch * demand.passes
    if kernel == DENSE:
        # A dense gradient has a number for every row, so its optimizer reads and writes the whole
        # shard, one row after the other: no latency of single rows.
        update = demand.rows * demand.row_bytes * demand.passes / c["memory_rate"]
    if kernel not in CACHED_KERNELS:
        lookup = named("lookup_seconds", served * touch, "s")
        return {"lookup": lookup}, named("update_seconds", update, "s")
    assert demand.cache is not None
    fetched = fetched_rows(served, demand.rows, parts, demand.cache)
    crossing = named("fetch_seconds", fetched * demand.row_bytes / slow_rate(kernel, c), "s")
    step = named("update_seconds", update + crossing, "s")
    if prefetch:
        lookup = named("lookup_seconds", served * touch, "s")
        return {"load": named("prefetch_seconds", crossing, "s"), "lookup": lookup}, step
    hits = named("hits", served - fetched, "rows")
    return {"lookup": named("lookup_seconds", hits * touch + crossing, "s")}, step


def replicated_seconds(
    demand: Demand, kernel: str, ranks: Any, c: Any, *, local: Any = None, training: bool = True
) -> dict[str, Any]:
    """Seconds of one replica by phase: local lookups; then of a dense kernel an all-reduce and an
    update of the whole table, of others rows with their numbers from every rank and to each."""
    touch = touch_seconds(demand, kernel, c)
    served = named("ids_at_shard", where(demand.rows > 0, demand.ids, 0), "ids")
    lookup = named("lookup_seconds", served * touch, "s")
    if not training:
        return {"lookup": lookup}
    if kernel == DENSE:
        table = named("table_bytes", demand.rows * demand.row_bytes, "B")
        reduced = network.transfer_seconds("all_reduce", table, ranks, c, local)
        return {
            "lookup": lookup,
            "reduce": named("all_reduce_seconds", reduced + served * touch, "s"),
            "step": named("update_seconds", table * demand.passes / c["memory_rate"], "s"),
        }
    rows = named("rows_of_all_ranks", demand.distinct * ranks, "rows")
    moved = named("gathered_bytes", rows * _replica_row_bytes(demand), "B")
    gathered = network.transfer_seconds("all_gather", moved, ranks, c, local)
    summed = named("summing_seconds", served * (c["sort_cost"] + touch), "s")
    return {
        "lookup": lookup,
        "reduce": named("gather_rows_seconds", gathered + summed, "s"),
        "step": named("update_seconds", rows * touch * demand.passes, "s"),
    }


def _replica_row_bytes(demand: Demand) -> Any:
    """Bytes of a row of a replica that is exchanged: its number and its gradient."""
    index = noted(INDEX_BYTES, "index_bytes", "B", "row numbers travel as int64", like=demand.ids)
    return named("exchanged_row_bytes", index + demand.columns * demand.backward_bytes, "B")


ROW_PASSES = 2  # rows that are exchanged one by one are sorted and summed, too


def rows_are_few(ids: float, rows: int, columns: int, ranks: int) -> bool:
    """Whether replicas of ``rows`` x ``columns`` in fp32 exchange rows, ``ids`` of each rank at the
    most, rather than a dense gradient."""
    size = ELEMENT_BYTES["fp32"]
    replica = rows * columns * size
    # Rows of all ranks come to each, and are sorted and summed there, which passes over them as
    # often again. By the number of ids, not of different rows, for that much is known before a
    # batch is there; and only above what rides with other gradients for nothing.
    few = ROW_PASSES * ranks * ids * (INDEX_BYTES + columns * size) <= replica
    return replica > RIDE_BYTES and few


class Latencies(NamedTuple):
    """What a step takes for some tables of a module, whatever their number: collectives of one kind
    and eager operations, by phase."""

    collective: network.Collective
    collectives: dict[str, int]
    operations: dict[str, int]


Part = Literal["routed", "steady", "strips", "riding", "reduced", "gathered"]
_REPLICATED = {"lookup": 4, "reduce": 6, "step": 8}
_ROUTED = {"exchange_ids": 20, "lookup": 4, "exchange_rows": 4, "reduce": 6, "step": 20}
# Counts, ids and rows out, gradients back; the same with counts and ids at once, where as many ids
# go to each rank in every step; sums over columns that are cut where an update needs them; one
# dense gradient of replicas, which rides with row gradients or is reduced; counts, then rows of
# replicas that exchange these.
LATENCIES: dict[Part, Latencies] = {
    "routed": Latencies(
        "all_to_all",
        {"exchange_ids": 2, "exchange_rows": 1, "reduce": 1},
        _ROUTED,
    ),
    "steady": Latencies(
        "all_to_all", {"exchange_ids": 1, "exchange_rows": 1, "reduce": 1}, _ROUTED
    ),
    "strips": Latencies("all_to_all", {"step": 1}, {"step": 30}),
    "riding": Latencies("all_reduce", {}, _REPLICATED),
    "reduced": Latencies("all_reduce", {"reduce": 1}, _REPLICATED),
    "gathered": Latencies("all_gather", {"reduce": 2}, {"lookup": 4, "reduce": 30, "step": 8}),
}


def replica_part(kernel: str, rides: bool) -> Part:
    """The part that replicas of a kernel are; ``rides``: a dense gradient of all of them does."""
    if kernel != DENSE:
        return "gathered"
    return "riding" if rides else "reduced"


def exchange_latency(part: Part, phase: str, ranks: Any, c: Any, local: Any = None) -> Any:
    """Of these, what the collectives of a part take in one phase."""
    collective, collectives, _ = LATENCIES[part]
    return collectives[phase] * network.latency_seconds(collective, ranks, c, local)


def step_latencies(parts: Iterable[Part], ranks: Any, c: Any, local: Any = None) -> dict[str, Any]:
    """Seconds per step and phase that do not depend on the number of tables."""
    seconds: dict[str, Any] = {}

    def add(phase: str, value: Any) -> None:
        seconds[phase] = seconds.get(phase, 0.0) + value

    for part in parts:
        collective, collectives, operations = LATENCIES[part]
        for phase, count in operations.items():
            add(phase, count * c["operation_latency"])
        for phase, count in collectives.items():
            add(phase, count * network.latency_seconds(collective, ranks, c, local))
    return seconds
