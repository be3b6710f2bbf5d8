"""Where parameters start: any rectangle of their values, made without the whole of them.

Values come from weights that are there, from files of which a rectangle alone is read, from what
the model offers, or from a module's own initialisation. Of that it is noted on the meta device what
it does to the weight (``normal_``, then zeros in one row), and done to tiles of it, each of which
has random numbers of its own. So a rank draws what it keeps and no more, and a row starts alike
however a table is cut, on any number of ranks.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwright.core.block import Block
from shardwright.core.errors import InputError, RunError, ShardwrightError
from shardwright.runtime.checkpoint.agreement import reason, together, together_numbered
from shardwright.runtime.checkpoint.files import open_shard
from shardwright.runtime.comm import Comm
from shardwright.runtime.noted import ELEMENTWISE, FILLS, Fill
from shardwright.runtime.torch_private import set_version
from shardwright.tracker.private import key_of, operator_name, written_by

T = TypeVar("T")
Ints = tuple[int, ...]
InitialBlock = Callable[[str, Ints, Ints], torch.Tensor]
# What a user may name: an InitialBlock, or of each parameter a tensor, an array or a file
Initial = InitialBlock | Mapping[str, Any]

TILE = (4096, 8)  # rows and columns that are drawn together
REMEDY = (
    "Give the model initial_block(fqn, offsets, sizes), or pass initial={name: a tensor, an array, "
    "a .npy or .safetensors file}."
)


class InitialWeight(NamedTuple):
    """A parameter, which is ``name`` in ``owner``; ``more`` initialises it after the module."""

    fqn: str
    owner: nn.Module
    name: str = "weight"
    more: Callable[[torch.Tensor], Any] | None = None

    @property
    def weight(self) -> torch.Tensor:
        """The whole parameter, on the meta device once it was let go."""
        return getattr(self.owner, self.name)

    @property
    def own(self) -> list[Callable[[], Any]]:
        """What initialises it, of which the last decides."""
        module, more = getattr(self.owner, "reset_parameters", None), self.more
        found = [] if module is None else [module]
        return found if more is None else [*found, lambda: more(self.weight)]

    def let_go(self) -> None:
        """Free the whole weight."""
        weight = self.weight
        if not weight.is_meta:
            empty = torch.empty_like(weight, device="meta")
            setattr(self.owner, self.name, nn.Parameter(empty, weight.requires_grad))

    def block(self, fqn: str, offsets: Ints, sizes: Ints) -> torch.Tensor:
        """A rectangle of the whole weight."""
        return self.weight.detach()[_spans(offsets, sizes)]


def blocks_of_whole(weights: Mapping[str, torch.Tensor]) -> InitialBlock:
    """Rectangles of whole ``weights``, by offsets and sizes."""

    def block(name: str, offsets: Ints, sizes: Ints) -> torch.Tensor:
        return weights[name].detach()[_spans(offsets, sizes)]

    return block


def facts_of(starts: Sequence[InitialWeight], initial: Initial | None) -> dict[str, str]:
    """What ranks have to have in common for their parts to be of one table."""
    empty = ",".join(start.fqn for start in starts if start.weight.is_meta)
    frozen = ",".join(start.fqn for start in starts if not start.weight.requires_grad)
    given = ",".join(initial) if isinstance(initial, Mapping) else str(callable(initial))
    meta = "parameters on the meta device"
    return {meta: empty, "frozen parameters": frozen, "initial=": given}


def freeing(
    initial: InitialBlock, starts: Sequence[InitialWeight], blocks: Iterable[Block], rank: int
) -> InitialBlock:
    """``initial``, with which each whole weight goes once ``rank`` has taken all that it keeps of
    it, so that never all tables are there twice."""
    owners = {start.fqn: start for start in starts}
    left = dict.fromkeys(owners, 0)
    for block in blocks:
        if block.tensor in left and block.role == "parameter" and block.rank == rank:
            left[block.tensor] += math.prod(block.sizes)
    # What this rank keeps nothing of goes at once and not after the last table.
    for fqn, elements in left.items():
        if not elements:
            owners[fqn].let_go()

    def block_of(fqn: str, offsets: Ints, sizes: Ints) -> torch.Tensor:
        found = initial(fqn, offsets, sizes)
        # Counted in elements: blocks are asked for in pieces, of which nobody says which is the
        # last.
        left[fqn] -= math.prod(sizes)
        if not left[fqn]:
            owners[fqn].let_go()
        return found

    return block_of


def initial_blocks(
    model: nn.Module, starts: Sequence[InitialWeight], initial: Initial | None, comm: Comm
) -> InitialBlock:
    """Rectangles of the parameters of ``model`` (collective where one is on the meta device, or
    ``initial`` names something): the same error on every rank for what cannot be had.

    ``initial`` comes first, then weights that are there, then ``model.initial_block``, then a
    module's own initialisation. The seed is a number from the first rank's default generator.
    """
    named = {start.fqn: start for start in starts}
    if initial is None and not any(start.weight.is_meta for start in starts):
        # Nothing is read or drawn, so nothing can fail on one rank alone: no collective is needed.
        return lambda fqn, offsets, sizes: named[fqn].block(fqn, offsets, sizes)
    # Drawn on every rank, though the first one's counts: generators stay alike.
    drawn = int(torch.randint(2**31, (), device="cpu"))

    def failure(error: Exception) -> ShardwrightError:
        return InputError("initial", "values that can be read", f"'{reason(error)}'")

    sources, seed = together_numbered(
        comm, "starting values", lambda: _sources(model, named, initial), failure, drawn
    )

    def block(fqn: str, offsets: Ints, sizes: Ints) -> torch.Tensor:
        source = sources[fqn]
        if isinstance(source, Fills):
            return source.block(seed, offsets, sizes)
        return source(fqn, offsets, sizes)

    return block


def filled(comm: Comm, make: Callable[[], T]) -> T:
    """What ``make`` makes of starting values (collective): the error of a rank, whose values are
    none or whose memory does not do, is that of all."""

    def failure(error: Exception) -> ShardwrightError:
        return RunError("tables", "values and memory for this rank's rows", f"'{reason(error)}'")

    return together(comm, "values of tables", make, failure)


def _sources(
    model: nn.Module, starts: Mapping[str, InitialWeight], initial: Initial | None
) -> dict[str, InitialBlock | Fills]:
    given: Mapping[str, InitialBlock] = {}
    if callable(initial):
        given = dict.fromkeys(starts, initial)
    elif isinstance(initial, Mapping):
        for name in initial:
            if name not in starts:
                some = ", ".join(list(starts)[:3])
                raise InputError("initial", f"names of parameters as {some}", f"'{name}'")
        given = {name: _given(starts[name], value) for name, value in initial.items()}
    elif initial is not None:
        wanted = "a mapping of names to values, or a function"
        raise InputError("initial", wanted, type(initial).__name__, REMEDY)
    found: dict[str, InitialBlock | Fills] = {}
    for fqn, start in starts.items():
        if fqn in given:
            found[fqn] = _checked(start, given[fqn])
        elif not start.weight.is_meta:
            found[fqn] = start.block
        elif hasattr(model, "initial_block"):
            found[fqn] = _checked(start, model.initial_block)
        else:
            found[fqn] = Fills.of(start)
    return found


def _checked(start: InitialWeight, source: InitialBlock) -> InitialBlock:
    """InputError, by name, for what is no rectangle of numbers of the asked sizes."""

    def block(fqn: str, offsets: Ints, sizes: Ints) -> torch.Tensor:
        # A user's function is called on each rank for its own rows. What it gives is checked here,
        # or a wrong shape would be an error of some copy far away.
        found = source(fqn, offsets, sizes)
        if not isinstance(found, torch.Tensor) or tuple(found.shape) != tuple(sizes):
            got = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            where = f"initial values of {fqn} at {tuple(offsets)}"
            raise InputError(where, f"a tensor of shape {tuple(sizes)}", f"{got}")
        wants_floats = start.weight.is_floating_point()
        # Integers would be taken for weights without a word; another width of float is cast.
        if found.is_meta or (wants_floats and not found.is_floating_point()):
            got = "some on the meta device" if found.is_meta else str(found.dtype)
            raise InputError(f"initial values of {fqn}", "floating-point numbers", got)
        return found

    return block


def _given(start: InitialWeight, value: Any) -> InitialBlock:
    """What a user named for a parameter; of files nothing but the header is read here."""
    if isinstance(value, torch.Tensor):
        _check_shape(start, tuple(value.shape), "a tensor")
        return blocks_of_whole({start.fqn: value})
    if isinstance(value, np.ndarray):
        return _of_array(start, value)
    if not isinstance(value, (str, os.PathLike)):
        wanted = "a tensor, an array, or the path of a .npy or .safetensors file"
        raise InputError(f"initial of {start.fqn}", wanted, type(value).__name__)
    path = Path(value)
    if path.suffix == ".npy":
        try:
            return _of_array(start, np.load(path, mmap_mode="r", allow_pickle=False))
        except (OSError, ValueError) as error:
            raise InputError(str(path), "a .npy file of an array", f"'{error}'") from None
    if path.suffix == ".safetensors":
        return _of_safetensors(start, path)
    raise InputError(f"initial of {start.fqn}", "a .npy or .safetensors file", str(path))


def _of_array(start: InitialWeight, array: Any) -> InitialBlock:
    """Rectangles of an array, which may be memory-mapped: a copy of no more than is asked for."""
    _check_shape(start, array.shape, "an array")

    def block(fqn: str, offsets: Ints, sizes: Ints) -> torch.Tensor:
        # A copy, for torch warns of an array that cannot be written, as a mapped one.
        return torch.from_numpy(np.array(array[_spans(offsets, sizes)]))

    return block


def _of_safetensors(start: InitialWeight, path: Path) -> InitialBlock:
    """Rectangles of the tensor of the parameter's name in a file, or of its only one."""
    with open_shard(path) as file:
        # A file of one tensor need not know what the model calls it.
        names = list(file.keys())
        if start.fqn not in names and len(names) != 1:
            some = ", ".join(names[:3])
            raise InputError(str(path), f"a tensor '{start.fqn}'", f"{some}")
        name = start.fqn if start.fqn in names else names[0]
        _check_shape(start, tuple(file.get_slice(name).get_shape()), f"{path}: '{name}'")

    def block(fqn: str, offsets: Ints, sizes: Ints) -> torch.Tensor:
        with open_shard(path) as file:
            return file.get_tensor(name)[_spans(offsets, sizes)]

    return block


