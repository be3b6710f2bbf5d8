"""Data parallel with whole parameters: DDP, Megatron-LM's own, and with shared states ZeRO-1.

DDP (torch 2.13, ``torch/csrc/distributed/c10d/reducer.cpp``) copies gradients into buckets that it
keeps, and copies the means back: gradients exist twice. ZeRO-1 is DDP whose optimizer states are
cut over the ranks, as ``torch.distributed.optim.ZeroRedundancyOptimizer`` does it: whole
parameters at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwright.core.tensor import TensorSpec, element_bytes
from shardwright.core.timeline import Kind
from shardwright.heap.ledger import GradientRule, Ledger
from shardwright.heap.machine import Count, Sharding, Units


@dataclass(slots=True)
class Replicated:
    """Parameters in the dtype they compute in; gradients in buckets beside their own."""

    heap: Ledger
    units: Units
    sharding: Sharding
    frozen: frozenset[str] = frozenset()
    backwards: int = 0
    left: list[str] = field(default_factory=list)

    def state(self) -> object:
        """Whether there was a backward."""
        return self.backwards > 0

    def depths(self) -> list[Count]:
        """Nothing."""
        return []

    def resident(self) -> dict[Kind, int]:
        """Whole parameters, and DDP's buckets where there are ranks to average with."""
        tensors = [tensor for its in self.units.values() for tensor in its]
        weights = sum(t.numel * self.sharding.stored(t) for t in tensors)
        several = self.sharding.shards * self.sharding.replicas > 1
        trained = [t for t in tensors if t.fqn not in self.frozen]
        buckets = sum(t.numel * self.sharding.computed(t) for t in trained)
        return {"weight": weights, "communication": buckets if several else 0}

    def updated(self) -> list[TensorSpec]:
        """Every parameter; under ZeRO-1 those of the rank that has most of them."""
        tensors = [
            TensorSpec(t.fqn, t.shape, self.sharding.param_dtype or t.dtype)
            for its in self.units.values()
            for t in its
            if t.fqn not in self.frozen
        ]
        if self.sharding.shares == "nothing" or self.sharding.shards == 1:
            return tensors
        shares: list[list[TensorSpec]] = [[] for _ in range(self.sharding.shards)]
        sizes = [0] * self.sharding.shards
        for tensor in sorted(tensors, key=lambda t: -t.numel):
            least = sizes.index(min(sizes))
            shares[least].append(tensor)
            sizes[least] += tensor.numel * element_bytes(tensor.dtype)
        return shares[sizes.index(max(sizes))]

    def rule(self) -> GradientRule:
        """Gradients of later microbatches are added to those of the first."""
        return "added" if self.backwards else "stays"

    def begin(self, forward: Sequence[str], backward: Sequence[str], last: bool) -> None:
        """Nothing depends on the microbatch but whether gradients are there."""

    def enter(self, unit: str) -> None:
        """Parameters are there."""

    def leave(self, unit: str) -> None:
        """Parameters stay."""

    def finish(self) -> None:
        """Nothing was taken."""

    def enter_backward(self, unit: str) -> None:
        """Parameters are there."""

    def arrive(self, unit: str, dtype: str, nbytes: int) -> None:
        """Buckets are reduced when all of the backward is over."""

    def leave_backward(self, unit: str) -> None:
        """Buckets are reduced in place."""

    def finish_backward(self) -> None:
        """One more backward has left its gradients, which are whole and complete."""
        self.backwards += 1
        for unit in self.units:
            self.heap.become(f"{unit}.unreduced", f"{unit}.gradient", "gradient")

    def zero_grad(self) -> None:
        """Gradients go."""
        for unit in self.units:
            self.heap.free(f"{unit}.gradient")
        self.backwards = 0


class Megatron(Replicated):
    """Megatron-LM's data parallel (``core/distributed/param_and_grad_buffer.py``, 0.14): gradients
    are added to a buffer in the dtype they are summed in, which stays for the whole run. Its
    optimizers update copies in fp32 of narrower parameters, which ranks share as they do states
    (``core/optimizer/distrib_optimizer.py``): evenly, whatever the tensors."""

    __slots__ = ()

    def resident(self) -> dict[Kind, int]:
        """Whole parameters, this rank's copies of them, and the buffer of gradients."""
        tensors = [tensor for its in self.units.values() for tensor in its]
        weights = sum(t.numel * self.sharding.stored(t) for t in tensors)
        if self.sharding.casts(TensorSpec("", (1,), "fp32")):
            weights += sum(t.numel * element_bytes("fp32") for t in self.updated())
        trained = [t for t in tensors if t.fqn not in self.frozen]
        return {"weight": weights, "gradient": sum(map(self._summed, trained))}

    def _summed(self, tensor: TensorSpec) -> int:
        return tensor.numel * self.sharding.reduced(tensor)

    def updated(self) -> list[TensorSpec]:
        """This rank's part of every unit in fp32; of experts that few ranks hold, among these."""
        found = []
        for unit, its in self.units.items():
            sharding = self.sharding
            shards = sharding.expert_shards if sharding.is_experts(unit) else sharding.shards
            numel = sum(t.numel for t in its if t.fqn not in self.frozen)
            part = math.ceil(numel / (shards if sharding.shares == "states" else 1))
            found.append(TensorSpec(unit, (part,), "fp32"))
        return found

    def rule(self) -> GradientRule:
        """The buffer is there from the start."""
        return "added"

    def finish_backward(self) -> None:
        """Gradients are in their buffer."""
