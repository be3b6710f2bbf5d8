from __future__ import annotations

import pytest

from shardwright.cost.constants import RATES, cluster
from shardwright.job.cluster import ClusterSection
from shardwright.torchrec.profile import PRESET, TORCHREC

GIB = 2**30


def test_every_constant_has_a_source_and_a_date() -> None:
    assert PRESET.capacities
    for constant in TORCHREC.values():
        assert constant.source
        assert constant.date[:2] == "20"
        assert constant.value >= 0


def test_a_job_without_a_preset_gets_torchrecs_with_all_ranks_on_one_host() -> None:
    section = ClusterSection(compute_device="cpu", world_size=16)
    found, assumptions = cluster(section, "torchrec-1.9", PRESET)
    assert (found.name, found.local_world_size, found.group) == ("torchrec-1.9", 16, 16)
    assert assumptions[0].startswith("cluster.preset not given: 'torchrec-1.9', for ")
    assert any("16 ranks per host" in note for note in assumptions)


def test_a_cpu_has_no_hbm_whatever_is_said() -> None:
    section = ClusterSection(compute_device="cpu", hbm_cap="1 GiB")
    found, _ = cluster(section, "torchrec-1.9", PRESET)
    assert found.capacity == (0, 128 * GIB, 2048 * GIB)


def test_torchrecs_topology_has_its_own_capacities_and_constants() -> None:
    found, _ = cluster(ClusterSection(world_size=16), "torchrec-1.9", PRESET)
    assert (found.compute_device, found.capacity) == ("cuda", (32 * GIB, 128 * GIB, 2048 * GIB))
    assert found.constants == TORCHREC


@pytest.mark.parametrize("key", RATES)
def test_a_job_may_replace_a_rate_of_torchrecs(key: str) -> None:
    found, _ = cluster(ClusterSection(**{key: 12.5}), "torchrec-1.9", PRESET)
    changed = {name for name, c in found.constants.items() if c != TORCHREC[name]}
    assert changed == {key}
    constant = found.constants[key]
    assert (constant.value, constant.unit) == (12.5, TORCHREC[key].unit)
    assert constant.source == f"cluster.{key} of the job"
