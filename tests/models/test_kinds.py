from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from shardwright.core.errors import InputError
from shardwright.core.kinds import (
    LINEAR,
    EmbeddingsSection,
    dense_of,
    flops,
    join_of,
    nbytes,
    parameters,
    settled,
)
from shardwright.core.model import TableSpec
from shardwright.models.embeddings import Embeddings
from shardwright.models.kinds import HashNetwork, Kinds, SharedArray, mish_

SMALL: dict[str, dict[str, Any]] = {
    "full": {},
    "hash": {"kind": "hash"},
    "double_hash": {"kind": "double_hash"},
    "qr mult": {"kind": "qr", "collisions": 7},
    "qr add": {"kind": "qr", "collisions": 7, "operation": "add"},
    "qr concat": {"kind": "qr", "collisions": 7, "operation": "concat"},
    "mixed_dim": {"kind": "mixed_dim", "width": 3},
    "memcom": {"kind": "memcom"},
    "tt": {"kind": "tt", "rank": 3},
    "dhe": {"kind": "dhe", "hashes": 32, "hidden": 16},
    "robe": {"kind": "robe", "block": 4},
}
ROWS = (1000, 77, 50)


def _tables(name: str, rows: tuple[int, ...] = ROWS, **more: Any) -> tuple[TableSpec, ...]:
    keys = SMALL[name] | more
    own = [TableSpec(f"t{i}", n, 16, **keys) for i, n in enumerate(rows)]
    return settled(own, EmbeddingsSection())


def _ids(rows: tuple[int, ...] = ROWS, batch: int = 64) -> torch.Tensor:
    random = torch.Generator().manual_seed(3)
    return torch.stack([torch.randint(n, (batch,), generator=random) for n in rows], 1)


@pytest.mark.parametrize("name", SMALL)
def test_the_formulas_count_what_the_module_has(name: str) -> None:
    tables = _tables(name)
    own = list(Embeddings(tables).parameters())
    assert sum(p.numel() for p in own) == sum(map(parameters, tables))
    assert sum(p.nbytes for p in own) == sum(map(nbytes, tables))


class _ByEntry(TorchDispatchMode):
    """Counts products and sums of numbers, entry by entry."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        entries = (torch.ops.aten.mul.Tensor, torch.ops.aten.add.Tensor)
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if func in entries and len(tensors) == 2 and all(x.dtype == torch.float32 for x in tensors):
            self.count += found.numel()
        return found


@pytest.mark.parametrize("name", SMALL)
def test_the_formula_of_operations_is_what_torch_counts(name: str) -> None:
    module = Embeddings(_tables(name, rows=(1000,)))
    ids = torch.arange(64).unsqueeze(1)  # all different
    by_entry = _ByEntry()
    with FlopCounterMode(display=False) as products, by_entry:
        module(ids)
    assert products.get_total_flops() + by_entry.count == 64 * flops(module.kinds.tables[0])


@pytest.mark.parametrize("name", SMALL)
def test_a_full_table_made_of_another_kind_has_its_rows(name: str) -> None:
    module = Embeddings(_tables(name))
    full = module.materialised()
    found = full(_ids())
    assert found.shape == (64, 3, 16)
    assert (found - module(_ids())).abs().max().item() <= 1e-6
    assert sum(p.numel() for p in full.parameters()) == sum(ROWS) * 16


def test_every_kind_follows_its_formula() -> None:
    ids, (first, *_) = _ids(), ROWS
    for name in SMALL:
        module = Embeddings(_tables(name)).double()
        found, members = module(ids), {m.name: m for m in module.kinds.members}

        def of(part: str, module: Embeddings = module, members: Any = members) -> torch.Tensor:
            return module.rows_of(members[f"t0{part}"])

        i, c = ids[:, 0], module.kinds.tables[0].collisions
        match name:
            case "full":
                wanted = of("")[i]
            case "hash":
                wanted = of("")[i % 250]
            case "qr mult":
                wanted = of(".quotient")[i // c] * of(".remainder")[i % c]
            case "qr add":
                wanted = of(".quotient")[i // c] + of(".remainder")[i % c]
            case "qr concat":
                wanted = torch.cat([of(".quotient")[i // c], of(".remainder")[i % c]], 1)
            case "mixed_dim":
                wanted = of("")[i] @ module.kinds.of_table["t0"].weight.t()
            case "memcom":
                wanted = of(".shared")[i % 250] * of(".scale")[i]
            case "tt":
                a, b = of(".first")[i // 100].view(-1, 4, 3), of(".second")[i // 10 % 10]
                c = of(".third")[i % 10].view(-1, 3, 2)
                wanted = torch.einsum("nar,nrbs,nsc->nabc", a, b.view(-1, 3, 2, 3), c).flatten(1)
            case "dhe":
                wanted = _network(module.kinds.of_table["t0"], i.tolist())
            case _:
                continue
        assert first == 1000
        assert (found[:, 0] - wanted).abs().max().item() <= 1e-12, name


def _network(network: Any, ids: list[int]) -> torch.Tensor:
    """Hash by hash in Python's integers."""
    pairs = list(zip(network.factors.tolist(), network.shifts.tolist(), strict=True))
    wrapped = [[((a * i + b + 2**31) % 2**32 - 2**31) / 2**31 for a, b in pairs] for i in ids]
    rows = torch.tensor(wrapped, dtype=torch.float32).double()
    for number, layer in enumerate(network.layers):
        rows = torch.nn.functional.mish(rows) if number else rows
        rows = layer(rows)
    return rows


