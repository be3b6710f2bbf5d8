"""Which kernels a device runs, where it has a choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from shardwright.core.errors import InputError, expected

Device = Literal["cpu", "cuda"]
Attention = Literal["flash", "cudnn", "efficient", "math"]
RMSNorm = Literal["fused", "composite"]
CrossEntropy = Literal["composite", "fused"]


@dataclass(frozen=True, slots=True)
class Kernels:
    """``attention`` is what is tried first: torch takes the next of flash, efficient and math where
    it cannot be used. ``rms_norm`` is composite before torch 2.9 and where a compiler takes it
    apart. ``cross_entropy`` is fused where the model's loss is Liger's."""

    device: Device = "cuda"
    attention: Attention = "flash"
    rms_norm: RMSNorm = "fused"
    cross_entropy: CrossEntropy = "composite"


def kernels(
    device: str = "cuda",
    attention: str = "flash",
    rms_norm: str = "fused",
    cross_entropy: str = "composite",
) -> Kernels:
    """The kernels of a device by name; an unknown name is the user's error."""
    choices = (
        ("device", device, get_args(Device)),
        ("attention", attention, get_args(Attention)),
        ("rms_norm", rms_norm, get_args(RMSNorm)),
        ("cross_entropy", cross_entropy, get_args(CrossEntropy)),
    )
    for name, value, names in choices:
        if value not in names:
            remedy = "Choose one of them." if name != "device" else "Use the nearest of them."
            raise InputError(expected(f"lowering.{name}", " or ".join(names), f"'{value}'", remedy))
    return Kernels(device, attention, rms_norm, cross_entropy)  # type: ignore[arg-type]
