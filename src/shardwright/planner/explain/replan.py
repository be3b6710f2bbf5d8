"""The best plan that has one thing as it is wanted, everything else free to move."""

# What comes out is the plan of a job in which the user writes the key that is named (a test plans
# both and compares). So everything that the plan's job had left open is open again, but for buckets
# where units are named, which other buckets would not have.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from msgspec import UNSET

from shardwright.core.errors import InputError, ShardwrightError
from shardwright.core.model import ModelSpec
from shardwright.core.placement import TwoZeros, Zero
from shardwright.core.quantities import SAME_SECONDS, format_seconds
from shardwright.job.job import CHOSEN_FROM, Job, checkpointing_of, memory_of, parallel_of
from shardwright.job.model_of_job import key_of, model_of
from shardwright.job.plan import Plan, UnitPlan
from shardwright.planner.draft import Draft, Found
from shardwright.planner.explain.recompute import model_recorded
from shardwright.planner.planner import WHOLE_STAGES, find, surely_or_perhaps
from shardwright.planner.problem import hosts_of
from shardwright.planner.search.watch import Watch
from shardwright.planner.variation import ModelOf, Variation, changed, checkpointed, once, shared

STAGES: dict[str, Zero | TwoZeros] = {
    "zero1": 1,
    "zero2": 2,
    "zero3": 3,
    "hsdp": 3,
    "hfsdp": (2, 3),
}
HYBRIDS = ("hsdp", "hfsdp")
BUCKET_SIZE = "planner.dense.bucket_size"
SECONDS = 30.0  # of search, where a job gives its own no limit


@dataclass(frozen=True, slots=True)
class Replanned:
    """``seconds`` of the slowest rank of the plan that was found, None where none was that fits;
    no such plan takes less than ``bound`` (0 where that is not known). ``option`` says how what was
    asked for lies in it, ``cut`` what ended the search early, ``reason`` all of it in words."""

    seconds: float | None
    bound: float
    option: str
    cut: str
    reason: str


def forced_table(plan: Plan, index: int, field: str, wanted: str) -> Variation:
    """A table that has no other sharding type, or no other kernel."""
    name = plan.tables[index].name
    where = key_of(plan.job, name, field)
    key = f'{where} = ["{wanted}"]'
    if where != f"tables.{name}.{field}":
        key += ", which is of all its parts"
    if plan.job.model.traits.is_function:
        key = f'planner.tables = {{"{name}" = "{wanted}"}}'
    table = msgspec.structs.replace(plan.model.tables[index], **{field: (wanted,)})
    return Variation(plan.job, key, table)


def forced_unit(plan: Plan, unit: UnitPlan, wanted: str) -> Variation:
    """A unit that is sharded, replicated or in host memory, all sharded units resharded or kept or
    at a stage of ZeRO, or all blocks checkpointed; at any stage that was left open, and of buckets
    where there are no others than those of the plan."""
    is_open = left_open(plan)
    if wanted in ("checkpointed", *CHOSEN_FROM):
        policies = CHOSEN_FROM[1:] if wanted == "checkpointed" else (wanted,)
        key = "planner.dense.checkpointing"
        return Variation(changed(is_open, {key: policies}), f"{key} = {list(policies)}")
    size, stage = plan.model.bucket_size, memory_of(plan.job).zero
    job = plan.job if size or wanted in STAGES else changed(is_open, {BUCKET_SIZE: UNSET})
    place = {"replicated": "replicate", "offloaded": "offload"}.get(wanted, "shard")
    own = [each.name for each in plan.model.units_of(unit.members)]
    job = changed(job, {"planner.units": {**job.planner.units, **dict.fromkeys(own, place)}})
    key = "planner.units = {" + ", ".join(f'"{name}" = "{place}"' for name in own) + "}"
    if wanted in ("resharded", "kept"):
        job = changed(job, {"planner.dense.reshard": wanted == "resharded"})
        reshard = str(wanted == "resharded").lower()
        key += f" and planner.dense.reshard = {reshard}, which is of all units"
    if is_open.planner.dense.bucket_size == "auto":
        key += f" and {BUCKET_SIZE} = {size}" if size else " without buckets"
    if size and wanted not in STAGES and memory_of(is_open).zero == "auto":
        key += f" and memory.zero = {stage}"
    if wanted in STAGES:
        job, zero = at_stage(plan, job, wanted), STAGES[wanted]
        key += f" and memory.zero = {list(zero) if isinstance(zero, tuple) else zero}"
        if (replicas := parallel_of(job).data_replicate) > 1:
            key += f" and parallel.data_replicate = {replicas}"
        key += ", which is of all units"
    return Variation(job, key)


def left_open(plan: Plan) -> Job:
    """The job of a plan as it was before a stage of ZeRO, replicas and buckets were chosen, which
    what was tried tells."""
    job, rows = plan.job, plan.search.tried or ()
    if any(row.zero is UNSET for row in rows) or not rows:
        return job
    # Rows have a stage where any of these was open. One stage alone that is not 3 was named, for
    # what is open always tries 3 or several, and then it was the buckets that were open.
    stages = {row.zero for row in rows}
    if len(stages) > 1 or stages == {3}:
        job = shared(job, 3, min(row.replicas or 1 for row in rows))
        job = changed(job, {"memory.zero": "auto"})
    sizes = {row.bucket_size or 0 for row in rows if row.zero in WHOLE_STAGES}
    bucket_size = "auto" if len(sizes) > 1 else max(sizes, default=0) or UNSET
    return changed(job, {BUCKET_SIZE: bucket_size})


