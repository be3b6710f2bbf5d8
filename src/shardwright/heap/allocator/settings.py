"""Settings of the caching allocator, in the syntax of ``PYTORCH_CUDA_ALLOC_CONF``."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from shardwright.core.errors import InputError, UnsupportedError, expected

MIB = 2**20

# c10/core/AllocatorConfig.h of torch 2.13, in bytes
MIN_BLOCK = 512  # sizes are rounded up to multiples of it
SMALL_REQUEST = 1 * MIB  # the largest request of the small pool
SMALL_SEGMENT = 2 * MIB
MIN_OWN_SEGMENT = 10 * MIB  # a smaller large request shares a segment of LARGE_SEGMENT
LARGE_SEGMENT = 20 * MIB
ROUND_SEGMENT = 2 * MIB

# roundup_power2_divisions: one number per power of two from 1 MiB to 32 GiB
INTERVALS = 16
FIRST_INTERVAL = 20  # log2 of 1 MiB

WHERE = "PYTORCH_CUDA_ALLOC_CONF"

# They change when memory is asked for, or the host's memory, but no byte of the device's.
WITHOUT_EFFECT = frozenset(
    {
        "graph_capture_record_stream_reuse",
        "pinned_free_catch_all",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "release_lock_on_cudamalloc",
        "throw_on_cudamalloc_oom",
    }
)


class AllocatorSettings(msgspec.Struct, frozen=True):
    """What of the settings changes the bytes that are reserved; sizes in bytes.

    ``memory_fraction`` is that of the device's memory which may be reserved. Garbage is collected
    only where it is given, as in PyTorch.
    """

    expandable_segments: bool = False
    max_split_size: int | None = None
    max_non_split_rounding: int = LARGE_SEGMENT
    large_segment: int = LARGE_SEGMENT
    roundup_divisions: tuple[int, ...] = ()
    garbage_collection_threshold: float = 0.0
    memory_fraction: float | None = None

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """Settings from text like ``expandable_segments:True,max_split_size_mb:512``."""
        values: dict[str, Any] = {}
        for key, value in _pairs(text):
            if key in WITHOUT_EFFECT:
                continue
            if key not in _READERS:
                names = ", ".join(sorted({*_READERS, *WITHOUT_EFFECT}))
                raise InputError(expected(WHERE, f"options among {names}", f"'{key}'"))
            if read := _READERS[key](value):
                values |= read
        return cls(**values)

    def rounded(self, nbytes: int) -> int:
        """The bytes of a block for a request of ``nbytes``."""
        if nbytes < MIN_BLOCK:
            return MIN_BLOCK
        divisions = self._divisions(nbytes)
        if divisions > 1 and nbytes > MIN_BLOCK * divisions:
            step = (1 << (nbytes.bit_length() - 1)) // divisions
            return -(-nbytes // step) * step
        return -(-nbytes // MIN_BLOCK) * MIN_BLOCK

    def room(self, capacity: int | None) -> int | None:
        """Bytes that may be reserved of a device with ``capacity``; None of one without end."""
        if capacity is None or self.memory_fraction is None:
            return capacity
        return int(self.memory_fraction * capacity)

    def segment(self, size: int) -> int:
        """The bytes of a new segment for a block of ``size``."""
        if size <= SMALL_REQUEST:
            return SMALL_SEGMENT
        if size < MIN_OWN_SEGMENT:
            return self.large_segment
        return -(-size // ROUND_SEGMENT) * ROUND_SEGMENT

    def _divisions(self, nbytes: int) -> int:
        if not self.roundup_divisions:
            return 0
        interval = nbytes.bit_length() - 1 - FIRST_INTERVAL
        return self.roundup_divisions[min(max(interval, 0), INTERVALS - 1)]


def _pairs(text: str) -> list[tuple[str, str]]:
    """Keys and values; a value in brackets may have commas and colons."""
    plain = re.sub(r"\s", "", text)
    found = []
    while plain:
        match = re.match(r"([^:,\[\]]+):(\[[^\]]*\]|[^:,\[\]]+)(?:,|$)", plain)
        if match is None:
            raise InputError(expected(WHERE, "'option:value' with commas between", f"'{plain}'"))
        found.append((match[1], match[2]))
        plain = plain[match.end() :]
    return found


def _wrong(key: str, wanted: str, value: str) -> InputError:
    return InputError(expected(f"{WHERE} {key}", wanted, f"'{value}'"))


def _switch(key: str) -> Callable[[str], dict[str, Any]]:
    def read(value: str) -> dict[str, Any]:
        if value not in ("True", "False"):
            raise _wrong(key, "True or False", value)
        return {key: value == "True"}

    return read


def _mebibytes(key: str, field: str, least: int) -> Callable[[str], dict[str, Any]]:
    def read(value: str) -> dict[str, Any]:
        if not value.isdecimal() or int(value) < least:
            raise _wrong(key, f"a whole number of MiB, at least {least}", value)
        return {field: int(value) * MIB}

    return read


def _share(key: str, field: str, most: str) -> Callable[[str], dict[str, Any]]:
    def read(value: str) -> dict[str, Any]:
        try:
            share = float(value)
        except ValueError:
            share = -1.0
        if not 0 < share <= 1 or (share == 1 and most == "below"):
            raise _wrong(key, f"a number above 0 and {most} 1", value)
        return {field: share}

    return read


def _backend(value: str) -> dict[str, Any]:
    if value != "native":
        raise UnsupportedError(
            expected(f"{WHERE} backend", "native", f"'{value}'", "Others are not modelled.")
        )
    return {}


def _roundup(value: str) -> dict[str, Any]:
    """One number for every size, or ``[256:1,512:2,>:4]``: numbers by size in MiB."""
    key = "roundup_power2_divisions"
    if not value.startswith("["):
        return {"roundup_divisions": (_division(value, key),) * INTERVALS}
    divisions = [0] * INTERVALS
    last = -1
    for item in value[1:-1].split(","):
        size, _, number = item.partition(":")
        division = _division(number, key)
        if size == ">":
            divisions[last + 1 :] = [division] * (INTERVALS - last - 1)
            continue
        if not size.isdecimal() or not _power_of_two(int(size)):
            raise _wrong(key, "sizes in MiB that are powers of two, or >", size)
        first, last = last < 0, min(int(size).bit_length() - 1, INTERVALS - 1)
        if first:
            divisions[:last] = [division] * last
        divisions[last] = division
    return {"roundup_divisions": tuple(divisions)}


def _division(number: str, key: str) -> int:
    if not number.isdecimal() or (int(number) and not _power_of_two(int(number))):
        raise _wrong(key, "numbers of divisions that are powers of two, or 0", number)
    return int(number)


def _power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


_LEAST_SPLIT = LARGE_SEGMENT // MIB
_READERS: dict[str, Callable[[str], dict[str, Any]]] = {
    "expandable_segments": _switch("expandable_segments"),
    "max_split_size_mb": _mebibytes("max_split_size_mb", "max_split_size", _LEAST_SPLIT),
    "max_non_split_rounding_mb": _mebibytes(
        "max_non_split_rounding_mb", "max_non_split_rounding", _LEAST_SPLIT
    ),
    "large_segment_size_mb": _mebibytes(
        "large_segment_size_mb", "large_segment", MIN_OWN_SEGMENT // MIB + 1
    ),
    "garbage_collection_threshold": _share(
        "garbage_collection_threshold", "garbage_collection_threshold", "below"
    ),
    "per_process_memory_fraction": _share(
        "per_process_memory_fraction", "memory_fraction", "at most"
    ),
    "roundup_power2_divisions": _roundup,
    "backend": _backend,
}
