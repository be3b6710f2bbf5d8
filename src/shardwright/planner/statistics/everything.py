"""All statistics of a plan."""

from __future__ import annotations

from shardwright.core.plan import Plan
from shardwright.core.statistics import Statistics
from shardwright.planner.statistics.holdings import Holdings
from shardwright.planner.statistics.memory import decisive, ledgers, peak_tiers
from shardwright.planner.statistics.ranks import rank_statistics, spreads, unevenness
from shardwright.planner.statistics.tables import kernel_statistics, table_statistics
from shardwright.planner.statistics.times import (
    bottlenecks,
    critical_path,
    excess,
    part_maxima,
    waiting,
)


def statistics(plan: Plan) -> Statistics:
    """What ``plan`` adds up to; nothing is priced or placed again."""
    held = Holdings(plan)
    parts = part_maxima(plan)
    return Statistics(
        decisive=decisive(plan),
        ranks=rank_statistics(plan, held),
        tables=table_statistics(plan, held),
        kernels=kernel_statistics(plan, held),
        unevenness=unevenness(plan),
        spreads=spreads(plan),
        parts=parts,
        sum_of_maxima=sum(part.seconds for part in parts),
        excess=excess(plan),
        critical_path=critical_path(plan, held),
        peak_tiers=peak_tiers(plan),
        ledgers=ledgers(plan, held),
        bottlenecks=bottlenecks(plan, held),
        waiting=waiting(plan),
    )
