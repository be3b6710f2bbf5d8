"""Layouts of jobs with embedding tables: each is planned, so that its tables and dense units are
placed together, and bounded before that.
"""

# What a plan chooses itself (where tables lie, which units are sharded, how many layers share one,
# prefetch) is no axis: the space has what a job has to say. Seconds of a layout are known only once
# it is planned, which takes seconds itself, so those whose bound is above the answer never are.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from msgspec import UNSET

from shardwright.core.advice import Layout
from shardwright.core.cluster import MAX_PLANNED
from shardwright.core.errors import UnsupportedError
from shardwright.core.footprint import Footprint, StepTime
from shardwright.core.quantities import format_seconds
from shardwright.estimate.advise.space import POLICIES, QUARTERS, Space, for_engine
from shardwright.estimate.footprint import footprint_of
from shardwright.estimate.recordings import found_among, found_for, models_of
from shardwright.estimate.step_time import planned_time, unranged_time
from shardwright.job.job import Job, memory_of, table_optimizer
from shardwright.job.model_of_job import is_planned
from shardwright.job.tables import embeddings_of, free_tables
from shardwright.planner.draft import Found
from shardwright.planner.planner import bound_of, watch_of
from shardwright.planner.problem import Problem, make_problem
from shardwright.planner.profiles import cluster_of
from shardwright.planner.search.watch import Watch
from shardwright.planner.shortage import not_run
from shardwright.planner.step_draft import StepDraft
from shardwright.planner.strategy.steps import smallest
from shardwright.planner.variation import ModelOf, changed

STAGES = (3, 2)  # of ZeRO; in a step of one backward 1 is as 2
RESIDENT = ("weight", "optimizer_state", "cache")  # of a table, in every moment of a step


class PlannedSpace(Space):
    """Those of a planned job: how many copies of the dense units' shards there are, what data ranks
    share of them, and checkpointing by one of the ``policies`` that the model runs with."""

    def __init__(
        self, job: Job, ranks: tuple[int, int], batch: int, fixed: Mapping[str, str],
        policies: Sequence[str],
    ) -> None:  # fmt: skip
        self.policies = policies
        super().__init__(job, "", ranks, batch, fixed)

    def _axes(self, host: int) -> dict[str, Sequence[Any]]:
        whole = not self.job.planner.dense.reshard  # which only stage 3 can
        found = {
            "data_replicate": [n for n in range(1, self.world + 1) if self.world % n == 0],
            "zero": STAGES if whole and self.world > 1 else STAGES[:1],
        }
        return {**found, "checkpointing": self.policies} if self.policies else found

    def layouts(self) -> Iterator[Layout]:
        """Every layout, in the order of the axes; ranks that share nothing are one of them."""
        a = self.axes
        if self.global_batch % self.world or self.world > MAX_PLANNED:
            return
        for replicate, zero, policy in product(
            a["data_replicate"], a["zero"], a.get("checkpointing", ("",))
        ):
            shard = self.world // replicate
            if shard > 1 or zero == a["zero"][0]:
                stage = zero if shard > 1 else 0
                yield Layout(replicate, shard, zero=stage, micro_batch=0, checkpointing=policy)

    def microbatches(self, layout: Layout) -> int:
        """A planned step has one."""
        return 1

    def job_of(self, layout: Layout) -> Job:
        """The job that asks for a layout."""
        keys: dict[str, Any] = {
            "parallel.data_replicate": layout.data_replicate,
            "parallel.data_shard": layout.data_shard,
            "memory.zero": layout.zero or STAGES[0],
            "batch.size": self.global_batch // self.world,
            "cluster.world_size": self.world,
        }
        if keys["memory.zero"] == STAGES[0]:  # whose units are modules
            keys["planner.dense.bucket_size"] = UNSET
        if layout.checkpointing:
            keys["memory.checkpointing"] = layout.checkpointing
            keys["planner.dense.checkpointing"] = UNSET
        return changed(self.job, keys)


class Planned(NamedTuple):
    """A layout's plan, or where none ``fits`` the draft that asks least; seconds that no plan of
    the layout can beat."""

    fits: bool
    time: StepTime
    footprint: Footprint
    bound: float


