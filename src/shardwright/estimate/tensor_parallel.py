"""A user's module cut over tensor ranks, as torch's ``parallelize_module`` cuts it with plain
tensors between its layers: what one rank has of it, with stand-ins for the exchanges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shardwright.core.errors import InputError, expected
from shardwright.job.parallel import Style, fits
from shardwright.models.llama.collectives import all_reduce, copy_to_ranks, gather_alike
from shardwright.models.llama.layers import rows_here

Forward = Callable[[torch.Tensor], torch.Tensor]


def cut(module: nn.Module, plan: Mapping[str, Style], degree: int, where: str) -> None:
    """Leave of every layer that ``plan`` names, experts apart, the part of one of ``degree`` ranks.

    A name may have ``*`` in place of any part of a path. InputError names the layer that is not
    there, is of another class, or cannot be divided.
    """
    done: dict[nn.Parameter, tuple[int, nn.Parameter]] = {}
    layers: dict[str, Style] = {name: style for name, style in plan.items() if style != "expert"}
    for path, style in styles(module, layers, where):
        layer = module.get_submodule(path)
        if not isinstance(layer, nn.Linear | nn.Embedding):
            kind = type(layer).__name__
            raise InputError(expected(f"{where} '{path}'", "a Linear or an Embedding", kind))
        wide = isinstance(layer, nn.Linear) == (style != "rowwise")  # rows are cut, not columns
        forward = _forward(layer, style, degree)
        _part(layer, "weight", 0 if wide else 1, degree, done, f"{where} '{path}'")
        if wide and isinstance(layer, nn.Linear) and layer.bias is not None:
            _part(layer, "bias", 0, degree, done, f"{where} '{path}'")
        vars(layer)["forward"] = forward
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter in done:
            wanted = "a layer that is cut like the one it shares its weight with"
            raise InputError(expected(f"{where}: {name}", wanted, "a whole one", "Name both."))


def styles(module: nn.Module, plan: Mapping[str, Style], where: str) -> Iterator[tuple[str, Style]]:
    """The layers that a plan names, each by its path; the last pattern that fits one decides."""
    found: dict[str, Style] = {}
    paths = [path for path, _ in module.named_modules(remove_duplicate=False) if path]
    for pattern, style in plan.items():
        fitting = [path for path in paths if fits(path, pattern)]
        if not fitting:
            raise InputError(expected(where, "names of layers", f"'{pattern}', which is none"))
        found |= dict.fromkeys(fitting, style)
    yield from found.items()


def _part(
    layer: nn.Module,
    name: str,
    dim: int,
    degree: int,
    done: dict[nn.Parameter, tuple[int, nn.Parameter]],
    where: str,
) -> None:
    """Put a rank's part of a parameter, cut along ``dim``, in its place; one that several layers
    share is cut once."""
    whole = getattr(layer, name)
    if any(whole is part for _, part in done.values()):
        return  # the very layer stands in several places
    if whole not in done:
        shape = list(whole.shape)
        if shape[dim] % degree:
            wanted = f"a {name} {shape} whose dim {dim} parallel.tensor divides"
            raise InputError(expected(where, wanted, f"{degree} ranks"))
        shape[dim] //= degree
        part = nn.Parameter(whole.new_empty(shape), requires_grad=whole.requires_grad)
        done[whole] = dim, part
    along, part = done[whole]
    if along != dim:
        wanted = f"its shared {name} cut along dim {along}, as in another layer"
        raise InputError(expected(where, wanted, f"dim {dim}"))
    setattr(layer, name, part)


def _forward(layer: nn.Linear | nn.Embedding, style: Style, degree: int) -> Forward:
    """What a layer does on one rank: exchanges around it."""
    own: Any = layer.forward
    vocab = layer.num_embeddings if isinstance(layer, nn.Embedding) else 0

    def rows(x: torch.Tensor) -> torch.Tensor:
        return all_reduce(rows_here(layer.weight, x, vocab), degree)

    def summed(x: torch.Tensor) -> torch.Tensor:
        return all_reduce(own(x), degree)

    def columns(x: torch.Tensor) -> torch.Tensor:
        return own(copy_to_ranks(x, degree) if x.is_floating_point() else x)

    def gathered(x: torch.Tensor) -> torch.Tensor:
        return gather_alike(columns(x), -1, degree)

    if style == "rowwise":
        return rows if vocab else summed
    return gathered if style == "colwise_rep" else columns
