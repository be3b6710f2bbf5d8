"""The tape of a step tells what the ledger sums, event by event."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest

from shardwright.core.errors import UnsupportedError
from shardwright.core.footprint import RankMemory
from shardwright.core.timeline import StorageChange
from shardwright.estimate.footprint import footprint
from shardwright.estimate.recordings import found_for
from shardwright.heap.classes import RankClass, Setting
from shardwright.heap.tape import AGAIN, STREAMS
from shardwright.job.job import parse_job
from shardwright.planner.search.watch import Watch
from shardwright.planner.step_draft import StepDraft

MODEL = {
    "kind": "llama",
    "layers": 6,
    "dim": 64,
    "heads": 4,
    "kv_heads": 2,
    "ffn_dim": 160,
    "vocab": 512,
}
EXPERTS = {"experts": 4, "experts_per_token": 2}


def _worst(
    device: str = "cuda", model: dict[str, Any] | None = None, **sections: dict[str, Any]
) -> RankMemory:
    job = {
        "model": {**MODEL, **(model or {})},
        "cluster": {"world_size": 8, "compute_device": device},
        "batch": {"size": 4, "sequence": 64},
        **sections,
    }
    return footprint(parse_job(job), details=True).worst


CASES: dict[str, dict[str, Any]] = {
    "our runtime": {},
    "FSDP2": {"memory": {"runtime": "fsdp2"}},
    "DDP": {"memory": {"runtime": "ddp"}},
    "recomputed": {"memory": {"checkpointing": "full", "runtime": "fsdp2"}},
    "accumulated": {"parallel": {"microbatches": 4}},
    "a pipeline": {"parallel": {"pipeline": 2, "tensor": 2}, "memory": {"runtime": "fsdp2"}},
    "interleaved": {"parallel": {"pipeline": 2, "schedule": "interleaved_1f1b"}},
    "experts that run again": {
        "model": EXPERTS,
        "parallel": {"expert": 4},
        "memory": {"checkpointing": "selective", "runtime": "fsdp2"},
    },
}


@functools.cache
def _followed(case: str) -> RankMemory:
    """What several tests look at: nothing is left out of its largest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwright.heap.classes.LARGEST", 10_000)
        return _worst(**CASES[case])


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("case", CASES)
def test_what_is_alive_at_the_peak_adds_up_to_it(case: str) -> None:
    worst = _followed(case)
    assert sum(alive.bytes for alive in worst.largest) == worst.peak_bytes
    by_kind: dict[str, int] = {}
    for alive in worst.largest:
        by_kind[alive.kind] = by_kind.get(alive.kind, 0) + alive.bytes
    assert by_kind == worst.by_category


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("case", CASES)
def test_the_timeline_reaches_the_peak_and_ends_as_it_began(case: str) -> None:
    worst = _followed(case)
    totals = [sum(sample.bytes) for sample in worst.timeline]
    assert max(totals) == worst.peak_bytes
    kept = sum(worst.by_category.get(kind, 0) for kind in ("weight", "optimizer_state", "buffer"))
    assert kept <= totals[-1] <= worst.peak_bytes


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("case", CASES)
def test_the_allocator_reserves_at_least_what_is_alive(case: str) -> None:
    worst = _followed(case)
    assert worst.reserved_bytes >= worst.peak_bytes


