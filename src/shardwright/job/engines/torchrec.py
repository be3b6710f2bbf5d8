"""A plan of TorchRec's, as TorchRec prints or serializes it, as a job whose plan is that one.

A plan is a ``ShardingPlan`` or a module's ``EmbeddingModuleShardingPlan``: ``print(plan)``, or
``json.dumps(plan._serialize())`` of its main branch (read 2026-08).
"""

# A plan says where tables lie, and not what is looked up in them. What it does not say, the job
# beside it does, or it is assumed and said. Replicas have no shards in a plan, and so no size.

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
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
COLUMNS = {"sharding type": "sharding_type", "compute kernel": "compute_kernel", "ranks": "ranks"}


class Shards(NamedTuple):
    """What the shards of a table say: its size, the widest of them, where they lie."""

    rows: int
    dim: int
    width: int
    ranks: tuple[int, ...]
    devices: tuple[tuple[str, int], ...]  # kind and index on its host


def job_of(text: str, job: Job | None, world_size: int | None) -> Imported:
    """The job of the plan in ``text``: the tables of ``job``, or those that the plan has, each
    allowed to lie as it does there.

    InputError: no plan; UnsupportedError: one that no plan of ours can be.
    """
    modules = _serialized(text) if text.lstrip()[:1] == "{" else _printed(text)
    entries = [
        (path, name, each) for path, found in modules.items() for name, each in found.items()
    ]
    once = {name for _, name, _ in entries if [each[1] for each in entries].count(name) == 1}
    named = {name if name in once else f"{path}.{name}": each for path, name, each in entries}
    if not named:
        raise InputError(expected("the plan", "a table", "none"))
    keys = Keys(named, NONE)
    return keys.imported(lambda: _document(keys, job, world_size))


def _document(keys: Keys, job: Job | None, world_size: int | None) -> dict[str, Any]:
    known = {table.name: table for table in job.tables} if job else {}
    tables = {name: entry_of(table) for name, table in known.items()}
    places: dict[str, list[int]] = {}
    shards: list[Shards] = []
    cut: list[str] = []
    for name in keys.config:
        kind = keys.one_of(name, "sharding_type", TYPES, "none")
        kernel = keys.one_of(name, "compute_kernel", KERNELS, "none")
        if job and name not in known:
            keys.wrong(expected(name, "a table of the job", "none of that name"))
            continue
        found = _shards(keys, name)
        tables[name] = _table(keys, name, found, known.get(name))
        tables[name] |= {"sharding_types": [kind], "compute_kernels": [kernel]}
        trait = traits(TYPES[kind])
        if trait.cuts_columns and found:
            tables[name]["min_partition"] = found.width
            cut.append(name)
        if trait.partition != "uniform" and (ranks := found.ranks if found else _ranks(keys, name)):
            places[name] = sorted({*ranks})
        shards += [found] if found else []
    if cut:
        keys.assume(f"columns of {', '.join(cut)} in any order on the ranks of each")
    document = document_of(job) if job else _alone(keys, shards)
    document |= {"tables": [*tables.values()]}
    most = max((rank for each in shards for rank in each.ranks), default=0)
    section = document.setdefault("cluster", {})
    section["world_size"] = world_size or section.get("world_size") or most + 1
    if most >= section["world_size"]:
        keys.wrong(expected("-n", f"the {most + 1} ranks of the plan", str(section["world_size"])))
    planner = document.setdefault("planner", {})
    planner.setdefault("options", "torchrec")  # cuts as TorchRec makes them, and no others
    constraints = planner.setdefault("constraints", {})
    constraints["ranks"] = constraints.get("ranks", {}) | places
    return document


def _alone(keys: Keys, shards: list[Shards]) -> dict[str, Any]:
    """The sections of a job of tables alone."""
    keys.assume("fp32 rows, one id a bag, no optimizer states: --job has what a plan does not say")
    keys.assume(f"batches of {BATCH}")
    devices = {device for each in shards for device in each.devices}
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
    if found is None:
        if keys.value(name, "shards", None):  # which are wrong
            return {}
        remedy = "A plan has none of replicas: name a job that has the table with --job."
        keys.wrong(expected(f"{name}.shards", "shards, which say rows and dim", "none", remedy))
        return {}
    return {"name": name, "rows": found.rows, "dim": found.dim}


def _ranks(keys: Keys, name: str) -> tuple[int, ...]:
    found = keys.value(name, "ranks", None) or []
    if not isinstance(found, list) or not all(type(rank) is int and rank >= 0 for rank in found):
        keys.wrong(expected(f"{name}.ranks", "a list of ranks", f"{found!r}"))
        return ()
    return tuple(found)


def _shards(keys: Keys, name: str) -> Shards | None:
    """What the shards of a table say; None where there are none."""
    ranks, listed = _ranks(keys, name), keys.value(name, "shards", None)
    if not listed:
        return None
    ends, widths, devices = [], [], []
    places = []
    try:
        for shard in listed:
            (row, column), (rows, columns) = shard["shard_offsets"], shard["shard_sizes"]
            ends.append((int(row + rows), int(column + columns)))
            widths.append(int(columns))
            place = re.fullmatch(r"rank:(\d+)/(\w+?)(?::(\d+))?", str(shard.get("placement")))
            if place:
                places.append(int(place[1]))
                devices.append((place[2], int(place[3] or 0)))
    except (TypeError, KeyError, ValueError, AttributeError):
        wanted = "shard_offsets and shard_sizes of two numbers each"
        keys.wrong(expected(f"{name}.shards", wanted, f"{listed!r:.60}"))
        return None
    rows, dim = (max(end[at] for end in ends) for at in (0, 1))
    return Shards(rows, dim, max(widths), tuple(places) or ranks, tuple(devices))


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
