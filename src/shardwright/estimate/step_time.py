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
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from msgspec import UNSET, UnsetType

from shardwright.core.cluster import Cluster
from shardwright.core.footprint import StepTime
from shardwright.core.optimizers import Optimizer
from shardwright.core.recording import Piece, RecordedUnit
from shardwright.core.tensor import TensorSpec, element_bytes
from shardwright.cost.clock import (
    beside_launches,
    between,
    has_clock,
    near_of,
    piece_seconds,
    reached,
    ring_seconds,
    sent_seconds,
)
from shardwright.cost.dense import product_rate
from shardwright.cost.network import among_replicas
from shardwright.heap.machine import Sharding
from shardwright.heap.rank_step import Chunk, states
from shardwright.job.job import BatchSection, degrees_of
from shardwright.job.parallel import Degrees
from shardwright.job.pipelining import order
from shardwright.job.pipelining import stage_of as place_of
from shardwright.planner.step_draft import StepDraft

FORWARDS = 3  # a backward takes twice the FLOPs of a forward
SHARDED = "sharded parameters"


@dataclass
class PassSeconds:
    """Seconds of a pass by what takes them."""

    parts: Counter[str] = field(default_factory=Counter)
    flops: Counter[str] = field(default_factory=Counter)  # of units

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    def add(self, other: PassSeconds, times: int = 1) -> None:
        """What ``times`` of another one take, too."""
        for name, seconds in other.parts.items():
            self.parts[name] += times * seconds
        for unit, flops in other.flops.items():
            self.flops[unit] += times * flops


@dataclass
class UnitSums:
    """Of units that the same ranks share: how many they are, and bytes as they are stored, as they
    are gathered, as their gradients are summed, and that an update of all of them touches."""

    units: int = 0
    stored: int = 0
    computed: int = 0
    summed: int = 0
    touched: int = 0

    def add(self, other: UnitSums, times: int = 1) -> None:
        """``times`` more units like others."""
        self.units += times * other.units
        self.stored += times * other.stored
        self.computed += times * other.computed
        self.summed += times * other.summed
        self.touched += times * other.touched


@dataclass
class StageWork:
    """What a stage computes, whoever shares its units: a forward, a backward, units that all data
    ranks share and those with experts that other ranks do not have. Works of layers add up."""

    forward: PassSeconds = field(default_factory=PassSeconds)
    backward: PassSeconds = field(default_factory=PassSeconds)
    units: UnitSums = field(default_factory=UnitSums)
    experts: UnitSums = field(default_factory=UnitSums)

    def add(self, other: StageWork, times: int = 1) -> None:
        """``times`` another one, too."""
        self.forward.add(other.forward, times)
        self.backward.add(other.backward, times)
        self.units.add(other.units, times)
        self.experts.add(other.experts, times)

    def add_unit(
        self, name: str, unit: RecordedUnit, sharding: Sharding, optimizer: Optimizer
    ) -> None:
        """One more unit, called ``name``."""
        trained = [t for t in unit.tensors if t.fqn not in unit.frozen]
        found = UnitSums(
            1,
            sum(t.numel * sharding.stored(t.dtype) for t in unit.tensors),
            sum(t.numel * sharding.computed(t.dtype) for t in unit.tensors),
            sum(t.numel * sharding.reduced(t.dtype) for t in trained),
            sum(_touched(t, optimizer, sharding) for t in trained),
        )
        (self.experts if sharding.is_experts(name) else self.units).add(found)


