"""Tables of a module: which embeddings can be some, a stand-in for them while a step is recorded,
that takes what comes back from them, and no row; and which of them are asked for what the module is
given as it is, so that their lookups may begin with its forward.

What the exchange itself takes is not the module's; a plan decides it, so it is not recorded.
"""

# A stand-in gives rows of the right size and has a gradient that goes nowhere: what a plan decides
# (who has which rows, what an exchange takes) stays out of the recording, so that one recording
# serves every placement. Its marks say where in the step ids are asked for, rows come and their
# gradients leave. ``Reached`` compares by identity, not by value: only what is handed on untouched
# is known when the module's forward begins.

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwright.core.recording import Point, Pooling
from shardwright.trace.structure import containers, repeats

Mark = Callable[[str, Point], None]
Embedding = nn.Embedding | nn.EmbeddingBag
Path = tuple[Any, ...]  # keys one inside of another, from (arguments, keywords) on
_DEPTH = 3
# What a collection of TorchRec's tells of its tables, and the module inside that has their weights
_COLLECTIONS = {"embedding_bag_configs": "embedding_bags", "embedding_configs": "embeddings"}
# Of weights in modules of one's own: gradients of float16 need a scaler, which updates would follow
OWN_DTYPES = (torch.float32, torch.bfloat16)
_POOLINGS: dict[str, Pooling] = {"sum": "sum", "mean": "mean", "none": "none"}


class CollectedTable(NamedTuple):
    """A table of a collection; ``inside`` is the name of its ``weight`` there, ``start`` what
    initialises it there, if anything does."""

    name: str
    inside: str
    weight: nn.Parameter
    pooling: Pooling
    features: tuple[str, ...]
    start: Callable[[torch.Tensor], Any] | None


def collected(part: nn.Module) -> list[CollectedTable]:
    """The tables of an EmbeddingBagCollection or an EmbeddingCollection as TorchRec has them, known
    by their methods; none of any other module."""
    kinds = {kind: inside for kind, inside in _COLLECTIONS.items() if hasattr(part, kind)}
    parameters = dict(part.named_parameters()) if kinds else {}
    found = []
    for kind, module in kinds.items():
        for config in getattr(part, kind)():
            inside = f"{module}.{config.name}.weight"
            if inside not in parameters:
                return []
            pooling = getattr(config, "pooling", "none")
            pooling = _POOLINGS[str(getattr(pooling, "value", pooling)).lower()]
            features = tuple(config.feature_names)
            start = getattr(config, "init_fn", None)
            found.append(
                CollectedTable(config.name, inside, parameters[inside], pooling, features, start)
            )
    return found


def is_weighted(part: nn.Module) -> bool:
    """Whether ids of a collection have weights."""
    asked = getattr(part, "is_weighted", None)
    return bool(asked and asked())


def embeddings(module: nn.Module) -> Iterator[tuple[str, Embedding, str]]:
    """Every embedding inside of a module, by its path, and why it cannot be a table; empty where it
    can, as far as can be said before it is called. Those of collections are not among them."""
    places: dict[int, list[str]] = {}  # a module in two places has its weight in two
    for name, parameter in module.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name)
    # A table is one tensor with one placement: one in a part that repeats is recorded for some of
    # them and stands for all, so it could not be told whose rows are asked for.
    repeated = {
        part
        for container in containers(module)
        for cut in container.stretches
        if repeats(cut)
        for number in cut.every
        for part in container.children[number].modules()
        if part is not container.children[number]
    }
    apart = {part for each in module.modules() if collected(each) for part in each.modules()}
    for path, part in module.named_modules():
        if isinstance(part, Embedding) and part not in apart:
            names = places.get(id(part.weight), [])
            others = [name for name in names if name != f"{path}.weight"]
            shared = f"a weight shared with '{others[0]}'" if path and others else ""
            inside = "in a part that repeats" if part in repeated else ""
            inside = "the whole module" if not path else inside
            yield path, part, inside or shared or own_reason(part)


def own_reason(
    part: Embedding, dtypes: Container[torch.dtype] = OWN_DTYPES, *, frozen: bool = False
) -> str:
    """What of an embedding itself a table with weights of ``dtypes``, perhaps ``frozen`` ones, does
    not do."""
    if type(part) not in (nn.Embedding, nn.EmbeddingBag):
        return f"a class of its own, {type(part).__name__}"
    weight = part.weight
    if not weight.requires_grad and not frozen:
        return "frozen"
    if len(weight) > 1 and not weight.stride(0):
        return "whose rows are one, an expanded tensor"
    if weight.dtype not in dtypes:
        return f"of {str(weight.dtype).removeprefix('torch.')}"
    if part.max_norm is not None or part.scale_grad_by_freq:
        return "with max_norm or scale_grad_by_freq"
    if isinstance(part, nn.EmbeddingBag) and (part.mode == "max" or part.include_last_offset):
        return "a bag with mode max or include_last_offset"
    hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks)
    of_weight = (weight._backward_hooks, getattr(weight, "_post_accumulate_grad_hooks", None))
    return "with hooks" if any(hooks) or any(of_weight) else ""


