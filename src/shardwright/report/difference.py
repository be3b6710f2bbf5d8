"""What changed between two plans, as values."""

# Plans are compared as facts by key, and not as JSON: a reader asks what changed for a table or a
# rank, and blocks and timelines differ wherever anything does. Values stay values (bytes, seconds)
# until they are shown, so that what changed alike can be added up.

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any, Literal

import msgspec

from shardwright.job.job import Job
from shardwright.job.plan import Plan, RankTotals, TablePlan, UnitPlan
from shardwright.report.plan_sheets import longest_seconds, table_bytes
from shardwright.report.wording import placement_text, ranks_text

Value = int | float | str | None
Group = Literal["plan", "table", "unit", "rank", "job", "cluster"]
Unit = Literal["", "bytes", "seconds"]
Facts = dict[str, tuple[Value, Unit]]

MOST_WAYS = 3  # rows of one key of tables, units or ranks
MOST_WORDS = 3  # that one such row names


class Difference(msgspec.Struct, frozen=True):
    """``key`` of ``name`` was ``before`` in the first plan and is ``after`` in the second.

    None is a side that does not have it; ``name`` is empty for the plan, job and cluster.
    """

    group: Group
    name: str
    key: str
    before: Value
    after: Value
    unit: Unit = ""


def differences(a: Plan, b: Plan) -> list[Difference]:
    """From ``a`` to ``b``: the plan as a whole, tables, units, ranks, then job and cluster keys."""
    return [
        *_changed("plan", "", _plan_facts(a), _plan_facts(b)),
        *_group("table", _tables(a), _tables(b)),
        *_group("unit", _units(a), _units(b)),
        *_group("rank", _ranks(a), _ranks(b)),
        *_changed("job", "", *_job_facts(a.job, b.job)),
        *_changed("cluster", "", _cluster_facts(a), _cluster_facts(b)),
    ]


def together(a: Plan, b: Plan, found: Iterable[Difference]) -> list[tuple[int, Difference]]:
    """What was ``found`` from ``a`` to ``b``, alike differences counted, as one, in the order of
    their first: words that changed alike, numbers of one key, added up (of ranks the largest), and
    the rarer ways in which one key changed where there are many."""
    alike: dict[tuple[str, str], dict[tuple[object, ...], list[Difference]]] = {}
    for each in found:
        of_table = each.group == "job" and each.key.startswith("tables.")
        key = f"tables.*.{each.key.rpartition('.')[2]}" if of_table else each.key
        # Numbers of one key go together whatever they are, words only with those that changed the
        # same way: a sum of bytes means something, a list of placements does not.
        counted = each.name and isinstance(each.before, int | float)
        values = () if counted and each.after is not None else (each.before, each.after)
        alike.setdefault((each.group, key), {}).setdefault(values, []).append(each)
    return [
        (len(several), _merged(several, key, a, b))
        for (_, key), ways in alike.items()
        for several in _commonest(list(ways.values()))
    ]


def _commonest(ways: list[list[Difference]]) -> list[list[Difference]]:
    """The ways in which a key changed, the rarer ones as one where there are many."""
    if len(ways) <= MOST_WAYS:
        return ways
    ranked = sorted(ways, key=len, reverse=True)
    # A way is named by itself only if it is common; where each is rare one row says so of all.
    usual = [way for way in ranked[: MOST_WAYS - 1] if len(way) > len(ways) / MOST_WAYS]
    return [*usual, [each for way in ranked[len(usual) :] for each in way]]


def _merged(alike: Sequence[Difference], key: str, a: Plan, b: Plan) -> Difference:
    first = alike[0]
    if len(alike) == 1:
        return first
    if first.before == alike[-1].before and first.after == alike[-1].after:
        return Difference(first.group, "", key, first.before, first.after, first.unit)
    if not isinstance(first.before, int | float) or not isinstance(first.after, int | float):
        words = _words([each.before for each in alike]), _words([each.after for each in alike])
        if (first.group, key) == ("table", "ranks"):
            names = {each.name for each in alike}
            words = _ranks_of(a, names), _ranks_of(b, names)
        return Difference(first.group, "", key, *words, first.unit)
    # Peaks and seconds of ranks do not add: they are there at the same time, on different machines.
    of, word = (max, "largest") if first.group == "rank" else (sum, "together")
    before = of(each.before for each in alike if isinstance(each.before, int | float))
    after = of(each.after for each in alike if isinstance(each.after, int | float))
    return Difference(first.group, "", f"{key}, {word}", before, after, first.unit)


def _words(values: Sequence[Value]) -> str:
    """Those that several have, the commonest first."""
    counts = Counter("(none)" if value is None else str(value) for value in values)
    named = [value for value, _ in counts.most_common(MOST_WORDS)]
    more = [f"{len(counts) - MOST_WORDS:,} others"] if len(counts) > MOST_WORDS else []
    return ", ".join([*named, *more])


