"""What one rank has of a user's module under tensor and expert parallelism.

Layers are cut as torch's ``parallelize_module`` cuts them, with plain tensors between them, experts
as TorchTitan's ``ExpertParallel`` does: tokens go to the ranks of their experts and come back. One
process stands for its rank, so exchanges are stand-ins that take what the real ones take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from shardwright.core.errors import InputError, expected
from shardwright.core.llama import received_rows
from shardwright.job.parallel import ParallelSection, Style, capacity_of, expert_load, fits
from shardwright.models.llama.experts import elsewhere
from shardwright.models.llama.layers import (
    all_reduce,
    all_to_all,
    copy_to_ranks,
    gather_alike,
    rows_here,
)

Forward = Callable[[torch.Tensor], torch.Tensor]


def cut(module: nn.Module, plan: Mapping[str, Style], degree: int, where: str) -> None:
    """Leave of every layer that ``plan`` names, experts apart, the part of one of ``degree`` ranks.

    A name may have ``*`` in place of any part of a path. InputError names the layer that is not
    there, is of another class, or cannot be divided.
    """
    # By parameter: layers that share a weight must share its part, too, or the tied weight would
    # become two.
    done: dict[nn.Parameter, tuple[int, nn.Parameter]] = {}
    layers: dict[str, Style] = {name: style for name, style in plan.items() if style != "expert"}
    for path, style in styles(module, layers, where):
        layer = module.get_submodule(path)
        if not isinstance(layer, nn.Linear | nn.Embedding):
            kind = type(layer).__name__
            raise InputError(expected(f"{where} '{path}'", "a Linear or an Embedding", kind))
        wide = isinstance(layer, nn.Linear) == (style != "rowwise")  # rows are cut, not columns
        forward = _forward(layer, style, degree)
        _part(layer, "weight", 0 if wide else 1, degree, done, f"{where} '{path}'")
        if wide and isinstance(layer, nn.Linear) and layer.bias is not None:
            _part(layer, "bias", 0, degree, done, f"{where} '{path}'")
        vars(layer)["forward"] = forward
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter in done:
            wanted = "a layer that is cut like the one it shares its weight with"
            raise InputError(expected(f"{where}: {name}", wanted, "a whole one", "Name both."))


def styles(module: nn.Module, plan: Mapping[str, Style], where: str) -> Iterator[tuple[str, Style]]:
    """The layers that a plan names, each by its path; the last pattern that fits one decides."""
    found: dict[str, Style] = {}
    paths = [path for path, _ in module.named_modules(remove_duplicate=False) if path]
    for pattern, style in plan.items():
        fitting = [path for path in paths if fits(path, pattern)]
        if not fitting:
            raise InputError(expected(where, "names of layers", f"'{pattern}', which is none"))
        found |= dict.fromkeys(fitting, style)
    yield from found.items()


def _part(
    layer: nn.Module,
    name: str,
    dim: int,
    degree: int,
    done: dict[nn.Parameter, tuple[int, nn.Parameter]],
    where: str,
) -> None:
    """Put a rank's part of a parameter, cut along ``dim``, in its place; one that several layers
    share is cut once."""
    whole = getattr(layer, name)
    if any(whole is part for _, part in done.values()):
        return  # the very layer stands in several places
    if whole not in done:
        shape = list(whole.shape)
        if shape[dim] % degree:
            wanted = f"a {name} {shape} whose dim {dim} parallel.tensor divides"
            raise InputError(expected(where, wanted, f"{degree} ranks"))
        shape[dim] //= degree
        part = nn.Parameter(whole.new_empty(shape), requires_grad=whole.requires_grad)
        done[whole] = dim, part
    along, part = done[whole]
    if along != dim:
        wanted = f"its shared {name} cut along dim {along}, as in another layer"
        raise InputError(expected(where, wanted, f"dim {dim}"))
    setattr(layer, name, part)


def _forward(layer: nn.Linear | nn.Embedding, style: Style, degree: int) -> Forward:
    """What a layer does on one rank: exchanges around it."""
    own: Any = layer.forward
    vocab = layer.num_embeddings if isinstance(layer, nn.Embedding) else 0

    def rows(x: torch.Tensor) -> torch.Tensor:
        return all_reduce(rows_here(layer.weight, x, vocab), degree)

    def summed(x: torch.Tensor) -> torch.Tensor:
        return all_reduce(own(x), degree)

    def columns(x: torch.Tensor) -> torch.Tensor:
        return own(copy_to_ranks(x, degree) if x.is_floating_point() else x)

    def gathered(x: torch.Tensor) -> torch.Tensor:
        return gather_alike(columns(x), -1, degree)

    if style == "rowwise":
        return rows if vocab else summed
    return gathered if style == "colwise_rep" else columns


# ---- experts -------------------------------------------------------------------------------------


SHAPES = (
    "rows [rows, ...] sorted by expert, with counts or ends [experts], or places [experts, rows, "
    "...] of each"
)


class Routing(msgspec.Struct, frozen=True):
    """How experts are shared: ``degree`` ranks, and how many rows each of them receives."""

    degree: int = 1
    section: ParallelSection = ParallelSection()

    @classmethod
    def of(cls, section: ParallelSection) -> Routing:
        """That of a job's section."""
        names = ("expert", "routing", "capacity_factor", "skew", "expert_load")
        own = ParallelSection(**{name: getattr(section, name) for name in names})
        return cls(own.expert, own if own.expert > 1 else ParallelSection())

    def received(self, rows: int, experts: int) -> int:
        """Rows that a rank's experts work on, of so many that every rank sends."""
        load = expert_load(self.section, experts, self.section.expert_load)
        return received_rows(rows, experts, self.degree, load, capacity_of(self.section))


