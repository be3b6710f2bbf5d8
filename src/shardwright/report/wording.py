"""Numbers and names as people read them: plain text, the same in a terminal and on a page;
what a footprint says.

Names come from files that anyone may have written, so :func:`printable` stands before every one.
"""

# Names and messages come from files that anybody may have written, and end in a terminal, where
# control characters move the cursor, and direction marks make text read as something else. So
# `printable` stands before each of them, and only there is it decided what a character may be.
# Verdicts are worded here for every command, so that two never say the same in two ways.

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence

from shardwright.core.footprint import Footprint, Largest, RankMemory, StepTime, Verdict, verdict_of
from shardwright.core.measurement import Saved, Straggler
from shardwright.core.placement import BlockShard, Flat, Owned, Placement, Replicate, Shard
from shardwright.core.quantities import counted, format_bytes, format_seconds
from shardwright.core.timeline import Kind, category, stretches

NAME_LIMIT = 120
TEXT_LIMIT = 2000
_MOST_STRETCHES = 5
NO_BREAK = "\u00a0"  # a blank at which no line ends


def printable(text: str, limit: int = NAME_LIMIT) -> str:
    """``text`` on one line without control, direction or unassigned characters.

    Those become U+FFFD, white space becomes a blank, and what is longer than ``limit`` loses its
    middle. Markup is left alone: whoever builds markup escapes it.
    """
    if len(text) <= limit:
        return _cleaned(text)
    # Cut before it is cleaned: a text of a megabyte costs no more than its ends.
    half = limit // 2 - 1
    return f"{_cleaned(text[:half])}…{_cleaned(text[-half:])}"


def unbroken(text: str) -> str:
    """``text`` whose words stay on one line: a figure and its unit."""
    return text.replace(" ", NO_BREAK)


def _cleaned(text: str) -> str:
    return text if text.isprintable() else "".join(map(_printable, text))


def _printable(character: str) -> str:
    if character.isspace():
        return " "
    # All of category C: control, format (direction marks are), surrogates, private and unassigned.
    return "\ufffd" if unicodedata.category(character).startswith("C") else character


