"""FSDP2's schedule on a symbolic heap: what torch's ``fully_shard`` takes and frees, and when.

Read in torch 2.13, ``torch/distributed/fsdp/_fully_shard``: parameters are gathered into one buffer
and copied out; in the forward that buffer stays until the next copy has been made, in the backward
the unit of the forward before is filled ahead. Gradients stay where autograd leaves them until
their unit's backward is over, are copied into one buffer in the reduce dtype, and that buffer stays
until the next unit reduces, or one later for each that ``set_reduce_scatter_max_input_buffers``
allows beyond one. A sum over replicas that is not the gradient itself (in another dtype, copied to
the host, or added to the gradient of an earlier microbatch) stays until the backward ends
(``FSDPParamGroup._all_reduce_state``), where torch has it in its ``FSDPCommContext`` until the next
unit's is there.
"""

# Why torch's code is followed line by line: a peak under FSDP2 is decided by which Python name
# still holds a buffer (a loop variable, a state that is dropped only when the next unit reduces).
# A rule of thumb, as that two units are whole at a time, misses these. A version of torch that
# lets go earlier or later changes this file, and the comparison with real FSDP2 on fake tensors
# shows it.

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from shardwright.core.tensor import TensorSpec
from shardwright.core.timeline import Kind
from shardwright.heap.ledger import STAYING
from shardwright.heap.machine import Count, Machine, Sharding


