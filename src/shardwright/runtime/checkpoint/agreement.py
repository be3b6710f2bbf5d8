"""All ranks go on, or none: an error on one rank becomes the same error on every rank."""

# An exception on one rank while the others go on is a hang: they wait in the next collective until
# a timeout that says nothing. So whatever can fail on one rank alone runs inside `together`, which
# costs one all-reduce when all is well, and raises the first rank's own words everywhere when not.

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

from shardwright.core.errors import (
    InputError,
    MismatchError,
    NoPlanError,
    RunError,
    ShardwrightError,
)

if TYPE_CHECKING:
    from shardwright.runtime.comm import Comm

MAX_TEXT = 4000  # bytes of a message that travel
_KINDS: tuple[type[ShardwrightError], ...] = (RunError, InputError, MismatchError, NoPlanError)

T = TypeVar("T")


def rank_and_size(comm: Comm | None) -> tuple[int, int]:
    """This process among those of the mesh, row by row; without a group it is alone."""
    if comm is None:
        return 0, 1
    coordinate = comm.mesh.get_coordinate()
    assert coordinate is not None, "a rank outside the mesh has no Comm"
    rank = 0
    for at, count in zip(coordinate, comm.mesh.shape, strict=True):
        rank = rank * count + at
    return rank, comm.total


def global_rank(comm: Comm | None, rank: int) -> int:
    """How the whole job counts ``rank`` of the mesh, which is what messages name."""
    return rank if comm is None else int(comm.mesh.mesh.flatten()[rank])


def together(
    comm: Comm | None,
    label: str,
    act: Callable[[], T],
    failure: Callable[[Exception], ShardwrightError],
) -> T:
    """What ``act`` returns, once it has succeeded on every rank.

    If any failed, every rank raises the error of the first that did; ``failure`` puts one that is
    not ours into words. Called by all ranks.
    """
    return together_numbered(comm, label, act, failure, 0)[0]


def together_numbered(
    comm: Comm | None,
    label: str,
    act: Callable[[], T],
    failure: Callable[[Exception], ShardwrightError],
    number: int,
) -> tuple[T, int]:
    """The same, and the ``number`` (below 2^63) of rank 0; it takes no collective more."""
    result: T | None = None
    error: ShardwrightError | None = None
    cause: Exception | None = None
    try:
        result = act()
    except ShardwrightError as raised:
        error = raised
    except Exception as raised:  # a rank that left here would keep the others waiting
        error, cause = failure(raised), raised
    first = _raise_first(comm, label, error, cause, number)
    return result, first  # type: ignore[return-value]


def _raise_first(
    comm: Comm | None,
    label: str,
    error: ShardwrightError | None,
    cause: Exception | None,
    number: int,
) -> int:
    if comm is None:
        if error is not None:
            raise error from cause
        return number
    rank, size = rank_and_size(comm)
    # Raised at once, the error would leave the others in the collective below.
    own = {rank: int(error is not None)} | ({size: number} if rank == 0 else {})
    totals = total(comm, label, own, size + 1)
    # The number of rank 0 travels with the flags, which saves a second collective in every save.
    failed = totals[:size]
    if not failed.any():
        return int(totals[size])
    first = int(failed.nonzero()[0])
    message: dict[int, int] = {}
    if rank == first and error is not None:
        kind_number = next((i for i, kind in enumerate(_KINDS) if isinstance(error, kind)), 0)
        raw = str(error).encode()[:MAX_TEXT]
        message = dict(enumerate([kind_number, len(raw), *raw]))
    # All others add zeros, so the sum is the one rank's message; of one length, which they need not
    # ask for.
    received = total(comm, label, message, MAX_TEXT + 2).tolist()
    text = bytes(received[2 : 2 + received[1]]).decode(errors="replace")
    kind = _KINDS[received[0]]
    if kind is not RunError and not failed.all():
        text += f" Found on rank {global_rank(comm, first)}."
    raise kind(text) from cause


def reason(error: Exception) -> str:
    """Why something failed, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def total(comm: Comm, label: str, own: dict[int, int], size: int) -> torch.Tensor:
    """The sum over ranks of vectors of ``size`` integers, given by index; on the host."""
    vector = torch.zeros(size, dtype=torch.int64)
    if own:
        vector[torch.tensor(list(own))] = torch.tensor(list(own.values()))
    vector = vector.to(comm.mesh.device_type)
    # A sum serves as gather and as broadcast, and every backend has it for integers on every
    # device.
    comm.all_reduce(f"checkpoint: {label}", vector)
    return vector.cpu()
