from __future__ import annotations

import pytest
import torch

from shardwright.core.block import Block, GroupKey
from shardwright.heap import route
from shardwright.heap.ledger import Ledger
from shardwright.heap.traffic import Served, Traffic
from shardwright.runtime.embeddings.exchange import interleave, joined, pack, regroup, unpack
from shardwright.runtime.embeddings.route import HeldBlock, TableGroup
from shardwright.runtime.embeddings.routing import RowRequest
from shardwright.runtime.embeddings.store import Store
from shardwright.runtime.embeddings.update import EPSILON, RULES, Looked
from shardwright.runtime.probe import Probe
from shardwright.tracker.memory import MemoryTracker

RATE = 0.1
SIZES = [(5, 40, 3), (50, 7, 4), (3, 0, 2), (1, 9, 8)]


def _case(rows: int, ids: int, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * ids + dim)
    weight = torch.randn(rows, dim, generator=generator)
    numbers = torch.randint(rows, (ids,), generator=generator)
    return weight, numbers, torch.randn(ids, dim, generator=generator)


def _store(optimizer: str, weight: torch.Tensor, dtype: str = "fp32") -> Store:
    rows, dim = weight.shape
    block = Block("table", "parameter", (0, 0), (rows, dim), 0)
    group = TableGroup(GroupKey(dim, optimizer, dtype, dim), 1, (), {0: (HeldBlock(block, 0),)})
    return Store(group, 0, lambda *_: weight, Probe(), torch.device("cpu"))


