"""Plans of jobs, each made once for all tests that ask for it."""

from __future__ import annotations

import msgspec

from shardwright.core.job import Job
from shardwright.core.plan import Plan
from shardwright.lab import recordings

_MADE: dict[bytes, Plan] = {}


def plan(job: Job) -> Plan:
    """The plan of ``job``; not for tests that change what planning does, or watch it."""
    key = msgspec.json.encode(job)
    if key not in _MADE:
        _MADE[key] = recordings.plan(job)
    return _MADE[key]
