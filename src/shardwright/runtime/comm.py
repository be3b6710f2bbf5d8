"""Every collective of the runtime. Nothing else names torch.distributed's operations.

The backend is probed once: torch renamed two collectives between 2.11 and 2.13, and averaging is
done as a sum and a scale by the caller, which every backend has. Waits are bounded by the timeout
of the mesh's own group. The calling order is the same on every rank by construction (layout order).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.core.errors import MismatchError, UnsupportedError, expected
from shardwright.runtime.probe import Probe

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def start(
    backend: str, timeout_seconds: float, rank: int, world_size: int, store: Path | None = None
) -> None:
    """Join the process group; every wait in it is bounded by ``timeout_seconds``.

    Ranks meet at the file ``store``, which opens no port, or where torchrun's environment says.
    """
    meeting = None if store is None else dist.FileStore(str(store), world_size)
    dist.init_process_group(
        backend,
        store=meeting,
        rank=rank if meeting is not None else -1,
        world_size=world_size if meeting is not None else -1,
        timeout=timedelta(seconds=timeout_seconds),
    )


def stop() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def fingerprint_of(tensor: torch.Tensor) -> str:
    """sha256 of a tensor's values."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy()).hexdigest()


class Comm:
    """The collectives of one 1-D mesh, counted and labelled."""

    def __init__(self, mesh: DeviceMesh, probe: Probe | None = None) -> None:
        if mesh.ndim != 1:
            raise UnsupportedError(
                expected(
                    "mesh", "a 1-D mesh", f"{mesh.ndim} dimensions", "Pass a 1-D sub-mesh of it."
                )
            )
        self.mesh = mesh
        self.group = mesh.get_group()
        self.rank = mesh.get_local_rank()
        self.size = mesh.size()
        self.probe = probe or Probe()

    def _done(self) -> None:
        """Let the backend's thread let go of the tensors.

        gloo wakes the caller first and drops its hold after; where cores are few, the caller would
        compute on with buffers alive that nobody needs. A yield costs about a microsecond.
        """
        if self.mesh.device_type == "cpu":
            os.sched_yield()

    def all_gather(self, label: str, full: torch.Tensor, shard: torch.Tensor) -> None:
        """``full`` [W*n] becomes the shards [n] of all ranks in rank order."""
        self.probe.collective(label, full.numel() * full.element_size())
        _all_gather(full, shard, group=self.group)
        self._done()

    def reduce_scatter(self, label: str, shard: torch.Tensor, full: torch.Tensor) -> None:
        """``shard`` [n] becomes this rank's part of the sum over ranks of ``full`` [W*n]."""
        self.probe.collective(label, full.numel() * full.element_size())
        _reduce_scatter(shard, full, op=dist.ReduceOp.SUM, group=self.group)
        self._done()

    def all_reduce(self, label: str, tensor: torch.Tensor) -> None:
        """``tensor`` becomes its sum over ranks."""
        self.probe.collective(label, tensor.numel() * tensor.element_size())
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self.group)
        self._done()

    def all_to_all(
        self,
        label: str,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_splits: Sequence[int] | None = None,
        sent_splits: Sequence[int] | None = None,
    ) -> None:
        """Send the k-th split of ``sent`` to rank k; equal splits where none are given."""
        self.probe.collective(label, sent.numel() * sent.element_size())
        dist.all_to_all_single(
            received,
            sent,
            None if received_splits is None else list(received_splits),
            None if sent_splits is None else list(sent_splits),
            group=self.group,
        )
        self._done()

    def agree(self, what: str, facts: Mapping[str, str]) -> None:
        """Raise on every rank, naming the ranks and the first fact on which they differ."""
        digests = [hashlib.sha256(f"{k}={v}".encode()).digest() for k, v in facts.items()]
        own = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8)
        own = own.to(self.mesh.device_type)
        everyone = own.new_empty(self.size * own.numel())
        self.all_gather(f"agree on {what}", everyone, own)
        rows = everyone.view(self.size, len(digests), 32).cpu()
        for index, name in enumerate(facts):
            differing = [r for r in range(self.size) if not rows[r, index].equal(rows[0, index])]
            if differing:
                ranks = ", ".join(map(str, differing))
                raise MismatchError(
                    expected(
                        what,
                        f"the same {name} on every rank",
                        f"another one on rank {ranks} than on rank 0",
                        "Start every rank from the same plan, code and versions.",
                    )
                )
