"""A search is heard in every round, may be stopped, and keeps the best that it has."""

from __future__ import annotations

import itertools

from shardwright.estimate.recordings import plan
from shardwright.job.job import parse_job
from shardwright.job.plan import Plan
from shardwright.planner.search.watch import Watch

TABLES = [{"name": f"t{i}", "rows": 1000 * (i + 1) ** 2, "dim": 64} for i in range(12)]


def planned(hear: object, **planner: object) -> Plan:
    document = {
        "tables": TABLES,
        "cluster": {"compute_device": "cuda", "world_size": 4, "hbm_cap": "50 MB"},
        "planner": planner,
    }
    return plan(parse_job(document, "job"), hear)  # type: ignore[arg-type]


def test_a_search_that_is_stopped_keeps_the_plan_that_it_has_and_says_so() -> None:
    heard: list[float] = []

    def stop(watch: Watch) -> None:
        if watch.best is not None:
            heard.append(watch.best)
            watch.stop()

    stopped, whole = planned(stop), planned(None)
    assert heard
    assert stopped.search.skipped == ("the search, which was stopped",)
    assert stopped.max_rank_seconds <= heard[0] * (1 + 1e-9)
    assert whole.max_rank_seconds <= stopped.max_rank_seconds * (1 + 1e-9)
    assert whole.search.skipped == ()


def test_what_is_heard_of_a_search_is_the_best_step_and_a_bound_below_it() -> None:
    heard: list[tuple[float, float]] = []

    def hear(watch: Watch) -> None:
        if watch.best is not None:
            heard.append((watch.best, watch.bound))

    made = planned(hear)
    seconds = [best for best, _ in heard]
    assert seconds == sorted(seconds, reverse=True)
    assert all(0 < bound <= best * (1 + 1e-9) for best, bound in heard)
    assert made.max_rank_seconds <= seconds[-1] * (1 + 1e-9)


def test_a_part_of_a_search_ends_with_the_whole_and_finds_no_plan_of_its_own() -> None:
    whole = Watch()
    part = whole.part()
    part.found(1.0)
    assert whole.best is None
    assert not part.over()
    whole.stop()
    assert part.over()


def test_a_search_that_is_over_its_limit_names_the_limit() -> None:
    clock = itertools.count(0.0)
    watch = Watch(3.0, clock=lambda: next(clock))
    assert watch.cut_short == ""
    while not watch.over():
        pass
    assert watch.cut_short == "the search, at planner.time_limit = 3 s"
