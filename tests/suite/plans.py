"""Plans of jobs, each made once in a process for all tests that ask for it."""

from __future__ import annotations

import msgspec

from shardwright.estimate import recordings
from shardwright.job.job import Job
from shardwright.job.plan import Plan

MADE: dict[bytes, Plan] = {}


def plan(job: Job) -> Plan:
    """The plan of a job that says everything, not of one whose module may change; not for tests
    that change what planning does, or watch it."""
    key = msgspec.json.encode(job, order="deterministic")
    if key not in MADE:
        MADE[key] = recordings.plan(job)
    return MADE[key]
