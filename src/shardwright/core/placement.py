"""Where the blocks of a tensor live, one placement per mesh axis, free of torch.

The same five placements serve both accesses. Reached by ``gather`` (weights come to the data) they
are data parallel, FSDP and whole-parameter ownership; reached by ``route`` (ids go to the weights)
they are the table types of recommender systems.
"""

# Torch-free twins of DTensor's placements under the same names, so that a plan can be read where
# torch is not installed. `Flat` has no twin: it cuts the buffer of a whole unit, which no
# placement of a single tensor can say.

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec


class Replicate(msgspec.Struct, frozen=True, tag="replicate", tag_field="placement"):
    """Every rank of the axis holds the whole tensor."""


class Shard(msgspec.Struct, frozen=True, tag="shard", tag_field="placement"):
    """Cut along tensor dimension ``dim`` in ceiling chunks; the last ranks may hold less."""

    dim: int = 0


class Owned(msgspec.Struct, frozen=True, tag="owned", tag_field="placement"):
    """Whole on one rank, empty on the others."""

    rank: int


class BlockShard(msgspec.Struct, frozen=True, tag="block_shard", tag_field="placement"):
    """Cut along ``dim`` at multiples of ``size`` only, so that a block is never divided."""

    size: int
    dim: int = 0


class Flat(msgspec.Struct, frozen=True, tag="flat", tag_field="placement"):
    """The unit's padded buffer is cut evenly; a cut may cross tensor boundaries."""


Placement = Replicate | Shard | Owned | BlockShard | Flat


Zero = Literal[1, 2, 3]
# A stage for replicas and one for shards: what shards of parameters have in common, their replicas
# cut again.
TwoZeros = tuple[Literal[2], Literal[3]]


def shared_words(zero: Zero | TwoZeros, replicas: int = 1) -> str:
    """What the field calls a stage of ZeRO among the shards of so many replicas."""
    if isinstance(zero, tuple):
        return "HFSDP"
    if replicas == 1:
        return f"ZeRO-{zero}"
    return "HSDP" if zero == 3 else f"ZeRO-{zero} in replicas"


class Roles(NamedTuple):
    """Where a unit's parameters, gradients and optimizer states live between steps."""

    parameter: Placement
    gradient: Placement
    optimizer_state: Placement

    @property
    def zero(self) -> Zero | None:
        """The stage of ZeRO of which these are a row; None of other ones."""
        cut = self.optimizer_state
        return next((stage for stage in _STAGES if roles(cut, stage) == self), None)


_STAGES: tuple[Zero, ...] = (3, 2, 1)


def roles(cut: Placement, zero: Zero = 3) -> Roles:
    """What ZeRO cuts as ``cut`` says: optimizer states, from stage 2 on gradients, with 3
    parameters too. The rest is whole on every rank; where ``cut`` is Replicate, all of it is."""
    whole = Replicate()
    return Roles(cut if zero == 3 else whole, whole if zero == 1 else cut, cut)


def describe(placement: Placement) -> str:
    """A short text for tables: ``Shard(0)``, ``Owned(3)``, ``Replicate()``."""
    match placement:
        case Replicate():
            return "Replicate()"
        case Shard(dim):
            return f"Shard({dim})"
        case Owned(rank):
            return f"Owned({rank})"
        case BlockShard(size, dim):
            return f"BlockShard({size}, {dim})"
        case Flat():
            return "Flat()"
