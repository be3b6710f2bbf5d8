"""Every collective of the runtime goes through a Comm; a process group begins and ends here."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.core.errors import (
    InputError,
    MismatchError,
    UnsupportedError,
    check_type,
    expected,
)
from shardwright.runtime.peers import Peers
from shardwright.runtime.pending import Pending
from shardwright.runtime.probe import Probe
from shardwright.runtime.torch_private import flattened

__all__ = [
    "Comm",
    "CutTwice",
    "Peers",
    "Pending",
    "fingerprint_of",
    "flat",
    "meet",
    "start",
    "stop",
]

START_SECONDS = 300.0  # some ranks start later than others by more than a step may take


def meet(
    timeout_seconds: float, rank: int, world_size: int, store: Path | None = None
) -> dist.Store:
    """The store in which ranks meet: the file ``store``, which opens no port, where they wait
    ``START_SECONDS`` for each other; or where torchrun's environment says."""
    if store is not None:
        meeting = dist.FileStore(str(store), world_size)
        meeting.set(f"started/{rank}", "")
        started = [f"started/{each}" for each in range(world_size)]
        meeting.wait(started, timedelta(seconds=START_SECONDS))
        return meeting
    try:
        found, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_seconds)))
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        where = f"MASTER_PORT={os.environ.get('MASTER_PORT')}"
        remedy = "Name another: torchrun --master-port."
        raise InputError(expected(where, "a port that is free", "one in use", remedy)) from error
    # torchrun's store outlives its workers: a rank must not meet one that was restarted
    return dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), found)


def start(
    backend: str, timeout_seconds: float, rank: int, world_size: int, store: dist.Store
) -> None:
    """Join the process group of those who met in ``store``; every wait in it is bounded by
    ``timeout_seconds``."""
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def stop() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def flat(mesh: DeviceMesh) -> DeviceMesh:
    """All ranks of ``mesh`` in one dimension (collective for several); InputError unless they are
    in ascending order, for then a group has them in another."""
    ranks = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise InputError(expected("mesh", "its ranks in ascending order", str(mesh.mesh.tolist())))
    if mesh.ndim == 1:
        return mesh
    if len(ranks) == dist.get_world_size():
        return DeviceMesh.from_group(dist.group.WORLD, mesh.device_type)
    return flattened(mesh)


