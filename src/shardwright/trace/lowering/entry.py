"""One row of a lowering table: what a device's kernel does, and where that is written."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.core.footprint import Certainty


@dataclass(frozen=True, slots=True)
class Entry:
    """``when`` is the condition on device and inputs; ``saved`` what stays for the backward,
    ``returned`` what is allocated for the result, ``forward`` and ``backward`` what a kernel takes
    and frees inside; ``source`` names files of pytorch/pytorch unless it says otherwise."""

    function: str
    when: str
    saved: str
    returned: str
    forward: str
    backward: str
    source: str
    certainty: Certainty = "modelled"
