"""A table before anyone has decided how it looks: the terminal and the page both draw sheets."""

# Cells are text before anybody knows where they are drawn, so a figure reads the same in a
# terminal, in a notebook and on the page, and tests of a sheet need neither. What is left out where
# there is no room (`spare`) is decided where the columns are made: whoever draws does not know what
# matters.

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Column:
    """On a first screen with little width the columns with the highest ``spare`` leave first; those
    with 0 stay."""

    title: str
    numeric: bool = False
    spare: int = 0


@dataclass(frozen=True, slots=True)
class Sheet:
    """Rows of printable text, one cell per column; a cell may have several lines."""

    title: str
    columns: tuple[Column, ...]
    # Printable and not escaped: whoever makes markup of it escapes, and would do so twice
    # otherwise.
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def only(self, kept: Sequence[int]) -> Sheet:
        """The same sheet with the columns at ``kept``."""
        columns = tuple(self.columns[k] for k in kept)
        rows = tuple(tuple(row[k] for k in kept) for row in self.rows)
        return Sheet(self.title, columns, rows, self.note)


Cell = tuple[Column, Callable[[T], str]]


def text(title: str, cell: Callable[[T], str], spare: int = 0) -> Cell[T]:
    """A column of words, and what it says of a row's subject."""
    return Column(title, spare=spare), cell


def number(title: str, cell: Callable[[T], str], spare: int = 0) -> Cell[T]:
    """A column of figures, and what it says of a row's subject."""
    return Column(title, numeric=True, spare=spare), cell


def sheet_of(title: str, subjects: Iterable[T], cells: Iterable[Cell[T]], note: str = "") -> Sheet:
    """A sheet with a row for each subject."""
    cells = tuple(cells)
    rows = tuple(tuple(cell(each) for _, cell in cells) for each in subjects)
    return Sheet(title, tuple(column for column, _ in cells), rows, note)