def fingerprint_of(tensor: torch.Tensor) -> str:
    """sha256 of a tensor's values."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy()).hexdigest()


class Comm(Peers):
    """The collectives of a mesh, counted and labelled.

    A 2-D mesh means (replicate, shard). ``group``, ``rank`` and ``size`` are those of its last
    dimension, and gathers stay within them; reductions also sum over ``replicas``, the group of the
    first dimension (None for 1-D), as the last part of their wait. ``total`` counts all ranks.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        probe: Probe | None = None,
        *,
        paths: str | Mapping[str, str] | None = None,
        checked: bool | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        check_mesh(mesh)
        last = mesh.ndim - 1
        options: dict[str, Any] = {"paths": paths, "checked": checked, "timeout": timeout}
        super().__init__(
            mesh.get_group(last),
            mesh.get_local_rank(last),
            mesh.size(last),
            mesh.device_type,
            probe,
            **options,
        )
        self.mesh = mesh
        groups = (mesh.get_group(dim) for dim in range(mesh.ndim))
        ranks = repr([dist.get_process_group_ranks(group) for group in groups]).encode()
        self.identity = (self.size, mesh.size(), zlib.crc32(ranks))  # unlike that of other ranks
        self.total = mesh.size()
        self.kept = 1  # neighbouring parts of parameters that a rank keeps, its own among them
        self.replicas: dist.ProcessGroup | None = None
        self._twins: Peers | None = None
        if last:
            self.replicas = mesh.get_group(0)
            self._twins = Peers(
                self.replicas,
                mesh.get_local_rank(0),
                mesh.size(0),
                mesh.device_type,
                probe,
                **options,
            )

    @property
    def shards(self) -> Peers:
        """The ranks among whom whole parameters are gathered."""
        return self

    @property
    def sums_in_two(self) -> bool:
        """Whether a reduce-scatter is one over shards and then a sum over replicas, which may be
        left to a later one."""
        return self._twins is not None

    def as_replicas(self, replicas: int) -> DeviceMesh:
        """The ranks of a mesh of one dimension as (replicate, shard) (collective)."""
        shards = self.size // replicas
        shard = self.rank % shards
        first = self.rank - shard
        groups = [range(shard, self.size, shards), range(first, first + shards)]
        return DeviceMesh.from_group(
            [self._sub_group(own) for own in groups],
            self.mesh.device_type,
            mesh=self.mesh.mesh.view(replicas, shards),
            mesh_dim_names=("replicate", "shard"),
        )

    def gather_kept(self, label: str, kept: torch.Tensor, part: torch.Tensor) -> None:
        """``kept`` [kept*n] becomes the parts [n] of the ranks that keep the same ones."""
        assert self._twins is not None
        self._twins.all_gather(f"{label} over replicas", kept, part)

    def reduce_scatter(
        self,
        label: str,
        shard: torch.Tensor,
        full: torch.Tensor,
        *,
        wait: bool = True,
        replicas: bool = True,
        between: Callable[[], object] | None = None,
    ) -> Pending | None:
        """``shard`` [n] becomes this rank's part of the sum of ``full`` [W*n] over all ranks.

        Without ``replicas`` over the group's only; ``between`` is called before the sum over them.
        """
        if self._twins is None or not replicas:
            return super().reduce_scatter(label, shard, full, wait=wait)
        pending = super().reduce_scatter(label, shard, full, wait=False)
        if pending is not None and between is not None:
            pending.then(between)
        return self._over_replicas(pending, label, shard, wait)

    def all_reduce(
        self,
        label: str,
        tensor: torch.Tensor,
        *,
        wait: bool = True,
        largest: bool = False,
        replicas: bool = True,
    ) -> Pending | None:
        """``tensor`` becomes its sum, or the ``largest`` of each element, over all ranks.

        Without ``replicas`` over the group's only: what replicas have in common counts once.
        """
        if self._twins is None or not replicas:
            return super().all_reduce(label, tensor, wait=wait, largest=largest)
        pending = super().all_reduce(label, tensor, wait=False, largest=largest)
        return self._over_replicas(pending, label, tensor, wait, largest)

    def _over_replicas(
        self,
        pending: Pending | None,
        label: str,
        tensor: torch.Tensor,
        wait: bool,
        largest: bool = False,
    ) -> Pending | None:
        assert pending is not None
        assert self._twins is not None
        reduce = partial(self._twins.all_reduce, f"{label} over replicas", tensor, largest=largest)
        pending.then(reduce)
        return pending.returned(wait)

    def differs(self, label: str, numbers: torch.Tensor, *, everywhere: bool) -> bool:
        """Whether ``numbers`` [n] int64 are not the same on all ranks, or on all replicas."""
        pair = torch.cat([numbers, -numbers])
        if everywhere:
            self.all_reduce(label, pair, largest=True)
        elif self._twins is not None:
            self._twins.all_reduce(label, pair, largest=True)
        largest, smallest = pair.chunk(2)
        return not torch.equal(largest, -smallest)

    def broadcast_replicas(self, label: str, tensor: torch.Tensor, *, everywhere: bool) -> None:
        """``tensor`` becomes what it is on the first of all ranks, or of all replicas."""
        if self._twins is not None:
            self._twins.broadcast(label, tensor, 0)
        if everywhere:
            self.broadcast(label, tensor, 0)

    def meet(self, where: str, why: str, remedy: str) -> None:
        """Wait for all ranks of the mesh to be ``where``, with no collective."""
        Peers.meet(self.shards, where, why, remedy)
        if self._twins is not None:
            self._twins.meet(where, why, remedy)

    def agree(self, what: str, facts: Mapping[str, str], values: str = "") -> bool:
        """Raise on every rank, naming the ranks and the first fact on which they differ. Whether
        the ``values`` of those among whom the first rank's parameters are cut are the same."""
        if self.is_fake:
            return True
        texts = [*(f"{k}={v}" for k, v in facts.items()), values]
        digests = [hashlib.sha256(text.encode()).digest() for text in texts]
        own = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8)
        everyone = own = own.to(self.mesh.device_type)
        for peers in (self.shards, self._twins):
            if peers is not None:
                own, everyone = everyone, everyone.new_empty(peers.size * everyone.numel())
                peers.all_gather(f"agree on {what}", everyone, own)
        rows = everyone.view(self.total, len(digests), 32).cpu()
        ranks = self.mesh.mesh.flatten().tolist()
        for index, name in enumerate(facts):
            first = rows[0, index]
            differing = [
                r for r, row in zip(ranks, rows, strict=True) if not row[index].equal(first)
            ]
            if differing:
                raise MismatchError(
                    expected(
                        what,
                        f"the same {name} on every rank",
                        f"another one on rank {', '.join(map(str, differing))} "
                        f"than on rank {ranks[0]}",
                        "Start every rank from the same plan, code and versions.",
                    )
                )
        return all(row[-1].equal(rows[0, -1]) for row in rows[: self.mesh.size(self.mesh.ndim - 1)])


