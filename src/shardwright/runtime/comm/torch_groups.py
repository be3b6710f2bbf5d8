"""torch's process groups: their collectives as torch 2.11 and 2.13 name them, groups of some ranks,
how long waits in them take, and groups of threads."""

# Why so much of this is private: the public collectives wrap each call in checks, logging and a
# look-up of the group, several times what the call itself takes where little is sent.

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh


class Operations:
    """One process group's collectives without the wrappers around them, names picked once.

    Each returns the Work (None where the backend needs no waiting); ``wait`` says whether the
    caller waits at once, which spares NCCL a stream.
    """

    __slots__ = (
        *("_all_reduce", "_all_to_all", "_gather", "_options", "_scatter"),
        *("group", "rank", "size"),
    )

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        # torch 2.11 has the second name of each, torch 2.13 the first.
        self._gather = getattr(group, "all_gather_single", None) or group._allgather_base
        self._scatter = getattr(group, "reduce_scatter_single", None) or group._reduce_scatter_base
        self._all_to_all = getattr(group, "all_to_all_single", None) or group.alltoall_base
        self._all_reduce = group.allreduce
        self._options = (_options(later=True), _options(later=False))

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, wait: bool) -> dist.Work | None:
        return self._gather(full, shard, self._options[wait][0])

    def reduce_scatter(
        self, shard: torch.Tensor, full: torch.Tensor, wait: bool
    ) -> dist.Work | None:
        return self._scatter(shard, full, self._options[wait][1])

    def all_reduce(self, tensor: torch.Tensor, wait: bool, largest: bool) -> dist.Work | None:
        return self._all_reduce([tensor], self._options[wait][4 if largest else 2])

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_splits: Sequence[int],
        sent_splits: Sequence[int],
        wait: bool,
    ) -> dist.Work | None:
        options = self._options[wait][3]
        return self._all_to_all(received, sent, list(received_splits), list(sent_splits), options)

    def broadcast(self, tensor: torch.Tensor, source: int, wait: bool) -> dist.Work | None:
        """``source`` is a rank of the group."""
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = source, 0, not wait
        return self.group.broadcast([tensor], options)

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> dist.Work:
        """``to`` is a rank of the group."""
        return self.group.send([tensor], to, tag)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> dist.Work:
        return self.group.recv([tensor], source, tag)


def _options(later: bool) -> tuple[Any, ...]:
    """Options of all_gather, reduce_scatter, all_reduce, all_to_all and all_reduce by maximum."""
    kinds = ("Allgather", "ReduceScatter", "Allreduce", "AllToAll", "Allreduce")
    made: tuple[Any, ...] = tuple(getattr(c10d, f"{kind}Options")() for kind in kinds)
    for options in made:
        # Under NCCL a call that is waited for at once runs on the caller's own stream.
        options.asyncOp = later
    made[1].reduceOp = made[2].reduceOp = dist.ReduceOp.SUM
    made[4].reduceOp = dist.ReduceOp.MAX
    return made


def default_store() -> c10d.Store:
    """The store through which the ranks of this process's default group met."""
    return c10d._get_default_store()


def wait_limit(group: dist.ProcessGroup) -> timedelta | None:
    """How long a wait in ``group`` may take; None where its backend does not say."""
    try:
        limit = _backend(group).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return limit if isinstance(limit, timedelta) else None


def limit_waits(group: dist.ProcessGroup, limit: timedelta | None) -> timedelta | None:
    """Bound the waits in ``group`` by ``limit``; returns the bound that holds now.

    None: a group that still has torch's default (30 minutes for gloo), as the groups of a sub-mesh
    have, gets the default group's bound; any other keeps its own.
    """
    present = wait_limit(group)
    if limit is None:
        # With torch's own nobody learns for half an hour that a rank is gone.
        if present is None or present != c10d._get_default_timeout(dist.get_backend(group)):
            return present
        limit = wait_limit(c10d._get_default_group())
    setter = getattr(_backend(group), "_set_default_timeout", None)
    if limit is None or limit == present or setter is None:
        return present
    setter(limit)
    return limit


def _backend(group: dist.ProcessGroup) -> Any:
    return group._get_backend(group._device_types[0])


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that ``mesh`` is a slice of, or itself."""
    return mesh._get_root_mesh()


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """``mesh`` in one dimension, with a group of its own (collective)."""
    return mesh._flatten()


def sub_group(
    parent: dist.ProcessGroup, ranks: Sequence[int], name: str, limit: timedelta | None
) -> dist.ProcessGroup:
    """The group of the global ``ranks``, made by its members alone.

    ``name`` must be the same on all members and new. (``new_group`` with local synchronisation
    makes its name from the number of groups a rank is in, so members that are in different numbers
    of other groups would wait for each other under different names.)
    """
    group: dist.ProcessGroup
    default = c10d._get_default_group()
    # Bound to a device, torch would split the default communicator, which all ranks of the job have
    # to do together.
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        # What new_group calls, without the barrier of the whole job that comes with it.
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            list(ranks).index(default.rank()),
            list(ranks),
            c10d.Backend(c10d._world.pg_map[parent][0]),
            c10d._get_default_store(),
            cast(Any, name),
            timeout=limit or c10d._get_default_timeout(dist.get_backend(parent)),
        )
    finally:
        default.bound_device_id = bound
    # As new_group notes it: global ranks are looked up there.
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group


THREADS = "threads"  # our backend among threads of one process


class _Worlds(threading.local):
    """What torch's module of process groups knows, for every thread its own."""

    def __init__(self) -> None:
        self.default_pg: dist.ProcessGroup | None = None
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, Any] = {}
        self.pg_group_ranks: dict[Any, Any] = {}
        self.pg_backend_config: dict[Any, Any] = {}
        self.group_count = 0
        self.tags_to_pg: dict[Any, Any] = {}
        self.pg_to_tag: dict[Any, Any] = {}
        self.pg_coalesce_state: dict[Any, Any] = {}
        self.comms: list[Any] = []
        self.devices: Any = None  # those whose rank this thread is one of


@contextmanager
def several_worlds() -> Iterator[None]:
    """Every thread may be in a default process group of its own inside."""
    before, worlds = c10d._world, _Worlds()
    c10d._world = cast(Any, worlds)
    # C++ has a table of groups by name as well, one for the process unless it is told otherwise.
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        c10d._world = before


@contextmanager
def world_of(devices: Any) -> Iterator[None]:
    """Process groups that this thread makes inside are among the ranks of ``devices``."""
    worlds = cast(Any, c10d._world)
    # Torch makes a backend by name and lets its maker know nothing else: the ranks are found here.
    worlds.devices = devices
    try:
        yield
    finally:
        worlds.devices = None


def present_devices() -> Any:
    """Those whose rank this thread is one of."""
    return cast(Any, c10d._world).devices


@cache
def register_threads(make: Callable[[str, int, Sequence[int], timedelta], Any]) -> None:
    """Groups of backend ``THREADS`` are made by ``make(name, rank, global ranks, timeout)``."""

    def created(options: Any, _: Any) -> Any:
        size = options.group_size
        # The default group has no list: it is of all ranks.
        members = list(options.global_ranks_in_group) or list(range(size))
        return make(options.group_id, options.group_rank, members, options.timeout)

    dist.Backend.register_backend(THREADS, created, extended_api=True, devices=["cpu", "cuda"])
