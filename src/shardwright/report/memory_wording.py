"""What a footprint says, in the words of people who do not read our code."""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.core.footprint import Footprint, RankMemory, Verdict
from shardwright.core.quantities import format_bytes
from shardwright.core.timeline import Kind, category
from shardwright.report.wording import counted, printable

MOST_NAMED = 3  # categories that a sentence names
BILLION, MILLION = 10**9, 10**6


def count_text(number: int) -> str:
    """How many parameters: ``8.03 billion``."""
    if number >= BILLION:
        return f"{number / BILLION:.2f} billion"
    return f"{number / MILLION:.2f} million" if number >= MILLION else f"{number:,}"


def range_text(low: int, high: int) -> str:
    """``286.10 to 476.84 MiB``; one figure where both ends read alike."""
    first, last = format_bytes(low), format_bytes(high)
    if first == last:
        return first
    shared = first.split(" ")[1] == last.split(" ")[1]
    return f"{first.split(' ')[0] if shared else first} to {last}"


def headline(footprint: Footprint) -> str:
    """Whose memory it is, in one line."""
    parameters = f"{count_text(footprint.parameters)} parameters"
    model = printable(footprint.model)
    return f"{model}: {parameters} on {counted(footprint.world_size, 'rank')}"


def settings_lines(footprint: Footprint) -> tuple[str, ...]:
    """Degrees and settings, as ``name value`` lists."""
    degrees = [f"{_spaced(name)} {size}" for name, size in footprint.parallel.items() if size > 1]
    settings = [f"{_spaced(name)} {printable(s)}" for name, s in footprint.settings.items() if s]
    return tuple(", ".join(line) for line in (degrees, settings) if line)


def _spaced(name: str) -> str:
    return printable(name.replace("_", " "))


def class_text(footprint: Footprint, rank: RankMemory) -> str:
    """Which ranks are meant: ``each of 8 ranks``, ``rank class 'stage 0' (4 ranks)``."""
    if len(footprint.ranks) > 1:
        return f"rank class '{printable(rank.name)}' ({counted(rank.ranks, 'rank')})"
    return "each rank" if rank.ranks > 1 else "the rank"


def peak_text(rank: RankMemory) -> str:
    """Where most is alive: ``backward of layers.30``, or the phase alone."""
    at = next((phase.at for phase in rank.phases if phase.phase == rank.peak_phase), "")
    phase = printable(rank.peak_phase)
    return f"{phase}, {printable(at)}" if at else phase


def largest_text(by_category: Mapping[Kind, int], most: int = MOST_NAMED) -> str:
    """The largest categories with their bytes: ``activations 61.20 GiB, ...``."""
    largest = sorted(by_category.items(), key=lambda item: -item[1])[:most]
    return ", ".join(f"{category(kind)} {format_bytes(n)}" for kind, n in largest if n > 0)


def verdict_sentence(footprint: Footprint) -> str:
    """Whether it fits, by how much, or which ranks do not and what fills them."""
    verdict = footprint.verdict
    if verdict == "unknown" or footprint.capacity is None:
        return (
            "No capacity is known, so nothing is said about fitting: name cluster.preset or "
            "cluster.hbm_cap."
        )
    capacity = format_bytes(footprint.capacity)
    fullest = max(footprint.ranks, key=lambda rank: footprint.needs(rank)[1])
    if verdict == "fits":
        left = footprint.capacity - footprint.needs(fullest)[1]
        return f"Fits {capacity} with {format_bytes(left)} to spare."
    rank = footprint.worst if verdict == "does not fit" else fullest
    least, most = footprint.needs(rank)
    who = class_text(footprint, rank)
    if verdict == "perhaps":
        return (
            f"Perhaps fits: {who} needs {range_text(least, most)} of {capacity}. It hangs on what "
            "the allocator keeps and what else is on the device."
        )
    return (
        f"Does not fit: {who} needs {format_bytes(least)} of {capacity}, "
        f"{format_bytes(least - footprint.capacity)} too much, in {peak_text(rank)}. "
        f"The largest are {largest_text(rank.by_category)}."
    )


VERDICT_STYLES: dict[Verdict, str] = {
    "fits": "bold green",
    "perhaps": "bold yellow",
    "does not fit": "bold red",
    "unknown": "bold",
}
