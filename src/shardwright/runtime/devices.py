"""Several ranks in one process, each a thread with a device of its own.

Their process groups have a backend of ours, whose collectives copy from memory to memory: everyone
leaves what he gives and where he wants the result, and whoever comes last copies for all. So a call
that does not wait never blocks, and nobody is held longer than until all have come. Whoever waits
for a rank that has ended, or longer than the timeout, gets the error that a lost connection is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist

from shardwright.runtime.comm.torch_groups import (
    THREADS,
    present_devices,
    register_threads,
    several_worlds,
    world_of,
)
from shardwright.tracker.announce import thread_of
from shardwright.tracker.private import without_dispatch_modes

Parts = Sequence[torch.Tensor]
Copy = Callable[[Sequence[Parts]], None]  # of what every rank of a group has left
_FIRST: Final = 0


@dataclass
class ThreadCall:
    """A collective, as far as ranks have come to it: what each has left, by rank of the group."""

    kind: str
    left: dict[int, Parts] = field(default_factory=dict)
    done: bool = False
    error: str = ""


class Rendezvous:
    """Where the ``members`` of one group meet; collectives are told apart by their number."""

    def __init__(self, devices: Devices, members: Sequence[int]) -> None:
        self.devices = devices
        self.members = tuple(members)
        self._calls: dict[int, ThreadCall] = {}
        self._changed = threading.Condition(devices.lock)

    def leave(self, number: int, kind: str, rank: int, parts: Parts, copy: Copy) -> ThreadCall:
        """Come to a collective as ``rank`` of the group; the last one copies for all."""
        with self._changed:
            # Whoever comes first makes it. Kinds are compared, for by number alone two different
            # calls would be one.
            call = self._calls.setdefault(number, ThreadCall(kind))
            call.left[rank] = parts
            if call.kind != kind:
                call.error = f"{kind} on rank {self.members[rank]} where others have {call.kind}"
            # Whoever is last copies, and outside of the lock: copies take long, and others may come
            # to the next collective meanwhile.
            is_last = len(call.left) == len(self.members)
            if is_last:
                del self._calls[number]
        if is_last:
            self._copy(call, copy)
        return call

    def _copy(self, call: ThreadCall, copy: Copy) -> None:
        """All have come. What goes wrong is everybody's error."""
        try:
            if not call.error:
                copy([call.left[each] for each in range(len(self.members))])
        except Exception as error:
            call.error = f"{type(error).__name__}: {error}"
        except BaseException as error:
            call.error = "stopped"
            self.devices.stopped = type(error)
            raise
        finally:
            with self._changed:
                # What ranks gave is not kept alive by a call that somebody may wait for much later.
                call.left.clear()
                call.done = True
                self._changed.notify_all()

    def wait(self, call: ThreadCall, rank: int, seconds: float) -> None:
        """As ``rank`` of the group, until all have come; RuntimeError, as of a lost connection, if
        one does not."""
        if not call.done:
            with self._changed:
                self._changed.wait_for(lambda: call.done or self._lost(call), seconds)
                if not call.done and (missing := self._missing(call)):
                    self._give_up(call, rank, self._lost(call), missing, seconds)
                if not self._changed.wait_for(lambda: call.done, seconds):  # all came, one copies
                    raise RuntimeError(f"timed out after {seconds:g} s: a copy has not ended")
        if call.error:
            if self.devices.stopped is not None:
                raise self.devices.stopped
            raise RuntimeError(f"{call.kind} of ranks {self.members}: {call.error}")

    def wake(self) -> None:
        """Somebody has ended; the lock is held."""
        self._changed.notify_all()

    def _missing(self, call: ThreadCall) -> list[int]:
        return [each for place, each in enumerate(self.members) if place not in call.left]

    def _lost(self, call: ThreadCall) -> list[int]:
        missing = self._missing(call)
        return [each for each in missing if each in self.devices.gone]

    def _give_up(
        self, call: ThreadCall, rank: int, lost: list[int], missing: list[int], seconds: float
    ) -> NoReturn:
        call.error = f"connection closed by peer: rank {self.members[rank]} waits no longer"
        if self.devices.stopped is not None:
            raise self.devices.stopped
        ranks = ", ".join(map(str, lost or missing))
        if lost:
            raise RuntimeError(f"connection closed by peer: rank {ranks} has ended")
        raise RuntimeError(f"timed out after {seconds:g} s: rank {ranks} has not come")


