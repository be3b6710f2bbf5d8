"""The fastest layouts that fit: all priced, taken fastest first, each refused by a bound of its
memory or by its exact figure, until enough fit.
"""

# What makes the answer a proof: layouts leave the queue in the order of their seconds. One waits
# there with a bound from below until it is the first; then its pipeline is followed pass by pass,
# and it goes back with its real seconds. Memory is asked the same way: only a layout that is next
# and whose bound leaves room is estimated, which takes a thousand times as long. A layout that has
# to be planned is one of these: its seconds and memory come at once, and when the answer is known,
# those that are left with their bound alone are not planned.

from __future__ import annotations

import heapq
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from shardwright.core.advice import Advice, Advised, Layout, OfEngine, Priced
from shardwright.core.cluster import Cluster
from shardwright.core.errors import (
    InputError,
    NoPlanError,
    UnsupportedError,
    check_type,
    expected,
)
from shardwright.core.footprint import Footprint, StepTime, Verdict, verdict_of
from shardwright.cost.clock import has_clock
from shardwright.estimate.advise.planned import Plans, planned_layouts
from shardwright.estimate.advise.pricing import Pricing
from shardwright.estimate.advise.space import Space, global_batch
from shardwright.estimate.footprint import footprint
from shardwright.estimate.unplanned import estimated
from shardwright.heap.classes import outside
from shardwright.job.exported import cannot
from shardwright.job.job import A_JOB, Job, memory_of
from shardwright.job.model_of_job import is_planned
from shardwright.planner.profiles import cluster_of
from shardwright.planner.variation import changed

