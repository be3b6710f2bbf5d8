"""The ``[cluster]`` of a job: a preset or a cluster file, and what its machine has instead."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from shardwright.core.cluster import CAPACITIES, Calibration, Device, Ranks, read_calibration
from shardwright.core.errors import InputError, expected, there_are
from shardwright.core.llama import MAX_WORLD
from shardwright.core.quantities import LEAST_BARE, check_unit
from shardwright.job.model import beside

ManyRanks = Annotated[int, msgspec.Meta(ge=1, le=MAX_WORLD)]
Bandwidth = Annotated[float, msgspec.Meta(gt=0, le=1e15)]
Multiplier = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class ClusterSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A preset or a cluster file, and what this job's machine has instead; capacities are per rank.

    ``measured`` is what the file said when the job was read.

    Attributes:
        preset (by device): ``local``, ``cpu-host``, ``v100-8``, ``a100-8``, ``h100-8``, ``h200-8``,
            ``b200-8``, ``gb200-72``, ``mi300x-8``, ``a100-40-8``, ``h100-pcie-8``, ``h100-nvl-8``,
            ``l40s-8``, ``rtx4090-1``, ``rtx5090-1``: constants and capacities
        file: instead of a preset a cluster file of ``shardwright calibrate``, found from the
            working directory, else beside the job. What it said stays with the job in the plan, as
            ``measured``
        world_size, local_world_size (the preset's): ranks, ranks per host; at most 16384 for a
            plan, 1048576 for an estimate of memory. With ``[parallel]`` the ranks may follow from
            it
        pod_size (1): hosts that are linked as closely as the ranks of one
        compute_device (the preset's): ``"cpu"`` or ``"cuda"``
        ddr_cap, hbm_cap, ssd_cap (the preset's): memory per rank on a CPU, on an accelerator, on
            its disk: bytes, or text such as ``"38 MiB"``
        hbm_mem_bw, ddr_mem_bw, ssd_mem_bw, hbm_to_ddr_mem_bw, intra_host_bw, inter_host_bw,
            bwd_compute_multiplier, weighted_feature_bwd_compute_multiplier (TorchRec's): with
            ``constants = "torchrec-1.9"``: its topology, in bytes per millisecond
    """

    preset: str = ""
    file: str = ""
    measured: Calibration | None = None
    world_size: ManyRanks | None = None
    local_world_size: Ranks | None = None
    pod_size: Ranks | None = None
    compute_device: Literal["cpu", "cuda"] | None = None
    hbm_cap: int | str | None = None
    ddr_cap: int | str | None = None
    ssd_cap: int | str | None = None
    hbm_mem_bw: Bandwidth | None = None
    ddr_mem_bw: Bandwidth | None = None
    ssd_mem_bw: Bandwidth | None = None
    hbm_to_ddr_mem_bw: Bandwidth | None = None
    intra_host_bw: Bandwidth | None = None
    inter_host_bw: Bandwidth | None = None
    bwd_compute_multiplier: Multiplier | None = None
    weighted_feature_bwd_compute_multiplier: Multiplier | None = None


def with_calibration(
    section: ClusterSection, where: str = "job", job_path: Path | None = None
) -> ClusterSection:
    """The section with its file read; a relative path starts at the working directory, else
    beside the job."""
    if section.preset:
        raise InputError(
            expected(
                f"{where}: cluster",
                "a file or a preset",
                "both",
                "Leave one of the two out; on the command line --set cluster.preset= takes the "
                "preset away, --set cluster.file= the file.",
            )
        )
    measured = read_calibration(beside(section.file, job_path, f"{where}: cluster.file"))
    return msgspec.structs.replace(section, measured=measured)


def check_units(cluster: object, where: str, least: int = LEAST_BARE) -> None:
    """InputError for a capacity of a ``[cluster]`` that has no unit and is below ``least``."""
    if isinstance(cluster, Mapping):
        for key in CAPACITIES:
            check_unit(cluster.get(key), f"{where}: cluster.{key}", least)