@dataclass(slots=True)
class FSDP2(Machine):
    """The state of a rank: which units are gathered, and which buffers are still held.

    ``units`` are in the order in which their modules are registered. ``latest`` is the last unit
    in what torch calls the order after forward, since that was cleared, and ``before`` has by unit
    those that came before its own forwards, as far as no backward has met these yet.
    """

    sizes: dict[str, FSDP2Bytes] = field(init=False)
    latest: str | None = None
    before: dict[str, list[Count]] = field(default_factory=dict)
    chunk: Sequence[str] = ()
    last: bool = True
    present: set[str] = field(default_factory=set)
    filled: set[str] = field(default_factory=set)  # gathered, not yet copied out
    left: set[str] = field(default_factory=set)  # whose backward is over
    buffers: dict[str, str] = field(default_factory=dict)  # of what is filled, by name
    held: str | None = None  # the buffer that was copied from last
    reducing: list[str] = field(default_factory=list)  # what reduce-scatters read, oldest first
    summed: str | None = None  # over replicas, and not yet let go by the next unit's

    def __post_init__(self) -> None:
        self.sizes = {
            name: FSDP2Bytes(
                tensors,
                self.sharding,
                self.sharding.shards_of(name),
                experts=self.sharding.is_experts(name),
                frozen=self.frozen,
            )
            for name, tensors in self.units.items()
        }

    def state(self) -> object:
        """What is gathered, and which buffers are held."""
        sets = (self.present, self.filled, self.left)
        before = [(unit, [each.value for each in its]) for unit, its in self.before.items()]
        return (
            [frozenset(each) for each in sets],
            dict(self.buffers),
            (self.held, tuple(self.reducing), self.summed, self.latest),
            before,
        )

    def depths(self) -> list[Count]:
        """Of every unit, by those that came before its forwards."""
        return [each for its in self.before.values() for each in its]

    def resident(self) -> dict[Kind, int]:
        """The parameters' shares."""
        kept = [chunk.nbytes for sizes in self.sizes.values() for chunk in sizes.chunks]
        return {} if self.sharding.offload else {"weight": sum(kept)}

    def updated(self) -> list[TensorSpec]:
        """The first rank's chunk of every parameter."""
        return [chunk for sizes in self.sizes.values() for chunk in sizes.updated]

    def begin(self, forward: Sequence[str], backward: Sequence[str], last: bool) -> None:
        """A pass through the units of a chunk begins."""
        self.chunk, self.last = tuple(dict.fromkeys(forward)), last
        self.adding = any(self.heap.holds(f"{unit}.unreduced") for unit in self.chunk)

    # ---- forward -------------------------------------------------------------------------------

    def enter(self, unit: str) -> None:
        """Before a forward."""
        if unit in self.present:
            return
        if unit not in self.filled:  # a unit that runs again in a backward may be
            self._fill(unit)
        self._copy_out(unit)
        self._drop_held()  # wait_for_unshard still names it while it copies
        self.held = self.buffers.pop(unit)

    def leave(self, unit: str) -> None:
        """After a forward; the root is left last and lets the last buffer go."""
        # torch prefetches in a backward by its list of forwards in reverse. The list is kept here
        # as counts by unit, so that a thousand equal microbatches are one entry and can be skipped.
        ahead = unit if self.latest is None else self.latest
        its = self.before.setdefault(unit, [])
        if its and its[-1].value == ahead:
            its[-1].number += 1
        else:
            its.append(Count(ahead))
        self.latest = unit
        if unit not in self.sharding.kept and self.sharding.reshard_after_forward:
            self._free(unit)

    def finish(self) -> None:
        """After the root's forward."""
        self._drop_held()

    # ---- backward ------------------------------------------------------------------------------

    def enter_backward(self, unit: str) -> None:
        """Before a backward; the unit of the forward before is gathered ahead."""
        self.left.discard(unit)
        if unit not in self.present:
            if unit not in self.filled:
                self._fill(unit)
            self._copy_out(unit)
            self.heap.free(self.buffers.pop(unit))
        # After the unit itself, never before: torch begins the next gather once the present one has
        # been waited for, so that at most these two are whole at once.
        ahead = self._meet(unit)
        if ahead not in self.present | self.filled:
            self._fill(ahead)

    def leave_backward(self, unit: str) -> None:
        """After a backward: reduce the gradients, or keep them whole for the next microbatch."""
        self.left.add(unit)
        reduces = self.sharding.reduces
        if reduces == "each" or (reduces == "last" and self.last):
            self._reduce(unit)
            return
        # Gradients stay whole between microbatches, but parameters do not: each microbatch gathers
        # them anew.
        if reduces == "last":
            self._free(unit)
        if not self._has_gradients(unit):
            return
        if not self.heap.holds(f"{unit}.accumulated"):
            self._accumulate(unit)
        elif not self.adding:
            self.heap.free(f"{unit}.unreduced")

    def finish_backward(self) -> None:
        """After the whole backward: units whose inputs have no gradient follow now, and where
        gradients are reduced at the end of the step, all of the chunk."""
        for unit in self.chunk:
            if unit not in self.left:
                self.leave_backward(unit)
        self.left.clear()
        at_end = self.sharding.reduces == "end"
        if at_end and not self.last:
            return
        for unit in self.chunk if at_end else ():
            self._reduce(unit)
        # Only at the end of a backward is everything let go that the next unit's reduce would have
        # replaced: there is no next one.
        self._drop_reduced(down_to=0)
        self.summed = None
        for unit in self.chunk:
            self.heap.free(f"{unit}.scattered")
        for unit in self.filled:
            self.heap.free(self.buffers.pop(unit))
        self.filled.clear()
        self.latest = None
        self.before.clear()

    # ---- what they are made of -----------------------------------------------------------------

    def _meet(self, unit: str) -> str:
        """The unit before the last forward of this one that no backward has met; else itself."""
        its = self.before.get(unit)
        if not its:
            return unit
        its[-1].number -= 1
        return its[-1].value if its[-1].number else its.pop().value

    def _accumulate(self, unit: str) -> None:
        """Keep a microbatch's gradient whole, in the dtype it will be reduced in."""
        sizes = self.sizes[unit]
        if not sizes.accumulated:
            return
        self.heap.free(f"{unit}.unreduced")
        with self.heap.passing(STAYING, sizes.accumulating):
            self.heap.take(f"{unit}.accumulated", STAYING, sizes.accumulated)

    def _has_gradients(self, unit: str) -> bool:
        """Whether any are there: of a unit that is called several times autograd hands its sums
        over in the backward of the first call, which comes last."""
        return any(self.heap.holds(f"{unit}.{name}") for name in ("unreduced", "accumulated"))

    def _reduce(self, unit: str) -> None:
        sizes = self.sizes[unit]
        self._free(unit)
        if self.heap.holds(f"{unit}.accumulated"):
            self.heap.free(f"{unit}.unreduced")  # added to what is accumulated
        self._drop_reduced(down_to=self.sharding.reduce_scatter_inputs - 1)
        if not sizes.reduced or not self._has_gradients(unit):
            return
        with self.heap.passing(STAYING, sizes.turned):
            self.heap.take(f"{unit}.reduce_scatter", "reduce_scatter", sizes.reduced)
        # All gradients are copied into the one buffer before the reduce begins, and are freed then,
        # but for the one that torch's loop variable still names.
        kept = min(sizes.last, self.heap.free(f"{unit}.unreduced"))
        kept = kept or min(sizes.last_accumulated, self.heap.free(f"{unit}.accumulated"))
        with self.heap.passing(STAYING, kept):
            self._take_share(unit)
        self.reducing.append(unit)

    def _take_share(self, unit: str) -> None:
        """The share of the sum, in the reduce dtype and then in that of the parameters."""
        sizes = self.sizes[unit]
        passing = sizes.gradient
        # copied to the host, or added to that of an earlier microbatch
        moved = self.sharding.offload or self.heap.holds(f"{unit}.gradient")
        if sizes.scattered:
            self.heap.take(f"{unit}.scattered", "reduce_scatter", sizes.scattered)
        elif moved and self.sharding.replicas > 1:  # the sum itself is what is moved, and stays
            self.heap.take(f"{unit}.scattered", "reduce_scatter", sizes.gradient)
            passing = 0
        if moved:
            self.heap.briefly("gradient", passing)
        else:
            self.heap.take(f"{unit}.gradient", "gradient", sizes.gradient)
        if self.sharding.replicas == 1:
            self.heap.free(f"{unit}.scattered")
        elif not self.sharding.holds_all_reduced:  # else it stays until the backward ends
            if self.summed is not None:
                self.heap.free(f"{self.summed}.scattered")
            self.summed = unit

    def _fill(self, unit: str) -> None:
        sizes = self.sizes[unit]
        with self.heap.passing("all_gather", sizes.cast):
            # a unit that runs twice in a row has two for a moment
            again = self.held == f"{unit}.all_gather"
            self.buffers[unit] = f"{unit}{'.again' if again else ''}.all_gather"
            self.heap.take(self.buffers[unit], "all_gather", sizes.gathered)
        self.filled.add(unit)

    def _copy_out(self, unit: str) -> None:
        sizes = self.sizes[unit]
        with self.heap.passing("all_gather", sizes.copied):
            self.heap.take(f"{unit}.full", "gathered_weight", sizes.unsharded)
        self.filled.discard(unit)
        self.present.add(unit)

    def _free(self, unit: str) -> None:
        if unit in self.present:
            self.heap.free(f"{unit}.full")
            self.present.discard(unit)

    def _drop_held(self) -> None:
        if self.held is not None:
            self.heap.free(self.held)
            self.held = None

    def _drop_reduced(self, down_to: int) -> None:
        while len(self.reducing) > down_to:
            self.heap.free(f"{self.reducing.pop(0)}.reduce_scatter")


