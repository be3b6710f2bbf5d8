from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwright.core.job import Job, parse_job
from shardwright.core.model_of_job import tables_of
from shardwright.models.dlrm import (
    DLRM,
    ROWS_PER_GENERATOR,
    Interaction,
    interaction_width,
    mlp,
)

BATCH = 6


def _job(interaction: str = "dot", **changes: Any) -> Job:
    rows = (10, ROWS_PER_GENERATOR + 5, 2 * ROWS_PER_GENERATOR + 1)
    return parse_job(
        {
            "tables": [{"name": f"t{i}", "rows": n, "dim": 16} for i, n in enumerate(rows)],
            "model": {"bottom": [8, 16], "top": [6, 1], "interaction": interaction},
        }
        | changes
    )


@pytest.fixture(scope="module")
def model() -> DLRM:
    return DLRM(_job())


@pytest.mark.parametrize(
    ("features", "dim", "kind", "width"),
    [(26, 16, "dot", 367), (1, 4, "dot", 5), (3, 16, "dot", 22), (3, 16, "cat", 64)],
)
def test_the_interaction_has_its_width(features: int, dim: int, kind: str, width: int) -> None:
    assert interaction_width(features, dim, kind) == width
    found = Interaction(features, kind)(torch.randn(2, dim), torch.randn(2, features, dim))
    assert found.shape == (2, width)


def test_a_linear_sits_at_every_even_index_with_weight_then_bias() -> None:
    built = mlp((22, 6, 1), last_relu=False, device="meta")
    assert [(name, tuple(p.shape)) for name, p in built.named_parameters()] == [
        ("0.weight", (6, 22)),
        ("0.bias", (6,)),
        ("2.weight", (1, 6)),
        ("2.bias", (1,)),
    ]


def test_a_batch_gives_one_logit_per_sample(model: DLRM) -> None:
    logits = model(torch.randn(BATCH, 13), torch.zeros(BATCH, 3, dtype=torch.int64))
    assert logits.shape == (BATCH, 1)


def test_the_interaction_is_the_products_of_all_pairs(model: DLRM) -> None:
    dense, sparse = torch.randn(2, 16), torch.randn(2, 3, 16)
    found = model.interact(dense, sparse)
    stack = [dense, *sparse.unbind(1)]
    pairs = [(stack[i] * stack[j]).sum(1) for i in range(4) for j in range(i)]
    torch.testing.assert_close(found, torch.cat([dense, torch.stack(pairs, 1)], 1))


@pytest.mark.parametrize(
    ("offsets", "sizes"),
    [
        ((0, 0), (1, 16)),
        ((ROWS_PER_GENERATOR - 1, 0), (2, 16)),
        ((ROWS_PER_GENERATOR, 4), (7, 8)),
        ((5, 15), (2 * ROWS_PER_GENERATOR - 5, 1)),
        ((2 * ROWS_PER_GENERATOR, 0), (1, 16)),
        ((3, 0), (0, 16)),
    ],
)
def test_a_rectangle_of_a_table_starts_as_in_the_whole(
    model: DLRM, offsets: tuple[int, int], sizes: tuple[int, int]
) -> None:
    whole = model.get_parameter("tables.t2.weight").detach()
    (row, column), (rows, columns) = offsets, sizes
    part = model.initial_block("tables.t2.weight", offsets, sizes)
    assert torch.equal(part, whole[row : row + rows, column : column + columns])


@pytest.mark.parametrize(
    ("name", "offsets", "sizes"),
    [("top.0.weight", (2, 5), (3, 4)), ("bottom.2.bias", (3,), (5,))],
)
def test_a_rectangle_of_a_dense_weight_starts_as_in_the_whole(
    model: DLRM, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    whole = model.get_parameter(name).detach()
    spans = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
    assert torch.equal(model.initial_block(name, offsets, sizes), whole[spans])


def test_starting_values_follow_the_seed_and_nothing_else(model: DLRM) -> None:
    torch.manual_seed(1)
    again = DLRM(_job())
    other = DLRM(_job(train={"seed": 1}))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name))
        assert not torch.equal(parameter, other.get_parameter(name))


def test_tables_start_within_the_bound_of_their_rows(model: DLRM) -> None:
    for table in tables_of(_job()):
        weight = model.get_parameter(table.tensor.fqn)
        bound = table.rows**-0.5
        assert 0.8 * bound < weight.abs().max().item() <= bound


def test_every_part_of_a_table_has_values_of_its_own(model: DLRM) -> None:
    weight = model.get_parameter("tables.t2.weight")
    first = weight[:ROWS_PER_GENERATOR]
    second = weight[ROWS_PER_GENERATOR : 2 * ROWS_PER_GENERATOR]
    assert not torch.equal(first, second)
