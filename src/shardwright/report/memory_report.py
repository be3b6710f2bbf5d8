"""A footprint in a terminal: its sheets, and an estimate beside what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from shardwright.core.footprint import (
    Footprint,
    ModuleMemory,
    RankMemory,
    State,
    StepTime,
    Tracked,
)
from shardwright.core.quantities import format_bytes
from shardwright.core.timeline import Kind, category, in_order
from shardwright.report.sheet import Cell, Column, Sheet, number, sheet_of, text
from shardwright.report.table import assumed_line, drawn, listed, prose, spaced
from shardwright.report.wording import (
    TEXT_LIMIT,
    VERDICT_STYLES,
    class_text,
    error_text,
    headline,
    peak_text,
    percent,
    printable,
    range_text,
    seconds_text,
    settings_lines,
    signed_bytes,
    step_time_sentence,
    tokens_sentence,
    two_digits,
    verdict_sentence,
)

EVERYTHING = 10**6  # rows that a full report may have
SURE = (
    "exact: arithmetic or a trace; modelled: rests on a model of the device, or of which ids come; "
    "assumed: on a constant that may be replaced."
)
MORE = "More: --full. Over time: --timeline x.svg. What fits: shardwright fit JOB.toml."


def memory_report(
    footprint: Footprint,
    rank: RankMemory | None = None,
    *,
    tokens: float | None = None,
    full: bool = False,
) -> RenderableType:
    """Whether the job fits, all ranks, identical ones once, then one of them in detail: ``rank``,
    or the one with the highest peak; what training on so many ``tokens`` takes. ``full`` leaves
    nothing out."""
    rank = rank or footprint.worst
    lines = [headline(footprint), *settings_lines(footprint)]
    if footprint.source:
        lines.append(printable(footprint.source, TEXT_LIMIT))
    assumed = tuple(printable(text, TEXT_LIMIT) for text in footprint.assumptions)
    return spaced(
        prose("\n".join(lines)),
        Group(*_answers(footprint, tokens)),
        *(_every_sheet if full else _first_sheets)(footprint, rank),
        listed("Assumptions", assumed) if full else assumed_line(assumed, FIRST_ASSUMPTIONS),
        prose(MORE, style="dim"),
    )


def _answers(footprint: Footprint, tokens: float | None) -> Iterator[RenderableType]:
    yield prose(verdict_sentence(footprint), style=VERDICT_STYLES[footprint.verdict])
    if footprint.time:
        yield prose(step_time_sentence(footprint.time))
        if tokens:
            yield prose(tokens_sentence(footprint.time, tokens))


# Rows of a first screen.
FIRST_CLASSES, FIRST_CATEGORIES, FIRST_TENSORS, FIRST_ASSUMPTIONS = 3, 4, 2, 2


def _first_sheets(footprint: Footprint, rank: RankMemory) -> list[RenderableType | None]:
    """The fullest classes, what the peak is made of, and the largest tensors in it."""
    tensors = tensors_sheet(rank, FIRST_TENSORS)
    return [
        drawn(classes_sheet(footprint, FIRST_CLASSES), short=True),
        drawn(peak_sheet(footprint, rank, FIRST_CATEGORIES), short=True),
        drawn(tensors, short=True) if tensors else _followed(footprint),
    ]


def _every_sheet(footprint: Footprint, rank: RankMemory) -> list[RenderableType | None]:
    """Everything that is known of the class, and every class."""
    modules, tensors = modules_sheet(rank), tensors_sheet(rank)
    return [
        drawn(classes_sheet(footprint)),
        drawn(categories_sheet(footprint, rank)),
        prose(SURE, style="dim"),
        drawn(modules) if modules else None,
        drawn(tensors) if tensors else None,
        None if modules or tensors else _followed(footprint),
        drawn(device_sheet(footprint, rank)),
        drawn(time_sheet(footprint.time)) if footprint.time else None,
    ]


def _followed(footprint: Footprint) -> RenderableType | None:
    """Which class has its modules and tensors followed, where this one has not."""
    followed = [rank.name for rank in footprint.ranks if rank.modules or rank.largest]
    if not followed:
        return None
    name = printable(followed[0])
    return prose(f"Modules, tensors and the timeline are followed for '{name}' only.", style="dim")


INDENT = "  "


def classes_sheet(footprint: Footprint, most: int = EVERYTHING) -> Sheet:
    """One row per class of ranks, the fullest first where there are more than ``most``."""
    shown = footprint.ranks
    if len(shown) > most:
        shown = tuple(sorted(shown, key=lambda rank: -rank.peak_bytes)[:most])
    left = len(footprint.ranks) - len(shown)
    cells: list[Cell[RankMemory]] = [
        text("ranks", lambda rank: printable(rank.name)),
        number("count", lambda rank: f"{rank.ranks:,}", spare=1),
        number("peak", lambda rank: format_bytes(rank.peak_bytes)),
        text("in", peak_text, spare=2),
        number("needs of its device", lambda rank: range_text(*footprint.needs(rank))),
        text("verdict", footprint.verdict_of),
    ]
    if any(rank.reserved_bytes for rank in shown):
        cells.insert(4, number("allocator holds", _held))
    capacity = "" if footprint.capacity is None else f", {format_bytes(footprint.capacity)} each"
    rest = "group has" if left == 1 else f"{left:,} groups have"
    note = f"The other {rest} lower peaks: --full." if left else ""
    return sheet_of(f"Identical ranks{capacity}", shown, cells, note)


def _held(rank: RankMemory) -> str:
    return format_bytes(rank.reserved_bytes) if rank.reserved_bytes else "not modelled"


def peak_sheet(footprint: Footprint, rank: RankMemory, most: int) -> Sheet:
    """The largest categories at the peak, how sure they are, and the peak of each phase."""
    sizes = {kind: size for kind, size in rank.by_category.items() if size}
    largest = sorted(sizes, key=lambda kind: -sizes[kind])
    largest = largest[:most] if len(largest) > most + 1 else largest  # one more needs no sum
    rows = [
        (category(kind), sizes[kind], rank.certainty.get(kind, "")) for kind in in_order(largest)
    ]
    left = len(sizes) - len(largest)
    if left:
        smaller = sum(sizes.values()) - sum(sizes[kind] for kind in largest)
        rows.append((f"{left} smaller", smaller, ""))
    return sheet_of(
        f"By category, {class_text(footprint, rank)}: {format_bytes(rank.peak_bytes)} at the peak, "
        f"in {peak_text(rank)}",
        rows,
        (
            text("category", lambda row: row[0]),
            number("bytes", lambda row: format_bytes(row[1])),
            number("share", lambda row: percent(row[1] / max(rank.peak_bytes, 1))),
            text("how sure", lambda row: row[2]),
        ),
        _phase_peaks(rank),
    )


def categories_sheet(footprint: Footprint, rank: RankMemory) -> Sheet:
    """Bytes by category at the peak, how sure they are, and at the peak of every phase."""
    phases = [phase for phase in rank.phases if phase.by_category]
    tables = [rank.by_category, *(phase.by_category for phase in phases)]
    kinds = in_order(kind for table in tables for kind, nbytes in table.items() if nbytes)
    rows = [
        (
            category(kind),
            _size(rank.by_category.get(kind, 0)),
            percent(rank.by_category.get(kind, 0) / max(rank.peak_bytes, 1)),
            rank.certainty.get(kind, ""),
            *(_size(phase.by_category.get(kind, 0)) for phase in phases),
        )
        for kind in kinds
    ]
    sums = (format_bytes(phase.bytes) for phase in phases)
    rows.append(("together", format_bytes(rank.peak_bytes), "", "", *sums))
    return Sheet(
        f"By category, {class_text(footprint, rank)}: at the peak, in {peak_text(rank)}, and in "
        "each phase",
        (
            Column("category"),
            Column("at the peak", numeric=True),
            Column("share", numeric=True),
            Column("how sure"),
            *(Column(printable(p.phase.replace("_", " ")), numeric=True) for p in phases),
        ),
        tuple(rows),
        _places(rank),
    )


def time_sheet(time: StepTime) -> Sheet:
    """What a step's seconds are made of."""
    return sheet_of(
        f"A step's seconds, of the rank with most to do: {two_digits(time.low)} to "
        f"{two_digits(time.high)} s for 80 of 100 runs",
        sorted(time.parts.items(), key=lambda part: -part[1]),
        (
            text("part", lambda part: part[0]),
            number("seconds", lambda part: seconds_text(part[1])),
            number("share", lambda part: percent(part[1] / time.seconds)),
        ),
        f"Rests on constants {time.source}.",
    )


