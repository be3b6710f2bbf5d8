"""What the exchange of ids and rows allocates on one rank, step by step.

The sizes are those of ``shardwright.runtime.embeddings``. How many rows of an update are distinct
is known of made-up click logs; elsewhere ids are assumed to spread evenly over a table's rows,
which bounds that from above.
"""

# Why each sort and each copy has its line: at a batch of millions of ids what an exchange takes
# for a moment (ids before and after a sort, rows beside rows put in order) is more than what it
# keeps, and often the peak of the step. Functions are in the order in which a step calls them,
# and a name that one of them takes another one frees: ``take`` refuses one that is there already,
# which is how a change in the runtime's order that was not made here shows. Tests train and
# compare to the byte.

from __future__ import annotations

import msgspec

from shardwright.core.batch import INDEX_BYTES
from shardwright.core.optimizers import BY_ROW
from shardwright.core.schedule import BAGS_OF_ONE, rows_at_once
from shardwright.heap.ledger import Ledger
from shardwright.heap.traffic import FLOAT, Served, Traffic

BOOL = 1
SORTED = 4  # of a row number that is sorted, up to 2^31 rows
# While a row is updated, its states and what is made of them: of an element and of a row.
BESIDE = {
    "sgd": (0, 0),
    "rowwise_adagrad": (0, 3),
    "adagrad": (2, 0),
    "adam": (4, 0),
    "partial_rowwise_adam": (2, 3),
}
KEPT_BY_ROW = 2  # of these of a row while the weight is changed: the state and the mean of squares


def exchange_ids(heap: Ledger, traffic: Traffic) -> None:
    """Ids go out, and what is asked for comes."""
    ask(heap, traffic)
    advance(heap, traffic)
    hear(heap, traffic)


def next_batch(traffic: Traffic) -> Traffic:
    """What the lookup of a batch to come leaves, which is as large under names of its own."""
    return msgspec.structs.replace(traffic, path=f"{traffic.path}, next batch")


def ask(heap: Ledger, traffic: Traffic) -> None:
    """Sort by owner, send; the order stays until backward."""
    if not traffic.asked:
        return
    _join(heap, traffic)
    for index, group in enumerate(traffic.asked):
        rows, sorting = group.ids * INDEX_BYTES, group.cut * INDEX_BYTES
        lengths = group.rows * INDEX_BYTES if group.jagged else 0
        weights = group.ids * FLOAT if group.weighted else 0
        heap.take(f"{traffic.path}.weights.{index}", "communication", 3 * weights)
        if group.dedup:
            # the part and the way to its rows
            heap.briefly("communication", rows + 2 * sorting)
            with heap.passing("communication", 2 * rows):  # and the number of each different one
                heap.take(f"{traffic.path}.sent.{index}", "communication", group.sent_bytes)
                heap.take(f"{traffic.path}.lengths.{index}", "communication", group.sent_bytes)
                heap.take(f"{traffic.path}.order.{index}", "communication", 2 * rows)
            continue
        # Tables that are whole on one rank need no sort: their ids go as they lie, and only jagged
        # bags have lengths that stay for the backward.
        if not group.cut:
            heap.take(f"{traffic.path}.sent.{index}", "communication", rows)
            heap.take(f"{traffic.path}.order.{index}", "communication", lengths)
            continue
        order, owners = lengths or rows, group.cut * group.owner
        # row numbers, and of those to be sorted the part and the way to its rows
        heap.briefly("communication", rows + 2 * sorting)
        with heap.passing("communication", rows + 2 * owners):  # sorted in a second copy
            heap.take(f"{traffic.path}.order.{index}", "communication", order)
        with heap.passing("communication", rows + owners):
            heap.take(f"{traffic.path}.sent.{index}", "communication", rows)
        if group.jagged:  # the bag and the owner of every id, from which segments follow
            with heap.passing("communication", 3 * rows):
                heap.take(f"{traffic.path}.lengths.{index}", "communication", lengths)
    _ask_replicas(heap, traffic)
    _send(heap, traffic)


