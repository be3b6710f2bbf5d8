"""The storages that are alive, and what each is for: followed under a dispatch mode.

A storage counts once however many views it has, from its first tensor until it is freed or resized
to nothing. The mode sees each new tensor below autograd; memory inside one kernel, the interpreter
and the allocator's own are not seen.
"""

# Why a dispatch mode: below autograd every tensor that an operation makes passes by, also those
# that autograd makes in a backward, which no hook of Python sees. What must stay true: a storage
# is known by its key and never held; the tracker would otherwise be the reason for the memory
# that it reports.

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache, partial
from itertools import accumulate
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from shardwright.core.errors import UnsupportedError
from shardwright.core.timeline import Kind, Phase
from shardwright.tracker import private

GUESSED = 0  # by the phase that a storage was made in
MOVED = 1  # by the collective that moved it
INFERRED = 2  # by the place it was found in
DECLARED = 3  # by the model, the optimizer or the runtime that owns it


class Holding:
    """A storage: what it is for, how sure that is, its bytes now, and who made it.

    ``raw`` are its own bytes, ``size`` those that count: rounded up to ``grain``. ``operation``
    is what made it, until ``name`` says which tensor it is.
    """

    __slots__ = ("certainty", "grain", "kind", "module", "name", "operation", "raw", "size")

    def __init__(self, kind: Kind, certainty: int, operation: object, module: str | None) -> None:
        self.kind: Kind = kind
        self.certainty = certainty
        self.operation = operation
        self.module = module  # None outside of modules
        self.name = ""
        self.raw = -1
        self.grain = 1
        self.size = 0

    @property
    def label(self) -> str:
        """Its name, or the operation that made it."""
        return self.name or operation_name(self.operation)


def operation_name(operation: object) -> str:
    """``aten.mm`` for an operator, ``resize_`` for a text."""
    if isinstance(operation, str):
        return operation
    schema = private.schema_of(operation)
    name = schema.name if schema is not None else getattr(operation, "__name__", str(operation))
    return str(name).replace("::", ".")


# A moment of a log is a number of entries: 0 before the first, ``len(entries)`` now. What a storage
# is for is often found out after it was made (a gradient, when it is put in its place), so kinds
# are looked up when the log is read and hold from the storage's first byte on.


class Log:
    """``entries`` (a storage, bytes more or less, the module at work), and at which of them a phase
    or an iteration began.

    ``earlier`` are holdings that were there before the first entry and were found later.
    """

    def __init__(self) -> None:
        self.entries: list[tuple[Holding, int, str | None]] = []
        self.earlier: list[tuple[Holding, int]] = []
        self.turns: list[tuple[int, Phase]] = []
        self.iterations: list[tuple[int, int]] = []
        self._phase: Phase | None = None

    @property
    def now(self) -> int:
        """The present moment."""
        return len(self.entries)

    def turn(self, phase: Phase) -> None:
        """What comes belongs to ``phase``."""
        if phase != self._phase:
            self._phase = phase
            self.turns.append((len(self.entries), phase))

    def resize(self, held: Holding, size: int, module: str | None) -> None:
        """A storage has ``size`` bytes from now on."""
        before, held.size = held.size, size
        if before == size:
            return
        # Torch takes memory of the new size and copies, before it frees the old one.
        self.entries.append((held, size or -before, module))
        if before and size:
            self.entries.append((held, -before, None))

    def go(self, held: Holding) -> None:
        """A storage is freed; any thread may say so."""
        # A bare append: a storage may go in any thread, and appending to a list is the one thing
        # here that needs no lock.
        if held.size:
            self.entries.append((held, -held.size, None))

    def put_earlier(self, held: Holding) -> None:
        """What came last was there from the beginning."""
        if held.size and self.entries[-1][0] is held:
            self.entries.pop()
            self.earlier.append((held, held.size))

    # ---- reading ---------------------------------------------------------------------------------

    def totals(self) -> list[int]:
        """Live bytes at every moment."""
        base = sum(size for _, size in self.earlier)
        return list(accumulate((change for _, change, _ in list(self.entries)), initial=base))

    def kinds_at(self, moments: Iterable[int]) -> dict[int, dict[Kind, int]]:
        """Live bytes by kind at some moments, kinds without any left out."""
        live: Counter[Kind] = Counter()
        for held, size in self.earlier:
            live[held.kind] += size
        found: dict[int, dict[Kind, int]] = {}
        position = 0
        for moment in sorted(set(moments)):
            for held, change, _ in self.entries[position:moment]:
                live[held.kind] += change
            position = moment
            found[moment] = {kind: size for kind, size in live.items() if size}
        return found

    def alive_at(self, moment: int) -> dict[Holding, int]:
        """Bytes of every holding that was alive at ``moment``."""
        sizes = Counter(dict(self.earlier))
        for held, change, _ in self.entries[:moment]:
            sizes[held] += change
        return {held: size for held, size in sizes.items() if size}


