"""What a recorder sees of storages, of units and of where it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwright.trace.recorder import Recorder, watching

FOUR = 16  # bytes of four numbers


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
