"""Kinds of embeddings: of what tables and dense parameters one is made, and what it takes.

Most kinds are compositions. An id of the logical table becomes a row of one or several smaller
*parts*, which are placed, priced and updated as any table is; what comes back is *joined* to the
logical row. ``dhe`` and ``robe`` have no part: their rows are computed from dense parameters.
``int8`` and ``int4`` are full tables of rows of bytes, for inference. The starting values give an
entry the variance of a full table's, 1 / (3 rows).
"""

# Planner, costs and heap know full tables and rows of bytes, and nothing else: a kind is taken
# apart into parts before they see it, and joined again behind them (models/kinds.py). Sizes,
# starting values and FLOPs of a kind are all here, so that a plan's bytes and the module that is
# built cannot differ.

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET

from shardwright.core.amount import ceil_div, named, noted
from shardwright.core.errors import InputError
from shardwright.core.model import QUANTIZED, KindKeys, KindName, TableSpec
from shardwright.core.tensor import element_bytes

# How the rows of the parts become one: the only one, products, sums, side by side, a linear map,
# products of matrices; of none they are computed.
Join = Literal["one", "multiply", "add", "concat", "project", "tensor_train", "network", "array"]
LINEAR: tuple[Join, ...] = ("one", "add", "concat", "project")  # joined before or after pooling
NEAR_ONE = 0.01  # how far the remainders' rows of a product start from 1
MAX_HASHED = 2**31  # ids that are hashed in 32 bits
ABOVE = 200  # rows; smaller tables stay full where a job says nothing


class Packed(NamedTuple):
    """A row of ``bits`` for every entry, whole bytes, and ``ends`` bytes: the scale and the offset
    of its own with which it is read."""

    bits: int
    ends: int


PACKED: dict[str, Packed] = {"int8": Packed(8, 8), "int4": Packed(4, 4)}


class Part(NamedTuple):
    """A table of ``rows`` x ``dim`` in which id i has row (i div ``divisor``) mod ``rows``, of
    ``mixed`` ids in an order without any. It starts uniform within ``bound`` of ``centre``."""

    suffix: str
    rows: int
    dim: int
    bound: float
    divisor: int = 1
    mixed: bool = False
    centre: float = 0.0


class Dense(NamedTuple):
    """A dense parameter, which starts uniform within ``bound``."""

    name: str
    shape: tuple[int, ...]
    bound: float


class Kind(NamedTuple):
    """``keys`` that can be said of it, its parts and dense parameters."""

    keys: tuple[str, ...]
    parts: Callable[[TableSpec], tuple[Part, ...]]
    dense: Callable[[TableSpec], tuple[Dense, ...]] = lambda _: ()


def as_full(rows: int) -> float:
    """The bound of a full table of ``rows``."""
    return math.sqrt(1.0 / rows)


