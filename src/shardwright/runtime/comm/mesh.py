"""Every collective of the runtime goes through a Comm; a process group begins and ends here."""

# A mesh of (replicate, shard) has two process groups on each rank, and what is cut over shards
# alone, or over both, is reduced by a collective of one and then of the other. The second begins as
# the last part of the wait for the first (``Pending.then``): all ranks wait in the same order, so a
# wait is a place where a collective may begin, and it needs no thread and no stream of its own.
# Gathers of what a rank keeps stay within its shards, for replicas have the same.

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from operator import attrgetter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.core.errors import InputError, MismatchError, UnsupportedError, check_type
from shardwright.runtime.comm.peers import Collectives, Peers
from shardwright.runtime.comm.pending import Pending
from shardwright.runtime.comm.torch_groups import flattened
from shardwright.runtime.probe import Probe

START_SECONDS = 300.0  # some ranks start later than others by more than a step may take


def meet(
    timeout_seconds: float, rank: int, world_size: int, store: Path | None = None
) -> dist.Store:
    """The store in which ranks meet: the file ``store``, which opens no port, where they wait
    ``START_SECONDS`` for each other; or where torchrun's environment says."""
    if store is not None:
        # A file is there at once, whoever comes: without this wait a late rank would be waited for
        # by the first collective, for as long as a step's timeout allows and no longer.
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
        raise InputError(where, "a port that is free", "one in use", remedy) from error
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
        raise InputError("mesh", "its ranks in ascending order", str(mesh.mesh.tolist()))
    if mesh.ndim == 1:
        return mesh
    # The group of all ranks is there. Another one would be one more communicator, with memory of
    # its own on an accelerator.
    if len(ranks) == dist.get_world_size():
        return DeviceMesh.from_group(dist.group.WORLD, mesh.device_type)
    return flattened(mesh)


