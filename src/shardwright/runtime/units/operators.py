"""What torch's operators do with sharded tensors, by the kind of operator.

* Element by element, on one tensor or on lists of them: on what each rank holds. A whole operand is
  cut first; a plain tensor that is written gets the whole.
* A reduction of everything to one number: of the parts, then of all ranks. The result is plain.
* A view: the tensor that it is taken of and how, so that what is written through it arrives.
* Random numbers: drawn for the whole tensor, so that ranks with one seed have what one process has.
* Everything else: on whole tensors, gathered on every rank; what was written is cut again.

Which rule holds depends on nothing that differs between ranks, for most of them communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from shardwright.core.errors import InputError, UnsupportedError
from shardwright.runtime.units import reductions
from shardwright.runtime.units.cut import Cut
from shardwright.runtime.units.linked import norm_of_many
from shardwright.tracker.private import operator_name, schema_of

aten = torch.ops.aten
Rule = Callable[[Any, Any, Any], Any]
Step = Callable[[torch.Tensor], torch.Tensor]

ELEMENTWISE = {  # besides those that torch marks so
    *(aten._to_copy, aten.copy_, aten.fill_, aten.zero_, aten.lift_fresh, aten.masked_fill_),
    *(aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like),
}
# Views that are the tensor itself if the shape stays. Others are not: a transposed square matrix
# has its shape, too.
SAME = {aten.view, aten._unsafe_view, aten.expand, aten.squeeze, aten._reshape_alias}
WHOLE = "whole"
COLLECTIVES = {"c10d", "_c10d_functional", "_c10d_functional_autograd"}
MEMORY = {aten.set_, aten.resize_}
NEW = {aten.new_empty, aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty_strided}


class View(NamedTuple):
    """The sharded tensor that a view was taken of, and the ``steps`` that take it of the whole."""

    base: Any
    steps: tuple[Step, ...]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The view of the whole base."""
        for step in self.steps:
            whole = step(whole)
        return whole

    def __deepcopy__(self, memo: Any) -> View:
        raise refused(self.base.cut, "a view to be copied", "Clone it first.")


