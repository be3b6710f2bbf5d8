"""Who is here, and at which collective: asked before one in debug mode, after one failed, and while
a call that every rank has to make waits for the others.

Asking before costs an all-gather each time and finds ranks that are about to exchange different
things, which gloo would do without a word. Asking after, or meanwhile, goes through the store where
the ranks met, for the process group is of no use any more, or busy.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Final

import torch
import torch.distributed as dist

from shardwright.core.errors import MismatchError, PeerError
from shardwright.runtime.comm.torch_groups import default_store

SECONDS: Final = 2.0
LATE_SECONDS: Final = 10.0  # after which a rank that waits for others in the store says so
HERE_SECONDS: Final = 5.0  # after which a rank in a call of all ranks leaves word that it is there
SAID_SECONDS: Final = 10.0  # after which it says who has left none
REMEDY: Final = (
    "Whole tensors are for all ranks at once: call sw.full_state_dict(model), or full_tensor(), on "
    "every rank, then use what it gives on one."
)
_GRACE: Final = 1.0
_LOOK_AT_CALLS: Final = 0.5
_LOOK: Final = 0.02
_LABEL: Final = 96
_ENTRY: Final = struct.Struct(f"<qq16s32s{_LABEL}s")


@dataclass(frozen=True, slots=True)
class LabelledCall:
    """A collective as one rank sees it; ``nbytes`` is 0 where ranks may differ in it."""

    sequence: int
    kind: str
    nbytes: int
    label: str

    def packed(self) -> torch.Tensor:
        text = self.label.encode()
        # Rows of one length, for they are gathered. The hash tells labels apart whose first bytes
        # are the same; the bytes are for people.
        digest = hashlib.sha256(text).digest()
        packed = _ENTRY.pack(self.sequence, self.nbytes, self.kind.encode(), digest, text[:_LABEL])
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    def __str__(self) -> str:
        size = f" of {self.nbytes} B" if self.nbytes else ""
        return f"{self.label!r} ({self.kind}{size}, collective {self.sequence})"


def _unpacked(row: torch.Tensor) -> LabelledCall:
    sequence, nbytes, kind, _, label = _ENTRY.unpack(bytes(row.tolist()))
    text = label.rstrip(b"\0").decode(errors="replace")
    return LabelledCall(sequence, kind.rstrip(b"\0").decode(), nbytes, text)


def compare(
    entry: LabelledCall, ranks: Sequence[int], gather: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """MismatchError on every rank, with the same text, unless all are at the same collective.

    ``gather`` collects equal rows of bytes from all ``ranks`` into [W, n].
    """
    rows = gather(entry.packed())
    # Every rank has all rows, so all come to the same answer and raise the same words.
    differing = [index for index in range(1, len(ranks)) if not rows[index].equal(rows[0])]
    if differing:
        names = ", ".join(str(ranks[index]) for index in differing)
        raise MismatchError(
            f"collective {_unpacked(rows[0]).sequence}",
            "the same on every rank",
            f"{_unpacked(rows[0])} on rank {ranks[0]} "
            f"but {_unpacked(rows[differing[0]])} on rank {names}",
            "Call modules in the same order, with the same shapes, on every rank.",
        )


@dataclass(frozen=True, slots=True)
class Absence:
    """What a roll call found: global ranks that did not answer, and where those are that did.

    ``silent`` is None where the store did not answer either.
    """

    silent: tuple[int, ...] | None
    elsewhere: Mapping[int, str]


def missing(group: dist.ProcessGroup, ranks: Sequence[int], own: int, word: str) -> Absence:
    """Say ``word`` to the other ``ranks`` of ``group`` and hear who answers within ``SECONDS``.

    Takes at most ``SECONDS`` and a second, whatever the store does, and raises nothing.
    """
    answers: dict[int, str] = {}
    done = threading.Event()
    store, name = default_store(), group.group_name
    others = [rank for rank in ranks if rank != own]

    def ask() -> None:
        try:
            _ask(store, name, others, own, word, answers)
        except Exception:  # a store that died with its rank; whoever was heard before still counts
            return
        done.set()

    # In a thread: a store whose host is gone blocks for its own timeout, and this rank has
    # something to say now.
    thread = threading.Thread(target=ask, name="desync", daemon=True)
    thread.start()
    thread.join(SECONDS + _GRACE)
    heard = dict(answers)
    elsewhere = {rank: said for rank, said in heard.items() if said != word}
    if not done.is_set():
        return Absence(None, elsewhere)
    silent = tuple(rank for rank in ranks if rank != own and rank not in heard)
    return Absence(silent, elsewhere)


def _ask(
    store: dist.Store,
    group: str,
    others: Sequence[int],
    own: int,
    word: str,
    answers: dict[int, str],
) -> None:
    # Names of groups may be the same on ranks of different groups.
    prefix = f"shardwright/desync/{group}/{min([own, *others])}"
    store.set(f"{prefix}/{own}", word)
    end = time.monotonic() + SECONDS
    while len(answers) < len(others) and time.monotonic() < end:
        for rank in others:
            if rank not in answers and store.check([f"{prefix}/{rank}"]):
                answers[rank] = store.get(f"{prefix}/{rank}").decode()
        time.sleep(_LOOK)


def meet(
    place: str, others: Sequence[int], own: int, seconds: float, late: Callable[[list[int]], None]
) -> list[int]:
    """Wait in the store until all ``others`` are at ``place``, for ``seconds``; who never came.
    ``late`` is told once for whom it waits."""
    # Through the store: a barrier would be a collective, which is what must not meet another one
    # here.
    store, began, said = default_store(), time.monotonic(), False
    store.set(f"{place}/{own}", "here")
    absent, pause = list(others), _LOOK / 16
    while absent := [rank for rank in absent if not store.check([f"{place}/{rank}"])]:
        waited = time.monotonic() - began
        if waited > seconds:
            break
        if waited > LATE_SECONDS and not said:
            said = True
            late(absent)
        time.sleep(pause)
        # Short looks first, as the others are here nearly always; later fewer, for all ranks ask
        # one store.
        pause = min(2 * pause, _LOOK)
    return absent


def peer_error(
    label: str, step: int | None, sequence: int, absence: Absence, ranks: Sequence[int]
) -> PeerError:
    """One line with the unit, the step, the collective and the ranks that are missing."""
    where = label if step is None else f"{label}, step {step}"
    if absence.silent is None:
        found = "no answer from the store where ranks meet, so nobody can say who is missing"
    elif absence.silent:
        found = f"no sign of rank {', '.join(map(str, absence.silent))}"
    else:
        found = "all of them waiting for each other"
    if absence.elsewhere:
        places = [f"rank {rank} at {said}" for rank, said in sorted(absence.elsewhere.items())]
        found += f", and {'; '.join(places)}"
    remedy = (
        "See what that rank says; this one could go on."
        if absence.silent
        else "SHARDWRIGHT_LOG=debug compares every collective before it starts."
    )
    return PeerError(where, f"all {len(ranks)} ranks at collective {sequence}", found, remedy)


def apart(
    where: str, own: int, why: str, remedy: str, absence: Absence
) -> MismatchError | PeerError:
    """One line of a rank that others did not follow to ``where`` it is."""
    places = [f"rank {rank} at {said}" for rank, said in sorted(absence.elsewhere.items())]
    if places:
        wanted = "every rank to be here"
        found = f"{'; '.join(places)}: here {why}"
        return MismatchError(f"{where} on rank {own}", wanted, found, remedy)
    silent = ", ".join(map(str, absence.silent or ())) or "any other"
    return PeerError(f"{where} on rank {own}", "all ranks", f"no sign of rank {silent}", remedy)


def timed_out(error: BaseException) -> bool:
    """Whether this rank gave up waiting; otherwise it saw a connection close."""
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


@dataclass(slots=True)
class _Waiting:
    """A call under way of which every rank has to make its own; ``stage`` counts what was done."""

    name: str
    place: str
    own: int
    others: Sequence[int]
    begun: float
    stage: int = 0

    def look(self) -> None:
        """Leave word, or say who is missing, once it is time."""
        waited = time.monotonic() - self.begun
        # Word is left long before it is looked for, or a rank that came a moment later would be
        # missed.
        if self.stage == 0 and waited > HERE_SECONDS:
            self.stage = 1
            default_store().set(f"{self.place}/{self.own}", "here")
        if self.stage == 1 and waited > SAID_SECONDS:
            self.stage = 2
            absent = [r for r in self.others if not default_store().check([f"{self.place}/{r}"])]
            if absent:
                names = ", ".join(map(str, absent))
                text = f"waiting for {waited:.0f} s for rank {names}. {REMEDY}"
                logging.getLogger("shardwright").warning("%s: %s", self.name, text)


class _Watch:
    """The calls of this process that are under way, and a thread that looks at them as long as
    there are any."""

    def __init__(self) -> None:
        self.calls: dict[int, _Waiting] = {}
        self.numbers = count()
        self._any = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, call: _Waiting) -> int:
        """Look at ``call`` until it is taken from ``calls`` by the number that this gives."""
        number = next(self.numbers)
        self.calls[number] = call
        self._any.set()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._look, name="missing ranks", daemon=True)
            self._thread.start()
        return number

    def _look(self) -> None:
        while True:
            self._any.wait()
            # Before the look: a call that begins after it sets it again.
            self._any.clear()
            while self.calls:
                time.sleep(_LOOK_AT_CALLS)
                # A copy, as calls begin and end in other threads.
                for call in [*self.calls.values()]:
                    with contextlib.suppress(Exception):  # a store that is gone: the call says why
                        call.look()


_watch = _Watch()


@contextmanager
def asked_of_all(name: str, place: str, own: int, others: Sequence[int]) -> Iterator[None]:
    """Inside of a call ``name`` that rank ``own`` and ``others`` each have to make: after a while
    it is said who is missing, and a PeerError says so, too. ``place`` tells calls apart."""
    begun = time.monotonic()
    number = _watch.begin(_Waiting(name, f"shardwright/whole/{place}", own, others, begun))
    try:
        yield
    except PeerError as error:
        raise PeerError(f"{error} {REMEDY}") from error
    finally:
        del _watch.calls[number]