def at_stage(plan: Plan, job: Job, wanted: str) -> Job:
    """The job at a stage of ZeRO among the plan's shards; or among those of replicas, as many as in
    the plan, or as hosts, or as few as can be. InputError where ranks are too few."""
    world, replicas = plan.world_size, plan.grid.replicas
    if wanted not in HYBRIDS:
        size = plan.model.bucket_size if STAGES[wanted] in WHOLE_STAGES else 0
        return shared(job, STAGES[wanted], replicas, size)
    if replicas == 1:
        replicas = hosts_of(plan.cluster)
    if replicas == 1:
        replicas = next((n for n in range(2, world) if world % n == 0), 1)
    if replicas == 1:
        raise InputError(wanted, "ranks that are replicas of several shards", f"{world}")
    return shared(job, STAGES[wanted], replicas)


def check_dtypes(plan: Plan) -> None:
    """InputError where to name a stage would say in what is computed, too: ``memory`` is not given
    and not all parameters are fp32."""
    dtypes = {tensor.dtype for unit in plan.model.units for tensor in unit.tensors}
    if plan.job.memory is UNSET and dtypes - {"fp32"}:
        raise InputError("memory", "a section of the job that says what is computed in", "none")


def replanned(
    plan: Plan,
    forced: Variation,
    words: Callable[[Draft], str],
    wanted: str,
    again: ModelOf | None,
    watch: Watch,
) -> Replanned:
    """Search as ``plan`` was searched; ``words`` says how what was forced lies in a draft.

    ``again`` records the model with other checkpointing policies; without it the plan's own stays.
    """
    # The watch has run since the question was asked, but the first answer is no part of this
    # search.
    limit = plan.job.planner.time_limit or SECONDS
    watch.seconds = watch.elapsed + limit
    job = forced.job if again else checkpointed(forced.job, _policy(plan))
    try:
        models = _models(plan, forced, again)
        found = surely_or_perhaps(lambda sure: find(job, [models], watch, sure))
    except ShardwrightError as error:
        text = f"{wanted} with the rest planned anew has no plan: {error}"
        return Replanned(None, 0.0, "", "", text)
    cut = "stopped" if watch.stopped else f"cut at {limit:g} s" if watch.ended else ""
    # Of several stages or policies only the best one's bound is known, which says nothing of the
    # others.
    bound = 0.0 if found.tried else found.bound
    option = "" if found.draft is None else words(found.draft)
    seconds = None if found.draft is None else found.seconds
    text = _reason(plan, found, wanted, option, bound, forced.words)
    if cut:
        text += f" The search was {cut}: a longer one may find a faster plan."
    return Replanned(seconds, bound, option, cut, text)


def _models(plan: Plan, forced: Variation, again: ModelOf | None) -> ModelOf:
    """Describes the plan's model, recorded anew only for another checkpointing policy."""
    own = _policy(plan)

    def described(job: Job) -> ModelSpec:
        if checkpointing_of(job)[0] == own:
            return forced.with_table(model_of(job, plan.recording))
        return forced.with_table(model_recorded(plan, job, again))

    return once(described)


def _policy(plan: Plan) -> str:
    """The checkpointing policy that the plan was found with."""
    tried = plan.search.tried
    if tried is UNSET:
        return checkpointing_of(plan.job)[0]
    return min(tried, key=lambda its: its.max_rank_seconds or float("inf")).checkpointing


def _reason(plan: Plan, found: Found, wanted: str, option: str, bound: float, key: str) -> str:
    before = plan.max_rank_seconds
    start = f"{wanted} with the rest planned anew"
    if found.draft is None:
        return f"{start} has no plan that fits, as far as was searched."
    after = found.seconds
    how = option.replace(f"{wanted}, ", "")
    start += "" if how == wanted else f" ({how})"
    if abs(after - before) <= SAME_SECONDS * before:
        return f"{start} is as good: {format_seconds(after)} per step."
    if after < before:
        return f"{start} is faster: {instead(before, after)}. To have it: {key}."
    text = f"{start} is slower: {instead(before, after)}."
    if bound > before * (1 + SAME_SECONDS):
        return f"{text} No such plan takes less than {_precise(bound, before)}."
    return text


def instead(before: float, after: float) -> str:
    """Seconds of a step beside those ``before``, which are 0 where nothing is looked up."""
    change = (after - before) / before * 100 if before else 0.0
    share = f" ({change:+,.{1 if abs(change) >= 0.1 else 3}f} %)" if change else ""
    return f"{_precise(after, before)} instead of {_precise(before, after)} per step{share}"


def _precise(seconds: float, beside: float) -> str:
    """A duration with as many digits as tell it from another one."""
    for digits in range(3, 10):
        text = format_seconds(seconds, digits)
        if text != format_seconds(beside, digits):
            break
    return text
