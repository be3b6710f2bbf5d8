"""What a model calls to look rows up, in place of embeddings of its own: an embedding, or one of
TorchRec's collections of tables.

TorchRec itself is never imported: what goes in and comes out has the methods of its types.
"""

# Users go on calling what they had, and setting and freezing it, so a stand-in refuses by name what
# would now change nothing, as its weight, which is not there. What it asks of its tables is kept
# until the forward that it was made for (``prepared``), for tables know a lookup that is under way
# by the very objects that they were given.

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import nn

from shardwright.core.errors import InputError, UnsupportedError, expected
from shardwright.runtime.embeddings.bags import (
    INTEGERS,
    Keyed,
    check_dtype,
    check_names,
    checked,
    keyed_of,
    versions_of,
)
from shardwright.runtime.embeddings.initial import blocks_of_whole
from shardwright.trace.tables import collected, is_weighted


class NoTableError(UnsupportedError, AttributeError):
    """The embedding at ``path`` is used as no table can be."""

    # An AttributeError, too: hasattr(module, "weight") is False then, as of any module without one.
    def __init__(self, path: str, wanted: str, found: str) -> None:
        remedy = f"Keep it in a unit: planner.tables = {{ '{path}' = 'dense' }}."
        super().__init__(f"embedding '{path}'", wanted, found, remedy)
        self.path, self.found = path, found


class _Prepared(NamedTuple):
    """What tables are ``given`` for the ``arguments`` of a forward."""

    arguments: tuple[Any, ...]
    versions: tuple[int, ...]
    given: Any

    def is_of(self, arguments: tuple[Any, ...]) -> bool:
        """Whether it is of these, unchanged since."""
        if len(arguments) != len(self.arguments):
            return False
        same = all(a is b for a, b in zip(self.arguments, arguments, strict=True))
        return same and self.versions == versions_of(arguments)


class LookupModule(nn.Module):
    """What a model calls to look rows up; ``asks`` says what its tables are given then."""

    def __init__(self) -> None:
        super().__init__()
        self._prepared: list[_Prepared] = []  # for forwards to come

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Whether rows are updated in their backward, from the next forward on; say the same on
        every rank."""
        self.rows_of().learning.say(requires_grad)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """UnsupportedError: nobody would average or train the copy's rows with the others."""
        where, found = f"tables '{self.rows_of().path}'", "copy.deepcopy"
        wanted = "a model of their own for other weights"
        remedy = (
            "Apply the plan to a second one, sw.apply(build(), plan, mesh); "
            "sw.average_weights keeps a moving average in it."
        )
        raise UnsupportedError(where, wanted, found, remedy)

    def __copy__(self) -> Self:
        # Not by copy's own way, which asks __reduce_ex__: that refuses.
        made = object.__new__(type(self))
        vars(made).update(vars(self))
        return made

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """InputError: they are of ranks, which no file has."""
        where, remedy = f"a pickle of tables '{self.rows_of().path}'", "Pickle full_state_dict()."
        found = "a sharded one, which needs its ranks"
        raise InputError(where, "a module that is not sharded", found, remedy)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local: Any, strict: bool, *found: list[str]
    ) -> None:
        """Besides what torch loads, rows of whole tables, by the names that their weights have in
        the unsharded model."""
        super()._load_from_state_dict(state_dict, prefix, local, strict, *found)
        _missing, unexpected, errors = found
        rows = self.rows_of()
        if not isinstance(rows, LookupModule):
            return  # a stand-in of one process
        given = {}
        for table in rows.tables:
            key = prefix + table.fqn.removeprefix(f"{rows.path}.")
            whole = state_dict.get(key)
            if not isinstance(whole, torch.Tensor) or whole.is_meta:
                continue
            # The module has no parameter of this name, so torch took it for a stray one.
            if key in unexpected:
                unexpected.remove(key)
            if whole.shape == (table.rows, table.dim):
                given[table.fqn] = whole
            else:
                shape = f"({table.rows}, {table.dim})"
                errors.append(expected(key, f"shape {shape}", f"{tuple(whole.shape)}"))
        block = blocks_of_whole(given)
        for store, held in rows.holdings():
            of = held.block
            if of.tensor in given:
                with torch.no_grad():
                    # This rank's part alone, though each rank was given the whole.
                    store.block_view(held).copy_(block(of.tensor, of.offsets, of.sizes))

    def asks(self, *arguments: Any) -> Any:
        """What the tables take, of what a forward is given."""
        (given,) = arguments
        return given

    def _asked(self, *arguments: Any) -> Any:
        """The same, or why there is nothing they can take, which they say on all ranks."""
        try:
            return self.asks(*arguments)
        # Kept and not raised: the other ranks are on their way into an exchange, in which they hear
        # of it.
        except Exception as error:
            return error

    def _looked_up(self, rows: nn.Module, given: Any) -> Any:
        """What ``rows`` gives for what it is ``given``; InputError where that is why not."""
        if isinstance(given, Exception) and not isinstance(rows, LookupModule):
            raise given  # a stand-in of one process
        return rows(given)

    def rows_of(self) -> Any:
        """The module of tables."""
        return self

    def prepared(self, *arguments: Any) -> Any:
        """The same for a forward to come, which gets no other."""
        found = next((each for each in self._prepared if each.is_of(arguments)), None)
        if found is not None:
            return found.given
        given = self._asked(*arguments)
        # What is handed on as it came is known by itself.
        if all(given is not argument for argument in arguments):
            self._prepared.append(_Prepared(arguments, versions_of(arguments), given))
        return given

    def given(self, *arguments: Any) -> Any:
        """The same for a forward, which forgets all that was prepared before it."""
        for place, each in enumerate(self._prepared):
            if each.is_of(arguments):
                # Forwards come in the order they were prepared in: one that was left out will not
                # come.
                del self._prepared[: place + 1]
                return each.given
        return self._asked(*arguments)


