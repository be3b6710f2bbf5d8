"""Everything that one forward and backward takes and frees, in order.

A dispatch mode sees every tensor that an operation returns; a storage is taken with its first
tensor and freed when the last one is gone, exactly as the runtime's garbage collection does it.
Under fake tensors nothing is computed and nothing is allocated.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from shardwright.trace.tables import RoutedRows
from shardwright.trace.work import NOTHING, work_of
from shardwright.tracker.containers import map_tensors, tensors_in

What = Literal["take", "free", "gradient", "mark"]


TOLD = "_shardwright_module_told"  # on results whose gradient names the module that made them


class Record(NamedTuple):
    """``take`` or ``free`` of a storage; ``gradient``: it now is a parameter's; ``mark``: a unit
    gets to a ``name``, a :data:`~shardwright.core.recording.Point`. ``recomputed``: made by a
    module that runs again in the backward."""

    what: What
    storage: int
    nbytes: int
    name: str
    module: str
    recomputed: bool = False


class Recorder(TorchDispatchMode):
    """Use as a context around a forward and a backward; ``records`` is what happened.

    Storages that were there before are left out: those that ``adopt`` names, and those that an
    operation is given though none made them, whose bytes are ``given``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.records: list[Record] = []
        self.works = [NOTHING]  # between marks
        self.operators: set[str] = set()
        self.module = ""
        self.running = 0  # modules whose forward is under way
        self.given = 0
        # Units whose parameters no one else is to use, by storage; those that someone did use.
        self.homes: dict[int, str] = {}
        self.inside: set[str] = set()
        self.astray: set[str] = set()
        # the module that an error came from, by the error's id: itself would keep tensors alive
        self.failed: tuple[int, str] | None = None
        self._known: dict[int, tuple[int, int]] = {}
        self._finalizers: dict[int, weakref.finalize] = {}
        self._next = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        """Run the operation and note the storages of what it returns."""
        name = function._schema.name
        if function is not _FRESH:  # whose argument is a constant that was just made
            self._meet(arguments)
        result = function(*arguments, **(keywords or {}))
        self.operators.add(name)
        self.works[-1] += work_of(function, arguments, keywords or {}, result)
        if isinstance(result, torch.Tensor):
            self._note(result, name)
        elif isinstance(result, (tuple, list)):
            for leaf in result:
                if isinstance(leaf, torch.Tensor):
                    self._note(leaf, name)
        return result

    def adopt(self, tensor: torch.Tensor) -> None:
        """Leave out a storage that was there before."""
        storage = tensor.untyped_storage()
        self._known[storage._cdata] = (-1, storage.nbytes())
        if storage._cdata not in self._finalizers:
            self._finalizers[storage._cdata] = weakref.finalize(storage, self._gone, storage._cdata)

    def forget(self, tensor: torch.Tensor) -> None:
        """Leave out the storage that was taken last."""
        taken = self.records.pop()
        assert taken.what == "take"
        assert taken.storage == self.storage_of(tensor)
        storage = tensor.untyped_storage()
        self._finalizers.pop(storage._cdata).detach()
        self.adopt(tensor)

    def storage_of(self, tensor: torch.Tensor) -> int | None:
        """The number of a storage that is followed."""
        known = self._known.get(tensor.untyped_storage()._cdata)
        return known[0] if known else None

    def mark(self, unit: str, point: str) -> None:
        """A unit gets to a point of its step."""
        if point == "enter":
            self.inside.add(unit)
        elif point == "leave":
            self.inside.discard(unit)
        elif point == "backward":
            self.homes = {}  # what a backward needs of a unit, its forward has kept
        self.records.append(Record("mark", -1, 0, point, unit))
        self.works.append(NOTHING)

    def gradient(self, tensor: torch.Tensor, parameter: str) -> None:
        """``tensor`` is the gradient of ``parameter`` from now on."""
        number = self.storage_of(tensor)
        assert number is not None, f"the gradient of {parameter} was not seen"
        assert number >= 0, f"the gradient of {parameter} was there before"
        self.records.append(Record("gradient", number, 0, parameter, self.module))

    def place_of(self, error: BaseException) -> str:
        """The innermost module whose forward raised ``error``, else the one whose backward did."""
        if self.failed is not None and self.failed[0] == id(error):
            return self.failed[1]
        return self.module

    def close(self) -> None:
        """Stop following storages."""
        for finalizer in self._finalizers.values():
            finalizer.detach()
        self._finalizers.clear()
        self._known.clear()

    def _meet(self, arguments: Any) -> None:
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                home = self.homes.get(argument.untyped_storage()._cdata)
                if home is not None and home not in self.inside:
                    self.astray.add(home)
                if argument.untyped_storage()._cdata not in self._known:
                    self.given += argument.untyped_storage().nbytes()
                    self.adopt(argument)
            elif isinstance(argument, (tuple, list)):
                self._meet(argument)

    def _note(self, tensor: torch.Tensor, name: str) -> None:
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        known = self._known.get(storage._cdata)
        if known is None:
            number = self._follow(storage, nbytes)
            self.records.append(Record("take", number, nbytes, name, self.module, self.running > 0))
        elif known[1] != nbytes:  # grown by an out= argument, or resized
            self._resized(storage, nbytes, name)

    def _resized(self, storage: torch.UntypedStorage, nbytes: int, name: str) -> None:
        number, old = self._known[storage._cdata]
        if old:
            self.records.append(Record("free", number, old, "", self.module))
        self._known[storage._cdata] = (number, nbytes)
        if nbytes:
            self.records.append(Record("take", number, nbytes, name, self.module, self.running > 0))

    def _follow(self, storage: torch.UntypedStorage, nbytes: int) -> int:
        key, number = storage._cdata, self._next
        self._next += 1
        self._known[key] = (number, nbytes)
        self._finalizers[key] = weakref.finalize(storage, self._gone, key)
        return number

    def _gone(self, key: int) -> None:
        number, nbytes = self._known.pop(key)
        self._finalizers.pop(key, None)
        if nbytes and number >= 0:
            self.records.append(Record("free", number, nbytes, "", self.module))


