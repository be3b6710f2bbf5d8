from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwright.core.errors import InputError
from shardwright.job.job import Job, parse_job
from shardwright.job.model_of_job import tables_of
from shardwright.models.dlrm import (
    DLRM,
    ROWS_PER_GENERATOR,
    Dot,
    interaction,
    mlp,
)

BATCH = 6


def _job(interaction: str = "dot", layers: tuple[int, int] | None = None, **changes: Any) -> Job:
    rows = (10, ROWS_PER_GENERATOR + 5, 2 * ROWS_PER_GENERATOR + 1)
    return parse_job(
        {
            "tables": [{"name": f"t{i}", "rows": n, "dim": 16} for i, n in enumerate(rows)],
            "model": {"bottom": [8, 16], "top": [6, 1], "interaction": interaction}
            | (dict(zip(("cross_layers", "cross_rank"), layers, strict=True)) if layers else {}),
        }
        | changes
    )


@pytest.fixture(scope="module")
def model() -> DLRM:
    return DLRM(_job())


@pytest.mark.parametrize(
    ("features", "dim", "kind", "width"),
    [
        (26, 16, "dot", 367),
        (1, 4, "dot", 5),
        (3, 16, "dot", 22),
        (3, 16, "cat", 64),
        (3, 16, "dcn", 64),
    ],
)
def test_the_interaction_has_its_width(features: int, dim: int, kind: str, width: int) -> None:
    tables = [{"name": f"t{i}", "rows": 4, "dim": dim} for i in range(features)]
    job = parse_job({"tables": tables, "model": {"bottom": [dim], "interaction": kind}})
    meet = interaction(job, "cpu")
    assert meet.width == width
    assert meet(torch.randn(2, dim), torch.randn(2, features, dim)).shape == (2, width)


def test_the_cross_network_is_that_of_dcn_v2() -> None:
    model = DLRM(_job("dcn", layers=(2, 5)))
    dense, sparse = torch.randn(2, 16), torch.randn(2, 3, 16)
    first = x = torch.cat([dense, *sparse.unbind(1)], 1)
    for layer in range(2):
        narrow, wide, bias = (
            model.get_parameter(f"interact.{name}")
            for name in (f"narrow.{layer}.weight", f"wide.{layer}.weight", f"wide.{layer}.bias")
        )
        assert (narrow.shape, wide.shape) == ((5, 64), (64, 5))
        assert not bias.any()
        x = x + first * (x @ narrow.t() @ wide.t() + bias)
    torch.testing.assert_close(model.interact(dense, sparse), x)


@pytest.mark.parametrize("key", ["cross_layers", "cross_rank"])
def test_other_interactions_have_no_cross_network(key: str) -> None:
    with pytest.raises(InputError, match=f"model.{key}: expected no such key but for a cross"):
        parse_job({"tables": [{"name": "t", "rows": 4, "dim": 16}], "model": {key: 2}})


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


@pytest.mark.parametrize("features", [1, 2, 7])
def test_products_have_the_gradients_of_torch(features: int) -> None:
    torch.manual_seed(0)
    n = features + 1
    dot = Dot(features, 4).double()
    dense, sparse = torch.randn(3, 4).double(), torch.randn(3, features, 4).double()
    given = [dense.requires_grad_(), sparse.requires_grad_()]

    def plain(dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        stack = torch.cat([dense.unsqueeze(1), sparse], 1)
        products = torch.einsum("bik,bjk->bij", stack, stack)
        rows, columns = torch.tril_indices(n, n, -1)
        return torch.cat([dense, products[:, rows, columns]], 1)

    weights = torch.randn(3, dot.width).double()
    found, true = (
        torch.autograd.grad((each(*given) * weights).sum(), given) for each in (dot, plain)
    )
    for ours, torchs in zip(found, true, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-12, atol=1e-12)


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


@pytest.mark.parametrize("kind", ["full", "hash", "qr", "memcom", "tt", "mixed_dim", "dhe", "robe"])
def test_parameters_of_every_kind_start_around_their_centre(kind: str) -> None:
    keys = {"dhe": {"hashes": 8, "hidden": 6}, "tt": {"rank": 2}}.get(kind, {})
    model = DLRM(_job(embeddings={"kind": kind, "above": 0, **keys}))
    for name, values in model.named_parameters():
        centre = 1.0 if name.endswith((".remainder.weight", ".scale.weight")) else 0.0
        if values.numel() > 1000 and not name.endswith(".scale.weight"):
            assert (values < centre).float().mean().item() == pytest.approx(0.5, abs=0.1), name
    if kind == "qr":
        remainder = model.get_parameter("tables.t2.remainder.weight")
        assert remainder.min().item() >= 0.99
        assert remainder.max().item() <= 1.01
