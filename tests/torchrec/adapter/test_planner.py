"""TorchRec's models in, our plans out as its sharding plans."""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own modules
    pytest.importorskip("torchrec", reason="TorchRec is not installed")
    import torch
    from torch import nn
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType, optim
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import ParameterConstraints, Topology
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
    from torchrec.distributed.planner.planners import (
        EmbeddingShardingPlanner,
        validate_compute_kernels,
        validate_modules_inclusion_in_sharding_plan,
        validate_rank_assignment,
    )
    from torchrec.distributed.planner.storage_reservations import (
        FixedAbsoluteStorageReservation,
        FixedPercentageStorageReservation,
    )
    from torchrec.distributed.planner.types import Shard
    from torchrec.distributed.types import CacheParams
    from torchrec.modules.embedding_configs import DataType
    from torchrec_models import Model, one_bag, one_sequence, sharders, topology

from shardwright.core.errors import MismatchError, NoPlanError, UnsupportedError
from shardwright.torchrec import ShardwrightPlanner, job_of, read_tables, sharding_plan
from shardwright.torchrec.adapter.planner import PARTS

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of TorchRec's reservations

GIB = 2**30


# Reading tables


def test_tables_are_read_with_their_shape_dtype_features_and_place() -> None:
    found = read_tables(Model(), sharders())

    specs = [table.spec for table in found]
    assert [(s.name, s.rows, s.dim, s.dtype, s.pooled) for s in specs] == [
        ("t0", 1000, 64, "fp32", True),
        ("t1", 50_000, 128, "fp32", True),
        ("t2", 7, 256, "fp32", True),
        ("s0", 2000, 64, "fp32", False),
        ("s1", 4000, 64, "fp16", False),
    ]
    assert [len(s.pooling_factors) for s in specs] == [1, 2, 1, 1, 1]
    assert [t.module_path for t in found] == ["sparse.ebc"] * 3 + ["ec"] * 2
    parameters = dict(Model().named_parameters())
    assert all(spec.fqn in parameters for spec in specs)


def test_a_constraint_says_traffic_and_limits() -> None:
    constraint = ParameterConstraints(
        sharding_types=["table_wise", "column_wise"],
        compute_kernels=["fused"],
        min_partition=32,
        pooling_factors=[3.0, 4.5],
        num_poolings=[2.0, 1.0],
        batch_sizes=[64, 128],
        output_dtype=DataType.FP16,
        cache_params=CacheParams(load_factor=0.25, prefetch_pipeline=True),
    )
    spec = read_tables(Model(), sharders(), {"t1": constraint})[1].spec

    assert spec.sharding_types == ("table_wise", "column_wise")
    assert spec.compute_kernels == ("fused",)
    assert spec.min_partition == 32
    assert spec.pooling_factors == (3.0, 4.5)
    assert spec.num_poolings == (2.0, 1.0)
    assert spec.batch_sizes == (64, 128)
    assert spec.output_dtype == "fp16"
    assert spec.cache is not None
    assert (spec.cache.load_factor, spec.cache.prefetch_pipeline) == (0.25, True)


@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        (torch.optim.SGD, "sgd"),
        (torch.optim.Adam, "adam"),
        (optim.RowWiseAdagrad, "rowwise_adagrad"),
        (torch.optim.Adagrad, "adagrad"),
        (optim.LAMB, "adagrad"),
    ],
)
def test_the_optimizer_is_that_of_the_parameter(optimizer: type, told: str) -> None:
    model = one_bag()
    for parameter in model.parameters():
        parameter._optimizer_classes = [optimizer]  # as apply_optimizer_in_backward does

    assert read_tables(model, sharders())[0].spec.optimizer == told


def test_the_optimizer_is_else_that_of_the_fused_kernel() -> None:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    sharder = EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD})
    assert read_tables(one_bag(), [sharder])[0].spec.optimizer == "rowwise_adagrad"
    assert read_tables(one_bag(), sharders())[0].spec.optimizer is None


def test_weights_of_ids_are_the_modules() -> None:
    found = read_tables(Model(weighted=True), sharders())
    assert [t.spec.module_weighted for t in found] == [True] * 3 + [False] * 2


