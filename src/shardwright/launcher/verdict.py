"""Whose fault it is: from what is seen of every rank to one reason, as pure functions.

The order of blame: a rank that reports an error of its own; a rank whose process is gone without
a word; a rank that was asked to stop; the rank that is behind while the others wait for it. A rank
that only lost its peers is never blamed as long as there is another one.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from shardwright.core.errors import (
    EXIT_BUG,
    EXIT_INPUT,
    EXIT_PREEMPTED,
    EXIT_RUN_FAILED,
)
from shardwright.launcher.exhausted import words_of_memory
from shardwright.launcher.heartbeat import Beat
from shardwright.launcher.outcome import STOPPED, RankOutcome
from shardwright.launcher.watch import RankView

Kind = Literal["error", "lost", "stopped", "stalled"]

_SUDDEN: Final = 1.0  # a rank that moved in its last second did not hang


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which ranks are to blame, and for what kind of end; ``waited``: the quietest second."""

    kind: Kind
    ranks: tuple[int, ...]
    waited: float = 0.0


def blame(views: Sequence[RankView]) -> Verdict | None:
    """The verdict over ranks of a run in trouble; None when every rank finished."""
    running = [view for view in views if not view.finished]
    for kind, guilty in _ORDER:
        if found := guilty(running):
            ranks = tuple(sorted(view.rank for view in found))
            return Verdict(kind, ranks, max(view.quiet for view in found))
    return None


def _with_an_error(running: Sequence[RankView]) -> list[RankView]:
    """The rank that reported an error of its own first, and those that reported the same."""
    errors = [view for view in running if view.ended_as("failed") and not view.lost_its_peers]
    if not errors:
        return []
    first = min(errors, key=lambda view: (view.spoke, view.rank))
    return [view for view in errors if view.message == first.message]


def _gone(running: Sequence[RankView]) -> list[RankView]:
    """Ranks that ended without a word."""
    return [view for view in running if view.lost]


def _stopped_at_work(running: Sequence[RankView]) -> list[RankView]:
    """All suspects, if every one was asked to stop and one of them was not hanging: it moved just
    before, or has more to tell than that, for what it saved may have taken long."""
    suspects = _suspects(running)
    worked = any(view.quiet < _SUDDEN or view.message != STOPPED for view in suspects)
    return suspects if worked and all(view.ended_as("stopped") for view in suspects) else []


def _frozen(running: Sequence[RankView]) -> list[RankView]:
    """Ranks whose process is stopped, as by SIGSTOP."""
    return [view for view in _suspects(running) if view.process == "stopped"]


def _behind(running: Sequence[RankView]) -> list[RankView]:
    """Ranks that have begun the fewest collectives: the others wait for them."""
    fewest = min((view.sequence for view in running), default=None)
    suspects = _suspects(running)
    return [view for view in suspects if view.sequence == fewest] or suspects


def _suspects(running: Sequence[RankView]) -> list[RankView]:
    """Ranks that did not merely lose their peers; all, if every one did."""
    return [view for view in running if not view.lost_its_peers] or list(running)


_ORDER: Final[tuple[tuple[Kind, Callable[[Sequence[RankView]], list[RankView]]], ...]] = (
    ("error", _with_an_error),
    ("lost", _gone),
    ("stopped", _stopped_at_work),
    ("stalled", _frozen),
    ("stalled", _behind),
)


def exit_code(
    verdict: Verdict, views: Mapping[int, RankView], exits: Mapping[int, int], words: str
) -> int:
    """The run's exit code. ``exits``: rank -> exit code where torchrun reported it; ``words``: what
    the blamed rank left on its stderr."""
    first = views[verdict.ranks[0]]
    if verdict.kind in ("error", "stopped") and first.status is not None:
        return first.status.code or EXIT_PREEMPTED
    if verdict.kind == "lost" and first.beat is None and words and not words_of_memory(words):
        return _code_of_a_start_that_failed(exits.get(first.rank, EXIT_BUG))
    return EXIT_RUN_FAILED


def _code_of_a_start_that_failed(code: int) -> int:
    """Of a worker that never lived: bad input has its own code, another code is our bug."""
    if code == EXIT_INPUT:
        return EXIT_INPUT
    return EXIT_BUG if code > 0 else EXIT_RUN_FAILED


def reason(
    verdict: Verdict, views: Mapping[int, RankView], exits: Mapping[int, int], words: str
) -> str:
    """One line that names the ranks, the step and the phase."""
    first = views[verdict.ranks[0]]
    who = naming(verdict.ranks)
    if verdict.kind in ("error", "stopped"):
        assert first.status is not None
        return f"{who}: {first.status.message}{_at(first.status)}"
    tail = f": {words}" if words else ""
    if verdict.kind == "lost":
        when = "before a sign of life" if first.beat is None else _without_a_word(first.beat)
        return f"{who} died {when}{_cause(exits.get(first.rank))}{tail}"
    others = tuple(sorted(set(views) - set(verdict.ranks)))
    waited = f"; {naming(others)} waited" if others else ""
    how = " (the process is stopped)" if first.process == "stopped" else ""
    seconds = f"for {verdict.waited:.0f} s{how}"
    if first.beat is None:
        return f"{who} showed no sign of life {seconds}{waited}{tail}"
    return f"{who} made no progress {seconds}; {_standstill(first.beat)}{waited}"


def naming(ranks: Sequence[int]) -> str:
    """``rank 1``, ``ranks 0, 2``."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _without_a_word(beat: Beat) -> str:
    at = beat.phase if beat.step is None else f"step {beat.step} in {beat.phase}"
    return f"without a word at {at}"


def _standstill(beat: Beat) -> str:
    step = "" if beat.step is None else f"step {beat.step}, "
    return f"{step}{beat.phase}, collective {beat.sequence}"


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


_NOISE = re.compile(r"^(\^+|~+|[-=*]{3,}|File \".*|Traceback .*|.*Warning: .*|warnings\.warn.*)$")


def last_words(log: str) -> str:
    """The last line of a log that says something; empty when none does."""
    lines = [line.strip() for line in log.splitlines()]
    said = [line for line in lines if line and not _NOISE.match(line)]
    return said[-1] if said else ""
