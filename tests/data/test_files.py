"""A file is read into the rows that plain text has, whatever it is, or refused by what it is."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import re
import struct
import sys
import tarfile
import zipfile
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardwright.core.errors import InputError
from shardwright.data.cache import CachedRows, write_cache
from shardwright.data.days import PARTS, Days, slices_of
from shardwright.data.files import OTHERS
from shardwright.data.lines import PACKINGS
from shardwright.data.logs import FIELD_NAMES, BagColumn, ColumnLog, CriteoLog, DenseColumn
from shardwright.data.reading import ClickBatch, ClickLog, ClickReader, DealtRows, numbered_batches

ROWS = 11
FEATURES = (BagColumn("user", 100), BagColumn("viewed", 1000, ids="modulo"))
NAMES = ["click", "age", "price", "user", "viewed"]
CLICKS = [number % 3 == 0 for number in range(ROWS)]
AGES = [None if number == 4 else 20 + number for number in range(ROWS)]
PRICES = [number * 1.25 - 2 for number in range(ROWS)]
USERS = [number * 7 for number in range(ROWS)]
VIEWED = [[number, 3, number * 11][: number % 4] for number in range(ROWS)]


def table(**changes: Any) -> pa.Table:
    columns = {"click": CLICKS, "age": AGES, "price": PRICES, "user": USERS, "viewed": VIEWED}
    return pa.table({"other": ["Öl"] * ROWS} | columns | changes)


def text(separator: str = ",", bag: str = "{}", between: str = " ", quote: str = "") -> str:
    lines = [NAMES]
    for click, age, price, user, viewed in zip(CLICKS, AGES, PRICES, USERS, VIEWED, strict=True):
        ids = bag.format(between.join(map(str, viewed))) if viewed else ""
        lines.append([str(int(click)), "" if age is None else str(age), str(price), str(user), ids])
    return "".join(separator.join(f"{quote}{f}{quote}" for f in line) + "\n" for line in lines)


def parquet(made: pa.Table, **options: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(made, file, **options)
    return file.getvalue()


def packed(raw: bytes, codec: str) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(raw)
    return bytes(sink.getvalue().to_pybytes())


PLAIN = text().encode()
SAME: dict[str, bytes] = {
    "tabs": text("\t").encode(),
    "semicolons": text(";").encode(),
    "bars": text("|").encode(),
    "quotes": text(quote='"').encode(),
    "a mark of UTF-8": codecs.BOM_UTF8 + PLAIN,
    "quotes behind a mark of UTF-8": codecs.BOM_UTF8 + text(quote='"').encode(),
    "CRLF": PLAIN.replace(b"\n", b"\r\n"),
    "empty lines": PLAIN.replace(b"\n", b"\n\n"),
    "no end of the last line": PLAIN.rstrip(b"\n"),
    "blanks behind commas": text(", ").encode(),
    "gzip": gzip.compress(PLAIN),
    "gzip of several members": gzip.compress(PLAIN[:50]) + gzip.compress(PLAIN[50:]),
    "bzip2": bz2.compress(PLAIN),
    "xz": lzma.compress(PLAIN),
    "zstd": packed(PLAIN, "zstd"),
    "zstd of several frames": packed(PLAIN[:50], "zstd") + packed(PLAIN[50:], "zstd"),
    "lz4": packed(PLAIN, "lz4"),
    "gzip of a mark of UTF-8": gzip.compress(codecs.BOM_UTF8 + PLAIN),
    "bars in bags": text(between="|").encode(),
    "carets in bags": text(between="^").encode(),
    "semicolons in bags": text(between=";").encode(),
    "commas in bags": text("\t", between=",").encode(),
    "brackets": text(bag='"[{}]"', between=", ").encode(),
    "tuples": text("\t", bag="({})", between=", ").encode(),
    "words in brackets": text(bag="\"['{}']\"", between="', '").encode(),
    "ids with a point": text(between=".0 ", bag="{}.0").encode(),
    "other names": PLAIN.replace(b"click,", "größe,click,".encode(), 1).replace(b"\n", b"\nx,")[
        :-2
    ],
    "other names in Latin-1": PLAIN.replace(b"click,", "größe,click,".encode("latin-1"), 1).replace(
        b"\n", b"\nx,"
    )[:-2],
    "a comma in quotes": PLAIN.replace(b"click,", b'"a,b",click,', 1).replace(b"\n", b'\n"x,y",')[
        : -len('"x,y",')
    ],
    "a quote over two lines": PLAIN.replace(b"click,", b"text,click,", 1).replace(
        b"\n", b'\n"two\nlines ""here""",'
    )[: -len('"two\nlines ""here""",')],
    "a quote that is none": PLAIN.replace(b"click,", b"size,click,", 1).replace(
        b"\n", b'\n17" wide,'
    )[: -len('17" wide,')],
    "labels with a point": PLAIN.replace(b"\n0,", b"\n0.0,").replace(b"\n1,", b"\n1.0,"),
    "labels in words": PLAIN.replace(b"\n0,", b"\nFalse,").replace(b"\n1,", b"\nTrue,"),
    "Parquet": parquet(table()),
    "Parquet of two rows a group": parquet(table(), row_group_size=2, compression="zstd"),
    "Parquet of numbers as text": parquet(table(user=[str(user) for user in USERS])),
    "Parquet of a dictionary": parquet(
        table(user=pa.array([str(user) for user in USERS]).dictionary_encode())
    ),
    "Parquet of ids with a point": parquet(table(user=[float(user) for user in USERS])),
    "Parquet of bags as text": parquet(table(viewed=[" ".join(map(str, v)) for v in VIEWED])),
    "Parquet of bags that are none": parquet(table(viewed=[v or None for v in VIEWED])),
    "Parquet of dates beside them": parquet(table(other=pa.array(range(ROWS), pa.timestamp("s")))),
    "Parquet of ids of 32 bits": parquet(table(user=pa.array(USERS, pa.uint32()))),
    "Parquet of decimals": parquet(table(price=pa.array(PRICES).cast(pa.decimal128(12, 4)))),
    "Parquet of columns elsewhere": parquet(table().select([5, 0, 4, 3, 2, 1])),
}


