"""``PYTHONPATH=validation python -m published.times FILE.json [-o FILE.json]``: seconds of steps
that others published, beside those that are predicted for them.

A row is predicted where a job says what it does: a feed-forward without a gate is a GPT's, and what
a framework does otherwise is said by keys of [memory]. The others are counted, with why they are
left out.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwright.core.document import write_atomically
from shardwright.core.errors import EXIT_OK, InputError, ShardwrightError, expected
from shardwright.core.outputs import FileKind, check_output
from shardwright.estimate.unplanned import timed
from shardwright.job.job import parse_job

TIMES = FileKind("comparison of step times", re.compile(rb'\{\s*"sources": \{'))
PRESETS = {
    "A100-80": "a100-8",
    "A100-vtrain1": "a100-8",
    "A100-40": "a100-40-8",
    "H100-80": "h100-8",
    "H100-96-500W": "h100-8",
    "H200": "h200-8",
    "B200": "b200-8",
    "GB200": "gb200-72",
}
# Of a framework what it does otherwise than kernels that see no score and norms in one, by words of
# its name in the rows; "softmax" are products with one kernel between them.
OTHERWISE: tuple[tuple[str, dict[str, str]], ...] = (
    (r"flash_attention2 \+ RMS kernel", {}),
    (r"kernel flash", {"rms_norm": "composite"}),
    (r"kernel fused", {"rms_norm": "composite", "attention": "softmax"}),
    (r"kernel torch", {"rms_norm": "composite", "attention": "eager"}),
    (r"vTrain|Megatron-LM 2022", {"attention": "softmax"}),
    (r"PURE", {"reduce_dtype": "bf16"}),
)
# What of a data sheet such a device has otherwise than its preset.
CHANGED = {"H100-96-500W": {"memory_rate": 2.4e12}}
# What rows of one job have in common, whatever their layouts.
JOB = ("gpu", "model", "gpus", "global_batch", "seq", "dtype", "framework")
# Rows of these sources are among those that the constants of their device were fitted to.
FITTED = ("Aleph-Alpha", "KempnerInstitute", "pytorch/torchtitan", "arXiv 2205.05198")


def read_rows(document: Any, where: str) -> list[dict[str, Any]]:
    """Published rows; where some of their values stand in lists of ``names``, with these."""
    try:
        names = document.get("names", {})
        rows = [dict(zip(document["fields"], row, strict=True)) for row in document["rows"]]
        return [row | {key: names[key][row[key]] for key in names} for row in rows]
    except (AttributeError, TypeError, KeyError, ValueError, IndexError):
        wanted = "an object with 'fields' and 'rows', lists of as many values"
        raise InputError(expected(where, wanted, "something else")) from None


def same_job(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Equal for layouts of one job."""
    return (row["source"].split(":")[0], *(row.get(key) for key in JOB))


def why_not(row: Mapping[str, Any]) -> str:
    """Why a row is not predicted; empty where it is."""
    if row["gpu"] not in PRESETS:
        return f"no preset is a {row['gpu']}"
    if row["dtype"] in ("mxfp8", "fp4"):
        return f"dtype {row['dtype']}"
    for key in ("vocab", "micro_batch", "global_batch", "step_time_s"):
        if not row[key]:
            return f"{key} is not stated"
    if "fp8" in row["dtype"] and row["zero"] in (2, 3) and "torchtitan" not in row["framework"]:
        return "fp8 of Transformer Engine under FSDP, which no job says"
    return "checkpointing is not known" if row["checkpointing"] == "unknown" else ""


def job_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row as a job. A recipe whose checkpointing is not stated is taken to have none."""
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
    if chunks > 1 and pipeline > 1:
        parallel["chunks"] = chunks
    if row["experts"] and (row.get("ep") or 1) > 1:
        parallel["expert"] = row["ep"]
    cluster = {"preset": PRESETS[row["gpu"]], "world_size": row["gpus"]}
    if row.get("gpus_per_node", 8) != 8:
        cluster["local_world_size"] = row["gpus_per_node"]
    return {
        "model": _model(row),
        "cluster": cluster,
        "batch": {"size": row["micro_batch"] * microbatches, "sequence": row["seq"]},
        "parallel": parallel,
        "memory": _memory(row),
    }


def _model(row: Mapping[str, Any]) -> dict[str, Any]:
    names = {"layers": "layers", "hidden": "dim", "heads": "heads", "kv_heads": "kv_heads"}
    names |= {"head_dim": "head_dim", "vocab": "vocab", "ffn": "ffn_dim"}
    found = {"kind": "llama", **{ours: row[theirs] for theirs, ours in names.items()}}
    if not row["glu"]:
        found |= _gpt(row)
    if row["experts"]:
        found |= {"experts": row["experts"], "experts_per_token": row["top_k"]}
        found["expert_ffn_dim"] = row["expert_ffn"]
        if row["shared_ffn"]:
            found["shared_ffn_dim"] = row["shared_ffn"]
        found["moe_layers"] = list(range(row["dense_layers"] or 0, row["layers"]))
    return found


def _gpt(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a GPT has otherwise than a llama; Megatron-LM's has biases and dropout by default."""
    found = {"mlp": "gelu", "norm": "layernorm", "positions": row["seq"], "tied_embeddings": True}
    if "Megatron" in row["framework"] and "CI" not in row["framework"]:
        found |= {"bias": True, "dropout": 0.1, "attention_dropout": 0.1}
    return found


