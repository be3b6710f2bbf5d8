"""How long a step takes on an accelerator, for every degree of parallelism and runtime whose memory
is estimated: recorded operators priced by class, what ranks send, the pipeline's order.
"""

# The recording that gives a rank's memory gives its seconds, too: nothing here knows what a layer
# is. A pass of a stage is the sum of its pieces; what units gather and reduce hides behind it as
# far as it may; passes follow one another in the schedule's own order, rank by rank, each when what
# it waits for has come, so that a bubble is what is left over and no formula of its own.

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.core.footprint import StepTime
from shardwright.core.optimizers import Optimizer
from shardwright.core.recording import Moment
from shardwright.core.tensor import TensorSpec, element_bytes
from shardwright.cost.clock import (
    link_rate,
    network_rate,
    piece_seconds,
    ring_seconds,
    sent_seconds,
)
from shardwright.cost.dense import product_rate
from shardwright.heap.machine import Sharding
from shardwright.heap.rank_step import Chunk, states
from shardwright.job.job import BatchSection
from shardwright.job.parallel import Degrees
from shardwright.job.pipelining import order, stage_of

FORWARDS = 3  # a backward takes twice the FLOPs of a forward
SHARDED = "sharded parameters"


@dataclass
class PassSeconds:
    """Seconds of a pass by what takes them."""

    parts: Counter[str] = field(default_factory=Counter)
    flops: int = 0

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Layout:
    """Where the ranks of each degree are, ``host`` of them on one, and the constants ``c`` of their
    machine, of which those of the clock are from a ``source``. Ranks of a group lie ``beside``
    apart from each other."""

    degrees: Degrees
    host: int
    c: Mapping[str, float]
    source: str

    def ring(self, nbytes: float, ranks: int, beside: int, times: int = 1) -> float:
        """Seconds of a collective over some of them."""
        return float(ring_seconds(nbytes, ranks, beside, self.host, self.c, times))

    def replicas(self, nbytes: float, ranks: int, beside: int, times: int = 1) -> float:
        """The same among those that have the same parameters: on a network it begins when the last
        of them has its gradients, and all others wait."""
        c = {**self.c, "network_efficiency": self.c["replica_efficiency"]}
        return float(ring_seconds(nbytes, ranks, beside, self.host, c, times))

    def passed(self, moments: Sequence[Moment]) -> PassSeconds:
        """A forward or backward, without what units gather and reduce."""
        found = PassSeconds()
        d = self.degrees
        groups = {
            "tensor": (d.tensor, 1),
            "context": (d.context, d.tensor),
            "expert": (d.expert, 1),
        }
        for moment in moments:
            spent = piece_seconds(moment.piece, self.c)
            busy = spent.computing
            for sent in moment.piece.operators.sent if moment.piece.operators else ():
                seconds = sent_seconds(sent, *groups[sent.group], self.host, self.c)
                found.parts[f"{sent.group} parallel"] += seconds
                busy += seconds
            found.parts["products"] += spent.products
            found.parts["attention"] += spent.attention
            found.parts["elementwise"] += spent.elementwise
            # Some kernels of a piece wait for the host and others for the device, so that it takes
            # more than the longer of both.
            longer, shorter = max(spent.launches, busy), min(spent.launches, busy)
            found.parts["launches"] += longer - busy + self.c["interleaves"] * shorter
            found.flops += moment.piece.work.flops
        return found

    def hidden(self, communicating: float, computing: float) -> float:
        """What a step is longer by for collectives beside what computes."""
        hides = min(communicating, self.c["hides"] * computing)
        return communicating - hides + self.c["slows"] * hides


@dataclass
class Stage:
    """A chunk of the model on a rank: seconds of its passes, and of what its units do once a
    step."""

    forward: PassSeconds
    backward: PassSeconds
    once: float
    update: float


def stage_of_chunk(chunk: Chunk, sharding: Sharding, layout: Layout, optimizer: Optimizer) -> Stage:
    """A chunk's seconds."""
    forward, backward = layout.passed(chunk.forward), layout.passed(chunk.backward)
    gathered, reduced, update = 0.0, 0.0, 0.0
    tensor = layout.degrees.tensor
    states_shared = sharding.shares == "states"
    for name, unit in chunk.step.units.items():
        trained = [t for t in unit.tensors if t.fqn not in unit.frozen]
        computed = sum(t.numel * sharding.computed(t.dtype) for t in unit.tensors)
        summed = sum(t.numel * sharding.reduced(t.dtype) for t in trained)
        shards, replicas = sharding.shards_of(name), sharding.replicas
        if sharding.shares != "all":
            replicas *= sharding.shards
        gathered += layout.ring(computed, shards, tensor)
        reduced += layout.ring(summed, shards, tensor)
        # Replicas sum what they have of a gradient, which an all-reduce moves twice. Where they
        # share states each gets a part of the sum, and what they updated is gathered again.
        among = (replicas, tensor * shards)
        reduced += layout.replicas(summed / shards, *among, 1 if states_shared else 2)
        gathered += layout.replicas(computed, *among) if states_shared else 0.0
        updated = shards * replicas if states_shared else shards
        update += sum(_touched(t, optimizer) for t in trained) / updated
    update /= layout.c["memory_rate"] * layout.c["memory_efficiency"]
    # What is sharded comes and goes with every microbatch where the runtime reduces each; whole
    # parameters (below stage 3) are gathered once a step. The rest waits for the last backward,
    # which hides it, but for a distributed optimizer, which begins when all gradients are there.
    each = sharding.shares == "all" and sharding.reduces == "each"
    comes = each and sharding.zero == 3
    again = gathered if comes and sharding.reshard_after_forward else 0.0
    if comes:
        forward.parts[SHARDED] = layout.hidden(gathered, forward.seconds)
    if each:
        backward.parts[SHARDED] = layout.hidden(reduced + again, backward.seconds)
    once = (0.0 if comes else gathered) + (0.0 if each else reduced)
    if not (states_shared or sharding.waits):
        once = layout.hidden(once, forward.seconds + backward.seconds)
    return Stage(forward, backward, once, update)


