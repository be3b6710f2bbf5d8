"""The arguments of a Megatron-LM run as they stand in a test's file: names without dashes, values
as YAML gives them. Every flag that is read is remembered, so that the others can be named."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from typing import Any

from shardwright.core.errors import InputError, expected

_FALSE = ("false", "no", "off", "none", "null", "")


def _canonical(name: str) -> str:
    return name.lstrip("-").replace("_", "-")


class Flags:
    """The arguments of one run; ``where`` names the run in errors."""

    def __init__(self, arguments: Mapping[str, Any], where: str) -> None:
        self.where = where
        self._values = {_canonical(name): value for name, value in arguments.items()}
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def any(self, beginning: str) -> bool:
        """Whether any flag begins so."""
        return any(name.startswith(beginning) for name in self._values)

    def raw(self, name: str) -> Any:
        """The value as it was given, or None."""
        self._read.add(name)
        return self._values.get(name)

    def on(self, name: str) -> bool:
        """Whether a switch is set."""
        value = self.raw(name)
        if isinstance(value, str):
            return value.strip().lower() not in _FALSE
        return bool(value)

    def integer(self, name: str, default: int) -> int:
        """A whole number; a text such as ``1024`` counts as one."""
        number = self.number(name, float(default))
        if number != int(number):
            raise InputError(expected(f"{self.where}: {name}", "a whole number", str(number)))
        return int(number)

    def number(self, name: str, default: float) -> float:
        """A number; a text such as ``1e-2`` counts as one."""
        value = self.raw(name)
        if value is None:
            return default
        try:
            return float(value)
        except (TypeError, ValueError):
            raise InputError(expected(f"{self.where}: {name}", "a number", repr(value))) from None

    def text(self, name: str, default: str) -> str:
        """A word, without quotes or the backslashes of a shell."""
        value = self.raw(name)
        if value is None or isinstance(value, bool):
            return default
        return str(value).replace("\\", "").strip().strip("\"'")

    def words(self, name: str, default: Iterable[str]) -> tuple[str, ...]:
        """Several words: a list, or a text such as ``[mlp moe_act]``."""
        value = self.raw(name)
        if value is None or isinstance(value, bool):
            return tuple(default)
        parts = value if isinstance(value, list | tuple) else self.text(name, "").split()
        return tuple(word for part in parts if (word := str(part).strip("[]'\", ")))

    def unread(self) -> tuple[str, ...]:
        """The flags that nobody asked for, in alphabetical order."""
        return tuple(sorted(set(self._values) - self._read))


def layer_pattern(where: str, text: str, layers: int) -> tuple[bool, ...]:
    """Which layers of ``moe-layer-freq`` or ``linear-attention-freq`` are of the special kind.

    A whole number n marks every n-th layer from the first; otherwise a list in Python's form, such
    as ``([0]*3+[1]*11)``, has one entry for each layer.
    """
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError):
        raise InputError(expected(where, "a whole number or a list of 0 and 1", text)) from None
    if isinstance(value, int):
        return tuple(index % value == 0 for index in range(layers))
    if len(value) != layers:
        raise InputError(expected(where, f"{layers} entries", str(len(value))))
    return tuple(bool(item) for item in value)


def _value(node: ast.expr) -> int | list[int]:
    """Whole numbers and lists of them, with sums of lists and multiples."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return int(node.value)
    if isinstance(node, ast.List):
        items = [_value(item) for item in node.elts]
        if all(isinstance(item, int) for item in items):
            return [item for item in items if isinstance(item, int)]
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int):
            return left * right
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
    raise ValueError(node)
