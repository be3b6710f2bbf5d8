"""From the end of a launched run to its outcome: code, reason, and every rank's last word.

The ``code`` of ``outcome.json`` is what the ``train`` command exits with (see
:mod:`shardwright.core.errors`).
"""

# When one rank dies all others fail within moments, and theirs is the louder message. So the order
# of blame is fixed: an error of its own, then a process that is gone without a word, then one
# asked to stop, then the one the others wait for; who only lost its peers comes last. It is
# decided from values alone (no clock, no process), which is what makes it testable. outcome.json
# is the launcher's, since rank 0 may be the one that died; torchrun's own code is always 0 or 1.

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import msgspec

from shardwright.core.document import decode_json
from shardwright.core.errors import (
    EXIT_BUG,
    EXIT_INPUT,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_RUN_FAILED,
    InputError,
    expected,
)
from shardwright.launcher.exhausted import address_space, words_of_memory
from shardwright.launcher.folder import log_file
from shardwright.launcher.heartbeat import STOPPED, Beat, RankOutcome
from shardwright.launcher.watch import RankView, RunWatch

Kind = Literal["error", "lost", "stopped", "stalled"]

_SUDDEN: Final = 1.0  # a rank that moved in its last second did not hang


@dataclass(frozen=True, slots=True)
class Blame:
    """Which ranks are to blame, and for what kind of end; ``waited``: the quietest second."""

    kind: Kind
    ranks: tuple[int, ...]
    waited: float = 0.0


def blame(views: Sequence[RankView]) -> Blame | None:
    """The verdict over ranks of a run in trouble; None when every rank finished."""
    running = [view for view in views if not view.finished]
    for kind, guilty in _ORDER:
        if found := guilty(running):
            ranks = tuple(sorted(view.rank for view in found))
            return Blame(kind, ranks, max(view.quiet for view in found))
    return None


def _with_an_error(running: Sequence[RankView]) -> list[RankView]:
    """The rank that reported an error of its own first, and those that reported the same."""
    errors = [view for view in running if view.ended_as("failed") and not view.lost_its_peers]
    if not errors:
        return []
    # By time and then by rank, so that the verdict is one whatever the order of looking.
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


# Where every rank says that it lost its peers, all are looked at, for somebody has to be named.
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
    verdict: Blame, views: Mapping[int, RankView], exits: Mapping[int, int], words: str
) -> int:
    """The run's exit code. ``exits``: rank -> exit code where torchrun reported it; ``words``: what
    the blamed rank left on its stderr."""
    first = views[verdict.ranks[0]]
    if verdict.kind in ("error", "stopped") and first.status is not None:
        return first.status.code or EXIT_PREEMPTED
    # A worker that never lived failed at importing or at its arguments: that is input or our bug,
    # while memory that ran out is the run's fault and may be tried again.
    if verdict.kind == "lost" and first.beat is None and words and not words_of_memory(words):
        code = exits.get(first.rank, EXIT_BUG)
        return EXIT_INPUT if code == EXIT_INPUT else EXIT_BUG if code > 0 else EXIT_RUN_FAILED
    return EXIT_RUN_FAILED


