"""Jobs that ask too much or make no sense: one line, the right exit code, within seconds."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.main import main
from shardwright.core.errors import EXIT_INPUT, EXIT_NO_PLAN, EXIT_OK

SECONDS = 8.0  # for anything here, with time to spare on a busy machine
HEAD = '[cluster]\npreset = "h100-8"\nworld_size = 2\n'
TABLE = 'name = "a"\nrows = 10\ndim = 16\n'


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
    """``shardwright plan`` on a text of TOML, beside ``tables.json`` if there is one."""
    monkeypatch.delenv("SHARDWRIGHT_LOG", raising=False)
    monkeypatch.chdir(tmp_path)

    def command(text: str, *words: str, tables: str | None = None) -> Answer:
        path = tmp_path / "job.toml"
        path.write_text(text)
        if tables is not None:
            (tmp_path / "tables.json").write_text(tables)
        capsys.readouterr()
        started = time.perf_counter()
        code = main(["plan", str(path), *words])
        assert time.perf_counter() - started < SECONDS
        streams = capsys.readouterr()
        return Answer(code, streams.out, streams.err)

    return command


def _table(**changes: Any) -> str:
    fields = {"name": "a", "rows": 10, "dim": 16} | changes
    lines = [f"{key} = {_toml(value)}" for key, value in fields.items()]
    return "\n".join(["[[tables]]", *lines, ""])


def _toml(value: Any) -> str:
    return value if isinstance(value, Literal_) else json.dumps(value)


class Literal_(str):  # noqa: N801
    """A text that is written as it is."""


NAN, HUGE, MINUS = Literal_("nan"), Literal_("1e400"), Literal_("-1")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rows": -5}, ["tables[0] 'a'.rows", "-5"]),
        ({"rows": 0}, ["tables[0] 'a'.rows", "got 0"]),
        ({"rows": 10**30}, ["tables[0] 'a'.rows"]),
        ({"rows": Literal_("1" * 5000)}, ["a job in TOML"]),
        ({"rows": NAN}, ["tables[0].rows", "nan"]),
        ({"rows": HUGE}, ["tables[0].rows", "inf"]),
        ({"rows": "10"}, ["tables[0].rows", "'10'"]),
        ({"rows": True}, ["tables[0].rows", "True"]),
        ({"dim": 0}, ["tables[0] 'a'.dim"]),
        ({"dim": 2**20}, ["tables[0] 'a'.dim"]),
        ({"dim": Literal_("16.5")}, ["tables[0].dim", "16.5"]),
        ({"dim": 65536, "min_partition": 4}, ["tables[0] 'a'.min_partition", "4096"]),
        ({"min_partition": -4}, ["tables[0] 'a'.min_partition"]),
        ({"pooling_factors": [HUGE]}, ["pooling_factors"]),
        ({"pooling_factors": [NAN]}, ["pooling_factors", "nan"]),
        ({"pooling_factors": [MINUS]}, ["pooling_factors", "-1"]),
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
        ({"dtype": "fp31"}, ["tables[0] 'a'.dtype", "fp31"]),
        ({"sharding_types": ["diagonal"]}, ["sharding_types[0]", "diagonal"]),
        ({"sharding_types": []}, ["sharding_type"]),
        ({"compute_kernels": []}, ["kernel"]),
        ({"compute_kernels": ["quant"]}, ["kernel", "quant"]),
        ({"compute_kernels": ["key_value"], "sharding_types": ["data_parallel"]}, ["kernel"]),
        ({"cache": {}}, ["unknown key"]),
    ],
    ids=str,
)
def test_a_table_that_cannot_be_is_refused(
    plan: Plan, changes: dict[str, Any], words: list[str]
) -> None:
    if "cache" in changes:
        text = f"{_table()}[tables.cache]\nload = 3\n"
    else:
        text = "".join(
            _table(**{key: value}) if not isinstance(value, list) else _listed(key, value)
            for key, value in changes.items()
        )
        if len(changes) > 1:
            text = _table_of(changes)
    plan(HEAD + text).refuses(EXIT_INPUT, *words)
