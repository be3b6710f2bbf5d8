"""The gradient of a unit: autograd leaves it on whole parameters, the ranks sum it, this rank keeps
its share.

What autograd computes stays as it is until the unit's backward is over: the gradient of a large
embedding is there from its first part on and not before. Then the gradients are copied, in the
dtype of sums, to where each rank's share lies together, and are freed.
"""

# What ranks compare while they sum a gradient, in a few numbers that travel with it (``Note``):
# gathers of equal size pair up whatever they are of, so a rank that uses other units, or in another
# order, computes with mixed weights and never knows. Therefore every sum carries ``CHECK_BITS``
# bits of what its rank did so far, each as a pair (bit, 1 - bit): where one of the pair is 0 here
# the sum must be 0, in any dtype and for any number of ranks. After them comes a 1 for every tensor
# that has a gradient here, so that all ranks learn which have one anywhere.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwright.core.errors import MismatchError
from shardwright.core.layout import CHECK_BITS
from shardwright.runtime.comm import Comm, Pending
from shardwright.runtime.guard import Guard
from shardwright.runtime.torch_private import C_GRAD, no_subclass_functions, of_bits, unrecorded
from shardwright.runtime.units.buffers import Buffers, Cached, Elastic, SegmentViews, copy_stream
from shardwright.runtime.units.regroup import Apart

Accept = Callable[[int, torch.Tensor, Sequence[bool]], None]


assert CHECK_BITS == 16, "a note has the bits of two bytes"
_BITS_OF = [tuple(byte >> place & 1 for place in range(8)) for byte in range(256)]


class Note:
    """One rank's note, and what it becomes when all are added up."""

    def __init__(self, comm: Comm, label: str, present: Sequence[bool]) -> None:
        self.comm = comm
        self.label = label
        self.present = present
        history = comm.remember(label)
        low, high = _BITS_OF[history & 255], _BITS_OF[history >> 8 & 255]
        not_low, not_high = _BITS_OF[~history & 255], _BITS_OF[~history >> 8 & 255]
        self.own = (*low, *high, *not_low, *not_high)
        self._kept: torch.Tensor | None = None
        self._arrived: torch.Event | None = None

    @property
    def is_kept(self) -> bool:
        """Whether there is a sum that nobody has looked at."""
        return self._kept is not None

    def row(self, length: int, like: torch.Tensor) -> torch.Tensor:
        """The note [length], the same for every rank, in dtype and on device of ``like``."""
        return of_bits((*self.own, *self.present), length, like)

    def read(self, row: torch.Tensor) -> Sequence[bool]:
        """Which tensors have a gradient on any rank, from the sum of all notes [n].

        Raises MismatchError, on every rank, if they did not do the same so far. On an accelerator
        nothing waits for the sum where the answer is known: ``check`` looks at it later.
        """
        if self.comm.is_fake:
            return self.present
        row = row.real if row.is_complex() else row
        if not row.is_cpu:
            self._kept = torch.empty(row.shape, dtype=row.dtype, pin_memory=True)
            self._kept.copy_(row, non_blocking=True)
            self._arrived = torch.Event(row.device)
            self._arrived.record()
            # The sum can only add tensors to those that have a gradient. Where all have one there
            # is nothing to learn, and the host need not wait for the device.
            if all(self.present):
                return self.present
        sums: list[float] = row.tolist()
        if self._kept is None:
            self._check(sums)
        first = len(self.own)
        return [total > 0 for total in sums[first : first + len(self.present)]]

    def check(self, *, wait: bool) -> bool:
        """Look at a sum that was kept, if it is there or ``wait``; whether that was done."""
        if self._kept is None or self._arrived is None:
            return True
        if wait:
            self._arrived.synchronize()
        elif not self._arrived.query():
            return False
        kept, self._kept = self._kept, None
        self._check(kept.tolist())
        return True

    def _check(self, sums: list[float]) -> None:
        # Those of bits come first, and of tensors after them.
        if [total for own, total in zip(self.own, sums, strict=False) if total and not own]:
            last = ", ".join(f"'{label}'" for label in self.comm.forget())
            raise MismatchError(
                f"'{self.label}'",
                "every rank to use the same units in the same order",
                f"another order on some rank; the last here were {last}",
                "Nothing was updated. Let every rank run every unit; SHARDWRIGHT_LOG=debug "
                "names the first difference.",
            )


class Sum(NamedTuple):
    """A segment's gradient on its way: summed over ranks when ``pending`` is done."""

    gradient: SegmentGradient
    row: torch.Tensor
    note: Note
    factor: float | None  # what the sum is multiplied with; None: replicas have not added theirs
    pending: Pending | None


