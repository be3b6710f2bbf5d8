"""What is predicted of every configuration, on a CPU, before there is a GPU.

    PYTHONPATH=src:benchmarks python -m gpu.predict [FILE]

writes ``predictions.json``, or another file, beside which the machine's figures are laid. The units
that a module of the user's own was recorded in are kept, too: a GPU need not wait for a recording.
"""

from __future__ import annotations

import datetime
import sys
from functools import cache
from pathlib import Path

import msgspec
import torch

from gpu.configurations import Configuration, memory_configurations, timed_configurations
from gpu.rows import Setting
from shardwright.core.recording import RecordedUnit
from shardwright.estimate.rehearsal import units_of
from shardwright.estimate.unplanned import estimated

FILE = Path(__file__).with_name("predictions.json")
KEPT = ("weight", "optimizer_state", "buffer", "input")  # between steps


class Prediction(msgspec.Struct, omit_defaults=True):
    """Bytes of rank 0: the peak of live tensors, that of each phase, what there is between steps,
    what the allocator holds, and what is needed outside of it (least and most)."""

    peak: int
    phases: dict[str, int]
    kept: int
    reserved: int
    retries: int
    outside: tuple[int, int]
    parameters: int
    units: tuple[RecordedUnit, ...] = ()


class Predictions(msgspec.Struct):
    """All of them, by the names of configurations."""

    torch: str
    date: str
    configurations: dict[str, Prediction]


def predicted(setting: Setting, configuration: Configuration) -> Prediction:
    """The estimate of a configuration."""
    job = configuration.job(setting)
    found = estimated(job)
    rank = found.worst
    units = units_of(job) if job.model.kind == "python" else []
    return Prediction(
        peak=rank.peak_bytes,
        phases={each.phase: each.bytes for each in rank.phases},
        kept=sum(rank.by_category.get(kind, 0) for kind in KEPT),
        reserved=rank.reserved_bytes,
        retries=rank.retries,
        outside=(sum(e.low for e in found.outside), sum(e.high for e in found.outside)),
        parameters=found.parameters,
        units=tuple(msgspec.structs.replace(unit, tensors=()) for unit in units),
    )


@cache
def predictions() -> Predictions:
    """What was written."""
    return msgspec.json.decode(FILE.read_bytes(), type=Predictions)


def prediction_of(setting: Setting, configuration: Configuration) -> Prediction:
    """That of a configuration: written, or, of small ones and on a CPU, made now."""
    if setting.small or setting.device == "cpu":
        return predicted(setting, configuration)
    return predictions().configurations[configuration.name]


def main() -> int:
    setting = Setting("cuda")
    found: dict[str, Prediction] = {}
    for configuration in (*memory_configurations(), *timed_configurations()):
        found[configuration.name] = made = predicted(setting, configuration)
        print(f"{configuration.name}: {made.peak / 2**30:.2f} GiB", flush=True)
    written = Predictions(str(torch.__version__), datetime.date.today().isoformat(), found)
    path = Path(sys.argv[1]) if sys.argv[1:] else FILE
    path.write_bytes(msgspec.json.format(msgspec.json.encode(written), indent=1) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
