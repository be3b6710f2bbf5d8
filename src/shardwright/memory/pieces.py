"""Pieces of a recording in memory: what each adds up to, and names for the storages it touches."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from shardwright.core.recording import Blocks, Piece, Recording
from shardwright.core.timeline import Kind
from shardwright.memory.ledger import GradientRule, Scene, Summary

STAYING: Kind = "unreduced_gradient"


class Summaries:
    """What each piece adds up to under a rule for gradients, found once for all its blocks."""

    def __init__(self, recording: Recording, rule: GradientRule) -> None:
        self.rule = rule
        self.kinds: dict[int, Kind] = {
            touch.slot: touch.kind
            for piece in recording.pieces
            for touch in piece.touches
            if touch.what == "take"
        }
        self.unit_of = {t.fqn: unit.name for unit in recording.units for t in unit.tensors}
        self._found: dict[int, Summary] = {}

    def of(self, piece: Piece) -> Summary:
        """The piece's sums; pieces are distinguished by identity."""
        found = self._found.get(id(piece))
        if found is None:
            found = self._found[id(piece)] = self._sum(piece)
        return found

    def _sum(self, piece: Piece) -> Summary:
        live: dict[Kind, int] = {}
        peak: dict[Kind, int] = {}
        gradients: dict[str, int] = {}
        total = highest = 0
        for touch in piece.touches:
            kind = self.kinds.get(touch.slot, touch.kind)
            if touch.what == "take":
                live[kind] = live.get(kind, 0) + touch.nbytes
                total += touch.nbytes
                if total > highest:
                    highest, peak = total, dict(live)
                continue
            live[kind] = live.get(kind, 0) - touch.nbytes
            if touch.what == "gradient" and self.rule == "stays":
                unit = self.unit_of[touch.name]
                gradients[unit] = gradients.get(unit, 0) + touch.nbytes
                live[STAYING] = live.get(STAYING, 0) + touch.nbytes
            else:
                total -= touch.nbytes
        net = {kind: nbytes for kind, nbytes in live.items() if nbytes}
        return Summary(net, peak, total, highest, gradients)


class Slots:
    """Names for storages: the same one has one name wherever it is taken and freed, in whichever
    block that stands for others. Who takes a slot: the piece, and which of its takes it is."""

    def __init__(self, recording: Recording, blocks: Blocks) -> None:
        self.blocks = blocks
        self._taken: dict[int, tuple[str, str, int, int]] = {}
        visits: dict[tuple[str, str], int] = {}  # a unit that runs again in a backward comes twice
        self._folded: dict[str, str] = {}
        for piece in recording.pieces:
            takes = 0
            visit = visits[piece.unit, piece.point] = visits.get((piece.unit, piece.point), 0) + 1
            for touch in piece.touches:
                if touch.what == "take":
                    self._taken.setdefault(touch.slot, (piece.unit, piece.point, visit, takes))
                    takes += 1

    def key(self, slot: int, scene: Scene) -> Hashable:
        """A slot where ``scene`` touches it."""
        unit, point, visit, place = self._taken[slot]
        home, here = self.blocks.home(unit), self.blocks.home(scene.piece.unit)
        mine = (scene.chunk, scene.microbatch, point, visit, place)
        if home is None:
            return (*mine, unit)
        series, recorded = home
        distance = recorded - here[1] if here is not None and here[0] is series else None
        if distance is not None and abs(distance) <= series.period:
            block = scene.block + distance
        else:
            extra = len(series.names) - len(series.recorded)
            block = recorded if recorded < series.period else recorded + extra
        return (*mine, series.name, block, unit[len(series.recorded[recorded]) :])

    def units(self) -> Iterator[tuple[str, str]]:
        """Every unit by its own name, and the module that it is; the root's where it is several."""
        for name, unit in self.blocks.unfolded():
            whole = all(tensor.fqn.startswith(f"{unit.name}.") for tensor in unit.tensors)
            yield name, self.folded(unit.name) if whole else ""

    def folded(self, module: str) -> str:
        """A module's path with a star for the number of its block."""
        found = self._folded.get(module)
        if found is None:
            found = self._folded[module] = self._fold(module)
        return found

    def _fold(self, module: str) -> str:
        for series in self.blocks.series:
            for block in series.recorded:
                if module == block or module.startswith(f"{block}."):
                    return f"{block.rpartition('.')[0]}.*{module[len(block) :]}".lstrip(".")
        return module