class Operators:
    """The rules for a class of tensors, looked up once for every operator."""

    def __init__(self, kind: type[Any]) -> None:
        self.kind = kind
        self.rules: dict[Any, Rule] = {}

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Do what ``func`` says."""
        rule = self.rules.get(func)
        if rule is None:
            rule = self.rules[func] = self._rule(func)
        return rule(func, args, kwargs)

    def _rule(self, func: Any) -> Rule:
        packet, name = func.overloadpacket, operator_name(func).removeprefix("aten::")
        written = _written(func)
        # An operator can be of several kinds, so the order of these questions counts: what would be
        # wrong as a later kind is asked first.
        if func in (aten.detach.default, aten.alias.default):
            return self._alias
        if func.namespace in COLLECTIVES:
            return _refuse_collective
        if packet in MEMORY:
            return _refuse_memory
        if func.is_view:
            return self._viewed
        if torch.Tag.nondeterministic_seeded in func.tags:
            # Drawn part by part, ranks with one seed would have the same numbers in every part.
            return partial(self._drawn, written)
        if func in (aten.is_same_size.default, aten.is_pinned.default):
            return _asked
        if packet in reductions.WHOLE and not written and func not in reductions.WITH_INDICES:
            return partial(self._reduced, reductions.WHOLE[packet])
        # Called like an operator on lists, but its results are numbers over all ranks and not
        # parts.
        if packet is aten._foreach_norm:
            return self._norms
        if packet is aten._amp_foreach_non_finite_check_and_unscale_:
            return self._unscaled
        if name.startswith(("_foreach_", "_fused_")) and packet not in reductions.OF_LISTS:
            return partial(self._lists, written)
        if packet in ELEMENTWISE or torch.Tag.pointwise in func.tags:
            return partial(self._elementwise, written)
        if packet in NEW:
            return self._new
        return partial(self._on_wholes, written)

    # ---- element by element ----------------------------------------------------------------------

    def _elementwise(self, written: Sequence[str], func: Any, args: Any, kwargs: Any) -> Any:
        kind = self.kind
        kwargs.pop("memory_format", None)  # of the whole tensor, which parts do not have
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
        shards = [t for t in tensors if type(t) is kind]
        target = _of_names(func, args, kwargs, written)[0] if written else None
        like = shards[0] if target is None else target
        # The result has the shape that all broadcast to. If no sharded operand has it, this rank's
        # part of the result is not made of parts.
        if any(t is not like and t.dim() for t in tensors) and target is None:
            shape = torch.broadcast_shapes(*(t.shape for t in tensors))
            like = next((s for s in shards if s.shape == shape), None)
        if type(like) is not kind or any(s.view_of_base is not None for s in shards):
            return self._on_wholes(written, func, args, kwargs)
        cut = like.cut
        found = func(
            *[self._local(v, cut) for v in args],
            **{name: self._local(v, cut) for name, v in kwargs.items()},
        )
        if target is None:
            return self._wrapped(found, cut)
        increment_version(target._local_tensor)  # beneath autograd nobody else does
        return target

    def _local(self, value: Any, cut: Cut) -> Any:
        """What meets the local part of a tensor that is cut like ``cut``."""
        if type(value) is self.kind and (value.cut is cut or value.cut.key == cut.key):
            return value._local_tensor
        if not isinstance(value, torch.Tensor):
            return value
        # Autograd does not see it being cut here, and would give it the gradient of a part.
        if torch.is_grad_enabled() and value.requires_grad:
            raise refused(cut, f"an operand of shape {tuple(value.shape)} that is not cut like it")
        if not value.dim() and not isinstance(value, DTensor):
            return value
        if isinstance(value, DTensor):
            value = value.full_tensor()
        # One number meets a part of any shape; cut, it would be on one rank.
        if value.numel() == 1:
            return value.reshape(1)
        return cut.part(value.expand(cut.shape))

    def _wrapped(self, found: Any, cut: Cut) -> Any:
        if isinstance(found, torch.Tensor):
            return self.kind(found, cut)
        if isinstance(found, tuple | list):
            return type(found)(self._wrapped(each, cut) for each in found)
        return found

    def _lists(self, written: Sequence[str], func: Any, args: Any, kwargs: Any) -> Any:
        """Operators on lists: what is at one place of all lists belongs together."""
        # Loops and comprehensions, for an optimizer's step comes here with a list for every state;
        # generators would take twice the time.
        kind = self.kind
        lists = [v for v in (*args, *kwargs.values()) if isinstance(v, list | tuple)]
        if [v for values in lists for v in values if type(v) is kind and v.view_of_base]:
            return self._on_wholes(written, func, args, kwargs)
        targets = _of_names(func, args, kwargs, written)
        cuts = self._cuts(lists, targets)
        if WHOLE in cuts:
            rows = (zip(cuts, v, strict=False) for v in targets if isinstance(v, list | tuple))
            if any(cut is WHOLE and type(v) is kind for row in rows for cut, v in row):
                return self._on_wholes(written, func, args, kwargs)

        def local(value: Any) -> Any:
            if not isinstance(value, list | tuple):
                return value
            return [
                v._local_tensor
                if type(v) is kind and (v.cut is cut or (cut is not WHOLE and v.cut.key == cut.key))
                else self._at(cut, v)
                for cut, v in zip(cuts, value, strict=False)
            ]

        found = func(*map(local, args), **{name: local(v) for name, v in kwargs.items()})
        parts = [t if isinstance(t, list | tuple) else (t,) for t in targets]
        increment_version([t._local_tensor for ts in parts for t in ts if type(t) is kind])
        if not isinstance(found, list | tuple) or targets:
            return found
        return [
            self._wrapped(each, cut) if isinstance(cut, Cut) else each
            for each, cut in zip(found, cuts, strict=True)
        ]

    def _cuts(self, lists: Sequence[Any], targets: Sequence[Any]) -> list[Cut | str | None]:
        """For every place the cut in which it is computed; ``WHOLE`` where a whole plain tensor is
        written, None where nothing is sharded by us."""
        kind = self.kind
        cuts: list[Any] = [None] * max(map(len, lists))
        for values in lists:
            for place, value in enumerate(values):
                if type(value) is kind and cuts[place] is None:
                    cuts[place] = value.cut
        for values in targets:
            for place, value in enumerate(values if isinstance(values, list | tuple) else ()):
                cut = cuts[place]
                if not isinstance(cut, Cut) or not value.dim():
                    continue
                if type(value) is kind:
                    cuts[place] = value.cut
                elif isinstance(value, DTensor):
                    self.cut_again(value, cut)
                else:
                    cuts[place] = WHOLE
        return cuts

    def _at(self, cut: Any, value: Any) -> Any:
        if isinstance(cut, Cut):
            return self._local(value, cut)
        if not isinstance(value, DTensor):
            return value
        return value.full_tensor() if cut is WHOLE else value._local_tensor

    def cut_again(self, value: DTensor, cut: Cut) -> None:
        """A DTensor that torch cut, such as a state that it loaded for a parameter: from now on it
        is cut like the parameter."""
        local = cut.part(value.full_tensor()).clone()
        value.__class__ = self.kind
        value._local_tensor, value._spec = local, cut.spec(local.dtype)
        value.cut, value.view_of_base, value.home = cut, None, None  # type: ignore[attr-defined]

    # ---- views, random numbers, new tensors ------------------------------------------------------

    def _alias(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        spec, view = tensor._spec, tensor.view_of_base
        return self.kind(tensor._local_tensor, tensor.cut, view=view, spec=spec)

    def _viewed(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor, rest = args[0], args[1:]
        # On meta, which says shape and dtype of the view without a collective.
        probe = func(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), *rest, **kwargs)
        if func.overloadpacket in SAME and probe.shape == tensor.shape:
            return self._alias(func, args, kwargs)
        earlier = tensor.view_of_base or View(tensor, ())

        def made(result: torch.Tensor, place: int | None = None) -> Any:
            def step(whole: torch.Tensor) -> torch.Tensor:
                found = func(whole, *rest, **kwargs)
                return found if place is None else found[place]

            view = View(earlier.base, (*earlier.steps, step))
            spec, local = tensor.cut.spec_of_view(result), tensor._local_tensor
            if result.dtype is not local.dtype:  # a wrapper says its part's dtype
                local = local.new_empty(0, dtype=result.dtype)
            return self.kind(local, tensor.cut, view=view, spec=spec)

        if isinstance(probe, torch.Tensor):
            return made(probe)
        return [made(result, place) for place, result in enumerate(probe)]

    def _drawn(self, written: Sequence[str], func: Any, args: Any, kwargs: Any) -> Any:
        """Random numbers for a whole tensor, of which each rank keeps its part."""
        tensor, rest = args[0], args[1:]
        like = not written and operator_name(func).endswith("_like")
        if type(tensor) is not self.kind or tensor.view_of_base is not None:
            return self._on_wholes(written, func, args, kwargs)
        if written != ("self",) and not like:
            return self._on_wholes(written, func, args, kwargs)
        rest = [v.full_tensor() if isinstance(v, DTensor) else v for v in rest]
        local, cut = tensor._local_tensor, tensor.cut
        # All of it on every rank, although a part is kept: so generators advance alike, as in one
        # process.
        whole = func(local.new_empty(cut.shape), *rest, **kwargs)
        if like:
            return self.kind(cut.part(whole).clone(), cut)
        local.copy_(cut.part(whole))
        increment_version(local)
        return tensor

    def _new(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A plain tensor. But an empty one of this shape on a device that is named, with which
        torch's ``StateDictStager`` begins a copy, is cut alike."""
        tensor, size, *rest = args
        copied = func.overloadpacket is aten.new_empty and kwargs.get("device") is not None
        if copied and tensor.view_of_base is None and tuple(size) == tuple(tensor.shape):
            return self.kind(func(tensor._local_tensor, tensor.cut.sizes, **kwargs), tensor.cut)
        return func(tensor._local_tensor, size, *rest, **kwargs)

    # ---- reductions ------------------------------------------------------------------------------

    def _reduced(self, how: reductions.Reduction, func: Any, args: Any, kwargs: Any) -> Any:
        bound = _bound(func, args, kwargs)
        tensor = bound["self"]
        other = bound.get("other", bound.get("tensor"))
        simple = type(tensor) is self.kind and tensor.view_of_base is None
        if not simple or not reductions.is_full(bound, tensor.dim()):
            return self._on_wholes((), func, args, kwargs)
        if other is not None and other.shape != tensor.shape:
            return self._on_wholes((), func, args, kwargs)
        cut = tensor.cut
        if cut.is_of_many and how is reductions.norm:
            raise norm_of_many(cut.fqn)
        if other is not None:
            bound["other"] = self._local(other, cut)
        found = how(tensor._local_tensor, cut, bound)
        if bound.get("keepdim"):
            found = found.view((1,) * tensor.dim())
        return found

    def _norms(self, func: Any, args: Any, kwargs: Any) -> Any:
        bound = _bound(func, args, kwargs)
        given, order = bound["self"], float(bound.get("ord", 2.0))
        parts = []
        for tensor in given:
            if type(tensor) is self.kind and tensor.view_of_base is None:
                if tensor.cut.is_of_many:
                    raise norm_of_many(tensor.cut.fqn)
                parts.append((tensor._local_tensor, tensor.cut.comm))
            else:
                plain = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                parts.append((plain, None))
        norms = reductions.norms(parts, order)
        wanted = bound.get("dtype")
        return [n.to(wanted or t.dtype) for n, t in zip(norms, given, strict=True)]

    def _unscaled(self, func: Any, args: Any, kwargs: Any) -> None:
        """Unscale gradients; one that is not finite on some rank is none on any."""
        gradients, found, scale = args
        shards = [g for g in gradients if type(g) is self.kind]
        others = [g for g in gradients if type(g) is not self.kind]
        func([g._local_tensor for g in shards], found, scale)
        if others:
            func(others, found, scale)
        # GradScaler skips a step where this is set. Set on some ranks only, those would keep
        # weights that the others change.
        for comm in {id(s.cut.comm): s.cut.comm for s in shards}.values():
            comm.all_reduce("gradients that are not finite", found, largest=True)

    # ---- everything else -------------------------------------------------------------------------

    def _on_wholes(self, written: Sequence[str], func: Any, args: Any, kwargs: Any) -> Any:
        leaves, tree = tree_flatten((args, kwargs))
        shards = [leaf for leaf in leaves if type(leaf) is self.kind]
        targets = _of_names(func, args, kwargs, written)
        theirs = [t for t in targets if isinstance(t, DTensor) and type(t) is not self.kind]
        if theirs:
            return self._on_dtensors(theirs[0], func, args, kwargs)
        wholes: dict[int, torch.Tensor] = {}

        def whole(leaf: Any) -> Any:
            if type(leaf) is not self.kind:
                return leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
            view = leaf.view_of_base or View(leaf, ())
            # One whole for all views of a tensor, or one would not see what is written through
            # another.
            if id(view.base) not in wholes:
                wholes[id(view.base)] = view.base.gathered()
            return view.of(wholes[id(view.base)])

        args, kwargs = tree_unflatten([whole(leaf) for leaf in leaves], tree)
        found = func(*args, **kwargs)
        # Gathering is not recorded, so a gradient would end here, silently.
        if torch.is_grad_enabled() and any(shard.requires_grad for shard in shards):
            _refuse_training(shards, func, found)
        for target in _flat(targets):
            if type(target) is self.kind:
                base = target.view_of_base.base if target.view_of_base else target
                base._local_tensor.copy_(base.cut.part(wholes[id(base)]))
                increment_version(base._local_tensor)
        if len(targets) == 1 and isinstance(found, torch.Tensor):
            return targets[0]
        return found

    def _on_dtensors(self, like: DTensor, func: Any, args: Any, kwargs: Any) -> Any:
        """A tensor that torch cut is written: the others come as it is cut."""

        def theirs(leaf: Any) -> Any:
            if type(leaf) is not self.kind:
                return leaf
            return leaf.detach().redistribute(like.device_mesh, like.placements)

        args, kwargs = tree_map(theirs, (args, kwargs))
        return func(*args, **kwargs)

    def as_part(self, value: Any, cut: Cut) -> Any:
        """``value`` cut like ``cut``: a tensor of ours or torch's, or a whole plain one."""
        if type(value) is self.kind and value.cut.key == cut.key and value.view_of_base is None:
            return value
        if not isinstance(value, torch.Tensor) or value.shape != cut.shape:
            found = (
                f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            )
            raise InputError(cut.fqn, f"shape {tuple(cut.shape)}, the whole tensor's", found[:60])
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        return self.kind(cut.part(whole.detach()).clone(), cut)


