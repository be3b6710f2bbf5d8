from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from plans import plan
from tampering import changed, leaves

from shardwright.cli.main import main
from shardwright.core.amount import Step
from shardwright.core.errors import EXIT_MISMATCH, InputError, MismatchError
from shardwright.job.job import Job, parse_job
from shardwright.job.plan import Plan, read_plan, sealed, write_plan
from shardwright.planner import explain

TYPES = ("data_parallel", "table_wise", "row_wise", "column_wise")
UNITS = {"units": {"bottom": "shard", "top": "replicate"}, "dense": {"reshard": True}}
KERNELS = ("fused", "fused_uvm", "fused_uvm_caching", "key_value")


def _job(ranks: int = 3, optimizer: str = "sgd", **sections: Any) -> Job:
    """A table of each type that ``optimizer`` allows, one unit of each mode."""
    types = TYPES if optimizer == "sgd" else TYPES[:3]
    return parse_job(
        {
            "model": {"bottom": [8, 16], "top": [6, 1]},
            "cluster": {"world_size": ranks},
            "train": {"optimizer": optimizer},
            "planner": UNITS,
            "tables": [
                {"name": f"t_{kind}", "rows": 50 + i, "dim": 16, "sharding_types": [kind]}
                for i, kind in enumerate(types)
            ],
        }
        | sections
    )


def _tables(constants: str = "torchrec-1.9", **sections: Any) -> Job:
    """Tables alone on two hosts: every kernel of an accelerator, bags, sequences and weights."""
    tables: list[dict[str, Any]] = [
        {"name": f"t_{kernel}", "rows": 1000 + i, "dim": 64, "compute_kernels": [kernel]}
        for i, kernel in enumerate(KERNELS)
    ]
    for table in tables:
        table["sharding_types"] = ["table_wise", "row_wise", "column_wise"]
        table["cache"] = {"stats": [500.0, 0.5, 0.25]}
    tables += [
        {"name": "bags", "rows": 3001, "dim": 32, "pooling_factors": [20.0, 0.5]},
        {"name": "list", "rows": 77, "dim": 32, "pooled": False, "pooling_factors": [3.0]},
        {"name": "heavy", "rows": 500, "dim": 32, "module_weighted": True, "output_dtype": "fp16"},
        {"name": "local", "rows": 5003, "dim": 128, "sharding_types": ["table_row_wise"]},
        {"name": "grid", "rows": 5003, "dim": 128, "sharding_types": ["grid_shard"]},
    ]
    return parse_job(
        {
            "tables": [{"optimizer": "rowwise_adagrad"} | table for table in tables],
            "cluster": {
                "world_size": 4,
                "local_world_size": 2,
                "compute_device": "cuda",
                "hbm_cap": "1 GiB",
                "ssd_cap": "1 TiB",
            },
            "batch": {"size": 48},
            "planner": {"constants": constants},
        }
        | sections
    )


@pytest.fixture(scope="module")
def made() -> Plan:
    return plan(_job())


@pytest.fixture(scope="module")
def made_of_tables() -> Plan:
    return plan(_tables())


def _names(made: Plan) -> list[str]:
    return [table.name for table in made.tables] + [unit.name for unit in made.units]


def test_the_plan_under_test_has_every_type_and_both_unit_modes(made: Plan) -> None:
    assert tuple(table.sharding_type for table in made.tables) == TYPES
    assert [unit.reshard_after_forward for unit in made.units] == [True, False]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
def test_every_step_of_every_explanation_evaluates_to_its_value(
    reevaluate: Callable[[Sequence[Step]], None], optimizer: str, ranks: int
) -> None:
    made = plan(_job(ranks, optimizer))
    for name in _names(made):
        for found in explain.explain_tensor(made, name):
            reevaluate(found.steps)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("constants", ["torchrec-1.9", "cluster"])
def test_every_step_evaluates_for_every_kernel_and_profile(
    reevaluate: Callable[[Sequence[Step]], None], constants: str, inference: bool
) -> None:
    estimator = {"pipeline_type": "train_prefetch_sparse_dist", "is_inference": inference}
    planner = {"constants": constants, "estimator": estimator}
    made = plan(_tables(constants, planner=planner))
    assert {table.compute_kernel for table in made.tables} >= set(KERNELS)
    for name in _names(made):
        for found in explain.explain_tensor(made, name):
            reevaluate(found.steps)


