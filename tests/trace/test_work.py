"""What operators compute and move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwright.core.work import OperatorShapes, Product, Work
from shardwright.trace.recorder import Recorder

FLOAT = 4


@pytest.fixture
def work() -> Callable[[Callable[[], Any]], Work]:
    """The work of a few operators together."""

    def measure(run: Callable[[], Any]) -> Work:
        recorder = Recorder()
        with recorder:
            run()
        found = recorder.work
        recorder.storages.release()
        return found

    return measure


Measure = Callable[[Callable[[], Any]], Work]


def test_a_product_counts_its_flops_and_no_bytes(work: Measure) -> None:
    a, b = torch.ones(3, 5), torch.ones(5, 7)
    assert work(lambda: a @ b) == Work(1, 2 * 3 * 5 * 7, 0)


def test_a_grouped_product_counts_every_row_or_column_once(work: Measure) -> None:
    rows, ends = torch.ones(6, 4), torch.tensor([2, 2, 6], dtype=torch.int32)
    experts = torch.ones(3, 4, 8, requires_grad=True)
    once = 2 * 6 * 4 * 8
    assert work(lambda: torch._grouped_mm(rows, experts, offs=ends)) == Work(1, once, 0)
    rows.requires_grad_(True)

    def both() -> None:
        torch.autograd.backward(torch._grouped_mm(rows, experts, offs=ends), torch.ones(6, 8))

    assert work(both).flops == 3 * once
    pairs = torch.ones(3, 4, 4), torch.ones(3, 4, 8)
    assert work(lambda: torch._grouped_mm(*pairs)) == Work(1, 3 * 2 * 4 * 4 * 8, 0)


def test_another_operator_counts_what_it_reads_and_writes(work: Measure) -> None:
    a, b = torch.ones(3, 5), torch.ones(5)
    assert work(lambda: a + b) == Work(1, 0, (15 + 5 + 15) * FLOAT)


def test_tensors_in_lists_are_read_too(work: Measure) -> None:
    a, b = torch.ones(4), torch.ones(6)
    assert work(lambda: torch.cat([a, b])) == Work(1, 0, (4 + 6 + 10) * FLOAT)


def test_a_change_in_place_is_work_and_a_view_is_none(work: Measure) -> None:
    a = torch.ones(3, 5)
    assert work(lambda: a.view(15)[2:].unsqueeze(0)) == Work()
    assert work(lambda: a.reshape(15)) == Work()  # one, where no copy is needed
    assert work(lambda: a.mul_(2)).calls == 1


def test_to_make_memory_is_no_work_and_to_fill_it_is(work: Measure) -> None:
    assert work(lambda: torch.empty(7)) == Work()
    assert work(lambda: torch.zeros(7)) == Work(1, 0, 7 * FLOAT)


def test_attention_counts_the_flops_of_its_products(work: Measure) -> None:
    size, heads, length, width = 2, 3, 5, 4
    parts = [torch.ones(size, heads, length, width, requires_grad=True) for _ in "qkv"]
    attend = torch.nn.functional.scaled_dot_product_attention
    forward = work(lambda: attend(*parts))
    assert forward.flops == 2 * 2 * size * heads * length * length * width

    def both() -> None:
        attend(*parts).sum().backward()

    backward = work(both).flops - forward.flops
    assert backward == 5 * 2 * size * heads * length * length * width


def shapes(run: Callable[[], Any]) -> OperatorShapes:
    """What is told by its shape of a few operators together."""
    recorder = Recorder()
    with recorder:
        run()
    found = recorder.shapes
    recorder.storages.release()
    return found


def test_products_are_told_by_shape_and_dtype_in_their_order() -> None:
    a, b = torch.ones(3, 5, dtype=torch.bfloat16), torch.ones(5, 7, dtype=torch.bfloat16)
    found = shapes(lambda: (a @ b, a @ b, torch.addmm(torch.ones(7), a.float(), b.float())))
    narrow, wide = Product("bf16", 3, 7, 5), Product("fp32", 3, 7, 5)
    assert found.products == (narrow, narrow, wide)


def test_a_batch_of_products_is_as_many_calls() -> None:
    a, b = torch.ones(4, 3, 5), torch.ones(4, 5, 7)
    assert shapes(lambda: a @ b).products == (Product("fp32", 3, 7, 5, 4),)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_computes_half_of_what_is_masked(causal: bool) -> None:
    parts = [torch.ones(2, 3, 8, 4, requires_grad=True) for _ in "qkv"]
    attend = torch.nn.functional.scaled_dot_product_attention
    (found,) = shapes(lambda: attend(*parts, is_causal=causal)).attention
    assert found.flops * (2 if causal else 1) == 2 * 2 * 2 * 3 * 8 * 8 * 4
    assert (found.dtype, found.head_dim, found.calls) == ("fp32", 4, 1)


def test_rows_of_experts_are_taken_to_be_dealt_evenly() -> None:
    rows, ends = torch.ones(6, 4), torch.tensor([2, 2, 6], dtype=torch.int32)
    experts = torch.ones(3, 4, 8)
    found = shapes(lambda: torch._grouped_mm(rows, experts, offs=ends))
    assert found.products == (Product("fp32", 2, 8, 4, 3),)
    assert sum(each.flops for each in found.products) == 2 * 6 * 4 * 8


def test_of_a_large_tensor_what_is_picked_moves_and_not_the_whole(work: Measure) -> None:
    table, ids = torch.ones(1000, 4), torch.tensor([3, 5])
    read = 2 * (2 * 4 * FLOAT) + 2 * 8  # rows read and written, and ids
    assert work(lambda: torch.nn.functional.embedding(ids, table)) == Work(1, 0, read)
    logs = torch.ones(2, 1000, requires_grad=True)

    def loss() -> None:
        torch.nn.functional.nll_loss(logs, ids, reduction="sum").backward()

    # Forward a number a row; backward the whole gradient is written, and nothing of its size read.
    assert 2 * 1000 * FLOAT < work(loss).moved < 2 * 1000 * FLOAT + 200
