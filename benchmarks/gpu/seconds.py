"""Stage ``seconds``: how long a step takes on one rank that is really there, its parts apart.

Forward, backward and update from when they are asked for to when the device has done them;
``step`` has no wait inside, and ``host`` is what the processor is busy to ask for one. Raw figures:
rates are made of them elsewhere.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

import torch

from gpu.configurations import Configuration, timed_configurations
from gpu.memory import told
from gpu.predict import prediction_of
from gpu.rehearsal import running
from gpu.rows import Row, Setting

WARM, APART, TOGETHER = 2, 3, 5  # steps
PARTS = ("forward", "backward", "update")


def rows(setting: Setting) -> list[Row]:
    """A configuration each; of small ones one module of a user's own stands for all."""
    left_out = ("bert", "vit", "resnet", "t5") if setting.small else ()
    return [
        Row(each.name, partial(measured, setting, each), each.seconds, each.environment)
        for each in timed_configurations()
        if each.runs_on(setting) and not each.name.startswith(left_out)
    ]


def measured(setting: Setting, configuration: Configuration) -> dict[str, Any]:
    """Medians in seconds."""
    known = prediction_of(setting, configuration) if setting.device == "cuda" else None
    job = configuration.job(setting)
    cuda = setting.device == "cuda"
    with running(setting, configuration, known) as run:
        for _ in range(WARM):
            run.step()
        setting.synchronize()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        parts: dict[str, list[float]] = {name: [] for name in PARTS}
        for _ in range(APART):
            for name in PARTS:
                begun = time.perf_counter()
                getattr(run, name)()
                setting.synchronize()
                parts[name].append(time.perf_counter() - begun)
        together, hosts = [], []
        for _ in range(TOGETHER):
            begun, processor = time.perf_counter(), time.process_time()
            run.step()
            hosts.append(time.process_time() - processor)
            setting.synchronize()
            together.append(time.perf_counter() - begun)
        found: dict[str, Any] = {
            **{name: statistics.median(each) for name, each in parts.items()},
            "step": statistics.median(together),
            "host": statistics.median(hosts),
            "samples": job.batch.size,
            "tokens": job.batch.size * job.batch.sequence,
        }
        if cuda:
            found["allocated"] = torch.cuda.max_memory_allocated()
            found["reserved"] = torch.cuda.max_memory_reserved()
    return {**found, "predicted": told(known)} if known else found
