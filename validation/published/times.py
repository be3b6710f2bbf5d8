"""``PYTHONPATH=validation python -m published.times FILE.json [-o FILE.json]``: seconds of steps
that others published, beside those that are predicted for them.

A row is predicted where a llama of ours says the same as it does: dense, gated, in 16 bits, with
attention and norms in kernels of their own. The others are counted, with why they are left out.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwright.core.document import FileKind, check_output, write_atomically
from shardwright.core.errors import EXIT_OK, InputError, ShardwrightError, expected
from shardwright.estimate.unplanned import estimated
from shardwright.job.job import parse_job

TIMES = FileKind("comparison of step times", re.compile(rb'\{\s*"sources": \{'))
PRESETS = {"A100-80": "a100-8", "A100-40": "a100-8", "H100-80": "h100-8", "H200": "h200-8"}
# Rows of these sources are among those that the constants of their device were fitted to.
FITTED = ("Aleph-Alpha", "KempnerInstitute", "pytorch/torchtitan", "arXiv 2205.05198")


def why_not(row: Mapping[str, Any]) -> str:
    """Why a row is not predicted; empty where it is."""
    if row["gpu"] not in PRESETS:
        return f"no preset is a {row['gpu']}"
    if row["experts"] or not row["glu"]:
        return "experts" if row["experts"] else "no gated feed-forward"
    if row["dtype"] not in ("bf16", "fp16"):
        return f"dtype {row['dtype']}"
    if row["checkpointing"] not in ("none", "full", "selective"):
        return "checkpointing is not known"
    if "kernel" in row["framework"] and "flash_attention2 + RMS" not in row["framework"]:
        return "attention or norms without a kernel of their own"
    return "compiled" if row["compile"] else ""


def job_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row as a job."""
    tensor, pipeline, context = (int(row[key] or 1) for key in ("tp", "pp", "cp"))
    data = row["gpus"] // (tensor * pipeline * context)
    microbatches = max(row["global_batch"] // data // row["micro_batch"], 1)
    chunks = int(row["vpp"] or 1)
    parallel: dict[str, Any] = {
        "data_shard": data,
        "tensor": tensor,
        "pipeline": pipeline,
        "context": context,
        "microbatches": microbatches,
    }
    if tensor > 1:
        parallel["sequence"] = bool(row["sp"])
    if pipeline > 1:
        parallel["schedule"] = "interleaved_1f1b" if chunks > 1 else "1f1b"
    if chunks > 1:
        parallel["chunks"] = chunks
    sharded = {"runtime": "fsdp2"}
    # Kernels that rows name are of attention and norms.
    kernels = {"attention_backend": "flash", "bias_activation_fusion": False}
    whole = {"runtime": "megatron", "zero": 1, "reduce_dtype": "bf16", "megatron": kernels}
    names = {"layers": "layers", "hidden": "dim", "heads": "heads", "kv_heads": "kv_heads"}
    return {
        "model": {
            "kind": "llama",
            **{ours: row[theirs] for theirs, ours in names.items()},
            "ffn_dim": row["ffn"],
            "vocab": row["vocab"],
        },
        "cluster": {"preset": PRESETS[row["gpu"]], "world_size": row["gpus"]},
        "batch": {"size": row["micro_batch"] * microbatches, "sequence": row["seq"]},
        "parallel": parallel,
        "memory": (sharded if row["zero"] == 3 else whole)
        | {"checkpointing": row["checkpointing"]},
    }


def compare(document: Any, where: str) -> dict[str, Any]:
    """Every row that can be predicted, and what the errors of each source are."""
    try:
        rows = [dict(zip(document["fields"], row, strict=True)) for row in document["rows"]]
    except (TypeError, KeyError, ValueError):
        wanted = "an object with 'fields' and 'rows', lists of as many values"
        raise InputError(expected(where, wanted, "something else")) from None
    told, left_out = [], Counter[str]()
    for row in rows:
        why = why_not(row)
        if not why:
            try:
                told.append(predicted(row))
                continue
            except ShardwrightError as error:
                why = re.sub(r"\d+", "N", str(error))
        left_out[why] += 1
    sources = defaultdict(list)
    for each in told:
        sources[each["source"].split(":")[0].split("@")[0]].append(each)
    found = {
        name: {"fitted_on": name.startswith(FITTED), **errors(its)}
        for name, its in sorted(sources.items())
    }
    return {"sources": found, "all": errors(told), "left_out": dict(left_out), "rows": told}


def predicted(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with what is predicted."""
    time = estimated(parse_job(job_of(row))).time
    assert time, "a preset of an accelerator has a clock"
    measured = row["step_time_s"]
    keys = (
        "source",
        "model",
        "gpu",
        "gpus",
        "tp",
        "pp",
        "vpp",
        "cp",
        "micro_batch",
        "global_batch",
    )
    return {
        **{key: row[key] for key in keys},
        "checkpointing": row["checkpointing"],
        "measured": measured,
        "predicted": round(time.seconds, 4),
        "error": round(time.seconds / measured - 1, 4),
        "in_range": time.low <= measured <= time.high,
        "parts": {name: round(seconds, 4) for name, seconds in time.parts.items()},
    }


def errors(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How far off predictions are, and how many pairs of one job they put in order."""
    if not rows:
        return {"rows": 0}
    off = sorted(abs(row["error"]) for row in rows)
    right, pairs = ordered(rows)
    return {
        "rows": len(rows),
        "median": round(statistics.median(off), 4),
        "p90": off[min(int(len(off) * 0.9), len(off) - 1)],
        "bias": round(statistics.median(row["error"] for row in rows), 4),
        "in_range": sum(row["in_range"] for row in rows),
        "pairs": pairs,
        "pairs_in_order": right,
    }


def ordered(rows: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """Of pairs of layouts of one job over 5 % apart, how many are predicted in order, and all."""
    jobs = defaultdict(list)
    for row in rows:
        jobs[row["source"].split(":")[0], row["model"], row["gpus"], row["global_batch"]].append(
            row
        )
    right = pairs = 0
    for its in jobs.values():
        for place, one in enumerate(its):
            for other in its[:place]:
                if max(one["measured"], other["measured"]) > 1.05 * min(
                    one["measured"], other["measured"]
                ):
                    pairs += 1
                    right += (one["measured"] < other["measured"]) == (
                        one["predicted"] < other["predicted"]
                    )
    return right, pairs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m published.times", description=__doc__)
    parser.add_argument("file", type=Path, help="JSON with fields and rows")
    parser.add_argument("-o", "--out", type=Path, help="file for the comparison")
    options = parser.parse_args(arguments)
    try:
        if options.out:
            check_output(options.out, TIMES, (options.file,), "--out")
        found = compare(json.loads(options.file.read_text(encoding="utf-8")), options.file.name)
        if options.out:
            write_atomically(options.out, (json.dumps(found, indent=1) + "\n").encode())
    except ShardwrightError as error:
        print(f"shardwright: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    json.dump({key: found[key] for key in ("sources", "all", "left_out")}, sys.stdout, indent=1)
    print()
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