def _ranks_of(plan: Plan, names: Set[str]) -> str:
    """All ranks that have something of one of the tables."""
    ranks = {rank for table in plan.tables if table.name in names for rank in table.ranks}
    text = ranks_text(ranks, plan.world_size)
    return text if text == "all" else f"among {text}"


def _group(group: Group, a: Mapping[str, Facts], b: Mapping[str, Facts]) -> Iterator[Difference]:
    for name in dict.fromkeys((*a, *b)):
        if name not in b:
            yield Difference(group, name, "presence", "there", None)
        elif name not in a:
            yield Difference(group, name, "presence", None, "there")
        else:
            yield from _changed(group, name, a[name], b[name])


def _changed(group: Group, name: str, a: Facts, b: Facts) -> Iterator[Difference]:
    absent: tuple[Value, Unit] = (None, "")
    for key in dict.fromkeys((*a, *b)):
        before, after = a.get(key, absent), b.get(key, absent)
        if before[0] != after[0]:
            yield Difference(group, name, key, before[0], after[0], before[1] or after[1])


def _plan_facts(plan: Plan) -> Facts:
    return {
        "ranks": (plan.world_size, ""),
        "slowest rank": (plan.max_rank_seconds, "seconds"),
        "lower bound": (plan.lower_bound_seconds, "seconds"),
        "units gathered ahead": (plan.prefetch, ""),
        "version": (plan.version, ""),
    }


def _tables(plan: Plan) -> dict[str, Facts]:
    return {table.name: _table_facts(table, plan.world_size) for table in plan.tables}


def _table_facts(table: TablePlan, world_size: int) -> Facts:
    return {
        "rows": (table.rows, ""),
        "dim": (table.dim, ""),
        "sharding": (table.sharding_type, ""),
        "kernel": (table.compute_kernel, ""),
        "optimizer": (table.optimizer, ""),
        "ranks": (ranks_text(table.ranks, world_size), ""),
        "bytes": (table_bytes(table), "bytes"),
        "seconds": (longest_seconds((table,)), "seconds"),
    }


def _units(plan: Plan) -> dict[str, Facts]:
    return {unit.name: _unit_facts(unit) for unit in plan.units}


def _unit_facts(unit: UnitPlan) -> Facts:
    return {
        "weights": (placement_text(unit.parameter), ""),
        "gradients": (placement_text(unit.gradient), ""),
        "optimizer states": (placement_text(unit.optimizer_state), ""),
        "optimizer": (unit.optimizer, ""),
        "freed after forward": ("yes" if unit.reshard_after_forward else "no", ""),
        "in host memory": ("yes" if unit.offloaded is True else "no", ""),
        "checkpointing": (unit.checkpointing, ""),
        "bytes per rank": (unit.bytes_per_rank, "bytes"),
        "padding": (unit.padding_bytes, "bytes"),
        "collectives per step": (unit.collectives, ""),
        "communication volume": (unit.bytes_per_step, "bytes"),
        "seconds": (unit.seconds, "seconds"),
    }


def _ranks(plan: Plan) -> dict[str, Facts]:
    return {str(totals.rank): _rank_facts(totals) for totals in plan.ranks}


def _rank_facts(totals: RankTotals) -> Facts:
    return {
        "peak": (totals.peak_bytes, "bytes"),
        "peak in": (totals.peak_phase, ""),
        "seconds": (totals.seconds, "seconds"),
    }


def _job_facts(*jobs: Job) -> Iterator[Facts]:
    """Keys of each job; of tables, those that all jobs have."""
    # A table that one job lacks is told once, as absent, and not by each of its keys.
    shared = set.intersection(*({table.name for table in job.tables} for job in jobs))
    for job in map(partial(_filled, jobs=jobs), jobs):
        tree: dict[str, Any] = msgspec.to_builtins(job)
        tree["tables"] = {t["name"]: t for t in tree["tables"] if t["name"] in shared}
        yield {key: (value, "") for key, value in _leaves("", tree)}


def _filled(job: Job, jobs: Iterable[Job]) -> Job:
    """With the sections of defaults that another job writes: what is the same is no difference."""
    lacking: dict[str, Any] = {}
    for other, name in itertools.product(jobs, ("memory", "parallel")):
        section = getattr(other, name)
        if getattr(job, name) is msgspec.UNSET and section is not msgspec.UNSET:
            lacking[name] = type(section)()
    return msgspec.structs.replace(job, **lacking)


def _cluster_facts(plan: Plan) -> Facts:
    found: Facts = {}
    for key, value in _leaves("", msgspec.to_builtins(plan.cluster)):
        found[key] = (value, "bytes" if key in ("hbm_cap", "ddr_cap") else "")
    return found


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Value]]:
    """Dotted key and value of everything inside; a list is one value, written as text."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(f"{path}.{key}" if path else str(key), inner)
    elif isinstance(value, list | tuple):
        yield path, ", ".join(str(item) for item in value) or "(none)"
    elif isinstance(value, bool):
        yield path, "yes" if value else "no"
    else:
        yield path, value