def _summed(weight: torch.Tensor, rows: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    dense = torch.zeros(weight.shape, dtype=torch.float64)
    for row, part in zip(rows.tolist(), gradient.double(), strict=True):
        dense[row] += part
    return dense


@pytest.mark.parametrize(("rows", "ids", "dim"), SIZES)
def test_sgd_is_the_dense_update_of_the_summed_gradient(rows: int, ids: int, dim: int) -> None:
    weight, numbers, gradient = _case(rows, ids, dim)
    expected = weight.double() - RATE * _summed(weight, numbers, gradient)
    store = _store("sgd", weight)
    store.update(Looked(numbers), gradient.clone(), RATE, 1)
    torch.testing.assert_close(store.weight.double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("rows", "ids", "dim"), SIZES)
def test_row_wise_adagrad_is_exact_where_rows_repeat(rows: int, ids: int, dim: int) -> None:
    weight, numbers, gradient = _case(rows, ids, dim)
    store = _store("rowwise_adagrad", weight)
    expected, sums = weight.double(), torch.zeros(rows, dtype=torch.float64)
    for number in range(1, 4):
        dense = _summed(weight, numbers, gradient)
        sums += dense.square().mean(1)
        expected -= RATE * dense / (sums.sqrt() + EPSILON).unsqueeze(1)
        store.update(Looked(numbers), gradient.clone(), RATE, number)
    torch.testing.assert_close(store.weight.double(), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(store.states["sum"].double(), sums, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_rows_that_are_not_looked_up_stay_and_others_move_as_in_torch(optimizer: str) -> None:
    weight, numbers, gradient = _case(30, 9, 4)
    store, true = _store(optimizer, weight), torch.nn.Parameter(weight.double())
    if optimizer == "adam":
        torchs: torch.optim.Optimizer = torch.optim.Adam([true], lr=RATE)
    else:
        torchs = torch.optim.Adagrad([true], lr=RATE, eps=EPSILON)
    true.grad = _summed(weight, numbers, gradient)
    for number in (1, 2):
        store.update(Looked(numbers), gradient.clone(), RATE, number)
        torchs.step()
    torch.testing.assert_close(store.weight.double(), true.detach(), atol=1e-6, rtol=0)
    others = torch.ones(30, dtype=torch.bool).index_fill(0, numbers, value=False)
    assert torch.equal(store.weight[others], weight[others])


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_the_dense_form_agrees_with_the_sparse_one(optimizer: str) -> None:
    weight, numbers, gradient = _case(6, 4, 4)
    sparse, dense = _store(optimizer, weight), _store(optimizer, weight)
    looked = torch.bincount(numbers, minlength=6).float() if sparse.moving_rows else None
    sparse.update(Looked(numbers), gradient.clone(), RATE, 1)
    dense.update_all(_summed(weight, numbers, gradient).float(), looked, RATE, 1)
    torch.testing.assert_close(dense.weight, sparse.weight, atol=1e-6, rtol=0)
    for name, state in sparse.states.items():
        torch.testing.assert_close(dense.states[name], state, atol=1e-6, rtol=1e-6)


def _looked(form: str, rows: torch.Tensor) -> Looked:
    """``rows`` one each, in bags of 0 to 3, or weighted, or both."""
    lengths = torch.arange(len(rows)) % 4
    lengths = lengths[lengths.cumsum(0) <= len(rows)]
    lengths[-1] += len(rows) - int(lengths.sum())
    weights = torch.rand(len(rows), generator=torch.Generator().manual_seed(3))
    return Looked(
        rows, lengths if "bags" in form else None, weights if "weighted" in form else None
    )


FORMS = ["one each", "bags", "weighted", "weighted bags"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("optimizer", RULES)
def test_an_update_piece_by_piece_is_that_of_all_rows_at_once(
    optimizer: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, numbers, _ = _case(40, 90, 4)
    looked = _looked(form, numbers)
    segments = 90 if looked.lengths is None else len(looked.lengths)
    gradient = torch.randn(segments, 4, generator=torch.Generator().manual_seed(4))
    whole, pieces = _store(optimizer, weight), _store(optimizer, weight)
    for number in (1, 2):
        with monkeypatch.context() as patched:
            patched.setattr("shardwright.runtime.embeddings.store.rows_at_once", lambda _: 7)
            pieces.update(looked, gradient.clone(), RATE, number)
        whole.update(looked, gradient.clone(), RATE, number)
    torch.testing.assert_close(pieces.weight, whole.weight, atol=1e-7, rtol=0)
    for name, state in whole.states.items():
        torch.testing.assert_close(pieces.states[name], state, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_sgd_adds_every_gradient_once_whatever_the_number_of_threads(form: str) -> None:
    weight, numbers, _ = _case(40, 9000, 16)
    looked = _looked(form, numbers)
    segments = 9000 if looked.lengths is None else len(looked.lengths)
    gradient = torch.randn(segments, 16, generator=torch.Generator().manual_seed(4))
    dense = _summed(weight, numbers, looked.spread(gradient))
    before = torch.get_num_threads()
    for threads in (1, 4):
        store = _store("sgd", weight)
        torch.set_num_threads(threads)
        try:
            store.update(looked, gradient.clone(), 0.01, 1)
        finally:
            torch.set_num_threads(before)
        expected = weight.double() - 0.01 * dense
        torch.testing.assert_close(store.weight.double(), expected, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", RULES)
@pytest.mark.parametrize("repeats", [1, 30])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("width", [16, 1024])  # of which few are changed at a time
def test_an_update_takes_the_memory_that_is_planned(
    optimizer: str, dtype: str, repeats: int, form: str, width: int
) -> None:
    weight, distinct = torch.randn(900, width), 300
    store, ids = _store(optimizer, weight, dtype), torch.arange(distinct).repeat(repeats)
    looked = _looked(form, ids)
    segments = len(ids) if looked.lengths is None else len(looked.lengths)
    gradient = torch.randn(segments, width)
    tracker = MemoryTracker()
    with tracker:
        given = [part for part in (*looked, gradient) if part is not None]
        for tensor in (weight, *given, store.weight, *store.states.values()):
            tracker.adopt(tensor, "weight")
        before = tracker.total
        with tracker.during("step"):
            store.update(looked, gradient, RATE, 1)
    served = Served(
        len(ids),
        segments,
        width,
        distinct,
        jagged="bags" in form,
        weighted="weighted" in form,
        optimizer=optimizer,
        element=store.weight.element_size(),
    )
    heap = Ledger()
    with heap.during("step"):
        route.update(heap, Traffic("tables", 1, (), (served,)))
    planned = sum(heap.peaks["step"].values())
    planned -= len(ids) * 4 * served.weighted  # the weights themselves, which are given here
    assert planned == pytest.approx(sum(tracker.peaks["step"].values()) - before, rel=0.03)


def test_a_segment_is_the_weighted_sum_of_its_rows_and_gives_them_its_gradient() -> None:
    store = _store("sgd", torch.arange(8.0).view(4, 2))
    looked = Looked(torch.tensor([3, 1, 0]), torch.tensor([2, 0, 1]), torch.tensor([1.0, 2, 3]))
    assert store.look_up(looked).tolist() == [[10, 13], [0, 0], [0, 3]]
    store.update(looked, torch.tensor([[1.0, 0], [9, 9], [0, 1]]), 1.0, 1)
    assert store.weight.tolist() == [[0, -2], [0, 3], [4, 5], [5, 7]]


def test_what_is_packed_for_a_rank_comes_out_there() -> None:
    plain = RowRequest(torch.tensor([5, 6, 7]), [1, 2], None, None, [1, 2], None)
    lengths, weights = torch.tensor([2, 1, 0]), torch.tensor([0.5, 1.5, 2.5])
    bags = RowRequest(torch.tensor([1, 2, 3]), [2, 1], None, lengths, [1, 2], weights)
    sent, counts = pack([plain, bags], 2)
    assert counts == [[1, 2, 0, 1, 0, 2], [2, 1, 0, 2, 0, 1]]
    first, second = unpack(sent, counts, 2)
    assert first.rows.tolist() == [5, 6, 7]
    assert first.lengths is None
    assert [part.tolist() for part in second if part is not None] == [
        [1, 2, 3],
        [2, 1, 0],
        [0.5, 1.5, 2.5],
    ]


def test_ranks_without_lengths_have_one_row_in_each_segment() -> None:
    received = torch.tensor([8, 9, 1, 2, 2])  # two rows; two rows in a segment of two
    (looked,) = unpack(received, [[2, 0, 0], [2, 1, 0]], 1)
    assert looked.rows.tolist() == [8, 9, 1, 2]
    assert looked.lengths is not None
    assert looked.lengths.tolist() == [1, 1, 2]
    both = joined([looked, Looked(torch.tensor([4]))])
    assert both.lengths is not None
    assert both.lengths.tolist() == [1, 1, 2, 1]


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
