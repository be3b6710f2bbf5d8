from __future__ import annotations

import pytest

from shardwright.core.errors import InputError, UnsupportedError
from shardwright.heap.allocator import AllocatorSettings

MIB = 2**20


def test_settings_are_read_as_pytorch_reads_them() -> None:
    text = (
        "expandable_segments:True, max_split_size_mb:512,max_non_split_rounding_mb:30,"
        "garbage_collection_threshold:0.8,per_process_memory_fraction:0.9,"
        "large_segment_size_mb:32,backend:native,pinned_use_background_threads:True"
    )
    assert AllocatorSettings.parse(text) == AllocatorSettings(
        expandable_segments=True,
        max_split_size=512 * MIB,
        max_non_split_rounding=30 * MIB,
        large_segment=32 * MIB,
        garbage_collection_threshold=0.8,
        memory_fraction=0.9,
    )


def test_no_text_means_the_defaults() -> None:
    assert AllocatorSettings.parse("") == AllocatorSettings()


def test_divisions_in_brackets_fill_the_sizes_below_the_first_and_above_the_last() -> None:
    parsed = AllocatorSettings.parse("roundup_power2_divisions:[4:2,8:4,>:8]")
    assert parsed.roundup_divisions == (2, 2, 2, 4, *[8] * 12)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("expandable_segments", "expected 'option:value' with commas between, got 'expandable"),
        ("expandable_segments:yes", "expandable_segments: expected True or False, got 'yes'"),
        ("max_split_size_mb:10", "a whole number of MiB, at least 20, got '10'"),
        ("max_split_size_mb:1.5", "a whole number of MiB, at least 20, got '1.5'"),
        ("large_segment_size_mb:10", "at least 11, got '10'"),
        ("garbage_collection_threshold:1.0", "a number above 0 and below 1, got '1.0'"),
        ("garbage_collection_threshold:high", "a number above 0 and below 1, got 'high'"),
        ("roundup_power2_divisions:3", "powers of two, or 0, got '3'"),
        ("roundup_power2_divisions:[100:4]", "sizes in MiB that are powers of two, or >, got '100"),
        ("roundup_power2_divisions:[64:4", "'option:value' with commas between"),
        ("max_split_size:512", "options among backend, .*got 'max_split_size'"),
    ],
)
def test_settings_that_mean_nothing_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        AllocatorSettings.parse(text)


def test_the_drivers_own_allocator_is_not_modelled() -> None:
    with pytest.raises(UnsupportedError, match="expected native, got 'cudaMallocAsync'"):
        AllocatorSettings.parse("backend:cudaMallocAsync")