class Devices:
    """The ranks of this process; ``timeout`` bounds every wait for one of them."""

    def __init__(self, world_size: int, timeout: timedelta) -> None:
        self.world_size = world_size
        self.timeout = timeout
        self.lock = threading.RLock()
        self.gone: set[int] = set()
        self.stopped: type[BaseException] | None = None  # what a signal raised in one of them
        self._store = dist.HashStore()
        self._meetings: dict[str, Rendezvous] = {}

    @contextmanager
    def here(self) -> Iterator[None]:
        """Threads of this process may be ranks inside."""
        register_threads(ThreadGroup)
        with several_worlds():
            yield

    @contextmanager
    def rank(self, rank: int) -> Iterator[None]:
        """This thread is ``rank`` inside, in the default process group of them all."""
        # A backward has to stay on this thread: by its thread everything knows which rank it is of.
        with thread_of(rank), world_of(self), torch.autograd.set_multithreading_enabled(False):
            try:
                dist.init_process_group(
                    THREADS,
                    store=self._store,
                    rank=rank,
                    world_size=self.world_size,
                    timeout=self.timeout,
                )
                yield
            except Exception:
                raise
            except BaseException as error:  # a signal's, which is everybody's
                # The first one's counts; what other ranks raise follows from it.
                self.stopped = self.stopped or type(error)
                raise
            finally:
                self._end(rank)
                if dist.is_initialized():
                    dist.destroy_process_group()

    def rendezvous(self, name: str, members: Sequence[int]) -> Rendezvous:
        """Where the group of this name meets."""
        with self.lock:
            return self._meetings.setdefault(name, Rendezvous(self, members))

    def _end(self, rank: int) -> None:
        with self.lock:
            self.gone.add(rank)
            for rendezvous in self._meetings.values():
                # Those who wait for this rank look again, and find it gone: they need not wait for
                # the timeout.
                rendezvous.wake()