def _phase_peaks(rank: RankMemory) -> str:
    peaks = [f"{printable(p.phase)} {format_bytes(p.bytes)}" for p in rank.phases if p.bytes]
    return f"Peak of each phase: {', '.join(peaks)}." if peaks else ""


def _size(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else "-"


def _places(rank: RankMemory) -> str:
    """Where in each phase its peak is."""
    places = [f"{printable(p.phase)} in {printable(p.at)}" for p in rank.phases if p.at]
    return f"Each phase is shown at its own peak: {', '.join(places)}." if places else ""


def modules_sheet(rank: RankMemory) -> Sheet | None:
    """Every module as a tree, alike ones as one row; None where none were followed."""
    modules = _without_lists(rank.modules)
    if not modules:
        return None
    labels = dict(zip([module.name for module in modules], _tree(modules), strict=True))
    cells: list[Cell[ModuleMemory]] = [
        text("module", lambda module: labels[module.name]),
        number("times", lambda module: f"{module.count:,}"),
        number("weights", lambda module: _size(module.parameters)),
        number("kept for backward", lambda module: _size(module.saved)),
        number("by each", lambda m: _size(m.saved // m.count)),
        number("rank's peak in forward", lambda module: _size(module.forward_peak)),
        number("in backward", lambda m: _size(m.backward_peak)),
    ]
    if any(module.kind for module in modules):
        cells.insert(1, text("class", lambda module: printable(module.kind)))
    return sheet_of(
        "By module",
        modules,
        cells,
        "Weights and what is kept count all modules of a row; peaks are all that is alive on the "
        "rank while one of them runs.",
    )


def _without_lists(modules: Sequence[ModuleMemory]) -> list[ModuleMemory]:
    """Without lists that are nothing but their alike members, as ``layers`` of ``layers.*``."""
    # A list has no weights but its members': beside them its row would say the same bytes twice.
    stars = {m.name.removesuffix(".*"): m for m in modules if m.name.endswith(".*")}
    return [
        module
        for module in modules
        if module.name not in stars
        or (module.parameters, module.saved)
        != (stars[module.name].parameters, stars[module.name].saved)
    ]


def _tree(modules: Sequence[ModuleMemory]) -> list[str]:
    """The last part of each name below its parent's; the whole name where no parent is listed.

    The model itself comes first, under no name or that of its class.
    """
    depth: dict[str, int] = {}
    labels = []
    for place, module in enumerate(modules):
        if place == 0 and module.name in ("", module.kind):
            depth[""] = 0
            labels.append(printable(module.name) or "(model)")
            continue
        # The nearest that is listed: modules without anything of their own are not, so a name may
        # have lost its direct parent.
        parents = [name for name in depth if not name or module.name.startswith(f"{name}.")]
        parent = max(parents, key=len, default=None)
        depth[module.name] = 0 if parent is None else depth[parent] + 1
        own = module.name[len(parent) + 1 :] if parent else module.name
        labels.append(INDENT * depth[module.name] + printable(own))
    return labels


def tensors_sheet(rank: RankMemory, most: int = EVERYTHING) -> Sheet | None:
    """The largest of what is alive at the peak; None where it was not followed."""
    if not rank.largest:
        return None
    return sheet_of(
        "Largest tensors at the peak",
        rank.largest[:most],
        (
            text("tensor", lambda alive: printable(alive.name)),
            text("of module", lambda alive: printable(alive.module)),
            text("category", lambda alive: category(alive.kind), spare=1),
            number("times", lambda alive: str(alive.count), spare=2),
            number("together", lambda alive: format_bytes(alive.bytes)),
            number("share", lambda alive: percent(alive.bytes / max(rank.peak_bytes, 1))),
        ),
    )


def device_sheet(footprint: Footprint, rank: RankMemory) -> Sheet:
    """From live bytes to what a rank needs of its device, as ranges."""
    rows = [("live tensors at the peak", format_bytes(rank.peak_bytes), "the tables above")]
    if rank.reserved_bytes:
        # From 0, since what the allocator holds beyond live bytes it may also give back.
        around = range_text(0, max(rank.reserved_bytes - rank.peak_bytes, 0))
        replayed = "modelled: the step's allocations replayed"
        rows.append(("rounding, gaps and what is kept", around, replayed))
        if rank.retries:
            given = "modelled: cached memory given back, in two steps"
            rows.append(("retries", f"{rank.retries:,}", given))
    rows += [
        (printable(extra.name), range_text(extra.low, extra.high), printable(extra.source, 200))
        for extra in footprint.outside
    ]
    least, most = footprint.needs(rank)
    rows.append(("together", range_text(least, most), ""))
    if footprint.capacity is not None:
        rows.append(("there is", format_bytes(footprint.capacity), "cluster"))
        rows.append(("left", _left(footprint.capacity - most, footprint.capacity - least), ""))
    columns = Column("what"), Column("bytes", numeric=True), Column("from")
    return Sheet(f"What {class_text(footprint, rank)} needs of its device", columns, tuple(rows))


def _left(least: int, most: int) -> str:
    return f"{range_text(least, most)}" + (" (too little)" if most < 0 else "")


ALONE = "Run on this machine: two steps as one CPU rank, whole fp32 parameters"
AMONG = "Run on this machine: two steps on {} CPU ranks under {}"
# Kinds that a tracker knows and an estimate does not: a model's last activation, and gradients of
# parameters that nothing shards.
SAME: dict[Kind, Kind] = {"output": "activation", "unreduced_gradient": "gradient"}


def rehearsal_report(
    predicted: Footprint, measured: Sequence[Tracked], *, full: bool = False
) -> RenderableType:
    """Of the fullest rank phases, and categories at the measured peak; in ``full`` the peak of
    every step, and modules as they were entered and left."""
    peaks = [each.peak.bytes for each in measured]
    fullest = measured[peaks.index(max(peaks))]
    how = predicted.settings["runtime"]
    title = ALONE if not measured[1:] else AMONG.format(len(measured), how)
    ratios = sorted(predicted.worst.peak_bytes / peak for peak in peaks)
    text = f"Peak predicted over measured: {ratios[0]:.4f}"
    if measured[1:]:
        text += f" at worst, {ratios[-1]:.4f} at best"
    return spaced(
        Text(title, style="bold"),
        prose(f"{text}."),
        drawn(phases_sheet(predicted, fullest)),
        drawn(kinds_sheet(predicted, fullest)),
        *(drawn(sheet) for sheet in (_followed_sheets(fullest) if full else ())),
    )


def _followed_sheets(measured: Tracked) -> list[Sheet]:
    found = (steps_sheet(measured), states_sheet(measured))
    return [sheet for sheet in found if sheet is not None]


def steps_sheet(measured: Tracked) -> Sheet:
    """The measured peak of every step, after one that makes what stays."""
    return sheet_of(
        "Measured peak of every step",
        tuple(enumerate(measured.iterations, 1)),
        (
            text("step", lambda each: str(each[0])),
            number("peak", lambda each: format_bytes(each[1].bytes)),
            text("at", lambda each: printable(each[1].at)),
        ),
        "A step before them made the optimizer's states.",
    )


# Moments of a module's step, and how a table calls them.
_MOMENTS: dict[State, str] = {
    "before pre-forward": "before its\nforward",
    "peak forward": "most in it",
    "after post-forward": "after it",
    "before pre-backward": "before its\nbackward",
    "peak backward": "most in it",
    "after post-backward": "after it",
}


def states_sheet(measured: Tracked) -> Sheet | None:
    """Live bytes as every module was entered and left in the last step, in its first call; None
    where no modules were followed."""
    if not measured.snapshots:
        return None
    last = max(each.iteration for each in measured.snapshots)
    rows: dict[str, dict[State, int]] = {}
    for each in measured.snapshots:
        if each.iteration == last and each.call <= 1:
            rows.setdefault(each.module, {}).setdefault(each.state, each.bytes)
    return Sheet(
        f"Measured live bytes around every module, in step {last}",
        (Column("module"), *(Column(title, numeric=True) for title in _MOMENTS.values())),
        tuple(
            (printable(name), *(_size(states.get(moment, 0)) for moment in _MOMENTS))
            for name, states in rows.items()
            if "before pre-forward" in states
        ),
        "All that is alive on the rank, with what a unit gathers and reduces around a module.",
    )


def phases_sheet(predicted: Footprint, measured: Tracked) -> Sheet:
    """The peak of every phase."""
    found = {phase.phase: phase.bytes for phase in measured.phases}
    return _beside(
        "Peak of each phase, all categories together",
        "phase",
        [
            (printable(p.phase), p.bytes, found[p.phase])
            for p in predicted.worst.phases
            if p.phase in found
        ],
    )


def kinds_sheet(predicted: Footprint, measured: Tracked) -> Sheet:
    """Categories at the peak of the phase whose measured peak is highest."""
    phase = measured.peak.phase
    kinds_of = {p.phase: p.by_category for p in predicted.worst.phases}
    before, after = _merged(kinds_of.get(phase, {})), _merged(measured.peak.by_category)
    kinds = [k for k in in_order({*before, *after}) if before.get(k) or after.get(k)]
    return _beside(
        f"By category at the peak, in {printable(phase)}",
        "category",
        [(category(k), before.get(k, 0), after.get(k, 0)) for k in kinds],
        "Outputs count as activations, and gradients that nobody shards as sharded.",
    )


def _beside(title: str, of: str, rows: Sequence[tuple[str, int, int]], note: str = "") -> Sheet:
    """Bytes as predicted and as measured."""
    cells: list[Cell[tuple[str, int, int]]] = [
        text(of, lambda row: row[0]),
        number("predicted", lambda row: format_bytes(row[1])),
        number("measured", lambda row: format_bytes(row[2])),
        number("difference", lambda row: signed_bytes(row[1] - row[2])),
        number("error", lambda row: error_text(row[1], row[2])),
    ]
    return sheet_of(title, rows, cells, note)


def _merged(kinds: Mapping[Kind, int]) -> dict[Kind, int]:
    found: dict[Kind, int] = {}
    for kind, nbytes in kinds.items():
        shown = SAME.get(kind, kind)
        found[shown] = found.get(shown, 0) + nbytes
    return found