def shared_rows(table: TableSpec) -> int:
    """Rows where ``collisions`` ids share one."""
    return -(-table.rows // _int(table.collisions))


def _int(value: Any) -> int:
    assert isinstance(value, int), "kinds are settled when a job is read"
    return value


def _full(table: TableSpec) -> tuple[Part, ...]:
    return (Part("", table.rows, table.dim, as_full(table.rows)),)


def _hash(table: TableSpec) -> tuple[Part, ...]:
    return (Part("", shared_rows(table), table.dim, as_full(table.rows)),)


def _double_hash(table: TableSpec) -> tuple[Part, ...]:
    rows, bound = shared_rows(table), as_full(2 * table.rows)
    return (
        Part("first", rows, table.dim, bound),
        Part("second", rows, table.dim, bound, mixed=True),
    )


def _qr(table: TableSpec) -> tuple[Part, ...]:
    collisions, dim, bound, near = _int(table.collisions), table.dim, as_full(table.rows), 0.0
    low = bound
    if table.operation == "mult":
        near, low = 1.0, NEAR_ONE
    elif table.operation == "add":
        bound = low = as_full(2 * table.rows)
    else:
        dim //= 2
    return (
        Part("quotient", shared_rows(table), dim, bound, divisor=collisions),
        Part("remainder", collisions, dim, low, centre=near),
    )


def _mixed_dim(table: TableSpec) -> tuple[Part, ...]:
    width = _int(table.width)
    if width == table.dim:
        return _full(table)
    return (Part("", table.rows, width, math.sqrt(6.0 / (table.rows + width))),)


def _projection(table: TableSpec) -> tuple[Dense, ...]:
    width = _int(table.width)
    bound = math.sqrt(6.0 / (table.dim + width))
    return (Dense("weight", (table.dim, width), bound),) if width < table.dim else ()


def _memcom(table: TableSpec) -> tuple[Part, ...]:
    shared = Part("shared", shared_rows(table), table.dim, as_full(table.rows))
    return shared, Part("scale", table.rows, 1, 0.0, centre=1.0)


def cores_of(table: TableSpec) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Rows and columns of the three cores of a tensor train, products of at least ``rows`` and of
    ``dim``; the core in the middle, which has the rank on both sides, has fewest columns."""
    side = _root(table.rows)
    rows = (-(-table.rows // (side * side)), side, side)
    small, middle, large = _three_factors(table.dim)
    return rows, (large, small, middle)


def _root(rows: int) -> int:
    """The smallest integer whose cube is at least ``rows``."""
    # A root in doubles may be off by one either way, so it only says where to begin.
    side: int = max(round(rows ** (1 / 3)) - 1, 1)
    while side**3 < rows:
        side += 1
    return side


def _three_factors(dim: int) -> tuple[int, int, int]:
    """Factors of ``dim``, ascending, whose sum is least."""
    divisors = [d for d in range(1, dim + 1) if dim % d == 0]
    triples = (
        (a, b, dim // (a * b)) for a in divisors for b in divisors if b >= a and dim % (a * b) == 0
    )
    return min((t for t in triples if t[2] >= t[1]), key=sum)


def _tt(table: TableSpec) -> tuple[Part, ...]:
    rank = _int(table.rank)
    (first, second, third), (a, b, c) = cores_of(table)
    variance = (1.0 / (3 * table.rows) / rank**2) ** (1 / 3)  # of rank^2 products of three
    bound = math.sqrt(3.0 * variance)
    return (
        Part("first", first, a * rank, bound, divisor=second * third),
        Part("second", second, rank * b * rank, bound, divisor=third),
        Part("third", third, rank * c, bound),
    )


def widths_of(table: TableSpec) -> tuple[int, ...]:
    """Widths of a hash network from its hashes to the row."""
    inner = (_int(table.hidden),) * (_int(table.layers) - 1)
    return (_int(table.hashes), *inner, table.dim)


def _network(table: TableSpec) -> tuple[Dense, ...]:
    widths, found = widths_of(table), []
    for layer, (fan_in, fan_out) in enumerate(itertools.pairwise(widths)):
        bound = math.sqrt(1.0 / fan_in)
        found.append(Dense(f"layers.{layer}.weight", (fan_out, fan_in), bound))
        found.append(Dense(f"layers.{layer}.bias", (fan_out,), bound))
    return tuple(found)


def _array(table: TableSpec) -> tuple[Dense, ...]:
    size = -(-table.rows * table.dim // _int(table.collisions))
    return (Dense("weight", (max(size, _int(table.block)),), as_full(table.rows)),)


KINDS: dict[KindName, Kind] = {
    "full": Kind((), _full),
    "hash": Kind(("collisions",), _hash),
    "double_hash": Kind(("collisions",), _double_hash),
    "qr": Kind(("collisions", "operation"), _qr),
    "mixed_dim": Kind(("width",), _mixed_dim, _projection),
    "memcom": Kind(("collisions",), _memcom),
    "tt": Kind(("rank",), _tt),
    "dhe": Kind(("hashes", "hidden", "layers"), lambda _: (), _network),
    "robe": Kind(("collisions", "block"), lambda _: (), _array),
    "int8": Kind((), _full),
    "int4": Kind((), _full),
}
_JOINS: dict[KindName, Join] = {
    "double_hash": "add",
    "memcom": "multiply",
    "tt": "tensor_train",
    "dhe": "network",
    "robe": "array",
}
_OPERATIONS: dict[Any, Join] = {"mult": "multiply", "add": "add", "concat": "concat"}


# AUC on held-out rows less that of full tables, by benchmarks/embeddings_study.toml: made-up rows,
# 200 ids to a row or remainder (validation/cpu-2-cores/embeddings_study.json, 2026-11-25).
KNOWN_AUC: dict[KindName, float] = {"hash": -0.003, "qr": -0.003, "dhe": 0.001}
SEEDS_VARY = 0.003  # by so much, one standard deviation, where most


def kind_of(table: TableSpec) -> KindName:
    """Its kind; full where nothing is said."""
    return "full" if table.kind is UNSET else table.kind


def join_of(table: TableSpec) -> Join:
    """How the rows of its parts become one."""
    kind = kind_of(table)
    if kind == "qr":
        return _OPERATIONS[table.operation]
    if kind == "mixed_dim" and dense_of(table):
        return "project"
    return _JOINS.get(kind, "one")


def parts_of(table: TableSpec) -> tuple[Part, ...]:
    """The tables that it is made of."""
    return KINDS[kind_of(table)].parts(table)


def dense_of(table: TableSpec) -> tuple[Dense, ...]:
    """The dense parameters that it is made of."""
    return KINDS[kind_of(table)].dense(table)


def is_packed(table: TableSpec) -> bool:
    """Whether its rows are bytes, which nothing trains."""
    return kind_of(table) in PACKED


def packed_bytes(columns: Any, kind: str) -> Any:
    """Bytes of a row of ``columns`` in a kind of ``PACKED``."""
    values = ceil_div(columns, noted(8 // PACKED[kind].bits, "entries", "", "of a byte", columns))
    ends = noted(PACKED[kind].ends, "scale_bytes", "B", f"scale and offset of {kind}", columns)
    return named("row_bytes", values + ends, "B")


def parameters(table: TableSpec) -> int:
    """How many numbers it has."""
    dense = sum(math.prod(each.shape) for each in dense_of(table))
    return sum(part.rows * part.dim for part in parts_of(table)) + dense


def nbytes(table: TableSpec) -> int:
    """Bytes of its parameters."""
    if is_packed(table):
        return table.rows * _int(packed_bytes(table.dim, kind_of(table)))
    return parameters(table) * element_bytes(table.dtype)


def flops(table: TableSpec) -> int:
    """Floating-point operations that make one row, of matrix products and of joins entry by entry;
    not those of hashes, activations and biases."""
    dim = table.dim
    match join_of(table):
        case "one" if is_packed(table):
            return 2 * dim
        case "multiply" | "add":
            return dim
        case "project":
            return 2 * dim * _int(table.width)
        case "tensor_train":
            rank = _int(table.rank)
            _, (a, b, c) = cores_of(table)
            return 2 * b * c * rank**2 + 2 * a * b * c * rank
        case "network":
            widths = widths_of(table)
            return sum(2 * a * b for a, b in itertools.pairwise(widths))
    return 0


def members_of(table: TableSpec, *, bags: bool = False) -> tuple[TableSpec, ...]:
    """The tables that are placed for it, with a feature for each of its own. Where ``bags`` are
    looked up whose rows have to be joined before they are pooled, they come back one by one."""
    parts = parts_of(table)
    # A part is a full table: with the keys of its kind it would be taken apart again.
    bare: dict[str, Any] = dict.fromkeys(KindKeys.__struct_fields__, UNSET)
    if is_packed(table):
        del bare["kind"]  # how its rows are kept
    # A product of pooled rows is no pooled product: such rows have to come back one by one, which
    # costs more on the wire and is why it is decided here.
    if bags and join_of(table) not in LINEAR:
        bare |= {"pooled": False, "pooling_type": UNSET, "module_weighted": False}
    found = []
    for part in parts:
        own: dict[str, Any] = {"rows": part.rows, "dim": part.dim}
        if part.suffix:
            own["name"] = f"{table.name}.{part.suffix}"
            own["features"] = tuple(f"{name}.{part.suffix}" for name in table.feature_names)
        found.append(msgspec.structs.replace(table, **bare, **own))
    return tuple(found)


class EmbeddingsSection(KindKeys, frozen=True, forbid_unknown_fields=True):
    """The kind of every table with more than ``above`` rows that names none of its own.

    Attributes:
        above: rows; smaller tables stay full
        temperature: of ``mixed_dim`` without a width: a table has round(``dim`` (n /
            rows)^temperature) columns, n being the rows of the smallest table
    """

    above: int = ABOVE
    temperature: float = 0.3


def settled(tables: Sequence[TableSpec], section: EmbeddingsSection) -> tuple[TableSpec, ...]:
    """The tables, each with its kind and every key of it."""
    least = min((table.rows for table in tables), default=1)
    found = []
    for table in tables:
        kind = table.kind
        if kind is UNSET and section.kind is not UNSET and table.rows > section.above:
            kind = section.kind
        if kind is UNSET or kind == "full":
            found.append(table)
            continue
        narrow = round(table.dim * (least / table.rows) ** section.temperature)
        usual = {
            "collisions": 4,
            "operation": "mult",
            "width": min(max(narrow, 1), table.dim),
            "rank": 16,
            "hashes": 1024,
            "hidden": 1800,
            "layers": 5,
            "block": table.dim,
        }
        keys = {
            key: next(
                value
                for value in (getattr(table, key), getattr(section, key), usual[key])
                if value is not UNSET
            )
            for key in KINDS[kind].keys
        }
        if "collisions" in keys:
            # A default, or what a section says for all tables, may be more than a small one has
            # rows.
            keys["collisions"] = min(keys["collisions"], table.rows)
        found.append(msgspec.structs.replace(table, kind=kind, **keys))
    return tuple(found)


def check_kind(table: KindKeys, spot: str, kinds: tuple[KindName, ...] = ()) -> None:
    """InputError at a key that neither its kind nor one of ``kinds`` has."""
    kind = "full" if table.kind is UNSET else table.kind
    for key in KindKeys.__struct_fields__[1:]:
        value = getattr(table, key)
        if value is not UNSET and not any(key in KINDS[k].keys for k in (kind, *kinds)):
            owners = [f"'{name}'" for name, each in KINDS.items() if key in each.keys]
            wanted = f"no such key for kind '{kind}'"
            remedy = f"It belongs to kind {', '.join(owners)}."
            raise InputError(f"{spot}.{key}", wanted, repr(value), remedy)


def check_settled(table: TableSpec, spot: str) -> None:
    """InputError where the kind of a table cannot have its sizes."""
    kind = kind_of(table)
    if kind == "mixed_dim" and _int(table.width) > table.dim:
        wanted = f"at most dim {table.dim}"
        raise InputError(f"{spot}.width", wanted, str(table.width))
    if kind == "qr" and table.operation == "concat" and table.dim % 2:
        wanted = "an even dim, of which each part has half"
        raise InputError(f"{spot}.dim", wanted, str(table.dim))
    if kind == "robe" and table.dim % _int(table.block):
        wanted = f"a divisor of dim {table.dim}"
        raise InputError(f"{spot}.block", wanted, str(table.block))
    if kind in ("double_hash", "dhe", "robe") and table.rows > MAX_HASHED:
        wanted = f"at most {MAX_HASHED:,} rows of kind '{kind}', whose ids are hashed in 32 bits"
        raise InputError(f"{spot}.rows", wanted, f"{table.rows:,}")
    for kernel in table.compute_kernels or ():
        if kind in PACKED and kernel not in QUANTIZED:
            wanted = f"{', '.join(QUANTIZED)} for kind '{kind}', which serves inference only"
            raise InputError(f"{spot}.compute_kernels", wanted, f"'{kernel}'")
    if kind != "full" and table.dtype != "fp32":
        wanted = f"'fp32' for kind '{kind}'"
        raise InputError(f"{spot}.dtype", wanted, repr(table.dtype))
