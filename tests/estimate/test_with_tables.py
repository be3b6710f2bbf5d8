"""Which embeddings in a module of the user's own are tables, and which stay in units."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import recommenders
import torch
from torch import nn

from shardwright.core.errors import InputError, NoPlanError
from shardwright.core.quantities import SAME_SECONDS
from shardwright.core.sharding import FREE
from shardwright.core.timeline import decode
from shardwright.estimate.recordings import found_for, plan, plan_module
from shardwright.job.job import Job, parse_job
from shardwright.job.plan import Plan
from shardwright.planner import explain
from shardwright.planner.planner import watch_of

TABLES = {"users", "seen", "shops", "shown.items", "shown.tags"}


def job_of(function: str, cap: str = "1 GiB", ranks: int = 2, **sections: Any) -> Job:
    cluster = {"preset": "local", "world_size": ranks, "ddr_cap": cap}
    model = {"python": f"recommenders:{function}", "arguments": sections.pop("arguments", {})}
    train = {"optimizer": "sgd", **sections.pop("train", {})}
    batch = {"size": 8}
    document = {"model": model, "cluster": cluster, "batch": batch, "train": train, **sections}
    return parse_job(document)


def tables_of(made: Plan) -> set[str]:
    return {table.name for table in made.tables}


def units_of(made: Plan) -> set[str]:
    return {name for unit in made.units for name in unit.tensors}


@pytest.mark.parametrize("function", ["build", "uses"])
@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_no_plan_can_beat_counts_what_a_module_computes_by_itself_once(
    function: str, prefetch: int, ranks: int
) -> None:
    job = job_of(function, ranks=ranks, planner={"dense": {"prefetch": prefetch}})
    found = found_for(job, watch_of(job))
    assert found.draft is not None
    assert 0 < found.bound <= found.draft.max_rank_seconds * (1 + SAME_SECONDS)


# ---- which can be --------------------------------------------------------------------------------

REASONS = {
    "tied": "a weight shared with 'head.weight'",
    "held": "a weight shared with 'holder.also.weight'",
    "read": "a use of its weight",
    "twice": "looked up several times in a step",
    "normed": "with max_norm or scale_grad_by_freq",
    "scaled": "with max_norm or scale_grad_by_freq",
    "precise": "of float64",
    "offsets": "offsets, while ids [B, L] with a padding_idx can be one",
    "largest": "a bag with mode max or include_last_offset",
    **{f"layers.{n}.place": "in a part that repeats" for n in range(5)},
}


def test_what_is_used_as_no_table_can_be_stays_in_a_unit_and_the_plan_says_why() -> None:
    made = plan(job_of("uses", planner={"tables": {"fine": "row_wise"}}))
    assert tables_of(made) == {"fine"}
    assert {f"{path}.weight" for path in REASONS} <= units_of(made)
    told = [re.fullmatch(r"embedding '(.+)' is .*: (.+)", each) for each in made.assumptions]
    assert {found.group(1): found.group(2) for found in told if found} == REASONS


def test_a_loss_that_goes_through_all_parameters_leaves_no_table_out() -> None:
    made = plan(job_of("penalised", cap="8 MiB"))
    assert units_of(made) == {"users.weight", "items.weight"}
    assert sum("parameters that a step goes through" in each for each in made.assumptions) == 2


def test_a_frozen_embedding_stays_in_a_unit() -> None:
    made = plan(job_of("build", planner={"tables": {"users": "table_wise"}}))
    assert "old.weight" in units_of(made)


def test_a_sparse_gradient_goes_to_a_table_alone() -> None:
    sparse: dict[str, Any] = {"arguments": {"sparse": True}}
    assert tables_of(plan(job_of("uses", **sparse))) == {"fine"}
    for more in ({"train": {"optimizer": "adamw"}}, {"planner": {"tables": {"fine": "dense"}}}):
        with pytest.raises(InputError, match=r"module 'fine' .* let it be routed"):
            plan(job_of("uses", **sparse, **more))


def test_a_table_has_the_ids_of_a_step_and_the_name_of_its_weight() -> None:
    tables = plan(job_of("build", train={"table_optimizer": "sgd"})).model.tables
    found = {table.fqn: (table.rows, table.dim, table.batch_sizes) for table in tables}
    users, items, seen = recommenders.USERS, recommenders.ITEMS, 8 * recommenders.SEEN
    assert found == {
        "users.weight": (users, 16, (8,)),
        "seen.weight": (items, 16, (seen,)),
        "shops.weight": (recommenders.SHOPS, 4, (8,)),
        "shown.items.weight": (items, 8, (seen,)),
        "shown.tags.weight": (recommenders.TAGS, 8, (seen,)),
    }


# ---- which are -----------------------------------------------------------------------------------


def test_beside_sgd_the_faster_way_is_taken() -> None:
    small, every = (
        plan(job_of("build", **more)) for more in ({}, {"train": {"table_optimizer": "sgd"}})
    )
    assert tables_of(small) == set()
    assert tables_of(every) == TABLES
    assert small.max_rank_seconds < every.max_rank_seconds


def test_latencies_of_every_table_s_own_exchange_are_weighed_and_part_of_the_bound() -> None:
    train = {"optimizer": "adam", "table_optimizer": "rowwise_adagrad"}
    made = plan(job_of("several", train=train))
    assert {table.sharding_type for table in made.tables} == {"table_wise", "data_parallel"}
    assert made.gap < 0.01
    for table, kind in itertools.product(made.tables, FREE):
        assert explain.why_not(made, table.name, kind).verdict != "faster"


def test_a_table_that_no_rank_can_gather_is_routed() -> None:
    rows, dim = 40_000, 64
    made = plan(job_of("wide", cap="7 MiB"))
    assert tables_of(made) == {"users"}
    assert max(rank.peak_bytes for rank in made.ranks) < rows * dim * 4
    with pytest.raises(NoPlanError):
        plan(job_of("wide", cap="7 MiB", planner={"tables": {"users": "dense"}}))


def test_a_large_table_is_routed_and_small_ones_beside_it_stay_in_a_unit() -> None:
    made = plan(job_of("uneven"))
    assert tables_of(made) == {"users"}
    assert "shops.weight" in units_of(made)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd_momentum"])
def test_beside_another_optimizer_there_are_tables_only_where_the_job_says_how_they_learn(
    optimizer: str,
) -> None:
    assert tables_of(plan(job_of("build", train={"optimizer": optimizer}))) == set()
    train = {"optimizer": optimizer, "table_optimizer": "rowwise_adagrad"}
    made = plan(job_of("build", train=train))
    assert tables_of(made) == TABLES
    assert {table.optimizer for table in made.tables} == {"rowwise_adagrad"}


def test_a_rate_of_their_own_makes_tables_of_all_that_can_be() -> None:
    assert tables_of(plan(job_of("build", train={"table_learning_rate": 0.5}))) == TABLES


def test_what_a_job_forces_is_done_whatever_it_costs() -> None:
    kinds = {"users": "column_wise", "seen": "data_parallel", "shops": "dense"}
    made = plan(job_of("build", planner={"tables": kinds}))
    found = {table.name: table.sharding_type for table in made.tables}
    assert {path: found.get(path, "dense") for path in kinds} == kinds


def test_every_number_of_a_table_is_explained_by_its_path_and_by_its_weight() -> None:
    made = plan(job_of("build", train={"table_optimizer": "rowwise_adagrad"}))
    for name in ("shown.items", "shown.items.weight"):
        for statement in explain.explain_tensor(made, name):
            assert statement.steps[-1].value == pytest.approx(statement.stored, rel=1e-12)


def test_beside_units_in_bf16_embeddings_are_tables_whose_rows_are_given_in_it() -> None:
    train = {"optimizer": "adamw", "table_optimizer": "rowwise_adagrad"}
    kinds = ("fp32", "bf16")
    plans = [plan(job_of("build", train=train, memory={"param_dtype": kind})) for kind in kinds]
    in_full, in_half = ({table.name for table in made.tables} for made in plans)
    assert in_full
    assert in_half == in_full
    assert {table.dtype for made in plans for table in made.model.tables} == {"fp32"}
    kept = [sum(e.bytes for e in decode(p.timeline) if e.kind == "activation") for p in plans]
    assert kept[1] < kept[0]


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "sections", "said"),
    [
        ("build", {"planner": {"tables": {"user": "row_wise"}}}, "planner.tables: .*users.*'user'"),
        ("build", {"planner": {"tables": {"old": "row_wise"}}}, "'old'.* table: frozen"),
        (
            "uses",
            {"planner": {"tables": {"tied": "row_wise"}}},
            "'tied'. embedding 'tied' is a .* not a table: a weight shared with 'head.weight'$",
        ),
        (
            "uses",
            {"planner": {"tables": {"tied": "row_wise"}}, "train": {"optimizer": "adam"}},
            "'tied'. embedding 'tied' is a .* not a table: a weight shared with 'head.weight'$",
        ),
        (
            "build",
            {"planner": {"tables": {"users": "row_wise"}}, "train": {"optimizer": "adam"}},
            "got 'users'. Embeddings are tables beside .*'sgd', or where train.table_optimizer ",
        ),
        ("bare", {"train": {"table_optimizer": "sgd"}}, "train.table_optimizer: .* got none"),
        ("bare", {"train": {"table_learning_rate": 1.0}}, "train.table_learning_rate: .* none"),
        (
            "build",
            {"train": {"table_optimizer": "sgd"}, "memory": {"param_dtype": "fp16"}},
            "train.table_optimizer: .* memory.param_dtype be bf16",
        ),
    ],
)
def test_what_is_said_of_tables_that_there_are_not_is_refused(
    function: str, sections: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        plan(job_of(function, **sections))


def test_a_rate_of_tables_that_there_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match=r"table_learning_rate: .*'adamw' without"):
        job_of("build", train={"optimizer": "adamw", "table_learning_rate": 1.0})


LEFT = "could be tables: 'users': train.table_optimizer takes them out of dense units"


def test_a_plan_names_large_embeddings_that_could_be_tables_and_are_left_dense() -> None:
    wide = {"rows": 40_000, "dim": 16}
    assert LEFT in plan(job_of("wide", arguments=wide, train={"optimizer": "adam"})).assumptions
    small = plan(job_of("wide", arguments={"rows": 40, "dim": 16}, train={"optimizer": "adam"}))
    said = {"optimizer": "adam", "table_optimizer": "rowwise_adagrad"}
    for other in (small, plan(job_of("wide", arguments=wide, train=said))):
        assert not any("could be tables" in each for each in other.assumptions)


def test_where_no_plan_fits_it_is_tried_whether_one_with_tables_does() -> None:
    wide = {"rows": 200_000, "dim": 16}
    with pytest.raises(NoPlanError, match=r"What would help: train\.table_optimizer of 'rowwise_"):
        plan(job_of("wide", "16 MiB", arguments=wide, train={"optimizer": "adam"}))
    with pytest.raises(NoPlanError) as caught:  # as tables that are looked up twice none can be
        plan(job_of("wide_twice", "16 MiB", arguments=wide, train={"optimizer": "adam"}))
    assert "table_optimizer" not in str(caught.value)
    with pytest.raises(NoPlanError) as caught:  # a plan with tables does not fit either
        plan(job_of("wide", "2 MiB", arguments=wide, train={"optimizer": "adam"}))
    assert "table_optimizer" not in str(caught.value)


def test_where_no_plan_fits_large_embeddings_say_why_they_are_no_tables() -> None:
    wide = {"rows": 200_000, "dim": 16}
    with pytest.raises(NoPlanError) as caught:
        plan(job_of("wide_twice", "2 MiB", arguments=wide))
    why = "is a dense unit's, not a table: looked up several times in a step"
    assert f" Embedding 'users' (12.21 MiB) {why}. " in str(caught.value)
    with pytest.raises(NoPlanError) as caught:  # all of its embeddings are small
        plan(job_of("uses", "1 KiB"))
    assert "Embedding" not in str(caught.value)


# ---- from Python ---------------------------------------------------------------------------------


def planned(**sections: Any) -> Plan:
    _, inputs, loss, clicks = recommenders.build(8)
    build: Callable[[], nn.Module] = recommenders.Recommender
    return plan_module(build, inputs, loss=loss, targets=clicks, optimizer="sgd", **sections)


def test_a_loop_of_one_s_own_has_tables_only_where_it_says_how_they_learn() -> None:
    assert tables_of(planned()) == set()
    learn = {"table_optimizer": "sgd", "table_learning_rate": 0.1}
    assert tables_of(planned(train=learn)) == TABLES
    with pytest.raises(InputError, match=r"plan_module: train\.table_learning_rate"):
        planned(train={"table_optimizer": "sgd"})


def test_a_module_is_as_it_was_after_it_was_planned() -> None:
    model = recommenders.Recommender()
    inputs = recommenders.build(8)[1]
    before = {name: type(part) for name, part in model.named_modules()}
    learn = {"table_optimizer": "sgd", "table_learning_rate": 0.1}
    plan_module(lambda: model, inputs, train=learn)
    assert {name: type(part) for name, part in model.named_modules()} == before
    assert isinstance(model.users.weight, torch.nn.Parameter)


# ---- TorchRec's collections ----------------------------------------------------------------------

USERS = "bags.embedding_bags.users"


def test_tables_of_collections_have_their_features_bags_and_names() -> None:
    tables = plan(job_of("collections", arguments={"pooling": "mean"})).model.tables
    assert [
        (t.name, t.pooled, t.pooling, t.pooling_factors, t.batch_sizes, t.feature_names)
        for t in tables
        if t.name != "shops"
    ] == [
        (USERS, True, "mean", (2.0,), (8,), ("user",)),
        ("bags.embedding_bags.goods", True, "mean", (2.0, 2.0), (8, 8), ("seen", "bought")),
        ("words.embeddings.words", False, "none", (2.0,), (8,), ("said",)),
    ]


def test_a_table_of_a_collection_is_no_dense_unit_s() -> None:
    with pytest.raises(InputError, match=rf"planner.tables.'{USERS}': expected a sharding type"):
        plan(job_of("collections", planner={"tables": {USERS: "dense"}}))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("frozen", "table 'users': expected fp32 or bf16 weights that learn.* got a frozen one"),
        ("half", "table 'users': expected fp32 or bf16 weights.* got float16"),
        ("weighted", "expected weights that do not learn"),
        ("uneven", "expected as many bags of each feature, got 2 and 8"),
        ("unknown", "collection 'bags': expected 'bought', got user, seen"),
        ("alone", "expected a KeyedJaggedTensor, got dict"),
        ("twice", "collection 'bags': expected each looked up once.*, got looked up several times"),
    ],
)
def test_what_a_plan_cannot_have_of_a_collection_is_refused_by_name(change: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        plan(job_of("odd_collections", arguments={"change": change}))