def test_tables_of_one_name_get_their_modules_path() -> None:
    model = nn.ModuleDict({"left": one_bag(), "right": one_bag()})
    assert [t.spec.name for t in read_tables(model, sharders())] == ["left.0.t", "right.0.t"]
    planned = ShardwrightPlanner(topology(2), 8).plan(model, sharders())
    assert {path: list(part) for path, part in planned.plan.items()} == {
        "left.0": ["t"],
        "right.0": ["t"],
    }


def test_tables_of_another_device_group_are_left_out() -> None:
    found = read_tables(Model(), sharders(), {"t0": ParameterConstraints(device_group="cpu")})
    assert [t.name for t in found] == ["t1", "t2", "s0", "s1"]


def test_another_module_with_a_sharder_is_refused_by_name() -> None:
    from torchrec.distributed.embeddingbag import EmbeddingBagSharder

    with pytest.raises(UnsupportedError, match=r"module '0'.*got EmbeddingBag\. Leave its sharder"):
        read_tables(nn.Sequential(nn.EmbeddingBag(10, 8)), [EmbeddingBagSharder()])


def config(name: str, rows: int = 10_000, dim: int = 64) -> Any:
    return EmbeddingBagConfig(
        name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"f_{name}"]
    )


def fused() -> tuple[nn.Module, Any]:
    """Tables that are updated in their backward."""
    from torchrec.distributed.fused_embeddingbag import FusedEmbeddingBagCollectionSharder
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

    bags = FusedEmbeddingBagCollection(
        tables=[config("a"), config("b")],
        optimizer_type=optim.RowWiseAdagrad,
        optimizer_kwargs={"lr": 0.1},
        device=torch.device("cpu"),
    )
    return nn.ModuleDict({"bags": bags}), FusedEmbeddingBagCollectionSharder()


def processed() -> tuple[nn.Module, Any]:
    """Tables whose ids get weights by their places."""
    from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
    from torchrec.modules.feature_processor_ import PositionWeightedModule
    from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

    bags = EmbeddingBagCollection(
        device=torch.device("meta"), is_weighted=True, tables=[config("a"), config("b")]
    )
    processors = {f"f_{name}": PositionWeightedModule(max_feature_length=5) for name in "ab"}
    both = FeatureProcessedEmbeddingBagCollection(bags, processors)
    return nn.ModuleDict({"bags": both}), FeatureProcessedEmbeddingBagCollectionSharder()


@pytest.mark.parametrize(
    ("make", "fqn", "optimizer", "weighted"),
    [
        (fused, "bags.embedding_bags.a.weight", "rowwise_adagrad", False),
        (processed, "bags._embedding_bag_collection.embedding_bags.a.weight", None, True),
    ],
)
def test_fused_collections_and_those_with_processors_are_planned_as_torchrec_plans_them(
    make: Any, fqn: str, optimizer: str | None, weighted: bool
) -> None:
    model, sharder = make()
    tables = read_tables(model, [sharder])
    first = tables[0].spec
    assert (first.fqn, first.optimizer, first.module_weighted) == (fqn, optimizer, weighted)
    assert fqn in dict(model.state_dict())
    given = topology(4, local_world_size=2)
    planner = ShardwrightPlanner(given, 64)
    found = planner.plan(model, [sharder])
    theirs = EmbeddingShardingPlanner(given, 64).plan(model, [sharder])
    assert {p: set(t) for p, t in found.plan.items()} == {p: set(t) for p, t in theirs.plan.items()}
    validate_modules_inclusion_in_sharding_plan(found, model, [sharder])
    validate_rank_assignment(found, given)