def columns(path: Path, **options: Any) -> ColumnLog:
    return ColumnLog(path, "click", ["age", "price"], FEATURES, **options)


def written(folder: Path, raw: bytes, name: str = "file") -> Path:
    (folder / name).write_bytes(raw)
    return folder / name


def values(batch: ClickBatch) -> list[Any]:
    ids = batch.ids
    bags = (
        [[part.tolist() for part in bag] for bag in ids.values()] if isinstance(ids, dict) else []
    )
    return [batch.dense.tolist(), batch.labels.tolist(), bags or np.asarray(ids).tolist()]


def dealt(log: ClickLog) -> list[Any]:
    """What a rank of two reads that goes on where others stopped, over two passes."""
    before = (DealtRows(2, (4, 3)), DealtRows(3, (3,)))
    found = [ClickReader(log, 2, rank, 2, dealt=before) for rank in (0, 1)]
    return [values(batch) for reader in found for batch in islice(reader, ROWS)]


@pytest.mark.parametrize("form", SAME)
def test_a_file_of_any_form_has_the_rows_of_the_plain_one(form: str, tmp_path: Path) -> None:
    plain, other = (
        columns(written(tmp_path, PLAIN)),
        columns(written(tmp_path, SAME[form], "other")),
    )
    assert dealt(other) == dealt(plain)
    assert other.count() == plain.count() == ROWS


@pytest.mark.parametrize("form", ["gzip", "Parquet", "quotes"])
def test_a_cache_and_days_have_the_rows_of_the_plain_one(form: str, tmp_path: Path) -> None:
    found = []
    for name, raw in (("plain", PLAIN), ("other", SAME[form])):
        log = columns(written(tmp_path, raw, name))
        write_cache(log, tmp_path / f"{name} rows", narrow=True)
        rows = CachedRows(tmp_path / f"{name} rows")
        cached = [values(batch) for batch in islice(numbered_batches(rows.at, 4), 5)]
        days = slices_of(log.path, 3, lambda path: columns(Path(path)))
        thinned = [Days(days[part], drop=0.5, seed=2).count() for part in PARTS]
        found.append((cached, thinned))
    assert found[0] == found[1]


