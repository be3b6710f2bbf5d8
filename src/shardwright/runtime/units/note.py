"""What ranks compare while they sum a gradient, in a few numbers that travel with it.

Gathers of equal size pair up whatever they are of, so a rank that uses other units, or in another
order, computes with mixed weights and never knows. Therefore every sum carries ``CHECK_BITS`` bits
of what its rank did so far, each as a pair (bit, 1 - bit): where one of the pair is 0 here the sum
must be 0, in any dtype and for any number of ranks. After them comes a 1 for every tensor that has
a gradient here, so that all ranks learn which have one anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwright.core.errors import MismatchError, expected
from shardwright.core.layout import CHECK_BITS
from shardwright.runtime.comm import Comm
from shardwright.runtime.torch_private import of_bits

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

    def rows(self, ranks: int, length: int, like: torch.Tensor) -> torch.Tensor:
        """The note for every rank [ranks, length], in dtype and on device of ``like``."""
        return of_bits((*self.own, *self.present), length, like).expand(ranks, length)

    def read(self, row: torch.Tensor) -> Sequence[bool]:
        """Which tensors have a gradient on any rank, from the sum of all notes [n].

        Raises MismatchError, on every rank, if they did not do the same so far. On an accelerator
        nothing waits for the sum where the answer is known: ``check`` looks at it later.
        """
        if self.comm.is_fake:
            return self.present
        row = row.real if row.is_complex() else row
        if row.device.type == "cpu":
            self._check(row)
        else:
            self._kept = torch.empty(row.shape, dtype=row.dtype, pin_memory=True)
            self._kept.copy_(row, non_blocking=True)
            self._arrived = torch.Event(row.device)
            self._arrived.record()
            if all(self.present):
                return self.present
        first = len(self.own)
        return [total > 0 for total in row[first : first + len(self.present)].tolist()]

    def check(self, *, wait: bool) -> bool:
        """Look at a sum that was kept, if it is there or ``wait``; whether that was done."""
        if self._kept is None or self._arrived is None:
            return True
        if wait:
            self._arrived.synchronize()
        elif not self._arrived.query():
            return False
        kept, self._kept = self._kept, None
        self._check(kept)
        return True

    def _check(self, row: torch.Tensor) -> None:
        sums = row[: len(self.own)].tolist()
        if any(total and not own for own, total in zip(self.own, sums, strict=True)):
            last = ", ".join(f"'{label}'" for label in self.comm.forget())
            raise MismatchError(
                expected(
                    f"'{self.label}'",
                    "every rank to use the same units in the same order",
                    f"another order on some rank; the last here were {last}",
                    "Nothing was updated. Let every rank run every unit; SHARDWRIGHT_LOG=debug "
                    "names the first difference.",
                )
            )
