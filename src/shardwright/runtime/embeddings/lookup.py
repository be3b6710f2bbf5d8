"""One lookup, from ids on their way to the owners of rows until these are updated; and which are
refused."""

# A lookup waits in several places: in the list of those that were asked for ahead, in autograd's
# graph until its backward, in what a guard defers. Plans count what it holds in each, so every step
# lets go of what the next ones do not need: of ids once they are sent, of what was given once rows
# are here, of the way that gradients go once they are sent.

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

import torch
from torch import nn

from shardwright.core.errors import UnsupportedError
from shardwright.runtime.embeddings import exchange
from shardwright.runtime.embeddings.bags import OwnPooling, TableFeature, versions_of
from shardwright.runtime.embeddings.exchange import Counts, SentIds, Travelling
from shardwright.runtime.embeddings.modules import LookupModule
from shardwright.runtime.embeddings.route import Table
from shardwright.runtime.embeddings.routing import RowRequest, Rows
from shardwright.runtime.embeddings.store import Learnt, Store
from shardwright.runtime.embeddings.update import Looked
from shardwright.runtime.guard import Guard
from shardwright.runtime.sharded_module import mix_in


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


# Tables have no parameter that could be frozen: they are told, and where all that trains beside
# them is frozen without a word of them, a backward asks.


class Learning:
    """What was ``said`` of the rows of a module of ``tables``, None as long as nobody did, of which
    ``frozen`` ones stay as they are, and the parameters that trained in ``part``, the smallest part
    around them that has some, when they were sharded."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = frozenset(table.fqn for table in tables)
        self.said: bool | None = None
        self.frozen: set[str] = set()
        self.part = ""
        self._beside: list[weakref.ref[nn.Parameter]] = []

    @property
    def is_off(self) -> bool:
        """Whether rows stay as they are."""
        return self.said is False

    def say(self, requires_grad: bool) -> None:
        """Whether rows are updated, of all tables."""
        self.said = requires_grad
        self.frozen.clear()

    def say_of(self, fqn: str, requires_grad: bool) -> None:
        """The same of one table."""
        # "All frozen, but not this one" becomes "some frozen".
        if self.is_off:
            self.frozen |= self.tables
            self.said = True
        (self.frozen.discard if requires_grad else self.frozen.add)(fqn)
        # Nothing is left to learn, and without a backward nothing is exchanged either.
        if self.frozen == self.tables:
            self.say(False)

    def of_trained(self, gradient: Rows, features: Sequence[TableFeature]) -> Rows:
        """The gradient of rows of every feature, 0 of those in frozen tables."""
        if not self.frozen:
            return gradient
        # Zeros and not left out: counts of rows were exchanged in the forward, and every rank waits
        # for as many gradients.
        still = [place for place, f in enumerate(features) if f.table.fqn in self.frozen]
        if isinstance(gradient, torch.Tensor):
            return gradient.index_fill(0, torch.tensor(still, device=gradient.device), 0.0)
        zeros = {place: torch.zeros_like(gradient[place]) for place in still}
        return [zeros.get(place, rows) for place, rows in enumerate(gradient)]

    def hold(self, stores: Iterable[Store]) -> None:
        """Let stores keep the rows of frozen tables, which some optimizers move without a
        gradient."""
        for store in stores:
            # Their gradient is 0, but moments and weight decay move rows without one.
            own = store.held if self.frozen else ()
            still = [held for held in own if held.block.tensor in self.frozen]
            store.still = [(held.base, held.base + held.rows) for held in still]

    def check(self, path: str) -> None:
        """UnsupportedError where all that trained around the tables at ``path`` is frozen now, and
        nobody has said whether they are, too."""
        if self.said is not None:
            return
        left = False  # whether any was not replaced since
        for reference in self._beside:
            parameter = reference()
            # Something beside the tables trains, so nobody meant to freeze everything.
            if parameter is not None and parameter.requires_grad:
                return
            left = left or parameter is not None
        if not left:
            return
        where = f"'{self.part}'" if self.part else "the model"
        call = f"model.get_submodule('{path}').requires_grad_"
        wanted = "a word on whether their rows learn"
        found = f"none, while all parameters of {where} are frozen, which rows are none of"
        remedy = f"Call {call}(False), or (True), on every rank."
        raise UnsupportedError(f"tables '{path}'", wanted, found, remedy)

    def note(self, part: str, parameters: list[nn.Parameter]) -> None:
        """Those of ``part`` train, and may be frozen later."""
        # Weakly: they are only asked whether they still train, and must not outlive their model.
        self.part, self._beside = part, [weakref.ref(parameter) for parameter in parameters]


class AroundTables:
    """Mixed into the class of every module that has tables below."""

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Whether parameters train, and from the next forward on rows of tables."""
        super().requires_grad_(requires_grad)  # type: ignore[misc]
        for _, learning in _tables(self):
            learning.say(requires_grad)
        return self

    def __copy__(self) -> Self:
        # Not by __reduce_ex__, which is this class's own.
        made: Self = object.__new__(type(self))
        vars(made).update(vars(self))
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """As tables say that are still below."""
        for path, _ in _tables(self):
            self.get_submodule(path).__deepcopy__(memo)  # type: ignore[attr-defined]
        made = memo[id(self)] = self.__copy__()
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As tables say that are still below: the class is one of this process."""
        for path, _ in _tables(self):
            self.get_submodule(path).__reduce_ex__(protocol)  # type: ignore[attr-defined]
        return super().__reduce_ex__(protocol)


def _tables(model: Any) -> Iterator[tuple[str, Learning]]:
    for path, module in model.named_modules():
        learning = getattr(module, "learning", None)
        if isinstance(learning, Learning):
            yield path, learning


def _parts(path: str) -> Iterator[str]:
    """What a module is in, from the inside out."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def reach_tables(model: nn.Module) -> None:
    """Let ``requires_grad_`` of ``model`` and of its parts reach the tables below."""
    for part in {part for path, _ in _tables(model) for part in _parts(path)}:
        module = model.get_submodule(part)
        # A stand-in has a requires_grad_ that reaches its rows.
        if not isinstance(module, LookupModule):
            kind = type(module)
            names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
            # Under the class's own name, for people and tools print it.
            mix_in(module, AroundTables, kind.__name__, **names)


def note_trained(model: nn.Module) -> None:
    """Let every module of tables of ``model`` know what trains around it."""
    for path, learning in _tables(model):
        for part in _parts(path):
            trained = [p for p in model.get_submodule(part).parameters() if p.requires_grad]
            if trained:
                learning.note(part, trained)
                break
