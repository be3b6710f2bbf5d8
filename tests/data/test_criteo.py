"""The Criteo reader: values of a row, refusals by line, and the dealing of rows to ranks."""

from __future__ import annotations

import math
import os
import re
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.errors import InputError
from shardwright.data.logs import FIELD_NAMES, CriteoLog
from shardwright.data.reading import ClickBatch, ClickReader, DealtRows, evaluation_batches

TABLES = [1000 + i for i in range(26)]
HUGE = [1 << 40] * 26  # no reduction: ids come back as written
HEADER = ",".join(FIELD_NAMES)


def row(number: int = 0, separator: str = "\t", **fields: str) -> str:
    values = {"label": str(number % 2), **{f"I{i}": str(number) for i in range(1, 14)}}
    values |= {f"C{i}": f"{number * 26 + i:08x}" for i in range(1, 27)}
    return separator.join((values | fields).values())


def log(folder: Path, *lines: str, end: str = "\n", name: str = "clicks.tsv") -> Path:
    path = folder / name
    path.write_bytes("".join(line + end for line in lines).encode())
    return path


def numbered(folder: Path, rows: int) -> Path:
    return log(folder, *(row(i) for i in range(rows)), name=f"{rows}.tsv")


def numbers(batch: ClickBatch) -> list[int]:
    return ((batch.ids[:, 0] - 1) // 26).tolist()


def first(path: Path, tables: list[int] = HUGE) -> ClickBatch:
    return next(ClickReader(CriteoLog(path, tables), 1))


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        next(ClickReader(CriteoLog(path, TABLES), 64))
    text = str(caught.value)
    assert "\n" not in text
    assert ": expected " in text
    assert ", got " in text
    assert str(path) in text
    return text


def test_a_batch_has_the_shapes_and_types_that_a_model_takes(tmp_path: Path) -> None:
    batch = next(ClickReader(CriteoLog(numbered(tmp_path, 5), TABLES), 4))
    assert (batch.dense.shape, batch.dense.dtype) == ((4, 13), np.float32)
    assert (batch.ids.shape, batch.ids.dtype) == ((4, 26), np.int64)
    assert (batch.labels.shape, batch.labels.dtype) == ((4,), np.float32)
    assert batch.labels.tolist() == [0, 1, 0, 1]
    assert batch.dense.flags.c_contiguous
    assert batch.ids.flags.c_contiguous


def test_missing_fields_are_zero(tmp_path: Path) -> None:
    batch = first(log(tmp_path, "1" + "\t" * 39))
    assert not batch.dense.any()
    assert not batch.ids.any()
    assert batch.labels.tolist() == [1]


def test_a_negative_integer_counts_as_zero_and_others_as_log_of_one_more(tmp_path: Path) -> None:
    dense = first(log(tmp_path, row(I1="-1", I2="-2.0", I3="7", I4="0"))).dense[0]
    assert dense[:4].tolist() == [0.0, 0.0, np.float32(math.log(8)), 0.0]


def test_an_integer_may_be_spelled_as_a_float(tmp_path: Path) -> None:
    dense = first(log(tmp_path, row(I1="260.0", I2="260", I3="2.6e2"))).dense[0]
    assert dense[0] == dense[1] == dense[2] == np.float32(math.log(261))


def test_an_id_above_two_to_the_31_keeps_its_value(tmp_path: Path) -> None:
    path = log(tmp_path, row(C1="ffffffff", C2="80000000", C3="AbC", C4="0"))
    assert first(path).ids[0, :4].tolist() == [0xFFFFFFFF, 1 << 31, 0xABC, 0]
    assert first(path, TABLES).ids[0, 0] == 0xFFFFFFFF % TABLES[0]


def test_each_column_is_reduced_to_its_own_table(tmp_path: Path) -> None:
    path = log(tmp_path, row(**{f"C{i}": "deadbeef" for i in range(1, 27)}))
    assert first(path, TABLES).ids[0].tolist() == [0xDEADBEEF % rows for rows in TABLES]


def test_the_comma_form_with_its_header_reads_as_the_tab_form_does(tmp_path: Path) -> None:
    tabs = numbered(tmp_path, 4)
    commas = log(tmp_path, HEADER, *(row(i, ",") for i in range(4)), name="clicks.csv")
    assert (CriteoLog(tabs, TABLES).spelling, CriteoLog(commas, TABLES).spelling) == ("tsv", "csv")
    assert CriteoLog(tabs, TABLES).count() == CriteoLog(commas, TABLES).count() == 4
    for _, one, two in zip(
        range(3),
        ClickReader(CriteoLog(tabs, TABLES), 3),
        ClickReader(CriteoLog(commas, TABLES), 3),
        strict=False,
    ):
        np.testing.assert_array_equal(one.ids, two.ids)
        np.testing.assert_array_equal(one.dense, two.dense)


def test_carriage_returns_and_empty_lines_do_not_matter(tmp_path: Path) -> None:
    plain = numbered(tmp_path, 3)
    dos = log(tmp_path, "", row(0), row(1), "", row(2), "", end="\r\n", name="dos.tsv")
    assert CriteoLog(dos, TABLES).count() == 3
    one, two = (next(ClickReader(CriteoLog(path, TABLES), 7)) for path in (plain, dos))
    np.testing.assert_array_equal(one.ids, two.ids)


def test_a_last_line_without_an_end_is_a_row(tmp_path: Path) -> None:
    path = tmp_path / "clicks.tsv"
    path.write_text(row(0) + "\n" + row(1))
    assert numbers(next(ClickReader(CriteoLog(path, HUGE), 3))) == [0, 1, 0]


@pytest.mark.parametrize(
    ("bad", "field", "found"),
    [
        (row().rsplit("\t", 1)[0], "row", "got 39 (the unlabelled test split has 39)"),
        (row() + "\t", "row", "expected 40 fields, got 41"),
        (row(label="2"), "field label", "expected 0 or 1, got '2'"),
        (row(label=""), "field label", "got ''"),
        (row(I3="many"), "field I3", "got 'many'"),
        (row(I13="nan"), "field I13", "got 'nan'"),
        (row(I13="inf"), "field I13", "got 'inf'"),
        (row(I1="1e400"), "field I1", "got '1e400'"),
        (row(I1="2.5"), "field I1", "expected a finite whole number or nothing, got '2.5'"),
        (row(I1="1_0"), "field I1", "got '1_0'"),
        (row(I1="fade"), "field I1", "got 'fade'"),
        (row(C1="xyz"), "field C1", "expected 1 to 8 hexadecimal digits or nothing, got 'xyz'"),
        (row(C26="-1"), "field C26", "got '-1'"),
        (row(C26="0x1f"), "field C26", "got '0x1f'"),
        (row(C2="123456789"), "field C2", "got '123456789'"),
        (row(C2="\0a"), "field C2", r"got '\x00a'"),
        (row(C2="é"), "field C2", r"got '\xc3\xa9'"),
        (row(C2="f" * 100), "field C2", "f' (and 60 bytes more)"),
    ],
)
def test_a_bad_row_is_refused_by_line_and_field(
    tmp_path: Path, bad: str, field: str, found: str
) -> None:
    path = log(tmp_path, row(0), row(1), bad, row(3))
    text = refusal(path)
    assert text.startswith(f"{path}:3, {field}: expected ")
    assert found in text
    assert "data.skip_bad_rows" in text


def test_the_line_number_of_a_bad_row_counts_the_header_and_empty_lines(tmp_path: Path) -> None:
    path = log(tmp_path, HEADER, "", row(0, ","), row(1, ",", I5="x"))
    assert refusal(path).startswith(f"{path}:4, field I5: ")


def test_bad_rows_left_out_are_counted_and_the_next_rows_fill_the_batch(tmp_path: Path) -> None:
    lines = [row(0), row(1, I1="x"), row(2), "0\t1", row(4), row(5)]
    reader = ClickReader(CriteoLog(log(tmp_path, *lines), HUGE), 3, skip_bad_rows=True)
    assert numbers(next(reader)) == [0, 2, 4]
    assert reader.bad_rows == 2
    assert numbers(next(reader)) == [5, 0, 2]
    assert (reader.bad_rows, reader.epoch) == (3, 1)


def test_a_rank_fills_its_batch_from_rows_of_its_own(tmp_path: Path) -> None:
    lines = [row(i, **({"I1": "x"} if i == 2 else {})) for i in range(12)]
    path = log(tmp_path, *lines)
    one, two = (
        ClickReader(CriteoLog(path, HUGE), 2, rank, 2, skip_bad_rows=True) for rank in (0, 1)
    )
    assert [numbers(next(one)) for _ in range(2)] == [[0, 1], [4, 5]]
    assert [numbers(next(two)) for _ in range(2)] == [[3, 6], [7, 10]]
    assert (one.bad_rows, two.bad_rows) == (0, 1)


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 2)])
def test_a_pass_without_a_good_row_is_refused(tmp_path: Path, rank: int, world_size: int) -> None:
    path = log(tmp_path, *(row(i, I1="x") for i in range(5)))
    reader = ClickReader(CriteoLog(path, TABLES), 2, rank, world_size, skip_bad_rows=True)
    with pytest.raises(InputError, match=r"expected a good row in a pass, got \d bad ones"):
        next(reader)


