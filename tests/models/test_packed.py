from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.core.errors import InputError
from shardwright.core.kinds import (
    PACKED,
    EmbeddingsSection,
    flops,
    nbytes,
    packed_bytes,
    parameters,
    settled,
)
from shardwright.core.model import KindName, TableSpec
from shardwright.models.embeddings import Embeddings, looked_up, packed, unpacked

DTYPES = {"int8": torch.float32, "int4": torch.float16}


def _rows(dim: int, size: float) -> torch.Tensor:
    rows = torch.randn(300, dim, generator=torch.Generator().manual_seed(dim)) * size
    rows[0], rows[1], rows[2] = 0, size, -size  # without any range
    rows[3] = rows[3].abs() + 100 * size  # far from zero
    return rows


def _ends(found: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    tail = found[:, -PACKED[kind].ends :].contiguous().view(DTYPES[kind]).double()
    return tail[:, 0], tail[:, 1]


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("dim", [1, 2, 3, 16, 127])
@pytest.mark.parametrize("size", [1e-7, 1e-3, 1.0, 500.0])
def test_no_entry_is_further_than_half_a_step_from_what_it_was(
    kind: str, dim: int, size: float
) -> None:
    rows = _rows(dim, size)
    found = packed(rows, kind, "rows")
    scale, offset = _ends(found, kind)
    steps = 2 ** PACKED[kind].bits - 1
    exact = rows.double()
    read = unpacked(found, kind, dim).double()
    rounding = exact.abs().amax(1) * 2**-23  # of reading it in fp32
    assert ((read - exact).abs().amax(1) <= scale / 2 + rounding).all()
    assert (offset <= exact.amin(1)).all()
    assert (offset + steps * scale >= exact.amax(1)).all()


@pytest.mark.parametrize("kind", PACKED)
def test_a_step_is_no_larger_than_the_range_and_the_dtype_of_its_ends_ask_for(kind: str) -> None:
    rows = _rows(64, 1.0)
    scale, _ = _ends(packed(rows, kind, "rows"), kind)
    spread = (rows.amax(1) - rows.amin(1)).double()
    eps = torch.finfo(DTYPES[kind]).eps
    least = spread + rows.abs().amax(1).double() * eps
    steps = 2 ** PACKED[kind].bits - 1
    assert (scale <= least / steps * (1 + 2 * eps) + torch.finfo(DTYPES[kind]).tiny).all()


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("dim", [1, 5, 16])
def test_a_lookup_reads_what_was_packed(kind: str, dim: int) -> None:
    found = packed(_rows(dim, 0.1), kind, "rows")
    ids = torch.randint(300, (7, 11), generator=torch.Generator().manual_seed(0))
    read = looked_up(found, ids, kind, dim)
    assert read.shape == (7, 11, dim)
    assert (read - unpacked(found[ids], kind, dim)).abs().max().item() <= 1e-6


def test_bytes_lie_as_torch_packs_them() -> None:
    rows = _rows(16, 1.0)
    byte = torch.ops.quantized.embedding_bag_byte_prepack(rows)
    nibble = torch.ops.quantized.embedding_bag_4bit_prepack(rows)
    for kind, theirs in (("int8", byte), ("int4", nibble)):
        assert theirs.shape[1] == packed_bytes(16, kind)
        ours = unpacked(packed(rows, kind, "rows"), kind, 16)
        scale, _ = _ends(theirs, kind)
        assert ((unpacked(theirs, kind, 16) - ours).abs().amax(1) <= 1.1 * scale).all()


@pytest.mark.parametrize("kind", PACKED)
def test_reading_an_entry_is_a_product_and_a_sum(kind: str) -> None:
    (table,) = settled([TableSpec("t", 300, 16)], EmbeddingsSection(kind=kind))  # type: ignore[arg-type]
    calls: list[int] = []

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            found = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.addcmul.default:
                calls.append(2 * found.numel())
            return found

    own = packed(_rows(16, 1.0), kind, "rows")
    with Counted():
        unpacked(own, kind, 16)
    assert sum(calls) == 300 * flops(table)
    assert parameters(table) == 300 * 16


@pytest.mark.parametrize(
    ("kind", "bad", "words"),
    [
        ("int8", float("nan"), "numbers up to 3.40282e+38 for kind 'int8', got nan"),
        ("int8", float("inf"), "got inf"),
        ("int4", 7e4, "numbers up to 65504 for kind 'int4', got 70000"),
        ("int4", -7e4, "got 70000"),
    ],
)
def test_what_no_scale_reaches_is_refused(kind: str, bad: float, words: str) -> None:
    rows = torch.zeros(4, 4)
    rows[2, 1] = bad
    with pytest.raises(InputError) as error:
        packed(rows, kind, "table 'item'")
    assert str(error.value).startswith("table 'item': expected ")
    assert words in str(error.value)


@pytest.mark.parametrize("dim", [5, 16])
@pytest.mark.parametrize("trained", ["full", "hash", "qr", "mixed_dim", "tt"])
def test_tables_of_any_kind_are_packed(trained: KindName, dim: int) -> None:
    bare = [TableSpec("a", 70_000, dim), TableSpec("b", 30, dim)]
    module = Embeddings(settled(bare, EmbeddingsSection(kind=trained)))
    ids = torch.stack([torch.randint(rows, (50,)) for rows in (70_000, 30)], 1)
    ids[:3, 0] = torch.tensor([0, 65_536, 69_999])
    for kind, steps in (("int8", 255), ("int4", 15)):
        serving = module.materialised(kind)  # type: ignore[arg-type]
        found, wanted = serving(ids), module(ids).detach()
        spread = wanted.amax(-1) - wanted.amin(-1)
        assert ((found - wanted).abs().amax(-1) <= 0.51 * spread / steps + 2e-5).all()
        assert (found != wanted).any()
        held = sum(p.nbytes for p in serving.parameters())
        assert held == sum(map(nbytes, serving.kinds.tables))
        assert held == 70_030 * packed_bytes(dim, kind)
        assert not any(p.requires_grad for p in serving.parameters())
        unpacked_again = serving.materialised()
        assert (unpacked_again(ids) - found).abs().max().item() <= 1e-6


def test_packed_tables_stand_beside_others() -> None:
    tables = settled(
        [
            TableSpec("a", 500, 16, kind="int8"),
            TableSpec("b", 400, 16),
            TableSpec("c", 300, 16, kind="qr"),
            TableSpec("d", 300, 16, kind="int4"),
        ],
        EmbeddingsSection(),
    )
    module = Embeddings(tables)
    ids = torch.stack([torch.randint(t.rows, (9,)) for t in tables], 1)
    found = module(ids)
    for place, table in enumerate(tables):
        alone = Embeddings([table])(ids[:, place : place + 1])
        assert torch.equal(found[:, place], alone[:, 0])
