"""Which tables are of another kind where a job lets its plan choose and they do not fit full.

Kinds come in the order in which a job would have them. As few tables as possible, those that are
largest, are of a later kind than the first with which anything fits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec
from msgspec import UNSET

from shardwright.core.kinds import settled
from shardwright.core.model import KindName, TableSpec
from shardwright.job.job import Job
from shardwright.job.tables import embeddings_of, free_tables
from shardwright.planner.strategy.found import Found

Look = Callable[[Job], Found]


def find_kinds(job: Job, look: Look) -> Found:
    """What ``look`` finds for the job with the kinds of its tables chosen.

    Whether fewer tables of a later kind fit is found by halving: more of them take less memory.
    """
    kinds = job.planner.kinds
    free = free_tables(job.tables, embeddings_of(job.embeddings), kinds)
    if kinds is UNSET or not free:
        return look(job)
    order = sorted(free, key=lambda table: (-table.nbytes, table.name))
    found = look(_chosen(job, order, 0, kinds[0], kinds[0]))
    for before, kind in itertools.pairwise(kinds):
        if found.draft is not None:
            break
        least, most = 0, len(order)  # too few, and enough as far as is known
        found = look(_chosen(job, order, most, before, kind))
        while found.draft is not None and most - least > 1:
            middle = (least + most) // 2
            fewer = look(_chosen(job, order, middle, before, kind))
            if fewer.draft is None:
                least = middle
            else:
                most, found = middle, fewer
    return found


def _chosen(job: Job, order: list[TableSpec], count: int, before: KindName, kind: KindName) -> Job:
    """The job with the first ``count`` tables of a ``kind``, and the others of the one before."""
    of = {table.name: kind if k < count else before for k, table in enumerate(order)}
    tables = [
        msgspec.structs.replace(t, kind=of[t.name]) if t.name in of else t for t in job.tables
    ]
    return msgspec.structs.replace(job, tables=settled(tables, embeddings_of(job.embeddings)))
