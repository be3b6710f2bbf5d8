from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.amount import Step, derivation
from shardwright.core.batch import Batch
from shardwright.core.cluster import TIERS
from shardwright.core.errors import InputError, UnsupportedError
from shardwright.core.model import TableSpec
from shardwright.core.option import Option, shard_runs
from shardwright.core.sharding import ShardingType
from shardwright.cost.constants import cluster
from shardwright.job.cluster import ClusterSection
from shardwright.job.job import parse_job
from shardwright.planner.pricing import additive
from shardwright.planner.pricing.evaluate import PricingContext


def _setting(batch: int = 4096, **section: Any) -> PricingContext:
    return PricingContext(cluster(ClusterSection(**section), "additive")[0], Batch(batch))


def _option(table: TableSpec, sharding_type: ShardingType, parts: int = 2) -> Option:
    width = table.dim // parts if sharding_type == "column_wise" else table.dim
    return Option(table.name, sharding_type, "fused", shard_runs(table, sharding_type, 4, 4, width))


@given(
    rows=st.integers(1, 2**40),
    dim=st.sampled_from([4, 64, 128]),
    factors=st.lists(st.floats(0, 100), min_size=1, max_size=3),
    sharding_type=st.sampled_from(["table_wise", "column_wise"]),
    batch=st.integers(1, 2**16),
    world_size=st.integers(1, 64),
)
def test_a_derivation_leads_to_the_price(
    reevaluate: Callable[[Sequence[Step]], None],
    rows: int,
    dim: int,
    factors: list[float],
    sharding_type: ShardingType,
    batch: int,
    world_size: int,
) -> None:
    setting = _setting(batch, world_size=world_size)
    table = TableSpec("t", rows, dim, pooling_factors=tuple(factors))
    option = _option(table, sharding_type)
    (choice,) = additive.price(setting, [(table, option)])
    for index, found in enumerate(choice.costs):
        derived = additive.derive(setting, table, option, index)
        assert derived.seconds.value == found.total_seconds
        assert tuple(derived.storage[tier].value for tier in TIERS) == found.storage
        for amount in (derived.seconds, *derived.storage.values()):
            reevaluate(derivation(amount))


def test_halves_of_a_table_cost_half_each() -> None:
    table = TableSpec("t", 1_000_000, 16)
    cases = [(table, _option(table, kind)) for kind in ("table_wise", "column_wise")]
    whole, halves = additive.price(_setting(), cases)
    assert whole.costs[0].total_seconds == pytest.approx(1.6078e-4, rel=5e-5)
    assert halves.costs[0].total_seconds == pytest.approx(whole.costs[0].total_seconds / 2)
    assert halves.total_storage == whole.total_storage == (64_000_000, 0, 0)


def test_a_cpu_keeps_tables_in_host_memory() -> None:
    table = TableSpec("t", 1000, 16)
    setting = _setting(compute_device="cpu", ddr_cap="1 GiB")
    (choice,) = additive.price(setting, [(table, _option(table, "table_wise"))])
    assert choice.total_storage == (0, 64_000, 0)


def test_other_types_have_no_additive_cost() -> None:
    table = TableSpec("t", 1000, 16)
    with pytest.raises(UnsupportedError) as caught:
        additive.price(_setting(), [(table, _option(table, "row_wise"))])
    assert str(caught.value) == (
        "tables 't'.sharding_types: expected one of table_wise, column_wise for the additive "
        "cost, got row_wise."
    )


@pytest.mark.parametrize(
    ("constants", "key", "value"),
    [
        ("additive", "options", "torchrec"),
        ("additive", "dedup", True),
        ("torchrec-1.9", "dedup", True),
    ],
)
def test_a_key_that_these_costs_do_not_read_is_refused(
    constants: str, key: str, value: object
) -> None:
    job = {"tables": [{"name": "t", "rows": 9, "dim": 8}], "cluster": {"compute_device": "cuda"}}
    with pytest.raises(InputError) as caught:
        parse_job(job | {"planner": {"constants": constants, key: value}})
    wanted = f"planner.{key}: expected none beside planner.constants '{constants}', which does not"
    assert wanted in str(caught.value)
