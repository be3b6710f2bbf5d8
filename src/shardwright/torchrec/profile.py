"""The door: all that the planner asks of TorchRec's world, under the names it asks by."""

from shardwright.torchrec.constants import PRESET
from shardwright.torchrec.critical_path import critical_terms, modules
from shardwright.torchrec.options import torchrec_options
from shardwright.torchrec.pricing import derive, exchange_bytes, faster, price
from shardwright.torchrec.search import bounded_tables, search
from shardwright.torchrec.times import PHASE_OF_PART

__all__ = [
    "PHASE_OF_PART",
    "PRESET",
    "bounded_tables",
    "critical_terms",
    "derive",
    "exchange_bytes",
    "faster",
    "modules",
    "price",
    "search",
    "torchrec_options",
]
