"""One lookup, from ids on their way to the owners of rows until these are updated; and which are
refused."""

# A lookup waits in several places: in the list of those that were asked for ahead, in autograd's
# graph until its backward, in what a guard defers. Plans count what it holds in each, so every step
# lets go of what the next ones do not need: of ids once they are sent, of what was given once rows
# are here, of the way that gradients go once they are sent.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from shardwright.core.errors import UnsupportedError
from shardwright.runtime.embeddings import exchange
from shardwright.runtime.embeddings.bags import OwnPooling, versions_of
from shardwright.runtime.embeddings.exchange import Counts, SentIds, Travelling
from shardwright.runtime.embeddings.routing import RowRequest
from shardwright.runtime.embeddings.sums import Learnt
from shardwright.runtime.embeddings.update import Looked
from shardwright.runtime.guard import Guard


@dataclass(slots=True, eq=False, weakref_slot=True)
class TableLookup:
    """What was ``given`` (``whole``: as one tensor of ids), and what it has come to so far."""

    # asked for
    given: Any
    whole: bool
    rows: torch.Tensor  # what other ranks ask for, as it came
    adds: bool  # whether units had gradients then, of a backward that no step came after
    versions: tuple[int, ...] = ()
    results: Sequence[int] = ()  # rows of each feature
    pools: Mapping[int, OwnPooling] = field(default_factory=dict)
    shares: Sequence[torch.Tensor | None] = ()  # of each feature's pooled rows
    asked: list[RowRequest] = field(default_factory=list)  # per group, without its rows
    replicas: list[RowRequest] = field(default_factory=list)  # per group of replicas
    sent: SentIds | None = None
    # started: rows are looked up, and travel
    started: bool = False
    counts: Counts = field(default_factory=list)  # sent to each rank
    served: Counts = field(default_factory=list)  # received from each rank
    found: Sequence[torch.Tensor] = ()  # rows of replicas
    travelling: Travelling | None = None  # rows on their way here, then gradients to their owners
    # in its backward
    into: Counts = field(default_factory=list)  # of gradients that come, [rank][section]
    rides: bool = False  # the dense gradient of replicas travels with them
    guard: Guard | None = None  # that has seen this rank's own, where none is over the step
    learnt: Learnt | None = None  # of replicas
    gradients: Sequence[torch.Tensor] = ()  # by group, flat, once they are here

    def is_for(self, given: Any) -> bool:
        """Whether it is of these ids, unchanged since."""
        # By object and version: comparing the ids themselves would read all of them and wait for
        # the device.
        return self.given is given and self.versions == versions_of(given)

    def under_way(self) -> Iterator[torch.Tensor]:
        """What it holds before its rows are looked up."""
        yield from _tensors_in((self.shares, self.asked, self.replicas, self.sent))

    def arrived(self) -> Mapping[int, OwnPooling]:
        """Rows are here: nothing else is needed of what was given than how some are pooled, which
        this gives."""
        pools, self.pools, self.given, self.versions = self.pools, {}, None, ()
        return pools

    def returned(self) -> None:
        """Gradients are sent: the way that they went is not needed any more."""
        self.shares, self.asked, self.replicas = (), [], []

    def parted(self, groups: int) -> list[Looked]:
        """What was looked up of each group; it is not kept as it came."""
        rows, self.rows = self.rows, self.rows.new_empty(0)
        return exchange.unpack(rows, self.served, groups)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors_in(part)
    elif isinstance(value, RowRequest):
        for each in fields(value):
            yield from _tensors_in(getattr(value, each.name))
    elif isinstance(value, SentIds):
        yield from _tensors_in(list(vars(value).values()))
    elif isinstance(value, Travelling):
        yield from value.under_way


class LookUp(torch.autograd.Function):
    """Joins the route to autograd; table weights themselves never carry a gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, lookup: TableLookup, tables: Any) -> Any:
        out = tables.arrive(lookup)
        tables.open.add(lookup)  # until its graph is gone, or its backward
        # Not by save_for_backward, which is for tensors: the backward needs where rows went, not
        # what they were.
        ctx.lookup, ctx.tables, ctx.whole = lookup, tables, lookup.whole
        if not lookup.whole and isinstance(out, torch.Tensor):
            # tensors of their own for autograd, which may be changed in place
            out = torch.unsafe_split_with_sizes(out.flatten(0, 1), [out.shape[1]] * len(out))
        return out if lookup.whole else tuple(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # A graph may outlive its backward. The lookup goes now, and with it memory that plans count
        # as free, and a second backward of the graph is told from the first.
        lookup, ctx.lookup = ctx.lookup, None
        if lookup is None:
            wanted = "one per lookup, for rows are updated in it"
            raise UnsupportedError("backward of tables", wanted, "a second one", "Look up again.")
        ctx.tables.retrace(gradients[0] if ctx.whole else gradients, lookup)
        return None, None, None


def refuse_many_lookups(optimizer: str, others: int) -> None:
    """What is not linear is exact on a step's whole gradient only: without a guard there is one
    lookup to a backward."""
    if others and optimizer:
        raise UnsupportedError(
            f"lookups before a backward of {optimizer} tables",
            "one",
            f"{others + 1}",
            "Look up once per backward, under no_grad otherwise, train with sgd, or hand a "
            "guard to apply.",
        )


def refuse_accumulation(path: str) -> None:
    """Rows have no gradient that a later backward could add to: without a guard there is one
    backward to an optimizer's step."""
    where = f"gradients of tables in '{path}'"
    wanted = "one backward before the optimizer's step, for it updates their rows"
    remedy = "Hand a sw.Guard to apply and settle it once, before the optimizer's step."
    raise UnsupportedError(where, wanted, "gradients that are accumulated over several", remedy)


def refuse_scaling(path: str, kind: str) -> None:
    """Gradients of float16 are scaled by a factor that rows would be updated with."""
    if torch.is_grad_enabled() and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        if dtype == torch.float16:
            wanted = "bfloat16, whose gradients need no GradScaler"
            remedy = "Keep these embeddings dense, or use bfloat16."
            raise UnsupportedError(f"tables in '{path}' under autocast", wanted, "float16", remedy)
