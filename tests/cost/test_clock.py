"""Seconds of pieces by class of operator, beside their derivations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from shardwright.core.amount import Step, derivation, leaf, named
from shardwright.core.recording import Piece
from shardwright.core.work import AttentionCalls, OperatorShapes, Product, Work
from shardwright.cost.clock import computed_seconds, reached
from shardwright.cost.presets import PRESETS

CLOCK = PRESETS["h100-8"].constants | PRESETS["h100-8"].clock
C = reached({name: c.value for name, c in CLOCK.items()})
PRODUCT = Product("bf16", 4096, 1024, 2048, calls=3)
ATTENDING = AttentionCalls("bf16", 64, 2**30, calls=2)
MANY = 10**6  # calls, whose launches take longer than what they compute


def _piece(
    products: tuple[Product, ...] = (),
    attention: tuple[AttentionCalls, ...] = (),
    work: Work = Work(1),  # noqa: B008
) -> Piece:
    return Piece("enter", "a", (), work, OperatorShapes(products, attention))


PIECES = {
    "products": _piece((PRODUCT, PRODUCT), work=Work(6, 2 * PRODUCT.flops, 2**20)),
    "attention": _piece((PRODUCT,), (ATTENDING,), Work(5, 2**60, 2**28)),
    "no shapes": Piece("enter", "a", (), Work(1, 2**40, 2**20)),
    "launches": _piece((PRODUCT,), work=Work(MANY, PRODUCT.flops, 2**20)),
}


@pytest.mark.parametrize("name", PIECES)
def test_numbers_and_amounts_agree(name: str, reevaluate: Callable[[Sequence[Step]], None]) -> None:
    leaves = reached({name: leaf(c.value, name, c.unit) for name, c in CLOCK.items()})
    found: Any = computed_seconds(PIECES[name], leaves, "bf16")
    assert found.value == computed_seconds(PIECES[name], C, "bf16") > 0
    reevaluate(derivation(named("seconds", found, "s")))


def test_a_product_takes_its_flops_at_a_rate_that_falls_with_its_sides() -> None:
    half = C["product_half_size"] * (1 / 4096 + 1 / 1024 + 1 / 2048)
    once = PRODUCT.flops / (C["bf16_compute_rate"] * C["product_efficiency"]) * (1 + half)
    moved = 2**20 / (CLOCK["memory_rate"].value * CLOCK["memory_efficiency"].value)
    found = computed_seconds(PIECES["products"], C, "fp32")
    launched = 6 * C["launch_latency"]  # longer than what is computed, which costs a share of it
    assert found == pytest.approx(launched + C["interleaves"] * (2 * once + moved))


def test_flops_without_a_shape_take_the_rate_of_fp32() -> None:
    moved = 2**20 / C["memory_rate"]
    flops = 2**40 / (C["compute_rate"] * C["product_efficiency"])
    launched = C["interleaves"] * C["launch_latency"]
    found = computed_seconds(PIECES["no shapes"], C, "bf16")
    assert found == pytest.approx(flops + moved + launched)


def test_a_piece_takes_what_its_launches_take_where_that_is_longer() -> None:
    assert computed_seconds(PIECES["launches"], C, "bf16") == pytest.approx(
        MANY * C["launch_latency"], rel=1e-5
    )