def test_every_step_evaluates_for_additive_costs(
    reevaluate: Callable[[Sequence[Step]], None],
) -> None:
    made = plan(
        parse_job(
            {
                "tables": [
                    {"name": "a", "rows": 9000, "dim": 64},
                    {"name": "b", "rows": 9, "dim": 8},
                ],
                "planner": {"constants": "additive"},
            }
        )
    )
    for name in _names(made):
        for found in explain.explain_tensor(made, name):
            reevaluate(found.steps)


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_the_last_step_is_the_number_that_is_stored(ranks: int) -> None:
    made = plan(_job(ranks))
    for name in _names(made):
        for found in explain.explain_tensor(made, name):
            assert found.steps[-1].value == pytest.approx(found.stored, rel=1e-12)
            assert found.steps[-1].unit == found.unit


def test_each_shape_of_shard_is_explained_once_with_its_ranks() -> None:
    made = plan(_job(3, tables=[{"name": "t", "rows": 50, "dim": 16}]))
    rows = explain.explain_tensor(
        plan(
            _job(3, tables=[{"name": "t", "rows": 50, "dim": 16, "sharding_types": ["row_wise"]}])
        ),
        "t",
    )
    assert made.tables[0].name == "t"
    assert [e.title for e in rows] == [
        *(f"tables.t.weight on ranks 0-1: {what}" for what in WHAT),
        *(f"tables.t.weight on rank 2: {what}" for what in WHAT),
        "tables.t.weight on every rank: seconds to address its own ids",
    ]
    assert [e.ranks for e in rows] == [(0, 1)] * 4 + [(2,)] * 4 + [(0, 1, 2)]


WHAT = (
    "DDR bytes",
    "seconds per step",
    "bytes of ids in per step",
    "bytes of rows out per step",
)


@pytest.mark.parametrize("name", [f"t_{kernel}" for kernel in KERNELS])
def test_every_memory_that_a_kernel_fills_is_explained(made_of_tables: Plan, name: str) -> None:
    table = next(t for t in made_of_tables.tables if t.name == name)
    found = {e.title.rpartition(": ")[2]: e for e in explain.explain_tensor(made_of_tables, name)}
    for tier, nbytes in zip(("HBM", "DDR", "SSD"), table.shards[0].storage, strict=True):
        assert (f"{tier} bytes" in found) == bool(nbytes)
        if nbytes:
            assert found[f"{tier} bytes"].stored == nbytes
    assert found["seconds per step"].stored == table.shards[0].total_seconds


def test_seconds_that_count_in_no_total_are_shown_beside_it(made_of_tables: Plan) -> None:
    found = explain.explain_tensor(made_of_tables, "bags")
    seconds = next(e for e in found if e.title.endswith("seconds per step"))
    assert any(note.startswith("input_dist takes ") for note in seconds.notes)


@pytest.mark.parametrize("index", [0, 1])
def test_a_unit_has_the_bytes_of_every_rank_explained(made: Plan, index: int) -> None:
    unit = made.units[index]
    found = explain.explain_tensor(made, unit.name)
    kept, facts = found[:-4], [e.title for e in found[-4:]]
    assert facts == [
        f"unit {unit.name}: bytes of its tensors",
        f"unit {unit.name}: collectives per step",
        f"unit {unit.name}: full buffers of its collectives per step",
        f"unit {unit.name}: seconds per step",
    ]
    assert sorted(rank for e in kept for rank in e.ranks) == [0, 1, 2]
    assert len({e.title for e in kept}) == len(kept)
    # without states: weights and gradients, padding included
    assert {e.stored for e in kept} == {2 * unit.bytes_per_rank}
    assert found[-3].stored == unit.collectives
    assert found[-2].stored == unit.bytes_per_step
    assert found[-1].stored == unit.seconds


def test_a_table_is_found_by_name_and_by_fqn(made: Plan) -> None:
    by_fqn = explain.explain_tensor(made, "tables.t_row_wise.weight")
    assert by_fqn == explain.explain_tensor(made, "t_row_wise")


def test_a_dense_tensor_is_explained_by_its_unit(made: Plan) -> None:
    assert explain.explain_tensor(made, "top.0.bias") == explain.explain_tensor(made, "top")


