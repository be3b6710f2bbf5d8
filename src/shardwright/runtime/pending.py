"""Collectives under way, and who keeps their tensors until they are done."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import NoReturn, Protocol

import torch
import torch.distributed as dist

from shardwright.core.measurement import Meeting
from shardwright.runtime.probe import Probe


class Ranks(Protocol):
    """Those who are in a collective."""

    @property
    def limit(self) -> timedelta | None:
        """How long a wait for them may take."""
        ...

    @property
    def name(self) -> str:
        """Of their group."""
        ...

    @property
    def probe(self) -> Probe:
        """Who is told of collectives."""
        ...

    def settle(self) -> None:
        """One of their collectives is done."""
        ...

    def explain(self, error: RuntimeError, label: str, sequence: int) -> None:
        """Raise a PeerError if one of them caused ``error``."""
        ...


class Pending:
    """A collective under way. It owns its Works and every tensor that they touch until ``wait``."""

    __slots__ = (
        "_after",
        "_arrived",
        "_label",
        "_peers",
        "_sequence",
        "_tensors",
        "_what",
        "_works",
    )

    def __init__(
        self, peers: Ranks, label: str, sequence: int, kind: str = "", nbytes: int = 0
    ) -> None:
        self._peers = peers
        self._label = label
        self._sequence = sequence
        self._what = kind, nbytes
        self._arrived = time.perf_counter()  # a probe may listen only when it is waited for
        self._works: list[dist.Work] = []
        self._tensors: tuple[torch.Tensor, ...] = ()
        self._after: Callable[[], object] | None = None

    def wait(self) -> None:
        """Finish the collective, its local sum included; does nothing the second time."""
        after, tensors = self._after, self._tensors
        if not self._works and after is None:
            return
        self._after, self._tensors = None, ()
        began = time.perf_counter()
        try:
            self._join()
            ended = time.perf_counter()
            if after is not None:
                after()
        except RuntimeError as error:
            self.blame(error)
        del tensors, after
        peers = self._peers
        if peers.probe.listens:
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
        self._after = after if self._after is None else partial(_both, self._after, after)

    def blame(self, error: RuntimeError) -> NoReturn:
        """Raise a PeerError if another rank caused ``error``, else ``error``."""
        self._peers.explain(error, self._label, self._sequence)
        raise error

    def owns(self, work: dist.Work | None, *tensors: torch.Tensor) -> None:
        """Take over a Work and what it touches."""
        if work is not None:
            self._works.append(work)
        self._tensors = tensors

    def _join(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()


def _both(first: Callable[[], object], second: Callable[[], object]) -> None:
    first()
    second()


class PointToPoint(Pending):
    """Sends and receives. Where nobody waits for them, a thread does: gloo writes into the tensors
    of a receive until it is complete, and has no hold on them."""

    __slots__ = ()

    @classmethod
    def of(cls, pending: Pending) -> PointToPoint:
        return cls(pending._peers, pending._label, pending._sequence, *pending._what)

    def _join(self) -> None:
        works, self._works = self._works, []
        limit = self._peers.limit
        try:
            while works:
                last = works[-1]  # it keeps the limit of when its connection was made, if not set
                last.wait() if limit is None else last.wait(limit)
                works.pop()
        except RuntimeError:
            _outlive(works)
            raise

    def __del__(self) -> None:
        if self._works:
            _outlive(self._works)


def _outlive(works: Sequence[dist.Work]) -> None:
    """Keep ``works`` until they are done or failed."""
    orphans = threading.Thread(target=_wait_for, args=(works,), name="letters", daemon=True)
    with contextlib.suppress(RuntimeError):  # the interpreter is ending
        orphans.start()


def _wait_for(works: Sequence[dist.Work]) -> None:
    for work in works:
        with contextlib.suppress(RuntimeError):
            work.wait()
