"""A job's tables: the checks that types cannot make, and reading them from a file of their own."""

# Bounds come before everything that grows with a size: what a mistyped number asks for would
# otherwise cost memory and minutes before it is refused. Tables are checked as every kind that a
# plan may choose for them: what fails for one of them alone would else fail in the middle of a
# search.

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from shardwright.core.document import parse_json, read_bytes
from shardwright.core.errors import InputError, expected
from shardwright.core.kinds import (
    EmbeddingsSection,
    check_kind,
    check_settled,
    dense_of,
    is_packed,
    kind_of,
    parts_of,
    settled,
)
from shardwright.core.model import KindName, TableSpec
from shardwright.core.sharding import traits
from shardwright.core.tensor import element_bytes
from shardwright.job.model import KINDS, ModelKind, beside
from shardwright.job.planner import ConstraintsSection, PlannerSection

MAX_ROWS = 2**40
MAX_DIM = 2**16
MAX_COLUMN_SHARDS = 4096
MAX_BYTES = 64 * 2**20  # of a table file
NOTES = ("source", "kind", "dim")  # of a table file: for people, not used


def read_tables(name: str, job_path: Path | None) -> list[Any]:
    """The tables of a JSON file: a list, or an object with ``tables``; ``pooling`` is short for one
    pooling factor. A relative path starts at the working directory, else beside the job."""
    path = beside(name, job_path, "model.tables")
    raw = read_bytes(path, "table", "Name a JSON file in model.tables.")
    if len(raw) > MAX_BYTES:
        raise InputError(
            expected(str(path), f"at most {MAX_BYTES >> 20} MiB", f"{len(raw):,} bytes")
        )
    document = parse_json(raw, str(path), "a JSON file of tables")
    if isinstance(document, dict):
        unknown = sorted(set(document) - {"tables", *NOTES})
        if unknown:
            raise InputError(
                expected(
                    f"{path}",
                    "an object with tables",
                    f"'{unknown[0]}'",
                    "Clusters and batches belong into the job.",
                )
            )
        document = document.get("tables")
    if not isinstance(document, list):
        raise InputError(
            expected(str(path), "a list of tables, or an object with one", type(document).__name__)
        )
    return [_with_pooling_factors(entry) for entry in document]


def entry_of(table: TableSpec) -> dict[str, Any]:
    """The keys of a table that are not their defaults, as an entry of a job that reads as equal."""
    # Without the fqn, which a job may not say: it follows from the name when the model is made.
    usual = {f.name: f.default for f in msgspec.structs.fields(TableSpec) if f.name != "fqn"}
    said = {key: getattr(table, key) for key in usual}
    found = {key: value for key, value in said.items() if value not in (usual[key], None)}
    # Through JSON, so that tuples are lists and a cache is a mapping: the entry is written as TOML.
    entry: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(found))
    return entry


def _with_pooling_factors(entry: Any) -> Any:
    if isinstance(entry, dict) and "pooling" in entry and "pooling_factors" not in entry:
        entry = {**entry, "pooling_factors": [entry["pooling"]]}
        del entry["pooling"]
    return entry


def check_tables(tables: tuple[TableSpec, ...], where: str, kind: ModelKind) -> None:
    """Raise InputError at the first table that cannot be in a model of this ``kind``.

    A dlrm names modules after its tables, so their names are plain; dense models have none.
    """
    if not KINDS[kind].lists_tables:
        if tables:
            wanted = f"none for a {kind}"
            raise InputError(expected(f"{where}: tables", wanted, f"{len(tables)}"))
        return
    if not tables:
        raise InputError(expected(f"{where}: tables", "at least one [[tables]] entry", "none"))
    names: set[str] = set()
    for index, table in enumerate(tables):
        _check_name(f"{where}: tables[{index}]", table.name, names, KINDS[kind].reads_clicks)
        names.add(table.name)
        _check_table(f"{where}: tables[{index}] '{table.name}'", table)


def embeddings_of(section: EmbeddingsSection | UnsetType) -> EmbeddingsSection:
    """What a job says of the kinds of its tables."""
    return EmbeddingsSection() if section is UNSET else section


def free_tables(
    tables: tuple[TableSpec, ...],
    section: EmbeddingsSection,
    kinds: tuple[KindName, ...] | UnsetType,
) -> tuple[TableSpec, ...]:
    """Tables whose kind a plan chooses among ``kinds``."""
    if kinds is UNSET:
        return ()
    return tuple(t for t in tables if t.kind is UNSET and t.rows > section.above)


