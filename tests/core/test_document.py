from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwright
from shardwright.core.document import (
    encode_document,
    encode_toml,
    parse_toml,
    read_document,
    to_json,
    write_atomically,
    write_document,
)
from shardwright.core.errors import InputError

SCHEMA = "shardwright.note/1"


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: Literal["shardwright.note/1"]
    size: float
    names: dict[str, int] = {}


def _read(path: Path) -> Note:
    return read_document(path, Note, SCHEMA, made_by="shardwright note")


def _message(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        _read(path)
    return str(caught.value)


def test_a_document_comes_back_as_it_was_written(tmp_path: Path) -> None:
    note = Note(SCHEMA, 0.1, {"b": 1, "a": 2})
    write_document(note, tmp_path / "deep" / "note.json")
    assert _read(tmp_path / "deep" / "note.json") == note


TEXT = st.text(st.characters(codec="utf-8"), max_size=9)
PLAIN = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXT
VALUE = st.recursive(
    PLAIN, lambda v: st.lists(v, max_size=3) | st.dictionaries(TEXT, v, max_size=3)
)


@given(st.dictionaries(TEXT, VALUE, max_size=4))
def test_plain_values_are_read_as_they_were_written_in_toml(document: dict[str, Any]) -> None:
    assert tomllib.loads(encode_toml(document)) == document


def test_sections_and_entries_are_written_for_people_and_nothing_is_not() -> None:
    tables = [{"name": "a", "cache": {"load_factor": 0.5, "stats": None}}, {"name": "b"}]
    assert encode_toml({"cluster": {"rates": {"a.b": 1}}, "x": None, "tables": tables}) == (
        '[cluster.rates]\n"a.b" = 1\n\n[[tables]]\nname = "a"\n\n'
        '[tables.cache]\nload_factor = 0.5\n\n[[tables]]\nname = "b"\n'
    )


THREADS = """
import sys, threading
import msgspec
from shardwright.core.document import decode_json, to_kind

def tree(number):
    leaf = msgspec.defstruct(f"Leaf{number}", [(f"key{i}", int, 0) for i in range(20)])
    fields = [("leaf", leaf), ("leaves", tuple[leaf, ...], ())]
    middle = msgspec.defstruct(f"Middle{number}", fields)
    return msgspec.defstruct(f"Tree{number}", [("middle", middle), ("more", list[middle], [])])

def read(kind, ready):
    ready.wait()
    assert decode_json(b'{"middle":{"leaf":{"key3":1}}}', kind).middle.leaf.key3 == 1
    to_kind({"middle": {"leaf": {}}}, kind)

sys.setswitchinterval(1e-6)
for number in range(60):
    kind, ready = tree(number), threading.Barrier(8)
    threads = [threading.Thread(target=read, args=(kind, ready)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print("read")
"""


def test_threads_may_be_the_first_to_read_a_kind_together() -> None:
    """Where msgspec is given it by several, the process ends by a segmentation fault."""
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"read\n", b"")


READS = re.compile(r"msgspec\.(convert\(|\w+\.Decoder|\w+\.decode\([^=]*\btype=)")


def test_nothing_is_read_into_a_kind_past_what_keeps_threads_apart() -> None:
    sources = Path(shardwright.__file__).parent.rglob("*.py")
    found = {path.name for path in sources if READS.search(path.read_text())}
    assert found == {"document.py"}


def test_a_document_is_indented_sorted_and_ends_with_a_newline() -> None:
    text = encode_document(Note(SCHEMA, 0.5, {"b": 1, "a": 2})).decode()
    assert text == (
        '{\n  "schema": "shardwright.note/1",\n  "size": 0.5,\n'
        '  "names": {\n    "a": 2,\n    "b": 1\n  }\n}\n'
    )


