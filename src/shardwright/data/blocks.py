"""Rows of Parquet and of NumPy's arrays, in blocks of columns.

Arrays are those of Criteo's logs: facebookresearch/dlrm's npz (``X_int``, ``X_cat``, ``y``), or a
folder with TorchRec's ``NAME_dense.npy``, ``NAME_sparse.npy`` and ``NAME_labels.npy``. Their
columns are label, I1, I2, ... and C1, C2, ...
"""

# A block becomes text only where a row of it is asked for: a rank steps over those of others.

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from shardwright.core.errors import InputError, expected, listed
from shardwright.data.lines import BROKEN, CHECK, Row, RowFile, arrow_of, broken

LABEL = "label"  # the column that an array of labels is
ARRAYS = ("y", "X_int", "X_cat")  # of dlrm: labels, dense, sparse

_BLOCK = 1024  # rows that become text together
_EXACT = 2**53  # up to which a float64 tells whole numbers apart
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
_WANTED = "labels [rows], dense [rows, D] and sparse [rows, F]"


class Cells(Sequence[bytes]):
    """A row of a block, whose fields are made when they are asked for."""

    __slots__ = ("_at", "_block")

    def __init__(self, block: _Block, at: int) -> None:
        self._block, self._at = block, at

    def __len__(self) -> int:
        return len(self._block.columns)

    def __getitem__(self, place: Any) -> Any:
        return [column[self._at] for column in self._block.columns][place]

    def __iter__(self) -> Iterator[bytes]:
        at = self._at
        return iter([column[at] for column in self._block.columns])


class _Block:
    """Neighbouring rows, column by column."""

    def __init__(self, make: Callable[[], list[list[bytes]]]) -> None:
        self._make = make

    @cached_property
    def columns(self) -> list[list[bytes]]:
        """Fields as text."""
        return self._make()