def test_an_unknown_tensor_is_refused_with_the_known_ones(made: Plan) -> None:
    with pytest.raises(InputError) as caught:
        explain.explain_tensor(made, "tpo")
    assert str(caught.value) == (
        "--tensor or --unit: expected a table or unit of the plan, got 'tpo'. "
        "Did you mean 'top'? There are 'top' and 5 more."
    )


def test_constants_in_an_explanation_have_their_source(made: Plan) -> None:
    seconds = explain.explain_tensor(made, "t_row_wise")[1]
    used = {s.name: s for s in seconds.steps if s.name in made.cluster.constants}
    assert used
    for name, step in used.items():
        constant = made.cluster.constants[name]
        assert (step.value, step.unit) == (constant.value, constant.unit)
        assert step.source == f"{constant.source}, {constant.date}"


def _facts(made: Plan) -> dict[str, tuple[str, str]]:
    return {fact.what: (fact.value, fact.origin) for fact in explain.basis(made)}


def test_the_basis_shows_what_the_job_says_and_what_is_a_default(made_of_tables: Plan) -> None:
    facts = _facts(made_of_tables)
    assert facts["lookups"] == (
        "pooled (8), sequence (1)",
        "tables.pooled of list, others the default",
    )
    assert facts["dtype"] == ("fp32", "tables.dtype not given: the default")
    assert facts["optimizer of tables"] == (
        "rowwise_adagrad, fused in backward",
        "tables.optimizer",
    )
    assert facts["input pipeline"][1] == "planner.estimator.pipeline_type not given: the default"
    assert facts["outputs at the peak"][0].startswith("counted where")
    assert facts["mode"][0] == "training"
    assert facts["HBM of a rank"] == ("1,073,741,824 B (1.00 GiB)", "cluster.hbm_cap")
    assert facts["DDR of a rank"][1] == "preset 'torchrec-1.9'"
    assert facts["reservation"][0].startswith("heuristic: 15 % (the default), dense parameters 0 B")
    assert facts["reservation"][1].endswith("the rule of profile 'torchrec-1.9'")
    assert facts["costs"][1] == "planner.constants"


def test_the_basis_shows_what_a_job_sets() -> None:
    planner = {
        "constants": "torchrec-1.9",
        "estimator": {
            "pipeline_type": "train_sparse_dist",
            "count_ephemeral": True,
            "is_inference": True,
            "communication": ["fp16", "bf16"],
            "cache_load_factor": 0.3,
        },
        "reservation": {"kind": "absolute", "nbytes": 12345},
    }
    facts = _facts(plan(_tables(planner=planner)))
    where = "planner.estimator"
    assert facts["input pipeline"] == ("train_sparse_dist", f"{where}.pipeline_type")
    assert facts["outputs at the peak"] == ("always counted", f"{where}.count_ephemeral")
    assert facts["mode"] == ("inference: no backward", f"{where}.is_inference")
    assert facts["rows on the wire"] == ("fp16 forward, bf16 backward", f"{where}.communication")
    assert facts["cached share of rows"] == ("0.3 (2 tables)", f"{where}.cache_load_factor")
    assert facts["reservation"][1] == "planner.reservation.kind"
    assert facts["reservation"][0].startswith("absolute: 12,345 B")


def _raised(factor: float = 1.01) -> Callable[[Any], Any]:
    return lambda value: value + 1 if isinstance(value, int) else value * factor


