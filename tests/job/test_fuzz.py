"""Every file that a command reads, changed at random: read, or refused in one line."""

from __future__ import annotations

import copy
import json
import random
import resource
import shutil
import tomllib
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import checkpoint_cases
import msgspec
import pytest
import samples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwright.cli.init import _converted
from shardwright.cli.main import _line
from shardwright.core.cluster import SCHEMA as CLUSTER
from shardwright.core.cluster import read_calibration
from shardwright.core.document import encode_document, read_document
from shardwright.core.errors import ShardwrightError
from shardwright.core.measurement import (
    COMPARISON_SCHEMA,
    RECORD_SCHEMA,
    Comparison,
    Record,
    read_measurement,
)
from shardwright.core.timeline import decode
from shardwright.data.logs import BagColumn, ColumnLog, CriteoLog
from shardwright.data.reading import ClickReader
from shardwright.job.hf_config import read_hf_config
from shardwright.job.job import read_job
from shardwright.job.plan import Plan, read_plan, sealed
from shardwright.launcher.ending import decode_outcome
from shardwright.launcher.progress import so_far
from shardwright.report.html import render
from shardwright.runtime.checkpoint.read import read_full
from shardwright.train.compare import compare
from shardwright.train.records import merge

ROOT = Path(__file__).parents[2]
MOST_MEMORY = 768 * 2**20  # bytes that reading so many files may add to this process
AT_ONCE = 25  # inputs of one example: hypothesis takes longer for an example than most files do
USUAL = settings.get_profile("usual").max_examples
HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 10**6, 2**31, 2**53 + 1, 2**63, 2**64, 10**30, -(10**30)),
    *(0.5, -0.0, 1e308, 1e-320, float("inf"), float("nan"), "", "x", "a.b", ".." * 9, "\0", "\n"),
    *("é" * 99, "\u2028", "<b>", "1e9", "16 GiB", "0 B", "-3 MiB", "nan", "../../x", "/dev/zero"),
    *([], [[]], [0], [1] * 70, ["x"], {}, {"": 0}, {"x": {}}, [None], [-1], [10**30], [[1, 2]]),
    *("adam", "row_wise", "cuda", "cpu", "none", "dlrm", "llama", "auto", "int64", "float32"),
    "[" * 3000,
    "9" * 5000,
    "x" * 70_000,
)


