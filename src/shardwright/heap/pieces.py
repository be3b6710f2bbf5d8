"""Pieces of a recording in memory: what each adds up to."""

from __future__ import annotations

from shardwright.core.recording import Piece, Recording
from shardwright.core.timeline import Kind
from shardwright.heap.ledger import GradientRule, Summary

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
        self.home_of = {t.fqn: (u.name, t.dtype) for u in recording.units for t in u.tensors}
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
        gradients: dict[tuple[str, str], int] = {}
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
            stays = touch.what == "gradient" and self.rule == "stays"
            if touch.what == "gradient":
                home = self.home_of[touch.name]
                gradients[home] = gradients.get(home, 0) + stays * touch.nbytes
            if stays:
                live[STAYING] = live.get(STAYING, 0) + touch.nbytes
            else:
                total -= touch.nbytes
        net = {kind: nbytes for kind, nbytes in live.items() if nbytes}
        return Summary(net, peak, total, highest, gradients)
