"""``shardwright init``: a commented job to begin with, or one from a TorchTitan configuration."""

from __future__ import annotations

import argparse
import tomllib
from importlib import resources
from pathlib import Path

from shardwright.core.document import read_bytes, write_atomically
from shardwright.core.errors import EXIT_OK, InputError, ShardwrightError, expected
from shardwright.core.job import parse_job
from shardwright.core.torchtitan import as_toml, job_of

KINDS = {
    "tables": "embedding tables alone, to be planned",
    "dlrm": "a DLRM on click logs, to be planned and trained",
    "llama": "a llama on text, to be planned and trained",
    "python": "a module of your own, with a Python file to put it into",
}
NAMES = {"python": "my_model"}  # of a file whose kind would be a poor name for a Python module
NEXT = {"tables": ("plan",), "torchtitan": ("memory", "fit")}
ALL = ("memory", "plan", "train")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``init``."""
    listed = "; ".join(f"{kind}: {text}" for kind, text in KINDS.items())
    parser.add_argument("kind", nargs="?", choices=KINDS, metavar="KIND", help=listed)
    parser.add_argument(
        "--from",
        dest="source",
        nargs=2,
        metavar=("torchtitan", "FILE"),
        help="instead of a kind: a TorchTitan configuration, as a job for memory and fit",
    )
    parser.add_argument("-n", "--ranks", type=int, metavar="N", help="ranks of that configuration")
    parser.add_argument(
        "-o", "--out", type=Path, metavar="JOB.toml", help="the file to write; by default KIND.toml"
    )


def execute(options: argparse.Namespace) -> int:
    """Write the job, and what belongs to it, where no such file is."""
    kind = options.kind or "torchtitan"
    job = options.out or Path(f"{NAMES.get(kind, kind)}.toml")
    if (options.kind is None) is (options.source is None):
        wanted = f"a kind ({', '.join(KINDS)}), or --from torchtitan FILE"
        raise InputError(expected("init", wanted, "both" if options.kind else "neither"))
    if options.kind is None:
        files = {job: _converted(job, *options.source, options.ranks)}
    else:
        files = {job: _template(f"{kind}.toml", job)}
    if kind == "python":
        _check_module(job)
        files[job.with_suffix(".py")] = _template("python.py", job)
    for path in files:
        if path.exists():
            raise InputError(
                expected(str(path), "no file yet", "one", "Name another with -o, or move it away.")
            )
    for path, text in files.items():
        write_atomically(path, text.encode())
        print(f"wrote {path}")
    for command in NEXT.get(kind, ALL):
        print(f"  shardwright {command} {job}")
    return EXIT_OK


def _template(name: str, job: Path) -> str:
    templates = resources.files("shardwright.cli") / "templates"
    text = (templates / name).read_text(encoding="utf-8")
    return text.replace("MODULE", job.stem).replace("JOB", str(job))


def _check_module(job: Path) -> None:
    """Its Python file is imported by its name, from the folder that it is in."""
    if not job.stem.isidentifier() or job.parent != Path():
        found = "'" + str(job) + "'"
        wanted = "a name for a Python module, in this folder, such as my_model.toml"
        raise InputError(expected("--out", wanted, found))


def _converted(job: Path, source: str, path: str, ranks: int | None) -> str:
    if source != "torchtitan":
        raise InputError(expected("--from", "torchtitan", f"'{source}'"))
    try:
        config = tomllib.loads(read_bytes(path, "TorchTitan configuration").decode())
    except (ValueError, RecursionError) as error:
        raise InputError(expected(path, "a configuration in TOML", f"'{error}'")) from None
    try:
        found = job_of(config, ranks)
        parse_job(found.document)
    except ShardwrightError as error:
        raise type(error)(f"{path}: {error}") from None
    unread = ", ".join(found.left_out) or "nothing"
    lines = [
        f"# {Path(path).name} of TorchTitan, as a job whose memory is estimated:",
        f"#   shardwright memory {job}",
        f"# Not read of it: {unread}.",
        "# What a GPU has is said by cluster.preset (h100-8 and others) or cluster.hbm_cap.",
    ]
    return "\n".join(lines) + "\n\n" + as_toml(found.document)
