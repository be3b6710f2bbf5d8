"""The allocator's model: examples worked by hand from PyTorch's source, and what always holds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.core.errors import InputError
from shardwright.heap.allocator import (
    AllocatorRequest,
    AllocatorSettings,
    PoolBytes,
    Replay,
    replay,
)
from shardwright.heap.allocator.allocator import Allocator, CachedBlock
from shardwright.heap.allocator.growth import grown

KIB, MIB = 2**10, 2**20
EXPANDABLE = AllocatorSettings(expandable_segments=True)


def _takes(*sizes: int, stream: int = 0) -> list[AllocatorRequest]:
    return [AllocatorRequest(f"{stream}.{k}", size, stream) for k, size in enumerate(sizes)]


def _free(name: str, late: int = 0) -> AllocatorRequest:
    return AllocatorRequest(name, -1, late=late)


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
        (10 * MIB + 512, 10 * MIB + 512, 12 * MIB),
    ],
)
def test_one_request_takes_a_segment_for_its_size(size: int, allocated: int, reserved: int) -> None:
    """A rest of exactly 1 MiB is not cut off: 11 MiB of a segment of 12 keep it all."""
    result = replay(_takes(size))
    assert (result.allocated_peak, result.reserved_peak) == (allocated, reserved)


def test_small_requests_share_a_segment_of_two_mebibytes() -> None:
    assert replay(_takes(*[512] * 4096)).reserved_peak == 2 * MIB
    assert replay(_takes(*[512] * 4097)).reserved_peak == 4 * MIB


def test_requests_below_ten_mebibytes_share_a_segment_of_twenty() -> None:
    assert replay(_takes(9 * MIB, 9 * MIB)).reserved_peak == 20 * MIB
    assert replay(_takes(9 * MIB, 9 * MIB, 3 * MIB)).reserved_peak == 40 * MIB


def test_what_is_freed_serves_the_next_request_that_fits() -> None:
    requests = [*_takes(40 * MIB), _free("0.0"), AllocatorRequest("again", 30 * MIB)]
    result = replay(requests)
    assert result.reserved_peak == 40 * MIB
    assert result.allocated_end == 30 * MIB


def test_the_smallest_block_that_fits_is_taken() -> None:
    requests = [
        *_takes(100 * MIB, 40 * MIB, 60 * MIB),
        _free("0.0"),
        _free("0.1"),
        _free("0.2"),
        AllocatorRequest("a", 38 * MIB),  # cuts the block of 40
        AllocatorRequest("b", 58 * MIB),  # cuts the block of 60
        AllocatorRequest("c", 100 * MIB),
    ]
    assert replay(requests).reserved_end == 200 * MIB


def test_free_neighbours_become_one_block() -> None:
    requests = [
        *_takes(20 * MIB),
        _free("0.0"),
        AllocatorRequest("a", 8 * MIB),
        AllocatorRequest("b", 8 * MIB),
        _free("a"),
        _free("b"),
        AllocatorRequest("c", 20 * MIB),
    ]
    assert replay(requests).reserved_end == 20 * MIB


def test_a_request_that_no_part_is_large_enough_for_takes_a_segment_more() -> None:
    """Two holes of 10 MiB, apart, do not serve 20 MiB: this is fragmentation."""
    requests = [
        AllocatorRequest("all", 30 * MIB),
        _free("all"),
        *[AllocatorRequest(name, 10 * MIB) for name in "abc"],
        _free("a"),
        _free("c"),
        AllocatorRequest("d", 20 * MIB),
    ]
    result = replay(requests)
    assert result.reserved_peak == 50 * MIB
    assert result.fragmentation == pytest.approx(20 / 50)


def test_a_stream_does_not_take_what_another_one_cached() -> None:
    requests = [*_takes(40 * MIB), _free("0.0"), *_takes(40 * MIB, stream=1)]
    result = replay(requests)
    assert result.reserved_peak == 80 * MIB
    assert result.pools == (PoolBytes(0, False, 40 * MIB), PoolBytes(1, False, 40 * MIB))


def test_a_block_that_another_stream_still_uses_is_freed_late() -> None:
    late = [*_takes(40 * MIB), _free("0.0", late=2), AllocatorRequest("a", 40 * MIB)]
    assert replay(late).reserved_peak == 80 * MIB
    assert replay(late).active_peak == 80 * MIB
    later = [*late[:2], AllocatorRequest("small", 1), AllocatorRequest("b", 40 * MIB)]
    assert replay(later).reserved_peak == 42 * MIB


def test_a_full_device_gives_back_what_is_cached_and_tries_again() -> None:
    requests = [*_takes(40 * MIB), _free("0.0"), AllocatorRequest("a", 60 * MIB)]
    result = replay(requests, capacity=64 * MIB)
    assert (result.retries, result.out_of_memory) == (1, None)
    assert (result.reserved_peak, result.reserved_end) == (60 * MIB, 60 * MIB)


def test_a_retry_waits_for_blocks_that_are_freed_late() -> None:
    requests = [*_takes(40 * MIB), _free("0.0", late=100), AllocatorRequest("a", 60 * MIB)]
    result = replay(requests, capacity=64 * MIB)
    assert (result.retries, result.out_of_memory, result.active_peak) == (1, None, 60 * MIB)


def test_a_segment_that_is_used_in_part_cannot_be_given_back() -> None:
    requests = [
        *_takes(40 * MIB),
        _free("0.0"),
        AllocatorRequest("a", 2 * MIB),
        AllocatorRequest("b", 30 * MIB),
    ]
    assert replay(requests, capacity=64 * MIB).out_of_memory is None
    failed = replay([*requests, AllocatorRequest("c", 30 * MIB)], capacity=64 * MIB)
    assert (failed.retries, failed.out_of_memory) == (1, 4)


def test_a_replay_ends_with_the_request_that_fails() -> None:
    result = replay(
        [*_takes(40 * MIB, 40 * MIB), AllocatorRequest("a", 2 * MIB)], capacity=64 * MIB
    )
    assert (result.out_of_memory, result.allocated_end) == (1, 40 * MIB)


def test_max_split_size_keeps_large_blocks_whole() -> None:
    unsplit = AllocatorSettings.parse("max_split_size_mb:100")
    requests = [*_takes(200 * MIB), _free("0.0"), AllocatorRequest("a", 60 * MIB)]
    assert replay(requests).reserved_end == 200 * MIB
    assert replay(requests, unsplit).reserved_end == 260 * MIB


def test_an_unsplit_block_serves_requests_that_are_little_smaller() -> None:
    unsplit = AllocatorSettings.parse("max_split_size_mb:100")
    near = [*_takes(200 * MIB), _free("0.0"), AllocatorRequest("a", 182 * MIB)]
    assert replay(near, unsplit).allocated_end == 200 * MIB
    far = [*_takes(200 * MIB), _free("0.0"), AllocatorRequest("a", 180 * MIB)]
    assert replay(far, unsplit).reserved_end == 380 * MIB


def test_unsplit_blocks_are_given_back_first_and_count_as_no_retry() -> None:
    unsplit = AllocatorSettings.parse("max_split_size_mb:100")
    frees = [_free(f"0.{k}") for k in range(3)]
    requests = [*_takes(200 * MIB, 120 * MIB, 12 * MIB), *frees, AllocatorRequest("a", 300 * MIB)]
    result = replay(requests, unsplit, capacity=350 * MIB)
    assert (result.retries, result.reserved_end) == (0, 312 * MIB)


def test_too_few_unsplit_blocks_make_a_retry_of_it() -> None:
    unsplit = AllocatorSettings.parse("max_split_size_mb:100")
    requests = [
        *_takes(200 * MIB, 40 * MIB),
        _free("0.0"),
        _free("0.1"),
        AllocatorRequest("a", 300 * MIB),
    ]
    result = replay(requests, unsplit, capacity=350 * MIB)
    assert (result.retries, result.reserved_end) == (1, 300 * MIB)


def test_garbage_is_collected_above_the_threshold() -> None:
    text = "garbage_collection_threshold:0.5,per_process_memory_fraction:1.0"
    requests = [*_takes(40 * MIB, 20 * MIB), _free("0.0"), AllocatorRequest("a", 50 * MIB)]
    assert replay(requests, AllocatorSettings.parse(text), 100 * MIB).reserved_end == 70 * MIB
    assert replay(requests, capacity=200 * MIB).reserved_end == 110 * MIB


def test_a_replay_may_end_where_enough_is_reserved() -> None:
    requests = _takes(40 * MIB, 20 * MIB, 50 * MIB, 30 * MIB)
    assert replay(requests, enough=60 * MIB).reserved_peak == 110 * MIB
    assert replay(requests, enough=140 * MIB) == replay(requests)
    collects = AllocatorSettings.parse("garbage_collection_threshold:0.5")
    assert replay(requests, collects, enough=60 * MIB) == replay(requests)


def test_power_of_two_divisions_round_requests_up() -> None:
    """The example of PyTorch's source, a thousand times larger: 1200 of 4 divisions is 1280."""
    quarters = AllocatorSettings.parse("roundup_power2_divisions:4")
    assert [quarters.rounded(n * KIB) for n in (1024, 1200, 1793)] == [
        1024 * KIB,
        1280 * KIB,
        2048 * KIB,
    ]
    assert quarters.rounded(700) == 1024