class Partial(NamedTuple):
    """A segment's gradient, summed over shards in several backwards and not over replicas yet."""

    row: torch.Tensor
    present: Sequence[bool]


class Landing(NamedTuple):
    """A segment's mean gradient on its way to host memory, where it is when ``copied``."""

    index: int
    mean: torch.Tensor
    present: Sequence[bool]
    copied: torch.Event | None

    @classmethod
    def of(cls, index: int, mean: torch.Tensor, present: Sequence[bool]) -> Landing:
        """Begin to copy ``mean``, beside what an accelerator computes."""
        copies = copy_stream(mean.device, "host")
        there = torch.empty_like(mean, device="cpu", pin_memory=mean.device.type != "cpu")
        with copies.beside_computing():
            there.copy_(mean, non_blocking=True)
            # The allocator knows only the stream that memory was taken on. Without this it would
            # give ``mean`` away while the copy still reads it.
            copies.uses(mean)
            return cls(index, there, present, copies.event())


class SegmentGradient:
    """The unreduced gradient of a segment."""

    def __init__(
        self, index: int, views: SegmentViews, wholes: Sequence[nn.Parameter], comm: Comm
    ) -> None:
        self.index = index
        self.views = views
        self.wholes = list(wholes)
        self.comm = comm
        names = [f"gradient of {slot.tensor.fqn}" for slot in views.segment.slots]
        # The guard names the first tensor that is not finite, which should be the one nearest to
        # the loss.
        self.names = names[::-1]  # as a backward comes to them
        self.is_replicated = views.segment.cut == "replicated"
        ranks = 1 if self.is_replicated else comm.size
        sent = self.sent = views.segment.sent
        device = views.whole.device
        self.send = Elastic(ranks * views.bytes.row, device)
        self.apart = Apart(views.segment, self.send.tensor.view(views.reduced).view(ranks, sent))
        self.reals = _reals(self.apart.rows.view(-1))  # as it travels
        # Views were made while there was memory. From here on there is some only while a sum is
        # under way.
        self.send.give()
        self.held: list[torch.Tensor | None] = [None] * len(self.wholes)
        self.partial: Partial | None = None

    @property
    def trains(self) -> bool:
        """Whether any of its tensors requires a gradient now."""
        for whole in self.wholes:  # noqa: SIM110 (a generator takes twice the time)
            if whole.requires_grad:
                return True
        return False

    @property
    def is_here(self) -> bool:
        """Whether a gradient is here that no reduce has taken."""
        get = C_GRAD.__get__  # asked of every tensor in every step, so past the property
        with no_subclass_functions():
            for held, whole in zip(self.held, self.wholes, strict=True):
                if held is not None or get(whole) is not None:
                    return True
        return False

    def keep(self) -> None:
        """Hold what this backward left, in the dtype it will be summed in. Where that is the dtype
        it is in, it stays on the whole parameters, and the next backward adds to it."""
        if self.views.reduced == self.views.computed:
            return
        for place, gradient in enumerate(self._taken()):
            if gradient is not None:
                self.hold(place, gradient)

    def hold(self, place: int, gradient: torch.Tensor) -> None:
        """Hold a gradient of the tensor at ``place`` in the dtype it will be summed in."""
        held = self.held[place]
        gradient = _dense(gradient)
        if held is None:
            self.held[place] = gradient.to(self.views.reduced)
            self.comm.probe.holds(self.held[place], "unreduced_gradient")
        else:
            held.add_(gradient)

    def _taken(self) -> list[torch.Tensor | None]:
        """What autograd left, taken off the whole parameters."""
        put = C_GRAD.__set__
        with no_subclass_functions():  # which torch looks for at every attribute otherwise
            taken: list[torch.Tensor | None] = [*map(C_GRAD.__get__, self.wholes)]
        for place, gradient in enumerate(taken):
            if gradient is not None:
                # Left here, the next backward would add to a gradient that is summed already.
                put(self.wholes[place], None)
                # Under create_graph gradients have a graph. The sum over ranks is not a part of it.
                if gradient.requires_grad:
                    taken[place] = gradient = gradient.detach()
                if gradient.layout is not torch.strided:
                    taken[place] = _dense(gradient)
        return taken

    def start(self, unit: str, before: float, after: float | None, guard: Guard | None) -> Sum:
        """Begin to sum over ranks (collective); without ``after`` over shards alone."""
        comm = self.comm
        gradients = self._taken()
        for place, held in enumerate(self.held):
            if held is not None:
                gradient = gradients[place]
                # Into what was held, which is in the dtype of sums. The other way around, several
                # backwards would be rounded to the dtype that they compute in.
                gradients[place] = held if gradient is None else held.add_(gradient)
        self.held = [None] * len(self.wholes)
        label = f"{unit} reduce"
        note = Note(comm, label, [gradient is not None for gradient in gradients])
        self.send.take()
        comm.probe.holds(self.send.tensor, "reduce_scatter")  # or is all-reduced
        rows = self.apart.rows
        self.apart(gradients, note.row(self.apart.rest.shape[1], rows))
        # Before the sum: after it one rank's NaN is in the gradients of all, and nobody can say
        # whose it was.
        if guard is not None:
            guard.look([rows], self.names, partial(reversed, gradients))
        # Copied by now. What autograd made should be gone before the collective takes memory.
        del gradients
        # On what is sent, for this part of the division is there to keep the sum from overflowing.
        if before != 1.0:
            rows.mul_(before)
        if self.is_replicated:
            row = rows[0].clone()  # the sum is handed on, the buffer is not
            self.send.give()
            return Sum(self, row, note, after, comm.all_reduce(label, _reals(row), wait=False))
        # New for each sum, as a part of it is what parameters have as gradient until it is cleared.
        row = rows.new_empty(self.sent)
        options: dict[str, Any] = {}
        if comm.sums_in_two:
            options = {"replicas": after is not None, "between": partial(self._add_partial, row)}
        pending = comm.reduce_scatter(label, _reals(row), self.reals, wait=False, **options)
        return Sum(self, row, note, after, pending)

    def _add_partial(self, row: torch.Tensor) -> None:
        """Add what earlier backwards left to a sum over shards, and which tensors had some."""
        earlier, self.partial = self.partial, None
        if earlier is not None:
            share = self.views.segment.share
            row[:share].add_(earlier.row[:share])
            # The note's bits are of this backward alone. Only what says who has a gradient is
            # joined, for a tensor that had one in an earlier backward must not count as one
            # without.
            row[share + 2 * CHECK_BITS :][: len(earlier.present)].add_(
                torch.tensor(earlier.present, dtype=row.dtype, device=row.device)
            )

    def keep_partial(self, row: torch.Tensor, present: Sequence[bool]) -> None:
        """Leave a sum over shards, and that of earlier backwards, to a later one over replicas."""
        if self.partial is not None:
            share = self.views.segment.share
            row[:share].add_(self.partial.row[:share])
            present = [*map(any, zip(present, self.partial.present, strict=True))]
        self.partial = Partial(row, present)
        self.comm.probe.holds(row, "unreduced_gradient")

    def cached(self) -> Iterator[Cached]:
        """Every view, and the buffer that it is a view of."""
        apart, room = self.apart, self.send.tensor
        for name, view in (("rows", apart.rows), ("flat", self.reals), ("rest", apart.rest)):
            yield f"{name} of gradients", view, room
        for name, strips in zip(self.names[::-1], apart.strips, strict=True):
            for share in strips.shares:
                yield name, share, room
        for pad in apart.pads:
            yield "padding of gradients", pad, room

    def drop(self) -> None:
        """Forget what is here."""
        for whole in self.wholes:
            C_GRAD.__set__(whole, None)
        self.held = [None] * len(self.wholes)
        self.partial = None


