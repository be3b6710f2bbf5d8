"""What a plan adds up to as sheets and lines of text. TorchRec's names stand beside our own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from shardwright.core.quantities import format_bytes, format_seconds
from shardwright.core.sharding import traits
from shardwright.core.timeline import category
from shardwright.job.plan import Plan
from shardwright.planner.statistics.records import (
    MEASURE_WORDS,
    Bottleneck,
    Measure,
    MemoryLedger,
    MemoryPrice,
    RankStatistics,
    Statistics,
    TableShare,
)
from shardwright.report.plan_sheets import MOST_RANKS, by_rank
from shardwright.report.sheet import Cell, Sheet, number, sheet_of, text
from shardwright.report.wording import percent, printable, ranks_text

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
    routed = bool(plan.tables)
    cells: list[Cell[RankStatistics]] = [
        number("s/step", lambda rank: format_seconds(rank.seconds)),
        *(seconds_of(part.part) for part in statistics.parts if part.seconds),
    ]
    if any(rank.idle_seconds for rank in statistics.ranks):
        cells.append(number("waits", lambda rank: format_seconds(rank.idle_seconds)))
    if routed:
        cells += [
            number("ids in", lambda rank: format_bytes(rank.input_bytes)),
            number("rows out", lambda rank: format_bytes(rank.output_bytes)),
            text("shards", _shards),
        ]
    title, legend = "Time per rank", ""
    if routed:
        title = "Time and traffic per rank"
        legend = f"Bytes are those of one step. {_letters(statistics)}."
    sheet, more = by_rank(plan, title, {rank.rank: rank for rank in statistics.ranks}, cells, most)
    return replace(sheet, note=f"{legend}{more}".strip())


def seconds_of(part: str) -> Cell[Any]:
    """Seconds that ranks, or tables, spend on a part of a step."""
    return number(
        PART_TITLES.get(part, part), lambda each: format_seconds(each.parts.get(part, 0.0))
    )


def _shards(rank: RankStatistics) -> str:
    counts = (f"{traits(kind).letters} {count:,}" for kind, count in rank.shards.items())
    return ", ".join(counts) or "none"


def _letters(statistics: Statistics) -> str:
    kinds = dict.fromkeys(kind for rank in statistics.ranks for kind in rank.shards)
    letters = ", ".join(f"{traits(kind).letters} {kind}" for kind in kinds)
    return f"Shards by type: {letters or 'none'}"


def evenness_sheet(plan: Plan, statistics: Statistics) -> Sheet:
    """Least, medians, mean and most of seconds and bytes, and the measures of imbalance."""
    # What one rank with everything comes to: without it nobody knows whether 0.4 is much.
    highest = (plan.world_size - 1) / plan.world_size
    return sheet_of(
        "How evenly it lies on the ranks",
        list(zip(statistics.spreads, statistics.unevenness, strict=True)),
        (
            text("of", lambda each: MEASURE_WORDS[each[0].of]),
            number("least", lambda each: _amount(each[0].of, each[0].smallest)),
            number("low\nmedian", lambda each: _amount(each[0].of, each[0].low_median)),
            number("high\nmedian", lambda each: _amount(each[0].of, each[0].high_median)),
            number("mean", lambda each: _amount(each[0].of, each[0].mean)),
            number("most", lambda each: _amount(each[0].of, each[0].largest)),
            text("on rank", lambda each: ranks_text(each[0].largest_ranks, plan.world_size)),
            number("over mean", lambda each: _over(each[0].largest, each[0].mean)),
            number("largest\ndeviation", lambda each: _share(each[1].largest_deviation)),
            number("total\ndistance", lambda each: _share(each[1].total_distance)),
            number("chi", lambda each: _share(each[1].chi)),
            number("entropy", lambda each: _share(each[1].relative_entropy)),
        ),
        f"Each rank's share against 1/{plan.world_size}; 0 is even. The largest deviation "
        f"(TorchRec: total variation) is at most {highest:.4g}, the sum of all (total distance) at "
        f"most {2 * highest:.4g}; chi-square (chi divergence) and relative entropy (KL divergence) "
        "are 1 where one rank has all.",
    )


def _quiet(share: float) -> float:
    # The same doubles summed in another order differ in the last bits: ranks that are even would be
    # shown as above or below.
    return share if abs(share) > NOISE else 0.0


def _share(share: float) -> str:
    return f"{_quiet(share):.3f}"


def _over(most: float, mean: float) -> str:
    """How far the most is above the mean."""
    return percent(_quiet(most / mean - 1), signed=True)


def _amount(of: Measure, value: float) -> str:
    return format_seconds(value) if of == "seconds" else format_bytes(value)


def tiers_sheet(plan: Plan, statistics: Statistics) -> Sheet:
    """The fullest ranks, those within 1 MiB of each other together."""
    return sheet_of(
        f"Ranks by peak, {statistics.decisive.upper()}",
        list(enumerate(statistics.peak_tiers, start=1)),
        (
            text("tier", lambda each: str(each[0])),
            number("most", lambda each: format_bytes(each[1].nbytes)),
            number("bytes", lambda each: f"{each[1].nbytes:,}"),
            text("rank", lambda each: ranks_text(each[1].ranks, plan.world_size)),
        ),
        "A tier is the ranks within 1 MiB of its highest one.",
    )


def ledger_sheet(ledger: MemoryLedger) -> Sheet:
    """Where every byte of a memory goes on its fullest rank."""
    lines = [
        (LEDGER_WORDS.get(line.what) or category(line.what), line.nbytes) for line in ledger.lines
    ]
    return sheet_of(
        f"Where the {ledger.tier.upper()} of rank {ledger.rank} goes",
        [*lines, ("capacity", ledger.capacity)],
        (
            text("what", lambda line: line[0]),
            number("size", lambda line: format_bytes(line[1])),
            number("bytes", lambda line: f"{line[1]:,}"),
            number(
                "share", lambda line: percent(line[1] / ledger.capacity if ledger.capacity else 0.0)
            ),
        ),
        "The rank that needs most of it. The lines sum to the capacity.",
    )


def bottlenecks_sheet(plan: Plan, statistics: Statistics) -> Sheet:
    """The tables that take most of the slowest and of the fullest rank."""
    return sheet_of(
        "What the worst ranks hold",
        [
            (found, table, share)
            for found in statistics.bottlenecks
            for table, share in _largest(found)
        ],
        (
            text("most", lambda each: MEASURE_WORDS[each[0].of]),
            text("rank", lambda each: str(each[0].rank)),
            text("table", lambda each: printable(each[1].name)),
            text("sharding", lambda each: printable(each[1].sharding_type)),
            number("takes", lambda each: _amount(each[0].of, each[1].amount)),
            number("share", lambda each: percent(each[2])),
        ),
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


def _largest(found: Bottleneck) -> Iterator[tuple[TableShare, float]]:
    """Tables with their shares of what the rank has in all; small ones but for the first not."""
    for place, table in enumerate(found.tables):
        share = table.amount / found.total if found.total else 0.0
        if share >= LEAST_SHARE or not place:
            yield table, share


def parts_sheet(plan: Plan, statistics: Statistics) -> Sheet:
    """The most and the mean that ranks spend on each part."""
    path = statistics.critical_path
    return sheet_of(
        "Parts of a step",
        statistics.parts,
        (
            text("part", lambda part: part.part),
            number("most", lambda part: format_seconds(part.seconds)),
            text("on rank", lambda part: ranks_text(part.ranks, plan.world_size)),
            number("mean", lambda part: format_seconds(part.mean)),
            number("over mean", lambda part: _over(part.seconds, part.mean) if part.mean else ""),
        ),
        f"The sum of the maxima is {format_seconds(statistics.sum_of_maxima)}; the slowest rank is "
        f"{percent(_quiet(statistics.excess))} above the mean. The critical path takes "
        f"{format_seconds(path.seconds)}: {format_seconds(path.communication)} of communication "
        f"and {format_seconds(path.compute)} of compute.",
    )


def critical_sheet(statistics: Statistics) -> Sheet:
    """The terms of the critical path."""
    return sheet_of(
        "Critical path",
        statistics.critical_path.terms,
        (
            text("term", lambda term: printable(term.name)),
            text("kind", lambda term: "communication" if term.communication else "compute"),
            number("seconds", lambda term: format_seconds(term.seconds)),
            text("slowest rank", lambda term: str(term.rank)),
        ),
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
