from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardwright.cli.main import main
from shardwright.core.amount import Step
from shardwright.core.errors import EXIT_MISMATCH, InputError, MismatchError
from shardwright.core.job import Job, parse_job
from shardwright.core.plan import Plan, read_plan, sealed, write_plan
from shardwright.planner import explain, plan

TYPES = ("data_parallel", "table_wise", "row_wise", "column_wise")


def _job(ranks: int = 3, optimizer: str = "sgd", **sections: Any) -> Job:
    """A table of each type that ``optimizer`` allows, one unit of each mode."""
    types = TYPES if optimizer == "sgd" else TYPES[:3]
    return parse_job(
        {
            "model": {"bottom": [8, 16], "top": [6, 1]},
            "cluster": {"world_size": ranks},
            "train": {"optimizer": optimizer},
            "planner": {"units": {"bottom": "shard", "top": "replicate"}},
            "tables": [
                {"name": f"t_{kind}", "rows": 50 + i, "dim": 16, "sharding_types": [kind]}
                for i, kind in enumerate(types)
            ],
        }
        | sections
    )


@pytest.fixture(scope="module")
def made() -> Plan:
    return plan(_job())


def _names(made: Plan) -> list[str]:
    return [table.name for table in made.tables] + [unit.name for unit in made.units]


def test_the_plan_under_test_has_every_type_and_both_unit_modes(made: Plan) -> None:
    assert tuple(table.sharding_type for table in made.tables) == TYPES
    assert [unit.reshard_after_forward for unit in made.units] == [True, False]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
def test_every_step_of_every_explanation_evaluates_to_its_value(
    reevaluate: Callable[[Sequence[Step]], None], optimizer: str, ranks: int
) -> None:
    made = plan(_job(ranks, optimizer))
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


@pytest.mark.parametrize("kind", TYPES)
def test_a_table_has_its_bytes_and_seconds_explained_shard_by_shard(made: Plan, kind: str) -> None:
    table = made.tables[TYPES.index(kind)]
    found = explain.explain_tensor(made, table.name)
    assert [e.title for e in found] == [
        f"{table.fqn} on rank {rank}: {what}"
        for rank in table.ranks
        for what in ("bytes", "seconds per step")
    ]
    assert tuple(e.stored for e in found[::2]) == table.nbytes
    assert tuple(e.stored for e in found[1::2]) == table.seconds


@pytest.mark.parametrize("index", [0, 1])
def test_a_unit_has_the_bytes_of_every_rank_explained(made: Plan, index: int) -> None:
    unit = made.units[index]
    found = explain.explain_tensor(made, unit.name)
    assert [e.title for e in found] == [
        *(f"unit {unit.name} on rank {rank}: bytes" for rank in range(3)),
        f"unit {unit.name}: bytes of its tensors",
    ]
    # without states: weights and gradients, padding included
    assert [e.stored for e in found[:3]] == [2 * unit.bytes_per_rank] * 3


def test_a_table_is_found_by_name_and_by_fqn(made: Plan) -> None:
    by_fqn = explain.explain_tensor(made, "tables.t_row_wise.weight")
    assert by_fqn == explain.explain_tensor(made, "t_row_wise")


def test_a_dense_tensor_is_explained_by_its_unit(made: Plan) -> None:
    assert explain.explain_tensor(made, "top.0.bias") == explain.explain_tensor(made, "top")


def test_an_unknown_tensor_is_refused_with_the_known_ones(made: Plan) -> None:
    with pytest.raises(InputError) as caught:
        explain.explain_tensor(made, "tpo")
    assert str(caught.value) == (
        "--tensor: expected one of t_data_parallel, t_table_wise, t_row_wise, t_column_wise, "
        "bottom, top, got 'tpo'."
    )


def test_constants_in_an_explanation_have_their_source(made: Plan) -> None:
    seconds = explain.explain_tensor(made, "t_row_wise")[1]
    used = {s.name: s for s in seconds.steps if s.name in made.cluster.constants}
    assert used
    for name, step in used.items():
        constant = made.cluster.constants[name]
        assert (step.value, step.unit) == (constant.value, constant.unit)
        assert step.source == f"{constant.source}, {constant.date}"


def _raised(factor: float = 1.01) -> Callable[[Any], Any]:
    return lambda value: value + 1 if isinstance(value, int) else value * factor


