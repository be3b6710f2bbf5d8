"""The table of docs/job.md, from the sections of a job; ``python tests/suite/job_tables.py`` writes
it again.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec

from shardwright.core.document import encode_toml
from shardwright.job.job import Job
from shardwright.job.schema import Section, sections, texts

PAGE = Path(__file__).parents[2] / "docs" / "job.md"
HEAD, END = "| key | default | meaning |\n|---|---|---|\n", "\n\nA file of tables"


def page(study: Section) -> str:
    """The page with its table as it should be; ``study`` is a section that only a benchmark has."""
    before, _, rest = PAGE.read_text().partition(HEAD)
    rows = _rows(Job, "", {"study": study}, set())
    return before + HEAD + "\n".join(rows) + END + rest.partition(END)[2]


def _rows(
    section: Section, way: str, more: dict[str, Section], said: set[Section]
) -> Iterator[str]:
    """Keys of a section, then the sections in it, each below a headline."""
    types = typing.get_type_hints(section)
    inner = {name: next(sections(kind), None) for name, kind in types.items()} | more
    # Keys of kinds are those of tables and of [embeddings], and said once.
    every = [text for base in section.__mro__ if base not in said for text in texts(base)]
    said.update(section.__mro__)
    for text in every:
        if inner[text.names[0]] is None:
            usual = [_usual(section, name) for name in text.names]
            default = text.default or ", ".join(usual if len(set(usual)) > 1 else usual[:1])
            yield _row(", ".join(f"`{name}`" for name in text.names), default, text.meaning)
    for text in every:
        (name, *_) = text.names
        if (of := inner[name]) is not None:
            entries = "[" if typing.get_origin(types[name]) is tuple else ""
            yield _row(f"**[{entries}{way}{name}{entries and ']'}]**", text.default, text.meaning)
            yield from _rows(of, f"{way}{name}.", {}, said)


def _row(*cells: str) -> str:
    return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"


def _usual(section: Section, name: str) -> str:
    """A key's default as TOML; nothing where the section leaves it open."""
    (field,) = (field for field in msgspec.structs.fields(section) if field.name == name)
    value = field.default
    if value in ("", (), None) or isinstance(value, msgspec.UnsetType | type(msgspec.NODEFAULT)):
        return ""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:.10g}"
    shown = encode_toml({"x": msgspec.to_builtins(value)}).strip().partition(" = ")[2]
    return f"`{shown}`"


if __name__ == "__main__":
    import sys

    sys.path.append(str(PAGE.parents[1] / "benchmarks"))
    from study.section import StudySection

    PAGE.write_text(page(StudySection))