Path_ = tuple[str | int, ...]
TAMPERED: dict[str, tuple[Path_, Callable[[Any], Any]]] = {
    "peak": (("ranks", 1, "peak_bytes"), _raised()),
    "peak phase": (("ranks", 1, "peak_phase"), lambda _: "load"),
    "bytes at the peak": (("ranks", 0, "at_peak", "weight"), _raised()),
    "exact bytes": (("ranks", 0, "exact", "weight"), _raised()),
    "host bytes": (("ranks", 0, "ddr_bytes"), _raised()),
    "rank seconds": (("ranks", 2, "seconds"), _raised()),
    "rank seconds by little": (("ranks", 2, "seconds"), _raised(1 + 1e-9)),
    "seconds of a part": (("ranks", 2, "parts", "forward"), _raised()),
    "a rank left out": (("ranks",), lambda ranks: ranks[:2]),
    "table bytes": (("tables", 1, "shards", 0, 4, "weight"), _raised()),
    "table seconds": (("tables", 2, "shards", 0, 2, "lookup"), _raised()),
    "table rows": (("tables", 0, "rows"), _raised()),
    "table name": (("tables", 0, "name"), lambda _: "other"),
    "table type": (("tables", 1, "sharding_type"), lambda _: "data_parallel"),
    "table kernel": (("tables", 1, "compute_kernel"), lambda _: "dense"),
    "table optimizer": (("tables", 1, "optimizer"), lambda _: "rowwise_adagrad"),
    "cached share": (("tables", 1, "cache_load_factor"), lambda _: 0.5),
    "shard rows": (("tables", 2, "shards", 0, 1, 0), _raised()),
    "shard columns": (("tables", 3, "shards", 0, 1, 1), _raised()),
    "number of shards": (("tables", 2, "shards", 0, 1, 2), lambda _: 2**20),
    "no shards": (("tables", 2, "shards"), lambda _: []),
    "owner": (("tables", 1, "shards", 0, 0), lambda rank: (rank + 1) % 3),
    "owner out of range": (("tables", 1, "shards", 0, 0), lambda _: 3),
    "owner below zero": (("tables", 1, "shards", 0, 0), lambda _: -1),
    "a shard too many": (("tables", 1, "shards"), lambda shards: [*shards, shards[0]]),
    "a table left out": (("tables",), lambda tables: tables[1:]),
    "unit seconds": (("units", 0, "seconds"), _raised()),
    "unit bytes": (("units", 0, "bytes_per_rank"), _raised()),
    "unit padding": (("units", 0, "padding_bytes"), _raised()),
    "unit placement": (("units", 1, "parameter"), lambda _: {"placement": "owned", "rank": 0}),
    "unit gradient": (("units", 1, "gradient"), lambda _: {"placement": "flat"}),
    "unit modules": (("units", 0, "modules"), lambda _: ["top"]),
    "unit without modules": (("units", 0, "modules"), lambda _: []),
    "unit resharding": (("units", 0, "reshard_after_forward"), lambda _: False),
    "unit collectives": (("units", 0, "collectives"), _raised()),
    "unit bytes per step": (("units", 1, "bytes_per_step"), _raised()),
    "a unit left out": (("units",), lambda units: units[:1]),
    "prefetch": (("prefetch",), lambda _: 1),
    "block": (("blocks", 0, 3, 0), _raised()),
    "block rank": (("blocks", 0, 4), _raised()),
    "a block left out": (("blocks",), lambda blocks: blocks[:-1]),
    "event bytes": (("timeline", 0, 0, 5), _raised()),
    "event duration": (("timeline", -1, 0, 7), _raised()),
    "event count": (("timeline", 0, 1), lambda _: 2**20),
    "an event left out": (("timeline",), lambda events: events[:-1]),
    "slowest rank": (("max_rank_seconds",), _raised()),
    "lower bound": (("lower_bound_seconds",), _raised()),
    "gap": (("gap",), _raised()),
    "reservation": (("reserved", "ddr_left"), _raised()),
    "kind of reservation": (("reserved", "kind"), lambda _: "none"),
    "assumptions": (("assumptions",), lambda notes: notes[1:]),
    "search": (("search", "name"), lambda _: "exact"),
    "options of the search": (("search", "options"), _raised()),
    "more feasible than proposed": (("search", "feasible"), lambda _: 10**6),
    "nothing feasible": (("search", "feasible"), lambda _: 0),
    "proved by no proof": (("search", "proved_seconds"), lambda _: 1e-9),
    "constant": (("cluster", "constants", "memory_rate", "value"), _raised()),
    "capacity": (("cluster", "ddr_cap"), _raised()),
    "batch": (("job", "batch", "size"), _raised()),
    "rows in the job": (("job", "tables", 0, "rows"), _raised()),
    "rows below zero": (("job", "tables", 0, "rows"), lambda _: -5),
    "optimizer in the job": (("job", "tables", 0, "optimizer"), lambda _: "rowwise_adagrad"),
    "ranks in the job": (("job", "cluster", "world_size"), lambda _: 2),
    "reservation in the job": (("job", "planner", "reservation", "kind"), lambda _: "percentage"),
}  # fmt: skip


# Changes of one number that no plan has: its format says no.
MALFORMED: dict[str, tuple[Path_, int, str]] = {
    "more shards than a run may have": (("tables", 2, "shards", 0, 1, 2), 2**40, "<= 1048576"),
    "a run of no shards": (("tables", 2, "shards", 0, 1, 2), 0, ">= 1"),
}


