"""What an operator computes and moves: FLOPs of products, bytes of everything else."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from shardwright.core.document import decode_json
from shardwright.core.work import AttentionCalls, OperatorShapes, Product, Sent, Work
from shardwright.trace.lowering.kernels import workspace
from shardwright.trace.lowering.lowered import take
from shardwright.tracker.private import OpOverload, key_of, schema_of
from shardwright.tracker.tensors import NAMES

aten = torch.ops.aten
Counted = tuple[Work, OperatorShapes]
NO_OPERATORS = OperatorShapes()
NOTHING = Work()
NARROW = "fp8"
# Operators that touch no element: they make, alias or describe memory.
_FREE = frozenset(
    packet
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach")
    if (packet := getattr(aten, name, None)) is not None
) | {aten.lift_fresh, aten._local_scalar_dense}


def work_of(function: Any, arguments: Any, keywords: Any, result: Any) -> Counted:
    """The work of one call of an operator as it was dispatched, and its shape if that counts."""
    packet = function.overloadpacket
    if function.namespace == "prim" or packet in _FREE or _is_view(function, arguments, result):
        return NOTHING, NO_OPERATORS
    if function.namespace == "shardwright" and packet.__name__ in _OF_OURS:
        given = _given(function, arguments, keywords)
        return _OF_OURS[packet.__name__](packet.__name__, given, result)
    attention = _ATTENTION.get(packet)
    if attention is not None:
        flops, query = attention(arguments), arguments[attention is _attention_backward]
        # Half of all pairs are masked, and not computed.
        unmasked = flops // 2 if _given(function, arguments, keywords)["is_causal"] else flops
        calls = AttentionCalls(_dtype(query), query.shape[-1], unmasked)
        return Work(1, flops), OperatorShapes(attention=(calls,))
    if packet in _GROUPED:
        return _grouped(*arguments[:2], result)
    counted = flop_registry.get(packet)
    if counted is not None:
        flops = int(counted(*arguments, **keywords, out_val=result))
        return Work(1, flops), OperatorShapes(_product(packet, arguments, flops))
    return Work(1, 0, _moved(packet, arguments, result)), NO_OPERATORS


# Operators that read a few rows or elements of their first tensor.
_READ_SOME = frozenset({aten.embedding, aten.gather, aten.nll_loss_forward})
_IGNORE_SECOND = frozenset({aten.nll_loss_backward})  # which asks it for its shape alone


def _moved(packet: Any, arguments: Any, result: Any) -> int:
    """Bytes that an operator reads and writes: all of what it takes and gives, but of a tensor in
    which it picks as much as it picks."""
    first, rest, back = (sum(_bytes(each)) for each in (arguments[:1], arguments[1:], result))
    if packet in _READ_SOME:
        return rest + back + min(first, back)
    ignored = sum(_bytes(arguments[1])) if packet in _IGNORE_SECOND else 0
    return first + rest + back - ignored


# Where the matrices of a product are among an operator's arguments, and a convolution's weight.
_MATRICES = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1, aten._scaled_mm: 0}
_WEIGHTS = {aten.convolution: 1, aten._convolution: 1, aten.convolution_backward: 2}


def _product(packet: Any, arguments: Any, flops: int) -> tuple[Product, ...]:
    """A product by its shape; a convolution of so many ``flops`` as the products of what lies under
    its windows with its weight that they come to. None where no shape is known."""
    if packet in _WEIGHTS:
        weight = arguments[_WEIGHTS[packet]]
        n, k = weight.shape[0], weight.shape[1:].numel()
        # Backward one for the gradient of the input and one for the weight's, if they are wanted.
        calls = sum(arguments[-1][:2]) if packet is aten.convolution_backward else 1
        return (Product(_dtype(weight), flops // (2 * n * k * calls), n, k, calls),)
    first = _MATRICES.get(packet)
    if first is None:
        return ()
    one, other = arguments[first : first + 2]
    calls = one.shape[0] if one.dim() == 3 else 1
    return (Product(_dtype(one), one.shape[-2], other.shape[-1], one.shape[-1], calls),)


def _dtype(tensor: torch.Tensor) -> str:
    # Both formats of 8 bits go at one rate.
    return NAMES.get(tensor.dtype, "fp32").removesuffix("_e5m2")


def _given(function: Any, arguments: Any, keywords: Any) -> dict[str, Any]:
    """What an operator was called with, by name; what was left out as its schema has it."""
    named = {each.name: each.default_value for each in schema_of(function).arguments}
    return named | dict(zip(named, arguments, strict=False)) | keywords


# ---- stand-ins of a model of ours for what crosses ranks -----------------------------------------


def _sent(name: str, given: dict[str, Any], result: Any) -> Counted:
    """A collective: the larger of what is given and what comes back is a full buffer."""
    there, back = sum(_bytes(given["x"])), sum(_bytes(result))
    sent = Sent(name, given["group"], max(there, back))
    return Work(1, 0, there + back), OperatorShapes(sent=(sent,))


def _attended(name: str, given: dict[str, Any], result: Any) -> Counted:
    """Attention over a sequence that is divided among ranks, all steps of the ring at once."""
    query, width = given["query"], given["query"].shape[-1] + given["value"].shape[-1]
    # Queries by keys, and their weights by values.
    flops = 2 * query.shape[:-1].numel() * given["keys"] * width
    if name == "attention_backward":
        # Queries by keys again, and a gradient of each of the four that two products have.
        flops = flops * 5 // 2
    return Work(1, 2 * flops), OperatorShapes(
        attention=(AttentionCalls(_dtype(query), query.shape[-1], flops),)
    )


@torch.library.custom_op("shardwright::computes", mutates_args=())
def _computes(like: torch.Tensor, work: str) -> None:
    """Stands for kernels that a compiler would generate, of which no operator is left."""


_computes.register_fake(lambda like, work: None)


def tell(like: torch.Tensor, work: Work, shapes: OperatorShapes = NO_OPERATORS) -> None:
    """Have it recorded that so much is computed here; ``like`` is any tensor that is there."""
    _computes(like, msgspec.json.encode((work, shapes)).decode())


def _dealt(name: str, given: dict[str, Any], result: Any) -> Counted:
    """A product of every expert."""
    work, shapes = _grouped(given["one"], given["other"], given["result"])
    if given["narrow"]:
        (its,) = shapes.products
        shapes = OperatorShapes((msgspec.structs.replace(its, dtype=NARROW),))
    return work, shapes


def _narrow(name: str, given: dict[str, Any], result: Any) -> Counted:
    """A product in 8 bits, and a cast before it in one pass: a copy by rows and one by columns."""
    (m, k), n = given["one"].shape, given["other"].shape[1]
    its = Product(NARROW, m, n, k)
    cast = given["casts"] * (sum(_bytes(given["one"])) + 2 * m * k)
    return Work(1 + given["casts"], its.flops, cast), OperatorShapes((its,))


def _told(name: str, given: dict[str, Any], result: Any) -> Counted:
    return decode_json(given["work"], Counted)


_OF_OURS = {
    "computes": _told,
    "all_gather": _sent,
    "all_gather_beside": lambda name, given, result: (Work(1), NO_OPERATORS),
    "reduce_scatter": _sent,
    "all_reduce": _sent,
    "all_to_all": _sent,
    "all_reduce_": lambda _, given, result: _sent("all_reduce", given, given["x"]),
    "grouped_product": _dealt,
    "narrow_product": _narrow,
    "attention": _attended,
    "attention_backward": _attended,
}


def _is_view(function: Any, arguments: Any, result: Any) -> bool:
    """Whether an operator gives memory back that it was given, and changes none of it."""
    if function.is_view:
        return True
    if schema_of(function).is_mutable or not isinstance(result, torch.Tensor):
        return False
    own = key_of(result.untyped_storage())
    given = (a for a in arguments if isinstance(a, torch.Tensor))
    return any(key_of(tensor.untyped_storage()) == own for tensor in given)


# Products of experts, each with rows of its own, which torch's counter does not know.
_GROUPED = (aten._grouped_mm, aten._scaled_grouped_mm)


def _grouped(one: torch.Tensor, other: torch.Tensor, result: torch.Tensor) -> Counted:
    """Of a matrix whose rows or columns are dealt to experts every one is used once; matrices of
    three dimensions on both sides are an expert's each."""
    experts = next(t.shape[0] for t in (one, other, result) if t.dim() == 3)
    m, k, n = one.shape[-2], one.shape[-1], other.shape[-1]
    flops = 2 * m * k * n * (experts if one.dim() == other.dim() == 3 else 1)
    # What is dealt is taken to be dealt evenly: rows, columns or, in the gradient of weights, what
    # both have in common.
    if one.dim() == 2 and other.dim() == 3:
        m = max(m // experts, 1)
    elif one.dim() == 3 and other.dim() == 2:
        n = max(n // experts, 1)
    elif other.dim() == 2:
        k = max(k // experts, 1)
    return Work(1, flops), OperatorShapes((Product(_dtype(one), m, n, k, experts),))


def _attention(arguments: Any) -> int:
    query, key, value = (part.shape for part in arguments[:3])
    return int(sdpa_flop_count(query, *_of_every_head(query, key, value)))


def _attention_backward(arguments: Any) -> int:
    gradient, query, key, value = (part.shape for part in arguments[:4])
    return int(sdpa_backward_flop_count(gradient, query, *_of_every_head(query, key, value)))


def _of_every_head(query: torch.Size, *shapes: torch.Size) -> Iterator[tuple[int, ...]]:
    """Keys and values as every head of the queries sees them; groups of heads may share them."""
    return ((*shape[:1], *query[1:2], *shape[2:]) for shape in shapes)


# Torch's own counter knows none of a CPU's attention, and torch 2.11's no shared keys.
_ATTENTION = {
    aten._scaled_dot_product_cudnn_attention: _attention,
    aten._scaled_dot_product_efficient_attention: _attention,
    aten._scaled_dot_product_flash_attention: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_cudnn_attention_backward: _attention_backward,
    aten._scaled_dot_product_efficient_attention_backward: _attention_backward,
    aten._scaled_dot_product_flash_attention_backward: _attention_backward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def _bytes(value: Any) -> Iterable[int]:
    if isinstance(value, torch.Tensor):
        yield value.numel() * value.element_size()
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _bytes(item)


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


# A value of a graph that a compiler has fused exists if a library kernel makes or reads it, if it
# is a reduction's or if it leaves the graph. Pointwise values in between are computed where they
# are read; what they read lives as long.


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