def _touched(tensor: TensorSpec, optimizer: Optimizer) -> int:
    """Bytes that an update reads and writes: weights, states, and gradients twice, once for their
    norm."""
    kept = sum(state.bytes for state in states(optimizer, tensor) if state.place == "device")
    return 2 * kept + tensor.numel * (2 * element_bytes(tensor.dtype) + 2 * element_bytes("fp32"))


def step_time(
    ranks: Sequence[Sequence[Chunk]],
    sharding: Sharding,
    layout: Layout,
    optimizer: Optimizer,
    batch: BatchSection,
    dtype: str,
) -> StepTime:
    """A step of a pipeline's ``ranks``, each with its chunks; one rank where there is none.
    ``batch`` is that of a data rank, ``dtype`` what most products are in."""
    degrees, c = layout.degrees, layout.c
    made: dict[int, Stage] = {}

    def stage(chunk: Chunk) -> Stage:
        key = id(chunk.recording)
        if key not in made:
            made[key] = stage_of_chunk(chunk, sharding, layout, optimizer)
        return made[key]

    stages = [[stage(chunk) for chunk in chunks] for chunks in ranks]
    times = degrees.microbatches
    busy = [sum(s.forward.seconds + s.backward.seconds for s in each) * times for each in stages]
    slowest = stages[max(range(len(busy)), key=busy.__getitem__)]
    parts: Counter[str] = Counter()
    for each in slowest:
        for work in (each.forward, each.backward):
            for name, seconds in work.parts.items():
                parts[name] += seconds * times
        parts[SHARDED if sharding.shares == "all" else "gradients"] += each.once
        parts["optimizer"] += each.update
    if degrees.pipeline > 1:
        sent = max(chunk.sent for chunks in ranks for chunk in chunks)
        ends = _makespan(stages, degrees, _transfer(sent, layout))
        # A rank that never waits has none, and its sum in another order may end a bit earlier.
        parts["pipeline bubble"] = max(ends - max(busy), 0.0)
    parts["fixed"] = c["step_latency"]
    seconds = sum(parts.values())
    flops = sum(s.forward.flops for each in stages for s in each)
    world = degrees.world_size
    return StepTime(
        seconds,
        seconds / (1 + c["range"]),
        seconds * (1 + c["range"]),
        {name: spent for name, spent in parts.items() if spent},
        batch.size * batch.sequence * degrees.data_replicate * degrees.data_shard,
        FORWARDS * flops * times * world // degrees.pipeline,
        world * product_rate(dtype, c),
        world,
        layout.source,
        "tokens" if batch.sequence > 1 else "samples",
    )


def _transfer(nbytes: int, layout: Layout) -> float:
    """Seconds until what a stage sends is at the next one, which is on another host unless all
    ranks of a stage and the next are on one."""
    rate = link_rate if layout.degrees.world_size <= layout.host else network_rate
    return float(nbytes / rate(layout.c) + layout.c["collective_latency"])


def _makespan(stages: Sequence[Sequence[Stage]], degrees: Degrees, transfer: float) -> float:
    """When the last pass of a pipeline ends, each begun when its rank is free and what it waits for
    has come."""
    count = degrees.pipeline * degrees.chunks
    orders = order(degrees.schedule, degrees.pipeline, degrees.microbatches, degrees.chunks)
    free = [0.0] * degrees.pipeline
    place = [0] * degrees.pipeline
    done: dict[tuple[str, int, int], float] = {}
    moved = True
    while moved:
        moved = False
        for rank, passes in enumerate(orders):
            while place[rank] < len(passes):
                each = passes[place[rank]]
                at = stage_of(degrees.schedule, degrees.pipeline, rank, each.chunk)
                key = "forward" if each.kind == "forward" else "backward"
                before, needs = at - 1 if key == "forward" else at + 1, 0.0
                if each.kind != "weight_backward" and 0 <= before < count:
                    came = done.get((key, before, each.microbatch))
                    if came is None:
                        break
                    needs = came + transfer
                stage = stages[rank][each.chunk]
                work = stage.forward if key == "forward" else stage.backward
                # A split backward computes the gradients of inputs and those of weights apart, each
                # about half.
                share = 0.5 if each.kind in ("input_backward", "weight_backward") else 1.0
                free[rank] = max(free[rank], needs) + work.seconds * share
                if each.kind != "weight_backward":
                    done[key, at, each.microbatch] = free[rank]
                place[rank] += 1
                moved = True
    assert all(n == len(passes) for n, passes in zip(place, orders, strict=True)), "a deadlock"
    return max(free)
