"""Whether a document is as a JSON Schema has it: of the words of such schemas those of a job's."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
}
BOUNDS = {
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
}
SIZES = {"minItems": (list, operator.ge), "maxItems": (list, operator.le)} | {
    "minLength": (str, operator.ge)
}
SAID = {
    "$schema",
    "$defs",
    "title",
    "description",
    "default",
    "examples",
    "then",
}  # nothing, or elsewhere


def wrong(value: Any, schema: dict[str, Any], root: dict[str, Any], at: str = "") -> Iterator[str]:
    """The places at which a document is not as its schema says; KeyError for an unknown word."""
    for word, said in schema.items():
        if word not in SAID and not all(_is_so(value, word, said, schema, root)):
            yield f"{at or 'job'}: {word} {said}"[:200]
    for name, inner in schema.get("properties", {}).items():
        if isinstance(value, dict) and name in value:
            yield from wrong(value[name], inner, root, f"{at}.{name}".lstrip("."))
    for part in schema.get("allOf", ()):
        yield from wrong(value, part, root, at)
    if "if" in schema and not any(wrong(value, schema["if"], root)):
        yield from wrong(value, schema["then"], root, at)
    if "$ref" in schema:
        yield from wrong(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root, at)


def _is_so(
    value: Any, word: str, said: Any, schema: dict[str, Any], root: dict[str, Any]
) -> Iterator[bool]:
    def fits(inner: Any, of: Any) -> bool:
        return not any(wrong(inner, of, root))

    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if word == "type":
        names = [said] if isinstance(said, str) else said
        yield any(
            isinstance(value, TYPES[name]) and isinstance(value, bool) <= (name == "boolean")
            for name in names
        )
    elif word in ("enum", "const"):
        yield value in (said if word == "enum" else [said])
    elif word == "anyOf":
        yield any(fits(value, of) for of in said)
    elif word == "not":
        yield not fits(value, said)
    elif word in BOUNDS:
        yield not is_number or BOUNDS[word](value, said)
    elif word in SIZES:
        kind, holds = SIZES[word]
        yield not isinstance(value, kind) or holds(len(value), said)
    elif word == "required":
        yield not isinstance(value, dict) or set(said) <= set(value)
    elif word == "items":
        first = len(schema.get("prefixItems", ()))
        rest = value[first:] if isinstance(value, list) else []
        yield from (said is not False and fits(inner, said) for inner in rest)
    elif word == "prefixItems":
        yield from (fits(inner, of) for inner, of in zip(value, said, strict=False))
    elif word == "additionalProperties":
        more = set(value) - set(schema.get("properties", ())) if isinstance(value, dict) else ()
        yield from (said is not False and fits(value[name], said) for name in more)
    elif word not in ("properties", "allOf", "if", "$ref"):
        raise KeyError(word)
