"""What a recorder sees of storages, of units and of where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwright.trace.recorder import Recorder, watching

FOUR = 16  # bytes of four numbers
HALF = torch.float16
# Each beside one that a careless look would take for the same call.
CALLS: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (lambda x: x.bool() * 1, lambda x: x.bool() * True),
    (lambda x: x.int() + 1, lambda x: x.int() + 1.0),
    (lambda x: x.half() + x.half(), lambda x: x + x.half()),
    (lambda x: x.t().exp(), lambda x: x.exp()),
    (lambda x: x.sum(0), lambda x: x.sum(1)),
    (lambda x: x.sum(0, dtype=HALF), lambda x: x.sum(0)),
    (lambda x: torch.cat([x, x]), lambda x: torch.cat([x, x], 1)),
    (lambda x: x.max(0), lambda x: x.max(1)),
    (lambda x: x[:, :2] + x[:, 1:3], lambda x: x[:2] + x[1:3]),
    (lambda x: x.clone(), lambda x: x.t().clone()),
    (lambda x: x.topk(2), lambda x: x.topk(3)),
    (lambda x: x.to(HALF), lambda x: x.to(torch.float64)),
    (lambda x: x.new_zeros(2), lambda x: x.new_zeros(3)),
]


def seen(recorder: Recorder) -> list[tuple[str, int]]:
    return [(touch.what, touch.nbytes) for touch in recorder.touches]


def test_a_storage_is_taken_with_its_first_tensor_and_freed_with_its_last() -> None:
    recorder, x = Recorder(), torch.ones(4)
    with recorder:
        y = x * 2
        view = y[:2]
        del y
        assert seen(recorder) == [("take", FOUR)]
        del view
    assert seen(recorder) == [("take", FOUR), ("free", FOUR)]


def test_what_was_there_before_is_given_once_and_not_taken() -> None:
    recorder, x = Recorder(), torch.ones(4)
    with recorder:
        part = x[:2]
        again = x.view(2, 2)
        del part, again, x
    assert seen(recorder) == []
    assert recorder.given == FOUR


def test_what_is_adopted_is_not_given() -> None:
    recorder, x = Recorder(), torch.ones(4)
    recorder.adopt(x)
    with recorder:
        x.view(2, 2)
    assert recorder.given == 0


def test_a_storage_that_takes_the_place_of_one_that_went_is_seen() -> None:
    recorder, kept = Recorder(), []
    with recorder:
        for _ in range(8):
            x = torch.ones(4).detach()
            kept.append(x * 2)
            del x
    taken = [nbytes for what, nbytes in seen(recorder) if what == "take"]
    assert len(taken) == 16


def test_a_storage_resized_to_nothing_is_freed_and_taken_again_when_it_is_back() -> None:
    recorder, x = Recorder(), torch.ones(4)
    with recorder:
        y = x * 2
        y.untyped_storage().resize_(0)
        y.untyped_storage().resize_(FOUR)
        assert seen(recorder) == [("take", FOUR), ("free", FOUR), ("take", FOUR)]
    assert len({touch.slot for touch in recorder.touches}) == 1


def test_a_storage_that_grows_has_both_blocks_for_a_moment() -> None:
    recorder, x = Recorder(), torch.ones(4)
    with recorder:
        y = x * 2
        y.resize_(8)
        assert seen(recorder) == [("take", FOUR), ("take", 2 * FOUR), ("free", FOUR)]
        y.resize_(4)  # which keeps the block
        del y
        assert seen(recorder)[3:] == [("free", 2 * FOUR)]
    assert [touch.slot for touch in recorder.touches] == [0, 1, 0, 1]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.inner(x)
        if self.fails:
            raise ValueError("here")
        return x


def marks(recorder: Recorder) -> list[tuple[str, str]]:
    return [(piece.point, piece.unit) for piece in recorder.finished()[1:]]


def test_a_unit_that_runs_twice_has_two_forwards_and_two_backwards() -> None:
    model, recorder = Twice(), Recorder()
    with watching(recorder, model, {"inner": [model.inner]}, None), recorder:
        model(torch.ones(1, 4, requires_grad=True)).sum().backward()
    once = [("enter", "inner"), ("leave", "inner")]
    back = [("enter_backward", "inner"), ("leave_backward", "inner")]
    assert marks(recorder) == [*once, *once, *back, *back]


@pytest.mark.parametrize("given", [4, 5])
def test_ids_that_are_counted_up_are_rows(given: int) -> None:
    positions = nn.Embedding(4, 2)
    with FakeTensorMode(allow_non_fake_inputs=True), Recorder():
        ids = torch.arange(given).unsqueeze(0).expand(3, -1)
        positions(ids[:, :4])
        positions(ids % 4)
        positions(torch.arange(given).clamp_(max=3))
        if given == 4:
            positions(ids)
            return
        with pytest.raises(IndexError, match="ids of 5 rows, of which there are 4"):
            positions(ids)


def test_the_innermost_module_that_failed_is_known_afterwards() -> None:
    inner, recorder = Twice(), Recorder()
    inner.fails = True
    model = nn.Sequential(nn.Identity(), nn.Sequential(inner))
    failing = pytest.raises(ValueError, match="here")
    with watching(recorder, model, {}, None), recorder, failing as failed:
        model(torch.ones(1, 4))
    assert recorder.place_of(failed.value) == "1.0"


def test_a_unit_that_changes_its_input_ends_its_backward_with_the_gradient_of_it() -> None:
    class Adds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x += 1
            return x

    model, recorder = Adds(), Recorder()
    x = torch.ones(4, requires_grad=True) * 2
    with watching(recorder, model, {"": [model]}, None), recorder:
        model(x).sum().backward()
    assert [name for name, _ in marks(recorder)] == [
        "enter",
        "leave",
        "enter_backward",
        "leave_backward",
    ]


def _looks(found: Any) -> list[tuple[object, ...]]:
    results = [found] if isinstance(found, Tensor) else list(found)
    return [
        (t.shape, t.stride(), t.dtype, t.storage_offset(), t.untyped_storage().nbytes())
        for t in results
    ]


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_an_operation_without_data_is_worked_out_once_and_looks_the_same(number: int) -> None:
    x = torch.empty(4, 3, device="meta")
    wanted = [_looks(call(x)) for call in CALLS[number]]
    assert wanted[0] != wanted[1]
    recorder = Recorder()
    with recorder:
        for _ in range(3):
            found = [call(x) for call in CALLS[number]]
            assert [_looks(each) for each in found] == wanted
            del found
    takes, frees = (
        [each for each in seen(recorder) if each[0] == what] for what in ("take", "free")
    )
    assert len(takes) == len(frees)
    turn = len(takes) // 3
    assert takes == takes[:turn] * 3


def test_what_an_operation_changes_or_hands_on_is_not_made_anew() -> None:
    x = torch.empty(4, 3, device="meta")
    with Recorder() as recorder:
        for _ in range(2):
            assert x.add_(1) is x
            x.view(12)  # as large, and no memory of its own
            assert x.contiguous() is x
    assert seen(recorder) == []


def test_tensors_with_data_are_computed() -> None:
    x = torch.ones(4)
    with Recorder():
        assert [(x * k).sum().item() for k in (1, 1, 2, 2)] == [4, 4, 8, 8]
        assert (x + x).tolist() == (x + x).tolist() == [2.0] * 4
