"""``shardwright init``: a commented job to begin with, or another program's configuration."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from shardwright.core.document import encode_toml, parse_json, read_bytes, write_atomically
from shardwright.core.errors import EXIT_OK, InputError, ShardwrightError, check_type, expected
from shardwright.core.outputs import beside
from shardwright.job import megatron, torchtitan
from shardwright.job.engines import accelerate, deepspeed, huggingface, torchrec
from shardwright.job.imported import Imported
from shardwright.job.job import Job, parse_job, read_job
from shardwright.job.model import KINDS

# Kinds with a template, tables alone first: what they ask for is least
TEMPLATES = sorted(
    (kind for kind in KINDS if KINDS[kind].template), key=lambda k: KINDS[k].has_step
)
FUNCTIONS = ("build", "batches")  # of a Python file that the job names
MODULE = "my_model"  # a job beside a Python file, for which its kind would be a poor name


class Given(NamedTuple):
    """A configuration of another program, the job beside it, and the ranks that are asked for."""

    title: str
    text: str
    path: str
    beside: Job | None
    ranks: int | None

    @property
    def job(self) -> Job:
        """The one beside it, of a source that needs one."""
        assert self.beside, "asked for before"
        return self.beside

    @property
    def object(self) -> dict[str, Any]:
        """What its JSON says."""
        what = f"a configuration of {self.title} in JSON"
        found: dict[str, Any] = parse_json(self.text, self.path, what)
        check_type(found, dict, what)
        return found


class Source(NamedTuple):
    """A program whose configurations become jobs; one whose ``form`` names no model needs a job
    beside it that does."""

    title: str
    read: Callable[[Given], Imported]
    form: str = ""


SOURCES = {
    "torchtitan": Source("TorchTitan", lambda g: torchtitan.job_of_text(g.text, g.path, g.ranks)),
    "megatron": Source("Megatron-LM", lambda g: megatron.job_of(g.text, g.ranks)),
    "accelerate": Source("Accelerate", lambda g: accelerate.job_of(g.text, g.job, g.ranks), "YAML"),
    "deepspeed": Source("DeepSpeed", lambda g: deepspeed.job_of(g.object, g.job, g.ranks), "JSON"),
    "huggingface": Source("Hugging Face", lambda g: huggingface.job_of(g.object, g.path, g.ranks)),
    "torchrec": Source("TorchRec", lambda g: torchrec.job_of(g.text, g.beside, g.ranks)),
}
ESTIMATES, ALONE = ("memory", "fit"), ("plan",)
TABLES = "torchrec"  # whose jobs are of tables
ALL = ("memory", "plan", "train")
DIM = 16  # of guessed tables, as of the template
HOW_HELD_OUT = (
    "the last tenth of the rows is held out and scored; test_path = FILE in its place names others"
)
MLPS = {"bottom": [64, DIM], "top": [64, 32, 1], "interaction": "dot"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``init``."""
    listed = "; ".join(f"{kind}: {KINDS[kind].template}" for kind in TEMPLATES)
    parser.add_argument("kind", nargs="?", choices=TEMPLATES, metavar="KIND", help=listed)
    parser.add_argument(
        "--from",
        dest="source",
        nargs=2,
        metavar=("|".join(SOURCES), "FILE"),
        help="instead of a kind: TorchTitan's TOML, its main branch's flags or Megatron-LM's "
        "arguments (a script, or in quotes), Accelerate's YAML, DeepSpeed's JSON, a model's "
        "config.json, as a job for memory and fit, or a plan of TorchRec's for plan",
    )
    parser.add_argument(
        "--job",
        metavar="JOB.toml",
        help="whose model and batch Accelerate's YAML or DeepSpeed's JSON divides, or whose tables "
        "TorchRec's plan places",
    )
    parser.add_argument(
        "--data",
        metavar="FILE",
        help="of kind dlrm: a log of one's own, whose columns and tables are guessed",
    )
    parser.add_argument("-n", "--ranks", type=int, metavar="N", help="ranks that it is for")
    parser.add_argument(
        "-o", "--out", type=Path, metavar="JOB.toml", help="the file to write; by default KIND.toml"
    )


def execute(options: argparse.Namespace) -> int:
    """Write the job where no such file is, and what belongs to it where it is not there yet."""
    if options.data and options.source is None:
        options.kind = options.kind or "dlrm"  # the only kind that reads a log
    kind = options.kind or (options.source[0] if options.source else "")
    traits = KINDS.get(kind)
    own = traits is not None and traits.is_function
    job = options.out or Path(f"{MODULE if own else kind}.toml")
    if (options.kind is None) is (options.source is None):
        wanted = f"a kind ({', '.join(TEMPLATES)}), or --from {'|'.join(SOURCES)} FILE"
        raise InputError(expected("init", wanted, "both" if options.kind else "neither"))
    if options.data and kind != "dlrm":
        raise InputError(expected("--data", "kind dlrm", f"'{kind}'", "Others read no click log."))
    if options.data:
        files = {job: _of_data(job, options.data, options.ranks)}
    elif options.kind is None:
        files = {job: _converted(job, *options.source, options)}
    else:
        files = {job: _template(f"{kind}.toml", job)}
    if job.suffix not in ("", ".toml"):
        raise InputError(expected("--out", "a name that ends in .toml", f"'{job.name}'"))
    module = job.with_suffix(".py")
    if own:
        _check_module(job)
        if not module.exists():
            files[module] = _template("python.py", job)
    # All are looked at before one is written: half of a job and its module would be in the way next
    # time.
    for path in files:
        if path.exists():
            raise InputError(
                expected(str(path), "no file yet", "one", "Name another with -o, or move it away.")
            )
    for path, text in files.items():
        changed = beside(path)
        write_atomically(path, text.encode())
        print(f"wrote {path}{changed}")
    if own and module not in files:
        print(f"kept {module}: {_lacking(module)}")
    commands = ESTIMATES if traits is None else ALL if traits.has_step else ALONE
    commands = ALONE if kind == TABLES else commands
    if options.data:
        print(f"  shardwright inspect {job} -o {job}")
    for command in commands:
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


