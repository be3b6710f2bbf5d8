"""Experts of a user's module on ranks that have some of them each, as TorchTitan's
``ExpertParallel`` style runs them: tokens go to the ranks of their experts and come back."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from shardwright.core.errors import InputError, expected
from shardwright.core.llama import received_rows
from shardwright.estimate.tensor_parallel import styles
from shardwright.job.parallel import ParallelSection, Style, capacity_of, expert_load
from shardwright.models.llama.collectives import all_to_all
from shardwright.models.llama.experts import elsewhere

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
