"""A run that torchrun started, on one host or several: what ranks compare before anything moves,
whose folder is whose, and how rank 0 gets what the others measured.

Ranks talk through the store where they met, before there is a process group, so whatever is wrong
is one line within seconds.
"""

# Nothing collective is done before ranks have compared themselves, for a group of ranks with
# different plans hangs or computes nonsense instead of failing. They talk through the store where
# they met: each writes one key and waits for those of all others, so a rank that is missing is
# named after the patience of a run. Which folders are one folder no path tells (hosts mount alike
# and share nothing, or share by another name): rank 0 puts a file of a random name into its own,
# and who sees that file shares the folder.

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import torch
import torch.distributed as dist
from msgspec import UNSET

from shardwright import __version__
from shardwright.core.document import decode_json
from shardwright.core.errors import (
    InputError,
    MismatchError,
    PeerError,
    ShardwrightError,
    expected,
)
from shardwright.core.quantities import counted
from shardwright.job.job import checkpoint_folder
from shardwright.job.plan import Plan
from shardwright.launcher.folder import HELD_OUT, record_file, scores_file
from shardwright.launcher.launch import hold
from shardwright.runtime.comm import START_SECONDS, Comm

CLOCKS: Final = 1.0  # seconds that the clocks of two hosts may be apart without a word
_KEY: Final = "shardwright/hosts"


class HostFacts(msgspec.Struct, frozen=True):
    """A rank's host, the number torchrun gave it, its run folder, and what has to be the same on
    all ranks."""

    node: int
    host: str
    folder: str
    same: dict[str, str]


