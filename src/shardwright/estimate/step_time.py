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
from shardwright.cost.clock import piece_seconds, ring_seconds, sent_seconds
from shardwright.cost.dense import product_rate
from shardwright.heap.machine import Sharding
from shardwright.heap.rank_step import Chunk, states
from shardwright.job.parallel import Degrees
from shardwright.job.pipelining import order, stage_of

FORWARDS = 3  # a backward takes twice the FLOPs of a forward


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
    """Where the ranks of each degree are: ``host`` ranks share one; those of a group lie
    ``beside`` apart from each other."""

    degrees: Degrees
    host: int
    c: Mapping[str, float]

    def ring(self, nbytes: float, ranks: int, beside: int, times: int = 1) -> float:
        """Seconds of a collective over some of them."""
        return float(ring_seconds(nbytes, ranks, beside, self.host, self.c, times))

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
            found.parts["launches"] += max(spent.launches - busy, 0.0)
            found.flops += moment.piece.work.flops
        return found

    def hidden(self, communicating: float, computing: float) -> float:
        """What a step is longer by for collectives beside what computes."""
        hides = min(communicating, self.c["hides"] * computing)
        return communicating - hides + self.c["slows"] * hides


@dataclass
class Stage:
    """A chunk of the model on a rank: seconds of its passes, and once a step of its units."""

    forward: PassSeconds
    backward: PassSeconds
    once: float
    update: float


def stage_of_chunk(chunk: Chunk, sharding: Sharding, layout: Layout, optimizer: Optimizer) -> Stage:
    """A chunk's seconds; ``once`` are those of collectives of units once a step."""
    forward, backward = layout.passed(chunk.forward), layout.passed(chunk.backward)
    gathered, reduced, update = 0.0, 0.0, 0.0
    c, degrees = layout.c, layout.degrees
    for name, unit in chunk.step.units.items():
        trained = [t for t in unit.tensors if t.fqn not in unit.frozen]
        shards, replicas = sharding.shards_of(name), sharding.replicas
        computed = sum(t.numel * sharding.computed(t.dtype) for t in unit.tensors)
        summed = sum(t.numel * sharding.reduced(t.dtype) for t in trained)
        if shards == 1 and sharding.shares != "all":
            replicas *= sharding.shards
        gathered += layout.ring(computed, shards, degrees.tensor)
        reduced += layout.ring(summed, shards, degrees.tensor)
        if replicas > 1:
            # With states shared a sum is scattered, and what each updated is gathered again.
            beside = degrees.tensor * shards
            reduced += layout.ring(
                summed / shards, replicas, beside, 2 - (sharding.shares != "all")
            )
            if sharding.shares == "states":
                gathered += layout.ring(computed, replicas, beside)
        update += (
            sum(_touched(t, optimizer) for t in trained)
            / shards
            / (replicas if sharding.shares == "states" else 1)
        )
    update /= c["memory_rate"] * c["memory_efficiency"]
    once = 0.0
    every = sharding.reduces == "each" and sharding.shares == "all"
    again = every and sharding.reshard_after_forward and sharding.zero == 3
    if every and sharding.zero == 3:
        forward.parts["sharded parameters"] = layout.hidden(gathered, forward.seconds)
        both = reduced + (gathered if again else 0.0)
        backward.parts["sharded parameters"] = layout.hidden(both, backward.seconds)
    elif sharding.shares == "states":
        once = gathered + reduced
    else:
        once = layout.hidden(gathered + reduced, forward.seconds + backward.seconds)
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
    tokens: int,
    dtype: str,
    source: str,
) -> StepTime:
    """A step of a pipeline's ``ranks``, each with its chunks; one rank where there is none."""
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
        parts["sharded parameters" if sharding.shares == "all" else "gradients"] += each.once
        parts["optimizer"] += each.update
    if degrees.pipeline > 1:
        sent = max(chunk.sent for chunks in ranks for chunk in chunks)
        ends = _makespan(stages, degrees, _transfer(sent, layout))
        parts["pipeline bubble"] = ends - max(busy)
    parts["fixed"] = c["step_latency"]
    seconds = sum(parts.values())
    flops = sum(s.forward.flops for each in stages for s in each)
    world = degrees.world_size
    return StepTime(
        seconds,
        seconds / (1 + c["range"]),
        seconds * (1 + c["range"]),
        {name: spent for name, spent in parts.items() if spent},
        tokens,
        FORWARDS * flops * times * world // degrees.pipeline,
        world * product_rate(dtype, c),
        world,
        source,
    )


def _transfer(nbytes: int, layout: Layout) -> float:
    """Seconds until what a stage sends is at the next one, which is on another host unless all
    ranks of a stage and the next are on one."""
    near = layout.degrees.world_size <= layout.host
    c = layout.c
    rate = (
        c["all_gather_rate"] * c["link_efficiency"]
        if near
        else c["inter_host_rate"] * c["network_efficiency"]
    )
    return nbytes / rate + c["collective_latency"]


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