def refused(cut: Cut, what: str, remedy: str = "") -> UnsupportedError:
    """What a sharded tensor cannot answer."""
    usual = "Use full_tensor(), or its unit's unsharded()."
    return UnsupportedError(
        cut.fqn, "a use that a sharded tensor has an answer to", what, remedy or usual
    )


def _refuse_collective(func: Any, args: Any, kwargs: Any) -> Any:
    shard = next(leaf for leaf in tree_flatten((args, kwargs))[0] if hasattr(leaf, "cut"))
    name = operator_name(func).partition("::")[2].rstrip("_")
    remedy = "Gradients are means over ranks already; broadcast or compare full_tensor()."
    raise refused(shard.cut, f"{name}, for ranks have different parts", remedy)


def _refuse_memory(func: Any, args: Any, kwargs: Any) -> Any:
    shard = next(leaf for leaf in tree_flatten((args, kwargs))[0] if hasattr(leaf, "cut"))
    raise refused_memory(shard.cut, operator_name(func).partition("::")[2])


def refused_memory(cut: Cut, what: str) -> UnsupportedError:
    """It would lie elsewhere than its unit's others."""
    remedy = "Copy values with copy_(); its memory is a part of its unit's."
    return refused(cut, f"{what}, which gives it other memory", remedy)