class Parquet(RowFile):
    """Columns of Parquet, in a file or in several, one after another: numbers, text, and lists of
    them. A folder of ``path`` that is called ``day=1`` is one more column of its files."""

    def __init__(self, path: Path, files: Sequence[Path]) -> None:
        super().__init__(path)
        self._arrow, self._files, self._rows = arrow_of(path, "Parquet"), files, 0
        for each in files:
            with self._open(each) as file:
                names = (*file.schema_arrow.names, *self._of_folders(each))
                self._rows += file.metadata.num_rows
            self.names = self.names or names
            if names != self.names:
                wanted, found = f"columns as in {files[0].relative_to(path)}", listed(names, 5)
                raise InputError(expected(str(each), wanted, found))
        if not self._rows:
            raise InputError(expected(str(path), "data rows", "Parquet without one", CHECK))

    def _open(self, file: Path) -> Any:
        try:
            return self._arrow.parquet.ParquetFile(file)
        except (OSError, ValueError) as error:
            raise broken(file, error) from error

    def _of_folders(self, file: Path) -> dict[str, bytes]:
        """What the names of a file's folders say, as Hive and Spark write them."""
        inside = file.relative_to(self.path).parts  # none where it is the path itself
        pairs = (unquote(name).split("=", 1) for name in inside[:-1])
        return {key: b"" if value == _NO_VALUE else value.encode() for key, value in pairs}

    def unreadable(self) -> dict[str, str]:
        """Columns of types that no text is made of, by their names."""
        found = {}
        with self._open(self._files[0]) as file:
            for each in file.schema_arrow:
                try:
                    self._text(self._arrow.array([], each.type), each.name, False)
                except InputError:
                    found[each.name] = str(each.type)
        return found

    def count(self) -> int | None:
        """Footers say so."""
        return self._rows

    def rows(self, names: Sequence[str], hexadecimal: Sequence[str] = ()) -> Iterator[Row]:
        """Fields of these columns."""
        for path in self._files:
            number, known = 0, self._of_folders(path)
            wanted = [name for name in dict.fromkeys(names) if name not in known]
            with self._open(path) as file:
                try:
                    for batch in file.iter_batches(_BLOCK, columns=wanted, use_threads=False):
                        block = _Block(partial(self._texts, batch, known, names, hexadecimal))
                        for at in range(len(batch)):
                            number += 1
                            yield path, number, Cells(block, at)
                except (OSError, self._arrow.ArrowException) as error:
                    raise broken(path, error) from error

    def _texts(
        self, batch: Any, known: dict[str, bytes], names: Sequence[str], hexadecimal: Sequence[str]
    ) -> list[list[bytes]]:
        return [
            [known[name]] * len(batch)
            if name in known
            else self._text(batch.column(name), name, name in hexadecimal)
            for name in names
        ]

    def _text(self, column: Any, name: str, in_hex: bool) -> list[bytes]:
        arrow, kind = self._arrow, column.type
        types = arrow.types
        if self._is_list(kind):
            return self._bags(column, name)
        if types.is_dictionary(kind):
            return self._text(column.dictionary_decode(), name, in_hex)
        if types.is_boolean(kind):
            column = column.cast(arrow.int8())
        if in_hex and types.is_integer(kind):
            if kind == arrow.int32():  # hashes of 32 bits
                column = column.view(arrow.uint32())
            return [b"" if value is None else b"%x" % value for value in column.to_pylist()]
        if types.is_floating(kind):
            return [b"" if value is None else _number(value) for value in column.to_pylist()]
        if types.is_fixed_size_binary(kind):
            return [b"" if value is None else value.hex().encode() for value in column.to_pylist()]
        if isinstance(kind, arrow.BaseExtensionType):  # UUIDs, say
            return [b"" if value is None else str(value).encode() for value in column.to_pylist()]
        if not types.is_binary(kind):
            try:
                column = column.cast(arrow.string()).cast(arrow.binary())
            except (arrow.ArrowNotImplementedError, arrow.ArrowInvalid):
                raise self._unreadable(name, kind) from None
        return [value or b"" for value in column.to_pylist()]

    def _is_list(self, kind: Any) -> bool:
        types = self._arrow.types
        known = (types.is_list, types.is_large_list, types.is_fixed_size_list)
        return any(is_one(kind) for is_one in known)

    def _unreadable(self, name: str, kind: Any) -> InputError:
        wanted = "numbers, text or lists of them"
        return InputError(expected(f"{self.path}, column '{name}'", wanted, str(kind)))

    def _bags(self, column: Any, name: str) -> list[bytes]:
        """Lists as text has bags: words with blanks between."""
        if self._is_list(column.type.value_type):
            raise self._unreadable(name, column.type)
        counts = self._arrow.compute.list_value_length(column).fill_null(0).to_pylist()
        # Nothing in a list is no id: a word says so, for between blanks nothing would be seen.
        words = iter([word or b"null" for word in self._text(column.flatten(), name, False)])
        return [b" ".join(next(words) for _ in range(count)) for count in counts]


def _number(value: float) -> bytes:
    """A number as text; ids may be whole ones, which no exponent must hide."""
    exact = value.is_integer() and abs(value) < _EXACT
    return b"%d" % value if exact else repr(value).encode()


class Arrays(RowFile):
    """Arrays of labels [rows], dense [rows, D] and sparse [rows, F] features, in files or in an
    archive, by the names that they have in it."""

    def __init__(self, path: Path, files: dict[str, Path]) -> None:
        super().__init__(path)
        self._files = files
        with self._open() as arrays:
            self._check([array.shape for array in arrays.each])
            self._count = arrays.each[0].shape[0]
            _, dense, sparse = arrays.each
            # TorchRec stores logarithms, dlrm counts.
            self.logarithms = len(set(files.values())) > 1 and dense.dtype.kind == "f"
        self.names = (
            LABEL,
            *(f"I{i}" for i in range(1, dense.shape[1] + 1)),
            *(f"C{i}" for i in range(1, sparse.shape[1] + 1)),
        )

    def _check(self, shapes: Sequence[tuple[int, ...]]) -> None:
        labels, dense, sparse = shapes
        rows = {shape[:1] for shape in shapes}
        flat = labels in ((labels[:1]), (*labels[:1], 1))
        if len(rows) != 1 or not flat or len(dense) != 2 or len(sparse) != 2 or () in rows:
            found = ", ".join(str(list(shape)) for shape in shapes)
            raise InputError(expected(str(self.path), _WANTED, found))
        if not labels[0]:
            raise InputError(expected(str(self.path), "data rows", "arrays without one", CHECK))

    def _open(self) -> _OpenArrays:
        return _OpenArrays(self.path, self._files)

    def count(self) -> int | None:
        """Their first dimension."""
        return self._count

    def rows(self, names: Sequence[str], hexadecimal: Sequence[str] = ()) -> Iterator[Row]:
        """Fields of these columns."""
        places = [self.names.index(name) for name in names]
        in_hex = [name in hexadecimal for name in names]
        with self._open() as arrays:
            for start in range(0, self._count, _BLOCK):
                count = min(_BLOCK, self._count - start)
                values = [array.read(count) for array in arrays.each]
                block = _Block(partial(_columns, values, places, in_hex))
                yield from ((self.path, start + at + 1, Cells(block, at)) for at in range(count))