def test_a_file_that_is_missing_empty_or_a_folder_is_refused(tmp_path: Path) -> None:
    assert "got nothing" in refusal(tmp_path / "absent.tsv")
    assert "got a directory" in refusal(tmp_path)
    assert "got an empty file" in refusal(log(tmp_path, name="empty.tsv"))
    assert "got an empty file" in refusal(log(tmp_path, "", "", name="blank.tsv"))
    assert "got only a header" in refusal(log(tmp_path, HEADER, name="header.csv"))


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"\x7fELF\2\1\n", "got a program"),
        (b"\0\0\1,\n", "got a binary file"),
        (b"\x1f\x9d\x90,a\n", "got a binary file"),
        (b"a" * 70_000, "got a line of 65536 bytes or more"),
        (b"hello world\n", "got 'hello world'"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes, found: str) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    text = refusal(path)
    assert found in text
    assert re.match(rf"{path}(:1)?: expected 40 tab-separated fields", text)


def test_a_wrong_header_names_the_column(tmp_path: Path) -> None:
    wrong = log(tmp_path, HEADER.replace("I7", "i7"), row(0, ","))
    assert "clicks.tsv:1, column 8 of the header: expected 'I7', got 'i7'." in refusal(wrong)
    short = log(tmp_path, HEADER.rsplit(",", 1)[0], row(0, ","))
    assert "column 40 of the header: expected 'C26', got no such column." in refusal(short)
    long = log(tmp_path, HEADER + ",C27", row(0, ","))
    assert "column 41 of the header: expected no such column, got 'C27'." in refusal(long)
    none = log(tmp_path, row(0, ","))
    assert "column 1 of the header: expected 'label', got '0'." in refusal(none)