class Under:
    """A collective that a rank has come to; what it waits for."""

    __slots__ = ("_call", "_group")

    def __init__(self, group: ThreadGroup, call: ThreadCall) -> None:
        self._group, self._call = group, call

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until all have come."""
        limit = timeout or self._group.limit
        self._group.wait(self._call, limit)
        return True


class ThreadGroup(dist.ProcessGroup):
    """A process group of threads; its names are those by which torch's groups are called."""

    def __init__(self, name: str, rank: int, members: Sequence[int], limit: timedelta) -> None:
        super().__init__(rank, len(members))
        self.rendezvous = present_devices().rendezvous(name, members)
        self.limit = limit
        self._rank, self._name, self._count = rank, name, 0

    # ---- what torch asks a group and its backend -------------------------------------------------

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, _: torch.device) -> ThreadGroup:
        return self

    def size(self) -> int:
        return len(self.rendezvous.members)

    @property
    def options(self) -> ThreadGroup:
        return self

    @property
    def _timeout(self) -> timedelta:
        return self.limit

    def _set_default_timeout(self, limit: timedelta) -> None:
        self.limit = limit

    def shutdown(self) -> None:
        """Nothing is connected."""

    # ---- collectives -----------------------------------------------------------------------------

    def all_gather_single(self, full: torch.Tensor, shard: torch.Tensor, _: Any = None) -> Under:
        return self._come("all_gather", (full, shard), _gathered)

    def reduce_scatter_single(self, shard: torch.Tensor, full: torch.Tensor, options: Any) -> Under:
        _check_operation(options, dist.ReduceOp.SUM)
        return self._come("reduce_scatter", (shard, full), _scattered)

    def all_to_all_single(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_splits: list[int],
        sent_splits: list[int],
        _: Any = None,
    ) -> Under:
        parts = [
            tensor.split(splits or tensor.shape[0] // self.size())
            # ``data``, for autograd must not take a copy into it for a change.
            for tensor, splits in ((received.data, received_splits), (sent, sent_splits))
        ]
        copy = partial(_exchanged, self.rendezvous.members)
        return self._come("all_to_all", [*parts[0], *parts[1]], copy)

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Under:
        _check_operation(options, dist.ReduceOp.SUM, dist.ReduceOp.MAX)
        largest = options is not None and options.reduceOp == dist.ReduceOp.MAX
        kind = "all_reduce max" if largest else "all_reduce"
        return self._come(kind, tensors, _largest if largest else _summed)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Under:
        def copy(left: Sequence[Parts]) -> None:
            for rank, (target,) in enumerate(left):
                if rank != options.rootRank:
                    target.data.copy_(left[options.rootRank][0])

        return self._come(f"broadcast {self.rendezvous.members[options.rootRank]}", tensors, copy)

    def barrier(self, _: Any = None) -> Under:
        return self._come("barrier", (), lambda left: None)

    _allgather_base = all_gather_single  # before torch 2.13
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def wait(self, call: ThreadCall, limit: timedelta) -> None:
        """Until all have come to a collective."""
        self.rendezvous.wait(call, self._rank, limit.total_seconds())

    def _come(self, kind: str, parts: Parts, copy: Copy) -> Under:
        devices = {part.device for part in parts if part.is_cuda}
        # The last rank copies on its own stream, for all: what this one has computed on its stream
        # must be done by then.
        _synchronise(devices)

        def copied(left: Sequence[Parts]) -> None:
            with torch.no_grad(), without_dispatch_modes():  # no tracker's business
                copy(left)
            _synchronise({part.device for each in left for part in each if part.is_cuda})

        # By number, as every rank counts its own calls: ranks that call in another order are found
        # by the kind.
        self._count += 1
        return Under(self, self.rendezvous.leave(self._count, kind, self._rank, parts, copied))


def _check_operation(options: Any, *known: Any) -> None:
    if options is not None and all(options.reduceOp != each for each in known):
        raise RuntimeError(f"a reduction that threads do not have: {options.reduceOp}")


def _synchronise(devices: set[torch.device]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)


def _gathered(left: Sequence[Parts]) -> None:
    for full, _ in left:
        for place, (_, shard) in zip(full.data.chunk(len(left)), left, strict=True):
            if place.data_ptr() != shard.data_ptr():
                place.copy_(shard)


def _scattered(left: Sequence[Parts]) -> None:
    parts = [full.view(len(left), -1) for _, full in left]
    for rank, (shard, _) in enumerate(left):
        total = _sum([part[rank] for part in parts])
        shard.data.view(-1).copy_(total)


def _exchanged(members: Sequence[int], left: Sequence[Parts]) -> None:
    size = len(left)
    for rank, parts in enumerate(left):
        for source in range(size):
            target, given = parts[source], left[source][size + rank]
            if target.shape != given.shape:
                wanted, found = tuple(target.shape), tuple(given.shape)
                one, other = members[rank], members[source]
                raise RuntimeError(f"rank {one} expects {wanted} of rank {other}, got {found}")
            target.copy_(given)


def _summed(left: Sequence[Parts]) -> None:
    _spread(left, _sum([tensor for (tensor,) in left]))


def _largest(left: Sequence[Parts]) -> None:
    most = left[_FIRST][0].clone()
    for (tensor,) in left[1:]:
        torch.maximum(most, tensor.to(most.device), out=most)
    _spread(left, most)


def _spread(left: Sequence[Parts], value: torch.Tensor) -> None:
    for (tensor,) in left:
        tensor.data.copy_(value)


def _sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """In rank order, where the first one is."""
    total = tensors[_FIRST].clone()
    for tensor in tensors[1:]:
        total.add_(tensor.to(total.device))
    return total