CPU_PRESETS = ("", "local", "cpu-host")  # all of them, or a llama there is taken for bf16


def device_of(section: ClusterSection) -> Device:
    """What the ranks of a job compute on."""
    # By the section and not by a Cluster: the preset's constants would have to be loaded with
    # costs, which this floor does not know.
    if section.compute_device:
        return section.compute_device
    if section.measured is not None:
        return section.measured.compute_device
    return "cpu" if section.preset in CPU_PRESETS else "cuda"


# ---- a machine in one word -----------------------------------------------------------------------

DEVICES = {
    "V100": "v100-8",
    "A100": "a100-8",
    "A100-80": "a100-8",
    "A100-40": "a100-40-8",
    "H100": "h100-8",
    "H100-PCIe": "h100-pcie-8",
    "H100-NVL": "h100-nvl-8",
    "H200": "h200-8",
    "B200": "b200-8",
    "GB200": "gb200-72",
    "MI300X": "mi300x-8",
    "L40S": "l40s-8",
    "RTX4090": "rtx4090-1",
    "RTX5090": "rtx5090-1",
    "cpu": "local",
}
_COUNTED = re.compile(
    r"(?:(?P<hosts>\d+)x)?(?P<each>\d+)x(?P<device>[A-Za-z][\w-]*)", re.IGNORECASE
)


def in_one_word(text: str, where: str = "--on") -> dict[str, Any]:
    """The keys of the ``[cluster]`` that ``8xH100``, ``2x8xA100-40`` (hosts, devices of each),
    a preset or a cluster file is; InputError where it is none of them."""
    if not isinstance(text, str):  # from Python
        raise InputError(expected(where, "a machine in a word, such as '8xH100'", repr(text)))
    if text.endswith(".toml"):
        return {"file": text}
    known = {name.lower(): preset for name, preset in DEVICES.items()}
    if text in (*DEVICES.values(), *CPU_PRESETS):
        return {"preset": text}
    found = _COUNTED.fullmatch(f"1x{text}" if text.lower() in known else text)
    preset = known.get(found["device"].lower()) if found else None
    if found is None or preset is None:
        if meant := _meant(text):
            wanted = "a machine such as 8xH100, a preset or a cluster file"
            raise InputError(expected(where, wanted, f"'{text}'", f"Did you mean '{meant}'?"))
        if found is None:  # a preset that another profile has, or none
            return {"preset": text}
        wanted = "a known device, a preset or a cluster file"
        remedy = there_are(found["device"], DEVICES)
        raise InputError(expected(where, wanted, f"'{found['device']}'", remedy))
    hosts, each = found["hosts"], int(found["each"])
    section = {"preset": preset, "world_size": int(hosts or 1) * each}
    # Of cards that a host usually has one of a few are meant to be in one.
    together = hosts or (preset.endswith("-1") and 1 < each <= MOST_CARDS)
    return section | ({"local_world_size": each} if together else {})


MOST_CARDS = 8  # in one host
BESIDE = re.compile(r"\d+-?gb?\b|hbm\d?|sxm\d?|pcie\d?")  # what shops write beside a device


def _meant(text: str) -> str:
    """A machine in one word that has the device and the counts of a ``text``: ``8xH100`` of
    ``H100x8`` and of ``8 H100-SXM5-80GB``; empty where no device, or more counts, are in it."""
    spaced = re.sub(r"[^a-z0-9]+", "-", text.lower())
    names = {name.lower().replace("-", ""): name for name in DEVICES}
    names |= {name.removeprefix("rtx"): device for name, device in names.items()}
    # The longest first, so that 80 of A100-80 is not taken for a count.
    for name in sorted(names, key=len, reverse=True):
        device = re.search("-?".join(name), spaced)
        if device:
            rest = f"{spaced[: device.start()]} {spaced[device.end() :]}"
            counts = re.findall(r"\d+", BESIDE.sub("", rest)) or ["1"]
            return "x".join([*counts, names[name]]) if len(counts) < 3 else ""
    return ""
