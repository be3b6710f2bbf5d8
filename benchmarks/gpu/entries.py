"""Rows of many measurements: each is an entry of its own, which fails or is left out alone.

An entry says ``class``, ``op``, ``dtype`` and ``shape``, what ``timed`` gives, and ``bytes`` and
``flops`` where these are plain arithmetic: every operator that is asked for reads its operands once
and writes its results once. Operands are random, and taken in turn from as many copies, ``turns``,
as no cache holds together: they come from memory, as in a step of training.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from gpu.rows import MESSAGE, Setting, timed

MIB = 2**20
CACHED = 256 * MIB  # no card's cache has as much: 50 MiB of H100 and H200, 126 MiB of B200
TURNS = 32  # copies at most
SECONDS = 0.01  # of each of the five samples
SMALLER = 128  # times, where two cores measure it
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FLOAT8 = torch.float8_e4m3fn
Operands = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """A measurement to make: ``make()`` gives the operands of one call of ``run``."""

    op: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], Operands]
    run: Callable[..., object]
    nbytes: int | None = None
    flops: int | None = None
    on_cuda: bool = False  # and nowhere else
    turns: int | None = None  # None: as many as no cache holds, one where bytes are not known
    seconds: float = SECONDS
    more: dict[str, Any] = field(default_factory=dict)

    def said(self, setting: Setting) -> dict[str, Any]:
        """What is known before it is measured."""
        found = {"op": self.op, "dtype": self.dtype, "shape": list(self.shape), **self.more}
        found |= {"bytes": self.nbytes, "flops": self.flops, "turns": self._turns(setting)}
        return {key: value for key, value in found.items() if value is not None}

    def _turns(self, setting: Setting) -> int:
        wanted = self.turns
        if wanted is None:
            wanted = min(TURNS, -(-CACHED // (self.nbytes or CACHED)))
        return min(wanted, 2) if setting.small else wanted

    def measure(self, setting: Setting) -> dict[str, Any]:
        """Calls of ``run``, each with the next operands."""
        operands = itertools.cycle([self.make() for _ in range(self._turns(setting))])
        return timed(setting, lambda: self.run(*next(operands)), seconds=self.seconds)


def measured(setting: Setting, kind: str, cases: Iterable[Case], seconds: float) -> dict[str, Any]:
    """The entries of all cases of a class, in order. An error is its entry's; it is the row's too
    where cases themselves fail, or where the device is of no use any more. What is not begun in
    ``seconds`` is skipped, but for the first."""
    entries: list[dict[str, Any]] = []
    setting.synchronize()  # a process's first call makes its context, which is no case's time
    end = time.perf_counter() + seconds
    try:
        for case in cases:
            entry = {"class": kind, **case.said(setting)}
            entries.append(entry)
            if case.on_cuda and setting.device != "cuda":
                entry["skipped"] = "only on CUDA"
            elif time.perf_counter() > end and len(entries) > 1 and not setting.small:
                entry["skipped"] = "no time was left"
            else:
                entry |= _measured(setting, case)
    except Exception as error:
        return {"entries": entries, "error": error_of(error)}
    return {"entries": entries}


def _measured(setting: Setting, case: Case) -> dict[str, Any]:
    try:
        return case.measure(setting)
    except Exception as error:
        found = {"error": error_of(error)}
    setting.synchronize()  # which raises, again, where nothing more can be asked of the device
    if setting.device == "cuda":
        torch.cuda.empty_cache()
    return found


def error_of(error: Exception) -> str:
    """What a figure says of it."""
    return f"{type(error).__name__}: {error}"[:MESSAGE]


class Draw:
    """Random operands on a setting's device."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.device = setting, setting.device

    def size(self, number: int) -> int:
        """As it is, or so small that two cores are soon done."""
        return max(16, number // SMALLER) if self.setting.small else number

    def few(self, count: int) -> int:
        """As many, or some."""
        return min(count, 16) if self.setting.small else count

    def normal(self, *shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
        """Normal numbers."""
        drawn = torch.randn(*shape, device=self.device, dtype=BF16 if dtype == FLOAT8 else dtype)
        return drawn.to(dtype)

    def all(self, shape: tuple[int, ...], *dtypes: torch.dtype) -> Operands:
        """Tensors of one shape."""
        return tuple(self.normal(*shape, dtype=dtype) for dtype in dtypes)

    def bytes(self, count: int) -> torch.Tensor:
        """Any bytes."""
        return torch.randint(256, (count,), device=self.device, dtype=torch.uint8)

    def ids(self, count: int, below: int) -> torch.Tensor:
        """Uniform ones."""
        return torch.randint(below, (count,), device=self.device)


def name_of(dtype: torch.dtype) -> str:
    """As entries have it."""
    return str(dtype).removeprefix("torch.")
