"""Lookups begin with the forward of the whole model, so that rows travel while what comes before
them computes; their ids may have travelled while the batch before was computed."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from shardwright.core.errors import InputError
from shardwright.runtime.embeddings.modules import LookupModule
from shardwright.runtime.embeddings.tables import ShardedTables
from shardwright.runtime.torch_private import outside_graphs
from shardwright.trace.tables import GivenArguments, Reached, value_at
from shardwright.tracker.private import in_backward


class Ahead:
    """The lookups of a model that begin with its forward.

    They are those of modules of tables that get what the model was given: the first forward tells,
    and all ranks have to have seen the same. It holds no module.
    """

    def __init__(self, model: nn.Module) -> None:
        self.given: dict[str, GivenArguments] = {}
        self._first: Reached | None = Reached(model, dict(_lookup_modules(model)))
        self._around: Any = model.register_forward_hook(self._learn)
        model.register_forward_pre_hook(self._begin, with_kwargs=True)

    @outside_graphs
    def _begin(self, model: nn.Module, arguments: Any, keywords: Any) -> None:
        if not in_backward():
            for part, given in self._found(model, (arguments, keywords)):
                part.rows_of().start(given)

    def ask(self, model: nn.Module, arguments: Any, keywords: Any) -> None:
        """Let the ids of a forward to come travel."""
        for part, given in self._found(model, (arguments, keywords)):
            part.rows_of().ask(given)

    def _found(self, model: nn.Module, call: tuple[Any, Any]) -> Iterator[tuple[LookupModule, Any]]:
        """What every module of tables is going to be given in a ``call`` of the model."""
        for path, given in self.given.items():
            try:
                values = [value_at(call, place) for place in given.arguments]
                named = {key: value_at(call, place) for key, place in given.keywords}
            except KeyError:  # the model is called in another way, on all ranks
                continue
            part: Any = model.get_submodule(path) if path else model
            yield part, part.prepared(*values, **named)

    @outside_graphs
    def _learn(self, model: nn.Module, *_: Any) -> None:
        """The first forward is over (collective)."""
        first, self._first = self._first, None
        if first is None:
            return
        # Once: what a model hands to its tables is looked for in its first forward only.
        self._around.remove()
        first.remove()
        parts: dict[str, Any] = dict(_lookup_modules(model))
        found = {p: given for p, given in first.found.items() if parts[p].rows_of().travels}
        tables = next((part.rows_of() for part in parts.values()), None)
        if tables is None or tables.comm.size == 1:
            return
        # Not hash(), which is another number in every process.
        number = zlib.crc32(repr(sorted(found.items())).encode())
        seen = torch.tensor([number], device=tables.device)
        # A rank that begins other lookups with its forward would be in other exchanges than the
        # rest.
        if not tables.comm.differs("what begins with a forward", seen, everywhere=True):
            self.given = found


_of: WeakKeyDictionary[nn.Module, Ahead] = WeakKeyDictionary()


def look_ahead(model: nn.Module) -> None:
    """Let the lookups of ``model`` begin with its forward, and gradients of rows travel while a
    backward goes on."""
    for part in model.modules():
        if isinstance(part, ShardedTables):
            part.overlap = True
    _of[model] = Ahead(model)


def start_sparse_data_dist(model: nn.Module, *arguments: Any, **keywords: Any) -> None:
    """Let the ids of the next batch travel while this one is computed (collective)::

        sw.start_sparse_data_dist(model, *following)  # what the next forward is going to be given
        loss_of(model(*batch)).backward()

    ``model`` is what ``apply`` or ``shard_embeddings`` returned with ``overlap``. Call it on every
    rank or on none, with the very objects that the forward gets; without a next batch, not at all.
    Ids that are no rows are named by that forward. The first forward tells where ids are among its
    arguments, so nothing travels before it.
    """
    ahead = _of.get(model)
    if ahead is None:
        wanted = "one that overlaps its exchanges"
        remedy = "Pass overlap=True to shard_embeddings, or plan with train.overlap."
        raise InputError("model", wanted, type(model).__name__, remedy)
    ahead.ask(model, arguments, keywords)


def _lookup_modules(model: nn.Module) -> Iterator[tuple[str, LookupModule]]:
    """The modules that a model calls to look rows up, by path."""
    inside: set[nn.Module] = set()
    for path, part in model.named_modules():
        if isinstance(part, LookupModule) and part not in inside:
            inside.update(part.modules())
            yield path, part