def _send(heap: Ledger, traffic: Traffic) -> None:
    """Sections are joined, with counts beside them if these travel with ids."""
    heads = traffic.head_bytes
    sections = traffic.sent_bytes - heads
    # One collective for all sections instead of one for each: what is saved in latency costs a copy
    # of everything that is sent.
    if traffic.is_joined:
        heap.briefly("communication", sections)
        _forget_sent(heap, traffic)
        heap.take(f"{traffic.path}.sent", "communication", sections)
    if heads:
        heap.briefly("communication", traffic.sent_bytes)
        _forget_sent(heap, traffic)
        heap.take(f"{traffic.path}.sent", "communication", traffic.sent_bytes)
        heap.take(f"{traffic.path}.came", "communication", traffic.received_bytes + heads)


def _forget_sent(heap: Ledger, traffic: Traffic) -> None:
    for index in range(len(traffic.asked)):
        heap.free(f"{traffic.path}.sent.{index}")
        heap.free(f"{traffic.path}.weights.{index}")
    heap.free(f"{traffic.path}.sent")


def advance(heap: Ledger, traffic: Traffic) -> None:
    """Ids follow their counts, where these went first."""
    if traffic.asked and not traffic.head_bytes:
        heap.take(f"{traffic.path}.rows", "communication", traffic.received_bytes)


def hear(heap: Ledger, traffic: Traffic) -> None:
    """The rows that others ask for are here, and stay until the update."""
    _forget_sent(heap, traffic)
    if traffic.head_bytes:
        heap.take(f"{traffic.path}.rows", "communication", traffic.received_bytes)
        heap.free(f"{traffic.path}.came")


def _join(heap: Ledger, traffic: Traffic) -> None:
    heap.take(f"{traffic.path}.shares", "activation", traffic.means * FLOAT)
    heap.take(f"{traffic.path}.joined", "activation", traffic.joined * INDEX_BYTES)


def _ask_replicas(heap: Ledger, traffic: Traffic) -> None:
    """Ids of the replicas' rows, after which nothing needs what is given any more."""
    for index, group in enumerate(traffic.replicas):
        kept = (group.ids + (group.rows if group.jagged else 0)) * INDEX_BYTES
        kept += group.ids * FLOAT if group.weighted else 0
        heap.take(f"{traffic.path}.replica_rows.{index}", "communication", kept)
    heap.free(f"{traffic.path}.joined")


def look_up(heap: Ledger, traffic: Traffic) -> None:
    """Rows for the others, and the replicas' rows for oneself."""
    if not traffic.asked:
        _join(heap, traffic)
        _ask_replicas(heap, traffic)
    else:
        # group by group, put by rank; of one group sections are gathered from all ranks
        joined = traffic.served_bytes if len(traffic.asked) > 1 else 0
        parted = traffic.received_bytes if traffic.is_joined and not joined else 0
        beside = _finding(heap, traffic)
        alone = [g.ids for g in traffic.served if not (g.jagged or g.weighted)]
        starts = max((ids for ids in alone if ids >= BAGS_OF_ONE), default=0) * INDEX_BYTES
        with heap.passing("communication", max(joined + parted, starts) + beside):
            heap.take(f"{traffic.path}.found", "communication", traffic.served_bytes)
    for index, group in enumerate(traffic.replicas):
        found = group.rows * group.width * FLOAT
        heap.take(f"{traffic.path}.replica_found.{index}", "communication", found)
        starts = 3 * group.rows * INDEX_BYTES if group.jagged else 0  # and torch's beside sums
        heap.briefly("communication", max(starts, _in_full(group)))


def _finding(heap: Ledger, traffic: Traffic) -> int:
    """Different rows are found in memory and on disk; bytes that are beside what they come to."""
    most = max(map(_in_full, traffic.served), default=0)
    for group in traffic.served:
        if group.on_disk:  # sorted, with the place of each id, then rows to be summed
            distinct = group.distinct * INDEX_BYTES
            heap.briefly("communication", 3 * group.ids * INDEX_BYTES + 2 * distinct)
            rows = group.distinct * group.width * FLOAT
            most = max(most, group.ids * INDEX_BYTES + distinct + rows)
    return most


