"""Predictions for the rows of Megatron-LM's functional tests: their arguments as a job, estimated.

What a test's file does not say and its platform does: how many ranks there were, which attention
Transformer Engine took, and the workspaces of cuBLAS, which torch counts as allocated.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from published.devices import Device, device_of, ranks_of
from published.prediction import Prediction
from shardwright.core.errors import InputError, ShardwrightError, UnsupportedError, expected
from shardwright.core.footprint import Footprint, RankMemory
from shardwright.estimate.unplanned import estimated
from shardwright.job.imported import Imported
from shardwright.job.job import parse_job
from shardwright.job.megatron import job_of
from shardwright.trace.lowering.kernels import CUBLAS_HANDLES, CUBLAS_HOPPER, CUBLAS_OTHER

MIB = 2**20
ENGINE_WORKSPACE = 4 * MIB
ENGINE_WORKSPACE_HOPPER = 32 * MIB + 1024
"""Bytes of Transformer Engine's cuBLAS workspace (``get_cublas_workspace_size_bytes``)."""
GROUPED, OVERLAPPED = 4, 3
"""Workspaces more, of the streams of grouped products (``get_num_cublas_streams``), and of
overlapped tensor-parallel communication (``_NUM_MAX_UB_STREAMS``)."""

FAMILIES = {
    "t5": "an encoder beside the decoder is not described",
    "bert": "an encoder-only model is not described",
    "retro": "a retrieval model is not described",
    "mimo": "a model with a vision encoder is not described",
    "multimodal": "a model with a vision encoder is not described",
    "vision": "a vision model is not described",
}
"""Families of tests that are left out, by how their name begins."""


def predict_megatron(row: Mapping[str, Any]) -> Prediction:
    """Predict the peak of the last rank, whose writer logged the row."""
    family, test = test_of(str(row.get("source", "")))
    for name, reason in FAMILIES.items():
        if family.lower().startswith(name):
            raise UnsupportedError(f"{family}: {reason}")
    measured = row.get("max_alloc_bytes")
    if not isinstance(measured, int | float) or measured <= 0:
        raise InputError(expected("max_alloc_bytes", "a number of bytes", repr(measured)))
    arguments = row.get("args")
    if not isinstance(arguments, Mapping) or not arguments:
        raise InputError(expected("args", "the arguments of the run", "none"))
    given = {name.lstrip("-").replace("_", "-"): value for name, value in arguments.items()}
    environment = row.get("env")
    environment = environment if isinstance(environment, Mapping) else {}
    platform = str(row.get("platform") or "")
    device, unnamed = device_of(platform)
    ranks, guessed = ranks_of(test, platform)
    kernels, picked = attention(given, environment, device, old_engine(test, platform))
    found, job, ranks = _estimated(msgspec.json.encode(given | kernels), ranks)
    last = max(found.ranks, key=lambda rank: rank.coordinates.get("pipeline", 0))
    buffers = workspaces(given, environment, device)
    notes = [*unnamed, guessed if ranks else "the fewest ranks that its degrees allow", *picked]
    notes += [f"{each} (assumed)" for each in job.assumed]
    if "num-experts" in given:
        notes.append("tokens spread evenly over the experts")
    if job.unread:
        notes.append(f"not read, whatever they change: {', '.join(job.unread)}")
    return Prediction(
        family=family,
        platform=platform,
        measured=int(measured),
        capacity=device.capacity,
        configuration=f"{family}/{test}",
        predicted=last.peak_bytes + sum(buffers.values()),
        parts=_parts(last) | buffers,
        assumptions=tuple(notes),
        phase=last.peak_phase,
        parameters=found.parameters,
    )


@functools.cache
def _estimated(arguments: bytes, ranks: int) -> tuple[Footprint, Imported, int]:
    """The memory of a job by its arguments, with as many ranks as it took, 0 for the fewest."""
    given = msgspec.json.decode(arguments)
    try:
        found = job_of(given, ranks)
    except ShardwrightError as error:
        if not str(error).startswith("-n: "):
            raise
        found, ranks = job_of(given, None), 0
    return estimated(parse_job(found.document)), found, ranks


def _parts(last: RankMemory) -> dict[str, int]:
    return {kind.replace("_", " "): nbytes for kind, nbytes in last.by_category.items()}


def test_of(source: str) -> tuple[str, str]:
    """Family and name of the test that a row's source names."""
    path = source.rsplit(":", 1)[-1].split("/test_cases/", 1)[-1]
    folders = path.split("/")[:-1]
    if len(folders) < 2:
        return folders[0] if folders else "unknown", path
    return folders[-2], folders[-1]


def old_engine(test: str, platform: str) -> bool:
    """Whether the row came from a container whose Transformer Engine knows no deterministic flash
    or fused attention; read from rows, see ``comparison.py``."""
    return platform.startswith("lts") and ("dracooci" in platform or "frozen" in test)


def attention(
    given: Mapping[str, Any], environment: Mapping[str, Any], device: Device, old: bool
) -> tuple[dict[str, str], list[str]]:
    """The attention that Transformer Engine picks where nobody names one, and that it was picked:
    cuDNN's fused one from Hopper on and flash attention before it. cuDNN's is not deterministic on
    Blackwell, and neither is so in an ``old`` one."""
    named = str(given.get("attention-backend", "auto")).rpartition(".")[2]
    if named != "auto" or given.get("transformer-impl") == "local":
        return {}, []
    exact = bool(given.get("deterministic-mode")) or (
        str(environment.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "")) == "0"
    )
    picked = "fused" if device.hopper and not (device.blackwell and exact) else "flash"
    if (old and exact) or not (given.get("bf16") or given.get("fp16")):
        picked = "unfused"
    note = f"attention backend {picked}: left to Transformer Engine"
    return {"attention-backend": picked}, [note]


def workspaces(
    given: Mapping[str, Any], environment: Mapping[str, Any], device: Device
) -> dict[str, int]:
    """What cuBLAS is given to work in: by torch pairs of ``:KiB:count``, else torch's default."""
    pairs = re.findall(r":(\d+):(\d+)", str(environment.get("CUBLAS_WORKSPACE_CONFIG", "")))
    each = sum(int(size) * 2**10 * int(count) for size, count in pairs)
    each = each or (CUBLAS_HOPPER if device.hopper else CUBLAS_OTHER)
    found = {"cuBLAS workspaces of torch": CUBLAS_HANDLES * each}
    experts, engine = "num-experts" in given, given.get("transformer-impl") != "local"
    count = int(engine or experts)
    if engine and experts and given.get("moe-grouped-gemm"):
        count += GROUPED
    if engine and given.get("tp-comm-overlap") and given.get("tensor-model-parallel-size", 1) > 1:
        count += OVERLAPPED
    if count:
        one = ENGINE_WORKSPACE_HOPPER if device.hopper else ENGINE_WORKSPACE
        found["cuBLAS workspaces of Transformer Engine"] = count * one
    return found
