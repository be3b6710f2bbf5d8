"""Keys of a job that are set from outside of its file, as ``--set`` does."""

from __future__ import annotations

import difflib
from typing import Any

from shardwright.core.document import parse_toml
from shardwright.core.errors import InputError, check_type, expected


def set_key(document: dict[str, Any], text: str) -> None:
    """Set the key of a ``text`` such as ``section.key=value`` at any depth of a job's document: a
    step on the way is a section, or the name of an entry of a list such as ``tables.C3``.

    InputError where there is no such place, or ``text`` is no such assignment.
    """
    check_type(text, str, "override", "Write 'section.key=value'.")
    key, equals, value = text.partition("=")
    *way, name = _steps(key)
    if not (equals and way):
        raise InputError(expected("--set", "section.key=value", f"'{text}'"))
    try:
        parsed = parse_toml(f"value = {value}", "--set", "a value")["value"]
    except InputError:
        parsed = value
    model = document.get("model", {})
    if way[0] == "tables" and "tables" not in document and isinstance(model, dict):
        wanted = f"[[tables]] in the job, not in {model['tables']}" if "tables" in model else ""
        raise InputError(expected(f"--set {key.strip()}", wanted or "a job with tables", "none"))
    target: Any = document
    for depth, step in enumerate(way):
        target = _inside(target, step, ".".join(way[: depth + 1]))
    if isinstance(target, list):
        named = expected(f"--set {key.strip()}", "the name of an entry first", f"'{name}'")
        raise InputError(f"{named} Write {'.'.join(way)}.NAME.{name}=VALUE.")
    if not isinstance(target, dict):
        raise InputError(expected(f"--set {'.'.join(way)}", "a section", repr(target)))
    target[name] = parsed


def _steps(key: str) -> list[str]:
    """The steps of a dotted key as TOML writes it, quotes around steps with dots of their own."""
    try:
        found: Any = parse_toml(f"{key} = 0", "--set", "a key")
    except InputError:
        return [""]
    steps = []
    while isinstance(found, dict) and len(found) == 1:
        (step,) = found
        steps.append(step)
        found = found[step]
    return steps or [""]


def _inside(target: Any, step: str, spot: str) -> Any:
    """The section ``step`` of a section, made where there is none, or a list's entry of a name."""
    if isinstance(target, dict):
        return target.setdefault(step, {})
    if isinstance(target, list):
        entries = {str(e["name"]): e for e in target if isinstance(e, dict) and "name" in e}
        if step in entries:
            return entries[step]
        near = difflib.get_close_matches(step, entries, n=3, cutoff=0.0)
        wanted = f"the name of an entry, such as {', '.join(near)}" if near else "an entry"
        raise InputError(expected(f"--set {spot}", wanted, f"'{step}'"))
    raise InputError(expected(f"--set {spot}", "a section", repr(target)))