def _in_full(group: Served) -> int:
    """Bytes beside rows that were rounded: of bags, whose sums are made in full, all rows in full
    with their places."""
    size = group.width * group.element if group.element < FLOAT else 0
    if size and (group.jagged or group.weighted):
        size = group.width * FLOAT + max(size, INDEX_BYTES)
    return group.ids * size


def exchange_rows(heap: Ledger, traffic: Traffic) -> None:
    """The rows asked for come back, in fewer bytes once those found are rounded."""
    # Rows travel in fewer bytes than they are kept in, so there are two buffers for a moment, and
    # the wide one goes before what comes back is there.
    rounded = traffic.served_elements * traffic.forward_size
    if rounded < traffic.served_bytes:
        heap.take(f"{traffic.path}.rounded", "communication", rounded)
        heap.free(f"{traffic.path}.found")
    # Nobody waits here: what is sent must stay until the rows of the others are here (`arrive`).
    if not traffic.early:
        heap.briefly("communication", 0 if traffic.ranks == 1 else traffic.asked_bytes)
        _forget_found(heap, traffic)
    heap.take(f"{traffic.path}.back", "communication", traffic.asked_bytes)
    if not traffic.early:
        arrive(heap, traffic)


def _forget_found(heap: Ledger, traffic: Traffic) -> None:
    for name in ("found", "rounded"):
        heap.free(f"{traffic.path}.{name}")


def arrive(heap: Ledger, traffic: Traffic) -> None:
    """Rows that were on their way are here, and what was sent is forgotten."""
    _forget_found(heap, traffic)
    # What came back is the result itself, in order and in full: from here on it is the model's
    # activation, which its recording counts.
    if traffic.as_asked and traffic.forward_size == FLOAT:
        heap.free(f"{traffic.path}.back")


def assemble(heap: Ledger, traffic: Traffic) -> None:
    """Everything found is put in feature order; the result is the model's."""
    regrouped = traffic.asked_bytes if len(traffic.asked) > 1 else 0
    for group in traffic.asked:
        sorted_ = group.cut and not (group.jagged or group.dedup)
        inverse = group.ids * INDEX_BYTES if sorted_ else 0
        copied = (group.cut or group.dedup) and not group.direct
        pieces = group.bags * group.width * FLOAT if copied else 0
        widened = traffic.forward_size < FLOAT and not traffic.as_asked
        rows = group.rows * group.width * FLOAT if widened else 0
        heap.briefly("communication", regrouped + rows + inverse + max(inverse, pieces))
    heap.free(f"{traffic.path}.back")
    for index in range(len(traffic.replicas)):
        heap.free(f"{traffic.path}.replica_found.{index}")


def return_gradients(heap: Ledger, traffic: Traffic) -> None:
    """Gradients of rows go back to the rows' owners, those of replicas with them if they ride."""
    heap.take(f"{traffic.path}.divided", "communication", traffic.mean_elements * FLOAT)
    if not traffic.asked:
        return
    _replica_gradient(heap, traffic)
    sent = 0
    for group in traffic.asked:
        whole, size = (n * group.width * FLOAT for n in (group.bags, group.rows))
        rounded = group.rows * group.width * traffic.backward_size
        beside = whole if group.cut or group.dedup else 0
        if group.dedup:  # and two numbers of each row that is summed
            beside += group.rows * 2 * INDEX_BYTES
        if rounded < size:
            beside = max(beside, rounded)
        with heap.passing("communication", sent + size + beside):
            sent += rounded
    ride = traffic.ride_bytes
    joined = sent + ride if len(traffic.asked) > 1 or traffic.rides else 0
    received = 0 if traffic.ranks == 1 else traffic.arrived_bytes + ride
    # Gradients travel while the rest of the backward computes, so both buffers stay until the
    # update asks for them (`receive_gradients`).
    if traffic.late:
        with heap.passing("communication", sent + ride if joined else 0):
            heap.take(f"{traffic.path}.returned", "communication", joined or sent)
            heap.take(f"{traffic.path}.received", "communication", received)
        return
    heap.briefly("communication", sent + ride + joined + received)
    _regroup(heap, traffic)


