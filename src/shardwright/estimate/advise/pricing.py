"""Seconds of every layout, and a bound of its memory, from one recording for each way to divide a
layer: layouts that cut layers alike differ in sums.
"""

# `memory` records each stage of a layout and walks it. Thousands of layouts have only a hundred
# different layers between them, so here the whole model is recorded once for each of these, cut
# into what is before its layers, one layer of each sort, and what is behind; a stage is so many of
# them. What must stay true: a step put together so takes as long as `memory` says (a test compares
# both), or the order of layouts is not that of the figures that are printed.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import compress
from typing import Any, NamedTuple

import msgspec

from shardwright.core.advice import Layout
from shardwright.core.footprint import StepTime
from shardwright.core.recording import BlockNames, Piece, Recording
from shardwright.core.tensor import element_bytes
from shardwright.estimate.advise.shares import NEAR, Model, Share, near, share_of
from shardwright.estimate.advise.space import Space
from shardwright.estimate.fit.variants import UnevenError, drawn_between
from shardwright.estimate.stages import ModelStage, stages_of_ranks
from shardwright.estimate.step_time import (
    RankClock,
    Stage,
    StageWork,
    busy_seconds,
    stage_of,
    time_of,
    transfer_seconds,
)
from shardwright.estimate.unplanned import (
    ends_of,
    machine_of,
    optimizer_of,
    recorded_model,
    sharding,
    treatment_of,
)
from shardwright.heap.ledger import Ledger
from shardwright.heap.machine import Sharding
from shardwright.heap.rank_step import states
from shardwright.job.job import Job, memory_of, parallel_of
from shardwright.job.parallel import Degrees, experts_of
from shardwright.job.pipelining import State, checked, highest, maximal, named, representative
from shardwright.planner.profiles import cluster_of
from shardwright.planner.variation import changed
from shardwright.trace.checkpointing import Policy, policy

PAIRS = ((1, 2), (2, 4))  # sizes of microbatches that larger ones are drawn by
# Before a backward: its chunk, of how many microbatches each chunk keeps something then, and which
# have gradients of earlier ones.
InFlight = tuple[int, State, State]


class _Kept(NamedTuple):
    """Bytes of a stage: of its units between steps, of what it updates, saved by a forward, of its
    units as they compute and of gradients as they are summed; whose backward begins behind the
    head's."""

    stage: ModelStage
    resident: int
    updated: int
    saved: int
    whole: int
    summed: int
    begun: Share