class Plans:
    """Plans layouts of a ``space``: the questions that :class:`Pricing` answers without a plan."""

    def __init__(
        self, space: PlannedSpace, models: Sequence[ModelOf], progress: Callable[[str], None]
    ) -> None:
        self.space, self.models, self.progress = space, models, progress
        self.cluster, _ = cluster_of(changed(space.job, {"cluster.world_size": space.world}))
        self.device = memory_of(space.job).lowering or self.cluster.compute_device
        self.dtype = memory_of(space.job).param_dtype or "fp32"
        self.planned: dict[Layout, Planned] = {}
        self._bounds: dict[Layout, tuple[float, int]] = {}

    def least_seconds(self, layout: Layout) -> float:
        """What no plan of a layout can beat."""
        return self._bound(layout)[0]

    def least_bytes(self, layout: Layout) -> int:
        """What the fullest rank has at least between steps, by whatever plan."""
        return self._bound(layout)[1]

    def _bound(self, layout: Layout) -> tuple[float, int]:
        if layout not in self._bounds:
            bounds = [(bound_of(p), _least_bytes(p)) for p in self._problems(layout)]
            seconds = min(seconds for seconds, _ in bounds)
            job = self.space.job
            if free_tables(job.tables, embeddings_of(job.embeddings), job.planner.kinds):
                bounds, seconds = [], 0.0  # a plan may choose tables of other kinds
            self._bounds[layout] = seconds, min((nbytes for _, nbytes in bounds), default=0)
        return self._bounds[layout]

    def _problems(self, layout: Layout) -> list[Problem]:
        job = self.space.job_of(layout)
        found, refused = [], []
        for model_of in self.models:
            try:
                found.append(make_problem(job, model_of(job)))
            except UnsupportedError as error:  # a way that is none
                refused.append(error)
        if not found:
            raise refused[0]
        return found

    def time(self, layout: Layout) -> StepTime:
        """A step of a layout's plan."""
        return self.plan(layout).time

    def plan(self, layout: Layout) -> Planned:
        """A layout's plan, made once."""
        if layout not in self.planned:
            watch = watch_of(self.space.job, self._hear)
            found = found_among(self.space.job_of(layout), self.models, watch)
            draft = _draft_of(found)
            # Of several ways to have embeddings a search bounds the one that it took alone.
            bound = self.least_seconds(layout)
            self.planned[layout] = Planned(
                found.draft is not None,
                _time_of(draft),
                footprint_of(found, draft, watch.cut_short),
                bound if len(self.models) > 1 else max(bound, found.bound),
            )
        return self.planned[layout]

    def _hear(self, watch: Watch) -> None:
        best = min((each.time.seconds for each in self.planned.values() if each.fits), default=0.0)
        so_far = f", best {format_seconds(best)} a step" if best else ""
        begun = f"{len(self.planned):,} of {len(self._bounds):,} layouts planned{so_far}"
        self.progress(f"{begun}; the next for {watch.elapsed:.0f} s")

    def time_of(self, job: Job) -> StepTime:
        """A step of the plan of any job."""
        return _time_of(_draft_of(found_for(job, watch_of(job, self._hear))))

    def bound(self, layout: Layout) -> float:
        """Seconds that no plan of a layout can beat, as far as is known by now."""
        found = self.planned.get(layout)
        return found.bound if found else self.least_seconds(layout)


def planned_layouts(
    job: Job, engine: str, ranks: tuple[int, int], batch: int, fixed: Mapping[str, str],
    progress: Callable[[str], None],
) -> Plans | None:  # fmt: skip
    """Those of a job whose steps are all planned: a model of click logs or text, or a module of the
    user's own with tables. None of others."""
    job, traits = for_engine(job, engine), job.model.traits
    own = traits.is_function and table_optimizer(job) and is_planned(job)
    if not traits.has_step or (traits.is_estimated and not own):
        return None
    keys = {"cluster.world_size": ranks[0], "batch.size": max(batch // ranks[0], 1)}
    models = models_of(changed(job, keys))
    if not models:
        return None
    keys |= {"memory.checkpointing": "selective", "planner.dense.checkpointing": UNSET}
    runs = traits.has_blocks and not not_run(models[0](changed(job, keys)))
    policies = [each for each in POLICIES["shardwright"] if each not in QUARTERS] if runs else ()
    return Plans(PlannedSpace(job, ranks, batch, fixed, policies), models, progress)


def _draft_of(found: Found) -> StepDraft:
    draft = found.draft or smallest(found.problem)
    assert isinstance(draft, StepDraft)
    return draft


def _time_of(draft: StepDraft) -> StepTime:
    return planned_time(draft) or unranged_time(draft)


def _least_bytes(problem: Problem) -> int:
    """What tables and units take in all, shared evenly, of the memory that decides."""
    tier, ranks = problem.cluster.decisive_tier, problem.cluster.world_size
    tables = 0
    for choices in problem.tables:
        sizes = (
            sum(
                run.count * sum(cost.kinds(tier).get(kind, 0) for kind in RESIDENT)
                for run, cost in zip(choice.option.runs, choice.costs, strict=True)
            )
            for choice in choices
        )
        tables += min(sizes)
    return tables // ranks + min(a.at_rest for a in problem.unit_space.arrangements)
