"""A plan of TorchRec's, as TorchRec prints or serializes it, as a job whose plan is that one.

A plan is a ``ShardingPlan`` or a module's ``EmbeddingModuleShardingPlan``: ``print(plan)``, or
``json.dumps(plan._serialize())`` of its main branch (read 2026-08).
"""

# A plan says where tables lie, and not what is looked up in them. What it does not say, the job
# beside it does, or it is assumed and said. Replicas have no shards in a plan, and so no size.

from __future__ import annotations

import re
import typing
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from shardwright.core.document import parse_json
from shardwright.core.errors import InputError, UnsupportedError, expected
from shardwright.core.model import ComputeKernel, TableSpec
from shardwright.core.sharding import ShardingType, traits
from shardwright.job.engines.own import document_of
from shardwright.job.imported import Imported, Keys
from shardwright.job.job import Job
from shardwright.job.tables import entry_of

BATCH = 512  # samples of a rank, as TorchRec's planner takes them by default
FORMS = "print(plan), or json.dumps(plan._serialize())"
TYPES = {name: name for name in typing.get_args(ShardingType)}
KERNELS = {name: name for name in typing.get_args(ComputeKernel)}
NONE = re.compile("(?!)")  # no key is without effect
PLACE = re.compile(r"rank:(\d+)/(\w+?)(?::(\d+))?")
COLUMNS = {"sharding type": "sharding_type", "compute kernel": "compute_kernel", "ranks": "ranks"}


class Shards(NamedTuple):
    """What the shards of a table say: its size, the width of the widest, the ranks that they lie
    on, and of which kind and index on its host the device of each is."""

    rows: int
    dim: int
    width: int
    ranks: tuple[int, ...]
    devices: frozenset[tuple[str, int]]


def job_of(text: str, job: Job | None, world_size: int | None) -> Imported:
    """The job of the plan in ``text``: the tables of ``job``, or those that the plan has, each
    allowed to lie as it does there.

    InputError: no plan; UnsupportedError: one that no plan of ours can be.
    """
    modules = _serialized(text) if text.lstrip()[:1] == "{" else _printed(text)
    times = Counter(name for found in modules.values() for name in found)
    named = {
        name if times[name] == 1 else f"{path}.{name}": each
        for path, found in modules.items()
        for name, each in found.items()
    }
    if not named:
        raise InputError(expected("the plan", "a table", "none"))
    keys = Keys(named, NONE)
    return keys.imported(lambda: _document(keys, job, world_size))


def _document(keys: Keys, job: Job | None, world_size: int | None) -> dict[str, Any]:
    known = {table.name: table for table in job.tables} if job else {}
    tables = {name: entry_of(table) for name, table in known.items()}
    places: dict[str, list[int]] = {}
    cut: list[str] = []
    devices: set[tuple[str, int]] = set()
    least = 1  # ranks
    for name in keys.config:
        kind = keys.one_of(name, "sharding_type", TYPES, "none")
        kernel = keys.one_of(name, "compute_kernel", KERNELS, "none")
        shards, ranks, trait = _shards(keys, name), _ranks(keys, name), traits(TYPES[kind])
        if job and name not in known:
            keys.wrong(expected(name, "a table of the job", "none of that name"))
            continue
        tables[name] = _table(keys, name, shards, known.get(name))
        tables[name] |= {"sharding_types": [kind], "compute_kernels": [kernel]}
        if shards:
            ranks = shards.ranks or ranks
            devices |= shards.devices
            if trait.cuts_columns:
                tables[name]["min_partition"] = shards.width
                cut.append(name)
        least = max((least, *(1 + rank for rank in ranks)))
        if ranks and trait.partition != "uniform":  # others lie on all ranks anyway
            places[name] = sorted({*ranks})
    if cut:
        keys.assume(f"columns of {', '.join(cut)} in any order on the ranks of each")
    document = document_of(job) if job else _alone(keys, devices)
    document["tables"] = [*tables.values()]
    section = document.setdefault("cluster", {})
    section["world_size"] = world_size or section.get("world_size") or least
    if least > section["world_size"]:
        keys.wrong(expected("-n", f"the {least} ranks of the plan", str(section["world_size"])))
    planner = document.setdefault("planner", {})
    planner.setdefault("options", "torchrec")  # cuts as TorchRec makes them, and no others
    if places:
        constraints = planner.setdefault("constraints", {})
        constraints["ranks"] = constraints.get("ranks", {}) | places
    return document


def _alone(keys: Keys, devices: Collection[tuple[str, int]]) -> dict[str, Any]:
    """The sections of a job of tables alone."""
    keys.assume("fp32 rows, one id a bag, no optimizer states: --job has what a plan does not say")
    keys.assume(f"batches of {BATCH}")
    kind = min((kind for kind, _ in devices), default="cuda")
    cluster: dict[str, Any] = {"compute_device": kind}
    if kind != "cpu" and devices:
        cluster["local_world_size"] = 1 + max(index for _, index in devices)
    return {"model": {"kind": "tables"}, "cluster": cluster, "batch": {"size": BATCH}}


