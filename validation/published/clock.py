"""What the seconds of a published row are made of: the numbers that a clock's constants multiply.

Recordings, formulas and schedules are the product's. Each formula is asked what it says with one
constant at 1 and the others at nothing, so that its terms stand apart (``features``); from them a
fit works a step's seconds out for thousands of sets of constants (``Rows``) as ``step_time`` does.
"""

# What is not linear is done here as there, and nowhere else: a piece takes the longer of its
# kernels and their launches, a ring goes at the slower of link and network, collectives hide behind
# compute. A pipeline's order is walked by the product's own function with numbers that know what
# they are the sum of (``Along``), so that its longest path is linear, too. ``Rows.predicted`` is
# compared with the product's seconds at the fitted constants.

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from shardwright.core.optimizers import Optimizer
from shardwright.core.work import OperatorShapes
from shardwright.cost.clock import piece_seconds, reached, sent_seconds
from shardwright.cost.presets import HARDWARE
from shardwright.estimate.step_time import (
    SHARDED,
    RankClock,
    Stage,
    makespan,
    stage_of,
    transfer_seconds,
    work_of_chunk,
)
from shardwright.estimate.unplanned import chunks_of, optimizer_of
from shardwright.heap.machine import Sharding
from shardwright.heap.rank_step import Chunk
from shardwright.job.job import Job
from shardwright.job.parallel import Degrees

Array = np.ndarray[Any, np.dtype[np.float64]]
NONE = 1e30  # an efficiency that makes a term nothing
NOTHING = {
    "product_efficiency": NONE,
    "product_half_size": 0.0,
    "attention_efficiency": NONE,
    "memory_efficiency": NONE,
    "launch_latency": 0.0,
    "interleaves": 0.0,
    "link_efficiency": NONE,
    "network_efficiency": NONE,
    "replica_efficiency": NONE,
    "collective_latency": 0.0,
    "hides": 0.0,
    "slows": 0.0,
    "step_latency": 0.0,
    "range": 0.0,
}
RING = ("link_efficiency", "network_efficiency", "collective_latency")
SHARED_RING = (*RING, "replica_efficiency")
GROUPS = ("tensor", "context", "expert")


def features(job: Job, changed: Mapping[str, float]) -> dict[str, Any]:
    """Of a job on a preset, of whose data sheet some constants are ``changed``."""
    ranks, sharding, degrees = chunks_of(job)
    preset = HARDWARE[job.cluster.preset or ""]
    sheet = {name: each.value for name, each in preset.constants.items()} | dict(changed)
    host = job.cluster.local_world_size or min(preset.host, degrees.world_size)

    def layout(**some: float) -> RankClock:
        return RankClock(degrees, host, reached(sheet | NOTHING | some), "")

    stages: dict[int, int] = {}
    told: list[dict[str, Any]] = []
    for chunk in (chunk for chunks in ranks for chunk in chunks):
        if id(chunk.recording) not in stages:
            stages[id(chunk.recording)] = len(told)
            priced = {
                name: _stage(chunk, sharding, layout(**{name: 1.0}), optimizer_of(job))
                for name in (*SHARED_RING, "memory_efficiency")
            }
            told.append(
                {
                    "forward": _pieces(chunk, "forward", layout),
                    "backward": _pieces(chunk, "backward", layout),
                    "shared": [
                        [priced[name].forward.parts[SHARDED] for name in SHARED_RING],
                        [priced[name].backward.parts[SHARDED] for name in SHARED_RING],
                        [priced[name].once for name in SHARED_RING],
                    ],
                    "update": priced["memory_efficiency"].update,
                }
            )
    sent = max(chunk.sent for chunks in ranks for chunk in chunks)
    pipelined = degrees.pipeline > 1
    return {
        "stages": told,
        "ranks": [[stages[id(chunk.recording)] for chunk in chunks] for chunks in ranks],
        "transfer": [
            transfer_seconds(sent, layout(**{n: 1.0})) if pipelined else 0.0 for n in RING
        ],
        "hides_once": not (sharding.shares == "states" or sharding.waits),
        "order": [degrees.schedule, degrees.pipeline, degrees.microbatches, degrees.chunks],
    }