@pytest.mark.parametrize(
    ("data", "ending"),
    [
        (b"{", "expected note JSON, got 'Input data was truncated'. "
            "Make one with `shardwright note`."),
        (b"", "expected note JSON, got 'Input data was truncated'. "
            "Make one with `shardwright note`."),
        (b"[]", "expected a note object, got list. Make one with `shardwright note`."),
        (b"3", "expected a note object, got int. Make one with `shardwright note`."),
        (b'{"schema": NaN}', "got 'JSON is malformed: invalid character (byte 11)'. "
            "Make one with `shardwright note`."),
        (b'{"size": 1e400}', "got 'Number out of range - at `$[...]`'. "
            "Make one with `shardwright note`."),
        (b"[" * 100_000, "got 'maximum recursion depth exceeded while deserializing an object'. "
            "Make one with `shardwright note`."),
        (b'{"a": "\xff"}', "invalid start byte'. Make one with `shardwright note`."),
        (b'{"size": 1}', "schema: expected 'shardwright.note/1', got none. "
            "Make it again with `shardwright note`."),
        (b'{"schema": 3}', "schema: expected 'shardwright.note/1', got none. "
            "Make it again with `shardwright note`."),
        (b'{"schema": "shardwright.note/2"}', "schema: expected 'shardwright.note/1', "
            "got 'shardwright.note/2'. Make it again with `shardwright note`."),
        (b'{"schema": "shardwright.note/1", "size": 1, "colour": 2}',
            "not a valid note: Object contains unknown field `colour`."),
        (b'{"schema": "shardwright.note/1"}',
            "not a valid note: Object missing required field `size`."),
        (b'{"schema": "shardwright.note/1", "size": "1"}',
            "not a valid note: Expected `float`, got `str` - at `$.size`."),
    ],
)  # fmt: skip
def test_a_document_that_cannot_be_used_is_refused_in_one_line(
    tmp_path: Path, data: bytes, ending: str
) -> None:
    path = tmp_path / "note.json"
    path.write_bytes(data)
    message = _message(path)
    assert message.startswith(f"{path}: ")
    assert message.endswith(ending)
    assert "\n" not in message


def test_a_missing_document_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    assert _message(path) == (
        f"{path}: expected a note file, got no such file. Make one with `shardwright note`."
    )


def test_a_directory_is_no_document(tmp_path: Path) -> None:
    assert _message(tmp_path) == (
        f"{tmp_path}: expected a note file, got a directory. Make one with `shardwright note`."
    )


def test_a_pipe_that_nobody_writes_into_is_no_document(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "expected a note file, got no regular file" in _message(tmp_path / "pipe")
    assert "expected a note file, got no regular file" in _message(Path("/dev/zero"))


def test_a_path_through_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    path = tmp_path / "file" / "note.json"
    assert _message(path).startswith(
        f"{path}: expected a readable note file, got 'Not a directory'"
    )


def test_a_document_beyond_256_mib_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    with path.open("wb") as file:
        file.truncate(256 * 2**20 + 1)
    assert _message(path) == f"{path}: expected a note below 256 MiB, got a larger file."


def test_writing_replaces_the_old_file_and_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    write_atomically(path, b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["note.json"]


def test_a_reader_keeps_the_old_file_it_has_open(tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    write_atomically(path, b"old")
    with path.open("rb") as reader:
        write_atomically(path, b"new and longer")
        assert reader.read() == b"old"


def test_a_write_that_fails_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    target = tmp_path / "note.json"
    target.mkdir()
    with pytest.raises(InputError) as caught:
        write_atomically(target, b"x")
    assert str(caught.value) == f"{target}: expected a file that can be written, got a directory."
    assert os.listdir(tmp_path) == ["note.json"]


def test_a_write_below_a_file_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    path = tmp_path / "file" / "note.json"
    with pytest.raises(InputError) as caught:
        write_atomically(path, b"x")
    assert str(caught.value) == (f"{path}: expected a file that can be written, got 'File exists'.")


def test_the_working_folder_is_no_file_to_write() -> None:
    with pytest.raises(InputError, match=r"^\.: expected a file that can be written"):
        write_atomically(Path(), b"x")


def test_values_become_indented_json() -> None:
    assert to_json({"sizes": ((1, 2),)}) == (
        '{\n  "sizes": [\n    [\n      1,\n      2\n    ]\n  ]\n}'
    )


@pytest.mark.parametrize("separator", [".", " . ", '."x"."x.y".'])
def test_a_key_of_very_many_steps_is_refused_before_it_is_parsed(separator: str) -> None:
    text = separator.join(["a"] * 100_000) + " = 1\n"
    with pytest.raises(InputError) as error:
        parse_toml(text, "job.toml", "a job")
    assert str(error.value) == "job.toml: expected keys of at most 100 steps, got a deeper one."


def test_long_words_numbers_and_texts_are_no_deep_keys() -> None:
    text = f'a = "{"x" * 200_000}"\nb = [{"1.5, " * 5000}]\nc = "{"so. " * 5000}"\n"{"d" * 50}" = 1'
    assert len(parse_toml(text, "job.toml", "a job")["b"]) == 5000


def test_a_document_of_more_than_16_mib_is_refused() -> None:
    with pytest.raises(InputError, match="expected at most 16 MiB of TOML, got 16,777,218 bytes"):
        parse_toml(b"#" + b"x" * 2**24 + b"\n", "job.toml", "a job")