def _memory(row: Mapping[str, Any]) -> dict[str, Any]:
    policy = row["checkpointing"].replace("unknown (recipe)", "none")
    if policy == "selective" and "Megatron" in row["framework"]:
        policy = "core_attention"
    found: dict[str, Any] = {"runtime": "fsdp2", "checkpointing": policy}
    dtype = row["dtype"] if row["dtype"] in ("bf16", "fp16") else "bf16"
    if row["zero"] == 2:
        found["reshard_after_forward"] = False
    elif row["zero"] != 3:
        found |= {"runtime": "megatron", "reduce_dtype": dtype}
        found |= {"zero": 1} if row["zero"] == 1 else {}
    if dtype != "bf16":
        found["param_dtype"] = dtype
    narrow = row["dtype"].startswith("fp8")
    if narrow and found["runtime"] != "megatron":
        found["float8"] = "rowwise" if "rowwise" in row["dtype"] else "tensorwise"
    if row["compile"]:
        found["compile"] = True
    keys = next((keys for words, keys in OTHERWISE if re.search(words, row["framework"])), {})
    attention, norm = keys.get("attention", "flash"), keys.get("rms_norm", "fused")
    if found["runtime"] == "megatron":
        found["megatron"] = {
            "attention_backend": "flash" if attention == "flash" else "local",
            "masked_softmax_fusion": attention != "eager",
            "rms_norm_fusion": norm == "fused",
        } | ({"fp8_format": "hybrid"} if narrow else {})
        if "kernel" in row["framework"]:
            # Aleph-Alpha/scaling (737f855): layers are of plain torch, the head gathers logits, and
            # embedding and head count as layers where a pipeline is cut.
            plain = ("bias_activation_fusion", "gradient_accumulation_fusion", "parallel_output")
            found["megatron"] |= dict.fromkeys(plain, False)
            ends = ("embedding", "loss")
            found["megatron"] |= {f"account_for_{end}_in_pipeline_split": True for end in ends}
    else:
        found |= {"attention": "eager"} if attention != "flash" else {}
        found |= {"rms_norm": norm} if norm != "fused" else {}
    others = ("attention", "rms_norm")
    return found | {key: value for key, value in keys.items() if key not in others}


def compare(document: Any, where: str) -> dict[str, Any]:
    """Every row that can be predicted, and what the errors of each source are."""
    told, left_out = [], Counter[str]()
    for row in read_rows(document, where):
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
    time = timed(parse_job(job_of(row)))
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
        jobs[same_job(row)].append(row)
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


def command(
    told: Callable[[Any, str], dict[str, Any]],
    parser: argparse.ArgumentParser,
    kind: FileKind,
    arguments: Sequence[str] | None,
    hidden: str,
) -> int:
    """Compare the rows of a file and print what that gave but for its ``hidden`` part, all of which
    goes to ``--out``; the process's exit code."""
    parser.add_argument("-o", "--out", type=Path, help="file for the comparison")
    options = parser.parse_args(arguments)
    try:
        if options.out:
            check_output(options.out, kind, (options.file,), "--out")
        found = told(json.loads(options.file.read_text(encoding="utf-8")), options.file.name)
        if options.out:
            write_atomically(options.out, (json.dumps(found, indent=1) + "\n").encode())
    except (OSError, ValueError) as error:
        if not isinstance(error, ShardwrightError):
            error = InputError(expected(options.file.name, "JSON with fields and rows", str(error)))
        print(f"shardwright: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    json.dump({name: its for name, its in found.items() if name != hidden}, sys.stdout, indent=1)
    print()
    return EXIT_OK


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m published.times", description=__doc__)
    parser.add_argument("file", type=Path, help="JSON with fields and rows")
    return command(compare, parser, TIMES, arguments, "rows")


if __name__ == "__main__":
    sys.exit(main())