class Hosts:
    """The hosts of a run, as a rank sees them once they are ``ready``.

    ``facts`` are those of every rank; ``shared``: the run folder here is rank 0's.
    """

    def __init__(
        self, plan: Plan, rank: int, folder: Path, clock: Callable[[], float] = time.time
    ) -> None:
        self.plan, self.rank, self.folder, self.clock = plan, rank, folder, clock
        self.shared = rank == 0
        self.facts: list[HostFacts] = []
        self.lines: list[str] = []  # for rank 0 to say
        self._own = own_facts(plan, rank, folder)

    @contextmanager
    def ready(self, store: dist.Store, prepare: Callable[[], None]) -> Iterator[None]:
        """Compare ranks, find out which folders are one, and ``prepare`` each of them once.

        Folders are held inside. MismatchError: ranks differ in plan, versions, data, or are not as
        many to a host as planned. PeerError: a rank does not answer, or could not prepare.
        """
        self._store = store
        self._patience = self.plan.job.train.timeout
        # One key a rank and no collective: a rank that never started would hang a collective for
        # its whole timeout, without a name.
        texts = self._exchange("facts", msgspec.json.encode(self._own).decode())
        self.facts = [decode_json(text, HostFacts) for text in texts]
        check_facts(self.facts, self.plan)
        self._compare_clocks()
        with ExitStack() as held:
            first = self._find_folders(held)
            # Longer from here on: the first of a folder writes the data, which the others wait for.
            self._patience = START_SECONDS
            self._together("ready", prepare if first else None)
            yield

    def names(self) -> str:
        """``2 hosts: a (ranks 0-1), b (ranks 2-3)``."""
        nodes = self._nodes()
        parts = [f"{self.facts[r[0]].host} (rank{_span(r)})" for r in nodes.values()]
        return f"{counted(len(parts), 'host')}: {', '.join(parts)}"

    def bring(self, comm: Comm) -> None:
        """Rank 0's folder gets what ranks without it left in theirs (collective)."""
        for file in (record_file, *(partial(scores_file, part=part) for part in HELD_OUT)):
            path = file(self.folder, self.rank)
            # Only from folders that rank 0 does not see; all ranks take part, for a collective
            # needs them.
            text = path.read_bytes() if path.exists() and not self.shared else b""
            # frombuffer refuses an empty buffer.
            own = torch.frombuffer(bytearray(text or b"\0"), dtype=torch.uint8)
            own = own.to(comm.mesh.device_type)
            sizes = own.new_empty(comm.size, dtype=torch.int64)
            comm.all_gather("sizes of records", sizes, sizes.new_tensor([len(text)]))
            for rank, size in enumerate(sizes.tolist()):  # one after the other: they may be large
                if size:
                    part = own if rank == self.rank else own.new_empty(size)
                    comm.broadcast("a record", part, rank)
                    if self.rank == 0:
                        file(self.folder, rank).write_bytes(part.cpu().numpy().tobytes())

    def _nodes(self) -> dict[int, list[int]]:
        nodes: dict[int, list[int]] = {}
        for rank, facts in enumerate(self.facts):
            nodes.setdefault(facts.node, []).append(rank)
        return nodes

    def _exchange(self, what: str, text: str) -> list[str]:
        """Every rank's text, by rank."""
        # A key is written once in a run, so nobody reads what was meant for another question.
        self._store.set(f"{_KEY}/{what}/{self.rank}", text)
        return [self._heard(f"{what}/{rank}", rank) for rank in range(self.plan.world_size)]

    def _heard(self, what: str, rank: int) -> str:
        key = f"{_KEY}/{what}"
        try:
            self._store.wait([key], timedelta(seconds=self._patience))
            return self._store.get(key).decode()
        except RuntimeError as error:  # of torch.distributed: nobody has said it, or no store
            who = f"rank {rank}"
            if self.facts:
                who += f" on {self.facts[rank].host}"
            wanted = f"a word of all {self.plan.world_size} ranks within {self._patience:g} s"
            raise PeerError(expected("setup", wanted, f"none of {who}")) from error

    def _together(self, what: str, act: Callable[[], None] | None) -> None:
        """``act`` here; raises on every rank where it did on one."""
        error: ShardwrightError | None = None
        try:
            if act:
                act()
        except ShardwrightError as raised:
            error = raised
        said = self._exchange(what, str(error) if error else "")
        if error:
            raise error
        for rank, text in enumerate(said):
            if text:
                raise PeerError(f"{self.facts[rank].host} (rank {rank}): {text}")

    def _compare_clocks(self) -> None:
        """Rank 0 asks the first rank of every other host what time it is."""
        firsts = [ranks[0] for ranks in self._nodes().values() if 0 not in ranks]
        if self.rank in firsts:
            self._heard(f"asked/{self.rank}", 0)
            self._store.set(f"{_KEY}/clock/{self.rank}", repr(self.clock()))
        for rank in firsts if self.rank == 0 else ():
            before = self.clock()
            self._store.set(f"{_KEY}/asked/{rank}", "")
            there = float(self._heard(f"clock/{rank}", rank))
            after = self.clock()
            # As NTP does it: the answer was given somewhere between question and reply, half of
            # that is how far off the comparison may be.
            apart = there - (before + after) / 2
            if abs(apart) > CLOCKS + (after - before) / 2:
                how = "ahead of" if apart > 0 else "behind"
                here, other = self.facts[0].host, self.facts[rank].host
                said = f"the clock of {other} is {abs(apart):.1f} s {how} that of {here}"
                self.lines.append(said)

    def _find_folders(self, held: ExitStack) -> bool:
        """Hold the folder and see whether it is rank 0's; True for its lowest rank.

        Rank 0 puts a file with a name of its own into its folders, and the others look for it.
        """
        saves = self.plan.job.checkpoint is not UNSET
        saved = checkpoint_folder(self.plan.job, self.folder)
        mark = ""
        if self.rank == 0:
            mark = secrets.token_hex(6)
            signs = [self.folder / f".{mark}", *([saved / f".{mark}"] if saves else [])]

        def begin() -> None:
            if self.rank == 0:
                held.enter_context(hold(self.folder, mark))
                for sign in signs:
                    _put(sign)

        self._together("held", begin)
        # Rank 0's, which the others learn here; theirs are empty.
        mark = self._exchange("mark", mark)[0]
        self.shared = self.rank == 0 or (self.folder / f".{mark}").exists()
        alone = saves and self.rank > 0 and not (saved / f".{mark}").exists()
        place = "" if self.shared else f"{self._own.node} {self._own.folder}"
        places = self._exchange("folder", place)
        lonely = self._exchange("saved", "alone" if alone else "")
        if self.rank == 0:
            for sign in signs:
                with contextlib.suppress(OSError):
                    sign.unlink()
        # A checkpoint is complete when all ranks have written into one folder; two half ones cannot
        # be read.
        if "alone" in lonely:
            host = self.facts[lonely.index("alone")].host
            wanted = "a folder that all hosts share"
            raise InputError(
                expected("checkpoint.folder", wanted, f"{saved}, which {host} has not")
            )
        first = places.index(place) == self.rank

        def begin_elsewhere() -> None:
            if first and self.rank > 0:
                held.enter_context(hold(self.folder, mark))

        self._together("held elsewhere", begin_elsewhere)
        return first


