"""Optimizer state by the names of the unsharded model, however the optimizer sees its parameters.

An optimizer may have flat tensors that hold parts of many parameters, or one tensor for each. Its
state is cut, or joined, accordingly: a tensor of the parameter's shape is cut like the parameter,
one of a number for each block of elements like these blocks, a number such as ``step`` belongs to
every parameter that the tensor has. So a state has one value for some elements of a parameter: for
each, for as many as ``blocks`` of the optimizer says, or, ``ONCE``, for all.
"""

# A checkpoint knows parameters by name and no flat tensor, so that it loads into any optimizer over
# any cut: states are named, cut and joined here on their way out and in. A load must not leave an
# optimizer half old and half new, on this rank or on another: memory is prepared first, everything
# is checked on all ranks, and only ``install`` changes the optimizer.

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from shardwright.core.amount import ceil_div
from shardwright.core.errors import InputError, MismatchError, UnsupportedError
from shardwright.runtime.checkpoint.region import TensorPart, blocks_of
from shardwright.runtime.flat_tensors import FlatHome
from shardwright.runtime.model_parts import STATE, ModelPart
from shardwright.runtime.torch_private import local_of

State = dict[str, Any]
ONCE = 0


class Use(NamedTuple):
    """A part of a parameter that begins at ``start`` of an optimizer's flat tensor; None: the
    optimizer has the parameter itself."""

    part: ModelPart
    start: int | None = None

    def cut(self, value: torch.Tensor, block: int = 1) -> torch.Tensor:
        """The part's elements of a state tensor, or its blocks; they share memory."""
        local = local_of(value).detach()
        if self.start is None:
            return local
        first = self.start // block
        return local[first : first + ceil_div(self.part.numel, block)]

    def held(self, name: str, value: torch.Tensor, block: int) -> TensorPart:
        """What this rank has of a state tensor of the whole parameter."""
        held = self.part.held
        tensor, called = self.cut(value, block), state_name(held.name, name)
        if block == 1:
            return held._replace(name=called, tensor=tensor)
        whole, (offsets, sizes) = blocks_of(held.shape, held.offsets, held.sizes, block)
        return TensorPart(called, whole, offsets, sizes, tensor)


Uses = dict[nn.Parameter, list[Use]]


