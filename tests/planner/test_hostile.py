"""Jobs that ask too much or make no sense: one line, the right exit code, without much ado."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from counting import at_most

from shardwright.cli.main import main
from shardwright.core.errors import EXIT_INPUT, EXIT_NO_PLAN, EXIT_OK

CALLS = 5_000_000  # for anything here: a second or two of a machine that is not busy
HOST = {"preset": "h100-8", "world_size": 2}


@dataclass(frozen=True)
class Raw:
    """A value that is written as it stands."""

    text: str


NAN, INFINITE = Raw("nan"), Raw("1e400")


def _toml(value: Any) -> str:
    match value:
        case Raw():
            return value.text
        case bool():
            return str(value).lower()
        case list():
            return f"[{', '.join(map(_toml, value))}]"
        case dict():
            pairs = (f"{json.dumps(key)} = {_toml(inner)}" for key, inner in value.items())
            return f"{{{', '.join(pairs)}}}"
        case _:
            return json.dumps(value)


def _job(*tables: dict[str, Any], **sections: dict[str, Any]) -> str:
    """A job of ``tables``, each with 10 rows of 16 where it says nothing else."""
    sections = {"cluster": HOST} | sections
    lines = [f"{name} = {_toml(section)}" for name, section in sections.items()]
    entries = [{"name": f"t{i}", "rows": 10, "dim": 16} | t for i, t in enumerate(tables or [{}])]
    return "\n".join([*lines, f"tables = {_toml(entries)}", ""])


@dataclass(frozen=True)
class Answer:
    """What planning left: the exit code and both streams."""

    code: int
    out: str
    err: str

    def refuses(self, code: int, *words: str) -> None:
        """One line on stderr that says all of ``words``; nothing on stdout."""
        assert self.code == code, self
        assert self.err.startswith("shardwright: "), self
        assert self.err.count("\n") == 1, self
        assert self.err.endswith("\n"), self
        assert len(self.err) < 4100
        assert "\x1b" not in self.err
        assert "Traceback" not in self.err
        assert "internal error" not in self.err
        assert self.out == ""
        for word in words:
            assert word in self.err


Plan = Callable[..., Answer]


@pytest.fixture
def plan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Plan:
    """``shardwright plan`` of a job's text, beside a file of tables if there is one."""
    monkeypatch.delenv("SHARDWRIGHT_LOG", raising=False)
    monkeypatch.chdir(tmp_path)

    def command(text: str, *words: str, tables: str | None = None) -> Answer:
        path = tmp_path / "job.toml"
        path.write_text(text)
        if tables is not None:
            (tmp_path / "tables.json").write_text(tables)
        capsys.readouterr()
        with at_most(CALLS):
            code = main(["plan", str(path), *words])
        streams = capsys.readouterr()
        return Answer(code, streams.out, streams.err)

    return command


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rows": -5}, ["tables[0] 't0'.rows", "-5"]),
        ({"rows": 0}, ["tables[0] 't0'.rows", "got 0"]),
        ({"rows": 10**30}, ["tables[0] 't0'.rows"]),
        ({"rows": Raw("1" * 5000)}, ["a job in TOML"]),
        ({"rows": NAN}, ["tables[0].rows", "nan"]),
        ({"rows": INFINITE}, ["tables[0].rows", "inf"]),
        ({"rows": "10"}, ["tables[0].rows", "'10'"]),
        ({"rows": True}, ["tables[0].rows", "True"]),
        ({"dim": 0}, ["tables[0] 't0'.dim"]),
        ({"dim": 2**20}, ["tables[0] 't0'.dim"]),
        ({"dim": 16.5}, ["tables[0].dim", "16.5"]),
        ({"dim": 65536, "min_partition": 4}, ["tables[0] 't0'.min_partition", "4096"]),
        ({"min_partition": -4}, ["tables[0] 't0'.min_partition"]),
        ({"pooling_factors": [INFINITE]}, ["pooling_factors", "inf"]),
        ({"pooling_factors": [NAN]}, ["pooling_factors", "nan"]),
        ({"pooling_factors": [-1.0]}, ["pooling_factors", "-1"]),
        ({"pooling_factors": []}, ["pooling_factors", "none"]),
        ({"pooling_factors": 3}, ["pooling_factors", "array"]),
        ({"num_poolings": [1.0, 1.0]}, ["num_poolings", "got 2"]),
        ({"batch_sizes": [64, 64]}, ["batch_sizes", "got 2"]),
        ({"batch_sizes": [0]}, ["batch_sizes", "got 0"]),
        ({"batch_sizes": [2**40]}, ["batch_sizes"]),
        ({"name": "a b"}, ["tables[0].name"]),
        ({"name": "\x1b[31mred"}, ["tables[0].name"]),
        ({"name": "x" * 10**5}, ["tables[0].name"]),
        ({"colour": 3}, ["unknown key 'tables[0].colour'"]),
        ({"x" * 10**5: 3}, ["unknown key"]),
        ({"dtype": "fp31"}, ["tables[0] 't0'.dtype", "fp31"]),
        ({"sharding_types": ["diagonal"]}, ["sharding_types[0]", "diagonal"]),
        ({"sharding_types": []}, ["sharding_types: expected one or more"]),
        ({"compute_kernels": []}, ["kernel"]),
        ({"compute_kernels": ["quant", "fused"]}, ["kernels", "quant"]),
        (
            {"compute_kernels": ["key_value"], "sharding_types": ["data_parallel"]},
            ["tables.t0.sharding_types", "data_parallel: it needs dense", "allows only key_value"],
        ),
        ({"cache": {"load": 3}}, ["tables[0].cache", "load"]),
        ({"cache": {"load_factor": 2}}, ["cache.load_factor", "got 2"]),
        ({"cache": {"stats": [1.0]}}, ["cache.stats"]),
    ],
    ids=lambda value: next(iter(value))[:20] if isinstance(value, dict) else "",
)
def test_a_table_that_cannot_be_is_refused(
    plan: Plan, changes: dict[str, Any], words: list[str]
) -> None:
    plan(_job(changes)).refuses(EXIT_INPUT, *words)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"cluster": HOST | {"world_size": 10**6}}, ["cluster.world_size", "16384"]),
        ({"cluster": HOST | {"world_size": -1}}, ["cluster.world_size"]),
        ({"cluster": HOST | {"world_size": 0}}, ["cluster.world_size"]),
        ({"cluster": HOST | {"world_size": 2**80}}, ["cluster.world_size"]),
        (
            {"cluster": HOST | {"world_size": 8, "local_world_size": 3}},
            ["cluster.local_world_size", "a divisor of 8", "got 3"],
        ),
        (
            {"cluster": HOST | {"world_size": 8, "local_world_size": 2, "pod_size": 3}},
            ["cluster.pod_size", "got 3"],
        ),
        ({"cluster": HOST | {"pod_size": 3}}, ["cluster.pod_size", "got 3"]),
        ({"cluster": HOST | {"preset": "h1000"}}, ["cluster.preset", "'h1000'"]),
        ({"cluster": HOST | {"hbm_cap": 0}}, ["cluster.hbm_cap"]),
        ({"cluster": HOST | {"hbm_cap": -5}}, ["cluster.hbm_cap"]),
        ({"cluster": HOST | {"hbm_cap": 2**61}}, ["cluster.hbm_cap"]),
        ({"cluster": HOST | {"hbm_cap": "lots"}}, ["cluster.hbm_cap", "'lots'"]),
        ({"cluster": HOST | {"hbm_cap": NAN}}, ["cluster.hbm_cap"]),
        ({"cluster": HOST | {"hbm_mem_bw": 3.0}}, ["cluster.hbm_mem_bw"]),
        ({"cluster": HOST | {"hbm_mem_bw": INFINITE}}, ["cluster.hbm_mem_bw"]),
        ({"cluster": HOST | {"hosts": 2}}, ["unknown key 'cluster.hosts'"]),
        ({"batch": {"size": 0}}, ["batch.size"]),
        ({"batch": {"size": 2**40}}, ["batch.size"]),
        ({"batch": {"size": INFINITE}}, ["batch.size"]),
        ({"planner": {"constants": "additive"}}, ["cluster.preset"]),
        ({"planner": {"constants": "torchrec-2"}}, ["planner.constants"]),
        ({"planner": {"time_limit": -1}}, ["planner.time_limit"]),
        ({"planner": {"time_limit": NAN}}, ["planner.time_limit"]),
        ({"planner": {"reservation": {"percentage": 1.0}}}, ["planner.reservation.percentage"]),
        ({"planner": {"reservation": {"kind": "traced"}}}, ["planner.reservation.kind"]),
        ({"planner": {"reservation": {"nbytes": -1}}}, ["planner.reservation.nbytes"]),
        ({"planner": {"reservation": {"multiplier": INFINITE}}}, ["multiplier"]),
        ({"planner": {"estimator": {"pipeline_type": "x"}}}, ["estimator.pipeline_type"]),
        ({"planner": {"estimator": {"communication": ["fp32"]}}}, ["communication"]),
        ({"planner": {"proposers": [{"kind": "best"}]}}, ["planner.proposers[0].kind"]),
        ({"planner": {"proposers": [{}]}}, ["planner.proposers[0].kind"]),
        ({"planner": {"units": {"top": "shard"}}}, ["planner.units", "top"]),
        ({"planner": {"goal": "fast"}}, ["unknown key 'planner.goal'"]),
        ({"model": {"tables": "none.json"}}, ["both"]),
        ({"model": {"kind": "gpt"}}, ["model.kind"]),
    ],
    ids=lambda value: json.dumps(value, default=str)[:60] if isinstance(value, dict) else "",
)
def test_a_section_that_cannot_be_is_refused(
    plan: Plan, section: dict[str, Any], words: list[str]
) -> None:
    plan(_job({}, **section)).refuses(EXIT_INPUT, *words)