def _edited(made: Plan, path: Path_, change: Callable[[Any], Any]) -> str:
    document = json.loads(msgspec.json.encode(made))
    spot = document
    for key in path[:-1]:
        spot = spot[key]
    before = spot[path[-1]]
    spot[path[-1]] = change(before)
    assert spot[path[-1]] != before
    return json.dumps(document)


def _tampered(made: Plan, path: Path_, change: Callable[[Any], Any]) -> Plan:
    return msgspec.json.decode(_edited(made, path, change), type=Plan)


def test_a_plan_as_it_was_made_is_explained(made: Plan, tmp_path: Path) -> None:
    write_plan(made, tmp_path / "plan.json")
    assert explain.draft_of(read_plan(tmp_path / "plan.json")).peak_bytes == tuple(
        totals.peak_bytes for totals in made.ranks
    )


@pytest.mark.parametrize("case", TAMPERED)
def test_an_edited_plan_is_not_read(made: Plan, tmp_path: Path, case: str) -> None:
    path = tmp_path / "plan.json"
    write_plan(_tampered(made, *TAMPERED[case]), path)
    with pytest.raises(MismatchError, match="The file was edited after planning"):
        read_plan(path)


@pytest.mark.parametrize("case", MALFORMED)
def test_a_plan_edited_to_what_none_can_be_is_not_read(
    made: Plan, tmp_path: Path, case: str
) -> None:
    place, value, wanted = MALFORMED[case]
    path = tmp_path / "plan.json"
    path.write_text(_edited(made, place, lambda _: value))
    with pytest.raises(InputError, match=r"tables\[2\].shards\[0\]\[1\]\[2\]") as caught:
        read_plan(path)
    assert wanted in str(caught.value)


@pytest.mark.parametrize("case", TAMPERED)
def test_an_edited_plan_with_a_new_fingerprint_is_not_explained(made: Plan, case: str) -> None:
    edited = sealed(_tampered(made, *TAMPERED[case]))
    with pytest.raises(MismatchError) as caught:
        explain.draft_of(edited)
    assert caught.value.exit_code == EXIT_MISMATCH == 4
    assert str(caught.value).startswith("plan: ")


# What no number of a plan of tables alone depends on, and what only a new search could tell.
NOT_FELT = (
    *("version", "fingerprint", "job.train", "job.data", "job.model", "job.batch.sequence"),
    *("search.wall_seconds", "search.proposals", "search.feasible", "search.slow_kernels"),
    *("job.planner.partitioner", "job.planner.reservation", "job.cluster.preset"),
    *("job.planner.estimator.count_ephemeral",),
)
NOT_FELT_OF_TABLES = ("fqn", "constraint_weighted", "pooled", "cache.stats.1")


@pytest.mark.slow
def test_every_number_of_a_plan_of_tables_alone_is_recomputed() -> None:
    tables = [
        {"name": "cached", "rows": 1000, "dim": 64, "compute_kernels": ["fused_uvm_caching"]},
        {"name": "bags", "rows": 3001, "dim": 32, "pooling_factors": [20.0, 0.5]},
    ]
    tables[0]["cache"] = {"load_factor": 0.3, "stats": [500.0, 0.5, 0.25]}
    cluster = {"world_size": 2, "compute_device": "cuda", "hbm_cap": "1 GiB"}
    made = plan(_tables(tables=tables, cluster=cluster))
    unnoticed = []
    for path in leaves(json.loads(msgspec.json.encode(made))):
        name = ".".join(map(str, path))
        of_table = path[:2] == ("job", "tables") and name.endswith(NOT_FELT_OF_TABLES)
        if not name.startswith(NOT_FELT) and not of_table and _is_explained(made, path):
            unnoticed.append(name)
    assert unnoticed == []


def _is_explained(made: Plan, path: Path_) -> bool:
    """Whether nobody notices another value at ``path``."""
    try:
        explain.draft_of(sealed(_tampered(made, path, changed)))
    except (MismatchError, msgspec.ValidationError):  # another plan, or none at all
        return False
    return True


