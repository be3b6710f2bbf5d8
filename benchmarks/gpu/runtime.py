"""The runtime on the device: does it give what the plain module does, and what does it take beside
torch's own FSDP2. One rank of NCCL, a fake group of eight, and two ranks of gloo on one card."""

from __future__ import annotations

from gpu import runtime_exchanges, runtime_host, runtime_state, runtime_tables, runtime_units
from gpu.rows import Row, Setting


def rows(setting: Setting) -> list[Row]:
    """Those that tell most first."""
    return [
        *runtime_units.rows(setting),
        *runtime_host.rows(setting),
        *runtime_exchanges.rows(setting),
        *runtime_tables.rows(setting),
        *runtime_state.rows(setting),
    ]