def own_facts(plan: Plan, rank: int, folder: Path) -> HostFacts:
    """Those of this process, from torchrun's environment."""
    data = filter(None, (plan.job.data.path, plan.job.data.test_path))
    same = {
        "plan": plan.fingerprint,
        "torch version": str(torch.__version__),
        "shardwright version": __version__,
        "python version": platform.python_version(),
        **{f"size of {path}": _size(path) for path in data},
    }
    planned = rank // plan.cluster.local_world_size
    node = int(os.environ.get("GROUP_RANK", planned))
    return HostFacts(node, socket.gethostname(), str(folder.absolute()), same)


def check_facts(facts: Sequence[HostFacts], plan: Plan) -> None:
    """MismatchError, the same on every rank, unless all ranks say the same of themselves and there
    are as many to a host as planned."""
    first = facts[0]
    for name in dict.fromkeys(name for each in facts for name in each.same):
        other = [r for r, each in enumerate(facts) if each.same.get(name) != first.same.get(name)]
        if other:
            found = (
                f"another one on {facts[other[0]].host} (rank{_span(other)}) than on {first.host}"
            )
            remedy = "Start every host from the same plan, code, versions and data."
            raise MismatchError(expected("hosts", f"the same {name} everywhere", found, remedy))
    nodes = [each.node for each in facts]
    hosts, per_host = len(set(nodes)), plan.cluster.local_world_size
    planned = [rank // per_host for rank in range(plan.world_size)]
    if [sorted(set(nodes)).index(node) for node in nodes] != planned:
        counts = ", ".join(str(nodes.count(node)) for node in sorted(set(nodes)))
        raise MismatchError(
            expected(
                "hosts",
                f"{planned[-1] + 1} with {per_host} ranks each, as planned",
                f"{hosts} with {counts}",
                "Start torchrun so, or plan with another cluster.local_world_size.",
            )
        )


def _size(path: str) -> str:
    with contextlib.suppress(OSError):
        return f"{Path(path).stat().st_size} bytes"
    return "no such file"


def _span(ranks: Sequence[int]) -> str:
    """`` 3``, ``s 0-3``, ``s 0, 2``: what follows the word rank."""
    first, last = ranks[0], ranks[-1]
    if len(ranks) == 1:
        return f" {first}"
    if list(ranks) == list(range(first, last + 1)):
        return f"s {first}-{last}"
    return f"s {', '.join(map(str, ranks))}"


def _put(sign: Path) -> None:
    try:
        sign.parent.mkdir(parents=True, exist_ok=True)
        # Written through to the disk: a network file system shows other hosts only what has
        # arrived.
        with sign.open("wb") as file:
            os.fsync(file.fileno())
    except OSError as error:
        found = error.strerror or "none"
        raise InputError(expected(str(sign.parent), "a folder to write in", found)) from None
