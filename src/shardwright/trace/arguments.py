"""Which arguments of a module reach parts of it as they are, so that a part's work may begin with
the module's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

Path = tuple[Any, ...]  # keys one inside of another, from (arguments, keywords) on
_DEPTH = 3


class GivenArguments(NamedTuple):
    """Where a part's arguments are among those of the module."""

    arguments: tuple[Path, ...]
    keywords: tuple[tuple[str, Path], ...]


class Reached:
    """Follows one forward of ``root``; ``found`` are then the parts that are called once, with
    nothing but what the module was given."""

    def __init__(self, root: nn.Module, parts: Mapping[str, nn.Module]) -> None:
        self.found: dict[str, GivenArguments] = {}
        self._places: list[tuple[Path, Any]] = []
        self._seen: set[str] = set()
        self._handles: list[Any] = [
            root.register_forward_pre_hook(self._begin, with_kwargs=True),
            *(
                part.register_forward_pre_hook(self._reach(path), with_kwargs=True)
                for path, part in parts.items()
            ),
        ]

    def remove(self) -> None:
        """Follow no more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._places.clear()

    def _begin(self, _: nn.Module, arguments: Any, keywords: Any) -> None:
        self._places = list(_places((arguments, keywords), _DEPTH))
        self.found.clear()
        self._seen.clear()

    def _reach(self, path: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_: nn.Module, arguments: Any, keywords: Any) -> None:
            given = [self._place(value) for value in arguments]
            named = {key: self._place(value) for key, value in keywords.items()}
            once = path not in self._seen
            self._seen.add(path)
            self.found.pop(path, None)
            if once and None not in given and None not in named.values():
                self.found[path] = GivenArguments(
                    tuple(p for p in given if p is not None),
                    tuple((key, p) for key, p in named.items() if p is not None),
                )

        return hook

    def _place(self, value: Any) -> Path | None:
        return next((path for path, other in self._places if other is value), None)


def value_at(call: tuple[Any, Any], path: Path) -> Any:
    """What lies at ``path`` of a call's (arguments, keywords); KeyError where nothing does."""
    value: Any = call
    for key in path:
        if isinstance(value, (tuple, list, Mapping)):
            try:
                value = value[key]
            except (IndexError, TypeError):
                raise KeyError(key) from None
        else:
            value = vars(value)[key]
    return value


def _places(value: Any, depth: int, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Everything inside of a value by where it is, but for what is inside of a tensor."""
    if path and not isinstance(value, (int, float, str, bool, type(None))):
        yield path, value
    if not depth or isinstance(value, (torch.Tensor, nn.Module)):
        return
    inside: Any = ()
    if isinstance(value, (tuple, list)):
        inside = enumerate(value)
    elif isinstance(value, Mapping):
        inside = value.items()
    elif hasattr(value, "__dict__"):
        inside = vars(value).items()
    for key, part in inside:
        yield from _places(part, depth - 1, (*path, key))
