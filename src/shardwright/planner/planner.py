"""From a job to a plan: choose checkpointing, search, prove the bound, write everything down."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
from msgspec import UNSET
from msgspec.structs import replace as replaced

from shardwright.core.errors import UnsupportedError, expected
from shardwright.core.model import ModelSpec
from shardwright.job.job import (
    Job,
    checkpointing_of,
    memory_of,
    with_checkpointing,
)
from shardwright.job.plan import Plan, Tried
from shardwright.planner import profiles, shortage
from shardwright.planner.assemble import assemble
from shardwright.planner.problem import hosts_of
from shardwright.planner.search.watch import Hear, Watch
from shardwright.planner.sharing import (
    Sharing,
    bucket_sizes_of,
    sharings_of,
    with_buckets,
    with_sharing,
)
from shardwright.planner.strategy import search
from shardwright.planner.strategy.found import Found, ModelOf
from shardwright.planner.strategy.steps import smallest


def plan(job: Job, model_of: ModelOf, hear: Hear | None = None) -> Plan:
    """The best plan found for ``job``; raises NoPlanError with the shortfall if none fits.

    ``model_of`` describes its model, recorded with the first checkpointing policy that the job
    leaves open, and that of the same job with another batch. ``hear`` is called with the
    :class:`Watch` of the search in every round.
    """
    watch = watch_of(job, hear)
    return written(surely_or_perhaps(lambda sure: find(job, model_of, watch, sure)), watch)


def surely_or_perhaps(look: Callable[[bool], Found]) -> Found:
    """What ``look`` finds that fits for sure; where nothing does, what perhaps fits, which is less
    than that on an accelerator alone."""
    found = look(True)
    if found.draft is not None or not found.problem.on_accelerator:
        return found
    return look(False)


def watch_of(job: Job, hear: Hear | None = None) -> Watch:
    """One with the time that a job gives its search."""
    return Watch(job.planner.time_limit or float("inf"), hear)


def written(found: Found, watch: Watch) -> Plan:
    """What was found as a plan; NoPlanError with the shortfall where nothing fits."""
    if found.draft is None:
        raise shortage.error(found, watch)
    how = found.described(watch.elapsed, cut_short=watch.cut_short)
    return assemble(found.draft, found.bound, how)


def find(job: Job, model_of: ModelOf, watch: Watch, sure: bool = True) -> Found:
    """What the search of a job brings back, at the stage of ZeRO, over the replicas and with the
    checkpointing policy of the fastest plan that fits, or if it need not be ``sure`` perhaps fits;
    where nothing does, with those that ask least. What was left open is as the job of what was
    found has it."""
    cluster, _ = profiles.cluster_of(job)
    usual = min(checkpointing_of(job), key=lambda name: name != "none")
    if job.planner.dense.bucket_size == "auto":
        model_of = _once(model_of)
    sharings = sharings_of(job, hosts_of(cluster), _bucket_sizes(job, _with(model_of, usual)))
    if memory_of(job).zero != "auto" and len(sharings) == 1:
        return _find(job, model_of, watch, sure)
    best: Found | None = None
    least, rows = 0, []
    for sharing in sharings:
        found = _find(with_sharing(job, sharing), model_of, watch, sure)
        zero, replicas = sharing.zero, sharing.replicas if sharing.replicas > 1 else UNSET
        tried = found.tried or (_tried(usual, found),)
        size = sharing.bucket_size or UNSET
        its = [replaced(row, zero=zero, replicas=replicas, bucket_size=size) for row in tried]
        rows += its
        bytes_ = min(row.peak_bytes for row in its)
        smaller = best is not None and best.draft is None is found.draft and bytes_ < least
        if best is None or found.seconds < best.seconds or smaller:
            best, least = found, bytes_
    assert best is not None, "there are stages"
    return replace(best, tried=tuple(rows))


def _once(model_of: ModelOf) -> ModelOf:
    """Describes a model once, however many sizes of buckets are tried of it."""
    known: dict[bytes, ModelSpec] = {}

    def described(job: Job) -> ModelSpec:
        size = job.planner.dense.bucket_size
        bare = with_buckets(job, 0)
        key = msgspec.json.encode(bare)
        if key not in known:
            known[key] = model_of(bare)
        return replaced(known[key], bucket_size=size) if isinstance(size, int) else known[key]

    return described


def _bucket_sizes(job: Job, model_of: ModelOf) -> tuple[int, ...]:
    """What is tried of them; for the whole parameters of a stage that is known, or left open."""
    if memory_of(job).zero not in (1, 2, "auto"):
        return (0,)
    if job.planner.dense.bucket_size != "auto":
        return bucket_sizes_of(job, 0)
    units = model_of(with_sharing(job, Sharing(2))).units
    trained = (t.numel for unit in units for t in unit.tensors if t.fqn not in unit.frozen)
    return bucket_sizes_of(job, sum(trained))


def _find(job: Job, model_of: ModelOf, watch: Watch, sure: bool) -> Found:
    """The same of a job that names its stage."""
    tries = dict(_tries(job, model_of, watch, sure))
    tried = tuple(_tried(*each) for each in tries.items()) if len(tries) > 1 else ()
    best = min(tries, key=lambda policy: tries[policy].seconds)
    if tried and tries[best].draft is None:
        best = min(tried, key=lambda its: its.peak_bytes).checkpointing
    return replace(tries[best], tried=tried, model_of=_with(model_of, best))


def _tries(job: Job, model_of: ModelOf, watch: Watch, sure: bool) -> Iterator[tuple[str, Found]]:
    """What is found with each policy: no other one where nothing was given up with none, or where
    there is nothing to be checkpointed."""
    policies = checkpointing_of(job)
    for policy in sorted(policies, key=lambda name: name != "none"):
        model = _with(model_of, policy)(job)
        if reason := shortage.not_run(model) if policy != "none" else "":
            if "none" in policies:
                return
            wanted = f"'none' for a model {reason}"
            raise UnsupportedError(expected("memory.checkpointing", wanted, f"'{policy}'"))
        found = search(job, model, watch, sure=sure)
        yield policy, found
        if policy == "none" and found.draft is not None and not found.gave_up:
            return


def _with(model_of: ModelOf, policy: str) -> ModelOf:
    """Describes models recorded with ``policy``, where their jobs leave a choice."""

    def described(job: Job) -> ModelSpec:
        is_open = len(checkpointing_of(job)) > 1
        return model_of(with_checkpointing(job, policy) if is_open else job)

    return described


def _tried(policy: str, found: Found) -> Tried:
    if found.draft is not None:
        return Tried(policy, found.seconds, found.draft.highest_peak)
    return Tried(policy, None, smallest(found.problem).demand)