CUDA_GRANULARITY = 512  # bytes: the CUDA caching allocator's smallest block, kMinBlockSize
_FRESH = torch.ops.aten.lift_fresh.default  # its argument is a constant that was just made
BEFORE = "made before"  # in place of an operation
_OTHERS = " and others"  # of one storage


class Follower(TorchDispatchMode):
    """Sees operations while it is entered; what storages do is written down by who inherits it."""

    def __init__(self, *, granularity: int | None, mixed: bool, device_type: str | None) -> None:
        super().__init__()
        self.storages = Storages(
            self, granularity=granularity, mixed=mixed, device_type=device_type
        )
        self._paused = 0
        self._following = ExitStack()

    def made_by(self, operation: object) -> Holding:
        """A holding of what ``operation`` makes now."""
        raise NotImplementedError

    def resize(self, held: Holding, size: int) -> None:
        """A storage has ``size`` bytes from now on, instead of ``held.size``."""
        raise NotImplementedError

    def free(self, held: Holding) -> None:
        """A storage is gone; any thread may say so."""
        raise NotImplementedError

    def change(self, held: Holding, new: Holding, size: int) -> None:
        """A storage is used for something else from now on."""
        self.free(held)
        self.resize(new, size)

    def run(self, function: Any, arguments: Any, keywords: Any) -> Any:
        """What an operation returns."""
        return function(*arguments, **keywords)

    def heed(self, function: Any, arguments: Any, keywords: Any, result: Any) -> bool:
        """An operation ran; whether it may return what it was given and nobody counts."""
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        """Run the operation and count the storages of what it returns."""
        return self.follow(function, types, arguments, keywords)

    def follow(self, function: Any, types: Any, arguments: Any, keywords: Any) -> Any:
        """The same, for modes that say for themselves whether torch's compiler may look into it."""
        if any(map(_unwraps, types)):
            return NotImplemented  # its parts come by on their own
        keywords = keywords or {}
        result = self.run(function, arguments, keywords)
        complete(function, arguments, result)
        if self._paused:
            return result
        # Most operations return what they made, and a storage that is not known is then new.
        # Backends of collectives also hand over buffers that they copied to themselves: those are
        # looked for among what was given before they are taken for new ones.
        foreign = self.heed(function, arguments, keywords, result)
        given = (*arguments, *keywords.values()) if foreign else None
        if isinstance(result, torch.Tensor):
            self.storages.see(result, function, given)
        elif isinstance(result, tuple | list):
            for leaf in tree_iter(result):
                if isinstance(leaf, torch.Tensor):
                    self.storages.see(leaf, function, given)
        return result

    def __enter__(self) -> Self:
        # A resize of a storage passes by no dispatch mode, so it is heard apart: FSDP2 frees
        # gathered parameters by resizing their storages to nothing, and would otherwise seem to
        # keep all of them.
        self._following.enter_context(private.following_resizes(self._resized))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._following.close()

    def _pause(self, on: bool) -> None:
        self._paused += 1 if on else -1

    def _resized(self, storage: torch.UntypedStorage) -> None:
        self.storages.resized(storage, take_up=False)


_unwraps = cache(private.unwraps_itself)


