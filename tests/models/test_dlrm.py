from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shardwright.core.job import Job, parse_job
from shardwright.core.specs.dlrm import spec
from shardwright.models.dlrm import DLRM, ROWS_PER_GENERATOR

MATMULS = ("bottom.0", "bottom.1", "interaction.bmm", "top.0", "top.1")
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


@pytest.mark.parametrize("interaction", ["dot", "cat"])
def test_the_spec_has_the_parameters_of_the_module_in_its_order(interaction: str) -> None:
    job = _job(interaction)
    built = [(n, tuple(p.shape)) for n, p in DLRM(job, "meta").named_parameters()]
    told = spec(job)
    for unit in told.units:
        mine = [(n, shape) for n, shape in built if n.startswith(f"{unit.name}.")]
        assert [(t.fqn, t.shape) for t in unit.tensors] == mine
    tables = [(n, shape) for n, shape in built if n.startswith("tables.")]
    assert [(t.tensor.fqn, t.tensor.shape) for t in told.tables] == tables
    assert len(told.tensors) == len(built)


@pytest.mark.parametrize("interaction", ["dot", "cat"])
def test_the_spec_has_the_dtypes_and_buffers_of_the_module(interaction: str) -> None:
    job = _job(interaction)
    built, told = DLRM(job, "meta"), spec(job)
    assert {p.dtype for p in built.parameters()} == {torch.float32}
    assert {t.dtype for t in told.tensors} == {"fp32"}
    sizes = [b.numel() * b.element_size() for b in built.buffers()]
    assert [b.nbytes for b in told.buffers] == sizes


@pytest.mark.parametrize("interaction", ["dot", "cat"])
def test_the_spec_counts_the_forward_flops_of_matrix_products(interaction: str) -> None:
    job = _job(interaction)
    built = DLRM(job)
    with FlopCounterMode(display=False) as counter:
        built(torch.randn(BATCH, 13), torch.zeros(BATCH, 3, dtype=torch.int64))
    told = sum(
        work.flops_per_sample
        for stage in spec(job).stages
        for work in stage.forward
        if work.name in MATMULS
    )
    assert counter.get_total_flops() == told * BATCH


@pytest.mark.parametrize("interaction", ["dot", "cat"])
def test_the_spec_counts_the_backward_flops_of_matrix_products(interaction: str) -> None:
    job = _job(interaction)
    built = DLRM(job)
    logits = built(torch.randn(BATCH, 13), torch.zeros(BATCH, 3, dtype=torch.int64))
    with FlopCounterMode(display=False) as counter:
        logits.sum().backward()
    told = sum(
        work.flops_per_sample
        for stage in spec(job).stages
        for work in stage.backward
        if work.name in MATMULS
    )
    assert counter.get_total_flops() == told * BATCH


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
    for table in spec(_job()).tables:
        weight = model.get_parameter(table.tensor.fqn)
        bound = table.rows**-0.5
        assert 0.8 * bound < weight.abs().max().item() <= bound


def test_every_part_of_a_table_has_values_of_its_own(model: DLRM) -> None:
    weight = model.get_parameter("tables.t2.weight")
    first = weight[:ROWS_PER_GENERATOR]
    second = weight[ROWS_PER_GENERATOR : 2 * ROWS_PER_GENERATOR]
    assert not torch.equal(first, second)
