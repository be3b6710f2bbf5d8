"""What every runtime profile answers: what a rank keeps, and what a step takes and frees."""

# The walk of a step (`rank_step`) knows when units are entered and left; a machine knows what its
# runtime takes and frees then.
#
# What must stay true: `state` has everything that decides what is done next beside what the heap
# holds by name. Passes are skipped where it is equal (`Repetition`); what is forgotten there lets
# the peak of a later microbatch go unseen.

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from shardwright.core.llama import LLAMA_EXPERTS
from shardwright.core.placement import Zero
from shardwright.core.schedule import Prefetch
from shardwright.core.tensor import TensorSpec, element_bytes
from shardwright.core.timeline import Kind
from shardwright.core.unit_bytes import Dtypes
from shardwright.heap.ledger import GradientRule, Ledger
from shardwright.job.parallel import fits

Units = Mapping[str, Sequence[TensorSpec]]
# When gradients are summed over ranks: after every backward, unit by unit; after that of the last
# microbatch, unit by unit; or when that is over, as a pipeline does it, which until then also
# leaves alone what it has gathered.
Reduces = Literal["each", "last", "end"]
# What data ranks share: parameters, gradients and states, the states alone, or nothing.
Shares = Literal["all", "states", "nothing"]


class Sharding(Dtypes, frozen=True):
    """How parameters, which have the dtype they are stored in, are spread over data ranks and in
    which dtypes they are used.

    Every rank has the ``replicated`` units. Units in ``kept`` stay whole from their forward to
    their backward. ``prefetch``, ``flat`` and ``zero`` are of our own runtime: how many units are
    on their way while one computes, whether a unit is cut as one buffer or each of its parameters
    by itself, and below 3 that units which are shared are whole between steps, too. Shares,
    gradients and states of all units with ``offload``, or of those in ``offloaded``, are in host
    memory. Gradients and states of shards that are cut ``twice`` are cut over ``replicas``, too.
    ``reduce_scatter_inputs`` and ``holds_all_reduced`` are of FSDP2 (``job.memory.Fsdp2Section``).
    A runtime that ``waits`` sums gradients of whole parameters when all of them are there.
    Large tensors are cut between blocks of ``block`` elements. ``experts`` name units, with ``*``
    for any part.
    """

    shards: int = 1
    expert_shards: int = 1
    replicas: int = 1
    reshard_after_forward: bool = True
    kept: frozenset[str] = frozenset()
    replicated: frozenset[str] = frozenset()
    zero: Zero = 3
    prefetch: Prefetch = 1
    flat: bool = True
    reduces: Reduces = "each"
    shares: Shares = "all"
    waits: bool = False
    on_gpu: bool = True
    offload: bool = False
    offloaded: frozenset[str] = frozenset()
    twice: bool = False
    reduce_scatter_inputs: int = 1
    holds_all_reduced: bool = True
    block: int = 1
    experts: tuple[str, ...] = LLAMA_EXPERTS

    def is_experts(self, unit: str) -> bool:
        """Whether a unit has nothing but experts that other ranks do not have."""
        return any(fits(unit, pattern) for pattern in self.experts)

    def on_host(self, unit: str) -> bool:
        """Whether a rank's shares of a unit are in host memory."""
        return self.offload or unit in self.offloaded

    def away(self, unit: str) -> bool:
        """Whether that is another memory than the device's."""
        return self.on_gpu and self.on_host(unit)

    def shards_of(self, unit: str) -> int:
        """Ranks that share a unit: experts that other ranks do not have are shared by fewer."""
        if unit in self.replicated or self.shares != "all":
            return 1
        return self.expert_shards if self.is_experts(unit) else self.shards

    def kept_of(self, unit: str) -> int:
        """Neighbouring parts of a unit that a rank keeps, of which it updates one."""
        return self.replicas if self.twice and unit not in self.replicated else 1

    def stays(self, unit: str) -> bool:
        """Whether parameters that ranks share are whole between steps."""
        return self.zero < 3 and unit not in self.replicated

    def parameter_bytes(self, unit: str, tensor: TensorSpec) -> int:
        """What a rank keeps of a parameter, padding apart."""
        share = -(-tensor.numel // self.shards_of(unit)) * self.stored(tensor.dtype)
        here = 0 if self.away(unit) else share
        if not self.stays(unit):
            return here
        apart = self.casts(tensor.dtype) or self.on_host(unit)
        return tensor.numel * self.computed(tensor.dtype) + (here if apart else 0)

    def stored(self, dtype: str) -> int:
        """Bytes of an element between steps: whole parameters are kept as they compute."""
        return element_bytes(dtype) if self.shares == "all" else self.computed(dtype)


@dataclass(slots=True)
class Count:
    """How many times something is there."""

    value: str
    number: int = 1


@dataclass(slots=True)
class Machine(ABC):
    """A runtime at work on one rank's heap; units are known by name, tensors in ``frozen`` have
    neither gradients nor states. What a runtime does nothing at, it need not say."""

    heap: Ledger
    units: Units
    sharding: Sharding
    frozen: frozenset[str] = frozenset()
    adding: bool = field(default=False, init=False)  # to gradients of an earlier microbatch

    @property
    def trained(self) -> list[TensorSpec]:
        """The tensors that have gradients, unit by unit."""
        return [t for its in self.units.values() for t in its if t.fqn not in self.frozen]

    @abstractmethod
    def state(self) -> object:
        """What is done next follows from it and from what the heap holds by name; equal values are
        equal states."""

    def depths(self) -> list[Count]:
        """How many of the same it remembers here and there, in the order of ``state``: passes move
        these numbers, and none does otherwise for one that is larger."""
        return []

    @abstractmethod
    def resident(self) -> dict[Kind, int]:
        """What is there between steps, apart from optimizer states, in bytes."""

    @abstractmethod
    def updated(self) -> list[TensorSpec]:
        """What this rank's optimizer updates, tensor by tensor."""

    def rule(self) -> GradientRule:
        """What becomes of a gradient of the microbatch whose backward is under way: it stays until
        its unit's is over, unless one of an earlier microbatch is there, to which autograd adds."""
        return "added" if self.adding else "stays"

    def begin(self, forward: Sequence[str], backward: Sequence[str], last: bool) -> None:  # noqa: B027
        """A pass through units begins, of which forwards and backwards enter these, some again and
        again; no backward through them follows the ``last`` one."""

    def enter(self, unit: str) -> None:  # noqa: B027
        """Before a unit's forward."""

    def leave(self, unit: str) -> None:  # noqa: B027
        """After a unit's forward."""

    def finish(self) -> None:  # noqa: B027
        """After the whole forward."""

    def enter_backward(self, unit: str) -> None:  # noqa: B027
        """Before a unit's backward."""

    def arrive(self, unit: str, dtype: str, nbytes: int) -> None:  # noqa: B027
        """Gradients come of a unit's tensors of one dtype, of which so many bytes stay."""

    def leave_backward(self, unit: str) -> None:  # noqa: B027
        """After a unit's backward."""

    @abstractmethod
    def finish_backward(self) -> None:
        """After the whole backward."""

    def zero_grad(self) -> None:
        """After the optimizer's step: gradients go."""
        for unit in self.units:
            self.heap.free(f"{unit}.gradient")


class Repetition:
    """A rank between passes, as it is when made: what repeats from there on can be skipped."""

    def __init__(self, heap: Ledger, machine: Machine) -> None:
        self.heap, self.machine = heap, machine
        self.held, self.state, self.live = heap.names(), machine.state(), dict(heap.live)
        self.counts = [each.number for each in machine.depths()]

    def skip(self, times: int) -> int:
        """Do again what was done since, ``times`` over, or as often as it does the same; how often
        that was."""
        # Numbers that a pass moves (how many forwards no backward has met) are not of the state:
        # they are moved on, and end the skipping before one of them would get below 0.
        if self.held != self.heap.names() or self.state != self.machine.state():
            return 0
        depths = self.machine.depths()
        changes = [e.number - before for e, before in zip(depths, self.counts, strict=True)]
        for each, change in zip(depths, changes, strict=True):
            if change < 0:
                times = min(times, (each.number + change) // -change)
        for each, change in zip(depths, changes, strict=True):
            each.number += times * change
        live = self.heap.live
        self.heap.skip({kind: n - self.live.get(kind, 0) for kind, n in live.items()}, times)
        return times


@dataclass(slots=True)
class Replicated(Machine):
    """Parameters in the dtype they compute in; gradients in buckets beside their own, which are
    reduced in place when all of a backward is over."""

    def state(self) -> object:
        """Whether there was a backward."""
        return self.adding

    def resident(self) -> dict[Kind, int]:
        """Whole parameters, and DDP's buckets where there are ranks to average with."""
        several = self.sharding.shards * self.sharding.replicas > 1
        buckets = sum(t.numel * self.sharding.computed(t.dtype) for t in self.trained)
        return {"weight": self._whole, "communication": buckets if several else 0}

    @property
    def _whole(self) -> int:
        """Bytes of all parameters."""
        sizes = (t.numel * self.sharding.stored(t.dtype) for t in chain(*self.units.values()))
        return sum(sizes)

    def updated(self) -> list[TensorSpec]:
        """Every parameter; under ZeRO-1 those of the rank that has most of them."""
        dtype = self.sharding.param_dtype
        tensors = [TensorSpec(t.fqn, t.shape, dtype or t.dtype) for t in self.trained]
        if self.sharding.shares == "nothing" or self.sharding.shards == 1:
            return tensors
        shares: list[list[TensorSpec]] = [[] for _ in range(self.sharding.shards)]
        sizes = [0] * self.sharding.shards
        # As torch's ZeroRedundancyOptimizer does it: the largest parameter first, each to the rank
        # that has least so far.
        for tensor in sorted(tensors, key=lambda t: -t.numel):
            least = sizes.index(min(sizes))
            shares[least].append(tensor)
            sizes[least] += tensor.numel * element_bytes(tensor.dtype)
        return shares[sizes.index(max(sizes))]

    def finish_backward(self) -> None:
        """A backward has left its gradients, to which later microbatches add theirs."""
        self.adding = True
        for unit in self.units:
            self.heap.become(f"{unit}.unreduced", f"{unit}.gradient", "gradient")

    def zero_grad(self) -> None:
        """Gradients go."""
        Machine.zero_grad(self)  # super() knows no class with slots
        self.adding = False


class Megatron(Replicated):
    """Megatron-LM's data parallel (``core/distributed/param_and_grad_buffer.py``, 0.14): gradients
    are added to a buffer in the dtype they are summed in, which stays for the whole run. Its
    optimizers update copies in fp32 of narrower parameters, which ranks share as they do states
    (``core/optimizer/distrib_optimizer.py``): evenly, whatever the tensors."""

    __slots__ = ()

    def resident(self) -> dict[Kind, int]:
        """Whole parameters, this rank's copies of them, and the buffer of gradients."""
        weights = self._whole
        if self.sharding.casts("fp32"):
            weights += sum(t.numel * element_bytes("fp32") for t in self.updated())
        gradients = sum(t.numel * self.sharding.reduced(t.dtype) for t in self.trained)
        return {"weight": weights, "gradient": gradients}

    def updated(self) -> list[TensorSpec]:
        """This rank's part of every unit in fp32; of experts that few ranks hold, among these. What
        nobody shares is updated tensor by tensor."""
        if self.sharding.shares != "states":
            return [TensorSpec(t.fqn, t.shape, "fp32") for t in self.trained]
        found = []
        for unit, its in self.units.items():
            sharding = self.sharding
            shards = sharding.expert_shards if sharding.is_experts(unit) else sharding.shards
            numel = sum(t.numel for t in its if t.fqn not in self.frozen)
            part = math.ceil(numel / shards)
            found.append(TensorSpec(unit, (part,), "fp32"))
        return found

    def rule(self) -> GradientRule:
        """The buffer is there from the start."""
        return "added"

    def finish_backward(self) -> None:
        """Gradients are in their buffer."""