class Gradients:
    """The unreduced gradient of a unit and its way to this rank's share."""

    def __init__(self, buffers: Buffers, comm: Comm) -> None:
        self.comm = comm
        self.offloaded = buffers.offloaded
        self.expected = False  # a backward is in the unit, and every rank will reduce
        self.keeps = False  # there may be some that a backward has left to a later reduce
        wholes = iter(buffers.parameters)
        self.segments = [
            SegmentGradient(index, views, [next(wholes) for _ in views.segment.slots], comm)
            for index, views in enumerate(buffers.segments)
        ]
        self.under_way: list[Sum] = []
        self.landing: list[Landing] = []
        self.unchecked: list[Note] = []

    @property
    def is_here(self) -> bool:
        """Whether a gradient is here that no reduce has taken."""
        return any(gradient.is_here for gradient in self.segments)

    @property
    def is_partial(self) -> bool:
        """Whether sums over shards wait for those over replicas."""
        return any(gradient.partial is not None for gradient in self.segments)

    def is_left(self, over_replicas: bool) -> bool:
        """Whether a backward has ended without a reduce of something that has to be reduced now."""
        if not self.keeps:  # so that nothing is asked of every tensor in every step
            return False
        for each in self.segments:
            if over_replicas and each.partial is not None:
                return True
            if (over_replicas or not each.is_replicated) and each.is_here:
                return True
        return False

    def expect(self) -> None:
        """A backward reaches the unit, or is in it already."""
        self.expected = True

    @unrecorded
    def hold(self, place: int, gradient: torch.Tensor) -> None:
        """Sum ``gradient`` of the tensor at ``place`` in the unit's layout with the next reduce."""
        self.keeps = True
        for segment in self.segments:
            if place < len(segment.wholes):
                segment.hold(place, gradient)
                return
            place -= len(segment.wholes)

    @unrecorded
    def keep(self) -> None:
        """Hold this backward's gradient, unreduced, until one is reduced."""
        self.expected, self.keeps = False, True
        for gradient in self.segments:
            gradient.keep()

    @unrecorded
    def start(
        self, unit: str, divisor: float | None, guard: Guard | None, *, over_replicas: bool = True
    ) -> None:
        """Begin to sum over ranks (collective) and to divide by ``divisor``, by default their
        number; ``finish`` before the next one. ``guard`` looks at what is summed. What is not
        summed ``over_replicas`` waits for a sum that is, and what all ranks have whole as it is."""
        self.expected, self.keeps = False, not over_replicas
        for gradient in self.segments:
            # What is whole on every rank has no sum over shards alone.
            if gradient.is_replicated and not over_replicas:
                gradient.keep()
            # By requires_grad, which is the same on all ranks, and not by whether a gradient is
            # here: a rank without one sends zeros, for the others are in this collective.
            elif gradient.trains:
                before, after = _factors(gradient.views.reduced, self.comm.total, divisor)
                after_shards = after if over_replicas else None
                self.under_way.append(gradient.start(unit, before, after_shards, guard))

    @unrecorded
    def finish(self, accept: Accept) -> None:
        """Wait for the sums, and hand out the means: segment, share, which tensors have one. What
        goes to host memory is handed out when it has landed."""
        under_way, self.under_way = self.under_way, []
        for gradient, row, note, factor, pending in under_way:
            if pending is not None:
                pending.wait()
            gradient.send.give()
            views = gradient.views
            share, noted = row.split_with_sizes(
                (views.segment.share, gradient.sent - views.segment.share)
            )
            present = note.read(noted)
            if note.is_kept:
                self.unchecked.append(note)
            if factor is None:
                gradient.keep_partial(row, present)
                continue
            if factor != 1.0:
                share.mul_(factor)
            # Divided before it is cast: the narrower dtype may not hold the sum.
            mean = share if share.dtype is views.dtype else share.to(views.dtype)
            if self.offloaded:
                self.landing.append(Landing.of(gradient.index, mean, present))
                continue
            self.comm.probe.holds(mean, "gradient")
            accept(gradient.index, mean, present)

    @unrecorded
    def land(self, accept: Accept) -> None:
        """Hand out the means that are on their way to host memory."""
        landing, self.landing = self.landing, []
        for index, mean, present, copied in landing:
            if copied is not None:
                copied.synchronize()
            self.comm.probe.holds(mean, "gradient")
            accept(index, mean, present)

    def follow(self, hear: Callable[[torch.Tensor], None]) -> Iterator[RemovableHandle]:
        """Call ``hear`` with every gradient that a backward leaves on a whole parameter."""
        for whole in chain(*(segment.wholes for segment in self.segments)):
            if whole.requires_grad:
                yield whole.register_post_accumulate_grad_hook(partial(_tell, hear))

    def check(self, *, wait: bool = False) -> None:
        """Look at what ranks sent each other with sums that nothing has waited for yet."""
        if self.unchecked:
            self.unchecked = [note for note in self.unchecked if not note.check(wait=wait)]

    def drop(self) -> None:
        """Forget a gradient that will not be reduced."""
        # The other ranks may be in this collective. What it writes to must not be freed before it
        # ends.
        for gradient, _, _, _, pending in self.under_way:
            if pending is not None:
                pending.wait()
            gradient.send.give()
        self.under_way.clear()
        self.landing.clear()
        self.expected = self.keeps = False
        for gradient in self.segments:
            gradient.drop()


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """Gradients as they are summed: sparse embeddings leave others."""
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def _reals(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers [n] as pairs [2n], which every backend adds up."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


@cache
def _factors(dtype: torch.dtype, ranks: int, divisor: float | None) -> tuple[float, float]:
    """What gradients are multiplied with before and after they are summed.

    Sums of fp16 would overflow where their mean does not, so about half of the division comes
    first there, as far as it is one by a power of 2.
    """
    first = 1.0
    while dtype is torch.float16 and ranks / first > first:
        # By powers of 2, which change exponents and round nothing.
        first *= 2.0
    return 1.0 / first, first / (ranks if divisor is None else divisor)


def _tell(hear: Callable[[torch.Tensor], None], whole: torch.Tensor) -> None:
    gradient = C_GRAD.__get__(whole)
    if gradient is not None:
        hear(gradient)
