"""What the exchange of one module of tables moves through one rank in a step."""

from __future__ import annotations

import msgspec

from shardwright.core.batch import INDEX_BYTES
from shardwright.core.tensor import ELEMENT_BYTES

FLOAT = ELEMENT_BYTES["fp32"]
SECTIONS = 3  # of a group: row numbers, lengths of bags, weights of ids


class Asked(msgspec.Struct, frozen=True):
    """What a rank asks of one group of a route, whose rows are ``width`` wide.

    ``rows`` come back for ``ids``, of which ``cut`` have to be sorted by owner, whose number has
    ``owner`` bytes, and are summed to ``bags``. All are as many where every bag has one id and is
    not ``jagged``. With ``dedup`` ``rows`` are the different ones, and their numbers alone are
    sent. With ``direct`` they are all that a module asks for, and results are put where they belong
    without a copy.
    """

    ids: int
    rows: int
    bags: int
    width: int
    cut: int = 0
    jagged: bool = False
    weighted: bool = False
    dedup: bool = False
    direct: bool = False
    owner: int = 1

    @property
    def sent_bytes(self) -> int:
        """Row numbers, lengths of segments and weights of rows, each of which takes as much."""
        return _sent(self.rows if self.dedup else self.ids, self.rows, self.jagged, self.weighted)


class Served(msgspec.Struct, frozen=True):
    """What a rank serves of one group, to all ranks or, of replicas, to itself: ``rows`` for
    ``ids``, of which ``distinct`` are different, and how they are updated; ``on_disk`` most of
    these come from there. An element of them has ``element`` bytes. Where other ranks have other
    columns of them, ``sums`` of rows go there. Of replicas, which have ``size`` rows, the gradients
    of ``distinct`` ones are exchanged row by row; if there are none, the gradient is dense."""

    ids: int
    rows: int
    width: int
    distinct: int
    jagged: bool = False
    weighted: bool = False
    optimizer: str = "sgd"
    on_disk: bool = False
    element: int = FLOAT
    is_cut: bool = False  # by columns, beside an optimizer that has one number a row
    sums: int = 0
    size: int = 0

    @property
    def received_bytes(self) -> int:
        """Row numbers, lengths and weights that came."""
        return _sent(self.ids, self.rows, self.jagged, self.weighted)

    @property
    def distinct_bytes(self) -> int:
        """The numbers of the different rows and the sums of their gradients."""
        return self.distinct * (INDEX_BYTES + self.width * FLOAT)

    @property
    def dense_bytes(self) -> int:
        """The gradient of replicas that do not exchange rows."""
        return 0 if self.distinct else self.size * self.width * FLOAT


def _sent(ids: int, rows: int, jagged: bool, weighted: bool) -> int:
    return (ids + (rows if jagged else 0) + (ids if weighted else 0)) * INDEX_BYTES


class Traffic(msgspec.Struct, frozen=True):
    """A rank's share of what the module of tables at ``path`` exchanges; ids are those of one step.

    ``asked`` and ``served`` are of the same groups of the route. The dense gradient of replicas
    ``rides`` with the row gradients or is reduced. ``joined`` are the ids and lengths of bags that
    come feature by feature and are put together to be checked. An element of a row travels in
    ``forward_size`` bytes, one of its gradient in ``backward_size``. ``steady``: counts of ids
    travel with them. With ``as_asked`` what comes back are the results of features, which come each
    for itself. ``early``: the lookup begins with the forward, and what travels stays until rows are
    needed; ``late``: the same of gradients until rows are updated; ``ahead``: the ids of its next
    batch are under way from a forward's end to the next one. Of ``means`` bags the sums are
    divided, ``mean_elements`` in all.
    """

    path: str
    ranks: int
    asked: tuple[Asked, ...]
    served: tuple[Served, ...]
    replicas: tuple[Served, ...] = ()
    rides: bool = False
    joined: int = 0
    forward_size: int = FLOAT
    backward_size: int = FLOAT
    steady: bool = False
    as_asked: bool = False
    early: bool = False
    late: bool = False
    ahead: bool = False
    means: int = 0
    mean_elements: int = 0

    @property
    def head_bytes(self) -> int:
        """Bytes of the counts that travel with ids, of all ranks."""
        # Where as many ids go to each rank in every step their counts need no exchange of their
        # own: a head before each part says how many there are, and whether a rank had more than
        # there was room for.
        if not (self.steady and self.asked):
            return 0
        return self.ranks * (SECTIONS * len(self.asked) + 1) * INDEX_BYTES

    @property
    def sent_bytes(self) -> int:
        """Bytes of the ids asked for, with their counts where these travel with them."""
        return sum(group.sent_bytes for group in self.asked) + self.head_bytes

    @property
    def received_bytes(self) -> int:
        """Bytes of the ids served, with lengths of segments and weights."""
        return sum(group.received_bytes for group in self.served)

    @property
    def asked_elements(self) -> int:
        """Elements of the rows asked for."""
        return sum(group.rows * group.width for group in self.asked)

    @property
    def served_elements(self) -> int:
        """Elements of the rows served."""
        return sum(group.rows * group.width for group in self.served)

    @property
    def asked_bytes(self) -> int:
        """Bytes in which the rows asked for come back."""
        return self.asked_elements * self.forward_size

    @property
    def served_bytes(self) -> int:
        """Bytes of the rows served, as they were found."""
        return self.served_elements * FLOAT

    @property
    def returned_bytes(self) -> int:
        """Bytes in which the gradients of rows go back."""
        return self.asked_elements * self.backward_size

    @property
    def arrived_bytes(self) -> int:
        """Bytes in which gradients arrive at the rows' owners."""
        return self.served_elements * self.backward_size

    @property
    def dense_bytes(self) -> int:
        """Bytes of the gradient of replicas that do not exchange rows."""
        return sum(group.dense_bytes for group in self.replicas)

    @property
    def ride_bytes(self) -> int:
        """Of these, those that travel with the row gradients, all ranks' together."""
        return self.ranks * self.dense_bytes if self.rides else 0

    @property
    def touched_bytes(self) -> int:
        """Bytes of the rows of replicas whose gradients are exchanged."""
        return sum(group.distinct_bytes for group in self.replicas)

    @property
    def is_joined(self) -> bool:
        """Whether what travels has several sections, which are put by rank and parted again."""
        return len(self.asked) > 1 or any(g.jagged or g.weighted for g in self.asked)
