"""Collectives under way, and who keeps their tensors until they are done.

A backend reads what is sent and writes what is received at any time until the wait is over, and
gloo keeps no hold of its own on the tensors of a receive: were one freed before, gloo would write
into memory of somebody else. So a ``Pending`` holds its tensors until ``wait``, and sends and
receives that nobody waits for are waited for by a thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from shardwright.core.measurement import Meeting
from shardwright.runtime.probe import Probe


class _InIt(Protocol):
    """Those who are in a collective: ``Peers``, of which this file knows no more."""

    name: str
    probe: Probe

    def settle(self) -> None:
        """One of their collectives is over."""

    def explain(self, error: RuntimeError, label: str, sequence: int) -> None:
        """Raise a PeerError if one of them caused ``error``."""


class Pending:
    """A collective under way. It owns its Work and every tensor that it touches until ``wait``."""

    __slots__ = (
        "_after",
        "_arrived",
        "_label",
        "_peers",
        "_sequence",
        "_tensors",
        "_what",
        "_work",
    )

    def __init__(
        self, peers: _InIt, label: str, sequence: int, kind: str = "", nbytes: int = 0
    ) -> None:
        self._peers = peers
        self._label = label
        self._sequence = sequence
        self._what = kind, nbytes
        self._arrived = time.perf_counter()  # a probe may listen only when it is waited for
        self._work: dist.Work | Transfers | None = None
        self._tensors: tuple[torch.Tensor, ...] = ()
        self._after: Callable[[], object] | None = None

    def starts(
        self,
        tensors: tuple[torch.Tensor, ...],
        operation: Callable[..., dist.Work | Transfers | None],
        *arguments: Any,
    ) -> None:
        """Call ``operation``, which touches ``tensors`` until what it gives is over."""
        try:
            self._work = operation(*arguments)
        except RuntimeError as error:
            self.blame(error)
        self._tensors = tensors

    def wait(self) -> None:
        """Finish the collective, its local sum included; does nothing the second time."""
        work, after, tensors = self._work, self._after, self._tensors
        if work is None and after is None:
            return
        # Let go of before the wait: if that raises, a second wait must not wait for it again.
        self._work, self._after, self._tensors = None, None, ()
        peers, began, ended = self._peers, 0.0, 0.0
        listens = peers.probe.listens
        try:
            if listens:
                began = time.perf_counter()
            if work is not None:
                work.wait()
            # What comes after is a sum made here, or a collective that counts for itself.
            if listens:
                ended = time.perf_counter()
            if after is not None:
                after()
        except RuntimeError as error:
            self.blame(error)
        # Before ``settle``, so that memory is free when the caller goes on.
        del work, tensors, after
        if listens:
            place = (peers.name, self._sequence, self._what[0], self._label, self._what[1])
            peers.probe.met(Meeting(*place, self._arrived, began, ended))
        peers.settle()

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What it touches, until it is done."""
        return self._tensors

    def returned(self, wait: bool) -> Pending | None:
        """What a call with ``wait`` gives its caller."""
        if wait:
            self.wait()
            return None
        return self

    def then(self, after: Callable[[], object]) -> None:
        """Call ``after`` as the last part of ``wait``."""
        # In the order in which they were given: the second may be a collective, which all ranks
        # begin here.
        self._after = after if self._after is None else partial(_both, self._after, after)

    def blame(self, error: RuntimeError) -> NoReturn:
        """Raise a PeerError if another rank caused ``error``, else ``error``."""
        self._peers.explain(error, self._label, self._sequence)
        raise error


def _both(first: Callable[[], object], second: Callable[[], object]) -> None:
    first()
    second()


class Transfers:
    """Sends and receives that make one collective; every wait for one takes ``limit`` at most."""

    __slots__ = ("_limit", "_works")

    def __init__(self, works: Iterable[dist.Work], limit: timedelta | None) -> None:
        self._works: list[dist.Work] = []
        self._limit = limit
        for work in works:  # one by one: those before one that fails are under way
            self._works.append(work)

    def wait(self) -> None:
        """Until all are over; does nothing the second time."""
        while self._works:
            last = self._works[-1]
            # if not set, it keeps the limit of when its connection was made
            last.wait() if self._limit is None else last.wait(self._limit)
            # Only once it is over: what an error leaves in the list is waited for when this object
            # goes.
            self._works.pop()

    def __del__(self) -> None:
        # By a thread, as an object may be freed anywhere, and here nobody may be made to wait.
        if self._works:
            outlive = threading.Thread(
                target=_wait_for, args=(self._works,), name="transfers", daemon=True
            )
            with contextlib.suppress(RuntimeError):  # the interpreter is ending
                outlive.start()


def _wait_for(works: Sequence[dist.Work]) -> None:
    for work in works:
        with contextlib.suppress(RuntimeError):
            work.wait()