TEXTS = ["u138", "Zoë", "漢字", "9f-04:E0", "L'Oréal", "17", "+/a=", "007", "-1", "x" * 99, "U138"]
SEEN = [TEXTS[number : number + number % 4] for number in range(ROWS)]


def texts(separator: str = ",", between: str = "|", bag: str = "{}", quote: str = "") -> bytes:
    lines = (
        ["click", "user", "seen"],
        *zip(
            (str(int(click)) for click in CLICKS),
            TEXTS,
            (bag.format(between.join(seen)) for seen in SEEN),
            strict=True,
        ),
    )
    rows = (separator.join(f"{quote}{field}{quote}" for field in line) for line in lines)
    return "".join(f"{row}\n" for row in rows).encode()


def texts_of_arrow(user: Any = TEXTS, seen: Any = SEEN) -> bytes:
    return parquet(pa.table({"click": CLICKS, "user": user, "seen": seen}))


SAME_TEXTS = {
    "tabs": texts("\t", " "),
    "quotes": texts(quote='"'),
    "lists of Python's": texts("\t", "', '", "['{}']"),
    "gzip": gzip.compress(texts(";")),
    "Parquet": texts_of_arrow(),
    "Parquet of a dictionary": texts_of_arrow(pa.array(TEXTS).dictionary_encode()),
    "Parquet of large text": texts_of_arrow(pa.array(TEXTS, pa.large_string())),
    "Parquet of bytes": texts_of_arrow(pa.array(TEXTS).cast(pa.binary())),
    "Parquet of lists of a dictionary": texts_of_arrow(
        seen=pa.array(SEEN, pa.list_(pa.dictionary(pa.int32(), pa.string())))
    ),
    "Parquet of bags as text": texts_of_arrow(seen=[",".join(seen) for seen in SEEN]),
}