_FRESH = torch.ops.aten.lift_fresh.default


@contextmanager
def watching(
    recorder: Recorder,
    root: nn.Module,
    units: dict[str, Sequence[nn.Module]],
    cast: torch.dtype | None,
) -> Iterator[None]:
    """Hooks that tell ``recorder`` where in the model it is, gone again at the end.

    A unit is entered with its first module's forward and left with its last one's; its backward
    begins with the gradient of its output and ends with that of its inputs. Floating inputs of
    every unit are cast to ``cast``, as mixed precision does it; a unit may be the root.
    """
    handles: list[Any] = []
    names = {module: name for name, module in root.named_modules()}
    for module in root.modules():
        handles.append(module.register_forward_pre_hook(_entering(recorder, names)))
        handles.append(module.register_forward_hook(_leaving(recorder, names), always_call=True))
    for name, parameter in root.named_parameters():
        if parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(_noting(recorder, name)))
    for module in root.modules():
        if isinstance(module, RoutedRows):
            module.mark = recorder.mark
    for name, modules in units.items():
        boundary = _Boundary(recorder, name, cast)
        for module in modules:
            first = module is modules[0]
            before = boundary.before if first else boundary.casting
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(modules[-1].register_forward_hook(boundary.after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module in root.modules():
            if isinstance(module, RoutedRows):
                module.mark = None


def _entering(recorder: Recorder, names: dict[nn.Module, str]) -> Callable[..., None]:
    def hook(module: nn.Module, arguments: Any) -> None:
        recorder.module = names[module]
        recorder.running += 1
        recorder.failed = None

    return hook


def _leaving(recorder: Recorder, names: dict[nn.Module, str]) -> Callable[..., None]:
    def hook(module: nn.Module, arguments: Any, result: Any) -> None:
        name = names[module]
        error = sys.exc_info()[1]  # this hook also runs while one passes through
        if error is not None and (recorder.failed is None or recorder.failed[0] != id(error)):
            recorder.failed = (id(error), name)
        recorder.module = name.rpartition(".")[0]
        recorder.running -= 1

        def backward(gradient: torch.Tensor) -> None:
            recorder.module = name  # until the gradient of another module's result arrives

        told = isinstance(result, torch.Tensor) and hasattr(result, TOLD)  # by a module inside
        if isinstance(result, torch.Tensor) and result.requires_grad and not told:
            setattr(result, TOLD, True)
            result.register_hook(backward)

    return hook


def _noting(recorder: Recorder, name: str) -> Callable[[torch.Tensor], None]:
    def hook(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        recorder.gradient(parameter.grad, name)

    return hook


class _Boundary:
    """Where a unit's forward and backward begin and end."""

    def __init__(self, recorder: Recorder, unit: str, cast: torch.dtype | None) -> None:
        self.recorder, self.unit, self.cast = recorder, unit, cast
        self.backward = False

    def casting(self, module: nn.Module, arguments: Any, keywords: Any) -> Any:
        """Floating inputs in the unit's dtype."""
        if self.cast is None:
            return arguments, keywords
        wanted = self.cast

        def cast(value: Any) -> Any:
            floating = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.to(wanted) if floating and value.dtype != wanted else value

        return tree_map(cast, arguments), tree_map(cast, keywords)

    def before(self, module: nn.Module, arguments: Any, keywords: Any) -> Any:
        """The unit is entered; its inputs go through a node that says when backward is done."""
        arguments, keywords = self.casting(module, arguments, keywords)
        self.recorder.mark(self.unit, "enter")
        given = [t for t in tensors_in((arguments, keywords)) if t.requires_grad]
        if given and torch.is_grad_enabled():
            left = iter(_Leave.apply(self.left, *given))
            arguments, keywords = map_tensors(
                lambda tensor: next(left) if tensor.requires_grad else tensor,
                (arguments, keywords),
            )
        return arguments, keywords

    def after(self, module: nn.Module, arguments: Any, result: Any) -> None:
        """The unit is left; the gradient of its result begins its backward."""
        for tensor in tensors_in(result):
            if tensor.requires_grad:
                tensor.register_hook(self.begin)
        self.recorder.mark(self.unit, "leave")

    def begin(self, gradient: torch.Tensor) -> None:
        """The first gradient of a result has arrived."""
        if not self.backward:
            self.backward = True
            self.recorder.mark(self.unit, "enter_backward")

    def left(self) -> None:
        """The gradients of the inputs are there; a module that ran twice has two backwards."""
        self.backward = False
        self.recorder.mark(self.unit, "leave_backward")


class _Leave(torch.autograd.Function):
    """Passes its inputs on, and says when their gradients are complete."""

    @staticmethod
    def forward(context: Any, left: Callable[[], None], *inputs: torch.Tensor) -> Any:
        context.left = left
        return tuple(value.detach() for value in inputs)  # which may be changed in place

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        context.left()
        return (None, *gradients)