def _columns(
    values: Sequence[NDArray[Any]], places: Sequence[int], in_hex: Sequence[bool]
) -> list[list[bytes]]:
    every = list(chain.from_iterable(array.reshape(len(array), -1).T for array in values))
    found = []
    for place, as_hex in zip(places, in_hex, strict=True):
        numbers: list[Any] = every[place].tolist()
        whole = every[place].dtype.kind in "iu"
        form = "%x" if as_hex and whole else "%d" if whole else "%r"
        found.append([(form % number).encode() for number in numbers])
    return found


class _OpenArrays:
    """Arrays that are read from their beginning, a few rows at a time."""

    def __init__(self, path: Path, files: dict[str, Path]) -> None:
        self._open, archive = ExitStack(), None
        try:
            if len(set(files.values())) == 1:
                archive = self._open.enter_context(zipfile.ZipFile(path))
            self.each = []
            for name, file in files.items():
                stream = archive.open(f"{name}.npy") if archive else file.open("rb")
                self._open.enter_context(stream)
                where = str(file) if archive is None else f"{path}, {name}"
                self.each.append(_Array(where, stream, signed=name == ARRAYS[-1]))
        except BaseException as error:
            self._open.close()
            if isinstance(error, OSError | zipfile.BadZipFile):
                raise broken(Path(getattr(error, "filename", None) or path), error) from error
            raise

    def __enter__(self) -> _OpenArrays:
        return self

    def __exit__(self, *ended: object) -> None:
        self._open.close()


class _Array:
    """An array whose rows are read one after another."""

    def __init__(self, where: str, stream: Any, signed: bool) -> None:
        self._where, self._stream = where, stream
        try:
            version = np.lib.format.read_magic(stream)
            read = np.lib.format.read_array_header_1_0
            if version != (1, 0):
                read = np.lib.format.read_array_header_2_0
            self.shape, by_columns, self.dtype = read(stream)
        except ValueError as error:
            raise InputError(expected(where, "an array of NumPy", f"'{error}'")) from None
        if self.dtype.kind not in "biuf" or (by_columns and len(self.shape) > 1):
            found = "one in Fortran's order" if by_columns else f"one of {self.dtype}"
            remedy = "Save it again as numpy.ascontiguousarray of numbers."
            raise InputError(expected(where, "an array of numbers, by rows", found, remedy))
        # Hashes of 32 bits, which TorchRec stores with a sign.
        self._as = np.dtype(np.uint32 if signed and self.dtype == np.int32 else self.dtype)

    def read(self, count: int) -> NDArray[Any]:
        """The next ``count`` rows."""
        shape = (count, *self.shape[1:])
        size = self.dtype.itemsize * int(np.prod(shape))
        try:
            raw = self._stream.read(size)
        except BROKEN as error:
            raise broken(Path(self._where), error) from error
        if len(raw) != size:
            raise broken(Path(self._where), EOFError())
        found = np.frombuffer(raw, self.dtype).reshape(shape)
        if self.dtype.kind == "b":
            return found.astype(np.uint8)
        return found.view(self._as)
