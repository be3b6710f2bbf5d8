"""From the end of a launched run to its outcome: code, reason, and every rank's last word."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardwright.core.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_RUN_FAILED,
    expected,
)
from shardwright.launcher.exhausted import address_space, words_of_memory
from shardwright.launcher.folder import log_file
from shardwright.launcher.outcome import OUTCOME_SCHEMA, STOPPED, Outcome, RankOutcome
from shardwright.launcher.verdict import (
    Verdict,
    blame,
    exit_code,
    last_words,
    naming,
    reason,
)
from shardwright.launcher.watch import RankView, Watch


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
    end: End, watch: Watch, command: tuple[str, ...], seconds: float, versions: dict[str, str]
) -> Outcome:
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
    return Outcome(
        OUTCOME_SCHEMA, code, why, step, watch.world_size, ranks, command, seconds, versions
    )


def _verdict(end: End, exits: Mapping[int, int]) -> Verdict | None:
    """None when only torchrun's own end is known."""
    views = end.views
    if end.torchrun is not None:
        # torchrun is gone, so every worker is gone or about to go: those never seen are lost too
        seen = any(view.status is not None for view in views)
        if end.torchrun < 0 and not seen:
            return None
        views = tuple(replace(v, process="gone") if v.process == "unknown" else v for v in views)
    verdict = blame(views)
    if verdict is not None and verdict.kind == "lost":
        return _first_to_go(verdict, exits, views)
    return verdict


def _judged(
    verdict: Verdict | None, end: End, watch: Watch, exits: dict[int, int], log: str
) -> tuple[int, str]:
    place = _see(watch)
    if verdict is None:
        how = f"was killed by signal {-(end.torchrun or 0)}"
        return EXIT_RUN_FAILED, f"torchrun {how} before the ranks finished {place}"
    views = {view.rank: view for view in end.views}
    first = verdict.ranks[0]
    output = watch.output(first)
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


def _first_to_go(verdict: Verdict, exits: Mapping[int, int], views: Sequence[RankView]) -> Verdict:
    """Of ranks without a word: those torchrun did not end itself, if any are known. One of them may
    not have been seen to go before those that it took along."""
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
    view: RankView, verdict: Verdict | None, why: str, exits: dict[int, int]
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


def _see(watch: Watch) -> str:
    return f"(see {watch.folder / 'torchrun.log'})"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