def _stage(chunk: Chunk, sharding: Sharding, clock: RankClock, optimizer: Optimizer) -> Stage:
    work = work_of_chunk(chunk, sharding, clock, optimizer)
    return stage_of(work, sharding, clock, optimizer)


def _pieces(chunk: Chunk, part: str, layout: Any) -> list[list[float]]:
    """Distinct pieces of a pass: how often each comes, and the numbers of its terms."""
    times = Counter(id(moment.piece) for moment in getattr(chunk, part))
    pieces = {id(moment.piece): moment.piece for moment in getattr(chunk, part)}
    d = layout().degrees
    degrees = {"tensor": (d.tensor, 1), "context": (d.context, d.tensor), "expert": (d.expert, 1)}
    found = []
    for key, piece in pieces.items():
        one = piece_seconds(piece, layout(product_efficiency=1.0).c).products
        sized = piece_seconds(piece, layout(product_efficiency=1.0, product_half_size=1.0).c)
        line = [
            times[key],
            piece_seconds(piece, layout(launch_latency=1.0).c).launches,
            one,
            sized.products - one,
            piece_seconds(piece, layout(attention_efficiency=1.0).c).attention,
            piece_seconds(piece, layout(memory_efficiency=1.0).c).elementwise,
        ]
        calls = (piece.operators or OperatorShapes()).sent
        for group in GROUPS:
            its = [sent for sent in calls if sent.group == group]
            for name in RING:
                at = layout(**{name: 1.0})
                line.append(sum(sent_seconds(s, *degrees[group], at.host, at.c) for s in its))
        found.append([float(f"{value:.9g}") for value in line])
    return found


# ---- a pipeline's longest path -------------------------------------------------------------------


class Along:
    """Seconds at the end of a path, and how often each of several spans is on it."""

    __slots__ = ("spans", "value")

    def __init__(self, value: float, spans: Array) -> None:
        self.value, self.spans = value, spans

    def __add__(self, other: Any) -> Along:
        if isinstance(other, Along):
            return Along(self.value + other.value, self.spans + other.spans)
        return Along(self.value + other, self.spans)

    __radd__ = __add__

    def __mul__(self, share: float) -> Along:
        return self if share == 1.0 else Along(self.value * share, self.spans * share)

    def __lt__(self, other: Any) -> bool:
        return bool(self.value < getattr(other, "value", other))

    def __gt__(self, other: Any) -> bool:
        return bool(self.value > getattr(other, "value", other))


def path(order: Sequence[Any], ranks: Sequence[Sequence[int]], seconds: Array) -> Array:
    """How often each span is on the longest path: of every stage its forward and its backward, and
    at last a transfer; of these the ``seconds``."""
    schedule, pipeline, microbatches, chunks = order
    if pipeline == 1:
        counts = np.zeros(len(seconds))
        for stage in ranks[0]:
            counts[2 * stage : 2 * stage + 2] += microbatches
        return counts
    spans = [Along(each, row) for each, row in zip(seconds, np.eye(len(seconds)), strict=True)]
    stages = [
        [SimpleNamespace(seconds=(spans[2 * s], spans[2 * s + 1])) for s in rank] for rank in ranks
    ]
    degrees = Degrees(1, 1, 1, False, pipeline, 1, 1, schedule, microbatches, chunks)
    ends: Any = makespan(stages, degrees, spans[-1])  # type: ignore[arg-type]
    return np.asarray(ends.spans)


# ---- rows at once --------------------------------------------------------------------------------


