from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from shardwright.core.cluster import SCHEMA, Calibration, SourcedFigure, write_calibration
from shardwright.core.errors import InputError
from shardwright.cost.constants import cluster
from shardwright.cost.presets import HARDWARE, LOCAL, MODELS, PRESETS
from shardwright.job.cluster import ClusterSection, device_of
from shardwright.job.planner import Profile

GIB = 2**30


@pytest.mark.parametrize("name", [*HARDWARE, "additive"])
def test_every_constant_has_a_unit(name: str) -> None:
    assert all(constant.unit for constant in PRESETS[name].constants.values())


@pytest.mark.parametrize("name", PRESETS)
def test_every_constant_has_a_source_and_a_date(name: str) -> None:
    for constant in PRESETS[name].constants.values():
        assert constant.source
        assert constant.date[:2] == "20"
        assert constant.value >= 0


@pytest.mark.parametrize("name", PRESETS)
def test_capacities_have_a_source(name: str) -> None:
    assert PRESETS[name].capacities


@pytest.mark.parametrize("name", HARDWARE)
def test_rates_divide_and_so_are_never_zero(name: str) -> None:
    rates = [c for key, c in PRESETS[name].constants.items() if key.endswith("_rate")]
    assert rates
    assert all(rate.value > 0 for rate in rates)


def test_machines_have_the_same_constants_in_the_same_units() -> None:
    """But for rates of products in other dtypes than fp32, which not every machine has."""
    units = [{k: c.unit for k, c in sorted(p.constants.items())} for p in HARDWARE.values()]
    own = [{k: u for k, u in of.items() if not k.endswith("_compute_rate")} for of in units]
    assert all(of == own[0] for of in own)


def test_products_are_faster_the_fewer_bits_they_have() -> None:
    for name in ("a100-8", "h100-8", "h200-8", "b200-8", "mi300x-8"):
        c = {key: constant.value for key, constant in HARDWARE[name].constants.items()}
        assert c["compute_rate"] < c["tf32_compute_rate"] < c["bf16_compute_rate"]
        assert c["bf16_compute_rate"] == c["fp16_compute_rate"] <= c.get("fp8_compute_rate", 9e99)


def test_a_profile_that_is_no_machine_has_a_preset_of_its_name() -> None:
    assert {*MODELS, "cluster"} == set(get_args(Profile))


@pytest.mark.parametrize("name", HARDWARE)
def test_a_near_memory_is_no_slower_than_a_far_one(name: str) -> None:
    values = {key: constant.value for key, constant in PRESETS[name].constants.items()}
    assert values["memory_rate"] >= values["host_link_rate"] >= values["ssd_rate"]
    assert values["all_to_all_rate"] >= values["inter_host_rate"]


def test_the_local_preset_keeps_what_was_measured() -> None:
    values = {name: c.value for name, c in PRESETS["local"].constants.items()}
    assert (values["compute_rate"], values["memory_rate"]) == (60e9, 10e9)
    assert (values["all_to_all_latency"], values["reduce_scatter_rate"]) == (280e-6, 0.45e9)
    assert (values["sgd_passes"], values["rowwise_adagrad_passes"]) == (3.0, 12.0)


def test_a_preset_is_taken_as_it_is() -> None:
    found, assumptions = cluster(ClusterSection(), "cluster")
    assert (found.world_size, found.local_world_size, found.group) == (2, 2, 2)
    assert found.capacity == (0, 2 * GIB, 0)
    assert assumptions == (
        "cluster.preset not given: 'local', for no compute_device is named",
        "hardware constants are the preset 'local's, not measured on this machine",
        "cluster.world_size not given: 2 ranks, as the preset has",
        "cluster.local_world_size not given: 2 ranks per host, 1 host",
        "cluster.ddr_cap is the preset 'local's: 2,147,483,648 B per rank (assumed)",
    )


