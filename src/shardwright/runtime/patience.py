"""Calls that every rank has to make, as those that give whole tensors: one made on some ranks alone
waits for the others. After a while it is said who is missing; nothing is asked before that."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Final

import torch.distributed as dist

from shardwright.core.errors import PeerError
from shardwright.runtime.peers import Peers
from shardwright.runtime.torch_private import default_store

HERE_SECONDS: Final = 5.0  # after which a rank that waits leaves word of it
SAID_SECONDS: Final = 10.0  # after which it says who has left none
_LOOK: Final = 0.5
REMEDY: Final = (
    "Whole tensors are for all ranks at once: call sw.full_state_dict(model), or full_tensor(), on "
    "every rank, then use what it gives on one."
)


@dataclass(slots=True)
class _Call:
    """A call under way; ``stage`` counts what was done about it."""

    name: str
    peers: Peers
    sequence: int
    begun: float
    stage: int = 0

    def look(self) -> None:
        """Leave word, or say who is missing, once it is time."""
        waited = time.monotonic() - self.begun
        if self.stage == 0 and waited > HERE_SECONDS:
            self.stage = 1
            default_store().set(self._key(self.peers.ranks[self.peers.rank]), "here")
        if self.stage == 1 and waited > SAID_SECONDS:
            self.stage = 2
            others = [r for r in self.peers.ranks if r != self.peers.ranks[self.peers.rank]]
            missing = [r for r in others if not default_store().check([self._key(r)])]
            if missing:
                names = ", ".join(map(str, missing))
                text = f"waiting for {waited:.0f} s for rank {names}. {REMEDY}"
                logging.getLogger("shardwright").warning("%s: %s", self.name, text)

    def _key(self, rank: int) -> str:
        return f"shardwright/whole/{self.peers.name}/{self.sequence}/{rank}"


class Patience:
    """The calls of this process that are under way, and a thread that looks at them as long as
    there are any."""

    def __init__(self) -> None:
        self._calls: dict[int, _Call] = {}
        self._numbers = count()
        self._any = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def asked_of_all(self, name: str, peers: Peers) -> Iterator[None]:
        """Inside of a call ``name`` that all ``peers`` have to make; a PeerError says so, too."""
        if peers.size == 1 or peers.is_fake or not dist.is_initialized():
            yield
            return
        number = next(self._numbers)
        self._calls[number] = _Call(name, peers, peers.sequence, time.monotonic())
        self._any.set()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._watch, name="patience", daemon=True)
            self._thread.start()
        try:
            yield
        except PeerError as error:
            raise PeerError(f"{error} {REMEDY}") from error
        finally:
            del self._calls[number]

    def _watch(self) -> None:
        while True:
            self._any.wait()
            self._any.clear()
            while self._calls:
                time.sleep(_LOOK)
                for call in [*self._calls.values()]:
                    with contextlib.suppress(Exception):  # a store that is gone: the call says why
                        call.look()


patience = Patience()