class CutTwice(Comm):
    """The same where what a shard has is cut again among its R replicas.

    ``rank`` and ``size`` count these parts: rank (r, s) of the mesh has part s*R + r. All R ranks
    of a shard keep its parameters, so a gather of what has not changed needs ``shards`` alone.
    """

    def __init__(
        self, mesh: DeviceMesh, probe: Probe | None = None, *, timeout: timedelta | None = None
    ) -> None:
        super().__init__(mesh, probe, timeout=timeout)
        assert self._twins is not None, "a mesh of one dimension has no replicas"
        self._shards = Peers(
            self.group, self.rank, self.size, mesh.device_type, probe, timeout=timeout
        )
        self.kept = self._twins.size
        self.rank = self.rank * self.kept + self._twins.rank
        self.size = self.total
        self.identity = (self.size, *self.identity[1:])
        self.replicas = None
        self._every: Peers | None = None

    @property
    def shards(self) -> Peers:
        return self._shards

    @property
    def sums_in_two(self) -> bool:
        return False

    def global_rank(self, rank: int) -> int:
        shard, twin = divmod(rank, self.kept)
        return int(self.mesh.mesh[twin, shard])

    def prepare(self, nbytes: int) -> None:
        self._shards.prepare(nbytes)

    def narrow(self, ranks: int) -> Peers:
        return self._shards.narrow(ranks)

    def all_gather(
        self, label: str, full: torch.Tensor, shard: torch.Tensor, *, wait: bool = True
    ) -> Pending | None:
        kept = shard.new_empty(self.kept * shard.numel())
        self.gather_kept(label, kept, shard)
        return self._shards.all_gather(label, full, kept, wait=wait)

    def reduce_scatter(
        self,
        label: str,
        shard: torch.Tensor,
        full: torch.Tensor,
        *,
        wait: bool = True,
        replicas: bool = True,
        between: Callable[[], object] | None = None,
    ) -> Pending | None:
        assert self._twins is not None
        assert replicas, "parts of a shard's sum are whose replica has them"
        kept = shard.new_empty(self.kept * shard.numel())
        self.probe.holds(kept, "communication")
        pending = self._shards.reduce_scatter(label, kept, full, wait=False)
        assert pending is not None
        over = f"{label} over replicas"
        pending.then(partial(self._twins.reduce_scatter, over, shard, kept))
        return pending.returned(wait)

    def all_reduce(
        self,
        label: str,
        tensor: torch.Tensor,
        *,
        wait: bool = True,
        largest: bool = False,
        replicas: bool = True,
    ) -> Pending | None:
        """``tensor`` becomes its sum, or the ``largest``, over all ranks, which have no parts in
        common."""
        pending = self._shards.all_reduce(label, tensor, wait=False, largest=largest)
        return self._over_replicas(pending, label, tensor, wait, largest)

    def broadcast(self, label: str, tensor: torch.Tensor, source: int) -> None:
        assert self._twins is not None
        shard, twin = divmod(source, self.kept)
        self._shards.broadcast(label, tensor, shard)
        self._twins.broadcast(f"{label} over replicas", tensor, twin)

    def all_to_all(
        self,
        label: str,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_splits: Sequence[int] | None = None,
        sent_splits: Sequence[int] | None = None,
        *,
        wait: bool = True,
    ) -> Pending | None:
        """Send the k-th split of ``sent`` to who has part k, in one group of all ranks."""
        if self._every is None:
            whole = flat(self.mesh)
            rank, device = whole.get_local_rank(), whole.device_type
            self._every = Peers(whole.get_group(), rank, self.size, device, self.probe)
        shards = range(self._shards.size)
        order = [s * self.kept + r for r in range(self.kept) for s in shards]  # of the group
        given, wanted = (
            tensor.split(list(splits) if splits else tensor.numel() // self.size)
            for tensor, splits in ((sent, sent_splits), (received, received_splits))
        )
        arrived = torch.empty_like(received)
        targets = [wanted[part] for part in order]
        pending = self._every.all_to_all(
            label,
            arrived,
            torch.cat([given[part] for part in order]),
            [target.numel() for target in targets],
            [given[part].numel() for part in order],
            wait=False,
        )
        assert pending is not None
        pending.then(partial(_parted, arrived, targets))
        return pending.returned(wait)


def _parted(values: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    for target, part in zip(targets, values.split([t.numel() for t in targets]), strict=True):
        target.copy_(part)


def check_mesh(mesh: DeviceMesh) -> None:
    """InputError unless ``mesh`` is one of one or two dimensions that this rank is in."""
    check_type(mesh, DeviceMesh, "mesh", "init_device_mesh makes one.")
    names = mesh.mesh_dim_names or [f"dim {index}" for index in range(mesh.ndim)]
    dims = ", ".join(f"{name} {mesh.size(index)}" for index, name in enumerate(names))
    if mesh.ndim > 2:
        raise UnsupportedError(
            expected(
                "mesh",
                "a 1-D mesh, or a 2-D one of (replicate, shard)",
                f"{mesh.ndim} dimensions ({dims})",
                "Pass a 1-D or 2-D sub-mesh of it, such as mesh['replicate', 'shard'].",
            )
        )
    if mesh.get_coordinate() is None:
        raise InputError(
            expected(
                "mesh",
                "a mesh that this rank is in",
                f"ranks {mesh.mesh.flatten().tolist()} ({dims}) on rank {dist.get_rank()}",
                "Call it on the ranks of the mesh only.",
            )
        )