SHOWN = 10  # layouts that fit
FASTER = 5  # layouts in front of them
MOST_DOUBLED = 2**14  # ranks up to which fewer are looked for
# What is asked where nobody names an engine: of torch's ways the first that takes the model.
OFFERED = (("shardwright",), ("torchtitan", "torchtitan-toml", "fsdp2"), ("megatron",))


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked for beside a job: layouts of an engine (where neither it nor another runtime is
    named, of those that are ``OFFERED``), values of axes, bytes of every device that stay free,
    samples of all ranks in a step (the job's, where 0), and jobs of its model with the seconds that
    a step of each was measured to take, by which all are scaled."""

    engine: str = ""
    fixed: Mapping[str, str] = field(default_factory=dict)
    headroom: int = 0
    global_batch: int = 0
    measured: Sequence[tuple[Job, float]] = ()


Hear = Callable[[str], None]


def advise(job: Job, progress: Hear = lambda _: None, **wanted: Any) -> Advice:
    """The fastest layouts of a job's model on its cluster that fit; its global batch, sequence,
    dtype and optimizer are held. ``wanted`` are the fields of :class:`Wanted`:
    ``advise(job, engine="megatron", fixed={"tensor": "8"})``.

    ``progress`` gets a line for everything that is worked out; an interruption ends the search with
    what was found until then. Of a job for which nothing fits the nearest layout is told and the
    fewest ranks. InputError for a cluster whose clock is not known unless layouts are planned,
    UnsupportedError for tables alone or a model that the engine does not run.
    """
    begun = time.perf_counter()
    check_type(job, Job, "job", A_JOB)
    searches, lacking = _searches(job, Wanted(**wanted), progress)
    try:
        for search in searches:
            search.look(1)
        best = min(searches, key=_seconds)
        best.look(SHOWN)
    except KeyboardInterrupt:
        for search in searches:
            search.stop()
        best = min(searches, key=_seconds)
        if not best.rows:
            raise
    found = best.advice()
    if not found.rows:
        ways = [(search, search.ways_out()) for search in searches]
        best, way = min(ways, key=lambda each: (each[1].ranks, each[1].nearest.most_bytes))
        found = msgspec.structs.replace(best.advice(), nearest=way.nearest)
        if way.ranks < math.inf:
            found = msgspec.structs.replace(found, fewest_ranks=int(way.ranks))
    if len(searches) > 1:
        each = [s.of_engine() for s in sorted(searches, key=_seconds)]
        each += [OfEngine(engine, 0, lacks=why) for engine, why in lacking.items()]
        found = msgspec.structs.replace(found, engines=tuple(each))
    return msgspec.structs.replace(found, seconds=time.perf_counter() - begun)


def job_of(job: Job, layout: Layout, **wanted: Any) -> Job:
    """The job that asks for a ``layout`` which was advised for it; ``engine`` as the advice has."""
    return _Search(job, Wanted(**wanted), lambda _: None).space.job_of(layout)


def fewest_ranks(
    job: Job,
    fast_enough: Callable[[Advice], bool],
    progress: Hear = lambda _: None,
    **wanted: Any,
) -> tuple[Job, Advice] | None:
    """The job on the fewest ranks, doubled from one host on, with its advice, on which something
    fits and is ``fast_enough``, the global batch held; None where no number is."""
    cluster, here = cluster_of(job)[0], _Search(job, Wanted(**wanted), progress)
    wanted["global_batch"] = here.space.global_batch
    for world in _doubled(min(cluster.local_world_size or 1, here.world)):
        fewer = _on(job, world)
        if not any(search.layouts for search in _searches(fewer, Wanted(**wanted), progress)[0]):
            continue
        found = advise(fewer, progress, **wanted)
        if found.rows and fast_enough(found):
            return fewer, found
    return None


def _doubled(world: int) -> Iterator[int]:
    while world <= MOST_DOUBLED:
        yield world
        world *= 2


def _on(job: Job, world: int) -> Job:
    """The job on other ranks, as many on a host where these divide them."""
    local = job.cluster.local_world_size
    keys: dict[str, Any] = {"cluster.world_size": world}
    if local and world > local and world % local:
        keys["cluster.local_world_size"] = None
    if job.parallel is not UNSET:
        keys |= {"parallel.data_shard": -1, "parallel.data_replicate": 1}
    return changed(job, keys)


def _leaving(job: Job, headroom: int) -> Job:
    """The job on devices with so many bytes less, in which plans are made."""
    cluster, _ = cluster_of(job)
    left = max(cluster.memory_per_rank - headroom, 1)
    return changed(job, {f"cluster.{cluster.decisive_tier}_cap": left}) if headroom else job


def _searches(job: Job, wanted: Wanted, progress: Hear) -> tuple[list[_Search], dict[str, str]]:
    """A search for each engine that is asked, and why some are not."""
    found: list[_Search] = []
    lacking: dict[str, str] = {}
    first = _Search(job, wanted, progress)
    if not (wanted.engine or first.plans) and memory_of(job).runtime == "shardwright":
        for names in OFFERED:
            for name in names:
                search = _Search(job, replace(wanted, engine=name), progress)
                if not (why := search.lacks()):
                    found.append(search)
                    lacking.pop(names[0], None)
                    break
                lacking.setdefault(names[0], why)
    return (found, lacking) if found else ([first], {})


def _seconds(search: _Search) -> float:
    """Of its answer."""
    return search.rows[0].time.seconds if search.rows else math.inf


class _WayOut(NamedTuple):
    """Where nothing fits: what lacks least, and the fewest ranks on which something does."""

    nearest: Advised
    ranks: float = math.inf


class _Search:
    def __init__(self, job: Job, wanted: Wanted, progress: Callable[[str], None]) -> None:
        cluster, _ = cluster_of(job)
        self.job, self.wanted, self.progress = job, wanted, progress
        self.world = job.cluster.world_size or cluster.world_size
        host = cluster.local_world_size or self.world
        self.unable = 0
        batch = wanted.global_batch or global_batch(job, self.world)
        ranks = self.world, min(host, self.world)
        self.capacity = cluster.memory_per_rank
        self.plans = planned_layouts(
            _leaving(job, wanted.headroom), wanted.engine, ranks, batch, wanted.fixed, progress
        )
        self.space: Space
        self.pricing: Pricing | Plans
        if self.plans:
            self.space, self.pricing = self.plans.space, self.plans
        else:
            self._check_has_seconds(cluster)
            self.space = Space(job, wanted.engine, ranks, batch, wanted.fixed)
            self.pricing = Pricing(self.space)
        self.scale = 1.0
        self.least: dict[Layout, tuple[float, int]] = {}
        self.taken: list[Advised] = []
        self.rows: list[Advised] = []  # that fit
        self._order: Iterator[Advised] | None = None
        self.refused: list[Layout] = []  # by their bound
        self.exact = 0
        self.assumptions: list[str] = []

    def _check_has_seconds(self, cluster: Cluster) -> None:
        job = self.job
        if not (job.cluster.preset and has_clock(cluster.constants)):
            where = "job: cluster.preset"
            accelerators = "an accelerator whose seconds are known"
            found = f"'{job.cluster.preset}'" if job.cluster.preset else "none"
            raise InputError(expected(where, accelerators, found, "Such as --on 8xH100."))
        if not (job.model.traits.is_function or job.model.traits.is_estimated):
            remedy = "Of tables alone there is nothing to choose but their plan: shardwright plan."
            what = "a model with a step"
            raise UnsupportedError(expected("job: model.kind", what, job.model.kind, remedy))

    @cached_property
    def layouts(self) -> list[Layout]:
        """All of the space."""
        return list(self.space.layouts())

    def lacks(self) -> str:
        """Why the engine does none of it; empty where it may."""
        if not self.layouts:
            return "no layout divides ranks, batch and model"
        if not self.wanted.engine:
            return ""

        def degrees(each: Layout) -> tuple[int, ...]:
            return each.pipeline, each.tensor, each.context, self.space.microbatches(each)

        # Most of what an engine refuses is of the model, whatever the layout.
        plain = min(self.layouts, key=degrees)
        return " ".join(cannot(self.space.job_of(plain), self.wanted.engine))

    def look(self, count: int) -> None:
        """Go on until so many fit, or to the end."""
        if self._order is None:
            self.price()
            self._scale()
            self._order = self.in_order()
        while len(self.rows) < count and (each := next(self._order, None)):
            if not any(map(partial(_is_same, each), self.taken)):
                self.taken.append(each)
                self.rows += [each] if each.verdict == "fits" else []

    def stop(self) -> None:
        """Have what was planned until now where that is not told yet."""
        if self.plans and not self.rows:
            found = map(self._exact, self.plans.planned)
            self.taken = sorted(found, key=lambda each: each.time.seconds)
            self.rows = [each for each in self.taken if each.verdict == "fits"]

    def of_engine(self) -> OfEngine:
        """The answer in a line."""
        best = self.rows[0] if self.rows else UNSET
        return OfEngine(self.wanted.engine, len(self.layouts), best)

    def advice(self) -> Advice:
        """What was found, in the order of seconds."""
        rows = self.rows
        answer = rows[0] if rows else None
        return Advice(
            model=self.job.model.name,
            engine=self.wanted.engine,
            runtime=memory_of(self.space.job).runtime,
            world_size=self.world,
            device=self.job.cluster.preset or self.pricing.cluster.name,
            capacity=self.capacity,
            global_batch=self.space.global_batch,
            sequence=self.job.batch.sequence,
            dtype=self.pricing.dtype,
            space={name: tuple(map(str, its)) for name, its in self.space.axes.items()},
            layouts=len(self.least),
            rows=tuple(rows),
            faster=tuple(self._faster(answer)) if answer else (),
            bounded=len(self.refused),
            exact=len(self.plans.planned) if self.plans else self.exact,
            unable=self.unable,
            proven=self._proven(answer),
            headroom=self.wanted.headroom,
            lower_bound_seconds=self._lower_bound(),
            points=self._points(),
            assumptions=tuple(dict.fromkeys(self.assumptions)),
        )

    def _lower_bound(self) -> float | UnsetType:
        """What no plan of any layout can beat that may fit, with what plans told of theirs."""
        if not self.plans:
            return UNSET
        left = [layout for layout in self.least if layout not in self.refused]
        return min(map(self.plans.bound, left), default=0.0) * self.scale

    def _proven(self, answer: Advised | None) -> bool:
        least = self._lower_bound()
        return answer is not None and (not self.plans or answer.time.seconds <= least * (1 + 1e-9))

    def ways_out(self) -> _WayOut:
        """Of a job for which nothing fits."""
        order = sorted(self.least, key=lambda layout: self._bound(layout)[0])
        few = self.plans.planned or order[:1] if self.plans else order[:3]
        nearest = min(map(self._exact, few), key=lambda each: each.most_bytes)
        wanted = replace(self.wanted, global_batch=self.space.global_batch)
        for world in _doubled(2 * self.world):
            search = _Search(_on(self.job, world), wanted, self.progress)
            if not search.layouts:
                break  # the batch is not divided among so many
            search.look(1)
            if search.rows:
                return _WayOut(nearest, world)
        return _WayOut(nearest)

    def price(self) -> None:
        """Seconds and bytes of every layout, from below."""
        heard = time.monotonic()
        layouts = self.layouts
        if not layouts:
            ways = f"{self.space.global_batch:,} samples on {self.world:,} ranks"
            fixed = "".join(f", {axis} {value}" for axis, value in self.wanted.fixed.items())
            wanted = f"a layout of {ways}{fixed}"
            remedy = "Degrees divide ranks, batch, heads, layers and tokens: see --global-batch."
            raise InputError(expected("advise", wanted, "none", remedy))
        if why := self.lacks():
            raise UnsupportedError(why)
        for layout in layouts:
            seconds = self.pricing.least_seconds(layout)
            self.least[layout] = seconds, self.pricing.least_bytes(layout)
            if time.monotonic() - heard > 1:
                heard = time.monotonic()
                self.progress(f"{len(self.least):,} of {len(layouts):,} layouts priced")

    def _scale(self) -> None:
        ratios = []
        for job, seconds in self.wanted.measured:
            now = self.plans.time_of(job) if self.plans else footprint(job, ways=False).time
            if not now:
                wanted = "a job whose step has predicted seconds"
                raise InputError(expected("--measured", wanted, "none of this one"))
            ratios.append(seconds / now.seconds)
        if ratios:
            self.scale = statistics.geometric_mean(ratios)

    def in_order(self) -> Iterator[Advised]:
        """Every layout with its memory, fastest first."""
        queue = [(its[0], place, layout) for place, (layout, its) in enumerate(self.least.items())]
        heapq.heapify(queue)
        exact: dict[int, StepTime] = {}
        while queue:
            seconds, place, layout = heapq.heappop(queue)
            if self.plans and self.rows and place not in exact:
                continue  # it cannot be faster
            _, high = self._bound(layout)
            if high > self.capacity - self.wanted.headroom:
                self.refused.append(layout)
                continue
            if place not in exact:
                exact[place] = found = self.pricing.time(layout)
                fits = not self.plans or self.plans.plan(layout).fits
                bounded = found.seconds > seconds * (1 - 1e-9)
                assert bounded or not fits, "a bound above what it bounds"
                heapq.heappush(queue, (found.seconds, place, layout))
                continue
            if self.wanted.engine and cannot(self.space.job_of(layout), self.wanted.engine):
                self.unable += 1
                continue
            yield self._judged(layout, exact[place])

    def _verdict(self, least: int, most: int) -> Verdict:
        return verdict_of(least + self.wanted.headroom, most + self.wanted.headroom, self.capacity)

    def _bound(self, layout: Layout) -> tuple[int, int]:
        """The least that a layout's fullest rank needs of its device, and what it must at least be
        sure to have."""
        nbytes = self.least[layout][1]
        extras = outside(self.space.degrees(layout), self.pricing.device == "cuda")
        return nbytes + sum(e.low for e in extras), nbytes + sum(e.high for e in extras)

    def _estimated(self, layout: Layout, *, full: bool) -> Footprint | None:
        """The layout's footprint, or None where there is none for it; but for ``full`` ones what an
        allocator holds is followed as far as it tells whether it fits."""
        if self.plans:
            return self.plans.plan(layout).footprint
        self.exact += 1
        self.progress(
            f"{len(self.least):,} layouts priced, {len(self.refused):,} refused by a bound, "
            f"{self.exact:,} estimated"
        )
        job = self.space.job_of(layout)
        try:
            if is_planned(job):
                return footprint(job, ways=False)
            return estimated(job, spare=None if full else self.wanted.headroom)
        except NoPlanError:
            return None

    def _judged(self, layout: Layout, seconds: StepTime, *, full: bool = False) -> Advised:
        found = self._estimated(layout, full=full)
        if found is None:
            low, high = self._bound(layout)
            return Advised(layout, self._scaled(seconds), low, high, "does not fit")
        self.assumptions += found.assumptions
        needs = [found.needs(rank) for rank in found.ranks]
        least, most = max(n[0] for n in needs), max(n[1] for n in needs)
        if self.plans and found.capacity is not None:  # what a job reserves of its budget is needed
            taken = self.pricing.cluster.memory_per_rank - found.capacity
            least, most = least + taken, most + taken
        verdict = self._verdict(least, most)
        if self.plans and not self.plans.plan(layout).fits:
            verdict = "does not fit"
        return Advised(layout, self._scaled(seconds), least, most, verdict)

    def _exact(self, layout: Layout) -> Advised:
        return self._judged(layout, self.pricing.time(layout), full=True)

    def _scaled(self, found: StepTime) -> StepTime:
        if self.scale == 1:
            return found
        keys: dict[str, Any] = {
            name: getattr(found, name) * self.scale for name in ("seconds", "low", "high")
        }
        keys["parts"] = {name: seconds * self.scale for name, seconds in found.parts.items()}
        return msgspec.structs.replace(found, **keys)

    def _faster(self, answer: Advised) -> list[Advised]:
        """Of the layouts in front of the answer those that lack least, with exact figures."""
        limit = answer.time.seconds
        known = [e for e in self.taken if e.verdict != "fits" and e.time.seconds < limit]
        bounds = {e.layout: e.most_bytes for e in known}
        if not self.plans:
            bounds |= {each: self._bound(each)[1] for each in self.refused}
        found: list[Advised] = []
        for layout in sorted(bounds, key=bounds.__getitem__):
            if self.pricing.time(layout).seconds * self.scale < limit:
                found.append(self._exact(layout))
            if len(found) == FASTER:
                break
        return sorted(found, key=lambda each: each.time.seconds)

    def _points(self) -> tuple[Priced, ...]:
        judged = {each.layout: each for each in self.taken}
        return tuple(
            Priced(
                judged[layout].time.seconds if layout in judged else seconds * self.scale,
                judged[layout].least_bytes if layout in judged else nbytes,
                judged[layout].verdict if layout in judged else "",
            )
            for layout, (seconds, nbytes) in self.least.items()
        )


def _is_same(one: Advised, other: Advised) -> bool:
    """Whether two layouts differ in nothing but the name of their stage of ZeRO."""
    layout = msgspec.structs.replace(one.layout, zero=other.layout.zero)
    return msgspec.structs.replace(one, layout=layout) == other
