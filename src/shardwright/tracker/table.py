"""What was tracked as text, for a terminal or a log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwright.core.footprint import Tracked
from shardwright.core.quantities import format_bytes
from shardwright.core.timeline import category, in_order

_WIDEST = 48  # characters of a name


def as_text(tracked: Tracked) -> str:
    """Peaks by phase and category, modules, what was alive at the peak, and the device's word."""
    return "\n".join(_lines(tracked)) + "\n"


def _lines(tracked: Tracked) -> Iterator[str]:
    how = "fake tensors" if tracked.fake else "real tensors"
    peak = tracked.peak
    yield f"{tracked.model or 'Memory'}: peak {format_bytes(peak.bytes)} in {peak.phase}, {how}"
    if peak.at:
        yield f"reached at {peak.at}"
    yield ""
    kinds = in_order(kind for phase in tracked.phases for kind in phase.by_category)
    header = ["", *(phase.phase for phase in tracked.phases)]
    rows = [["all", *(format_bytes(phase.bytes) for phase in tracked.phases)]]
    for kind in kinds:
        figures = (format_bytes(phase.by_category.get(kind, 0)) for phase in tracked.phases)
        rows.append([category(kind), *figures])
    yield from _table("peak of a phase", header, rows)
    if len(tracked.iterations) > 1:
        rows = [[p.phase, format_bytes(p.bytes), p.at] for p in tracked.iterations]
        yield from _table("iterations", ["", "peak", "reached at"], rows)
    if tracked.modules:
        rows = [
            [m.name, m.kind, *map(format_bytes, (m.parameters, m.saved))]
            + [format_bytes(size) if size else "-" for size in (m.forward_peak, m.backward_peak)]
            for m in tracked.modules
        ]
        names = ["", "class", "weights", "saved", "peak forward", "peak backward"]
        yield from _table("modules", names, rows)
    if tracked.largest:
        rows = [
            [a.name, category(a.kind), format_bytes(a.bytes), str(a.count)] for a in tracked.largest
        ]
        yield from _table("alive at the peak", ["", "kind", "bytes", "tensors"], rows)
    yield from _device(tracked)


def _device(tracked: Tracked) -> Iterator[str]:
    device = tracked.device
    if device is None:
        return
    rows = [
        ["active peak", format_bytes(device.active_peak)],
        ["allocated peak", format_bytes(device.allocated_peak)],
        ["reserved peak", format_bytes(device.reserved_peak)],
        ["active before", format_bytes(device.before)],
        ["retries", str(device.retries)],
        ["out of memory", str(device.out_of_memory)],
        ["accuracy", f"{tracked.accuracy:.3f}"],
    ]
    yield from _table(device.device, ["", ""], rows)


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns as wide as what is in them, the first flush left, figures flush right."""
    cut = [[_short(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cut, strict=True)]
    yield title
    for row in (header, *cut) if any(header) else cut:
        cells = [
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  " + "  ".join(cells).rstrip()
    yield ""


def _short(text: str) -> str:
    return text if len(text) <= _WIDEST else "..." + text[3 - _WIDEST :]
