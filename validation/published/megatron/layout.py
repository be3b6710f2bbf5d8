"""Which layers stand where: the patterns of hybrid models and of pipeline layouts."""

from __future__ import annotations

from typing import Literal

import msgspec

from shardwright.core.errors import InputError, expected

Block = Literal["attention", "mlp", "moe", "mamba", "linear_attention"]
Layer = tuple[Block, ...]

_HYBRID: dict[str, Block] = {
    "M": "mamba",
    "*": "attention",
    "-": "mlp",
    "E": "moe",
    "G": "linear_attention",
    "D": "attention",
    "W": "attention",
}


class Chunk(msgspec.Struct, frozen=True):
    """One virtual stage of the pipeline: its layers and the model's index of the first, whether
    the embedding comes before them, the layers of each depth of multi-token prediction, and
    whether it ends with the loss."""

    layers: tuple[Layer, ...]
    first: int = 0
    embedding: bool = False
    predictors: tuple[tuple[Layer, ...], ...] = ()
    loss: bool = False


def hybrid_layers(
    where: str, pattern: str
) -> tuple[tuple[Layer, ...], tuple[tuple[Layer, ...], ...]]:
    """The layers of a hybrid model and, after each ``/``, those of one prediction depth."""
    main, *depths = pattern.replace("|", "").split("/")
    return _letters(where, main), tuple(_letters(where, depth) for depth in depths if depth)


def _letters(where: str, text: str) -> tuple[Layer, ...]:
    unknown = sorted({letter for letter in text if letter not in _HYBRID})
    if unknown:
        raise InputError(
            expected(f"{where}: hybrid-layer-pattern", f"letters of {''.join(_HYBRID)}", unknown[0])
        )
    return tuple((_HYBRID[letter],) for letter in text)


def expand(text: str) -> str:
    """``Et*2|(tt|)*2t|mL`` in full: ``Ett|tt|tt|t|mL``."""
    out, rest = _sequence(text.replace(" ", "").replace(",", ""), 0)
    if rest != len(text.replace(" ", "").replace(",", "")):
        raise ValueError(text)
    return out


def _sequence(text: str, at: int) -> tuple[str, int]:
    out = ""
    while at < len(text) and text[at] != ")":
        if text[at] == "(":
            item, at = _sequence(text, at + 1)
            if at >= len(text):
                raise ValueError(text)
        else:
            item = text[at]
        at += 1
        if at < len(text) and text[at] == "*":
            end = at + 1
            while end < len(text) and text[end].isdigit():
                end += 1
            item, at = item * int(text[at + 1 : end]), end
        out += item
    return out, at


def even_stages(
    layers: int, stages: int, *, embedding: bool, loss: bool, first: int | None, last: int | None
) -> tuple[int, ...]:
    """Layers of each stage. ``embedding`` and ``loss`` count as a layer of the first and the last
    stage; ``first`` and ``last`` give those two stages their own number of layers."""
    middle = stages - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0) + embedding + loss
    share, over = divmod(rest, middle) if middle else (0, 0)
    counts = [share + (index < over) for index in range(middle)]
    if counts and embedding:
        counts[0] -= 1
    if counts and loss:
        counts[-1] -= 1
    head = [] if first is None else [first]
    tail = [] if last is None else [last]
    return tuple(head + counts + tail)
