from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from shardwright.core.errors import InputError, UnsupportedError
from shardwright.core.model import TableSpec
from shardwright.core.placement import Flat, Replicate
from shardwright.estimate.recordings import described
from shardwright.job.job import Job
from shardwright.planner.problem import Problem, canonical_order, make_problem, reservation_kind
from shardwright.planner.statistics.tables import over_shards
from shardwright.planner.strategy.tables import space_of

MakeJob = Callable[..., Job]


def _problem(job: Job) -> Problem:
    return make_problem(job, described(job))


def _types(job: Job) -> list[str]:
    return [choice.option.sharding_type for choice in _problem(job).tables[0]]


def test_a_table_may_be_placed_in_four_ways(make_job: MakeJob) -> None:
    assert _types(make_job(50)) == ["data_parallel", "table_wise", "row_wise", "column_wise"]


def test_a_table_too_narrow_to_cut_has_no_columns_to_offer(make_job: MakeJob) -> None:
    assert "column_wise" not in _types(make_job(50, dim=4))


def test_rowwise_adagrad_has_no_columns_to_offer(make_job: MakeJob) -> None:
    assert "column_wise" not in _types(make_job(50, train={"optimizer": "adagrad"}))


def test_only_allowed_types_are_offered(make_job: MakeJob) -> None:
    job = make_job(50, table={"sharding_types": ["row_wise", "table_wise"]})
    assert _types(job) == ["table_wise", "row_wise"]


@pytest.mark.parametrize("name", ["grid_shard", "table_row_wise", "table_column_wise"])
def test_types_of_hosts_are_offered_on_one_where_they_are_named(
    make_job: MakeJob, name: str
) -> None:
    assert _types(make_job(50, table={"sharding_types": [name]})) == [name]


def test_columns_are_cut_under_row_wise_adagrad_where_that_is_named(make_job: MakeJob) -> None:
    adagrad = {"optimizer": "adagrad"}
    assert _types(make_job(50, train=adagrad)) == ["data_parallel", "table_wise", "row_wise"]
    named = make_job(50, table={"sharding_types": ["column_wise"]}, train=adagrad)
    assert _types(named) == ["column_wise"]