def test_hashes_of_an_id_are_spread_over_their_range_and_differ_from_id_to_id() -> None:
    (table,) = _tables("dhe", rows=(1_000_000,))
    network = HashNetwork(table, "cpu")
    found = network.encoded(torch.randperm(1_000_000)[:20_000])
    assert -1 <= found.min().item() <= found.max().item() < 1
    assert found.mean(0).abs().max().item() < 0.05
    assert (found.square().mean(0) - 1 / 3).abs().max().item() < 0.03
    assert len(torch.unique(found, dim=0)) == 20_000
    correlated = torch.corrcoef(found.t()).fill_diagonal_(0).abs().max().item()
    assert correlated < 0.1


def test_no_two_ids_share_a_hash_for_every_factor_is_odd() -> None:
    """Modulo 2^32 an odd factor has an inverse; four times an id is four times one 2^30 on."""
    (table,) = _tables("dhe", rows=(1_000_000,))
    assert (HashNetwork(table, "cpu").factors % 2 == 1).all()


@pytest.mark.parametrize("name", SMALL)
def test_rows_without_gradients_are_those_with_them(name: str) -> None:
    module, ids = Embeddings(_tables(name)), _ids(batch=500)
    with torch.no_grad():
        found = module(ids)
    assert found.shape == (500, 3, 16)
    assert (found - module(ids)).abs().max().item() <= 1e-6