def _check_shape(start: InitialWeight, shape: Ints, what: str) -> None:
    wanted = tuple(start.weight.shape)
    if tuple(shape) != wanted:
        raise InputError(f"initial of {start.fqn}", f"shape {wanted}", f"{what} of {tuple(shape)}")


def _spans(offsets: Ints, sizes: Ints) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))


class Fills:
    """How a weight is initialised: what is done to its rows, in turn; ``block`` does it to a
    rectangle."""

    def __init__(self, start: InitialWeight, done: list[Fill]) -> None:
        self.fqn, self.done, self.dtype = start.fqn, done, start.weight.dtype
        self.shape = tuple(start.weight.shape)
        # Of tensors of any shape a matrix is made, for tiles are of rows and columns.
        self.rows, self.width = _rows_of(start.weight)

    @classmethod
    def of(cls, start: InitialWeight) -> Fills:
        """What a module does to its weight on the meta device; InputError where that is not to
        every element by itself, or where somebody else initialised it, which left no numbers."""
        # On meta only the version tells that something was written by others than the module
        # itself. What it was is gone, so it cannot be done again to a part.
        versions = 0 if start.weight.is_inference() else start.weight._version
        noted: list[Fill] = []
        known = 0
        for own in start.own:
            noted = _noted(start, own)
            known += len(noted)
        if versions > known and start.own:
            found = "one that was initialised on the meta device, which keeps no numbers"
            wanted = "a weight as its own module initialises it"
            raise InputError(start.fqn, wanted, found, REMEDY)
        # What is noted first has to set every row, or some would start from memory of any content.
        if not noted or noted[0].rows != _rows_of(start.weight)[0] or noted[0].name not in FILLS:
            wanted = "a real tensor, or a module that initialises it"
            raise InputError(start.fqn, wanted, "one on the meta device", REMEDY)
        return cls(start, noted)

    def block(self, seed: int, offsets: Ints, sizes: Ints) -> torch.Tensor:
        """The rectangle ``sizes`` at ``offsets``, for any ``seed`` the same whatever it is part
        of."""
        if len(self.shape) != 2:  # a rectangle of rows: all columns, or it would be no matrix
            assert tuple(sizes) == self.shape, "a whole tensor"
            offsets, sizes = (0, 0), (self.rows, self.width)
        # Tiles are counted from the table's own corner and not from the rectangle's, so that every
        # cut of the table finds the same ones.
        (row, column), (rows, columns) = offsets, sizes
        found = torch.empty(rows, columns, dtype=self.dtype)
        generator = torch.Generator()
        start = int.from_bytes(hashlib.sha256(f"{seed}/{self.fqn}".encode()).digest()[:4], "big")
        across = -(-self.width // TILE[1])
        for i in range(row // TILE[0], -(-(row + rows) // TILE[0])):
            for j in range(column // TILE[1], -(-(column + columns) // TILE[1])):
                # generators tell 2**32 seeds apart: counted, no two tiles of a table have the same
                generator.manual_seed((start + i * across + j) % 2**32)
                top, left = i * TILE[0], j * TILE[1]
                tile = self._tile(top, left, generator)
                low, high = max(row, top), min(row + rows, top + tile.shape[0])
                first, last = max(column, left), min(column + columns, left + tile.shape[1])
                found[low - row : high - row, first - column : last - column] = tile[
                    low - top : high - top, first - left : last - left
                ]
        return found if len(self.shape) == 2 else found.view(self.shape)

    def _tile(self, top: int, left: int, generator: torch.Generator) -> torch.Tensor:
        """The whole tile, so that its numbers are those of every rectangle that has some of it."""
        rows, columns = min(TILE[0], self.rows - top), min(TILE[1], self.width - left)
        tile = torch.empty(rows, columns, dtype=self.dtype)
        # All of what was done, in its order: normal_ and then zeros for one row is not zeros and
        # then normal_.
        for fill in self.done:
            fill.to(tile, top, generator)
        return tile


class _Noted(TorchDispatchMode):
    """Notes what is written into one weight."""

    def __init__(self, start: InitialWeight) -> None:
        super().__init__()
        self.fqn, self.key = start.fqn, key_of(start.weight.untyped_storage())
        self.rows, self.width = _rows_of(start.weight)
        self.done: list[Fill] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        # By storage and not by object: fills write through views of the weight, as of one row.
        written = tree_leaves(written_by(function, arguments, keywords))
        if any(map(self._is_ours, written)):
            self._note(function, arguments, keywords)
        return function(*arguments, **keywords)

    def _is_ours(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and key_of(value.untyped_storage()) == self.key

    def _note(self, function: Any, arguments: Any, keywords: Any) -> None:
        name = operator_name(function).removeprefix("aten::")
        target, *others = arguments if arguments and self._is_ours(arguments[0]) else (None,)
        # Each tile has a generator of its own.
        options = {key: value for key, value in keywords.items() if key != "generator"}
        tensors = any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((others, options)))
        width = self.width
        # It will be done to tiles. Only what is done to whole rows is the same there.
        in_rows = (
            target is not None
            and target.is_contiguous()
            and not target.storage_offset() % width
            and not target.numel() % width
        )
        if name not in FILLS | ELEMENTWISE or tensors or not in_rows:
            wanted = "an initialisation of every element by itself"
            raise InputError(self.fqn, wanted, f"'{name}' on the meta device", REMEDY)
        first, rows = target.storage_offset() // width, target.numel() // width
        self.done.append(Fill(function, first, rows, tuple(others), options))


def _noted(start: InitialWeight, own: Callable[[], Any]) -> list[Fill]:
    """What ``own`` does to the weight; InputError where it is not to every element by itself."""
    noted = _Noted(start)
    versions = [(p, p._version) for p in start.owner.parameters(False) if not p.is_inference()]
    try:
        # Nothing is computed, as the weight is on meta: a dispatch mode sees which operators would
        # fill it.
        with noted, torch.no_grad():
            own()
    except ShardwrightError:
        raise
    except Exception as error:  # of the user's own function, which asks the meta device for numbers
        wanted = "an initialisation that runs on the meta device"
        raise InputError(start.fqn, wanted, f"'{reason(error)}'", REMEDY) from error
    finally:
        for parameter, version in versions:  # which tell whether somebody else initialised them
            set_version(parameter, version)
    return noted.done


def _rows_of(weight: torch.Tensor) -> tuple[int, int]:
    """A tensor as a matrix of its rows."""
    rows = weight.shape[0] if weight.dim() else 1
    return rows, max(weight.numel() // max(rows, 1), 1)
