"""Who owns the memory of a training step: the model, its optimizers, its inputs, what FSDP2 makes.

They are heard through hooks, which also show the phases of a step and its iterations. torch keeps
the parts of FSDP2 in parameter groups, whose methods are wrapped while a tracker is at work. What a
method makes counts as that collective's buffer, unless it is found in a better place afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

from shardwright.core.errors import InputError, UnsupportedError
from shardwright.core.timeline import Kind, Phase
from shardwright.tracker import private
from shardwright.tracker.modules import Modules
from shardwright.tracker.storages import DECLARED, INFERRED, MOVED, given_tensors, is_constant

if TYPE_CHECKING:
    from shardwright.tracker.memory import MemoryTracker


class Owners:
    """The owners of one tracker's memory. ``phase`` is the one of the step outside of a backward
    and an optimizer."""

    def __init__(self, tracker: MemoryTracker, model: Any, optimizer: Any, inputs: Any) -> None:
        if not isinstance(model, nn.Module):
            raise InputError("model", "a torch.nn.Module", type(model).__name__)
        optimizers = [] if optimizer is None else optimizer
        self.optimizers = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
        for given in self.optimizers:
            if not isinstance(given, torch.optim.Optimizer):
                found = type(given).__name__
                raise InputError("optimizer", "a torch.optim.Optimizer, or several", found)
        self.tracker = tracker
        self.storages = tracker.storages
        self.model = model
        self.inputs = inputs
        self.phase: Phase = "setup"
        self.modules = Modules(model, tracker.log, self)
        self._hears_all = not self.optimizers
        self._own: list[torch.Tensor] = []  # the parameters that there were at first
        self._names: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> its name
        self._watched: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> its hook
        self._steps = 0  # under way: an optimizer may be made of others
        self._stepped = False
        self._awaiting_end = False
        self._ended = 0

    @property
    def first_tensor(self) -> torch.Tensor | None:
        """What shows the device, and whether the model is fake."""
        return next(
            chain(self.model.parameters(), self.model.buffers(), _tensors(self.inputs)), None
        )

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Count what is there, and hear what happens until the end."""
        self._refuse()
        self._take_stock()
        self.tracker.log.iterations.append((self.tracker.log.now, self.modules.iteration))
        with ExitStack() as around:
            around.enter_context(following_fsdp2(self.tracker, self.model))
            around.callback(self._unhook)
            self._hook_optimizers(around)
            self.modules.begin()
            around.callback(self.modules.end)
            around.callback(self._settle)
            yield

    def _refuse(self) -> None:
        for path, module in self.model.named_modules():
            if private.is_compiled(module):
                raise UnsupportedError(
                    f"module '{path or type(module).__name__}'",
                    "a module that runs operation by operation",
                    "a compiled one, whose memory no dispatch mode sees",
                    "Track the model without torch.compile.",
                )

    # ---- what is there at first ------------------------------------------------------------------

    def _take_stock(self) -> None:
        assign = self.storages.assign
        for name, parameter in self.model.named_parameters():
            self._own.append(parameter)
            self._names[parameter] = name
            assign(parameter, "weight", DECLARED, name)
        for optimizer in self.optimizers:
            # An optimizer may have parameters that are none of the model's, such as the flat ones
            # of a runtime: they are weights all the same.
            for number, parameter in enumerate(
                chain.from_iterable(g["params"] for g in optimizer.param_groups)
            ):
                if parameter not in self._names:
                    self._own.append(parameter)
                    self._names[parameter] = f"parameter {number} of the optimizer"
                assign(parameter, "weight", DECLARED)
            self._take_states(optimizer)
        self._take_gradients()
        for name, buffer in self.model.named_buffers():
            assign(buffer, "buffer", DECLARED, name)
        for number, leaf in enumerate(_tensors(self.inputs)):
            assign(leaf, "input", DECLARED, f"input {number}")

    def _take_states(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, states in optimizer.state.items():
            name = self._names.get(parameter, "") if torch.is_tensor(parameter) else ""
            for key, leaf in states.items() if isinstance(states, dict) else ():
                for tensor in _tensors(leaf):
                    self.storages.assign(tensor, "optimizer_state", DECLARED, f"{name}.{key}")

    def _take_gradients(self) -> None:
        """Every gradient that a parameter shows: between passes that is this rank's own part."""
        for parameter in self._own:
            if parameter.grad is not None:
                name = f"{self._names[parameter]}.grad"
                self.storages.assign(parameter.grad, "gradient", INFERRED, name)

    # ---- what the modules say --------------------------------------------------------------------

    def begin_forward(self) -> None:
        """A forward of the model begins, or of a part of it that is called on its own."""
        self._settle()
        while self._steps:  # one that raised, or whose closure this is
            self._steps -= 1
            self.tracker.end()
        # An iteration ends with the first forward after a step, not with the step: gradients are
        # often cleared after it, and several optimizers may step one after the other.
        if self._stepped:
            self._stepped = False
            self.modules.next_iteration()
            self.tracker.log.iterations.append((self.tracker.log.now, self.modules.iteration))
        self.phase = "forward"
        self.tracker.log.turn(self.tracker.phase)

    def begin_model(self, arguments: Any) -> None:
        """The forward of the whole model begins."""
        for number, leaf in enumerate(_tensors(arguments)):
            self.storages.assign(leaf, "input", INFERRED, f"input {number}")

    def end_model(self, output: Any) -> None:
        """The forward of the whole model is over; what follows, such as a loss, belongs to it."""
        for leaf in _tensors(output):
            self.storages.assign(leaf, "output", MOVED)

    def meet(self, path: str, module: nn.Module) -> None:
        """A module has its parameters as it computes with them: those that were not there at first
        are gathered ones."""
        for name, parameter in private.own_parameters(module).items():
            if parameter is None:
                continue
            fqn = self._names.setdefault(parameter, f"{path}.{name}" if path else name)
            self.storages.assign(parameter, "gathered_weight", INFERRED, fqn)
            if parameter.requires_grad and parameter.is_leaf and parameter not in self._watched:
                hook = parameter.register_post_accumulate_grad_hook(self._accumulated)
                self._watched[parameter] = hook

    def _accumulated(self, parameter: torch.Tensor) -> None:
        held = self.storages.held(parameter)
        # The gradient of a gathered parameter is whole and still to be reduced; that of any other
        # is the rank's own.
        whole = held is not None and held.kind == "gathered_weight"
        if parameter.grad is not None:
            kind: Kind = "unreduced_gradient" if whole else "gradient"
            name = f"{self._names.get(parameter, '')}.grad"
            self.storages.assign(parameter.grad, kind, INFERRED, name)

    # ---- what operations say ---------------------------------------------------------------------

    def heed(self, function: Any, arguments: tuple[Any, ...]) -> None:
        """An operation ran: count what it was given if nobody made it, and what a collective
        moved."""
        backward = private.in_backward()
        # autograd has no hook for the end of a backward. A callback that is queued while one runs
        # is called when it ends, and must be queued anew in each.
        if backward and not self._awaiting_end:
            self._awaiting_end = True
            # FSDP2 and DDP queue callbacks of their own, in which the last units reduce. One that
            # is queued by a callback comes after all that are there.
            private.after_backward(partial(private.after_backward, self._end_backward))
        # Gradients are enabled in a backward only while a checkpointed forward runs again (or a
        # second derivative is taken).
        computing = torch.is_grad_enabled() if backward else self.phase == "forward"
        kind = kind_moved(function, computing=computing)
        if kind is not None:
            first = self.modules.iteration == 1  # in which the buffers of DDP turn up
            for buffer in buffers_of(arguments):
                for held in reversed(self.storages.meet(buffer)):
                    if first:
                        self.tracker.log.put_earlier(held)
                self.storages.assign(buffer, kind, MOVED)
            return
        if backward or not computing or is_constant(function) or self.tracker.in_region:
            return  # backends copy what they move into buffers of their own, and hand it over then
        for tensor in given_tensors(arguments):
            self.storages.meet(tensor)

    # ---- the end of a backward, and steps --------------------------------------------------------

    def _end_backward(self) -> None:
        self._ended = self.tracker.log.now
        self._take_gradients()
        if self.phase == "forward":
            self.phase = "backward"  # until a step or a forward: gradients are clipped now
        self._awaiting_end = False

    def _settle(self) -> None:
        """No pass is under way; those of checkpoints within another one looked like ends, too."""
        self._awaiting_end = False
        self.modules.backwards.finish(self._ended)

    def _hook_optimizers(self, around: ExitStack) -> None:
        if self._hears_all:
            handles = [
                register_optimizer_step_pre_hook(self._before_step),
                register_optimizer_step_post_hook(self._after_step),
            ]
        else:
            handles = []
            for optimizer in self.optimizers:
                handles.append(optimizer.register_step_pre_hook(self._before_step))
                handles.append(optimizer.register_step_post_hook(self._after_step))
        for handle in handles:
            around.callback(handle.remove)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not private.in_backward():
            self._settle()
        self._steps += 1
        self.tracker.begin("step")

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._take_states(optimizer)
        if self._steps:
            self._steps -= 1
            self.tracker.end()
        self._stepped = True
        if not private.in_backward():
            self.phase = "setup"
            self.tracker.log.turn(self.tracker.phase)

    def _unhook(self) -> None:
        for hook in self._watched.values():
            hook.remove()
        self._watched.clear()


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_iter(values) if isinstance(leaf, torch.Tensor))