def _lacking(module: Path) -> str:
    """What a Python file that is there already lacks for the job beside it."""
    with suppress(SyntaxError, ValueError):
        names = set()
        for part in ast.parse(read_bytes(module, "Python file")).body:
            names |= {getattr(part, "name", "")}  # of a function or a class
            names |= {
                each.asname or each.name
                for each in getattr(part, "names", ())
                if isinstance(each, ast.alias)
            }
            names |= {
                each.id for each in getattr(part, "targets", ()) if isinstance(each, ast.Name)
            }
        if names.issuperset(FUNCTIONS):
            return f"the job calls its {' and '.join(FUNCTIONS)}"
        lacking = " and ".join(f"{name}()" for name in FUNCTIONS if name not in names)
        other = "init python -o OTHER.toml writes an example of both"
        return f"the job needs its {lacking}, as docs/own-model.md describes them; {other}"
    return "no Python that can be read"


def _converted(job: Path, source: str, path: str, options: argparse.Namespace) -> str:
    if source not in SOURCES:
        raise InputError(expected("--from", " or ".join(SOURCES), f"'{source}'"))
    title, read, form = SOURCES[source]
    if source != TABLES and (options.job is None) is bool(form):
        needing = " or ".join(name for name, each in SOURCES.items() if each.form)
        wanted = f"a job beside --from {needing}, and none beside others"
        found = "none" if options.job is None else "one"
        remedy = f"{title}'s {form} names no model." if form else ""
        raise InputError(expected("--job", wanted, found, remedy))
    typed = path.lstrip().startswith("--")  # arguments, not their file
    name, where = ("Arguments", "") if typed else (Path(path).name, f"{path}: ")
    raw = path.encode() if typed else read_bytes(path, f"{title} configuration")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        what = f"a configuration of {title}"
        raise InputError(expected(path, what, f"'{error}'")) from None
    # One that cannot be read is told with its own name, and not with that of the other.
    beside = read_job(options.job) if options.job else None
    try:
        made = read(Given(title, text, path, beside, options.ranks))
        parse_job(made.document)
    except ShardwrightError as error:
        named = str(error).startswith(where)
        raise type(error)(str(error) if named else f"{where}{error}") from None
    use, command = ("memory is estimated", "memory")
    if source == TABLES:
        use, command = ("tables are cut and lie so", "plan")
    lines = [
        f"# {name} of {title}, as a job whose {use}:",
        f"#   shardwright {command} {job}",
        *([f"# Assumed: {'; '.join(made.assumed)}."] if made.assumed else []),
        f"# Without effect on memory: {', '.join(made.harmless) or 'nothing'}.",
        f"# Not read, whatever they change: {', '.join(made.unread) or 'nothing'}.",
        "# What a GPU has is said by cluster.preset (h100-8 and others) or cluster.hbm_cap.",
    ]
    return "\n".join(lines) + "\n\n" + encode_toml(made.document)


def _of_data(job: Path, data: str, ranks: int | None) -> str:
    """A job for a log, whose columns and tables are guessed from its first rows."""
    from shardwright.data.guess import HELD_OUT, described, guess, is_days

    found = guess(data)
    columns: dict[str, Any] = {"kind": "columns", "path": data, "label": found.label}
    columns["dense"] = [each.name for each in found.dense]
    columns["ids"] = found.ids
    columns["logarithm"] = [each.name for each in found.dense if each.logarithm]
    columns["scale"] = {each.name: [each.center, each.spread] for each in found.dense}
    columns["missing"], columns["header"] = found.missing, found.header
    names: dict[str, str] = {}
    for each in found.tables:
        name = re.sub(r"\W|^(?=\d)", "_", each.column, flags=re.ASCII)[:90]
        names[each.column] = f"{name}_{len(names)}" if name in names.values() else name
    tables = [
        {"name": names[each.column], "rows": each.rows, "dim": DIM}
        | ({"features": [each.column]} if names[each.column] != each.column else {})
        | ({"pooling_factors": [each.length]} if each.length != 1 else {})
        for each in found.tables
    ]
    size, steps = 256, 100
    if found.whole:  # tables know a short log by heart after a few passes, and score other rows ill
        steps = min(max(round(2 * found.rows / (size * (ranks or 2))), 20), steps)
    document = {
        "model": {"kind": "dlrm", "dense_features": len(found.dense), **MLPS},
        "cluster": {"preset": "local", "world_size": ranks or 2},
        "batch": {"size": size},
        "data": {key: value for key, value in columns.items() if value},
        "train": {
            "steps": steps,
            "optimizer": "adam",
            "learning_rate": 0.002,
            "table_learning_rate": 0.03,
            "out": f"runs/{job.stem}",
        },
        "tables": tables,
    }
    if found.is_criteo:
        document["data"] = {"kind": "criteo", "path": data}
    if found.can_hold_out and not is_days(Path(data)):
        document["data"]["days"] = HELD_OUT
    parse_job(document)
    text = "".join(f"# {line}\n" for line in described(found)) + "\n" + encode_toml(document)
    return text.replace(f"\ndays = {HELD_OUT}\n", f"\ndays = {HELD_OUT}  # {HOW_HELD_OUT}\n")