def as_optimizers(given: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    """One, several or no optimizers as a list."""
    if given is None:
        return []
    return [given] if isinstance(given, Optimizer) else list(given)


def uses_of(parts: Sequence[ModelPart], optimizer: Optimizer) -> Uses:
    """For every parameter of the optimizer, in its order, the parts of the model it has."""
    known: dict[int, list[Use]] = {id(part.parameter): [Use(part)] for part in parts}
    for unit in {id(p.unit): p.unit for p in parts if p.unit is not None}.values():
        # Flat tensors of no element here are known, too: the optimizer has them on every rank.
        known.update({id(each.flat.parameter): [] for each in unit.all_flat_parts})
    for part in parts:
        home = getattr(part.parameter, "home", None)
        if isinstance(home, FlatHome) and part.numel:
            known[id(home.flat.parameter)].append(Use(part, home.offset))
    found: Uses = {}
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise InputError(
                    f"optimizer.param_groups[{number}]['params'][{index}]",
                    "a parameter of the model, or of its last optimizer_parameters",
                    f"another tensor of shape {tuple(parameter.shape)}",
                    "Make the optimizer after sharding the model.",
                )
            found[parameter] = known[id(parameter)]
    return found


# ---- what there is -------------------------------------------------------------------------------


def per_block(optimizer: Optimizer) -> Mapping[str, int]:
    """States that have one number for so many elements."""
    return getattr(optimizer, "blocks", {})


def elements_per_value(
    fqn: str, name: str, value: Any, parameter: torch.Tensor, blocks: Mapping[str, int]
) -> int:
    """For how many elements of a parameter a state has one value."""
    if isinstance(value, int | float):
        return ONCE
    if isinstance(value, torch.Tensor):
        if local_of(value).shape == local_of(parameter).shape and name not in blocks:
            return 1
        if not value.dim():
            return ONCE
        if name in blocks:
            return blocks[name]
        found = f"one of shape {tuple(value.shape)}"
    else:
        found = f"a {type(value).__name__}"
    where = f"state '{name}' of {fqn}"
    remedy = "Save optimizers of this kind with optimizer.state_dict()."
    raise UnsupportedError(where, "a number or a tensor of the parameter's shape", found, remedy)


def named_state(
    uses: Uses, states: Mapping[Any, State], blocks: Mapping[str, int]
) -> Iterator[tuple[Use, str, Any, int]]:
    """Part, name, value and for how many elements there is one, for every state of an optimizer."""
    for parameter, parts in uses.items():
        for name, value in present(states.get(parameter, {})).items():
            for use in parts:
                # A parameter without elements has no state that could be told from none.
                if math.prod(use.part.held.shape):
                    each = elements_per_value(use.part.fqn, name, value, parameter, blocks)
                    yield use, name, value, each


def held_state(uses: Uses, optimizer: Optimizer, *, leads: bool) -> Iterator[TensorPart]:
    """The state as it is saved; that of parameters outside of units by the rank that leads."""
    for use, name, value, each in named_state(uses, optimizer.state, per_block(optimizer)):
        part = use.part
        # All ranks have it whole and alike, and one of them saves it.
        if not leads and part.unit is None:
            continue
        if each == ONCE:
            # By those who have some of the parameter, as of any other state of it.
            if part.numel:
                yield TensorPart(state_name(part.fqn, name), (), (), (), _as_tensor(value))
        else:
            yield use.held(name, value, each)


def state_name(fqn: str, name: str) -> str:
    """What a checkpoint calls a parameter's state."""
    return f"{STATE}{fqn}/{name}"


def present(state: Mapping[str, Any]) -> State:
    """The entries that are set; torch leaves some as None."""
    return {name: value for name, value in state.items() if value is not None}


def _as_tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach()
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


# ---- what will be there --------------------------------------------------------------------------


class Number(NamedTuple):
    """A number that is read for one parameter into a state that several may share."""

    parameter: nn.Parameter
    fqn: str
    name: str
    value: torch.Tensor


class Incoming:
    """State that is about to be loaded: memory for it, in place where the optimizer has some.

    ``names`` says which states each parameter will have. A parameter without any gets none, as
    before its first step. Nothing of the optimizer is replaced before ``install``.
    """

    def __init__(
        self, uses: Uses, optimizer: Optimizer, names: Mapping[str, Collection[str]]
    ) -> None:
        self.optimizer = optimizer
        self.states: dict[nn.Parameter, State] = {}
        self.tensors: list[tuple[Use, str, torch.Tensor, int]] = []
        self.numbers: list[Number] = []
        wanted = {p: _wanted(parts, names) for p, parts in uses.items()}
        # Before anything is read into it, state needs memory; what is there already is filled where
        # it is.
        lacking = [
            p for p, w in wanted.items() if w and present(optimizer.state.get(p, {})).keys() != w
        ]
        made = fresh_state(optimizer, lacking)
        for parameter, parts in uses.items():
            state = made.get(parameter) or present(optimizer.state.get(parameter, {}))
            if not wanted[parameter]:  # of no element the optimizer may have made one anyway
                state = {} if any(use.part.numel for use in parts) else state
            elif state.keys() != wanted[parameter]:
                raise _other_names(parts[0].part.fqn, optimizer, state, wanted[parameter])
            self.states[parameter] = state
            self._list(parameter, parts, state)

    def _list(self, parameter: nn.Parameter, parts: Sequence[Use], state: State) -> None:
        for use in parts:
            fqn = use.part.fqn
            if not math.prod(use.part.held.shape):
                continue
            for name, value in state.items():
                each = elements_per_value(fqn, name, value, parameter, per_block(self.optimizer))
                if each == ONCE:
                    # Aside from the optimizer's own, which several parameters share: they are
                    # compared before it is set.
                    room = torch.zeros_like(_as_tensor(value))
                    self.numbers.append(Number(parameter, fqn, name, room))
                else:
                    self.tensors.append((use, name, value, each))

    def held(self) -> Iterator[TensorPart]:
        """What is to be filled."""
        for number in self.numbers:
            yield TensorPart(state_name(number.fqn, number.name), (), (), (), number.value)
        for use, name, value, each in self.tensors:
            yield use.held(name, value, each)

    def check(self) -> None:
        """Raise MismatchError if parameters that share a number were given different ones."""
        first: dict[tuple[int, str], Number] = {}
        for number in self.numbers:
            other = first.setdefault((id(number.parameter), number.name), number)
            if not torch.equal(other.value, number.value):
                where = f"state '{number.name}' of {number.fqn}"
                wanted = f"{other.value.item()}, as of {other.fqn} in the same flat tensor"
                remedy = "Make the optimizer over model.parameters()."
                raise MismatchError(where, wanted, f"{number.value.item()}", remedy)

    def install(self) -> None:
        """Let the optimizer have the state, which is filled by now."""
        for number in self.numbers:
            state = self.states[number.parameter]
            present_value = state[number.name]
            if isinstance(present_value, torch.Tensor):
                # In place: the tensor is where, and in which dtype, the optimizer keeps it.
                present_value.copy_(number.value)
            else:
                state[number.name] = type(present_value)(number.value.item())
        for parameter, state in self.states.items():
            if state:
                self.optimizer.state[parameter] = state
            else:
                # None at all, and not an empty one: torch's optimizers make states only where there
                # is nothing.
                self.optimizer.state.pop(parameter, None)


def _wanted(parts: Sequence[Use], names: Mapping[str, Collection[str]]) -> set[str]:
    """The states that a parameter of the optimizer will have: the same for all parts of it."""
    found: set[str] | None = None
    first = ""
    for use in parts:
        if not math.prod(use.part.held.shape):
            continue
        own = set(names.get(use.part.fqn, ()))
        if found is None:
            found, first = own, use.part.fqn
        elif found != own:
            wanted = f"{_listed(found)}, as of {first} in the same flat tensor"
            remedy = "Make the optimizer over model.parameters()."
            raise MismatchError(f"optimizer state of {use.part.fqn}", wanted, _listed(own), remedy)
    return found or set()


def _other_names(
    fqn: str, optimizer: Optimizer, own: Collection[str], given: Collection[str]
) -> MismatchError:
    kind = type(optimizer).__name__
    wanted = f"{_listed(own)}, which {kind} keeps"
    remedy = "Make the optimizer with the options of the one that was saved."
    return MismatchError(f"optimizer state of {fqn}", wanted, _listed(given), remedy)


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def fresh_state(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> dict[Any, State]:
    """The state that ``parameters`` would have after a first step, zeroed where it is a tensor.

    One that can say so is asked for its ``initial_state``. A double of another one takes that step
    on a few zeros, so that neither the parameters, nor schedulers, nor hooks see it.
    """
    if not parameters:
        return {}
    initial = getattr(optimizer, "initial_state", None)
    if initial is not None:
        return {parameter: initial(parameter) for parameter in parameters}
    asked = {id(parameter) for parameter in parameters}
    # Not by its class, whose __init__ wants arguments that nobody has kept.
    double = object.__new__(type(optimizer))
    # Settings that are no group's go along; everything that a step writes is replaced below.
    double.__dict__.update(optimizer.__dict__)
    double.__dict__.pop("step", None)  # a scheduler's, which counts
    double._optimizer_step_pre_hooks = OrderedDict()
    double._optimizer_step_post_hooks = OrderedDict()
    stand_ins: dict[nn.Parameter, nn.Parameter] = {}
    double.param_groups = []
    for group in optimizer.param_groups:
        chosen = [p for p in group["params"] if id(p) in asked]
        stand_ins.update({p: _stand_in(p) for p in chosen})
        double.param_groups.append({**group, "params": [stand_ins[p] for p in chosen]})
    double.state = defaultdict(dict)
    for p, stand_in in stand_ins.items():  # what some make before their first step
        made = optimizer.state.get(p, {})
        double.state[stand_in] = {name: _small(value, p, stand_in) for name, value in made.items()}
    try:
        double.step()
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        wanted = "to take a step on zeros, which makes its state"
        remedy = "Take one step before loading."
        raise UnsupportedError(
            f"optimizer {type(optimizer).__name__}", wanted, f"'{reason}'", remedy
        ) from error
    return {
        p: {
            name: _like(value, stand_in, p)
            for name, value in present(double.state[stand_in]).items()
        }
        for p, stand_in in stand_ins.items()
    }


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """A small parameter that an optimizer treats as this one; of no shape that a number has."""
    # Two of each: of a size of one, a state of the parameter's shape could not be told from a
    # number.
    sizes = (2,) * max(1, parameter.dim())
    zeros = torch.zeros(sizes, dtype=parameter.dtype, device=local_of(parameter).device)
    made = nn.Parameter(zeros)
    made.grad = torch.zeros_like(made)
    return made


def _small(value: Any, parameter: torch.Tensor, stand_in: torch.Tensor) -> Any:
    """For the stand-in of ``parameter`` what a state of that is, to be changed."""
    if not isinstance(value, torch.Tensor):
        return copy.copy(value)
    if value.shape == parameter.shape:
        return torch.zeros_like(stand_in, dtype=value.dtype)
    return value.clone()


def _like(value: Any, stand_in: torch.Tensor, parameter: nn.Parameter) -> Any:
    """A state for ``parameter`` after the one that its stand-in has."""
    if isinstance(value, torch.Tensor) and value.shape == stand_in.shape:
        # Of the parameter's own kind: for a sharded one a sharded state.
        return torch.zeros_like(parameter, dtype=value.dtype, requires_grad=False)
    return value