@dataclass(frozen=True)
class RankClock:
    """Where the ranks of each degree are, ``host`` of them on one, and the constants ``c`` of their
    machine as they are reached, of which those of the clock are from a ``source``. Ranks of a group
    lie ``beside`` apart from each other."""

    degrees: Degrees
    host: int
    c: Mapping[str, float]
    source: str

    @classmethod
    def of(cls, degrees: Degrees, cluster: Cluster) -> RankClock:
        """On a machine with a clock."""
        host = cluster.local_world_size or degrees.world_size
        return cls(degrees, host, reached(cluster.values), cluster.constants["range"].source)

    def rings(
        self, sums: UnitSums, nbytes: float, ranks: int, beside: int, times: int = 1
    ) -> float:
        """Seconds of a collective of each unit over some of them, which together move so much."""
        each = nbytes / max(sums.units, 1)
        seconds = ring_seconds(each, ranks, beside, self.host, self.c, times)
        return float(sums.units * seconds)

    def among_replicas(
        self, sums: UnitSums, nbytes: float, ranks: int, beside: int, times: int = 1
    ) -> float:
        """The same among those that have the same parameters."""
        c = among_replicas(self.c, ranks, near_of(ranks, beside, self.host))
        return replace(self, c=c).rings(sums, nbytes, ranks, beside, times)

    def passed(self, pieces: Sequence[Piece]) -> PassSeconds:
        """A forward or backward, without what units gather and reduce."""
        found = PassSeconds()
        d = self.degrees
        groups = {
            "tensor": (d.tensor, 1),
            "context": (d.context, d.tensor),
            "expert": (d.expert, 1),
        }
        # Blocks that repeat are one piece again and again.
        times = Counter(map(id, pieces))
        for piece in {id(piece): piece for piece in pieces}.values():
            one = PassSeconds(flops=Counter({piece.unit: piece.work.flops}))
            spent = piece_seconds(piece, self.c)
            busy = spent.computing
            for sent in piece.operators.sent if piece.operators else ():
                seconds = sent_seconds(sent, *groups[sent.group], self.host, self.c)
                one.parts[f"{sent.group} parallel"] += seconds
                busy += seconds
            one.parts["products"] += spent.products
            one.parts["attention"] += spent.attention
            one.parts["elementwise"] += spent.elementwise
            one.parts["launches"] += beside_launches(busy, spent.launches, self.c) - busy
            found.add(one, times[id(piece)])
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

    @cached_property
    def seconds(self) -> tuple[float, float]:
        """Of a forward and of a backward."""
        return self.forward.seconds, self.backward.seconds


def work_of_chunk(
    chunk: Chunk, sharding: Sharding, clock: RankClock, optimizer: Optimizer
) -> StageWork:
    """What a recorded chunk of the model computes."""
    forward, backward = ([m.piece for m in its] for its in (chunk.forward, chunk.backward))
    work = StageWork(clock.passed(forward), clock.passed(backward))
    for name, unit in chunk.step.units.items():
        work.add_unit(name, unit, sharding, optimizer)
    return work


def stage_of(work: StageWork, sharding: Sharding, clock: RankClock, optimizer: Optimizer) -> Stage:
    """A chunk's seconds."""
    forward, backward = PassSeconds(), PassSeconds()
    forward.add(work.forward)
    backward.add(work.backward)
    gathered, reduced, update, c = 0.0, 0.0, 0.0, clock.c
    tensor, host = clock.degrees.tensor, c["host_link_rate"]
    away = sharding.on_gpu and sharding.offload
    on_host = away or (sharding.on_gpu and optimizer.offload)
    states_shared = sharding.shares == "states"
    for sums, ranks in (
        (work.units, sharding.shards),
        (work.experts, sharding.expert_shards),
    ):
        shards, replicas = ranks if sharding.shares == "all" else 1, sharding.replicas
        if sharding.shares != "all":
            replicas *= sharding.shards
        gathered += clock.rings(sums, sums.computed, shards, tensor)
        reduced += clock.rings(sums, sums.summed, shards, tensor)
        # Replicas sum what they have of a gradient, which an all-reduce moves twice. Where they
        # share states each gets a part of the sum, and what they updated is gathered again.
        among = (replicas, tensor * shards)
        reduced += clock.among_replicas(
            sums, sums.summed / shards, *among, 1 if states_shared else 2
        )
        gathered += clock.among_replicas(sums, sums.computed, *among) if states_shared else 0.0
        among_all = shards * replicas if states_shared else shards
        update += sums.touched / among_all / c["ddr_rate" if on_host else "memory_rate"]
        if away:  # a share goes to the device before a gather, its sum comes back
            gathered += sums.stored / shards / host
            reduced += sums.summed / shards / host
        elif on_host:  # gradients go there and parameters come back, once a step
            update += (sums.summed + sums.computed) / among_all / host
    # What is sharded comes and goes with every microbatch where the runtime reduces each; whole
    # parameters (below stage 3) are gathered once a step. The rest waits for the last backward,
    # which hides it, but for a distributed optimizer, which begins when all gradients are there.
    each = sharding.shares == "all" and sharding.reduces == "each"
    comes = each and sharding.zero == 3
    again = gathered if comes and sharding.reshard_after_forward else 0.0
    if comes:
        forward.parts[SHARDED] = clock.hidden(gathered, forward.seconds)
    if each:
        backward.parts[SHARDED] = clock.hidden(reduced + again, backward.seconds)
    once = (0.0 if comes else gathered) + (0.0 if each else reduced)
    if not (states_shared or sharding.waits):
        once = clock.hidden(once, forward.seconds + backward.seconds)
    return Stage(forward, backward, once, update)


