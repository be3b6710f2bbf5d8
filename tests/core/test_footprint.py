"""Verdicts on classes of ranks."""

from __future__ import annotations

from shardwright.core.footprint import Footprint, RankMemory


def rank(name: str, peak: int, reserved: int = 0) -> RankMemory:
    return RankMemory(
        name=name,
        ranks=1,
        coordinates={},
        peak_bytes=peak,
        peak_phase="forward",
        by_category={},
        certainty={},
        phases=(),
        reserved_bytes=reserved,
    )


def footprint(*ranks: RankMemory, capacity: int | None) -> Footprint:
    return Footprint("llama", 1, len(ranks), {}, {}, ranks, capacity)


def test_a_class_that_was_not_replayed_is_no_surer_to_fit_than_those_that_were() -> None:
    worst, other = rank("stage 0", 100, reserved=150), rank("stage 1", 80)
    found = footprint(worst, other, capacity=110)
    assert found.needs(worst) == (100, 150)
    assert found.needs(other) == (80, 120)
    assert found.verdict_of(other) == "perhaps"
    assert footprint(worst, other, capacity=120).verdict_of(other) == "fits"


def test_without_an_allocator_live_bytes_decide() -> None:
    found = footprint(rank("all ranks", 100), capacity=100)
    assert found.needs(found.worst) == (100, 100)
    assert found.verdict == "fits"