class FSDP2Bytes:
    """Buffers of a unit of ``tensors`` on the first of so many ``shards``; ``experts``: it has
    nothing else.

    ``gathered`` from ``cast`` shares and copied out to ``unsharded``, beside which ``copied`` more
    are alive meanwhile; ``reduced`` to ``scattered``, the share where its dtype is not the
    parameters', and to ``gradient``. ``chunks`` are what is kept, ``updated`` those that are
    trained. ``accumulated`` are gradients in the dtype they are reduced in, 0 where autograd makes
    them in it, and ``accumulating`` what is there beside while they are cast. ``last`` and
    ``last_accumulated`` are gradients of the last parameter, ``turned`` the same where it is copied
    before, for it is cut along another dimension.
    """

    def __init__(
        self,
        tensors: Sequence[TensorSpec],
        sharding: Sharding,
        shards: int,
        *,
        experts: bool,
        frozen: Collection[str],
    ) -> None:
        self.chunks = [local_chunk(tensor, shards, experts=experts) for tensor in tensors]
        self.updated = [chunk for chunk in self.chunks if chunk.fqn not in frozen]
        # A single rank gathers and reduces nothing: FSDP2 then copies each parameter by itself.
        several = shards > 1 and bool(tensors)
        # by parameter, whole with the padding of equal shares; those cut along another dimension
        # than the first are put together from a copy
        whole = [c.numel * shards * sharding.computed(c.dtype) for c in self.chunks]
        casts = [_cast(chunk, sharding) for chunk in self.chunks]
        turned = [cut_dim(tensor, shards, experts=experts) > 0 for tensor in tensors]
        copied = sum(size for size, is_turned in zip(whole, turned, strict=True) if is_turned)
        self.gathered = sum(whole) if several else 0
        self.cast = sum(casts) if several else 0
        self.unsharded = sum(whole)
        self.copied = copied if several else _beside(casts, whole)
        # full gradients as autograd makes them, and in the dtype of sums
        trained = [tensor for tensor in tensors if tensor.fqn not in frozen]
        gradients = [tensor.numel * sharding.computed(tensor.dtype) for tensor in trained]
        totals = [tensor.numel * sharding.reduced(tensor.dtype) for tensor in trained]
        scattered = sum(chunk.numel * sharding.reduced(chunk.dtype) for chunk in self.updated)
        self.reduced = scattered * shards
        self.gradient = sum(chunk.nbytes for chunk in self.updated)
        self.scattered = scattered if scattered != self.gradient else 0
        is_cast = gradients != totals
        self.accumulated = sum(totals) if is_cast else 0
        self.accumulating = _beside_new(gradients, totals) if is_cast else 0
        # a loop variable of foreach_reduce keeps the last gradient until it returns
        self.last = gradients[-1] if several and trained else 0
        self.last_accumulated = totals[-1] if several and trained else 0
        self.turned = self.last if turned and turned[-1] else 0


