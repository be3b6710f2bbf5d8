"""Where in the user's own code an error came from, and which id a lookup of torch's refused."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

import shardwright

_TORCH, _OURS = (Path(package.__file__).parent for package in (torch, shardwright))
_LOOKUPS = (functional.embedding.__code__, functional.embedding_bag.__code__)


def place_of(error: BaseException) -> str | None:
    """The last line of the user's code on the way to an error, or nothing where torch alone was
    called; None where the error is ours."""
    paths = [(Path(f.filename), f) for f in traceback.extract_tb(error.__traceback__)]
    # operators, who follows them, and what refuses some
    trace = _OURS / "trace"
    own = (trace / name for name in ("recorder.py", "checks.py", "faked.py"))
    passed = {_TORCH, _OURS / "tracker", *own}
    path, frame = [(p, f) for p, f in paths if passed.isdisjoint((p, *p.parents))][-1]
    if not {_OURS / "estimate", _OURS / "train"}.isdisjoint(path.parents):
        return ""
    return None if _OURS in path.parents else f", {path.name}:{frame.lineno} ({frame.name})"


class WrongId(NamedTuple):
    """An id that is no row: the module that looked it up, where it is among the ids, and the rows
    that there are with what was found instead."""

    of: str
    place: int | list[int]
    found: tuple[int, int]


def wrong_id(error: BaseException) -> WrongId | None:
    """The first id of a lookup that ended in ``error``, for it is no row; None where it ended in
    another one. Torch names neither."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    places = [place for place, frame in enumerate(frames) if frame.f_code in _LOOKUPS]
    if not places:
        return None
    given = frames[places[-1]].f_locals
    ids, rows = given["input"], len(given["weight"])
    wrong = ((ids < 0) | (ids >= rows)).nonzero()
    if not len(wrong):
        return None
    place = wrong[0].tolist()
    callers = (frame.f_locals.get("self") for frame in frames[: places[-1]])
    modules = [each for each in callers if isinstance(each, nn.Module)]
    paths = {part: path for root in modules[:1] for path, part in root.named_modules()}
    path = paths.get(modules[-1], "") if modules else ""
    of = f"'{path}'" if path else "a lookup"
    return WrongId(of, place[0] if len(place) == 1 else place, (rows, int(ids[tuple(place)])))
