"""The cluster a job names: a preset or a measured machine, and what the job has instead."""

from __future__ import annotations

from pathlib import Path

from shardwright.core.cluster import (
    CAPACITIES,
    Calibration,
    Cluster,
    Constant,
    Device,
    SourcedFigure,
    decisive,
)
from shardwright.core.document import unknown_key
from shardwright.core.errors import InputError, expected, not_one_of
from shardwright.core.quantities import counted, parse_bytes
from shardwright.cost.presets import HARDWARE, LOCAL, MODELS, OF_A_JOB, PRESETS, Preset
from shardwright.job.cluster import ClusterSection, with_calibration
from shardwright.job.planner import Profile

ACCELERATED, PLAIN = "h100-8", "local"  # presets of a job that names none
RATES = (  # of a job's [cluster]: each replaces the constant of that name, where a profile has it
    "hbm_mem_bw",
    "ddr_mem_bw",
    "ssd_mem_bw",
    "hbm_to_ddr_mem_bw",
    "intra_host_bw",
    "inter_host_bw",
    "bwd_compute_multiplier",
    "weighted_feature_bwd_compute_multiplier",
)


def cluster(
    section: ClusterSection, profile: Profile, own: Preset | None = None
) -> tuple[Cluster, tuple[str, ...]]:
    """The cluster a job names for a cost profile, and what had to be assumed about it.

    ``own`` is the preset of a profile that brings one along.
    """
    if section.file and section.measured is None:
        section = with_calibration(section)
    name, preset = _preset(section, profile, own)
    constants = _constants(section, name, preset)
    device: Device = section.compute_device or preset.compute_device
    world_size = section.world_size or preset.world_size
    local = _local_world_size(section, preset, world_size)
    group = _group(section, world_size, local)
    capacities = {key: _capacity(section, key, preset, device) for key in CAPACITIES}
    found = Cluster(name, world_size, local, device, **capacities, group=group, constants=constants)
    if found.memory_per_rank == 0:
        key = f"{found.decisive_tier}_cap"
        raise InputError(
            expected(f"cluster.{key}", "the bytes a rank may fill", "0", "Set it in the job.")
        )
    return found, _assumptions(section, profile, preset, found)


def says_capacity(section: ClusterSection) -> bool:
    """Whether a job says what the bytes that a rank may fill follow from."""
    return bool(section.preset or section.file or section.hbm_cap or section.ddr_cap)


def _preset(section: ClusterSection, profile: Profile, own: Preset | None) -> tuple[str, Preset]:
    """What the job starts from, by its name."""
    measured = section.measured
    if measured is None:
        name = _preset_name(section, profile)
        return name, own or PRESETS[name]
    if profile in MODELS:
        raise InputError(
            expected(
                "cluster.file",
                f"none with planner.constants '{profile}', which has its own constants",
                f"'{section.file}'",
                "Leave one of the two out.",
            )
        )
    if section.compute_device not in (None, measured.compute_device):
        raise InputError(
            expected(
                "cluster.compute_device",
                f"'{measured.compute_device}', which '{section.file}' is of",
                f"'{section.compute_device}'",
                "Leave it out, or calibrate on that device.",
            )
        )
    return Path(section.file).name, calibrated(measured, section.file)


def _preset_name(section: ClusterSection, profile: Profile) -> str:
    """The preset a job names, or the one that its profile and device stand for."""
    name = section.preset
    if not name:
        if profile in MODELS:
            return profile
        return ACCELERATED if section.compute_device == "cuda" else PLAIN
    if name not in (*HARDWARE, *MODELS):
        raise InputError(not_one_of("cluster.preset", name, (*HARDWARE, *MODELS)))
    if profile in MODELS and name != profile:
        raise InputError(
            expected(
                "cluster.preset",
                f"'{profile}', as planner.constants",
                f"'{name}'",
                "Leave one of the two out.",
            )
        )
    if profile not in MODELS and name in MODELS:
        raise InputError(
            expected(
                "cluster.preset",
                f"one of {', '.join(HARDWARE)} for planner.constants '{profile}'",
                f"'{name}'",
                f"Set planner.constants to '{name}' as well.",
            )
        )
    return name


def _constants(section: ClusterSection, name: str, preset: Preset) -> dict[str, Constant]:
    """The preset's constants; rates in bytes per millisecond may be replaced one by one."""
    given = {key: getattr(section, key) for key in RATES}
    given = {key: value for key, value in given.items() if value is not None}
    if not given.keys() <= preset.constants.keys():
        key, value = next(iter(given.items()))
        kind = "file" if section.file else "preset"
        raise InputError(
            expected(
                f"cluster.{key}",
                f"no rate of TorchRec's with {kind} '{name}', which has its own constants",
                f"{value}",
                "Leave it out, or set planner.constants to 'torchrec-1.9'.",
            )
        )
    found = preset.constants | preset.clock
    return found | {
        key: Constant(value, preset.constants[key].unit, f"cluster.{key} of the job", "as given")
        for key, value in given.items()
    }


def _local_world_size(section: ClusterSection, preset: Preset, world_size: int) -> int:
    """Ranks per host: as the job says, as the preset's hosts have if those fill up, or all."""
    local = section.local_world_size
    if local is None:
        return preset.host if preset.host and world_size % preset.host == 0 else world_size
    if world_size > local and world_size % local:
        raise InputError(
            expected("cluster.local_world_size", f"a divisor of {world_size}", f"{local}")
        )
    return local


def _group(section: ClusterSection, world_size: int, local: int) -> int:
    """Ranks linked as closely as those of one host; at most all."""
    pod_size = section.pod_size or 1
    if pod_size > world_size:
        raise InputError(expected("cluster.pod_size", f"at most {world_size}", f"{pod_size}"))
    group = pod_size * local
    if world_size > local and world_size % group:
        raise InputError(
            expected(
                "cluster.pod_size",
                f"a divisor of {world_size // local} hosts",
                f"{pod_size}",
            )
        )
    return min(group, world_size)


