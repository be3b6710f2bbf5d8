"""What a plan adds up to: exports ``statistics``, and ``memory_prices``, which plans again."""

from shardwright.planner.statistics.everything import statistics
from shardwright.planner.statistics.price import memory_prices

__all__ = ["memory_prices", "statistics"]