def _touched(tensor: TensorSpec, optimizer: Optimizer, sharding: Sharding) -> int:
    """Bytes that an update reads and writes: weights, states, and gradients twice, once for their
    norm; of one of many kernels what these do."""
    on_host = sharding.offload or optimizer.offload or not sharding.on_gpu
    if passes := optimizer.host_passes if on_host else optimizer.passes:
        return tensor.numel * (passes + 1) * element_bytes("fp32")
    counted = (s for s in states(optimizer, tensor) if s.place == "device" or optimizer.offload)
    kept = sum(state.bytes for state in counted)
    return 2 * kept + tensor.numel * (2 * element_bytes(tensor.dtype) + 2 * element_bytes("fp32"))


def step_time(
    ranks: Sequence[Sequence[Chunk]],
    sharding: Sharding,
    clock: RankClock,
    optimizer: Optimizer,
    batch: BatchSection,
    dtype: str,
) -> StepTime:
    """A step of a pipeline's ``ranks``, each with its chunks; one rank where there is none.
    ``batch`` is that of a data rank, ``dtype`` what most products are in."""
    made: dict[int, Stage] = {}

    def stage(chunk: Chunk) -> Stage:
        key = id(chunk.recording)
        if key not in made:
            work = work_of_chunk(chunk, sharding, clock, optimizer)
            made[key] = stage_of(work, sharding, clock, optimizer)
        return made[key]

    stages = [[stage(chunk) for chunk in chunks] for chunks in ranks]
    sent = max(chunk.sent for chunks in ranks for chunk in chunks)
    return time_of(stages, sharding, clock, batch, dtype, sent)


def busy_seconds(stages: Sequence[Sequence[Stage]], degrees: Degrees) -> list[float]:
    """What every rank of a pipeline computes in a step, without what it does once."""
    return [sum(sum(s.seconds) for s in each) * degrees.microbatches for each in stages]