@pytest.mark.parametrize(
    ("constraints", "code"),
    [
        ({"together": [["t0", "t9"]]}, EXIT_INPUT),
        ({"together": [["t0", "t1"], ["t1", "t2"]]}, EXIT_INPUT),
        ({"together": [["t0", "t1"]], "apart": [["t1", "t0"]]}, EXIT_INPUT),
        ({"together": [["t0", "t1"]], "ranks": {"t0": [0], "t1": [1]}}, EXIT_INPUT),
        ({"apart": [["t0", "t0"]]}, EXIT_INPUT),
        ({"apart": [["t0", "t1", "t2"]]}, EXIT_INPUT),
        ({"ranks": {"t0": [2]}}, EXIT_INPUT),
        ({"ranks": {"t0": [-1]}}, EXIT_INPUT),
        ({"ranks": {"t0": [0, 0]}}, EXIT_INPUT),
        ({"ranks": {"t0": [10**30]}}, EXIT_INPUT),
        ({"ranks": {"t0": []}}, EXIT_INPUT),
        ({"ranks": {"t0": 1}}, EXIT_INPUT),
        ({"rank": {"t0": [1]}}, EXIT_INPUT),
        ({"apart": [["t0", "t1"]], "ranks": {"t0": [1], "t1": [1]}}, EXIT_NO_PLAN),
        ({"apart": [["t0", "t1"], ["t1", "t2"], ["t0", "t2"]]}, EXIT_NO_PLAN),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_constraints_that_contradict_are_refused(
    plan: Plan, constraints: dict[str, Any], code: int
) -> None:
    plan(_job({}, {}, {}, planner={"constraints": constraints})).refuses(code)


@pytest.mark.parametrize("search", ["bounded", "exact", "proposers"])
def test_a_table_too_large_for_any_rank_has_no_plan(plan: Plan, search: str) -> None:
    planner = {"search": search, "time_limit": 2}
    text = _job({"rows": 2**40, "dim": 2**16, "sharding_types": ["table_wise"]}, planner=planner)
    plan(text).refuses(EXIT_NO_PLAN, "t0", "288,230,376,151,711,744 B")


@pytest.mark.parametrize("spare", [-1, 0])
def test_bytes_are_counted_beyond_the_digits_of_a_double(plan: Plan, spare: int) -> None:
    size = 2**40 * 2**16 * 4
    cluster = {"world_size": 2, "hbm_cap": size + spare}
    answer = plan(
        _job(
            {"rows": 2**40, "dim": 2**16, "sharding_types": ["table_wise"]},
            cluster=cluster,
            planner={"constants": "additive"},
        )
    )
    if spare < 0:
        answer.refuses(EXIT_NO_PLAN, f"{size:,} B")
    else:
        assert answer.code == EXIT_OK, answer


def test_the_largest_tables_there_are_have_no_plan(plan: Plan) -> None:
    table = {"rows": 2**40, "dim": 2**16, "pooling_factors": [1e6], "num_poolings": [1e6]}
    plan(_job(*[table] * 9, batch={"size": 2**31 - 1})).refuses(EXIT_NO_PLAN)


def test_a_million_shards_are_planned(plan: Plan) -> None:
    """Each table has up to 4,096 column shards."""
    table = {"rows": 3, "dim": 65536, "min_partition": 16, "sharding_types": ["column_wise"]}
    assert plan(_job(*[table] * 16)).code == EXIT_OK


def test_tables_of_thousands_of_shards_on_thousands_of_ranks_are_planned(plan: Plan) -> None:
    """Each may be cut into 4,096 pieces, and every rank may hold some of each."""
    table = {"rows": 10**7, "dim": 65536, "min_partition": 16}
    cluster = HOST | {"world_size": 2048, "local_world_size": 8}
    assert plan(_job(*[table] * 20, cluster=cluster)).code == EXIT_OK


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("limits", "hosts"),
    [
        pytest.param({}, 4096, id="different shards of all grids"),
        pytest.param({"min_partition": 16}, 128, id="like shards of the finest cuts"),
    ],
)
def test_more_shards_than_the_planner_can_hold_are_refused(
    plan: Plan, limits: dict[str, int], hosts: int
) -> None:
    table = {"rows": 10**7, "dim": 65536} | limits
    cluster = HOST | {"world_size": 4096, "local_world_size": 4096 // hosts}
    text = _job(*[table] * 1000, cluster=cluster)
    plan(text).refuses(EXIT_INPUT, "tables: expected at most 3,000,000 shards to choose from", "'t")


def test_many_tables_of_many_widths_are_planned(plan: Plan) -> None:
    tables = [{"rows": 10 + i, "dim": 65536} for i in range(40)]
    assert plan(_job(*tables)).code == EXIT_OK


@pytest.mark.slow
def test_thousands_of_ranks_are_planned(plan: Plan) -> None:
    assert plan(_job({}, {"rows": 10**7}, cluster=HOST | {"world_size": 4096})).code == EXIT_OK


def test_thousands_of_features_are_planned(plan: Plan) -> None:
    assert plan(_job({"pooling_factors": [1.5] * 5000})).code == EXIT_OK


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["expected [[tables]], or a [model]", "shardwright init"]),
        ("tables = []", ["at least one"]),
        ("tables = 3", ["tables: expected array"]),
        ("[[tables]]", ["tables[0].name: expected a value, got none"]),
        ("[[tables]]\nname = 3\nrows = 1\ndim = 1", ["tables[0].name"]),
        ("tables = " + "[" * 3000, ["a job in TOML"]),
        ("x = " + "{a = " * 400, ["a job in TOML"]),
        ("tables = [1, 2", ["a job in TOML"]),
        ("\x00", ["a job in TOML"]),
        ('"" = 3', ["unknown key ''"]),
        ("model = 3", ["model"]),
        ("planner = []", ["planner"]),
    ],
)
def test_a_text_that_is_no_job_is_refused(plan: Plan, text: str, words: list[str]) -> None:
    plan(text).refuses(EXIT_INPUT, *words)


