"""Modules that are built without memory, and get their numbers one tensor after the other.

A function runs on fake tensors while every operation is noted. The numbers of a tensor are those
of the operations that lead to it, run again for it alone, each with the state of the random
generator that it would have found: bit for bit what the function itself would have made.
"""

# A job's function may build tables of which no rank has room for one, and a plan must not change a
# run's numbers: so what is drawn is the numbers of one process, made tensor by tensor. For that
# the generator's state before each random operation is found again, by running what comes before
# it and dropping the result, in chunks where it can be. What cannot be followed is said
# (``NotDeferredError``), and the caller builds the module with memory instead.

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from shardwright.runtime.noted import (
    FILLS,
    NotedPlace,
    Operation,
    Serial,
    Stream,
    is_serial,
    places_in,
)
from shardwright.tracker.private import (
    key_of,
    operator_name,
    own_buffers,
    own_parameters,
    without_dispatch_modes,
    written_by,
)

Memory = dict[int, tuple[int, torch.UntypedStorage]]  # of storages: who wrote last, and the bytes


class NotDeferredError(Exception):
    """A function whose numbers cannot be made later; the text is what stands in the way."""


class Deferred(TorchDispatchMode):
    """While entered, operations are noted and run on fake CPU tensors.

    Seed the generators before, as before running the function itself. Numbers that the function
    asks for are made for it. Where it cannot be followed it goes on, on fake tensors alone.
    """

    def __init__(self, mode: FakeTensorMode | None = None) -> None:
        """``mode`` is the one of the fake tensors, which the caller enters; else one of its own."""
        super().__init__()
        self._enters = mode is None
        self._fake = mode or FakeTensorMode(allow_non_fake_inputs=True)
        self._operations: list[Operation] = []
        self._writers: dict[int, list[int]] = {}  # of every storage the operations, in order
        self._storages: list[torch.UntypedStorage] = []  # alive, so that addresses stay theirs
        self._numbers: dict[int, int] = {}  # of storages, by address
        self._constants: set[int] = set()  # storages with memory, made by no operation
        self._streams: dict[torch.Generator, Stream] = {}
        self._recent: Memory = {}  # of what was read last
        self._lost: NotDeferredError | None = None  # what could not be noted: nothing is from then

    def __enter__(self) -> Deferred:
        if self._enters:
            # Before this mode, as the last one that is entered hears first: it sees operators as
            # they were called, and the fake mode those that it lets through.
            self._fake.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._enters:
            self._fake.__exit__(*error)

    # ---- noting ----------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        try:
            # Before the call, which may change how a tensor lies (t_, resize_).
            places = tree_map(self._given, (arguments, keywords))
        except NotDeferredError as error:
            self._lost = self._lost or error
        if self._lost is not None:
            result = function(*arguments, **keywords)
            forget_conversions(self._fake)
            return result
        if function is torch.ops.aten._local_scalar_dense.default:
            # Somebody asks for a number, as item() does. A fake tensor has none, so what leads to
            # it is run now.
            return self._read(function, *places)
        try:
            result = function(*arguments, **keywords)
        except DataDependentOutputException:
            return self._read(function, *places)
        forget_conversions(self._fake)  # whose references let no module change its dtype
        try:
            self._note(function, *places, result)
        except NotDeferredError as error:
            self._lost = error
        return result

    def _given(self, value: Any) -> Any:
        """The place of a tensor that is an argument; other values as they are."""
        if isinstance(value, torch.UntypedStorage):
            raise NotDeferredError("memory that no operation has made, as of a file")
        if not isinstance(value, torch.Tensor):
            return value
        known = key_of(value.untyped_storage()) in self._numbers
        place = self.place(value)
        if not known:
            if isinstance(value, FakeTensor):
                raise NotDeferredError("memory that no operation has made, as of a file")
            self._constants.add(place.storage)
        return place

    def place(self, tensor: torch.Tensor) -> NotedPlace:
        """Where a fake tensor lies now."""
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            raise NotDeferredError("a tensor that is sparse or a conjugate")
        storage = tensor.untyped_storage()
        number = self._numbers.setdefault(key_of(storage), len(self._storages))
        if number == len(self._storages):
            self._storages.append(storage)
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return NotedPlace(number, tensor.dtype, shape, stride, int(tensor.storage_offset()))

    def _note(self, function: Any, arguments: Any, keywords: Any, result: Any) -> None:
        results = tree_leaves(
            tree_map(lambda v: self.place(v) if isinstance(v, torch.Tensor) else v, result)
        )
        places = [leaf for leaf in results if isinstance(leaf, NotedPlace)]
        makes = {p.storage for p in places} - self._constants - set(self._writers)
        written = places_in(written_by(function, arguments, keywords))
        if self._constants & {p.storage for p in written}:
            raise NotDeferredError("a change of a tensor that was there before")
        # Views are remembered by where they lie, and make no numbers.
        if not makes and not written:
            return  # a view
        fills = operator_name(function).removeprefix("aten::") in FILLS
        # A fill does not read what it fills: what was there before need not be made.
        read = places_in((arguments[1:], keywords) if fills else (arguments, keywords))
        index = len(self._operations)
        operation = Operation(
            function,
            arguments,
            {k: None if k == "generator" else v for k, v in keywords.items()},
            results,
            frozenset(makes),
            frozenset(p.storage for p in written),
            frozenset(p.storage for p in written if fills and self._is_whole(p)),
            frozenset(p.storage for p in read),
            self._turn(function, keywords.get("generator"), index),
        )
        self._operations.append(operation)
        for storage in operation.makes | operation.writes:
            self._writers.setdefault(storage, []).append(index)

    def _is_whole(self, place: NotedPlace) -> bool:
        """Whether the tensor is all of its storage."""
        reached = 1
        for stride, extent in sorted(zip(place.stride, place.shape, strict=True)):
            if extent != 1 and stride != reached:
                return False
            reached *= extent
        size = self._storages[place.storage].nbytes()
        return place.offset == 0 and reached * place.dtype.itemsize == size

    def _turn(
        self, function: Any, generator: torch.Generator | None, index: int
    ) -> tuple[Stream, int] | None:
        """The stream that the generator is in, a new one where it was seeded in between."""
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return None
        generator = generator or torch.default_generator
        if generator.device.type != "cpu":
            raise NotDeferredError(f"numbers drawn on '{generator.device}'")
        with without_dispatch_modes():
            state = generator.get_state()
            # Fake operators draw nothing, so the real generator stays as it was seeded. If it is
            # another now, somebody has seeded it since, and a new stream begins.
            stream = self._streams.get(generator)
            if stream is None or not torch.equal(stream.states[0], state):
                stream = self._streams[generator] = Stream([state])
        stream.operations.append(index)
        return stream, len(stream.operations) - 1

    # ---- running again ---------------------------------------------------------------------------

    def value(self, tensor: torch.Tensor | NotedPlace) -> torch.Tensor:
        """A fake tensor with its numbers, in memory of its own; a real one as it is."""
        if isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor):
            return tensor
        place = tensor if isinstance(tensor, NotedPlace) else self.place(tensor)
        with _again():
            found = self._leading_to([(place.storage, len(self._operations))])
            return place.over(self._run(found, {})[place.storage][1])

    def drawn(self, places: Any) -> Any:
        """A nest of places as tensors with other numbers: what leads to them is run, and nothing
        else, and draws from the default generator as it is now."""
        end = len(self._operations)
        found = self._leading_to((place.storage, end) for place in places_in(places))
        with torch.no_grad():
            real = self._run(found, {}, exact=False)
            return tree_map(lambda v: self._over(v, real), places)

    def _read(self, function: Any, arguments: Any, keywords: Any) -> Any:
        """What an operation says of numbers, no tensor. What led to them is kept until the next,
        for functions often ask in a loop."""
        wanted = [(p.storage, len(self._operations)) for p in places_in((arguments, keywords))]
        with without_dispatch_modes(), _again():
            # Functions that ask for numbers ask in loops. From the beginning each time, that would
            # be quadratic.
            real = self._recent
            ready = {storage: index for storage, (index, _) in real.items()}
            found = self._leading_to(wanted, ready)
            # Memory cannot go back: an operation that wrote before it was left so would write over
            # what came later.
            if any(self._undoes(index, ready) for index in found):
                found, real = self._leading_to(wanted), {}
            real = self._run(found, real)
            touched = {s for s, _ in wanted}.union(*(self._operations[i].touches for i in found))
            self._recent = {storage: real[storage] for storage in touched & set(real)}
            given, options = tree_map(lambda v: self._over(v, real), (arguments, keywords))
            answer = function(*given, **options)
        if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(answer)):
            raise NotDeferredError("a tensor whose shape depends on numbers")
        return answer

    def _over(self, value: Any, real: Memory) -> Any:
        """A place as a tensor over ``real``, of which it gets some if it is about to be filled."""
        if not isinstance(value, NotedPlace):
            return value
        held = self._storages[value.storage]
        if value.storage in self._constants:
            return value.over(held)
        if value.storage not in real:
            real[value.storage] = (-1, torch.UntypedStorage(held.nbytes()))
        return value.over(real[value.storage][1])

    def _undoes(self, index: int, ready: Mapping[int, int]) -> bool:
        """Whether an operation writes what a later one has left in memory that is ready."""
        operation = self._operations[index]
        return any(ready.get(s, -1) >= index for s in operation.makes | operation.writes)

    def _leading_to(
        self, wanted: Iterable[tuple[int, int]], ready: Mapping[int, int] | None = None
    ) -> list[int]:
        """The operations that the numbers of storages, each before an operation, come from; but
        for storages that are ``ready`` as an operation has left them."""
        stack, seen = list(wanted), set()
        while stack:
            storage, before = stack.pop()
            for index in reversed(self._writers.get(storage, ())):
                if index >= before:
                    continue
                if (storage, index) in seen or (ready and ready.get(storage) == index):
                    break
                seen.add((storage, index))
                operation = self._operations[index]
                stack.extend((read, index) for read in operation.reads)
                # What was written to it before that does not count.
                if storage in operation.makes or storage in operation.fills:
                    break
        return sorted({index for _, index in seen})

    def _run(self, indices: Sequence[int], real: Memory, *, exact: bool = True) -> Memory:
        """Run operations over the memory ``real``, and return that with what they made and filled;
        ``exact`` with the states of generators as they would have been."""
        for index in indices:
            operation = self._operations[index]
            turn = operation.turn if exact else None
            if turn is not None:
                # Every draw has the state that it would have found: what came before it is skipped
                # here, and took numbers then.
                torch.set_rng_state(self._state(*turn))
            arguments, keywords = tree_map(
                lambda v: self._over(v, real), (operation.arguments, operation.keywords)
            )
            leaves = tree_leaves(operation.function(*arguments, **keywords))
            if turn is not None and len(turn[0].states) == turn[1] + 1:
                # Kept, so that the next tensor in order need not draw this one again.
                turn[0].states.append(torch.get_rng_state())
            for place, found in zip(operation.results, leaves, strict=True):
                if isinstance(place, NotedPlace) and place.storage in operation.makes:
                    is_ours = key_of(found.untyped_storage()) in self._numbers  # a constant's
                    found = place.as_noted(found.clone() if is_ours else found)
                    real[place.storage] = (index, found.untyped_storage())
            for storage in operation.writes:
                real[storage] = (index, real[storage][1])
        return real

    def rows_of(self, place: NotedPlace) -> Serial | None:
        """The numbers of a matrix that is drawn row after row; None of another tensor."""
        found = self._leading_to([(place.storage, len(self._operations))])
        fills = [self._operations[index].fill_of(place) for index in found]
        first = self._operations[found[0]] if found else None
        if first is None or first.turn is None or not is_serial(fills, place):
            return None
        with _again():
            state = self._state(*first.turn)
        return Serial(fills, place.shape, place.dtype, state)  # type: ignore[arg-type]

    def _state(self, stream: Stream, turn: int) -> torch.Tensor:
        """The state at a turn, for which what comes before it draws, and is dropped."""
        while len(stream.states) <= turn:
            index = stream.operations[len(stream.states) - 1]
            drawn = self._drawn_alone(index, stream.states[-1])
            if drawn is not None:
                stream.states.append(drawn.after())
                continue
            needed = ((storage, index) for storage in self._operations[index].reads)
            self._run([*self._leading_to(needed), index], {})
        return stream.states[turn]

    def _drawn_alone(self, index: int, state: torch.Tensor) -> Serial | None:
        """What an operation draws, without the memory that it fills; None of others."""
        operation = self._operations[index]
        target = operation.arguments[0] if operation.fills else None
        fill = operation.fill_of(target) if isinstance(target, NotedPlace) else None
        if not is_serial([fill], target):
            return None
        return Serial([fill], target.shape, target.dtype, state)  # type: ignore[list-item,arg-type]

    # ---- a module --------------------------------------------------------------------------------

    def settle(self, module: nn.Module) -> None:
        """Let parameters be on the meta device, with ``module.initial_block`` for their numbers,
        and every other tensor of the module have its own. NotDeferredError if something of what
        was done could not be noted."""
        if self._lost is not None:
            raise self._lost
        names = {id(p): name for name, p in module.named_parameters()}
        sources: dict[str, NotedPlace | torch.Tensor] = {}
        done: dict[int, tuple[Any, Any]] = {}  # with what it was, so that its id stays its own

        def settled(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) not in done:
                if id(value) in names:
                    fake = isinstance(value, FakeTensor)
                    source = self.place(value) if fake else value.detach()
                    sources[names[id(value)]] = source
                    made: torch.Tensor = _on_meta(value)
                else:
                    made = self.value(value)
                done[id(value)] = (value, made)
                done[id(made)] = (made, made)  # which recurrent layers have in a list
            return done[id(value)][1]

        for part in module.modules():
            for name, value in [*own_parameters(part).items(), *own_buffers(part).items()]:
                if value is not None:
                    setattr(part, name, settled(value))
            for name, value in list(vars(part).items()):
                if name not in _OF_MODULES and _has_tensors(value):
                    vars(part)[name] = tree_map(settled, value)
        storages = [s.storage for s in sources.values() if isinstance(s, NotedPlace)]
        # They would be made one by one, and be two afterwards.
        if len(set(storages)) < len(storages):
            raise NotDeferredError("parameters that share memory")

        last: dict[str, Serial | torch.Tensor] = {}  # a table is asked for piece after piece

        def initial_block(
            fqn: str, offsets: tuple[int, ...], sizes: tuple[int, ...]
        ) -> torch.Tensor:
            if all(offset == 0 for offset in offsets) and sizes == tuple(sources[fqn].shape):
                last.clear()
                return self.value(sources[fqn])
            if fqn not in last:
                last.clear()
                source = sources[fqn]
                serial = self.rows_of(source) if isinstance(source, NotedPlace) else None
                last[fqn] = self.value(source) if serial is None else serial
            found = last[fqn]
            if isinstance(found, Serial):
                return found.block(offsets, sizes)
            return found[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]

        vars(module)["initial_block"] = initial_block

    def check_left(self) -> None:
        """NotDeferredError where someone has a fake tensor still: it would have no numbers.

        Nothing can be noted after it.
        """
        self._recent.clear()
        mode = weakref.ref(self._fake)  # which every fake tensor holds
        del self._fake
        # Cycles of a module that was just made are young; a whole collection looks at all that was
        # ever imported, too, which takes 0.3 s.
        for generation in range(3):
            if mode() is not None:
                gc.collect(generation)
        if mode() is not None:
            raise NotDeferredError("tensors that are neither the module's nor its inputs")


_OF_MODULES = frozenset(vars(nn.Module()))  # what every module has
_OF_FAKES = frozenset(("_is_param", *vars(FakeTensorMode().from_tensor(torch.empty(0)))))


def _on_meta(parameter: torch.Tensor) -> nn.Parameter:
    """The parameter without memory, and with what its user has set on it."""
    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    made = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    vars(made).update({k: v for k, v in vars(parameter).items() if k not in _OF_FAKES})
    return made


def _has_tensors(value: Any) -> bool:
    several = isinstance(value, (torch.Tensor, list, tuple, dict))
    return several and any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value))


def forget_conversions(mode: FakeTensorMode) -> None:
    """Drop torch's weak references to fake tensors, with which it converts no tensor twice and
    knows constants: they would let no module change its dtype."""
    converter = mode.fake_tensor_converter
    meta = converter.meta_converter
    converter.constant_storage_mapping.clear()
    meta.tensor_memo.clear()
    meta.describer.lookup_tensor.clear()


@contextmanager
def _again() -> Iterator[None]:
    """Operations run for real inside, and leave the default generator as it was."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        yield
