"""A job's layout for the engine that runs it: what cannot be done there, else as it is written
there.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import msgspec
from msgspec import UNSET

from shardwright.core.errors import InputError, UnsupportedError, not_one_of
from shardwright.job.engines import accelerate, fsdp2, megatron, own, torchtitan
from shardwright.job.engines.layout import HEAD, Engine, layout_of
from shardwright.job.job import Job, memory_of, parallel_of

ENGINES: dict[str, Engine] = {
    "torchtitan": torchtitan.MAIN,
    "torchtitan-toml": torchtitan.RELEASES,
    "megatron": megatron.MEGATRON,
    "fsdp2": fsdp2.FSDP2,
    "accelerate": accelerate.ACCELERATE,
    "shardwright": own.OWN,
}


def cannot(job: Job, engine: str) -> tuple[str, ...]:
    """Why an engine does not run a job's layout, a line for each reason; empty where it does.

    InputError where there is no such engine, or the job's degrees do not fit its ranks.
    """
    return tuple(_engine(engine).cannot(layout_of(job)))


def unlike(job: Job, engine: str, given: Container[str] | None = None) -> dict[str, Any]:
    """Keys of a job that an engine takes another value of, with the first that it takes; with the
    keys that are ``given`` none of these, and of others also those that it usually has otherwise.

    InputError where there is no such engine.
    """
    found, runtime = _engine(engine), "memory.runtime"
    if not found.takes("model.kind", job.model.kind):
        return {}  # of which no key matters
    if given and runtime in given and not found.takes(runtime, memory_of(job).runtime):
        return {}  # whose other keys would be those of another runtime
    values = {
        f"{section}.{key}": value
        for section, its in (("memory", memory_of(job)), ("parallel", parallel_of(job)))
        for key, value in msgspec.structs.asdict(its).items()
        if value is not UNSET  # which nobody has to say
    }
    usual = {} if given is None else {key: value(job) for key, value in found.usual.items()}
    first = {
        key: found.limits[key][0]
        for key in values
        if key.startswith("memory.") and key in found.limits and not found.takes(key, values[key])
    }
    return {
        key: value
        for key, value in (first | usual).items()
        if key not in (given or ()) and value not in (values.get(key), UNSET)
    }


def exported(job: Job, engine: str) -> str:
    """A job's layout as an engine reads it: flags, a file or a snippet of Python.

    UnsupportedError with every reason why it cannot.
    """
    found, layout = _engine(engine), layout_of(job)
    if reasons := tuple(found.cannot(layout)):
        raise UnsupportedError(" ".join(reasons))
    settings, text = layout.memory.allocator, found.written(layout)
    # Comments of a shell, of TOML, of YAML and of Python.
    head = f"# Set PYTORCH_ALLOC_CONF={settings} for it.\n" if settings else ""
    if layout.hosts > 1 and HEAD in text:
        head += f"# On each of {layout.hosts} hosts; {HEAD} is the address of the first.\n"
    return head + text


def _engine(name: str) -> Engine:
    if name not in ENGINES:
        raise InputError(not_one_of("engine", name, ENGINES))
    return ENGINES[name]
