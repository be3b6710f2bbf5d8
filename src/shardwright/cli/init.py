"""``shardwright init``: a commented job to begin with."""

from __future__ import annotations

import argparse
from importlib import resources
from pathlib import Path

from shardwright.core.document import write_atomically
from shardwright.core.errors import EXIT_OK, InputError, expected

KINDS = {
    "tables": "embedding tables alone, to be planned",
    "dlrm": "a DLRM on click logs, to be planned and trained",
    "llama": "a llama on text, to be planned and trained",
    "python": "a module of your own, with a Python file to put it into",
}
NAMES = {"python": "my_model"}  # of a file whose kind would be a poor name for a Python module
NEXT = {"tables": ("plan",)}
ALL = ("memory", "plan", "train")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``init``."""
    listed = "; ".join(f"{kind}: {text}" for kind, text in KINDS.items())
    parser.add_argument("kind", choices=KINDS, metavar="KIND", help=listed)
    parser.add_argument(
        "-o", "--out", type=Path, metavar="JOB.toml", help="the file to write; by default KIND.toml"
    )


def execute(options: argparse.Namespace) -> int:
    """Write the job, and what belongs to it, where no such file is."""
    job = options.out or Path(f"{NAMES.get(options.kind, options.kind)}.toml")
    files = {job: f"{options.kind}.toml"}
    if options.kind == "python":
        _check_module(job)
        files[job.with_suffix(".py")] = "python.py"
    for path in files:
        if path.exists():
            raise InputError(
                expected(str(path), "no file yet", "one", "Name another with -o, or move it away.")
            )
    templates = resources.files("shardwright.cli") / "templates"
    for path, template in files.items():
        text = (templates / template).read_text(encoding="utf-8")
        text = text.replace("MODULE", job.stem).replace("JOB", str(job))
        write_atomically(path, text.encode())
        print(f"wrote {path}")
    for command in NEXT.get(options.kind, ALL):
        print(f"  shardwright {command} {job}")
    return EXIT_OK


def _check_module(job: Path) -> None:
    """Its Python file is imported by its name, from the folder that it is in."""
    if not job.stem.isidentifier() or job.parent != Path():
        found = "'" + str(job) + "'"
        wanted = "a name for a Python module, in this folder, such as my_model.toml"
        raise InputError(expected("--out", wanted, found))