@pytest.mark.parametrize("form", ["plain", *SAME_TEXTS])
def test_an_id_that_is_text_has_the_row_of_its_hash_in_every_form(
    form: str, tmp_path: Path
) -> None:
    """As a function of the documentation has it, for whoever serves a model."""
    documented = (Path(__file__).parents[2] / "docs" / "job.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(import hashlib\n.*?)```", documented, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    row = partial(names["row"], rows=1000)
    path = written(tmp_path, SAME_TEXTS.get(form, texts()))
    features = [BagColumn(name, 1000, ids="hash") for name in ("user", "seen")]
    ids = next(ClickReader(ColumnLog(path, "click", [], features), ROWS)).ids
    assert isinstance(ids, dict)
    assert ids["user"][0].tolist() == [row(word) for word in TEXTS]
    assert ids["seen"][0].tolist() == [row(word) for seen in SEEN for word in seen]
    assert np.diff(ids["seen"][1]).tolist() == [len(seen) for seen in SEEN]


COUNTS = [[(number * i) % 40 for i in range(13)] for number in range(ROWS)]
HASHES = [[(number * 2654435761 + i * 40503) % 2**32 for i in range(26)] for number in range(ROWS)]
TABLES = (1000,) * 26


def criteo(separator: str = "\t", header: bool = False, quote: str = "") -> bytes:
    lines = [",".join(FIELD_NAMES).split(",")] if header else []
    for click, counts, hashes in zip(CLICKS, COUNTS, HASHES, strict=True):
        lines.append([str(int(click)), *map(str, counts), *(f"{h:08x}" for h in hashes)])
    rows = (separator.join(f"{quote}{field}{quote}" for field in line) for line in lines)
    return "".join(f"{row}\n" for row in rows).encode()


def criteo_table(hashes: Callable[[list[int]], Any]) -> bytes:
    columns = [CLICKS, *zip(*COUNTS, strict=True)]
    columns += [hashes(list(column)) for column in zip(*HASHES, strict=True)]
    return parquet(pa.table(dict(zip(FIELD_NAMES, map(pa.array, columns), strict=True))))


def dlrm_arrays() -> bytes:
    """As facebookresearch/dlrm keeps what it has preprocessed."""
    file = io.BytesIO()
    X, y = np.array(COUNTS, np.int32), np.array(CLICKS, np.int32)  # noqa: N806
    np.savez_compressed(file, X_int=X, X_cat=np.array(HASHES, np.int64), y=y, counts=np.ones(26))
    return file.getvalue()


CRITEO: dict[str, bytes] = {
    "gzip": gzip.compress(criteo()),
    "zstd": packed(criteo(), "zstd"),
    "commas": criteo(",", header=True),
    "quotes": criteo(",", header=True, quote='"'),
    "tabs under a header": criteo(header=True),
    "semicolons under a header": criteo(";", header=True),
    "a mark of UTF-8": codecs.BOM_UTF8 + criteo(),
    "Parquet of text": criteo_table(lambda hashes: [f"{h:08x}" for h in hashes]),
    "Parquet of numbers": criteo_table(lambda hashes: hashes),
    "Parquet of signed numbers": criteo_table(
        lambda hashes: np.array(hashes, np.uint32).view(np.int32)
    ),
    "arrays of dlrm": dlrm_arrays(),
}


@pytest.mark.parametrize("form", CRITEO)
def test_a_criteo_log_of_any_form_has_the_rows_of_the_plain_one(form: str, tmp_path: Path) -> None:
    plain = CriteoLog(written(tmp_path, criteo()), TABLES)
    other = CriteoLog(written(tmp_path, CRITEO[form], "other"), TABLES)
    assert dealt(other) == dealt(plain)
    assert other.count() == plain.count() == ROWS


def torchrec_arrays(folder: Path, name: str) -> Path:
    """As TorchRec's preprocessing leaves them: logarithms, and hashes with a sign."""
    folder.mkdir(exist_ok=True)
    dense = np.log(np.array(COUNTS, np.int32) + 3, dtype=np.float32)
    np.save(folder / f"{name}dense.npy", dense)
    np.save(folder / f"{name}sparse.npy", np.array(HASHES, np.uint32).view(np.int32))
    np.save(folder / f"{name}labels.npy", np.array(CLICKS, np.int32).reshape(-1, 1))
    return folder


def test_arrays_of_torchrec_have_the_ids_of_the_text_and_their_own_logarithms(
    tmp_path: Path,
) -> None:
    plain = next(ClickReader(CriteoLog(written(tmp_path, criteo()), TABLES), ROWS))
    log = CriteoLog(torchrec_arrays(tmp_path / "arrays", "train_"), TABLES)
    found = next(ClickReader(log, ROWS))
    assert values(found)[1:] == values(plain)[1:]
    assert found.dense.tolist() == np.log(np.array(COUNTS) + 3, dtype=np.float32).tolist()


@pytest.mark.parametrize("form", ["gzip", "arrays of TorchRec", "arrays of dlrm"])
def test_a_folder_of_days_of_any_form_is_cut_as_that_of_plain_ones(
    form: str, tmp_path: Path
) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "other").mkdir()
    for day in range(3):
        written(tmp_path / "plain", criteo(), f"day_{day}")
        if form == "arrays of TorchRec":
            torchrec_arrays(tmp_path / "other", f"day_{day}_")
        else:
            name = f"day_{day}.gz" if form == "gzip" else f"day_{day}_reordered.npz"
            written(tmp_path / "other", CRITEO[form], name)
    found = []
    for name in ("plain", "other"):
        parts = slices_of(tmp_path / name, None, lambda path: CriteoLog(path, TABLES))
        logs = [Days(parts[part], drop=0.3, seed=1) for part in PARTS]
        found.append([(log.count(), values(next(ClickReader(log, 5)))[1:]) for log in logs])
    assert found[0] == found[1]


def test_a_folder_of_parquet_is_one_log_of_all_its_files(tmp_path: Path) -> None:
    for number, start in enumerate((0, 4, 5)):
        part = table().slice(start, (4, 1, ROWS)[number])
        written(tmp_path, parquet(part), f"part-0000{number}.snappy.parquet")
    written(tmp_path, b"", "_SUCCESS")
    log = columns(tmp_path)
    assert dealt(log) == dealt(columns(written(tmp_path, PLAIN)))
    assert log.count() == ROWS
    days = slices_of(tmp_path, 3, lambda path: columns(Path(path)))
    assert Days(days["train"]).count() == 7
    written(tmp_path, parquet(table().rename_columns(list("abcdef"))), "part-00003.parquet")
    with pytest.raises(InputError, match=r"expected columns as in part-00000.*, got a, b"):
        columns(tmp_path)


