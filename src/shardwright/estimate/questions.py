"""Questions as Python asks them: of a model by name, of a job, or of a module at hand, on a machine
in one word."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from shardwright.core.advice import Advice
from shardwright.core.errors import InputError, did_you_mean, expected
from shardwright.core.footprint import Fit, Footprint
from shardwright.estimate.footprint import footprint
from shardwright.job.asked import SHORT
from shardwright.job.cluster import in_one_word
from shardwright.job.job import Job, asked, job_in

Asked = Job | Path | str
Progress = Callable[[str], None]


def memory(model: Asked, *, on: str = "", **keys: Any) -> Footprint:
    """What every rank takes, as ``shardwright memory`` says it:
    ``memory("llama3-8b", on="8xH100", seq=8192)``.

    ``model`` is a job or its file, a public model's name, a ``config.json`` or
    ``package.module:function``; ``on`` a machine in one word; ``keys`` are those of the command's
    short options (``seq``, ``batch``, ``runtime``, ``optimizer``, ...) or of the job,
    ``**{"memory.loss": "chunked"}``. Of the answer ``fits`` is whether every rank fits for sure.
    InputError as the command says it.
    """
    return footprint(job_for(model, on, keys), details=True)


def fit(model: Asked, progress: Progress = lambda _: None, *, on: str = "", **keys: Any) -> Fit:
    """The largest batch and sequence that fit, and the fewest ranks, as ``shardwright fit`` says
    it; arguments are those of :func:`memory`. ``fits``: as it is asked, for sure."""
    from shardwright.estimate.fit import fit as search

    return search(job_for(model, on, keys), progress=progress)


def advise(
    model: Asked, progress: Progress = lambda _: None, *, on: str = "", **keys: Any
) -> Advice:
    """The fastest layouts that fit, as ``shardwright advise`` says it; arguments are those of
    :func:`memory` and the fields of ``Wanted``: ``engine``, ``fixed``, ``headroom`` in bytes,
    ``global_batch``, ``measured`` in seconds. ``fits``: any does for sure."""
    from shardwright.estimate.advise.search import Wanted
    from shardwright.estimate.advise.search import advise as search

    wanted = {key: keys.pop(key) for key in Wanted.__dataclass_fields__ if key in keys}
    return search(job_for(model, on, keys), progress, **wanted)


def job_for(model: Asked, on: str, keys: Mapping[str, Any]) -> Job:
    """The one job that all of it asks for; a job as it is, beside which nothing may be asked."""
    if isinstance(model, Job):
        if on or keys:
            remedy = "Pass its file, or change it with msgspec.structs.replace."
            found = ", ".join(["on"] * bool(on) + list(keys))
            raise InputError(expected("job", "nothing beside a Job", found, remedy))
        return model
    if not isinstance(model, str | Path):
        wanted, remedy = "a Job, its file or a model's name", "read_job reads a file."
        raise InputError(expected("model", wanted, type(model).__name__, remedy))
    if on:
        in_one_word(on, "on")
    given = [f"{_key(name)}={_text(value)}" for name, value in keys.items() if value is not None]
    return job_in(asked(model, given, on), model)


def _key(name: str) -> str:
    if name in SHORT or "." in name:
        return SHORT.get(name, name)
    guess = did_you_mean(name, SHORT) or "Keys of a job have a dot: 'memory.loss'."
    raise InputError(expected(name, f"one of {', '.join(SHORT)}", "another name", guess))


def _text(value: Any) -> str:
    """A value as ``--set`` takes it."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(msgspec.to_builtins(value))
    except TypeError:
        return str(value)


def estimate_memory(of: Any, inputs: Any = None, **how: Any) -> Footprint:
    """The memory of every class of ranks, without running anything: of a :class:`Job`
    (:func:`shardwright.estimate.footprint.footprint`), or of a module at hand that is called with
    ``inputs`` (:func:`shardwright.estimate.recordings.module_memory`):
    ``estimate_memory(net, batch, optimizer="adamw", on="1xH100")``."""
    if inputs is None:
        if not isinstance(of, Job) and callable(of):
            raise InputError(expected("inputs", "what the module is called with", "none"))
        if not isinstance(of, Job):
            remedy = "read_job reads a file; sw.memory takes names, too."
            wanted, found = "a Job, or a module and its inputs", type(of).__name__
            raise InputError(expected("estimate_memory", wanted, found, remedy))
        return footprint(of, **how)
    from shardwright.estimate.recordings import module_memory

    return module_memory(of, inputs, **how)