def test_divisions_may_differ_by_size() -> None:
    parsed = AllocatorSettings.parse("roundup_power2_divisions:[64:8,256:4,1024:2,>:1]")
    sizes = {32: 8, 64: 8, 127: 8, 128: 0, 256: 4, 512: 0, 1024: 2, 2048: 1, 2**20: 1}
    found = {size: parsed.roundup_divisions[min(size.bit_length() - 1, 15)] for size in sizes}
    assert found == sizes


def test_an_expandable_segment_is_mapped_page_by_page() -> None:
    assert replay(_takes(1), EXPANDABLE).reserved_peak == 2 * MIB
    assert replay(_takes(2 * MIB), EXPANDABLE).reserved_peak == 20 * MIB
    assert replay(_takes(15 * MIB, 15 * MIB), EXPANDABLE).reserved_peak == 40 * MIB
    assert replay(_takes(15 * MIB, 15 * MIB)).reserved_peak == 32 * MIB


def test_an_expandable_segment_grows_into_what_is_free_at_its_end() -> None:
    requests = [*_takes(40 * MIB, 40 * MIB), _free("0.1"), AllocatorRequest("a", 60 * MIB)]
    assert replay(requests, EXPANDABLE).reserved_peak == 100 * MIB
    assert replay(requests).reserved_peak == 140 * MIB


