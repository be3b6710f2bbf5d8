from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from shardwright.core.schedule import UPDATED_AT_ONCE
from shardwright.heap import route
from shardwright.heap.ledger import Ledger
from shardwright.heap.traffic import Asked, Served, Traffic

ID, FLOAT = 8, 4


def _traffic(
    *asked: Asked, served: tuple[Served, ...] = (Served(12, 12, 16, 9),), **changes: Any
) -> Traffic:
    """One row-wise group: a rank asks for 10 ids of 16 columns, serves 12, 9 of them distinct."""
    changes = {"ranks": 2, **changes}
    return Traffic("tables", asked=asked or (CUT,), served=served, **changes)


CUT = Asked(10, 10, 10, 16, cut=10)
UNCUT = Asked(10, 10, 10, 16)
WHOLE = _traffic(UNCUT)
TWO_GROUPS = _traffic(
    UNCUT, Asked(20, 20, 20, 8), served=(Served(12, 12, 16, 9), Served(6, 6, 8, 6))
)
REPLICAS = Traffic("tables", 2, (), (), (Served(10, 10, 16, 0, size=10),))


def _peak(act: Callable[[Ledger, Traffic], None], traffic: Traffic, *before: Any) -> int:
    """Bytes at the highest point of ``act`` beyond what lived when it began."""
    heap = Ledger(fine=True)
    for earlier in before:
        earlier(heap, traffic)
    start = heap.total
    with heap.during("lookup"):
        act(heap, traffic)
    return sum(heap.peaks.get("lookup", {}).values()) - start


def _left(traffic: Traffic, *acts: Callable[[Ledger, Traffic], None]) -> int:
    heap = Ledger(fine=True)
    for act in acts:
        act(heap, traffic)
    return heap.total


def test_traffic_adds_up_over_its_groups() -> None:
    assert TWO_GROUPS.received_bytes == 18 * ID
    assert TWO_GROUPS.asked_bytes == (10 * 16 + 20 * 8) * FLOAT
    assert TWO_GROUPS.served_bytes == (12 * 16 + 6 * 8) * FLOAT


def test_weights_of_ids_travel_in_a_section_of_their_own() -> None:
    weighted = msgspec.structs.replace(UNCUT, weighted=True)
    served = (Served(12, 12, 16, 9, weighted=True),)
    assert not WHOLE.is_joined
    assert _traffic(weighted, served=served).is_joined
    apart = _peak(route.exchange_ids, WHOLE)
    assert _peak(route.exchange_ids, _traffic(weighted, served=served)) > 2 * apart


def test_ids_of_a_whole_table_are_sent_as_they_are() -> None:
    assert _peak(route.exchange_ids, WHOLE) == (10 + 12) * ID
    assert _left(WHOLE, route.exchange_ids) == 12 * ID


FEW = (Served(1, 1, 16, 1),)


def test_ids_of_row_shards_are_sorted_by_owner_and_keep_their_order() -> None:
    assert _peak(route.exchange_ids, _traffic(served=FEW)) == 3 * 10 * ID + 10
    assert _left(_traffic(), route.exchange_ids) == (10 + 12) * ID


def test_an_owner_s_number_has_two_bytes_beyond_256_ranks() -> None:
    of_many = _traffic(Asked(10, 10, 10, 16, cut=10, owner=2), served=FEW)
    assert _peak(route.exchange_ids, of_many) == 3 * 10 * ID + 10 * 2


def test_only_the_ids_of_row_shards_are_sorted_where_both_kinds_are_asked() -> None:
    mixed = _traffic(Asked(10, 10, 10, 16, cut=4), served=FEW)
    assert _peak(route.exchange_ids, mixed) == 3 * 10 * ID + 4
    assert _left(mixed, route.exchange_ids) == (10 + 1) * ID


ONCE = Asked(10, 6, 10, 16, cut=10, dedup=True)