class File(NamedTuple):
    """A kind of file: documents that are right, how one is written, and all that reads it."""

    documents: tuple[Any, ...]
    write: Callable[[Any], bytes]
    read: Callable[[Path], Any]
    inputs: int


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every value of a document stands, sections and lists among them."""
    if path:
        yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def changed(document: Any, seed: int) -> Any:
    """One to three values of a document replaced, taken away, repeated, renamed or exchanged."""
    draw = random.Random(seed)
    found = json.loads(json.dumps(document))
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        where = list(places(found))
        if not where:
            break
        *way, last = draw.choice(where)
        inside = found
        for step in way:
            inside = inside[step]
        how = draw.randrange(6)
        if how == 0:
            del inside[last]
        elif how == 1 and isinstance(inside, list):
            inside.extend([copy.deepcopy(inside[last])] * draw.choice((1, 2, 50)))
        elif how == 2 and isinstance(inside, dict):
            inside[draw.choice(("x", "", f"{last}x", "rows", "schema", "a.b", "\0"))] = inside[last]
        elif how == 3 and isinstance(inside[last], int | float):
            inside[last] = inside[last] * draw.choice((-1, 2, 1e6, 10**12)) + draw.choice((0, 1))
        else:
            inside[last] = copy.deepcopy(draw.choice(HOSTILE))
    return found


def cut(raw: bytes, seed: int) -> bytes:
    """Bytes flipped, cut, doubled, put in."""
    draw, found = random.Random(seed), bytearray(raw)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at = draw.randrange(len(found) + 1)
        how = draw.randrange(5)
        if how == 0 and found:
            found[at % len(found)] ^= 1 << draw.randrange(8)
        elif how == 1:
            del found[at:]
        elif how == 2:
            found[at:at] = found[draw.randrange(len(found) + 1) :][:200]
        elif how == 3:
            del found[at : at + draw.choice((1, 2, 40))]
        else:
            found[at:at] = draw.choice((b"\0", b"\xff\xfe", b"[" * 900, b"9" * 5000, b"\n", b'"'))
    return bytes(found)


def as_json(document: Any) -> bytes:
    return json.dumps(document).encode()


def as_toml(document: Any) -> bytes:
    """Sections as inline tables: any value that TOML has."""

    def text(value: Any) -> str:
        if isinstance(value, dict):
            pairs = (f"{json.dumps(k)} = {text(v)}" for k, v in value.items() if v is not None)
            return f"{{{', '.join(pairs)}}}"
        if isinstance(value, list):
            return f"[{', '.join(text(v) for v in value if v is not None)}]"
        if isinstance(value, float):
            return repr(value)
        return json.dumps(value)

    if not isinstance(document, dict):
        return text(document).encode()
    lines = (f"{json.dumps(k)} = {text(v)}\n" for k, v in document.items() if v is not None)
    return "".join(lines).encode()


def resealed(document: Any) -> bytes:
    """A changed plan that says of itself that it was not changed."""
    try:
        return encode_document(sealed(msgspec.convert(document, Plan, strict=False)))
    except (msgspec.ValidationError, TypeError, ValueError, OverflowError):
        return as_json(document)


def toml_of(*names: str) -> tuple[Any, ...]:
    return tuple(tomllib.loads((ROOT / "examples" / name).read_text()) for name in names)


@cache
def a_plan() -> Plan:
    return samples.plan()


def golden_plan() -> Any:
    raw = (ROOT / "tests" / "golden" / "plan.json").read_bytes()
    return builtins(sealed(msgspec.json.decode(raw, type=Plan)))


def builtins(value: Any) -> Any:
    return json.loads(msgspec.json.encode(value))


def read_the_plan(path: Path) -> None:
    plan = read_plan(path, check=True)
    render(plan, None, None)


def read_the_measurement(path: Path) -> None:
    found = read_measurement(path)
    render(a_plan(), found, compare(a_plan(), found))


def read_the_record(path: Path) -> None:
    record = read_document(path, Record, RECORD_SCHEMA, "train")
    merge(a_plan(), [record, record])


def read_criteo(path: Path) -> None:
    log = CriteoLog(path, [100] * 26)
    log.check()
    next(ClickReader(log, 3))


def read_columns(path: Path) -> None:
    features = (BagColumn("item", 100), BagColumn("seen", 50, weighted=True))
    next(ClickReader(ColumnLog(path, "click", ["age"], features), 3))


CALIBRATION = {
    "schema": CLUSTER,
    "date": "2026-01-01",
    "world_size": 2,
    "compute_device": "cpu",
    "backend": "gloo",
    "machine": {"cpu": "x"},
    "capacities": {"ddr_cap": {"value": 1e9, "unit": "bytes", "source": "s", "date": "2026-01"}},
    "constants": {"flops": {"value": 1e9, "unit": "1/s", "source": "s", "date": "2026-01"}},
}
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
    "tie_word_embeddings": False,
}
EXPERTS = {
    **{k: v for k, v in CONFIG.items() if k != "rope_scaling"},
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
TITAN = {
    "model": {"name": "llama3", "flavor": "8B"},
    "training": {"local_batch_size": 1, "seq_len": 128},
    "parallelism": {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 1},
    "activation_checkpoint": {"mode": "selective"},
}
CLICKS = "\n".join("\t".join(["1", *map(str, range(13)), *["0a1b2c3d"] * 26]) for _ in range(4))
COLUMNS = "item,seen,age,click\n3 4,5:0.5,1.5,1\n,,,0\n7,1:1 2:2,-1,1\n1,2,3,0\n"
OUTCOME = (ROOT / "tests" / "golden" / "outcome.json").read_text()
LINES = [{"step": 1, "steps": 9, "loss": 0.5}, {"said": "x"}, {"step": 2, "steps": 9, "loss": 0.4}]


def job_files() -> tuple[Any, ...]:
    return toml_of("transformer.toml", "llama_tiny.toml", "bags.toml", "recommender.toml")


FILES: dict[str, Callable[[], File]] = {
    "job": lambda: File(job_files(), as_toml, read_job, 1000),
    "cluster": lambda: File((CALIBRATION,), as_toml, read_calibration, 600),
    "plan": lambda: File((golden_plan(),), as_json, read_the_plan, 150),
    "resealed plan": lambda: File((golden_plan(),), resealed, read_the_plan, 150),
    "measurement": lambda: File(
        (builtins(samples.measurement(a_plan())),), as_json, read_the_measurement, 150
    ),
    "comparison": lambda: File(
        (builtins(samples.comparison(a_plan())),),
        as_json,
        lambda path: read_document(path, Comparison, COMPARISON_SCHEMA, "train"),
        500,
    ),
    "record": lambda: File((a_record(),), as_json, read_the_record, 400),
    "outcome": lambda: File(
        (json.loads(OUTCOME),), as_json, lambda path: decode_outcome(path.read_bytes()), 600
    ),
    "config.json": lambda: File((CONFIG, EXPERTS), as_json, read_hf_config, 900),
    "torchtitan": lambda: File(
        (TITAN,),
        as_toml,
        lambda path: _converted(
            Path("job.toml"), "torchtitan", str(path), Namespace(job=None, ranks=2)
        ),
        400,
    ),
    "progress": lambda: File(
        (LINES,),
        lambda lines: b"\n".join(map(as_json, lines if isinstance(lines, list) else [lines])),
        lambda path: so_far(path.parent),
        500,
    ),
}


def a_record() -> Any:
    run = samples.measurement(a_plan())
    events = tuple(event for event in decode(run.timeline) if event.rank == 0)
    return builtins(
        Record(
            schema=RECORD_SCHEMA,
            plan_fingerprint=a_plan().fingerprint,
            rank=0,
            events=events,
            losses=(0.5, 0.4),
            seconds_per_step=0.1,
            memory_steps=(1,),
            time_steps=(2,),
            bad_rows=0,
            versions={"torch": "2"},
            machine={"cpu": "x"},
        )
    )


def is_refused_well(read: Callable[[], Any]) -> None:
    """Nothing else is raised than what ends a command with one line and a code above 1."""
    refused = None
    try:
        read()
    except ShardwrightError as error:
        refused = error
    if refused:
        assert refused.exit_code in (2, 3, 4)
        line = _line(str(refused))
        assert line.isprintable()
        assert "expected" in line or "unknown key" in line or "not a valid" in line


def put(path: Path, raw: bytes) -> None:
    """Write a new file: one that is cut and written again may wait for the disk."""
    path.unlink(missing_ok=True)
    path.write_bytes(raw)


def fuzzed(inputs: int, one: Callable[[int], None]) -> None:
    """As many inputs, each of a seed of its own, and in a thorough run as many more as of other
    cases; hypothesis says with which seeds one fails."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    @settings(
        max_examples=inputs * settings.default.max_examples // USUAL // AT_ONCE,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 2**64 - 1))
    def run(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(AT_ONCE):
            one(draw.getrandbits(64))

    run()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < MOST_MEMORY


@pytest.mark.slow
@pytest.mark.parametrize("kind", FILES)
def test_a_changed_file_is_read_or_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    file = FILES[kind]()
    path = tmp_path / ("progress.jsonl" if kind == "progress" else "file")
    for document in file.documents:
        path.write_bytes(file.write(document))
        file.read(path)  # it is right before it is changed

    def one(seed: int) -> None:
        document = file.documents[seed % len(file.documents)]
        if seed % 4:
            put(path, file.write(changed(document, seed)))
        else:
            put(path, cut(file.write(document), seed))
        is_refused_well(lambda: file.read(path))

    fuzzed(file.inputs, one)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "read"), [(CLICKS, read_criteo), (COLUMNS, read_columns)], ids=["criteo", "columns"]
)
def test_a_changed_click_log_is_read_or_refused_in_one_line(
    tmp_path: Path, text: str, read: Callable[[Path], None]
) -> None:
    path = tmp_path / "log"
    path.write_text(text)
    read(path)

    def one(seed: int) -> None:
        put(path, cut(text.encode(), seed))
        is_refused_well(lambda: read(path))

    fuzzed(250, one)


@pytest.mark.slow
def test_a_changed_checkpoint_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    """Lists and manifests with digests that fit, and bytes of any file."""
    kept = {n: t for n, t in checkpoint_cases.tensors().items() if n in ("cube", "bool")}
    whole = checkpoint_cases.save(tmp_path / "whole", 5, checkpoint_cases.deal(kept, 2, seed=3))
    assert checkpoint_cases.same(read_full(whole.parent), kept)
    lists = {rank: json.loads((whole / f"rank-{rank}.json").read_bytes()) for rank in (0, 1)}
    files = {path.name: path.read_bytes() for path in whole.iterdir()}
    saved = tmp_path / "changed" / whole.name
    shutil.copytree(whole, saved)

    def one(seed: int) -> None:
        for name, raw in files.items():
            put(saved / name, raw)
        if seed % 4:
            rank = seed % 2
            document = changed(lists[rank], seed)
            (saved / f"rank-{rank}.json").write_bytes(as_json(document))
            checkpoint_cases.seal(saved)
        else:
            name = sorted(files)[seed % len(files)]
            (saved / name).write_bytes(cut(files[name], seed))
        is_refused_well(lambda: read_full(saved.parent))

    fuzzed(250, one)