def test_pages_in_the_middle_of_an_expandable_segment_are_given_back_when_needed() -> None:
    requests = [
        *_takes(40 * MIB, 40 * MIB, 40 * MIB),
        _free("0.1"),
        AllocatorRequest("a", 60 * MIB),
    ]
    result = replay(requests, EXPANDABLE, capacity=140 * MIB)
    assert (result.retries, result.out_of_memory) == (1, None)
    assert result.reserved_end == 140 * MIB
    assert replay(requests, capacity=140 * MIB).out_of_memory is None
    split = [*requests[:4], AllocatorRequest("b", 2 * MIB), AllocatorRequest("a", 60 * MIB)]
    assert replay(split, EXPANDABLE, capacity=160 * MIB).out_of_memory is None
    assert replay(split, capacity=160 * MIB).out_of_memory == 5


def test_growing_batches_fragment_less_with_expandable_segments() -> None:
    """The case of the allocator's notes: each step a little larger than the last one."""
    requests: list[AllocatorRequest] = []
    for step in range(12):
        sizes = [(24 + step) * MIB + 512 * layer for layer in range(24)]
        requests += [AllocatorRequest((step, k), size) for k, size in enumerate(sizes)]
        requests += [AllocatorRequest((step, k), -size) for k, size in enumerate(sizes)]
    plain, grown = replay(requests), replay(requests, EXPANDABLE)
    assert grown.reserved_peak < 1.05 * grown.allocated_peak
    assert plain.reserved_peak > 2 * plain.allocated_peak
    assert grown.fragmentation < plain.fragmentation


