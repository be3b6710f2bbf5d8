"""``shardwright``: finds the command, runs it, turns errors into one line and an exit code."""

# A command is imported when it runs and not before: torch takes seconds, of which `--help`,
# `explain` and `report` need none. Errors become one line and a code here and nowhere else, so that
# a script can tell bad input from a bug of ours; a traceback is asked for by SHARDWRIGHT_LOG=debug.

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from shutil import get_terminal_size
from textwrap import wrap
from typing import Any, NoReturn

from shardwright import __version__
from shardwright.core.errors import (
    EXIT_BUG,
    EXIT_INPUT,
    EXIT_INTERRUPTED,
    EXIT_OK,
    InputError,
    ShardwrightError,
    expected,
    is_called,
    likeliest,
    not_one_of,
)
from shardwright.launcher.exhausted import REMEDY, how_exhausted, out_of_memory, room_for_torch

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
LONGEST_MESSAGE = 4000  # characters; a list of known names may be long

GROUPS = {
    "before a run": {
        "init": "write a commented job to begin with: tables, DLRM, llama, a module of your own",
        "plan": "choose a placement for every table and unit (a module wrapped as one, as by FSDP)",
        "explain": "every step behind the numbers of a plan",
        "memory": "what every rank of a job takes, before it runs: by category, module and tensor",
        "fit": "the largest batch and sequence of a job that fit, and the fewest ranks",
        "advise": "the fastest layout of a model that fits a cluster, for the engine that runs it",
        "export": "a job's layout for TorchTitan, Megatron-LM, FSDP2 or Accelerate",
        "inspect": "how often ids of a click log repeat, as tables of a job",
    },
    "run": {
        "demo": "plan, run, compare and report on this machine, 2 ranks, about a minute",
        "train": "run a job or a plan under torchrun on this machine",
        "run": "one rank of a run, started by torchrun",
    },
    "after a run": {
        "compare": "predicted against measured, of a finished run",
        "report": "one HTML file about a plan or a run",
        "reshard": "a checkpoint cut anew for another plan: ranks, sharding types, units",
        "diff": "two plans side by side",
    },
    "tools": {
        "calibrate": "measure this machine's memory, compute and links, for plans that rest on "
        "them",
        "doctor": "versions, backends, and what works here",
        "schema": "what a job may say, as a JSON Schema, for editors",
        "completion": "what bash, zsh or fish completes for this command",
    },
}
COMMANDS = {name: text for group in GROUPS.values() for name, text in group.items()}

MOVED = {  # commands of earlier versions, and what in the repository does it now
    "study": "PYTHONPATH=benchmarks python -m study JOB.toml",
    "pack": "python examples/packing.py RUN_DIR",
}

EPILOG = """\
examples:
  shardwright memory llama3-8b --on 8xH100 --seq 8192
  shardwright init python -o my_model.toml
  shardwright plan examples/demo.toml -o plan.json
  shardwright explain plan.json --tensor C3
  shardwright train examples/demo.toml -n 2

exit codes: 0 ok, 1 our bug, 2 bad input, 3 nothing fits, 4 outside tolerance or mismatch,
5 the run failed, 75 stopped by a signal, every rank ended, 130 interrupted
"""


class Parser(argparse.ArgumentParser):
    """Options are written out, and what is wrong with them is one line."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)  # --rank and --ranks are two

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """A wrong choice is told as a wrong value of a job is."""
        if action.choices is not None and value not in action.choices:
            told = not_one_of("", str(value), action.choices).removeprefix(": ")
            raise argparse.ArgumentError(action, told)

    def error(self, message: str) -> NoReturn:
        """One line instead of the usage text, which --help shows."""
        end = "" if message.endswith(("?", ".")) else "."
        self.exit(EXIT_INPUT, f"{self.prog}: {_line(message)}{end} See '{self.prog} --help'.\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the process's exit code."""
    return exit_code(lambda: _run(list(sys.argv[1:] if arguments is None else arguments)))