def test_a_job_replaces_what_it_names() -> None:
    section = ClusterSection(preset="local", world_size=8, local_world_size=4, ddr_cap="36 MiB")
    found, assumptions = cluster(section, "cluster")
    assert (found.world_size, found.local_world_size, found.group) == (8, 4, 4)
    assert found.memory_per_rank == 36 * 2**20
    assert len(assumptions) == 1


def test_an_accelerator_fills_its_own_memory() -> None:
    found, _ = cluster(ClusterSection(preset="h100-8"), "cluster")
    assert found.memory_per_rank == 80 * 10**9


@pytest.mark.parametrize(
    ("section", "profile", "name"),
    [
        ({}, "cluster", "local"),
        ({"compute_device": "cpu"}, "cluster", "local"),
        ({"compute_device": "cuda"}, "cluster", "h100-8"),
        ({}, "additive", "additive"),
    ],
)
def test_a_job_without_a_preset_gets_its_devices_or_its_profiles(
    section: dict[str, Any], profile: Profile, name: str
) -> None:
    found, assumptions = cluster(ClusterSection(**section), profile)
    assert found.name == name
    assert assumptions[0].startswith(f"cluster.preset not given: '{name}', for ")


@pytest.mark.parametrize(
    ("preset", "world_size", "local"),
    [
        ("h100-8", 64, 8),
        ("h100-8", 8, 8),
        ("h100-8", 12, 12),
        ("h100-8", 2, 2),
        ("local", 6, 6),
    ],
)
def test_hosts_are_the_presets_where_ranks_fill_them(
    preset: str, world_size: int, local: int
) -> None:
    found, assumptions = cluster(ClusterSection(preset=preset, world_size=world_size), "cluster")
    assert (found.local_world_size, found.group) == (local, local)
    assert any(f"{local} ranks per host" in note for note in assumptions)


def test_a_pod_is_several_hosts() -> None:
    found, _ = cluster(ClusterSection(preset="h100-8", world_size=64, pod_size=2), "cluster")
    assert (found.local_world_size, found.group) == (8, 16)


def test_a_host_may_have_more_ranks_than_there_are() -> None:
    found, _ = cluster(ClusterSection(preset="h100-8", world_size=4, local_world_size=8), "cluster")
    assert (found.world_size, found.local_world_size, found.group) == (4, 8, 4)


def test_the_additive_profile_has_four_ranks_of_four_gib() -> None:
    found, _ = cluster(ClusterSection(), "additive")
    assert (found.world_size, found.compute_device, found.hbm_cap) == (4, "cuda", 4 * GIB)


NAMES = ", ".join((*HARDWARE, *MODELS))
MACHINES = ", ".join(HARDWARE)


