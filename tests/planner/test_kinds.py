"""Kinds of tables that a plan chooses: none where full tables fit, else those of the largest."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import UNSET
from plans import plan
from study.found import read_study, spread_of

from shardwright.core.errors import InputError, NoPlanError
from shardwright.core.kinds import KNOWN_AUC, SEEDS_VARY, kind_of, nbytes
from shardwright.job.job import Job, parse_job
from shardwright.job.plan import Plan
from shardwright.planner.explain.basis import basis
from shardwright.planner.planner import find_kinds

STUDY = Path(__file__).parents[2] / "validation" / "cpu-2-cores" / "embeddings_study.json"
ROWS = {"a": 20_000, "b": 60_000, "c": 30_000, "d": 150, "e": 40_000}


def _job(memory: str, kinds: tuple[str, ...] = ("full", "qr", "hash"), **tables: Any) -> Job:
    own = [
        {"name": name, "rows": rows, "dim": 16, **tables.get(name, {})}
        for name, rows in ROWS.items()
    ]
    return parse_job(
        {
            "tables": own,
            "cluster": {"preset": "cpu-host", "world_size": 2, "ddr_cap": memory},
            "batch": {"size": 32},
            "planner": {"kinds": kinds},
            "embeddings": {"collisions": 8} if {"qr", "hash"} & {*kinds} else {},
        }
    )


def _kinds(made: Plan) -> dict[str, str]:
    return {table.name: kind_of(table) for table in made.job.tables}


def _known(made: Plan) -> list[str]:
    return [fact.value for fact in basis(made) if fact.what == "AUC beside full tables"]


def test_a_plan_says_what_its_kinds_are_known_to_cost_in_quality() -> None:
    assert _known(plan(_job("20 MiB"))) == []
    (said,) = _known(plan(_job("2.5 MiB", b={"kind": "tt"})))
    assert f"qr {KNOWN_AUC['qr']:+.3f} (seeds vary by {SEEDS_VARY})" in said
    assert "tt not measured" in said


def test_what_kinds_are_known_to_cost_is_what_the_study_measured() -> None:
    study = read_study(STUDY)
    reached, varied = {}, []
    for kind in study.kinds:
        if kind.section.operation is UNSET or kind.section.operation == "mult":
            found = spread_of(kind, "all", lambda quality: quality.auc)
            assert found is not None
            varied.append(found.deviation)
            reached[kind.section.kind] = found.mean
    full = reached.pop("full")
    assert {kind: round(auc - full, 3) for kind, auc in reached.items()} == KNOWN_AUC
    assert round(max(varied), 3) == SEEDS_VARY


def _saved(made: Plan) -> list[str]:
    return [fact.value for fact in basis(made) if fact.what == "kinds of embeddings"]


def test_tables_that_fit_stay_full() -> None:
    made = plan(_job("20 MiB"))
    assert set(_kinds(made).values()) == {"full"}
    assert _saved(made) == []


@pytest.mark.parametrize(
    ("memory", "small"), [("4 MiB", "b"), ("2.5 MiB", "be"), ("900 KiB", "bcea")]
)
def test_as_few_as_possible_are_of_another_kind_the_largest_first(memory: str, small: str) -> None:
    made = plan(_job(memory, ("full", "qr")))
    assert {name for name, kind in _kinds(made).items() if kind == "qr"} == set(small)
    own = sum(nbytes(table) for table in made.job.tables if table.name in small)
    (said,) = _saved(made)
    assert said.startswith("full" if len(small) < 3 else "qr")
    assert own < sum(ROWS[name] for name in small) * 16 * 4 / 7


def test_a_table_that_names_its_kind_keeps_it() -> None:
    made = plan(_job("2 MiB", ("full", "qr"), b={"kind": "tt"}, e={"kind": "full"}))
    assert _kinds(made) == {"a": "qr", "b": "tt", "c": "qr", "d": "full", "e": "full"}


def test_a_later_kind_is_taken_where_an_earlier_one_does_not_fit_for_all() -> None:
    made = plan(_job("500 KiB", ("full", "double_hash", "tt")))
    kinds = set(_kinds(made).values())
    assert "tt" in kinds
    assert "full" not in kinds - {_kinds(made)["d"]}


def test_what_fits_with_no_kind_is_refused_with_the_shortfall() -> None:
    with pytest.raises(NoPlanError):
        plan(_job("20 KiB"))


@pytest.mark.parametrize(("memory", "kind"), [("2 MiB", "int8"), ("1300 KiB", "int4")])
def test_rows_of_bytes_serve_where_full_tables_do_not_fit(memory: str, kind: str) -> None:
    made = plan(_job(memory, ("full", "int8", "int4")))
    assert kind in set(_kinds(made).values())
    weights = sum(totals.at_peak["weight"] for totals in made.ranks)
    assert weights == sum(map(nbytes, made.job.tables))
    kernels = {table.name: table.compute_kernel for table in made.tables}
    packed = {name for name, found in _kinds(made).items() if found != "full"}
    assert {name for name, kernel in kernels.items() if kernel == "quant"} == packed


def test_a_plan_of_chosen_kinds_is_planned_again_alike() -> None:
    made = plan(_job("2.5 MiB"))
    again = plan(made.job)
    assert _kinds(again) == _kinds(made)
    assert all(table.kind is not UNSET or table.name == "d" for table in made.job.tables)


@pytest.mark.parametrize(
    ("keys", "types", "part"),
    [
        ({"kind": "memcom"}, ["column_wise"], "a.scale"),
        ({"kind": "mixed_dim", "width": 3}, ["column_wise"], "a"),
        ({"kind": "tt", "rank": 3}, ["column_wise"], "a.first"),
    ],
)
def test_a_placement_that_a_part_cannot_have_is_refused_by_its_name(
    keys: dict[str, Any], types: list[str], part: str
) -> None:
    table = {"name": "a", "rows": 500, "dim": 8, "sharding_types": types, **keys}
    job = parse_job(
        {
            "model": {"bottom": [8], "top": [1]},
            "tables": [table],
            "cluster": {"preset": "local", "world_size": 2},
        }
    )
    with pytest.raises(InputError, match=f"expected any that can be planned for '{part}', got"):
        plan(job)


@pytest.mark.parametrize("third", [1, 2, 3, 4])
def test_as_few_tables_as_can_be_are_of_the_third_kind_and_all_others_of_the_second(
    third: int,
) -> None:
    def of(job: Job) -> list[str]:
        """Kinds of the tables that are worth one, the largest first."""
        free = [table for table in job.tables if ROWS[table.name] > 1000]
        return [kind_of(t) for t in sorted(free, key=lambda table: -ROWS[table.name])]

    def look(job: Job) -> Any:
        kinds = of(job)
        fits = "full" not in kinds and kinds.count("hash") >= third
        return SimpleNamespace(draft=job if fits else None)

    found: Any = find_kinds(_job("1 MiB"), look)
    assert of(found.draft) == ["hash"] * third + ["qr"] * (4 - third)
