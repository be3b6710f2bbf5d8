"""What was saved comes back bit by bit, in any cut, and only in a dtype that can hold it."""

from __future__ import annotations

import logging
import random
import tempfile
from pathlib import Path

import checkpoint_cases as cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from shardwright.core.errors import InputError, MismatchError
from shardwright.runtime.checkpoint import TensorPart, read_checkpoint, read_full


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Values of every size a dtype has, its extremes among them."""
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        values = [0.0, -0.0, 1.0, -1.5, info.max, info.min, info.tiny, info.tiny * info.eps]
        return torch.tensor(values, dtype=torch.float64).to(dtype)
    return torch.tensor([0, 1, torch.iinfo(dtype).max, torch.iinfo(dtype).min], dtype=dtype)


@settings(max_examples=30)
@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 2**30),
    st.lists(st.lists(st.integers(0, 6), max_size=4), min_size=1, max_size=3),
)
def test_any_cut_is_read_into_any_other(
    saved_by: int, read_by: int, seed: int, shapes: list[list[int]]
) -> None:
    chance = random.Random(seed)
    made = {
        f"t{i}": cases.filled(shape, chance.choice(cases.DTYPES), i)
        for i, shape in enumerate(shapes)
    }
    with tempfile.TemporaryDirectory() as folder:
        cases.save(Path(folder), 3, cases.deal(made, saved_by, seed, copies=True))
        true = [part for rank in cases.deal(made, read_by, seed + 1) for part in rank]
        wanted = cases.blank(true)
        absent = made.keys() - {part.name for part in wanted}
        restored = read_checkpoint(folder, wanted, None, skip=tuple(absent))
        assert cases.said(restored)[0] == 3
        assert cases.said(restored)[3] == saved_by
        assert cases.equal(wanted, true)
        assert cases.same(read_full(folder), made)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_dtype_scalars_and_empty_tensors_come_back(tmp_path: Path, world_size: int) -> None:
    made = cases.tensors()
    cases.save(tmp_path, 7, cases.deal(made, world_size, seed=world_size))
    wanted = cases.blank(cases.all_of(made))
    read_checkpoint(tmp_path, wanted, None)
    assert cases.equal(wanted, cases.all_of(made))
    assert cases.same(read_full(tmp_path, 7), made)


def test_ranks_that_hold_nothing_save_and_are_read(tmp_path: Path) -> None:
    made = {"weight": cases.filled((4,), torch.float32, 0)}
    cases.save(tmp_path, 1, [[], cases.all_of(made), []])
    assert cases.same(read_full(tmp_path), made)
    cases.save(tmp_path, 2, [[], []])
    assert read_full(tmp_path) == {}
    assert read_checkpoint(tmp_path, [], None).manifest.step == 2


def test_a_scalar_that_is_an_element_of_a_flat_buffer_is_read(tmp_path: Path) -> None:
    scalar = TensorPart("scale", (), (0,), (1,), torch.tensor([2.5]))
    saved = cases.save(tmp_path, 1, [[], [scalar]])
    wanted = [TensorPart("scale", (), (), (), torch.zeros(()))]
    read_checkpoint(tmp_path, wanted, None)
    assert wanted[0].tensor == 2.5
    cases.save(tmp_path, 2, [wanted])
    again = [scalar._replace(tensor=torch.zeros(1))]
    read_checkpoint(tmp_path, again, None)
    assert again[0].tensor.tolist() == [2.5]
    assert saved.name == "step-1"


def test_a_parameter_and_a_strided_view_are_filled_in_place(tmp_path: Path) -> None:
    made = {"a": cases.filled((4, 6), torch.float32, 0), "b": cases.filled((3,), torch.float32, 1)}
    cases.save(tmp_path, 1, cases.deal(made, 3, seed=5))
    storage, parameter = torch.zeros(4, 9), torch.nn.Parameter(torch.zeros(3))
    wanted = [
        TensorPart("a", (4, 6), (0, 0), (4, 6), storage[:, 2:8]),
        TensorPart("b", (3,), (0,), (3,), parameter),
    ]
    read_checkpoint(tmp_path, wanted, None)
    assert storage[:, 2:8].equal(made["a"])
    assert storage[:, :2].count_nonzero() == 0
    assert parameter.detach().equal(made["b"])
    assert parameter.requires_grad


def test_the_tensor_files_are_plain_safetensors(tmp_path: Path) -> None:
    made = cases.tensors()
    saved = cases.save(tmp_path, 1, [cases.all_of(made)])
    loaded = load_file(saved / "rank-0.safetensors")
    assert cases.same({name.partition("@")[0]: t for name, t in loaded.items()}, made)


def test_the_newest_complete_step_is_read_and_others_by_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (9, 10, 2):
        made = {"weight": torch.full((3,), float(step))}
        cases.save(tmp_path, step, [cases.all_of(made)], fingerprint=f"f{step}")
    (tmp_path / "step-11").mkdir()
    (tmp_path / "step-12.tmp").mkdir()
    (tmp_path / "step-013").mkdir()
    (tmp_path / "step-13").symlink_to(tmp_path / "step-2")
    wanted = [TensorPart("weight", (3,), (0,), (3,), torch.zeros(3))]
    with caplog.at_level(logging.WARNING):
        restored = read_checkpoint(tmp_path, wanted, None)
    assert cases.said(restored) == (10, {"fingerprint": "f10"}, {"rank": 0}, 1, ({"rank": 0},))
    assert wanted[0].tensor.tolist() == [10.0] * 3
    assert [r.getMessage() for r in caplog.records] == [
        f"{tmp_path / 'step-12.tmp'}: a save that is not finished; ignored"
    ]
    assert read_full(tmp_path, 2)["weight"].tolist() == [2.0] * 3
    with pytest.raises(InputError, match=r"step-11: expected a manifest.json, got none"):
        read_full(tmp_path, 11)
    with pytest.raises(InputError, match=r"step-13: expected a folder, got a symbolic link"):
        read_full(tmp_path, 13)
    with pytest.raises(InputError, match=r"step-14: expected a readable folder"):
        read_full(tmp_path, 14)
    with pytest.raises(InputError, match="step: expected an integer"):
        read_full(tmp_path, -1)


def test_a_folder_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"expected a folder step-N with a manifest\.json, got none"
    ):
        read_full(tmp_path / "nowhere")


FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
WIDER = {
    (torch.float32, torch.float64),
    (torch.bfloat16, torch.float64),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float64),
    (torch.float16, torch.float32),
    *((torch.float8_e4m3fn, wide) for wide in FLOATS[:4]),
    (torch.int8, torch.int64),
}
PAIRS = [(a, b) for a in (*FLOATS, torch.int8, torch.int64) for b in (*FLOATS, torch.int64)]


@pytest.mark.parametrize(("saved", "wanted"), PAIRS, ids=str)
def test_a_wider_dtype_is_exact_and_a_smaller_one_is_refused_unless_asked_for(
    tmp_path: Path, saved: torch.dtype, wanted: torch.dtype
) -> None:
    true = numbers(saved)
    cases.save(tmp_path, 1, [cases.all_of({"weight": true})])
    target = torch.full(true.shape, 77.0).to(wanted)
    before = target.clone()
    held = [TensorPart("weight", tuple(true.shape), (0,), tuple(true.shape), target)]
    if saved == wanted or (saved, wanted) in WIDER:
        read_checkpoint(tmp_path, held, None)
        assert cases.bits(target.to(saved)) == cases.bits(true)
        return
    with pytest.raises(MismatchError, match=r"weight: expected a dtype that holds every value"):
        read_checkpoint(tmp_path, held, None)
    assert cases.bits(target) == cases.bits(before)
    if saved.is_floating_point and wanted.is_floating_point:
        read_checkpoint(tmp_path, held, None, allow_smaller_dtype=True)
        assert cases.bits(target) == cases.bits(true.to(wanted))
    else:
        with pytest.raises(MismatchError, match="weight"):
            read_checkpoint(tmp_path, held, None, allow_smaller_dtype=True)


def test_an_integer_is_never_narrowed_and_a_bool_is_no_number(tmp_path: Path) -> None:
    made = {"steps": torch.tensor([2**40])}
    cases.save(tmp_path, 1, [cases.all_of(made)])
    for wrong in (torch.int32, torch.uint8, torch.bool, torch.float64):
        held = [TensorPart("steps", (1,), (0,), (1,), torch.zeros(1, dtype=wrong))]
        with pytest.raises(MismatchError, match="steps: expected a dtype that holds every value"):
            read_checkpoint(tmp_path, held, None, allow_smaller_dtype=True)


def test_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    cases.save(tmp_path, 1, [cases.all_of({"weight": torch.ones(4, 5)})])
    held = [TensorPart("weight", (5, 4), (0, 0), (5, 4), torch.zeros(5, 4))]
    text = r"step-1: weight: expected shape \(5, 4\) as in the model, got \(4, 5\)"
    with pytest.raises(MismatchError, match=text):
        read_checkpoint(tmp_path, held, None)


def test_tensors_that_either_side_lacks_are_named_and_counted(tmp_path: Path) -> None:
    made = {name: torch.ones(2) for name in ("a", "b", "c", "d", "e", "optimizer/a/exp_avg")}
    cases.save(tmp_path, 1, [cases.all_of(made)])
    wanted = cases.all_of({name: torch.zeros(2) for name in ("a", "x", "y")})
    text = r"2 that the checkpoint lacks \(x, y\) and 5 that the model lacks \(b, c, d and 2 more\)"
    with pytest.raises(MismatchError, match=text):
        read_checkpoint(tmp_path, wanted, None)
    assert all(held.tensor.count_nonzero() == 0 for held in wanted)


def test_tensors_can_be_left_unread_by_how_their_names_start(tmp_path: Path) -> None:
    made = {name: torch.ones(2) for name in ("a", "b", "optimizer/a/exp_avg")}
    cases.save(tmp_path, 1, [cases.all_of(made)])
    wanted = cases.all_of({"a": torch.zeros(2), "b": torch.zeros(2)})
    read_checkpoint(tmp_path, wanted, None, skip=("optimizer/",))
    assert all(held.tensor.tolist() == [1.0, 1.0] for held in wanted)
    assert read_full(tmp_path, skip=("optimizer/",)).keys() == {"a", "b"}