@pytest.mark.parametrize("resealed", [False, True])
@pytest.mark.parametrize("arguments", [[], ["--tensor", "t_row_wise"], ["--statistic", "ranks"]])
def test_explaining_an_edited_plan_exits_with_4(
    made: Plan,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    resealed: bool,
    arguments: list[str],
) -> None:
    edited = _tampered(made, *TAMPERED["table bytes"])
    path = tmp_path / "plan.json"
    write_plan(sealed(edited) if resealed else edited, path)
    assert main(["explain", str(path), *arguments]) == 4
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("search", ["bounded", "proposers"])
@pytest.mark.parametrize("constants", ["torchrec-1.9", "cluster"])
def test_plans_of_every_search_are_made_again(constants: str, search: str) -> None:
    made = plan(_tables(planner={"constants": constants, "search": search}))
    assert explain.draft_of(made).rank_seconds == pytest.approx([r.seconds for r in made.ranks])


def test_a_cached_share_that_the_search_chose_is_used_again() -> None:
    cache = {"load_factor": 0.1, "stats": [5000.0, 0.5, 0.25]}
    tables = [
        {"name": f"t{i}", "rows": 400_000, "dim": 64, "compute_kernels": ["fused_uvm_caching"]}
        | {"cache": cache, "sharding_types": ["table_wise"]}
        for i in range(3)
    ]
    planner = {
        "constants": "torchrec-1.9",
        "search": "proposers",
        "proposers": [{"kind": "scaleup"}],
        "reservation": {"kind": "none"},
    }
    cluster = {"world_size": 2, "compute_device": "cuda", "hbm_cap": "160 MiB"}
    made = plan(_tables(planner=planner, tables=tables, cluster=cluster))
    shares = [table.cache_load_factor for table in made.tables]
    assert any(share is not None and not math.isclose(share, 0.1) for share in shares)
    explain.draft_of(made)
    assert ("the search",) in {(origin,) for _, origin in _facts_of_shares(made)}


def _facts_of_shares(made: Plan) -> list[tuple[str, str]]:
    return [(f.value, f.origin) for f in explain.basis(made) if f.what == "cached share of rows"]


@pytest.mark.parametrize("wanted", TYPES)
@pytest.mark.parametrize("name", ["t_table_wise", "tables.t_row_wise.weight"])
def test_why_not_shows_what_another_type_would_do(name: str, wanted: str) -> None:
    tables = [{"name": f"t_{kind}", "rows": 5000, "dim": 16} for kind in ("table_wise", "row_wise")]
    made = plan(_job(2, tables=tables))
    found = explain.why_not(made, name, wanted)
    assert found.wanted == wanted
    if wanted == found.chosen:
        assert (found.verdict, found.reason) == ("chosen", f"{wanted} is what was chosen.")
    else:
        assert found.reason.startswith(f"{wanted} (")
        assert " fits (rank " in found.reason
        assert "s per step (" in found.reason
        assert found.seconds is not None
        assert (found.seconds > made.max_rank_seconds) == (found.verdict == "slower")


def test_why_not_shows_the_shortfall() -> None:
    cluster = {"world_size": 2, "ddr_cap": "9 MiB"}
    made = plan(_job(2, tables=[{"name": "t", "rows": 200_000, "dim": 16}], cluster=cluster))
    found = explain.why_not(made, "t", "table_wise")
    assert found.verdict == "does not fit"
    assert "does not fit: rank " in found.reason
    assert f"of {9 * 2**20:,} B DDR, {found.missing:,} B too much." in found.reason
    assert found.missing > 0


def test_why_not_of_tables_alone_shows_the_memory_that_is_short() -> None:
    tables = [{"name": "t", "rows": 400_000, "dim": 64, "optimizer": "sgd"}]
    cluster = {
        "world_size": 4,
        "local_world_size": 2,
        "compute_device": "cuda",
        "hbm_cap": "80 MiB",
    }
    made = plan(_tables(tables=tables, cluster=cluster))
    found = explain.why_not(made, "t", "data_parallel")
    assert found.verdict == "does not fit"
    weights = 400_000 * 64 * 4
    assert f"{made.reserved.hbm_left:,} B HBM" in found.reason
    assert weights - made.reserved.hbm_left < found.missing < weights


def test_why_not_says_when_another_way_is_as_good() -> None:
    """All ranks wait for the large table, whatever is done with the tiny one."""
    tables = [
        {"name": "large", "rows": 9000, "dim": 128, "sharding_types": ["table_wise"]},
        {"name": "tiny", "rows": 10, "dim": 8},
    ]
    made = plan(parse_job({"tables": tables, "planner": {"constants": "additive"}}))
    (wanted,) = {"table_wise", "column_wise"} - {made.tables[1].sharding_type}
    found = explain.why_not(made, "tiny", wanted)
    assert found.verdict == "as good"
    assert " and is as good: " in found.reason


