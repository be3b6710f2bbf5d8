from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from shardwright.core.errors import EXIT_NO_PLAN, NoPlanError
from shardwright.core.job import Job
from shardwright.core.specs import model_spec
from shardwright.planner import plan
from shardwright.planner.problem import make_problem
from shardwright.planner.strategy.steps import smallest

MakeJob = Callable[..., Job]
CAP = 8 * 2**20


@pytest.fixture
def too_large(make_job: MakeJob) -> Job:
    """Rows of 19 MB on two ranks of 8 MiB; activations and the dense part on top."""
    return make_job(
        200_000, 90_000, 50, cluster={"world_size": 2, "ddr_cap": CAP}, batch={"size": 1024}
    )


def _refusal(job: Job) -> str:
    with pytest.raises(NoPlanError) as caught:
        plan(job)
    assert caught.value.exit_code == EXIT_NO_PLAN == 3
    message = str(caught.value)
    assert "\n" not in message
    return message


def _number(pattern: str, message: str) -> int:
    found = re.search(pattern.replace("#", "([0-9,]+)"), message)
    assert found is not None, message
    return int(found.group(1).replace(",", ""))


def _changed(job: Job, section: str, **values: Any) -> Job:
    part = msgspec.structs.replace(getattr(job, section), **values)
    return msgspec.structs.replace(job, **{section: part})


def test_a_plan_that_does_not_fit_names_the_fullest_rank(too_large: Job) -> None:
    message = _refusal(too_large)
    peaks = smallest(make_problem(too_large, model_spec(too_large))).peak_bytes
    rank = _number("rank # is the fullest", message)
    assert peaks[rank] == max(peaks) == _number("needs # B", message)


def test_the_shortfall_is_the_need_less_the_capacity(too_large: Job) -> None:
    message = _refusal(too_large)
    need = _number("needs # B", message)
    assert _number(r"\) of # B", message) == CAP
    assert _number("# B too much", message) == need - CAP > 0


def test_the_largest_part_of_the_fullest_rank_is_named(too_large: Job) -> None:
    message = _refusal(too_large)
    assert "its largest part is tables.t0.weight" in message
    assert _number("tables.t0.weight with # B", message) == 100_000 * 64


def test_the_capacity_that_is_named_fits(too_large: Job) -> None:
    capacity = _number("cluster.ddr_cap of # B", _refusal(too_large))
    made = plan(_changed(too_large, "cluster", ddr_cap=capacity))
    assert max(r.peak_bytes for r in made.ranks) <= capacity


def test_the_number_of_ranks_that_is_named_fits(too_large: Job) -> None:
    ranks = _number("# ranks fit", _refusal(too_large))
    made = plan(_changed(too_large, "cluster", world_size=ranks))
    assert max(r.peak_bytes for r in made.ranks) <= CAP
    _refusal(_changed(too_large, "cluster", world_size=ranks // 2))


def test_the_batch_that_is_named_fits(make_job: MakeJob) -> None:
    job = make_job(50, cluster={"world_size": 2, "ddr_cap": 2**20}, batch={"size": 8192})
    batch = _number("a batch of # per rank fits", _refusal(job))
    made = plan(_changed(job, "batch", size=batch))
    assert max(r.peak_bytes for r in made.ranks) <= 2**20


def test_a_way_out_that_does_not_fit_is_not_named(too_large: Job) -> None:
    assert "a batch of" not in _refusal(too_large)  # the weights alone are too large


def test_an_accelerator_is_told_its_own_key(make_job: MakeJob) -> None:
    cluster = {"preset": "h100-8", "world_size": 2, "hbm_cap": CAP}
    assert "cluster.hbm_cap of " in _refusal(make_job(200_000, 90_000, cluster=cluster))


def test_a_job_beyond_every_way_out_is_told_the_capacity_alone(make_job: MakeJob) -> None:
    message = _refusal(make_job(50, cluster={"world_size": 2, "ddr_cap": 1}))
    assert message.endswith(" fits.")
    assert message.count("fit") == 2  # "found that fits", and the capacity that does