@pytest.mark.parametrize(
    ("kernel", "types"),
    [("dense", ["data_parallel"]), ("fused", ["table_wise", "row_wise", "column_wise"])],
)
def test_a_kernel_goes_with_its_types(make_job: MakeJob, kernel: str, types: list[str]) -> None:
    assert _types(make_job(50, table={"compute_kernels": [kernel]})) == types


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"table": {"sharding_types": ["row_wise"], "compute_kernels": ["dense"]}},
            "tables.t0.sharding_types: expected any that can be planned for 't0', got row_wise: it "
            "needs a kernel other than dense, and the job allows only dense "
            "(tables.t0.compute_kernels). Name another one, or leave the key out.",
        ),
        (
            {"planner": {"estimator": {"is_inference": True}}},
            "job: planner.estimator.is_inference: expected none beside model.kind 'dlrm', whose "
            "steps are simulated, got True. Leave it out, or leave [model] out to plan the tables "
            "alone.",
        ),
        (
            {"planner": {"estimator": {"communication": ["fp32", "int8"]}}},
            "planner.estimator.communication: expected two of fp32, fp16, bf16 where tables are "
            "trained, got int8.",
        ),
        (
            {"planner": {"units": {"botom": "shard"}}},
            "planner.units: expected units bottom, top, got 'botom'.",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(
    make_job: MakeJob, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((InputError, UnsupportedError)) as caught:
        _problem(make_job(50, **changes))
    assert str(caught.value) == message


def test_rows_in_half_precision_take_half_the_seconds_on_the_wire(make_job: MakeJob) -> None:
    half = {"estimator": {"communication": ["fp16", "bf16"]}}
    for full, less in zip(
        _problem(make_job(50)).tables[0],
        _problem(make_job(50, planner=half)).tables[0],
        strict=True,
    ):
        for phase in () if full.option.traits.replicated else ("exchange_rows", "reduce"):
            pairs = zip(full.shard_costs, less.shard_costs, strict=True)
            assert all(b.seconds[phase] == a.seconds[phase] / 2 for a, b in pairs)


def test_every_shard_has_its_bytes_and_seconds(make_job: MakeJob) -> None:
    for choice in _problem(make_job(5, cluster={"world_size": 4})).tables[0]:
        assert len(choice.shard_costs) == choice.option.count == len(choice.option.shards)
        for cost in choice.shard_costs:
            assert cost.total_seconds == pytest.approx(math.fsum(cost.seconds.values()))
            assert cost.storage == (0, sum(cost.ddr.values()), 0)


def test_row_shards_hold_what_their_rows_hold(make_job: MakeJob) -> None:
    job = make_job(5, cluster={"world_size": 4}, train={"optimizer": "adagrad"})
    row_wise = _problem(job).tables[0][2]
    held = tuple(cost.ddr_bytes for cost in row_wise.shard_costs)
    assert held == tuple(rows * (16 * 4 + 4) for rows in (2, 2, 1, 0))


def test_a_replica_asks_nobody(make_job: MakeJob) -> None:
    choices = {c.option.sharding_type: c for c in _problem(make_job(50)).tables[0]}
    assert choices["data_parallel"].everywhere == 0
    assert choices["row_wise"].everywhere > choices["table_wise"].everywhere > 0


def test_a_choice_sums_over_its_shards(make_job: MakeJob) -> None:
    for choice in _problem(make_job(5, cluster={"world_size": 4})).tables[0]:
        seconds = [cost.total_seconds for cost in choice.shard_costs]
        assert over_shards(choice, "seconds") == pytest.approx(math.fsum(seconds), rel=1e-15)
        sums = zip(*(cost.storage for cost in choice.shard_costs), strict=True)
        assert choice.total_storage == tuple(map(sum, sums))


def test_a_unit_may_be_sharded_or_replicated(make_job: MakeJob) -> None:
    for choices in _problem(make_job(50)).units:
        assert [choice.placement for choice in choices] == [Replicate(), Flat(), Flat()]
        assert [choice.replicated for choice in choices] == [True, False, False]
        assert [choice.reshard for choice in choices] == [False, False, True]


def test_a_sharded_unit_gathers_in_both_directions_if_it_reshards(make_job: MakeJob) -> None:
    replicated, kept, resharded = _problem(make_job(50)).units[1]
    assert kept.seconds["forward"] > replicated.seconds["forward"]
    gather = kept.seconds["forward"] - replicated.seconds["forward"]
    assert kept.seconds["backward"] == pytest.approx(replicated.seconds["backward"], rel=1e-2)
    assert resharded.seconds["backward"] - kept.seconds["backward"] == pytest.approx(gather)
    assert kept.seconds["step"] < replicated.seconds["step"]


def test_a_model_is_planned_with_the_constants_of_a_machine_only(make_job: MakeJob) -> None:
    with pytest.raises(InputError) as caught:
        make_job(50, planner={"constants": "additive"})
    assert str(caught.value) == (
        "job: planner.constants: expected 'cluster' for kind 'dlrm', whose dense part is planned "
        "too, got 'additive'. Leave [model] out to plan the tables alone."
    )


@pytest.mark.parametrize("kind", ["heuristic", "inference"])
def test_the_dense_part_of_a_model_is_simulated_instead_of_guessed(
    make_job: MakeJob, kind: str
) -> None:
    with pytest.raises(InputError) as caught:
        make_job(50, planner={"reservation": {"kind": kind}})
    assert str(caught.value) == (
        "job: planner.reservation.kind: expected traced, percentage, absolute or none for kind "
        f"'dlrm', got '{kind}'. Its dense part is simulated to the byte; no multiplier is needed."
    )


def test_tables_alone_have_no_dense_part_to_trace(make_tables: MakeJob) -> None:
    with pytest.raises(UnsupportedError) as caught:
        _problem(make_tables(50, planner={"reservation": {"kind": "traced"}}))
    assert str(caught.value) == (
        "planner.reservation.kind: expected another kind for tables alone, got 'traced'. There is "
        "no dense part to trace: name its function in model.python, or say its bytes in "
        "planner.reservation.nbytes with kind 'absolute'."
    )


def test_tables_alone_have_no_units_to_force(make_tables: MakeJob) -> None:
    with pytest.raises(InputError) as caught:
        _problem(make_tables(50, planner={"units": {"top": "shard"}}))
    assert str(caught.value) == "planner.units: expected no unit: tables alone, got 'top'."


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        (
            {"ranks": {"t0": [0, 2]}},
            "planner.constraints.ranks.t0: expected ranks below 2, got 2.",
        ),
        (
            {"apart": [["t0", "t1", "t2"]]},
            "planner.constraints.apart[0]: expected at most 2 tables, one per rank, got 3.",
        ),
    ],
)
def test_constraints_beyond_the_ranks_there_are_are_refused(
    make_tables: MakeJob, constraints: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        _problem(make_tables(50, 60, 70, planner={"constraints": constraints}))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("profile", "kind"), [("cluster", "none"), ("torchrec-1.9", "heuristic"), ("additive", "none")]
)
def test_a_profile_has_its_own_reservation_for_tables_alone(
    make_tables: MakeJob, profile: str, kind: str
) -> None:
    job = make_tables(50, cluster={}, planner={"constants": profile})
    assert reservation_kind(job) == kind


