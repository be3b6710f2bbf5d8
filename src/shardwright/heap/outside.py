"""Memory of a device that torch's allocator does not see, as ranges with their sources."""

from __future__ import annotations

from shardwright.core.footprint import Extra
from shardwright.job.parallel import Degrees

MB = 10**6
CONTEXT = (300 * MB, 500 * MB)
CONTEXT_SOURCE = "CUDA context and kernels, as commonly seen; assumed"
# The upper end is what Fujii et al. (arXiv 2411.06465) count; a communicator that has sent nothing
# yet holds less.
COMMUNICATOR = (100 * MB, 500 * MB)
COMMUNICATOR_SOURCE = "NCCL buffers; upper end from arXiv 2411.06465, lower assumed"


def communicators(degrees: Degrees) -> int:
    """Groups of more than one rank that a rank talks in; the world counts where data is shared."""
    sizes = (
        degrees.shards,
        degrees.data_replicate,
        degrees.tensor,
        degrees.pipeline,
        degrees.context,
        degrees.expert,
    )
    return sum(size > 1 for size in sizes)


def outside(degrees: Degrees, on_gpu: bool, more: int = 0) -> tuple[Extra, ...]:
    """What else fills a rank's device, with so many communicators ``more``; nothing on a CPU."""
    if not on_gpu:
        return ()
    found = [Extra("CUDA context", *CONTEXT, CONTEXT_SOURCE)]
    count = communicators(degrees) + more
    if count:
        low, high = COMMUNICATOR
        name = f"{count} communicator{'s' if count > 1 else ''}"
        found.append(Extra(name, count * low, count * high, COMMUNICATOR_SOURCE))
    return tuple(found)