def test_rows_that_travel_once_are_sorted_and_know_whose_they_are() -> None:
    once = _traffic(ONCE, served=FEW)
    kept = 2 * 10 * ID + 6 * ID  # whose result each row is, and of each result its row
    assert _peak(route.exchange_ids, once) == 2 * 10 * ID + kept + 6 * ID
    assert _left(once, route.exchange_ids) == kept + ID
    assert _left(once, route.exchange_ids, route.forget_trip) == ID


def test_each_row_travels_once_both_ways() -> None:
    once = _traffic(ONCE)
    assert (once.asked[0].sent_bytes, once.asked_bytes) == (6 * ID, 6 * 16 * FLOAT)
    assert _peak(route.assemble, once, route.exchange_rows) == 10 * 16 * FLOAT
    alone = _traffic(served=(Served(0, 0, 16, 0),)).asked[0]
    sums = msgspec.structs.replace(alone, rows=6, dedup=True)
    wide = _traffic(sums, served=(Served(0, 0, 16, 0),))
    assert _peak(route.return_gradients, wide) == (10 + 6) * 16 * FLOAT + 2 * 6 * ID


def test_results_that_are_all_a_module_asks_for_need_no_copy() -> None:
    direct = _traffic(msgspec.structs.replace(ONCE, direct=True))
    assert _peak(route.assemble, direct, route.exchange_rows) == 0


def test_several_groups_are_joined_before_they_are_sent() -> None:
    assert _peak(route.exchange_ids, TWO_GROUPS) == (30 + 30) * ID


def test_counts_that_travel_with_ids_are_put_before_them_and_taken_off_again() -> None:
    heads = 2 * (3 + 1)
    steady = _traffic(UNCUT, steady=True)
    assert steady.sent_bytes == (10 + heads) * ID
    assert _peak(route.exchange_ids, steady) == (10 + heads + heads + 12) * ID
    assert _left(steady, route.exchange_ids) == 12 * ID
    large = _traffic(UNCUT, served=FEW, steady=True)
    assert _peak(route.exchange_ids, large) == (10 + 10 + heads) * ID


def test_the_owner_finds_the_rows_it_serves() -> None:
    assert _left(_traffic(), route.look_up) == 12 * 16 * FLOAT


def test_rows_of_several_groups_are_found_group_by_group_and_joined() -> None:
    assert _peak(route.look_up, TWO_GROUPS) == 2 * TWO_GROUPS.served_bytes
    assert _left(TWO_GROUPS, route.look_up) == TWO_GROUPS.served_bytes


def test_a_replica_finds_its_own_rows_and_keeps_the_ids() -> None:
    assert _left(REPLICAS, route.look_up) == 10 * ID + 10 * 16 * FLOAT


def test_found_rows_are_gone_when_the_rows_asked_for_are_in_order() -> None:
    left = _left(WHOLE, route.look_up, route.exchange_rows, route.assemble)
    assert left == 0  # the result is the model's


def test_rows_asked_for_arrive_beside_the_rows_found_for_others() -> None:
    assert _peak(route.exchange_rows, WHOLE, route.look_up) == 10 * 16 * FLOAT
    assert _left(WHOLE, route.look_up, route.exchange_rows) == 10 * 16 * FLOAT


def test_a_rank_alone_has_what_it_asked_for_where_it_found_it() -> None:
    one = _traffic(UNCUT, served=(Served(10, 10, 16, 9),), ranks=1)
    size = 10 * 16 * FLOAT
    assert _peak(route.exchange_rows, one, route.exchange_ids, route.look_up) == 0
    assert _left(one, route.look_up, route.exchange_rows) == size
    assert _peak(route.return_gradients, one) == size


def test_rows_of_a_whole_table_are_in_order_as_they_come() -> None:
    assert _peak(route.assemble, WHOLE, route.exchange_rows) == 0


def test_rows_of_row_shards_go_back_to_their_order_through_a_copy() -> None:
    copy = 10 * 16 * FLOAT
    assert _peak(route.assemble, _traffic(), route.exchange_rows) == 10 * ID + copy


