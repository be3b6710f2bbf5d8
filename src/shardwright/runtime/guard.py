"""No gradient that is not finite updates anything.

Every rank looks at its own gradients before they are summed, where it is still known whose they
are. A row gradient updates its table as soon as all ranks agree that theirs are finite; with a
guard over the whole model nothing is updated before all gradients of the step were looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwright.core.errors import RunError
from shardwright.runtime.comm import Comm

Update = Callable[[], None]
_FINE = 0
_FIRST = 2**62  # less the place of what a rank found: the first is the largest number
_DOTTED = (torch.float32, torch.float64)


class Guard:
    """What a rank has seen of a step's gradients, and the updates that wait for all ranks' word.

    Given to ``apply``, it is over units and tables: call ``settle`` before the optimizer's step,
    after all backwards of it, and ``forget`` after an exception of your own in between. What it
    refuses is a gradient whose squares do not add up to a finite number, for such squares are what
    optimizers keep, and sums over ranks stay finite without them.

    With ``skip`` such a step raises nothing: ``skipped`` counts it, and ``fault`` says what was
    wrong with the step that was settled last, or is None, when the optimizer may step.
    """

    def __init__(self, mesh: DeviceMesh | Comm, *, skip: bool = False) -> None:
        self.comm = mesh if isinstance(mesh, Comm) else Comm(mesh)
        self.skip = skip
        self.skipped = 0
        self.fault: RunError | None = None
        self.forget()

    def forget(self) -> None:
        """Begin a step: nothing was seen, and nothing waits."""
        self._names: list[str] = []  # in the order in which a backward comes to them
        self._found: tuple[int, float] | None = None  # place in names, largest absolute value
        self._waiting: list[Update] = []

    @property
    def is_fine(self) -> bool:
        """Whether all that this rank looked at since the last time was finite."""
        return self._found is None

    def look(
        self,
        values: Sequence[torch.Tensor],
        names: Sequence[str],
        parts: Callable[[], Iterable[torch.Tensor | None]],
    ) -> None:
        """Look at numbers of this rank, ``values`` [any], quickest where they are contiguous.

        ``names`` are those of all they are of, "gradient of top.0.weight" and the like, the same on
        every rank; ``parts`` gives the numbers of each and is called where some are wrong only.
        """
        first = len(self._names)
        # Also where nothing is looked at any more: places are counted alike on all ranks, and one
        # of them names the fault for all.
        self._names.extend(names)
        if self._found is not None or all(map(_is_finite, values)):
            return
        largest = [0.0 if p is None else _largest(p) for p in parts()]
        bad = [place for place, size in enumerate(largest) if not math.isfinite(size)]
        # Where all are finite and their squares are not, it is the largest that did it.
        place = bad[0] if bad else largest.index(max(largest))
        self._found = (first + place, largest[place])

    def defer(self, update: Update) -> None:
        """Let ``update`` wait until the step is settled."""
        self._waiting.append(update)

    def settle(self, words: Sequence[int] = ()) -> list[int]:
        """Agree on what was seen since the last time (collective), and run the updates that wait.

        Returns the largest of every rank's ``words``, integers that travel with it.
        RunError on every rank, naming the first bad gradient and its ranks, and no update runs, if
        a gradient of any rank is not finite.
        """
        names, found, waiting = self._names, self._found, self._waiting
        # First, so that whoever catches the error begins with nothing.
        self.forget()
        # One maximum over ranks tells whether anything was found and, if so, the first of all.
        own = _FINE if found is None else _FIRST - found[0]
        numbers = torch.tensor([own, *words], device=self.comm.mesh.device_type)
        self.comm.all_reduce("whether gradients are finite", numbers, largest=True)
        word, *others = numbers.tolist()
        if word != _FINE:
            waiting.clear()  # whoever keeps the error does not keep them
            place = _FIRST - word
            ranks, largest = self._whose(found, place)
            if not self.skip:  # no name for the error: its frames would keep it, and it them
                raise not_finite(names[place], ranks, largest, self.comm.step)
            self.fault = not_finite(names[place], ranks, largest, self.comm.step)
            self.skipped += 1
            return others
        self.fault = None
        waiting.reverse()
        while waiting:
            waiting.pop()()  # what an update was kept for goes with it
        return others

    def _whose(self, found: tuple[int, float] | None, place: int) -> tuple[list[int], list[float]]:
        """The ranks whose gradient at ``place`` is not finite, and its largest value on each."""
        ranks = self.comm.mesh.mesh.flatten().tolist()
        seen = torch.zeros(len(ranks), 2, dtype=torch.float64, device=self.comm.mesh.device_type)
        if found is not None and found[0] == place:
            # -1 stands for nan: the largest of numbers of which one is nan would say nothing.
            numbers = torch.tensor([1.0, found[1]], dtype=torch.float64).nan_to_num(nan=-1.0)
            seen[ranks.index(self.comm.mesh.get_rank())] = numbers
        # Only in the bad case, which all ranks know of by now: a good step takes one small
        # collective.
        self.comm.all_reduce("whose gradient is not finite", seen)
        rows = seen.tolist()
        bad = [(rank, size) for rank, (is_bad, size) in zip(ranks, rows, strict=True) if is_bad]
        return [rank for rank, _ in bad], [size for _, size in bad]


def not_finite(
    name: str, ranks: Sequence[int], largest: Sequence[float], step: int | None
) -> RunError:
    """What to say of numbers whose ``largest`` on ``ranks`` are these; -1 stands for nan."""
    on = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    when = "" if step is None else f" in step {step}"
    size = max(largest)
    found = "inf" if size > torch.finfo(torch.float32).max else f"numbers as large as {size:.3g}"
    wanted = "finite numbers with a finite sum of squares"
    remedy = "It updated nothing: lower the learning rate or look at the data."
    return RunError(f"{name} on {on}{when}", wanted, "nan" if min(largest) < 0 else found, remedy)


def _largest(part: torch.Tensor) -> float:
    return part.abs().amax().item() if part.numel() else 0.0


def _is_finite(values: torch.Tensor) -> bool:
    """Whether the squares of ``values`` add up to a finite number, in one pass without a copy."""
    if values.device.type == "cpu" and values.dtype in _DOTTED and values.is_contiguous():
        flat = values.view(-1)
        return math.isfinite(flat.dot(flat).item())  # BLAS, in half the time of a norm
    # 16-bit numbers are squared in fp32: in fp16 256 squared is inf, and 256 is no bad gradient.
    wide = torch.float32 if values.dtype.itemsize < torch.float32.itemsize else None
    return bool(torch.linalg.vector_norm(values, dtype=wide).square().isfinite().item())
