"""Activation checkpointing, by the names a job uses: what a block's forward keeps and what is
computed again in its backward.

Blocks are run through ``torch.utils.checkpoint`` without reentrance, as training code does it: by a
recording, which sees the copies, the recomputation and its early stop as they are, and by the
runtime. Policies by operator go by aten names; an operator that a lowering put in an other's place
answers to that other's name.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any, Literal, Self

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from shardwright.core.errors import InputError
from shardwright.job.memory import COSTLY, PRODUCTS
from shardwright.trace.lowering.kernels import aten_name
from shardwright.tracker.private import operator_name

Kind = Literal["none", "full", "operators", "core_attention"]

CORE_MODULES = ("core_attention", "inner_attention", "sdpa")  # Megatron, TorchTitan
NAMES = (
    "none, full, selective, selective_op, core_attention, layers:N, first:N or save:OPERATOR,..."
)

_ATTENTION = functional.scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class Policy:
    """``kept`` are the operators whose results stay, ``alternate`` those of which only the first,
    third, ... result does; every ``every``-th block is checkpointed, or the ``first`` ones are."""

    name: str
    kind: Kind
    kept: frozenset[str] = frozenset()
    alternate: frozenset[str] = frozenset()
    every: int = 1
    first: int = 0

    @property
    def picks_some(self) -> bool:
        """Whether it is of some blocks alone, by their places."""
        return self.every > 1 or self.first > 0

    @property
    def of_a_block(self) -> Policy:
        """The policy of those blocks that it picks."""
        return Policy("full", "full") if self.picks_some else self

    def turn(self, place: int) -> int:
        """Where a block stands in what the policy repeats, by its place from 0 on: it is picked at
        0, and blocks with the same are treated alike."""
        return int(place >= self.first) if self.first else (place + 1) % self.every

    def keeps(self) -> Callable[[str], bool]:
        """A fresh count: whether the result of the next operator of a name is kept."""
        # A fresh count for each forward: TorchTitan keeps every second product of a block, and
        # forward and recomputation must count alike, or one would save what the other one does not
        # ask for.
        products = itertools.count(1)

        def keep(name: str) -> bool:
            name = aten_name(name)
            if name in self.alternate:
                return next(products) % 2 == 1
            return name in self.kept

        return keep


def policy(name: str) -> Policy:
    """A policy by the name a job gives it."""
    head, _, rest = name.partition(":")
    if name == "none":
        return Policy(name, "none")
    if name == "full":
        return Policy(name, "full")
    if name in ("selective", "selective_op"):
        return Policy(name, "operators", COSTLY, PRODUCTS)
    if name == "core_attention":
        return Policy(name, "core_attention")
    if head in ("layers", "first") and rest.isdigit() and int(rest) > 0:
        return Policy(name, "full", **{"every" if head == "layers" else "first": int(rest)})
    if head == "save" and rest:
        kept = frozenset(_operator(name, part.strip()) for part in rest.split(","))
        return Policy(name, "operators", kept)
    raise InputError("memory.checkpointing", NAMES, f"'{name}'", "Choose one of these policies.")


def treated(places: Iterable[int], chosen: Policy) -> list[int]:
    """Which of the blocks at ``places`` a policy picks."""
    return [index for index, place in enumerate(places) if chosen.turn(place) == 0]


@dataclass
class Applied:
    """Modules whose ``forward`` was exchanged; leaving it undoes that. Their parameters and hooks
    are where they were."""

    blocks: list[nn.Module] = field(default_factory=list)

    def exchange(self, block: nn.Module, forward: Callable[..., Any]) -> None:
        """Let a module run ``forward``."""
        block.forward = forward
        self.blocks.append(block)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        for block in self.blocks:
            del block.forward
        self.blocks.clear()


def apply_checkpointing(
    blocks: Sequence[nn.Module],
    policy_name: str | Policy,
    *,
    preserve_rng_state: bool = False,
    early_stop: bool = True,
) -> Applied:
    """Checkpoint blocks in place: their ``forward`` is exchanged, so that hooks (of sharding, of a
    tracer) stay outside of the recomputation, as they do around a checkpoint wrapper.

    ``preserve_rng_state`` also keeps the state of the random generator, some kilobytes of the host.
    """
    chosen = policy(policy_name) if isinstance(policy_name, str) else policy_name
    applied = Applied()
    if chosen.kind == "none":
        return applied
    options: dict[str, Any] = {
        "use_reentrant": False,
        "preserve_rng_state": preserve_rng_state,
        "early_stop": early_stop,
    }
    for block in (blocks[place] for place in treated(range(len(blocks)), chosen)):
        for changed, run in _checkpointed(block, chosen, options):
            if "forward" in vars(changed):
                wanted = "a block that is not checkpointed yet"
                found = "one whose forward was exchanged"
                remedy = "Remove the other checkpointing first."
                raise InputError(type(changed).__name__, wanted, found, remedy)
            applied.exchange(changed, _Forward(changed, run))
    return applied


def _checkpointed(
    block: nn.Module, chosen: Policy, options: dict[str, Any]
) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """The modules to change, and what runs their forwards."""
    if chosen.kind == "core_attention":
        parts = [m for name, m in block.named_modules() if name.rpartition(".")[2] in CORE_MODULES]
        if not parts:
            yield block, partial(_with_attention, options)
        for part in parts:
            yield part, partial(checkpoint, **options)
        return
    if chosen.kind == "operators":
        options = options | {"context_fn": partial(_contexts, chosen)}
    yield block, partial(checkpoint, **options)


class _Forward:
    """The forward of a module, which ``run`` calls. The module is held weakly, as it holds this."""

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        self.module, self.run = weakref.ref(module), run

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        module = self.module()
        assert module is not None
        return self.run(MethodType(type(module).forward, module), *arguments, **keywords)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forward:
        return _Forward(copy.deepcopy(self.module(), memo), self.run)


def _contexts(chosen: Policy) -> Any:
    forward, again = chosen.keeps(), chosen.keeps()

    def decide(context: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
        keep = again if context.is_recompute else forward
        if keep(operator_name(operator)):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)


def _with_attention(
    options: dict[str, Any], forward: Callable[..., Any], *arguments: Any, **keywords: Any
) -> Any:
    with _attention_again(options):
        return forward(*arguments, **keywords)


@contextmanager
def _attention_again(options: dict[str, Any]) -> Iterator[None]:
    """Calls of scaled_dot_product_attention inside are checkpointed, whoever replaced it before."""
    # Whatever the name stands for now, perhaps a lowering's replacement, is what is checkpointed.
    current = functional.scaled_dot_product_attention
    attention = _Attention(partial(checkpoint, current, **options))
    functional.scaled_dot_product_attention = attention.run
    try:
        with attention:
            yield
    finally:
        functional.scaled_dot_product_attention = current


class _Attention(TorchFunctionMode):
    """The same for models that imported the function by its name; once, whoever asks first."""

    def __init__(self, again: Callable[..., Any]) -> None:
        super().__init__()
        self.again = again
        self.is_running = False

    def run(self, *arguments: Any, **keywords: Any) -> Any:
        """Attention, checkpointed."""
        self.is_running = True
        try:
            return self.again(*arguments, **keywords)
        finally:
            self.is_running = False

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        called = self.run if function is _ATTENTION and not self.is_running else function
        return called(*arguments, **(keywords or {}))


def _operator(policy_name: str, written: str) -> str:
    """``aten.mm`` or ``aten::mm`` as the dispatcher writes it."""
    space, _, rest = written.replace("::", ".").partition(".")
    known = bool(rest) and hasattr(getattr(torch.ops, space), rest.partition(".")[0])
    if not known:
        wanted = "operators of torch such as aten.mm after 'save:'"
        found = f"'{written}' in '{policy_name}'"
        raise InputError("memory.checkpointing", wanted, found, "Name operators as torch.ops does.")
    return f"{space}::{rest.partition('.')[0]}"
