"""What the allocator of an accelerator says for the time of a tracking."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.core.footprint import DeviceMemory

CUDA_GRANULARITY = 512  # bytes: the CUDA caching allocator's smallest block, kMinBlockSize


class DeviceMeter:
    """Peaks of ``torch.cuda`` from its making on; making one resets them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.cuda.reset_peak_memory_stats(device)
        self.first = self._now()

    def read(self) -> DeviceMemory:
        """The figures until now."""
        now, first = self._now(), self.first
        return DeviceMemory(
            device=torch.cuda.get_device_name(self.device),
            before=first["active_bytes.all.current"],
            active_peak=now["active_bytes.all.peak"],
            allocated_peak=now["allocated_bytes.all.peak"],
            reserved_peak=now["reserved_bytes.all.peak"],
            retries=now["num_alloc_retries"] - first["num_alloc_retries"],
            out_of_memory=now["num_ooms"] - first["num_ooms"],
        )

    def _now(self) -> dict[str, Any]:
        torch.cuda.synchronize(self.device)
        return dict(torch.cuda.memory_stats(self.device))


def meter_for(device: torch.device | None, *, fake: bool) -> DeviceMeter | None:
    """A meter where real tensors live on a GPU."""
    if fake or device is None or device.type != "cuda" or not torch.cuda.is_available():
        return None
    return DeviceMeter(device)


def granularity_of(device_type: str) -> int:
    """Bytes to which an allocation on a device is rounded up."""
    return CUDA_GRANULARITY if device_type == "cuda" else 1
