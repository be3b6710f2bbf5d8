"""A job's layout for the engine that runs it: what cannot be done there, else as it is written
there.
"""

from __future__ import annotations

from shardwright.core.errors import InputError, UnsupportedError, not_one_of
from shardwright.job.engines import accelerate, fsdp2, megatron, own, torchtitan
from shardwright.job.engines.layout import HEAD, Engine, layout_of
from shardwright.job.job import Job

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
