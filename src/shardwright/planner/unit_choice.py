"""One way to place a dense unit, of one module or of several that share its buffer."""

# Bytes and seconds of a unit follow from its layout and its context alone, so that a choice can be
# made again from a plan (`explain`), asked for in vain (`--why-not`) and bound from below
# (`strategy/steps.unit_floors`) without the search that found it.

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from shardwright.core.amount import named
from shardwright.core.block import Block
from shardwright.core.layout import ReplicaGrid, UnitLayout, unit_layout
from shardwright.core.model import UnitSpec
from shardwright.core.optimizer_states import Elements
from shardwright.core.optimizers import OPTIMIZERS
from shardwright.core.placement import Flat, Placement, Replicate, Roles, Zero, roles
from shardwright.core.schedule import Action
from shardwright.core.timeline import Phase
from shardwright.core.unit_bytes import Dtypes, UnitBytes
from shardwright.cost import dense, optimizer
from shardwright.cost.pipeline import ComputeSeconds, UnitSeconds
from shardwright.job.memory import Offload


class DenseContext(Dtypes, frozen=True):
    """Everything but a unit and its placement that the unit's seconds depend on.

    ``local`` of the ranks are linked closely, all where it is None; ``c`` are constants by name.
    Units that are not replicated are shared as a stage of ``zero`` says, and their shards,
    gradients and states may be, or are all, in host memory as ``offload`` says, which is that of
    the device unless this is an accelerator. They are shared by the shards of as many ``replicas``,
    which cut gradients and states again where they are cut ``twice``.
    """

    ranks: int
    local: int | None
    c: Mapping[str, float]
    zero: Zero = 3
    offload: Offload = "none"
    on_gpu: bool = False
    replicas: int = 1
    twice: bool = False

    @property
    def grid(self) -> ReplicaGrid:
        """The ranks as units that are not replicated lie on them."""
        return ReplicaGrid(self.replicas, self.ranks // self.replicas, self.twice)

    @property
    def shards_local(self) -> int | None:
        """How many of a group of shards are linked closely."""
        shards = self.grid.shards
        # Ranks of a group of shards are neighbours. Where hosts hold whole groups, nothing of a
        # group crosses hosts. Else both hosts and groups begin at multiples of their sizes, so what
        # they have in common comes in pieces of at least their greatest common divisor.
        if self.local is None or (self.replicas > 1 and self.local % shards == 0):
            return None
        return math.gcd(self.local, shards)

    @property
    def replicas_local(self) -> int | None:
        """How many replicas of a shard are linked closely."""
        if self.local is None:
            return None
        # Replicas of a shard lie a whole group of shards apart, so a host has as many as it has
        # groups.
        near = max(self.local // self.grid.shards, 1)
        return None if near >= self.replicas else near


class Calls(NamedTuple):
    """Collectives of a unit in a step: gathers for forwards and backwards, sums, and what replicas
    of its shards do, to sum and to have what others of them updated."""

    forward: int
    backward: int
    reduces: int
    between: int

    @property
    def gathers(self) -> int:
        """Before forwards and backwards."""
        return self.forward + self.backward


class UnitSizes(NamedTuple):
    """What the seconds of a unit follow from, as numbers or as amounts of a derivation.

    Bytes of the whole buffer as it is ``gathered``, of its gradient before it is summed
    (``cleared``) and as it is (``reduced``, and among replicas ``part_reduced``); of a rank's
    slice, and of what is ``trained`` and ``stored`` there. Ranks that share it, replicas of each
    share, and how many of them are linked closely.
    """

    gathered: Any
    cleared: Any
    reduced: Any
    part_reduced: Any
    slice: Any
    trained: Any
    stored: Any
    shards: Any
    local: Any
    replicas: Any
    replicas_local: Any


@dataclass(frozen=True)
class UnitChoice:
    """A unit with the placement of its states, and under which stage of ZeRO the other roles follow
    it; bytes and seconds are those of every rank, padding apart.

    ``computing`` is what its modules take. The rank's shares of an ``offloaded`` unit, in all
    roles, are in host memory.
    """

    unit: UnitSpec
    placement: Placement
    zero: Zero
    reshard: bool
    buffers: UnitBytes
    computing: ComputeSeconds
    context: DenseContext
    offloaded: bool = False

    @property
    def layout(self) -> UnitLayout:
        """Where every element of it lives."""
        return self.buffers.layout

    @property
    def away(self) -> bool:
        """Whether the shares of a rank are in another memory than the device's."""
        return self.offloaded and self.context.on_gpu

    @cached_property
    def grid(self) -> ReplicaGrid:
        """The ranks of its parts; of a replicated unit all of them alike."""
        return ReplicaGrid(1, self.context.ranks) if self.replicated else self.context.grid

    @cached_property
    def sizes(self) -> UnitSizes:
        """What its seconds follow from."""
        context, layout, its = self.context, self.layout, self.buffers
        return UnitSizes(
            gathered=its.cleared if self.stays else its.gathered,
            cleared=its.cleared,
            reduced=its.reduced,
            part_reduced=its.reduced // self.grid.shards if self.between else 0,
            slice=layout.shard_bytes,
            trained=layout.trained.shard_bytes,
            stored=layout.stored_bytes,
            shards=self.grid.shards,
            local=context.local if self.replicated else context.shards_local,
            replicas=self.grid.replicas,
            replicas_local=context.replicas_local,
        )

    @cached_property
    def spent(self) -> UnitSeconds:
        """What its collectives, gradient and update take."""
        return unit_seconds(self, self.sizes, self.context.c)

    @property
    def replicated(self) -> bool:
        """Whether every rank keeps the whole unit."""
        return isinstance(self.placement, Replicate)

    @property
    def comes(self) -> bool:
        """Whether its whole parameters are other memory than what every rank keeps of it, which a
        forward fills: ranks send it, or replicas are copied in the dtype of computing. What stays
        and is never updated is filled once in a run."""
        still = self.stays and not self.layout.trains
        return (not self.replicated or self.buffers.room > 0) and not still

    @property
    def stays(self) -> bool:
        """Whether it is whole on every rank between steps, of which each updates a share."""
        return self.zero < 3 and not self.replicated

    @property
    def roles(self) -> Roles:
        """Where parameters, gradients and optimizer states live."""
        return roles(self.placement, self.zero)

    @cached_property
    def seconds(self) -> dict[Phase, float]:
        """Seconds by phase where nothing overlaps."""
        again = self.spent.gather if self.reshard else 0.0
        return {
            "forward": self.computing.forward + self.spent.gather + (self.spent.replicas or 0.0),
            "backward": self.computing.backward + self.spent.gradient + again,
            "reduce": self.spent.reduce,
            "step": self.spent.update,
        }

    @property
    def reduces(self) -> bool:
        """Whether anything of it is summed: nothing is where everything is frozen."""
        return self.layout.trains

    @property
    def between(self) -> bool:
        """Whether replicas of its shards sum as well."""
        return self.reduces and self.grid.replicas > 1

    def calls(self, step: Iterable[Action]) -> Calls:
        """Its collectives among the actions of a step; replicas are copied, not gathered."""
        # Counted in the step itself, not by a rule: a unit that runs twice, or again for a
        # checkpoint, is gathered more often than once each way.
        done = Counter((a.verb, a.direction) for a in step if a.target == self.unit.name)
        return Calls(
            0 if self.replicated else done["gather", "forward"],
            0 if self.replicated else done["gather", "backward"],
            done["reduce", "backward"] if self.reduces else 0,
            done["reduce", "backward"] + self.grid.twice if self.between else 0,
        )

    @property
    def kept_bytes(self) -> int:
        """Full buffers with which replicas have what others of them updated in a step."""
        return self.layout.stored_bytes if self.reduces and self.grid.twice else 0

    def moved_bytes(self, calls: Calls) -> int:
        """Full buffers of all collectives of a step."""
        its = self.sizes
        gathered: int = calls.gathers * its.gathered
        summed: int = calls.reduces * (its.reduced + its.part_reduced + self.note_bytes)
        return gathered + self.kept_bytes + summed

    @property
    def note_bytes(self) -> int:
        """Bytes that travel with a gradient to every rank, beside it."""
        once = self.grid.kept if self.between else 0
        return self.layout.note_bytes * (once + (1 if self.replicated else self.layout.world_size))

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Where its parameters live; gradients and states live beside them, but where parts of
        parameters that stay do."""
        return tuple(self.grid.blocks(self.layout, "parameter", self.roles.parameter))

    @cached_property
    def padding(self) -> tuple[int, ...]:
        """Bytes of each rank's buffer that belong to no tensor."""
        return self._of_ranks(self.layout.paddings(stored=True))

    @cached_property
    def trained_padding(self) -> tuple[int, ...]:
        """Bytes of each rank's share of what gets a gradient that belong to no tensor."""
        return self._of_ranks(self.layout.trained.paddings(stored=False))

    def elements(self, rank: int | None) -> tuple[Elements, Elements] | None:
        """Of what is trained, the elements of tensors and of padding on a rank, where its optimizer
        quantizes some; of the fullest rank, padding among the rest, where it is None."""
        # States of 8 bits are kept in blocks of elements, and small tensors in full, so their bytes
        # depend on where a rank's slice begins and ends; those of others on its length alone.
        if not OPTIMIZERS[self.unit.optimizer].quantized:
            return None
        trained = self.layout.trained
        if rank is not None:
            return trained.elements(rank if self.grid.replicas == 1 else self.grid.part(rank))
        own, padding = trained.elements(trained.fullest())
        every = Elements(*(a + b for a, b in zip(own, padding, strict=True)))
        return every, Elements(0, 0, 0)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of optimizer states on the fullest rank, those of padding among them."""
        elements = self.elements(None)
        found: int = optimizer.dense_state_bytes(
            self.sizes.trained,
            self.unit.optimizer,
            self.layout.trained.flat_tensors,
            elements and elements[0],
        )
        return found

    def _of_ranks(self, parts: tuple[int, ...]) -> tuple[int, ...]:
        """What every rank has of something that is known of each part."""
        if self.grid.replicas == 1:
            return parts
        return tuple(parts[self.grid.part(rank)] for rank in self.grid.ranks)


def merged(units: Sequence[UnitSpec]) -> UnitSpec:
    """The unit that neighbours share: ``layers.0-3`` of ``layers.0`` to ``layers.3``."""
    # The name has to say which layers share it, for it is what a plan, a timeline and a measurement
    # have in common.
    first = units[0]
    if len(units) == 1:
        return first
    last = units[-1].name.rpartition(".")[2]
    tensors = tuple(tensor for unit in units for tensor in unit.tensors)
    return UnitSpec(
        f"{first.name}-{last}",
        tensors,
        first.optimizer,
        first.series,
        tuple(path for unit in units for path in unit.modules),
        tuple(member for unit in units for member in unit.members),
        tuple(name for unit in units for name in unit.frozen),
        next((unit.checkpointing for unit in units if unit.checkpointed), "none"),
        tuple(path for unit in units for path in unit.checkpointed),
    )


def unit_choices(
    units: Sequence[UnitSpec],
    computed: Mapping[str, ComputeSeconds],
    context: DenseContext,
    *,
    offloads: bool = True,
) -> Iterator[UnitChoice]:
    """Neighbours as one unit: replicated, sharded and kept after forward, sharded and resharded;
    below ZeRO's stage 3 replicated or sharded and whole between steps. Those that are sharded once
    more in host memory, where it ``offloads``.

    Where two cost the same, the earlier one is the simpler one.
    """
    unit = merged(units)
    computing = ComputeSeconds(
        sum(computed[member.name].forward for member in units),
        sum(computed[member.name].backward for member in units),
    )

    def choices(placement: Placement, zero: Zero = 3, *, offloaded: bool) -> Iterator[UnitChoice]:
        """Kept whole after a forward, and if it can be resharded."""
        sharded = isinstance(placement, Flat)
        grid = context.grid if sharded else ReplicaGrid(1, context.ranks)
        copied = context.copied(unit.tensors, on_host=offloaded)
        layout = unit_layout(
            unit.tensors,
            placement,
            grid.parts,
            unit.frozen,
            zero=zero,
            kept=grid.kept,
            cast=copied,
            block=OPTIMIZERS[unit.optimizer].block,
        )
        buffers = UnitBytes.of(layout, context, copied)
        # Kept before resharded, and replicated before sharded: whoever takes the first of equally
        # fast choices takes the one with fewer collectives.
        for reshard in (False, True) if sharded and zero == 3 else (False,):
            yield UnitChoice(unit, placement, zero, reshard, buffers, computing, context, offloaded)

    yield from choices(Replicate(), offloaded=False)
    for offloaded in (False, True) if offloads else (False,):
        yield from choices(Flat(), context.zero, offloaded=offloaded)


def unit_seconds(choice: UnitChoice, of: UnitSizes, c: Any) -> UnitSeconds:
    """What one gather, one reduce, the gradient's buffer and the update of a unit take.

    Numbers give numbers, amounts derivations. Of a unit in host memory a gather begins with a copy
    of the rank's share, a reduce ends with one of its gradient, and the host updates.
    """
    # `explain` derives the seconds of a plan by the same calls: terms in another order would differ
    # from the plan in the last bits.
    sharded = not choice.replicated
    gather, reduce = (
        dense.communication_seconds(
            buffer, of.slice, of.shards, sharded=sharded, stays=choice.stays, c=c, local=of.local
        )
        for buffer in (of.gathered, of.reduced)
    )
    gathers, reduces = gather["gather"], reduce["reduce"] if choice.reduces else 0.0
    if choice.comes and not sharded:  # no rank sends anything, and each fills its own copy
        gathers = dense.copy_seconds(of.gathered, c, away=False)
    replicas = None
    if choice.between:
        between = dense.replica_seconds(
            of.stored,
            of.part_reduced,
            of.replicas,
            twice=choice.grid.twice,
            c=c,
            local=of.replicas_local,
        )
        reduces = reduces + between["reduce"]
        replicas = between["gather"] if choice.grid.twice else None
    # The device computes with what is gathered, so a share in host memory crosses the link before
    # each gather, and its gradient after each reduce. Its update runs on the host, at the speed of
    # the host's memory (`update_seconds`).
    if choice.offloaded:
        share = named("sent_bytes", of.gathered // of.shards, "B")
        gathers = gathers + dense.copy_seconds(share, c, away=choice.away)
        if choice.reduces:
            reduces = reduces + dense.copy_seconds(of.trained, c, away=choice.away)
    on_host = choice.away or not choice.context.on_gpu
    moved = optimizer.dense_update_bytes(of.trained, choice.unit.optimizer, on_host=on_host)
    return UnitSeconds(
        gather=gathers,
        reduce=reduces,
        gradient=dense.gradient_seconds(of.cleared, c),
        update=dense.update_seconds(moved, c, away=choice.away),
        replicas=replicas,
    )