def _table(keys: Keys, name: str, found: Shards | None, known: TableSpec | None) -> dict[str, Any]:
    """A table of the size that its shards say, or that the job does."""
    if known is not None:
        if found and (found.rows, found.dim) != (known.rows, known.dim):
            wanted = f"{known.rows} x {known.dim} as in the job"
            keys.wrong(expected(f"{name}.shards", wanted, f"{found.rows} x {found.dim}"))
        return entry_of(known)
    if found:
        return {"name": name, "rows": found.rows, "dim": found.dim}
    if not keys.value(name, "shards", None):  # else they are wrong, which is said
        remedy = "A plan has none of replicas: name a job that has the table with --job."
        keys.wrong(expected(f"{name}.shards", "shards, which say rows and dim", "none", remedy))
    return {}


def _ranks(keys: Keys, name: str) -> tuple[int, ...]:
    found = keys.value(name, "ranks", None) or []
    if not isinstance(found, list) or not all(type(rank) is int and rank >= 0 for rank in found):
        keys.wrong(expected(f"{name}.ranks", "a list of ranks", f"{found!r}"))
        return ()
    return tuple(found)


def _shards(keys: Keys, name: str) -> Shards | None:
    """What the shards of a table say; None where there are none, or wrong ones."""
    listed = keys.value(name, "shards", None)
    if not listed:
        return None
    try:
        cuts = [(*each["shard_offsets"], *each["shard_sizes"]) for each in listed]
        if not all(len(cut) == 4 and all(type(at) is int for at in cut) for cut in cuts):
            raise ValueError
        found = [PLACE.fullmatch(str(each.get("placement"))) for each in listed]
    except (TypeError, KeyError, ValueError, AttributeError):
        wanted = "shard_offsets and shard_sizes of two numbers each"
        keys.wrong(expected(f"{name}.shards", wanted, f"{listed!r:.60}"))
        return None
    rows = max(row + rows for row, _, rows, _ in cuts)
    dim = max(column + columns for _, column, _, columns in cuts)
    if (covered := sum(rows * columns for *_, rows, columns in cuts)) != rows * dim:
        wanted = f"the {rows * dim:,} numbers of {rows} x {dim} once each"
        keys.wrong(expected(f"{name}.shards", wanted, f"{covered:,}"))
    places = [each.groups() for each in found if each]
    return Shards(
        rows,
        dim,
        max(columns for *_, columns in cuts),
        tuple(int(rank) for rank, _, _ in places),
        frozenset((kind, int(index or 0)) for _, kind, index in places),
    )


def _serialized(text: str) -> dict[str, dict[str, Any]]:
    """Tables of each module of a plan in JSON; a module's own has no path."""
    found = parse_json(text, "the plan", "JSON")
    modules = found["plan"] if set(found) == {"plan"} else {"": found}
    tables = [each for module in _values(modules) for each in _values(module)]
    if not tables or not all(
        isinstance(each, Mapping) and "sharding_type" in each for each in tables
    ):
        shown = ", ".join(list(found)[:3]) or "nothing"
        wanted = f"{FORMS}, tables with a sharding_type"
        raise UnsupportedError(expected("the plan", wanted, f"an object of {shown}"))
    return dict(modules)


def _values(value: Any) -> list[Any]:
    return [*value.values()] if isinstance(value, Mapping) else [None]


def _printed(text: str) -> dict[str, dict[str, Any]]:
    """Tables of each module of a plan as it is printed: of a module two lists, of its tables and
    of their shards."""
    found: dict[str, dict[str, Any]] = {}
    tables: dict[str, Any] | None = None
    heads: list[str] = []
    for line in filter(str.strip, text.splitlines()):
        cells = [cell.strip() for cell in line.split(" | ")]
        if line.startswith("module: "):
            tables = found.setdefault(line.removeprefix("module: ").strip(), {})
        elif cells[0] == "param":
            heads = cells
            tables = found.setdefault("", {}) if tables is None else tables
        elif set("".join(cells)) <= {"-"}:
            continue
        elif tables is None or len(cells) != len(heads) or len(heads) != 4:
            raise UnsupportedError(expected("the plan", FORMS, f"'{line.strip():.60}'"))
        elif heads[1] in COLUMNS:
            said = zip(map(COLUMNS.get, heads[1:]), cells[1:], strict=True)
            tables[cells[0]] = {str(key): _listed(cell) for key, cell in said}
        else:
            said = zip(("shard_offsets", "shard_sizes", "placement"), cells[1:], strict=True)
            shard = {key: _listed(cell) for key, cell in said}
            tables.setdefault(cells[0], {}).setdefault("shards", []).append(shard)
    return found


def _listed(cell: str) -> Any:
    """A cell as numbers where it is a list of them."""
    if re.fullmatch(r"\[[\d, ]*\]", cell):
        return [int(number) for number in re.findall(r"\d+", cell)]
    return None if cell == "None" else cell