def test_a_check_reads_no_further_than_the_first_row(tmp_path: Path) -> None:
    CriteoLog(log(tmp_path, row(0), "nonsense"), TABLES).check()
    with pytest.raises(InputError, match=r":1, field I2: expected a finite whole"):
        CriteoLog(log(tmp_path, row(0, I2="?"), row(1)), TABLES).check()


def test_a_file_emptied_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = numbered(tmp_path, 2)
    reader = ClickReader(CriteoLog(path, TABLES), 2)
    next(reader)
    path.write_bytes(b"")
    with pytest.raises(InputError, match="expected data rows, got no longer any"):
        next(reader)


def test_sizes_and_ranks_that_cannot_be_are_refused(tmp_path: Path) -> None:
    path = numbered(tmp_path, 2)
    with pytest.raises(InputError, match="table_rows: expected 26 table sizes, got 3 of them"):
        ClickReader(CriteoLog(path, [1, 2, 3]), 1)
    with pytest.raises(InputError, match="table_rows, C2: expected a positive size, got 0"):
        ClickReader(CriteoLog(path, [1, 0, *[1] * 24]), 1)
    with pytest.raises(InputError, match="batch_size: expected a positive number of rows, got 0"):
        ClickReader(CriteoLog(path, TABLES), 0)
    with pytest.raises(InputError, match="rank: expected 0 <= rank < world_size, got 2 of 2"):
        ClickReader(CriteoLog(path, TABLES), 1, 2, 2)
    with pytest.raises(InputError, match="limit: expected a positive number"):
        evaluation_batches(CriteoLog(path, TABLES), 1, limit=0)


def test_a_file_repeats_without_end_and_epochs_count_its_passes(tmp_path: Path) -> None:
    reader = ClickReader(CriteoLog(numbered(tmp_path, 3), HUGE), 4)
    read = [n for batch in islice(reader, 6) for n in numbers(batch)]
    assert read == [i % 3 for i in range(24)]
    assert reader.epoch == 7


@pytest.mark.parametrize("taken", [0, 2, 4, 7, 10, 16])
def test_who_goes_on_in_a_pass_reads_all_rows_of_those_that_follow(
    tmp_path: Path, taken: int
) -> None:
    log = CriteoLog(numbered(tmp_path, 7), HUGE)
    reader = ClickReader(log, 2, dealt=[DealtRows(2, (taken,))])
    read = [n for batch in islice(reader, 12) for n in numbers(batch)]
    assert read == [n % 7 for n in range(taken, taken + 24)]


@given(
    rows=st.integers(1, 30),
    batch=st.integers(1, 6),
    world_size=st.integers(1, 4),
    batches=st.integers(1, 8),
)
def test_the_global_batch_does_not_depend_on_the_world_size(
    tmp_path_factory: pytest.TempPathFactory, rows: int, batch: int, world_size: int, batches: int
) -> None:
    path = numbered(tmp_path_factory.mktemp("log"), rows)
    whole = ClickReader(CriteoLog(path, HUGE), batch * world_size)
    shares = [
        ClickReader(CriteoLog(path, HUGE), batch, rank, world_size) for rank in range(world_size)
    ]
    for k in range(batches):
        together = numbers(next(whole))
        assert together == [n for share in shares for n in numbers(next(share))]
        size = batch * world_size
        assert together == [n % rows for n in range(k * size, (k + 1) * size)]


