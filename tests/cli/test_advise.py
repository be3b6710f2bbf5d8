"""``shardwright advise``: a screen, a picture, a file for an engine, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from commands import Call

from shardwright.core.measurement import Curve, Measurement, write_measurement
from shardwright.core.outputs import PICTURE, check_output
from shardwright.estimate.footprint import footprint
from shardwright.job.job import read_job
from shardwright.job.plan import read_plan

JOB = """
[model]
kind = "llama"
layers = 4
dim = 1024
heads = 8
kv_heads = 4
ffn_dim = 2816
vocab = 32000

[cluster]
preset = "h100-8"
hbm_cap = "6 GiB"

[batch]
size = 8
sequence = 4096

[memory]
runtime = "fsdp2"
"""
TABLES = """
[model]
bottom = [64, 16]
top = [256, 64, 1]

[cluster]
preset = "local"
world_size = 2
ddr_cap = "2 MiB"

[batch]
size = 64

[[tables]]
name = "users"
rows = 20_000
dim = 16

[[tables]]
name = "shops"
rows = 50
dim = 16
"""
FEW = ("--fix", "pipeline=1", "--fix", "context=1", "--fix", "tensor=1")


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return str(path)


def test_the_answer_is_one_screen_with_a_picture(
    job: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    picture = tmp_path / "all.svg"
    done = call("advise", job, *FEW, "--tokens", "1e9", "--picture", str(picture))
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    said = " ".join(done.out.split())
    assert "Fastest that fits: shard" in said
    assert "layouts none that fits is faster within this model" in said
    assert "1,000,000,000 tokens: about" in said
    assert "Faster, that lack least" in said
    drawn = ElementTree.fromstring(picture.read_text())
    check_output(picture, PICTURE)  # the next answer may take its place
    circles = [each for each in drawn.iter() if each.tag.endswith("circle")]
    assert len(circles) > 10


def test_everything_is_told_as_json_and_in_full(job: str, call: Call) -> None:
    done = call("advise", job, *FEW, "--json")
    found = json.loads(done.out)
    assert found["schema"] == "shardwright.advice/1"
    assert found["layouts"] == len(found["points"])
    assert found["proven"]
    full = call("advise", job, *FEW, "--full").out
    assert "data_replicate: 1, 2, 4, 8" in full
    for name in ("checkpointing", "slower by", "spare", "waits most for"):
        assert name in full


def test_what_nobody_gives_is_as_the_engine_has_it(job: str, call: Call, tmp_path: Path) -> None:
    out = tmp_path / "fsdp.yaml"
    done = call("advise", job, *FEW, "--export", "accelerate", "-o", str(out))
    assert done.err.startswith("Not given, so as accelerate has it: memory.reduce_dtype=bf16\n")
    assert "\nmixed_precision: bf16\n" in out.read_text()
    call("advise", job, "--engine", "nemo").refuses(2, "--engine: expected one of torchtitan")


def test_the_answer_is_written_for_an_engine(job: str, call: Call, tmp_path: Path) -> None:
    out = tmp_path / "run.sh"
    done = call("advise", job, *FEW, "--export", "megatron", "-o", str(out))
    assert done.code == 0, done.err
    assert "--micro-batch-size" in out.read_text()
    assert "for megatron" in done.out
    again = call("advise", job, *FEW, "--export", "megatron", "-o", str(out))
    assert again.code == 2
    assert "expected no file yet" in again.err


def test_where_nothing_fits_the_code_is_3(job: str, call: Call) -> None:
    done = call("advise", job, *FEW, "--set", "cluster.hbm_cap='1 GiB'", "--fix", "micro_batch=1")
    assert done.code == 3
    assert "layouts fits. Nearest: shard" in " ".join(done.out.split())


def test_layouts_with_tables_are_planned_and_the_answer_is_a_job(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path, out, picture = (tmp_path / name for name in ("job.toml", "answer.toml", "all.svg"))
    path.write_text(TABLES)
    files = ("--export", "shardwright", "-o", str(out), "--picture", str(picture))
    done = call("advise", str(path), *files)
    assert done.code == 0, done.err
    assert max(map(len, done.out.splitlines())) <= 80
    said = " ".join(done.out.split())
    assert "2 ranks of local for shardwright, fp32: 128 samples a step" in said
    assert "Planned: " in said
    assert " by any plan" in said
    assert "MFU" not in said, "nobody knows the peak of this machine"
    found = json.loads(call("advise", str(path), "--json").out)
    assert 0 < found["lower_bound_seconds"] <= found["rows"][0]["time"]["seconds"] * (1 + 1e-9)
    made = call("plan", str(out), "-o", str(tmp_path / "plan.json"))
    assert made.code == 0, made.err
    plan = read_plan(tmp_path / "plan.json")
    assert plan.max_rank_seconds == pytest.approx(found["rows"][0]["time"]["seconds"])
    circles = [e for e in ElementTree.fromstring(picture.read_text()).iter() if "circle" in e.tag]
    assert len(circles) >= found["layouts"]


def test_a_layout_with_tables_that_lacks_memory_says_how_much_beside_what_stays_free(
    call: Call, tmp_path: Path
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(TABLES)
    done = call("advise", str(path), "--headroom", "1.5 MiB")
    assert done.code == 3
    said = " ".join(done.out.split())
    assert "layouts fits. Nearest: shard " in said
    assert "which needs -" not in said
    assert "On 8 ranks something fits." in said


def test_the_answer_on_fewer_ranks_is_written_with_the_batch_of_all(
    call: Call, tmp_path: Path
) -> None:
    path, out = tmp_path / "job.toml", tmp_path / "answer.toml"
    path.write_text(TABLES)
    done = call(
        "advise", str(path), "-n", "4", "--set", "cluster.local_world_size=1",
        "--fewest-gpus", "--export", "shardwright", "-o", str(out),
    )  # fmt: skip
    assert done.code == 0, done.err
    its = read_job(out)
    assert (its.cluster.world_size or 0) < 4
    assert its.batch.size * (its.cluster.world_size or 0) == 4 * 64


def test_a_run_of_the_model_scales_all(job: str, call: Call, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    sets = ("--set", "memory.runtime='shardwright'", "--set", "cluster.hbm_cap='40 GiB'")
    planned = call("plan", job, *sets, "-o", str(run / "plan.json"))
    assert planned.code == 0, planned.err
    plan = read_plan(run / "plan.json")
    now = footprint(plan.job, ways=False).time
    assert now
    samples = plan.job.batch.size * plan.world_size
    measured = Measurement(
        schema="shardwright.measurement/1",
        plan_fingerprint=plan.fingerprint,
        world_size=plan.world_size,
        steps=10,
        memory_steps=(3, 4, 5),
        time_steps=(6, 7),
        timeline=(),
        curve=Curve(),
        quality=None,
        samples_per_second=samples / now.seconds / 2,
        bad_rows=0,
        versions={},
        machine={},
    )
    where = run / "measured.json"
    write_measurement(measured, where)
    plain = json.loads(call("advise", job, *FEW, "--json").out)
    scaled = json.loads(call("advise", job, *FEW, "--json", "--measured", str(where)).out)
    for one, other in zip(plain["rows"], scaled["rows"], strict=True):
        assert other["time"]["seconds"] == pytest.approx(2 * one["time"]["seconds"])
    other = call("advise", job, *FEW, "--set", "model.layers=2", "--measured", str(where))
    assert other.code == 2
    assert "measured.json: expected a run of" in other.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--picture", "x.png"), "--picture: expected a file that ends in .svg"),
        (("--export", "megatron"), "--export: expected ENGINE and -o FILE beside it"),
        (("--fix", "tensor"), "--fix: expected AXIS=VALUE"),
        (("--measured", "0"), "--measured: expected seconds above 0"),
        (("--measured", "soon"), "--measured: expected seconds, or the measured.json of a run"),
        (("--deadline", "12 days"), "--deadline: expected --fewest-gpus and --tokens"),
        (("--tokens", "-1"), "--tokens: expected a number above 0"),
        (("--headroom", "lots"), "--headroom: expected bytes"),
        (("--global-batch", "-3"), "--global-batch: expected at least 1"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_a_line(
    job: str, call: Call, words: tuple[str, ...], said: str
) -> None:
    done = call("advise", job, *words)
    assert done.code == 2
    assert said in done.err
    assert len(done.err.splitlines()) == 1