def test_numbers_of_why_not_are_those_of_the_plan_that_is_forced() -> None:
    """One table on one rank's worth of choices: forcing the type gives what why-not foretold."""
    tables = [{"name": "t", "rows": 9000, "dim": 64, "optimizer": "sgd"}]
    made = plan(_tables(tables=tables))
    for wanted in {*TYPES, "table_row_wise"} - {made.tables[0].sharding_type}:
        forced = [tables[0] | {"sharding_types": [wanted]}]
        again = plan(_tables(tables=forced))
        found = explain.why_not(made, "t", wanted)
        assert found.seconds == pytest.approx(again.max_rank_seconds, rel=1e-9)


IMPOSSIBLE: dict[str, tuple[Job, str, str, str]] = {
    "type not allowed": (_job(), "t_row_wise", "grid_shard", "the job allows only row_wise"),
    "adagrad by columns": (
        _job(optimizer="adam", tables=[{"name": "t", "rows": 50, "dim": 16}]),
        *("t", "column_wise", "rowwise_adagrad sums over all columns of a row"),
    ),
    "nothing to cut": (
        _job(tables=[{"name": "t", "rows": 50, "dim": 16, "min_partition": 9}]),
        *("t", "column_wise", "there is nothing to cut: no width that divides 16 columns"),
    ),
    "kernel of a dlrm": (
        _job(tables=[{"name": "t", "rows": 50, "dim": 16}]),
        *("t", "fused_uvm", "this version's runtime carries out fused for routed tables"),
    ),
    "kernel not allowed": (_tables(), "t_fused", "fused_uvm", "the job allows only fused "),
    "type by its kernel": (
        _tables(tables=[{"name": "t", "rows": 9, "dim": 8, "compute_kernels": ["fused"]}]),
        *("t", "data_parallel", "it needs dense, and the job allows only fused"),
    ),
    "dense without replicas": (
        _tables(tables=[{"name": "t", "rows": 9, "dim": 8, "sharding_types": ["row_wise"]}]),
        *("t", "dense", "only data_parallel is dense"),
    ),
    "fused replicas": (
        _tables(tables=[{"name": "t", "rows": 9, "dim": 8, "sharding_types": ["data_parallel"]}]),
        *("t", "fused", "data_parallel is dense"),
    ),
    "a cpu": (
        _tables(
            tables=[{"name": "t", "rows": 9, "dim": 8}],
            cluster={"world_size": 2, "compute_device": "cpu"},
        ),
        *("t", "fused_uvm", "a CPU has no faster memory"),
    ),
    "quantised": (_tables(), "bags", "quant", "it serves quantised tables in inference"),
    "no drive": (
        _tables(
            "cluster",
            cluster={"preset": "local", "compute_device": "cuda", "hbm_cap": "1 GiB"},
            tables=[{"name": "t", "rows": 9, "dim": 8}],
        ),
        *("t", "key_value", "there is no SSD"),
    ),
    "additive": (
        parse_job(
            {
                "tables": [{"name": "t", "rows": 9, "dim": 8}],
                "planner": {"constants": "additive"},
            }
        ),
        *("t", "row_wise", "the additive costs know table_wise and column_wise only"),
    ),
    "torchrec's sequences": (
        _tables(planner={"constants": "torchrec-1.9", "options": "torchrec"}),
        *("list", "table_row_wise", "it pools what it looks up, and the rows of this table stay"),
    ),
    "kept together": (
        _tables(
            planner={
                "constants": "torchrec-1.9",
                "constraints": {"together": [["bags", "heavy"]]},
            }
        ),
        *("bags", "row_wise", "kept together"),
    ),
    "pinned": (
        _tables(
            planner={"constants": "torchrec-1.9", "constraints": {"ranks": {"bags": [1]}}}
        ),
        *("bags", "row_wise", "it uses every rank, and planner.constraints keep the table"),
    ),
}  # fmt: skip


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_why_not_shows_what_is_not_possible_and_why(case: str) -> None:
    job, name, wanted, why = IMPOSSIBLE[case]
    found = explain.why_not(plan(job), name, wanted)
    assert found.verdict == "impossible", found.reason
    assert found.reason.startswith(f"{wanted} is not possible: ")
    assert why in found.reason


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (names[number % 3], wanted)
        for number, wanted in enumerate(explain.WANTED)
        for names in (("bags", "list", "heavy"), ("t_fused", "local", "grid"))
    ],
)
def test_why_not_has_a_reason_for_every_type_and_kernel(
    made_of_tables: Plan, name: str, wanted: str
) -> None:
    found = explain.why_not(made_of_tables, name, wanted)
    assert found.reason.startswith(wanted)
    assert found.reason.endswith(".")
    assert (found.option == "") == (found.verdict in ("chosen", "impossible"))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("wanted", ["table_column_wise", "fused_uvm", "key_value", "grid_shard"])
