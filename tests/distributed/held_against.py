"""What ranks metered, held against the plan that they ran."""

from __future__ import annotations

import pytest
from plans import plan
from pool import Pool
from tasks import meter_steps

from shardwright.core.timeline import decode, exact_bytes, phase_peaks
from shardwright.job.job import Job
from shardwright.job.plan import Plan


def check_bytes(pool: Pool, job: Job, tolerance: float) -> Plan:
    """Exact bytes of a job on two ranks are equal, and peaks within ``tolerance``; its plan."""
    made = plan(job)
    predicted = decode(made.timeline)
    peaks = phase_peaks(predicted)
    for rank, (exact, by_step, _) in enumerate(pool.run(2, meter_steps, job=job, made=made)):
        wanted = {k: n for k, n in exact_bytes(predicted).items() if n and k[0] == rank}
        assert {k: n for k, n in exact_bytes(exact).items() if n} == wanted
        measured = min(
            max(sum(kinds.values()) for kinds in phase_peaks(events).values()) for events in by_step
        )
        highest = max(sum(kinds.values()) for (r, _), kinds in peaks.items() if r == rank)
        assert highest == pytest.approx(measured, rel=tolerance)
    return made
