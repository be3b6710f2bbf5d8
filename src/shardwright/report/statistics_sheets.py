"""What a plan adds up to as sheets and lines of text. TorchRec's names stand beside our own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardwright.core.quantities import format_bytes, format_seconds
from shardwright.core.sharding import traits
from shardwright.core.timeline import category
from shardwright.job.plan import Plan
from shardwright.planner.statistics.records import (
    Bottleneck,
    Measure,
    MemoryLedger,
    MemoryPrice,
    RankStatistics,
    Statistics,
)
from shardwright.report.plan_sheets import MOST_RANKS, alike, worst
from shardwright.report.sheet import Column, Sheet
from shardwright.report.wording import percent, printable, ranks_text

MEASURE_WORDS: dict[Measure, str] = {
    "seconds": "seconds",
    "hbm_bytes": "HBM",
    "ddr_bytes": "DDR",
    "ssd_bytes": "SSD",
}
PART_TITLES = {
    "fwd_compute": "forward\ncompute",
    "fwd_comms": "forward\ncomms",
    "bwd_compute": "backward\ncompute",
    "bwd_comms": "backward\ncomms",
    "exchange_ids": "exchange\nids",
    "exchange_rows": "exchange\nrows",
}
LEDGER_WORDS = {
    "set_aside": "set aside by the reservation",
    "dense": "reserved for dense parameters",
    "inputs": "reserved for the inputs of a step",
    "free": "free",
}
NOISE = 1e-9  # shares below this are rounding
LEAST_SHARE = 1e-3  # of a rank that is worth a line


def times_sheet(plan: Plan, statistics: Statistics, most: int = MOST_RANKS) -> Sheet:
    """Seconds by part, waiting, traffic and shards of each rank; alike ranks share a row."""
    parts = [part.part for part in statistics.parts if part.seconds]
    waits = any(rank.idle_seconds for rank in statistics.ranks)
    routed = bool(plan.tables)
    rows = [(rank.rank, _times_row(rank, parts, waits, routed)) for rank in statistics.ranks]
    groups, more = alike(rows), ""
    if len(groups) > most:
        groups = worst(plan, groups, most)
        more = f" Of {plan.world_size} ranks the fullest and slowest are shown."
    traffic = (
        Column("ids in", numeric=True),
        Column("rows out", numeric=True),
        Column("shards"),
    )
    legend = f"Bytes are those of one step. {_letters(statistics)}.{more}"
    return Sheet(
        "Time and traffic per rank" if routed else "Time per rank",
        (
            Column("rank"),
            Column("s/step", numeric=True),
            *(Column(PART_TITLES.get(part, part), numeric=True) for part in parts),
            *((Column("waits", numeric=True),) if waits else ()),
            *(traffic if routed else ()),
        ),
        tuple((ranks_text(ranks, plan.world_size), *row) for row, ranks in groups),
        legend if routed else more.strip(),
    )


def _times_row(
    rank: RankStatistics, parts: Sequence[str], waits: bool, routed: bool
) -> tuple[str, ...]:
    shards = ", ".join(f"{traits(kind).letters} {count:,}" for kind, count in rank.shards.items())
    traffic = (format_bytes(rank.input_bytes), format_bytes(rank.output_bytes), shards or "none")
    return (
        format_seconds(rank.seconds),
        *(format_seconds(rank.parts.get(part, 0.0)) for part in parts),
        *((format_seconds(rank.idle_seconds),) if waits else ()),
        *(traffic if routed else ()),
    )


def _letters(statistics: Statistics) -> str:
    kinds = dict.fromkeys(kind for rank in statistics.ranks for kind in rank.shards)
    letters = ", ".join(f"{traits(kind).letters} {kind}" for kind in kinds)
    return f"Shards by type: {letters or 'none'}"


def evenness_sheet(plan: Plan, statistics: Statistics) -> Sheet:
    """Least, medians, mean and most of seconds and bytes, and the measures of imbalance."""
    rows = []
    for spread, uneven in zip(statistics.spreads, statistics.unevenness, strict=True):
        rows.append(
            (
                MEASURE_WORDS[spread.of],
                _amount(spread.of, spread.smallest),
                _amount(spread.of, spread.low_median),
                _amount(spread.of, spread.high_median),
                _amount(spread.of, spread.mean),
                _amount(spread.of, spread.largest),
                ranks_text(spread.largest_ranks, plan.world_size),
                percent(_quiet(spread.largest / spread.mean - 1), signed=True),
                f"{_quiet(uneven.largest_deviation):.3f}",
                f"{_quiet(uneven.total_distance):.3f}",
                f"{_quiet(uneven.chi):.3f}",
                f"{_quiet(uneven.relative_entropy):.3f}",
            )
        )
    highest = (plan.world_size - 1) / plan.world_size
    return Sheet(
        "How evenly it lies on the ranks",
        (
            Column("of"),
            Column("least", numeric=True),
            Column("low\nmedian", numeric=True),
            Column("high\nmedian", numeric=True),
            Column("mean", numeric=True),
            Column("most", numeric=True),
            Column("on rank"),
            Column("over mean", numeric=True),
            Column("largest\ndeviation", numeric=True),
            Column("total\ndistance", numeric=True),
            Column("chi", numeric=True),
            Column("entropy", numeric=True),
        ),
        tuple(rows),
        f"Each rank's share against 1/{plan.world_size}; 0 is even. The largest deviation "
        f"(TorchRec: total variation) is at most {highest:.4g}, the sum of all (total distance) at "
        f"most {2 * highest:.4g}; chi-square (chi divergence) and relative entropy (KL divergence) "
        "are 1 where one rank has all.",
    )


def _quiet(share: float) -> float:
    return share if abs(share) > NOISE else 0.0


def _amount(of: Measure, value: float) -> str:
    return format_seconds(value) if of == "seconds" else format_bytes(value)


def tiers_sheet(plan: Plan, statistics: Statistics) -> Sheet:
    """The fullest ranks, those within 1 MiB of each other together."""
    rows = (
        (str(n), format_bytes(t.nbytes), f"{t.nbytes:,}", ranks_text(t.ranks, plan.world_size))
        for n, t in enumerate(statistics.peak_tiers, start=1)
    )
    return Sheet(
        f"Fullest ranks, {statistics.decisive.upper()}",
        (
            Column("tier"),
            Column("most", numeric=True),
            Column("bytes", numeric=True),
            Column("rank"),
        ),
        tuple(rows),
        "A tier is the ranks within 1 MiB of its fullest one.",
    )


def ledger_sheet(ledger: MemoryLedger) -> Sheet:
    """Where every byte of a memory goes on its fullest rank."""
    share = {line.what: line.nbytes / ledger.capacity for line in ledger.lines if ledger.capacity}
    rows = [
        (
            LEDGER_WORDS.get(line.what) or category(line.what),
            format_bytes(line.nbytes),
            f"{line.nbytes:,}",
            percent(share.get(line.what, 0.0)),
        )
        for line in ledger.lines
    ]
    total = ("capacity", format_bytes(ledger.capacity), f"{ledger.capacity:,}", "100.0 %")
    return Sheet(
        f"Where the {ledger.tier.upper()} of rank {ledger.rank} goes, the fullest",
        (
            Column("what"),
            Column("size", numeric=True),
            Column("bytes", numeric=True),
            Column("share", numeric=True),
        ),
        (*rows, total),
        "The lines sum to the capacity.",
    )


def bottlenecks_sheet(plan: Plan, statistics: Statistics) -> Sheet:
    """The tables that take most of the slowest and of the fullest rank."""
    rows = [row for found in statistics.bottlenecks for row in _bottleneck_rows(found)]
    return Sheet(
        "What the worst ranks hold",
        (
            Column("most"),
            Column("rank"),
            Column("table"),
            Column("sharding"),
            Column("takes", numeric=True),
            Column("share", numeric=True),
        ),
        tuple(rows),
        f"{' '.join(_worst(plan, b) for b in statistics.bottlenecks)} Shares are of what that rank "
        "has in all.",
    )


def _worst(plan: Plan, found: Bottleneck) -> str:
    word = MEASURE_WORDS[found.of]
    if len(found.ranks) == 1:
        return f"Rank {found.rank} has most {word}."
    if len(found.ranks) == plan.world_size:
        return f"All ranks have equal {word}."
    return f"Ranks {ranks_text(found.ranks, plan.world_size)} have most {word}."


def _bottleneck_rows(found: Bottleneck) -> Iterable[tuple[str, ...]]:
    for number, table in enumerate(found.tables):
        share = table.amount / found.total if found.total else 0.0
        if share >= LEAST_SHARE or not number:
            yield (
                MEASURE_WORDS[found.of],
                str(found.rank),
                printable(table.name),
                printable(table.sharding_type),
                _amount(found.of, table.amount),
                percent(share),
            )


def parts_sheet(plan: Plan, statistics: Statistics) -> Sheet:
    """The most and the mean that ranks spend on each part."""
    rows = tuple(
        (
            part.part,
            format_seconds(part.seconds),
            ranks_text(part.ranks, plan.world_size),
            format_seconds(part.mean),
            percent(_quiet(part.seconds / part.mean - 1), signed=True) if part.mean else "",
        )
        for part in statistics.parts
    )
    path = statistics.critical_path
    return Sheet(
        "Parts of a step",
        (
            Column("part"),
            Column("most", numeric=True),
            Column("on rank"),
            Column("mean", numeric=True),
            Column("over mean", numeric=True),
        ),
        rows,
        f"The sum of the maxima is {format_seconds(statistics.sum_of_maxima)}; the slowest rank is "
        f"{percent(_quiet(statistics.excess))} above the mean. The critical path takes "
        f"{format_seconds(path.seconds)}: {format_seconds(path.communication)} of communication "
        f"and {format_seconds(path.compute)} of compute.",
    )


def critical_sheet(statistics: Statistics) -> Sheet:
    """The terms of the critical path."""
    rows = tuple(
        (
            printable(term.name),
            "communication" if term.communication else "compute",
            format_seconds(term.seconds),
            str(term.rank),
        )
        for term in statistics.critical_path.terms
    )
    return Sheet(
        "Critical path",
        (Column("term"), Column("kind"), Column("seconds", numeric=True), Column("slowest rank")),
        rows,
        "What all ranks wait for together: each term takes as long as on its slowest rank.",
    )


def waiting_lines(statistics: Statistics) -> tuple[str, ...]:
    """What the ranks wait for, and where the slowest rank loses."""
    waiting, ranks = statistics.waiting, statistics.ranks
    if not waiting.mean_seconds:
        return ("No rank waits for another.",)
    slowest = ranks[waiting.slowest].seconds
    lines = [
        f"Ranks wait for rank {waiting.slowest}: {format_seconds(waiting.mean_seconds)} on average "
        f"({percent(waiting.mean_seconds / slowest)} of a step), rank {waiting.longest} longest "
        f"with {format_seconds(waiting.longest_seconds)}."
    ]
    if waiting.part:
        lines.append(
            f"Rank {waiting.slowest} loses most in {printable(waiting.part)}: "
            f"{format_seconds(waiting.part_seconds)} against {format_seconds(waiting.part_mean)} "
            "on average."
        )
    return tuple(lines)


def price_line(prices: Sequence[MemoryPrice], proved: float = 0.0) -> str:
    """What more memory would buy; where the search ``proved`` more than the relaxation, of that."""
    if not prices:
        return "There are no tables: the bound does not depend on memory."
    worth = [price for price in prices if price.bound_falls]
    if not worth and proved:
        return (
            "More memory per rank would not lower the bound of shards spread at will; what single "
            "ranks hold may matter."
        )
    if not worth:
        return "More memory per rank would not lower the bound: memory is not what limits it."
    bound = "the bound of shards spread at will" if proved else "the bound"
    parts = [
        f"one more GiB of {price.tier.upper()} per rank would lower {bound} by "
        f"{format_seconds(price.bound_falls)}"
        for price in worth
    ]
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def skipped_lines(plan: Plan) -> tuple[str, ...]:
    """What the search did not try, and why."""
    return tuple(printable(why) for why in plan.search.skipped)