def test_text_without_a_header_is_given_names_and_other_files_have_theirs(tmp_path: Path) -> None:
    first, _, rows = PLAIN.partition(b"\n")
    names = first.decode().split(",")
    log = columns(written(tmp_path, rows), header=names)
    assert dealt(log) == dealt(columns(written(tmp_path, PLAIN, "plain")))
    assert log.count() == ROWS
    with pytest.raises(InputError, match=r"data.header: expected one column 'age', got none"):
        columns(written(tmp_path, rows), header=names[:1])
    with pytest.raises(InputError, match=r"data.header: expected none, for .* names its columns"):
        columns(written(tmp_path, parquet(table()), "parquet"), header=names)


def test_folders_that_say_a_column_are_one_log_in_the_order_of_their_numbers(
    tmp_path: Path,
) -> None:
    """As Hive and Spark write them: 10 comes after 9, and what is being written is not read."""
    for folder in ("day=9/user=4", "day=10/user=%312"):
        inside = tmp_path / "log" / folder
        inside.mkdir(parents=True)
        written(inside, parquet(table().drop_columns(["user"]).slice(0, 2)), "part-0.parquet")
        (inside / "_temporary").mkdir()
        written(inside, b"", ".part-0.parquet.crc")
    log = columns(tmp_path / "log")
    ids = next(ClickReader(log, 4)).ids
    assert isinstance(ids, dict)
    assert ids["user"][0].tolist() == [4, 4, 12, 12]
    assert log.count() == 4
    written(tmp_path / "log", parquet(table()), "more.parquet")
    with pytest.raises(
        InputError, match=r"more\.parquet: expected columns as in day=9/user=4/part-0"
    ):
        columns(tmp_path / "log")


def test_a_day_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("day_0", "day_0.gz", "day_1"):
        written(tmp_path, CRITEO["gzip"], name)
    with pytest.raises(InputError, match=r"expected one file of day_0, got day_0 and day_0\.gz"):
        slices_of(tmp_path, None, lambda path: CriteoLog(path, TABLES))


def test_numbers_get_a_logarithm_and_a_scale_and_nothing_is_nothing_after_both(
    tmp_path: Path,
) -> None:
    path = written(tmp_path, b"click,age,price\n1,-3,10\n0,,NULL\n1,7,20\n")
    dense = [DenseColumn("age", True, 1.0, 0.5), DenseColumn("price", center=10.0, spread=4.0)]
    log = ColumnLog(path, "click", dense, [], missing=["NULL"])
    found = next(ClickReader(log, 3)).dense
    assert found.tolist() == [[-2.0, 0.0], [0.0, 0.0], [np.float32((np.log(8.0) - 1) / 0.5), 2.5]]
    tiny = ColumnLog(path, "click", [DenseColumn("age", spread=1e-40)], [])
    with pytest.raises(InputError, match="2, column 'age': expected a finite number or nothing"):
        next(ClickReader(tiny, 1))


def test_without_pyarrow_what_needs_it_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for form in ("Parquet", "zstd"):
        with pytest.raises(InputError, match=r"expected pyarrow installed.*Install shardwright\[d"):
            columns(written(tmp_path, SAME[form]))
    assert columns(written(tmp_path, SAME["gzip"])).count() == ROWS


HEAD = b"click,age,price,user,viewed\n"
ONE = HEAD + b"1,34,9.5,17,3 4\n"
GOOD = [[[34.0, 9.5]], [1.0], [[[17], [0, 1]], [[3, 4], [0, 2]]]]


def row(line: bytes) -> bytes:
    return HEAD + line + b"\n"


def zipped(name: str, content: bytes = b"x") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, content)
    return file.getvalue()


def tarred() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        info = tarfile.TarInfo("train.txt")
        info.size = len(ONE)
        archive.addfile(info, io.BytesIO(ONE))
    return file.getvalue()


