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
from typing import Any, NoReturn

from shardwright import __version__
from shardwright.core.errors import (
    EXIT_BUG,
    EXIT_INPUT,
    EXIT_INTERRUPTED,
    InputError,
    ShardwrightError,
    expected,
    likeliest,
)
from shardwright.launcher.exhausted import REMEDY, how_exhausted, out_of_memory, room_for_torch

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
LONGEST_MESSAGE = 4000  # characters; a list of known names may be long

COMMANDS = {
    "demo": "plan, run, compare and report on this machine, 2 ranks, about a minute",
    "init": "write a commented job to begin with: tables, a DLRM, a llama, a module of your own",
    "plan": "choose a placement for every table and unit of a job",
    "explain": "every step behind the numbers of a plan",
    "memory": "what every rank of a job takes, before it runs: by category, module and tensor",
    "fit": "the largest batch and sequence of a job that fit, and the fewest ranks",
    "advise": "the fastest layout of a model on a cluster that fits, for an engine that runs it",
    "export": "a job's layout for TorchTitan, Megatron-LM, FSDP2 or Accelerate",
    "train": "run a job or a plan under torchrun on this machine",
    "compare": "predicted against measured, of a finished run",
    "report": "one HTML file about a plan or a run",
    "inspect": "how often ids of a click log repeat, as tables of a job",
    "reshard": "a checkpoint cut anew for another plan: ranks, sharding types, units",
    "diff": "two plans side by side",
    "calibrate": "measure this machine's memory, compute and links, for plans that rest on them",
    "schema": "what a job may say, as a JSON Schema, for editors",
    "doctor": "versions, backends, and what works here",
    "run": "one rank of a run, started by torchrun",
}

MOVED = {  # commands of earlier versions, and what in the repository does it now
    "study": "PYTHONPATH=benchmarks python -m study JOB.toml",
    "pack": "python examples/packing.py RUN_DIR",
}

EPILOG = """\
example:
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

    def error(self, message: str) -> NoReturn:
        """One line instead of the usage text, which --help shows."""
        end = "" if message.endswith("?") else "."
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
    parser = Parser(
        prog="shardwright",
        description="Plans, explains and runs sharded PyTorch training.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"shardwright {__version__}"
    parser.add_argument("-V", "--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    wanted = next((word for word in given if not word.startswith("-")), "")
    if wanted in MOVED:
        remedy = f"In a checkout of the repository: {MOVED[wanted]}"
        raise InputError(expected(f"'{wanted}'", "a command of the package", "none", remedy))
    # Only the command that runs is imported. The others get a parser without options, which is
    # enough for the list of --help.
    for name, text in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text.capitalize() + ".")
        if name == wanted:
            importlib.import_module(f"shardwright.cli.{name}").add_arguments(sub)
    # Not parse_args, whose message names the words and neither the command nor the option that was
    # meant.
    options, left = parser.parse_known_args(given)
    if left:
        _refuse_left(commands.choices[options.command], left)
    module = importlib.import_module(f"shardwright.cli.{options.command}")
    code: int = module.execute(options)
    return code


def _refuse_left(command: argparse.ArgumentParser, left: list[str]) -> NoReturn:
    """Of words that ``command`` does not take, and of the option that the first may have meant."""
    known = [name for action in command._actions for name in action.option_strings]
    near = likeliest(left[0].partition("=")[0], known)
    guess = f", did you mean '{near}'?" if near else ""
    command.error(f"expected no {' '.join(map(repr, left))}{guess}")


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
