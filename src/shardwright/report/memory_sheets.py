"""A footprint as sheets: classes of ranks, categories, phases, modules, tensors, the device."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.core.categories import category, in_order
from shardwright.core.footprint import Footprint, ModuleMemory, RankMemory
from shardwright.core.quantities import format_bytes
from shardwright.report.memory_wording import (
    class_text,
    peak_text,
    range_text,
)
from shardwright.report.sheet import Column, Sheet
from shardwright.report.wording import counted, percent, printable

MOST_CLASSES = 16
MOST_MODULES = 60
MOST_TENSORS = 12
INDENT = "  "


def classes_sheet(footprint: Footprint, most: int = MOST_CLASSES) -> Sheet:
    """One row per class of ranks, the fullest first where there are more than ``most``."""
    shown = footprint.ranks
    if len(shown) > most:
        shown = tuple(sorted(shown, key=lambda rank: -rank.peak_bytes)[:most])
    left = len(footprint.ranks) - len(shown)
    replayed = any(rank.reserved_bytes for rank in shown)
    columns = [
        Column("class"),
        Column("ranks", numeric=True),
        Column("peak", numeric=True),
        Column("in"),
        Column("allocator holds", numeric=True),
        Column("needs of its device", numeric=True),
        Column("verdict"),
    ]
    rows: list[tuple[str, ...]] = [
        (
            printable(rank.name),
            f"{rank.ranks:,}",
            format_bytes(rank.peak_bytes),
            peak_text(rank),
            format_bytes(rank.reserved_bytes) if rank.reserved_bytes else "not modelled",
            range_text(*footprint.needs(rank)),
            footprint.verdict_of(rank),
        )
        for rank in shown
    ]
    if not replayed:
        del columns[4]
        rows = [(*row[:4], *row[5:]) for row in rows]
    capacity = "" if footprint.capacity is None else f" of {format_bytes(footprint.capacity)} each"
    note = f"The other {left:,} classes hold less: --full." if left else ""
    return Sheet(f"Ranks{capacity}, alike ones as one class", tuple(columns), tuple(rows), note)


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
    rows.append(
        (
            "together",
            format_bytes(rank.peak_bytes),
            "",
            "",
            *(format_bytes(p.bytes) for p in phases),
        )
    )
    return Sheet(
        f"By category, {class_text(footprint, rank)}: at the peak, in {peak_text(rank)}, and in "
        "each phase",
        (
            Column("category"),
            Column("at the peak", numeric=True),
            Column("share", numeric=True),
            Column("how sure", under="category"),
            *(Column(printable(phase.phase), numeric=True) for phase in phases),
        ),
        tuple(rows),
        _places(rank),
    )


def _size(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else "-"


def _places(rank: RankMemory) -> str:
    """Where in each phase its peak is."""
    told = [f"{printable(p.phase)} in {printable(p.at)}" for p in rank.phases if p.at]
    return f"Each phase is shown at its own peak: {', '.join(told)}." if told else ""


def modules_sheet(rank: RankMemory, most: int = MOST_MODULES) -> Sheet | None:
    """Every module as a tree, alike ones as one row; None where none were followed."""
    modules = _without_lists(rank.modules)
    if not modules:
        return None
    shown = modules[:most]
    left = len(modules) - len(shown)
    columns: tuple[Column, ...] = (
        Column("module"),
        Column("class", under="module"),
        Column("times", numeric=True),
        Column("weights", numeric=True),
        Column("kept for backward", numeric=True),
        Column("by each", numeric=True, under="kept for backward"),
        Column("rank's peak in forward", numeric=True),
        Column("in backward", numeric=True, under="rank's peak in forward"),
    )
    rows: list[tuple[str, ...]] = [
        (
            label,
            printable(module.kind),
            f"{module.count:,}",
            _size(module.parameters),
            _size(module.saved),
            _size(module.saved // module.count),
            _size(module.forward_peak),
            _size(module.backward_peak),
        )
        for module, label in zip(shown, _tree(shown), strict=True)
    ]
    if not any(module.kind for module in shown):
        columns = (columns[0], *columns[2:])
        rows = [(row[0], *row[2:]) for row in rows]
    more = f" {counted(left, 'more module')}: --full." if left else ""
    return Sheet(
        "By module",
        columns,
        tuple(rows),
        "Parameters and what is kept count all modules of a row; peaks are all that is alive on "
        f"the rank while one of them runs.{more}",
    )


def _without_lists(modules: Sequence[ModuleMemory]) -> list[ModuleMemory]:
    """Without lists that are nothing but their alike members, as ``layers`` of ``layers.*``."""
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
        parents = [name for name in depth if not name or module.name.startswith(f"{name}.")]
        parent = max(parents, key=len, default=None)
        depth[module.name] = 0 if parent is None else depth[parent] + 1
        own = module.name[len(parent) + 1 :] if parent else module.name
        labels.append(INDENT * depth[module.name] + printable(own))
    return labels


def tensors_sheet(rank: RankMemory, most: int = MOST_TENSORS) -> Sheet | None:
    """The largest of what is alive at the peak; None where it was not followed."""
    if not rank.largest:
        return None
    return Sheet(
        "Largest tensors at the peak",
        (
            Column("tensor"),
            Column("of module", under="tensor"),
            Column("category"),
            Column("times", numeric=True),
            Column("together", numeric=True),
            Column("share", numeric=True),
        ),
        tuple(
            (
                printable(alive.name),
                printable(alive.module),
                category(alive.kind),
                str(alive.count),
                format_bytes(alive.bytes),
                percent(alive.bytes / max(rank.peak_bytes, 1)),
            )
            for alive in rank.largest[:most]
        ),
    )


def device_sheet(footprint: Footprint, rank: RankMemory) -> Sheet:
    """From live bytes to what a rank needs of its device, as ranges."""
    rows = [("live tensors at the peak", format_bytes(rank.peak_bytes), "the tables above")]
    if rank.reserved_bytes:
        around = max(rank.reserved_bytes - rank.peak_bytes, 0)
        rows.append(
            (
                "rounding, gaps and what is kept",
                range_text(0, around),
                "modelled: the step's allocations replayed",
            )
        )
    rows += [
        (printable(extra.name), range_text(extra.low, extra.high), printable(extra.source, 200))
        for extra in footprint.outside
    ]
    least, most = footprint.needs(rank)
    rows.append(("together", range_text(least, most), ""))
    if footprint.capacity is not None:
        rows.append(("there is", format_bytes(footprint.capacity), "cluster"))
        rows.append(("left", _left(footprint.capacity - most, footprint.capacity - least), ""))
    return Sheet(
        f"What {class_text(footprint, rank)} needs of its device",
        (Column("what"), Column("bytes", numeric=True), Column("from")),
        tuple(rows),
    )


def _left(least: int, most: int) -> str:
    return f"{range_text(least, most)}" + (" (too little)" if most < 0 else "")