def test_ranks_of_uneven_memory_are_planned_by_what_each_of_them_has(
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = topology(4, hbm_cap=GIB)
    given.devices[2].storage.hbm = GIB // 8
    given.devices[1].storage.ddr //= 2
    reservation = FixedPercentageStorageReservation(0.5)
    planner = ShardwrightPlanner(given, 8, storage_reservation=reservation)
    validate_rank_assignment(planner.plan(Model(), sharders()), given)
    assert planner.made is not None
    assert planner.made.reserved.hbm_left == GIB // 16
    assert planner.made.reserved.ddr_left == given.devices[1].storage.ddr
    assert "planned as if each had that of the least" in caplog.text


# Plans


def judged(
    found: Any, model: nn.Module, given: Topology, batch: int, constraints: Any
) -> list[Any]:
    """The plan as TorchRec's sharding options, priced by its own estimators."""
    enumerator = EmbeddingEnumerator(given, batch, constraints)
    options = enumerator.enumerate(model, sharders())
    chosen = []
    for path, part in found.plan.items():
        for name, parameter in part.items():
            option = copy.deepcopy(
                next(
                    o
                    for o in options
                    if (o.path, o.name) == (path, name)
                    and o.sharding_type == parameter.sharding_type
                    and o.compute_kernel == parameter.compute_kernel
                )
            )
            if parameter.sharding_spec is not None:
                option.shards = [
                    Shard(list(s.shard_sizes), list(s.shard_offsets))
                    for s in parameter.sharding_spec.shards
                ]
            for shard, rank in zip(option.shards, parameter.ranks, strict=True):
                shard.rank = rank
            chosen.append(option)
    enumerator.populate_estimates(chosen)
    return chosen


@pytest.mark.parametrize("options", ["wide", "torchrec"])
def test_a_plan_is_valid_and_priced_as_torchrec_does(options: str) -> None:
    given = topology(16, local_world_size=8, hbm_cap=GIB // 20)
    constraints = {
        "t1": ParameterConstraints(pooling_factors=[20.0, 3.0]),
        "s0": ParameterConstraints(pooling_factors=[50.0]),
    }
    planner = ShardwrightPlanner(
        given,
        512,
        storage_reservation=FixedPercentageStorageReservation(0.15),
        constraints=constraints,
        job_overrides={"planner": {"options": options}},
    )
    model = Model()
    found = planner.plan(model, sharders())

    validate_modules_inclusion_in_sharding_plan(found, model, sharders())
    validate_rank_assignment(found, given)
    chosen = judged(found, model, given, 512, constraints)
    validate_compute_kernels(chosen)
    milliseconds, hbm = [0.0] * 16, [0] * 16
    for option in chosen:
        for shard in option.shards:
            milliseconds[shard.rank] += shard.perf.total
            hbm[shard.rank] += shard.storage.hbm
    made = planner.made
    assert made is not None
    assert max(milliseconds) == pytest.approx(made.max_rank_seconds * 1e3, rel=1e-9)
    assert hbm == [rank.hbm_bytes for rank in made.ranks]
    assert max(hbm) <= int(0.85 * (GIB // 20))


def test_shards_name_rank_and_device_and_replicas_have_no_spec() -> None:
    given = topology(4, local_world_size=2)
    constraints = {
        "t0": ParameterConstraints(sharding_types=["data_parallel"]),
        "t1": ParameterConstraints(sharding_types=["column_wise"], min_partition=32),
        "t2": ParameterConstraints(sharding_types=["row_wise"]),
    }
    planner = ShardwrightPlanner(given, 64, constraints=constraints)
    part = planner.plan(Model(), sharders()).plan["sparse.ebc"]

    assert part["t0"].sharding_spec is None
    assert part["t0"].ranks == [0, 1, 2, 3]
    columns = part["t1"].sharding_spec.shards
    assert [s.shard_offsets[1] for s in columns] == sorted(s.shard_offsets[1] for s in columns)
    assert [s.placement.rank() for s in columns] == part["t1"].ranks
    assert all(
        s.placement.device() == torch.device("cuda", s.placement.rank() % 2) for s in columns
    )
    rows = part["t2"].sharding_spec.shards
    assert [s.shard_sizes for s in rows] == [[2, 256], [2, 256], [2, 256], [1, 256]]
    assert [str(s.placement) for s in rows][3] == "rank:3/cuda:1"


def test_placements_on_a_cpu_name_the_rank() -> None:
    found = ShardwrightPlanner(topology(2, "cpu"), 8).plan(one_sequence(), sharders())
    shards = found.plan["0"]["t"].sharding_spec.shards
    assert {str(s.placement) for s in shards} <= {"rank:0/cpu", "rank:1/cpu"}


def test_the_parameters_of_a_constraint_reach_the_runtime() -> None:
    cache = CacheParams(load_factor=0.3)
    constraint = ParameterConstraints(
        sharding_types=["table_wise"],
        compute_kernels=["fused_uvm_caching"],
        cache_params=cache,
        enforce_hbm=True,
    )
    planner = ShardwrightPlanner(topology(2), 8, constraints={"t": constraint})
    found = planner.plan(one_bag(), sharders()).plan["0"]["t"]
    assert (found.compute_kernel, found.cache_params, found.enforce_hbm) == (
        "fused_uvm_caching",
        cache,
        True,
    )


def test_without_a_process_group_a_collective_plan_is_a_plan() -> None:
    planner = ShardwrightPlanner(topology(2), 8)
    assert planner.collective_plan(one_bag()).plan.keys() == {"0"}
    assert planner.collective_plan(nn.Linear(2, 2)).plan == {}


def test_a_plan_that_does_not_fit_is_refused_by_the_planner() -> None:
    planner = ShardwrightPlanner(
        topology(2, hbm_cap=10_000),
        8,
        storage_reservation=FixedPercentageStorageReservation(0.15),
    )
    with pytest.raises(NoPlanError):
        planner.plan(Model(), sharders())


def test_arguments_stand_where_torchrec_s_planner_has_them() -> None:
    own, theirs = (
        list(inspect.signature(planner).parameters)
        for planner in (ShardwrightPlanner, EmbeddingShardingPlanner)
    )
    assert own == [*theirs, "job_overrides"]
    planner = ShardwrightPlanner(
        topology(2, hbm_cap=GIB), 8, None, FixedAbsoluteStorageReservation(99), debug=False
    )
    planner.plan(one_bag(), sharders())
    assert planner.made is not None
    assert planner.made.reserved.hbm_left == GIB - 99


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_torchrec_s_search_are_refused_with_what_does_their_work(name: str) -> None:
    part = EmbeddingEnumerator(topology(2), 8)
    with pytest.raises(UnsupportedError) as caught:
        ShardwrightPlanner(topology(2), 8, **{name: part})
    said = f"{name}: expected nothing: our own search, got EmbeddingEnumerator. {PARTS[name]}"
    assert str(caught.value) == said


def averaged(*poolings: str) -> nn.Module:
    """A module of tables that are pooled so."""
    tables = [
        EmbeddingBagConfig(
            name=f"t{i}",
            num_embeddings=10_000_000,
            embedding_dim=64,
            feature_names=[f"f{i}"],
            pooling=PoolingType[pooling],
        )
        for i, pooling in enumerate(poolings)
    ]
    bags = EmbeddingBagCollection(device=torch.device("meta"), tables=tables)
    return nn.ModuleDict({"ebc": bags})


def test_averaged_bags_are_not_cut_by_rows_beside_others() -> None:
    """TorchRec divides the sums of tables that are not cut by rows too."""

    def cut(*poolings: str) -> list[bool]:
        tables = job_of(averaged(*poolings), topology=topology(4))["tables"]
        return ["row_wise" in table["sharding_types"] for table in tables]

    assert cut("SUM", "MEAN", "SUM") == [True, False, True]
    assert cut("MEAN", "MEAN") == [False, False]
    assert cut("MEAN") == [True]


@pytest.mark.parametrize("beside", ["row_wise", "table_wise"])
def test_averaged_bags_that_must_be_cut_by_rows_want_all_tables_so(beside: str) -> None:
    constraints = {
        "t0": ParameterConstraints(sharding_types=["row_wise"]),
        "t1": ParameterConstraints(sharding_types=[beside]),
    }
    planner = ShardwrightPlanner(topology(2), 8, constraints=constraints)
    if beside == "row_wise":
        planner.plan(averaged("MEAN", "SUM"), sharders())
        return
    with pytest.raises(UnsupportedError, match=r"^table 't0': .* sums of 't1' \(table_wise\) too"):
        planner.plan(averaged("MEAN", "SUM"), sharders())


def test_a_plan_of_another_model_or_topology_is_refused() -> None:
    planner = ShardwrightPlanner(topology(2), 8)
    planner.plan(one_bag(), sharders())
    assert planner.made is not None
    with pytest.raises(MismatchError, match=r"table 't'.*expected 200 x 8, got 100 x 8"):
        sharding_plan(planner.made, read_tables(one_bag(200), sharders()), topology(2))
    with pytest.raises(MismatchError, match="expected 4 ranks"):
        sharding_plan(planner.made, read_tables(one_bag(), sharders()), topology(4))