def receive_gradients(heap: Ledger, traffic: Traffic) -> None:
    """Gradients that were on their way are here."""
    for name in ("returned", "received"):
        heap.free(f"{traffic.path}.{name}")
    _regroup(heap, traffic)


def _regroup(heap: Ledger, traffic: Traffic) -> None:
    """Gradients that came in one are put group by group again."""
    joined = traffic.ranks > 1 and (len(traffic.asked) > 1 or traffic.rides)
    came = traffic.arrived_bytes + traffic.ride_bytes if joined else 0
    heap.briefly("communication", 2 * came)
    heap.take(f"{traffic.path}.arrived", "communication", traffic.arrived_bytes)


def reduce_replicas(heap: Ledger, traffic: Traffic) -> None:
    """The gradients of replicas are summed in place unless they rode along, or rows gathered."""
    if not traffic.asked:
        _replica_gradient(heap, traffic)
    own, every = traffic.touched_bytes, traffic.ranks * traffic.touched_bytes
    heap.briefly("communication", 2 * own + 2 * every)  # flat, as long as any, joined
    heap.take(f"{traffic.path}.gathered", "communication", every)
    heap.free(f"{traffic.path}.touched")


def _replica_gradient(heap: Ledger, traffic: Traffic) -> None:
    """A dense gradient of all replicated tables, or of each row that was looked up its own."""
    if not traffic.replicas:
        return
    own = sum(group.rows * group.width for group in traffic.replicas) * FLOAT
    with heap.passing("communication", own):
        heap.take(f"{traffic.path}.replica_gradient", "gradient", traffic.dense_bytes)
        touched = 0
        for group in traffic.replicas:
            made = touched + _summing(group) if group.distinct else _spreading(group)
            with heap.passing("communication", made):
                touched += group.distinct_bytes
        heap.take(f"{traffic.path}.touched", "communication", touched)


def _spreading(group: Served) -> int:
    """Bytes for a moment where every id gets its bag's gradient: the bag's number, and then the
    gradient, times its weight."""
    one = group.width * FLOAT
    if group.jagged:
        return group.ids * (SORTED + one)
    return group.ids * one if group.weighted else 0


def forget_trip(heap: Ledger, traffic: Traffic) -> None:
    """The backward of tables ends: the way that ids went is not needed any more."""
    for index in range(len(traffic.replicas)):
        heap.free(f"{traffic.path}.replica_rows.{index}")
    for index in range(len(traffic.asked)):
        heap.free(f"{traffic.path}.order.{index}")
        heap.free(f"{traffic.path}.lengths.{index}")
    for name in ("shares", "divided"):
        heap.free(f"{traffic.path}.{name}")


def update(heap: Ledger, traffic: Traffic) -> None:
    """Owners update their rows; everything of the exchange is gone afterwards."""
    regrouped = traffic.received_bytes if traffic.is_joined else 0
    heap.briefly("temporary", regrouped)
    if regrouped:
        heap.free(f"{traffic.path}.rows")
    cut = [group for group in traffic.served if group.is_cut]
    kept = regrouped  # with the different rows of those before that are cut, and their gradients
    for group in traffic.served:
        rows = group.rows * group.width * FLOAT if traffic.backward_size < FLOAT else 0
        made = _summed(group) if group.is_cut else _updating(group)
        heap.briefly("temporary", kept + rows + made)
        kept += group.distinct_bytes if group.is_cut else 0
    # The sums over all columns are needed before any row of a cut table may change, so all such
    # groups are summed first, exchanged once, and only then updated.
    if cut:
        kept += _add_up(heap, cut, kept)
    for group in cut:
        heap.briefly("temporary", kept + _stepping(group) - group.distinct_bytes)
    for replicas in traffic.replicas:
        if replicas.distinct:
            came = traffic.ranks * replicas.distinct
            most = min(came, replicas.size)
            found = Served(came, 0, replicas.width, most, optimizer=replicas.optimizer)
            heap.briefly("temporary", _updating(found))
        elif replicas.optimizer != "sgd" or replicas.element < FLOAT:  # not all in its place
            rows = replicas.size * FLOAT if replicas.optimizer in BY_ROW else 0
            heap.briefly("temporary", replicas.dense_bytes + rows)
    for name in ("arrived", "rows", "replica_gradient", "gathered"):
        heap.free(f"{traffic.path}.{name}")