class Pricing:
    """Prices layouts of a ``space`` with the constants of its cluster's clock."""

    def __init__(self, space: Space) -> None:
        self.space, self.job = space, space.job
        self.cluster, _ = cluster_of(changed(self.job, {"cluster.world_size": space.world}))
        self.section = memory_of(self.job)
        self.device = space.device
        self.optimizer = optimizer_of(self.job)
        self.dtype = self.section.param_dtype or "fp32"
        self.experts = experts_of(parallel_of(self.job), self.job.model.traits)
        shape = space.shape
        self.tied = shape is not None and shape.tied_embeddings
        self._clock: RankClock | None = None
        self._shardings: dict[tuple[int, Degrees], Sharding] = {}
        self._models: dict[tuple[object, ...], Model] = {}
        self._ranks: dict[tuple[object, ...], list[tuple[ModelStage, ...]]] = {}
        self._stages: dict[tuple[object, ...], Stage] = {}
        self._residents: dict[tuple[object, ...], tuple[int, int]] = {}
        self._works: dict[tuple[int, ModelStage], StageWork] = {}
        self._sums: dict[tuple[object, ...], _Kept] = {}
        self._in_flight: dict[
            tuple[object, ...], list[tuple[tuple[ModelStage, ...], set[InFlight]]]
        ] = {}
        self._recordings: dict[tuple[object, ...], Recording] = {}
        # Whether what was drawn is what was recorded, by sizes and what divides a layer: under
        # another policy the same pieces run again.
        self._on_line: dict[tuple[object, ...], bool] = {}

    # ---- seconds -------------------------------------------------------------------------------

    def sharding(self, layout: Layout) -> Sharding:
        """How a layout's data ranks share what they have."""
        degrees = self.space.degrees(layout)
        key = layout.zero, degrees
        if key not in self._shardings:
            section = memory_of(self.space.job_of(layout)) if layout.zero else self.section
            on_gpu, block = self.device == "cuda", self.optimizer.block
            self._shardings[key] = sharding(section, degrees, on_gpu, self.experts, block)
        return self._shardings[key]

    def clock(self, layout: Layout) -> RankClock:
        """Where a layout's ranks are, with the constants."""
        degrees = self.space.degrees(layout)
        if self._clock is None:
            self._clock = RankClock.of(degrees, self.cluster)
        return replace(self._clock, degrees=degrees)

    def stages(self, layout: Layout) -> list[list[Stage]]:
        """Of every rank of its pipeline, chunk by chunk."""
        cut, clock = self.sharding(layout), self.clock(layout)
        model = self.model(layout)
        ways = (layout.data_shard, layout.data_replicate, layout.zero)
        found = []
        for rank in self.ranks(layout):
            of_rank = []
            for stage in rank:
                key = (id(model), stage, ways)
                if key not in self._stages:
                    work = self._work(model, stage)
                    self._stages[key] = stage_of(work, cut, clock, self.optimizer)
                of_rank.append(self._stages[key])
            found.append(of_rank)
        return found

    def ranks(self, layout: Layout) -> list[tuple[ModelStage, ...]]:
        """Which stages of the model every rank of the pipeline has, or others like them."""
        model, key = self.model(layout), self._ranks_key(layout)
        if key not in self._ranks:
            ends = ends_of(self.section)
            ranks = stages_of_ranks(len(model.layers), self.space.degrees(layout), ends)
            self._ranks[key] = [tuple(map(model.like, its)) for its in ranks]
        return self._ranks[key]

    def _work(self, model: Model, stage: ModelStage) -> StageWork:
        """What a stage computes, however it is shared."""
        key = id(model), stage
        if key not in self._works:
            self._works[key] = work = StageWork()
            for share, times in model.shares(stage):
                work.add(share.work, times)
        return self._works[key]

    def _ranks_key(self, layout: Layout) -> tuple[object, ...]:
        model = self.model(layout)
        return len(model.layers), model.alike, layout.pipeline, layout.schedule, layout.chunks

    def least_seconds(self, layout: Layout) -> float:
        """What a step takes at least: a rank begins when a microbatch has come through the stages
        before its first, and what its last backward leaves goes back through them. Where gradients
        of weights come later than those of inputs they may be all that is left then."""
        found, clock = self.stages(layout), self.clock(layout)
        busy = busy_seconds(found, clock.degrees)
        slowest = found[max(range(len(busy)), key=busy.__getitem__)]
        extra = sum(each.once + each.update for each in slowest) + clock.c["step_latency"]
        if layout.pipeline == 1:
            return busy[0] + extra
        sent = transfer_seconds(self.model(layout).stream, clock)
        # The first chunks of all ranks are the first stages, in a loop as in a V.
        ends, before, back = 0.0, 0.0, not named(layout.schedule).split
        for seconds, of_rank in zip(busy, found, strict=True):
            ends = max(ends, before + seconds)
            first = of_rank[0]
            before += first.forward.seconds + sent
            before += (first.backward.seconds + sent) * back
        return ends + extra

    def time(self, layout: Layout) -> StepTime:
        """A step of a layout, as ``memory`` says it."""
        times = self.space.microbatches(layout) * layout.micro_batch
        batch = msgspec.structs.replace(self.job.batch, size=times)
        model = self.model(layout)
        return time_of(
            self.stages(layout),
            self.sharding(layout),
            self.clock(layout),
            batch,
            self.dtype,
            model.stream if layout.pipeline > 1 else 0,
        )

    # ---- recordings ----------------------------------------------------------------------------

    def model(self, layout: Layout) -> Model:
        """The shares of the model under a layout, from a recording of all of it."""
        key = (
            layout.tensor, layout.context, layout.expert, layout.micro_batch, layout.compile,
            layout.checkpointing, layout.pipeline > 1 and self.tied,
        )  # fmt: skip
        if key not in self._models:
            chosen = policy(layout.checkpointing)
            if chosen.picks_some and self.space.shape is not None:
                self._models[key] = self._of_some(layout, chosen)
            else:
                self._models[key] = self._recorded(layout)
        return self._models[key]

    def _of_some(self, layout: Layout, chosen: Policy) -> Model:
        """Some layers fully checkpointed, the others not."""
        none, full = (
            self.model(msgspec.structs.replace(layout, checkpointing=name))
            for name in ("none", "full")
        )
        # Blocks behind the last are picked with every so many, and are not of the first.
        end = none.end if chosen.first else full.end
        return none._replace(chosen=chosen, picked=full.layers, end=end)

    def _recorded(self, layout: Layout) -> Model:
        # One data rank that runs one microbatch: what is shared among more is the machine's.
        alone = msgspec.structs.replace(layout, pipeline=1, schedule="", chunks=1, data_replicate=1)
        one = dict.fromkeys(
            ("data_replicate", "data_shard", "pipeline", "chunks", "microbatches"), 1
        )
        degrees = msgspec.structs.replace(self.space.degrees(layout), **one)
        job = self._small(self.space.job_of(alone), layout.pipeline > 1)
        found = self._between(job, degrees, layout.micro_batch)
        made = found or self._recording(job, degrees, layout.micro_batch)
        clock = replace(self.clock(layout), degrees=degrees)
        return self._divided(made, clock, self._stream(layout), NEAR if found else 0.0)

    def _small(self, job: Job, pipelined: bool) -> Job:
        """The job with one layer where all are alike, or two in a unit of the root's. Stages of a
        pipeline each have a head or an embedding of their own."""
        shape = self.space.shape
        if shape is None:
            return job
        tied = shape.tied_embeddings and not pipelined
        keys: dict[str, Any] = {"tied_embeddings": tied}
        if len(shape.moe_layers) in (0, shape.layers):
            few = min(1 + tied, shape.layers)
            keys |= {"layers": few, "moe_layers": tuple(range(few)) if shape.moe_layers else ()}
        model = msgspec.structs.replace(job.model, shape=msgspec.structs.replace(shape, **keys))
        return msgspec.structs.replace(job, model=model)

    def _between(self, job: Job, degrees: Degrees, size: int) -> Recording | None:
        """The step of a microbatch of a llama on the line through two smaller ones, if there is
        one: of one sample some copies are views, and what a lookup moves is at most its table."""
        for few in PAIRS if self.space.shape is not None else ():
            divided = (few, size, degrees.tensor, degrees.context, degrees.expert)
            if size <= few[-1] or self._on_line.get(divided) is False:
                continue
            made = {n: self._recording(job, degrees, n) for n in few}
            with suppress(UnevenError):
                found = drawn_between(made, size)
                if divided not in self._on_line:
                    real = self._recording(job, degrees, size)
                    self._on_line[divided] = near(found, real)
                if self._on_line[divided]:
                    return found
        return None

    def _recording(self, job: Job, degrees: Degrees, size: int) -> Recording:
        key = (size, degrees, job.memory, job.model.shape)
        if key not in self._recordings:
            batch = msgspec.structs.replace(job.batch, size=size)
            job = msgspec.structs.replace(job, batch=batch)
            treatment = treatment_of(memory_of(job), self.device, degrees)
            model = recorded_model(job, degrees, treatment)
            stage = ModelStage((0, model.layers), True, True)
            # Where routing is uneven a step is that of the usual rank, and the fullest takes more.
            section = msgspec.structs.replace(parallel_of(job), expert_load="p50")
            self._recordings[key] = model.recorded(section, stage).recording
        return self._recordings[key]

    def _stream(self, layout: Layout) -> int:
        shape = self.space.shape
        if shape is None:
            return 0
        parts = layout.tensor if self.space.degrees(layout).sequence else 1
        tokens = self.job.batch.sequence // layout.context // parts
        return layout.micro_batch * tokens * shape.dim * element_bytes(self.dtype)

    def _divided(self, recording: Recording, clock: RankClock, stream: int, off: float) -> Model:
        """A recording, whose bytes may be ``off`` by such a part, cut where its layers begin and
        end."""
        blocks = BlockNames(recording)
        cut = sharding(self.section, clock.degrees, self.device == "cuda", self.experts)
        parts: dict[object, tuple[list[Piece], list[Piece]]] = {}
        at: object = "begin"
        waiting: list[Piece] = []
        where = 0  # 0: forward, 1: backward
        for piece in recording.pieces:
            where = 1 if piece.point == "backward" else where
            home = blocks.home(piece.unit)
            # What is left behind a unit is the next one's: it prepares what that is given, which a
            # stage that begins there does, too, or is code of a root that has no unit of its own.
            # (Of a unit inside of a layer the rest of this comes behind it.)
            outer = home is None or piece.unit == home[0].recorded[home[1]]
            if piece.point in ("leave", "leave_backward") and outer:
                waiting.append(piece)
                continue
            if home is not None:
                at = home[0].name, home[1]
            elif at not in ("begin", "end"):
                at = "begin" if where else "end"
            parts.setdefault(at, ([], []))[where].extend((*waiting, piece))
            waiting.clear()
        parts["begin"][where].extend(waiting)
        found = {name: share_of(*pieces, clock, off) for name, pieces in parts.items()}
        entered = [p.unit for p in recording.pieces if p.point == "enter"]
        first = min(
            (k for k, name in enumerate(entered) if blocks.home(name)), default=len(entered)
        )
        for unit in recording.units:
            home = blocks.home(unit.name)
            early = unit.name not in entered or entered.index(unit.name) < first
            name = (home[0].name, home[1]) if home else "begin" if early else "end"
            share = found.setdefault(name, Share())
            share.work.add_unit(unit.name, unit, cut, self.optimizer)
            share.units[unit.name] = unit.tensors
            share.frozen |= set(unit.frozen)
            share.whole += sum(t.numel * cut.computed(t.dtype) for t in unit.tensors)
        every = [
            found[series.name, series.template(k)]
            for series in recording.series
            for k in range(len(series.names))
        ]
        numbers = [int(n.rpartition(".")[2]) for s in recording.series for n in s.names]
        order = sorted(range(len(every)), key=numbers.__getitem__)
        layers = [every[k] for k in order]
        if self.space.shape is not None:
            layers += layers[-1:] * (self.space.shape.layers - len(layers))
        alike = all(each is layers[1] for each in layers[2:])
        return Model(found["begin"], layers, found.get("end", Share()), stream, alike=alike)

    # ---- a bound of memory ---------------------------------------------------------------------

    def least_bytes(self, layout: Layout) -> int:
        """What the fullest rank has alive at least: what it keeps between steps, and what is saved
        where most microbatches are in flight and the backward of a layer begins."""
        cut, model = self.sharding(layout), self.model(layout)
        return max(
            self._of_rank(layout, cut, model, [self._kept(cut, model, each) for each in its], alive)
            for its, alive in self._alive(layout)
        )

    def _of_rank(
        self,
        layout: Layout,
        cut: Sharding,
        model: Model,
        chunks: Sequence[_Kept],
        alive: Iterable[InFlight],
    ) -> int:
        base = sum(chunk.resident for chunk in chunks)
        updated = sum(chunk.updated for chunk in chunks)
        received = sum(0 if chunk.stage.first else model.stream for chunk in chunks)
        # Megatron-LM allocates what it receives, and so has what is in flight alone.
        if self.section.runtime != "megatron":
            base += received * self.space.microbatches(layout)
        shared = cut.shares == "all"
        # Whole gradients of all microbatches wait for the last backward of their chunk in a
        # pipeline, and whole parameters with them; else there are those of this rank's shares.
        waits, stays = cut.reduces == "end", shared and not cut.reshard_after_forward
        ends = max(chunk.summed for chunk in chunks) if waits else updated
        found = base + ends if shared else base
        for chunk, kept, again in alive:
            own = chunks[chunk]
            held = sum(n * each.saved for n, each in zip(kept, chunks, strict=True))
            # Parameters stay whole, and gradients with them, until a chunk's last backward.
            whole, begun = 0, own.begun.whole if shared and not stays else 0
            before = updated if shared and any(again) and layout.pipeline == 1 else 0
            if stays:
                whole = sum(each.whole for each in compress(chunks, kept))
            if waits and shared:
                both = [n and g for n, g in zip(kept, again, strict=True)]
                before = sum(each.summed for each in compress(chunks, both))
            # A backward begins behind the layers and gets to the last of them with all that is
            # saved before it; a forward ends there, too, with what microbatches left.
            behind = model.end.saved if own.stage.last else 0
            most = [held, held - behind + own.begun.rise + begun]
            if own.stage.last:
                most.append(held + model.end.rise)
                before_end = own.saved * kept[chunk] - behind + model.end.forward_rise
                found = max(found, base + (own.whole if stays else 0) + before_end)
            found = max(found, base + before + whole + max(most))
        return found

    def _kept(self, cut: Sharding, model: Model, stage: ModelStage) -> _Kept:
        """Sums of what a stage keeps."""
        key = (id(model), stage, cut.shards, cut.expert_shards, cut.replicas, cut.zero)
        if key not in self._sums:
            its = model.shares(stage)
            residents = [self._resident(cut, share) for share, _ in its]
            times = [n for _, n in its]
            self._sums[key] = _Kept(
                stage,
                sum(n * each[0] for n, each in zip(times, residents, strict=True)),
                sum(n * each[1] for n, each in zip(times, residents, strict=True)),
                sum(n * share.saved for share, n in its),
                sum(n * share.whole for share, n in its),
                sum(n * share.summed for share, n in its),
                model.begun(stage),
            )
        return self._sums[key]

    def _alive(self, layout: Layout) -> list[tuple[tuple[ModelStage, ...], set[InFlight]]]:
        """What is in flight on ranks that have like stages."""
        ranks = self.ranks(layout)
        times = self.space.microbatches(layout)
        if layout.pipeline == 1:
            return [(ranks[0], {(0, (1,), (int(times > 1),))})]
        few = _few(layout.schedule, layout.pipeline, times, layout.chunks)
        key = (*self._ranks_key(layout), few)
        if key not in self._in_flight:
            found: dict[tuple[ModelStage, ...], set[InFlight]] = {}
            alive = _alive(layout.schedule, layout.pipeline, few, layout.chunks)
            for its, states in zip(ranks, alive, strict=True):
                found.setdefault(its, set()).update(states)
            # Where as much is there or more a rank is as full or fuller.
            self._in_flight[key] = [
                (
                    its,
                    {
                        (c, kept[:count], kept[count:])
                        for c in range(count)
                        for kept in maximal({(*n, *g) for at, n, g in states if at == c})
                    },
                )
                for its, states in found.items()
                for count in (len(its),)
            ]
        return self._in_flight[key]

    def _resident(self, cut: Sharding, share: Share) -> tuple[int, int]:
        """Bytes that a rank keeps of a share's units, and those of what it updates."""
        key = (id(share), cut.shards, cut.expert_shards, cut.replicas, cut.zero)
        if key not in self._residents:
            make = machine_of(self.section, cut)
            machine = make(Ledger(), share.units, share.frozen)
            kept = sum(machine.resident().values())
            here, own = not cut.on_gpu, machine.updated()
            for tensor in own:
                for state in states(self.optimizer, tensor):
                    kept += state.bytes if here or state.place == "device" else 0
            gradients = 0 if cut.offload else sum(tensor.nbytes for tensor in own)
            self._residents[key] = kept, gradients
        return self._residents[key]


_few = cache(representative)


@cache
def _alive(schedule: str, pipeline: int, microbatches: int, chunks: int) -> list[list[InFlight]]:
    """Rank by rank, before backwards that meet most."""
    count = checked(schedule, pipeline, microbatches, chunks)
    return [
        [
            (chunk, state[:count], state[2 * count :])
            for (kind, chunk), states in of_rank.items()
            if kind in ("backward", "input_backward")
            for state in states
        ]
        for of_rank in highest(schedule, pipeline, microbatches, count)
    ]
