"""How long kinds of embeddings take to make rows, side by side in this process."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from shardwright.core.kinds import flops, nbytes, parameters
from shardwright.core.model import TableSpec
from shardwright.data.synthetic import ClickModel
from shardwright.models.embeddings import Embeddings
from study.found import Lookup

ROUNDS, LEAST = 30, 3  # calls of a kind: at most, and at least
ENOUGH = 10.0  # seconds of calls, after which a kind is measured no more
WARM = 2  # rounds that do not count


class _Sample(torch.nn.Module):
    """One id of every table: tables of a dim in one module."""

    def __init__(self, tables: Sequence[TableSpec]) -> None:
        super().__init__()
        by_dim: dict[int, list[int]] = {}
        for place, table in enumerate(tables):
            by_dim.setdefault(table.dim, []).append(place)
        self.places = [torch.tensor(places) for places in by_dim.values()]
        self.parts = torch.nn.ModuleList(
            Embeddings([tables[place] for place in places]) for places in by_dim.values()
        )

    def forward(self, ids: torch.Tensor) -> list[torch.Tensor]:
        """Ids [B, F] -> rows [B, f, D] for each dim."""
        return [
            part(ids.index_select(1, own) if len(self.parts) > 1 else ids)
            for part, own in zip(self.parts, self.places, strict=True)
        ]


def measure_lookups(
    kinds: Mapping[str, Sequence[TableSpec]], batch: int, zipf: float
) -> dict[str, Lookup]:
    """What a lookup takes of each kind's settled tables, for batches of ids with popularity
    ``zipf``.

    Kinds take turns, so that whatever else the machine does meets all of them; every round has a
    batch of its own. Seconds are CPU time of one thread.
    """
    if not kinds:
        return {}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    with _one_thread(), torch.no_grad():
        modules = {name: _Sample(tables) for name, tables in kinds.items()}
        for number, ids in zip(range(ROUNDS + WARM), _ids(kinds, batch, zipf), strict=False):
            for name, module in modules.items():
                taken = seconds[name]
                if len(taken) >= LEAST and sum(taken) > ENOUGH:
                    continue
                begin = time.thread_time()
                module(ids)
                took = time.thread_time() - begin
                if number >= WARM or took > 1.0:  # nothing is warmed up that takes so long
                    taken.append(took)
    return {
        name: Lookup(
            parameters=sum(map(parameters, tables)),
            nbytes=sum(map(nbytes, tables)),
            flops=sum(map(flops, tables)),
            seconds=statistics.median(seconds[name]),
            calls=len(seconds[name]),
        )
        for name, tables in kinds.items()
    }


def _ids(
    kinds: Mapping[str, Sequence[TableSpec]], batch: int, zipf: float
) -> Iterator[torch.Tensor]:
    """Batches [B, F] of ids that no two rounds share."""
    tables = next(iter(kinds.values()))
    names, lengths = [table.name for table in tables], [1.0] * len(tables)
    law = ClickModel(zipf=zipf).named(names, [table.rows for table in tables], lengths, 1)
    for number in itertools.count():
        found = law.rows(number * batch, (number + 1) * batch).batch.ids
        assert isinstance(found, dict)
        yield torch.stack([torch.from_numpy(found[name][0]) for name in names], 1)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