def test_a_model_is_traced_where_nothing_is_reserved(make_job: MakeJob) -> None:
    problem = _problem(make_job(50))
    assert reservation_kind(problem.job) == "traced"
    assert problem.capacity == problem.cluster.capacity


@pytest.mark.parametrize(
    ("section", "left"),
    [
        ({"kind": "none"}, 1000),
        ({"kind": "percentage", "percentage": 0.25}, 750),
        ({"kind": "absolute", "nbytes": 300}, 700),
        ({"kind": "absolute", "nbytes": 3000}, 0),
        ({"kind": "heuristic", "percentage": 0.0, "dense_bytes": 10, "multiplier": 2.5}, 815),
        ({"kind": "inference", "percentage": 0.0, "dense_bytes": 10}, 982),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_reserved_comes_off_the_memory_that_decides(
    make_tables: MakeJob, device: str, section: dict[str, Any], left: int
) -> None:
    cap = {"cpu": "ddr_cap", "cuda": "hbm_cap"}[device]
    problem = _problem(
        make_tables(
            50,
            cluster={"compute_device": device, "world_size": 2, cap: 1000},
            planner={"reservation": section},
            batch={"size": 1},
        )
    )
    assert problem.decisive_capacity == left
    other = 0 if device == "cpu" else 1
    assert problem.capacity[other] == problem.cluster.capacity[other]


def test_the_order_of_a_problem_depends_on_no_name_but_between_equals() -> None:
    tables = [TableSpec("c", 9, 4), TableSpec("a", 9, 4), TableSpec("b", 7, 4)]
    assert [tables[i].name for i in canonical_order(tables)] == ["b", "a", "c"]


def test_a_plan_says_that_nothing_is_reserved_and_no_optimizer_known(make_tables: MakeJob) -> None:
    notes = _problem(make_tables(50, 60)).assumptions
    assert "nothing is reserved for a dense part: planner.reservation is not given" in notes
    assert "2 tables name no optimizer, t0 first: their state is counted as 0 bytes" in notes
    one = _problem(make_tables(50)).assumptions
    assert "table t0 names no optimizer: its state is counted as 0 bytes" in one
    named = _problem(make_tables(50, table={"optimizer": "none"})).assumptions
    assert not any("no optimizer" in note for note in named)


def _slow_kernels(make_tables: MakeJob) -> Job:
    cluster = {"preset": "h100-8", "world_size": 16}
    return make_tables(700, 50, 100_000, dim=32, cluster=cluster)


def test_choices_that_are_known_are_those_that_are_made_anew(make_tables: MakeJob) -> None:
    job = _slow_kernels(make_tables)
    few = make_problem(job, described(job), slow=False)
    new = make_problem(job, described(job), slow=True)
    more = make_problem(job, described(job), slow=True, known=few)
    assert sum(map(len, few.tables)) < sum(map(len, more.tables))
    assert more.tables == new.tables
    space = space_of(few, few.tables, few.capacity)
    assert space_of(more, more.tables, more.capacity, space) == space_of(
        new, new.tables, new.capacity
    )


def test_shards_that_kernels_share_are_counted_once(
    make_tables: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = {"preset": "h100-8", "world_size": 16, "local_world_size": 2}
    job = make_tables(701, 51, 100_001, dim=64, cluster=cluster)
    options = [choice.option for choices in _problem(job).tables for choice in choices]
    listed = sum(len(option.runs) for option in options)
    shared = sum({id(option.runs): len(option.runs) for option in options}.values())
    assert listed > 2 * shared
    monkeypatch.setattr("shardwright.planner.choices.MAX_SHARDS", shared)
    assert _problem(job).tables
    monkeypatch.setattr("shardwright.planner.choices.MAX_SHARDS", shared - 1)
    with pytest.raises(InputError, match="shards to choose from"):
        _problem(job)