@pytest.mark.parametrize("overlap", ["none", "rows", "ids_and_rows"])
def test_a_batch_that_was_fetched_ahead_is_what_the_next_step_lets_go(overlap: str) -> None:
    job = {
        "model": {"bottom": [8, 16], "top": [8, 1], "interaction": "cat"},
        "tables": [{"name": "t", "rows": 3000, "dim": 16, "pooling_factors": [4.0],
                    "sharding_types": ["row_wise"]}],
        "cluster": {"preset": "a100-8", "world_size": 2},
        "batch": {"size": 4096},
        "train": {"overlap": overlap},
    }  # fmt: skip
    draft = found_for(parse_job(job), Watch()).draft
    assert isinstance(draft, StepDraft)
    held: dict[int, int] = {}
    for number, nbytes, _, _ in draft.rank_step(draft.load(0)).asked(draft.machine).twice():
        if nbytes > 0:
            held[number] = nbytes
        else:
            assert held.pop(number) == -nbytes
    fetched = Counter(nbytes for number, nbytes in held.items() if number > AGAIN // 2)
    before = Counter(nbytes for number, nbytes in held.items() if number <= AGAIN // 2)
    inputs = draft.problem.chunk.recording.inputs
    # What both steps leave is their input; all else that was fetched ahead is let go once.
    assert fetched[inputs] == 1
    assert before[inputs] >= 1
    assert not (fetched & before) - Counter([inputs])
    assert (sum(fetched.values()) > 1) == (overlap == "ids_and_rows")
    assert draft.needs[1] >= draft.highest_peak


def test_gradients_that_stay_where_they_are_take_no_second_memory() -> None:
    """Of DDP, and of a rank alone: a fused step takes nothing beside weights, states, gradients."""
    wide = {"layers": 3, "dim": 512, "heads": 8, "kv_heads": 8, "ffn_dim": 2048}
    found = _worst(
        model=wide,
        cluster={"world_size": 1, "compute_device": "cuda"},
        batch={"size": 1, "sequence": 16},
        memory={"runtime": "ddp", "implementation": "fused"},
    )
    step = next(phase for phase in found.phases if phase.phase == "step")
    gradients = step.by_category["gradient"]
    assert gradients > 16 * 2**20  # eight segments of the allocator
    assert found.reserved_bytes - found.peak_bytes < gradients // 2


def _one_by_one(requests: Iterable[tuple[Any, ...]]) -> list[tuple[int, int, int]]:
    """Requests with storages numbered as they come, and streams of what is taken."""
    numbers: dict[Any, int] = {}
    found = []
    for count, (name, nbytes, stream, *_) in enumerate(requests):
        if nbytes > 0:
            assert name not in numbers
            numbers[name] = count
            found.append((count, nbytes, stream))
        else:
            found.append((numbers.pop(name), nbytes, 0))
    return found


def _of_changes(changes: Sequence[StorageChange]) -> Iterator[tuple[Any, int, int]]:
    """Of what only is another kind from here on nobody is asked."""
    turned = {
        place
        for place, (old, new) in enumerate(pairwise(changes))
        if old.storage == new.storage and old.bytes == -new.bytes < 0
    }
    assert turned
    left = [c for k, c in enumerate(changes) if not {k, k - 1} & turned]
    for turn in range(3):
        for change in left:
            if (change.phase == "setup") == (turn == 0):
                yield (turn, change.storage), change.bytes, STREAMS.get(change.kind, 0)


@pytest.mark.parametrize("case", CASES)
def test_an_allocator_is_asked_for_every_change_of_a_tape(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def both(memory: RankMemory, each: RankClass, setting: Setting, _: bool) -> RankMemory:
        tape = each.step.taped(setting.make)
        asked = _one_by_one(each.step.asked(setting.make).twice())
        seen.append((asked, _one_by_one(_of_changes(tape.changes))))
        return memory

    monkeypatch.setattr("shardwright.heap.classes._with_events", both)
    _worst(**CASES[case])
    assert len(seen[0][0]) > 500
    assert all(asked == told for asked, told in seen)


@pytest.mark.slow
def test_a_device_that_is_almost_full_has_the_allocator_give_back_what_it_cached() -> None:
    size = {"dim": 512, "heads": 8, "kv_heads": 8, "ffn_dim": 1408, "vocab": 8000}
    rest = {"batch": {"size": 4, "sequence": 512}, "memory": {"runtime": "fsdp2"}}
    free = _worst(model=size, **rest)
    between = (free.peak_bytes + free.reserved_bytes) // 2
    cluster = {"world_size": 8, "compute_device": "cuda", "hbm_cap": f"{between // 2**20} MiB"}
    tight = _worst(model=size, cluster=cluster, **rest)
    assert (free.retries, tight.peak_bytes) == (0, free.peak_bytes)
    assert tight.retries > 0
    assert free.reserved_bytes > between >= tight.reserved_bytes


@pytest.mark.slow
def test_a_class_that_is_asked_for_is_shown_in_detail(monkeypatch: Any) -> None:
    monkeypatch.setattr("shardwright.heap.classes.LARGEST", 10_000)
    job = {
        "model": {**MODEL, "layers": 24},
        "cluster": {"world_size": 8, "compute_device": "cpu"},
        "batch": {"size": 8, "sequence": 64},
        "parallel": {"pipeline": 4, "tensor": 2},
    }
    found = footprint(parse_job(job), details=True, rank="stage 1")
    told = next(rank for rank in found.ranks if rank.name == "stage 1")
    assert told is not found.worst
    assert sum(alive.bytes for alive in told.largest) == told.peak_bytes


def test_compiled_experts_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"memory\.compile: expected false"):
        _worst(model=EXPERTS, memory={"compile": True})


def test_a_cpu_has_no_caching_allocator_to_replay() -> None:
    assert _worst(device="cpu").reserved_bytes == 0


def test_modules_show_parameters_and_what_their_forward_saves() -> None:
    sharded = {"units": {"layers": "shard"}}
    modules = {module.name: module for module in _worst(planner=sharded).modules}
    block, root = modules["layers.*"], modules[""]
    assert block.count == 6
    wide = 3 * 64 * 160 + 2 * 64 * 64 + 2 * 64 * 32 + 2 * 64
    assert block.parameters == 6 * wide * 4 // 8
    assert (
        modules["layers.*.feed_forward"].saved + modules["layers.*.attention"].saved < block.saved
    )
    assert block.saved < root.saved
    assert root.forward_peak >= block.forward_peak > modules["tok_embeddings"].forward_peak
    assert all(module.backward_peak for module in modules.values() if module.parameters)


def test_recomputation_saves_only_what_enters_a_block() -> None:
    modules = {m.name: m for m in _followed("recomputed").modules}
    stream = 4 * 64 * 64 * 2
    # the input of each block, and the rotations that the cast of its inputs makes
    assert modules["layers.*"].saved <= 6 * (stream + 2 * 64 * 8 * 2)
