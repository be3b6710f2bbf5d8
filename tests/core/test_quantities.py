from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.errors import InputError
from shardwright.core.quantities import format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (4096, 4096),
        ("512 B", 512),
        ("48 MiB", 48 * 2**20),
        ("48MiB", 48 * 2**20),
        (" 1.5 GiB ", 3 * 2**29),
        ("80 GB", 80 * 10**9),
        ("0.1 GB", 10**8),
        ("9007199254740993 B", 2**53 + 1),
    ],
)
def test_sizes_are_read_exactly(text: int | str, size: int) -> None:
    assert parse_bytes(text, "cluster.ddr_cap") == size


@pytest.mark.parametrize(
    "text", ["", "48", "48 mib", "48 Mi", "-1 MiB", "1e3 B", "1 GiB 2", "nan B"]
)
def test_a_text_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_bytes(text, "cluster.ddr_cap")
    assert str(caught.value) == (
        f"cluster.ddr_cap: expected bytes as an integer or a text like '48 MiB', got '{text}'."
    )


@pytest.mark.parametrize("size", [0, -5, 2**60 + 1, "0 B", "0.4 B", "9" * 400 + " B"])
def test_a_size_out_of_range_is_refused(size: int | str) -> None:
    with pytest.raises(
        InputError, match=r"^cluster.hbm_cap: expected a size between 1 B and 2\^60"
    ):
        parse_bytes(size, "cluster.hbm_cap")


@given(st.integers(1, 2**30), st.sampled_from(["B", "KiB", "MiB", "GiB", "KB", "MB", "GB"]))
def test_a_whole_number_of_units_is_that_many_bytes(count: int, unit: str) -> None:
    scale = {"K": 1, "M": 2, "G": 3}.get(unit[0], 0)
    base = 1024 if "i" in unit else 1000
    assert parse_bytes(f"{count} {unit}", "x") == count * base**scale


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (2**20, "1.00 MiB"),
        (3 * 2**29, "1.50 GiB"),
        (2**41, "2.00 TiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_bytes_are_written_in_binary_units(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0"),
        (1.5, "1.5 s"),
        (0.0125, "12.5 ms"),
        (3.3e-5, "33 µs"),
        (4e-9, "4 ns"),
        (-0.002, "-2 ms"),
    ],
)
def test_seconds_are_written_in_the_largest_unit_below_them(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@given(st.integers(1, 2**59))
def test_a_written_size_reads_back_within_its_digits(size: int) -> None:
    again = parse_bytes(format_bytes(size), "x")
    assert abs(again - size) <= 0.005 * size + 1