_GATHERS = ("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_")
_SCATTERS = ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_")
# These also carry activations of a forward, and tokens to experts: there they stay what they are.
_OTHERS = ("allreduce_", "allreduce_coalesced_", "alltoall_base_", "alltoall_", "broadcast_")
_TENSOR_ARGUMENTS = 2  # every one of these names its tensors first


@cache
def _kinds() -> dict[Any, Kind]:
    names: dict[str, Kind] = {
        **dict.fromkeys(_GATHERS, "all_gather"),
        **dict.fromkeys(_SCATTERS, "reduce_scatter"),
        **dict.fromkeys(_OTHERS, "communication"),
    }
    found: dict[Any, Kind] = {}
    for name, kind in names.items():
        packet = getattr(torch.ops.c10d, name, None)
        if packet is not None:
            found[packet.default] = kind
    return found


def kind_moved(function: Any, *, computing: bool) -> Kind | None:
    """What buffers of a collective are; None for other operators, and where it carries what a
    forward is ``computing``."""
    kind = _kinds().get(function)
    return None if computing and kind == "communication" else kind


def buffers_of(arguments: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    """The tensors that a collective moves."""
    todo = list(arguments[:_TENSOR_ARGUMENTS])
    while todo:
        argument = todo.pop()
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            todo.extend(argument)


_FSDP2 = "torch.distributed.fsdp"  # without it there are no units of FSDP2


@contextmanager
def following_fsdp2(tracker: MemoryTracker, model: nn.Module) -> Iterator[None]:
    """Mark the kinds of what FSDP2 holds for ``model``, and of what it makes."""
    groups = private.fsdp_groups(model) if _FSDP2 in sys.modules else []
    if not groups:
        yield
        return
    watch = _Groups(tracker)
    for group in groups:
        watch.take_stock(group)
    methods = {
        "unshard": watch.gather,
        "wait_for_unshard": watch.gather,
        "reshard": watch.reshard,
        "post_backward": watch.reduce,
    }
    with private.wrapping_groups(methods):
        yield


class _Groups:
    def __init__(self, tracker: MemoryTracker) -> None:
        self.tracker = tracker

    def take_stock(self, group: Any) -> None:
        """Also where the model is left gathered, and shows whole parameters."""
        self._assign_parameters(group)
        self._assign_gradients(group)

    def gather(self, group: Any, run: Callable[[], Any]) -> Any:
        with self.tracker.region("all_gather"):
            result = run()
        self._assign_parameters(group)
        return result

    def reshard(self, group: Any, run: Callable[[], Any]) -> Any:
        with self.tracker.region("gathered_weight"):  # a part of it, kept by fewer ranks
            return run()

    def reduce(self, group: Any, run: Callable[[], Any]) -> Any:
        self._assign_gradients(group)
        with self.tracker.region("reduce_scatter"):
            result = run()
        self._assign_gradients(group)
        return result

    def _assign_parameters(self, group: Any) -> None:
        for held in group.fsdp_params:
            self._assign(held.sharded_param, "weight")
            for whole in (*held.all_gather_outputs, *held._unsharded_inner_tensors):
                self._assign(whole, "gathered_weight")

    def _assign_gradients(self, group: Any) -> None:
        for held in group.fsdp_params:
            whole = getattr(held, "_unsharded_param", None)
            self._assign(getattr(whole, "grad", None), "unreduced_gradient")
            self._assign(held.unsharded_accumulated_grad, "unreduced_gradient")
            self._assign(held.sharded_param.grad, "gradient")

    def _assign(self, tensor: torch.Tensor | None, kind: Kind) -> None:
        if tensor is not None:
            self.tracker.storages.assign(tensor, kind, DECLARED)