def with_kinds(
    tables: tuple[TableSpec, ...],
    embeddings: EmbeddingsSection | UnsetType,
    planner: PlannerSection,
    where: str,
    model: ModelKind,
) -> tuple[TableSpec, ...]:
    """The tables with the kinds that they or ``embeddings`` give them; InputError for what no
    ``model`` has, and for what nothing would read."""
    section, kinds = embeddings_of(embeddings), planner.kinds
    _check_choice(section, kinds, where)
    _check_range(f"{where}: embeddings.above", section.above, 0, MAX_ROWS)
    _check_range(f"{where}: embeddings.temperature", section.temperature, 0, 10)
    named = {section.kind, *(table.kind for table in tables), *(() if kinds is UNSET else kinds)}
    if section.temperature != EmbeddingsSection().temperature and "mixed_dim" not in named:
        spot, wanted = f"{where}: embeddings.temperature", "none without kind 'mixed_dim'"
        raise InputError(expected(spot, wanted, str(section.temperature)))
    free = free_tables(tables, section, kinds)
    # Nothing is left to choose from, so the key would do nothing without a word.
    if kinds is not UNSET and not free and all(table.kind is UNSET for table in tables):
        wanted = f"tables of more than {section.above} rows, or a lower embeddings.above"
        raise InputError(expected(f"{where}: planner.kinds", wanted, "none"))
    # Tables with their own kind first, and then every table that is free as each of the kinds in
    # turn.
    given = settled(tables, section)
    everything = list(enumerate(given))
    for kind in () if kinds is UNSET else kinds:
        tried = [msgspec.structs.replace(t, kind=kind) if t in free else t for t in tables]
        everything += enumerate(settled(tried, section))
    for index, table in everything:
        spot = f"{where}: tables[{index}] '{table.name}'"
        # One that is free has no kind yet: it comes again as each of those that it may get, and is
        # checked then.
        if table not in free:
            check_kind(table, spot)
            check_settled(table, spot)
        if is_packed(table):
            _check_packed(table, planner, model, spot)
        if not KINDS[model].has_step and dense_of(table):
            wanted = "a kind made of tables alone, for there is no dense part that is planned"
            remedy = "Name a [model] to train, or plan the table full."
            raise InputError(expected(f"{spot}.kind", wanted, repr(kind_of(table)), remedy))
    _check_free(planner.constraints, free, where)
    for index, table in enumerate(tables):
        if table.kind is not UNSET and not parts_of(given[index]):
            _check_dense(table, f"{where}: tables[{index}] '{table.name}'")
    return given


def _check_packed(table: TableSpec, planner: PlannerSection, model: ModelKind, spot: str) -> None:
    """Refuse rows of bytes where they would be trained, and where costs do not know them."""
    kind = kind_of(table)
    if KINDS[model].has_step:
        wanted = "a kind that is trained"
        remedy = "Train it full; examples/packing.py packs the rows of a checkpoint."
        raise InputError(expected(f"{spot}.kind", wanted, f"'{kind}', for inference", remedy))
    if planner.constants != "cluster":
        wanted = f"planner.constants = 'cluster' beside kind '{kind}'"
        raise InputError(expected(spot, wanted, f"'{planner.constants}'"))


def _check_dense(table: TableSpec, spot: str) -> None:
    """Refuse keys of a table whose rows are computed from dense parameters alone."""
    for key in ("sharding_types", "compute_kernels", "min_partition", "optimizer", "cache"):
        if (value := getattr(table, key)) is not None:
            wanted = f"none for kind '{kind_of(table)}', which is no table but a dense part"
            shown = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            raise InputError(expected(f"{spot}.{key}", wanted, shown))


def _check_choice(
    section: EmbeddingsSection, kinds: tuple[KindName, ...] | UnsetType, where: str
) -> None:
    """Refuse keys of kinds that no table would get."""
    if kinds is UNSET:
        check_kind(section, f"{where}: embeddings")
        return
    if not kinds or len(set(kinds)) != len(kinds):
        raise InputError(expected(f"{where}: planner.kinds", "different kinds", str(list(kinds))))
    check_kind(section, f"{where}: embeddings", kinds)


def _check_free(constraints: ConstraintsSection, free: tuple[TableSpec, ...], where: str) -> None:
    groups = (*constraints.together, *constraints.apart, tuple(constraints.ranks))
    named = {name for group in groups for name in group}
    # Its parts have other names under each kind, so a constraint on its name would hold for some
    # plans and mean nothing in others.
    for table in free:
        if table.name in named:
            wanted = "tables with a kind of their own beside planner.kinds"
            remedy = f"Say tables '{table.name}'.kind."
            spot = f"{where}: planner.constraints"
            raise InputError(expected(spot, wanted, f"'{table.name}'", remedy))


def _check_name(spot: str, name: str, taken: set[str], identifier: bool) -> None:
    pattern, words = r"[^\s\x00-\x1f\x7f]{1,200}", "up to 200 characters without white space"
    if identifier:
        pattern = r"[A-Za-z_][A-Za-z0-9_]{0,99}"
        words = "letters, digits and underscores, at most 100"
    if not re.fullmatch(pattern, name):
        raise InputError(expected(f"{spot}.name", words, repr(name[:100])))
    if name in taken:
        raise InputError(expected(f"{spot} '{name}'.name", "a name of its own", "one used twice"))