def fingerprint_of(tensor: torch.Tensor) -> str:
    """sha256 of a tensor's values."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy()).hexdigest()


class Comm(Collectives):
    """The collectives of a mesh, counted and labelled.

    A 2-D mesh means (replicate, shard). ``shards`` are the ranks of its last dimension, among whom
    whole parameters are gathered, and ``twins`` those of the first (None for 1-D), who have the
    same shard: reductions also sum over them, as the last part of their wait. ``total`` counts all.

    ``twice``: what a shard has is cut again among its R twins. ``rank`` and ``size`` count these
    parts: rank (r, s) of the mesh has part s*R + r. All R ranks of a shard keep its parameters, R
    parts with their own among them, so a gather of what has not changed needs ``shards`` alone.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        probe: Probe | None = None,
        *,
        twice: bool = False,
        paths: str | Mapping[str, str] | None = None,
        checked: bool | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        check_mesh(mesh)
        probe = probe or Probe()

        def peers(dim: int) -> Peers:
            group, device = mesh.get_group(dim), mesh.device_type
            return Peers(group, device, probe, paths=paths, checked=checked, timeout=timeout)

        last = mesh.ndim - 1
        assert last or not twice, "a mesh of one dimension has no replicas"
        self.mesh, self.twice = mesh, twice
        self.shards = shards = peers(last)
        self.twins = peers(0) if last else None
        self.kept = 1  # neighbouring parts of parameters that a rank keeps, its own among them
        self.rank, self.size = shards.rank, shards.size
        if twice and self.twins is not None:
            self.kept = self.twins.size
            self.rank = self.rank * self.kept + self.twins.rank
            self.size *= self.kept
        self.total = mesh.size()
        groups = (mesh.get_group(dim) for dim in range(mesh.ndim))
        ranks = repr([dist.get_process_group_ranks(group) for group in groups]).encode()
        # Cuts are alike only among the same ranks: of as many others each has other elements.
        self.identity = (self.size, self.total, zlib.crc32(ranks))
        self.group, self.name, self.channel = shards.group, shards.name, shards.channel
        self.is_fake, self.config = shards.is_fake, shards.config
        self._every: Peers | None = None  # of all ranks, for exchanges of parts that are cut twice

    def _tell_all(self, probe: Probe) -> None:
        for peers in (self.shards, self.twins, self._every):
            if peers is not None:
                peers.probe = probe

    # Who is told of collectives; set it to let somebody else hear of all of them. Asked several
    # times for every unit and step, so without a function of ours.
    probe = property(attrgetter("shards.probe"), _tell_all)

    @property
    def sums_in_two(self) -> bool:
        """Whether a reduce-scatter is one over shards and then a sum over replicas, which may be
        left to a later one."""
        return self.twins is not None and not self.twice

    @property
    def paths(self) -> dict[str, str]:
        """The way of each collective in words."""
        return self.shards.paths

    def prepare(self, nbytes: int) -> None:
        """As ``Peers.prepare``, of gathers."""
        self.shards.prepare(nbytes)

    def tell(self, what: str, text: str) -> None:
        """As ``Peers.tell``."""
        self.shards.tell(what, text)

    def narrow(self, ranks: int) -> Peers:
        """As ``Peers.narrow``, of those among whom whole parameters are gathered."""
        return self.shards.narrow(ranks)

    def asked_of_all(self, name: str) -> AbstractContextManager[None]:
        """As ``Peers.asked_of_all``."""
        return self.shards.asked_of_all(name)

    def global_rank(self, rank: int) -> int:
        """How the whole job counts the one who has part ``rank``, which is what messages name."""
        if not self.twice:
            return self.shards.global_rank(rank)
        shard, twin = divmod(rank, self.kept)
        return int(self.mesh.mesh[twin, shard])

    def as_replicas(self, replicas: int) -> DeviceMesh:
        """The ranks of a mesh of one dimension as (replicate, shard) (collective)."""
        shards = self.size // replicas
        shard = self.rank % shards
        first = self.rank - shard
        groups = [range(shard, self.size, shards), range(first, first + shards)]
        return DeviceMesh.from_group(
            [self.shards.sub_group(own) for own in groups],
            self.mesh.device_type,
            mesh=self.mesh.mesh.view(replicas, shards),
            mesh_dim_names=("replicate", "shard"),
        )

    def gather_kept(self, label: str, kept: torch.Tensor, part: torch.Tensor) -> None:
        """``kept`` [kept*n] becomes the parts [n] of the ranks that keep the same ones."""
        assert self.twins is not None
        self.twins.all_gather(f"{label} over replicas", kept, part)

    def all_gather(
        self, label: str, full: torch.Tensor, shard: torch.Tensor, *, wait: bool = True
    ) -> Pending | None:
        # Neighbouring parts first, from those who have the same shard: then a rank can give all of
        # the shard to the gather.
        if self.twice:
            kept = shard.new_empty(self.kept * shard.numel())
            self.gather_kept(label, kept, shard)
            shard = kept
        return self.shards.all_gather(label, full, shard, wait=wait)

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

        Without ``replicas`` over the shards only; ``between`` is called before the sum over them.
        """
        twins, over = self.twins, f"{label} over replicas"
        if twins is None or not replicas:
            assert not self.twice, "parts of a shard's sum are whose replica has them"
            return self.shards.reduce_scatter(label, shard, full, wait=wait)
        # Over shards first: what is left to sum over replicas, which are often other hosts, is a
        # part of the whole.
        last = partial(twins.all_reduce, over, shard)
        of_shards = shard
        if self.twice:
            of_shards = shard.new_empty(self.kept * shard.numel())
            # The sum over shards is of all parts that this rank keeps; the second sum leaves it its
            # own.
            self.probe.holds(of_shards, "communication")
            last = partial(twins.reduce_scatter, over, shard, of_shards)
        pending = self.shards.reduce_scatter(label, of_shards, full, wait=False)
        assert pending is not None
        if between is not None and not self.twice:
            pending.then(between)
        pending.then(last)
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
        """``tensor`` becomes its sum, or the ``largest`` of each element, over all ranks.

        Without ``replicas`` over the shards only: what replicas have in common counts once. Of what
        is cut twice they have nothing in common.
        """
        twins = self.twins
        if twins is None or not (replicas or self.twice):
            return self.shards.all_reduce(label, tensor, wait=wait, largest=largest)
        pending = self.shards.all_reduce(label, tensor, wait=False, largest=largest)
        assert pending is not None
        pending.then(partial(twins.all_reduce, f"{label} over replicas", tensor, largest=largest))
        return pending.returned(wait)

    def broadcast(self, label: str, tensor: torch.Tensor, source: int) -> None:
        # In two steps. Rows of the mesh that the source is not in send what they have, which the
        # second broadcast puts right.
        shard, twin = divmod(source, self.kept)
        self.shards.broadcast(label, tensor, shard)
        if self.twice and self.twins is not None:
            self.twins.broadcast(f"{label} over replicas", tensor, twin)

    def all_to_all(
        self,
        label: str,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_splits: Sequence[int] = (),
        sent_splits: Sequence[int] = (),
        *,
        wait: bool = True,
    ) -> Pending | None:
        """Send the k-th split of ``sent`` to who has part k; equal splits where none are given."""
        splits = received_splits, sent_splits
        if not self.twice:
            return self.shards.all_to_all(label, received, sent, *splits, wait=wait)
        if self._every is None:
            whole = flat(self.mesh)
            self._every = Peers(whole.get_group(), whole.device_type, self.probe)
        # the group of all ranks counts replica by replica, parts go shard by shard
        shards = range(self.shards.size)
        order = [s * self.kept + r for r in range(self.kept) for s in shards]
        wanted, given = (
            tensor.split(list(sizes) if sizes else tensor.numel() // self.size)
            for tensor, sizes in zip((received, sent), splits, strict=True)
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
        pending.then(partial(_split_into, targets, arrived))
        return pending.returned(wait)

    def differs(self, label: str, numbers: torch.Tensor, *, everywhere: bool) -> bool:
        """Whether ``numbers`` [n] int64 are not the same on all ranks, or on all replicas."""
        # The largest of the negatives is the smallest: one collective says whether both are the
        # same.
        pair = torch.cat([numbers, -numbers])
        if everywhere:
            self.all_reduce(label, pair, largest=True)
        elif self.twins is not None:
            self.twins.all_reduce(label, pair, largest=True)
        largest, smallest = pair.chunk(2)
        return not torch.equal(largest, -smallest)

    def broadcast_replicas(self, label: str, tensor: torch.Tensor, *, everywhere: bool) -> None:
        """``tensor`` becomes what it is on the first of all ranks, or of all replicas."""
        if self.twins is not None:
            self.twins.broadcast(label, tensor, 0)
        if everywhere:
            self.broadcast(label, tensor, 0)

    def meet(self, where: str, why: str, remedy: str) -> None:
        """Wait for all ranks of the mesh to be ``where``, with no collective."""
        self.shards.meet(where, why, remedy)
        if self.twins is not None:
            # First all of a row of the mesh, then all of a column: who is through both has met
            # everybody.
            self.twins.meet(where, why, remedy)

    def agree(self, what: str, facts: Mapping[str, str], values: str = "") -> bool:
        """Raise on every rank, naming the ranks and the first fact on which they differ. Whether
        the ``values`` of those among whom the first rank's parameters are cut are the same."""
        if self.is_fake:
            return True
        texts = [*(f"{k}={v}" for k, v in facts.items()), values]
        # Hashes travel, which are of one length; a gather of texts would have to ask how long they
        # are.
        digests = [hashlib.sha256(text.encode()).digest() for text in texts]
        own = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8)
        everyone = own = own.to(self.mesh.device_type)
        for peers in (self.shards, self.twins):
            if peers is not None:
                # After the shards each rank has a row of the mesh; gathered over replicas, rows are
                # all ranks in the mesh's own order.
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
                    what,
                    f"the same {name} on every rank",
                    f"another one on rank {', '.join(map(str, differing))} than on rank {ranks[0]}",
                    "Start every rank from the same plan, code and versions.",
                )
        return all(row[-1].equal(rows[0, -1]) for row in rows[: self.shards.size])


def _split_into(targets: Sequence[torch.Tensor], values: torch.Tensor) -> None:
    for target, part in zip(targets, values.split([t.numel() for t in targets]), strict=True):
        target.copy_(part)


def check_mesh(mesh: DeviceMesh) -> None:
    """InputError unless ``mesh`` is one of one or two dimensions that this rank is in."""
    check_type(mesh, DeviceMesh, "mesh", "init_device_mesh makes one.")
    names = mesh.mesh_dim_names or [f"dim {index}" for index in range(mesh.ndim)]
    dims = ", ".join(f"{name} {mesh.size(index)}" for index, name in enumerate(names))
    if mesh.ndim > 2:
        wanted = "a 1-D mesh, or a 2-D one of (replicate, shard)"
        remedy = "Pass a 1-D or 2-D sub-mesh of it, such as mesh['replicate', 'shard']."
        raise UnsupportedError("mesh", wanted, f"{mesh.ndim} dimensions ({dims})", remedy)
    if mesh.get_coordinate() is None:
        found = f"ranks {mesh.mesh.flatten().tolist()} ({dims}) on rank {dist.get_rank()}"
        raise InputError(
            "mesh", "a mesh that this rank is in", found, "Call it on the ranks of the mesh only."
        )
