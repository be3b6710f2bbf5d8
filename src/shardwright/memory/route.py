"""What the exchange of ids and rows allocates on one rank, step by step.

The sizes are those of ``shardwright.runtime.embeddings``. How many rows of an update are distinct
is known of made-up click logs; elsewhere ids are assumed to spread evenly over a table's rows,
which bounds that from above.
"""

from __future__ import annotations

import msgspec

from shardwright.core.batch import INDEX_BYTES
from shardwright.core.tensor import ELEMENT_BYTES
from shardwright.memory.ledger import Ledger

FLOAT = ELEMENT_BYTES["fp32"]
BOOL = 1
OWNER = 1  # of a rank's number, up to 256 ranks


class Traffic(msgspec.Struct, frozen=True):
    """A rank's share of what the module of tables at ``path`` exchanges; ids are those of one step.

    ``requests``: (ids asked for, width, those of them that have to be sorted by owner) of each
    group of the route. ``serves``: (ids served, width, distinct rows among them) of the same
    groups. ``replica_ids``: ids looked up in replicas, whose rows hold ``replica_bytes``; of these
    ``ride_bytes`` travel with the row gradients, all ranks' together.
    """

    path: str
    requests: tuple[tuple[int, int, int], ...]
    serves: tuple[tuple[int, int, int], ...]
    replica_ids: int
    replica_bytes: int
    replica_rows: int
    ride_bytes: int
    dim: int
    adagrad: bool

    @property
    def asked(self) -> int:
        """Ids asked for."""
        return sum(request[0] for request in self.requests)

    @property
    def asked_bytes(self) -> int:
        """Bytes of the rows asked for."""
        return sum(ids * width for ids, width, _ in self.requests) * FLOAT

    @property
    def served(self) -> int:
        """Ids served to all ranks."""
        return sum(served[0] for served in self.serves)

    @property
    def served_bytes(self) -> int:
        """Bytes of the rows served."""
        return sum(ids * width for ids, width, _ in self.serves) * FLOAT


def exchange_ids(heap: Ledger, traffic: Traffic) -> None:
    """Sort by owner, send; the order stays until backward, the rows served until the update."""
    if not traffic.requests:
        return
    several = len(traffic.requests) > 1
    for index, (ids, _, cut) in enumerate(traffic.requests):
        rows, sorting = ids * INDEX_BYTES, cut * INDEX_BYTES
        if not cut:
            heap.take(f"{traffic.path}.sent.{index}", "communication", rows)
            continue
        with heap.passing("communication", rows + 2 * sorting):
            pass  # row numbers, and of those to be sorted the part and the way to its rows
        with heap.passing("communication", rows + 2 * cut * OWNER):  # sorted in a second copy
            heap.take(f"{traffic.path}.order.{index}", "communication", rows)
        with heap.passing("communication", rows + cut * OWNER):
            heap.take(f"{traffic.path}.sent.{index}", "communication", rows)
    received = traffic.served * INDEX_BYTES
    joined = traffic.asked * INDEX_BYTES if several else 0
    with heap.passing("communication", joined):
        heap.take(f"{traffic.path}.rows", "communication", received)
    for index in range(len(traffic.requests)):
        heap.free(f"{traffic.path}.sent.{index}")


def look_up(heap: Ledger, traffic: Traffic) -> None:
    """Rows for the others, and the replicas' rows for oneself."""
    if traffic.requests:
        joined = traffic.served_bytes if len(traffic.requests) > 1 else 0
        with heap.passing("communication", joined):  # rows group by group, put by rank
            heap.take(f"{traffic.path}.found", "communication", traffic.served_bytes)
    if traffic.replica_ids:
        heap.take(
            f"{traffic.path}.replica_rows", "communication", traffic.replica_ids * INDEX_BYTES
        )
        size = traffic.replica_ids * traffic.dim * FLOAT
        heap.take(f"{traffic.path}.replica_found", "communication", size)


def exchange_rows(heap: Ledger, traffic: Traffic) -> None:
    """The rows asked for come back."""
    heap.take(f"{traffic.path}.back", "communication", traffic.asked_bytes)
    heap.free(f"{traffic.path}.found")


def assemble(heap: Ledger, traffic: Traffic) -> None:
    """Everything found is put in feature order; the result is the model's."""
    regrouped = traffic.asked_bytes if len(traffic.requests) > 1 else 0
    for ids, width, cut in traffic.requests:
        inverse = ids * INDEX_BYTES if cut else 0
        pieces = ids * width * FLOAT if cut else 0
        with heap.passing("communication", regrouped + inverse + max(inverse, pieces)):
            pass
    heap.free(f"{traffic.path}.back")
    heap.free(f"{traffic.path}.replica_found")


def return_gradients(heap: Ledger, traffic: Traffic) -> None:
    """Gradients of rows go back to the rows' owners, those of replicas with them if they ride."""
    if not traffic.requests:
        return
    _replica_gradient(heap, traffic)
    sent = 0
    for ids, width, cut in traffic.requests:
        size = ids * width * FLOAT
        with heap.passing("communication", sent + (2 * size if cut else size)):
            sent += size
    ride = traffic.ride_bytes
    joined = sent + ride if len(traffic.requests) > 1 or ride else 0
    received = traffic.served_bytes + ride
    with heap.passing("communication", sent + ride + joined + received):
        pass
    if joined:  # put group by group again
        with heap.passing("communication", 2 * received):
            pass
    heap.take(f"{traffic.path}.arrived", "communication", traffic.served_bytes)


def reduce_replicas(heap: Ledger, traffic: Traffic) -> None:
    """The gradients of replicas are summed in place, unless they rode along."""
    if not traffic.requests:
        _replica_gradient(heap, traffic)


def _replica_gradient(heap: Ledger, traffic: Traffic) -> None:
    """A dense gradient of all replicated tables."""
    if not traffic.replica_ids:
        return
    heap.take(f"{traffic.path}.replica_gradient", "gradient", traffic.replica_bytes)
    with heap.passing("communication", traffic.replica_ids * traffic.dim * FLOAT):
        pass


def forget_trip(heap: Ledger, traffic: Traffic) -> None:
    """The backward of tables ends: the way that ids went is not needed any more."""
    heap.free(f"{traffic.path}.replica_rows")
    for index in range(len(traffic.requests)):
        heap.free(f"{traffic.path}.order.{index}")


def update(heap: Ledger, traffic: Traffic) -> None:
    """Owners update their rows; everything of the exchange is gone afterwards."""
    several = len(traffic.serves) > 1
    regrouped = traffic.served * INDEX_BYTES if several else 0
    for ids, width, distinct in traffic.serves:
        sums = distinct * (2 * INDEX_BYTES + width * FLOAT)
        sorting = ids * (2 * INDEX_BYTES + BOOL) + sums
        squares = distinct * (INDEX_BYTES + FLOAT + 2 * width * FLOAT)
        most = max(sorting, squares) if traffic.adagrad else 0
        with heap.passing("temporary", regrouped + most):
            pass
    if traffic.replica_ids and traffic.adagrad:
        with heap.passing("temporary", traffic.replica_bytes + traffic.replica_rows * FLOAT):
            pass
    for name in ("arrived", "rows", "replica_gradient"):
        heap.free(f"{traffic.path}.{name}")