@pytest.mark.parametrize(
    ("section", "profile", "message"),
    [
        (
            {"preset": "moon"},
            "cluster",
            f"cluster.preset: expected one of {NAMES}, got 'moon'.",
        ),
        (
            {"preset": "h100-8"},
            "torchrec-1.9",
            "cluster.preset: expected 'torchrec-1.9', as planner.constants, got 'h100-8'. "
            "Leave one of the two out.",
        ),
        (
            {"preset": "torchrec-1.9"},
            "cluster",
            f"cluster.preset: expected one of {MACHINES} for planner.constants 'cluster', "
            "got 'torchrec-1.9'. Set planner.constants to 'torchrec-1.9' as well.",
        ),
        (
            {"preset": "torchrec-1.9"},
            "additive",
            "cluster.preset: expected 'additive', as planner.constants, got 'torchrec-1.9'. "
            "Leave one of the two out.",
        ),
        (
            {"hbm_mem_bw": 9.0, "preset": "h100-8"},
            "cluster",
            "cluster.hbm_mem_bw: expected no rate of TorchRec's with preset 'h100-8', which has "
            "its own constants, got 9.0. Leave it out, or set planner.constants to "
            "'torchrec-1.9'.",
        ),
        (
            {"preset": "local", "world_size": 4, "local_world_size": 3},
            "cluster",
            "cluster.local_world_size: expected a divisor of 4, got 3.",
        ),
        (
            {"preset": "h100-8", "world_size": 8, "pod_size": 9},
            "cluster",
            "cluster.pod_size: expected at most 8, got 9.",
        ),
        (
            {"preset": "h100-8", "world_size": 32, "pod_size": 3},
            "cluster",
            "cluster.pod_size: expected a divisor of 4 hosts, got 3.",
        ),
        (
            {"preset": "local", "compute_device": "cuda"},
            "cluster",
            "cluster.hbm_cap: expected the bytes a rank may fill, got 0. Set it in the job.",
        ),
        (
            {"ddr_cap": "much"},
            "cluster",
            "cluster.ddr_cap: expected bytes as an integer or a text like '48 MiB', got 'much'.",
        ),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(
    section: dict[str, Any], profile: Profile, message: str
) -> None:
    with pytest.raises(InputError) as caught:
        cluster(ClusterSection(**section), profile)
    assert str(caught.value) == message


def _figure(name: str, **changes: Any) -> SourcedFigure:
    constant = LOCAL[name]
    figure = SourcedFigure(constant.value, constant.unit, "measured: here", "2026-11-21", 9, 0.04)
    return msgspec.structs.replace(figure, **changes)


MEASURED = Calibration(
    schema=SCHEMA,
    date="2026-11-21",
    world_size=2,
    compute_device="cpu",
    backend="gloo",
    machine={"cores": "2", "threads_per_rank": "1"},
    capacities={"ddr_cap": SourcedFigure(3e9, "B", "half of the host's", "2026-11-21", 1)},
    constants={name: _figure(name) for name in LOCAL}
    | {"ssd_rate": _figure("ssd_rate", source="carried over", median_of=0)},
)


def _section(**changes: Any) -> ClusterSection:
    return ClusterSection(file="here/c.toml", measured=MEASURED, **changes)


def _with(**constants: SourcedFigure) -> ClusterSection:
    changed = msgspec.structs.replace(MEASURED, constants=MEASURED.constants | constants)
    return ClusterSection(file="c.toml", measured=changed)


def test_a_measured_machine_stands_for_a_preset_and_says_so() -> None:
    found, assumptions = cluster(_section(), "cluster")
    assert (found.name, found.world_size, found.compute_device) == ("c.toml", 2, "cpu")
    assert found.capacity == (0, 3 * 10**9, 0)
    constant = found.constants["memory_rate"]
    assert constant.source == "measured: here; median of 9, spread 4 %"
    assert found.constants["ssd_rate"].source == "carried over"
    assert assumptions == (
        "hardware constants were measured on 2026-11-21 with 2 ranks over gloo "
        "(c.toml: cores 2, threads per rank 1)",
        "not measured but carried over: ssd_rate",
        "cluster.world_size not given: 2 ranks, as they were measured with",
        "cluster.local_world_size not given: 2 ranks per host, 1 host",
        "cluster.ddr_cap is the file 'c.toml's: 3,000,000,000 B per rank (half of the host's)",
    )


def test_other_ranks_than_were_measured_with_are_an_assumption() -> None:
    found, assumptions = cluster(
        _section(world_size=4, local_world_size=4, ddr_cap="1 GiB"), "cluster"
    )
    assert (found.world_size, found.memory_per_rank) == (4, GIB)
    assert assumptions[-1] == (
        "collectives were measured with 2 ranks and are assumed to have the same latency and "
        "rate with 4"
    )


def test_a_section_that_only_names_its_file_is_read_when_it_is_used(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    write_calibration(MEASURED, path)
    found, _ = cluster(ClusterSection(file=str(path)), "cluster")
    assert found.constants == cluster(_section(), "cluster")[0].constants


@pytest.mark.parametrize(
    ("section", "profile", "message"),
    [
        (
            _section(),
            "additive",
            "cluster.file: expected none with planner.constants 'additive', which has its own "
            "constants, got 'here/c.toml'. Leave one of the two out.",
        ),
        (
            _section(compute_device="cuda"),
            "cluster",
            "cluster.compute_device: expected 'cpu', which 'here/c.toml' is of, got 'cuda'. "
            "Leave it out, or calibrate on that device.",
        ),
        (
            _section(hbm_mem_bw=9.0),
            "cluster",
            "cluster.hbm_mem_bw: expected no rate of TorchRec's with file 'c.toml', which has "
            "its own constants, got 9.0. Leave it out, or set planner.constants to "
            "'torchrec-1.9'.",
        ),
        (
            ClusterSection(file="c.toml", preset="local"),
            "cluster",
            "job: cluster: expected a file or a preset, got both. Leave one of the two out; on the "
            "command line --set cluster.preset= takes the preset away",
        ),
        (
            _with(memory_rat=_figure("memory_rate")),
            "cluster",
            "c.toml: unknown key 'constants.memory_rat'. Did you mean 'memory_rate'? Known here: ",
        ),
        (
            _with(memory_rate=_figure("memory_rate", unit="GB/s")),
            "cluster",
            "c.toml: constants.memory_rate.unit: expected 'B/s', got 'GB/s'.",
        ),
        (
            _with(memory_rate=_figure("memory_rate", value=0.0)),
            "cluster",
            "c.toml: constants.memory_rate.value: expected at least 1 B/s, got 0.",
        ),
        (
            _with(overlap=_figure("overlap", value=1.5)),
            "cluster",
            "c.toml: constants.overlap.value: expected at most 1 share, got 1.5.",
        ),
        (
            _with(row_latency=_figure("row_latency", value=61.0)),
            "cluster",
            "c.toml: constants.row_latency.value: expected at most 60 s, got 61.",
        ),
    ],
)
def test_a_measured_machine_that_cannot_be_is_refused(
    section: ClusterSection, profile: Profile, message: str
) -> None:
    with pytest.raises(InputError) as caught:
        cluster(section, profile)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("name", LOCAL)
def test_a_measured_machine_without_a_constant_is_refused(name: str) -> None:
    constants = {key: figure for key, figure in MEASURED.constants.items() if key != name}
    measured = msgspec.structs.replace(MEASURED, constants=constants)
    with pytest.raises(InputError) as caught:
        cluster(ClusterSection(file="c.toml", measured=measured), "cluster")
    assert str(caught.value) == (
        f"c.toml: constants.{name}: expected a value, got none. Run `shardwright calibrate` again."
    )


@pytest.mark.parametrize(
    ("capacities", "message"),
    [
        ({}, "c.toml: capacities.ddr_cap: expected bytes per rank, got none."),
        (
            {"ddr_cap": SourcedFigure(3.0, "GiB", "x", "2026-11")},
            "c.toml: capacities.ddr_cap.unit: expected 'B', got 'GiB'.",
        ),
        (
            {"ddr_cap": SourcedFigure(0.5, "B", "x", "2026-11")},
            "c.toml: capacities.ddr_cap.value: expected whole bytes, at most 2^60, got 0.5.",
        ),
    ],
)
def test_a_measured_machine_without_memory_is_refused(
    capacities: dict[str, SourcedFigure], message: str
) -> None:
    measured = msgspec.structs.replace(MEASURED, capacities=capacities)
    with pytest.raises(InputError) as caught:
        cluster(ClusterSection(file="c.toml", measured=measured), "cluster")
    assert str(caught.value) == message


def test_jobs_know_what_every_preset_computes_on() -> None:
    """Without the presets: a model's dtype follows from it."""
    for name, preset in PRESETS.items():
        assert device_of(ClusterSection(preset=name)) == preset.compute_device, name