def _add_up(heap: Ledger, cut: list[Served], kept: int) -> int:
    """Sums of squares over the columns of a rank are sent to those that have the others, beside
    what is ``kept``; their bytes, which stay."""
    sums = sum(group.distinct for group in cut) * FLOAT
    sent = sum(group.sums for group in cut) * FLOAT
    most = max(group.distinct for group in cut) * FLOAT
    heap.briefly("temporary", kept + 2 * sums + 2 * sent + most)
    return sums


def _updating(group: Served) -> int:
    """Bytes for a moment: ids sorted, and piece by piece each distinct row with the sum of its
    gradients, its states and what the optimizer makes of these, or its weight where that is not
    changed in its place."""
    in_place = group.element == FLOAT and not group.on_disk
    plain = not (group.jagged or group.weighted)
    if group.optimizer == "sgd" and in_place and plain:
        return 0
    if group.on_disk:
        return max(_summed(group), _stepping(group))
    # The runtime updates so many rows at a time (`core.schedule.rows_at_once`), which bounds what
    # an update takes however many rows a batch touches.
    most = rows_at_once(group.width)
    if group.optimizer == "sgd" and in_place:
        return _summed(group, most)
    changed = _sorted(group, group.distinct) + min(group.distinct, most) * _changing(group)
    return max(_summed(group, most), changed + _weights(group))


def _summed(group: Served, most: int | None = None) -> int:
    """Bytes for a moment where the gradients of each row are summed, weighted if it is."""
    return _summing(group, most) + _weights(group)


def _weights(group: Served) -> int:
    """Bytes of the weights of ids as they came."""
    return group.ids * FLOAT if group.weighted else 0


def _stepping(group: Served) -> int:
    """Bytes of the different rows of an update, and what an optimizer makes of them."""
    return group.distinct * (INDEX_BYTES + _changing(group))


def _changing(group: Served) -> int:
    """Bytes of the gradient of one row, and what an optimizer makes of it."""
    in_place = group.element == FLOAT and not group.on_disk
    elements, numbers = BESIDE[group.optimizer]
    beside = numbers * FLOAT + group.width * (1 + elements) * FLOAT
    if not in_place:  # in full, and rounded again, beside states and what is changed
        weight = FLOAT + (group.element if group.element < FLOAT else 0)
        kept = elements if numbers else max(elements - 1, 0)
        left = min(numbers, KEPT_BY_ROW) * FLOAT
        beside = max(beside, left + group.width * ((1 + kept) * FLOAT + weight))
    return beside


def _summing(group: Served, most: int | None = None) -> int:
    """Bytes for a moment where ids are sorted and the gradients of different rows summed, at
    ``most`` so many at a time."""
    distinct = group.distinct
    # Three moments of one function of which the largest counts: while ids are sorted, while the
    # first of each is marked, and while the gradients of a stretch are summed.
    sorting = group.ids * (INDEX_BYTES + 2 * SORTED)  # before and after, and where each is
    marking = group.ids * (INDEX_BYTES + SORTED + BOOL) + distinct * (2 * INDEX_BYTES + SORTED)
    ordering = 0
    if group.jagged:  # the segment of every id, before and after the sort
        ordering = _sorted(group, 0) + group.ids * (INDEX_BYTES + SORTED)
        ordering += distinct * 2 * INDEX_BYTES
    part = min(distinct, most or distinct)
    number = SORTED if group.jagged else INDEX_BYTES
    # two numbers of each, and where it begins unless that is known
    bags = part * (group.width * FLOAT + number * (2 + (part < distinct)))
    return max(sorting, marking, ordering, _sorted(group, distinct) + bags)


def _sorted(group: Served, distinct: int) -> int:
    """Bytes of ids in order: what is to be added up for each, its weight, and where ``distinct``
    ones begin."""
    number = SORTED if group.jagged else INDEX_BYTES
    weight = FLOAT if group.weighted else 0
    return group.ids * (number + weight) + distinct * (INDEX_BYTES + number)
