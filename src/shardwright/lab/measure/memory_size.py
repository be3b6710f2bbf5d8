"""How much memory there is for processes like this one."""

from __future__ import annotations

import os
from pathlib import Path

_LIMITS = (  # of a control group, by version
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def host_bytes(limits: tuple[Path, ...] = _LIMITS) -> int:
    """Bytes of the host's memory, or those its control group allows if they are fewer."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in limits:
        try:
            total = min(total, int(path.read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return total