FROM_FILE = '[model]\ntables = "tables.json"\n'


@pytest.mark.parametrize(
    "tables",
    [
        "",
        "nul",
        "{}",
        "[]",
        "3",
        "[3]",
        "[null]",
        "[[]]",
        "[" * 10_000 + "]" * 10_000,
        '{"tables": ' * 3000 + "[]" + "}" * 3000,
        '{"tables": [], "topology": {}}',
        '[{"name": "a"}]',
        '[{"name": "a", "rows": 1e400, "dim": 4}]',
        '[{"name": "a", "rows": NaN, "dim": 4}]',
        '[{"name": "a", "rows": -1, "dim": 4}]',
        '[{"name": "a", "rows": ' + "9" * 4000 + ', "dim": 4}]',
        '[{"name": "a", "rows": ' + "9" * 6000 + ', "dim": 4}]',
        '[{"name": "a", "rows": 1, "dim": 4, "pooling": 1e400}]',
        '[{"name": "a", "rows": 1, "dim": 4, "pooling": NaN}]',
        '[{"name": "a", "rows": 1, "dim": 4, "pooling": {"x": 1}}]',
        '[{"name": "a", "rows": 1, "dim": 4, "": 1}]',
        '[{"name": "\\ud800", "rows": 1, "dim": 4, "dtype": "\\ud800"}]',
        '[{"name": "\\u0000", "rows": 1, "dim": 4}]',
    ],
    ids=lambda text: text[:40],
)
def test_a_file_that_holds_no_tables_is_refused(plan: Plan, tables: str) -> None:
    plan(FROM_FILE, tables=tables).refuses(EXIT_INPUT)


@pytest.mark.parametrize("name", ["none.json", ".", "/", "x" * 5000, "\\u0000", ""])
def test_a_file_that_cannot_be_read_is_refused(plan: Plan, name: str) -> None:
    plan(f'[model]\ntables = "{name}"\n').refuses(EXIT_INPUT)


@pytest.mark.parametrize(
    "override",
    [
        "cluster.world_size=0",
        "planner.constraints=3",
        "planner.reservation.kind=half",
        "model.tables=none.json",
        "planner.search=quick",
        "batch.size=1e400",
        "batch.size=nan",
    ],
)
def test_an_override_that_cannot_be_is_refused(plan: Plan, override: str) -> None:
    plan(_job({}), "--set", override).refuses(EXIT_INPUT)


def test_a_process_of_its_own_says_one_line_too(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(_job({"rows": -1}))
    done = subprocess.run(
        [sys.executable, "-m", "shardwright", "plan", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    Answer(done.returncode, done.stdout, done.stderr).refuses(EXIT_INPUT, "'t0'.rows")