def reason(
    verdict: Blame, views: Mapping[int, RankView], exits: Mapping[int, int], words: str
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


OUTCOME_SCHEMA: Final = "shardwright.outcome/1"


class RunOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run's end, in one value.

    ``reason`` is one line, ready to print. ``step`` is the last step any rank reached.
    ``seconds`` is wall time from the start of torchrun to the end of the last process.
    """

    schema: Literal["shardwright.outcome/1"]
    code: int
    reason: str
    step: int | None
    world_size: int
    ranks: tuple[RankOutcome, ...]
    command: tuple[str, ...]
    seconds: float
    versions: dict[str, str]


def encode_outcome(outcome: RunOutcome) -> bytes:
    """Indented JSON with a final newline."""
    return msgspec.json.format(msgspec.json.encode(outcome), indent=2) + b"\n"


def decode_outcome(data: bytes, where: str = "outcome.json") -> RunOutcome:
    """The inverse of :func:`encode_outcome`; ``where`` names the file in the InputError."""
    try:
        return decode_json(data, RunOutcome)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(where, f"JSON of {OUTCOME_SCHEMA}", str(error)) from None


@dataclass(frozen=True, slots=True)
class End:
    """What was seen when the launcher decided to end the run: the ranks, torchrun's exit code
    (None: it was still running), the signal that stopped the launcher, and the pids that could
    not be ended. ``gone``: the run's folder was."""

    views: tuple[RankView, ...]
    torchrun: int | None
    stopped_by: int | None
    left: tuple[int, ...]
    gone: bool = False


def outcome_of(
    end: End, watch: RunWatch, command: tuple[str, ...], seconds: float, versions: dict[str, str]
) -> RunOutcome:
    """Call it when every process has ended: the logs are complete then."""
    log = _text(watch.folder / "torchrun.log")
    exits = watch.exits(log)
    final = watch.look()
    verdict = None
    if end.stopped_by is not None:
        code, why = _stopped(end.stopped_by, final)
    elif end.gone:
        words = _words_of_stopped(final)
        code, why = EXIT_RUN_FAILED, without_folder(watch.folder, _when(final), words)
    elif all(view.finished for view in end.views):
        code, why = EXIT_OK, "finished"
        if end.torchrun != 0:
            why = f"finished, though torchrun did not end well {_see(watch)}"
    else:
        verdict = _verdict(end, exits)
        code, why = _judged(verdict, end, watch, exits, log)
    if end.left:
        why += f"; could not be ended: process {', '.join(map(str, end.left))}"
    ranks = tuple(_last_word(view, verdict, why, exits) for view in final)
    steps = [rank.step for rank in ranks if rank.step is not None]
    step = max(steps, default=None)
    return RunOutcome(
        OUTCOME_SCHEMA, code, why, step, watch.world_size, ranks, command, seconds, versions
    )


def _verdict(end: End, exits: Mapping[int, int]) -> Blame | None:
    """None when only torchrun's own end is known."""
    views = end.views
    if end.torchrun is not None:
        # torchrun is gone, so every worker is gone or about to go: those never seen are lost too
        seen = any(view.status is not None for view in views)
        # Killed by a signal before any rank had a word: nothing tells a rank that failed from those
        # that went with torchrun.
        if end.torchrun < 0 and not seen:
            return None
        views = tuple(replace(v, process="gone") if v.process == "unknown" else v for v in views)
    verdict = blame(views)
    if verdict is not None and verdict.kind == "lost":
        return _first_to_go(verdict, exits, views)
    return verdict


def _judged(
    verdict: Blame | None, end: End, watch: RunWatch, exits: dict[int, int], log: str
) -> tuple[int, str]:
    place = _see(watch)
    if verdict is None:
        how = f"was killed by signal {-(end.torchrun or 0)}"
        return EXIT_RUN_FAILED, f"torchrun {how} before the ranks finished {place}"
    views = {view.rank: view for view in end.views}
    first = verdict.ranks[0]
    output = watch.output(first)
    # torchrun makes a worker's files before it starts it: without them none was started.
    if verdict.kind == "lost" and output is None:
        words = _last_words(log) or "no word in its log"
        return EXIT_RUN_FAILED, f"torchrun could not start the ranks: {words} {place}"
    said = _text(output) if output else ""
    words = ""
    if verdict.kind in ("lost", "stalled"):
        words = _last_words(said) if verdict.kind == "lost" else last_words(said)
    why = reason(verdict, views, exits, words)
    status = views[first].status
    if words:
        why += f" (see {output})"
    elif verdict.kind == "error" and status is not None and status.code == EXIT_BUG:
        why += f" (see {log_file(watch.folder, first)})"
    return exit_code(verdict, views, exits, words), why


def _first_to_go(verdict: Blame, exits: Mapping[int, int], views: Sequence[RankView]) -> Blame:
    """Of ranks without a word: those torchrun did not end itself, if any are known. One of them may
    not have been seen to go before those that it took along."""
    # torchrun ends the others with SIGTERM once one has failed: a rank with that code is a
    # consequence.
    ended = {-signal.SIGTERM, 0}
    silent = [view.rank for view in views if view.status is None]
    for ranks in (verdict.ranks, silent):
        guilty = tuple(rank for rank in ranks if exits.get(rank, 0) not in ended)
        if guilty:
            return replace(verdict, ranks=guilty)
    return verdict


def without_folder(folder: Path, when: str, words: Sequence[str] = ()) -> str:
    """That the folder of a run is not what it was; ``words`` of the ranks that were stopped."""
    found = f"one that was removed, moved or emptied{when}"
    kept = f"The ranks were {words[0]}" if words else "Nothing that was trained is left: run again."
    return expected(str(folder), "the folder of the run", found, kept)


def _when(final: list[RankView]) -> str:
    steps = [view.beat.step for view in final if view.beat and view.beat.step is not None]
    return f" at step {max(steps)}" if steps else " before the first step"


def _words_of_stopped(final: list[RankView]) -> list[str]:
    """What ranks say that were stopped between two steps."""
    return [v.message for v in final if v.ended_as("stopped") and v.message != STOPPED]


def _stopped(number: int, final: list[RankView]) -> tuple[int, str]:
    name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    at = _when(final)
    unruly = [view.rank for view in final if not _in_order(view)]
    said = _words_of_stopped(final)
    if said and not unruly:  # between two steps
        return EXIT_PREEMPTED, said[0]
    if number == signal.SIGINT:
        return EXIT_INTERRUPTED, f"stopped by {name}{at}"
    if not unruly:
        return EXIT_PREEMPTED, f"stopped by {name}{at}"
    return EXIT_RUN_FAILED, f"stopped by {name}{at}; {naming(unruly)} did not end in order"


def _in_order(view: RankView) -> bool:
    return view.status is not None and view.status.code in (EXIT_OK, EXIT_PREEMPTED)


def _last_word(
    view: RankView, verdict: Blame | None, why: str, exits: dict[int, int]
) -> RankOutcome:
    blamed = verdict is not None and view.rank in verdict.ranks
    if view.status is not None and not (blamed and verdict and verdict.kind == "stalled"):
        return view.status
    step = view.beat.step if view.beat else None
    phase = view.beat.phase if view.beat else None
    code = exits.get(view.rank)
    if blamed:
        return RankOutcome(view.rank, "lost", code, step, phase, why)
    return RankOutcome(view.rank, "stopped", code, step, phase, "ended by the launcher")


def _last_words(log: str) -> str:
    """Those of a log, but for words about what follows from memory that could not be had."""
    lacking = words_of_memory(log)
    return f"memory could not be had: {lacking}{address_space()}" if lacking else last_words(log)


def _see(watch: RunWatch) -> str:
    return f"(see {watch.folder / 'torchrun.log'})"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
