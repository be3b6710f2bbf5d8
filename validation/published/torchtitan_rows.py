"""Predictions for the rows of TorchTitan's benchmark pages: FSDP2 and all beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from published.devices import device_of
from published.prediction import Prediction
from shardwright.core.errors import InputError, UnsupportedError, expected
from shardwright.estimate.footprint import footprint
from shardwright.job.job import parse_job
from shardwright.job.torchtitan import FLAVORS

GIB = 2**30

# pytorch/torchtitan pull requests 859 and 1033: the loss is compiled where the model is
LOSS_COMPILED_SINCE = 202_503
SCHEDULES = {
    "interleaved1f1b": "interleaved_1f1b",
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "zbv": "zbv",
    "interleavedzerobubble": "interleaved_zero_bubble",
}


def predict_torchtitan(row: Mapping[str, Any]) -> Prediction:
    """Predict what the allocator of the fullest rank holds, which is what TorchTitan logs."""
    measured = row.get("memory_GiB")
    if not isinstance(measured, int | float) or measured <= 0:
        raise UnsupportedError("memory_GiB: the row has no memory figure")
    assumptions: list[str] = []
    job = parse_job(_document(row, assumptions), "row")
    found = footprint(job)
    worst = found.worst
    device, named = device_of(str(row.get("hw") or ""))
    return Prediction(
        family=str(row.get("model") or "llama"),
        platform=device.name,
        predicted=worst.reserved_bytes,
        measured=round(measured * GIB),
        parts={
            **{str(category): size for category, size in worst.by_category.items()},
            "cached by the allocator": worst.reserved_bytes - worst.peak_bytes,
        },
        assumptions=(*assumptions, *named, *found.assumptions),
        capacity=device.capacity,
        phase=worst.peak_phase,
        parameters=found.parameters,
    )


def _document(row: Mapping[str, Any], assumptions: list[str]) -> dict[str, Any]:
    """The row as a job."""
    parallel = row.get("parallel")
    if not isinstance(parallel, Mapping):
        raise InputError(expected("parallel", "degrees by name", repr(parallel)))
    degrees = {name: int(degree or 1) for name, degree in parallel.items()}
    for name in degrees:
        if name not in DEGREES:
            raise UnsupportedError(f"parallel.{name}: not among {', '.join(DEGREES)}")
    batch, sequence = row.get("local_batch"), row.get("seq_len")
    if not isinstance(batch, int) or not isinstance(sequence, int):
        raise InputError(expected("local_batch and seq_len", "numbers", f"{batch}, {sequence}"))
    ranks = row.get("gpus")
    section: dict[str, Any] = {"data_shard": -1, "tensor": 1, "pipeline": 1}
    section |= {DEGREES[name]: degree for name, degree in degrees.items()}
    if section["pipeline"] > 1:
        section |= _pipeline(row, section["pipeline"], batch, assumptions)
    compiled = bool(row.get("compile"))
    memory: dict[str, Any] = {
        "runtime": "fsdp2",
        "lowering": "cuda",
        "implementation": "fused",
        "checkpointing": _checkpointing(row, assumptions),
        "compile": ("blocks" if _date(row) < LOSS_COMPILED_SINCE else True) if compiled else False,
        "float8": _float8(row),
        "loss": "parallel" if section["tensor"] > 1 else "gathered",
    }
    assumptions.append("the counter is the allocator's reserved memory, of the fullest rank")
    return {
        "model": {"kind": "llama", **_model(str(row.get("model") or ""))},
        "cluster": {"world_size": int(ranks), "compute_device": "cuda"} if ranks else {},
        "batch": {"size": batch, "sequence": sequence},
        "parallel": section,
        "memory": memory,
    }


DEGREES = {
    "fsdp": "data_shard",
    "dp": "data_shard",
    "hsdp": "data_replicate",
    "dp_replicate": "data_replicate",
    "dp_shard": "data_shard",
    "tp": "tensor",
    "pp": "pipeline",
    "cp": "context",
}
"""Degrees by TorchTitan's names, and by ours."""


def _model(name: str) -> dict[str, Any]:
    found = re.fullmatch(r"(?:meta-)?(llama)[-_ ]?(\d)(?:\.\d)?[-_ ]?(\d+b)", name.lower())
    flavors = {} if found is None else FLAVORS.get(found[1] + found[2], {})
    if found is None or found[3].upper() not in flavors:
        known = ", ".join(f"{model}-{size}" for model, sizes in FLAVORS.items() for size in sizes)
        raise UnsupportedError(f"model {name!r}: not among {known}")
    return flavors[found[3].upper()]


def _checkpointing(row: Mapping[str, Any], assumptions: list[str]) -> str:
    named = str(row.get("ac") or "none").lower()
    if named.startswith("full"):
        return "full"
    if named.startswith("none") or named == "off":
        return "none"
    if "layer" in named or "every" in named:
        every = re.search(r"\d+", named)
        return f"layers:{every[0] if every else 2}"
    if "inferred" in named:
        assumptions.append(f"activation checkpointing: {named}")
    return "selective_op"


def _float8(row: Mapping[str, Any]) -> bool | str:
    named = row.get("float8")
    if isinstance(named, str):
        if "row" in named:
            return "rowwise"
        return "tensorwise" if "tensor" in named else False
    return bool(named)


def _pipeline(
    row: Mapping[str, Any], stages: int, batch: int, assumptions: list[str]
) -> dict[str, Any]:
    """Schedule and microbatches: as many as stages, TorchTitan's default, where that divides."""
    extra = re.sub(r"[\s_-]", "", str(row.get("extra") or "").lower())
    schedule = next((ours for theirs, ours in SCHEDULES.items() if theirs in extra), "1f1b")
    microbatches = stages if batch % stages == 0 else batch
    assumptions.append(f"{microbatches} microbatches, schedule {schedule}")
    return {"schedule": schedule, "microbatches": microbatches}


def _date(row: Mapping[str, Any]) -> int:
    """Year and month in the name of the page; the newest where it has none."""
    found = re.search(r"(20\d\d)-?(\d\d)", str(row.get("source") or "").partition(":")[2])
    return int(found[1] + found[2]) if found else 999_999