@st.composite
def traces(draw: st.DrawFn) -> list[AllocatorRequest]:
    """Takes and frees in any order, on up to three streams, some freed late."""
    sizes = st.one_of(
        st.integers(1, 4 * KIB), st.integers(1, 3 * MIB), st.integers(9 * MIB, 70 * MIB)
    )
    steps = draw(st.lists(st.tuples(st.booleans(), sizes, st.integers(0, 2)), max_size=60))
    alive: list[int] = []
    requests = []
    for k, (take, size, stream) in enumerate(steps):
        if take or not alive:
            alive.append(k)
            requests.append(AllocatorRequest(k, size, stream))
        else:
            name = alive.pop(size % len(alive))
            requests.append(AllocatorRequest(name, -1, late=(0, 0, 5)[stream]))
    return requests


ANY_SETTINGS = st.sampled_from(
    [
        AllocatorSettings(),
        EXPANDABLE,
        AllocatorSettings.parse("max_split_size_mb:32"),
        AllocatorSettings.parse("roundup_power2_divisions:8"),
        AllocatorSettings.parse("per_process_memory_fraction:0.5"),
        AllocatorSettings.parse("expandable_segments:True,max_split_size_mb:32"),
        AllocatorSettings.parse("garbage_collection_threshold:0.6,per_process_memory_fraction:0.9"),
    ]
)
CAPACITIES = st.sampled_from([None, 100 * MIB, 300 * MIB])


@given(traces(), ANY_SETTINGS, CAPACITIES)
@settings(max_examples=50)
def test_what_is_reserved_covers_what_is_active_and_fits_the_device(
    requests: list[AllocatorRequest], chosen: AllocatorSettings, capacity: int | None
) -> None:
    result = replay(requests, chosen, capacity)
    assert result.requested_peak <= result.allocated_peak <= result.active_peak
    assert result.active_peak <= result.reserved_peak
    assert result.allocated_end <= result.reserved_end <= result.reserved_peak
    assert sum(pool.bytes for pool in result.pools) == result.reserved_peak
    assert 0 <= result.fragmentation < 1
    if capacity is not None:
        assert result.reserved_peak <= capacity
    else:
        assert (result.retries, result.out_of_memory) == (0, None)


@given(traces(), ANY_SETTINGS, CAPACITIES)
@settings(max_examples=50)
def test_blocks_never_overlap_and_leave_no_gap(
    requests: list[AllocatorRequest], chosen: AllocatorSettings, capacity: int | None
) -> None:
    allocator = Allocator(chosen, capacity)
    held: dict[object, CachedBlock] = {}
    for name, nbytes, stream, _ in requests:
        if nbytes < 0:
            allocator.free(held.pop(name))
        elif (block := allocator.take(chosen.rounded(nbytes), stream)) is not None:
            assert block.size >= nbytes
            held[name] = block
        else:
            break
    _check_structure(allocator, list(held.values()))