class Storages:
    """The table of what is alive. ``mode`` is whose fake tensors count, None for real ones;
    ``mixed``: all count. ``device_type`` "" is any but meta, None any.
    ``granularity`` None: as the allocator of each device rounds."""

    def __init__(
        self, follower: Follower, *, granularity: int | None, mixed: bool, device_type: str | None
    ) -> None:
        self.follower = follower
        self.mode: private.FakeTensorMode | None = None
        self.mixed = mixed
        self.device_type = device_type
        self._granularity = granularity
        self._known: dict[int, Holding] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    # ---- what is alive ---------------------------------------------------------------------------

    def live(self) -> Counter[Kind]:
        """Bytes alive by kind."""
        found: Counter[Kind] = Counter()
        # A copy in one go: storages go in any thread, while somebody reads.
        for held in list(self._known.values()):
            found[held.kind] += held.size
        return found

    def total(self) -> int:
        """Bytes alive."""
        return sum(held.size for held in list(self._known.values()))

    def held(self, tensor: torch.Tensor) -> Holding | None:
        """What a tensor is known for now; None for one that is not followed."""
        found = (
            self._known.get(private.key_of(p.untyped_storage()))
            for p in private.plain_parts(tensor)
        )
        return next((held for held in found if held is not None), None)

    def release(self) -> None:
        """Follow nothing any more; what is alive stays as it was."""
        # The weak references alone call back: without them nothing is heard any more, and what is
        # known stays to be read.
        self._references.clear()

    # ---- what is known ---------------------------------------------------------------------------

    def assign(self, tensor: torch.Tensor, kind: Kind, certainty: int, name: str = "") -> None:
        """A storage is of ``kind``, if nothing surer is known.

        What was less sure before was wrong all the time; what was as sure is over.
        """
        for part, storage, held in self._counted(tensor):
            if held is None:
                held = self._add(storage, part, Holding(kind, certainty, BEFORE, None))
            # Surer knowledge puts right what was guessed from the storage's first byte on;
            # knowledge as sure is a change of use, such as a gradient that becomes the reduced one,
            # and counts from here on.
            elif certainty > held.certainty:
                held.kind, held.certainty = kind, certainty
            elif certainty == held.certainty >= INFERRED and kind != held.kind:
                held = self._change(private.key_of(storage), held, kind)
            if name and name != held.name and not held.name.endswith(_OTHERS):
                held.name = f"{held.name}{_OTHERS}" if held.name else name

    # ---- what comes and goes ---------------------------------------------------------------------

    def see(self, tensor: torch.Tensor, operation: Any, given: tuple[Any, ...] | None) -> None:
        """An operation returned ``tensor``. With ``given``, what is of a storage that it was given
        and that nobody counts is not counted now."""
        for part, storage, held in self._counted(tensor):
            if held is None:
                if given is None or not _is_of(storage, given):
                    self._add(storage, part, self.follower.made_by(operation))
            elif held.raw != storage.nbytes():  # grown by an out= argument
                self._measure(held, storage)

    def meet(self, tensor: torch.Tensor) -> list[Holding]:
        """Count storages that turn up without having been made; those that are new."""
        return [
            self._add(storage, part, Holding("input", GUESSED, BEFORE, None))
            for part, storage, held in self._counted(tensor)
            if held is None
        ]

    def resized(self, storage: torch.UntypedStorage, *, take_up: bool) -> None:
        """A storage was resized; ``take_up`` one that was not followed."""
        held = self._known.get(private.key_of(storage))
        if held is not None:
            self._measure(held, storage)
        elif take_up:
            is_fake = storage.device.type == "meta"  # as the storages of fake tensors say
            if is_fake == (self.mode is not None):
                self._add(storage, None, self.follower.made_by("resize_"))

    def _counted(
        self, tensor: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.UntypedStorage, Holding | None]]:
        """The parts of a tensor that count, their storages, and what these are known for."""
        for part in private.plain_parts(tensor):
            if self._counts(part):
                storage = part.untyped_storage()
                yield part, storage, self._known.get(private.key_of(storage))

    def _counts(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of a tensor, as it is or as it would be, is what is asked for."""
        if not self.mixed:
            mode = tensor.fake_mode if isinstance(tensor, private.FakeTensor) else None
            if mode is not self.mode:
                return False
        if self.device_type is None:
            return True
        found = device_type_of(tensor)
        return found == self.device_type if self.device_type else found != "meta"

    def _add(
        self, storage: torch.UntypedStorage, tensor: torch.Tensor | None, held: Holding
    ) -> Holding:
        key = private.key_of(storage)
        device = (self.device_type or "") if tensor is None else device_type_of(tensor)
        held.grain = self._granularity or granularity_of(device)
        self._known[key] = held
        # The callback has the key alone. A bound storage in it would keep alive what it waits for
        # to go.
        self._references[key] = weakref.ref(storage, partial(self._freed, key))
        self._measure(held, storage)
        return held

    def _measure(self, held: Holding, storage: torch.UntypedStorage) -> None:
        held.raw = size = storage.nbytes()
        if not isinstance(size, int):
            raise _unknown_size(size, held)
        self.follower.resize(held, -(-size // held.grain) * held.grain)

    def _change(self, key: int, held: Holding, kind: Kind) -> Holding:
        """The storage is used for something else from now on."""
        new = Holding(kind, held.certainty, held.operation, held.module)
        new.name, new.raw, new.grain = held.name, held.raw, held.grain
        # A new holding for the same storage: entries of the log name holdings, so what it was until
        # now stays what it was.
        self._known[key] = new
        self.follower.change(held, new, held.size)
        return new

    def _freed(self, key: int, _: object = None) -> None:
        self._references.pop(key, None)
        held = self._known.pop(key, None)
        if held is not None:
            self.follower.free(held)


def _unknown_size(size: object, held: Holding) -> UnsupportedError:
    made = operation_name(held.operation)
    where = f"module '{held.module}'" if held.module else "MemoryTracker"
    wanted = "tensors of known size"
    found = f"one of {size} bytes ({made if made == BEFORE else f'by {made}'})"
    return UnsupportedError(where, wanted, found, "Give the fake mode static shapes.")


def device_type_of(tensor: torch.Tensor) -> str:
    """Where a tensor is, or as a fake one says it would be."""
    device = tensor.fake_device if isinstance(tensor, private.FakeTensor) else tensor.device
    return str(device.type)


def _is_of(storage: torch.UntypedStorage, given: tuple[Any, ...]) -> bool:
    """Whether an operation was given ``storage``, rather than having made it."""
    key = private.key_of(storage)
    return any(
        private.key_of(part.untyped_storage()) == key
        for tensor in given_tensors(given)
        for part in private.plain_parts(tensor)
    )


def is_constant(function: Any) -> bool:
    """Whether an operation returns the tensor that it is given as one that was just made."""
    return function is _FRESH


def given_tensors(arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors among the arguments of an operation, also in lists."""
    found = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            found.append(argument)
        elif isinstance(argument, list | tuple):
            found.extend(leaf for leaf in argument if isinstance(leaf, torch.Tensor))
    return found


def granularity_of(device_type: str) -> int:
    """Bytes to which an allocation on a device is rounded up."""
    return CUDA_GRANULARITY if device_type == "cuda" else 1


PAGE = 4096  # oneDNN cuts its workspace by pages
LINE, ALIASED = 16, 256  # floats in a cache line; rows of a multiple of these get a line more
STATES, CELLS, GATES = 3, 2, 4  # buffers of an LSTM: over both widths, over its own; its gates


def complete(function: private.OpOverload, arguments: Sequence[Any], result: Any) -> None:
    """Give the results of a fake kernel the memory that the real one's have."""
    known = _WORKSPACES.get(private.operator_name(function))
    if known is None or not isinstance(result[known[0]], private.FakeTensor):
        return
    storage = result[known[0]].untyped_storage()
    # A fake kernel returns a workspace without bytes where the real one's size is known only to its
    # library.
    if not storage.nbytes():
        storage.resize_(known[1](arguments))


def lstm_workspace(arguments: Sequence[Any]) -> int:
    """Bytes of the workspace of oneDNN's LSTM layer in fp32 (3.x, AVX2; ``set_offsets`` and
    ``init_conf`` of its src/cpu/rnn/rnn_utils): gates, states, cells and the gradients' places."""
    inputs, hidden = arguments[0], int(arguments[10])
    steps, samples, wide = inputs.shape  # also where the module's own are batch first
    training = arguments[15]
    rows = samples * torch.float32.itemsize
    sizes = [
        steps * rows * _padded(GATES * hidden),
        steps * rows * _padded(hidden),
        *[2 * (steps + 1) * rows * _padded(max(wide, hidden))] * STATES,
        *[2 * (steps + 1) * rows * hidden] * CELLS,
    ]
    return sum(-(-size // PAGE) * PAGE for size in sizes) if training else 0


def _padded(width: int) -> int:
    """Floats of a row."""
    padded = -(-width // LINE) * LINE
    return padded + LINE if padded % ALIASED == 0 else padded


# By operator, which of its results, and their bytes by its arguments.
_WORKSPACES: dict[str, tuple[int, Callable[[Sequence[Any]], int]]] = {
    "aten::mkldnn_rnn_layer": (3, lstm_workspace)
}
