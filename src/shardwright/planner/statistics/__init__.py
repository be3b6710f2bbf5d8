"""What a plan adds up to, each number by a function that ``explain`` calls with Amounts too."""

from __future__ import annotations

from shardwright.job.plan import Plan
from shardwright.planner.statistics import memory, ranks, tables
from shardwright.planner.statistics.memory import memory_prices
from shardwright.planner.statistics.ranks import each_rank
from shardwright.planner.statistics.records import Statistics
from shardwright.planner.statistics.tables import Holdings

__all__ = ["memory_prices", "statistics"]


def statistics(plan: Plan) -> Statistics:
    """What ``plan`` adds up to; nothing is priced or placed again."""
    held = Holdings(plan)
    parts = ranks.part_maxima(plan)
    return Statistics(
        decisive=plan.cluster.decisive_tier,
        ranks=ranks.rank_statistics(plan, held),
        tables=tables.table_statistics(plan, held),
        kernels=tables.kernel_statistics(held),
        unevenness=ranks.all_unevenness(plan),
        spreads=ranks.spreads(plan),
        parts=parts,
        sum_of_maxima=ranks.sum_of_maxima(parts),
        excess=ranks.excess(each_rank(totals.seconds for totals in plan.ranks)),
        critical_path=ranks.critical_path(plan, held),
        peak_tiers=memory.peak_tiers(plan),
        ledgers=memory.ledgers(plan, held),
        bottlenecks=ranks.bottlenecks(plan, held),
        waiting=ranks.waiting(plan),
    )
