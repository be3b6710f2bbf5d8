"""Days of a log: what is trained on, what is held out, and rows that are thinned out."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.core.errors import InputError
from shardwright.data.days import PARTS, Days, LogSlice, bounds, day_files, slices_of
from shardwright.data.logs import CriteoLog
from shardwright.data.reading import ClickReader

TABLES = (1000,) * 26


def row(number: int, label: int = 0) -> str:
    return "\t".join([str(label), *[str(number)] * 13, *[f"{number:x}"] * 26])


def write(path: Path, numbers: range, every: int = 0) -> Path:
    """Rows of which each ``every``-th is a click."""
    rows = [row(n, int(bool(every) and n % every == 0)) for n in numbers]
    path.write_text("".join(f"{line}\n" for line in rows))
    return path


def opened(path: str) -> CriteoLog:
    return CriteoLog(path, TABLES)


def numbers(log: Days) -> list[int]:
    return [int(line.split(b"\t")[1]) for _, _, line in log.rows()]


def parts(path: Path, days: int | None) -> dict[str, list[int]]:
    found = slices_of(path, days, opened)
    return {part: numbers(Days(found[part])) for part in PARTS}


def test_of_seven_days_of_a_file_the_last_is_held_out_in_halves(tmp_path: Path) -> None:
    found = parts(write(tmp_path / "train.txt", range(70)), 7)
    assert found["train"] == list(range(60))
    assert found["validation"] == list(range(60, 65))
    assert found["test"] == list(range(65, 70))


@pytest.mark.parametrize("rows", [15, 16, 71, 97])
def test_every_row_of_a_file_is_in_one_part_whatever_its_length(tmp_path: Path, rows: int) -> None:
    found = parts(write(tmp_path / "train.txt", range(rows)), 7)
    assert found["train"] + found["validation"] + found["test"] == list(range(rows))
    assert all(found.values())


def test_of_a_folder_of_days_the_last_file_is_held_out_in_halves(tmp_path: Path) -> None:
    for day in range(24):
        write(tmp_path / f"day_{day}", range(10 * day, 10 * day + 10))
    found = parts(tmp_path, 24)
    assert found["train"] == list(range(230))  # day 10 comes after day 9, not after day 1
    assert found["validation"] == list(range(230, 235))
    assert found["test"] == list(range(235, 240))
    assert parts(tmp_path, None) == found


def test_a_day_that_is_missing_and_a_wrong_number_of_days_are_named(tmp_path: Path) -> None:
    for day in (0, 1, 3):
        write(tmp_path / f"day_{day}", range(4))
    with pytest.raises(InputError, match=r"expected day_2, got day_0, day_1, day_3"):
        day_files(tmp_path)
    write(tmp_path / "day_2", range(4))
    with pytest.raises(InputError, match=r"data.days: expected 24 files of days, got 4 files"):
        slices_of(tmp_path, 24, opened)


def test_too_few_rows_for_so_many_days_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"expected rows to train on and two that are held out"):
        parts(write(tmp_path / "train.txt", range(7)), 7)


def test_clicks_stay_and_the_asked_share_of_other_rows_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "train.txt", range(4000), every=4)
    log = Days([LogSlice(opened(str(path)))], drop=0.875, seed=1)
    found = numbers(log)
    assert {n for n in found if n % 4 == 0} == set(range(0, 4000, 4))
    left = len(found) - 1000
    assert 3000 * 0.125 * 0.8 < left < 3000 * 0.125 * 1.2
    assert numbers(log) == found  # in every pass the same
    assert numbers(Days([LogSlice(opened(str(path)))], drop=0.875, seed=2)) != found


def test_a_row_is_left_out_of_a_part_or_not_as_it_is_of_the_whole_file(tmp_path: Path) -> None:
    path = write(tmp_path / "train.txt", range(140), every=9)
    whole = numbers(Days([LogSlice(opened(str(path)))], drop=0.5, seed=3))
    found = slices_of(path, 7, opened)
    own = [n for part in PARTS for n in numbers(Days(found[part], drop=0.5, seed=3))]
    assert own == whole


def test_a_bad_row_is_named_by_its_own_file_and_line(tmp_path: Path) -> None:
    for day in range(3):
        write(tmp_path / f"day_{day}", range(10 * day, 10 * day + 10))
    lines = (tmp_path / "day_1").read_text().splitlines()
    lines[4] = lines[4].replace("\te\t", "\tzz\t", 1)
    (tmp_path / "day_1").write_text("\n".join(lines) + "\n")
    reader = ClickReader(Days(slices_of(tmp_path, None, opened)["train"]), 4)
    read = [next(reader), next(reader), next(reader)]
    assert len(read) == 3
    with pytest.raises(InputError, match=r"day_1:5, field C1: expected 1 to 8 hexadecimal digits"):
        next(reader)


def test_days_of_two_spellings_are_refused(tmp_path: Path) -> None:
    header = ",".join(["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))])
    (tmp_path / "day_1").write_text(f"{header}\n{row(1).replace(chr(9), ',')}\n")
    logs = [opened(str(write(tmp_path / "day_0", range(3)))), opened(str(tmp_path / "day_1"))]
    with pytest.raises(InputError, match=r"day_1: expected 'tsv', as in .*day_0, got 'csv'"):
        Days([LogSlice(log) for log in logs])


@pytest.mark.parametrize(("rows", "days"), [(70, 7), (71, 7), (100, 24), (7, 2)])
def test_bounds_are_those_of_equal_days(rows: int, days: int) -> None:
    first, middle = bounds(rows, days)
    assert rows - first in (rows // days, rows // days + 1)
    assert first < middle <= rows
