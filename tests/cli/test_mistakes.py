"""Mistakes that people make: each is one line that names the place and says what to do."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardwright as sw
from shardwright.core.errors import InputError


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


# what is set on a job that is right, and words of the line that answers
SET = [
    ("batch.siz=3", "'batch.siz'", "'size'"),
    ("bach.size=3", "'bach'", "'batch'"),
    ("batch=3", "--set", "section.key=value"),
    ("=3", "--set", "section.key=value"),
    ("batch.size", "--set", "section.key=value"),
    ("batch.size=", "batch.size", "int"),
    ("batch.size=many", "batch.size", "'many'"),
    ("batch.size=0", "batch.size", ">= 1"),
    ("batch.size=-4", "batch.size", ">= 1"),
    ("batch.size=1.5", "batch.size", "int"),
    ("batch.size=true", "batch.size", "int"),
    ("batch.sequence=0", "batch.sequence", ">= 1"),
    ("cluster.world_size=0", "cluster.world_size", ">= 1"),
    ("cluster.world_size=two", "cluster.world_size", "'two'"),
    ("cluster.preset=h100", "cluster.preset", "h100-8"),
    ("cluster.presets=local", "'cluster.presets'", "'preset'"),
    ("cluster.ddr_cap=lots", "cluster.ddr_cap", "'48 MiB'"),
    ("cluster.ddr_cap=0", "cluster.ddr_cap", "1 B"),
    ("cluster.ddr_cap=48", "cluster.ddr_cap", 'got 48 bytes. Did you mean "48 GiB"?'),
    ("cluster.hbm_cap=81920", "cluster.hbm_cap", 'Did you mean "81920 MiB"?'),
    ("cluster.ssd_cap=900", "cluster.ssd_cap", 'Did you mean "900 GiB"?'),
    ("cluster.ddr_cap=5 Mib", "cluster.ddr_cap", "'5 Mib'"),
    ("cluster.compute_device=tpu", "cluster.compute_device", "'tpu'"),
    ("cluster.file=none.toml", "none.toml", "no such file"),
    ("model.kind=bert", "model.kind", "'bert'"),
    ("model.bottom=16", "model.bottom", "array"),
    ("model.bottom=[]", "model.bottom", "1"),
    ("model.bottom=[0]", "model.bottom", ">= 1"),
    ("model.layers=3", "model.layers", "transformer"),
    ("model.hf_config=config.json", "model.bottom", "llama"),
    ("model.python=mine:build", "model.bottom", "python"),
    ("model.interaction=sum", "model.interaction", "'sum'"),
    ("train.steps=0", "train.steps", ">= 1"),
    ("train.step=10", "'train.step'", "'steps'"),
    ("train.optimizer=adma", "train.optimizer", "'adma'"),
    ("train.learning_rate=fast", "train.learning_rate", "float"),
    ("train.out=", "train.out", "length"),
    ("train.timeout=0", "train.timeout", "> 0"),
    ("train.table_optimizer=adamw", "train.table_optimizer", "'adamw'"),
    ("data.kind=parquet", "data.kind", "'parquet'"),
    ("data.rows=0", "data.rows", ">= 1"),
    ("data.python=mine", "data.python", "package.module:function"),
    ("planner.search=best", "planner.search", "'best'"),
    ("planner.constants=mine", "planner.constants", "'mine'"),
    ("planner.time_limit=soon", "planner.time_limit", "float"),
    ("planner.dense.prefetc=0", "'planner.dense.prefetc'", "'prefetch'"),
    ("planner.dense.checkpointing=all", "planner.dense.checkpointing", "array"),
    ("parallel.tensor=0", "parallel.tensor", ">= 1"),
    ("parallel.tensr=2", "'parallel.tensr'", "'tensor'"),
    ("memory.runtime=fsdp", "memory.runtime", "fsdp2"),
    ("memory.param_dtype=fp61", "memory.param_dtype", "'fp61'"),
    ("tables.big.rows=0", "'big'.rows", "from 1"),
    ("tables.bigger.rows=3", "tables", "bigger"),
    ("tables.big.min_partition=0", "'big'.min_partition", "from 1"),
    ("tables.big.sharding_types=[]", "'big'.sharding_types", "Leave it out for any"),
    ("tables.big.compute_kernels=[]", "'big'.compute_kernels", "one or more"),
    ('tables.big.sharding_types=["row"]', "sharding_types[0]", "row_wise"),
    ('tables.big.compute_kernels=["uvm"]', "compute_kernels[0]", "fused_uvm"),
    ("tables.big.pooling_factors=[-1.0]", "'big'.pooling_factors", "from 0"),
    ("tables.0.rows=5", "--set tables.0", "big"),
    ("cluster.ddr_cap=-5MiB", "cluster.ddr_cap", "'48 MiB'"),
    ("train.learning_rate=nan", "train.learning_rate", "> 0.0"),
    ("planner.time_limit=0", "planner.time_limit", "> 0.0"),
    ('cluster.ddr_cap="38 Mb"', "cluster.ddr_cap", "'48 MiB'"),
    ("cluster.ddr_cap=nan", "cluster.ddr_cap", "int"),
    ("cluster.ddr_cap=1.5", "cluster.ddr_cap", "int"),
    ("cluster.world_size=2.0", "cluster.world_size", "int"),
    ("train.learning_rate=-0.1", "train.learning_rate", "> 0.0"),
    ("train.learning_rate=inf", "train.learning_rate", "<= 1000000.0"),
    ("train.timeout=nan", "train.timeout", "> 0"),
    ("train.schedule.warmup_steps=-1", "train.schedule.warmup_steps", ">= 0"),
    ("checkpoint.every=10 minutes", "checkpoint.every", "'10 min'"),
    ("checkpoint.every=0 s", "checkpoint.every", "'30 s'"),
    ("checkpoint.keep=0", "checkpoint.keep", ">= 1"),
    ("tables.big.pooling_factors=[nan]", "'big'.pooling_factors", "from 0"),
    ("tables.big.pooling_factors=[]", "'big'.pooling_factors", "one value per feature"),
    ("tables.big.name=", "tables[", "letters, digits and underscores"),
    ("tables.big.rows=1e6", ".rows", "int"),
    ("tables.big.zipf=nan", ".zipf", ">= 0.0"),
    ("data.zipf=-1", "data.zipf", ">= 0.0"),
    ("data.drop_negatives=1.5", "data.drop_negatives", "< 1.0"),
    ("planner.time_limit=nan", "planner.time_limit", "> 0.0"),
    ("planner.reservation.percentage=nan", "planner.reservation.percentage", ">= 0.0"),
    ('model.bottom=[16,"8"]', "model.bottom[1]", "int"),
    ("tables=[]", "--set", "section.key=value"),
    ('planner.constraints.together=[["big","bgi"]]', "constraints.together[0]", "'bgi'"),
    ("planner.constraints.ranks={big=[5]}", "constraints.ranks.big", "below 2"),
    ("planner.constraints.ranks={big=[]}", "constraints.ranks.big", "distinct ranks"),
    ("train.schedule=cosine", "train.schedule: expected a section", "warmup_steps"),
    ("planner.dense=on", "planner.dense: expected a section", "prefetch"),
    ("planner.units.top.3=shard", "planner.units.top", 'planner.units."top.3"'),
]


@pytest.mark.parametrize(("setting", "place", "remedy"), SET, ids=[s[0] for s in SET])
def test_a_wrong_setting_is_one_line(
    call: Any, job: Path, setting: str, place: str, remedy: str
) -> None:
    call("plan", job, "--set", setting).refuses(2, place, remedy)


# a command in a folder with job.toml, plan.json, empty.toml, text.txt, run/ (empty)
COMMANDS = [
    ("plan empty.toml", "empty.toml", "shardwright init"),
    ("plan text.txt", "text.txt", "a job in TOML"),
    ("plan nope.toml", "nope.toml", "Name a job"),
    ("plan run", "run", "a directory"),
    ("plan job.toml -n 0", "world_size", ">= 1"),
    ("plan job.toml -o run", "run", "a directory"),
    ("plan job.toml -o text.txt", "text.txt", "Choose another -o"),
    ("plan plan.json", "plan.json", "a job in TOML"),
    ("explain text.txt", "text.txt", "a job in TOML"),
    ("memory llama3-9b --on 8xH100", "llama3-9b", "Did you mean 'llama3-8b'?"),
    ("fit lama3-8b --on 8xH100", "lama3-8b", "Did you mean 'llama3-8b'?"),
    ("memory job.toml --write job.toml", "job.toml", "a new file that ends in .toml"),
    ("train plan.json --seq 8", "--seq", "Plan again with --seq"),
    ("explain plan.json --tensor BIG", "'BIG'", "'big'"),
    ("explain plan.json --tensor smal", "'smal'", "'small'"),
    ("explain plan.json --unit layers.0 --why-not full", "'layers.0'", "'big'"),
    ("explain plan.json --rank 2", "--rank", "0 to 1"),
    ("explain plan.json --statistic gapp", "--statistic", "gap"),
    ("explain plan.json --why-not row_wise", "--why-not", "--tensor NAME"),
    ("explain plan.json --tensor big --why-not rowise", "--why-not", "row_wise"),
    ("train plan.json --set batch.size=3", "--set", "Plan again"),
    ("train plan.json -n 3", "-n", "shardwright plan JOB.toml -n 3 -o plan.json"),
    ("train nope.json", "nope.json", "shardwright plan"),
    ("compare nope", "nope", "train --out DIR"),
    ("compare run", "plan.json", "shardwright plan"),
    ("compare run --tolerance -1", "--tolerance", "0 to 10"),
    ("report nope", "nope: expected the folder of a run", "train --out DIR"),
    ("report plan.json -o job.toml", "job.toml", "Choose another -o"),
    ("diff plan.json job.toml", "job.toml", "shardwright plan JOB.toml -o plan.json"),
    ("diff plan.json nope.json", "nope.json", "shardwright plan"),
    ("run plan.json", "RANK", "shardwright train"),
    ("memory job.toml --timeline out.png", "--timeline", ".svg or .json"),
    ("plna job.toml", "'plna'", "plan"),
    ("plan job.toml -o text.txt/plan.json", "text.txt/plan.json", "no folder"),
    ("calibrate -o text.txt/cluster.toml", "text.txt/cluster.toml", "no folder"),
    ("plan job.toml -n two", "-n/--ranks", "'two'"),
    ("plan", "JOB.toml", "--help"),
    ("memory plan.json", "a job in TOML, got JSON", "explain, train"),
    ("fit plan.json", "a job in TOML, got JSON", "explain, train"),
    ("memory job.toml --rank 7", "--rank", "'all ranks'"),
    ("explain plan.json --tensor", "--tensor", "--help"),
    ("explain run --tensor big", "run: expected a job file", "Name a job in TOML"),
    ("reshard run --plan plan.json", "run", "Save a checkpoint there first"),
    ("compare plan.json", "plan.json: expected the folder of a run", "train --out DIR"),
    ("report plan.json -o run", "run", "a directory"),
    ("init llamma", "KIND", "'llama'"),
    ("init python -o job.toml", "job.toml", "Name another with -o"),
    ("init dlrm -o run", "run", "Name another with -o"),
    ("memory run", "run: expected a job file, got a directory", "Name a job"),
    ("fit run", "run: expected a job file, got a directory", "Name a job"),
    ("train run", "run: expected a job file, got a directory", "Name a job"),
    ("inspect run", "run: expected a job file, got a directory", "Name a job"),
    ("train job.toml --set data.kind=synthetic --out text.txt", "text.txt", "a folder to write in"),
    ("train job.toml --set data.kind=synthetic --out /dev/null/x", "/dev/null/x", "to write in"),
    ("calibrate -o run", "run", "a directory"),
    ("diff plan.json run", "run: expected a plan file, got a directory", "shardwright plan"),
    ("reshard plan.json --plan run", "plan.json: expected a folder", "train saved into"),
    ("plan job.toml --rank 3", "'--rank'", "Did you mean '--ranks' or '--set embeddings.rank=3'?"),
    ("train job.toml --steps 20", "'--steps' '20'", "Did you mean '--set train.steps=20'?"),
    ("plan job.toml --lr=1", "'--lr=1'", "Did you mean '--set train.learning_rate=1'?"),
    ("plan job.toml --sequence 8", "--sequence", "'--seq' or '--set parallel.sequence=8'?"),
    ("plan job.toml --microbatches", "--microbatches", "'--set parallel.microbatches=VALUE'?"),
    ("explain plan.json --statistics gap", "'--statistics'", "Did you mean '--statistic'?"),
    ("diff plan.json plan.json plan.json", "shardwright diff: expected no 'plan.json'", "--help"),
    ("report plan.json -o x.pdf", "-o of a report", ".html"),
    ("init dlrm -o x.json", "--out", ".toml"),
]


@pytest.mark.parametrize(("command", "place", "remedy"), COMMANDS, ids=[c[0] for c in COMMANDS])
def test_a_wrong_command_is_one_line(
    call: Any, plan: Path, tmp_path: Path, command: str, place: str, remedy: str
) -> None:
    (tmp_path / "empty.toml").touch()
    (tmp_path / "text.txt").write_text("what I thought about it\n")
    (tmp_path / "run").mkdir()
    call(*command.split()).refuses(2, place, remedy)


@pytest.mark.slow
def test_a_job_for_gpus_is_refused_where_there_are_none(
    call: Any, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    settings = ("cluster.preset=h100-8", "data.kind=synthetic")
    words = [word for setting in settings for word in ("--set", setting)]
    call("train", job, *words).refuses(2, "2 CUDA devices", "--set cluster.preset=local")


@pytest.mark.parametrize("preset", ["local", "h100-8"])
def test_tables_alone_say_what_trains_them(call: Any, job: Path, preset: str) -> None:
    tables = job.read_text().replace("bottom = [32, 16]\ntop = [32, 1]", 'kind = "tables"')
    job.write_text(tables.replace('[train]\noptimizer = "adagrad"', ""))
    answer = call("train", job, "--set", f"cluster.preset={preset}")
    answer.refuses(2, "tables alone", "Kind 'dlrm'", "'cat'", "sw.shard_embeddings")


def test_an_optimizer_of_tables_alone_is_each_tables_own(call: Any, job: Path) -> None:
    job.write_text(job.read_text().replace("bottom = [32, 16]\ntop = [32, 1]", 'kind = "tables"'))
    call("plan", job).refuses(2, "train.optimizer", "Each table names its own")


def test_tables_of_several_widths_may_be_planned_alone(call: Any, job: Path) -> None:
    call("plan", job, "--set", "tables.middle.dim=8").refuses(2, "'middle'.dim", "'tables' for")


def test_a_class_of_ranks_is_named_by_its_number_too(call: Any, job: Path) -> None:
    named, numbered = (call("memory", job, "--rank", rank) for rank in ("all ranks", "1"))
    assert named.code == numbered.code == 0, named
    assert named.out == numbered.out


ANY: Any = {"batch": {"size": 3}}
ANY_NUMBER: Any = 3
DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (lambda: sw.plan(ANY), "job: expected a Job, got dict. read_job reads a file"),
        (
            lambda: sw.estimate_memory(ANY),
            "estimate_memory: expected a Job, or a module and its inputs, got",
        ),
        (lambda: sw.explain(ANY, "C3"), "plan: expected a Plan, got dict. read_plan reads a file."),
        (lambda: sw.compare(ANY, ANY), "plan: expected a Plan, got dict. read_plan reads a file."),
        (lambda: sw.apply(ANY, ANY, ANY), "plan: expected a Plan, got dict."),
        (lambda: sw.shard_embeddings(ANY, ANY, ANY), "plan: expected a Plan, got dict. read_plan"),
        (lambda: sw.parse_job(None), "job: expected a dict, got NoneType. read_job reads a file"),
        (lambda: sw.read_job(3), "path: expected that of a job file, got int. Name a job in TOML"),
        (lambda: sw.read_plan(None), "path: expected that of a plan file, got NoneType. Make one"),
        (lambda: sw.plan_module(ANY, ANY), "build: expected a function that returns the module, "),
        (lambda: sw.get_dstorage(ANY), "module: expected a Module, got dict."),
        (lambda: sw.optimizer_parameters(ANY), "model: expected a Module, got dict."),
        (lambda: sw.full_state_dict(ANY), "model: expected a Module, got dict."),
        (lambda: sw.Buckets(ANY, ANY), "model: expected a Module, got dict."),
        (lambda: sw.Guard(ANY), "mesh: expected a DeviceMesh, got dict. init_device_mesh makes"),
        (lambda: sw.fully_shard_flat(ANY, ANY), "module: expected a module, or several, got dict."),
        (lambda: sw.write_plan(ANY, "x"), "plan: expected a Plan, got dict. plan and plan_module"),
        (lambda: sw.write_measurement(ANY, "x"), "measurement: expected a Measurement, got dict."),
        (lambda: sw.read_job(DEMO, [ANY]), "override: expected a str, got dict."),
        (lambda: sw.plan_module(dict, 3, cluster=ANY_NUMBER), "cluster: expected a preset's name"),
        (
            lambda: sw.plan_module(dict, 3, planner=ANY_NUMBER),
            "plan_module: planner: expected the keys of a job",
        ),
        (lambda: sw.plan_module(lambda dim: dim, 3), "build: expected a function that takes noth"),
        (lambda: sw.MemoryTracker(ANY), "model: expected a torch.nn.Module, got dict."),
    ],
)
def test_a_wrong_argument_is_one_line_that_names_it(asked: Callable[[], object], said: str) -> None:
    with pytest.raises(InputError) as caught:
        asked()
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize("name", ["fully_shard_flat", "Buckets", "plan_module", "explain"])
def test_a_wrong_argument_beside_right_ones_is_one_line(name: str, plan: Path) -> None:
    from torch import nn

    module = nn.Linear(2, 2)
    asked: dict[str, Callable[[], object]] = {
        "fully_shard_flat": lambda: sw.fully_shard_flat(module, "cpu"),
        "Buckets": lambda: sw.Buckets(module, None),
        "plan_module": lambda: sw.plan_module(module, 3),
        "explain": lambda: sw.explain(sw.read_plan(plan), 3),
    }
    said = {
        "fully_shard_flat": "mesh: expected a DeviceMesh, got str. init_device_mesh makes one.",
        "Buckets": "mesh: expected a DeviceMesh, got NoneType. init_device_mesh makes one.",
        "plan_module": "build: expected a function that returns the module, got Linear. Pass one, "
        "such as lambda: Net(64).",
        "explain": "name: expected a str, got int.",
    }
    with pytest.raises(InputError) as caught:
        asked[name]()
    assert str(caught.value) == said[name]


@pytest.mark.parametrize("command", ["plan", "memory", "fit", "train"])
@pytest.mark.parametrize(
    ("named", "place", "remedy"),
    [
        ("data_of_mistakes:batchez", "a function 'batchez' in data_of_mistakes", "'batches'"),
        ("date_of_mistakes:batches", "module 'date_of_mistakes'", "the folder that holds it"),
    ],
)
def test_a_wrong_function_of_data_is_named_by_every_command_and_nothing_is_run(
    call: Any, tmp_path: Path, command: str, named: str, place: str, remedy: str
) -> None:
    source = "raise SystemExit(3)\n\ndef batches():\n    yield 3\n"
    (tmp_path / "data_of_mistakes.py").write_text(source)
    model = 'model.python = "data_of_mistakes:build"\n'
    (tmp_path / "own.toml").write_text(f'{model}data.python = "{named}"\n')
    call(command, "own.toml").refuses(2, "own.toml: data.python: expected ", place, remedy)


def test_a_wrong_function_lists_those_that_are_there(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_of_mistakes.py").write_text("def build():\n    return None\n")
    (tmp_path / "own.toml").write_text('model.python = "mine_of_mistakes:biuld"\n')
    monkeypatch.syspath_prepend(os.fspath(tmp_path))
    call("memory", "own.toml").refuses(2, "a function 'biuld'", "There is 'build'.")
