"""Whose fault it is: from what is seen of every rank to one reason, as pure functions.

The order of blame: a rank that reports an error of its own; a rank whose process is gone without
a word; a rank that was told to stop; the rank that is behind while the others wait for it. A rank
that only lost its peers is never blamed as long as there is another one.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shardwright.core.errors import (
    EXIT_BUG,
    EXIT_INPUT,
    EXIT_PREEMPTED,
    EXIT_RUN_FAILED,
)
from shardwright.core.outcome import RankOutcome
from shardwright.lab.launcher.processes import Process
from shardwright.runtime.pulse import PulseReading

Kind = Literal["error", "lost", "stopped", "stalled"]

_SUDDEN = 1.0  # a rank that moved in its last second did not hang


@dataclass(frozen=True, slots=True)
class RankView:
    """What the launcher sees of one rank: ``quiet`` is how many seconds its pulse stood still,
    ``spoke`` when its status was written (seconds, any origin; 0 without one)."""

    rank: int
    pulse: PulseReading | None = None
    status: RankOutcome | None = None
    process: Process = "unknown"
    quiet: float = 0.0
    spoke: float = 0.0

    @property
    def finished(self) -> bool:
        return self.status is not None and self.status.state == "finished"

    @property
    def lost(self) -> bool:
        return self.status is None and self.process == "gone"

    @property
    def sequence(self) -> int:
        return -1 if self.pulse is None else self.pulse.sequence


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which ranks are to blame, and for what kind of end; ``waited``: the quietest second."""

    kind: Kind
    ranks: tuple[int, ...]
    waited: float = 0.0


def in_trouble(views: Sequence[RankView], timeout: float, setup_timeout: float) -> bool:
    """True when the run cannot go on by itself. Everybody's silence counts, not one rank's:
    a rank that hangs soon makes the others wait, and one that works alone for long is no fault.
    """
    running = [view for view in views if not view.finished]
    if any(view.status is not None or view.lost for view in running):
        return True
    starting = any(v.pulse is None or v.pulse.phase in ("setup", "load") for v in running)
    limit = max(timeout, setup_timeout) if starting else timeout
    return bool(running) and min(view.quiet for view in running) > limit


def blame(views: Sequence[RankView]) -> Verdict | None:
    """The verdict over ranks of a run in trouble; None when every rank finished."""
    running = [view for view in views if not view.finished]
    if not running:
        return None
    own = [v for v in running if v.status and v.status.state == "failed" and not v.status.peer]
    if own:
        first = min(own, key=lambda view: (view.spoke, view.rank))
        assert first.status is not None
        text = first.status.message
        return _verdict("error", [v for v in own if v.status and v.status.message == text])
    lost = [view for view in running if view.lost]
    if lost:
        return _verdict("lost", lost)
    suspects = [view for view in running if not (view.status and view.status.peer)] or running
    stopped = [v for v in suspects if v.status and v.status.state == "stopped"]
    if stopped and len(stopped) == len(suspects) and min(v.quiet for v in stopped) < _SUDDEN:
        return _verdict("stopped", stopped)
    frozen = [view for view in suspects if view.process == "stopped"]
    if frozen:
        return _verdict("stalled", frozen)
    behind = min(view.sequence for view in running)
    return _verdict("stalled", [v for v in suspects if v.sequence == behind] or suspects)


def _verdict(kind: Kind, views: Sequence[RankView]) -> Verdict:
    ranks = tuple(sorted(view.rank for view in views))
    return Verdict(kind, ranks, max((view.quiet for view in views), default=0.0))


def exit_code(
    verdict: Verdict, views: Mapping[int, RankView], exits: Mapping[int, int], words: str
) -> int:
    """The run's exit code. ``exits``: rank -> exit code where torchrun told it; ``words``: what
    the blamed rank left on its stderr."""
    first = views[verdict.ranks[0]]
    if verdict.kind in ("error", "stopped") and first.status is not None:
        return first.status.code or EXIT_PREEMPTED
    if verdict.kind == "lost" and first.pulse is None and words:
        code = exits.get(first.rank, EXIT_BUG)
        return EXIT_INPUT if code == EXIT_INPUT else EXIT_BUG if code > 0 else EXIT_RUN_FAILED
    return EXIT_RUN_FAILED


def reason(
    verdict: Verdict, views: Mapping[int, RankView], exits: Mapping[int, int], words: str
) -> str:
    """One line that names the ranks, the step and the phase."""
    first = views[verdict.ranks[0]]
    who = naming(verdict.ranks)
    if verdict.kind in ("error", "stopped"):
        assert first.status is not None
        return f"{who}: {first.status.message}{_at(first.status)}"
    if verdict.kind == "lost":
        cause = _cause(exits.get(first.rank))
        tail = f": {words}" if words else ""
        if first.pulse is None:
            return f"{who} died before a sign of life{cause}{tail}"
        return f"{who} died without a word at {place(first.pulse)}{cause}{tail}"
    others = tuple(sorted(set(views) - set(verdict.ranks)))
    waited = f"; {naming(others)} waited" if others else ""
    how = " (the process is stopped)" if first.process == "stopped" else ""
    if first.pulse is None:
        tail = f": {words}" if words else ""
        return f"{who} showed no sign of life for {verdict.waited:.0f} s{how}{waited}{tail}"
    at = first.pulse
    step = "" if at.step is None else f"step {at.step}, "
    where = f"{step}{at.phase}, collective {at.sequence}"
    return f"{who} made no progress for {verdict.waited:.0f} s{how}; {where}{waited}"


def naming(ranks: Sequence[int]) -> str:
    """``rank 1``, ``ranks 0, 2``."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def place(pulse: PulseReading) -> str:
    return pulse.phase if pulse.step is None else f"step {pulse.step} in {pulse.phase}"


def _at(status: RankOutcome) -> str:
    if status.step is None or f"step {status.step}" in status.message:
        return ""
    return f" (step {status.step}, {status.phase})"


def _cause(code: int | None) -> str:
    if code is None:
        return ""
    if code >= 0:
        return f" (exit code {code})"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    memory = "; the system does so when memory runs out" if -code == signal.SIGKILL else ""
    return f" (killed by signal {-code}, {name}{memory})"


_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
_SUMMARY = re.compile(r"rank\s*:\s*(\d+) \(local_rank: \d+\)\s*\n\s*exitcode\s*:\s*(-?\d+)")


def exits_in(log: str) -> dict[int, int]:
    """rank -> exit code (minus the signal) of the workers whose end torchrun's log tells."""
    found = {int(rank): int(code) for rank, code in _SUMMARY.findall(log)}
    return found | {int(rank): int(code) for code, rank in _FAILED.findall(log)}


_NOISE = re.compile(r"^(\^+|~+|[-=*]{3,}|File \".*|Traceback .*|.*Warning: .*|warnings\.warn.*)$")


def last_words(log: str) -> str:
    """The last line of a log that says something; empty when none does."""
    lines = [line.strip() for line in log.splitlines()]
    telling = [line for line in lines if line and not _NOISE.match(line)]
    return telling[-1] if telling else ""