TAMPERED: dict[str, tuple[tuple[str | int, ...], Callable[[Any], Any]]] = {
    "peak": (("ranks", 1, "peak_bytes"), _raised()),
    "peak phase": (("ranks", 1, "peak_phase"), lambda _: "load"),
    "bytes at the peak": (("ranks", 0, "at_peak", "weight"), _raised()),
    "exact bytes": (("ranks", 0, "exact", "weight"), _raised()),
    "host bytes": (("ranks", 0, "ddr_bytes"), _raised()),
    "rank seconds": (("ranks", 2, "seconds"), _raised()),
    "rank seconds by little": (("ranks", 2, "seconds"), _raised(1 + 1e-9)),
    "a rank left out": (("ranks",), lambda ranks: ranks[:2]),
    "table bytes": (("tables", 1, "nbytes", 0), _raised()),
    "table seconds": (("tables", 2, "seconds", 1), _raised()),
    "table rows": (("tables", 0, "rows"), _raised()),
    "table name": (("tables", 0, "name"), lambda _: "other"),
    "table type": (("tables", 1, "sharding_type"), lambda _: "data_parallel"),
    "table kernel": (("tables", 1, "compute_kernel"), lambda _: "dense"),
    "table optimizer": (("tables", 1, "optimizer"), lambda _: "rowwise_adagrad"),
    "shard size": (("tables", 2, "shard_sizes", 0, 0), _raised()),
    "owner": (("tables", 1, "ranks", 0), lambda rank: (rank + 1) % 3),
    "owner out of range": (("tables", 1, "ranks", 0), lambda _: 3),
    "owner below zero": (("tables", 1, "ranks", 0), lambda _: -1),
    "an owner too many": (("tables", 1, "ranks"), lambda ranks: [*ranks, 0]),
    "a table left out": (("tables",), lambda tables: tables[1:]),
    "unit seconds": (("units", 0, "seconds"), _raised()),
    "unit bytes": (("units", 0, "bytes_per_rank"), _raised()),
    "unit padding": (("units", 0, "padding_bytes"), _raised()),
    "unit placement": (("units", 1, "parameter"), lambda _: {"placement": "owned", "rank": 0}),
    "unit gradient": (("units", 1, "gradient"), lambda _: {"placement": "flat"}),
    "a unit left out": (("units",), lambda units: units[:1]),
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
    "assumptions": (("assumptions",), lambda notes: notes[1:]),
    "constant": (("cluster", "constants", "memory_rate", "value"), _raised()),
    "capacity": (("cluster", "ddr_cap"), _raised()),
    "batch": (("job", "batch", "size"), _raised()),
    "rows in the job": (("job", "tables", 0, "rows"), _raised()),
    "rows below zero": (("job", "tables", 0, "rows"), lambda _: -5),
    "optimizer in the job": (("job", "tables", 0, "optimizer"), lambda _: "rowwise_adagrad"),
    "ranks in the job": (("job", "cluster", "world_size"), lambda _: 2),
}  # fmt: skip


def _tampered(made: Plan, path: tuple[str | int, ...], change: Callable[[Any], Any]) -> Plan:
    document = json.loads(msgspec.json.encode(made))
    spot = document
    for key in path[:-1]:
        spot = spot[key]
    before = spot[path[-1]]
    spot[path[-1]] = change(before)
    assert spot[path[-1]] != before
    return msgspec.json.decode(json.dumps(document), type=Plan)


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


@pytest.mark.parametrize("case", TAMPERED)
def test_an_edited_plan_with_a_new_fingerprint_is_not_explained(made: Plan, case: str) -> None:
    edited = sealed(_tampered(made, *TAMPERED[case]))
    with pytest.raises(MismatchError) as caught:
        explain.draft_of(edited)
    assert caught.value.exit_code == EXIT_MISMATCH == 4
    assert str(caught.value).startswith("plan: ")


@pytest.mark.parametrize("resealed", [False, True])
@pytest.mark.parametrize("arguments", [[], ["--tensor", "t_row_wise"]])
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


@pytest.mark.parametrize("wanted", TYPES)
@pytest.mark.parametrize("name", ["t_table_wise", "tables.t_row_wise.weight"])
def test_why_not_tells_what_another_type_would_do(name: str, wanted: str) -> None:
    tables = [{"name": f"t_{kind}", "rows": 5000, "dim": 16} for kind in ("table_wise", "row_wise")]
    made = plan(_job(2, tables=tables))
    found = explain.why_not(made, name, wanted)
    assert found.wanted == wanted
    if wanted == found.chosen:
        assert found.reason == f"{wanted} is what was chosen."
    else:
        assert found.reason.startswith(f"{wanted} fits (rank ")
        assert " s per step (" in found.reason


def test_why_not_tells_the_shortfall() -> None:
    cluster = {"world_size": 2, "ddr_cap": "9 MiB"}
    made = plan(_job(2, tables=[{"name": "t", "rows": 200_000, "dim": 16}], cluster=cluster))
    reason = explain.why_not(made, "t", "table_wise").reason
    assert reason.startswith("table_wise does not fit: rank ")
    assert f" B of {9 * 2**20:,} B, " in reason


def test_why_not_tells_what_is_not_possible(made: Plan) -> None:
    found = explain.why_not(made, "t_row_wise", "grid_shard")
    assert found.reason == "grid_shard is not possible for this table here: only row_wise."


def test_why_not_needs_a_table(made: Plan) -> None:
    with pytest.raises(InputError, match=r"^--tensor: expected a table: t_data_parallel, "):
        explain.why_not(made, "top", "row_wise")
