from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from shardwright.core.errors import InputError
from shardwright.data.tokens import Text, held_out_batches, training_batches, write_text

SIZE, SEQUENCE = 1000, 7  # 142 windows: 128 to train on, 14 held out


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8).tobytes())
    return path


@pytest.fixture
def text(file: Path) -> Text:
    return Text(file, SEQUENCE)


def _starts(file: Path, inputs: np.ndarray) -> list[int]:
    """Where each row of inputs is in the file; its bytes are random, so there is one place."""
    found = [file.read_bytes().index(bytes(row.astype(np.uint8))) for row in inputs]
    assert all(start % SEQUENCE == 0 for start in found)
    return [start // SEQUENCE for start in found]


def test_targets_are_the_bytes_that_follow_the_inputs(file: Path, text: Text) -> None:
    content = np.frombuffer(file.read_bytes(), np.uint8)
    batch = text.batch(np.array([0, 141]))
    assert batch.inputs.dtype == batch.targets.dtype == np.int64
    assert batch.inputs.tolist() == [content[:7].tolist(), content[987:994].tolist()]
    assert batch.targets.tolist() == [content[1:8].tolist(), content[988:995].tolist()]


def test_inputs_and_targets_own_their_memory(text: Text) -> None:
    batch = text.batch(np.array([3]))
    assert all(a.base is None and a.flags.c_contiguous for a in (batch.inputs, batch.targets))


def test_a_pass_takes_every_training_window_once_in_a_new_order(file: Path, text: Text) -> None:
    reader = training_batches(text, 16)
    passes = [
        [window for _ in range(8) for window in _starts(file, next(reader).inputs)]
        for _ in range(2)
    ]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(128))
    assert passes[0] != passes[1]
    assert passes[0] != sorted(passes[0])


def test_a_batch_may_reach_into_the_next_pass_or_over_several(file: Path, text: Text) -> None:
    reader = training_batches(text, 300)
    found = _starts(file, next(reader).inputs)
    again = training_batches(text, 100)
    assert [w for _ in range(3) for w in _starts(file, next(again).inputs)] == found
    assert set(Counter(found).values()) <= {2, 3}


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_global_batch_does_not_depend_on_the_number_of_ranks(
    text: Text, world_size: int
) -> None:
    whole = training_batches(text, 12, seed=5)
    readers = [
        training_batches(text, 12 // world_size, r, world_size, 5) for r in range(world_size)
    ]
    for _ in range(30):
        wanted, parts = next(whole), [next(reader) for reader in readers]
        assert np.array_equal(np.concatenate([p.inputs for p in parts]), wanted.inputs)
        assert np.array_equal(np.concatenate([p.targets for p in parts]), wanted.targets)


def test_the_order_follows_from_the_seed(text: Text) -> None:
    first, again, other = (next(training_batches(text, 20, seed=seed)).inputs for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(("batch_size", "world_size"), [(1, 1), (4, 1), (3, 2), (5, 4), (50, 3)])
def test_ranks_share_what_is_held_out_and_take_as_many_full_batches(
    file: Path, text: Text, batch_size: int, world_size: int
) -> None:
    by_rank = [list(held_out_batches(text, batch_size, r, world_size)) for r in range(world_size)]
    assert len({len(batches) for batches in by_rank}) == 1
    numbers: list[int] = []
    for batches in by_rank:
        for batch, own in batches:
            assert batch.inputs.shape == (batch_size, SEQUENCE)
            starts = _starts(file, batch.inputs)
            assert [s - 128 for s, n in zip(starts, own, strict=True) if n >= 0] == [
                int(n) for n in own if n >= 0
            ]
            numbers.extend(int(n) for n in own if n >= 0)
    assert sorted(numbers) == list(range(14))


def test_nothing_is_both_trained_on_and_held_out(text: Text) -> None:
    assert (text.training, text.held_out) == (128, 14)


def test_two_windows_are_enough(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"0123456")
    text = Text(path, 3)
    assert (text.training, text.held_out) == (1, 1)
    assert next(training_batches(text, 2)).targets.tolist() == [[49, 50, 51]] * 2


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"012345")
    with pytest.raises(InputError) as caught:
        Text(path, 3)
    assert str(caught.value) == (
        f"{path}: expected at least 7 bytes, for two windows of 3 tokens, got 6. "
        "Take a longer text or a smaller batch.sequence."
    )


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    remedy = "Name a text in data.path, or none for a made-up one."
    for path, found in ((tmp_path / "none", "no such file"), (tmp_path, "a directory")):
        with pytest.raises(InputError) as caught:
            Text(path, 3)
        assert str(caught.value) == f"{path}: expected a text file, got {found}. {remedy}"


@pytest.mark.parametrize("name", ["a\0b", "n" * 5000])
def test_a_name_that_cannot_be_one_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="readable text file"):
        Text(name, 3)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(InputError, match="got 0"):
        Text(tmp_path / "empty", 1)


def test_the_made_up_text_is_the_same_every_time(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_text(tmp_path / name, 5000, seed)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b != c
    assert len(a) == 5000


def test_the_best_loss_of_the_made_up_text_is_that_of_its_words(tmp_path: Path) -> None:
    facts = write_text(tmp_path / "text", 500_000)
    words = (tmp_path / "text").read_bytes().split()[:-1]
    counts = Counter(words)
    nats = -sum(count * math.log(count / len(words)) for count in counts.values())
    letters = sum(len(word) + 1 for word in words)
    assert nats / letters == pytest.approx(facts.bayes_log_loss, rel=0.01)


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a file that can be written"):
        write_text(tmp_path, 10)
