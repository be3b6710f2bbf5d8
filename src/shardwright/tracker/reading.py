"""What a log says: peaks by phase, iteration and module, states of modules, what was alive;
and all of it as text."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from shardwright.core import footprint
from shardwright.core.quantities import format_bytes
from shardwright.core.timeline import Kind, Phase, category, in_order
from shardwright.tracker.modules import Modules
from shardwright.tracker.private import plain_parts
from shardwright.tracker.storages import Holding, Log

Peak = tuple[int, int]  # bytes, and the first moment that has them


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of the log: its first and last moment."""

    begin: int
    end: int


class Reading:
    """A log as it is now; ``root`` is how the whole model is called."""

    def __init__(self, log: Log, modules: Modules | None) -> None:
        self.log = log
        self.modules = modules
        self.root = type(modules.model).__name__ if modules else ""
        self.totals = log.totals()

    # ---- peaks -----------------------------------------------------------------------------------

    def peak(self) -> footprint.PhasePeak:
        """The highest moment of all."""
        moment = self._highest(Span(0, len(self.totals) - 1))[1]
        return self._peak_at(self._phase_at(moment), moment)

    def phases(self) -> dict[Phase, footprint.PhasePeak]:
        """The highest moment of every phase."""
        found: dict[Phase, Peak] = {}
        for phase, span in self._phase_spans():
            peak = self._highest(span)
            if phase not in found or peak[0] > found[phase][0]:
                found[phase] = peak
        return {phase: self._peak_at(phase, moment) for phase, (_, moment) in found.items()}

    def iterations(self) -> tuple[footprint.PhasePeak, ...]:
        """The highest moment of every iteration."""
        marks = self.log.iterations or [(0, 1)]
        ends = [begin for begin, _ in marks[1:]] + [len(self.totals) - 1]
        return tuple(
            self._peak_at(f"iteration {number}", self._highest(Span(begin, end))[1])
            for (begin, number), end in zip(marks, ends, strict=True)
        )

    def _phase_spans(self) -> Iterable[tuple[Phase, Span]]:
        turns = self.log.turns or [(0, "setup")]
        ends = [begin for begin, _ in turns[1:]] + [len(self.totals) - 1]
        for (begin, phase), end in zip(turns, ends, strict=True):
            yield phase, Span(begin, end)

    def _highest(self, span: Span) -> Peak:
        part = self.totals[span.begin : span.end + 1]
        most = max(part)
        return most, span.begin + part.index(most)

    def _phase_at(self, moment: int) -> str:
        name: str = "setup"
        for begin, phase in self.log.turns:
            if begin >= max(moment, 1):  # the entry before ``moment`` made it
                break
            name = phase
        return name

    def _peak_at(self, phase: str, moment: int) -> footprint.PhasePeak:
        kinds = self.log.kinds_at([moment])[moment]
        return footprint.PhasePeak(phase, self.totals[moment], kinds, self._where(moment))

    def _where(self, moment: int) -> str:
        if not moment:
            return ""
        held, _, module = self.log.entries[moment - 1]
        path = self.called(module)
        return f"{path}: {held.label}" if path else held.label

    def called(self, path: str | None) -> str:
        """A module by the name people read."""
        return self.root if path == "" else path or ""

    # ---- what was alive --------------------------------------------------------------------------

    def alive_at_peak(self, top: int) -> tuple[footprint.Alive, ...]:
        """The largest of what was alive at the highest moment; equal names count together."""
        moment = self._highest(Span(0, len(self.totals) - 1))[1]
        sizes: Counter[tuple[str, str, Kind]] = Counter()
        counts: Counter[tuple[str, str, Kind]] = Counter()
        for held, size in self.log.alive_at(moment).items():
            key = self._key(held)
            sizes[key] += size
            counts[key] += 1
        return tuple(
            footprint.Alive(name, module, kind, size, counts[name, module, kind])
            for (name, module, kind), size in sizes.most_common(top)
        )

    def _key(self, held: Holding) -> tuple[str, str, Kind]:
        module = self.called(held.module)
        name = held.name or (f"{module}: {held.label}" if module else held.label)
        return name, module, held.kind

    def timeline(self) -> tuple[tuple[Kind, ...], tuple[footprint.Sample, ...]]:
        """Kinds, and their live bytes after every change; frees have no name."""
        held_kinds = {held.kind for held, _, _ in self.log.entries}
        kinds = tuple(sorted(held_kinds | {held.kind for held, _ in self.log.earlier}))
        live: Counter[Kind] = Counter()
        for held, size in self.log.earlier:
            live[held.kind] += size
        phases = dict(self.log.turns)
        phase: str = "setup"
        found = []
        for index, (held, change, _) in enumerate(self.log.entries):
            phase = phases.get(index, phase)
            live[held.kind] += change
            name = self._where(index + 1) if change > 0 else ""
            found.append(footprint.Sample(name, phase, tuple(live[kind] for kind in kinds)))
        return kinds, tuple(found)

    # ---- modules ---------------------------------------------------------------------------------

    def snapshots(self) -> tuple[footprint.Snapshot, ...]:
        """Every state of every module, in the order they were reached, peaks last."""
        if self.modules is None:
            return ()
        forward, backward = self._module_peaks()
        rows: list[tuple[int, str, footprint.State, int, int]] = [
            (m.moment, m.module, m.state, m.iteration, m.call) for m in self.modules.marks
        ]
        rows.sort(key=lambda row: row[0])  # stable: marks of one moment keep their order
        for peaks, state in ((forward, footprint.STATES[2]), (backward, footprint.STATES[9])):
            for (path, iteration), (_, moment) in peaks.items():
                rows.append((moment, path, state, iteration, 0))
        kinds = self.log.kinds_at(row[0] for row in rows)
        return tuple(
            footprint.Snapshot(
                self.called(path), state, iteration, call, self.totals[moment], kinds[moment]
            )
            for moment, path, state, iteration, call in rows
        )

    def by_module(self) -> tuple[footprint.ModuleMemory, ...]:
        """Every module of the model, in its order."""
        if self.modules is None:
            return ()
        forward, backward = map(_over_iterations, self._module_peaks())
        saved = self._saved()
        return tuple(
            footprint.ModuleMemory(
                name=self.called(path),
                kind=type(module).__name__,
                parameters=_parameter_bytes(module),
                saved=saved.get(path, 0),
                forward_peak=forward.get(path, 0),
                backward_peak=backward.get(path, 0),
            )
            for path, module in self.modules.model.named_modules()
        )

    def _module_peaks(self) -> tuple[dict[tuple[str, int], Peak], dict[tuple[str, int], Peak]]:
        """By path and iteration: the highest moment of forwards, and of what backwards did."""
        assert self.modules is not None
        forward: dict[tuple[str, int], Peak] = {}
        backward: dict[tuple[str, int], Peak] = {}
        for call in self.modules.calls:
            peak = self._highest(Span(call.begin, call.end))
            _raise(forward, (call.module, call.iteration), peak)
        for mark in self.modules.marks:
            if mark.state == "before pre-backward":
                level = (self.totals[mark.moment], mark.moment)
                _raise(backward, (mark.module, mark.iteration), level)
        begins = [begin for begin, _ in self.log.iterations]
        for phase, span in self._phase_spans():
            if phase not in ("backward", "reduce"):
                continue
            for index in range(span.begin, span.end):
                _, change, module = self.log.entries[index]
                # A peak is reached by an entry that takes memory; one that frees can only follow
                # it.
                if change > 0 and module is not None:
                    peak = (self.totals[index + 1], index + 1)
                    iteration = self.log.iterations[max(0, bisect_right(begins, index) - 1)][1]
                    for path in _with_parents(module):
                        _raise(backward, (path, iteration), peak)
        return forward, backward

    def _saved(self) -> dict[str, int]:
        """By path, the most activations that one forward left."""
        assert self.modules is not None
        marks = [
            m for m in self.modules.marks if m.state in ("before pre-forward", footprint.STATES[4])
        ]
        kinds = self.log.kinds_at(mark.moment for mark in marks)
        before: dict[tuple[str, int, int], int] = {}
        found: dict[str, int] = {}
        for mark in marks:
            # Kinds as they are known at the end: what a forward made may have turned out to be a
            # gradient's or a runtime's since then.
            level = sum(kinds[mark.moment].get(kind, 0) for kind in ("activation", "output"))
            key = (mark.module, mark.iteration, mark.call)
            if mark.state == "before pre-forward":
                before[key] = level
            elif key in before:
                left = level - before[key]
                found[mark.module] = max(left, found.get(mark.module, 0))
        return found


def _raise(peaks: dict[tuple[str, int], Peak], key: tuple[str, int], peak: Peak) -> None:
    if key not in peaks or peak[0] > peaks[key][0]:
        peaks[key] = peak


def _with_parents(path: str) -> Iterable[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _over_iterations(peaks: dict[tuple[str, int], Peak]) -> dict[str, int]:
    found: dict[str, int] = {}
    for (path, _), (most, _) in peaks.items():
        found[path] = max(most, found.get(path, 0))
    return found


def _parameter_bytes(module: nn.Module) -> int:
    """This rank's parameters of a module and all below it, tied ones once."""
    return sum(
        part.numel() * part.element_size()
        for parameter in module.parameters()
        for part in plain_parts(parameter)
    )


_WIDEST = 48  # characters of a name


def as_text(tracked: footprint.Tracked) -> str:
    """Peaks by phase and category, modules, what was alive at the peak, and the device's word."""
    return "\n".join(_lines(tracked)) + "\n"


def _lines(tracked: footprint.Tracked) -> Iterator[str]:
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


def _device(tracked: footprint.Tracked) -> Iterator[str]:
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
