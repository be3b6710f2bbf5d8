"""What a cost profile of another planner brings: the one place where ours knows of TorchRec's.

``shardwright.torchrec`` is built on the planner, so nothing here can import it at once: it is
loaded when a job asks for ``profiles.torchrec``, and a job that does not never loads it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardwright.core.planning import Profile
from shardwright.core.timeline import Phase
from shardwright.cost.presets import Preset

if TYPE_CHECKING:
    import shardwright.torchrec.profile as torchrec

TORCHREC: Profile = "torchrec-1.9"

__all__ = ["TORCHREC", "phase_of_part", "preset", "torchrec"]


def __getattr__(name: str) -> Any:
    """Load TorchRec's profile on first use."""
    if name != "torchrec":
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return _torchrec()


def _torchrec() -> Any:
    return importlib.import_module("shardwright.torchrec.profile")


def preset(profile: Profile) -> Preset | None:
    """The machine of a profile whose constants lie with it."""
    found: Preset | None = _torchrec().PRESET if profile == TORCHREC else None
    return found


def phase_of_part(profile: Profile) -> Mapping[str, Phase]:
    """The phase in which each part of a step passes, for a profile whose parts are no phases."""
    found: Mapping[str, Phase] = _torchrec().PHASE_OF_PART if profile == TORCHREC else {}
    return found