class _OneDevice(TorchDispatchMode):
    """Refuses what a GPU does: tensors, or a generator, of different devices in one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(func)
        given = [x for x in pytree.tree_leaves((args, kwargs)) if hasattr(x, "device")]
        scalars = [x for x in given if isinstance(x, torch.Tensor) and x.dim() == 0]
        devices = {torch.device(x.device).type for x in given if not any(x is s for s in scalars)}
        assert len(devices) < 2 or func is torch.ops.aten.copy_.default, f"{func} of {devices}"
        return func(*args, **(kwargs or {}))


class _Unchecked(Embeddings):
    def _check(self, ids: torch.Tensor) -> None:
        """The meta device has no numbers to look at."""


@pytest.mark.parametrize("name", SMALL)
def test_embeddings_of_another_device_keep_nothing_on_the_cpu(name: str) -> None:
    """No GPU is needed to see it: the meta device is another one as well."""
    with _OneDevice():
        module = _Unchecked(_tables(name), device="meta", sparse=name != "robe")
        module.reset_parameters()
        for part in module.modules():
            if isinstance(part, HashNetwork):  # how many ids are different nobody knows there
                part.distinct = lambda ids: (ids, torch.arange(len(ids), device=ids.device))
        rows = module(_ids().to("meta"))
        rows.sum().backward()
    assert all(x.is_meta for x in (rows, *module.parameters(), *module.buffers()))
    assert all(own.grad is not None for own in module.parameters())


def test_mish_is_one_operation_where_no_cache_is_to_be_minded() -> None:
    with _OneDevice() as mode:
        mish_(torch.empty(2048, 1800, device="meta"))
    assert mode.operations[1:] == [torch.ops.aten.mish_.default]


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("batch", [1, 3])
def test_ids_stay_as_they_were_given(name: str, batch: int) -> None:
    module, ids = Embeddings(_tables(name)), _ids(batch=batch)
    module(ids)
    assert ids.equal(_ids(batch=batch))


def test_an_array_without_gradients_goes_round_at_its_end() -> None:
    (table,) = _tables("robe", rows=(9,), collisions=9)
    array = SharedArray(table, "cpu")
    assert len(array.weight) == 16
    nn.init.normal_(array.weight)
    with torch.no_grad():
        found = array(torch.arange(9))
    assert torch.equal(found, array(torch.arange(9)))
    ring = torch.cat([array.weight, array.weight])
    blocks = {tuple(ring[k : k + 4].tolist()) for k in range(16)}
    seen = {tuple(block) for row in found for block in row.view(4, 4).tolist()}
    assert seen <= blocks
    assert any(tuple(ring[k : k + 4].tolist()) in seen for k in (13, 14, 15))


def test_a_hash_network_in_bfloat16_is_near_to_that_in_fp32() -> None:
    module, ids = Embeddings(_tables("dhe")), _ids()
    with torch.no_grad():
        wanted = module(ids)
        with torch.autocast("cpu", torch.bfloat16):
            found = module(ids)
    assert found.dtype == torch.bfloat16
    assert (found - wanted).abs().max().item() <= 0.02 * wanted.abs().max().item()


def test_mish_in_place_is_mish() -> None:
    values = torch.cat([torch.linspace(-100, 100, 200_001), torch.tensor([1e30, -1e30, 0.0])])
    wanted = nn.functional.mish(values.double())
    found = mish_(values.clone().unsqueeze(1)).squeeze(1)
    assert ((found - wanted).abs() <= 1e-6 * wanted.abs().clamp(min=1)).all()


@pytest.mark.parametrize("name", [n for n in SMALL if n not in ("mixed_dim", "dhe")])
def test_an_entry_starts_with_the_variance_of_a_full_tables(name: str) -> None:
    tables = _tables(name, rows=(20_000,), **({"rank": 16} if name == "tt" else {}))
    module = Embeddings(tables).materialised()
    values = module.rows_of(module.kinds.members[0])
    assert values.var().item() * 3 * 20_000 == pytest.approx(1, abs=0.12)
    if name not in ("double_hash", "qr add", "tt"):  # sums reach farther
        assert values.abs().max().item() <= 1.02 * math.sqrt(1 / 20_000)
    assert values.min().item() < 0 < values.max().item()


def test_quotient_and_remainder_tell_every_id_apart_above_2_to_the_24() -> None:
    for rows, collisions in ((40_000_000, 4), (40_000_000, 200), (2**40, 2**20), (2**40, 3)):
        (table,) = settled(
            [TableSpec("t", rows, 2, kind="qr", collisions=collisions)], EmbeddingsSection()
        )
        kinds = Kinds([table], "cpu", bags=False)
        near = torch.arange(2**24 - 1000, 2**24 + 1000)
        edges = torch.arange(rows // collisions - 500, rows // collisions) * collisions
        ids = torch.cat([near, edges - 1, edges, edges + 1, torch.arange(rows - 1000, rows)])
        quotient, remainder = kinds.rows_of(0, ids)
        assert torch.equal(quotient * collisions + remainder, ids)
        assert 0 <= int(remainder.min()) <= int(remainder.max()) < collisions


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", SMALL)
def test_bags_are_pooled_after_their_rows_are_joined(name: str, weighted: bool, mode: Any) -> None:
    (table,) = _tables(name, rows=(1000,), pooling_type=mode, module_weighted=weighted)
    module = Embeddings([table]).double()
    kinds = Kinds([table], "cpu", bags=True).double()
    kinds.load_state_dict(module.kinds.state_dict())
    random = torch.Generator().manual_seed(1)
    lengths = torch.tensor([3, 0, 1, 5])
    ids = torch.randint(1000, (9,), generator=random)
    offsets = torch.tensor([0, *lengths.cumsum(0)])
    weights = (torch.rand(9, generator=random).double(),) if weighted else ()
    asked = kinds.asked({"t0": (ids, offsets, *weights)})
    assert isinstance(asked, dict)
    rows = {}
    for member in kinds.members:
        given, _, *own = asked[member.feature_names[0]]
        found = module.rows_of(member)[given]
        if member.pooled:
            found = _pool(found, lengths, own, member.pooling)
        rows[member.feature_names[0]] = found
    single = module(ids.unsqueeze(1)).squeeze(1)
    wanted = _pool(single, lengths, weights, mode)
    pooled = kinds(rows, {"t0": (ids, offsets, *weights)})["t0"]
    assert (pooled - wanted).abs().max().item() <= 1e-12
    assert all(m.pooled for m in kinds.members) == (join_of(table) in LINEAR or not kinds.members)


def _pool(rows: torch.Tensor, lengths: torch.Tensor, weights: Any, mode: str) -> torch.Tensor:
    scaled = rows * weights[0].unsqueeze(1) if weights else rows
    parts = scaled.split(lengths.tolist())
    sums = torch.stack([part.sum(0) for part in parts])
    return sums / lengths.clamp(min=1).unsqueeze(1) if mode == "mean" else sums


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("bad", [-1, 77, 2**62])
def test_an_id_that_is_no_row_is_refused_or_handed_on_as_it_is(name: str, bad: int) -> None:
    module, ids = Embeddings(_tables(name)), _ids()
    ids[5, 1] = bad
    with pytest.raises(InputError, match=f"'t1', sample 5: expected ids from 0 to 76, got {bad}"):
        module(ids)
    for member, rows in zip(
        [m for m in module.kinds.members if m.name.startswith("t1")],
        module.kinds.rows_of(1, ids[:, 1]),
        strict=True,
    ):
        assert int(rows[5]) == bad
        assert not 0 <= bad < member.rows


@pytest.mark.parametrize("name", [n for n in SMALL if dense_of(_tables(n)[0])])
def test_dense_parameters_learn(name: str) -> None:
    module = Embeddings(_tables(name))
    module(_ids()).square().sum().backward()
    for table in module.kinds.tables:
        for parameter in module.kinds.get_submodule(table.name).parameters():
            assert parameter.grad is not None
            assert parameter.grad.abs().sum() > 0
