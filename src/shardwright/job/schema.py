"""What a job may say, as a JSON Schema: types, ranges and defaults from its sections, what a key is
from their docstrings, and what no model of a kind reads from the rules.
"""

# For editors, and for the tables of docs/job.md: a key that is added to a section is in both. What
# keys have to have in common (degrees that multiply, widths that divide) no schema can say, so one
# that it takes may still be refused when it is read.

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET

from shardwright.core.errors import is_called
from shardwright.job.job import HIDDEN, Job
from shardwright.job.memory import MemorySection
from shardwright.job.model import CALLS, KINDS, ModelSection
from shardwright.job.parallel import ParallelSection
from shardwright.job.rules import RULES, given
from shardwright.job.train import CheckpointSection, ScheduleSection, TrainSection

DIALECT = "https://json-schema.org/draft/2020-12/schema"
Section = type[msgspec.Struct]


class KeyText(NamedTuple):
    """What a docstring says of keys: their default, where it is not the section's own, and what
    they mean, in Markdown."""

    names: tuple[str, ...]
    default: str
    meaning: str


def texts(section: Section) -> list[KeyText]:
    """The ``Attributes`` of a section's own docstring."""
    text = inspect.cleandoc(section.__dict__.get("__doc__") or "").replace("``", "`")
    found = []
    for entry in re.findall(r"^ {4}\w.*(?:\n {5,}.*)*", text.partition("Attributes:")[2], re.M):
        parts = re.fullmatch(r"([\w, ]+?)(?: \((.*?)\))?: (.*)", " ".join(entry.split()))
        assert parts, f"{section.__name__}: {entry}"
        found.append(KeyText(tuple(parts[1].split(", ")), parts[2] or "", parts[3]))
    return found


def job_schema() -> dict[str, Any]:
    """The schema of a job as it is written in TOML."""
    made = msgspec.json.schema(Job)["$defs"]
    made["Job"]["required"] = []  # tables may be those of a file, or none
    kept = {section.__name__: made[section.__name__] for section in sections(Job)}
    for section in sections(Job):
        properties = kept[section.__name__]["properties"]
        for name in [name for name in properties if f"{section.__name__}.{name}" in HIDDEN]:
            del properties[name]
        for base in section.__mro__:
            for text in texts(base):
                for name in text.names:
                    properties[name]["description"] = _plain(text)
        for key in properties.values():
            if not key.get("default") and key.get("default") not in (0, False):
                key.pop("default", None)
        summary = inspect.cleandoc(section.__doc__ or "").partition("\n\nAttributes:")[0]
        kept[section.__name__]["description"] = " ".join(summary.replace("``", "`").split())
    for name in ("nbytes", "dense_bytes"):  # which a job may say with a unit
        of = kept["ReservationSection"]["properties"][name]
        of["type"] = [of["type"], "string"]
    called = {"properties": {"kind": {"enum": list(CALLS)}}, "required": ["kind"]}
    model = made["Job"]["properties"]["model"]
    model["anyOf"] = [{"$ref": model.pop("$ref")}, called]
    conditions = [_condition(kind) for kind in KINDS]
    return {"$schema": DIALECT, **kept.pop("Job"), "allOf": conditions, "$defs": kept}


def sections(kind: Any) -> Iterator[Section]:
    """The structs of a type that a job may have, itself among them."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
        for name, inner in typing.get_type_hints(kind).items():
            if f"{kind.__name__}.{name}" not in HIDDEN:
                yield from sections(inner)
    for inner in typing.get_args(kind):
        yield from sections(inner)


def keys_called(name: str, kind: Section = Job, inside: str = "") -> Iterator[str]:
    """The keys that are a ``name``, or what the field calls so, in sections of their own:
    ``train.steps`` of ``steps``."""
    found = typing.get_type_hints(kind)
    known = [key for key in found if f"{kind.__name__}.{key}" not in HIDDEN]
    if inside and (meant := is_called(name, known)):
        yield f"{inside}{meant}"
    for key in known:
        # A section, which may be left out: entries of a list have names of their own.
        for section in (found[key], *typing.get_args(found[key])):
            is_entry = typing.get_origin(found[key]) is tuple or not isinstance(section, type)
            if not is_entry and issubclass(section, msgspec.Struct):
                yield from keys_called(name, section, f"{inside}{key}.")


def _plain(text: KeyText) -> str:
    """A text without links, which lead to other pages of the documentation."""
    group = f"{', '.join(f'`{name}`' for name in text.names)}: " if text.names[1:] else ""
    default = f" Default: {text.default}." if text.default else ""
    return group + re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text.meaning) + f".{default}"


def _condition(kind: Any) -> dict[str, Any]:
    """What stands beside a kind of model that does not read it: its default, or what is so."""
    job = Job(
        (),
        model=ModelSection(kind=kind),
        train=TrainSection(schedule=ScheduleSection()),
        memory=MemorySection(),
        parallel=ParallelSection(),
        checkpoint=CheckpointSection(),
    )
    then: dict[str, Any] = {}
    for rule in RULES:
        for key in rule.keys:
            *way, name = key.split(".")
            # Other rules follow from other keys than the kind, and say what these are.
            if rule.beside(job, name) != kind or isinstance(rule.allowed, msgspec.Struct):
                continue
            taken = dict.fromkeys((given(job, key)[1], rule.allowed))
            values = [msgspec.to_builtins(value) for value in taken if value is not UNSET]
            section = then
            for step in way:
                section = section.setdefault("properties", {}).setdefault(step, {})
            refused: dict[str, Any] = {"enum": values} if values else {"not": {}}
            section.setdefault("properties", {}).setdefault(name, {}).update(refused)
    model = {"properties": {"kind": {"const": kind}}, "required": ["kind"]}
    return {"if": {"properties": {"model": model}, "required": ["model"]}, "then": then}
