"""What the command line says to words it does not know."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwright import __version__
from shardwright.cli.main import COMMANDS, parsers


def test_without_a_command_it_shows_its_help(call: Any) -> None:
    bare = call()
    assert bare == call("--help")
    assert bare.code == 0
    groups = ("before a run:", "run:", "after a run:", "tools:")
    places = [bare.out.index(f"\n{group}\n") for group in groups]
    assert places == sorted(places)


def test_every_option_has_a_line() -> None:
    _, found = parsers(*COMMANDS)
    silent = [
        (name, action.dest)
        for name, parser in found.items()
        for action in parser._actions
        if not action.help
    ]
    assert silent == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_option(call: Any, shell: str) -> None:
    script = call("completion", shell).out
    _, found = parsers(*COMMANDS)
    options = {n for p in found.values() for a in p._actions for n in a.option_strings}
    if shell == "fish":
        options = {f"-l {n[2:]} " if n[:2] == "--" else f"-s {n[1:]} " for n in options}
    assert [each for each in (*options, *COMMANDS) if each not in script] == []


def test_bash_completes_commands_options_and_values(call: Any) -> None:
    script = call("completion", "bash").out
    asked = {
        "shardwright pl": "plan",
        "shardwright train --fo": "--forward",
        "shardwright train --forward par": "parallel",
        "shardwright init ll": "llama",
    }
    for line, completed in asked.items():
        words = line.split()
        given = f"COMP_WORDS=({' '.join(words)}) COMP_CWORD={len(words) - 1}"
        ask = f'{script}\n{given}; _shardwright; echo "${{COMPREPLY[@]}}"'
        found = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
        assert found.stdout.split() == [completed], (line, found)


def test_an_unknown_command_is_answered_with_the_known_ones(call: Any) -> None:
    call("plant").refuses(2, "'plant'", *COMMANDS)


def test_an_unknown_option_is_named(call: Any, job: Any) -> None:
    call("plan", job, "--frobnicate").refuses(2, "--frobnicate")


def test_an_unknown_option_before_the_command_is_refused(call: Any) -> None:
    call("--frobnicate").refuses(2)


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("plan", "JOB.toml"),
        ("explain", "plan.json"),
        ("train", "JOB.toml"),
        ("compare", "RUN_DIR"),
        ("report", "RUN_DIR"),
        ("diff", "a.json"),
    ],
)
def test_a_missing_argument_is_named(call: Any, command: str, missing: str) -> None:
    call(command).refuses(2, missing, f"shardwright {command} --help")


def test_an_option_without_its_value_is_refused(call: Any, job: Any) -> None:
    call("plan", job, "-o").refuses(2, "-o")


def test_ranks_that_are_no_number_are_refused(call: Any, job: Any) -> None:
    call("plan", job, "-n", "two").refuses(2, "-n", "'two'")


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_has_a_help_text(call: Any, command: str) -> None:
    answer = call(command, "--help")
    assert answer.code == 0
    assert f"shardwright {command}" in answer.out
    assert answer.err == ""


def test_help_lists_every_command_and_the_exit_codes(call: Any) -> None:
    answer = call("--help")
    assert answer.code == 0
    assert all(f"    {name} " in answer.out for name in COMMANDS)
    assert "exit codes: 0 ok" in answer.out


def test_the_version_is_the_packages(call: Any) -> None:
    assert call("--version").out == f"shardwright {__version__}\n"


def test_a_name_with_a_newline_stays_on_one_line(call: Any, job: Any) -> None:
    call("plan", job, "a\nb").refuses(2, "shardwright plan: expected no ")
    call("plan", "no\nsuch\x1b[31mfile.toml").refuses(2, "no such file")


def test_a_rank_that_torchrun_did_not_start_is_sent_to_train(call: Any, plan: Any) -> None:
    call("run", plan).refuses(2, "RANK", "shardwright train")


def test_an_unforeseen_error_is_called_a_bug(call: Any, job: Any, monkeypatch: Any) -> None:
    import shardwright.cli.plan

    def broken(_: Any) -> None:
        raise ZeroDivisionError("first\nsecond")

    monkeypatch.setattr(shardwright.cli.plan, "planned", broken)
    call("plan", job).refuses(1, "internal error: ZeroDivisionError: first", "SHARDWRIGHT_LOG")
    monkeypatch.setenv("SHARDWRIGHT_LOG", "debug")
    with pytest.raises(ZeroDivisionError):
        call("plan", job)


def test_a_full_disk_is_the_user_s_to_mend(call: Any, job: Any, monkeypatch: Any) -> None:
    import shardwright.cli.plan

    def full(_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shardwright.cli.plan, "planned", full)
    call("plan", job).refuses(2, "disk: expected room", "'No space left on device'", "--out")


def test_memory_that_cannot_be_had_is_the_user_s_to_mend(
    call: Any, job: Any, monkeypatch: Any
) -> None:
    import shardwright.cli.plan

    def exhausted(_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(shardwright.cli.plan, "planned", exhausted)
    call("plan", job).refuses(2, "memory: expected as much as", 'got "can\'t start new thread"')


def test_a_command_that_imports_torch_into_too_little_says_so(tmp_path: Path) -> None:
    """Libraries of torch end the process there, and nobody could say why."""
    job = tmp_path / "job.toml"
    job.write_text('[model]\nkind = "transformer"\nlayers = 1\ndim = 8\nheads = 2\n')
    line = f"ulimit -v 600000; exec {sys.executable} -m shardwright plan {job}"
    cache = {"SHARDWRIGHT_CACHE": str(tmp_path)}
    ended = subprocess.run(
        line, shell=True, env=os.environ | cache, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("shardwright: memory: expected 750.00 MiB of address space")
    assert ended.stderr.count("\n") == 1


def test_ctrl_c_is_130(call: Any, job: Any, monkeypatch: Any) -> None:
    import shardwright.cli.plan

    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shardwright.cli.plan, "planned", interrupted)
    call("plan", job).refuses(130, "interrupted")
