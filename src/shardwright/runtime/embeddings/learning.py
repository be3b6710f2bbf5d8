"""Whether rows of tables are updated. Tables have no parameter that could be frozen: they are told,
and where all that trains beside them is frozen without a word of them, a backward asks."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import nn

from shardwright.core.errors import UnsupportedError
from shardwright.runtime.embeddings.bags import TableFeature
from shardwright.runtime.embeddings.modules import LookupModule
from shardwright.runtime.embeddings.route import Table
from shardwright.runtime.embeddings.routing import Rows
from shardwright.runtime.embeddings.store import Store
from shardwright.runtime.sharded_module import mix_in


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
