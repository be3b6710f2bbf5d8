"""What every runtime profile answers: what a rank keeps, and what a step takes and frees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from shardwright.core.llama import LLAMA_EXPERTS
from shardwright.core.placement import Zero
from shardwright.core.schedule import Prefetch
from shardwright.core.tensor import TensorSpec, element_bytes
from shardwright.core.timeline import Kind
from shardwright.heap.ledger import GradientRule, Ledger
from shardwright.job.parallel import fits

Units = Mapping[str, Sequence[TensorSpec]]
# When gradients are summed over ranks: after every backward, unit by unit; after that of the last
# microbatch, unit by unit; or when that is over, as a pipeline does it, which until then also
# leaves alone what it has gathered.
Reduces = Literal["each", "last", "end"]
# What data ranks share: parameters, gradients and states, the states alone, or nothing.
Shares = Literal["all", "states", "nothing"]


class Sharding(msgspec.Struct, frozen=True):
    """How parameters are spread over data ranks and in which dtypes they are used.

    ``tensors`` of units have the dtype they are stored in; ``param_dtype`` and ``reduce_dtype`` are
    those of computing and of summing gradients, empty where they are left as they are. Every rank
    has the ``replicated`` units. Units in ``kept`` stay whole from their forward to their backward;
    ``ranks_after_forward`` share the others meanwhile, where it is not 0. ``prefetch``, ``flat``
    and ``zero`` are of our own runtime: how many units are on their way while one computes, whether
    a unit is cut as one buffer or each of its parameters by itself, and below 3 that units which
    are shared are whole between steps, too. Shares, gradients and states of all units with
    ``offload``, or of those in ``offloaded``, are in host memory. Gradients and states of shards
    that are cut ``twice`` are cut over ``replicas``, too. ``reduce_scatter_inputs`` and
    ``holds_all_reduced`` are of FSDP2 (``job.memory.Fsdp2Section``). Large tensors are cut
    between blocks of ``block`` elements. ``experts`` name units, with ``*`` for any part.
    """

    shards: int = 1
    expert_shards: int = 1
    replicas: int = 1
    param_dtype: str = ""
    reduce_dtype: str = ""
    reshard_after_forward: bool = True
    ranks_after_forward: int = 0
    kept: frozenset[str] = frozenset()
    replicated: frozenset[str] = frozenset()
    zero: Zero = 3
    prefetch: Prefetch = 1
    flat: bool = True
    reduces: Reduces = "each"
    shares: Shares = "all"
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
        share = -(-tensor.numel // self.shards_of(unit)) * self.stored(tensor)
        here = 0 if self.away(unit) else share
        if not self.stays(unit):
            return here
        apart = self.casts(tensor) or self.on_host(unit)
        return tensor.numel * self.computed(tensor) + (here if apart else 0)

    def stored(self, tensor: TensorSpec) -> int:
        """Bytes of an element between steps: whole parameters are kept as they compute."""
        return element_bytes(tensor.dtype) if self.shares == "all" else self.computed(tensor)

    def casts(self, tensor: TensorSpec) -> bool:
        """Whether a tensor is computed with in another dtype than it is stored in."""
        return self.param_dtype not in ("", tensor.dtype)

    def computed(self, tensor: TensorSpec) -> int:
        """Bytes of an element that is computed with."""
        return element_bytes(self.param_dtype or tensor.dtype)

    def reduced(self, tensor: TensorSpec) -> int:
        """Bytes of an element of a gradient that is summed."""
        return element_bytes(self.reduce_dtype or self.param_dtype or tensor.dtype)


@dataclass(slots=True)
class Count:
    """How many times something is there."""

    value: str
    number: int = 1


class Machine(Protocol):
    """A runtime at work on one rank's heap; units are known by name."""

    sharding: Sharding
    frozen: frozenset[str]  # tensors without gradients and states

    def state(self) -> object:
        """What is done next follows from it and from what the heap holds by name; equal values are
        equal states."""
        ...

    def depths(self) -> list[Count]:
        """How many of the same it remembers here and there, in the order of ``state``: passes move
        these numbers, and none does otherwise for one that is larger."""
        ...

    def resident(self) -> dict[Kind, int]:
        """What is there between steps, apart from optimizer states, in bytes."""
        ...

    def updated(self) -> list[TensorSpec]:
        """What this rank's optimizer updates, tensor by tensor."""
        ...

    def rule(self) -> GradientRule:
        """What becomes of a gradient of the microbatch whose backward is under way."""
        ...

    def begin(self, forward: Sequence[str], backward: Sequence[str], last: bool) -> None:
        """A pass through units begins, of which forwards and backwards enter these, some again and
        again; no backward through them follows the ``last`` one."""
        ...

    def enter(self, unit: str) -> None:
        """Before a unit's forward."""
        ...

    def leave(self, unit: str) -> None:
        """After a unit's forward."""
        ...

    def finish(self) -> None:
        """After the whole forward."""
        ...

    def enter_backward(self, unit: str) -> None:
        """Before a unit's backward."""
        ...

    def arrive(self, unit: str, dtype: str, nbytes: int) -> None:
        """Gradients come of a unit's tensors of one dtype, of which so many bytes stay."""
        ...

    def leave_backward(self, unit: str) -> None:
        """After a unit's backward."""
        ...

    def finish_backward(self) -> None:
        """After the whole backward."""
        ...

    def zero_grad(self) -> None:
        """After the optimizer's step: gradients go."""
        ...


class Mark:
    """A rank between passes, as it is when made: what repeats from there on can be skipped."""

    def __init__(self, heap: Ledger, machine: Machine) -> None:
        self.heap, self.machine = heap, machine
        self.held, self.state, self.live = heap.names(), machine.state(), dict(heap.live)
        self.counts = [each.number for each in machine.depths()]

    def skip(self, times: int) -> int:
        """Do again what was done since, ``times`` over, or as often as it does the same; how often
        that was."""
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
