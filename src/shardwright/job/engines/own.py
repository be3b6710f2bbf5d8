"""A layout as a job of ours, in TOML."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import NODEFAULT, UNSET

from shardwright.core.document import encode_toml
from shardwright.core.errors import expected
from shardwright.job.engines.layout import ANY, Engine, EngineLayout
from shardwright.job.job import HIDDEN, Job
from shardwright.job.model_of_job import unplanned

# What a job has by the time that it is read, beside the keys that it is from.
UNWRITTEN = (*HIDDEN, "ModelSection.tables")


def _more(layout: EngineLayout) -> Iterator[str]:
    for key, planned, value in unplanned(layout.job):
        yield expected(key, f"{planned} for steps that are planned and run", value)


def _written(layout: EngineLayout) -> str:
    return encode_toml(document_of(layout.job))


def document_of(job: Job) -> dict[str, Any]:
    """A job as a document that reads back as equal, without what it has anyway."""
    found: dict[str, Any] = given(job)
    if not job.tables:
        del found["tables"]
    # Without [model] a document is one of tables alone.
    return {"model": {"kind": job.model.kind}, **found}


def given(value: Any) -> Any:
    """A section, or a value of one, without what it would be anyway."""
    if isinstance(value, tuple):
        return [given(each) for each in value]
    if not isinstance(value, msgspec.Struct):
        return value
    found, kind = {}, type(value).__name__
    for field in msgspec.structs.fields(type(value)):
        each, make = getattr(value, field.name), field.default_factory
        usual = field.default if make is NODEFAULT else make()
        if each != usual and each is not UNSET and f"{kind}.{field.name}" not in UNWRITTEN:
            found[field.encode_name] = given(each)
    return found


OWN = Engine(
    "shardwright",
    "this version",
    dict.fromkeys(("parallel", "memory", "train", "model", "model.kind"), (ANY,)),
    _more,
    _written,
)
