"""What someone wrote to the parameters of a unit: kept, or refused inside of its forward."""

from __future__ import annotations

import torch
from torch.autograd.graph import increment_version

from shardwright.core.errors import InputError, expected
from shardwright.runtime.torch_private import set_version
from shardwright.runtime.units.buffers import Buffers
from shardwright.runtime.units.cut import part_of

Versions = tuple[int, int]  # of the whole parameters, and of those that are where the shard is


class Writes:
    """Versions of a unit's memory, which say who wrote what since it was gathered.

    Autograd saves the whole unit's with a graph: a gather of shards that are what they were at the
    last one must leave them as they are, or a backward is refused.
    """

    def __init__(self, buffers: Buffers) -> None:
        self.buffers = buffers
        self.watched: Versions | None = None  # while a forward is under way
        self._gathered = -1  # of the shard
        self._whole = self._replica = 0

    @property
    def versions(self) -> Versions:
        """What they are now."""
        return self.buffers.whole.tensor._version, self.buffers.replica._version

    @property
    def is_changed(self) -> bool:
        """Whether the shards were changed since they were gathered."""
        return self.buffers.shard._version != self._gathered

    @property
    def whole_is_written(self) -> bool:
        """Whether someone wrote a whole parameter since it was gathered."""
        return self.versions != (self._whole, self._replica)

    def gather(self) -> None:
        """The shards are gathered, and are others than last time."""
        self._gathered = self.buffers.shard._version
        self._whole = self.buffers.whole.tensor._version
        increment_version(self.buffers.replica)

    def forget(self) -> None:
        """Let what was written to whole parameters go with them."""
        set_version(self.buffers.whole.tensor, self._whole)
        self._replica = self.buffers.replica._version

    def free(self) -> None:
        """Whatever a graph has saved of the unit is refused by autograd until the unit is there
        again: reading it would end the process."""
        self._whole = self.buffers.whole.tensor._version
        increment_version(self.buffers.whole.tensor)

    @torch.no_grad()
    def keep(self, unit: str) -> None:
        """Keep this rank's part of the whole parameters as they are now.

        Where they compute in another dtype, elements that nobody changed keep their precision.
        """
        if self.is_changed:
            raise InputError(
                expected(
                    f"parameters of unit '{unit}'",
                    "either the sharded or the gathered ones to be written",
                    "both, since they were gathered",
                    "Write under torch.no_grad() before the forward or after the backward.",
                )
            )
        buffers = self.buffers
        rows = zip(buffers.locals, buffers.pieces, buffers.parameters, strict=True)
        for local, piece, whole in rows:
            now = part_of(whole.detach(), piece.offsets, piece.sizes)
            if now.dtype is not local.dtype:
                now = torch.where(now == local.to(now.dtype), local, now.to(local.dtype))
            local.copy_(now)
        self._whole, self._replica = self.versions
        self._gathered = buffers.shard._version

    def refusal(self, unit: str) -> InputError | None:
        """The forward is over: what to say if it wrote a parameter, for the write goes with the
        gathered copy, or is another on each replica."""
        was, self.watched = self.watched, None
        now = self.versions
        if was is None or now == was:
            return None
        written = self._written(shard=now[1] != was[1])
        self.forget()
        return InputError(
            expected(
                f"forward of unit '{unit}'",
                "one that only reads its parameters",
                f"one that writes {', '.join(written) or 'one'} in place",
                "Keep what a forward changes in a buffer, leave the parameter out "
                "(ignored_params), or write inside storage.unsharded(write=True).",
            )
        )

    def _written(self, *, shard: bool) -> list[str]:
        """What was written, as far as this rank's part shows it; of replicas, all that may be."""
        buffers = self.buffers
        rows = zip(buffers.pieces, buffers.parameters, buffers.locals, buffers.apart, strict=True)
        return [
            piece.tensor.fqn
            for piece, whole, local, apart in rows
            if (
                not part_of(whole.detach(), piece.offsets, piece.sizes).equal(local.to(whole.dtype))
                if apart
                else shard
            )
        ]
