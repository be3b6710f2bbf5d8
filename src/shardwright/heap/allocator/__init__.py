"""PyTorch's caching allocator for CUDA, without a device: what it reserves for given requests."""

from __future__ import annotations

from shardwright.heap.allocator.replay import (
    ASSUMPTION,
    AllocatorRequest,
    PoolBytes,
    Replay,
    replay,
)
from shardwright.heap.allocator.settings import AllocatorSettings

__all__ = ["ASSUMPTION", "AllocatorRequest", "AllocatorSettings", "PoolBytes", "Replay", "replay"]
