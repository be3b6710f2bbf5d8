"""The memory of a graph that a compiler has fused: which of its values exist, and how long.

A value exists if a library kernel makes or reads it, if it is a reduction's or if it leaves the
graph. Pointwise values in between are computed where they are read; what they read lives as long.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from shardwright.core.work import Work
from shardwright.trace.lowering.lowered import take
from shardwright.trace.lowering.operators import workspace
from shardwright.trace.work import NO_OPERATORS, NOTHING, Counted, tell, work_of
from shardwright.tracker.private import OpOverload

Held = Any  # a tensor, or what a graph returns in its place
Cell = tuple[fx.Node, int]

ALIASES = ("aten::_unsafe_view", "aten::reshape", "prims::view_of")
# computed element by element from what they read, though torch does not tag them so
_INLINED = (
    "clone _to_copy copy cat stack full full_like zeros zeros_like ones ones_like empty empty_like",
    "arange scalar_tensor where constant_pad_nd index index_select gather embedding slice_scatter",
    "select_scatter expand_copy lift_fresh_copy select_backward slice_backward repeat flip tril",
    "triu iota convert_element_type broadcast_in_dim",
)
INLINED = frozenset(name for line in _INLINED for name in line.split())
_REDUCTIONS = "sum mean amax amin max min prod any all var var_mean argmax argmin logsumexp"
REDUCTIONS = frozenset(_REDUCTIONS.split(" "))


class Fused:
    """``run`` takes what the graph takes, in its order, and returns what it returns."""

    def __init__(self, module: fx.GraphModule, workspaces: bool) -> None:
        self.nodes = list(module.graph.nodes)
        self.operators = {_name(node) for node in self.nodes if _name(node)}
        self.inputs = [node for node in self.nodes if node.op == "placeholder"]
        output = next(node for node in self.nodes if node.op == "output")
        self.outputs: list[Any] = list(output.args[0])
        self._stored = self._materialized()
        self._reads: dict[fx.Node, frozenset[Cell]] = {}
        for node in self.nodes:
            if node.op != "output":
                self._reads[node] = self._read(node)
        self._inner = {n: _inner(n) for n in self._stored} if workspaces else {}
        self._last = self._last_uses()
        self._work = self._computed()

    def run(self, inputs: list[Held]) -> list[Held]:
        """``inputs`` is emptied, so that what nobody else holds is freed after its last use."""
        held: dict[Cell, Tensor] = {}
        for node, tensor in zip(self.inputs, inputs, strict=True):
            held[(node, 0)] = tensor
        # The caller's list is the last thing that names them: what the graph has used goes as soon
        # as nobody else holds it, as under a compiled block.
        inputs.clear()
        tensor = None
        like = next(iter(held.values()))
        tell(like, *self._work)
        for node in self.nodes:
            if node in self._stored:
                inner = self._inner.get(node, 0)
                taken = take(like, inner) if inner else None
                for place, value in enumerate(_values(node)):
                    if isinstance(value, Tensor):
                        held[(node, place)] = torch.empty_strided(
                            value.shape, value.stride(), dtype=value.dtype, device=like.device
                        )
                del taken
            for cell in self._last.get(node, ()):
                held.pop(cell, None)
        return [self._leaving(node, held) for node in self.outputs]

    def _leaving(self, node: Any, held: dict[Cell, Tensor]) -> Held:
        if not isinstance(node, fx.Node):
            return node
        (cell,) = self._reads[node]
        base, value = held[cell], node.meta["val"]
        if base.shape == value.shape and base.stride() == value.stride():
            return base
        return base.as_strided(value.shape, value.stride(), value.storage_offset())

    def _materialized(self) -> set[fx.Node]:
        stored = set()
        leaving = {node for node in self.outputs if isinstance(node, fx.Node)}
        for node in reversed(self.nodes):
            if node.op != "call_function" or _alias(node):
                continue
            if not _inlined(node) or self._needed(node, leaving):
                stored.add(node)
        return stored

    def _needed(self, node: fx.Node, leaving: set[fx.Node]) -> bool:
        """Whether a value leaves the graph or is read by a kernel that is not generated."""
        if node in leaving:
            return True
        for user in node.users:
            if user.op == "output":
                continue
            if _alias(user):
                if self._needed(user, leaving):
                    return True
            # A reduction is generated code, too, and takes what it reads in its own loop; a
            # library's kernel, such as a product, reads from memory.
            elif not _inlined(user) and _kind(user) not in REDUCTIONS:
                return True
        return False

    def _read(self, node: fx.Node) -> frozenset[Cell]:
        """The stored values behind a value: itself, what it is a view of, or what it is made of."""
        if node.op in ("placeholder", "get_attr") or node in self._stored:
            return frozenset({(node, 0)})
        if node.target is operator.getitem:
            source, place = node.args
            assert isinstance(source, fx.Node)
            assert isinstance(place, int)
            return frozenset({(source, place)}) if source in self._stored else self._reads[source]
        return frozenset().union(*(self._reads[source] for source in node.all_input_nodes))

    def _computed(self) -> Counted:
        """Of all kernels: a library's by its operator, a generated one by what it reads and writes,
        which are the values that are stored."""
        work, shapes = NOTHING, NO_OPERATORS
        for node in self.nodes:
            if node not in self._stored:
                continue
            if not _inlined(node) and _kind(node) not in REDUCTIONS:
                keywords = {key: _valued(value) for key, value in node.kwargs.items()}
                more, its = work_of(node.target, _valued(node.args), keywords, node.meta["val"])
                work, shapes = work + more, shapes + its
                continue
            read = {cell for source in node.all_input_nodes for cell in self._reads[source]}
            values = [*_values(node), *(_values(source)[place] for source, place in read)]
            moved = sum(v.numel() * v.element_size() for v in values if isinstance(v, Tensor))
            work += Work(1, 0, moved)
        return work, shapes

    def _last_uses(self) -> dict[fx.Node, list[Cell]]:
        last: dict[Cell, fx.Node] = {}
        for node in self.nodes:
            if node in self._stored:
                for place, value in enumerate(_values(node)):
                    if isinstance(value, Tensor):
                        last[(node, place)] = node
                for source in node.all_input_nodes:
                    for cell in self._reads[source]:
                        last[cell] = node
            elif node.op == "placeholder":
                last[(node, 0)] = node
        for node in self.outputs:
            if isinstance(node, fx.Node):
                for cell in self._reads[node]:
                    last.pop(cell, None)
        uses: dict[fx.Node, list[Cell]] = {}
        for cell, node in last.items():
            uses.setdefault(node, []).append(cell)
        return uses


def _name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return schema.name if schema is not None else ""


def _kind(node: fx.Node) -> str:
    """An operator's name without the library it is of."""
    return _name(node).rpartition("::")[2]


def _alias(node: fx.Node) -> bool:
    target = node.target
    if target is operator.getitem:
        return True
    return isinstance(target, OpOverload) and (target.is_view or _name(node) in ALIASES)


def _inlined(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload):
        return target is operator.getitem
    return torch.Tag.pointwise in target.tags or _kind(node) in INLINED or _alias(node)


def _values(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta.get("val")
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _inner(node: fx.Node) -> int:
    if not isinstance(node.target, OpOverload):
        return 0

    return workspace(node.target, _valued(node.args))


def _valued(argument: Any) -> Any:
    """What a node was traced with, for the nodes among its arguments."""
    if isinstance(argument, fx.Node):
        return argument.meta.get("val")
    return [_valued(a) for a in argument] if isinstance(argument, (list, tuple)) else argument
