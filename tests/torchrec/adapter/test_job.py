"""TorchRec's models as jobs, and only what its runtime executes in them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own modules
    pytest.importorskip("torchrec", reason="TorchRec is not installed")
    import torch
    from torch import nn
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import ParameterConstraints
    from torchrec.distributed.planner.storage_reservations import (
        FixedAbsoluteStorageReservation,
        FixedPercentageStorageReservation,
        HeuristicalStorageReservation,
        InferenceStorageReservation,
        SKUAwareStorageReservation,
    )
    from torchrec_models import META, Model, one_bag, one_sequence, sharders, topology

from shardwright.core.errors import InputError, NoPlanError, UnsupportedError
from shardwright.estimate.recordings import plan as make_plan
from shardwright.job.job import parse_job, read_job
from shardwright.torchrec import job_of, write_job

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of TorchRec's reservations

GIB = 2**30


# Jobs


def test_a_job_of_a_model_is_read_back_from_its_file(tmp_path: Path) -> None:
    job = job_of(Model(), topology=topology(16, local_world_size=8), batch_size=64)
    write_job(job, tmp_path / "model.toml")

    assert (tmp_path / "model.tables.json").exists()
    assert read_job(tmp_path / "model.toml").tables == parse_job(job).tables
    made = make_plan(read_job(tmp_path / "model.toml"))
    assert (made.cluster.world_size, made.cluster.local_world_size) == (16, 8)
    assert made.cluster.values["inter_host_bw"] == topology().inter_host_bw


def test_pods_and_capacities_are_those_of_the_topology() -> None:
    given = topology(16, local_world_size=4, pod_size=2, hbm_cap=GIB)
    cluster = job_of(Model(), topology=given)["cluster"]
    assert (cluster["local_world_size"], cluster["pod_size"]) == (4, 2)
    assert cluster["hbm_cap"] == GIB
    assert "pod_size" not in job_of(Model(), topology=topology())["cluster"]


IDS = 20 * 8 * 64 * 6
DENSE = {"dense_bytes": 4040}


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda: FixedPercentageStorageReservation(0.2),
            {"kind": "percentage", "percentage": 0.2},
        ),
        (lambda: FixedAbsoluteStorageReservation(123), {"kind": "absolute", "nbytes": 123}),
        (
            lambda: HeuristicalStorageReservation(0.1),
            {"kind": "heuristic", "percentage": 0.1, "multiplier": 6.0, **DENSE},
        ),
        (
            lambda: HeuristicalStorageReservation(0.1, dense_tensor_estimate=99),
            {"kind": "heuristic", "percentage": 0.1, "dense_bytes": 99, "multiplier": 1.0},
        ),
        (
            lambda: InferenceStorageReservation(0.1),
            {"kind": "inference", "percentage": 0.1, "multiplier": 1.0, **DENSE},
        ),
        (  # dense parts six times, and what it says is needed for ids of two pipelined batches
            lambda: SKUAwareStorageReservation(GIB // 10, 1000),
            {"kind": "absolute", "nbytes": GIB // 10 + 1000 + 6 * 4040 + IDS},
        ),
        (
            lambda: None,
            {"kind": "heuristic", "percentage": 0.15, "multiplier": 6.0, **DENSE},
        ),
    ],
)
def test_a_reservation_leaves_what_torchrec_leaves(
    make: Callable[[], Any], told: dict[str, Any]
) -> None:
    given, reservation = topology(hbm_cap=GIB), make()
    constraints = {"t1": ParameterConstraints(pooling_factors=[1.0, 1.0])}
    job = job_of(
        Model(),
        topology=given,
        batch_size=64,
        constraints=constraints,
        storage_reservation=reservation,
    )
    assert job["planner"]["reservation"] == told

    judge = reservation or HeuristicalStorageReservation(0.15)
    left = judge.reserve(given, 64, Model(), sharders(), constraints).devices[0].storage
    reserved = make_plan(parse_job(job)).reserved
    assert (reserved.hbm_left, reserved.ddr_left) == (left.hbm, left.ddr)


def test_buffers_of_the_dense_part_count_once() -> None:
    model = Model()
    model.over.register_buffer("seen", torch.zeros(10, device=META))
    job = job_of(model, topology=topology())
    told = job["planner"]["reservation"]
    assert (told["dense_bytes"], told["multiplier"]) == (6 * 4040 + 40, 1.0)


def test_what_a_job_cannot_say_is_refused_in_one_line() -> None:
    with pytest.raises(NoPlanError, match=r"storage_reservation: expected HBM left for tables"):
        job_of(
            Model(),
            topology=topology(hbm_cap=GIB),
            storage_reservation=SKUAwareStorageReservation(GIB),
        )
    with pytest.raises(UnsupportedError, match="compute_device cpu or cuda, got 'mtia'"):
        job_of(Model(), topology=topology(device="mtia"))


def test_codecs_are_dtypes_of_the_wire() -> None:
    from torchrec.distributed.fbgemm_qcomm_codec import (
        CommType,
        QCommsConfig,
        get_qcomm_codecs_registry,
    )

    registry = get_qcomm_codecs_registry(
        QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.BF16)
    )
    sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry)
    job = job_of(one_bag(), topology=topology(), sharders=[sharder])
    assert job["planner"]["estimator"]["communication"] == ["fp16", "bf16"]


def test_job_overrides_win_key_by_key() -> None:
    overrides = {"planner": {"options": "torchrec"}, "batch": {"size": 3}}
    job = job_of(Model(), topology=topology(), batch_size=8, job_overrides=overrides)
    assert job["planner"]["options"] == "torchrec"
    assert job["planner"]["constants"] == "torchrec-1.9"
    assert job["batch"]["size"] == 3


# What TorchRec's runtime executes


def types_of(model: nn.Module, device: str, ranks: int = 4, **given: Any) -> set[str]:
    job = job_of(model, topology=topology(ranks, device), **given)
    return set(job["tables"][0]["sharding_types"])


def test_types_are_those_that_run_on_the_device() -> None:
    every = {"data_parallel", "table_wise", "row_wise", "column_wise"}
    assert types_of(one_bag(dim=128), "cuda") == every
    assert types_of(one_bag(dim=128), "cpu") == every - {"row_wise"}
    assert types_of(one_sequence(dim=128), "cuda") == every
    assert types_of(one_sequence(dim=128), "cpu") == every - {"data_parallel"}


def test_hosts_and_grids_are_for_several_hosts_and_on_request() -> None:
    given = topology(16, local_world_size=8)
    types = job_of(one_bag(dim=128), topology=given)["tables"][0]["sharding_types"]
    assert "table_row_wise" in types
    assert "grid_shard" not in types
    named = {"t": ParameterConstraints(sharding_types=["grid_shard"])}
    job = job_of(one_bag(dim=128), topology=given, constraints=named)
    assert job["tables"][0]["sharding_types"] == ["grid_shard"]


def test_rows_that_are_no_multiple_of_four_columns_are_only_replicated() -> None:
    assert types_of(one_bag(dim=6), "cuda") == {"data_parallel"}
    with pytest.raises(InputError, match=r"table 't'.*sequence table of 100 x 6.*multiple of 4"):
        job_of(one_sequence(dim=6), topology=topology(2, "cpu"))


def test_a_cpu_gets_no_shard_without_rows() -> None:
    assert "row_wise" in types_of(one_sequence(rows=7), "cpu")
    assert "row_wise" not in types_of(one_sequence(rows=5), "cpu")  # 2, 2, 1 and none
    assert "row_wise" in types_of(one_sequence(rows=5), "cuda")


def test_a_constraint_that_nothing_satisfies_names_the_table() -> None:
    given = {"t": ParameterConstraints(sharding_types=["row_wise"])}
    with pytest.raises(InputError, match=r"table 't'.*on cpu for a pooled table.*got row_wise"):
        job_of(one_bag(), topology=topology(2, "cpu"), constraints=given)


def test_kernels_are_named_only_where_they_differ_from_the_usual() -> None:
    assert "compute_kernels" not in job_of(one_bag(), topology=topology())["tables"][0]
    given = {"t": ParameterConstraints(compute_kernels=["fused", "fused_uvm", "nonsense"])}
    entry = job_of(one_bag(), topology=topology(), constraints=given)["tables"][0]
    assert entry["compute_kernels"] == ["fused", "fused_uvm"]
