"""Routes follow the blocks, whatever the cut."""

from __future__ import annotations

import pytest

from shardwright.core.block import Block
from shardwright.core.errors import InputError
from shardwright.runtime.embeddings.route import Table, make_route


def _block(row: int, column: int, rows: int, columns: int, rank: int) -> Block:
    return Block("t", "parameter", (row, column), (rows, columns), rank)


def test_columns_cut_at_different_rows_share_strips() -> None:
    table = Table("t", "t", 10, 4, ("f",), "rowwise_adagrad")
    blocks = [_block(0, 0, 6, 2, 0), _block(6, 0, 4, 2, 1), _block(0, 2, 10, 2, 1)]
    strips = make_route([table], blocks, 2).strips
    assert [(s.row, s.rows, s.members) for s in strips] == [
        (0, 6, ((0, 0, 0), (1, 0, 0))),
        (6, 4, ((1, 0, 10), (1, 0, 6))),
    ]


def test_optimizers_without_sums_over_columns_need_no_strips() -> None:
    table = Table("t", "t", 10, 4, ("f",), "adam")
    route = make_route([table], [_block(0, 0, 10, 2, 0), _block(0, 2, 10, 2, 1)], 2)
    assert route.strips == ()


def test_tables_of_other_widths_and_optimizers_lie_apart() -> None:
    tables = [Table(n, n, 4, d, (n,), o) for n, d, o in [("a", 2, "sgd"), ("b", 2, "adam")]]
    blocks = [Block(t.fqn, "parameter", (0, 0), (4, 2), 0) for t in tables]
    assert [g.key.optimizer for g in make_route(tables, blocks, 1).groups] == ["adam", "sgd"]


@pytest.mark.parametrize(
    "blocks",
    [
        [_block(0, 0, 5, 4, 0), _block(5, 0, 5, 2, 0), _block(5, 2, 5, 2, 1)],
        [_block(0, 0, 5, 4, 0)],
        [_block(0, 2, 10, 2, 0)],
    ],
    ids=["columns cut in one half", "rows missing", "columns missing"],
)
def test_other_cuts_are_refused_by_the_block(blocks: list[Block]) -> None:
    table = Table("t", "t", 10, 4, ("f",))
    with pytest.raises(InputError, match="blocks of t: expected column ranges side by side"):
        make_route([table], blocks, 2)