def _check_structure(allocator: Allocator, held: list[CachedBlock]) -> None:
    free = [block for pool in allocator.pools() for _, _, block in pool.free]
    unmapped = [block for pool in allocator.pools() for _, block in pool.unmapped]
    everything = [*held, *free, *unmapped]
    assert all(block.busy for block in held)
    assert not any(block.busy or not block.mapped for block in free)
    assert not any(block.busy or block.mapped for block in unmapped)
    for pool in allocator.pools():
        assert pool.free == sorted(pool.free)
        assert all((size, at) == (block.size, block.address) for size, at, block in pool.free)
        assert all(at == block.address for at, block in pool.unmapped)
    ends = sorted((block.address, block.address + block.size) for block in everything)
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))
    for block in everything:
        if block.next is not None:
            assert block.next.prev is block
            assert block.address + block.size == block.next.address
            # two free neighbours would have become one
            assert block.busy or block.next.busy or block.mapped != block.next.mapped
    mapped = sum(block.size for block in everything if block.mapped)
    assert mapped == allocator.device.reserved == sum(allocator.device.by_pool.values())


@given(traces(), ANY_SETTINGS)
@settings(max_examples=30)
def test_when_all_is_freed_every_segment_is_one_free_block(
    requests: list[AllocatorRequest], chosen: AllocatorSettings
) -> None:
    allocator = Allocator(chosen)
    held: dict[object, CachedBlock] = {}
    for name, nbytes, stream, _ in requests:
        if nbytes < 0:
            allocator.free(held.pop(name))
            continue
        block = allocator.take(chosen.rounded(nbytes), stream)
        assert block is not None
        held[name] = block
    reserved = allocator.device.reserved
    for block in held.values():
        allocator.free(block)
    assert allocator.device.reserved == reserved
    for block in _free_blocks(allocator):
        assert block.prev is None
        assert block.next is None or not block.next.mapped
    allocator.release_cached()
    assert allocator.device.reserved == 0
    assert list(_free_blocks(allocator)) == []


def _free_blocks(allocator: Allocator) -> Iterator[CachedBlock]:
    return (block for pool in allocator.pools() for _, _, block in pool.free)


def test_nothing_requested_reserves_nothing() -> None:
    assert replay([AllocatorRequest("empty", 0)]) == Replay(0, 0, 0, 0, 0, 0, 0, (), 0)


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        (
            [AllocatorRequest("a", 8), AllocatorRequest("a", 8)],
            "request 1: expected a new name, got 'a' again",
        ),
        ([AllocatorRequest("a", -8)], "request 0: expected a name that is held, got 'a'"),
    ],
)
def test_requests_that_contradict_each_other_are_refused(
    requests: list[AllocatorRequest], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        replay(requests)


@given(
    traces().map(lambda its: [AllocatorRequest(*each[:3]) for each in its]),
    ANY_SETTINGS,
    CAPACITIES,
    st.sampled_from([None, 30 * MIB, 90 * MIB, 250 * MIB]),
    st.integers(0, 60),
)
@settings(max_examples=200)
def test_what_only_grows_is_what_a_replay_holds(
    requests: list[AllocatorRequest],
    chosen: AllocatorSettings,
    capacity: int | None,
    enough: int | None,
    begin: int,
) -> None:
    """Of a step that is played twice, beside what was there before and is not freed."""
    there = [each for each in requests[:begin] if each.bytes > 0]
    before = [each._replace(name=f"before {each.name}") for each in there]
    again = [each._replace(name=f"again {each.name}") for each in requests]
    told = replay([*before, *requests, *again], chosen, enough=enough)
    found = grown([*before, *requests, *again], chosen, enough)  # type: ignore[arg-type]
    plain = not (chosen.expandable_segments or chosen.max_split_size)
    if not plain or chosen.garbage_collection_threshold:
        assert found is None
        return
    assert found == told.reserved_peak
    room = chosen.room(capacity)
    if room is not None and found <= room:
        told = replay([*before, *requests, *again], chosen, capacity, enough)
        assert (found, 0, None) == (told.reserved_peak, told.retries, told.out_of_memory)
