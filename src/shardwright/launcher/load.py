"""What other programs take of this machine's cores while a run is on."""

# The load average counts a run's own ranks, too, and for minutes after they ended; so others are
# what all cores did less what this process and its children did.

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

_STAT = Path("/proc/stat")


class OtherLoad:
    """Cores that others wanted from its beginning until :meth:`ended`."""

    def __init__(self) -> None:
        self._before = os.getloadavg()[0]
        self._began = time.monotonic(), _own(), _busy()

    def ended(self) -> float:
        """On average; where the system does not say, the load before. Children have to be over."""
        began, own, busy = self._began
        now = _busy()
        if busy is None or now is None:
            return self._before
        seconds, cores = max(time.monotonic() - began, 1e-3), os.cpu_count() or 1
        return wanted((now - busy - (_own() - own)) / seconds, cores)


def wanted(taken: float, cores: int) -> float:
    """Cores that others want who take ``taken`` beside ranks on all cores: these share evenly, so
    nobody gets more than a part of what was wanted."""
    share = min(max(taken / cores, 0.0), 0.99)
    return cores * share / (1 - share)


def _own() -> float:
    """Seconds of this process and of its children that ended."""
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(sum(resource.getrusage(who)[:2]) for who in whose)


def _busy() -> float | None:
    """Seconds of all cores at work; None where there is no such file."""
    try:
        user, nice, system, _idle, _io, *interrupts = map(int, _STAT.read_text().split()[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")
