"""Write a checkpoint: all ranks into a temporary folder, which one rename then makes real."""

# Either the checkpoint is there in full or every rank raises and the earlier ones are whole: a
# save is written under a temporary name and synced, its documents are read back as a reader would,
# and then it is renamed, once. A save is cut into parts at its collectives, so that files are
# written by a thread while training goes on; between two parts no rank may be ahead of another, or
# collectives of the step and of the save would meet.

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from shardwright.core.document import encode_document
from shardwright.core.errors import InputError, RunError, ShardwrightError
from shardwright.runtime.checkpoint import files, folders
from shardwright.runtime.checkpoint.agreement import (
    global_rank,
    rank_and_size,
    reason,
    together,
    together_numbered,
    total,
)
from shardwright.runtime.checkpoint.read import open_stored
from shardwright.runtime.checkpoint.region import TensorPart, checked

if TYPE_CHECKING:
    from shardwright.runtime.comm import Comm


class SaveWork:
    """A part of a save that needs no other rank: whoever drives the save runs it, in any thread."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._error: BaseException | None = None
        self.done = threading.Event()
        self.seconds = 0.0

    def run(self) -> None:
        """Do it; what it raises is kept for ``check``."""
        began = time.perf_counter()
        try:
            self._act()
        except BaseException as error:
            self._error = error
        self.seconds = time.perf_counter() - began
        self.done.set()

    def check(self) -> None:
        """Raise what it raised."""
        if self._error is not None:
            raise self._error


def run_through(parts: Generator[SaveWork, None, Path]) -> Path:
    """Save at once."""
    while True:
        try:
            next(parts).run()
        except StopIteration as end:
            return cast(Path, end.value)


def save_in_parts(
    folder: Path | str,
    step: int,
    held: Sequence[TensorPart],
    comm: Comm | None,
    *,
    facts: Mapping[str, str],
    scalars: Mapping[str, Any],
    keep: int | None = None,
    newest: folders.Newest | None = None,
    copied: bool = False,
) -> Generator[SaveWork, None, Path]:
    """Save what all ranks hold as ``folder/step-N``, whose path is returned, in parts: every
    ``SaveWork`` is run before the next part is asked for, by all ranks together.

    ``facts`` are the same on every rank (plan fingerprint, versions), ``scalars`` are this rank's
    plain values. A part that several ranks list is written by one. ``keep`` removes all but the
    newest so many checkpoints once this one is committed; ``newest`` of rank 0 then keeps it from
    the ``keep`` of other runs. Without ``comm`` this process is all. ``copied``: what is held may
    change once the first part is there, for what this rank writes was copied to host memory.

    Either the checkpoint is there in full, or every rank raises: InputError for a step that
    exists or parts that cannot be stored, MismatchError for parts that leave gaps or overlap or
    facts that differ, RunError naming the rank that could not write and why. Then nothing was
    saved, earlier checkpoints are whole, and what is held is as it was. Any number of processes
    may save into one folder at once.
    """
    rank, size = rank_and_size(comm)
    folder = Path(folder)
    final = folders.step_folder(folder, step)
    if comm is not None:
        said = {f"fact '{name}'": value for name, value in facts.items()}
        comm.agree(str(final), {"step": str(step), "keep": str(keep), **said})

    def failure(error: Exception) -> ShardwrightError:
        found = f"'{reason(error)}' on rank {global_rank(comm, rank)}"
        whole = "earlier checkpoints are whole, and " if folder.is_dir() else ""
        remedy = f"Nothing was saved; {whole}training can go on."
        return RunError(str(final), "every rank to save its part", found, remedy)

    with contextlib.ExitStack() as until_saved:
        number = folders.new_number()

        def prepare() -> tuple[list[TensorPart], dict[str, Any]]:
            _check_call(step, facts, keep)
            own = checked(held), plain(scalars)
            if rank == 0:
                until_saved.enter_context(folders.room(folder, step, number))
            return own

        def commit_by_first() -> None:
            # Held before it has its final name: between the rename and the lock another run's
            # `keep` could remove it.
            if rank == 0:
                with (newest or folders.Newest()).becomes(temporary / files.list_name(0)):
                    commit(temporary, final, step, size, facts)
                if keep is not None:
                    folders.retain(folder, keep, step)

        (own, values), number = together_numbered(comm, "prepare", prepare, failure, number)
        temporary = folders.temporary_folder(folder, step, number)
        mine = without_copies(own, comm)
        if copied:
            mine = together(comm, "copy", lambda: [_on_host(part) for part in mine], failure)
        # What this rank does not write is not kept alive while files are written.
        del own
        # Two parts for two fates: files may fail on any rank, and then nothing was saved; the
        # commit is rank 0's alone, after all have written.
        write = SaveWork(lambda: write_rank(temporary, step, rank, size, mine, values))
        yield write
        together(comm, "write", write.check, failure)
        end = SaveWork(commit_by_first)
        yield end
        together(comm, "commit", end.check, failure)
    return final


def _on_host(part: TensorPart) -> TensorPart:
    # Not ``cpu()``, which is no copy where the tensor is in host memory, and the next step writes
    # there.
    own = torch.empty(part.tensor.shape, dtype=part.tensor.dtype)
    return part._replace(tensor=own.copy_(part.tensor.detach()))


def write_rank(
    temporary: Path,
    step: int,
    rank: int,
    world_size: int,
    held: Sequence[TensorPart],
    scalars: dict[str, Any],
) -> None:
    """Write one rank's tensors and list, which the disk has on return."""
    file = files.write_shard(temporary / files.shard_name(rank), held)
    pieces = tuple(files.piece_of(part) for part in held)
    found = files.RankList(files.RANK_SCHEMA, step, rank, world_size, file, pieces, scalars)
    _write(temporary / files.list_name(rank), encode_document(found))