class RoutedRows(nn.Module):
    """Ids [B, F] -> rows [B, F, ``dim``] that nobody looked up; ``mark`` hears where a step is.
    Bags of features, whose widths are ``dims``, -> rows [B, dim] of each, or [N, dim] of those in
    ``each``, whose rows come one by one.

    ``path`` is that of the module of tables; ``asked`` is told how many ids it is asked for. Rows
    come in fp32 and are given in ``dtype``.
    """

    def __init__(
        self,
        dim: int,
        path: str = "tables",
        asked: Callable[[int], None] = lambda ids: None,
        *,
        dims: Mapping[str, int] | None = None,
        each: Container[str] = (),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.dim, self.dtype = dim, dtype
        self.dims, self.each = dims or {}, each
        self.path = path
        self.asked = asked
        self.mark: Mark | None = None
        # Rows need a gradient for a backward to come by, though there is no weight here: this empty
        # leaf is what autograd goes back to.
        self.handle = torch.empty(0, requires_grad=True)

    def forward(self, ids: Any) -> Any:
        """Rows in the order of the ids; they lie table by table, as an exchange puts them."""
        if isinstance(ids, torch.Tensor):
            self.asked(ids.numel())
            (rows,) = self._rows([(*ids.t().shape, self.dim)])
            return rows.to(self.dtype).transpose(0, 1)
        bags = [(self._results(name, ids[name]), dim) for name, dim in self.dims.items()]
        return dict(zip(self.dims, self._rows(bags), strict=True))

    def _results(self, name: str, bag: Any) -> int:
        """How many rows a feature gets."""
        if isinstance(bag, torch.Tensor):
            return len(bag)
        return len(bag[0]) if name in self.each else len(bag[1]) - 1

    def _rows(self, shapes: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, ...]:
        rows: tuple[torch.Tensor, ...] = _TableRows.apply(self.handle, shapes, self.path, self.mark)
        if self.mark is not None:
            self.mark(self.path, "rows")
        return rows


class _TableRows(torch.autograd.Function):
    """Rows come; their gradient goes back and is gone."""

    @staticmethod
    def forward(
        context: Any,
        handle: torch.Tensor,
        shapes: Sequence[tuple[int, ...]],
        path: str,
        mark: Mark | None,
    ) -> Any:
        context.path, context.mark = path, mark
        if mark is not None:
            mark(path, "lookup")
        return tuple(torch.empty(shape, dtype=torch.float32) for shape in shapes)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        if context.mark is not None:
            context.mark(context.path, "row_gradients")
        return None, None, None, None


# ---- what is asked for as it is given ------------------------------------------------------------


class GivenArguments(NamedTuple):
    """Where a part's arguments are among those of the module."""

    arguments: tuple[Path, ...]
    keywords: tuple[tuple[str, Path], ...]


class Reached:
    """Follows one forward of ``root``; ``found`` are then the parts that are called once, with
    nothing but what the module was given."""

    def __init__(self, root: nn.Module, parts: Mapping[str, nn.Module]) -> None:
        self.found: dict[str, GivenArguments] = {}
        self._places: list[tuple[Path, Any]] = []
        self._seen: set[str] = set()
        self._handles: list[Any] = [
            root.register_forward_pre_hook(self._begin, with_kwargs=True),
            *(
                part.register_forward_pre_hook(self._reach(path), with_kwargs=True)
                for path, part in parts.items()
            ),
        ]

    def remove(self) -> None:
        """Follow no more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._places.clear()

    def _begin(self, _: nn.Module, arguments: Any, keywords: Any) -> None:
        self._places = list(_places((arguments, keywords), _DEPTH))
        self.found.clear()
        self._seen.clear()

    def _reach(self, path: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_: nn.Module, arguments: Any, keywords: Any) -> None:
            given = [self._place(value) for value in arguments]
            named = {key: self._place(value) for key, value in keywords.items()}
            # A part that is called twice has no one place; a later call takes back what the first
            # one said.
            once = path not in self._seen
            self._seen.add(path)
            self.found.pop(path, None)
            if once and None not in given and None not in named.values():
                self.found[path] = GivenArguments(
                    tuple(p for p in given if p is not None),
                    tuple((key, p) for key, p in named.items() if p is not None),
                )

        return hook

    def _place(self, value: Any) -> Path | None:
        return next((path for path, other in self._places if other is value), None)


def value_at(call: tuple[Any, Any], path: Path) -> Any:
    """What lies at ``path`` of a call's (arguments, keywords); KeyError where nothing does."""
    value: Any = call
    for key in path:
        if isinstance(value, (tuple, list, Mapping)):
            try:
                value = value[key]
            except (IndexError, TypeError):
                raise KeyError(key) from None
        else:
            value = vars(value)[key]
    return value


def _places(value: Any, depth: int, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Everything inside of a value by where it is, but for what is inside of a tensor."""
    if path and not isinstance(value, (int, float, str, bool, type(None))):
        yield path, value
    if not depth or isinstance(value, (torch.Tensor, nn.Module)):
        return
    inside: Any = ()
    if isinstance(value, (tuple, list)):
        inside = enumerate(value)
    elif isinstance(value, Mapping):
        inside = value.items()
    elif hasattr(value, "__dict__"):
        inside = vars(value).items()
    for key, part in inside:
        yield from _places(part, depth - 1, (*path, key))