@given(
    rows=st.integers(1, 40),
    batch=st.integers(1, 6),
    world_size=st.integers(1, 4),
    limit=st.none() | st.integers(1, 50),
)
def test_evaluation_covers_each_row_once_in_the_same_number_of_batches_on_every_rank(
    tmp_path_factory: pytest.TempPathFactory,
    rows: int,
    batch: int,
    world_size: int,
    limit: int | None,
) -> None:
    path = numbered(tmp_path_factory.mktemp("log"), rows)
    ranks = [
        list(evaluation_batches(CriteoLog(path, HUGE), batch, rank, world_size, limit=limit))
        for rank in range(world_size)
    ]
    read = min(rows, limit or rows)
    assert {len(batches) for batches in ranks} == {math.ceil(read / (batch * world_size))}
    indices = [i for step in zip(*ranks, strict=True) for _, rows_ in step for i in rows_.tolist()]
    assert indices == list(range(read))
    for batches in ranks:
        for made, index in batches:
            assert numbers(made) == index.tolist()


def test_an_evaluation_batch_without_rows_keeps_its_shape(tmp_path: Path) -> None:
    [(batch, index)] = evaluation_batches(
        CriteoLog(numbered(tmp_path, 2), TABLES), 2, rank=1, world_size=2
    )
    assert (batch.dense.shape, batch.ids.shape) == ((0, 13), (0, 26))
    assert (batch.labels.shape, index.shape, index.dtype) == ((0,), (0,), np.int64)


def test_evaluation_refuses_a_bad_row_or_leaves_it_out_with_its_index(tmp_path: Path) -> None:
    path = log(tmp_path, row(0), row(1, C9="no"), row(2))
    with pytest.raises(InputError, match=r"clicks\.tsv:2, field C9: "):
        list(evaluation_batches(CriteoLog(path, HUGE), 2))
    batches = evaluation_batches(CriteoLog(path, HUGE), 2, skip_bad_rows=True)
    assert [(numbers(batch), index.tolist()) for batch, index in batches] == [
        ([0], [0]),
        ([2], [2]),
    ]


FIELD = st.text("0123456789abefx+-._ ni\r\0", max_size=10)


@pytest.mark.slow
@given(name=st.sampled_from(FIELD_NAMES), text=FIELD)
def test_a_row_is_either_parsed_or_has_a_named_fault(
    tmp_path_factory: pytest.TempPathFactory, name: str, text: str
) -> None:
    path = log(tmp_path_factory.getbasetemp(), row(0), row(1, **{name: text}), name="fuzzed.tsv")
    try:
        batch = next(ClickReader(CriteoLog(path, HUGE), 2))
    except InputError as error:
        assert str(error).startswith(f"{path}:2, field {name}: ")  # noqa: PT017
    else:
        assert np.isfinite(batch.dense).all()
        assert (batch.ids >= 0).all()
        assert (batch.ids < 1 << 32).all()
        if name.startswith("C"):
            assert batch.ids[1, FIELD_NAMES.index(name) - 14] == int(text.strip() or "0", 16)


def test_the_real_sample_is_read_as_it_is_described() -> None:
    sample = os.environ.get("SHARDWRIGHT_CRITEO_SAMPLE")
    if not sample:
        pytest.skip("SHARDWRIGHT_CRITEO_SAMPLE names no file of real rows")
    assert CriteoLog(sample, TABLES).spelling == "csv"
    assert CriteoLog(sample, TABLES).count() == 200
    [(batch, _)] = evaluation_batches(CriteoLog(sample, HUGE), 256)
    assert batch.labels.mean() == pytest.approx(0.245)
    assert (batch.ids >= 1 << 31).sum() / (batch.ids != 0).sum() == pytest.approx(0.435, abs=0.001)


def test_a_line_without_end_is_refused_before_it_fills_memory(tmp_path: Path) -> None:
    path = log(tmp_path, *(row(i) for i in range(3)), "1" * 70_000)
    reader = ClickReader(CriteoLog(path, HUGE), 2, skip_bad_rows=True)
    next(reader)
    with pytest.raises(InputError, match=r":4: expected a row of a click log, got 65536 bytes"):
        next(reader)


def test_a_file_that_goes_away_between_two_passes_is_named(tmp_path: Path) -> None:
    path = numbered(tmp_path, 2)
    reader = ClickReader(CriteoLog(path, HUGE), 2)
    next(reader)
    path.unlink()
    with pytest.raises(InputError, match="expected a readable file, got No such file"):
        next(reader)
