"""``shardwright memory JOB.toml``: what every rank takes, before anything runs."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import msgspec

from shardwright.cli import options as shared
from shardwright.core.document import write_atomically
from shardwright.core.errors import EXIT_NO_PLAN, EXIT_OK, InputError, expected, there_are
from shardwright.core.footprint import Footprint, RankMemory, Tracked
from shardwright.core.outputs import PICTURE, TRACE, beside, check_output
from shardwright.job.job import Job, named_files

PICTURES = {".svg": PICTURE, ".json": TRACE}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``memory``."""
    parser.epilog = (
        "Exit code 3: some ranks do not fit their capacity. JSON has the figures of those with the "
        "highest peak at the top and of all under 'ranks', identical ones once; the timeline is "
        "only in its own file."
    )
    shared.job_argument(parser)
    shared.tokens_option(parser)
    parser.add_argument("--rank", metavar="NAME", help="which ranks to show in detail")
    parser.add_argument(
        "--full",
        action="store_true",
        help="every rank, module and tensor; of what is measured, every step and module, too",
    )
    parser.add_argument(
        "--timeline",
        type=Path,
        metavar="out.svg|out.json",
        help="write the step event by event: a picture, or a Chrome trace for Perfetto",
    )
    parser.add_argument(
        "--real",
        action="store_true",
        help="also run two steps of a small model in this process and measure",
    )
    parser.add_argument(
        "--real-ranks",
        type=int,
        metavar="N",
        help="the same on N CPU ranks that share parameters: memory.runtime fsdp2 or shardwright",
    )
    shared.json_option(parser)


def execute(options: argparse.Namespace) -> int:
    """Estimate, write, show; 3 where something is known not to fit."""
    # Before minutes of tracing, as everything that can be refused by looking at options.
    _check_timeline(options.timeline)
    shared.check_tokens(options)
    job = shared.job_of(options)
    if options.timeline:
        inputs = (options.job, *named_files(job, options.job))
        check_output(options.timeline, PICTURES[options.timeline.suffix], inputs, "--timeline")
    from shardwright.cli.planning import SearchListener
    from shardwright.estimate.footprint import footprint

    with SearchListener(sys.stderr) as listener:
        found = footprint(job, details=True, rank=options.rank or "", hear=listener)
    if options.tokens and not found.time:
        wanted = "a job whose seconds are known: a preset of accelerators, and no plan"
        raise InputError(expected("--tokens", wanted, "another"))
    rank = _chosen(found, options.rank)
    if options.timeline:
        _write_timeline(found, rank, options.timeline)
    real = _rehearsed(job, options.real_ranks) if options.real or options.real_ranks else None
    if options.json:
        report = as_report(found, rank)
        if real:
            predicted, measured = real
            fullest = max(measured, key=lambda each: each.peak.bytes)
            report["real"] = {
                "predicted": as_report(predicted, predicted.worst),
                "measured": fullest if options.full else without_states(fullest),
                "peak_bytes_of_ranks": [each.peak.bytes for each in measured],
                "ratio": predicted.worst.peak_bytes / fullest.peak.bytes,
            }
        shared.print_json(report)
    else:
        _show(found, rank, real, options)
    return EXIT_NO_PLAN if found.verdict == "does not fit" else EXIT_OK


def without_states(measured: Tracked) -> Tracked:
    """What was measured but for every state of every module, which is long."""
    return msgspec.structs.replace(measured, snapshots=())


def _show(
    footprint: Footprint,
    rank: RankMemory,
    real: tuple[Footprint, list[Tracked]] | None,
    options: argparse.Namespace,
) -> None:
    from shardwright.report.memory_report import memory_report

    full = options.full
    shared.show(memory_report(footprint, rank, tokens=options.tokens, full=full))
    if real:
        from shardwright.report.memory_report import rehearsal_report

        print()
        shared.show(rehearsal_report(*real, full=full))


def _rehearsed(job: Job, ranks: int | None) -> tuple[Footprint, list[Tracked]]:
    """The job on one rank of this machine or several, estimated and measured."""
    from shardwright.estimate.rehearsal import alone, among, rehearse, rehearse_among
    from shardwright.estimate.unplanned import estimated

    here = alone(job) if ranks is None else among(job, ranks)
    predicted = estimated(here)
    if ranks is None:
        return predicted, [rehearse(here, predicted)]
    return predicted, rehearse_among(here, predicted, sys.stderr)


def as_report(footprint: Footprint, rank: RankMemory) -> dict[str, object]:
    """All of a footprint but its timeline; figures of ``rank`` at the top."""
    classes = []
    for each in footprint.ranks:
        least, most = footprint.needs(each)
        fields = msgspec.to_builtins(msgspec.structs.replace(each, kinds=(), timeline=()))
        classes.append(
            {
                **fields,
                "verdict": footprint.verdict_of(each),
                "needs_bytes": {"least": least, "most": most},
            }
        )
    return {
        **msgspec.to_builtins(msgspec.structs.replace(footprint, ranks=())),
        "verdict": footprint.verdict,
        "rank_class": rank.name,
        "peak_bytes": rank.peak_bytes,
        "peak_phase": rank.peak_phase,
        "by_category": rank.by_category,
        "reserved_bytes": rank.reserved_bytes,
        "retries": rank.retries,
        "ranks": classes,
    }


def _chosen(footprint: Footprint, name: str | None) -> RankMemory:
    if name is None:
        return footprint.worst
    for rank in footprint.ranks:
        alone = len(footprint.ranks) == 1 and name in map(str, range(rank.ranks))
        if alone or name in (rank.name, rank.name.removeprefix("rank ")):
            return rank
    known = there_are(name, [rank.name for rank in footprint.ranks])
    raise InputError(expected("--rank", "ranks by their name", f"'{name}'", known))


def _check_timeline(path: Path | None) -> None:
    if path is not None and path.suffix not in PICTURES:
        raise InputError(
            expected("--timeline", "a file that ends in .svg or .json", f"'{path.name}'")
        )


def _write_timeline(footprint: Footprint, rank: RankMemory, path: Path) -> None:
    from shardwright.report.memory_timeline import standalone, timeline_chart
    from shardwright.report.traces import chrome_trace

    if not rank.timeline:
        raise InputError(expected("--timeline", "ranks whose step was followed", f"'{rank.name}'"))
    if path.suffix == ".svg":
        text = standalone(partial(timeline_chart, footprint, rank))
    else:
        text = chrome_trace(footprint, rank)
    changed = beside(path)
    write_atomically(path, text.encode())
    print(f"timeline written to {path}{changed}", file=sys.stderr)
