"""What a cost profile of another planner brings: the one place where ours knows of TorchRec's.

``shardwright.torchrec`` is built on the planner, so nothing here can import it at once: it is
loaded when a job asks for ``profiles.torchrec``, and a job that does not never loads it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from shardwright.core.cluster import Cluster
from shardwright.core.timeline import Phase
from shardwright.cost import constants
from shardwright.cost.presets import Preset
from shardwright.job.job import Job
from shardwright.job.planner import Profile

if TYPE_CHECKING:
    import shardwright.torchrec.profile as torchrec

TORCHREC: Profile = "torchrec-1.9"

__all__ = ["TORCHREC", "cluster_of", "phase_of_part", "torchrec", "with_hosts"]


def __getattr__(name: str) -> Any:
    """Load TorchRec's profile on first use."""
    if name != "torchrec":
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return _torchrec()


def _torchrec() -> Any:
    return importlib.import_module("shardwright.torchrec.profile")


def cluster_of(job: Job) -> tuple[Cluster, tuple[str, ...]]:
    """The cluster that ``job`` names for its cost profile, and what had to be assumed about it.

    Whoever asks for a job's machine asks here: without the profile, the rates of another planner
    would be held against a preset of ours, and refused.
    """
    profile = job.planner.constants
    own: Preset | None = _torchrec().PRESET if profile == TORCHREC else None
    return constants.cluster(job.cluster, profile, own)


def with_hosts(job: Job) -> Job:
    """The job with the ranks of its cluster, and how many of them a host has, by number."""
    cluster, _ = cluster_of(job)
    sizes = {"world_size": cluster.world_size, "local_world_size": cluster.local_world_size}
    return msgspec.structs.replace(job, cluster=msgspec.structs.replace(job.cluster, **sizes))


def phase_of_part(profile: Profile) -> Mapping[str, Phase]:
    """The phase in which each part of a step passes, for a profile whose parts are no phases."""
    found: Mapping[str, Phase] = _torchrec().PHASE_OF_PART if profile == TORCHREC else {}
    return found