def test_gradients_leave_with_the_width_of_their_rows_and_arrive_at_the_owner() -> None:
    sent, arrived = 10 * 16 * FLOAT, 12 * 16 * FLOAT
    assert _peak(route.return_gradients, WHOLE) == sent + arrived
    assert _left(WHOLE, route.return_gradients) == arrived


def test_gradients_of_row_shards_are_sorted_into_a_copy() -> None:
    wide = _traffic(served=(Served(0, 0, 16, 0),))
    assert _peak(route.return_gradients, wide) == 2 * 10 * 16 * FLOAT


def test_replicas_sum_a_dense_gradient() -> None:
    assert _peak(route.reduce_replicas, REPLICAS) == 640 + 10 * 16 * FLOAT
    assert _left(REPLICAS, route.reduce_replicas) == 640


def test_sgd_updates_one_group_in_place() -> None:
    assert _peak(route.update, _traffic()) == 0


def test_sgd_of_rows_on_disk_reads_them_and_writes_them_back() -> None:
    served = Served(12, 12, 16, 12, on_disk=True)
    assert _peak(route.update, _traffic(served=(served,))) == 12 * (ID + 2 * 16 * FLOAT)


def test_adagrad_sorts_ids_and_sums_rows_that_occur_more_than_once() -> None:
    few = _traffic(served=(Served(12, 12, 16, 9, optimizer="rowwise_adagrad"),))
    assert _peak(route.update, few) == 12 * ID + 9 * (4 * ID + 16 * FLOAT)
    most = _traffic(served=(Served(120, 120, 16, 9, optimizer="rowwise_adagrad"),))
    assert _peak(route.update, most) == 120 * (ID + 2 * route.SORTED)


def test_gradients_of_many_rows_are_summed_piece_by_piece() -> None:
    width = UPDATED_AT_ONCE // (4 * FLOAT)  # of which four are changed at a time
    served = Served(12, 12, width, 9, optimizer="rowwise_adagrad")
    once = 4 * (width * FLOAT + 3 * ID)
    assert _peak(route.update, _traffic(served=(served,))) == 12 * ID + 9 * 2 * ID + once


def test_several_groups_are_parted_before_they_are_updated() -> None:
    assert _peak(route.update, TWO_GROUPS) == 18 * ID
    arrived = TWO_GROUPS.served_bytes
    parted = _peak(route.return_gradients, TWO_GROUPS)
    assert parted == max(2 * TWO_GROUPS.asked_bytes + arrived, 2 * arrived)


def test_a_riding_gradient_travels_once_to_every_rank() -> None:
    riding = _traffic(UNCUT, replicas=REPLICAS.replicas, rides=True)
    sent = 10 * 16 * FLOAT + 2 * 640
    received = 12 * 16 * FLOAT + 2 * 640
    assert _peak(route.return_gradients, riding) == 640 + 2 * sent + received
    assert _left(riding, route.return_gradients) == 640 + 12 * 16 * FLOAT
    assert _peak(route.reduce_replicas, riding) == 0


def test_an_adagrad_replica_squares_its_gradient() -> None:
    replicas = (Served(10, 10, 16, 0, optimizer="rowwise_adagrad", size=10),)
    traffic = Traffic("tables", 2, (), (), replicas)
    assert _peak(route.update, traffic) == 640 + 10 * FLOAT


def test_what_arrived_and_its_rows_wait_for_the_update_and_the_order_of_ids_does_not() -> None:
    way = (route.exchange_ids, route.return_gradients, route.forget_trip)
    assert _left(_traffic(), *way) == 12 * ID + 12 * 16 * FLOAT


@pytest.mark.parametrize("traffic", [_traffic(), WHOLE, TWO_GROUPS, REPLICAS])
def test_nothing_of_the_exchange_outlives_the_update(traffic: Traffic) -> None:
    left = _left(
        traffic,
        route.exchange_ids,
        route.look_up,
        route.exchange_rows,
        route.assemble,
        route.return_gradients,
        route.reduce_replicas,
        route.forget_trip,
        route.update,
    )
    assert left == 0