def _check_table(spot: str, table: TableSpec) -> None:
    _check_range(f"{spot}.rows", table.rows, 1, MAX_ROWS)
    _check_range(f"{spot}.dim", table.dim, 1, MAX_DIM)
    element_bytes(table.dtype, f"{spot}.dtype")
    if table.output_dtype is not None:
        element_bytes(table.output_dtype, f"{spot}.output_dtype")
    for key in ("sharding_types", "compute_kernels"):
        if getattr(table, key) == ():
            raise InputError(
                expected(f"{spot}.{key}", "one or more", "none", "Leave it out for any.")
            )
    least = table.min_partition
    if least is not None:
        _check_range(f"{spot}.min_partition", least, 1, MAX_DIM)
    if least and table.dim / least > MAX_COLUMN_SHARDS:
        raise InputError(
            expected(
                f"{spot}.min_partition",
                f"at most {MAX_COLUMN_SHARDS} column shards",
                f"{least} of {table.dim} columns",
            )
        )
    features = len(table.pooling_factors)
    for name, values in (("num_poolings", table.num_poolings), ("batch_sizes", table.batch_sizes)):
        if values is not None and len(values) != features:
            raise InputError(
                expected(
                    f"{spot}.{name}", f"{features} values, as pooling_factors", str(len(values))
                )
            )
    if len(table.feature_names) != features:
        wanted = f"{features} names, as pooling_factors"
        raise InputError(expected(f"{spot}.features", wanted, str(len(table.feature_names))))
    if not features:
        raise InputError(expected(f"{spot}.pooling_factors", "one value per feature", "none"))
    for key in ("pooling_factors", "num_poolings"):
        for factor in getattr(table, key) or ():
            _check_range(f"{spot}.{key}", factor, 0, 1e6)
    for size in table.batch_sizes or ():
        _check_range(f"{spot}.batch_sizes", size, 1, 2**31 - 1)
    _check_cache(spot, table)


def _check_cache(spot: str, table: TableSpec) -> None:
    _check_range(f"{spot}.kv_l1_mb", table.kv_l1_mb or 0, 0, 2**30)
    if table.cache is None:
        return
    if table.cache.load_factor is not None:
        _check_range(f"{spot}.cache.load_factor", table.cache.load_factor, 0, 1)
    if table.cache.passes is not None:
        _check_range(f"{spot}.cache.passes", table.cache.passes, 1, 1000)
    most = (1e15, 1.0, 1.0)  # lookups, cacheability, miss rate
    for value, high in zip(table.cache.stats or (), most, strict=False):
        _check_range(f"{spot}.cache.stats", value, 0, high)


def _check_range(where: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InputError(expected(where, f"a value from {low} to {high}", f"{value}"))


def check_constraints(
    constraints: ConstraintsSection, tables: tuple[TableSpec, ...], where: str
) -> None:
    """Raise InputError where constraints name what is not there or contradict one another."""
    by_name = {table.name: table for table in tables}
    spot = f"{where}: planner.constraints"
    for key in ("together", "apart"):
        for index, group in enumerate(getattr(constraints, key)):
            _check_group(f"{spot}.{key}[{index}]", group, by_name)
    for name, ranks in constraints.ranks.items():
        _check_group(f"{spot}.ranks", (name,), by_name, least=1)
        if not ranks or min(ranks) < 0 or len(set(ranks)) != len(ranks):
            raise InputError(
                expected(f"{spot}.ranks.{name}", "distinct ranks from 0", str(list(ranks)))
            )
    # A table in two groups would join them without anybody having said so.
    joined: dict[str, int] = {}
    for index, group in enumerate(constraints.together):
        for name in group:
            if joined.setdefault(name, index) != index:
                raise InputError(
                    expected(f"{spot}.together", "each table in one group", f"'{name}' in two")
                )
            _check_whole(f"{spot}.together[{index}]", by_name[name])
        _check_common_ranks(f"{spot}.together[{index}]", group, constraints)
    for index, group in enumerate(constraints.apart):
        # Only contradictions that can be seen here are refused; whether ranks are enough is the
        # search's to find out.
        homes = [joined.get(name) for name in group]
        for name, home in zip(group, homes, strict=True):
            if home is not None and homes.count(home) > 1:
                raise InputError(
                    expected(
                        f"{spot}.apart[{index}]",
                        "tables that are not kept together",
                        f"'{name}', which is in together[{home}] with another of them",
                    )
                )


def _check_group(
    spot: str, group: tuple[str, ...], tables: dict[str, TableSpec], least: int = 2
) -> None:
    for name in group:
        if name not in tables:
            raise InputError(expected(spot, "names of tables", f"'{name}'"))
    if len(set(group)) != len(group) or len(group) < least:
        raise InputError(expected(spot, f"{least} or more different tables", str(list(group))))


def _check_whole(spot: str, table: TableSpec) -> None:
    types = table.sharding_types
    if types is not None and not any(traits(t).whole for t in types):
        raise InputError(
            expected(
                spot,
                "tables that may be table_wise, for each lies whole on the common rank",
                f"'{table.name}' with {', '.join(types) or 'no type'}",
            )
        )


def _check_common_ranks(spot: str, group: tuple[str, ...], constraints: ConstraintsSection) -> None:
    pinned = [set(constraints.ranks[name]) for name in group if name in constraints.ranks]
    if pinned and not set.intersection(*pinned):
        raise InputError(
            expected(spot, "tables with a rank in common", "constraints.ranks without one")
        )