def npy(array: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npz(**arrays: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


# What a file has in it, and its one row, or what is said of it.
DIRTY: dict[str, tuple[bytes, list[Any] | str]] = {
    "as it should be": (ONE, GOOD),
    "blanks around fields": (row(b" 1 , 34 ,9.5, 17 , 3  4 "), GOOD),
    "blanks around names": (ONE.replace(b",user", b", user "), GOOD),
    "a plus": (row(b"1,+34,9.5,17,3 4"), GOOD),
    "an exponent": (row(b"1,3.4e1,95e-1,17,3 4"), GOOD),
    "zeros in front": (row(b"1,034,9.50,0017,03 4"), GOOD),
    "ids with a point": (row(b"1,34,9.5,17.0,3. 4.00"), GOOD),
    "a label with a point": (row(b"1.0,34,9.5,17,3 4"), GOOD),
    "a label in a word": (row(b"true,34,9.5,17,3 4"), GOOD),
    "a quote in quotes": (row(b'1,"34",9.5,"17","3 4"'), GOOD),
    "mixed ends of line": (HEAD + b"\r\n1,34,9.5,17,3 4\r\n", GOOD),
    "a bag in brackets": (row(b'1,34,9.5,[17],"[3, 4]"'), GOOD),
    "a bag with mixed separators": (row(b"1,34,9.5,17,3|;4^"), GOOD),
    "an empty column more": (
        b"click,age,price,user,viewed,\n1,34,9.5,17,3 4,\n",
        GOOD,
    ),
    "the columns in another order": (b"viewed,user,price,age,click\n3 4,17,9.5,34,1\n", GOOD),
    "a hash of 64 bits": (row(b"1,34,9.5,17,18446744073709551003 4"), GOOD),
    "no bags at all": (row(b"1,34,9.5,,"), [GOOD[0], GOOD[1], [[[], [0, 0]], [[], [0, 0]]]]),
    "no number": (row(b"1,,9.5,17,3 4"), [[[0.0, 9.5]], *GOOD[1:]]),
    "a label that is no click": (row(b"2,34,9.5,17,3 4"), "'click': expected 0 or 1, got '2'"),
    "no label": (row(b",34,9.5,17,3 4"), "'click': expected 0 or 1, got ''"),
    "a label of minus one": (row(b"-1,34,9.5,17,3 4"), "'click': expected 0 or 1, got '-1'"),
    "a label of a half": (row(b"0.5,34,9.5,17,3 4"), "'click': expected 0 or 1, got '0.5'"),
    "a word for nothing": (
        row(b"1,NULL,9.5,17,3 4"),
        "got 'NULL' (data.missing = [\"NULL\"] takes it",
    ),
    "no number at all": (row(b"1,nan,9.5,17,3 4"), '(data.missing = ["nan"] takes it'),
    "an infinite number": (row(b"1,inf,9.5,17,3 4"), "'age': expected a finite number"),
    "a number with commas": (row(b'1,"1,234",9.5,17,3 4'), "'age': expected a finite number"),
    "a decimal comma": (HEAD.replace(b",", b";") + b"1;34;9,5;17;3\n", "got '9,5'"),
    "a price with its currency": (row(b"1,34,$9.5,17,3 4"), "got '$9.5'"),
    "a share in percent": (row(b"1,34,95%,17,3 4"), "got '95%'"),
    "a date": (row(b"1,2024-01-01,9.5,17,3 4"), "got '2024-01-01'"),
    "a number with an underline": (row(b"1,3_4,9.5,17,3 4"), "got '3_4'"),
    "a hexadecimal number": (row(b"1,0x22,9.5,17,3 4"), "got '0x22'"),
    "a number that is too large": (row(b"1,1e60,9.5,17,3 4"), "got '1e60'"),
    "Arabic digits": (row("1,٣٤,9.5,17,3 4".encode()), "'age': expected a finite number"),
    "an id that is too large": (row(b"1,34,9.5,100,3 4"), "ids from 0 to 99 (data.ids"),
    "an id below zero": (row(b"1,34,9.5,-1,3 4"), "'user': expected ids of up to 18 digits"),
    "an id with a fraction": (row(b"1,34,9.5,17.5,3 4"), "'user': expected ids of up to 18 digits"),
    "an id in a word": (row(b"1,34,9.5,u17,3 4"), "got 'u17'"),
    "an id with an exponent": (row(b"1,34,9.5,1.7e1,3 4"), "got '1.7e1'"),
    "a word for no id": (row(b"1,34,9.5,NULL,3 4"), "'user': expected ids of up to 18 digits"),
    "an id of too many digits": (row(b"1,34,9.5,17," + b"9" * 21), "ids of up to 20 digits"),
    "a weight that nobody reads": (row(b"1,34,9.5,17:0.5,3 4"), "ids without weights"),
    "ids with minus between": (row(b"1,34,9.5,17,3-4"), "got '3-4'"),
    "a field too few": (row(b"1,34,9.5,17"), "row: expected 5 fields, as the header, got 4"),
    "a field too many": (row(b"1,34,9.5,17,3,4"), "row: expected 5 fields, as the header, got 6"),
    "a header once more": (HEAD + HEAD, "'click': expected 0 or 1, got 'click'"),
    "a last line that is a sum": (row(b"total: 1 row"), "expected 5 fields, as the header, got 1"),
    "a zero byte in a field": (row(b"1,3\x004,9.5,17,3 4"), r"got '3\x004'"),
    "a quote without an end": (row(b'1,34,9.5,17,"3 4'), ":2: expected a quote that ends, got"),
    "no header": (
        b"1,34,9.5,17,3 4\n0,1,2,3,4\n",
        "expected one column 'click', got none. There are '1', '34'",
    ),
    "a header with other case": (
        ONE.replace(b"click", b"Click"),
        "'click', got none. Did you mean 'Click'?",
    ),
    "a column twice": (ONE.replace(b"age,price", b"age,age"), "one column 'age', got several"),
    "only a header": (HEAD, "expected data rows, got only a header"),
    "nothing": (b"", "got an empty file"),
    "only ends of line": (b"\n\r\n\n", "got nothing but empty lines"),
    "only a mark of UTF-8": (codecs.BOM_UTF8, "got an empty file"),
    "blanks between fields": (ONE.replace(b",", b" "), "got 'click age price user viewed'"),
    "carriage returns": (ONE.replace(b"\n", b"\r"), "lines that end in a carriage return alone"),
    "one line without an end": (b"a," * (1 << 20), "a line of 1048576 bytes or more"),
    "UTF-16": (ONE.decode().encode("utf-16"), "text in UTF-16. Write it in UTF-8"),
    "UTF-16 without a mark": (ONE.decode().encode("utf-16-le"), "a binary file"),
    "bytes without a meaning": (bytes(range(256)), "a binary file"),
    "a ZIP archive": (zipped("log.csv", ONE), "got a ZIP archive. Unpack it."),
    "a workbook": (zipped("xl/workbook.xml"), "got a ZIP archive. Unpack it."),
    "other arrays": (
        zipped("train.npy", npy(np.zeros(3))),
        "arrays y, X_int, X_cat, got train.npy",
    ),
    "one array": (npy(np.zeros((3, 13))), "got one array of NumPy. Name the folder"),
    "arrays of other lengths": (
        npz(y=np.ones(2), X_int=np.ones((3, 13)), X_cat=np.ones((2, 26))),
        "sparse [rows, F], got [2], [3, 13], [2, 26]",
    ),
    "arrays of pickles": (
        npz(y=np.array([None]), X_int=np.ones((1, 2)), X_cat=np.ones((1, 2))),
        "an array of numbers, by rows, got one of object",
    ),
    "arrays by columns": (
        npz(y=np.ones(3), X_int=np.asfortranarray(np.ones((3, 2))), X_cat=np.ones((3, 2))),
        "got one in Fortran's order",
    ),
    "arrays without such columns": (
        npz(y=np.ones(3), X_int=np.ones((3, 2)), X_cat=np.ones((3, 2))),
        "expected one column 'click', got none. There are 'label', 'I1', 'I2', 'C1', 'C2'",
    ),
    "a tar archive": (tarred(), "got a tar archive. Unpack it: tar xf."),
    "a packed tar archive": (gzip.compress(tarred()), "got a tar archive, packed with gzip."),
    "packed Parquet": (gzip.compress(SAME["Parquet"]), "got Parquet, packed with gzip. Unpack it."),
    "packed twice": (gzip.compress(gzip.compress(ONE)), "packed with gzip, packed with gzip."),
    "packed nothing": (gzip.compress(b""), "got nothing, packed with gzip"),
    "gzip that ends early": (gzip.compress(PLAIN * 99, 0)[:4000], "a readable file, got an early"),
    "gzip that is broken": (gzip.compress(ONE)[:12] + b"\xff" * 40, "expected a readable file"),
    "zstd that is broken": (packed(ONE, "zstd")[:8] + b"\xff" * 40, "expected a readable file"),
    "Parquet that ends early": (SAME["Parquet"][:-20], "expected a readable file"),
    "Parquet without rows": (parquet(table().slice(0, 0)), "got Parquet without one"),
    "Parquet without a column": (
        parquet(table().drop_columns(["user"])),
        "expected one column 'user', got none. There are 'other', 'click'",
    ),
    "Parquet of large ids with a point": (
        parquet(table(viewed=[12345678901.0] * ROWS)),
        [[[20.0, -2.0]], [1.0], [[[0], [0, 1]], [[901], [0, 1]]]],
    ),
    "Parquet of NaN": (parquet(table(age=[np.nan] * ROWS)), '(data.missing = ["nan"] takes it'),
    "Parquet of null in bags": (parquet(table(user=[[1, None]] * ROWS)), "got 'null'"),
    "Parquet of structures": (
        parquet(table(age=[{"years": 3}] * ROWS)),
        "column 'age': expected numbers, text or lists of them, got struct<years",
    ),
    "Parquet of bags of bags": (
        parquet(table(user=[[[1]]] * ROWS)),
        "column 'user': expected numbers, text or lists of them, got list<element: list",
    ),
    "a page of HTML": (b"<!DOCTYPE html><p>404, not found", "got a page of HTML. Check data.path."),
    "lines of JSON": (b'{"click": 1, "age": 34}\n', "got JSON. Write it as Parquet or CSV."),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\noid x,y\n", "of Git LFS"),
    "a pickle": (b"\x80\x04\x95" + bytes(20), "got a Python pickle"),
    "a database": (b"SQLite format 3\0" + struct.pack(">H", 4096), "got a SQLite database"),
}


@pytest.mark.parametrize("case", DIRTY)
def test_a_dirty_file_is_read_rightly_or_refused_by_what_it_is(case: str, tmp_path: Path) -> None:
    raw, wanted = DIRTY[case]
    path = written(tmp_path, raw)
    if isinstance(wanted, list):
        assert values(next(ClickReader(columns(path), 1))) == wanted
        return
    with pytest.raises(InputError) as caught:
        list(islice(ClickReader(columns(path), ROWS), 99))
    said = str(caught.value)
    assert wanted in said
    assert said.startswith(str(path))
    assert "\n" not in said


@pytest.mark.parametrize("magic", [magic for magic, *_ in OTHERS])
def test_every_known_kind_of_file_is_named_packed_or_not(magic: bytes, tmp_path: Path) -> None:
    name = next(name for other, name, _ in OTHERS if magic.startswith(other))
    for raw in (magic + b" rest,\n", gzip.compress(magic + b" rest,\n")):
        with pytest.raises(InputError, match=re.escape(f"got {name}")):
            columns(written(tmp_path, raw))


def test_what_unpacks_text_is_told_by_bytes_and_not_by_a_name(tmp_path: Path) -> None:
    assert len({packing.magic for packing in PACKINGS}) == len(PACKINGS)
    assert columns(written(tmp_path, PLAIN, "log.gz")).count() == ROWS
    assert columns(written(tmp_path, SAME["Parquet"], "log.csv")).count() == ROWS


def test_words_for_nothing_are_taken_for_that_where_they_are_named(tmp_path: Path) -> None:
    path = written(tmp_path, row(b"1,NULL,nan,NULL,3 nan 4"))
    found = next(ClickReader(columns(path, missing=["NULL", "nan"]), 1))
    assert values(found) == [[[0.0, 0.0]], [1.0], [[[], [0, 0]], [[3, 4], [0, 2]]]]


def test_a_header_that_is_taken_for_a_row_of_criteo_s_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, "click\tage\tgröße\n1\t34\t17\n".encode())
    with pytest.raises(InputError) as caught:
        CriteoLog(path, TABLES)
    wanted = "expected a row of a Criteo log, got a header that names 'click', 'age', 'gr\\xc3"
    assert wanted in str(caught.value)
    assert 'A log of your own has data.kind = "columns".' in str(caught.value)