def test_why_not_tries_what_a_search_looks_at_on_request_only(
    made_of_tables: Plan, wanted: str
) -> None:
    found = explain.why_not(made_of_tables, "bags", wanted)
    assert found.verdict in ("slower", "faster", "as good")


def test_why_not_needs_a_table_and_a_type_or_kernel(made: Plan) -> None:
    known = r"^--tensor or --unit: expected a table or unit of the plan, got 'tpo'. Did you mean '"
    with pytest.raises(InputError, match=known):
        explain.why_not(made, "tpo", "row_wise")
    with pytest.raises(InputError, match=r"^--why-not: expected one of data_parallel, .*quant_uvm"):
        explain.why_not(made, "t_row_wise", "rowwise")


STATISTICS_OF = {
    "a dlrm": _job(2, "adam"),
    "torchrec": _tables(),
    "our costs": _tables("cluster"),
    "one rank": _job(1),
    "short memory": _tables(
        "cluster",
        tables=[{"name": f"t{i}", "rows": 50_000 * (i + 1), "dim": 64} for i in range(8)],
        cluster={"preset": "h100-8", "world_size": 2, "hbm_cap": "150 MiB"},
    ),
    "one large shard": _tables(
        tables=[{"name": "t", "rows": 10, "dim": 4, "sharding_types": ["table_wise"]}]
    ),
    "no time": _tables(
        "cluster", tables=[{"name": "t", "rows": 9, "dim": 8, "pooling_factors": [0.0]}]
    ),
}


@functools.cache
def _planned(case: str) -> Plan:
    return plan(STATISTICS_OF[case])


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", explain.STATISTICS)
@pytest.mark.parametrize("case", STATISTICS_OF)
def test_every_statistic_is_explained_step_by_step(
    reevaluate: Callable[[Sequence[Step]], None], case: str, name: str
) -> None:
    for found in explain.explain_statistic(_planned(case), name):
        reevaluate(found.steps)
        near = 1e-12 if found.unit == "" else 0.0
        assert found.steps[-1].value == pytest.approx(found.stored, rel=1e-9, abs=near)
        assert found.steps[-1].unit == found.unit


def test_an_unknown_statistic_is_refused_with_the_known_ones(made: Plan) -> None:
    with pytest.raises(InputError, match=r"^--statistic: expected one of ranks, .*, got 'luck'"):
        explain.explain_statistic(made, "luck")


RESERVED: dict[str, Any] = {
    "a share": {"kind": "percentage", "percentage": 0.3},
    "an amount": {"kind": "absolute", "nbytes": 12_345_678},
    "traced": {"kind": "traced", "nbytes": 12_345_678},
    "heuristic": {"kind": "heuristic", "dense_bytes": 1_234_567, "multiplier": 5.5},
    "inference": {"kind": "inference", "dense_bytes": 1_234_567},
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("case", RESERVED)
def test_what_every_rule_leaves_is_explained(
    reevaluate: Callable[[Sequence[Step]], None], case: str
) -> None:
    planner = {"constants": "torchrec-1.9", "reservation": RESERVED[case]}
    for found in explain.explain_statistic(plan(_tables(planner=planner)), "reservation"):
        reevaluate(found.steps)
        assert found.steps[-1].value == found.stored


def _binding(made: Plan) -> str:
    (bound, *_) = explain.explain_statistic(made, "lower_bound")
    return next(note for note in bound.notes if note.startswith("binding: "))


def test_the_bound_names_what_it_rests_on() -> None:
    assert _binding(plan(_tables("cluster"))).startswith("binding: the work of all tables, spread")
    assert _binding(_planned("one large shard")) == (
        "binding: t has no cut whose shards all take less"
    )
    assert "within the HBM of all ranks" in _binding(_planned("short memory"))