def shortened(text: str, width: int) -> str:
    """``text`` in at most ``width`` characters, the middle left out."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def ranks_text(ranks: Iterable[int], world_size: int) -> str:
    """Distinct ranks in few characters: ``all``, ``0-1, 5``, ``32 of 64``; ``none`` without any."""
    distinct = sorted(set(ranks))
    if not distinct:
        return "none"
    if world_size > 1 and (distinct[0], distinct[-1]) == (0, len(distinct) - 1) == (
        0,
        world_size - 1,
    ):
        return "all"
    found = list(stretches(distinct))
    if len(found) > _MOST_STRETCHES:
        return f"{len(distinct)} of {world_size}"
    return ", ".join(f"{a}" if n == 1 else f"{a}-{a + n - 1}" for a, n in found)


def shards_text(sizes: Sequence[tuple[int, int]], replicated: bool = False) -> str:
    """Shard sizes, equal ones counted: ``2 x 200,000 x 16``; different sizes on their own lines."""
    counts: dict[tuple[int, int], int] = {}
    for size in sizes:
        counts[size] = counts.get(size, 0) + 1
    if replicated and len(counts) == 1:
        return f"{size_text(*sizes[0])} each"
    if len(counts) > 3:
        return f"{len(sizes)} up to {size_text(*max(counts))}"
    return "\n".join(
        size_text(*size) if count == 1 else f"{count} x {size_text(*size)}"
        for size, count in counts.items()
    )


def size_text(rows: int, columns: int) -> str:
    """``200,000 x 16``."""
    return f"{rows:,} x {columns:,}"


def placement_text(placement: Placement) -> str:
    """A placement in the words of people who do not read our code."""
    match placement:
        case Replicate():
            return "replicated"
        case Flat():
            return "sharded (flat)"
        case Shard(dim):
            return f"sharded ({_dim_word(dim)})"
        case Owned(rank):
            return f"whole on rank {rank}"
        case BlockShard(size, dim):
            return f"sharded (blocks of {size} {_dim_word(dim)})"


def _dim_word(dim: int) -> str:
    return {0: "rows", 1: "columns"}.get(dim, f"dimension {dim}")


def percent(share: float, signed: bool = False) -> str:
    """``3.1 %``; two digits where one would round to nothing, none from 1000 % on; ``<0.01 %``."""
    value = share * 100
    if 0 < abs(value) < 0.005:
        return "<0.01 %"
    digits = 0 if abs(value) >= 1000 else 2 if 0 < abs(value) < 0.1 else 1
    if value == 0:
        return "0 %"
    return f"{value:+,.{digits}f} %" if signed else f"{value:,.{digits}f} %"


def error_text(predicted: float | None, measured: float | None) -> str:
    """``(predicted - measured) / measured``: ``+3.5 %``; ``equal`` where they are, ``-`` where it
    cannot be said."""
    if predicted is None or measured is None:
        return "-"
    if predicted == measured:
        return "equal"
    return change_text(predicted / measured - 1) if measured else "-"


def change_text(share: float) -> str:
    """A share with its sign, and of one that is not none but rounds to it that it is small."""
    text = percent(share, signed=True)
    return f"<{text[1:].replace('0.00', '0.01')}" if share and text[1:] == "0.00 %" else text


def unit_words(unit: str) -> str:
    """A unit of a constant as a reader knows it: ``touches`` are of a row, read or written."""
    return "row accesses" if unit == "touches" else unit


def slower_text(predicted: float, measured: float) -> str:
    """How a measured time is beside a predicted one, in words: ``12 % slower than predicted``,
    ``7 times slower than predicted``."""
    # Percent of what is far too small all look alike (-89 %, -99 %), while a factor says how far
    # off it is on both sides.
    if not predicted or not measured or predicted == measured:
        return "as predicted"
    ratio = max(predicted, measured) / min(predicted, measured)
    word = "slower" if measured > predicted else "faster"
    share = percent(abs(measured / predicted - 1))
    return f"{f'{two_digits(ratio)} times' if ratio >= TIMES else share} {word} than predicted"


TIMES = 2.0  # from this factor on it is told as one


def signed_bytes(difference: float) -> str:
    """A difference in bytes, to the byte: ``+1,024 B``, ``equal``."""
    return "equal" if difference == 0 else f"{difference:+,.0f} B"


def seconds_text(seconds: float | None) -> str:
    """A duration, or a dash."""
    return "-" if seconds is None else format_seconds(seconds)


MOST_NAMED = 3  # categories that a sentence names
BILLION, MILLION = 10**9, 10**6


def saved_text(saved: Saved) -> str:
    """What saving took, and from where the run went on."""
    parts = [f"saved {counted(saved.count, 'time')}"]
    if saved.count:
        parts.append(f"{format_bytes(saved.nbytes)} in {seconds_text(saved.seconds)}")
    parts.append(f"training stood still for {seconds_text(saved.stall_seconds)}")
    if saved.failed:
        parts.append(f"{counted(saved.failed, 'save')} failed")
    if saved.resumed:
        steps = ", ".join(map(str, saved.resumed[-_MOST_STRETCHES:]))
        parts.append(f"resumed {counted(len(saved.resumed), 'time')}, after step {steps}")
    return "; ".join(parts)


def straggler_text(late: Straggler) -> str:
    """The rank that the others waited for."""
    own, others = seconds_text(late.seconds), seconds_text(late.others)
    return f"rank {late.rank} is a straggler: {own} of work in a step, the others {others}"


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
    # The unit once where both have the same one.
    shared = first.split(" ")[1] == last.split(" ")[1]
    return f"{first.split(' ')[0] if shared else first} to {last}"


def headline(footprint: Footprint) -> str:
    """Whose memory it is, in one line."""
    parameters = f"{count_text(footprint.parameters)} parameters"
    if footprint.frozen:
        trained = count_text(footprint.parameters - footprint.frozen)
        parameters += f", {trained} of them trained,"
    model = printable(footprint.model)
    return f"{model}: {parameters} on {counted(footprint.world_size, 'rank')}"


# Settings whose keys are no words of the field.
SETTINGS = {"lowering": "kernels of"}


def settings_lines(footprint: Footprint) -> tuple[str, ...]:
    """Settings, dtypes first, and degrees, as ``name value`` lists."""
    degrees = [f"{_spaced(name)} {size}" for name, size in footprint.parallel.items() if size > 1]
    settings = [
        f"{SETTINGS.get(name) or _spaced(name)} {printable(setting)}"
        for name, setting in footprint.settings.items()
        if setting and (name, setting) != ("sequence", "1")
    ]
    return tuple(", ".join(line) for line in (settings, degrees) if line)


def _spaced(name: str) -> str:
    return printable(name.replace("_", " "))


def class_text(footprint: Footprint, rank: RankMemory) -> str:
    """Which ranks are meant: ``each rank``, ``stage 0 (4 identical ranks)``."""
    if len(footprint.ranks) > 1:
        alike = f" ({rank.ranks:,} identical ranks)" if rank.ranks > 1 else ""
        return f"{printable(rank.name)}{alike}"
    return "each rank" if rank.ranks > 1 else "the rank"


def peak_text(rank: RankMemory) -> str:
    """Where most is alive: ``backward of layers.30``, or the phase alone."""
    at = next((phase.at for phase in rank.phases if phase.phase == rank.peak_phase), "")
    phase = printable(rank.peak_phase)
    return f"{phase}, {printable(at)}" if at else phase


def largest_text(by_category: Mapping[Kind, int]) -> str:
    """The largest categories with their bytes: ``activations 61.20 GiB, ...``."""
    largest = sorted(by_category.items(), key=lambda item: -item[1])[:MOST_NAMED]
    return ", ".join(f"{category(kind)} {format_bytes(n)}" for kind, n in largest if n > 0)


def verdict_sentence(footprint: Footprint) -> str:
    """Whether it fits, by how much, or which ranks do not and what fills them."""
    verdict = footprint.verdict
    if verdict == "unknown" or footprint.capacity is None:
        return (
            "No capacity is known, so nothing is said about fitting: name cluster.preset or "
            "cluster.hbm_cap."
        )
    # By the most that a rank may need: whether it fits hangs on that. Where it does not, even the
    # least is too much, so the class with the highest peak is told.
    fullest = max(footprint.ranks, key=lambda rank: footprint.needs(rank)[1])
    rank = footprint.worst if verdict == "does not fit" else fullest
    where = f"{class_text(footprint, rank)}, most in {peak_text(rank)}"
    text = fitting(*footprint.needs(rank), footprint.capacity, where)
    if verdict == "does not fit":
        text += f" The largest are {largest_text(rank.by_category)}."
    return text


VERDICT_WORDS: dict[Verdict, str] = {
    "fits": "Fits",
    "perhaps": "Perhaps fits",
    "does not fit": "Does not fit",
    "unknown": "Not known to fit",
}


def step_time_sentence(time: StepTime) -> str:
    """How long a step takes, and what that is in tokens and of the peak: on one line of 80. Its
    range and the peak are told where they are known."""
    rate = time.tokens_per_second
    known = f" ({two_digits(time.low)} to {two_digits(time.high)})" if time.low < time.high else ""
    peak = f", MFU {mfu_text(time.mfu)}" if time.model_flops else ""
    return (
        f"A step: about {two_digits(time.seconds)} s{known}, {two_digits(rate)} {time.counted}/s, "
        f"{two_digits(rate / time.devices)} a device{peak}."
    )


def mfu_text(mfu: float) -> str:
    """``37%``, and ``<1%`` of what would round to nothing."""
    return f"{mfu:.0%}" if mfu >= 0.005 or not mfu else "<1%"


def tokens_sentence(time: StepTime, tokens: float) -> str:
    """What a training on so many tokens takes."""
    days = time.days(tokens)
    hours = two_digits(days * 24 * time.devices)
    return f"{tokens:,.0f} {time.counted}: about {two_digits(days)} days, {hours} GPU-hours."


def about_seconds(seconds: float) -> str:
    """A duration of two digits."""
    text = format_seconds(seconds, 12)
    figure, _, unit = text.partition(" ")
    return f"{two_digits(float(figure))} {unit}".strip()


def two_digits(value: float) -> str:
    """No digit more than a prediction of seconds deserves: ``1.3``, ``57,000``."""
    return f"{float(f'{value:.2g}'):,.10g}"


def policy_words(policy: str) -> str:
    """A checkpointing policy of ``fit``."""
    return "chosen by the plan" if policy == "as planned" else printable(policy)


def largest_words(found: Largest) -> str:
    """A size or ``none``, that the next one is not sure, or that more were not looked at."""
    words = f"{found.size:,}" if found.size else "none"
    if found.next_perhaps:
        return f"{words}, perhaps {found.size + found.step:,}"
    return f"{words} or more" if found.or_more else words


def fitting(least: int, most: int, capacity: int, where: str, tier: str = "") -> str:
    """What every command says of whether a rank fits: the least and the most that it needs of its
    device, ``where`` that is, and what it hangs on."""
    verdict = verdict_of(least, most, capacity)
    missing = verdict == "does not fit"
    share = f"{format_bytes(least - capacity)} too much" if missing else percent(most / capacity)
    end = f" {HANGS_ON}" if verdict == "perhaps" else ""
    needs = format_bytes(least) if missing else range_text(least, most)
    of = f"{format_bytes(capacity)}{f' {tier}' if tier else ''}"
    return f"{VERDICT_WORDS[verdict]}: {needs} of {of} ({share}) on {where}.{end}"


HANGS_ON = "It hangs on what the allocator keeps and what else is on the device."
VERDICT_STYLES: dict[Verdict, str] = {
    "fits": "bold green",
    "perhaps": "bold yellow",
    "does not fit": "bold red",
    "unknown": "bold",
}