def _capacity(section: ClusterSection, key: str, preset: Preset, device: Device) -> int:
    """Bytes per rank of one tier; a CPU has no HBM whatever is said."""
    given = getattr(section, key)
    size: int = getattr(preset, key) if given is None else parse_bytes(given, f"cluster.{key}")
    return 0 if (device, key) == ("cpu", "hbm_cap") else size


def _assumptions(
    section: ClusterSection, profile: Profile, preset: Preset, found: Cluster
) -> tuple[str, ...]:
    measured = section.measured
    whose = f"the preset '{found.name}'s" if measured is None else f"the file '{found.name}'s"
    notes = _unmeasured(section, profile, found) if measured is None else _measured(measured, found)
    if section.world_size is None:
        has = "the preset has" if measured is None else "they were measured with"
        notes.append(f"cluster.world_size not given: {counted(found.world_size, 'rank')}, as {has}")
    if section.local_world_size is None:
        hosts = found.world_size // found.local_world_size
        notes.append(
            f"cluster.local_world_size not given: {counted(found.local_world_size, 'rank')} per "
            f"host, {counted(hosts, 'host')}"
        )
    key = f"{found.decisive_tier}_cap"
    if getattr(section, key) is None:
        notes.append(
            f"cluster.{key} is {whose}: {found.memory_per_rank:,} B per rank ({preset.capacities})"
        )
    return tuple(notes)


def _unmeasured(section: ClusterSection, profile: Profile, found: Cluster) -> list[str]:
    """Why this preset, and that its constants are nobody's measurement of this machine."""
    notes = []
    if not section.preset:
        reason = "no compute_device is named"
        if section.compute_device:
            reason = f"compute_device is {section.compute_device}"
        if profile in MODELS:
            reason = "planner.constants say so"
        notes.append(f"cluster.preset not given: '{found.name}', for {reason}")
    notes.append(f"hardware constants are the preset '{found.name}'s, not measured on this machine")
    return notes


def _measured(measured: Calibration, found: Cluster) -> list[str]:
    """Where and when the constants were measured, and what of them was not."""
    ranks = counted(measured.world_size, "rank")
    machine = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in sorted(measured.machine.items()))
    notes = [
        f"hardware constants were measured on {measured.date} with {ranks} "
        f"over {measured.backend} ({found.name}: {machine})"
    ]
    if measured.carried_over:
        notes.append(f"not measured but carried over: {', '.join(measured.carried_over)}")
    if found.world_size != measured.world_size:
        notes.append(
            f"collectives were measured with {ranks} and are assumed to have "
            f"the same latency and rate with {found.world_size}"
        )
    return notes


AGAIN = "Run `shardwright calibrate` again."
UNITS_OF_RATES = ("B/s", "FLOP/s")


def calibrated(found: Calibration, where: str) -> Preset:
    """The preset that a cluster file describes; InputError names the constant that cannot be."""
    rates = (name for preset in PRESETS.values() for name in preset.constants)
    known = {name: "FLOP/s" for name in rates if name.endswith("_compute_rate")} | OF_A_JOB
    known |= {name: constant.unit for name, constant in LOCAL.items()}
    for name in found.constants:
        if name not in known:
            raise unknown_key(where, f"constants.{name}", name, known)
    missing = next((name for name in LOCAL if name not in found.constants), None)
    if missing:
        raise InputError(expected(f"{where}: constants.{missing}", "a value", "none", AGAIN))
    for name, figure in found.constants.items():
        _check(f"{where}: constants.{name}", figure, known[name])
    for name, figure in found.capacities.items():
        _check_capacity(f"{where}: capacities.{name}", figure)
    sizes = {name: int(figure.value) for name, figure in found.capacities.items()}
    key = f"{decisive(found.compute_device)}_cap"
    if not sizes.get(key):
        raise InputError(expected(f"{where}: capacities.{key}", "bytes per rank", "none"))
    return Preset(
        found.world_size,
        found.compute_device,
        sizes.get("hbm_cap", 0),
        sizes.get("ddr_cap", 0),
        sizes.get("ssd_cap", 0),
        found.capacities[key].source,
        {name: _constant(figure) for name, figure in found.constants.items()},
    )


def _check(where: str, figure: SourcedFigure, unit: str) -> None:
    """A constant in another unit, a rate of nothing and a share above all are refused."""
    if figure.unit != unit:
        raise InputError(expected(f"{where}.unit", f"'{unit}'", f"'{figure.unit}'"))
    if unit in UNITS_OF_RATES and figure.value < 1:
        raise InputError(expected(f"{where}.value", f"at least 1 {unit}", f"{figure.value:g}"))
    most = {"share": 1.0, "s": 60.0, "touches": 1e6}.get(unit)
    if most is not None and figure.value > most:
        raise InputError(
            expected(f"{where}.value", f"at most {most:g} {unit}", f"{figure.value:g}")
        )


def _check_capacity(where: str, figure: SourcedFigure) -> None:
    if figure.unit != "B":
        raise InputError(expected(f"{where}.unit", "'B'", f"'{figure.unit}'"))
    if figure.value > 2**60 or figure.value != int(figure.value):
        raise InputError(
            expected(f"{where}.value", "whole bytes, at most 2^60", f"{figure.value:g}")
        )


def _constant(figure: SourcedFigure) -> Constant:
    source = figure.source
    if figure.median_of:
        source += f"; median of {figure.median_of}, spread {figure.spread * 100:.0f} %"
    return Constant(figure.value, figure.unit, source, figure.date)