def cut_dim(tensor: TensorSpec, shards: int, *, experts: bool = False) -> int:
    """The dimension that is cut: the first, but the second of stacked matrices that are fewer than
    the ranks where a unit has nothing but ``experts``, as TorchTitan does it beside expert
    parallelism (its ``apply_fsdp``)."""
    return int(experts and len(tensor.shape) > 2 and tensor.shape[0] < shards)


def local_chunk(tensor: TensorSpec, shards: int, *, experts: bool = False) -> TensorSpec:
    """What the first of ``shards`` ranks holds of a tensor, which is cut in ceiling chunks."""
    if not tensor.shape or shards == 1:
        return tensor
    dim, shape = cut_dim(tensor, shards, experts=experts), list(tensor.shape)
    shape[dim] = -(-shape[dim] // shards)
    return msgspec.structs.replace(tensor, shape=tuple(shape))


def _cast(chunk: TensorSpec, sharding: Sharding) -> int:
    """A share as it is sent, where that is not what the rank keeps: cast, or on its way from the
    host in the dtype it is stored in."""
    if sharding.casts(chunk.dtype):
        return chunk.numel * sharding.computed(chunk.dtype)
    return chunk.nbytes if sharding.offload else 0


def _beside(casts: Sequence[int], whole: Sequence[int]) -> int:
    """What is alive at most beside all of ``whole`` while one after the other is copied from its
    cast, whose name is bound anew before the one before goes."""
    # The loop's name is bound to the next cast while the one before is still there, so beside the
    # copies made so far two casts may be alive, or the last copy beside its cast, whichever is
    # more.
    most = before = done = 0
    for cast, copy in zip(casts, whole, strict=True):
        most = max(most, done + before + cast - sum(whole), done + copy + cast - sum(whole))
        done, before = done + copy, cast
    return most


def _beside_new(old: Sequence[int], new: Sequence[int]) -> int:
    """What is alive at most beside all of ``new`` while they are made of ``old``, each of which
    goes before the next is made."""
    live, most = sum(old), 0
    for gone, made in zip(old, new, strict=True):
        live += made
        most = max(most, live - sum(new))
        live -= gone
    return most
