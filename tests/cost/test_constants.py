from __future__ import annotations

from typing import Any

import pytest

from shardwright.core.errors import InputError
from shardwright.core.job import ClusterSection
from shardwright.cost.constants import PRESETS, cluster


@pytest.mark.parametrize("name", PRESETS)
def test_every_constant_has_a_unit_a_source_and_a_date(name: str) -> None:
    for constant in PRESETS[name].constants.values():
        assert constant.unit
        assert constant.source
        assert constant.date[:2] == "20"
        assert constant.value >= 0


@pytest.mark.parametrize("name", PRESETS)
def test_rates_divide_and_so_are_never_zero(name: str) -> None:
    rates = [c for key, c in PRESETS[name].constants.items() if key.endswith("_rate")]
    assert rates
    assert all(rate.value > 0 for rate in rates)


def test_presets_have_the_same_constants_in_the_same_units() -> None:
    units = [{k: c.unit for k, c in p.constants.items()} for p in PRESETS.values()]
    assert all(u == units[0] for u in units)


def test_a_preset_is_taken_as_it_is() -> None:
    found, assumptions = cluster(ClusterSection())
    assert (found.world_size, found.local_world_size, found.memory_per_rank) == (2, 2, 2 * 2**30)
    assert assumptions == (
        "hardware constants are the preset 'local's, not measured on this machine",
        "cluster.ddr_cap is the preset 'local's: 2,147,483,648 B per rank",
    )


def test_a_job_replaces_what_it_names() -> None:
    section = ClusterSection(world_size=8, local_world_size=4, ddr_cap="36 MiB")
    found, assumptions = cluster(section)
    assert (found.world_size, found.local_world_size) == (8, 4)
    assert found.memory_per_rank == 36 * 2**20
    assert len(assumptions) == 1


def test_an_accelerator_fills_its_own_memory() -> None:
    found, _ = cluster(ClusterSection(preset="h100-8"))
    assert found.memory_per_rank == 80 * 10**9


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"preset": "moon"}, "cluster.preset: expected one of local, h100-8, got 'moon'."),
        (
            {"world_size": 4, "local_world_size": 3},
            "cluster.local_world_size: expected a divisor of 4, got 3.",
        ),
        (
            {"compute_device": "cuda"},
            "cluster.hbm_cap: expected the bytes a rank may fill, got 0. Set it in the job.",
        ),
        (
            {"ddr_cap": "much"},
            "cluster.ddr_cap: expected bytes as an integer or a text like '48 MiB', got 'much'.",
        ),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        cluster(ClusterSection(**section))
    assert str(caught.value) == message