def time_of(
    stages: Sequence[Sequence[Stage]],
    sharding: Sharding,
    clock: RankClock,
    batch: BatchSection,
    dtype: str,
    sent: int,
) -> StepTime:
    """A step of the ``stages`` of every rank; each sends so many bytes to the next one."""
    degrees, c = clock.degrees, clock.c
    times = degrees.microbatches
    busy = busy_seconds(stages, degrees)
    slowest = stages[max(range(len(busy)), key=busy.__getitem__)]
    parts: Counter[str] = Counter()
    for each in slowest:
        for work in (each.forward, each.backward):
            for name, seconds in work.parts.items():
                parts[name] += seconds * times
        parts[SHARDED if sharding.shares == "all" else "gradients"] += each.once
        parts["optimizer"] += each.update
    if degrees.pipeline > 1:
        ends = makespan(stages, degrees, transfer_seconds(sent, clock))
        # A rank that never waits has none, and its sum in another order may end a bit earlier.
        parts["pipeline bubble"] = max(ends - max(busy), 0.0)
    parts["fixed"] = c["step_latency"]
    flops = sum(_model_flops(s.forward, s.backward) for each in stages for s in each) * times
    return _told(parts, flops * degrees.world_size // degrees.pipeline, clock, batch, dtype)


def _model_flops(forward: PassSeconds, backward: PassSeconds) -> int:
    """Three times a forward, but for units whose step takes less: what is frozen has no gradient of
    its own, and a loss by chunks computes those of the head in its forward."""
    there, back = (_of_outermost(each.flops) for each in (forward, backward))
    found = sum(min(FORWARDS * flops, flops + back[unit]) for unit, flops in there.items())
    # A head whose weight is the embedding's has its backward there.
    elsewhere = sum(flops for unit, flops in back.items() if not there[unit])
    return min(found + elsewhere, FORWARDS * sum(there.values()))


def _of_outermost(flops: Counter[str]) -> Counter[str]:
    """Of units inside of others, as experts are, as those of the outermost."""
    found: Counter[str] = Counter()
    for unit, its in sorted(flops.items()):
        inside = (other for other in found if other and unit.startswith(f"{other}."))
        found[next(inside, unit)] += its
    return found


def _told(
    parts: Counter[str], flops: int, clock: RankClock, batch: BatchSection, dtype: str
) -> StepTime:
    """With what seconds come to; ``flops`` are those of all ranks that the model needs."""
    seconds, degrees, c = sum(parts.values()), clock.degrees, clock.c
    world = degrees.world_size
    return StepTime(
        seconds,
        *between(seconds, c),
        {name: spent for name, spent in parts.items() if spent},
        batch.size * batch.sequence * degrees.data_replicate * degrees.data_shard,
        flops,
        world * product_rate(dtype, c),
        world,
        clock.source,
        "tokens" if batch.sequence > 1 else "samples",
    )


def planned_time(draft: StepDraft) -> StepTime | UnsetType:
    """A step's seconds as a plan has them, of its slowest rank; none without a clock."""
    problem = draft.problem
    if not has_clock(problem.values):
        return UNSET
    step, job = problem.model.step, problem.job
    clock = RankClock.of(degrees_of(job, draft.ranks), problem.cluster)
    forward, backward = (
        clock.passed([m.piece for m in its]) for its in (step.forward, step.backward)
    )
    parts = forward.parts + backward.parts
    dense = sum(sum(phases.values()) for phases in draft.dense_seconds.values())
    update = sum(choice.spent.update for choice in draft.units)
    shown = max(dense - sum(parts.values()) - update, 0.0)
    parts[SHARDED if any(u.comes for u in draft.units) else "gradients"] = shown
    parts["optimizer"], parts["fixed"] = update, clock.c["step_latency"]
    seconds = max(draft.seconds, key=lambda phases: sum(phases.values()))
    parts["loading"] = seconds.get("load", 0.0)
    parts["tables"] = sum(seconds.values()) - sum(parts.values()) if draft.tables else 0.0
    dtype = problem.unit_space.context.param_dtype or "fp32"
    flops = _model_flops(forward, backward) * draft.ranks
    return _told(parts, flops, clock, job.batch, dtype)


def unranged_time(draft: StepDraft) -> StepTime:
    """The same of a machine without a clock, by phase: how far it is off nobody knows."""
    batch, phases = draft.problem.job.batch, max(draft.seconds, key=lambda its: sum(its.values()))
    seconds = draft.max_rank_seconds
    tokens = batch.size * batch.sequence * draft.ranks
    counted: Literal["tokens", "samples"] = "tokens" if batch.sequence > 1 else "samples"
    source = f"the constants of {draft.problem.cluster.name}"
    return StepTime(
        seconds, seconds, seconds, dict(phases), tokens, 0, 1.0, draft.ranks, source, counted
    )


def transfer_seconds(nbytes: int, clock: RankClock) -> float:
    """Seconds until what a stage sends is at the next one, which is on another host unless all
    ranks of a stage and the next are on one."""
    near = clock.degrees.world_size <= clock.host
    rate = clock.c["all_gather_rate" if near else "inter_host_rate"]
    return float(nbytes / rate + clock.c["collective_latency"])


def makespan(stages: Sequence[Sequence[Stage]], degrees: Degrees, transfer: float) -> float:
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
                at = place_of(degrees.schedule, degrees.pipeline, rank, each.chunk)
                key = "forward" if each.kind == "forward" else "backward"
                before, needs = at - 1 if key == "forward" else at + 1, 0.0
                if each.kind != "weight_backward" and 0 <= before < count:
                    came = done.get((key, before, each.microbatch))
                    if came is None:
                        break
                    needs = came + transfer
                seconds = stages[rank][each.chunk].seconds[key == "backward"]
                # A split backward computes the gradients of inputs and those of weights apart, each
                # about half.
                share = 0.5 if each.kind in ("input_backward", "weight_backward") else 1.0
                free[rank] = max(free[rank], needs) + seconds * share
                if each.kind != "weight_backward":
                    done[key, at, each.microbatch] = free[rank]
                place[rank] += 1
                moved = True
    assert all(n == len(passes) for n, passes in zip(place, orders, strict=True)), "a deadlock"
    return max(free)