def _refuse_training(shards: Sequence[Any], func: Any, found: Any) -> None:
    leaves = [leaf for leaf in tree_flatten(found)[0] if isinstance(leaf, torch.Tensor)]
    if not any(leaf.is_floating_point() or leaf.is_complex() for leaf in leaves):
        return
    shard = next(s for s in shards if s.requires_grad)
    raise refused(
        shard.cut,
        f"{operator_name(func).removeprefix('aten::')} with a graph",
        "Train through it inside its unit's forward; use full_tensor() in a loss that is the same "
        "on every rank, and detach() to look.",
    )


def _asked(func: Any, args: Any, kwargs: Any) -> bool:
    """What torch asks of tensors, not of their elements."""
    if func is aten.is_same_size.default:
        return bool(args[0].shape == args[1].shape)
    return bool(args[0]._local_tensor.is_pinned())


def _written(func: Any) -> tuple[str, ...]:
    """The names of the arguments that an operator writes."""
    return tuple(
        argument.name
        for argument in schema_of(func).arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _bound(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments that were given, by name."""
    names = (argument.name for argument in schema_of(func).arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _of_names(func: Any, args: Any, kwargs: Any, names: Sequence[str]) -> list[Any]:
    if not names:
        return []
    bound = _bound(func, args, kwargs)
    return [bound[name] for name in names if bound.get(name) is not None]


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    """Arguments, and what is in those that are lists."""
    for value in values:
        yield from value if isinstance(value, list | tuple) else (value,)