class StandIn(LookupModule):
    """One in place of a module of the user's own, called as that is; ``rows`` has its tables.
    UnsupportedError where something is set that would change nothing."""

    settings: tuple[str, ...] = ("learning_rate",)

    def __init__(self, like: nn.Module, rows: nn.Module) -> None:
        super().__init__()
        self.rows = rows
        self.training = like.training
        # Names that a user may set out of habit, which would be read by nobody now.
        had = {*vars(like), *like._parameters, *like._modules, *dir(type(like))} - _OF_MODULES
        self._had = frozenset(name for name in had if not name.startswith("_"))

    def __setattr__(self, name: str, value: Any) -> None:
        known = vars(self)
        if "_stands" in known and name not in self.settings:
            if name in known["_had"]:
                found, remedy = "one that the module had which stood here", "Set it before."
            elif name not in known and name in vars(self.rows):
                found, remedy = "one of its rows", f"Set it there: .rows.{name} = ..."
            else:
                return super().__setattr__(name, value)
            wanted = f"a setting of sharded tables ({', '.join(self.settings)})"
            raise UnsupportedError(f"'{self.rows.path}.{name}'", wanted, found, remedy)
        return super().__setattr__(name, value)

    @property
    def learning_rate(self) -> float:
        """Of the rows' updates; set it to follow a schedule."""
        rate: float = self.rows.learning_rate  # type: ignore[assignment]
        return rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self.rows.learning_rate = rate  # type: ignore[assignment]

    def rows_of(self) -> Any:
        return self.rows


_OF_MODULES = frozenset((*vars(nn.Module()), *dir(nn.Module)))


