"""``shardwright pack RUN_DIR [--kind int8] [--step N] [--out tables.safetensors]``."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardwright.cli import options as shared
from shardwright.core.document import TABLES, check_output
from shardwright.core.errors import InputError, UnsupportedError, expected
from shardwright.core.kinds import PACKED
from shardwright.core.quantities import format_bytes
from shardwright.job.job import checkpoint_folder
from shardwright.job.plan import read_plan
from shardwright.launcher.folder import plan_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``pack``."""
    parser.epilog = "shardwright.train.serving.packed_embeddings(FILE) looks rows up."
    shared.run_argument(parser)
    parser.add_argument("--kind", choices=list(PACKED), default="int8", help="of rows (int8)")
    parser.add_argument("--step", type=int, metavar="N", help="of the checkpoints (the newest)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="RUN_DIR/tables.safetensors, or another one"
    )


def execute(options: argparse.Namespace) -> int:
    """Write every table of the run as rows of bytes, in one process."""
    folder = shared.run_folder(options)
    job = read_plan(plan_file(folder)).job
    if not job.model.traits.reads_clicks:
        wanted, got = "a run of a DLRM", f"model.kind '{job.model.kind}'"
        remedy = "Pack tables of your own in Python: shardwright.train.serving."
        raise UnsupportedError(expected(str(folder), wanted, got, remedy))
    saved = checkpoint_folder(job, folder)
    if not saved.is_dir():
        remedy = "Train with a [checkpoint] section."
        raise InputError(expected(str(saved), "the checkpoints of the run", "none", remedy))
    out = options.out or folder / "tables.safetensors"
    check_output(out, TABLES, option="--out")

    from shardwright.train.serving import saved_embeddings, write_packed

    learned = saved_embeddings(saved, job.tables, options.step)
    replaced = shared.beside(out)
    write_packed(learned.materialised(options.kind), out)
    rows = sum(table.rows for table in job.tables)
    size = format_bytes(out.stat().st_size)
    print(f"{out}: {len(job.tables):,} tables, {rows:,} rows of {options.kind}, {size}{replaced}")
    return 0
