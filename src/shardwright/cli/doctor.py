"""``shardwright doctor``: what is installed and what works here."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import subprocess
import sys

from shardwright import __version__
from shardwright.cli import options as shared
from shardwright.core.errors import EXIT_OK, EXIT_RUN_FAILED

PACKAGES = ("torch", "numpy", "msgspec", "rich", "jinja2")
PROBE_SECONDS = 120
WORDS = {
    "devices": "CUDA devices",
    "threads": "torch's threads",
    "all_gather": "all-gather of torch",
    "gloo_all_reduce": "all-reduce on gloo",
    "True": "yes",
    "False": "no",
}
PROBE = """
import torch, torch.distributed as dist, tempfile, os
print("devices", torch.cuda.device_count() if torch.cuda.is_available() else 0)
print("threads", torch.get_num_threads())
for backend in ("gloo", "nccl"):
    print(backend, getattr(dist, f"is_{backend}_available")())
path = os.path.join(tempfile.mkdtemp(), "store")
dist.init_process_group("gloo", store=dist.FileStore(path, 1), rank=0, world_size=1)
from shardwright.runtime import comm
names = ("all_gather_single", "all_gather_into_tensor")
print("all_gather", next(n for n in names if hasattr(dist, n)))
x = torch.ones(4)
dist.all_reduce(x)
print("gloo_all_reduce", bool((x == 1).all()))
dist.destroy_process_group()
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``doctor``."""
    shared.json_option(parser)


def execute(options: argparse.Namespace) -> int:
    """Print facts; 5 if torch or gloo does not work."""
    facts: dict[str, str] = {
        "shardwright": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": str(os.cpu_count()),
    }
    for name in PACKAGES:
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts[name] = "not installed"
    probed, fault = _probe()
    facts.update(probed)
    works = not fault
    if options.json:
        shared.print_json({"facts": facts, "works": works, "fault": fault})
    else:
        said = {WORDS.get(name, name): WORDS.get(value, value) for name, value in facts.items()}
        width = max(map(len, said))
        print("\n".join(f"{name:<{width}}  {value}" for name, value in said.items()))
        print("training on this machine works" if works else f"training does not work: {fault}")
    return EXIT_OK if works else EXIT_RUN_FAILED


def _probe() -> tuple[dict[str, str], str]:
    """Try torch and gloo in a process of their own, so that a crash is an answer."""
    # As a run binds it: without it gloo looks the host's own name up, and fails where there is no
    # entry.
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE],
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {}, f"no answer from torch within {PROBE_SECONDS} s"
    facts = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return facts, last
    return facts, ""