def exit_code(run: Callable[[], int]) -> int:
    """What ``run`` returns; of what it raises one line on stderr and the code that goes with it."""
    try:
        with room_for_torch():
            code = run()
        # Inside of try: with a closed pipe the error comes with the flush and not with the print.
        sys.stdout.flush()
    except ShardwrightError as error:
        print(f"shardwright: {_line(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("shardwright: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout once more at its end, and would print a traceback about the
        # pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get("SHARDWRIGHT_LOG") == "debug":
            raise
        return _unforeseen(error)
    return code


def _run(given: Sequence[str]) -> int:
    wanted = next((word for word in given if not word.startswith("-")), "")
    if wanted in MOVED:
        remedy = f"In a checkout of the repository: {MOVED[wanted]}"
        raise InputError(expected(f"'{wanted}'", "a command of the package", "none", remedy))
    # Only the command that runs is imported. The others get a parser without options.
    parser, commands = parsers(wanted)
    # Not parse_args, whose message names the words and neither the command nor the option that was
    # meant.
    options, left = parser.parse_known_args(given)
    if left:
        _refuse_left(commands[options.command] if options.command else parser, left)
    if options.command is None:
        parser.print_help()
        return EXIT_OK
    module = importlib.import_module(f"shardwright.cli.{options.command}")
    code: int = module.execute(options)
    return code


def parsers(*wanted: str) -> tuple[Parser, dict[str, argparse.ArgumentParser]]:
    """The parser of the command line and those of all commands, of which the ``wanted`` ones know
    their options."""
    parser = Parser(
        prog="shardwright",
        usage="%(prog)s [-h] [-V] COMMAND ...",
        description=_listing(),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"shardwright {__version__}"
    said = "show the version and exit"
    parser.add_argument("-V", "--version", action="version", version=version, help=said)
    # Hidden, for argparse would list the commands without their groups.
    commands = parser.add_subparsers(
        dest="command", metavar="command", prog="shardwright", help=argparse.SUPPRESS
    )
    for name, text in COMMANDS.items():
        sub = commands.add_parser(name, description=f"{text[0].upper()}{text[1:]}.")
        if name in wanted:
            importlib.import_module(f"shardwright.cli.{name}").add_arguments(sub)
    return parser, commands.choices


def _listing() -> str:
    """What the program is, and its commands in groups, in the terminal's width."""
    indent, width = " " * (6 + max(map(len, COMMANDS))), get_terminal_size().columns
    lines = ["Plans, explains and runs sharded PyTorch training."]
    for group, commands in GROUPS.items():
        lines += ["", f"{group}:"]
        for name, text in commands.items():
            head = f"    {name}".ljust(len(indent))
            lines += wrap(text, width, initial_indent=head, subsequent_indent=indent)
    return "\n".join(lines)


def _refuse_left(command: argparse.ArgumentParser, left: list[str]) -> NoReturn:
    """Of words that ``command`` does not take, and of the option that the first may have meant, or
    the key of a job that it sets."""
    known = [name for action in command._actions for name in action.option_strings]
    (option, _, value), ways = left[0].partition("="), list[str]()
    if option.startswith("--") and "--set" in known and not is_called(option, known):
        from shardwright.job.asked import SHORT
        from shardwright.job.schema import keys_called

        value = value or "".join(word for word in left[1:2] if not word.startswith("-")) or "VALUE"
        short = {key: f"--{name}" for name, key in SHORT.items() if f"--{name}" in known}
        ways = [short.get(key, f"--set {key}={value}") for key in keys_called(option)]
    near = likeliest(option, known)
    # What is only spelt alike says nothing beside a key of that name.
    if ways and not (near.startswith(option) or option.startswith(near)):
        near = ""
    meant = " or ".join(map(repr, dict.fromkeys(filter(None, (near, *ways)))))
    asked = f". Did you mean {meant}?" if meant else ""
    command.error(f"expected no {' '.join(map(repr, left))}{asked}")


def _unforeseen(error: Exception) -> int:
    """A path that the system refuses is the user's to mend, and so is a disk or a memory without
    room; everything else is ours."""
    # Memory first: it comes as many types of error, some of which are OSErrors too.
    if out_of_memory(error):
        wanted = "as much as this command needs"
        text = expected("memory", wanted, how_exhausted(error), REMEDY)
        print(f"shardwright: {_line(text)}", file=sys.stderr)
        return EXIT_INPUT
    if isinstance(error, OSError) and error.filename:
        found = f"'{error.strerror or type(error).__name__}'"
        text = expected(str(error.filename), "a path that can be used", found)
        print(f"shardwright: {_line(text)}", file=sys.stderr)
        return EXIT_INPUT
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        remedy = "Free some, or name another place with -o or --out."
        text = expected("disk", "room for what is written", f"'{error.strerror}'", remedy)
        print(f"shardwright: {_line(text)}", file=sys.stderr)
        return EXIT_INPUT
    text = f"internal error: {type(error).__name__}: {error}. This is a bug; "
    print(f"shardwright: {_line(text)}SHARDWRIGHT_LOG=debug shows where.", file=sys.stderr)
    return EXIT_BUG


def _line(text: str) -> str:
    """One line that no name from a file or a command can break or colour."""
    try:
        from shardwright.report.wording import printable
    except (ImportError, MemoryError, OSError):  # there is no memory for it
        return " ".join(text.split())
    return printable(text, LONGEST_MESSAGE)
