"""Collectives: what ranks exchange, and who is missing where an exchange does not end.

``Comm`` has those of a mesh, made of those of its process groups (``Peers``), of which each goes
through ``torch_groups`` to torch.
"""

from shardwright.runtime.comm.mesh import (
    START_SECONDS,
    Comm,
    check_mesh,
    fingerprint_of,
    flat,
    meet,
    start,
    stop,
)
from shardwright.runtime.comm.peers import Peers
from shardwright.runtime.comm.pending import Pending

__all__ = [
    "START_SECONDS",
    "Comm",
    "Peers",
    "Pending",
    "check_mesh",
    "fingerprint_of",
    "flat",
    "meet",
    "start",
    "stop",
]