def commit(
    temporary: Path, final: Path, step: int, world_size: int, facts: Mapping[str, str]
) -> None:
    """Write the manifest, check everything as a reader would, and give the folder its name."""
    # Read back from the disk, so the manifest has what is there and not what was meant to be.
    lists = tuple(
        files.digest_of((temporary / files.list_name(rank)).read_bytes())
        for rank in range(world_size)
    )
    _write(temporary / files.MANIFEST, files.sealed(step, facts, lists))
    # As a reader would: what it would refuse must not become a checkpoint.
    open_stored(temporary, step)
    folders.sync(temporary)
    folders.give_name(temporary, final)
    try:
        folders.sync(final.parent)
    except OSError:
        final.rename(temporary)  # not known to be on the disk: then it is not saved
        raise


def _check_call(step: int, facts: Mapping[str, str], keep: int | None) -> None:
    if type(step) is not int or not 0 <= step <= files.MAX_STEP:
        raise InputError("step", f"an integer from 0 to {files.MAX_STEP}", f"{step!r}")
    if keep is not None and (type(keep) is not int or keep < 1):
        raise InputError("keep", "at least 1 checkpoint", f"{keep!r}")
    for name, value in plain(facts).items():
        if not isinstance(value, str):
            raise InputError(f"facts.{name}", "text", f"{value!r:.60}")


def _write(path: Path, data: bytes) -> None:
    # Never over a file that exists: whose it is cannot be known.
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


_WANTED = "text, a finite number, a 64-bit integer, true, false, none, or lists and maps of them"


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which tuples are lists; InputError names what would not come back equal."""
    return {_key("scalars", key): _plain(f"scalars.{key}", value) for key, value in values.items()}


def _plain(where: str, value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if type(value) is int and -(2**63) <= value < 2**64:
        return value
    if type(value) is float and math.isfinite(value):
        return value
    if isinstance(value, str) and _encodes(value):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(f"{where}[{i}]", item) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {_key(where, key): _plain(f"{where}.{key}", v) for key, v in value.items()}
    raise InputError(where, _WANTED, f"{type(value).__name__} {value!r:.60}")


def _key(where: str, key: Any) -> str:
    if not isinstance(key, str) or not _encodes(key):
        raise InputError(where, "names as text", f"{key!r:.60}")
    return key


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Claim(NamedTuple):
    """A part by the first 8 bytes of its description's sha256, and its bytes."""

    part: int
    nbytes: int


def claim(held: TensorPart) -> Claim:
    """What the other ranks get to know about a part."""
    # A hash travels and not the description: names are long, and the parts of all ranks are known
    # to all ranks. Two parts with one hash would be one, at a chance of 2^-64 a pair.
    text = repr(files.piece_of(held)).encode()
    number = int.from_bytes(hashlib.sha256(text).digest()[:8], "little", signed=True)
    return Claim(number, held.tensor.nbytes)


def writers(claims: Sequence[Sequence[Claim]]) -> list[set[int]]:
    """The parts that each rank writes: each part once.

    Large parts go first, each to the rank among its holders that has least to write so far, so
    the answer is the same wherever it is worked out.
    """
    holders: dict[Claim, list[int]] = defaultdict(list)
    for rank, parts in enumerate(claims):
        for part in parts:
            holders[part].append(rank)
    load = [0] * len(claims)
    chosen: list[set[int]] = [set() for _ in claims]
    # Parts with one holder first: where they go is fixed, and those with a choice even it out.
    for part in sorted(holders, key=lambda c: (len(holders[c]) > 1, -c.nbytes, c.part)):
        rank = min(holders[part], key=lambda r: (load[r], r))
        load[rank] += part.nbytes
        chosen[rank].add(part.part)
    return chosen


def without_copies(held: Sequence[TensorPart], comm: Comm | None) -> list[TensorPart]:
    """Of what this rank holds, the parts that it has to write. Called by all ranks."""
    rank, size = rank_and_size(comm)
    if comm is None or size == 1:
        return list(held)
    own = [claim(part) for part in held]
    counts = total(comm, "count parts", {rank: len(own)}, size).tolist()
    first = 2 * sum(counts[:rank])
    numbers = {first + i: n for i, n in enumerate(n for part in own for n in part)}
    everyone = iter(total(comm, "list parts", numbers, 2 * sum(counts)).tolist())
    claims = [[Claim(next(everyone), next(everyone)) for _ in range(n)] for n in counts]
    mine = writers(claims)[rank]
    return [part for part, number in zip(held, own, strict=True) if number.part in mine]
