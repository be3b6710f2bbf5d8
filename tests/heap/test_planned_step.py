"""A step as a plan has it: every phase apart, units of several layers, what a rank keeps."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from recordings import At, chain, layers, unit

from shardwright.core.optimizers import trained
from shardwright.core.recording import Recording, Touch
from shardwright.core.schedule import Merged, Prefetch
from shardwright.core.timeline import Kind, Phase
from shardwright.heap.flat import FlatUnits
from shardwright.heap.ledger import Ledger
from shardwright.heap.machine import Sharding
from shardwright.heap.rank_step import Chunk, RankStep
from shardwright.heap.traffic import Asked, Served, Traffic

Peaks = dict[Phase, dict[Kind, int]]

NOTE = 256  # bytes that travel with a gradient, to every rank
GRADIENT = 200  # of 50 numbers
SLICE = 128  # one of two, at its alignment
WHOLE = 2 * SLICE
ROW = SLICE + NOTE
REPLICA = 224  # at its alignment
REPLICA_ROW = REPLICA + NOTE
INPUT, SAVED, PASSING = 30, 400, 25


def _touches(name: str, gradient: int, first: int = 0, saved: int = 0) -> dict[At, Any]:
    """A forward that saves something; a backward that leaves a gradient and lets the rest go."""
    backward = (
        Touch("take", first + 1, gradient, "temporary"),
        Touch("gradient", first + 1, gradient, "temporary", f"{name}.w"),
        Touch("take", first + 2, PASSING, "temporary"),
        Touch("free", first, saved),
        Touch("free", first + 2, PASSING),
    )
    return {("enter", name): (Touch("take", first, saved),), ("enter_backward", name): backward}


MLP = chain([unit("mlp", 50)], touches=_touches("mlp", GRADIENT, saved=SAVED), inputs=INPUT)


def _run(
    recording: Recording,
    resident: dict[Kind, int],
    merged: Merged | None = None,
    tables: Traffic | None = None,
    **changes: Any,
) -> Peaks:
    sharding = Sharding(**{"shards": 2, "prefetch": 0, "on_gpu": True} | changes)
    heap = Ledger(fine=True)
    step = RankStep(
        [Chunk(recording)],
        optimizer=trained("sgd"),
        merged=merged or Merged(),
        tables={} if tables is None else {"tables": tables},
        resident=resident,
    )
    step.run(heap, lambda h, units, frozen: FlatUnits(h, units, sharding, frozen))
    return heap.peaks


def _peaks(*, sharded: bool, on_gpu: bool = True, resident: dict[Kind, int] | None = None) -> Peaks:
    replicated = frozenset[str]() if sharded else frozenset({"mlp"})
    kept: dict[Kind, int] = {"weight": SLICE if sharded else REPLICA}
    return _run(MLP, resident or kept, replicated=replicated, on_gpu=on_gpu)


def test_a_replicated_unit_has_its_gradient_whole_from_backward_to_step() -> None:
    peaks = _peaks(sharded=False)
    kept = {"weight": REPLICA, "input": INPUT}
    assert peaks["load"] == kept
    assert peaks["forward"] == {**kept, "activation": SAVED}
    assert peaks["backward"] == {
        **kept,
        "activation": SAVED,
        "unreduced_gradient": GRADIENT,
        "temporary": PASSING,
    }
    assert peaks["reduce"] == {  # what is sent beside what autograd left, then beside the sum
        **kept,
        "reduce_scatter": REPLICA_ROW,
        "gradient": REPLICA_ROW,
    }
    assert peaks["step"] == {**kept, "gradient": REPLICA_ROW}


def test_a_sharded_unit_is_whole_only_while_it_is_used() -> None:
    peaks = _peaks(sharded=True)
    kept = {"weight": SLICE, "input": INPUT}
    assert peaks["load"] == kept
    assert peaks["forward"] == {**kept, "gathered_weight": WHOLE, "activation": SAVED}
    # its weights and its gradient are less than what is sent, which the backward waits for
    assert WHOLE + SAVED + GRADIENT + PASSING < 3 * ROW
    assert peaks["backward"] == {**kept, "reduce_scatter": 2 * ROW, "gradient": ROW}
    assert peaks["step"] == {**kept, "gradient": ROW}


def test_a_sharded_gradient_is_sent_from_one_buffer_when_weights_and_gradients_are_gone() -> None:
    assert _peaks(sharded=True, on_gpu=False)["reduce"] == {
        "weight": SLICE,
        "input": INPUT,
        "reduce_scatter": 2 * ROW,
        "gradient": ROW,
        "communication": 2 * ROW,  # the parts of all ranks
    }


def test_the_parts_of_all_ranks_count_where_the_rank_itself_sums_them() -> None:
    plain, copying = _peaks(sharded=True), _peaks(sharded=True, on_gpu=False)
    assert sum(copying["reduce"].values()) > sum(plain["reduce"].values())
    while_sent: tuple[Phase, ...] = ("reduce", "backward")  # which waits for it
    assert {p: k for p, k in copying.items() if p not in while_sent} == {
        p: k for p, k in plain.items() if p not in while_sent
    }


@pytest.mark.parametrize("sharded", [False, True])
def test_what_a_rank_keeps_is_part_of_every_peak(sharded: bool) -> None:
    kept: dict[Kind, int] = {"weight": 7, "optimizer_state": 11, "buffer": 13}
    for kinds in _peaks(sharded=sharded, resident=kept).values():
        assert kept.items() <= kinds.items()


def test_set_up_is_no_phase_of_a_step() -> None:
    assert set(_peaks(sharded=True)) == {"load", "forward", "backward", "reduce", "step"}


# ---- layers that may share a unit ----------------------------------------------------------------

LAYER = 10_240  # bytes of a layer and of its gradient: halves have no padding
OF_LAYER = LAYER // 2 + NOTE  # what a rank gets of its gradient's sum
OF_PAIR = LAYER + NOTE


def _chain() -> Recording:
    """Three layers without activations."""
    recorded = layers(3, LAYER // 4)
    touches: dict[At, Any] = {}
    for index, each in enumerate(recorded):
        touches |= _touches(each.name, LAYER, 3 * index)
    return chain(recorded, touches=touches)


def _layers(prefetch: Prefetch, merged: bool, *, sharded: bool = True, **changes: Any) -> Peaks:
    """Peaks of three layers; the first two may be one unit."""
    pair = ("layers.0-1", ("layers.0", "layers.1"))
    units = ("layers.0-1", "layers.2") if merged else ("layers.0", "layers.1", "layers.2")
    return _run(
        _chain(),
        {"weight": 3 * LAYER // (2 if sharded else 1)},
        Merged([pair] if merged else []),
        prefetch=prefetch,
        **({"replicated": frozenset() if sharded else frozenset(units)} | changes),
    )


def test_layers_of_one_unit_are_whole_together() -> None:
    assert _layers(0, merged=False)["forward"]["gathered_weight"] == LAYER
    assert _layers(0, merged=True)["forward"]["gathered_weight"] == 2 * LAYER


def test_with_prefetch_two_units_are_whole_at_once() -> None:
    assert _layers(1, merged=False)["forward"]["gathered_weight"] == 2 * LAYER
    assert _layers(1, merged=True)["forward"]["gathered_weight"] == 3 * LAYER


def test_units_that_are_kept_stay_whole_from_forward_to_backward() -> None:
    peaks = _layers(0, merged=False, kept=frozenset({"layers.0", "layers.1"}))
    assert peaks["forward"]["gathered_weight"] == 3 * LAYER


def test_a_replicated_unit_is_gathered_neither_on_demand_nor_ahead() -> None:
    peaks = _layers(1, merged=False, sharded=False)
    assert all("gathered_weight" not in kinds for kinds in peaks.values())
    few = _layers(1, merged=False, replicated=frozenset({"layers.0", "layers.1"}))
    assert {kinds.get("gathered_weight", 0) for kinds in few.values()} == {0, LAYER}


def test_a_reduce_under_way_keeps_what_is_sent_and_the_parts_of_all_ranks() -> None:
    kept = {"weight": 3 * LAYER // 2}
    assert _layers(0, merged=False, on_gpu=False)["backward"] == {
        **kept,
        "reduce_scatter": 2 * OF_LAYER,  # the first layer's, which the backward waits for
        "gradient": 3 * OF_LAYER,
        "communication": 2 * OF_LAYER,
    }
    assert _layers(1, merged=False, on_gpu=False)["backward"] == {
        **kept,
        "gathered_weight": 2 * LAYER,  # the middle layer and, ahead, the first
        "unreduced_gradient": LAYER,  # the middle layer's
        "temporary": PASSING,
        "reduce_scatter": 2 * OF_LAYER,  # the last layer's under way
        "gradient": OF_LAYER,
        "communication": 2 * OF_LAYER,
    }


def test_shards_of_gradients_live_from_their_reduce_to_the_update() -> None:
    for prefetch in (0, 1):
        assert _layers(prefetch, merged=True)["step"] == {
            "weight": 3 * LAYER // 2,
            "gradient": OF_PAIR + OF_LAYER,
        }


def test_replicas_hold_whole_gradients_to_the_update() -> None:
    for prefetch in (0, 1):
        step = _layers(prefetch, merged=True, sharded=False)["step"]
        assert step == {"weight": 3 * LAYER, "gradient": 3 * LAYER + 2 * NOTE}


def test_the_gradient_of_a_merged_unit_comes_layer_by_layer() -> None:
    assert _layers(0, merged=True)["backward"] == {
        "weight": 3 * LAYER // 2,
        "gathered_weight": 2 * LAYER,
        "unreduced_gradient": 2 * LAYER,
        "temporary": PASSING,
        "gradient": OF_LAYER,
    }


# ---- tables --------------------------------------------------------------------------------------

IDS, WIDTH, ID, NUMBER = 10, 16, 8, 4
TRAFFIC = Traffic("tables", 2, (Asked(IDS, IDS, IDS, WIDTH),), (Served(IDS, IDS, WIDTH, IDS),))


def test_the_exchange_with_tables_has_phases_of_its_own() -> None:
    recorded = chain([unit("mlp", 50)], tables_after="mlp")
    with_tables = _run(recorded, {"weight": SLICE}, tables=TRAFFIC)
    alone = _run(recorded, {"weight": SLICE})
    assert set(with_tables) - set(alone) == {"exchange_ids", "lookup"}
    assert sum(with_tables["exchange_ids"].values()) >= SLICE + IDS * ID
    assert sum(with_tables["exchange_rows"].values()) >= SLICE + IDS * WIDTH * NUMBER
    assert sum(with_tables["reduce"].values()) >= sum(alone["reduce"].values())


def test_without_routed_tables_no_ids_are_exchanged() -> None:
    replicas = msgspec.structs.replace(
        TRAFFIC, asked=(), served=(), replicas=(Served(IDS, IDS, WIDTH, 0, size=IDS),)
    )
    recorded = chain([unit("mlp", 50)], tables_after="mlp")
    peaks = _run(recorded, {"weight": SLICE}, tables=replicas)
    assert "exchange_ids" not in peaks
    assert {"lookup", "exchange_rows"} <= set(peaks)


def test_every_module_of_tables_takes_and_frees_its_own() -> None:
    units = [unit("a", 50), unit("b", 50)]
    recorded = chain(units, tables_after={"a": "users", "b": "items"})
    shares = {path: msgspec.structs.replace(TRAFFIC, path=path) for path in ("users", "items")}

    def peak(phase: Phase, *paths: str) -> int:
        tables = {path: shares[path] for path in paths}
        heap = Ledger(fine=True)
        step = RankStep([Chunk(recorded)], optimizer=trained("sgd"), tables=tables, resident={})
        sharding = Sharding(shards=2, prefetch=0, on_gpu=True)
        step.run(heap, lambda h, units, frozen: FlatUnits(h, units, sharding, frozen))
        return sum(heap.peaks[phase].values())

    rows_served = IDS * ID  # which one keeps while the other looks up
    assert peak("exchange_ids", "users", "items") == peak("exchange_ids", "items") + rows_served
    arrived = IDS * (ID + WIDTH * NUMBER)
    assert peak("step", "users", "items") == peak("step", "users") + arrived


def test_rows_that_a_module_is_given_belong_to_their_exchange() -> None:
    rows = IDS * WIDTH * NUMBER
    touches: dict[At, Any] = {
        ("lookup", "tables"): (Touch("take", 0, rows),),
        ("row_gradients", "tables"): (Touch("free", 0, rows),),
    }
    peaks = _run(chain([unit("mlp", 50)], tables_after="mlp", touches=touches), {"weight": SLICE})
    assert peaks["exchange_rows"] == {"weight": SLICE, "activation": rows}