def cut_experts(
    module: nn.Module, plan: Mapping[str, Style], routing: Routing, where: str
) -> list[str]:
    """Leave of the stacked experts that ``plan`` names those of one rank; their paths.

    InputError names the module whose parameters are no stack of experts, that cannot be divided, or
    that is called with something else than rows that are sorted by expert.
    """
    wanted = {name: style for name, style in plan.items() if style == "expert"}
    paths = [path for path, _ in styles(module, wanted, where)]
    for path in paths:
        part = module.get_submodule(path)
        if "_elsewhere" in vars(part):  # the very module stands in several places
            continue
        spot = f"{where} '{path}'"
        experts = _stacked(part, spot)
        if experts % routing.degree:
            got = f"parallel.expert {routing.degree}"
            raise InputError(expected(spot, f"a degree that divides its {experts} experts", got))
        for inside in part.modules():
            for name, whole in list(inside.named_parameters(recurse=False)):
                shape = (experts // routing.degree, *whole.shape[1:])
                share = nn.Parameter(whole.new_empty(shape), requires_grad=whole.requires_grad)
                setattr(inside, name, share)
        # Its class and not its ``forward``: hooks of a unit run inside of a call, so that
        # parameters are gathered after the tokens have come, as a runtime does it.
        part.__class__ = _divided(type(part))
        vars(part)["_elsewhere"] = (routing, experts, where)  # alike in all parts that are alike
    return paths


def _stacked(part: nn.Module, spot: str) -> int:
    """How many experts all parameters of ``part`` are stacks of."""
    sizes = {p.shape[0] if p.ndim > 1 else 0 for p in part.parameters()}
    if len(sizes) == 1 and min(sizes) > 1 and not isinstance(part, nn.ModuleList):
        return sizes.pop()
    kind = type(part).__name__
    found = f"a {kind}" + (f" of {len(part)}" if isinstance(part, nn.ModuleList) else "")
    remedy = "Stack their weights, or leave parallel.expert out: all ranks share them then."
    raise InputError(
        expected(spot, "a module whose parameters are all [experts, ...]", found, remedy)
    )


@cache
def _divided(kind: type[nn.Module]) -> type[nn.Module]:
    """A class of experts that are called with rows of all ranks; exchanges are around its hooks,
    for a unit of such a module is gathered when its tokens have come."""

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        own = super(made, self).__call__
        return _exchanged(own, *vars(self)["_elsewhere"], arguments, keywords)

    made = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
    return made


def _exchanged(
    own: Any, routing: Routing, experts: int, where: str, arguments: Any, keywords: Any
) -> Any:
    given = [leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, torch.Tensor)]
    rows = [leaf for leaf in given if leaf.is_floating_point() and leaf.ndim > 1]
    rest = [leaf for leaf in given if leaf.shape == (experts,)]
    if len(rows) != 1 or len(rows) + len(rest) != len(given):
        raise _strange(where, given)
    here = experts // routing.degree

    def instead(arrived: torch.Tensor, ends: torch.Tensor) -> Any:
        def put(leaf: Any) -> Any:
            if leaf is rows[0]:
                return arrived
            return ends.to(leaf.dtype) if any(leaf is each for each in rest) else leaf

        changed, named = tree_map(put, (arguments, keywords))
        found = own(*changed, **named)
        if (
            not isinstance(found, torch.Tensor)
            or found.shape[: arrived.ndim - 1] != (arrived.shape[:-1])
        ):
            raise _strange(where, [found] if isinstance(found, torch.Tensor) else [])
        return found

    sent = rows[0]
    if sent.ndim > 2 and len(sent) == experts:
        return _places(instead, sent, routing.degree)
    received = routing.received(len(sent), experts)
    return elsewhere(instead, sent, received, here, routing.degree)


def _places(compute: Any, sent: torch.Tensor, degree: int) -> torch.Tensor:
    """Places [experts, rows, ...] of all experts go out, and come back from where they are."""
    experts, places = sent.shape[:2]
    here = experts // degree
    arrived = all_to_all(sent, experts, degree).unflatten(0, (degree, here))
    ends = torch.full((here,), places * degree, dtype=torch.int64)
    found = compute(arrived.transpose(0, 1).flatten(1, 2), ends)
    back = found.unflatten(1, (degree, places)).transpose(0, 1).flatten(0, 1)
    return all_to_all(back, experts, degree)


def _strange(where: str, found: list[torch.Tensor]) -> InputError:
    got = ", ".join(f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in found)
    return InputError(
        expected(
            where,
            f"experts that are given and give {SHAPES}",
            got or "something else",
            "Leave parallel.expert out: all ranks share them then.",
        )
    )
