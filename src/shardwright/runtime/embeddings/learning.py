"""Whether rows of tables are updated. Tables have no parameter that could be frozen: they are told,
and where all that trains beside them is frozen without a word of them, a backward asks."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Self

from torch import nn

from shardwright.core.errors import UnsupportedError, expected
from shardwright.runtime.embeddings.module import Entrance
from shardwright.runtime.sharded_module import mix_in


class Learning:
    """What was ``said`` of the rows of a module of tables, None as long as nobody did, and the
    parameters that trained in ``part``, the smallest part around them that has some, when they were
    sharded."""

    def __init__(self) -> None:
        self.said: bool | None = None
        self.part = ""
        self._beside: list[weakref.ref[nn.Parameter]] = []

    @property
    def is_off(self) -> bool:
        """Whether rows stay as they are."""
        return self.said is False

    def check(self, path: str) -> None:
        """UnsupportedError where all that trained around the tables at ``path`` is frozen now, and
        nobody has said whether they are, too."""
        if self.said is not None:
            return
        left = False  # whether any was not replaced since
        for reference in self._beside:
            parameter = reference()
            if parameter is not None and parameter.requires_grad:
                return
            left = left or parameter is not None
        if not left:
            return
        where = f"'{self.part}'" if self.part else "the model"
        call = f"model.get_submodule('{path}').requires_grad_"
        raise UnsupportedError(
            expected(
                f"tables '{path}'",
                "a word on whether their rows learn",
                f"none, while all parameters of {where} are frozen, which rows are none of",
                f"Call {call}(False), or (True), on every rank.",
            )
        )

    def note(self, part: str, parameters: list[nn.Parameter]) -> None:
        """Those of ``part`` train, and may be frozen later."""
        self.part, self._beside = part, [weakref.ref(parameter) for parameter in parameters]


class AroundTables:
    """Mixed into the class of every module that has tables below."""

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Whether parameters train, and from the next forward on rows of tables."""
        super().requires_grad_(requires_grad)  # type: ignore[misc]
        for _, learning in _tables(self):
            learning.said = requires_grad
        return self


def _tables(model: Any) -> Iterator[tuple[str, Learning]]:
    for path, module in model.named_modules():
        learning = getattr(module, "learning", None)
        if isinstance(learning, Learning):
            yield path, learning


def _parts(path: str) -> Iterator[str]:
    """What a module is in, from the inside out."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def reach_tables(model: nn.Module) -> None:
    """Let ``requires_grad_`` of ``model`` and of its parts reach the tables below."""
    for part in {part for path, _ in _tables(model) for part in _parts(path)}:
        module = model.get_submodule(part)
        if not isinstance(module, Entrance):
            kind = type(module)
            names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
            mix_in(module, AroundTables, kind.__name__, **names)


def note_trained(model: nn.Module) -> None:
    """Let every module of tables of ``model`` know what trains around it."""
    for path, learning in _tables(model):
        for part in _parts(path):
            trained = [p for p in model.get_submodule(part).parameters() if p.requires_grad]
            if trained:
                learning.note(part, trained)
                break
