"""A table before anyone has decided how it looks: the terminal and the page both draw sheets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Column:
    """``under`` names the column below which this one goes where there is little width."""

    title: str
    numeric: bool = False
    under: str = ""


@dataclass(frozen=True, slots=True)
class Sheet:
    """Rows of printable text, one cell per column; a cell may have several lines."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def stacked(self) -> Sheet:
        """The same sheet with fewer columns: each goes below the one it names in ``under``."""
        hosts = [i for i, column in enumerate(self.columns) if not column.under]
        members = {
            i: [i, *(j for j, c in enumerate(self.columns) if c.under == self.columns[i].title)]
            for i in hosts
        }
        return Sheet(
            self.title,
            tuple(
                Column("\n".join(self.columns[j].title for j in members[i]), column.numeric)
                for i, column in enumerate(self.columns)
                if i in members
            ),
            tuple(
                tuple("\n".join(row[j] for j in members[i] if row[j]) for i in hosts)
                for row in self.rows
            ),
            self.note,
        )


Cell = tuple[Column, Callable[[T], str]]


def text(title: str, cell: Callable[[T], str], under: str = "") -> Cell[T]:
    """A column of words, and what it says of a row's subject."""
    return Column(title, under=under), cell


def number(title: str, cell: Callable[[T], str], under: str = "") -> Cell[T]:
    """A column of figures, and what it says of a row's subject."""
    return Column(title, numeric=True, under=under), cell


def sheet_of(title: str, subjects: Iterable[T], cells: Iterable[Cell[T]], note: str = "") -> Sheet:
    """A sheet with a row for each subject."""
    cells = tuple(cells)
    rows = tuple(tuple(cell(each) for _, cell in cells) for each in subjects)
    return Sheet(title, tuple(column for column, _ in cells), rows, note)