def test_without_tables_to_ask_nothing_moves() -> None:
    nothing = Traffic("tables", 2, (), ())
    for act in (route.exchange_ids, route.look_up, route.return_gradients, route.reduce_replicas):
        assert _left(nothing, act) == 0


BAGS = _traffic(Asked(30, 10, 10, 16, jagged=True), served=(Served(36, 12, 16, 9, jagged=True),))


def test_lengths_of_bags_travel_with_their_ids_and_only_sums_come_back() -> None:
    sent, received = (30 + 10) * ID, (36 + 12) * ID
    assert _peak(route.exchange_ids, BAGS) == sent + 10 * ID + received
    assert _left(BAGS, route.exchange_ids) == received + 10 * ID
    assert _left(BAGS, route.look_up) == 12 * 16 * FLOAT


def test_bags_over_several_ranks_are_summed_where_they_were_asked_for() -> None:
    apart = _traffic(
        Asked(30, 18, 10, 16, cut=30, jagged=True), served=(Served(36, 20, 16, 9, jagged=True),)
    )
    assert _left(apart, route.exchange_ids) == (36 + 20 + 2 * 18) * ID
    assert _peak(route.assemble, apart, route.exchange_rows) == 10 * 16 * FLOAT
    assert _peak(route.return_gradients, apart) == max(
        (10 + 18) * 16 * FLOAT, (18 + 20) * 16 * FLOAT
    )


def test_sgd_sums_the_rows_of_bags_first() -> None:
    """Beside what came in order, which is not needed any more as it came."""
    sort, sums = 36 * route.SORTED, 9 * (ID + 3 * route.SORTED + 16 * FLOAT)
    assert _peak(route.update, BAGS, route.exchange_ids) == sort + sums
    many = msgspec.structs.replace(BAGS, served=(Served(360, 12, 16, 9, jagged=True),))
    sort = 360 * (ID + 2 * route.SORTED) + 9 * 2 * ID
    assert _peak(route.update, many, route.exchange_ids) == sort


def test_sgd_sums_the_rows_that_carry_weights_first() -> None:
    asked, served = Asked(10, 10, 10, 16, weighted=True), Served(36, 36, 16, 9, weighted=True)
    weighted = _traffic(asked, served=(served,))
    sort, sums = 36 * (ID + 2 * FLOAT), 9 * (4 * ID + 16 * FLOAT)
    assert _peak(route.update, weighted, route.exchange_ids) == sort + sums


def test_ids_that_come_feature_by_feature_are_joined_until_all_is_asked() -> None:
    joined = msgspec.structs.replace(WHOLE, joined=25)
    assert _peak(route.exchange_ids, joined) == max(25 + 10, 10 + 12) * ID
    assert _left(joined, route.exchange_ids) == 12 * ID
    local = msgspec.structs.replace(REPLICAS, joined=25)
    assert _peak(route.look_up, local) == max((25 + 10) * ID, 10 * ID + 10 * 16 * FLOAT)
    assert _left(local, route.look_up) == 10 * ID + 10 * 16 * FLOAT


def test_rows_in_half_precision_are_rounded_beside_what_they_come_from() -> None:
    half = _traffic(forward_size=2, backward_size=2)
    asked, served = 10 * 16, 12 * 16
    assert (half.asked_bytes, half.returned_bytes, half.arrived_bytes) == (
        *(2 * asked, 2 * asked),
        2 * served,
    )
    assert _peak(route.exchange_rows, half, route.look_up) == 2 * served
    assert _left(half, route.look_up, route.exchange_rows) == 2 * asked
    inverse_and_result = 10 * ID + asked * FLOAT
    assert _peak(route.assemble, half, route.exchange_rows) == asked * FLOAT + inverse_and_result
    assert _left(half, route.return_gradients) == 2 * served
    assert _peak(route.update, half, route.return_gradients) == served * FLOAT
