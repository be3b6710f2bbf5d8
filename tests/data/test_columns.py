"""Logs of named columns: what of a row a batch has, and refusals by line and column."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.errors import InputError
from shardwright.data.logs import BagColumn, ColumnLog, Ids, number_of
from shardwright.data.reading import ClickBatch, ClickReader, evaluation_batches

FEATURES = (
    BagColumn("item", 100),
    BagColumn("seen", 50, weighted=True),
    BagColumn("word", 7, ids="modulo"),
)
HEADER = "other,word,click,seen,age,item"


def log(folder: Path, *lines: str, header: str = HEADER) -> ColumnLog:
    path = folder / "log.csv"
    path.write_text("\n".join((header, *lines)) + "\n")
    return ColumnLog(path, "click", ["age"], FEATURES)


def one(file: ColumnLog, rows: int) -> ClickBatch:
    return next(ClickReader(file, rows))


def test_columns_are_found_by_name_and_bags_have_any_length(tmp_path: Path) -> None:
    batch = one(log(tmp_path, "?,1 9,1,3:0.5 4,-2.5,99", ",,0,,,0 1 2"), 2)
    assert batch.dense.tolist() == [[-2.5], [0.0]]
    assert batch.labels.tolist() == [1.0, 0.0]
    assert isinstance(batch.ids, dict)
    assert [part.tolist() for part in batch.ids["item"]] == [[99, 0, 1, 2], [0, 1, 4]]
    assert [part.tolist() for part in batch.ids["seen"]] == [[3, 4], [0, 2, 2], [0.5, 1.0]]
    assert [part.tolist() for part in batch.ids["word"]] == [[1, 2], [0, 2, 2]]


def test_tabs_separate_columns_as_well(tmp_path: Path) -> None:
    batch = one(log(tmp_path, "?\t1\t1\t\t2.5\t", header=HEADER.replace(",", "\t")), 1)
    assert (batch.dense.tolist(), batch.labels.tolist()) == ([[2.5]], [1.0])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a,1,1,1,1", "row: expected 6 fields, as the header, got 5"),
        ("a,1,2,1,1,1", "column 'click': expected 0 or 1, got '2'"),
        ("a,1,1,1,nan,1", "column 'age': expected a finite number or nothing, got 'nan'"),
        ("a,1,1,1,1e60,1", "column 'age': expected a finite number or nothing, got '1e60'"),
        ("a,1,1,1,1,100", "column 'item': expected ids from 0 to 99 (data.ids = \"modulo\""),
        (
            "a,1,1,1,1,u1",
            "column 'item': expected ids of up to 18 digits, separated by spaces "
            "(data.ids = \"hash\" takes text), got 'u1'",
        ),
        ("a,1,1,1,1,1:2", "column 'item': expected ids without weights"),
        ("a,1,1,1:,1,1", "column 'seen': expected a number behind the colon"),
        ("a,1,1,1:x,1,1", "column 'seen': expected a number behind the colon"),
        ("a,1,1,1:1e60,1,1", "column 'seen': expected a number behind the colon"),
    ],
)
def test_a_bad_field_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = log(tmp_path, "a,1,1,1,1,1", line)
    with pytest.raises(InputError) as caught:
        one(file, 2)
    assert str(caught.value).startswith(f"{file.path}:3, {message}")
    assert "\n" not in str(caught.value)


def test_a_missing_column_is_named_with_those_that_are_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the header: expected one column 'item', got none"):
        log(tmp_path, "1,1", header="click,age")
    with pytest.raises(InputError, match=r"Did you mean 'itms'\? There are 'click', 'age', 'itms'"):
        log(tmp_path, "1,1,1", header="click,age,itms")
    with pytest.raises(InputError, match="expected one column 'age', got several"):
        log(tmp_path, "1", header=f"{HEADER},age")
    with pytest.raises(InputError, match="expected data rows, got only a header"):
        log(tmp_path)


@pytest.mark.parametrize("ids", [None, "hash"])
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=20))
def test_a_row_is_either_parsed_or_has_a_named_fault(
    tmp_path_factory: pytest.TempPathFactory, ids: Ids | None, text: str
) -> None:
    path = log(tmp_path_factory.getbasetemp(), "a,1,1,1,1,1").path
    file = ColumnLog(path, "click", ["age"], [replace(f, ids=ids or f.ids) for f in FEATURES])
    for line in (f"a,{text},1,1,1,1", f"a,1,1,{text},1,1", f"a,1,1,1,{text},1"):
        raw = line.encode()
        assert (file.parse([raw]) is None) == (file.fault(raw) is not None)


def test_a_weight_is_behind_the_last_colon_of_text(tmp_path: Path) -> None:
    path = log(tmp_path, "?,a:b 'c:3',1,a:b:0.5 c:3,1,0").path
    file = ColumnLog(path, "click", ["age"], [replace(f, ids="hash") for f in FEATURES[1:]])
    ids = one(file, 1).ids
    assert isinstance(ids, dict)
    assert ids["word"][0].tolist() == [number_of(word, "hash") % 7 for word in (b"a:b", b"c:3")]
    assert ids["seen"][0].tolist() == [number_of(word, "hash") % 50 for word in (b"a:b", b"c")]
    assert ids["seen"][2].tolist() == [0.5, 3.0]
    fault = file.fault(b"?,1,1,a:b,1,0")
    assert fault is not None
    assert "a number behind the colon" in fault.wanted


def test_a_batch_without_rows_keeps_its_shape(tmp_path: Path) -> None:
    [(batch, _)] = evaluation_batches(log(tmp_path, "a,1,1,1,1,1"), 1, rank=1, world_size=2)
    assert batch.dense.shape == (0, 1)
    assert isinstance(batch.ids, dict)
    for ids, offsets, *_ in batch.ids.values():
        assert (ids.shape, ids.dtype, offsets.tolist()) == ((0,), np.int64, [0])


@pytest.mark.parametrize(("word", "found"), [("1 2", "2"), ("", "0")])
def test_where_every_feature_has_one_id_there_are_no_bags(
    tmp_path: Path, word: str, found: str
) -> None:
    def read(*lines: str) -> ClickBatch:
        path = log(tmp_path, *lines).path
        features = (FEATURES[2], FEATURES[0])
        return one(ColumnLog(path, "click", ["age"], features, bags=False), len(lines))

    batch = read("?,9,1,,-2.5,99", ",0,0,,,1")
    assert isinstance(batch.ids, np.ndarray)
    assert (batch.ids.dtype, batch.ids.tolist()) == (np.int64, [[2, 99], [0, 1]])
    with pytest.raises(InputError, match=f"csv:3, column 'word': expected one id, got {found}"):
        read("?,9,1,,-2.5,99", f",{word},0,,,1")
