from __future__ import annotations

import pytest
import torch

from shardwright.runtime.embeddings import update
from shardwright.runtime.embeddings.guide import interleave, regroup

RATE = 0.1


def _case(rows: int, ids: int, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * ids + dim)
    weight = torch.randn(rows, dim, generator=generator)
    numbers = torch.randint(rows, (ids,), generator=generator)
    return weight, numbers, torch.randn(ids, dim, generator=generator)


def _summed(weight: torch.Tensor, rows: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    dense = torch.zeros(weight.shape, dtype=torch.float64)
    for row, part in zip(rows.tolist(), gradient.double(), strict=True):
        dense[row] += part
    return dense


@pytest.mark.parametrize(("rows", "ids", "dim"), [(5, 40, 3), (50, 7, 4), (3, 0, 2), (1, 9, 8)])
def test_sgd_is_the_dense_update_of_the_summed_gradient(rows: int, ids: int, dim: int) -> None:
    weight, numbers, gradient = _case(rows, ids, dim)
    expected = weight.double() - RATE * _summed(weight, numbers, gradient)
    update.sgd(weight, numbers, gradient.clone(), RATE)
    torch.testing.assert_close(weight.double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("rows", "ids", "dim"), [(5, 40, 3), (50, 7, 4), (3, 0, 2), (1, 9, 8)])
def test_row_wise_adagrad_is_exact_where_rows_repeat(rows: int, ids: int, dim: int) -> None:
    weight, numbers, gradient = _case(rows, ids, dim)
    state = torch.zeros(rows)
    expected, sums = weight.double(), torch.zeros(rows, dtype=torch.float64)
    for _ in range(3):
        dense = _summed(weight, numbers, gradient)
        sums += dense.square().mean(1)
        expected -= RATE * dense / (sums.sqrt() + update.EPSILON).unsqueeze(1)
        update.rowwise_adagrad(weight, state, numbers, gradient.clone(), RATE)
    torch.testing.assert_close(weight.double(), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(state.double(), sums, atol=1e-6, rtol=1e-6)


def test_the_dense_forms_agree_with_the_sparse_ones() -> None:
    weight, numbers, gradient = _case(6, 20, 4)
    dense = _summed(weight, numbers, gradient).float()
    sparse, state, other = weight.clone(), torch.zeros(6), torch.zeros(6)
    update.rowwise_adagrad(sparse, state, numbers, gradient.clone(), RATE)
    update.dense_rowwise_adagrad(weight, other, dense, RATE)
    torch.testing.assert_close(weight, sparse, atol=1e-6, rtol=0)
    torch.testing.assert_close(other, state, atol=1e-6, rtol=1e-6)


def test_a_row_without_gradient_does_not_change() -> None:
    weight, state = torch.ones(3, 2), torch.zeros(3)
    update.dense_rowwise_adagrad(weight, state, torch.tensor([[0.0, 0], [1, 1], [0, 0]]), RATE)
    assert weight[0].tolist() == weight[2].tolist() == [1.0, 1.0]
    assert state.tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("counts", [[[2], [0], [3]], [[2, 1], [0, 4]], [[0, 0, 1], [1, 2, 0]]])
def test_regrouping_undoes_interleaving(counts: list[list[int]]) -> None:
    totals = [sum(column) for column in zip(*counts, strict=True)]
    groups = [100 * index + torch.arange(total) for index, total in enumerate(totals)]
    wire = interleave(groups, counts)
    assert len(wire) == sum(totals)
    for back, group in zip(regroup(wire, counts), groups, strict=True):
        assert back.tolist() == group.tolist()


def test_on_the_wire_values_lie_by_rank_and_then_by_group() -> None:
    wire = interleave([torch.tensor([1, 2, 3]), torch.tensor([7, 8])], [[2, 1], [1, 1]])
    assert wire.tolist() == [1, 2, 7, 3, 8]
