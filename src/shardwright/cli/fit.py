"""``shardwright fit JOB.toml``: the largest batch and sequence that fit, and the fewest ranks."""

from __future__ import annotations

import argparse
import sys
import time

from shardwright.cli import options as shared
from shardwright.cli.planning import SearchPatience
from shardwright.core.errors import EXIT_NO_PLAN, EXIT_OK
from shardwright.core.footprint import Fit
from shardwright.planner.search.watch import Watch

QUIET = 2.0  # seconds before progress is shown
EVERY, WATCHED = 5.0, 0.2  # seconds between lines where nobody watches, and where somebody does


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fit``."""
    parser.epilog = (
        "A capacity is needed: cluster.preset, or cluster.hbm_cap. Exit code 3: nothing fits, not "
        "even perhaps, under no checkpointing policy."
    )
    shared.job_argument(parser)
    shared.json_option(parser)
    parser.add_argument("--full", action="store_true", help="everything that was tried")


def execute(options: argparse.Namespace) -> int:
    """Search and show; 3 where no policy lets a single batch fit."""
    job = shared.job_of(options)
    from shardwright.estimate.fit import fit

    progress = _Progress()
    try:
        found = fit(job, progress=progress, hear=progress.hear)
    finally:
        progress.end()
    if options.json:
        shared.print_json(found)
    else:
        from shardwright.report.fit_report import fit_report

        shared.show(fit_report(found, full=options.full))
    return EXIT_OK if anything_fits(found) else EXIT_NO_PLAN


def anything_fits(found: Fit) -> bool:
    """Whether some policy lets some batch fit, if only perhaps, as `plan` and `memory` say it."""
    rows = (row.largest_batch for row in found.policies)
    return any(largest.size or largest.next_perhaps for largest in rows)


class _Progress:
    """The last estimate on stderr: one line that is written over, or a line now and then."""

    def __init__(self) -> None:
        self._begun = self._last = time.monotonic()
        self._over = sys.stderr.isatty()
        self._shown = False
        self._estimated = ""
        self._patience = SearchPatience(
            lambda seconds: self._show(f"first estimate; preparing for {seconds:.0f} s")
        )

    def hear(self, watch: Watch) -> None:
        """Every round of a search."""
        self._patience.end()
        since = f" for {watch.elapsed:.0f} s" if watch.elapsed >= 1 else ""
        self._show(f"{self._estimated or 'first estimate'}; planning{since}")

    def __call__(self, text: str) -> None:
        self._patience.end()
        self._estimated = text
        self._show(text)

    def _show(self, text: str) -> None:
        now = time.monotonic()
        if now - self._begun < QUIET or now - self._last < (WATCHED if self._over else EVERY):
            return
        self._last, self._shown = now, True
        print(f"\r\x1b[K{text}" if self._over else text, end="", file=sys.stderr, flush=True)
        if not self._over:
            print(file=sys.stderr)

    def end(self) -> None:
        """Wipe the line."""
        self._patience.end()
        if self._shown and self._over:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
