"""Small random jobs whose memory is just enough or a little less, and what `plan`, `memory` and
`fit` say of each. Tests ask a few, ``benchmarks/verdicts.py`` hundreds."""

from __future__ import annotations

import contextlib
import io
import json
import random
from pathlib import Path
from typing import Any

from shardwright.cli.main import main
from shardwright.core.errors import EXIT_NO_PLAN, EXIT_OK

# Of twenty jobs one is a llama, whose ``fit`` takes longest, and two are small GPTs.
KINDS = ("llama", "transformer", "transformer", *("dlrm", "tables") * 8, "dlrm")
GIB = 2**30


def job_of(seed: int) -> str:
    """A job of one of the kinds, in turn, without its memory."""
    draw = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    device = draw.choice(("cuda", "cuda", "cpu"))
    ranks = draw.choice((1, 2, 3))
    lines = ["[cluster]", f'compute_device = "{device}"', f"world_size = {ranks}"]
    lines += ["[batch]", f"size = {draw.choice((1, 3, 8))}"]
    if kind in ("llama", "transformer"):
        heads = draw.choice((2, 4))
        lines += [f"sequence = {draw.choice((16, 64, 200))}", "[model]", f'kind = "{kind}"']
        lines += [f"layers = {draw.choice((1, 2, 3))}", f"dim = {16 * heads}", f"heads = {heads}"]
        lines += [f"vocab = {draw.choice((100, 3000))}"]
        optimizer = draw.choice(("sgd", "adam", "adamw"))
    else:
        dim = draw.choice((4, 16))
        if kind == "dlrm":
            lines += ["[model]", f"bottom = [32, {dim}]", "top = [32, 1]"]
        optimizer = draw.choice(("sgd", "adagrad"))
        for name in "abc"[: draw.choice((1, 2, 3))]:
            rows = draw.choice((100, 5000, 40000))
            lines += ["[[tables]]", f'name = "{name}"', f"rows = {rows}", f"dim = {dim}"]
            lines += ['optimizer = "sgd"'] if kind == "tables" else []
    if kind != "tables":
        lines += ["[train]", f'optimizer = "{optimizer}"']
    if kind == "llama" and draw.random() < 0.5:  # is estimated without a plan
        runtime = draw.choice(("fsdp2", "ddp"))
        lines += ["[memory]", f'runtime = "{runtime}"']
    return "\n".join(lines) + "\n"


def said_of(seed: int, folder: Path) -> dict[str, Any]:
    """What the commands say of a random job once its memory is between less than the least and
    more than the most that it needs; ``wrong`` are contradictions among them."""
    path, draw = folder / f"job{seed}.toml", random.Random(-seed)
    path.write_text(job_of(seed))
    tier = "ddr_cap" if '"cpu"' in job_of(seed) else "hbm_cap"
    _, roomy = _asked("memory", path, f"cluster.{tier}={64 * GIB}B")
    worst = max(roomy["ranks"], key=lambda rank: rank["needs_bytes"]["most"])["needs_bytes"]
    room = int(draw.uniform(0.97 * worst["least"], 1.03 * worst["most"]))
    cap = f"cluster.{tier}={room}B"
    memory_exit, memory = _asked("memory", path, cap)
    fit_exit, fit = _asked("fit", path, cap)
    said = {"memory": memory.get("verdict", "does not fit")}
    if fit:
        own = next(row for row in fit["policies"] if row["checkpointing"] == fit["checkpointing"])
        said["fit"] = own["estimate"]["verdict"]
        largest = own["largest_batch"]
        if (largest["size"] >= fit["batch"]) != (said["fit"] == "fits"):
            said["fit, its largest batch"] = str(largest["size"])
    else:
        said["fit"] = "does not fit"
    if "runtime" not in path.read_text():
        plan_exit, plan = _asked("plan", path, cap)
        said["plan"] = plan.get("verdict", "does not fit")
        if (plan_exit == EXIT_OK) != (said["plan"] != "does not fit"):
            said["plan, its exit"] = str(plan_exit)
    if (memory_exit == EXIT_OK) != (said["memory"] != "does not fit"):
        said["memory, its exit"] = str(memory_exit)
    if said["fit"] != "does not fit" and fit_exit != EXIT_OK:
        said["fit, its exit"] = str(fit_exit)
    wrong = len(set(said.values())) > 1
    return {"seed": seed, "kind": KINDS[seed % len(KINDS)], "room": room, "said": said} | {
        "wrong": wrong
    }


def _asked(command: str, path: Path, *keys: str) -> tuple[int, dict[str, Any]]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()) as told:
        code = main([command, str(path), "--json", *(f"--set={key}" for key in keys)])
    assert code in (EXIT_OK, EXIT_NO_PLAN), told.getvalue()
    return code, json.loads(out.getvalue() or "{}")
