"""Embeddings of a user's own module as tables, while a step of it is recorded."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from msgspec import UNSET
from torch import nn

from shardwright.core.recording import RecordedTable, Recording, Unfolded
from shardwright.lab.with_tables import COULD, NOTE
from shardwright.runtime.embeddings.module import NoTableError, RoutedEmbedding
from shardwright.trace.arguments import Reached
from shardwright.trace.tables import Embedding, RoutedRows, embeddings

LARGE = 2**20  # bytes of an embedding that a table may be worth
MOST_NAMED = 3
ALONE = "to be looked up once in every step, and trained by it"


class _Unread(dict[str, Any]):
    """The parameters of a table, none: a step that goes through all parameters would miss it."""

    def __init__(self, path: str, rows: RoutedRows) -> None:
        super().__init__()
        self.path, self.rows = path, rows

    def items(self) -> Any:
        """As of any module, but not while a step runs."""
        if self.rows.mark is not None:
            raise NoTableError(self.path, ALONE, "among parameters that a step goes through")
        return super().items()


class Routed:
    """The embeddings of ``module`` that are tables: those of ``wanted``, by path, or all that can
    be where it is None. ``notes`` say which of all cannot, and why."""

    def __init__(self, module: nn.Module, wanted: Collection[str] | None) -> None:
        self.module = module
        self.tables: dict[str, Embedding] = {}
        self.notes: list[str] = []
        self.asked: dict[str, int] = {}  # ids of a step
        self.early: tuple[str, ...] = ()  # those asked for what the module is given
        for path, part, reason in () if wanted == () else embeddings(module):
            if not reason and (wanted is None or path in wanted):
                self.tables[path] = part
            elif reason and wanted is None:
                self._note(path, reason)

    def left_dense(self) -> str:
        """Where none is a table, the large ones that could be; empty without any."""
        found = embeddings(self.module)
        left = [path for path, part, reason in found if not reason and part.weight.nbytes >= LARGE]
        if not left or self.tables:
            return ""
        more = f" and {len(left) - MOST_NAMED} more" if len(left) > MOST_NAMED else ""
        named = ", ".join(f"'{path}'" for path in left[:MOST_NAMED])
        return f"{COULD} {named}{more}: train.table_optimizer takes them out of dense units"

    def drop(self, error: NoTableError) -> None:
        """One of them is none, as its use has shown."""
        del self.tables[error.path]
        self._note(error.path, error.found)

    def _note(self, path: str, reason: str) -> None:
        self.notes.append(f"{NOTE}'{path}' is a dense unit's, not a table: it is {reason}")

    @contextmanager
    def instead(self) -> Iterator[None]:
        """They are looked up elsewhere inside."""
        instead_of: dict[str, nn.Module] = {}
        reached: Reached | None = None
        try:
            for path, part in self.tables.items():
                rows = RoutedRows(part.embedding_dim, path, self._asking(path))
                instead = RoutedEmbedding(path, part, rows)
                vars(instead)["_parameters"] = _Unread(path, rows)
                self._put(path, instead)
                instead_of[path] = instead
            reached = Reached(self.module, instead_of)
            yield
            self.early = tuple(reached.found)
        finally:
            if reached is not None:
                reached.remove()
            for path, part in self.tables.items():
                self._put(path, part)

    def _asking(self, path: str) -> Any:
        def asked(ids: int) -> None:
            if path in self.asked:
                raise NoTableError(path, ALONE, "looked up several times in a step")
            self.asked[path] = ids

        return asked

    def _put(self, path: str, part: nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        setattr(self.module.get_submodule(parent), name, part)

    def completed(self, found: Recording) -> dict[str, Any]:
        """What they add to a recording; NoTableError for one that no step of it trains."""
        step = Unfolded(found)
        for path in self.tables:
            if path not in step.lookups or path not in step.returned:
                raise NoTableError(path, ALONE, "not trained by every step")
        if not self.tables:
            return {}
        tables = (
            RecordedTable(path, part.num_embeddings, part.embedding_dim, self.asked[path])
            for path, part in self.tables.items()
        )
        return {"tables": tuple(tables), "early": self.early or UNSET}
