"""Where a rank's memory goes: what is set aside and by which rule, what is filled, what is free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwright.core.amount import largest, leaf, named, smallest
from shardwright.core.batch import feature_batches
from shardwright.core.cluster import Tier
from shardwright.cost import reservation
from shardwright.planner.explain.explanation import (
    Explanation,
    Subject,
    finished,
    rank_groups,
    ranks_label,
)
from shardwright.planner.problem import reservation_kind
from shardwright.planner.statistics.memory import (
    DENSE,
    FREE,
    INPUTS,
    SET_ASIDE,
    TIER_WIDTH,
    filled,
    free,
    set_aside,
)
from shardwright.planner.statistics.records import MemoryLedger

WHERE = "planner.reservation"


def explain(subject: Subject) -> Iterator[Explanation]:
    """What is left for the plan of every memory, and the ledger of its fullest rank."""
    for record in subject.statistics.ledgers:
        yield _left(subject, record.tier)
        yield _ledger(subject, record)


def _left(subject: Subject, tier: Tier) -> Explanation:
    """The capacity less what the rule of the reservation takes, by that rule's formulas."""
    plan, section = subject.plan, subject.plan.job.planner.reservation
    kind = reservation_kind(plan.job)
    aside = set_aside(plan, tier)
    amount = leaf(getattr(plan.cluster, f"{tier}_cap"), "capacity", "B", f"cluster.{tier}_cap")
    if aside[SET_ASIDE] and kind in ("absolute", "traced"):
        fixed = leaf(section.nbytes, "set_aside", "B", f"{WHERE}.nbytes")
        amount = reservation.amount_left(amount, fixed)
    elif aside[SET_ASIDE]:
        share = leaf(section.percentage, "percentage", "", f"{WHERE}.percentage")
        amount = reservation.share_left(amount, share)
    if aside[DENSE] or aside[INPUTS]:
        amount = reservation.left_for_tables(amount, _dense(subject, kind), _inputs(subject, kind))
    return finished(
        f"{tier.upper()} of a rank that the plan may fill",
        getattr(plan.reserved, f"{tier}_left"),
        named("left", amount, "B"),
        notes=[f"{WHERE}.kind {kind}"],
    )


def _dense(subject: Subject, kind: str) -> Any:
    section = subject.plan.job.planner.reservation
    nbytes = leaf(section.dense_bytes, "dense_parameter_bytes", "B", f"{WHERE}.dense_bytes")
    times = leaf(section.multiplier, "multiplier", "", f"{WHERE}.multiplier")
    if kind == "inference":
        copies = reservation.DENSE_COPIES_IN_INFERENCE
        times = leaf(copies, "multiplier", "", "inference keeps no gradients")
    return reservation.dense_bytes(nbytes, times)


def _inputs(subject: Subject, kind: str) -> Any:
    """Bytes of the inputs alive at once; features with equal numbers of ids are shown together."""
    groups: dict[tuple[float, int], int] = {}
    problem = subject.draft.problem
    for table in problem.model.tables:
        for pair in zip(table.pooling_factors, feature_batches(table, problem.batch), strict=True):
            groups[pair] = groups.get(pair, 0) + 1
    lengths, sizes = [], []
    for number, ((length, size), count) in enumerate(groups.items()):
        factor = leaf(length, f"pooling_factor_{number}", "ids", "tables.pooling_factors")
        features = leaf(count, f"features_{number}", "", "tables' features of that kind")
        lengths.append(factor * features)
        sizes.append(leaf(size, f"batch_size_{number}", "samples", "batch.size or batch_sizes"))
    ids = reservation.batch_ids(lengths, sizes)
    batches, copies = 1, 1
    if kind != "inference":
        batches, copies = reservation.PIPELINED_BATCHES, reservation.BATCH_COPIES
    return reservation.input_bytes(
        ids,
        leaf(batches, "batches", "", "alive at once"),
        leaf(copies, "copies_of_a_batch", "", "made on its way"),
    )


def _ledger(subject: Subject, record: MemoryLedger) -> Explanation:
    capacity = leaf(record.capacity, "capacity", "B", f"cluster.{record.tier}_cap")
    sources = {
        SET_ASIDE: WHERE,
        DENSE: f"{WHERE}: dense part",
        INPUTS: f"{WHERE}: inputs of a step",
    }
    here = f"on rank {record.rank}; --statistic ranks --rank {record.rank}"
    lines = [
        leaf(line.nbytes, line.what, "B", sources.get(line.what, here))
        for line in record.lines
        if line.what != FREE
    ]
    return finished(
        f"{record.tier.upper()} that is free on rank {record.rank}, its fullest",
        record.lines[-1].nbytes,
        free(capacity, lines),
        ranks=[record.rank],
        notes=["what is taken and what is free are the whole capacity"],
    )


def explain_tiers(subject: Subject) -> Iterator[Explanation]:
    """The bytes of the fullest rank of each tier, and how near its emptiest one is to the edge."""
    nbytes = filled(subject.plan, subject.statistics.decisive)
    for number, record in enumerate(subject.statistics.peak_tiers, start=1):
        title = f"tier {number}, {ranks_label(record.ranks)}"
        values = {rank: nbytes[rank] for rank in record.ranks}
        terms = [group.value for group in rank_groups("bytes", values, "B")]
        most = largest("most", terms, "B")
        yield finished(f"{title}: most bytes", record.nbytes, most, ranks=record.ranks)
        if len(record.ranks) > 1:
            width = leaf(TIER_WIDTH, "width_of_a_tier", "B", "1 MiB")
            least = smallest("least", terms, "B")
            yield finished(
                f"{title}: bytes by which its emptiest rank is inside the tier",
                min(values.values()) - (record.nbytes - TIER_WIDTH),
                named("inside", least - (most - width), "B"),
                ranks=record.ranks,
            )
