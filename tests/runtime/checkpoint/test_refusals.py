"""Files that were changed, cut short, lost, added or forged are refused before a tensor changes."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_cases as cases
import pytest
import torch

from shardwright.core.errors import InputError, MismatchError
from shardwright.runtime.checkpoint import TensorPart, read_checkpoint, read_full

FILES = ("manifest.json", "rank-0.json", "rank-1.json", "rank-0.safetensors", "rank-1.safetensors")
FLIPS = 20


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    made = {name: t for name, t in cases.tensors().items() if name in ("cube", "bfloat16", "bool")}
    cut = [[part for part in rank if 0 not in part.sizes] for rank in cases.deal(made, 2, seed=3)]
    assert all(len(rank) >= 2 for rank in cut)
    return cases.save(tmp_path, 5, cut, fingerprint="f" * 64)


def refusal(saved: Path) -> str:
    """The one line with which a read of the folder ends, nothing having changed."""
    wanted = cases.blank(
        cases.all_of(
            {n: t for n, t in cases.tensors().items() if n in ("cube", "bfloat16", "bool")}
        )
    )
    before = [cases.bits(held.tensor) for held in wanted]
    with pytest.raises((InputError, MismatchError)) as caught:
        read_checkpoint(saved.parent, wanted, None)
    assert [cases.bits(held.tensor) for held in wanted] == before
    assert "\n" not in str(caught.value)
    with pytest.raises((InputError, MismatchError)):
        read_full(saved.parent, 5)
    return str(caught.value)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_refused_wherever_it_is(saved: Path, name: str) -> None:
    path = saved / name
    raw = path.read_bytes()
    chance = random.Random(name)
    for at in {0, len(raw) - 1, *(chance.randrange(len(raw)) for _ in range(FLIPS))}:
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1 << chance.randrange(8)]) + raw[at + 1 :])
        assert name in refusal(saved), at
    path.write_bytes(raw)
    read_full(saved.parent)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("share", ["0", "1", "half", "n-1", "n+1"])
def test_a_file_of_another_length_is_refused(saved: Path, name: str, share: str) -> None:
    raw = (saved / name).read_bytes() + b" "
    n = len(raw) - 1
    length = {"0": 0, "1": 1, "half": n // 2, "n-1": n - 1, "n+1": n + 1}[share]
    (saved / name).write_bytes(raw[:length])
    assert name in refusal(saved)


@pytest.mark.parametrize("name", FILES[1:])
def test_a_missing_file_is_refused_by_name(saved: Path, name: str) -> None:
    (saved / name).unlink()
    assert refusal(saved) == f"{saved}: expected the file {name}, got none."


def test_a_folder_without_a_manifest_is_no_checkpoint(saved: Path) -> None:
    (saved / "manifest.json").unlink()
    assert "expected a folder step-N with a manifest.json, got none" in refusal(saved)


@pytest.mark.parametrize("name", ["rank-2.json", "rank-2.safetensors", "data.pkl", "rank-00.json"])
def test_an_extra_file_is_refused_by_name(saved: Path, name: str) -> None:
    (saved / name).write_bytes(b"{}")
    assert refusal(saved) == f"{saved}: expected the files of 2 ranks, got '{name}' as well."


@pytest.mark.parametrize("name", FILES)
def test_a_link_in_the_place_of_a_file_is_refused(saved: Path, name: str) -> None:
    away = saved.parent / name
    shutil.move(saved / name, away)
    (saved / name).symlink_to(away)
    assert refusal(saved) == f"{saved / name}: expected a plain file, got a symbolic link."


def test_a_folder_in_a_checkpoint_is_refused(saved: Path) -> None:
    (saved / "more").mkdir()
    assert "expected a plain file, got something else" in refusal(saved)


def test_a_file_of_another_rank_is_refused(saved: Path) -> None:
    shutil.copy(saved / "rank-0.safetensors", saved / "rank-1.safetensors")
    assert "rank-1.safetensors" in refusal(saved)


def test_a_list_of_another_save_is_refused(saved: Path, tmp_path: Path) -> None:
    other = cases.save(tmp_path / "other", 5, [[], cases.all_of({"w": torch.ones(2)})])
    for name in ("rank-1.json", "rank-1.safetensors"):
        shutil.copy(other / name, saved / name)
    assert "rank-1.json" in refusal(saved)


def test_a_folder_renamed_to_another_step_is_refused(saved: Path) -> None:
    moved = saved.rename(saved.parent / "step-6")
    with pytest.raises(MismatchError, match=r"manifest\.json: step: expected 6, got 5"):
        read_full(moved.parent)


def set_in_list(key: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda found: found.update({key: value})


def set_in_piece(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda found: found["pieces"][0].update(values)


FORGED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "schema": (set_in_list("schema", "shardwright.checkpoint_rank/9"), "got 'shardwright.check"),
    "unknown field": (set_in_list("file_name", "../../etc/passwd"), "unknown field `file_name`"),
    "path in a piece": (set_in_piece(path="/etc/passwd"), "unknown field `path`"),
    "rank": (set_in_list("rank", 0), "rank: expected 1, got 0"),
    "world size": (set_in_list("world_size", 3), "world_size: expected 2 as in manifest.json"),
    "step": (set_in_list("step", 6), "step: expected 5 as in manifest.json, got 6"),
    "negative": (set_in_piece(offsets=[-1, 0]), "`int` >= 0"),
    "huge": (set_in_piece(shape=[2**70]), "rank-1.json: not a valid"),
    "huge in all": (set_in_piece(shape=[2**40, 2**40]), "2^62 elements"),
    "many dimensions": (set_in_piece(shape=[1] * 100), "length <= 12"),
    "type": (set_in_piece(tensor=5), "Expected `str`, got `int`"),
    "dtype": (set_in_piece(dtype="object"), "expected a dtype of float64"),
    "sizes": (set_in_piece(sizes=[0, 0, 0]), "got"),
    "outside": (set_in_piece(offsets=[2**40]), "expected a part of a tensor of shape"),
    "no pieces": (set_in_list("pieces", []), "expected every one of"),
    "twice": (lambda f: f["pieces"].append(f["pieces"][0]), "expected every one of"),
    "renamed": (set_in_piece(tensor="../../weight"), "expected every one of"),
    "file digest": (
        lambda f: f["file"].update(sha256="0" * 64),
        "rank-1.safetensors: expected sha",
    ),
    "file size": (lambda f: f["file"].update(nbytes=2**60), f"expected {2**60} bytes"),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_list_is_refused(saved: Path, what: str) -> None:
    edit, text = FORGED[what]
    cases.forge(saved, 1, edit)
    assert text in refusal(saved)


def test_a_tensor_larger_than_its_file_is_refused_before_anything_is_allocated(
    tmp_path: Path,
) -> None:
    saved = cases.save(tmp_path, 5, [cases.all_of({"w": torch.ones(4)})])
    cases.forge(saved, 0, set_in_piece(shape=[2**50], sizes=[2**50]))
    with pytest.raises(MismatchError, match=rf"rank-0.safetensors: expected more than the {2**52}"):
        read_full(tmp_path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dtype": "int32"}, r"w@0: expected \('I32', \(4,\)\), got \('F32', \(4,\)\)"),
        ({"shape": [2, 2], "offsets": [0], "sizes": [4], "tensor": "v"}, "v@0: expected the tens"),
        ({"shape": [2, 2], "offsets": [0, 0], "sizes": [2, 2]}, "w@0: expected the tensors of"),
        ({"shape": [3], "sizes": [3]}, r"expected \('F32', \(3,\)\), got \('F32', \(4,\)\)"),
    ],
)
def test_a_list_that_the_tensor_file_contradicts_is_refused(
    tmp_path: Path, change: dict[str, Any], text: str
) -> None:
    saved = cases.save(tmp_path, 5, [cases.all_of({"w": torch.ones(4)})])
    cases.forge(saved, 0, set_in_piece(**change))
    with pytest.raises(MismatchError, match=text):
        read_full(tmp_path)


MANIFESTS: dict[str, tuple[str | bytes, str]] = {
    "1e400": ('{"schema": "shardwright.checkpoint/1", "step": 1e400}', "not a valid"),
    "brackets": ("[" * 100_000, "not a valid"),
    "nested": ('{"schema": "shardwright.checkpoint/1", "facts": ' + "[" * 100_000, "not a valid"),
    "list": ("[]", "not a valid"),
    "no schema": ("{}", "got ''"),
    "next schema": ('{"schema": "shardwright.checkpoint/2"}', "got 'shardwright.checkpoint/2'"),
    "not utf-8": (b'{"schema": "\xff"}', "not a valid"),
    "nul": (b"\0" * 100, "not a valid"),
}


@pytest.mark.parametrize("what", MANIFESTS)
def test_a_hostile_manifest_is_refused_in_one_line(saved: Path, what: str) -> None:
    raw, text = MANIFESTS[what]
    (saved / "manifest.json").write_bytes(raw.encode() if isinstance(raw, str) else raw)
    found = refusal(saved)
    assert found.startswith(str(saved / "manifest.json"))
    assert text in found


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("path", "../../somewhere", "unknown field `path`"),
        ("lists", [], "expected"),
        ("world_size", 2**40, "not a valid"),
        ("world_size", 3, "expected"),
        ("facts", {"plan": 5}, "Expected `str`, got `int`"),
        ("sha256", "0" * 64, "expected sha256"),
        ("sha256", "A" * 64, "not a valid"),
    ],
)
def test_a_manifest_that_was_edited_is_refused(
    saved: Path, key: str, value: Any, text: str
) -> None:
    path = saved / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    found = refusal(saved)
    assert found.startswith(str(path))
    assert text in found


class Canary:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("forged", [False, True], ids=["as it is", "with digests that fit"])
def test_a_pickle_named_as_one_of_the_files_is_refused_and_not_run(
    saved: Path, name: str, forged: bool
) -> None:
    canary = saved.parent / "canary"
    (saved / name).write_bytes(pickle.dumps([Canary(canary)] * 400))
    if forged and name.endswith("safetensors"):
        cases.forge(saved, int(name[5]), lambda found: None)
    elif forged and name.startswith("rank"):
        cases.seal(saved)
    found = refusal(saved)
    assert name in found
    if forged and name.endswith("safetensors"):
        assert "expected a safetensors file" in found
    assert not canary.exists()


def test_a_safetensors_file_of_more_or_other_tensors_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    saved = cases.save(tmp_path, 5, [cases.all_of({"w": torch.ones(4)})])
    save_file({"w@0": torch.ones(4), "x@0": torch.ones(4)}, saved / "rank-0.safetensors")
    cases.forge(saved, 0, lambda found: None)
    with pytest.raises(MismatchError, match="x@0: expected the tensors of the rank's list, got on"):
        read_full(tmp_path)


def test_parts_wanted_outside_their_tensor_are_refused_before_anything_is_read(
    saved: Path,
) -> None:
    wanted = [TensorPart("cube", (3, 4, 5), (0, 0, 1), (3, 4, 5), torch.zeros(3, 4, 5))]
    with pytest.raises(InputError, match="cube: expected a part of a tensor of shape"):
        read_checkpoint(saved.parent, wanted, None)