class RoutedEmbedding(StandIn):
    """Stands in for ``like`` at ``path``: called as it is, and gives what it gives.

    ``rows`` is a module of one table: ids [N, 1] int64 -> rows [N, 1, D]. Bags are pooled here, or
    by ``rows`` if that has a feature of the name ``bags``. Rows at ``padding_idx`` get no gradient,
    and are in no bag, as in torch. NoTableError where it is called with ``offsets`` and pools bags
    here, or where somebody reads its weight, which is not here.
    """

    settings = ("learning_rate", "padding_idx")

    def __init__(
        self, path: str, like: nn.Embedding | nn.EmbeddingBag, rows: nn.Module, bags: str = ""
    ) -> None:
        super().__init__(like, rows)
        self.path, self.bags = path, bags
        self.num_embeddings, self.embedding_dim = like.num_embeddings, like.embedding_dim
        self.padding_idx = like.padding_idx
        self.mode = like.mode if isinstance(like, nn.EmbeddingBag) else ""
        # Last, for from here on attributes are refused.
        self._stands = True

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            wanted = "to be looked up alone, for a plan routes its rows"
            raise NoTableError(self.path, wanted, "a use of its weight")
        return super().__getattr__(name)

    def forward(
        self,
        input: torch.Tensor,  # noqa: A002 - torch's name
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Ids of any shape -> rows [..., D]; of a bag ids [B, L] -> [B, D]. InputError for what are
        no integers."""
        rows = self._looked_up(self.rows, self.given(input, offsets, per_sample_weights))
        if self.bags and self.mode:
            return rows[self.bags]
        found: torch.Tensor = rows.squeeze(1)
        if self.padding_idx is not None and not self.mode and found.requires_grad:
            # The row is looked up like others, and only its gradient is taken away, as torch does.
            padding = input.reshape(-1, 1) == self.padding_idx
            found.register_hook(lambda gradient: gradient.masked_fill(padding, 0.0))
        found = found.view(*input.shape, self.embedding_dim)
        if self.mode and self.padding_idx is not None:
            counted = (input != self.padding_idx).to(found.dtype)
            if self.mode == "mean":
                counted = counted / counted.sum(1, keepdim=True).clamp(min=1)
            elif per_sample_weights is not None:
                counted = counted * per_sample_weights
            # One product for each bag: rows times weights would be another tensor as large as all
            # rows.
            return torch.bmm(counted.unsqueeze(1), found).squeeze(1)
        if per_sample_weights is not None:
            return torch.bmm(per_sample_weights.unsqueeze(1), found).squeeze(1)
        if self.mode:
            is_mean = self.mode == "mean" and input.shape[1]  # of no ids torch gives zeros
            return found.mean(1) if is_mean else found.sum(1)
        return found

    def asks(
        self,
        input: torch.Tensor,  # noqa: A002 - torch's name
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> Any:
        """Bags of one feature, or ids [N, 1]."""
        if not isinstance(input, torch.Tensor) or input.dtype not in INTEGERS:
            kind = getattr(input, "dtype", type(input).__name__)
            text = str(kind).removeprefix("torch.")
            raise InputError(f"ids of '{self.path}'", "a tensor of int64 or int32", text)
        if not (self.bags and self.mode):
            if offsets is not None or (self.mode and input.dim() != 2):
                found = "offsets, while ids [B, L] with a padding_idx can be one"
                raise NoTableError(self.path, "bags of one length", found)
            return input.reshape(-1, 1).long()
        if offsets is None:
            offsets = torch.arange(input.shape[0] + 1, device=input.device) * input.shape[1]
        else:
            offsets = torch.cat([offsets, offsets.new_tensor([input.numel()])])
        weights = () if per_sample_weights is None else (per_sample_weights.reshape(-1),)
        ids = input.reshape(-1)
        if self.padding_idx is not None:  # it is not asked for
            counted = ids != self.padding_idx
            before = torch.cat([offsets.new_zeros(1), counted.cumsum(0)])
            ids, offsets = ids[counted], before[offsets]
            weights = tuple(weight[counted] for weight in weights)
        return {self.bags: (ids, offsets, *weights)}

    def prepared(
        self,
        input: torch.Tensor,  # noqa: A002 - torch's name
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> Any:
        """As ``forward`` is called."""
        return super().prepared(input, offsets, per_sample_weights)


class Pooled:
    """Pooled rows of several features, as TorchRec's KeyedTensor has them."""

    def __init__(self, rows: Mapping[str, torch.Tensor]) -> None:
        self._rows = dict(rows)

    def keys(self) -> list[str]:
        """The features."""
        return list(self._rows)

    def values(self) -> torch.Tensor:
        """Their rows side by side [B, sum of dims]; InputError where there are not as many of
        each."""
        if len({len(rows) for rows in self._rows.values()}) > 1:
            found = ", ".join(f"{len(rows)} of '{name}'" for name, rows in self._rows.items())
            remedy = "Give the KeyedJaggedTensor inverse_indices, or take to_dict()."
            raise InputError("values", "as many bags of every feature", found, remedy)
        return torch.cat(list(self._rows.values()), 1)

    def length_per_key(self) -> list[int]:
        """Columns of each feature."""
        return [rows.shape[1] for rows in self._rows.values()]

    def to_dict(self) -> dict[str, torch.Tensor]:
        """Rows [B, dim] by feature."""
        return dict(self._rows)

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._rows[key]


class Sequence:
    """The rows of one feature's ids, as TorchRec's JaggedTensor has them."""

    def __init__(self, rows: torch.Tensor, lengths: torch.Tensor) -> None:
        self._rows, self._lengths = rows, lengths

    def values(self) -> torch.Tensor:
        """Rows [values, dim]."""
        return self._rows

    def lengths(self) -> torch.Tensor:
        """Rows of each bag [B]."""
        return self._lengths

    def offsets(self) -> torch.Tensor:
        """Where bags start and the last one ends [B + 1]."""
        return nn.functional.pad(self._lengths.cumsum(0), (1, 0))

    def weights_or_none(self) -> None:
        """Rows have no weights."""


class RoutedTable(nn.Module):
    """Where a table of a collection was: ``requires_grad_`` is of its rows alone."""

    def __init__(self, rows: Any, fqn: str) -> None:
        super().__init__()
        self._learning, self._fqn = rows.learning, fqn

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Whether its rows are updated, from the next backward on; the same on every rank."""
        self._learning.say_of(self._fqn, requires_grad)
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            wanted = "to be looked up by its collection, for a plan routes its rows"
            raise NoTableError(self._fqn.removesuffix(".weight"), wanted, "a use of its weight")
        return super().__getattr__(name)


class RoutedTables(nn.ModuleDict):
    """Where the tables of a collection were."""

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Whether rows are updated, of every table in it."""
        for table in self.values():
            table.requires_grad_(requires_grad)
        return self


class RoutedCollection(StandIn):
    """Stands in for ``like``, an EmbeddingBagCollection or an EmbeddingCollection: features as a
    KeyedJaggedTensor -> ``Pooled``, or a ``Sequence`` of each. ``rows`` has its tables, which are
    frozen one by one where they were (``embedding_bags.NAME.requires_grad_(False)``)."""

    def __init__(
        self, rows: nn.Module, like: nn.Module, read: Callable[[Any], Keyed] = keyed_of
    ) -> None:
        super().__init__(like, rows)
        self.weighted, self._read = is_weighted(like), read
        tables = collected(like)
        self.pooled = all(table.pooling != "none" for table in tables)
        for table in tables if isinstance(rows, LookupModule) else ():  # not while it is recorded
            kind, _, name = table.inside.removesuffix(".weight").rpartition(".")
            ends = table.inside, f".{table.inside}"
            fqn = next(t.fqn for t in rows.tables if t.fqn == ends[0] or t.fqn.endswith(ends[1]))
            if kind not in self._modules:
                self.add_module(kind, RoutedTables())
            self.get_submodule(kind).add_module(name, RoutedTable(rows, fqn))
        # After its tables are there, which are attributes like others.
        self._stands = True

    def forward(self, features: Any) -> Pooled | dict[str, Sequence]:
        """Look every feature up."""
        given: Any = self.given(features)
        found: dict[str, torch.Tensor] = self._looked_up(self.rows, given)
        if self.pooled and given.inverse is not None:
            bags = {name: given.inverse[name.partition("@")[0]] for name in found}
            return Pooled({n: rows.index_select(0, bags[n]) for n, rows in found.items()})
        if self.pooled:
            return Pooled(found)
        lengths = dict(zip(given.names, given.lengths.split(given.bags), strict=True))
        return {
            name: Sequence(rows, lengths[name.partition("@")[0]]) for name, rows in found.items()
        }

    def asks(self, *arguments: Any) -> Keyed:
        """Features one after the other."""
        (features,) = arguments
        given = self._read(features)
        inverse = _inverse_of(features, given.names, given.bags)
        weights = given.weights if self.weighted else [None] * len(given.names)
        return replace(given, weights=weights, inverse=inverse)


def _inverse_of(given: Any, keys: list[str], bags: list[int]) -> dict[str, torch.Tensor] | None:
    """Of every feature the bag of each sample, where bags come once for several of them;
    InputError where one of these is none."""
    found = given.inverse_indices_or_none() if hasattr(given, "inverse_indices_or_none") else None
    if found is None:
        return None
    # TorchRec's variable batches: a bag comes once for all samples that share it.
    names, places = found
    places = checked(places, "inverse_indices of features")
    check_dtype(places, "inverse_indices of features")
    if places.dim() != 2 or len(places) != len(names):
        wanted = f"a tensor [{len(names)}, samples]"
        raise InputError("inverse_indices of features", wanted, str(list(places.shape)))
    inverse = dict(zip(map(str, names), places.unbind(), strict=True))
    check_names(keys, inverse)
    for key, count in zip(keys, bags, strict=True):
        low, high = inverse[key].aminmax() if len(inverse[key]) else (0, -1)
        if int(low) < 0 or int(high) >= count:
            found = int(low) if int(low) < 0 else int(high)
            spot = f"inverse_indices of feature '{key}'"
            raise InputError(spot, f"bags from 0 to {count - 1}", str(found))
    return inverse
