"""A symbolic heap: named allocations come and go, the peak of each phase is kept."""

# Why a piece is a summary here: a step has millions of allocations, and most of them are those of
# the same piece in another block. What a piece does does not depend on what is there before, so
# its own highest point on top of the live bytes is its peak, and what stays of it is all that
# follows need. A search asks for thousands of peaks; this is what makes one take milliseconds.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from shardwright.core.recording import Piece, Recording
from shardwright.core.timeline import Kind, Phase


@dataclass(frozen=True, slots=True)
class Summary:
    """A stretch of allocations: what stays of each kind, and how each stood at the highest total,
    all beside what was there before."""

    net: dict[Kind, int]
    peak: dict[Kind, int]
    net_total: int
    peak_total: int
    gradients: dict[tuple[str, str], int]  # come, those that stay: by recorded unit and dtype


@dataclass(frozen=True, slots=True)
class Scene:
    """A piece where it happens: ``unit`` by its own name, block ``block`` of a series (-1 outside),
    for a microbatch of a chunk of the model."""

    piece: Piece
    unit: str
    block: int = -1
    chunk: int = 0
    microbatch: int = 0


# What becomes of a parameter's gradient when autograd has it: it stays until the runtime takes it,
# or it is added to memory that is there already and freed.
GradientRule = Literal["stays", "added"]


# Phases of a step that are one where only forward, backward and step are.
COARSE: dict[Phase, Phase] = {
    "load": "forward",
    "exchange_ids": "forward",
    "lookup": "forward",
    "exchange_rows": "forward",
    "reduce": "backward",
}


class Ledger:
    """Live bytes by kind; ``peaks`` maps a phase to the kinds at its highest total. A ``fine`` one
    has the phases of a run, others forward, backward and step."""

    keeps_events = False

    def __init__(self, *, fine: bool = False) -> None:
        self._phases = {} if fine else COARSE
        self.phase: Phase = "setup"
        self.unit = ""  # the unit that is at work
        self.where: dict[Phase, str] = {}  # and which one was at the peak of a phase
        self.live: dict[Kind, int] = {}
        self.total = 0
        self.peaks: dict[Phase, dict[Kind, int]] = {}
        self._highest: dict[Phase, int] = {}
        self._held: dict[str, tuple[Kind, int]] = {}

    def take(self, name: str, kind: Kind, nbytes: int) -> None:
        """Allocate; a name may be held once."""
        assert name not in self._held, f"{name} is held already"
        self._held[name] = (kind, nbytes)
        self._change(kind, nbytes)

    def hold(self, name: str, kind: Kind, nbytes: int) -> None:
        """Have bytes that are counted already under a name, or more of them."""
        held = self._held.get(name, (kind, 0))
        self._held[name] = (kind, held[1] + nbytes)

    def holds(self, name: str) -> bool:
        """Whether something of this name is there."""
        return name in self._held

    def free(self, name: str) -> int:
        """Free an allocation; one that was never taken is nothing. Its bytes."""
        kind, nbytes = self._held.pop(name, ("temporary", 0))
        self._change(kind, -nbytes)
        return nbytes

    def become(self, name: str, to: str, kind: Kind) -> None:
        """What ``name`` holds is ``to``'s, another kind of bytes where it was: nothing comes or
        goes. A name that holds nothing stays so."""
        if name in self._held:
            old, nbytes = self._held.pop(name)
            self._held[to] = (kind, nbytes)
            self._change(old, -nbytes)
            self._change(kind, nbytes)

    def names(self) -> dict[str, tuple[Kind, int]]:
        """What is held by name, as it is now."""
        return dict(self._held)

    def skip(self, change: Mapping[Kind, int], times: int) -> None:
        """Bytes have come and gone so many times, and no peak among them counts."""
        for kind, nbytes in change.items():
            self.live[kind] = self.live.get(kind, 0) + times * nbytes
            self.total += times * nbytes

    @contextmanager
    def passing(self, kind: Kind, nbytes: int) -> Iterator[None]:
        """Bytes that live as long as the block."""
        self._change(kind, nbytes)
        yield
        self._change(kind, -nbytes)

    def briefly(self, kind: Kind, nbytes: int) -> None:
        """Bytes that are gone before anything else comes."""
        with self.passing(kind, nbytes):
            pass

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """What happens inside belongs to ``phase``."""
        outer, self.phase = self.phase, self._phases.get(phase, phase)
        self._mark()
        yield
        self.phase = outer
        self._mark()

    def run(self, summary: Summary, scene: Scene, rule: GradientRule) -> None:
        """Let the allocations of a piece come and go at once; the peak among them counts."""
        # A piece can be highest only as a whole: its own peak is on top of what is there.
        top = self.total + summary.peak_total
        if top > self._highest.get(self.phase, -1):
            self._highest[self.phase] = top
            kinds = self.live | summary.peak  # in one order in every process
            at_peak = {k: self.live.get(k, 0) + summary.peak.get(k, 0) for k in kinds}
            self.peaks[self.phase] = {kind: n for kind, n in at_peak.items() if n}
            self.where[self.phase] = self.unit
        for kind, nbytes in summary.net.items():
            self.live[kind] = self.live.get(kind, 0) + nbytes
        self.total += summary.net_total

    def _change(self, kind: Kind, nbytes: int) -> None:
        self.live[kind] = self.live.get(kind, 0) + nbytes
        self.total += nbytes
        # Bytes that go make no peak, so the moment is looked at only when some come.
        if nbytes > 0:
            self._mark()

    def _mark(self) -> None:
        if self.total > self._highest.get(self.phase, -1):
            self._highest[self.phase] = self.total
            self.peaks[self.phase] = {kind: n for kind, n in self.live.items() if n}
            self.where[self.phase] = self.unit


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
            # By slot: what a free says of its kind need not be what the take said, and bytes must
            # come off the kind that they were counted under.
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
            # Taken off its kind and put on the other, with the total as it was: nothing is
            # allocated by becoming a gradient.
            if stays:
                live[STAYING] = live.get(STAYING, 0) + touch.nbytes
            else:
                total -= touch.nbytes
        net = {kind: nbytes for kind, nbytes in live.items() if nbytes}
        return Summary(net, peak, total, highest, gradients)
