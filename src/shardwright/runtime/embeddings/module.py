"""An embedding of the user's own, whose rows come from somewhere else than a weight of its own."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import nn

from shardwright.core.errors import InputError, UnsupportedError, expected
from shardwright.runtime.embeddings.bags import INTEGERS, versions_of
from shardwright.runtime.embeddings.initial import blocks_of_whole


class NoTableError(UnsupportedError, AttributeError):
    """The embedding at ``path`` is used as no table can be."""

    def __init__(self, path: str, wanted: str, found: str) -> None:
        remedy = f"Keep it in a unit: planner.tables = {{ '{path}' = 'dense' }}."
        super().__init__(expected(f"embedding '{path}'", wanted, found, remedy))
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


class Entrance(nn.Module):
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
        raise UnsupportedError(expected(where, wanted, found, remedy))

    def __copy__(self) -> Self:
        made = object.__new__(type(self))
        vars(made).update(vars(self))
        return made

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """InputError: they are of ranks, which no file has."""
        where, remedy = f"a pickle of tables '{self.rows_of().path}'", "Pickle full_state_dict()."
        found = "a sharded one, which needs its ranks"
        raise InputError(expected(where, "a module that is not sharded", found, remedy))

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local: Any, strict: bool, *found: list[str]
    ) -> None:
        """Besides what torch loads, rows of whole tables, by the names that their weights have in
        the unsharded model."""
        super()._load_from_state_dict(state_dict, prefix, local, strict, *found)
        _missing, unexpected, errors = found
        rows = self.rows_of()
        if not isinstance(rows, Entrance):
            return  # a stand-in of one process
        given = {}
        for table in rows.tables:
            key = prefix + table.fqn.removeprefix(f"{rows.path}.")
            whole = state_dict.get(key)
            if not isinstance(whole, torch.Tensor) or whole.is_meta:
                continue
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
                    store.block_view(held).copy_(block(of.tensor, of.offsets, of.sizes))

    def asks(self, *arguments: Any) -> Any:
        """What the tables take, of what a forward is given."""
        (given,) = arguments
        return given

    def _asked(self, *arguments: Any) -> Any:
        """The same, or why there is nothing they can take, which they say on all ranks."""
        try:
            return self.asks(*arguments)
        except Exception as error:
            return error

    def _looked_up(self, rows: nn.Module, given: Any) -> Any:
        """What ``rows`` gives for what it is ``given``; InputError where that is why not."""
        if isinstance(given, Exception) and not isinstance(rows, Entrance):
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
        if all(given is not argument for argument in arguments):
            self._prepared.append(_Prepared(arguments, versions_of(arguments), given))
        return given

    def given(self, *arguments: Any) -> Any:
        """The same for a forward, which forgets all that was prepared before it."""
        for place, each in enumerate(self._prepared):
            if each.is_of(arguments):
                del self._prepared[: place + 1]
                return each.given
        return self._asked(*arguments)


class StandIn(Entrance):
    """An entrance in place of a module of the user's own, called as that is; ``rows`` has its
    tables. UnsupportedError where something is set that would change nothing."""

    settings: tuple[str, ...] = ("learning_rate",)

    def __init__(self, like: nn.Module, rows: nn.Module) -> None:
        super().__init__()
        self.rows = rows
        self.training = like.training
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
            raise UnsupportedError(expected(f"'{self.rows.path}.{name}'", wanted, found, remedy))
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
        """The module of its tables."""
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
            pooled: torch.Tensor = rows[self.bags]
            return pooled
        found: torch.Tensor = rows.squeeze(1)
        if self.padding_idx is not None and not self.mode and found.requires_grad:
            padding = input.reshape(-1, 1) == self.padding_idx
            found.register_hook(lambda gradient: gradient.masked_fill(padding, 0.0))
        found = found.view(*input.shape, self.embedding_dim)
        if self.mode and self.padding_idx is not None:
            counted = (input != self.padding_idx).to(found.dtype)
            if self.mode == "mean":
                counted = counted / counted.sum(1, keepdim=True).clamp(min=1)
            elif per_sample_weights is not None:
                counted = counted * per_sample_weights
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
            raise InputError(expected(f"ids of '{self.path}'", "a tensor of int64 or int32", text))
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
