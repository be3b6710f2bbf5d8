"""The partitioner that a job names."""

from __future__ import annotations

from shardwright.core.planning import PartitionerSection
from shardwright.planner.proposing.partitioners.greedy import GreedyPerf
from shardwright.planner.proposing.partitioners.memory_balanced import MemoryBalanced
from shardwright.planner.proposing.partitioners.partitioner import Partitioner


def make_partitioner(section: PartitionerSection) -> Partitioner:
    """The partitioner of a job's section."""
    if section.kind == "greedy":
        return GreedyPerf(section.sort_by, section.balance_modules)
    return MemoryBalanced(section.max_search_count, section.tolerance, section.balance_modules)
