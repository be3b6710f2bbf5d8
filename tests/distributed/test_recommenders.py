"""Embeddings in a module of the user's own, cut as a plan says: it trains as on one process, and
takes the bytes that its plan foresees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import recommender_tasks as tasks
import torch
from combinations import rare, slow
from pool import Pool

from shardwright.core.timeline import decode, exact_bytes, phase_peaks
from shardwright.estimate import recordings
from shardwright.job.job import Job
from shardwright.job.plan import Plan

TYPES = ("data_parallel", "table_wise", "row_wise", "column_wise", "dense")
TABLES = ("users", "seen", "shown.items", "shown.tags", "shops")
TURNED = tuple(TYPES[n:] + TYPES[:n] for n in range(len(TYPES)))  # every kind for every table
MOST_APART = 0.01  # of a peak
PLANS: dict[bytes, Plan] = {}


def plan(job: Job) -> Plan:
    """Made once for all tests of a job."""
    key = msgspec.json.encode(job, order="deterministic")
    if key not in PLANS:
        PLANS[key] = recordings.plan(job)
    return PLANS[key]


def forced(*kinds: str) -> dict[str, Any]:
    """A kind for each table, in turn."""
    named = {path: kinds[i % len(kinds)] for i, path in enumerate(TABLES)}
    if "column_wise" in kinds:
        named["shops"] = "row_wise"  # which has too few columns
    return {"tables": named}


def kinds_of(made: Plan) -> dict[str, str]:
    return {table.name: table.sharding_type for table in made.tables}


@pytest.mark.parametrize(
    ("kinds", "world_size"),
    [
        *((TURNED[0], 2), slow(TURNED[1], 3), slow(TURNED[2], 2), slow(TURNED[3], 1)),
        slow(TURNED[4], 2),
        *(rare((kind,), world_size) for kind in TYPES for world_size in (1, 2, 3)),
        *(rare(TYPES, world_size) for world_size in (1, 3, 4)),
    ],
)
def test_sgd_trains_as_on_one_process_and_takes_bytes_as_planned(
    pool: Pool, kinds: tuple[str, ...], world_size: int
) -> None:
    job = tasks.job_of(world_size, planner=forced(*kinds))
    made = plan(job)
    wanted = forced(*kinds)["tables"]
    assert kinds_of(made) == {path: kind for path, kind in wanted.items() if kind != "dense"}
    _check(made, pool.run(world_size, tasks.trained, job=job, made=made))


@pytest.mark.parametrize(
    ("optimizer", "kinds", "world_size"),
    [
        ("adam", ("table_wise", "data_parallel", "row_wise"), 2),
        slow("sgd", ("row_wise",), 3),
        *(rare("adam", ("row_wise",), world_size) for world_size in (1, 2)),
        *(rare("sgd", ("table_wise", "data_parallel", "row_wise"), size) for size in (1, 3)),
    ],
)
def test_row_wise_adagrad_is_exact_beside_units_of_another_optimizer(
    pool: Pool, kinds: tuple[str, ...], optimizer: str, world_size: int
) -> None:
    train = {"optimizer": optimizer, "learning_rate": 0.01, "table_learning_rate": 0.2}
    train["table_optimizer"] = "rowwise_adagrad"
    job = tasks.job_of(world_size, planner=forced(*kinds), train=train)
    made = plan(job)
    _check(made, pool.run(world_size, tasks.trained, job=job, made=made))


@pytest.mark.parametrize(
    ("kinds", "world_size", "reduced"),
    [
        *((TURNED[0], 2, "fp32"), slow(TURNED[1], 1, "bf16"), slow(TURNED[2], 2, "fp32")),
        *(rare((kind,), size, "fp32") for kind in TYPES[:4] for size in (1, 2, 4)),
        *(rare((kind,), 1, "bf16") for kind in TYPES[:4]),
        *(rare(*case) for case in ((TYPES, 1, "fp32"), (TYPES, 1, "bf16"), (TYPES, 4, "fp32"))),
    ],
)
def test_rows_are_given_in_what_units_compute_in_and_learn_in_fp32(
    pool: Pool, kinds: tuple[str, ...], world_size: int, reduced: str
) -> None:
    """Sums of bf16 over several ranks would be rounded in another order."""
    memory = {"param_dtype": "bf16", "reduce_dtype": reduced}
    job = tasks.job_of(world_size, planner=forced(*kinds), memory=memory)
    made = plan(job)
    wanted = forced(*kinds)["tables"]
    assert kinds_of(made) == {path: kind for path, kind in wanted.items() if kind != "dense"}
    _check(made, pool.run(world_size, tasks.trained_in_half, job=job, made=made))


@pytest.mark.parametrize(
    ("kinds", "world_size"),  # not 3: thirds of a loss are rounded in each gradient
    [
        *(slow(TYPES[1:3], 2), slow(TYPES[3:4] + TYPES[:1], 2)),
        *(rare((kind,) * 2, size) for kind in TYPES[:4] for size in (1, 2, 4)),
        *(rare(TYPES[1:3], size) for size in (1, 4)),
    ],
)
def test_embeddings_made_in_half_precision_are_tables_of_it(
    pool: Pool, kinds: tuple[str, ...], world_size: int
) -> None:
    named = dict(zip(TABLES, kinds, strict=False))
    job = tasks.job_of(world_size, "halved", planner={"tables": named}, batch={"size": 256})
    made = plan(job)
    assert kinds_of(made) == named
    assert {made.model.table(table.fqn).dtype for table in made.tables} == {"bf16"}
    results = pool.run(world_size, tasks.trained_in_half, job=job, made=made)
    _check(made, results, 2 * MOST_APART)  # rows that ids share are summed: how many is chance


@pytest.mark.parametrize("world_size", [2, slow(3), rare(1)])
def test_gradients_of_rows_that_travel_once_take_bytes_as_planned(
    pool: Pool, world_size: int
) -> None:
    train = {"table_optimizer": "rowwise_adagrad"}
    planner = {"tables": dict.fromkeys(TABLES[:2], "row_wise"), "dedup": True}
    sections = {"planner": planner, "train": train, "batch": {"size": 256}}
    job = tasks.job_of(world_size, "halved", **sections)
    made = plan(job)
    assert all(table.dedup for table in made.tables)
    results = pool.run(world_size, tasks.bytes_measured, job=job, made=made)
    _check(made, [({}, events) for events in results])


def _check(made: Plan, results: list[Any], most: float = MOST_APART) -> None:
    predicted = decode(made.timeline)
    wanted = {key: size for key, size in exact_bytes(predicted).items() if size}
    measured = [event for _, events in results for event in events]
    assert {key: size for key, size in exact_bytes(measured).items() if size} == wanted
    for rank in range(made.world_size):
        foreseen, seen = (
            max(sum(kinds.values()) for (r, _), kinds in phase_peaks(events).items() if r == rank)
            for events in (predicted, measured)
        )
        assert foreseen == pytest.approx(seen, rel=most)
    assert [differences for differences, _ in results] == [{}] * made.world_size


@pytest.mark.slow
def test_a_rank_keeps_its_share_of_a_table_and_never_has_the_whole_of_it(pool: Pool) -> None:
    rows, dim = 40_000, 64
    job = tasks.job_of(2, "wide", planner={"tables": {"users": "row_wise"}})
    for most, kept in pool.run(2, tasks.bytes_of_applying, job=job, made=plan(job)):
        assert kept == rows // 2 * dim * 4
        assert most < kept + 6.5 * 2**20  # a piece of 4 MiB, and at most 8,191 rows


@pytest.mark.slow
def test_a_checkpoint_of_one_plan_is_loaded_under_another(pool: Pool, tmp_path: Path) -> None:
    train = {"optimizer": "adam", "table_optimizer": "rowwise_adagrad"}
    jobs = [
        tasks.job_of(2, planner=forced(kind), train=train) for kind in ("row_wise", "table_wise")
    ]
    plans = [plan(job) for job in jobs]
    arguments = {"job": jobs[0], "plans": plans, "folder": tmp_path}
    for found in pool.run(2, tasks.saved_and_loaded, **arguments):
        assert found[0] == 0
        assert found[1] < tasks.CLOSE


def test_a_table_follows_a_schedule_and_is_looked_up_without_training(pool: Pool) -> None:
    job = tasks.job_of(2, planner=forced("row_wise", "data_parallel"))
    for found in pool.run(2, tasks.scheduled, job=job, made=plan(job)):
        assert found["users"] == 0
        assert all(found[path] > 0 for path in TABLES[1:])
        assert found["forward"] < tasks.CLOSE


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kinds", [("row_wise", "data_parallel"), ("data_parallel",)])
def test_a_frozen_table_stays_as_it_is_until_it_learns_again(
    pool: Pool, kinds: tuple[str, ...]
) -> None:
    job = tasks.job_of(2, planner=forced(*kinds))
    for found in pool.run(2, tasks.table_frozen, job=job, made=plan(job)):
        frozen, after, _ = found.pop("users")
        assert frozen == 0 < after
        assert all(moved > 0 and beside == 0 for moved, _, beside in found.values())


@pytest.mark.parametrize("part", ["", "shown"])
def test_tables_around_which_all_is_frozen_are_not_trained_without_a_word(
    pool: Pool, part: str
) -> None:
    job = tasks.job_of(2, planner=forced("row_wise", "data_parallel"))
    for first, second, moved in pool.run(2, tasks.all_frozen, job=job, made=plan(job), part=part):
        assert f"frozen, which rows are none of. Call model.get_submodule('{part}" in first
        assert "none, while all parameters of 'shown' are frozen" in first
        assert ("got one without a gradient" in second) if not part else (second == "")
        assert moved == 0


def test_freezing_a_model_reaches_its_tables(pool: Pool) -> None:
    job = tasks.job_of(2, planner=forced("row_wise", "data_parallel"))
    made = plan(job)
    for frozen, thawed in pool.run(2, tasks.frozen_but_a_part, job=job, made=made, part="first"):
        assert frozen
        assert all(name.startswith("first.") for name in frozen)
        assert {table.fqn for table in made.tables} <= thawed


@pytest.mark.parametrize("kinds", [("row_wise", "column_wise"), ("table_wise", "data_parallel")])
def test_a_state_of_the_whole_model_is_loaded_with_its_tables(
    pool: Pool, kinds: tuple[str, ...]
) -> None:
    job = tasks.job_of(2, planner=forced(*kinds))
    for first, second, said in pool.run(2, tasks.loaded_whole, job=job, made=plan(job)):
        assert set(first.values()) == set(second.values()) == {0.0}
        assert "users.weight: expected shape (6101, 16), got (6100, 16)." in said


@pytest.mark.parametrize("name", ["users.weight", "first.0.weight"])
def test_what_was_frozen_since_it_was_planned_is_named(pool: Pool, name: str) -> None:
    job = tasks.job_of(2, planner=forced("row_wise", "data_parallel"))
    for said in pool.run(2, tasks.frozen_before, job=job, made=plan(job), name=name):
        assert said == (
            f"{name}: expected a parameter that is trained, as in the plan, got a frozen one. "
            "Freeze it after sw.apply, or plan again for the model with it frozen."
        )


@pytest.mark.parametrize("world_size", [2, rare(1), rare(3)])
def test_an_average_of_weights_is_kept_in_a_model_of_its_own(pool: Pool, world_size: int) -> None:
    job = tasks.job_of(world_size, planner=forced("row_wise", "data_parallel", "table_wise"))
    for said, distances in pool.run(world_size, tasks.averaged, job=job, made=plan(job)):
        assert said.startswith("tables '")
        assert "got copy.deepcopy. Apply the plan to a second one, sw.apply(" in said
        assert max(distances.values()) < tasks.CLOSE


@pytest.mark.parametrize(
    ("optimizer", "holds"),
    [
        *(("rowwise_adagrad", True), slow("sgd", False)),
        *(rare(*case) for case in (("rowwise_adagrad", False), ("sgd", True))),
    ],
)
def test_gradients_of_tables_are_accumulated_until_a_guard_is_settled(
    pool: Pool, optimizer: str, holds: bool
) -> None:
    train = {"table_optimizer": optimizer}
    job = tasks.job_of(2, planner=forced("row_wise", "data_parallel"), train=train)
    arguments = {"job": job, "made": plan(job), "guarded": True, "holds": holds}
    for found in pool.run(2, tasks.accumulated, **arguments):
        assert found < 10 * tasks.CLOSE


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("holds", [False, True])
def test_gradients_of_tables_are_not_accumulated_without_a_guard(pool: Pool, holds: bool) -> None:
    job = tasks.job_of(2, planner=forced("row_wise", "data_parallel"))
    arguments = {"job": job, "made": plan(job), "guarded": False, "holds": holds}
    for found in pool.run(2, tasks.accumulated, **arguments):
        assert "one backward before the optimizer's step" in found
        assert "Hand a sw.Guard to apply" in found


def test_what_a_guard_refused_is_forgotten_by_tables(pool: Pool) -> None:
    job = tasks.job_of(2, planner=forced("row_wise", "data_parallel"))
    assert all(moved > 0 for moved in pool.run(2, tasks.goes_on, job=job, made=plan(job)))


def test_bags_without_ids_are_zeros(pool: Pool) -> None:
    job = tasks.job_of(2, planner=forced("row_wise", "data_parallel"))
    for found in pool.run(2, tasks.empty_bags, job=job, made=plan(job)):
        assert len(found) == 3
        assert not found.any()


def test_tables_are_refused_where_a_gradient_scaler_would_scale_them(pool: Pool) -> None:
    job = tasks.job_of(1, planner=forced("row_wise"))
    arguments = {"job": job, "made": plan(job)}
    (said,) = pool.run(1, tasks.under_autocast, dtype=torch.float16, **arguments)
    assert "under autocast: expected bfloat16" in said
    assert pool.run(1, tasks.under_autocast, dtype=torch.bfloat16, **arguments) == [""]


@pytest.mark.slow
def test_a_module_of_tables_alone_trains(pool: Pool) -> None:
    tables = {"users": "row_wise", "items": "table_wise"}
    job = tasks.job_of(2, "factors", planner={"tables": tables})
    made = plan(job)
    assert made.units == ()
    for differences, _ in pool.run(2, tasks.trained, job=job, made=made):
        assert differences == {}


def test_what_no_plan_has_seen_is_refused_by_the_embedding_s_name(pool: Pool) -> None:
    job = tasks.job_of(1, planner=forced("row_wise"))
    ((weight, offsets, ids),) = pool.run(1, tasks.refused, job=job, made=plan(job))
    assert weight.startswith("embedding 'users': expected to be looked up alone")
    assert weight.endswith("Keep it in a unit: planner.tables = { 'users' = 'dense' }.")
    assert offsets.startswith("embedding 'seen': expected bags of one length")
    assert ids.startswith(
        "ids of table 'users', sample 0: expected ids from 0 to 6100, got 1000000"
    )


IN_HALF = {"memory": {"param_dtype": "bf16"}}
COLLECTED = ("bags.embedding_bags.users", "bags.embedding_bags.goods", "words.embeddings.words")


@pytest.mark.parametrize(
    ("pooling", "kinds", "world_size"),
    [
        ("mean", TYPES[1:4], 2),
        *(slow("sum", TYPES[2:4] + TYPES[1:2], 3), slow("mean", TYPES[3:4] + TYPES[:2], 2)),
        *(rare(way, (kind,), 2) for kind in TYPES[:4] for way in ("sum", "mean")),
        *(rare("sum", TYPES[1:4], size) for size in (1, 2, 4)),
        *(rare("mean", TYPES[1:4], size) for size in (1, 3)),
    ],
)
def test_torchrec_s_collections_are_tables_of_a_plan(
    pool: Pool, pooling: str, kinds: tuple[str, ...], world_size: int
) -> None:
    named = {name: kinds[i % len(kinds)] for i, name in enumerate(COLLECTED)}
    model = {"python": "recommenders:collections", "arguments": {"pooling": pooling}}
    job = tasks.job_of(world_size, "collections", model=model, planner={"tables": named})
    made = plan(job)
    assert {name: kind for name, kind in kinds_of(made).items() if name != "shops"} == named
    _check(made, pool.run(world_size, tasks.trained, job=job, made=made))


@pytest.mark.parametrize(
    ("sections", "kinds", "world_size"),
    [
        (IN_HALF, ("row_wise", "column_wise"), 2),
        slow({}, ("table_wise", "data_parallel"), 3),
        *(rare({}, ("row_wise", "column_wise"), size) for size in (1, 2)),
        *(rare(IN_HALF, ("table_wise", "data_parallel"), size) for size in (2, 3)),
    ],
)
def test_collections_in_half_precision_take_bytes_as_planned(
    pool: Pool, sections: dict[str, Any], kinds: tuple[str, ...], world_size: int
) -> None:
    named = {name: kinds[i % len(kinds)] for i, name in enumerate(COLLECTED)}
    model = {"python": f"recommenders:{'' if sections else 'halved_'}collections"}
    sections = {**sections, "model": model, "planner": {"tables": named}}
    job = tasks.job_of(world_size, "collections", **sections)
    made = plan(job)
    assert {name: kind for name, kind in kinds_of(made).items() if name != "shops"} == named
    results = pool.run(world_size, tasks.bytes_measured, job=job, made=made)
    _check(made, [({}, events) for events in results])


FORMED = "expected a mapping of features to ids, or a KeyedJaggedTensor, got "
USERS, GOODS = (f"ids of table 'bags.embedding_bags.{name}'" for name in ("users", "goods"))
WRONG = {
    "high": f"{GOODS}, feature 'bought', position 11: expected ids from 0 to ",
    "low": f"{USERS}, feature 'user', position 0: expected ids from 0 to ",
    "float values": f"{USERS}, feature 'user': expected int64 or int32, got float32.",
    "square values": "values of features: expected a tensor [N], got [18, 2].",
    "list of values": "values of features: expected a tensor [N], got list.",
    "no values": "values of features: expected a tensor [N], got NoneType.",
    "float lengths": "lengths of features: expected int64 or int32, got float32.",
    "list of lengths": "lengths of features: expected a tensor, got list.",
    "too few": "values of features: expected 35, got 36.",
    "negative": f"{USERS}, feature 'user': expected lengths from 0 that add up to",
    "odd lengths": "features: expected as many bags of each of 3 features as lengths, got 17 ",
    "unknown": "features: expected 'bought', got user, seen, sold. Pass every feature.",
    "uneven": "features: expected as many bags of each of 3 features as lengths, got 17 ",
    "stride": "features: expected as many bags of each of 3 features as lengths, got 18 ",
    "weights": "features: expected 36 weights, got [1].",
    "text": "weights of features: expected a tensor, got str.",
    "complex": "weights of features: expected real numbers, got complex ones.",
    "meta": "ids of 'bags': expected tensors that can be looked up, got '",
    "none": f"features: {FORMED}NoneType.",
    "mapping": f"features: {FORMED}dict.",
}


@pytest.mark.parametrize("overlap", ["none", "rows"])
def test_bags_of_a_collection_that_are_none_are_one_line_on_every_rank(
    pool: Pool, overlap: str
) -> None:
    """And none of them hangs: the others hear of it, and look up again."""
    named = dict(zip(COLLECTED, ("row_wise", "table_wise", "row_wise"), strict=True))
    options = {"planner": {"tables": named}, "train": {"overlap": overlap}}
    job = tasks.job_of(2, "collections", **options)
    (first, apart), (second, too) = pool.run(2, tasks.wrong_collections, job=job, made=plan(job))
    assert apart == too == 0
    for case, text in WRONG.items():
        assert second[case].startswith(f"InputError: {text}"), second[case]
        start = f"PeerError: ids were refused on rank 1, no rows were moved: {text}"
        assert first[case].startswith(start), first[case]
        assert "\n" not in first[case] + second[case]
    assert set(first) == set(WRONG)