@dataclass
class Rows:
    """Rows by their features, as arrays: pieces, of which each is of a pass; passes, of which every
    two are of a stage; stages, of which each is of a row."""

    told: Sequence[dict[str, Any]]  # each keeps the path that was found last

    def __post_init__(self) -> None:
        pieces: list[list[float]] = []
        shared: list[list[float]] = []
        of_pass, once, of_row, update = [], [], [], []
        for row, each in enumerate(self.told):
            for stage in each["stages"]:
                for name, comes in zip(("forward", "backward"), stage["shared"], strict=False):
                    pieces += stage[name]
                    of_pass += [len(shared)] * len(stage[name])
                    shared.append(comes)
                once.append(stage["shared"][2])
                update.append(stage["update"])
                of_row.append(row)
        self.pieces, self.of_pass = np.array(pieces), np.array(of_pass)
        self.shared, self.once = np.array(shared), np.array(once)
        self.update, self.of_row = np.array(update), np.array(of_row)
        self.transfer = np.array([each["transfer"] for each in self.told])
        self.hides_once = np.array([each["hides_once"] for each in self.told])[self.of_row]
        self.first = np.searchsorted(self.of_row, np.arange(len(self.told)))
        self.on_path = np.zeros(len(shared))
        self.transfers = np.zeros(len(self.told))
        self.slowest = np.zeros(len(once))  # how often a stage is on the rank that is busy longest
        for row, each in enumerate(self.told):
            if "walked" in each:
                self._take(row, *each["walked"])

    def spans(self, c: Mapping[str, float]) -> tuple[Array, Array]:
        """Seconds of every pass, and of every transfer."""
        p = self.pieces
        busy = p[:, 2] / c["product_efficiency"]
        busy = busy + p[:, 3] * c["product_half_size"] / c["product_efficiency"]
        busy += p[:, 4] / c["attention_efficiency"] + p[:, 5] / c["memory_efficiency"]
        for k in range(len(GROUPS)):
            busy += _ring(p[:, 6 + 3 * k : 9 + 3 * k], c)
        launches = p[:, 1] * c["launch_latency"]
        both = np.maximum(busy, launches) + c["interleaves"] * np.minimum(busy, launches)
        taken = p[:, 0] * both
        computing: Array = np.bincount(self.of_pass, taken, len(self.shared)).astype(np.float64)
        passes = computing + _shown(_ring(self.shared, c), computing, c)
        return passes, _ring(self.transfer, c)

    def walk(self, c: Mapping[str, float]) -> None:
        """Find the longest paths anew, with these constants."""
        passes, transfers = self.spans(c)
        for row, each in enumerate(self.told):
            start, count = self.first[row], len(each["stages"])
            own = passes[2 * start : 2 * (start + count)]
            counts = path(each["order"], each["ranks"], np.append(own, transfers[row]))
            busy = [sum(own[2 * s] + own[2 * s + 1] for s in rank) for rank in each["ranks"]]
            longest = each["ranks"][int(np.argmax(busy))]
            if float(counts[:-1] @ own) < max(busy) * each["order"][2]:
                counts[:] = 0.0
                for stage in longest:
                    counts[2 * stage : 2 * stage + 2] += each["order"][2]
            each["walked"] = counts, longest
            self._take(row, counts, longest)

    def _take(self, row: int, counts: Array, longest: Sequence[int]) -> None:
        """A row's longest path, and the stages of its rank that is busy longest."""
        start, count = self.first[row], len(self.told[row]["stages"])
        self.on_path[2 * start : 2 * (start + count)] = counts[:-1]
        self.transfers[row] = counts[-1]
        self.slowest[start : start + count] = 0.0
        for stage in longest:
            self.slowest[start + stage] += 1.0

    def predicted(self, c: Mapping[str, float]) -> Array:
        """Seconds of a step of every row, on the paths that were found last."""
        passes, transfers = self.spans(c)
        once = _ring(self.once, c)
        hidden = _shown(once, passes[0::2] + passes[1::2], c)
        once = np.where(self.hides_once, hidden, once) + self.update / c["memory_efficiency"]
        stages = self.on_path * passes
        stages = stages[0::2] + stages[1::2] + self.slowest * once
        found = np.bincount(self.of_row, stages, len(self.told))
        return found + self.transfers * transfers + c["step_latency"]


def _ring(terms: Array, c: Mapping[str, float]) -> Array:
    """Of sums over link, network and latency, and over the network among replicas."""
    across = terms[:, 1] / c["network_efficiency"]
    if terms.shape[1] > len(RING):
        across = across + terms[:, 3] / c["replica_efficiency"]
    return np.maximum(terms[:, 0] / c["link_efficiency"], across) + terms[:, 2] * c[RING[2]]


def _shown(sent: Array, computing: Array, c: Mapping[str, float]) -> Array:
    hides = np.minimum(sent, c["hides"] * computing)
    return sent - hides + c["slows"] * hides
